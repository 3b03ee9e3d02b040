"""HTTP route that lists blocks: in groups by tier, tenant and namespace, or one by one.

    GET /v1/ls?tier=disk&tenant=team-a&namespace=DIGEST&limit=100&blocks=true

The administrator sees all blocks, other callers those of their tenant. Lists are bounded, and the
rest is counted ("left_off"). A tier that cannot be listed is named with the reason ("unlisted").
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Final

from fastapi import FastAPI, Request

from kvstore.blocks.key import Key
from kvstore.errors import ConfigError, TierError
from kvstore.service.access.auth import Unauthorised
from kvstore.service.http.app import Service, bearer_token, namespace_in
from kvstore.store.locator import L2
from kvstore.store.store import Store
from kvstore.tiers.base import Tier

MAX_LISTED: Final = 10_000
"""Maximum number of blocks in one response, and of groups."""
YIELD_EVERY: Final = 256
"""Keys listed between two pauses, in which other threads can run."""
YIELD_S: Final = 0.0005


@dataclass(frozen=True)
class ListFilter:
    """The requested blocks; None: any. blocks: list each block, not only the sums."""

    tier: str | None
    tenant: str | None
    namespace: str | None
    blocks: bool
    limit: int

    def matches(self, key: Key) -> bool:
        return self.tenant in (None, key.tenant) and self.namespace in (None, key.namespace)


class BlockListing:
    """Builds one response."""

    def __init__(self, store: Store, wanted: ListFilter) -> None:
        self._wanted = wanted
        self._models = {name: space.model for name, space in store.namespaces().items()}
        self._groups: dict[tuple[str, str, str], dict[str, Any]] = {}
        self._blocks: list[dict[str, Any]] = []
        self._left_off = 0
        self._unlisted: dict[str, str] = {}

    def add(self, tier: str, key: Key, nbytes: int, **more: Any) -> None:
        """Add one block of a tier."""
        if not self._wanted.matches(key):
            return
        where = (tier, key.tenant, key.namespace)
        group = self._groups.get(where)
        if group is None and len(self._groups) < MAX_LISTED:
            names = {"tier": tier, "tenant": key.tenant, "namespace": key.namespace}
            model = self._models.get(key.namespace, "")
            group = self._groups[where] = {**names, "model": model, "blocks": 0, "bytes": 0}
        if group is not None:
            group["blocks"] += 1
            group["bytes"] += nbytes
        elif not self._wanted.blocks:
            self._left_off += 1
        if self._wanted.blocks:
            if len(self._blocks) < self._wanted.limit:
                plain = {"tier": tier, "tenant": key.tenant, "namespace": key.namespace}
                self._blocks.append({**plain, "hash": key.hash.hex(), "bytes": nbytes, **more})
            else:
                self._left_off += 1

    def add_unlisted(self, tier: str, reason: str) -> None:
        """Add a tier that cannot be listed, with the reason."""
        self._unlisted[tier] = " ".join(reason.split())

    def as_json(self) -> dict[str, Any]:
        """The response: the largest groups first, blocks in the tier's order."""
        groups = sorted(self._groups.values(), key=lambda group: -group["bytes"])
        kept = groups if self._wanted.blocks else groups[: self._wanted.limit]
        left_off = self._left_off + sum(group["blocks"] for group in groups[len(kept) :])
        report = {"groups": kept, "left_off": left_off, "unlisted": self._unlisted}
        return {**report, "blocks": self._blocks} if self._wanted.blocks else report


def list_blocks(store: Store, wanted: ListFilter) -> dict[str, Any]:
    """List the blocks that `wanted` selects. Reads the tiers' lists: it may take long, or hang.

    Raises ConfigError: no tier has that name.
    """
    tiers = store.limit_applier.tiers
    names = [L2, *(tier.name for tier in tiers)]
    if wanted.tier not in (None, *names):
        raise ConfigError(f"unknown tier {wanted.tier!r}; use one of {', '.join(names)}")
    listing = BlockListing(store, wanted)
    if wanted.tier in (None, L2):
        for block in store.manager.tunables.blocks():
            state = {"pinned": block.pinned, "leased": block.leased, "dirty": block.dirty}
            listing.add(L2, block.key, block.nbytes, hits=block.hits, **state)
    for tier in tiers:
        if wanted.tier in (None, tier.name):
            try:
                for key, nbytes in _paced(tier):
                    listing.add(tier.name, key, nbytes)
            except NotImplementedError:
                listing.add_unlisted(tier.name, "this tier has no list of its blocks")
            except (TierError, OSError) as error:
                listing.add_unlisted(tier.name, str(error))
    return listing.as_json()


def _paced(tier: Tier) -> Iterator[tuple[Key, int]]:
    """A tier's list, with pauses in which other threads can run."""
    for number, item in enumerate(tier.usage()):
        if number % YIELD_EVERY == YIELD_EVERY - 1:
            time.sleep(YIELD_S)
        yield item


def add_listing(app: FastAPI, service: Service) -> None:
    """Add the route."""

    @app.get("/v1/ls")
    async def ls(
        request: Request,
        tier: str | None = None,
        tenant: str | None = None,
        namespace: str | None = None,
        blocks: bool = False,
        limit: int = 100,
    ) -> dict[str, Any]:
        mine = service.tenants.visible_tenant(bearer_token(request))
        if mine is not None and tenant not in (None, mine):
            raise Unauthorised("listing another tenant's blocks requires the admin auth token")
        if not 1 <= limit <= MAX_LISTED:
            raise ConfigError(f"limit = {limit}: must be 1 to {MAX_LISTED}")
        space = None if namespace is None else namespace_in(namespace)
        wanted = ListFilter(tier, mine or tenant, space, blocks, limit)
        return await service.run_admin_call(
            list_blocks, service.store, wanted, bulkhead=service.list_calls
        )
