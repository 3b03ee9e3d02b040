"""Identifies the weights in a folder: engines with different weights must not share blocks.

A local folder has no commit, and its files may be replaced or changed in place, so a fingerprint of
all bytes stands in for the commit. A commit of the hub identifies weights only if the local copy
is that commit's: the hub names files by digests, and the local bytes are compared with them.

The engine has loaded the weights before a connector is made. So files that have changed since the
engine's start may not be those that it loaded.
"""

from __future__ import annotations

import hashlib
import importlib
import logging
import os
import re
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from kvstore.connectors.common.engine_start import boot_clock_s, engine_start_s
from kvstore.connectors.common.file_digests import (
    GIT_SHA1,
    SHA256,
    FileChanged,
    digest_files,
)
from kvstore.errors import ConfigError

log = logging.getLogger(__name__)

WEIGHT_FILES: Final = (".safetensors", ".gguf", ".bin", ".pt", ".pth")
READING_FILES: Final = (".index.json", ".py", "quantize_config.json", "quant_config.json")
"""Ends of the names of other files that determine which weights an engine uses, and how."""
FILE_FORMATS: Final = (
    "auto",
    "hf",
    "safetensors",
    "pt",
    "mistral",
    "gguf",
    "bitsandbytes",
    "sharded_state",
    "layered",
    "fastsafetensors",
    "instanttensor",
    "runai_streamer",
    "runai_streamer_sharded",
)
"""Load formats of vLLM and SGLang that read the files of the model's folder at the engine's start.
Others take weights from a process, an object store, or a copy in another format."""
CLOCK_SKEW_S: Final = 0.1
"""File times are coarse: files that changed within this time before the engine's start count as
changed after it."""
DIGITS: Final = 32
UNSHARED: Final = "unshared"
_COMMIT: Final = re.compile(r"[0-9a-f]{40}")
_ALGORITHMS: Final = {64: SHA256, 40: GIT_SHA1}
"""Algorithm of a file's name in the hub's cache, by the length of the name."""


def has_weights(path: Path) -> bool:
    """True if this is a weight file or a folder that contains one. A fingerprint of anything else
    means nothing."""
    files = path.iterdir() if path.is_dir() else [path]
    return any(file.name.endswith(WEIGHT_FILES) for file in files)


def is_commit(revision: str) -> bool:
    """True for a whole commit. Branches and tags move."""
    return _COMMIT.fullmatch(revision) is not None


def fingerprint(path: Path, others: Sequence[str] = ()) -> str:
    """32 hex digits over the names, sizes and all bytes of the weight files of a path, and of the
    files that determine how they are read. others: names of more files.

    Raises:
        FileChanged: a file was changed meanwhile.
        OSError: a file cannot be read.
    """
    files = _files_of(path, others)
    found = _combine(files, digest_files(files).digests) if files else _combine([], [])
    if _files_of(path, others) != files:
        raise FileChanged(f"files of {path} were added or removed while they were read")
    return found


def loaded_weights_id(path: Path, others: Sequence[str] = ()) -> str:
    """Identity of the weights that this engine has loaded from a folder or file: the fingerprint.
    If they may have changed since the engine's start, it is a random one, so that no other engine
    shares blocks with this one.

    Raises:
        ConfigError: a file cannot be read.
    """
    try:
        found = fingerprint(path, others)
        changed = _changed_since_start(path, others)
    except FileChanged as error:
        return _unshared(str(error))
    except OSError as error:
        raise ConfigError(f"cannot read weights {error.filename!r}: {error.strerror}") from error
    return _unshared(f"{changed} has changed since this engine's start") if changed else found


def loaded_commit_id(
    repository: str, commit: str, download_dir: str | None = None, others: Sequence[str] = ()
) -> str:
    """Identity of the weights that this engine has loaded from the hub: 16 digits of the commit if
    the local files are the commit's, or if this machine has no copy; else as `loaded_weights_id`.

    download_dir: the hub's cache. None: the default one.

    Raises:
        ConfigError: a file cannot be read.
    """
    folder = _snapshot(repository, commit, download_dir)
    if folder is None or not has_weights(folder):
        return commit[:16]
    try:
        edited = _edited_file(_files_of(folder, others))
    except FileChanged as error:
        return _unshared(str(error))
    except OSError as error:
        raise ConfigError(f"cannot read weights {error.filename!r}: {error.strerror}") from error
    if edited is None:
        return commit[:16]
    log.warning("kvstore: %s is not the file of commit %s", edited, commit)
    return loaded_weights_id(folder, others)


def _files_of(path: Path, others: Sequence[str]) -> list[Path]:
    """Regular files and links to such, in order."""
    ends = (*WEIGHT_FILES, *READING_FILES)
    if path.is_file():
        return [path]
    found = (each for each in path.iterdir() if each.name.endswith(ends) or each.name in others)
    return sorted(each for each in found if each.is_file())


def _combine(files: Sequence[Path], digests: Sequence[str]) -> str:
    combined = hashlib.sha256()
    for file, digest in zip(files, digests, strict=True):
        combined.update(f"{file.name}:{digest};".encode())
    return combined.hexdigest()[:DIGITS]


def _edited_file(files: Sequence[Path]) -> Path | None:
    """The first file of a snapshot whose bytes do not have the digest that is its name in the hub's
    cache. None: all have the commit's bytes.

    Raises FileChanged, OSError: as `fingerprint`.
    """
    by_algorithm: dict[str, list[tuple[Path, str]]] = {}
    for file in files:
        # The target is blobs/DIGEST, which may be a link to a store of several repositories.
        target = Path(os.readlink(file)) if file.is_symlink() else file
        algorithm = _ALGORITHMS.get(len(target.name)) if target.parent.name == "blobs" else None
        if algorithm is None:
            return file  # not a link into the cache: its name tells nothing
        by_algorithm.setdefault(algorithm, []).append((file, target.name))
    for algorithm, named in by_algorithm.items():
        digests = digest_files([file for file, _ in named], algorithm).digests
        for (file, name), digest in zip(named, digests, strict=True):
            if digest != name:
                return file
    return None


def _snapshot(repository: str, commit: str, download_dir: str | None) -> Path | None:
    """The folder of a commit in the hub's cache. None: there is no copy on this machine."""
    try:
        hub = importlib.import_module("huggingface_hub")
        found = hub.snapshot_download(
            repository, revision=commit, cache_dir=download_dir, local_files_only=True
        )
    except (ImportError, ValueError, OSError) as error:  # no such library, name or copy
        found = getattr(error, "snapshot_path", None)  # a copy of some files
    return None if found is None else Path(found)


def _changed_since_start(path: Path, others: Sequence[str]) -> Path | None:
    """A file, link or folder that changed after this engine's start. None: all are older, or the
    start is unknown.

    Raises OSError: a file cannot be read any more.
    """
    start_s = engine_start_s()
    if start_s is None:
        return None
    newest_s = time.time() - (boot_clock_s() - start_s) - CLOCK_SKEW_S
    # A folder's change time tells that it was renamed, and that a file in it was.
    followed = [path, *_files_of(path, others)]
    links = [each for each in (*followed, *path.absolute().parents) if each.is_symlink()]
    statuses = [(each, each.stat()) for each in followed] + [(each, each.lstat()) for each in links]
    for each, status in statuses:
        if status.st_ctime >= newest_s:
            return each
    return None


def _unshared(reason: str) -> str:
    log.warning(
        "kvstore: no other engine shares this engine's blocks, and they are not found after its "
        "restart: %s",
        reason,
    )
    return f"{UNSHARED}-{os.urandom(16).hex()}"
