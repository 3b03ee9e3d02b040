"""The two paths over the bus, and the choice between them.

**Kernel** (zero-copy): the gather or scatter kernel reads or writes the mapped slots directly. One
launch, no extra memory, lowest latency. It occupies some thread blocks as long as the transfer
takes.

**Copy engine**: the kernel works between the pool and a staging buffer on the device. Large
`cudaMemcpyAsync`s copy whole blocks between that buffer and the slots. Two halves alternate on two
streams, so the kernel of one overlaps with the copies of the other. The device's processors are
free during the copies.

The thresholds below are not measured. `bench/gpu_check.py` measures both paths by size, and prints
the thresholds for the machine.
"""

from __future__ import annotations

import enum
from typing import Final


class Path(enum.Enum):
    KERNEL = "kernel"
    COPY_ENGINE = "copy engine"


class Direction(enum.Enum):
    D2H = "D2H"
    H2D = "H2D"


COPY_ENGINE_FROM_BYTES: Final = {Direction.D2H: 32 << 20, Direction.H2D: 32 << 20}
"""Minimum size of a copy for the copy engine. Not measured."""

STAGING_BYTES: Final = 64 << 20
"""Device memory of the staging buffer, for both halves together."""


def path_for(direction: Direction, nbytes: int) -> Path:
    """Return the path for a call that copies `nbytes` in total."""
    large = nbytes >= COPY_ENGINE_FROM_BYTES[direction]
    return Path.COPY_ENGINE if large else Path.KERNEL
