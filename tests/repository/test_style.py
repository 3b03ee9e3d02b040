"""Style that a machine can tell: layers, who imports what, where the environment is read, words."""

from __future__ import annotations

import ast
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "kvstore"
MAX_FILE_LINES = 450

MODULES = sorted(PACKAGE.rglob("*.py"))
SOURCES = sorted([*MODULES, *(ROOT / "bench").glob("*.py"), *(ROOT / "tests").rglob("*.py")])

# Which files may import a library that not every installation has. Names end in "/" for folders.
HOMES = {
    "torch": ("engine/", "kernels/", "connectors/"),
    "cupy": ("kernels/",),
    "triton": ("kernels/",),
    "vllm": ("connectors/vllm.py", "connectors/vllm/"),
    "sglang": ("connectors/sglang.py", "connectors/sglang/"),
    "redis": ("tiers/redis/",),
    "boto3": ("tiers/s3/",),
    "botocore": ("tiers/s3/",),
}
ASYNC_HOMES = ("service/", "engine/server.py")
ENVIRONMENT_HOMES = ("config/settings.py",)

# The engine knows the store by its own hooks only.
ENGINE_KNOWS = ("blocks", "config", "engine", "errors", "interface", "telemetry")

# Written in halves, so that this file does not find itself.
BANNED = {
    "unfinished": r"\b(?:TO" r"DO|FIX" r"ME|X" r"XX)\b|for " r"now\b|simpli" r"fied",
    "a word the glossary rules out": r"(?i)chu" r"nk(?!ed[ -]prefill)",
    "a path of some machine": r"/wo" r"rk/|/ho" r"me/\w|/ro" r"ot/|/fa" r"rm/|/us" r"r/local",
    "a host of a registry": r"pypi\.o" r"rg|registry\.n" r"pmjs|deb\.deb" r"ian",
}  # fmt: skip

# Others' identifiers that hold a banned word, each with the reason it must be written.
FOREIGN_WORDS = {
    ".chu" "nk(": "torch's method",
    "chat.completion.chu" "nk": "object name in OpenAI's protocol",
    '"chu' 'nked"': "HTTP's transfer encoding",
    "chu" "nk_size": "argument of HTTP clients",
    "iter_chu" "nks": "method of botocore",
    "chu" "nk_ids": "argument of vLLM's offloading",
    "num_chu" "nks": "attribute of vLLM's offloading",
    "blocks_per_chu" "nk": "option of vLLM's offloading",
    "kv_bytes_per_chu" "nk": "argument of vLLM's offloading",
    "enable_chu" "nked_prefill": "argument of vLLM",
    "disable_chu" "nked_mm_input": "argument of vLLM",
    "enable_chu" "nked_processing": "argument of vLLM",
}  # fmt: skip


def inside(path: Path, homes: tuple[str, ...]) -> bool:
    name = path.relative_to(PACKAGE).as_posix()
    return any(name == home or (home.endswith("/") and name.startswith(home)) for home in homes)


def show(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


@cache
def tree_of(path: Path) -> ast.Module:
    return ast.parse(path.read_text(), show(path))


def imports_of(tree: ast.AST) -> Iterator[tuple[str, int]]:
    """Absolute names that a module imports, anywhere in it, with their lines."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((alias.name, node.lineno) for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and node.level == 0:
            yield node.module, node.lineno
            yield from ((f"{node.module}.{alias.name}", node.lineno) for alias in node.names)


def banned_words(text: str) -> list[str]:
    for word in FOREIGN_WORDS:
        text = text.replace(word, "")
    return [
        f"line {number}: {reason}: {found[0]!r}"
        for number, line in enumerate(text.splitlines(), start=1)
        for reason, pattern in BANNED.items()
        if (found := re.search(pattern, line))
    ]


def test_layers() -> None:
    program = shutil.which("lint-imports", path=Path(sys.executable).parent.as_posix())
    if program is None:
        pytest.skip("import-linter is not installed")
    done = subprocess.run(
        [program, "--no-cache"], cwd=ROOT, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_a_library_is_imported_only_in_its_home() -> None:
    strays = [
        f"{show(path)}:{line} imports {name}"
        for path in MODULES
        for name, line in imports_of(tree_of(path))
        for library, homes in HOMES.items()
        if name.partition(".")[0] == library and not inside(path, homes)
    ]
    assert strays == []


def test_the_engine_knows_the_store_by_its_hooks_only() -> None:
    strays = [
        f"{show(path)}:{line} imports {name}"
        for path in MODULES
        if inside(path, ("engine/",))
        for name, line in imports_of(tree_of(path))
        if name.startswith("kvstore.") and name.split(".")[1] not in ENGINE_KNOWS
    ]
    assert strays == []


def test_coroutines_only_in_the_services() -> None:
    strays = [
        f"{show(path)}:{node.lineno}"
        for path in MODULES
        if not inside(path, ASYNC_HOMES)
        for node in ast.walk(tree_of(path))
        if isinstance(node, ast.AsyncFunctionDef | ast.AsyncWith | ast.AsyncFor | ast.Await)
    ]
    assert strays == []


def test_the_environment_is_read_only_by_config() -> None:
    strays = [
        f"{show(path)}:{node.lineno}"
        for path in MODULES
        if not inside(path, ENVIRONMENT_HOMES)
        for node in ast.walk(tree_of(path))
        if (isinstance(node, ast.Attribute) and node.attr in ("environ", "environb", "getenv"))
        or (isinstance(node, ast.ImportFrom) and node.module == "os" and reads_environment(node))
    ]
    assert strays == []


def reads_environment(node: ast.ImportFrom) -> bool:
    return any(alias.name in ("environ", "environb", "getenv") for alias in node.names)


def test_nothing_is_pickled_or_evaluated() -> None:
    pickles = {"pickle", "cPickle", "dill", "cloudpickle", "shelve", "marshal"}
    strays = [
        f"{show(path)}:{line} imports {name}"
        for path in SOURCES
        for name, line in imports_of(tree_of(path))
        if name.partition(".")[0] in pickles
    ]
    strays += [
        f"{show(path)}:{node.lineno} calls {node.func.id}"
        for path in SOURCES
        for node in ast.walk(tree_of(path))
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Name)
        and node.func.id in ("eval", "exec")
    ]
    assert strays == []


def test_no_exception_is_swallowed_whole() -> None:
    strays = [
        f"{show(path)}:{node.lineno}"
        for path in MODULES
        for node in ast.walk(tree_of(path))
        if isinstance(node, ast.ExceptHandler)
        and (node.type is None or ast.unparse(node.type) in ("Exception", "BaseException"))
        and all(isinstance(line, ast.Pass | ast.Continue) for line in node.body)
    ]
    assert strays == []


def test_files_are_small() -> None:
    lengths = {show(path): len(path.read_text().splitlines()) for path in MODULES}
    assert {name: lines for name, lines in lengths.items() if lines > MAX_FILE_LINES} == {}


def test_words() -> None:
    texts = [*SOURCES, ROOT / "README.md", ROOT / "dev", ROOT / ".ci" / "run"]
    texts += sorted((ROOT / "docs").rglob("*.md")) + sorted((ROOT / "deploy").rglob("*"))
    texts += [ROOT / "docker-compose.yml", ROOT / "pyproject.toml"]
    found = {
        show(path): words
        for path in texts
        if path.is_file() and (words := banned_words(path.read_text()))
    }
    assert found == {}, found


@pytest.mark.parametrize(
    ("text", "banned"),
    [
        ("a chu" "nk of bytes", True),
        ("CHU" "NKS", True),
        ("chu" "nked prefill, and chu" "nked-prefill", False),
        ("gate, up = both.chu" "nk(2)", False),
        ("# TO" "DO: later", True),
        ("good enough for " "now", True),
        ("see /wo" "rk/main", True),
        ("a plain line for nowhere", False),
    ],
)  # fmt: skip
def test_the_word_list_itself(text: str, banned: bool) -> None:
    assert bool(banned_words(text)) is banned


def test_the_import_walk_itself() -> None:
    tree = ast.parse("def f():\n    from torch import nn\nimport os, redis.cluster\n")
    names = {name for name, _ in imports_of(tree)}
    assert names == {"torch", "torch.nn", "os", "redis.cluster"}
