"""An engine in its own thread: requests arrive through a queue, outputs leave by callback.

The engine is single-threaded; other threads use it through this class. The queue is bounded by the
number of live requests, each of which can add a few commands.
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
"""Maximum number of submitted, unfinished requests."""
CALL_TIMEOUT_S = 30.0
"""Maximum wait for a call on the loop: several steps of a large model."""


class EngineDead(KVStoreError):
    """The engine's loop has ended, by request or by an internal error."""


class EngineThread:
    """Runs an engine's loop. All methods can be called from any thread.

    `deliver` functions are called on the loop's thread and must return at once.
    """

    def __init__(self, engine: Engine, *, max_live: int = MAX_LIVE) -> None:
        self.engine = engine
        self.max_live = max_live
        self.error = ""
        """Reason why the loop ended by itself. Empty: it runs, or was stopped."""
        self._commands: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._delivers: dict[str, Deliver] = {}
        self._ended = False
        self._stopping = False
        self._thread = threading.Thread(target=self._run, name="kvstore-engine", daemon=True)

    @property
    def alive(self) -> bool:
        """Whether the loop runs and accepts requests."""
        return self._thread.is_alive() and not self._ended

    def start(self) -> None:
        """Start the loop. Call it once."""
        self._thread.start()

    def stop(self, timeout_s: float = 30.0) -> None:
        """Abort all requests, close the engine, end the loop. Safe to call twice."""
        self._commands.put(self._stop_now)
        if self._thread.is_alive():
            self._thread.join(timeout_s)

    def submit(self, request: Request, deliver: Deliver) -> None:
        """Queue a request. All its outputs go to `deliver`, the last with a finish reason.

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
                raise QueueFull(f"{self.max_live} requests are live; try again later")
            assert request.request_id not in self._delivers, request.request_id
            self._delivers[request.request_id] = deliver
        self._commands.put(lambda: self._add(request))

    def abort(self, request_id: str) -> None:
        """End a request early. Ignores unknown and finished ids."""
        with self._lock:
            live = request_id in self._delivers
        if live:
            self._commands.put(lambda: self.engine.abort(request_id))

    def call(self, function: Callable[[Engine], T], timeout_s: float = CALL_TIMEOUT_S) -> T:
        """Run function(engine) between two steps. Returns its result, or raises its exception.

        Raises:
            EngineDead: the loop has ended, or did not run the function within timeout_s.
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
            raise EngineDead(f"no response from the engine within {timeout_s:g} s") from error

    # ---- on the loop's thread ----

    def _run(self) -> None:
        try:
            while not self._stopping:
                self._take_commands(wait=not self.engine.busy)
                if self.engine.busy:
                    for output in self.engine.step():
                        self._hand_out(output)
        except Exception as error:
            log.exception("engine loop failed: internal error")
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
        """End the loop: every live request and every queued call gets a result."""
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
    """Return the engine's statistics, exact between two steps."""
    return thread.call(lambda engine: engine.stats())
