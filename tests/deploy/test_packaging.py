"""The wheel and the source archive: what is in them, and that the wheel alone serves."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tarfile
import urllib.request
import venv
import zipfile
from email.message import Message
from email.parser import Parser
from pathlib import Path

import pytest

import kvstore
from kvstore.blocks.hashing import hash_tokens
from kvstore.testing.processes import Child

pytest.importorskip("build", reason="build is not installed (it is in the dev extra)")
pytest.importorskip("hatchling", reason="hatchling is not installed (it is in the dev extra)")

ROOT = Path(__file__).parents[2]
LIMIT_S = 280
"""A hang guard, no measure."""
JUNK = re.compile(
    r"__pycache__|\.py[cod]$|\.so$|\.orig$|\.rej$|~$|egg-info|_cache/|\.hypothesis|\.venv|/\.git/"
)
TESTED_FOLDERS = ("kvstore", "tests", "bench", "docs", "deploy", ".ci")
TESTED_FILES = (
    "README.md",
    "CHANGELOG.md",
    "CONTRIBUTING.md",
    "LICENSE",
    "pyproject.toml",
    "docker-compose.yml",
    "mkdocs.yml",
    "dev",
    ".env",
    ".dockerignore",
)
"""What the tests read beside the folders."""


def tree(*folders: str) -> set[str]:
    """Files of the working tree that are no leftovers of running it."""
    return {
        name
        for folder in folders
        for path in (ROOT / folder).rglob("*")
        if path.is_file() and not JUNK.search(name := path.relative_to(ROOT).as_posix())
    }


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the source archive, and the wheel that was built from it."""
    folder = tmp_path_factory.mktemp("dist")
    done = subprocess.run(
        [sys.executable, "-m", "build", "--no-isolation", "--outdir", str(folder), str(ROOT)],
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "warning" not in (done.stdout + done.stderr).lower()
    return folder


@pytest.fixture(scope="module")
def wheel(built: Path) -> Path:
    [path] = built.glob("*.whl")
    return path


@pytest.fixture(scope="module")
def metadata(wheel: Path) -> Message:
    with zipfile.ZipFile(wheel) as archive:
        [name] = [name for name in archive.namelist() if name.endswith(".dist-info/METADATA")]
        return Parser().parsestr(archive.read(name).decode())


def test_the_wheel_has_the_package_whole_and_nothing_else(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
    ours = {name for name in names if ".dist-info/" not in name}
    assert ours == tree("kvstore")
    assert "kvstore/py.typed" in ours
    assert any(name.endswith(".dist-info/licenses/LICENSE") for name in names)


def test_the_source_archive_has_what_its_tests_need_and_no_junk(built: Path) -> None:
    [path] = built.glob("*.tar.gz")
    with tarfile.open(path) as archive:
        names = {member.name.partition("/")[2] for member in archive if member.isfile()}
    assert tree(*TESTED_FOLDERS) | set(TESTED_FILES) <= names
    assert names - tree(*TESTED_FOLDERS) - set(TESTED_FILES) == {"PKG-INFO", ".gitignore"}
    assert [name for name in names if JUNK.search(name)] == []


def test_metadata_says_what_it_is(metadata: Message) -> None:
    assert metadata["Name"] == "kvstore-offload"
    assert metadata["Version"] == kvstore.__version__
    assert metadata["License-Expression"] == "Apache-2.0"
    assert metadata["Requires-Python"] == ">=3.10"
    extras = set(metadata.get_all("Provides-Extra") or [])
    assert {"engine", "redis", "s3", "vllm", "sglang", "cuda", "demo", "stack", "all"} <= extras


def test_every_requirement_has_a_lower_and_an_upper_bound(metadata: Message) -> None:
    """An installation next year gets what was tried, or says that it cannot."""
    for line in metadata.get_all("Requires-Dist") or []:
        requirement = line.partition(";")[0]
        if requirement.startswith("kvstore-offload["):
            continue
        bounded = ">=" in requirement and "<" in requirement
        assert bounded or "==" in requirement, line


def test_a_plain_installation_needs_no_torch_and_no_client(metadata: Message) -> None:
    plain = {
        re.split(r"[<>=;\[ ]", line)[0]
        for line in metadata.get_all("Requires-Dist") or []
        if "extra ==" not in line
    }
    assert "msgpack" in plain
    assert plain & {"torch", "redis", "boto3", "vllm", "sglang", "cupy-cuda13x"} == set()


def test_the_changelog_has_this_version() -> None:
    text = (ROOT / "CHANGELOG.md").read_text()
    versions = re.findall(r"^## \[([^\]]+)\]", text, re.MULTILINE)
    assert versions[0] == "Unreleased"
    assert kvstore.__version__ in versions
    numbers = [tuple(map(int, version.split("."))) for version in versions[1:]]
    assert numbers == sorted(numbers, reverse=True)


@pytest.mark.slow
@pytest.mark.timeout(2 * LIMIT_S)
def test_the_wheel_alone_serves(wheel: Path, tmp_path: Path) -> None:
    """In an environment with nothing else in it."""
    venv.create(tmp_path / "bare", with_pip=False)
    binary = tmp_path / "bare" / "bin"

    def run(*words: str, stdin: str = "") -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            words,
            input=stdin,
            capture_output=True,
            text=True,
            timeout=LIMIT_S,
            check=False,
            cwd=tmp_path,
            env={"PATH": str(binary)},
        )

    # By this environment's pip: making and compiling another takes as long as all the rest.
    words = [sys.executable, "-m", "pip", "--python", str(binary / "python"), "install", "--quiet"]
    done = subprocess.run(
        [*words, "--no-compile", "--disable-pip-version-check", str(wheel)],
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=False,
    )
    if "No matching distribution" in done.stderr or "onnection" in done.stderr:
        pytest.skip(f"no package index: {done.stderr.splitlines()[-1]}")
    assert done.returncode == 0, done.stderr
    assert run(str(binary / "python"), "-c", "import torch").returncode == 1

    command = str(binary / "kvstore")
    assert run(command, "version").stdout.strip().endswith(kvstore.__version__)
    tokens = list(range(40))
    hashed = run(command, "hash", "--token-ids", "-", stdin=json.dumps(tokens))
    assert hashed.returncode == 0, hashed.stderr
    assert all(one.hex() in hashed.stdout for one in hash_tokens(tokens))
    config = tmp_path / "config.json"
    config.write_text(
        json.dumps(
            {
                "model_type": "llama",
                "torch_dtype": "bfloat16",
                "num_hidden_layers": 32,
                "hidden_size": 4096,
                "num_attention_heads": 32,
                "num_key_value_heads": 8,
            }
        )
    )
    planned = run(command, "plan", str(config), "--l2", "1GiB", "--json")
    assert json.loads(planned.stdout)["bytes_per_token"] == 131_072, planned.stderr
    refused = run(command, "engine", "--model", "random")
    assert (refused.returncode, refused.stderr.count("\n")) == (2, 1), refused.stderr
    assert "kvstore-offload[engine]" in refused.stderr
    serves(command, tmp_path)


def serves(command: str, folder: Path) -> None:
    """The sidecar starts, is ready, and ends when told."""
    words = [command, "serve", "--socket", str(folder / "s"), "--port", "0", "--l2", "64MiB"]
    words += ["--slot-bytes", "64KiB", "--disk", str(folder / "disk"), "--disk-capacity", "64MiB"]
    with Child(words, ready=lambda line: line.startswith("kvstore ready")) as child:
        line = child.wait_ready(LIMIT_S)
        found = re.search(r"http://[^\s,]+", line)
        assert found
        for path in ("/readyz", "/metrics", "/v1/stats"):
            with urllib.request.urlopen(found.group() + path, timeout=30) as answer:
                assert answer.status == 200
        assert child.stop() == 0
