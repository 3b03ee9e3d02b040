"""Who asked for how many tokens, and which tier answered: counters by tenant and route.

A *route* is a word by which a client says what its traffic is ("chat", "rag"); a client that says
none has the route "". Labels come from outside, so there is a bound on how many are told apart:
after the first `MAX_USERS` pairs of tenant and route, a tenant's new ones are counted under its
route `OTHER`, and those of tenants beyond as many again under a tenant of that name.

All of it is called under the brain's lock, but for `snapshot`, which is too.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, TypeAlias

from kvstore.blocks.key import Namespace
from kvstore.telemetry.histogram import OTHER, Histogram

MAX_USERS: Final = 256
"""Pairs of tenant and route that are told apart."""
MAX_OPEN: Final = 1024
"""Runs asked for and not loaded yet that one session remembers; the oldest go first."""
HTTP_ROUTE: Final = "(http)"
"""Route of blocks that were read as frames."""

Record: TypeAlias = Callable[[str, float, Mapping[str, Any]], None]
"""Told of something that took a while, at its end: its name, seconds, what is known of it."""


class User:
    """What the sessions of one tenant and route have used, in tokens."""

    __slots__ = ("asked", "hits", "route", "saved", "tenant")

    def __init__(self, tenant: str, route: str) -> None:
        self.tenant = tenant
        self.route = route
        self.asked = 0
        """Of runs that were asked for, each once."""
        self.hits: Counter[str] = Counter()
        """Handed over, by the tier they came from."""
        self.saved = 0
        """Committed."""


class Meters:
    """The counters of one store."""

    def __init__(self, max_users: int = MAX_USERS) -> None:
        self._max_users = max_users
        self._users: dict[tuple[str, str], User] = {}
        self.read_bytes: Counter[str] = Counter()
        """Bytes of blocks handed over, by the tier they came from."""
        self.saved_bytes = 0
        """Bytes of blocks committed."""
        self.load_s = Histogram()
        """From a load to the last block of its run."""

    def user(self, tenant: str, route: str) -> User:
        """The counters of a tenant and route; once there are too many, those of all the tenant's
        other routes, and of all other tenants once there are too many of them too."""
        name = (tenant, route)
        if name not in self._users and len(self._users) >= self._max_users:
            name = (tenant, OTHER)
            if name not in self._users and len(self._users) >= 2 * self._max_users:
                name = (OTHER, OTHER)
        if name not in self._users:
            self._users[name] = User(*name)
        return self._users[name]

    def session(self, namespace: Namespace, tenant: str, route: str) -> SessionMeter:
        """The counters of one session."""
        user = self.user(tenant, route)
        return SessionMeter(self, user, namespace.block_tokens, namespace.block_bytes)

    def frame(self, namespace: Namespace | None, tenant: str, tier: str) -> None:
        """A block was asked for as a frame, and came from this tier; "": it was a miss. Where its
        namespace is unknown, so is how many tokens it has: it is not counted."""
        if namespace is None:
            return
        user = self.user(tenant, HTTP_ROUTE)
        user.asked += namespace.block_tokens
        if tier:
            user.hits[tier] += namespace.block_tokens
            self.read_bytes[tier] += namespace.block_bytes

    def snapshot(self) -> dict[str, Any]:
        """For statistics: "users" (asked, saved, hits by tier; tokens), bytes, "load_seconds"."""
        return {
            "users": [
                {
                    "tenant": user.tenant,
                    "route": user.route,
                    "asked": user.asked,
                    "saved": user.saved,
                    "hits": dict(user.hits),
                }
                for user in self._users.values()
            ],
            "read_bytes": dict(self.read_bytes),
            "saved_bytes": self.saved_bytes,
            "load_seconds": self.load_s.snapshot(),
        }


class SessionMeter:
    """What one session asks for and is given.

    A request that waits in an engine's queue is asked for again and again until it starts. Its run
    counts once: until it is loaded, the same run is not counted again. A load whose run was not
    asked for counts as asked, so that hits never exceed what was asked for.
    """

    def __init__(self, meters: Meters, user: User, block_tokens: int, block_bytes: int) -> None:
        self._meters = meters
        self._user = user
        self._block_tokens = block_tokens
        self._block_bytes = block_bytes
        self._open: OrderedDict[bytes, dict[bytes, int]] = OrderedDict()
        """By a run's first hash, runs asked for: by their last hash, their blocks."""

    def asked(self, hashes: Sequence[bytes]) -> None:
        """A match."""
        if not hashes:
            return
        runs = self._open.setdefault(hashes[0], {})
        if hashes[-1] in runs:
            return
        if len(runs) >= MAX_OPEN:
            runs.clear()
        runs[hashes[-1]] = len(hashes)
        self._user.asked += len(hashes) * self._block_tokens
        if len(self._open) > MAX_OPEN:
            self._open.popitem(last=False)

    def loading(self, hashes: Sequence[bytes]) -> None:
        """A load: of a run that was asked for, or the front of one."""
        if not hashes:
            return
        runs = self._open.get(hashes[0], {})
        last = hashes[-1]
        if runs and last not in runs:
            # The front of a longer run; the one asked for last, where there are several.
            longer = (name for name, blocks in reversed(runs.items()) if blocks >= len(hashes))
            last = next(longer, last)
        if runs.pop(last, None) is None:
            self._user.asked += len(hashes) * self._block_tokens
        elif not runs:
            del self._open[hashes[0]]

    def served(self, tiers: Sequence[str]) -> None:
        """Blocks were handed over, each from one of these tiers; there is one at least."""
        hits, read_bytes = self._user.hits, self._meters.read_bytes
        same = tiers.count(tiers[0]) == len(tiers)  # as ever, nearly: one step for all of them
        for tier, blocks in ((tiers[0], len(tiers)),) if same else Counter(tiers).items():
            hits[tier] += blocks * self._block_tokens
            read_bytes[tier] += blocks * self._block_bytes

    def loaded(self, seconds: float) -> None:
        """A load has ended."""
        self._meters.load_s.observe(seconds)

    def saved(self, blocks: int) -> None:
        """Blocks were committed."""
        self._user.saved += blocks * self._block_tokens
        self._meters.saved_bytes += blocks * self._block_bytes
