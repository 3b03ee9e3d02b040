"""Checks that no directory of a tier is also another tier's, or inside one of another tier."""

from __future__ import annotations

import contextlib
import itertools
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class TierDirectory:
    """A directory that one tier may use alone. tier: the tier's name. where: its table in the
    configuration."""

    where: str
    tier: str
    path: str


def shared_directories(directories: Sequence[TierDirectory]) -> Iterator[tuple[str, str]]:
    """Yield (table of the later tier, message) for each pair of directories that share files.

    Symbolic links are resolved, and existing directories are compared by device and inode. Creates
    and opens nothing.
    """
    places = [(each, _ids(each.path)) for each in directories]
    for (first, first_ids), (second, second_ids) in itertools.combinations(places, 2):
        if not first_ids[0].isdisjoint(second_ids[0]):
            relation = "is the same as"
        elif any(not first_ids[0].isdisjoint(parent) for parent in second_ids[1:]):
            relation = "is inside"
        elif any(not second_ids[0].isdisjoint(parent) for parent in first_ids[1:]):
            relation = "contains"
        else:
            continue
        yield (
            second.where,
            f"{second.where}: the directory {second.path!r} of tier {second.tier!r} {relation} "
            f"{first.path!r} of tier {first.tier!r}; give each tier its own directory, not inside "
            "another one",
        )


def _ids(path: str) -> list[frozenset[object]]:
    """What identifies a directory and each of its parents, from the inside out: the real path, and
    (device, inode) if it exists."""
    real_path = os.path.realpath(path)
    ids = []
    while True:
        one: set[object] = {real_path}
        with contextlib.suppress(OSError):  # It need not exist yet.
            status = os.stat(real_path)
            one.add((status.st_dev, status.st_ino))
        ids.append(frozenset(one))
        parent = os.path.dirname(real_path)
        if parent == real_path:
            return ids
        real_path = parent
