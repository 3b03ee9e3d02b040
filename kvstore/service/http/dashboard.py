"""The dashboard: its page, its files, and the JSON that it shows.

    GET /                     redirects to the page
    GET /dashboard            the page; /dashboard/FILE: its script and style
    GET /v1/dashboard         the JSON; with a tenant's auth token, of that tenant only
    GET /v1/dashboard/prefix  ?tenant=&namespace=&hash=  hashes of the prefix that ends there

The page is served without authentication, and contains no data. A policy in its header forbids all
network access except to the sidecar. The size of the JSON is bounded.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from importlib import resources
from typing import Any, Final

from fastapi import FastAPI, HTTPException, Request
from fastapi.responses import JSONResponse, RedirectResponse, Response

from kvstore.blocks.key import Key
from kvstore.service.access.auth import Unauthorised
from kvstore.service.http.app import Service, bearer_token, hashes_in, namespace_in
from kvstore.service.http.prefix_index import Chain, PrefixIndex
from kvstore.store.store import Store
from kvstore.telemetry.history import History
from kvstore.version import __version__

MAX_CHAINS: Final = 160
"""Maximum number of chains in the prefix tree."""
MAX_NAMESPACES: Final = 32
"""Maximum number of namespaces: the ones most recently used by sessions."""
VIEW_TTL_S: Final = 2.0
"""How long a view is reused, so that many viewers load the store no more than one."""
MAX_VIEWS: Final = 64
"""Maximum number of views kept, one for each tenant."""

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
    """Builds the page's JSON, once every `VIEW_TTL_S`. Called from one bulkhead's threads."""

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
        self._start_s = time.monotonic()
        self._views: dict[str | None, tuple[float, dict[str, Any]]] = {}

    def get(self, tenant: str | None) -> dict[str, Any]:
        """The view of one tenant; None: of all tenants."""
        cached = self._views.get(tenant)
        if cached is not None and time.monotonic() - cached[0] < VIEW_TTL_S:
            return cached[1]
        view = self._build(tenant)
        if len(self._views) >= MAX_VIEWS:
            self._views.clear()
        self._views[tenant] = (time.monotonic(), view)
        return view

    def prefix_to(self, key: Key) -> list[bytes]:
        """See `PrefixIndex.run_to`."""
        return self._prefixes.prefix_to(key)

    def _build(self, tenant: str | None) -> dict[str, Any]:
        stats = self._stats()
        slots = stats["l2"]["tenants"]
        users = stats["usage"]["users"]
        chains, more = self._prefixes.tree(MAX_CHAINS, lambda name: tenant in (None, name))
        spaces = self._store.namespaces()
        if tenant is not None:  # a tenant must not see another tenant's models
            spaces = {name: spaces[name] for name in _named(chains) if name in spaces}
        known = list(spaces.items())[-MAX_NAMESPACES:]
        return {
            "version": __version__,
            "time_s": round(time.time(), 1),
            "uptime_s": round(time.monotonic() - self._start_s, 1),
            "tenant": tenant,
            "l2": {k: v for k, v in stats["l2"].items() if k not in ("tenants", "eviction")},
            "tiers": {name: _tier(tier) for name, tier in stats["tiers"].items()},
            "clients": len(stats.get("service", {}).get("clients", ())),
            "request_mean_s": {
                operation: _mean_s(each)
                for operation, each in stats.get("service", {}).get("request_seconds", {}).items()
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
        """A chain as JSON, with its cached blocks by tier, the fastest tier first."""
        first, last = chain.keys[0], chain.keys[-1]
        space = self._store.namespaces().get(first.namespace)
        cached: dict[str, int] = {}
        nbytes = space.block_bytes if space is not None else 0
        in_l2 = self._store.manager.cached_or_loading(chain.keys, nbytes)
        sources = self._store.locator.find_tiers(chain.keys, in_l2)
        for is_in_l2, source in zip(in_l2, sources, strict=True):
            if is_in_l2 or source is not None:
                name = "l2" if is_in_l2 else self._tiers[source or 0]
                cached[name] = cached.get(name, 0) + 1
        return {
            "tenant": first.tenant,
            "namespace": first.namespace,
            "hash": last.hash.hex(),
            "depth": chain.depth,
            "blocks": len(chain.keys),
            "lookups": chain.lookups,
            "cached": cached,
            "pinned": self._store.manager.pins.count(chain.keys),
            "children": [self._chain(each) for each in chain.children],
            "more": chain.more,
        }


def add_dashboard(app: FastAPI, service: Service, views: Views) -> None:
    """Add the routes of the page, its files and its JSON."""
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
        tenant = service.tenants.visible_tenant(bearer_token(request))
        view = await service.run_admin_call(views.get, tenant, bulkhead=service.dashboard_calls)
        admin = _is_admin(service, request)
        return JSONResponse({**view, "admin": admin}, headers=SECURITY)

    @app.get("/v1/dashboard/prefix")
    async def prefix(tenant: str, namespace: str, hash: str, request: Request) -> dict[str, Any]:
        service.tenants.check_admin(bearer_token(request))
        [name] = hashes_in([hash])
        names = views.prefix_to(Key(tenant, namespace_in(namespace), name))
        if not names:
            raise HTTPException(404, "prefix not found: only recently looked-up prefixes are kept")
        return {"hashes": [each.hex() for each in names]}


def _named(chains: Sequence[Chain]) -> list[str]:
    """The namespaces of these chains. A tree has only one."""
    return list(dict.fromkeys(chain.keys[0].namespace for chain in chains))


def _is_admin(service: Service, request: Request) -> bool:
    try:
        service.tenants.check_admin(bearer_token(request))
    except Unauthorised:
        return False
    return True


def _tier(tier: Mapping[str, Any]) -> dict[str, Any]:
    """A tier's statistics, with quantiles in place of histograms."""
    shown = {k: v for k, v in tier.items() if k not in ("seconds", "codec")}
    codecs = list(tier.get("codec", {}).values())
    shown["ratio"] = max((each["ratio"] for each in codecs), default=1.0)
    for op, each in tier.get("seconds", {}).items():
        shown[f"{op}_mean_s"] = _mean_s(each)
        shown[f"{op}_p50_s"] = quantile_s(each, 0.5)
        shown[f"{op}_p95_s"] = quantile_s(each, 0.95)
    return shown


def _mean_s(histogram: Mapping[str, Any]) -> float:
    return histogram["sum"] / histogram["count"] if histogram["count"] else 0.0


def quantile_s(histogram: Mapping[str, Any], fraction: float) -> float:
    """A quantile of a `Histogram.snapshot`, with linear interpolation in a bucket as in Prometheus.

    Above the last bound it is that bound. It is 0 for an empty histogram.
    """
    wanted, below, low = fraction * histogram["count"], 0, 0.0
    for bound, count in zip(histogram["bounds"], histogram["counts"], strict=False):
        if count and below + count >= wanted:
            return float(low + (bound - low) * (wanted - below) / count)
        below, low = below + count, bound
    return low if histogram["count"] else 0.0
