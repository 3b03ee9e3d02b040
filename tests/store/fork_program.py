"""An embedded store for tests: a forked child closes it, and the parent saves on until a kill.

python fork_program.py DIRECTORY HOW     prints "child PID" once every block is acknowledged

HOW, in the child: "close" closes the store, "exit" ends by sys.exit with the parent's atexit
handlers, "process" is a multiprocessing.Process that uses the store, "live" closes and lives on,
"idle" lives on and does nothing.
"""

from __future__ import annotations

import atexit
import multiprocessing
import os
import sys
import time
from pathlib import Path
from typing import Any


def main(directory: str, how: str) -> None:
    # The helpers' folder, and the checkout's for when the package is not installed.
    sys.path[:0] = [str(folder) for folder in Path(__file__).parents[1:3]]
    from store_rig import SPACE, hashes, save

    import kvstore

    store = kvstore.open(l2="1MiB", slot_bytes=4096, disk=directory, disk_capacity="32MiB")
    session = store.session(SPACE)
    before, after = hashes(20, "before"), hashes(100, "after")
    assert len(save(session, before).slot_assignments) == 20
    assert store.flush(60.0)
    atexit.register(store.close)
    child = start_child(store, session, how)
    for first in range(0, 100, 20):
        assert len(save(session, after[first : first + 20]).slot_assignments) == 20
        assert store.flush(60.0)
    print(f"child {child}", flush=True)
    time.sleep(600)


def use(store: Any, session: Any) -> None:
    with store, session:
        session.match([b"x" * 32])


def start_child(store: Any, session: Any, how: str) -> int:
    """Fork the child, and wait for its end, unless it lives on."""
    if how == "process":
        process = multiprocessing.get_context("fork").Process(target=use, args=(store, session))
        process.start()
        process.join()
        assert process.exitcode == 0, process.exitcode
        return process.pid or 0
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        if how == "exit":
            sys.exit(0)
        if how != "idle":
            store.close()
        os.close(writer)
        os.closerange(0, 3)  # so that the test sees the end of its parent
        time.sleep(600 if how in ("live", "idle") else 0)
        os._exit(0)
    os.close(writer)
    os.read(reader, 1)  # its end: the child has closed the store, or has ended
    if how not in ("live", "idle"):
        _, status = os.waitpid(child, 0)
        assert status == 0, status
    return child


if __name__ == "__main__":
    main(*sys.argv[1:])
