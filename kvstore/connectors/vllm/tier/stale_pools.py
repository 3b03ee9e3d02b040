"""Host pools that killed engines left behind.

vLLM's tiering keeps its host pool in /dev/shm/vllm_offload_<engine>.mmap and removes the name when
the engine ends; a killed engine leaves it, and with it its gigabytes, until the machine restarts.
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
"""Age below which a pool is left alone though nobody here maps it: an engine in another process
namespace may just be starting, and its ranks find the pool by this name. vLLM's ranks wait 30 s
for one another there."""


def abandoned(folder: Path = FOLDER, proc: Path = Path("/proc")) -> list[Path]:
    """Pools of this user that no process maps, old enough to be nobody's."""
    old = [path for path in folder.glob(NAMES) if _is_ours_and_old(path)]
    if not old:
        return []
    mapped = _mapped(proc)
    return sorted(path for path in old if str(path) not in mapped)


def remove_abandoned(folder: Path = FOLDER, proc: Path = Path("/proc")) -> list[Path]:
    """Remove them; those that were. A pool that cannot be removed is left, and logged."""
    removed = []
    for path in abandoned(folder, proc):
        try:
            size = path.stat().st_size
            path.unlink()
        except OSError as error:
            log.warning("cannot remove the abandoned host pool %s: %s", path, error.strerror)
            continue
        log.warning("removed the host pool %s (%d bytes) of an engine that is gone", path, size)
        removed.append(path)
    return removed


def _is_ours_and_old(path: Path) -> bool:
    try:
        status = path.stat()
    except OSError:
        return False  # its engine has just removed it
    age_s = time.time() - status.st_mtime
    return status.st_uid == os.getuid() and age_s > STALE_S


def _mapped(proc: Path) -> set[str]:
    """Names of host pools that some process maps."""
    found = set()
    for maps in proc.glob("[0-9]*/maps"):
        try:
            text = maps.read_text(errors="replace")
        except OSError:
            continue  # it has ended, or is another user's, whose pools are not ours
        for line in text.splitlines():
            if "vllm_offload_" in line:
                found.add(line.split(maxsplit=5)[-1].removesuffix(" (deleted)"))
    return found
