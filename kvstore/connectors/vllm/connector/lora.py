"""Identifies the weights of a LoRA adapter by a salt in the hashes of its blocks.

vLLM's hashes contain the name and folder of an adapter. Both stay the same when the folder's files
are replaced, and stored blocks outlive the engine. So the salt contains a fingerprint of the files.

vLLM does not report when it reads an adapter. There are three cases:

- The files are older than the engine's start: the engine has read these, and all engines share the
  blocks.
- The files are newer: they may have been replaced between vLLM's read and the first request. Only
  this run of the engine uses the blocks.
- The files change after a request has used them: it is unknown which of them the engine has read,
  so requests of the adapter do not use the store.

A folder may be on shared storage, which may hang, so a separate thread reads it.
"""

from __future__ import annotations

import enum
import hashlib
import logging
import os
import stat
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Protocol, TypeAlias

from kvstore.connectors.common.weights_digest import WEIGHT_FILES, fingerprint

log = logging.getLogger("vllm.kvstore")

SNAPSHOT_WAIT_S: Final = 0.005
"""How long a step waits for the snapshot of a folder. It takes 0.1 ms on a local disk, except
the first one, which reads all bytes of the adapter."""
CLOCK_SKEW_S: Final = 0.1
"""Minimum difference between the times of the files and of the engine's start: file times are
coarse, and a file server has another clock."""
ADAPTERS_MAX: Final = 16384
"""Maximum number of tracked adapters. Requests of further ones do not use the store."""
FILES_MAX: Final = 64
"""Maximum number of files in an adapter's folder. A folder with more is not an adapter's."""

FolderState: TypeAlias = tuple[object, ...]
"""Attributes of a folder that change when its files do."""


class LoRARequest(Protocol):
    """Attributes of vLLM's LoRA request that are read here."""

    lora_int_id: int
    lora_path: str
    load_inplace: bool


class Trust(enum.Enum):
    """KNOWN: the salt identifies the weights. READING: call again in the next step. UNSURE: no
    block may be loaded or saved."""

    KNOWN = "known"
    READING = "reading"
    UNSURE = "unsure"


@dataclass(frozen=True)
class FolderSnapshot:
    """A folder at one time. weights: its fingerprint, if requested."""

    state: FolderState
    newest_s: float
    weights: str = ""


@dataclass(eq=False, slots=True)
class Adapter:
    """One adapter id in this run of the engine. first: snapshot of its files at the first use."""

    path: str
    first: FolderSnapshot | None = None
    pending: Future[FolderSnapshot] | None = None
    unsure_reason: str = ""
    salt: bytes = b""


class Adapters:
    """The adapters of one engine, created at its start. Only the scheduler's thread calls it."""

    def __init__(self, clock: Callable[[], float] = time.time) -> None:
        self._started_s = clock()
        self._run_id = os.urandom(16)
        self._adapters: dict[int, Adapter] = {}
        self._this_step: dict[int, tuple[Trust, bytes]] = {}
        self._snapshots = ThreadPoolExecutor(1, thread_name_prefix="kvstore-adapters")

    def salt(self, lora: LoRARequest | None) -> tuple[Trust, bytes]:
        """The salt that distinguishes this adapter's blocks from those of other weights of the same
        name; empty for the model itself. Valid for this step: vLLM may read the files again later.
        """
        if lora is None:
            return Trust.KNOWN, b""
        number = lora.lora_int_id
        if number not in self._this_step:
            self._this_step[number] = self._trust_of(lora)
        return self._this_step[number]

    def end_step(self) -> None:
        """End a step: the salts are checked again in the next one."""
        self._this_step.clear()

    def close(self) -> None:
        """End the thread when it has finished its snapshot."""
        self._snapshots.shutdown(wait=False, cancel_futures=True)

    def _trust_of(self, lora: LoRARequest) -> tuple[Trust, bytes]:
        adapter = self._adapters.get(lora.lora_int_id)
        if adapter is None:
            if len(self._adapters) >= ADAPTERS_MAX:
                return Trust.UNSURE, b""
            adapter = self._adapters[lora.lora_int_id] = Adapter(lora.lora_path)
        if lora.load_inplace:
            self._mark_unsure(adapter, "it is loaded in place")
        elif adapter.path != lora.lora_path:
            self._mark_unsure(adapter, f"{lora.lora_path} has the same id")
        if adapter.unsure_reason:
            return Trust.UNSURE, b""
        if adapter.pending is not None:
            # The snapshot that an earlier step started is too old for this one: take another.
            trust = self._check_folder(adapter, lora.lora_int_id)
            if trust is not Trust.KNOWN:
                return trust, b""
        return self._check_folder(adapter, lora.lora_int_id), adapter.salt

    def _check_folder(self, adapter: Adapter, number: int) -> Trust:
        if adapter.pending is None:
            known = adapter.first is not None
            adapter.pending = self._snapshots.submit(take_snapshot, adapter.path, weights=not known)
        wait([adapter.pending], SNAPSHOT_WAIT_S)
        if not adapter.pending.done():
            return Trust.READING
        ended, adapter.pending = adapter.pending, None
        try:
            snapshot = ended.result()
        except (OSError, ValueError, RuntimeError) as error:
            if adapter.first is not None:
                self._mark_unsure(adapter, f"its files cannot be read any more: {error}")
            return Trust.UNSURE
        if adapter.first is None:
            adapter.first = snapshot
            shared = snapshot.newest_s < self._started_s - CLOCK_SKEW_S
            own = b"" if shared else self._run_id + number.to_bytes(8, "big")
            adapter.salt = hashlib.sha256(snapshot.weights.encode() + own).digest()
        elif snapshot.state != adapter.first.state:
            self._mark_unsure(adapter, "its files have changed since it was first used")
            return Trust.UNSURE
        return Trust.KNOWN

    def _mark_unsure(self, adapter: Adapter, why: str) -> None:
        if not adapter.unsure_reason:
            log.warning(
                "kvstore: the LoRA adapter of %s does not use the store until it is loaded under "
                "another id: %s",
                adapter.path,
                why,
            )
        adapter.unsure_reason = why


def take_snapshot(path: str, *, weights: bool) -> FolderSnapshot:
    """Take a snapshot of an adapter's folder. weights: with its fingerprint.

    Raises OSError, ValueError, RuntimeError: not an adapter's folder, or it is being written.
    """
    folder = resolved(path)
    state, newest_s = state_of(folder)
    if not weights:
        return FolderSnapshot(state, newest_s)
    digest = hashlib.sha256((folder / "adapter_config.json").read_bytes())
    digest.update(fingerprint(folder).encode())
    if resolved(path) != folder or state_of(folder)[0] != state:
        raise ValueError(f"{path} has changed while it was read")
    return FolderSnapshot(state, newest_s, digest.hexdigest())


def resolved(path: str) -> Path:
    """The folder from which vLLM reads this adapter; of a hub's name, the local copy.

    Raises OSError, ValueError, RuntimeError: no such folder.
    """
    folder = Path(path).expanduser()
    if not folder.is_absolute() and not folder.exists():
        try:
            from huggingface_hub import snapshot_download
        except ImportError as error:
            raise ValueError(
                f"{path} is not a folder, and huggingface_hub is not installed"
            ) from error
        folder = Path(snapshot_download(path, local_files_only=True))
    return folder.absolute()


def state_of(folder: Path) -> tuple[FolderState, float]:
    """Attributes that change when a file of the folder is written, replaced or linked elsewhere,
    and the time of the last such change.

    Raises ValueError, OSError: not a folder, or it has no weights.
    """
    # ctime, not mtime: no program can set it.
    links = [each for each in (folder, *folder.parents) if each.is_symlink()]
    state: list[tuple[object, ...]] = [(str(folder.resolve()),)]
    times = [folder.stat().st_ctime]
    for link in links:
        times.append(link.lstat().st_ctime)
        state.append((str(link), times[-1]))
    entries = sorted(folder.iterdir())
    if len(entries) > FILES_MAX or not any(each.name.endswith(WEIGHT_FILES) for each in entries):
        raise ValueError(f"{folder} is not the folder of an adapter")
    for entry in entries:
        status = entry.stat()
        if stat.S_ISREG(status.st_mode):
            times += [status.st_ctime, entry.lstat().st_ctime]
            state.append((entry.name, status.st_size, status.st_ino, status.st_ctime_ns))
    return tuple(state), max(times)
