"""What a user may say in SGLang's extra config, and which SGLang this is made for."""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Mapping
from typing import Any, Final

from pydantic import Field

from kvstore.config.settings import Milliseconds, Section, ServerSettings, validated
from kvstore.errors import ConfigError

log = logging.getLogger(__name__)

TRIED: Final = "0.5.23"
"""The release that every claim here was tried with."""
NOT_OURS: Final = ("backend_name", "module_path", "class_name", "interface_v1")
"""Keys of the extra config that SGLang reads itself and leaves in."""
COPY_THREADS_MAX: Final = 8
"""More threads than this gain nothing: host memory is the limit by then."""


class DeadlineSettings(Section):
    """How long one call may wait for the store; what has not come by then is a miss."""

    base_ms: Milliseconds = 1000.0
    """What every call may wait."""
    per_gib_ms: Milliseconds = 4000.0
    """What a call may wait more for each GiB it moves."""
    cap_ms: Milliseconds = 5000.0
    """No call waits longer."""

    def of(self, nbytes: int) -> float:
        """Seconds that a call that moves `nbytes` may take."""
        return min(self.cap_ms, self.base_ms + self.per_gib_ms * nbytes / (1 << 30)) / 1e3


class BackendSettings(Section):
    """The keys of `--hicache-storage-backend-extra-config` that are ours."""

    socket: str = ServerSettings().socket
    """Unix socket of the node's sidecar."""
    token: str = Field(default="", repr=False)
    """Names the tenant, where the sidecar asks for one."""
    route: str = ""
    """What this engine's traffic is called in the sidecar's metrics: "chat", "rag"."""
    wait_ready_ms: Milliseconds = Field(default=0.0, ge=0)
    """How long SGLang's start waits for a sidecar that is not there yet."""
    embedded: Mapping[str, Any] | None = None
    """A store inside SGLang's process instead: arguments of `kvstore.open`."""
    model: str = ""
    """The model's id; "": SGLang's served name. Servers that share pages must agree on it."""
    revision: str = ""
    """Of its weights; "": the commit of the hub, or a fingerprint of the files."""
    deadline: DeadlineSettings = DeadlineSettings()
    copy_threads: int = Field(default=0, ge=0, le=64)
    """Threads that copy the pages of one batch; 0: one for each core, at most 8."""
    http: str = ""
    """The sidecar's HTTP side ("http://127.0.0.1:8100"), for SGLang's clear; "": no clear."""
    admin_token: str = Field(default="", repr=False)
    """What that HTTP side asks an administrator for."""

    @property
    def threads(self) -> int:
        """Threads that copy, the calling one among them."""
        return self.copy_threads or min(COPY_THREADS_MAX, os.cpu_count() or 1)


def backend_settings(extra: Mapping[str, Any]) -> BackendSettings:
    """Raises ConfigError: an unknown key or a wrong value, in one line."""
    ours = {name: value for name, value in extra.items() if name not in NOT_OURS}
    settings = validated(BackendSettings, ours, "hicache-storage-backend-extra-config")
    if settings.http and not settings.http.startswith(("http://", "https://")):
        raise ConfigError(f"http = {settings.http!r}; one like 'http://127.0.0.1:8100' is right")
    return settings


def check_version(version: str) -> None:
    """Say what was tried; refuse what cannot work.

    Raises ConfigError: an SGLang before 0.5.23, whose host pools and controller are others, or
    another minor release, whose interface nobody has looked at.
    """
    found = re.match(r"(\d+)\.(\d+)\.(\d+)", version)
    release = tuple(int(part) for part in found.groups()) if found else (0, 0, 0)
    tried = tuple(int(part) for part in TRIED.split("."))
    if release[:2] != tried[:2] or release < tried:
        raise ConfigError(
            f"SGLang {version} is not supported: kvstore was tried with {TRIED}, and accepts "
            f"later releases of {tried[0]}.{tried[1]}"
        )
    if release != tried:
        log.warning("SGLang %s was not tried with kvstore; %s was", version, TRIED)


def check_parallel(storage_config: Any) -> None:
    """Raises ConfigError: a way of sharing the work that the backend does not know."""
    if getattr(storage_config, "dcp_size", 1) > 1:
        raise ConfigError(
            f"decode-context parallelism of {storage_config.dcp_size} is not supported by kvstore; "
            "1 is right (leave --dcp-size out), or use SGLang's file backend"
        )
    if getattr(storage_config, "should_split_heads", False):
        raise ConfigError(
            f"tp_lcm_size {storage_config.tp_lcm_size} is not supported by kvstore: servers of "
            "different tensor parallelism do not share pages; leave it out of the extra config"
        )
