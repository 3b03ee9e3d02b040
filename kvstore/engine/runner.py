"""Runs one step of a batch: the paged KV pool, the page tables, the adapters.

The runner keeps no request state. It computes what rows ask for and trusts their page tables; who
owns which page is the scheduler's business.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from kvstore.engine.attention import AttentionPlan, StepRow
from kvstore.engine.hooks import LayerArrival
from kvstore.engine.loader import LoadedModel
from kvstore.engine.lora import LoraAdapter, LoraSegment
from kvstore.errors import ConfigError

__all__ = ["Runner", "StepRow"]


class Runner:
    """One model and its pool on one device. One thread at a time calls it.

    pool: [layers, 2, num_pages, page_tokens, kv_heads, head_dim], contiguous, in the model's dtype.
    """

    def __init__(
        self, loaded: LoadedModel, num_pages: int, page_tokens: int, *, threads: int | None = None
    ) -> None:
        """threads: torch's CPU threads for the whole process; None leaves them as they are.

        Raises:
            ConfigError: a size that is not positive, or a pool that does not fit in memory.
        """
        for name, value in (("num_pages", num_pages), ("page_tokens", page_tokens)):
            if value < 1:
                raise ConfigError(f"{name} is {value}; it must be at least 1")
        if threads is not None:
            if threads < 1:
                raise ConfigError(f"threads is {threads}; it must be at least 1")
            torch.set_num_threads(threads)
        self.loaded = loaded
        self.model = loaded.model
        self.num_pages = num_pages
        self.page_tokens = page_tokens
        config = loaded.config
        shape = (config.layers, 2, num_pages, page_tokens, config.kv_heads, config.head_dim)
        try:
            self.pool = torch.zeros(shape, dtype=self.model.dtype, device=self.model.device)
        except (RuntimeError, MemoryError) as error:
            nbytes = int(np.prod(shape)) * self.model.dtype.itemsize
            raise ConfigError(
                f"a KV pool of {num_pages} pages of {page_tokens} tokens needs {nbytes:,} bytes, "
                f"which {self.model.device} does not have; fewer num_pages would be right"
            ) from error
        self._adapters: dict[str, LoraAdapter] = {}
        self._arriving: list[Sequence[LayerArrival]] = []

    def add_lora(self, name: str, adapter: LoraAdapter) -> None:
        """Let rows name this adapter.

        Raises:
            ConfigError: the name is empty or already stands for another adapter.
        """
        if not name:
            raise ConfigError("a LoRA adapter needs a name; '' means no adapter")
        if name in self._adapters:
            raise ConfigError(f"LoRA adapter {name!r} is already loaded; another name is needed")
        self._adapters[name] = adapter.to(self.model.device, self.model.dtype)

    @property
    def loras(self) -> dict[str, LoraAdapter]:
        """The adapters rows may name."""
        return dict(self._adapters)

    def expect(self, layers: Sequence[LayerArrival]) -> None:
        """KV on its way into the pool, layer by layer: the next step's layer i runs after it."""
        assert len(layers) == self.loaded.config.layers, f"{len(layers)} layers arrive"
        self._arriving.append(layers)

    def step(self, rows: Sequence[StepRow]) -> torch.Tensor:
        """Compute the rows' new tokens: their K and V into their pages.

        Returns: [len(rows), vocab] float32, the logits of each row's last token, on the device.
        """
        config = self.loaded.config
        assert rows, "a step without rows"
        for row in rows:
            self._check(row)
        with torch.no_grad():
            arriving, self._arriving = self._arriving, []
            plan = AttentionPlan(
                rows, self.page_tokens, self.model.dtype, self.model.device, arriving
            )
            ids = np.concatenate([row.tokens for row in rows]).astype(np.int64)
            assert ids.min() >= 0, "token id below 0"
            assert ids.max() < config.vocab, "token id outside the vocabulary"
            positions = np.concatenate(
                [np.arange(row.start, row.start + len(row.tokens)) for row in rows]
            )
            return self.model.forward(
                torch.from_numpy(ids).to(self.model.device),
                torch.from_numpy(positions).to(self.model.device),
                self.pool,
                plan,
                self._segments(rows),
            )

    def _check(self, row: StepRow) -> None:
        """A row that is wrong is the scheduler's mistake."""
        end = row.start + len(row.tokens)
        assert len(row.tokens) > 0, "a row without new tokens"
        assert row.start >= 0, row.start
        assert end <= self.loaded.config.max_positions, (end, self.loaded.config.max_positions)
        needed = -(-end // self.page_tokens)
        assert len(row.pages) >= needed, (len(row.pages), needed)
        used = row.pages[:needed]
        assert used.min() >= 0, "page id below 0"
        assert used.max() < self.num_pages, "page id outside the pool"
        assert not row.lora or row.lora in self._adapters, row.lora

    def _segments(self, rows: Sequence[StepRow]) -> list[LoraSegment]:
        """Consecutive rows of one adapter share a segment; rows without one are in none."""
        segments: list[LoraSegment] = []
        first = 0
        last_name = ""
        for row in rows:
            end = first + len(row.tokens)
            if row.lora and row.lora == last_name:
                segments[-1].end = end
            elif row.lora:
                segments.append(LoraSegment(self._adapters[row.lora], first, end))
            last_name = row.lora
            first = end
        return segments
