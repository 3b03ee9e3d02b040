"""Bounded blocking calls of the HTTP server into the store, beside its event loop.

A call into a tier can hang and cannot be interrupted. So each kind of call has a bulkhead with a
maximum number of calls, and a further call is rejected with 503. A bulkhead full of hung calls does
not block other kinds. Each call has its own daemon thread, so a hung call does not delay the
process's exit.
"""

from __future__ import annotations

import asyncio
import contextvars
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, TypeVar

from fastapi import HTTPException

T = TypeVar("T")


class Bulkhead:
    """At most `count` calls at the same time. Used from the event loop's thread.

    what: the name of the calls in messages. rejected: number of rejected calls.
    """

    def __init__(self, what: str, count: int) -> None:
        self.what = what
        self.count = count
        self.rejected = 0
        self._taken = 0
        self._threads: set[threading.Thread] = set()

    def acquire(self) -> None:
        """Take a place for `start`, or to give back with `release`. 503 when all are taken."""
        if self._taken >= self.count:
            self.rejected += 1
            raise busy(f"{self.count} {self.what} are already in progress")
        self._taken += 1

    def release(self) -> None:
        """Give a place back."""
        assert self._taken > 0, "a place was given back twice"
        self._taken -= 1

    def start(self, function: Callable[..., T], *args: Any) -> asyncio.Future[T]:
        """Start a call. It keeps its place until it returns, even if no caller waits for it.

        Raises HTTPException: 503, the system cannot start a thread.
        """
        outcome: Future[T] = Future()

        def run() -> None:
            try:
                result = function(*args)
            except BaseException as error:
                outcome.set_exception(error)
            else:
                outcome.set_result(result)

        # Its log lines belong to the request that started it.
        context = contextvars.copy_context()
        thread = threading.Thread(
            target=context.run, args=(run,), name=f"http {self.what}", daemon=True
        )
        try:
            thread.start()
        except RuntimeError as error:
            self.release()
            raise busy(str(error)) from None
        self._threads.add(thread)

        def ended(running: asyncio.Future[T]) -> None:
            self._threads.discard(thread)
            self.release()
            running.exception()  # retrieve it, in case no caller waits any more

        running = asyncio.wrap_future(outcome)
        running.add_done_callback(ended)
        return running

    def join(self, deadline_s: float) -> int:
        """Wait for running calls until `deadline_s` (monotonic). Returns how many still run."""
        for thread in self._threads:
            thread.join(max(0.0, deadline_s - time.monotonic()))
        return sum(thread.is_alive() for thread in self._threads)


async def result_of(running: asyncio.Future[T], timeout_s: float) -> T:
    """The result of a call, or its exception. 504 after `limit_s`; the call itself continues."""
    done, _ = await asyncio.wait([running], timeout=timeout_s)
    if not done:
        raise HTTPException(504, f"the store did not answer within {timeout_s:g} s")
    return running.result()


def busy(text: str) -> HTTPException:
    """A 503 response that asks the client to retry after a second."""
    return HTTPException(503, text, headers={"Retry-After": "1"})
