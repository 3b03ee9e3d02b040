"""Findings of the checks `kvstore doctor NAME`, and their report."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from typing import Literal

import typer

from kvstore.errors import KVStoreError

EXIT_FAIL = 1


@dataclass(frozen=True)
class Finding:
    """Result of one check. text: what was found and, unless the state is "ok", what to do."""

    what: str
    state: Literal["ok", "warn", "fail"]
    text: str


def ok(what: str, text: str) -> Finding:
    """Return a finding without a problem."""
    return Finding(what, "ok", text)


def warn(what: str, text: str) -> Finding:
    """Return a finding that works, but is worth knowing."""
    return Finding(what, "warn", text)


def fail(what: str, text: str) -> Finding:
    """Return a finding that does not work."""
    return Finding(what, "fail", text)


def attempt(what: str, check: Callable[[], Finding]) -> Finding:
    """Run a check. A KVStoreError becomes a failed finding."""
    try:
        return check()
    except KVStoreError as error:
        return fail(what, " ".join(str(error).split()))


def report(findings: Iterable[Finding], *, as_json: bool) -> None:
    """Print the findings. Exits with 1 if one has failed."""
    found = list(findings)
    if as_json:
        print(json.dumps([asdict(finding) for finding in found]))
    else:
        width = max(len(finding.what) for finding in found)
        for finding in found:
            print(f"{finding.state:4}  {finding.what:{width}}  {finding.text}")
    if any(finding.state == "fail" for finding in found):
        raise typer.Exit(EXIT_FAIL)
