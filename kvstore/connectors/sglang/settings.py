"""The keys of kvstore in SGLang's extra config, and the supported releases of SGLang."""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Mapping
from typing import Any, Final

from pydantic import Field

from kvstore.config.field_types import Milliseconds
from kvstore.config.settings import Section, ServerSettings, validate
from kvstore.errors import ConfigError

log = logging.getLogger(__name__)

TESTED_RELEASE: Final = "0.5.23"
"""The release that kvstore was tested with."""
SGLANG_KEYS: Final = ("backend_name", "module_path", "class_name", "interface_v1")
"""Keys of the extra config that SGLang reads itself and does not remove."""
COPY_THREADS_MAX: Final = 8
"""More threads are not faster: host memory is the bottleneck."""


class MaxWaitSettings(Section):
    """Longest wait of one call, in milliseconds. Pages that arrive later are misses."""

    base: Milliseconds = 1000.0
    """Base wait of a call."""
    per_gib: Milliseconds = 4000.0
    """Additional wait for each GiB that the call transfers."""
    max: Milliseconds = 5000.0
    """Maximum wait of any call."""

    def seconds_for(self, nbytes: int) -> float:
        """Maximum wait, in seconds, of a call that transfers `nbytes`."""
        return min(self.max, self.base + self.per_gib * nbytes / (1 << 30)) / 1e3


class BackendSettings(Section):
    """kvstore's keys in `--hicache-storage-backend-extra-config`. Durations are milliseconds."""

    socket: str = ServerSettings().socket
    """Unix socket of the node's sidecar."""
    auth_token: str = Field(default="", repr=False)
    """Auth token of the tenant, if the sidecar requires one."""
    traffic_label: str = ""
    """Label of this engine's traffic in the sidecar's metrics: "chat", "rag"."""
    store_connect_timeout: Milliseconds = Field(default=0.0, ge=0)
    """How long SGLang waits at its start for a sidecar that is not running yet. 0: no wait."""
    embedded: Mapping[str, Any] | None = None
    """Arguments of `kvstore.open`, for a store in SGLang's process instead of a sidecar."""
    model: str = ""
    """Id of the model, the same in all servers that share pages. "": SGLang's served name."""
    revision: str = ""
    """Revision of the weights. "": the commit on the hub, or a fingerprint of the files."""
    max_wait: MaxWaitSettings = MaxWaitSettings()
    """Longest wait of one call for the store."""
    copy_threads: int = Field(default=0, ge=0, le=64)
    """Number of threads that copy the pages of a batch. 0: one for each core, at most 8."""
    http: str = ""
    """HTTP address of the sidecar ("http://127.0.0.1:8100"), for SGLang's clear. "": no clear."""
    admin_auth_token: str = Field(default="", repr=False)
    """Admin auth token of the sidecar, if it requires one."""

    @property
    def threads(self) -> int:
        """Number of threads that copy, including the calling one."""
        return self.copy_threads or min(COPY_THREADS_MAX, os.cpu_count() or 1)


def backend_settings(extra: Mapping[str, Any]) -> BackendSettings:
    """Validate the extra config.

    Raises ConfigError: an unknown key or an invalid value, in one line.
    """
    own = {name: value for name, value in extra.items() if name not in SGLANG_KEYS}
    settings = validate(BackendSettings, own, "hicache-storage-backend-extra-config")
    if settings.http and not settings.http.startswith(("http://", "https://")):
        raise ConfigError(
            f"http = {settings.http!r} is not a URL; use one like 'http://127.0.0.1:8100'"
        )
    return settings


def check_version(version: str) -> None:
    """Check the release of SGLang; warn about a patch release that was not tested.

    Raises ConfigError: an SGLang before 0.5.23, which has other host pools and another controller,
    or another minor release, whose interface may differ.
    """
    found = re.match(r"(\d+)\.(\d+)\.(\d+)", version)
    release = tuple(int(part) for part in found.groups()) if found else (0, 0, 0)
    tested = tuple(int(part) for part in TESTED_RELEASE.split("."))
    if release[:2] != tested[:2] or release < tested:
        raise ConfigError(
            f"SGLang {version} is not supported; use {TESTED_RELEASE} or a later release of "
            f"{tested[0]}.{tested[1]}"
        )
    if release != tested:
        log.warning(
            "SGLang %s was not tested with kvstore; it was tested with %s", version, TESTED_RELEASE
        )


def check_parallel(storage_config: Any) -> None:
    """Raises ConfigError: a kind of parallelism that the backend does not support."""
    if getattr(storage_config, "dcp_size", 1) > 1:
        raise ConfigError(
            f"decode-context parallelism of {storage_config.dcp_size} is not supported by kvstore; "
            "omit --dcp-size, or use SGLang's file backend"
        )
    if getattr(storage_config, "should_split_heads", False):
        raise ConfigError(
            f"tp_lcm_size = {storage_config.tp_lcm_size} is not supported by kvstore: servers with "
            "different tensor parallelism do not share pages; omit it in the extra config"
        )
