"""Nodes of two releases on one tier: a store in a child process that executes commands.

`Node(table)` is a node of this release. `Node(table, newer=True)` is a node of a later one: this
release with changes that older releases do not know. Before each save it is told which change its
frames have, and it reads all of them, and frames of this release.

    version     frames of format version 2
    codec       frames with a codec of another name
    field       frames whose header has one more field
    optional    frames whose header has one more field that readers may ignore
    segments    frames of this release in segments and tombstones of format version 2

As a program it reads commands from stdin, one JSON list a line, and answers each with a line.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any, Final

from kvstore.testing.processes import PACKAGE_PARENT

KINDS: Final = ("version", "codec", "field")
"""Changes of frames that this release does not understand."""
FLUSH_LIMIT_S: Final = 120.0


class Node:
    """A store in another process. Every method waits for its result.

    table: the tier's table in the configuration.
    """

    def __init__(self, table: dict[str, Any], *, newer: bool = False) -> None:
        folders = [PACKAGE_PARENT, str(Path(__file__).parent)]
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(folders)}
        argv = [sys.executable, __file__, json.dumps(table), "newer" if newer else "this"]
        self.process = subprocess.Popen(
            argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
        )
        assert self._answer() == "ready"

    def save(self, label: str, count: int, change: str = "") -> bool:
        """Save blocks and write them to the tier; False if a write failed. Then empty L2."""
        written: bool = self.do("save", label, count, change)
        return written

    def load(self, label: str, count: int) -> int:
        """Load blocks one by one; returns how many were cached, with the right bytes."""
        loaded: int = self.do("load", label, count)
        return loaded

    def stats(self) -> dict[str, Any]:
        """Statistics of the tier, with the L2 manager's "tier_writes_..."."""
        stats: dict[str, Any] = self.do("stats")
        return stats

    def do(self, operation: str, *arguments: Any) -> Any:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps([operation, *arguments]) + "\n")
        self.process.stdin.flush()
        return self._answer()

    def close(self) -> None:
        """Close the store and end the process."""
        assert self.process.stdin is not None
        self.process.stdin.close()
        assert self.process.wait(60) == 0
        self._close_output()

    def kill(self) -> None:
        """Kill the process: no store is closed."""
        self.process.kill()
        self.process.wait(60)
        self._close_output()

    def _answer(self) -> Any:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert line, "the node has ended"
        return json.loads(line)

    def _close_output(self) -> None:
        assert self.process.stdout is not None
        self.process.stdout.close()


# ---------------------------------------------------------------------- the later release


class Changes:
    """Makes this process a node of a later release. `change`: of the frames it writes."""

    def __init__(self) -> None:
        self.change = ""
        self._change_frames()
        self._change_codecs()
        self._change_segments()

    def _change_frames(self) -> None:
        import msgpack

        from kvstore.blocks import frame

        pack, decode = frame.pack_header, frame.decode_header

        def pack_later(header: memoryview, **fields: Any) -> None:
            pack(header, **fields)
            names = {"field": "device", "optional": "optional_device"}
            if self.change in names:
                _repack(header, lambda packed: {**packed, names[self.change]: "gpu"})
            if self.change == "version":
                header[6] = 2

        def decode_later(header: memoryview) -> Any:
            total = int.from_bytes(header[8:16], "little")
            if bytes(header[:6]) != frame.MAGIC or frame.checksum(header[16:4096]) != total:
                return decode(header)
            copy = memoryview(bytearray(header[:4096]))
            copy[6] = 1 if copy[6] == 2 else copy[6]
            _repack(copy, lambda packed: {n: packed[n] for n in packed if "device" not in n})
            return decode(copy)

        def _repack(header: memoryview, change: Any) -> None:
            length = int.from_bytes(header[16:18], "little")
            fields = change(msgpack.unpackb(header[18 : 18 + length]))
            packed = msgpack.packb(fields, use_bin_type=True)
            header[18:4096] = packed.ljust(4078, b"\0")
            header[16:18] = len(packed).to_bytes(2, "little")
            header[8:16] = frame.checksum(header[16:4096]).to_bytes(8, "little")

        frame.pack_header, frame.decode_header = pack_later, decode_later

    def _change_codecs(self) -> None:
        from kvstore import codecs
        from kvstore.codecs.chooser import Chooser

        by_frame_id, choose = codecs.codec_by_frame_id, Chooser.choose

        class Inverted:
            """A block with all bits inverted."""

            kind, frame_id = "inverted", "inverted/1"

            def bound(self, raw_bytes: int) -> int:
                return raw_bytes

            def encode(self, source: memoryview, target: memoryview) -> int:
                target[: len(source)] = bytes(255 - byte for byte in source)
                return len(source)

            decode = encode

        def by_later_frame_id(frame_id: str) -> Any:
            return Inverted() if frame_id == Inverted.frame_id else by_frame_id(frame_id)

        def choose_later(chooser: Chooser, *arguments: Any, **options: Any) -> Any:
            if self.change == "codec":
                return Inverted()
            return choose(chooser, *arguments, **options)

        codecs.codec_by_frame_id = by_later_frame_id
        Chooser.choose = choose_later  # type: ignore[method-assign]
        Chooser.record_read = Chooser.record_write = lambda *_: None  # type: ignore[method-assign]

    def _change_segments(self) -> None:
        from kvstore.tiers.disk import layout, lockfile

        assert lockfile.SEGMENT_VERSION == layout.SEGMENT_VERSION
        pack, unpack = layout._pack_sector, layout._unpack_sector

        def pack_later(*arguments: Any) -> memoryview:
            sector = pack(*arguments)
            sector[6] = 2 if self.change == "segments" else 1
            return sector

        def unpack_later(struct_: Any, magic: bytes, sector: memoryview) -> Any:
            copy = memoryview(bytearray(sector))
            copy[6] = 1 if copy[6] == 2 else copy[6]
            return unpack(struct_, magic, copy)

        layout._pack_sector, layout._unpack_sector = pack_later, unpack_later


class Operations:
    """The commands of a node."""

    def __init__(self, table: dict[str, Any], changes: Changes | None) -> None:
        import store_rig

        import kvstore

        self._rig = store_rig
        self._changes = changes
        with tempfile.NamedTemporaryFile("w+", suffix=".toml") as config:
            # A slow test machine must not open the circuit breaker.
            config.write('[limits]\ntier_timeout = "60s"\n')
            config.flush()
            self.store = kvstore.open("1MiB", "4KiB", tiers=(table,), config=config.name)
        self.session = self.store.session(store_rig.SPACE)

    def save(self, label: str, count: int, change: str) -> bool:
        if self._changes is not None:
            self._changes.change = change
        before = self.store.stats()["l2"]["tier_writes_failed"]
        self._rig.save(self.session, self._rig.hashes(count, label))
        assert self.store.flush(FLUSH_LIMIT_S)
        self.store.clear("l2")
        return bool(self.store.stats()["l2"]["tier_writes_failed"] == before)

    def load(self, label: str, count: int) -> int:
        names = self._rig.hashes(count, label)
        self._rig.match(self.session, names)
        cached = 0
        for name in names:
            cached += len(self._rig.loaded_tiers(self.session, [name]))
        self.store.clear("l2")
        return cached

    def prefix(self, label: str, count: int) -> list[int]:
        """Lengths of the prefix that a match finds and that a load returns."""
        names = self._rig.hashes(count, label)
        found = len(self._rig.match(self.session, names))
        loaded = len(self._rig.loaded_tiers(self.session, names))
        self.store.clear("l2")
        return [found, loaded]

    def warm(self) -> int:
        warmed = self.store.warmer.warm(1.0)
        self.store.clear("l2")
        return warmed

    def reconcile(self) -> None:
        from kvstore.tiers.wrappers import iter_layers

        (tier,) = self.store.limit_applier.tiers
        *_, inner = iter_layers(tier)
        inner.reconcile()  # type: ignore[attr-defined]

    def stats(self) -> dict[str, Any]:
        stats = self.store.stats()
        (tier,) = stats["tiers"].values()
        counts = {name: count for name, count in stats["l2"].items() if name.startswith("tier_")}
        return {name: tier[name] for name in tier if name not in ("seconds", "codec")} | counts


def main() -> None:
    table, release = json.loads(sys.argv[1]), sys.argv[2]
    operations = Operations(table, Changes() if release == "newer" else None)
    print(json.dumps("ready"), flush=True)
    for line in sys.stdin:
        operation, *arguments = json.loads(line)
        print(json.dumps(getattr(operations, operation)(*arguments)), flush=True)
    operations.session.close()
    operations.store.close()


if __name__ == "__main__":
    main()
