"""Two ways over the bus, and which one a copy takes.

**Kernel** (zero-copy): the gather or scatter kernel reads or writes the mapped slots itself. One
launch, no memory of its own, least latency; it occupies some thread blocks for as long as the bus
takes.

**Copy engine**: the kernel works between pool and a staging buffer on the device, and large
`cudaMemcpyAsync`s move whole blocks between that and the slots. Two halves alternate on two
streams, so the kernel of one overlaps the copies of the other. The device's processors are free
meanwhile.

The table below is a guess: it has not been measured. `bench/gpu_check.py` measures both paths by
size and prints the table that fits the machine.
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
"""Copies of at least so many bytes take the copy engine. Unmeasured."""

STAGING_BYTES: Final = 64 << 20
"""Device memory of the staging buffer, both halves together."""


def path_for(direction: Direction, nbytes: int) -> Path:
    """The path of one call's copy of `nbytes` in all."""
    large = nbytes >= COPY_ENGINE_FROM_BYTES[direction]
    return Path.COPY_ENGINE if large else Path.KERNEL
