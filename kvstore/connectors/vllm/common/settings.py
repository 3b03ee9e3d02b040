"""The keys of kvstore in vLLM's configuration, and the supported releases of vLLM."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, Final, Literal

from pydantic import Field

from kvstore.config.field_types import Milliseconds
from kvstore.config.settings import (
    PrefetchSettings,
    Section,
    ServerSettings,
    validate,
)
from kvstore.connectors.common.pending_lookups import ROUND_TRIP_MS
from kvstore.errors import ConfigError
from kvstore.ipc.client import RESPONSE_TIMEOUT_S
from kvstore.prefetch.factory import prefetch_policy
from kvstore.prefetch.policy import PrefetchPolicy

SUPPORTED_RELEASES: Final = ((0, 32),)
"""Releases (major, minor) that kvstore was tested with."""


class StoreSettings(Section):
    """The store to use, and how it identifies this model. Durations are milliseconds."""

    socket: str = ServerSettings().socket
    """Unix socket of the node's sidecar."""
    auth_token: str = Field(default="", repr=False)
    """Auth token of the tenant, if the sidecar requires one."""
    traffic_label: str = ""
    """Label of this engine's traffic in the sidecar's metrics: "chat", "rag"."""
    store_connect_timeout: Milliseconds = Field(default=0.0, ge=0)
    """How long the engine waits at its start for a sidecar that is not running yet. 0: no wait."""
    response_timeout: Milliseconds = Field(default=1e3 * RESPONSE_TIMEOUT_S, gt=0)
    """After this time without a message the sidecar counts as not responding, and is not used until
    it sends one."""
    embedded: Mapping[str, Any] | None = None
    """Arguments of `kvstore.open`, for a store in the engine's process instead of a sidecar."""
    model: str = ""
    """Id of the model, the same in all engines that share blocks. "": the name that vLLM uses."""
    revision: str = ""
    """Revision of the weights. "": the commit on the hub, or a fingerprint of the files."""


class ConnectorSettings(StoreSettings):
    """`kv_connector_extra_config` of the connector."""

    prefetch: PrefetchSettings = PrefetchSettings()
    """How long a request may wait for blocks of the tiers below L2."""

    @property
    def max_save_wait(self) -> float:
        """Milliseconds that a save may wait for its slots: as long as a load, but at least a round
        trip."""
        return max(ROUND_TRIP_MS, self.prefetch.max_wait)

    def policy(self) -> PrefetchPolicy:
        """The prefetch policy.

        Raises ConfigError: an unknown policy, or one that vLLM cannot follow.
        """
        if self.prefetch.policy == "adaptive":
            raise ConfigError(
                "prefetch.policy = 'adaptive' is not supported: vLLM's connectors cannot compute "
                "the head of a prefix while its tail is loaded; use 'timeout'"
            )
        return prefetch_policy(
            self.prefetch.policy,
            base_wait_ms=self.prefetch.base_wait,
            per_1k_tokens_ms=self.prefetch.per_1k_tokens,
            max_wait_ms=self.prefetch.max_wait,
        )


class TierSettings(StoreSettings):
    """The table of KVStoreTier in `secondary_tiers`."""

    max_wait: Milliseconds = Field(default=2000.0, gt=0)
    """Maximum wait for the answer to a lookup, for a load, and for the slots of a save."""
    on_reset: Literal["forget", "keep"] = "forget"
    """When vLLM resets its host pool, for example after an in-place change of weights. "forget":
    blocks saved before are not used any more. "keep": they still are."""


def connector_settings(extra: Mapping[str, Any]) -> ConnectorSettings:
    """Validate the extra config.

    Raises ConfigError: an unknown key, an invalid value, an unknown prefetch policy.
    """
    settings = validate(ConnectorSettings, extra, "kv_connector_extra_config")
    settings.policy()
    return settings


def check_version(version: str) -> None:
    """Check that this release of vLLM is supported.

    vLLM's interfaces change with every minor release, some of them silently (the KV layout did).

    Raises ConfigError: a release that kvstore was not tested with.
    """
    found = re.match(r"(\d+)\.(\d+)", version)
    release = (int(found[1]), int(found[2])) if found else None
    if release not in SUPPORTED_RELEASES:
        supported = ", ".join(f"{major}.{minor}" for major, minor in SUPPORTED_RELEASES)
        raise ConfigError(f"vLLM {version} is not supported; use {supported}")
