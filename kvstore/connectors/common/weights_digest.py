"""A fingerprint of the weights in a folder: engines with different weights must not share blocks.

A local folder has no commit, and its files may be replaced, so a fingerprint of the files stands in
for the commit. An engine cannot read gigabytes at its start. Different weights differ nearly
everywhere, so the fingerprint covers names, sizes and samples of the files.
"""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Final

SAMPLE_BYTES: Final = 64 << 10
SAMPLES: Final = 32
"""Number of samples of each file, evenly spread from its first to its last bytes."""
WEIGHT_FILES: Final = (".safetensors", ".gguf", ".bin", ".pt", ".pth")


def has_weights(path: Path) -> bool:
    """True if this is a weight file or a folder that contains one. A fingerprint of anything else
    means nothing."""
    files = path.iterdir() if path.is_dir() else [path]
    return any(file.name.endswith(WEIGHT_FILES) for file in files)


def fingerprint(path: Path) -> str:
    """16 hex digits over the names, sizes and samples of all weight files of a path."""
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
