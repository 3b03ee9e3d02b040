"""The shelves of one rank: one for each host pool and each order of its pages' bytes.

This is the backend without SGLang's types: what a rank's pools are, where their pages are kept,
and SGLang's batches of each interface, answered.
"""

from __future__ import annotations

import inspect
import json
import logging
import threading
import time
import urllib.request
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

import kvstore
from kvstore.config.settings import nearest
from kvstore.config.units import format_bytes
from kvstore.connectors.sglang.copies import Copies, Extents
from kvstore.connectors.sglang.namespace import (
    EXTENTS,
    FLAT,
    HostPool,
    namespace_of,
    tensor_extents,
)
from kvstore.connectors.sglang.page_pool import Shelf
from kvstore.connectors.sglang.restorable import (
    ALL_PAGES,
    TRAILING_PAGES,
    PrefixHits,
    kv_hits,
    trailing_lengths,
)
from kvstore.connectors.sglang.settings import BackendSettings
from kvstore.errors import ConfigError
from kvstore.interface import BlockStore
from kvstore.ipc.client import Client

if TYPE_CHECKING:
    from kvstore.store.store import Store

log = logging.getLogger(__name__)

KV: Final = "kv"
CLEAR_LIMIT_S: Final = 10.0
"""How long SGLang's clear, on its scheduler's thread, may wait for the sidecar."""
MEASURED_MAX: Final = 1024
"""Batches whose figures wait for SGLang's metrics; older ones are let go."""


class Shelves:
    """See the module's text.

    config: SGLang's HiCacheStorageConfig. zero_copy: whether KV comes by addresses (interface v1).
    """

    def __init__(
        self,
        settings: BackendSettings,
        config: Any,
        *,
        zero_copy: bool,
        model: str,
        revision: str,
    ) -> None:
        self._settings = settings
        self._config = config
        self._order = EXTENTS if zero_copy else FLAT
        self._named = {"model": model, "revision": revision}
        self._copies = Copies(settings.threads)
        self._lock = threading.Lock()
        self._pools: dict[str, HostPool] = {}
        self._shelves: dict[tuple[str, str], Shelf] = {}
        self._replaced: list[Shelf] = []
        self._embedded: Store | None = None
        self.read: deque[tuple[int, float]] = deque(maxlen=MEASURED_MAX)
        """(pages, GB/s) of batches read; `written` of batches written."""
        self.written: deque[tuple[int, float]] = deque(maxlen=MEASURED_MAX)

    def add(self, pool: Any, name: str) -> None:
        """A host pool that pages will be moved of; it takes the place of one of the same name.

        What another thread still reads or writes for that one ends as it began: its shelf is closed
        with all others.

        Raises ConfigError: the sidecar refuses its namespace, or a page is larger than a slot.
        """
        with self._lock:
            known = self._pools.get(name)
            if known is not None and known.pool is pool:
                return
            for key in [key for key in self._shelves if key[0] == name]:
                self._replaced.append(self._shelves.pop(key))
            self._pools[name] = HostPool(pool, name)
        if self._pools[name].holds_bytes:
            self._shelf(name, self._order if name == KV else self._side_order(name))

    def pool(self, name: str) -> HostPool:
        assert name in self._pools, f"SGLang registered no host pool {name!r}"
        return self._pools[name]

    # Questions.

    def run(self, keys: Sequence[str]) -> int:
        """Pages of KV that are held, from the first on."""
        if not self.pool(KV).holds_bytes:
            return len(keys)  # pages of an index space: its side pools say what there is
        return self._shelf(KV, self._order).run(keys)

    def hits(self, keys: Sequence[str], rules: Sequence[tuple[str, str, int]]) -> PrefixHits:
        """What can be restored of a prefix, side pools considered.

        rules: (pool, hit policy, pages of its window) of each side pool.
        """
        hits = kv_hits(KV, self.run(keys))
        for name, policy, window in rules:
            if not hits.lengths:
                break
            within = keys[: hits.pages]
            if policy == ALL_PAGES:
                run = self._shelf(name, self._side_order(name)).run(within)
                hits.restrict(name, range(1, run + 1))
            elif policy == TRAILING_PAGES:
                held = self._shelf(name, self._side_order(name)).holds(within)
                hits.restrict(name, trailing_lengths(held, max(1, window)))
        return hits

    # Batches.

    def get_addressed(self, name: str, keys: Sequence[str], host_indices: Any) -> list[bool]:
        """Read pages of a pool to the addresses of their token slots."""
        return self._moved(name, keys, host_indices, Shelf.get, self.read)

    def set_addressed(self, name: str, keys: Sequence[str], host_indices: Any) -> list[bool]:
        """Write pages of a pool from the addresses of their token slots."""
        return self._moved(name, keys, host_indices, Shelf.set, self.written)

    def get_flat(self, keys: Sequence[str], targets: Sequence[Any]) -> list[bool]:
        """Read pages of KV, flat, into tensors."""
        pages = tensor_extents(targets)
        return self._timed(Shelf.get, self._shelf(KV, FLAT), keys, pages, self.read)

    def set_flat(self, keys: Sequence[str], values: Sequence[Any]) -> list[bool]:
        """Write pages of KV, flat, from tensors."""
        tensors = [value.contiguous() for value in values]
        pages = tensor_extents(tensors)
        return self._timed(Shelf.set, self._shelf(KV, FLAT), keys, pages, self.written)

    def _moved(
        self,
        name: str,
        keys: Sequence[str],
        host_indices: Any,
        move: Callable[[Shelf, Sequence[str], Sequence[Extents]], list[bool]],
        measured: deque[tuple[int, float]],
    ) -> list[bool]:
        host = self.pool(name)
        if not host.holds_bytes:
            return [True] * len(keys)
        told = 0 if host_indices is None else len(host_indices)
        assert told == len(keys) * host.page_tokens, (
            f"{told} token slots of pool {name!r} for {len(keys)} pages of {host.page_tokens}"
        )
        order = EXTENTS if name == KV else self._side_order(name)
        shelf = self._shelf(name, order)
        if order == EXTENTS:
            return self._timed(move, shelf, keys, host.extents(host_indices), measured)
        firsts = [int(host_indices[at]) for at in range(0, told, host.page_tokens)]
        if measured is self.written:
            flat = [host.pool.get_data_page(first, flat=True).contiguous() for first in firsts]
            return self._timed(move, shelf, keys, tensor_extents(flat), measured)
        flat = [host.pool.get_dummy_flat_data_page() for _ in firsts]
        got = self._timed(move, shelf, keys, tensor_extents(flat), measured)
        for first, page, came in zip(firsts, flat, got, strict=True):
            if came:
                host.pool.set_from_flat_data_page(first, page)
        return got

    def _timed(
        self,
        move: Callable[[Shelf, Sequence[str], Sequence[Extents]], list[bool]],
        shelf: Shelf,
        keys: Sequence[str],
        pages: Sequence[Extents],
        measured: deque[tuple[int, float]],
    ) -> list[bool]:
        began_s = time.perf_counter()
        done = move(shelf, keys, pages)
        took_s = max(time.perf_counter() - began_s, 1e-9)
        if moved := sum(done):
            measured.append((moved, moved * shelf.namespace.block_bytes / took_s / 1e9))
        return done

    # Shelves.

    def _side_order(self, name: str) -> str:
        """How a side pool's pages are moved: by addresses where it gives any, else flat."""
        for order in (EXTENTS, FLAT):
            if (name, order) in self._shelves:
                return order
        return EXTENTS if self.pool(name).pieces(EXTENTS) else FLAT

    def _shelf(self, name: str, order: str) -> Shelf:
        shelf = self._shelves.get((name, order))
        if shelf is not None:
            return shelf
        with self._lock:
            shelf = self._shelves.get((name, order))
            if shelf is None:
                shelf = self._shelves[name, order] = self._make(self.pool(name), order)
            return shelf

    def _make(self, host: HostPool, order: str) -> Shelf:
        namespace = namespace_of(host, self._config, order, **self._named)
        store = self._open(namespace, host.name)
        log.info(
            "pages of pool %s: %s each (--slot %d on the sidecar fits them), namespace %s",
            host.name,
            format_bytes(namespace.block_bytes),
            namespace.block_bytes,
            namespace.digest,
        )
        return Shelf(store, self._copies, self._settings.deadline)

    def _open(self, namespace: Any, pool: str) -> BlockStore:
        settings = self._settings
        if settings.embedded is not None:
            if self._embedded is None:
                self._embedded = _embedded(settings.embedded, namespace.block_bytes)
            return self._embedded.session(namespace)
        rank = f"tp{self._config.tp_rank}pp{self._config.pp_rank}"
        return Client(
            settings.socket,
            namespace,
            token=settings.token or None,
            name=f"sglang-{rank}-{pool}",
            route=settings.route,
            wait_ready_s=settings.wait_ready_ms / 1e3,
        )

    # Care.

    def clear(self) -> bool:
        """Empty every tier, of all that share them; whether it was done."""
        if self._embedded is not None:
            self._embedded.clear("all")
            return True
        if not self._settings.http:
            log.warning(
                "clear: the sidecar's pages stay; give the extra config its 'http' address (and "
                "'admin_token') to have SGLang clear it"
            )
            return False
        request = urllib.request.Request(
            self._settings.http.rstrip("/") + "/v1/clear?tier=all", method="POST"
        )
        if self._settings.admin_token:
            request.add_header("Authorization", f"Bearer {self._settings.admin_token}")
        try:
            with urllib.request.urlopen(request, timeout=CLEAR_LIMIT_S) as answer:
                return bool(json.load(answer)["cleared"] == "all")
        except (OSError, ValueError, KeyError) as error:
            log.warning("clear: the sidecar at %s did not: %s", self._settings.http, error)
            return False

    def stats(self) -> dict[str, dict[str, int]]:
        """Pages got and kept, by pool and order."""
        return {f"{name}/{order}": shelf.stats() for (name, order), shelf in self._shelves.items()}

    def close(self) -> None:
        """No call is under way."""
        with self._lock:
            for shelf in (*self._shelves.values(), *self._replaced):
                shelf.close()
            self._shelves.clear()
            self._replaced.clear()
            if self._embedded is not None:
                self._embedded.close()
                self._embedded = None
        self._copies.close()


def _embedded(arguments: Mapping[str, Any], block_bytes: int) -> Store:
    known = inspect.signature(kvstore.open).parameters
    for argument in arguments:
        if argument not in known:
            raise ConfigError(f"unknown key 'embedded.{argument}'; {nearest(argument, known)}")
    return kvstore.open(**{"slot": block_bytes, **arguments})
