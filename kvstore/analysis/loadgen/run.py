"""Sessions against an endpoint: so many at once, or as they arrive, by threads.

Load is closed where no rate is given: a session begins when another has ended. With a rate,
sessions arrive as a Poisson process does, and one that finds every thread busy starts late, which
is counted: the server was then asked less than the rate says.
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
"""A session that starts this much after its arrival is late."""
FAULTS_IN_A_ROW: Final = 20
"""So many requests in a row that failed end the run: the server is gone, or refuses everything."""
TICK_S: Final = 0.1
MAX_CONCURRENCY: Final = 1024
REPLIES: Final = ("server", "made")


@dataclass(frozen=True)
class Load:
    """How much at once. rate: sessions a second, 0: as many as `concurrency` threads make.

    limit_s: longest run; what is not begun by then is not begun.
    replies: whose answers stand in the history: the server's own, or made ones.
    """

    concurrency: int = 4
    rate: float = 0.0
    limit_s: float = 600.0
    replies: str = "server"
    seed: int = 0

    def check(self) -> None:
        """Raises ConfigError."""
        if not 1 <= self.concurrency <= MAX_CONCURRENCY:
            raise ConfigError(f"--concurrency {self.concurrency}; 1 to {MAX_CONCURRENCY} is right")
        if not 0 <= self.rate < float("inf"):
            raise ConfigError(f"--rate {self.rate}; sessions a second, or 0 for none, is right")
        if self.replies not in REPLIES:
            raise ConfigError(f"--replies {self.replies!r}; {' or '.join(REPLIES)} is right")


@dataclass
class Ran:
    """What came of it. wall_s: from the first request to the last one's end. late: sessions."""

    outcomes: list[Outcome] = field(default_factory=list)
    wall_s: float = 0.0
    late: int = 0
    given_up: str = ""


class Run:
    """One workload's run."""

    def __init__(
        self, endpoint: Endpoint, load: Load, workload: str, on_done: Callable[[Outcome], None]
    ) -> None:
        load.check()
        self._endpoint = endpoint
        self._load = load
        self._workload = workload
        self._on_done = on_done
        self._ran = Ran()
        self._lock = threading.Lock()
        self._stop = threading.Event()
        self._faults = 0

    def run(self, sessions: Sequence[Session]) -> Ran:
        """Ask them all; returns when every one has ended, or the limit has passed."""
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
            ends = [outcome.start_s + outcome.latency_s for outcome in self._ran.outcomes]
            self._ran.wall_s = max(ends, default=start_s) - start_s
            return self._ran

    def _wait(self, threads: Sequence[threading.Thread], start_s: float) -> None:
        """Until the threads have ended. A request has a bound of its own, so they do."""
        end_s = start_s + self._load.limit_s
        while any(thread.is_alive() for thread in threads):
            if time.perf_counter() > end_s and not self._stop.is_set():
                self._give_up(f"the limit of {self._load.limit_s:g} s has passed")
            for thread in threads:
                thread.join(TICK_S / len(threads))

    def _arrivals(self, sessions: Sequence[Session]) -> Iterator[tuple[float, Session]]:
        """(seconds after the start, session); one thread at a time may take the next."""
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
                    self._ran.late += 1
            self._talk(session)

    def _talk(self, session: Session) -> None:
        history: list[Message] = []
        for turn in session.turns:
            if self._stop.is_set():
                return
            history += turn.messages
            outcome = self._endpoint.ask(
                history, workload=self._workload, temperature=session.temperature
            )
            self._done(outcome)
            if outcome.fault:
                return  # without its answer the rest of the session would be another one
            reply = outcome.text if self._load.replies == "server" else turn.reply
            history.append({"role": "assistant", "content": reply})

    def _done(self, outcome: Outcome) -> None:
        with self._lock:
            self._ran.outcomes.append(outcome)
            self._faults = self._faults + 1 if outcome.fault else 0
            hopeless = self._faults >= FAULTS_IN_A_ROW
        if hopeless:
            self._give_up(
                f"{FAULTS_IN_A_ROW} requests in a row failed, the last one: {outcome.fault}: "
                f"{outcome.detail}"
            )
        self._on_done(outcome)

    def _give_up(self, why: str) -> None:
        with self._lock:
            self._ran.given_up = self._ran.given_up or why
        self._stop.set()
