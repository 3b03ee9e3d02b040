"""Configuration reload without a restart: on SIGHUP, and on an administrator's request.

A reload applies all changes or none. It reads and checks the whole configuration, and rejects
changes that need a restart. Only then does it apply the changes, by steps that cannot fail.

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
from kvstore.service.http.app import Service, bearer_token
from kvstore.store.assembly import tier_config

log = logging.getLogger(__name__)

RELOADABLE: Final = frozenset(
    {
        "l2.ttl",
        "l2.max_pinned_fraction",
        "l2.quota",
        "tiers.read_bandwidth_limit",
        "tiers.write_bandwidth_limit",
        "tiers.queue_time",
        "tiers.quota",
        "write.policy",
        "write.selective_hits",
        "server.auth_tokens",
        "server.admin_auth_token",
        "limits.max_clients",
        "limits.write_queue_blocks",
        "limits.tier_timeout",
        "limits.breaker_failures",
        "limits.breaker_reset",
        "limits.handshake_timeout",
        "limits.http_transfer_timeout",
        "limits.shutdown_drain_timeout",
        "log.format",
        "log.level",
    }
)
"""Keys that can change while the sidecar runs."""
ENGINE_SECTIONS: Final = frozenset({"prefetch"})
"""Tables that the sidecar does not use: engines read them at their start."""
SECRET_KEYS: Final = frozenset({"server.auth_tokens", "server.admin_auth_token"})
MAX_SHOWN_CHARS: Final = 80


class RestartRequired(ConfigError):
    """A key changed that can change only with a restart."""


@dataclass(frozen=True)
class Change:
    """One key whose value differs. path: with the tier's number; key: without it."""

    path: str
    key: str
    old: Any
    new: Any

    def as_json(self) -> dict[str, Any]:
        """The change for JSON and logs, without secret values."""
        if self.key in SECRET_KEYS:
            return {"key": self.path}
        return {"key": self.path, "old": _shown(self.old), "new": _shown(self.new)}


class Reloader:
    """Keeps the settings in force, and reloads them.

    read: reads the settings again; None without a configuration file.
    prepare: checks settings that differ only in `RELOADABLE` keys, and returns a function that
        applies them and cannot fail.
    announce: called with one line after a reload by a signal.
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
        self._counts = {"applied": 0, "rejected": 0}
        self._last_s = 0.0
        self._failed = False
        self._lock = threading.Lock()
        # A signal handler may run at any point; SimpleQueue is safe to use there.
        self._signals: queue.SimpleQueue[bool] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._follow_signals, name="reload", daemon=True)

    def start(self) -> None:
        """Start to handle signals."""
        self._thread.start()

    def close(self) -> None:
        """End the thread."""
        self._signals.put(False)
        self._thread.join()

    def on_signal(self, number: int, frame: object) -> None:
        """Handle SIGHUP."""
        self._signals.put(True)

    def snapshot(self) -> dict[str, Any]:
        """For statistics: number of reloads "applied" and "rejected"; "in_force": 1 if the last
        reload was applied, or none was tried; "applied_at_s": time of the last applied reload
        (seconds since the epoch; 0: never)."""
        return {**self._counts, "in_force": int(not self._failed), "applied_at_s": self._last_s}

    def reload(self) -> list[Change]:
        """Read, check and apply the configuration. Returns the changes.

        Raises ConfigError: the file is invalid. RestartRequired: a change needs a restart. Nothing
        has changed then.
        """
        with self._lock:
            self._failed = True
            try:
                changes = self._reload()
            except Exception:
                self._counts["rejected"] += 1
                raise
            self._counts["applied"] += 1
            self._failed, self._last_s = False, time.time()
            return changes

    def _reload(self) -> list[Change]:
        if self._read is None:
            raise ConfigError("cannot reload: the sidecar was started without --config")
        settings = self._read()
        changes = list(changes_between(self.settings, settings))
        fixed = [change.path for change in changes if not _may_change(change)]
        if fixed:
            raise RestartRequired(
                f"{', '.join(fixed)} cannot change without a restart of the sidecar; "
                "nothing was changed"
            )
        apply = self._prepare(settings)
        apply()
        self.settings = settings
        for change in changes:
            log.info("configuration changed: %s", change.as_json())
        return changes

    def _follow_signals(self) -> None:
        while self._signals.get():
            while not self._signals.empty():  # one reload is enough for all queued signals
                if not self._signals.get():
                    return
            try:
                changes = self.reload()
            except ConfigError as error:
                log.error("configuration not reloaded: %s", " ".join(str(error).split()))
            except Exception:
                log.exception("configuration not reloaded: internal error")
            else:
                names = ", ".join(change.path for change in changes)
                self._announce(f"kvstore reloaded: {names or 'nothing has changed'}")


def changes_between(old: Settings, new: Settings) -> Iterator[Change]:
    """Every key whose value differs. A different number of tiers is one change."""
    for section in Settings.model_fields:
        was, now = getattr(old, section), getattr(new, section)
        if section != "tiers":
            yield from _differing(was, now, section, section)
        elif len(was) != len(now):
            yield Change("tiers", "tiers", len(was), len(now))
        else:
            for index, (before, after) in enumerate(zip(was, now, strict=True)):
                where = f"tiers.{index}"
                yield from _differing(before, after, where, "tiers")
                if before.kind == after.kind:
                    parts = tier_config(before, where), tier_config(after, where)
                    yield from _differing(*parts, where, "tiers", skip="name")


def _differing(
    was: BaseModel, now: BaseModel, path: str, key: str, skip: str = ""
) -> Iterator[Change]:
    for name in type(was).model_fields:
        before, after = getattr(was, name), getattr(now, name)
        if before != after and name != skip:
            yield Change(f"{path}.{name}", f"{key}.{name}", before, after)


def _may_change(change: Change) -> bool:
    return change.key in RELOADABLE or change.key.partition(".")[0] in ENGINE_SECTIONS


def _shown(value: Any) -> Any:
    if isinstance(value, bool | int | float):
        return value
    text = str(value)
    return text if len(text) <= MAX_SHOWN_CHARS else text[:MAX_SHOWN_CHARS] + "..."


def add_reload(app: FastAPI, service: Service, reloader: Reloader) -> None:
    """Add the route; it requires the administrator."""

    @app.post("/v1/reload")
    async def reload(request: Request) -> dict[str, Any]:
        service.tenants.check_admin(bearer_token(request))
        try:
            changes = await service.run_admin_call(reloader.reload)
        except RestartRequired as error:
            raise HTTPException(409, str(error)) from None
        return {
            "changed": [change.as_json() for change in changes if change.key in RELOADABLE],
            "for_engines": [change.path for change in changes if change.key not in RELOADABLE],
        }
