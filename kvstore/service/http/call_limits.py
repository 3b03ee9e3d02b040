"""Blocking calls of the store beside the HTTP side's event loop, bounded by kind.

A call into a tier can hang, and nothing can interrupt it. So each kind of call has a lane: at most
so many at once, the next is told to come again, and a lane full of hung calls is in no other's way.
Each call has a thread of its own, a daemon: a hung one does not hold up the process's end.
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


class Lane:
    """At most `count` calls at once. Used from the event loop's thread.

    what: the calls' name in messages. refused: how many found no place.
    """

    def __init__(self, what: str, count: int) -> None:
        self.what = what
        self.count = count
        self.refused = 0
        self._taken = 0
        self._threads: set[threading.Thread] = set()

    def enter(self) -> None:
        """Take a place, to be handed on to `start` or back by `leave`; 503 when there is none."""
        if self._taken >= self.count:
            self.refused += 1
            raise busy(f"{self.count} {self.what} are under way already")
        self._taken += 1

    def leave(self) -> None:
        """Hand a place back."""
        assert self._taken > 0, "a place given back twice"
        self._taken -= 1

    def start(self, function: Callable[..., T], *args: Any) -> asyncio.Future[T]:
        """Begin a call; it keeps the place until it returns, whoever waits for it meanwhile.

        Raises HTTPException: 503, the system starts no thread.
        """
        outcome: Future[T] = Future()

        def run() -> None:
            try:
                result = function(*args)
            except BaseException as error:
                outcome.set_exception(error)
            else:
                outcome.set_result(result)

        # What it logs belongs to the request that asked for it.
        context = contextvars.copy_context()
        thread = threading.Thread(
            target=context.run, args=(run,), name=f"http {self.what}", daemon=True
        )
        try:
            thread.start()
        except RuntimeError as error:
            self.leave()
            raise busy(str(error)) from None
        self._threads.add(thread)

        def ended(running: asyncio.Future[T]) -> None:
            self._threads.discard(thread)
            self.leave()
            running.exception()  # it is known now, should nobody wait for it any more

        running = asyncio.wrap_future(outcome)
        running.add_done_callback(ended)
        return running

    def join(self, deadline_s: float) -> int:
        """Wait for what runs, up to a moment of the monotonic clock; how many calls run on."""
        for thread in self._threads:
            thread.join(max(0.0, deadline_s - time.monotonic()))
        return sum(thread.is_alive() for thread in self._threads)


async def answer_of(running: asyncio.Future[T], limit_s: float) -> T:
    """What a call returns or raises; 504 when that takes too long. The call itself goes on."""
    done, _ = await asyncio.wait([running], timeout=limit_s)
    if not done:
        raise HTTPException(504, f"the store has not answered within {limit_s:g} s")
    return running.result()


def busy(text: str) -> HTTPException:
    """503: come again in a second."""
    return HTTPException(503, text, headers={"Retry-After": "1"})
