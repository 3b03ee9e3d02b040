"""docs/architecture.md matches the source: its symbols, packages, layers and threads."""

from __future__ import annotations

import ast
import functools
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "kvstore"
PROJECT = ROOT / "pyproject.toml"
TEXT = (ROOT / "docs" / "architecture.md").read_text()
SYMBOL = re.compile(r"`(kvstore/[\w/]+\.py):\s+([\w.]+)`")
THREAD_CALLS = {"Thread": "name", "ThreadPoolExecutor": "thread_name_prefix"}
"""Calls that start threads, and the argument with the thread's name."""
NOT_LISTED = ("analysis", "cli", "testing")
"""Packages whose threads the page leaves out."""
MAIN_THREAD = "main"


def section(title: str) -> str:
    """The text of one section of the page."""
    match = re.search(rf"^## {title}\n(.*?)(?=^## |\Z)", TEXT, re.MULTILINE | re.DOTALL)
    assert match is not None, f"no section {title!r}"
    return match[1]


@functools.cache
def tree_of(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


def members(node: ast.AST) -> Iterator[tuple[str, ast.AST]]:
    """Names defined in the body of a module or class, and `self.name` attributes of a class."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield child.name, child
        elif isinstance(child, ast.Assign | ast.AnnAssign):
            targets = child.targets if isinstance(child, ast.Assign) else [child.target]
            yield from ((each.id, each) for each in targets if isinstance(each, ast.Name))
    if isinstance(node, ast.ClassDef):
        for each in ast.walk(node):
            if isinstance(each, ast.Attribute) and isinstance(each.ctx, ast.Store):
                yield each.attr, each


@pytest.mark.parametrize(("file", "symbol"), sorted(set(SYMBOL.findall(TEXT))))
def test_every_symbol_on_the_page_exists(file: str, symbol: str) -> None:
    node: ast.AST = tree_of(ROOT / file)
    for name in symbol.split("."):
        found = dict(members(node)).get(name)
        assert found is not None, f"{file} has no {symbol}"
        node = found


def test_the_life_of_a_block_has_nine_steps_with_a_symbol_each() -> None:
    text = section("Life of a block")
    steps = re.split(r"^(\d+)\. ", text, flags=re.MULTILINE)[1:]
    assert steps[::2] == [str(number) for number in range(1, 10)]
    assert all(SYMBOL.search(step) for step in steps[1::2])


def test_the_page_lists_every_package_and_module_of_the_top_level() -> None:
    listed = set(re.findall(r"^\| `(\w+)(?:/|\.py)` \|", section("Packages"), re.MULTILINE))
    there = {path.parent.name for path in PACKAGE.glob("*/__init__.py")}
    there |= {path.stem for path in PACKAGE.glob("*.py")}
    assert listed == there


def test_the_layers_are_those_of_import_linter() -> None:
    contract = re.search(
        r'name = "kvstore"\n.*?layers = \[\n(.*?)\]', PROJECT.read_text(), re.DOTALL
    )
    page = re.search(r"^```\n(.*?)```", section("Packages"), re.MULTILINE | re.DOTALL)
    assert contract is not None
    assert page is not None
    assert page[1].splitlines() == re.findall(r'"(.*)"', contract[1])


def test_the_page_lists_every_thread() -> None:
    rows = re.findall(r"^\| `([^`]+)` \| `(kvstore/[\w/]+\.py)", section("Threads"), re.MULTILINE)
    listed = {(file, pattern_of(name)) for name, file in rows if name != MAIN_THREAD}
    assert listed == set(threads())


def test_the_locks_of_the_page_exist() -> None:
    named = set(re.findall(r"`(\w+\.\w*(?:lock|turn|out|changed))`", section("Lock order")))
    assert named
    assert named - set(locks()) == set()


def locks() -> Iterator[str]:
    """`Class.attribute` of every lock and condition that a class of the package makes."""
    for path in PACKAGE.rglob("*.py"):
        for owner in ast.walk(tree_of(path)):
            if isinstance(owner, ast.ClassDef):
                for node in ast.walk(owner):
                    if (
                        isinstance(node, ast.Assign)
                        and isinstance(node.targets[0], ast.Attribute)
                        and re.match(r"threading\.(R?Lock|Condition)\(", ast.unparse(node.value))
                    ):
                        yield f"{owner.name}.{node.targets[0].attr}"


def pattern_of(name: str) -> str:
    """A thread name of the page, with each upper-case placeholder as "*"."""
    return re.sub(r"[A-Z]+", "*", name)


def threads() -> Iterator[tuple[str, str]]:
    """(file, name) of every thread that the package starts; "*" for a variable part of a name."""
    for path in sorted(PACKAGE.rglob("*.py")):
        if path.relative_to(PACKAGE).parts[0] in NOT_LISTED:
            continue
        for function in ast.walk(tree_of(path)):
            if isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef):
                for name in names_in(function):
                    yield str(path.relative_to(ROOT)), name


def names_in(function: ast.FunctionDef | ast.AsyncFunctionDef) -> Iterator[str]:
    for call in ast.walk(function):
        if not isinstance(call, ast.Call):
            continue
        called = ast.unparse(call.func).rpartition(".")[2]
        for keyword in call.keywords:
            if keyword.arg is not None and keyword.arg == THREAD_CALLS.get(called):
                yield text_of(keyword.value, function)


def text_of(value: ast.expr, function: ast.FunctionDef | ast.AsyncFunctionDef) -> str:
    """The text of a constant, an f-string, or a variable of the function or its default value."""
    if isinstance(value, ast.Constant):
        return str(value.value)
    if isinstance(value, ast.JoinedStr):
        return "".join(
            str(part.value) if isinstance(part, ast.Constant) else "*" for part in value.values
        )
    assert isinstance(value, ast.Name), ast.unparse(value)
    for node in ast.walk(function):
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == value.id:
            return text_of(node.value, function)
    arguments = [*function.args.kwonlyargs]
    for argument, default in zip(arguments, function.args.kw_defaults, strict=True):
        if argument.arg == value.id and default is not None:
            return text_of(default, function)
    raise AssertionError(f"name of a thread in {function.name}: {ast.unparse(value)}")
