"""Measures the error of int8 storage on a sample of the gathered blocks."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any, Final

import torch

from kvstore.kernels.formats import BlockFormat
from kvstore.kernels.layout import PoolLayout
from kvstore.kernels.quantise import QuantisationError, error_of
from kvstore.kernels.torch_copier import HostCopier

SAMPLE_EVERY: Final = 64
"""One gather out of this many is measured, by its first block. The first gather is."""


def block_error(
    pool: PoolLayout, form: BlockFormat, pages: Sequence[int], slot: memoryview
) -> QuantisationError:
    """Return the error of one block in a slot, compared with its unchanged pages."""
    before = [sheet[list(pages)].cpu() for sheet in pool.sheets]
    after = PoolLayout(tuple(torch.zeros_like(sheet) for sheet in before), pool.parts)
    HostCopier(after, form).scatter([list(range(len(pages)))], [slot])
    return error_of(torch.stack(before), torch.stack(after.sheets))


class ErrorMeter:
    """Samples the error of gathered blocks. `sample` in the copier's thread, `stats` in any."""

    def __init__(self, pool: PoolLayout, form: BlockFormat) -> None:
        self._pool = pool
        self._form = form
        self._lock = threading.Lock()
        self._gathers = 0
        self._errors = 0
        self._max_abs = 0.0
        self._relative_rms = 0.0

    def sample(self, pages: Sequence[Sequence[int]], slots: Sequence[memoryview]) -> None:
        """Measure a gather if it is in the sample. Call it before the pages can change."""
        self._gathers += 1
        whole = [index for index, row in enumerate(pages) if min(row) >= 0]
        if self._gathers % SAMPLE_EVERY != 1 or not whole:
            return
        error = block_error(self._pool, self._form, pages[whole[0]], slots[whole[0]])
        with self._lock:
            self._errors += 1
            self._max_abs = max(self._max_abs, error.max_abs)
            self._relative_rms = max(self._relative_rms, error.relative_rms)

    def stats(self) -> dict[str, Any]:
        """Return the maximum error so far."""
        with self._lock:
            return {
                "blocks_sampled": self._errors,
                "max_abs": self._max_abs,
                "relative_rms": self._relative_rms,
            }
