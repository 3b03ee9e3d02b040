"""When the process of this engine started: files that changed later may not be those it loaded."""

from __future__ import annotations

import multiprocessing
import os
import time
from pathlib import Path

__all__ = ["boot_clock_id", "boot_clock_s", "engine_start_s"]


def engine_start_s() -> float | None:
    """Start of this process by `boot_clock_s`, if an engine started the process for itself.

    vLLM and SGLang load weights in child processes. None: this process is not such a child, so it
    may be much older than the engine in it.
    """
    if multiprocessing.parent_process() is None:
        return None
    try:
        # proc(5): the name in parentheses may contain anything; the 20th field after it is the
        # start in clock ticks since boot.
        ticks = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])
    except (OSError, ValueError, IndexError):
        return None
    start_s = ticks / os.sysconf("SC_CLK_TCK")
    return start_s if 0 < start_s <= boot_clock_s() else None  # else a sandbox's own /proc


def boot_clock_s() -> float:
    """Seconds since boot, which no process sets."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


def boot_clock_id() -> str:
    """Names the clock of `boot_clock_s`: times compare only if it is equal. "": unknown."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        # Containers may have a boot clock with another origin.
        clock = Path("/proc/self/ns/time").stat().st_ino
    except OSError:
        return ""
    return f"{boot}:{clock}"
