"""What a user may say in vLLM's configuration, and which vLLM this is made for."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, Final, Literal

from pydantic import Field

from kvstore.config.settings import (
    Milliseconds,
    PrefetchSettings,
    Section,
    ServerSettings,
    validated,
)
from kvstore.connectors.common.pending_lookups import ROUND_TRIP_MS
from kvstore.errors import ConfigError
from kvstore.ipc.client import REPLY_LIMIT_S
from kvstore.prefetch.policy import PrefetchPolicy, prefetch_policy

SUPPORTED: Final = ((0, 32),)
"""Releases (major, minor) that every claim here was tried with."""


class StoreSettings(Section):
    """Where the store is, and what it shall call this model."""

    socket: str = ServerSettings().socket
    """Unix socket of the node's sidecar."""
    token: str = Field(default="", repr=False)
    """Names the tenant, where the sidecar asks for one."""
    route: str = ""
    """What this engine's traffic is called in the sidecar's metrics: "chat", "rag"."""
    wait_ready_ms: Milliseconds = Field(default=0.0, ge=0)
    """How long the engine's start waits for a sidecar that is not there yet."""
    reply_limit_ms: Milliseconds = Field(default=1e3 * REPLY_LIMIT_S, gt=0)
    """Silence after which the sidecar counts as hung, and is not asked until it speaks again."""
    embedded: Mapping[str, Any] | None = None
    """A store inside the engine's process instead: arguments of `kvstore.open`."""
    model: str = ""
    """The model's id; "": vLLM's. Engines that share blocks must agree on it."""
    revision: str = ""
    """Of its weights; "": the commit of the hub, or a fingerprint of the files."""


class ConnectorSettings(StoreSettings):
    """`kv_connector_extra_config` of the connector."""

    prefetch: PrefetchSettings = PrefetchSettings()
    """How long a request may wait for blocks from below L2."""

    @property
    def save_ms(self) -> float:
        """How long a save may wait for its slots: as a load may, but at least for an answer."""
        return max(ROUND_TRIP_MS, self.prefetch.cap_ms)

    def policy(self) -> PrefetchPolicy:
        """Raises ConfigError: an unknown policy, or one that vLLM cannot follow."""
        if self.prefetch.policy == "adaptive":
            raise ConfigError(
                "prefetch.policy 'adaptive' computes a run from its front while its end is loaded, "
                "which vLLM's connectors cannot; 'timeout' is right"
            )
        return prefetch_policy(
            self.prefetch.policy,
            base_ms=self.prefetch.base_ms,
            per_ki_token_ms=self.prefetch.per_ki_token_ms,
            cap_ms=self.prefetch.cap_ms,
        )


class TierSettings(StoreSettings):
    """The tier's table in `secondary_tiers`."""

    deadline_ms: Milliseconds = Field(default=2000.0, gt=0)
    """Longest an answer, a load, or slots for a save are waited for."""
    on_reset: Literal["forget", "keep"] = "forget"
    """When vLLM resets its host pool, as around a change of weights in place: whether what was
    saved before is not found any more, or still is."""


def connector_settings(extra: Mapping[str, Any]) -> ConnectorSettings:
    """Raises ConfigError: an unknown key, a wrong value, a prefetch policy that is none."""
    settings = validated(ConnectorSettings, extra, "kv_connector_extra_config")
    settings.policy()
    return settings


def check_version(version: str) -> None:
    """Raises ConfigError: a vLLM whose interfaces this was not tried with.

    They change with every minor release, some of them silently (the layout of KV did).
    """
    found = re.match(r"(\d+)\.(\d+)", version)
    release = (int(found[1]), int(found[2])) if found else None
    if release not in SUPPORTED:
        right = ", ".join(f"{major}.{minor}" for major, minor in SUPPORTED)
        raise ConfigError(f"vLLM {version} is not supported; {right} is")
