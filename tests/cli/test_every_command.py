"""Rules for all commands, found by walking the app: help, --json, exit codes."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer

from kvstore.cli import EXIT_BROKEN_PIPE, EXIT_INTERRUPTED, EXIT_USER_ERROR, build_app, main

ROOT = Path(__file__).parents[2]
SERVERS = {"serve", "engine"}
"""They print no result, only a line when they are ready, and a log."""


def commands(group: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    """Yield every command without subcommands."""
    for name, command in group.commands.items():
        if hasattr(command, "commands"):
            yield from commands(command, (*path, name))
        else:
            yield (*path, name), command


ALL = dict(commands(typer.main.get_command(build_app())))
NAMES = [" ".join(path) for path in ALL]


def test_the_walk_finds_them() -> None:
    watched = {"stats", "ls", "pin", "unpin", "warm", "clear", "verify"}
    others = {"serve", "demo", "plan", "simulate", "hash", "version"}
    assert {*watched, *others, "config show", "bench hitrate", "doctor vllm"} <= set(NAMES)


@pytest.mark.parametrize("name", sorted(set(NAMES) - SERVERS))
def test_results_are_available_as_json(name: str) -> None:
    options = {word for param in ALL[tuple(name.split())].params for word in param.opts}
    assert "--json" in options


@pytest.mark.parametrize("name", NAMES)
def test_help_explains_the_command_and_every_option(
    name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    command = ALL[tuple(name.split())]
    assert command.help
    silent = [param.name for param in command.params if not getattr(param, "help", "")]
    assert silent == []
    assert main([*name.split(), "--help"]) == 0
    assert name in " ".join(capsys.readouterr().out.split())


@pytest.mark.parametrize("name", NAMES)
def test_an_unknown_option_is_one_line_and_exit_2(
    name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*name.split(), "--no-such-option"]) == EXIT_USER_ERROR
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("kvstore: ")
    assert captured.err.count("\n") == 1


def test_exit_codes_are_documented() -> None:
    text = (ROOT / "docs" / "cli.md").read_text()
    documented = {int(code) for code in re.findall(r"^\| (\d+) \|", text, re.MULTILINE)}
    assert documented == {0, 1, EXIT_USER_ERROR, EXIT_INTERRUPTED, EXIT_BROKEN_PIPE}


def test_a_command_that_exits_with_1_documents_it() -> None:
    """A command's own help explains its exit codes."""
    folder = ROOT / "kvstore" / "cli"
    for name in ("verify", "pin", "ls", "clear"):
        source = (folder / f"{name}.py").read_text()
        assert re.search(r"raise typer\.Exit\((EXIT_CORRUPT|1)\)", source)
        assert re.search(r"\b1\b", ALL[(name,)].help), name
