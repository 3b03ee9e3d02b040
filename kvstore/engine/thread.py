"""An engine in a thread of its own: requests come in through a queue, outputs go out by callback.

The engine itself knows one thread. Everybody else talks to it through here; the queue is bounded
by the number of requests that may be live at once, each of which can add a handful of commands.
"""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeout
from typing import Any, TypeVar

from kvstore.engine.loop import Engine
from kvstore.engine.request import Output, QueueFull, Request, Times
from kvstore.errors import KVStoreError

log = logging.getLogger(__name__)

Deliver = Callable[[Output], None]
T = TypeVar("T")

MAX_LIVE = 4096
"""Requests submitted and not yet finished."""
CALL_TIMEOUT_S = 30.0
"""Longest wait for the loop to do a call: several steps of a large model."""


class EngineDead(KVStoreError):
    """The engine's loop has ended, on request or by a fault of its own."""


class EngineThread:
    """Runs an engine's loop. Every method may be called from any thread.

    `deliver` functions are called on the loop's thread and must return at once.
    """

    def __init__(self, engine: Engine, *, max_live: int = MAX_LIVE) -> None:
        self.engine = engine
        self.max_live = max_live
        self.error = ""
        """Why the loop ended by itself; empty while it runs or when it was stopped."""
        self._commands: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._delivers: dict[str, Deliver] = {}
        self._ended = False
        self._stopping = False
        self._thread = threading.Thread(target=self._run, name="kvstore-engine", daemon=True)

    @property
    def alive(self) -> bool:
        """The loop runs and takes requests."""
        return self._thread.is_alive() and not self._ended

    def start(self) -> None:
        """Start the loop; once."""
        self._thread.start()

    def stop(self, timeout_s: float = 30.0) -> None:
        """Abort what is left, close the engine, end the loop. Safe to call twice."""
        self._commands.put(self._stop_now)
        if self._thread.is_alive():
            self._thread.join(timeout_s)

    def submit(self, request: Request, deliver: Deliver) -> None:
        """Queue a request; every output of it goes to `deliver`, the last with a finish reason.

        Raises:
            ConfigError: the request can never be served.
            QueueFull: too many requests are live.
            EngineDead: the loop has ended.
        """
        self.engine.check_request(request)
        with self._lock:
            if self._ended:
                raise EngineDead(self.error or "the engine has stopped")
            if len(self._delivers) >= self.max_live:
                raise QueueFull(f"{self.max_live} requests are live already; try again later")
            assert request.request_id not in self._delivers, request.request_id
            self._delivers[request.request_id] = deliver
        self._commands.put(lambda: self._add(request))

    def abort(self, request_id: str) -> None:
        """End a request early; unknown and finished ones are fine."""
        with self._lock:
            live = request_id in self._delivers
        if live:
            self._commands.put(lambda: self.engine.abort(request_id))

    def call(self, function: Callable[[Engine], T], timeout_s: float = CALL_TIMEOUT_S) -> T:
        """Run function(engine) between two steps and return what it returns, or raise what it
        raises.

        Raises:
            EngineDead: the loop has ended, or does not come round within timeout_s.
        """
        answer: Future[T] = Future()

        def run() -> None:
            if not answer.set_running_or_notify_cancel():
                return
            try:
                answer.set_result(function(self.engine))
            except Exception as error:
                answer.set_exception(error)

        with self._lock:
            if self._ended:
                raise EngineDead(self.error or "the engine has stopped")
            self._commands.put(run)
        try:
            return answer.result(timeout_s)
        except FutureTimeout as error:
            answer.cancel()
            raise EngineDead(f"the engine did not answer within {timeout_s:g} s") from error

    # ---- on the loop's thread ----

    def _run(self) -> None:
        try:
            while not self._stopping:
                self._take_commands(wait=not self.engine.busy)
                if self.engine.busy:
                    for output in self.engine.step():
                        self._hand_out(output)
        except Exception as error:
            log.exception("the engine's loop failed")
            self.error = f"the engine failed: {type(error).__name__}: {error}"
        finally:
            self._end()

    def _take_commands(self, *, wait: bool) -> None:
        if wait:
            self._commands.get()()
        while not self._commands.empty():
            self._commands.get()()

    def _stop_now(self) -> None:
        self._stopping = True

    def _add(self, request: Request) -> None:
        if self._ended:
            return
        try:
            self.engine.add(request)
        except KVStoreError as error:
            self._hand_out(_failure(request.request_id, str(error)))

    def _hand_out(self, output: Output) -> None:
        with self._lock:
            if output.finish_reason is None:
                deliver = self._delivers.get(output.request_id)
            else:
                deliver = self._delivers.pop(output.request_id, None)
        if deliver is not None:
            deliver(output)

    def _end(self) -> None:
        """Nobody is left waiting: every live request and every queued call gets its answer."""
        with self._lock:
            self._ended = True
            names = list(self._delivers)
        try:
            self.engine.close()
        finally:
            for name in names:
                self._hand_out(_failure(name, self.error or "the engine has stopped"))
            while not self._commands.empty():
                self._commands.get()()


def _failure(request_id: str, error: str) -> Output:
    return Output(request_id, [], "", "error", 0, {"l1": 0}, Times(), error)


def stats_of(thread: EngineThread) -> dict[str, Any]:
    """The engine's counters, exact between two steps."""
    return thread.call(lambda engine: engine.stats())
