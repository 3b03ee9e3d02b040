"""Removes host pools that killed engines left behind.

vLLM's tiering keeps its host pool in /dev/shm/vllm_offload_<engine>.mmap and removes the file when
the engine ends. If the engine is killed, the file and its gigabytes stay until the next reboot.
"""

from __future__ import annotations

import logging
import os
import time
from pathlib import Path
from typing import Final

log = logging.getLogger(__name__)

FOLDER: Final = Path("/dev/shm")
NAMES: Final = "vllm_offload_*.mmap"
STALE_S: Final = 120.0
"""Minimum age of a stale pool. A younger pool that no process here maps may belong to an engine
that is starting in another PID namespace. vLLM's ranks wait 30 s for one another there."""


def find_stale_pools(folder: Path = FOLDER, proc: Path = Path("/proc")) -> list[Path]:
    """Pools of this user that no process maps and that are older than `STALE_S`."""
    old = [path for path in folder.glob(NAMES) if _is_own_and_old(path)]
    if not old:
        return []
    mapped = _mapped_pools(proc)
    return sorted(path for path in old if str(path) not in mapped)


def remove_stale_pools(folder: Path = FOLDER, proc: Path = Path("/proc")) -> list[Path]:
    """Remove the stale pools and return them. A pool that cannot be removed is logged."""
    removed = []
    for path in find_stale_pools(folder, proc):
        try:
            size = path.stat().st_size
            path.unlink()
        except OSError as error:
            log.warning("cannot remove the stale host pool %s: %s", path, error.strerror)
            continue
        log.warning(
            "removed the stale host pool %s (%d bytes) of an engine that has ended", path, size
        )
        removed.append(path)
    return removed


def _is_own_and_old(path: Path) -> bool:
    try:
        status = path.stat()
    except OSError:
        return False  # its engine has just removed it
    age_s = time.time() - status.st_mtime
    return status.st_uid == os.getuid() and age_s > STALE_S


def _mapped_pools(proc: Path) -> set[str]:
    """Paths of the host pools that some process maps."""
    found = set()
    for maps in proc.glob("[0-9]*/maps"):
        try:
            text = maps.read_text(errors="replace")
        except OSError:
            continue  # the process has ended, or belongs to another user
        for line in text.splitlines():
            if "vllm_offload_" in line:
                found.add(line.split(maxsplit=5)[-1].removesuffix(" (deleted)"))
    return found
