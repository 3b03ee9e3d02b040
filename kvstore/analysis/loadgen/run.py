"""Sends sessions to an endpoint from threads: a fixed number at once, or at an arrival rate.

Without a rate the load is closed: a session starts when another has ended. With a rate, sessions
arrive as a Poisson process. A session that finds all threads busy starts late and is counted: the
server then got less load than the rate.
"""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Final

from kvstore.analysis.loadgen.endpoint import Endpoint, Outcome
from kvstore.analysis.loadgen.workloads import Message, Session
from kvstore.errors import ConfigError

LATE_S: Final = 0.1
"""A session that starts this many seconds after its arrival counts as late."""
FAULTS_IN_A_ROW: Final = 20
"""Consecutive failed requests that end the run: the server is down, or rejects everything."""
TICK_S: Final = 0.1
MAX_CONCURRENCY: Final = 1024
HISTORIES: Final = ("server", "synthetic")


@dataclass(frozen=True)
class Load:
    """Amount of load. rate: sessions per second. 0: closed loop of `concurrency` threads.

    max_duration_s: no request starts after it.
    history: assistant turns in the history are the server's own, or synthetic.
    """

    concurrency: int = 4
    rate: float = 0.0
    max_duration_s: float = 600.0
    history: str = "server"
    seed: int = 0

    def check(self) -> None:
        """Raise ConfigError if an option is invalid."""
        if not 1 <= self.concurrency <= MAX_CONCURRENCY:
            raise ConfigError(
                f"--concurrency must be 1 to {MAX_CONCURRENCY} (got {self.concurrency})"
            )
        if not 0 <= self.rate < float("inf"):
            raise ConfigError(f"--rate must be 0 or sessions per second (got {self.rate})")
        if self.history not in HISTORIES:
            raise ConfigError(f"--history must be {' or '.join(HISTORIES)} (got {self.history!r})")


@dataclass
class RunResult:
    """Result of a run. wall_s: from the first request to the end of the last. late_sessions:
    sessions that started late. aborted: the reason, "" if the run was complete."""

    outcomes: list[Outcome] = field(default_factory=list)
    wall_s: float = 0.0
    late_sessions: int = 0
    aborted: str = ""


class LoadRun:
    """One workload's run."""

    def __init__(
        self, endpoint: Endpoint, load: Load, workload: str, on_done: Callable[[Outcome], None]
    ) -> None:
        load.check()
        self._endpoint = endpoint
        self._load = load
        self._workload = workload
        self._on_done = on_done
        self._result = RunResult()
        self._lock = threading.Lock()
        self._stop = threading.Event()
        self._faults = 0

    def run(self, sessions: Sequence[Session]) -> RunResult:
        """Run all sessions. Returns when all have ended, or max_duration_s has passed."""
        arrivals = self._arrivals(sessions)
        start_s = time.perf_counter()
        threads = [
            threading.Thread(target=self._work, args=(arrivals, start_s), daemon=True)
            for _ in range(min(self._load.concurrency, len(sessions)))
        ]
        try:
            for thread in threads:
                thread.start()
            self._wait(threads, start_s)
        finally:
            self._stop.set()
        with self._lock:
            ends = [outcome.start_s + outcome.latency_s for outcome in self._result.outcomes]
            self._result.wall_s = max(ends, default=start_s) - start_s
            return self._result

    def _wait(self, threads: Sequence[threading.Thread], start_s: float) -> None:
        """Wait for the threads. They end, because every request has a timeout."""
        end_s = start_s + self._load.max_duration_s
        while any(thread.is_alive() for thread in threads):
            if time.perf_counter() > end_s and not self._stop.is_set():
                self._abort(f"--max-duration of {self._load.max_duration_s:g} s has passed")
            for thread in threads:
                thread.join(TICK_S / len(threads))

    def _arrivals(self, sessions: Sequence[Session]) -> Iterator[tuple[float, Session]]:
        """Yield (seconds after the start, session). Call it from one thread at a time."""
        draw = random.Random(self._load.seed)
        at_s = 0.0
        for session in sessions:
            yield at_s, session
            if self._load.rate:
                at_s += draw.expovariate(self._load.rate)

    def _work(self, arrivals: Iterator[tuple[float, Session]], start_s: float) -> None:
        while not self._stop.is_set():
            with self._lock:
                arrived = next(arrivals, None)
            if arrived is None:
                return
            at_s, session = arrived
            wait_s = start_s + at_s - time.perf_counter()
            if wait_s > 0 and self._stop.wait(wait_s):
                return
            if self._load.rate and wait_s < -LATE_S:
                with self._lock:
                    self._result.late_sessions += 1
            self._talk(session)

    def _talk(self, session: Session) -> None:
        history: list[Message] = []
        for turn in session.turns:
            if self._stop.is_set():
                return
            history += turn.messages
            outcome = self._endpoint.send(
                history, workload=self._workload, temperature=session.temperature
            )
            self._done(outcome)
            if outcome.fault:
                return  # Without this answer the rest of the session would be different.
            reply = outcome.text if self._load.history == "server" else turn.reply
            history.append({"role": "assistant", "content": reply})

    def _done(self, outcome: Outcome) -> None:
        with self._lock:
            self._result.outcomes.append(outcome)
            self._faults = self._faults + 1 if outcome.fault else 0
            hopeless = self._faults >= FAULTS_IN_A_ROW
        if hopeless:
            self._abort(
                f"{FAULTS_IN_A_ROW} requests in a row failed, the last with {outcome.fault}: "
                f"{outcome.detail}"
            )
        self._on_done(outcome)

    def _abort(self, why: str) -> None:
        with self._lock:
            self._result.aborted = self._result.aborted or why
        self._stop.set()
