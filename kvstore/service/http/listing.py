"""What is held, listed: by tier, tenant and namespace, or block by block.

    GET /v1/ls?tier=disk&tenant=team-a&namespace=DIGEST&limit=100&blocks=true

The administrator sees all of it, others their own tenant's. Lists are bounded; what did not fit is
counted. A tier that cannot be listed, or not now, is named with the reason.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Final

from fastapi import FastAPI, Request

from kvstore.blocks.key import Key
from kvstore.errors import ConfigError, TierError
from kvstore.service.auth import Unauthorised
from kvstore.service.http.app import Service, bearer, namespace_in
from kvstore.store.locator import L2
from kvstore.store.store import Store
from kvstore.tiers.base import Tier

MAX_LISTED: Final = 10_000
"""Blocks in one answer, and groups."""
YIELD_EVERY: Final = 256
"""Keys listed between two offers of the interpreter to other threads."""
YIELD_S: Final = 0.0005


@dataclass(frozen=True)
class Wanted:
    """What is asked for; None: of any. blocks: each of them, not only their sums."""

    tier: str | None
    tenant: str | None
    namespace: str | None
    blocks: bool
    limit: int

    def takes(self, key: Key) -> bool:
        return self.tenant in (None, key.tenant) and self.namespace in (None, key.namespace)


class Listing:
    """One answer in the making."""

    def __init__(self, store: Store, wanted: Wanted) -> None:
        self._wanted = wanted
        self._models = {name: space.model for name, space in store.namespaces().items()}
        self._groups: dict[tuple[str, str, str], dict[str, Any]] = {}
        self._blocks: list[dict[str, Any]] = []
        self._left_off = 0
        self._unlisted: dict[str, str] = {}

    def add(self, tier: str, key: Key, nbytes: int, **more: Any) -> None:
        """One block that a tier holds."""
        if not self._wanted.takes(key):
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

    def cannot(self, tier: str, reason: str) -> None:
        """A tier that is not listed, and why."""
        self._unlisted[tier] = " ".join(reason.split())

    def plain(self) -> dict[str, Any]:
        """As JSON has it: the largest groups first, blocks in each tier's order."""
        groups = sorted(self._groups.values(), key=lambda group: -group["bytes"])
        kept = groups if self._wanted.blocks else groups[: self._wanted.limit]
        left_off = self._left_off + sum(group["blocks"] for group in groups[len(kept) :])
        report = {"groups": kept, "left_off": left_off, "unlisted": self._unlisted}
        return {**report, "blocks": self._blocks} if self._wanted.blocks else report


def listed(store: Store, wanted: Wanted) -> dict[str, Any]:
    """What `wanted` asks for. Reads tiers' lists, so it may take long, or hang with a tier.

    Raises ConfigError: no tier of that name.
    """
    tiers = store.regulator.tiers
    names = [L2, *(tier.name for tier in tiers)]
    if wanted.tier not in (None, *names):
        raise ConfigError(f"unknown tier {wanted.tier!r}; one of {', '.join(names)} is right")
    listing = Listing(store, wanted)
    if wanted.tier in (None, L2):
        for block in store.brain.dials.held():
            state = {"pinned": block.pinned, "leased": block.leased, "dirty": block.dirty}
            listing.add(L2, block.key, block.nbytes, hits=block.hits, **state)
    for tier in tiers:
        if wanted.tier in (None, tier.name):
            try:
                for key, nbytes in _gently(tier):
                    listing.add(tier.name, key, nbytes)
            except NotImplementedError:
                listing.cannot(tier.name, "it keeps no list of its blocks")
            except (TierError, OSError) as error:
                listing.cannot(tier.name, str(error))
    return listing.plain()


def _gently(tier: Tier) -> Iterator[tuple[Key, int]]:
    """A tier's list, at a pace that leaves the interpreter to others."""
    for number, item in enumerate(tier.usage()):
        if number % YIELD_EVERY == YIELD_EVERY - 1:
            time.sleep(YIELD_S)
        yield item


def add_listing(app: FastAPI, service: Service) -> None:
    """The route."""

    @app.get("/v1/ls")
    async def ls(
        request: Request,
        tier: str | None = None,
        tenant: str | None = None,
        namespace: str | None = None,
        blocks: bool = False,
        limit: int = 100,
    ) -> dict[str, Any]:
        mine = service.tenants.sees(bearer(request))
        if mine is not None and tenant not in (None, mine):
            raise Unauthorised("another tenant's blocks are listed with the admin token")
        if not 1 <= limit <= MAX_LISTED:
            raise ConfigError(f"limit = {limit}; 1 to {MAX_LISTED} is right")
        space = None if namespace is None else namespace_in(namespace)
        wanted = Wanted(tier, mine or tenant, space, blocks, limit)
        return await service.look_after(listed, service.store, wanted, lane=service.listing)
