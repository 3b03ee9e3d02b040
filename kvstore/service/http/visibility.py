"""What of the statistics a tenant may see: the node's numbers, and of what is named, its own.

Occupancy and rates of L2 and of the tiers are the node's, and everybody's. Who else is here, with
which models, and how much they use is not.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def seen_by(tenant: str | None, stats: Mapping[str, Any]) -> dict[str, Any]:
    """Statistics as a sidecar tells them, for one tenant; None: all of them.

    Of namespaces a tenant sees those of its engines that are connected.
    """
    if tenant is None:
        return dict(stats)
    service = stats["service"]
    clients = {n: each for n, each in service["clients"].items() if each["tenant"] == tenant}
    mine = {each["namespace"] for each in clients.values()}
    seen = {
        **stats,
        "l2": {**stats["l2"], "tenants": _only(stats["l2"]["tenants"], {tenant})},
        "tiers": {name: _tier(tier, mine) for name, tier in stats["tiers"].items()},
        "namespaces": _only(stats["namespaces"], mine),
        "use": {
            **stats["use"],
            "users": [each for each in stats["use"]["users"] if each["tenant"] == tenant],
        },
        "service": {**service, "clients": clients},
    }
    # Engines do not publish whose a block is, and are named by their addresses.
    seen.pop("engines", None)
    return seen


def _tier(tier: Mapping[str, Any], namespaces: set[str]) -> dict[str, Any]:
    return {**tier, "codec": _only(tier.get("codec", {}), namespaces)}


def _only(table: Mapping[str, Any], names: set[str]) -> dict[str, Any]:
    return {name: value for name, value in table.items() if name in names}
