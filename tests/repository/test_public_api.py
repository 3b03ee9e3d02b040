"""The public API: everything in `kvstore.__all__`, loaded on first use."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import kvstore


@pytest.mark.parametrize("name", sorted(set(kvstore.__all__)))
def test_every_public_name_can_be_imported(name: str) -> None:
    assert getattr(kvstore, name) is not None
    assert name in dir(kvstore)


def test_type_checkers_see_the_names_that_are_there() -> None:
    tree = ast.parse(Path(kvstore.__file__).read_text())
    declared = {
        (node.module, alias.asname)
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and node.module and node.module.startswith("kvstore.")
        for alias in node.names
        if alias.asname is not None
    }
    assert declared == {(module, name) for name, module in kvstore._LAZY.items()}


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no attribute 'brain'"):
        getattr(kvstore, "brain")  # noqa: B009


def test_importing_the_package_imports_nothing_else_of_it() -> None:
    program = "import sys, kvstore; print([m for m in sys.modules if m.startswith('kvstore.')])"
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=60
    )
    assert done.stdout.strip() == "['kvstore.version']"
