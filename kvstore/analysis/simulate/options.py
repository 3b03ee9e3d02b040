"""Parses options of `kvstore simulate` and `kvstore plan`: sizes, bandwidths, progress."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Final

from kvstore.config.renamed import refuse_value
from kvstore.errors import ConfigError
from kvstore.prefetch.costs import CostModel, PrefillCurve, TierSpeed

BLOCKS_MAX: Final = 1 << 31
CONCURRENCY_MAX: Final = 65_536


def blocks_of(text: str, block_bytes: int, option: str) -> int | None:
    """Parse a tier's size: "infinite", blocks ("4096"), or bytes with a unit ("64GiB").

    Raises ConfigError: the size is invalid, or smaller than one block.
    """
    from kvstore.config.units import parse_bytes

    text = text.strip()
    if text in ("infinite", "inf"):
        return None
    if text.isdigit():
        if not 0 < int(text) <= BLOCKS_MAX:
            raise ConfigError(f"{option} must be 1 to {BLOCKS_MAX} blocks (got {text})")
        return int(text)
    nbytes = parse_bytes(text)
    if nbytes < block_bytes:
        raise ConfigError(
            f"{option} must be at least one block of {block_bytes} bytes (got {text})"
        )
    return min(nbytes // block_bytes, BLOCKS_MAX)


def size_of(option: str, blocks: int | None, size: str | None, block_bytes: int) -> int | None:
    """Parse a tier's size, given in blocks or in bytes. 0: not given. None: unlimited.

    Raises ConfigError: the size is invalid, or both forms are given.
    """
    if blocks is not None and size is not None:
        raise ConfigError(f"give {option}-blocks or {option}, not both")
    if blocks is not None:
        return blocks_of(str(blocks), block_bytes, f"{option}-blocks")
    if size is None:
        return 0
    if size.strip().isdigit():
        raise ConfigError(f"{option} needs a unit ({size}GiB), or use {option}-blocks (got {size})")
    return blocks_of(size, block_bytes, option)


@dataclass(frozen=True)
class Speeds:
    """Speed of computing and of loading, as given by options."""

    prefill_rate: str
    l2_bandwidth: str
    l3_bandwidth: str
    l3_latency: str

    def model(self, *, block_bytes: int, block_tokens: int) -> CostModel:
        """Return the cost model. Raises ConfigError if an option is invalid."""
        from kvstore.analysis.simulate.tiers import L2, L3
        from kvstore.config.units import parse_bytes, parse_duration_s

        speeds = (
            TierSpeed(L2, float(parse_bytes(self.l2_bandwidth.removesuffix("/s")))),
            TierSpeed(
                L3,
                float(parse_bytes(self.l3_bandwidth.removesuffix("/s"))),
                parse_duration_s(self.l3_latency),
            ),
        )
        return CostModel(PrefillCurve.read(self.prefill_rate), speeds, block_bytes, block_tokens)


def parse_names(text: str, known: Sequence[str], what: str) -> list[str]:
    """Parse names separated by commas. Raises ConfigError for an unknown name."""
    found = [name.strip() for name in text.split(",")]
    for name in found:
        refuse_value(what, name)
        if name not in known:
            raise ConfigError(f"unknown {what} {name!r}; use one of {', '.join(known)}")
    return found


@contextmanager
def progress_bar() -> Iterator[Callable[[str, int, int | None], None]]:
    """Show a progress bar on stderr if it is a terminal. Call it with (task, done, total)."""
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TaskProgressColumn, TimeRemainingColumn

    console = Console(stderr=True)
    columns = ("{task.description}", BarColumn(), TaskProgressColumn(), TimeRemainingColumn())
    hidden = not console.is_terminal
    with Progress(*columns, console=console, transient=True, disable=hidden) as bar:
        tasks: dict[str, Any] = {}

        def report(what: str, done: int, total: int | None) -> None:
            if what not in tasks:
                tasks[what] = bar.add_task(what, total=total)
            bar.update(tasks[what], completed=done, total=total)

        yield report
