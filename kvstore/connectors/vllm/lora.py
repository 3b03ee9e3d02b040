"""Which weights a LoRA adapter has, as bytes that enter the names of its blocks.

vLLM's hashes know an adapter by its name and folder. Both stay when the folder's files are
replaced, and blocks in a store outlive the engine that computed them: here the files' fingerprint
is told apart too.

vLLM never says when it reads an adapter, so what an engine computes with is known for sure only
while the files are those from before its start: then every engine may share the blocks. Files
that came later may have been replaced between vLLM's reading and the first request: their blocks
are for this run of the engine alone. Files that change once a request has used them end it: which
of the two the engine has, nobody can say, and its requests go without the store.

A folder may lie on shared storage, which may hang: it is looked at on a thread of its own.
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

LOOK_WAIT_S: Final = 0.005
"""How long a step waits for a look at a folder: 0.1 ms on a local disk."""
CLOCKS_S: Final = 0.1
"""Files must be that much older than the engine: times of files are coarse, and a file server's
clock is not ours."""
ADAPTERS_MAX: Final = 16384
"""Adapters known; requests of further ones go without the store."""
FILES_MAX: Final = 64
"""Files of an adapter's folder; one with more is none."""

State: TypeAlias = tuple[object, ...]
"""Whatever of a folder changes when its files do."""


class LoRARequest(Protocol):
    """What is read of vLLM's."""

    lora_int_id: int
    lora_path: str
    load_inplace: bool


class Trust(enum.Enum):
    """KNOWN: the blocks' names say which weights they are of. READING: ask again next step.
    UNSURE: nothing must be loaded or saved."""

    KNOWN = "known"
    READING = "reading"
    UNSURE = "unsure"


@dataclass(frozen=True)
class Look:
    """A folder as it was found. weights: its fingerprint, where that was asked for."""

    state: State
    newest_s: float
    weights: str = ""


@dataclass(eq=False, slots=True)
class Adapter:
    """One id of an adapter in this run of the engine. first: how its files were when first used."""

    path: str
    first: Look | None = None
    looking: Future[Look] | None = None
    unsure: str = ""
    salt: bytes = b""


class Adapters:
    """Of one engine, made at its start. Every call comes from the scheduler's thread."""

    def __init__(self, clock: Callable[[], float] = time.time) -> None:
        self._started_s = clock()
        self._run = os.urandom(16)
        self._known: dict[int, Adapter] = {}
        self._this_step: dict[int, tuple[Trust, bytes]] = {}
        self._looks = ThreadPoolExecutor(1, thread_name_prefix="kvstore-adapters")

    def salt(self, lora: LoRARequest | None) -> tuple[Trust, bytes]:
        """What tells this adapter's blocks from others' of its name; none for the model itself.
        Holds for this step: between steps vLLM may read the files again."""
        if lora is None:
            return Trust.KNOWN, b""
        number = lora.lora_int_id
        if number not in self._this_step:
            self._this_step[number] = self._judge(lora)
        return self._this_step[number]

    def stepped(self) -> None:
        """A step has ended."""
        self._this_step.clear()

    def close(self) -> None:
        """End the thread once it is back."""
        self._looks.shutdown(wait=False, cancel_futures=True)

    def _judge(self, lora: LoRARequest) -> tuple[Trust, bytes]:
        adapter = self._known.get(lora.lora_int_id)
        if adapter is None:
            if len(self._known) >= ADAPTERS_MAX:
                return Trust.UNSURE, b""
            adapter = self._known[lora.lora_int_id] = Adapter(lora.lora_path)
        if lora.load_inplace:
            self._give_up(adapter, "it is loaded in place")
        elif adapter.path != lora.lora_path:
            self._give_up(adapter, f"its id is {lora.lora_path}'s as well")
        if adapter.unsure:
            return Trust.UNSURE, b""
        if adapter.looking is not None:
            # What an earlier step asked for says nothing of this one; the next look does.
            trust = self._look(adapter, lora.lora_int_id)
            if trust is not Trust.KNOWN:
                return trust, b""
        return self._look(adapter, lora.lora_int_id), adapter.salt

    def _look(self, adapter: Adapter, number: int) -> Trust:
        if adapter.looking is None:
            known = adapter.first is not None
            adapter.looking = self._looks.submit(look_at, adapter.path, weights=not known)
        wait([adapter.looking], LOOK_WAIT_S)
        if not adapter.looking.done():
            return Trust.READING
        looked, adapter.looking = adapter.looking, None
        try:
            found = looked.result()
        except (OSError, ValueError, RuntimeError) as error:
            if adapter.first is not None:
                self._give_up(adapter, f"its files cannot be read any more: {error}")
            return Trust.UNSURE
        if adapter.first is None:
            adapter.first = found
            shared = found.newest_s < self._started_s - CLOCKS_S
            own = b"" if shared else self._run + number.to_bytes(8, "big")
            adapter.salt = hashlib.sha256(found.weights.encode() + own).digest()
        elif found.state != adapter.first.state:
            self._give_up(adapter, "its files have changed since it was first used")
            return Trust.UNSURE
        return Trust.KNOWN

    def _give_up(self, adapter: Adapter, why: str) -> None:
        if not adapter.unsure:
            log.warning(
                "kvstore: the LoRA adapter of %s goes without the store until it is loaded under "
                "another id: %s",
                adapter.path,
                why,
            )
        adapter.unsure = why


def look_at(path: str, *, weights: bool) -> Look:
    """An adapter's folder as it is now. weights: with its fingerprint.

    Raises OSError, ValueError, RuntimeError: it is no folder of an adapter, or is being written.
    """
    folder = resolved(path)
    state, newest_s = state_of(folder)
    if not weights:
        return Look(state, newest_s)
    digest = hashlib.sha256((folder / "adapter_config.json").read_bytes())
    digest.update(fingerprint(folder).encode())
    if resolved(path) != folder or state_of(folder)[0] != state:
        raise ValueError(f"{path} changes while it is read")
    return Look(state, newest_s, digest.hexdigest())


def resolved(path: str) -> Path:
    """Where vLLM reads this adapter: a folder, or the hub's copy here.

    Raises OSError, ValueError, RuntimeError: no such place.
    """
    folder = Path(path).expanduser()
    if not folder.is_absolute() and not folder.exists():
        try:
            from huggingface_hub import snapshot_download
        except ImportError as error:
            raise ValueError(f"{path} is no folder, and there is no hub here") from error
        folder = Path(snapshot_download(path, local_files_only=True))
    return folder.absolute()


def state_of(folder: Path) -> tuple[State, float]:
    """What changes when a file of the folder is written, replaced, or led to by another link; and
    when that was last so.

    Raises ValueError, OSError: it has no weights, or is no folder.
    """
    # The times of change of inodes: unlike those of contents, no program sets them.
    links = [each for each in (folder, *folder.parents) if each.is_symlink()]
    found: list[tuple[object, ...]] = [(str(folder.resolve()),)]
    times = [folder.stat().st_ctime]
    for link in links:
        times.append(link.lstat().st_ctime)
        found.append((str(link), times[-1]))
    entries = sorted(folder.iterdir())
    if len(entries) > FILES_MAX or not any(each.name.endswith(WEIGHT_FILES) for each in entries):
        raise ValueError(f"{folder} is no folder of an adapter")
    for entry in entries:
        about = entry.stat()
        if stat.S_ISREG(about.st_mode):
            times += [about.st_ctime, entry.lstat().st_ctime]
            found.append((entry.name, about.st_size, about.st_ino, about.st_ctime_ns))
    return tuple(found), max(times)
