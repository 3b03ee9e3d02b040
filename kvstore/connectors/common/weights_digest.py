"""Which weights a folder holds, as a word: two that differ must not share blocks.

A local folder has no commit, and the same path may hold other weights tomorrow: a fingerprint of
its files takes the commit's place. Reading gigabytes is out of the question at an engine's start;
weights that differ anywhere do so nearly everywhere, so samples of each file are enough, and the
metadata of the files (size, names) come for nothing.
"""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Final

SAMPLE_BYTES: Final = 64 << 10
SAMPLES: Final = 32
"""Samples of each file, evenly spread, the first and the last bytes among them."""
WEIGHT_FILES: Final = (".safetensors", ".gguf", ".bin", ".pt", ".pth")


def has_weights(path: Path) -> bool:
    """Whether this is a file of weights, or a folder with any in it: else a fingerprint is of
    nothing."""
    files = path.iterdir() if path.is_dir() else [path]
    return any(file.name.endswith(WEIGHT_FILES) for file in files)


def fingerprint(path: Path) -> str:
    """16 hex digits: names, sizes and samples of the files of weights in a folder (or of one)."""
    files = [path] if path.is_file() else sorted(path.iterdir())
    digest = hashlib.sha256()
    for file in files:
        if not file.name.endswith(WEIGHT_FILES):
            continue
        size = file.stat().st_size
        digest.update(f"{file.name}:{size};".encode())
        last = max(0, size - SAMPLE_BYTES)
        with file.open("rb") as opened:
            for start in sorted({last * number // (SAMPLES - 1) for number in range(SAMPLES)}):
                opened.seek(start)
                digest.update(opened.read(SAMPLE_BYTES))
    return digest.hexdigest()[:16]
