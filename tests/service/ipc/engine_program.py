"""A client process for tests: does what its command line says, prints a line, waits to be killed.

python engine_program.py SOCKET save NAME COUNT     saves and commits blocks
python engine_program.py SOCKET hold NAME COUNT     loads those, and asks for slots of others
"""

from __future__ import annotations

import sys
import time
from pathlib import Path


def main(socket_path: str, what: str, name: str, count: str) -> None:
    # The helpers' folder, and the checkout's for when the package is not installed.
    sys.path[:0] = [str(folder) for folder in Path(__file__).parents[2:4]]
    from sidecar_rig import NAMESPACE, hashes_of, put, until_done

    from kvstore.ipc.client import Client

    client = Client(socket_path, NAMESPACE, name=what)
    hashes = hashes_of(name, int(count))
    if what == "save":
        assert put(client, hashes) == len(hashes)
        assert client.sync(10.0)
    else:
        load = until_done(client, client.load(hashes))
        save = until_done(client, client.save(hashes_of(f"{name} unfilled", int(count))))
        assert len(load.slots) == len(save.slot_assignments) == len(hashes)
    print("ready", flush=True)
    time.sleep(600)


if __name__ == "__main__":
    main(*sys.argv[1:])
