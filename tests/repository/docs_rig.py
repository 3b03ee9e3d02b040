"""The commands that the documents show, and a small world in which they run as they stand."""

from __future__ import annotations

import json
import os
import re
import shlex
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import tokenizers

from kvstore.ipc.sidecar_connection import request_stats

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]

ELSEWHERE = {
    "vllm": "tests/engines/vllm starts engines with this configuration",
    "python -m sglang.launch_server": "needs a GPU; tests/engines/sglang loads the backend",
    "./dev": "is what runs these tests, or the demo, which has its own",
}
"""Commands that are not run here, and why not, by how they begin."""

SIZES = {"64GiB": "64MiB", "200GiB": "64MiB", "1TiB": "256MiB", "2TiB": "256MiB"}
"""Sizes of real nodes, and what is taken here instead by commands that allocate."""
SERVICES = ("serve", "engine")
QUICK = {
    ("bench", "breakeven"): "--model random --lengths 32,64 --load-lengths 64,128 --l2 128MiB "
    "--repeats 1",
    ("bench", "serve"): "--requests 2 --scale 0.1 --max-tokens 2",
}
"""Options that are added to commands which measure, so that they do so shortly."""
STATUS = {("doctor", "vllm"): 1}
"""Commands that say here that something is wrong: vLLM is not installed."""
SIDECAR = """
[l2]
bytes = "16MiB"
slot_bytes = "64KiB"      # a block of the engine's random model

[[tiers]]
kind = "disk"
directory = "{folder}/blocks"
capacity = "64MiB"

[server]
socket = "{folder}/kv.sock"
port = 0
"""
PROMPT = range(1, 65)
"""Token ids of the system prompt that the documents speak of."""
LIMIT_S = 100.0
"""A hang guard, no measure."""


@dataclass(frozen=True)
class Command:
    """One command line of a page, its words as a shell would hand them over."""

    page: str
    words: tuple[str, ...]

    def __str__(self) -> str:
        return f"{self.page}: {' '.join(self.words)[:70]}"


def commands() -> Iterator[Command]:
    """Every command in a bash block, each once."""
    seen: set[tuple[str, ...]] = set()
    for page in PAGES:
        if not page.exists():
            continue
        for block in re.findall(r"```bash\n(.*?)```", page.read_text(), re.DOTALL):
            for words in split(block):
                if words not in seen:
                    seen.add(words)
                    yield Command(page.name, words)


def split(block: str) -> Iterator[tuple[str, ...]]:
    """Lines of shell as words; a line goes on after a backslash and inside quotes."""
    begun = ""
    for line in block.splitlines():
        if line.endswith("\\"):
            begun += line[:-1] + " "
            continue
        begun += line + "\n"
        try:
            words = tuple(shlex.split(begun, comments=True))
        except ValueError:  # a quotation that is still open
            continue
        begun = ""
        if words:
            yield words
    assert not begun.strip(), f"a command without an end: {begun}"


class World:
    """A folder with the files that the documents speak of, a sidecar and an engine over it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        write_files(folder)
        self._socket = str(folder / "kv.sock")
        (folder / "kvstore.toml").write_text(SIDECAR.format(folder=folder))
        self._running: list[subprocess.Popen[str]] = []
        try:
            self._begin()
        except BaseException:
            self.kill()
            raise

    def _begin(self) -> None:
        self._running.append(self._start(["serve", "--config", "kvstore.toml"], os.environ))
        self._url = re.search(r"http://[\w.:]+", self._ready(self._running[-1]))[0]
        engine = [
            *["engine", "--model", "random", "--model-name", "m", "--port", "0", "--store"],
            self._socket,
        ]
        self._running.append(self._start(engine, self.environment()))
        self.engine_url = self._ready(self._running[-1]).split()[-1]
        self._compute(PROMPT)

    def _compute(self, prompt: Sequence[int]) -> None:
        """Have the engine compute a prompt, and wait until the sidecar holds its blocks."""
        body = {"prompt": [*prompt, 1], "max_tokens": 1, "model": "m"}
        request = urllib.request.Request(
            f"{self.engine_url}/completions",
            json.dumps(body).encode(),
            {"Content-Type": "application/json"},
        )
        urllib.request.urlopen(request, timeout=LIMIT_S).close()
        end_s = time.monotonic() + LIMIT_S
        while request_stats(self._socket, None)["l2"]["slots_ready"] < len(prompt) // 16:
            assert time.monotonic() < end_s, "the prompt's blocks do not come"
            time.sleep(0.05)

    def environment(self) -> dict[str, str]:
        return {
            **os.environ,
            "PYTHONPATH": str(ROOT),
            "KVSTORE_SERVER__SOCKET": self._socket,
            "KVSTORE_SERVER__PORT": self._url.rpartition(":")[2],
        }

    def run(self, command: Command) -> str:
        """Run it; a service until it says that it is ready, and then to its end."""
        words = [self.here(word, command.words[1]) for word in command.words[1:]]
        if command.words[1] in SERVICES and "--help" not in words:
            return self._serve(words)
        words += QUICK.get((words[0], words[1] if len(words) > 1 else ""), "").split()
        done = subprocess.run(
            [sys.executable, "-m", "kvstore", *words],
            cwd=self.folder,
            env=self.environment(),
            capture_output=True,
            text=True,
            timeout=LIMIT_S,
            check=False,
        )
        wanted = next(
            (code for begin, code in STATUS.items() if words[: len(begin)] == [*begin]), 0
        )
        assert done.returncode == wanted, f"{command}\n{done.stdout[-2000:]}{done.stderr[-2000:]}"
        return done.stdout

    def here(self, word: str, command: str) -> str:
        """A word of a page, with this world's places and sizes."""
        if command in SERVICES:
            word = SIZES.get(word, word)
            word = {"/data": str(self.folder / "data"), "FOLDER": "random"}.get(word, word)
            word = "0" if re.fullmatch(r"80\d\d|9\d\d\d", word) else word
            return word.replace("/run/kvstore.sock", str(self.folder / "another.sock"))
        word = word.replace("/run/kvstore.sock", self._socket)
        word = re.sub(r"http://127\.0\.0\.1:80\d\d/v1", self.engine_url, word)
        word = re.sub(r"http://127\.0\.0\.1:(8100|9200)", self._url, word)
        return word.replace("$CONFIG", "{}")

    def close(self) -> None:
        """End the engine, then the sidecar, as an operator would."""
        try:
            for process in reversed(self._running):
                process.send_signal(signal.SIGTERM)
                assert process.wait(LIMIT_S) == 0
        finally:
            self.kill()

    def kill(self) -> None:
        """Leave no process behind."""
        for process in self._running:
            process.kill()
            process.wait()
            if process.stdout is not None:
                process.stdout.close()

    def _serve(self, words: list[str]) -> str:
        if words[0] == "serve":
            words = [*words, "--port", "0", "--socket", str(self.folder / "another.sock")]
        process = self._start(words, self.environment())
        try:
            line = self._ready(process)
            process.send_signal(signal.SIGTERM)
            assert process.wait(LIMIT_S) == 0
            return line
        finally:
            process.kill()
            process.wait()

    def _start(self, words: list[str], environment: Mapping[str, str]) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [sys.executable, "-m", "kvstore", *words],
            cwd=self.folder,
            env={**environment, "PYTHONPATH": str(ROOT)},
            stdout=subprocess.PIPE,
            text=True,
        )

    def _ready(self, process: subprocess.Popen[str]) -> str:
        assert process.stdout is not None
        end_s = time.monotonic() + LIMIT_S
        while time.monotonic() < end_s:
            line = process.stdout.readline()
            if "http://" in line or not line:
                break
        assert "http://" in line, f"{process.args} is not ready: {line!r}"
        return line


def write_files(folder: Path) -> None:
    """The files the documents name: a model's folder, tiers, prompts, requests, a trace."""
    for name in ("MODEL", "llama-3-8b"):
        (folder / name).mkdir()
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "vocab_size": 128256,
        "max_position_embeddings": 8192,
        "torch_dtype": "bfloat16",
    }
    (folder / "MODEL" / "config.json").write_text(json.dumps(config))
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "llama-3-8b" / "config.json").write_text(json.dumps(config))
    letters = tokenizers.models.WordLevel({chr(32 + n): n for n in range(96)}, unk_token=" ")
    tokenizer = tokenizers.Tokenizer(letters)
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Split("", "isolated")
    tokenizer.save(str(folder / "MODEL" / "tokenizer.json"))
    tier = '[[tiers]]\nkind = "disk"\ndirectory = "tier"\ncapacity = "512MiB"\n'
    (folder / "tiers.toml").write_text(tier)
    write_requests(folder)
    (folder / "system_prompt.json").write_text(json.dumps([*PROMPT]))
    (folder / "prompts.jsonl").write_text('{"prompt": "Once upon a time there was a cache."}\n')
    rows = [
        {"timestamp": 100 * n, "input_length": 1024, "output_length": 8, "hash_ids": [0, n % 5 + 1]}
        for n in range(40)
    ]
    (folder / "trace.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def write_requests(folder: Path) -> None:
    """Two requests as files, and a log of some: a time stands before what they share."""
    rows = [
        {
            "timestamp": 1.8e9 + 30 * n,
            "model": "m",
            "messages": [
                {"role": "system", "content": f"Now: 12:00:0{n}. Be kind, and be brief. " * 4},
                {"role": "user", "content": f"Question {n}?"},
            ],
        }
        for n in range(5)
    ]
    for name, row in zip(("first", "second"), rows, strict=False):
        (folder / f"{name}.json").write_text(json.dumps(row))
    (folder / "requests.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
