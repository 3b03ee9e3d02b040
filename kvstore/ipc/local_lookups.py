"""Lookups that a client answers from the shared index, without a message to the sidecar."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from kvstore.ipc.sidecar_connection import SidecarConnection


class LocalLookups:
    """These lookups of `client.Client`. None of them blocks."""

    _connection: SidecarConnection | None
    _counts: dict[str, int]

    def is_absent(self, name: bytes) -> bool:
        """True if the block is certainly in no tier. False if it may be in one. Sends nothing."""
        connection = self._connection
        return connection is not None and not connection.unresponsive and connection.is_absent(name)

    def cached_prefix_len_packed(self, joined: bytes, size: int) -> int | None:
        """Length of the cached prefix of concatenated hashes of `size` bytes each. None if only
        the sidecar knows. Sends nothing."""
        connection = self._connection
        if connection is None or connection.unresponsive:
            return None
        return connection.cached_prefix_len_packed(joined, size)

    def block_states(self, hashes: Sequence[bytes]) -> list[bool | None]:
        """For each block: True if it is in L2, False if it is certainly in no tier, None if only
        the sidecar knows. Sends nothing."""
        connection = self._connection
        if connection is None or connection.unresponsive:
            return [None] * len(hashes)
        return connection.block_states(hashes)

    def queue_lookup_report(self, get_hashes: Callable[[], Sequence[bytes]]) -> None:
        """Report a lookup that was answered locally to the sidecar, with the next request."""
        self._counts["local_answers"] += 1
        if (connection := self._connection) is not None:
            connection.queue_lookup_report(get_hashes)
