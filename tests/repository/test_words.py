"""Words that must not come back (`words.py`), in the package, its documents and its deployment."""

from __future__ import annotations

from pathlib import Path

import pytest
from words import NAMES, PROSE, ROOT, old_words, parts_of, texts

HELD = ("kvstore", "docs", "deploy", "README.md", "CONTRIBUTING.md", "docker-compose.yml", "dev")


@pytest.mark.parametrize("place", HELD)
def test_old_words_do_not_come_back(place: str) -> None:
    found = [
        f"{path.relative_to(ROOT)}:{line}: {word!r}; write: {better}"
        for path in texts([ROOT / place])
        for line, word, better in old_words(path)
    ]
    assert found == [], "\n".join(found)


@pytest.mark.parametrize(
    ("text", "old"),
    [
        ("how much of a prompt is held", True),
        ("called with the lock held", False),
        ("tokens asked for", True),
        ("4096 is right", True),
        ("there is no tier", False),
        ("this is no tier", True),
        ("a flight of blocks", True),
        ("loads in flight, an in-flight load", False),
        ("compiled without register spills", False),
        ("a spilled block", True),
        ("the brain's lock", True),
        ("a plain sentence about a cached block", False),
    ],
)
def test_the_list_finds_old_prose_only(tmp_path: Path, text: str, old: bool) -> None:
    page = tmp_path / "page.md"
    page.write_text(text)
    assert bool(list(old_words(page))) is old


@pytest.mark.parametrize(
    ("name", "part"),
    [
        ("start_spill", "spill"),
        ("SpillTable", "spill"),
        ("_brain", "brain"),
        ("loads_in_flight", None),
        ("InFlightLoad", None),
        ("AskedKeys", "asked"),
        ("tasked", None),
    ],
)
def test_the_list_finds_parts_of_names(name: str, part: str | None) -> None:
    assert (parts_of(name) & NAMES.keys()) == ({part} if part else set())


def test_every_pattern_says_what_to_write() -> None:
    assert all(PROSE.values())
    assert all(NAMES.values())
