"""In-memory reference implementations of model and hooks: wrong pages give wrong tokens at once.

`FakeRunner` keeps one number per token instead of KV. Each number depends on the one before it,
read through the page table. The next token depends on all numbers of the prefix, also read through
the page table. So an engine that uses a page for the wrong prefix, reuses one too early or loads
the wrong block gets another token. `reference_tokens` computes the same tokens without pages.

`FakeHooks` keeps blocks in a dictionary by hash. It can answer late, shorten loads and lose blocks.
It also checks the engine's side of the interface: pages of a save do not change before `SaveDone`,
loads follow hits, and every request ends with exactly one abort.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from kvstore.engine.hooks import HookEvent, LoadDone, SaveDone
from kvstore.interface import HookMatch, LookupStatus

_MASK = (1 << 64) - 1
_POISON = 0xDEAD_BEEF_DEAD_BEEF


def _mix(*values: int) -> int:
    """Return 64 bits that depend on all values in order (splitmix64's finaliser, chained)."""
    state = 0x9E37_79B9_7F4A_7C15
    for value in values:
        state = (state ^ (value & _MASK)) * 0xBF58_476D_1CE4_E5B9 & _MASK
        state = (state ^ (state >> 27)) * 0x94D0_49BB_1331_11EB & _MASK
        state ^= state >> 31
    return state


def _kv(before: int, token: int, position: int, lora: str) -> int:
    """Return the number that replaces one token's KV."""
    return _mix(before, token, position, *lora.encode())


def _weight(position: int) -> int:
    return 2 * position + 1


def _next_token(total: int, vocab: int) -> int:
    return _mix(total) % vocab


def reference_tokens(
    prompt: Sequence[int], max_tokens: int, vocab: int, lora: str = ""
) -> list[int]:
    """Return the greedy tokens of a FakeRunner, without pages, cache or batch."""
    before = total = position = 0
    made: list[int] = []
    for token in prompt:
        before = _kv(before, token, position, lora)
        total = (total + before * _weight(position)) & _MASK
        position += 1
    while True:
        made.append(_next_token(total, vocab))
        if len(made) == max_tokens:
            return made
        before = _kv(before, made[-1], position, lora)
        total = (total + before * _weight(position)) & _MASK
        position += 1


@dataclass(frozen=True)
class FakeConfig:
    """The part of a model's config that the engine reads."""

    vocab: int = 97
    max_positions: int = 1 << 16
    eos_ids: tuple[int, ...] = ()


@dataclass(frozen=True)
class FakeLoaded:
    """The part of a loaded model that the engine reads."""

    config: FakeConfig = field(default_factory=FakeConfig)
    tokenizer: Any = None
    name: str = "fake"


@dataclass(frozen=True)
class FakeAdapter:
    digest: str


class FakeRunner:
    """A runner whose KV is one uint64 per token: pool [num_pages, page_tokens]."""

    def __init__(
        self, num_pages: int, page_tokens: int, vocab: int = 97, loras: Iterable[str] = ()
    ) -> None:
        self.pool: npt.NDArray[np.uint64] = np.full(
            (num_pages, page_tokens), _POISON, dtype=np.uint64
        )
        self.page_tokens = page_tokens
        self.vocab = vocab
        self.loras = {name: FakeAdapter(f"digest-of-{name}") for name in loras}
        self.rows_seen: list[list[tuple[int, int]]] = []
        """(start, tokens) of each row, per step."""

    def step(self, rows: Sequence[Any]) -> npt.NDArray[np.float32]:
        """Return logits [rows, vocab]: 1 for the next token, 0 elsewhere."""
        assert rows
        self.rows_seen.append([(row.start, len(row.tokens)) for row in rows])
        for row in rows:
            self._write(row)
        logits = np.zeros((len(rows), self.vocab), dtype=np.float32)
        for index, row in enumerate(rows):
            logits[index, self._read(row)] = 1.0
        return logits

    def _slot(self, row: Any, position: int) -> tuple[int, int]:
        page, offset = divmod(position, self.page_tokens)
        return int(row.pages[page]), offset

    def _write(self, row: Any) -> None:
        before = int(self.pool[self._slot(row, row.start - 1)]) if row.start else 0
        for position, token in enumerate(row.tokens.tolist(), start=row.start):
            before = _kv(before, token, position, row.lora)
            self.pool[self._slot(row, position)] = before

    def _read(self, row: Any) -> int:
        end = row.start + len(row.tokens)
        pages = row.pages[: -(-end // self.page_tokens)]
        values = self.pool[pages].reshape(-1)[:end]
        weights = 2 * np.arange(end, dtype=np.uint64) + np.uint64(1)
        return _next_token(int((values * weights).sum(dtype=np.uint64)), self.vocab)


class _Load(NamedTuple):
    pages: tuple[int, ...]
    hashes: tuple[bytes, ...]


class _Save(NamedTuple):
    pages: tuple[int, ...]
    hashes: tuple[bytes, ...]
    bytes_then: npt.NDArray[Any]


@dataclass(frozen=True)
class FakePlan:
    """Faults of a FakeHooks. Each function returns a value per call.

    pending_calls: PENDING results before a request's first other result.
    event_delay: polls before a load or save is reported.
    load_cut: blocks of a load that are missing.
    lost: whether a block is lost when it is looked up.
    """

    pending_calls: Callable[[], int] = lambda: 0
    event_delay: Callable[[], int] = lambda: 0
    load_cut: Callable[[], int] = lambda: 0
    lost: Callable[[], bool] = lambda: False


class FakeHooks:
    """KVHooks over a dictionary. pool: indexed by page first, as a FakeRunner's."""

    def __init__(
        self,
        pool: npt.NDArray[Any],
        page_tokens: int,
        block_tokens: int,
        plan: FakePlan | None = None,
        blocks: dict[bytes, npt.NDArray[Any]] | None = None,
    ) -> None:
        self.pool = pool
        self.block_tokens = block_tokens
        self.wants_times = True
        self.times: list[tuple[int, int, float]] = []
        """(start, tokens, seconds) of every `record_prefill`."""
        self.plan = plan or FakePlan()
        self.blocks = {} if blocks is None else blocks
        """Hash -> [pages_per_block, ...]. Two FakeHooks with the same dict share a store."""
        self.tier = "l2"
        self.pages_per_block = block_tokens // page_tokens
        self.aborted: dict[str, int] = {}
        self.matches = 0
        self.loads = 0
        self.load_pages: list[tuple[int, ...]] = []
        """Pages of every load."""
        self.waits: list[float] = []
        """timeout_s of every poll."""
        self._found: dict[str, tuple[int, tuple[bytes, ...]]] = {}
        self._pending: dict[str, int] = {}
        self._events: list[tuple[int, str | int, _Load | _Save]] = []
        self._loading: set[str] = set()
        self._next_id = 0

    def match(
        self, request_id: str, hashes: Sequence[bytes], first_block: int, *, can_start: bool
    ) -> HookMatch:
        assert request_id not in self.aborted, "match after abort"
        assert request_id not in self._loading, "match during a load"
        self.matches += 1
        self._found.pop(request_id, None)
        if request_id not in self._pending:
            self._pending[request_id] = self.plan.pending_calls()
        if self._pending[request_id]:
            self._pending[request_id] -= 1
            return HookMatch(LookupStatus.PENDING)
        run: list[bytes] = []
        for block_hash in hashes[first_block:]:
            if block_hash in self.blocks and self.plan.lost():
                del self.blocks[block_hash]
            if block_hash not in self.blocks:
                break
            run.append(block_hash)
        if not run:
            return HookMatch(LookupStatus.MISS)
        self._found[request_id] = (first_block, tuple(run))
        return HookMatch(LookupStatus.HIT, len(run), (self.tier,) * len(run))

    def load(self, request_id: str, pages: Sequence[int], blocks: int) -> None:
        _first, run = self._found.pop(request_id)
        assert 0 < blocks <= len(run), (blocks, len(run))
        assert len(pages) == blocks * self.pages_per_block
        assert any(page >= 0 for page in pages[-self.pages_per_block :]), "a load without benefit"
        for page in pages:
            if page >= 0:
                self.pool[page] = _POISON
        self.loads += 1
        self.load_pages.append(tuple(pages))
        self._loading.add(request_id)
        kept = blocks - min(blocks, self.plan.load_cut())
        self._events.append((self.plan.event_delay(), request_id, _Load(tuple(pages), run[:kept])))

    def save(self, request_id: str, hashes: Sequence[bytes], pages: Sequence[int]) -> int:
        assert len(pages) == len(hashes) * self.pages_per_block
        self._next_id += 1
        save = _Save(tuple(pages), tuple(hashes), self.pool[list(pages)].copy())
        self._events.append((self.plan.event_delay(), self._next_id, save))
        return self._next_id

    def record_prefill(self, start: int, tokens: int, seconds: float) -> None:
        assert start >= 0
        assert tokens > 1
        self.times.append((start, tokens, seconds))

    def poll(self, timeout_s: float = 0.0) -> list[HookEvent]:
        self.waits.append(timeout_s)
        ready = [event for event in self._events if event[0] <= 0]
        self._events = [(left - 1, who, copy) for left, who, copy in self._events if left > 0]
        return [self._end(who, copy) for _left, who, copy in ready]

    def _end(self, who: str | int, copy: _Load | _Save) -> HookEvent:
        per = self.pages_per_block
        if isinstance(copy, _Load):
            self._loading.discard(str(who))
            for index, block_hash in enumerate(copy.hashes):
                block = self.blocks.get(block_hash)
                if block is None:
                    return LoadDone(str(who), index)
                pages = copy.pages[index * per : (index + 1) * per]
                for page, value in zip(pages, block, strict=True):
                    if page >= 0:
                        self.pool[page] = value
            return LoadDone(str(who), len(copy.hashes))
        now = self.pool[list(copy.pages)]
        assert np.array_equal(now, copy.bytes_then), "pages changed during a save"
        taken = 0
        for index, block_hash in enumerate(copy.hashes):
            if block_hash not in self.blocks:
                self.blocks[block_hash] = now[index * per : (index + 1) * per].copy()
                taken += 1
        return SaveDone(int(who), taken)

    def abort(self, request_id: str) -> None:
        assert request_id not in self.aborted, "a second abort"
        self.aborted[request_id] = 1
        self._found.pop(request_id, None)

    @property
    def leased(self) -> set[str]:
        """Requests with leased blocks: found, and neither loaded nor aborted."""
        return set(self._found)

    def stats(self) -> dict[str, Any]:
        return {"blocks": len(self.blocks), "matches": self.matches, "loads": self.loads}

    def close(self) -> None:
        self._events = []
