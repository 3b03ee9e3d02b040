"""The statistics that a tenant may see: the node's totals, and its own clients and models.

Every tenant may see the occupancy and rates of L2 and the tiers. It may not see other tenants,
their models or their usage.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def visible_stats(tenant: str | None, stats: Mapping[str, Any]) -> dict[str, Any]:
    """The sidecar's statistics for one tenant. None: everything.

    A tenant sees the namespaces of its connected engines.
    """
    if tenant is None:
        return dict(stats)
    service = stats["service"]
    clients = {n: each for n, each in service["clients"].items() if each["tenant"] == tenant}
    namespaces = {each["namespace"] for each in clients.values()}
    visible = {
        **stats,
        "l2": {**stats["l2"], "tenants": _only(stats["l2"]["tenants"], {tenant})},
        "tiers": {name: _visible_tier(tier, namespaces) for name, tier in stats["tiers"].items()},
        "namespaces": _only(stats["namespaces"], namespaces),
        "usage": {
            **stats["usage"],
            "users": [each for each in stats["usage"]["users"] if each["tenant"] == tenant],
        },
        "service": {**service, "clients": clients},
    }
    # Engines do not publish the tenant of a block, and their names are addresses.
    visible.pop("engines", None)
    return visible


def _visible_tier(tier: Mapping[str, Any], namespaces: set[str]) -> dict[str, Any]:
    return {**tier, "codec": _only(tier.get("codec", {}), namespaces)}


def _only(table: Mapping[str, Any], names: set[str]) -> dict[str, Any]:
    return {name: value for name, value in table.items() if name in names}
