"""What `kvstore simulate` and `kvstore plan` make of their options: sizes, speeds, progress."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Final

from kvstore.errors import ConfigError
from kvstore.prefetch.costs import CostModel, PrefillCurve, TierSpeed

BLOCKS_MAX: Final = 1 << 31
ENGINES_MAX: Final = 65_536


def blocks_of(text: str, block_bytes: int, option: str) -> int | None:
    """A tier's size: "infinite", blocks ("4096"), or bytes with a unit ("64GiB"), whole blocks.

    Raises ConfigError: no such size, or not one block.
    """
    from kvstore.config.units import parse_bytes

    text = text.strip()
    if text in ("infinite", "inf"):
        return None
    if text.isdigit():
        if not 0 < int(text) <= BLOCKS_MAX:
            raise ConfigError(f"{option} is {text} blocks; 1 to {BLOCKS_MAX} is right")
        return int(text)
    nbytes = parse_bytes(text)
    if nbytes < block_bytes:
        raise ConfigError(f"{option} is {text}, less than one block of {block_bytes} bytes")
    return min(nbytes // block_bytes, BLOCKS_MAX)


def size_of(option: str, blocks: int | None, size: str | None, block_bytes: int) -> int | None:
    """Blocks of a tier given in blocks or in bytes; 0 where it is not given, None without end.

    Raises ConfigError: no such size, or both are given.
    """
    if blocks is not None and size is not None:
        raise ConfigError(f"{option}-blocks and {option} are two sizes of one tier; give one")
    if blocks is not None:
        return blocks_of(str(blocks), block_bytes, f"{option}-blocks")
    if size is None:
        return 0
    if size.strip().isdigit():
        raise ConfigError(f"{option} is {size}; write a unit ({size}GiB), or {option}-blocks")
    return blocks_of(size, block_bytes, option)


@dataclass(frozen=True)
class Speeds:
    """What computing and loading take, as options say."""

    prefill_rate: str
    l2_speed: str
    l3_speed: str
    l3_latency: str

    def model(self, *, block_bytes: int, block_tokens: int) -> CostModel:
        """The cost model. Raises ConfigError for an option that is wrong."""
        from kvstore.analysis.simulate.tiers import L2, L3
        from kvstore.config.units import parse_bytes, parse_duration_s

        speeds = (
            TierSpeed(L2, float(parse_bytes(self.l2_speed.removesuffix("/s")))),
            TierSpeed(
                L3,
                float(parse_bytes(self.l3_speed.removesuffix("/s"))),
                parse_duration_s(self.l3_latency),
            ),
        )
        return CostModel(PrefillCurve.read(self.prefill_rate), speeds, block_bytes, block_tokens)


def names(text: str, known: Sequence[str], what: str) -> list[str]:
    """Names separated by commas. Raises ConfigError with what is known for any other."""
    found = [name.strip() for name in text.split(",")]
    for name in found:
        if name not in known:
            raise ConfigError(f"unknown {what} {name!r}; one of {', '.join(known)} is right")
    return found


@contextmanager
def progress_bar() -> Iterator[Callable[[str, int, int | None], None]]:
    """A bar on stderr, where that is a terminal: told what, how much is done, and of how much."""
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
