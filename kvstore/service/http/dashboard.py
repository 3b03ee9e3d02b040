"""The dashboard: one page, the JSON it shows, and the files it is made of.

    GET /                    to the page
    GET /dashboard           the page; /dashboard/FILE its script and style
    GET /v1/dashboard        what it shows; of one tenant alone for a tenant's token
    GET /v1/dashboard/run    ?tenant=&namespace=&hash=  hashes of the run that ends there, to pin it

The page is served to anybody and has nothing in it but itself. It needs no network beyond the
sidecar: a policy in its header forbids any. What it shows comes as JSON of bounded size.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from importlib import resources
from typing import Any, Final

from fastapi import FastAPI, HTTPException, Request
from fastapi.responses import JSONResponse, RedirectResponse, Response

from kvstore import __version__
from kvstore.blocks.key import Key
from kvstore.service.auth import Unauthorised
from kvstore.service.http.app import Service, bearer, hashes_in, namespace_in
from kvstore.service.prefix_index import Chain, PrefixIndex
from kvstore.store.store import Store
from kvstore.telemetry.history import History

MAX_CHAINS: Final = 160
"""Chains of the radix view."""
MAX_NAMESPACES: Final = 32
"""Namespaces told of: those that sessions named last."""
VIEW_S: Final = 2.0
"""How long one view is good for; many who look ask no more of the store than one."""
MAX_VIEWS: Final = 64
"""Views kept: one for each tenant that looks."""

FILES: Final = {
    "dashboard.css": "text/css; charset=utf-8",
    "app.js": "text/javascript; charset=utf-8",
    "charts.js": "text/javascript; charset=utf-8",
    "dom.js": "text/javascript; charset=utf-8",
    "panels.js": "text/javascript; charset=utf-8",
    "icon.svg": "image/svg+xml",
}
SECURITY: Final = {
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; "
        "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-cache",
}


class Views:
    """Makes what the page shows, each view once every `VIEW_S`. Called from one lane's threads."""

    def __init__(
        self,
        store: Store,
        stats: Callable[[], dict[str, Any]],
        prefixes: PrefixIndex,
        history: History,
    ) -> None:
        self._store = store
        self._stats = stats
        self._prefixes = prefixes
        self._history = history
        self._tiers = list(store.stats()["tiers"])
        self._began_s = time.monotonic()
        self._made: dict[str | None, tuple[float, dict[str, Any]]] = {}

    def of(self, tenant: str | None) -> dict[str, Any]:
        """Everything, or what one tenant may see."""
        made = self._made.get(tenant)
        if made is not None and time.monotonic() - made[0] < VIEW_S:
            return made[1]
        view = self._make(tenant)
        if len(self._made) >= MAX_VIEWS:
            self._made.clear()
        self._made[tenant] = (time.monotonic(), view)
        return view

    def run_to(self, key: Key) -> list[bytes]:
        """See `PrefixIndex.run_to`."""
        return self._prefixes.run_to(key)

    def _make(self, tenant: str | None) -> dict[str, Any]:
        stats = self._stats()
        slots = stats["l2"]["tenants"]
        users = stats["use"]["users"]
        chains, more = self._prefixes.tree(MAX_CHAINS, lambda name: tenant in (None, name))
        spaces = self._store.namespaces()
        if tenant is not None:  # another's models are not its business
            spaces = {name: spaces[name] for name in _named(chains) if name in spaces}
        known = list(spaces.items())[-MAX_NAMESPACES:]
        return {
            "version": __version__,
            "time_s": round(time.time(), 1),
            "uptime_s": round(time.monotonic() - self._began_s, 1),
            "tenant": tenant,
            "l2": {k: v for k, v in stats["l2"].items() if k not in ("tenants", "eviction")},
            "tiers": {name: _tier(tier) for name, tier in stats["tiers"].items()},
            "clients": len(stats.get("service", {}).get("clients", ())),
            "verbs": {
                verb: _mean_s(each)
                for verb, each in stats.get("service", {}).get("verb_seconds", {}).items()
            },
            "users": [each for each in users if tenant in (None, each["tenant"])],
            "slots": {name: n for name, n in slots.items() if tenant in (None, name)},
            "namespaces": {
                digest: {
                    "model": space.model[:200],
                    "dtype": space.dtype,
                    "block_tokens": space.block_tokens,
                    "block_bytes": space.block_bytes,
                }
                for digest, space in known
            },
            "history": self._history.columns(tenant),
            "prefixes": {
                **self._prefixes.counts(),
                "more": more,
                "chains": [self._chain(each) for each in chains],
            },
        }

    def _chain(self, chain: Chain) -> dict[str, Any]:
        """A chain as JSON: how many of its blocks lie where, fastest tier first."""
        first, last = chain.keys[0], chain.keys[-1]
        space = self._store.namespaces().get(first.namespace)
        held: dict[str, int] = {}
        nbytes = space.block_bytes if space is not None else 0
        in_l2 = self._store.brain.held(chain.keys, nbytes)
        sources = self._store.finder.sources(chain.keys, in_l2)
        for resident, source in zip(in_l2, sources, strict=True):
            if resident or source is not None:
                name = "l2" if resident else self._tiers[source or 0]
                held[name] = held.get(name, 0) + 1
        return {
            "tenant": first.tenant,
            "namespace": first.namespace,
            "hash": last.hash.hex(),
            "depth": chain.depth,
            "blocks": len(chain.keys),
            "asks": chain.asks,
            "held": held,
            "pinned": self._store.brain.pinned(chain.keys),
            "children": [self._chain(each) for each in chain.children],
            "more": chain.more,
        }


def add_dashboard(app: FastAPI, service: Service, views: Views) -> None:
    """The page, its files and its routes."""
    folder = resources.files("kvstore.service") / "static"
    page = (folder / "index.html").read_bytes()
    files = {name: (folder / name).read_bytes() for name in FILES}

    @app.get("/")
    async def root() -> RedirectResponse:
        return RedirectResponse("dashboard", headers=SECURITY)

    @app.get("/dashboard")
    async def dashboard() -> Response:
        return Response(page, media_type="text/html; charset=utf-8", headers=SECURITY)

    @app.get("/dashboard/{name}")
    async def part(name: str) -> Response:
        if name not in files:
            raise HTTPException(404, "the dashboard has no such file")
        return Response(files[name], media_type=FILES[name], headers=SECURITY)

    @app.get("/v1/dashboard")
    async def shown(request: Request) -> JSONResponse:
        tenant = service.tenants.sees(bearer(request))
        view = await service.look_after(views.of, tenant, lane=service.looking)
        admin = _is_admin(service, request)
        return JSONResponse({**view, "admin": admin}, headers=SECURITY)

    @app.get("/v1/dashboard/run")
    async def run(tenant: str, namespace: str, hash: str, request: Request) -> dict[str, Any]:
        service.tenants.check_admin(bearer(request))
        [name] = hashes_in([hash])
        names = views.run_to(Key(tenant, namespace_in(namespace), name))
        if not names:
            raise HTTPException(404, "this run was not asked for of late; it is forgotten")
        return {"hashes": [each.hex() for each in names]}


def _named(chains: Sequence[Chain]) -> list[str]:
    """Namespaces of these chains; a tree is all of one."""
    return list(dict.fromkeys(chain.keys[0].namespace for chain in chains))


def _is_admin(service: Service, request: Request) -> bool:
    try:
        service.tenants.check_admin(bearer(request))
    except Unauthorised:
        return False
    return True


def _tier(tier: Mapping[str, Any]) -> dict[str, Any]:
    """A tier's numbers, with quantiles in place of histograms."""
    shown = {k: v for k, v in tier.items() if k not in ("seconds", "codec")}
    codecs = list(tier.get("codec", {}).values())
    shown["ratio"] = max((each["ratio"] for each in codecs), default=1.0)
    for direction, each in tier.get("seconds", {}).items():
        shown[f"{direction}_mean_s"] = _mean_s(each)
        shown[f"{direction}_p50_s"] = quantile_s(each, 0.5)
        shown[f"{direction}_p95_s"] = quantile_s(each, 0.95)
    return shown


def _mean_s(histogram: Mapping[str, Any]) -> float:
    return histogram["sum"] / histogram["count"] if histogram["count"] else 0.0


def quantile_s(histogram: Mapping[str, Any], share: float) -> float:
    """A quantile of a `Histogram.snapshot`: linear inside a bucket, as Prometheus has it; of what
    lies above the last bound, that bound. 0 while nothing was observed."""
    wanted, below, low = share * histogram["count"], 0, 0.0
    for bound, count in zip(histogram["bounds"], histogram["counts"], strict=False):
        if count and below + count >= wanted:
            return float(low + (bound - low) * (wanted - below) / count)
        below, low = below + count, bound
    return low if histogram["count"] else 0.0
