"""What a forked child does with the objects that it inherits: it lets go of them.

A child of `os.fork` (multiprocessing, the workers of data loaders) has a copy of its parent's
objects. It shares the parent's sockets, files and mapped memory, and has none of its threads. A
lock that another thread had taken stays taken in the child. So an object that owns any of these
registers a method with `on_fork`. The child calls it before its own code runs. The method closes
the child's descriptors, and makes every later call fail at once. It sends nothing and changes no
file, because both would change the parent's state.
"""

from __future__ import annotations

import logging
import os
import weakref
from collections.abc import Callable
from typing import Any, Final, NoReturn

log = logging.getLogger(__name__)

INHERITED: Final = "opened by another process, from which this one was forked; open it here again"
"""Fault of every operation on an inherited object."""

_methods: weakref.WeakKeyDictionary[Any, Callable[[Any], None]] = weakref.WeakKeyDictionary()


def on_fork(method: Callable[[], None]) -> None:
    """Have every forked child call this bound method while its object exists. One for each object.

    The child has one thread then. The method must take no lock that another thread may have, and
    may be called again in a child of the child. An exception is logged.
    """
    _methods[method.__self__] = method.__func__  # type: ignore[attr-defined]


class UnusableLock:
    """Takes the place of a lock in a child. Taking it raises `error` at once."""

    def __init__(self, error: type[Exception]) -> None:
        self._error = error

    def __enter__(self) -> NoReturn:
        raise self._error(INHERITED)

    def __exit__(self, *exc: object) -> None:
        raise AssertionError("this lock was never taken")


def make_unusable(owner: Any, *names: str, error: type[Exception]) -> None:
    """Replace these locks and conditions of an object by an `UnusableLock`."""
    for name in names:
        setattr(owner, name, UnusableLock(error))


def _call_methods() -> None:
    for owner, method in list(_methods.items()):
        try:
            method(owner)
        except Exception:
            log.exception("cannot let go of an object in a forked child")


os.register_at_fork(after_in_child=_call_methods)
