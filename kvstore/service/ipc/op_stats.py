"""Statistics of the socket: the time of each operation, and the prefixes that clients look up."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final, TypeAlias

from kvstore.ipc.protocol import MessageType
from kvstore.store.session import Session
from kvstore.telemetry.histogram import Histogram
from kvstore.telemetry.usage_counters import Record

OnLookup: TypeAlias = Callable[[str, str, Sequence[bytes]], None]
"""Called for each prefix lookup: tenant, namespace digest, hashes. Must return at once."""

OPERATIONS: Final = (
    MessageType.MATCH,
    MessageType.LOAD,
    MessageType.SAVE,
    MessageType.COMMIT,
    MessageType.RELEASE,
    MessageType.PING,
)


class OpStats:
    """Statistics of all connections; called from their threads."""

    def __init__(self, on_lookup: OnLookup | None, record: Record | None) -> None:
        self._on_lookup = on_lookup
        self._record = record
        self._seconds = {int(operation): Histogram() for operation in OPERATIONS}

    def record_request(self, operation: int, seconds: float, session: Session) -> None:
        """Record the time that the sidecar took to handle one request."""
        histogram = self._seconds.get(operation)
        if histogram is None:
            return
        histogram.observe(seconds)
        if self._record is not None and operation != MessageType.PING:
            about = {
                "kvstore.tenant": session.tenant,
                "kvstore.namespace": session.namespace.digest,
            }
            self._record(f"request {MessageType(operation).name.lower()}", seconds, about)

    def record_lookup(self, session: Session, hashes: Sequence[bytes]) -> None:
        """Report a client's lookup of a prefix."""
        if self._on_lookup is not None:
            self._on_lookup(session.tenant, session.namespace.digest, hashes)

    def request_seconds(self) -> dict[str, Any]:
        """Histograms of the handling time, by the operation's name."""
        return {
            MessageType(operation).name.lower(): histogram.snapshot()
            for operation, histogram in self._seconds.items()
        }
