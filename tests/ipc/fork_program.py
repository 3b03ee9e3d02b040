"""A client with leases for tests, with a forked child that lives on when its parent is killed.

python fork_program.py SOCKET     prints "child PID" when it has its slots
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path


def main(socket_path: str) -> None:
    # The helpers' folder, and the checkout's for when the package is not installed.
    sys.path[:0] = [str(folder) for folder in Path(__file__).parents[1:3]]
    from sidecar_rig import NAMESPACE, hashes_of, until_done

    from kvstore.ipc.client import Client

    client = Client(socket_path, NAMESPACE)
    save = until_done(client, client.save(hashes_of("unfilled", 8)))
    assert len(save.slot_assignments) == 8
    child = os.fork()
    if child:
        print(f"child {child}", flush=True)
    else:
        os.closerange(0, 3)  # so that the test sees the end of its parent
    time.sleep(600)


if __name__ == "__main__":
    main(*sys.argv[1:])
