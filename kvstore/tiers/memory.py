"""The in-memory reference implementation of a tier: frames in a dict, evicted in LRU order."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Iterator, Sequence

from pydantic import Field

from kvstore.blocks.key import Key
from kvstore.config.field_types import Bytes
from kvstore.config.settings import Section
from kvstore.errors import FrameTooLarge, TierError, TierFull
from kvstore.tiers.base import IO_ALIGNMENT, Tier

DEFAULT_CAPACITY_BYTES = 1 << 30


class Config(Section):
    """Configuration of the memory tier."""

    name: str = "memory"
    capacity: Bytes = Field(default=DEFAULT_CAPACITY_BYTES, ge=2 * IO_ALIGNMENT)
    """Maximum size in bytes of all headers and payloads."""


class MemoryTier(Tier):
    """Stores frames in this process's memory. They are lost when the process ends."""

    local_index = True
    sole_writer = True

    def __init__(self, capacity_bytes: int = DEFAULT_CAPACITY_BYTES, *, name: str = "memory"):
        self.name = name
        self._capacity_bytes = capacity_bytes
        self._lock = threading.Lock()
        self._frames: OrderedDict[Key, bytes] = OrderedDict()
        self._used_bytes = 0
        self._evictions = 0
        self._closed = False

    def contains(self, keys: Sequence[Key]) -> list[bool]:
        with self._lock:
            self._check_open()
            return [key in self._frames for key in keys]

    def read(self, key: Key, header: memoryview, payload: memoryview) -> int:
        with self._lock:
            self._check_open()
            frame = self._frames.get(key)
            if frame is None:
                return 0
            self._frames.move_to_end(key)
        length = len(frame) - IO_ALIGNMENT
        header[:IO_ALIGNMENT] = frame[:IO_ALIGNMENT]
        if length > len(payload):
            raise FrameTooLarge(f"payload of {length} bytes does not fit into {len(payload)} bytes")
        payload[:length] = memoryview(frame)[IO_ALIGNMENT:]
        return length

    def write(self, key: Key, header: memoryview, payload: memoryview) -> None:
        frame = b"".join((header[:IO_ALIGNMENT], payload))
        with self._lock:
            self._check_open()
            if key in self._frames:
                return
            if len(frame) > self._capacity_bytes:
                raise TierFull(
                    f"frame of {len(frame)} bytes is larger than the capacity of {self.name} "
                    f"({self._capacity_bytes} bytes)"
                )
            while self._used_bytes + len(frame) > self._capacity_bytes:
                _, victim = self._frames.popitem(last=False)
                self._used_bytes -= len(victim)
                self._evictions += 1
            self._frames[key] = frame
            self._used_bytes += len(frame)

    def delete(self, keys: Sequence[Key]) -> None:
        with self._lock:
            self._check_open()
            for key in keys:
                self._used_bytes -= len(self._frames.pop(key, b""))

    def usage(self) -> Iterator[tuple[Key, int]]:
        with self._lock:
            self._check_open()
            return iter([(key, len(frame)) for key, frame in reversed(self._frames.items())])

    def stats(self) -> dict[str, int | float | str]:
        with self._lock:
            return {
                "bytes_used": self._used_bytes,
                "bytes_capacity": self._capacity_bytes,
                "blocks": len(self._frames),
                "evictions": self._evictions,
            }

    def close(self) -> None:
        with self._lock:
            self._closed = True
            self._frames.clear()
            self._used_bytes = 0

    def _check_open(self) -> None:
        if self._closed:
            raise TierError(f"tier {self.name} is closed")


def open(config: Config) -> Tier:
    return MemoryTier(config.capacity, name=config.name)
