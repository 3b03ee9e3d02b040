"""Measures the latency of match and load between an engine's client and the sidecar.

The lower bound, measured in turns, is an echo of as many bytes between two processes over a
blocking Unix socket: the operating system's cost for two wake-ups. The third figure is a store
inside the process, without a socket.

    python bench/hotpath.py [--calls 2000] [--rounds 5] [--batch 64] [--json]
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import socket
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import kvstore
from kvstore.blocks.key import Namespace
from kvstore.interface import BlockStore, Operation
from kvstore.testing.processes import Sidecar

NAMESPACE = Namespace(model="bench", layers=2, kv_heads=2, head_dim=64)
SMALL_BYTES = 48
"""Size of a match of one hash on the socket."""


def echo(sock: socket.socket, other_end: socket.socket) -> None:
    """Return every message to the sender."""
    other_end.close()
    while data := sock.recv(1 << 16):
        sock.sendall(data)


def until_done(store: BlockStore, operation: Operation) -> None:
    while not operation.done:
        assert store.poll(5.0), f"no response: {operation.fault}"


def p50_us(call: Callable[[], None], calls: int) -> float:
    times = []
    for _ in range(calls):
        start = time.perf_counter()
        call()
        times.append(time.perf_counter() - start)
    return statistics.median(times) * 1e6


def fill(store: BlockStore, hashes: list[bytes]) -> None:
    save = store.save(hashes)
    until_done(store, save)
    assert len(save.slot_assignments) == len(hashes), "the slab is too small for this batch"
    store.commit(save)


def measure(store: BlockStore, hashes: list[bytes], calls: int) -> dict[str, float]:
    """Return the p50 of a small match and of loads (with release) of one block and of a batch."""

    def match() -> None:
        until_done(store, store.match(hashes[:1]))

    def load(count: int) -> None:
        operation = store.load(hashes[:count])
        until_done(store, operation)
        assert len(operation.slots) == count
        store.release(operation)

    one = p50_us(lambda: load(1), calls)
    batch = p50_us(lambda: load(len(hashes)), max(1, calls // 4))
    return {
        "match_us": p50_us(match, calls),
        "load_us": one,
        "batch_us": batch,
        "block_us": (batch - one) / (len(hashes) - 1),
    }


def run(calls: int, rounds: int, batch: int) -> list[dict[str, float | str]]:
    hashes = [number.to_bytes(4, "big") * 8 for number in range(batch)]
    slot = str(NAMESPACE.block_bytes)
    l2 = str(NAMESPACE.block_bytes * batch * 2)
    ours, theirs = socket.socketpair()
    # Fork before any thread starts.
    other = multiprocessing.get_context("fork").Process(
        target=echo, args=(theirs, ours), daemon=True
    )
    other.start()
    theirs.close()
    message = bytes(SMALL_BYTES)

    def bare() -> None:
        ours.sendall(message)
        ours.recv(1 << 16)

    figures: dict[str, list[dict[str, float]]] = {"echo": [], "sidecar": [], "embedded": []}
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "kv.sock"
        with (
            Sidecar(path, "--l2", l2, "--slot-bytes", slot) as sidecar,
            kvstore.open(l2, slot) as store,
        ):
            sidecar.wait_ready()
            stores: dict[str, BlockStore] = {
                "sidecar": kvstore.connect(str(path), NAMESPACE),
                "embedded": store.session(NAMESPACE),
            }
            for each in stores.values():
                fill(each, hashes)
            for _ in range(rounds):
                figures["echo"].append({"match_us": p50_us(bare, calls)})
                for name, each in stores.items():
                    figures[name].append(measure(each, hashes, calls))
            for each in stores.values():
                each.close()
            sidecar.stop()
    ours.close()
    other.join()
    # Use the best round: other load only makes a round slower.
    return [
        {"path": name, **{key: min(one[key] for one in rows) for key in rows[0]}}
        for name, rows in figures.items()
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--calls", type=int, default=2000, help="calls per round")
    parser.add_argument("--rounds", type=int, default=5, help="number of rounds")
    parser.add_argument("--batch", type=int, default=64, help="blocks of the larger load")
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    options = parser.parse_args()
    rows = run(options.calls, options.rounds, options.batch)
    if options.json:
        print(json.dumps({"rows": rows, "batch": options.batch}))
        return
    print(f"{'':10}{'match 1':>10}{'load 1':>10}{f'load {options.batch}':>10}{'a block':>10}   us")
    for row in rows:
        cells = [row.get(key) for key in ("match_us", "load_us", "batch_us", "block_us")]
        shown = (f"{cell:10.1f}" if cell is not None else f"{'':10}" for cell in cells)
        print(f"{row['path']:10}" + "".join(shown))


if __name__ == "__main__":
    main()
