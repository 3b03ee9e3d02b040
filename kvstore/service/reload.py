"""Reading the configuration anew without a restart: on SIGHUP, and when an administrator asks.

All of it takes effect or nothing: what is read is checked whole, what cannot change while the
sidecar runs is looked for, and only then is anything set, by steps that cannot fail.

    POST /v1/reload
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Final

from fastapi import FastAPI, HTTPException, Request
from pydantic import BaseModel

from kvstore.config.settings import Settings
from kvstore.errors import ConfigError
from kvstore.service.http.app import Service, bearer
from kvstore.store.assembly import tier_config

log = logging.getLogger(__name__)

RELOADS: Final = frozenset(
    {
        "l2.ttl_ms",
        "l2.pin_share",
        "l2.quota",
        "tiers.read_rate",
        "tiers.write_rate",
        "tiers.queue_ms",
        "tiers.quota",
        "write.policy",
        "write.selective_hits",
        "server.tokens",
        "server.admin_token",
        "limits.clients",
        "limits.queue_blocks",
        "limits.tier_deadline_ms",
        "limits.breaker_failures",
        "limits.breaker_reset_ms",
        "limits.hello_ms",
        "limits.transfer_ms",
        "limits.flush_ms",
        "log.format",
        "log.level",
    }
)
"""Keys that can change while the sidecar runs."""
ENGINES: Final = frozenset({"prefetch"})
"""Tables that the sidecar itself has no use for: engines read them when they start."""
SECRET: Final = frozenset({"server.tokens", "server.admin_token"})
MAX_SHOWN_CHARS: Final = 80


class RestartNeeded(ConfigError):
    """Something changed that cannot while the sidecar runs."""


@dataclass(frozen=True)
class Change:
    """One key whose value differs. path: with the tier's number in it; key: without."""

    path: str
    key: str
    was: Any
    now: Any

    def plain(self) -> dict[str, Any]:
        """As JSON has it; secrets are not in it."""
        if self.key in SECRET:
            return {"key": self.path}
        return {"key": self.path, "was": _shown(self.was), "now": _shown(self.now)}


class Reloader:
    """Holds the settings in force.

    read: reads them anew; None: there is nothing to read. prepare: checks settings that differ in
    `RELOADS` only, and gives what sets them, which cannot fail. announce: told of what a signal
    has done, in one line.
    """

    def __init__(
        self,
        settings: Settings,
        read: Callable[[], Settings] | None,
        prepare: Callable[[Settings], Callable[[], None]],
        announce: Callable[[str], None],
    ) -> None:
        self.settings = settings
        self._read = read
        self._prepare = prepare
        self._announce = announce
        self._counts = {"applied": 0, "refused": 0}
        self._last_s = 0.0
        self._failed = False
        self._turn = threading.Lock()
        # A signal's handler interrupts anything; this queue is made to be filled from there.
        self._signals: queue.SimpleQueue[bool] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._follow_signals, name="reload", daemon=True)

    def start(self) -> None:
        """Begin to follow signals."""
        self._thread.start()

    def close(self) -> None:
        """End the thread."""
        self._signals.put(False)
        self._thread.join()

    def told(self, number: int, frame: object) -> None:
        """The handler of SIGHUP."""
        self._signals.put(True)

    def snapshot(self) -> dict[str, Any]:
        """For statistics: how often the configuration was set anew ("applied"), and was not
        ("refused"); "in_force": whether the last try took effect (before the first: 1), and
        "applied_at_s", when one last did (seconds since the epoch; 0: never)."""
        return {**self._counts, "in_force": int(not self._failed), "applied_at_s": self._last_s}

    def reload(self) -> list[Change]:
        """Read, check, set; what is different now.

        Raises ConfigError: the file is wrong, or (RestartNeeded) changes what cannot change.
        Nothing is different then.
        """
        with self._turn:
            self._failed = True
            try:
                changes = self._reload()
            except Exception:
                self._counts["refused"] += 1
                raise
            self._counts["applied"] += 1
            self._failed, self._last_s = False, time.time()
            return changes

    def _reload(self) -> list[Change]:
        if self._read is None:
            raise ConfigError("the sidecar was started without --config; there is no file to read")
        settings = self._read()
        changes = list(changes_between(self.settings, settings))
        fixed = [change.path for change in changes if not _may_change(change)]
        if fixed:
            raise RestartNeeded(
                f"{', '.join(fixed)} cannot change while the sidecar runs: restart it; "
                "nothing was changed"
            )
        set_them = self._prepare(settings)
        set_them()
        self.settings = settings
        for change in changes:
            log.info("configuration: %s", change.plain())
        return changes

    def _follow_signals(self) -> None:
        while self._signals.get():
            while not self._signals.empty():  # one reload does for all that came meanwhile
                if not self._signals.get():
                    return
            try:
                changes = self.reload()
            except ConfigError as error:
                log.error("not reloaded: %s", " ".join(str(error).split()))
            except Exception:
                log.exception("not reloaded, by a mistake")
            else:
                names = ", ".join(change.path for change in changes)
                self._announce(f"kvstore reloaded: {names or 'nothing has changed'}")


def changes_between(old: Settings, new: Settings) -> Iterator[Change]:
    """Every key whose value differs. Another number of tiers is one change."""
    for section in Settings.model_fields:
        was, now = getattr(old, section), getattr(new, section)
        if section != "tiers":
            yield from _differing(was, now, section, section)
        elif len(was) != len(now):
            yield Change("tiers", "tiers", len(was), len(now))
        else:
            for index, (one, other) in enumerate(zip(was, now, strict=True)):
                where = f"tiers.{index}"
                yield from _differing(one, other, where, "tiers")
                if one.kind == other.kind:
                    parts = tier_config(one, where), tier_config(other, where)
                    yield from _differing(*parts, where, "tiers", skip="name")


def _differing(
    was: BaseModel, now: BaseModel, path: str, key: str, skip: str = ""
) -> Iterator[Change]:
    for name in type(was).model_fields:
        before, after = getattr(was, name), getattr(now, name)
        if before != after and name != skip:
            yield Change(f"{path}.{name}", f"{key}.{name}", before, after)


def _may_change(change: Change) -> bool:
    return change.key in RELOADS or change.key.partition(".")[0] in ENGINES


def _shown(value: Any) -> Any:
    if isinstance(value, bool | int | float):
        return value
    text = str(value)
    return text if len(text) <= MAX_SHOWN_CHARS else text[:MAX_SHOWN_CHARS] + "..."


def add_reload(app: FastAPI, service: Service, reloader: Reloader) -> None:
    """The route, for the administrator alone."""

    @app.post("/v1/reload")
    async def reload(request: Request) -> dict[str, Any]:
        service.tenants.check_admin(bearer(request))
        try:
            changes = await service.look_after(reloader.reload)
        except RestartNeeded as error:
            raise HTTPException(409, str(error)) from None
        return {
            "changed": [change.plain() for change in changes if change.key in RELOADS],
            "for_engines": [change.path for change in changes if change.key not in RELOADS],
        }
