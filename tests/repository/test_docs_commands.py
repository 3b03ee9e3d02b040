"""Every command that the documents show is run, or is named with the reason why not."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from docs_rig import ELSEWHERE, Command, World, commands, split

COMMANDS = list(commands())


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    made = World(tmp_path_factory.mktemp("docs"))
    yield made
    made.close()


@pytest.mark.parametrize("command", [c for c in COMMANDS if c.words[0] == "kvstore"], ids=str)
def test_it_runs(world: World, command: Command) -> None:
    world.run(command)


@pytest.mark.parametrize("command", [c for c in COMMANDS if c.words[0] != "kvstore"], ids=str)
def test_what_does_not_run_here_is_known(command: Command) -> None:
    text = " ".join(command.words)
    assert any(text.startswith(begin) for begin in ELSEWHERE), f"who runs {text!r}?"


def test_lines_are_split_as_a_shell_would() -> None:
    block = "one 'a\n b' # not this\n\n# nor this\ntwo \\\n  --x \"y z\"\n"
    assert list(split(block)) == [("one", "a\n b"), ("two", "--x", "y z")]
