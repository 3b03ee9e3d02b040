"""Runs functions in forked children of the test's process, and waits for them with a limit."""

from __future__ import annotations

import json
import multiprocessing
import os
import select
import signal
import traceback
from collections.abc import Callable
from typing import Any

LIMIT_S = 30.0
"""Maximum time of a child. A child that hangs is killed, and the test fails."""

# Python 3.12 and later warn of a fork with threads. That is what these tests are about.
IGNORE_FORK_WARNING = "ignore:.*fork.*:DeprecationWarning"


def in_child(function: Callable[[], Any]) -> Any:
    """Call the function in a child of `os.fork`. Returns its result, which must be JSON."""
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.close(reader)
        _run(function, writer)
    os.close(writer)
    return _result(pid, reader)


def in_process(function: Callable[[], Any]) -> Any:
    """Call the function in a forked `multiprocessing.Process`, which ends like any of them."""
    reader, writer = os.pipe()

    def target() -> None:
        os.close(reader)
        _report(function, writer)

    process = multiprocessing.get_context("fork").Process(target=target)
    process.start()
    os.close(writer)
    assert process.pid is not None
    try:
        return _result(process.pid, reader, wait=False)
    finally:
        process.join(LIMIT_S)
        assert process.exitcode == 0, f"the child ends with {process.exitcode}"


def _run(function: Callable[[], Any], writer: int) -> None:
    try:
        _report(function, writer)
    finally:
        os._exit(0)


def _report(function: Callable[[], Any], writer: int) -> None:
    try:
        answer = {"result": function()}
    except BaseException:
        answer = {"error": traceback.format_exc()}
    os.write(writer, json.dumps(answer).encode())
    os.close(writer)


def _result(pid: int, reader: int, *, wait: bool = True) -> Any:
    data = b""
    with os.fdopen(reader, "rb", buffering=0) as pipe:
        while select.select([pipe], [], [], LIMIT_S)[0]:
            part = pipe.read(1 << 16)
            if not part:
                break
            data += part
        else:
            os.kill(pid, signal.SIGKILL)
            data = json.dumps({"error": "the child hangs"}).encode()
    if wait:
        os.waitpid(pid, 0)
    answer = json.loads(data or '{"error": "the child ended without a result"}')
    assert "error" not in answer, answer["error"]
    return answer["result"]
