"""Usage counters by tenant and traffic label: tokens looked up, saved, and hit in each tier.

A *traffic label* is a client's word for its traffic ("chat", "rag"); the default is "". Labels come
from outside, so their number is bounded. The first `MAX_ROWS` pairs of tenant and label get their
own row. After that, new labels of a tenant are counted under its label `OTHER`. After twice as many
rows, new tenants are counted under the tenant `OTHER`.

Every method is called under the L2 manager's lock.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, TypeAlias

from kvstore.blocks.key import Namespace
from kvstore.telemetry.histogram import Histogram
from kvstore.telemetry.traffic import OTHER

MAX_ROWS: Final = 256
"""Pairs of tenant and traffic label with their own row."""
MAX_OPEN_LOOKUPS: Final = 1024
"""Lookups without a load yet that one session remembers; the oldest are dropped first."""
HTTP_TRAFFIC: Final = "(http)"
"""Traffic label of blocks that were read as frames."""

Record: TypeAlias = Callable[[str, float, Mapping[str, Any]], None]
"""Records a span when it ends: name, seconds, attributes."""


class UsageRow:
    """Tokens used by the sessions of one tenant and traffic label."""

    __slots__ = ("hit_tokens", "lookup_tokens", "saved_tokens", "tenant", "traffic_label")

    def __init__(self, tenant: str, traffic_label: str) -> None:
        self.tenant = tenant
        self.traffic_label = traffic_label
        self.lookup_tokens = 0
        """Tokens of prefixes looked up, each prefix once."""
        self.hit_tokens: Counter[str] = Counter()
        """Tokens returned to clients, by source tier."""
        self.saved_tokens = 0
        """Tokens of committed blocks."""


class UsageCounters:
    """The usage counters of one store."""

    def __init__(self, max_rows: int = MAX_ROWS) -> None:
        self._max_rows = max_rows
        self._rows: dict[tuple[str, str], UsageRow] = {}
        self.hit_bytes: Counter[str] = Counter()
        """Bytes of blocks returned to clients, by source tier."""
        self.saved_bytes = 0
        """Bytes of committed blocks."""
        self.load_s = Histogram()
        """Time from a load's start to its last block in L2."""

    def row(self, tenant: str, traffic_label: str) -> UsageRow:
        """The row of a tenant and traffic label, or the `OTHER` row that it is counted under."""
        name = (tenant, traffic_label)
        if name not in self._rows and len(self._rows) >= self._max_rows:
            name = (tenant, OTHER)
            if name not in self._rows and len(self._rows) >= 2 * self._max_rows:
                name = (OTHER, OTHER)
        if name not in self._rows:
            self._rows[name] = UsageRow(*name)
        return self._rows[name]

    def session(self, namespace: Namespace, tenant: str, traffic_label: str) -> SessionUsage:
        """The counters of one session."""
        row = self.row(tenant, traffic_label)
        return SessionUsage(self, row, namespace.block_tokens, namespace.block_bytes)

    def on_frame_read(self, namespace: Namespace | None, tenant: str, tier: str) -> None:
        """Count a block requested as a frame, and its source tier ("": a miss).

        A block of an unknown namespace has an unknown number of tokens, so it is not counted.
        """
        if namespace is None:
            return
        row = self.row(tenant, HTTP_TRAFFIC)
        row.lookup_tokens += namespace.block_tokens
        if tier:
            row.hit_tokens[tier] += namespace.block_tokens
            self.hit_bytes[tier] += namespace.block_bytes

    def snapshot(self) -> dict[str, Any]:
        """For statistics: "users" (one row each), "hit_bytes" (by tier), "saved_bytes",
        "load_seconds" (histogram)."""
        return {
            "users": [
                {
                    "tenant": row.tenant,
                    "traffic": row.traffic_label,
                    "lookup_tokens": row.lookup_tokens,
                    "saved_tokens": row.saved_tokens,
                    "hit_tokens": dict(row.hit_tokens),
                }
                for row in self._rows.values()
            ],
            "hit_bytes": dict(self.hit_bytes),
            "saved_bytes": self.saved_bytes,
            "load_seconds": self.load_s.snapshot(),
        }


class SessionUsage:
    """Counts the lookups, loads and saves of one session.

    An engine looks up a queued request again and again until the request starts. Its prefix counts
    once: the same prefix is counted again only after it was loaded. A load without a lookup counts
    as a lookup too, so hits never exceed lookups.
    """

    def __init__(
        self, counters: UsageCounters, row: UsageRow, block_tokens: int, block_bytes: int
    ) -> None:
        self._counters = counters
        self._row = row
        self._block_tokens = block_tokens
        self._block_bytes = block_bytes
        self._open: OrderedDict[bytes, dict[tuple[bytes, int], None]] = OrderedDict()
        """Open lookups, oldest first: first hash -> (last hash, blocks)."""

    def on_lookup(self, hashes: Sequence[bytes]) -> None:
        """Count a match, unless its prefix has an open lookup."""
        if not hashes:
            return
        prefixes = self._open.setdefault(hashes[0], {})
        prefix = (hashes[-1], len(hashes))
        if prefix in prefixes:
            return
        if len(prefixes) >= MAX_OPEN_LOOKUPS:
            prefixes.clear()
        prefixes[prefix] = None
        self._row.lookup_tokens += len(hashes) * self._block_tokens
        if len(self._open) > MAX_OPEN_LOOKUPS:
            self._open.popitem(last=False)

    def on_load_start(self, hashes: Sequence[bytes]) -> None:
        """Close the lookup of a loaded prefix; a load may take only the front of it."""
        if not hashes:
            return
        prefixes = self._open.get(hashes[0], {})
        prefix = (hashes[-1], len(hashes))
        if prefixes and prefix not in prefixes:
            # The load takes the front of a longer prefix: of several, the latest lookup.
            prefix = next((each for each in reversed(prefixes) if each[1] >= len(hashes)), prefix)
        if prefix not in prefixes:
            self._row.lookup_tokens += len(hashes) * self._block_tokens
            return
        del prefixes[prefix]
        if not prefixes:
            del self._open[hashes[0]]

    def on_hit(self, tiers: Sequence[str]) -> None:
        """Count blocks returned to the client; one source tier for each, at least one."""
        hit_tokens, hit_bytes = self._row.hit_tokens, self._counters.hit_bytes
        one_tier = tiers.count(tiers[0]) == len(tiers)  # the usual case: one addition for all
        for tier, blocks in ((tiers[0], len(tiers)),) if one_tier else Counter(tiers).items():
            hit_tokens[tier] += blocks * self._block_tokens
            hit_bytes[tier] += blocks * self._block_bytes

    def on_load_end(self, seconds: float) -> None:
        """Record the duration of a load."""
        self._counters.load_s.observe(seconds)

    def on_save(self, blocks: int) -> None:
        """Count committed blocks."""
        self._row.saved_tokens += blocks * self._block_tokens
        self._counters.saved_bytes += blocks * self._block_bytes
