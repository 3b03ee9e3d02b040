"""Runs the demo's steps with real processes: a sidecar, and two engines that know its socket."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

from kvstore.cli.demo.http import Completion, call, complete
from kvstore.errors import KVStoreError
from kvstore.testing.processes import Child, Sidecar

START_TIMEOUT_S: Final = 240.0
"""Maximum start time of a process. Two processes load a model at the same time."""
JOIN_TIMEOUT_S: Final = 60.0
"""Maximum time until both engines are connected to a restarted sidecar."""
TICK_S: Final = 0.1
MAX_WAIT_MS: Final = 60_000
"""Maximum wait for loads. Long, so that a busy machine shows hits, not truncated prefixes."""
BLOCK_TOKENS: Final = 16
MIN_HIT_FRACTION: Final = 0.9
"""Minimum fraction of the full blocks from the expected tier, for a step to pass."""
NO_TIER: Final = "none"
MODEL_NAME: Final = "demo"


class DemoFailed(KVStoreError):
    """A step did not show the expected result."""


@dataclass(frozen=True)
class Step:
    """One line of the table. before: what is done to the processes first, for the user."""

    name: str
    engine: str
    tier: str
    before: str = ""


STEPS: Final = (
    Step("cold", "A", NO_TIER),
    Step("warm", "A", "l1"),
    Step("second engine", "B", "l2"),
    Step("caches emptied", "B", "disk", "clearing B's own cache and L2"),
    Step("sidecar killed", "B", "disk", "killing the sidecar (-9) and restarting it"),
)


@dataclass(frozen=True)
class Row:
    """Result of a step over all prompts: sums of tokens, and the mean time to first token."""

    step: str
    engine: str
    prompt_tokens: int
    cached_tokens: int
    tier: str
    ttft_ms: float
    identical: bool

    def plain(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True)
class Plan:
    """What to run. model: `random` or `smollm2`. slots, slot_bytes: of the slab."""

    model: str
    prompts: Sequence[str]
    max_tokens: int
    slots: int
    slot_bytes: int

    def sidecar_flags(self, folder: Path) -> list[str]:
        l2_bytes = self.slots * self.slot_bytes
        disk = ["--disk", str(folder / "disk"), "--disk-capacity", str(4 * l2_bytes)]
        # On a busy machine a disk is slow, not broken. The demo waits, to show the cached blocks.
        config = folder / "sidecar.toml"
        config.write_text(f"[limits]\ntier_timeout = {MAX_WAIT_MS}\n")
        l2 = ["--l2", str(l2_bytes), "--slot-bytes", str(self.slot_bytes)]
        return ["--config", str(config), *l2, *disk]

    def engine_flags(self, socket: str) -> list[str]:
        flags = {
            "--model": self.model,
            "--model-name": MODEL_NAME,
            "--dtype": "float32",
            "--port": "0",
            "--store": socket,
            "--store-connect-timeout": "30s",
            "--block-tokens": str(BLOCK_TOKENS),
            "--page-tokens": str(BLOCK_TOKENS),
            "--num-pages": str(self.slots),
            "--prefetch": "wait_complete",
            "--max-wait": f"{MAX_WAIT_MS}ms",
            "--min-load-tokens": "0",
            # Two engines share the machine. More threads than free cores would slow both.
            "--threads": str(max(1, (os.cpu_count() or 1) // 2)),
        }
        return [part for flag in flags.items() for part in flag]


class Demo:
    """The processes of one run. Leaving the context ends all of them, also after an error."""

    def __init__(self, plan: Plan, folder: Path, say: Callable[[str], None]) -> None:
        self._plan = plan
        self._folder = folder
        self._say = say
        self._ending = contextlib.ExitStack()
        self._engines: dict[str, Child] = {}
        self._sidecar: Sidecar | None = None
        self.texts: list[str] = []
        """Text that each prompt's cold run generated."""

    def __enter__(self) -> Demo:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._ending.close()

    def start(self) -> None:
        """Start all three processes. Returns when they are ready."""
        self._say("starting a sidecar and two engines")
        sidecar = self._start_sidecar()
        flags = self._plan.engine_flags(sidecar.socket)
        for name in ("A", "B"):
            argv = [sys.executable, "-m", "kvstore", "engine", *flags]
            with delay_signals():
                child = Child(argv, ready=lambda line: line.startswith("kvstore engine: "))
                self._engines[name] = self._ending.enter_context(child)
        sidecar.wait_ready(START_TIMEOUT_S)
        for child in self._engines.values():
            child.wait_ready(START_TIMEOUT_S)

    def run(self, step: Step) -> Row:
        """Prepare the step, then send each prompt in turn."""
        if step.before:
            self._say(step.before)
        if step.name == "caches emptied":
            self._reset(step.engine)
            self._clear_l2()
        elif step.name == "sidecar killed":
            self._restart_sidecar()
            self._reset(step.engine)
        done = []
        for number, prompt in enumerate(self._plan.prompts, start=1):
            count = len(self._plan.prompts)
            self._say(f"{step.name}: prompt {number} of {count} on engine {step.engine}")
            url = self._url(step.engine) + "/v1"
            done.append(complete(url, MODEL_NAME, prompt, self._plan.max_tokens))
        if not self.texts:
            self.texts = [completion.text for completion in done]
        self._flush()
        return self._row(step, done)

    def _row(self, step: Step, done: Sequence[Completion]) -> Row:
        by_tier: dict[str, int] = {}
        for completion in done:
            for tier, tokens in completion.cached_by_tier.items():
                by_tier[tier] = by_tier.get(tier, 0) + tokens
        return Row(
            step=step.name,
            engine=step.engine,
            prompt_tokens=sum(completion.prompt_tokens for completion in done),
            cached_tokens=sum(by_tier.values()),
            tier="+".join(sorted(by_tier)) or NO_TIER,
            ttft_ms=round(sum(completion.ttft_ms for completion in done) / len(done), 1),
            identical=[completion.text for completion in done] == self.texts,
        )

    def _start_sidecar(self) -> Sidecar:
        flags = self._plan.sidecar_flags(self._folder)
        with delay_signals():
            sidecar = Sidecar(self._folder / "kvstore.sock", *flags)
            self._ending.enter_context(sidecar)
        self._sidecar = sidecar
        return sidecar

    def _restart_sidecar(self) -> None:
        assert self._sidecar is not None
        self._sidecar.kill()
        self._start_sidecar().wait_ready(START_TIMEOUT_S)
        end_s = time.monotonic() + JOIN_TIMEOUT_S
        while not self._joined():
            if time.monotonic() >= end_s:
                raise DemoFailed(f"the engines did not reconnect within {JOIN_TIMEOUT_S:g} s")
            time.sleep(TICK_S)

    def _joined(self) -> bool:
        """Return whether sidecar and engines both report the connection.

        The sidecar counts an engine after its handshake. The engine maps the slab some time later.
        """
        if call(f"{self._sidecar_url()}/v1/stats")["sessions"] < len(self._engines):
            return False
        engines = [call(f"{self._url(name)}/stats") for name in self._engines]
        return all(stats["hooks"]["store_connected"] for stats in engines)

    def _reset(self, engine: str) -> None:
        """Clear an engine's own cache."""
        call(f"{self._url(engine)}/reset_prefix_cache", "POST")

    def _flush(self) -> None:
        """Wait until all saved blocks are written to disk."""
        call(f"{self._sidecar_url()}/v1/flush", "POST")

    def _clear_l2(self) -> None:
        call(f"{self._sidecar_url()}/v1/clear?tier=l2", "POST")

    def _url(self, engine: str) -> str:
        line = self._engines[engine].ready_line
        return line.split(" at ")[-1].strip().removesuffix("/v1")

    def _sidecar_url(self) -> str:
        assert self._sidecar is not None
        return self._sidecar.url


@contextlib.contextmanager
def delay_signals() -> Iterator[None]:
    """Delay SIGINT and SIGTERM to the end of the block, so that no started child is lost."""
    received: list[int] = []
    numbers = (signal.SIGINT, signal.SIGTERM)
    before = {number: signal.signal(number, lambda n, _: received.append(n)) for number in numbers}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    if received:
        raise KeyboardInterrupt


def check(step: Step, row: Row, prompts: int) -> str:
    """Return what is wrong with a row, in one line. Empty: the step passed."""
    if not row.identical:
        return f"step {step.name!r}: the output differs from the cold run"
    if step.tier == NO_TIER:
        return ""
    blocks = (row.prompt_tokens - prompts * BLOCK_TOKENS) * MIN_HIT_FRACTION
    if step.tier not in row.tier.split("+") or row.cached_tokens < blocks:
        return (
            f"step {step.name!r}: {row.cached_tokens} of {row.prompt_tokens} prompt tokens came "
            f"from {row.tier}; expected nearly all from {step.tier}"
        )
    return ""
