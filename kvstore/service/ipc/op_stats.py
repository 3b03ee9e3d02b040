"""What the hot path hears, for statistics: how long each verb takes, which runs are asked for."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final, TypeAlias

from kvstore.ipc.protocol import Verb
from kvstore.store.session import Session
from kvstore.telemetry.histogram import Histogram
from kvstore.telemetry.usage_counters import Record

Asked: TypeAlias = Callable[[str, str, Sequence[bytes]], None]
"""Told of a run that is asked for: tenant, namespace digest, hashes. Must return at once."""

VERBS: Final = (Verb.MATCH, Verb.LOAD, Verb.SAVE, Verb.COMMIT, Verb.RELEASE, Verb.PING)


class Ears:
    """Shared by all connections; called from their threads."""

    def __init__(self, asked: Asked | None, record: Record | None) -> None:
        self._asked = asked
        self._record = record
        self._seconds = {int(verb): Histogram() for verb in VERBS}

    def handled(self, verb: int, seconds: float, session: Session) -> None:
        """A client's verb was handled in so many seconds."""
        histogram = self._seconds.get(verb)
        if histogram is None:
            return
        histogram.observe(seconds)
        if self._record is not None and verb != Verb.PING:
            about = {
                "kvstore.tenant": session.tenant,
                "kvstore.namespace": session.namespace.digest,
            }
            self._record(f"verb {Verb(verb).name.lower()}", seconds, about)

    def matched(self, session: Session, hashes: Sequence[bytes]) -> None:
        """A client asks for a run."""
        if self._asked is not None:
            self._asked(session.tenant, session.namespace.digest, hashes)

    def seconds(self) -> dict[str, Any]:
        """By the verb's name, how long handling takes (histograms)."""
        return {
            Verb(verb).name.lower(): histogram.snapshot()
            for verb, histogram in self._seconds.items()
        }
