"""Traces in every format, detected by content, and the errors about invalid lines."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgpack
import pytest

from kvstore.analysis.simulate.formats import open_trace, read_trace
from kvstore.analysis.simulate.prompts import name_of
from kvstore.analysis.simulate.traces import TraceRequest, ends_of
from kvstore.blocks.hashing import hash_tokens
from kvstore.cli import main
from kvstore.errors import ConfigError

EVENTS = Path(__file__).parents[2] / "data" / "vllm_kv_events.json"
QWEN = {"chat_id": 1, "parent_chat_id": -1, "timestamp": 61.5, "input_length": 40,
        "output_length": 9, "type": "text", "turn": 1, "hash_ids": [7, 8, 9]}  # fmt: skip


def lines(path: Path, *rows: Any) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_mooncake_has_blocks_of_512_and_milliseconds(tmp_path: Path) -> None:
    row = {"timestamp": 1500, "input_length": 600, "output_length": 3, "hash_ids": [4, 5]}
    (request,) = read_trace(lines(tmp_path / "trace", row))
    assert request == TraceRequest((4, 5), (0, 512, 600), 600, time_s=1.5, output_tokens=3)


def test_qwen_bailian_has_blocks_of_16_and_seconds(tmp_path: Path) -> None:
    path = lines(tmp_path / "trace", QWEN)
    (request,) = read_trace(path)
    assert (request.block_ids, request.ends, request.time_s) == ((7, 8, 9), (0, 16, 32, 40), 61.5)
    (joined,) = read_trace(path, 32)
    assert (joined.block_ids, joined.ends) == ((8, 9), (0, 32, 40))


def test_blocks_of_different_lengths(tmp_path: Path) -> None:
    row = {"input_length": 700, "hash_ids": [1, 2, 3], "block_tokens": [512, 88, 100]}
    (request,) = read_trace(lines(tmp_path / "trace", row))
    assert request.ends == (0, 512, 600, 700)


def test_token_ids_are_hashed_as_the_store_does(tmp_path: Path) -> None:
    ids = list(range(40))
    rows = [ids, {"prompt_token_ids": ids}, {"body": {"prompt": ids}, "timestamp": 20}]
    first, second, third = read_trace(lines(tmp_path / "trace", *rows))
    names = tuple(map(name_of, hash_tokens(ids)))
    assert first.block_ids == second.block_ids == third.block_ids == names
    assert (first.tokens, first.hit_tokens(2), third.time_s) == (40, 32, 0.02)
    (whole,) = read_trace(lines(tmp_path / "trace", ids[:32]))
    assert whole.hit_tokens(2) == 16  # the last token is always computed


def test_text_is_tokenized_by_the_documented_rule(tmp_path: Path) -> None:
    text = "the quick brown fox jumps over the lazy dog " * 4
    chat = {"messages": [{"role": "user", "content": text}]}
    rows = [{"prompt": text}, {"text": text + "and more"}, chat]
    first, longer, chat_request = read_trace(lines(tmp_path / "trace", *rows))
    assert first.tokens == len(text) // 4
    assert first.block_ids == longer.block_ids[: len(first.block_ids)]
    assert chat_request.block_ids != first.block_ids


def test_text_with_a_tokenizer(tmp_path: Path) -> None:
    tokenizers = pytest.importorskip("tokenizers")
    words = {"a": 0, "b": 1}
    inner = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="a"))
    inner.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    inner.save(str(tmp_path / "tokenizer.json"))
    path = lines(tmp_path / "trace", {"prompt": "a b " * 9})
    with open_trace(str(path), tokenizer=tmp_path) as trace:
        (request,) = trace.requests
    assert request.block_ids == tuple(map(name_of, hash_tokens([0, 1] * 9)))
    with pytest.raises(ConfigError, match="no tokenizer"):
        open_trace(str(path), tokenizer=tmp_path / "none")


def test_vllm_events_as_json_as_lines_and_packed(tmp_path: Path) -> None:
    rows = json.loads(EVENTS.read_text())
    found = read_trace(EVENTS)
    # Six blocks; four of them and two others; ten, and one more after them.
    assert [(len(request.block_ids), request.tokens) for request in found] == [
        (6, 192),
        (6, 192),
        (11, 352),
    ]
    assert found[0].block_ids[:4] == found[1].block_ids[:4]
    assert read_trace(lines(tmp_path / "lines", *rows)) == found
    arrays = [[row["decoded"][0], [_as_array(e) for e in row["decoded"][1]], 0] for row in rows]
    assert read_trace(lines(tmp_path / "arrays", *arrays)) == found
    (tmp_path / "packed").write_bytes(b"".join(msgpack.packb(row) for row in arrays))
    assert read_trace(tmp_path / "packed") == found


def _as_array(event: dict[str, Any]) -> list[Any]:
    names = ("block_hashes", "parent_block_hash", "token_ids", "block_size", "lora_id", "medium")
    return [event["type"], *(event[name] for name in names)]


GOOD = '{"input_length": 600, "hash_ids": [4, 5]}'


@pytest.mark.parametrize(
    ("text", "line", "words"),
    [
        (f"{GOOD}\n{{", 2, "invalid JSON"),
        (f"{GOOD}\n\n[1]\n", 3, "not a request"),
        (f'{GOOD}\n{{"input_length": -1, "hash_ids": []}}', 2, "(got -1)"),
        (f'{GOOD}\n{{"input_length": 9, "hash_ids": ["a"]}}', 2, "list of integers"),
        (f'{{"input_length": {10**30}, "hash_ids": [4]}}', 1, "from 0 to 2^40"),
        (f'{{"input_length": 9, "hash_ids": [4], "block_size": {10**30}}}', 1, "'block_size'"),
        ('{"input_length": 9, "hash_ids": [4], "timestamp": -1e400}', 1, "(got -inf)"),
        (f'{{"input_length": 9, "hash_ids": [4], "timestamp": {10**400}}}', 1, "'timestamp'"),
        ('{"input_length": 9, "hash_ids": [4], "timestamp": "12"}', 1, "(got '12')"),
        ('{"input_length": 9, "hash_ids": [4], "timestamp": null}', 1, "(got None)"),
        ('{"input_length": 9, "hash_ids": [1], "block_size": "x"}', 1, "'block_size'"),
        ('{"input_length": 9, "hash_ids": [1, 2], "block_tokens": [3]}', 1, "each of the 2 blocks"),
        ("[1, 2]\n[1, -2]\n", 2, "token ids must be"),
        ('[1, 2]\n{"other": 3}\n', 2, "not a request"),
        ('{"prompt": "x"}\n{"messages": [3]}\n', 2, "not a message"),
        ('{"some": "thing"}\n', 1, "not a request"),
        ('[1.5, [{"type": "BlockStored", "block_hashes": 3}], 0]\n', 1, "block_hashes"),
    ],
)
def test_an_invalid_line_is_one_error_with_its_place(
    text: str, line: int, words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_text(text)
    assert main(["simulate", str(path), "--infinite"]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    (said,) = captured.err.splitlines()
    assert f"{path}:{line}: " in said
    assert words in said


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["no-such-file", "--infinite"], "no-such-file"),
        (["TRACE"], "no cache to simulate"),
        (["TRACE", "--l2-blocks", "0"], "(got 0)"),
        (["TRACE", "--l2", "64"], "needs a unit"),
        (["TRACE", "--l2", "1GiB", "--infinite"], "only one of"),
        (["TRACE", "--infinite", "--eviction", "lur"], "unknown eviction policy 'lur'"),
        (["TRACE", "--infinite", "--load-policy", "soon"], "unknown load policy"),
        (["TRACE", "--infinite", "--prefill-rate", "0"], "prefill rate"),
        (["TRACE", "--infinite", "--page-tokens", "1"], "needs a trace with token ids"),
        (["TRACE", "--l1", "infinite"], "L1"),
        (["TRACE", "--sweep", "4,x"], "invalid size 'x'"),
        (["TRACE", "--infinite", "--plot", "a.gif"], "--plot must be"),
    ],
)
def test_an_invalid_option_is_one_line(
    arguments: list[str], words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_text(GOOD)
    given = [str(path) if word == "TRACE" else word for word in arguments]
    assert main(["simulate", *given]) == 2
    (said,) = capsys.readouterr().err.splitlines()
    assert words in said


def test_ends_never_pass_the_prompt() -> None:
    assert ends_of(3, 16, 40) == (0, 16, 32, 40)
    assert ends_of(2, 16, 40) == (0, 16, 32)
    assert ends_of(3, 16, 10) == (0, 10, 10, 10)
    assert ends_of(0, 16, 5) == (0,)
