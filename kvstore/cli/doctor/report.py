"""Checks of an environment: `kvstore doctor NAME`. What they have in common."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from typing import Literal

import typer

from kvstore.errors import KVStoreError

EXIT_WRONG = 1


@dataclass(frozen=True)
class Finding:
    """One thing that was looked at. text: what was found, and what to do unless it is "ok"."""

    what: str
    state: Literal["ok", "note", "wrong"]
    text: str


def ok(what: str, text: str) -> Finding:
    """As it should be."""
    return Finding(what, "ok", text)


def note(what: str, text: str) -> Finding:
    """Works, but worth knowing."""
    return Finding(what, "note", text)


def wrong(what: str, text: str) -> Finding:
    """Will not work."""
    return Finding(what, "wrong", text)


def attempt(what: str, check: Callable[[], Finding]) -> Finding:
    """A check whose named faults are findings too."""
    try:
        return check()
    except KVStoreError as error:
        return wrong(what, " ".join(str(error).split()))


def report(findings: Iterable[Finding], *, as_json: bool) -> None:
    """Print them; the command's exit code is 1 when something is wrong."""
    found = list(findings)
    if as_json:
        print(json.dumps([asdict(finding) for finding in found]))
    else:
        width = max(len(finding.what) for finding in found)
        for finding in found:
            print(f"{finding.state:5}  {finding.what:{width}}  {finding.text}")
    if any(finding.state == "wrong" for finding in found):
        raise typer.Exit(EXIT_WRONG)
