"""Runs one step of a batch: paged KV pool, page tables, adapters.

The runner has no request state. It computes the rows and trusts their page tables. The scheduler
owns the pages.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from kvstore.engine.attention import AttentionPlan, StepRow
from kvstore.engine.hooks import LayerArrival
from kvstore.engine.loader import LoadedModel
from kvstore.engine.lora import LoraAdapter, LoraSlice
from kvstore.errors import ConfigError

__all__ = ["Runner", "StepRow"]


class Runner:
    """One model and its pool on one device. One thread calls it at a time.

    pool: [layers, 2, num_pages, page_tokens, kv_heads, head_dim], contiguous, in the model's dtype.
    """

    def __init__(
        self, loaded: LoadedModel, num_pages: int, page_tokens: int, *, threads: int | None = None
    ) -> None:
        """threads: torch's CPU threads for the whole process. None: no change.

        Raises:
            ConfigError: a size is not positive, or the pool does not fit into memory.
        """
        for name, value in (("num_pages", num_pages), ("page_tokens", page_tokens)):
            if value < 1:
                raise ConfigError(f"{name} must be at least 1 (got {value})")
        if threads is not None:
            if threads < 1:
                raise ConfigError(f"threads must be at least 1 (got {threads})")
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
                f"which {self.model.device} does not have; reduce num_pages"
            ) from error
        self._adapters: dict[str, LoraAdapter] = {}
        self._arriving: list[Sequence[LayerArrival]] = []

    def add_lora(self, name: str, adapter: LoraAdapter) -> None:
        """Add an adapter that rows can name.

        Raises:
            ConfigError: the name is empty or in use.
        """
        if not name:
            raise ConfigError("the name of a LoRA adapter must not be empty")
        if name in self._adapters:
            raise ConfigError(f"LoRA adapter {name!r} is already loaded; use another name")
        self._adapters[name] = adapter.to(self.model.device, self.model.dtype)

    @property
    def loras(self) -> dict[str, LoraAdapter]:
        """Adapters that rows can name."""
        return dict(self._adapters)

    def expect(self, layers: Sequence[LayerArrival]) -> None:
        """Make layer i of the next step run after layers[i], a load in progress into the pool."""
        assert len(layers) == self.loaded.config.layers, f"{len(layers)} layers arrive"
        self._arriving.append(layers)

    def step(self, rows: Sequence[StepRow]) -> torch.Tensor:
        """Compute the rows' new tokens and write their K and V into their pages.

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
                self._lora_slices(rows),
            )

    def _check(self, row: StepRow) -> None:
        """Assert that a row is valid. The scheduler makes the rows."""
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

    def _lora_slices(self, rows: Sequence[StepRow]) -> list[LoraSlice]:
        """Return a slice per sequence of rows with the same adapter. Rows without one are left
        out."""
        slices: list[LoraSlice] = []
        first = 0
        last_name = ""
        for row in rows:
            end = first + len(row.tokens)
            if row.lora and row.lora == last_name:
                slices[-1].end = end
            elif row.lora:
                slices.append(LoraSlice(self._adapters[row.lora], first, end))
            last_name = row.lora
            first = end
        return slices
