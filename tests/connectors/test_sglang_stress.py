"""Several ranks look up, read and write batches of 128 pages while their sidecar is killed and
restarted: no call raises, no wrong byte is copied, and afterwards everything works."""

from __future__ import annotations

import random
import threading
from collections import Counter
from pathlib import Path

from sglang_rig import HostMemory, Rank, keys_of, settings, slots
from sidecar_rig import ForkedSidecar, disk, wait_until

RANKS = 3
BATCH = 128
"""Pages of SGLang's largest batch."""
FAMILIES = 4
"""Number of page chains. The bytes of a page depend on its chain and its number."""
KILLS = 3
BETWEEN = 6
"""Batches of each kind between two kills."""
WRECKED = b"\xa5"


class Engine:
    """One rank with the threads of SGLang: one looks up, one reads, one writes."""

    def __init__(self, socket: str, number: int) -> None:
        self.host = HostMemory(BATCH * (FAMILIES + 1))
        self.host.fill(17)
        self.rank = Rank(settings(socket, max_wait={"base": 2_000, "max": 2_000}), self.host)
        self.keys = [keys_of(f"family {family}", BATCH) for family in range(FAMILIES)]
        self.right = [self.host.page(page) for page in range(BATCH * FAMILIES)]
        self.done: Counter[str] = Counter()
        self.faults: list[str] = []
        self.ending = threading.Event()
        self._threads = [
            threading.Thread(target=self._repeat, args=(each, number))
            for each in (self.ask, self.read, self.write)
        ]

    def start(self) -> None:
        for thread in self._threads:
            thread.start()

    def end(self) -> None:
        self.ending.set()
        for thread in self._threads:
            thread.join(120)
            assert not thread.is_alive(), "a call has not ended"

    def ask(self, chance: random.Random) -> None:
        missing = keys_of("missing", BATCH)
        for keys in (*self.keys, missing, self.keys[0][:1] + missing[1:]):
            run = self.rank.cached_prefix_len(keys)
            if not 0 <= run <= len(keys) or (keys is missing and run):
                self.faults.append(f"a run of {run}")
        self.done["ask"] += 1

    def read(self, chance: random.Random) -> None:
        family, count = chance.randrange(FAMILIES), chance.choice((1, 17, BATCH))
        targets = range(BATCH * FAMILIES, BATCH * FAMILIES + count)
        for target in targets:
            self.host.overwrite(target, WRECKED * len(self.right[0]))
        got = self.rank.get(self.keys[family][:count], targets)
        for page, (target, came) in enumerate(zip(targets, got, strict=True)):
            expected = self.right[family * BATCH + page] if came else WRECKED * len(self.right[0])
            if self.host.page(target) != expected:
                self.faults.append(f"page {page} of {family}, {'got' if came else 'not got'}")
        self.done["read"] += 1
        self.done["got"] += sum(got)

    def write(self, chance: random.Random) -> None:
        family = chance.randrange(FAMILIES)
        kept = self.rank.set(self.keys[family], range(family * BATCH, (family + 1) * BATCH))
        self.done["write"] += 1
        self.done["kept"] += sum(kept)

    def _repeat(self, each: object, number: int) -> None:
        assert callable(each)
        chance = random.Random(number)
        try:
            while not self.ending.is_set():
                each(chance)
        except Exception as error:  # reported by the test: a call of SGLang must not raise
            self.faults.append(repr(error))


def test_ranks_continue_while_their_sidecar_is_killed_and_restarted(tmp_path: Path) -> None:
    log = tmp_path / "sidecar.log"
    sidecar = ForkedSidecar(
        tmp_path, {**slots(2 * BATCH), **disk(tmp_path / "disk", "4MiB")}, stderr=log
    )
    engines = [Engine(sidecar.socket, number) for number in range(RANKS)]

    def have_done(more: int) -> bool:
        kinds = ("ask", "read", "write")
        return all(each.done[kind] >= more for each in engines for kind in kinds) or any(
            each.faults for each in engines
        )

    for engine in engines:
        engine.start()
    try:
        for kill in range(1, KILLS + 1):
            wait_until(lambda: have_done(kill * BETWEEN), "calls continue")  # noqa: B023
            sidecar.kill()
            sidecar.start()
        so_far = max(engine.done[kind] for engine in engines for kind in ("ask", "read", "write"))
        wait_until(lambda: have_done(min(so_far, (KILLS + 2) * BETWEEN)), "calls continue")
    finally:
        for engine in engines:
            engine.end()
    assert [engine.faults for engine in engines] == [[]] * RANKS
    for engine in engines:
        assert min(engine.done["got"], engine.done["kept"]) > 0, engine.done
        targets = range(BATCH * FAMILIES, BATCH * FAMILIES + BATCH)
        for family in range(FAMILIES):
            pages = range(family * BATCH, (family + 1) * BATCH)
            wait_until(lambda: all(engine.rank.set(engine.keys[family], pages)), "kept")  # noqa: B023
            wait_until(lambda: all(engine.rank.get(engine.keys[family], targets)), "got")  # noqa: B023
            assert [engine.host.page(n) for n in targets] == [engine.right[n] for n in pages]
        engine.rank.close()
    wait_until(lambda: sidecar.stats()["l2"]["slots_leased"] == 0, "nothing stays leased")
    said = log.read_text()
    assert "protocol error" not in said
    assert "Traceback" not in said
    assert sidecar.stop() == 0
