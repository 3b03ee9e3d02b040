"""The composition root: builds a store from the configuration.

`open` runs a store inside this process. `connect` connects to the store of the node's sidecar.
`Store.session` and `Client` have the same interface, `interface.BlockStore`.
"""

from __future__ import annotations

import importlib
import pkgutil
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any, Final

from pydantic import BaseModel

from kvstore import codecs, tiers
from kvstore.blocks.frame import MAX_TENANT_BYTES
from kvstore.blocks.hashing import check_algorithm
from kvstore.blocks.key import DTYPE_BYTES, Namespace
from kvstore.cache.eviction import check_eviction
from kvstore.cache.quotas import OTHER_TENANTS
from kvstore.cache.write_policy import WritePolicy, write_policy
from kvstore.config.renamed import refuses_old_arguments
from kvstore.config.settings import (
    LimitSettings,
    ServerSettings,
    Settings,
    TierSettings,
    TraceSettings,
    suggest,
    validate,
)
from kvstore.config.units import format_bytes, without_login
from kvstore.errors import ConfigError
from kvstore.ipc.client import RESPONSE_TIMEOUT_S, Client
from kvstore.prefetch.factory import prefetch_policy
from kvstore.prefetch.policy import PrefetchPolicy
from kvstore.shm.slab import Slab
from kvstore.store.limits import StoreLimits
from kvstore.store.locator import L2
from kvstore.store.store import Store
from kvstore.telemetry import logs
from kvstore.telemetry.traffic import OTHER
from kvstore.telemetry.usage_counters import Record
from kvstore.tiers.base import Tier
from kvstore.tiers.rate_limit import RateLimit
from kvstore.tiers.tenant_quota import TenantQuotas
from kvstore.tiers.wrappers import CallTimeout, CircuitBreaker, iter_layers

DISK_CAPACITY: Final = "10GiB"
"""Default capacity of a disk tier."""
_TIER_NAME: Final = re.compile(r"[A-Za-z0-9_.-]{1,64}")


@refuses_old_arguments
def open(
    l2: str | int = "1GiB",
    slot_bytes: str | int = "2MiB",
    *,
    disk: str | Path | None = None,
    disk_capacity: str | int = DISK_CAPACITY,
    write: str = "write_through",
    eviction: str = "lru",
    codec: str = "auto",
    tiers: tuple[Mapping[str, Any], ...] = (),
    config: str | Path | None = None,
) -> Store:
    """Open a store inside this process, without a sidecar. The caller must close it.

    l2: size of the slab. slot_bytes: size of a slot, at least one block. disk: directory of a disk
    tier; its blocks survive the process. disk_capacity: maximum size of the disk tier. tiers:
    further tiers, as tables of the configuration. config: a TOML file; the other arguments
    override it. KVSTORE_* variables are not read.

    Raises ConfigError: an invalid value, in one line.
    """
    lower_tiers = [dict(table) for table in tiers]
    if disk is not None:
        lower_tiers.insert(0, disk_table(disk, disk_capacity, codec))
    overrides: dict[str, Any] = {
        "l2": {"bytes": l2, "slot_bytes": slot_bytes, "eviction": eviction},
        "write": {"policy": write},
    }
    if lower_tiers or config is None:
        overrides["tiers"] = lower_tiers
    return build_store(Settings.load(config, overrides, environment=False))


@refuses_old_arguments
def connect(
    socket_path: str,
    namespace: Namespace,
    auth_token: str | None = None,
    *,
    name: str = "",
    traffic_label: str = "",
    response_timeout_s: float = RESPONSE_TIMEOUT_S,
    connect_timeout_s: float = 0.0,
) -> Client:
    """Connect to the sidecar at `socket_path`; see `client.Client`.

    Raises ConfigError: the sidecar rejects the client (slot size, auth token, protocol version).
    """
    return Client(
        socket_path,
        namespace,
        auth_token=auth_token,
        name=name,
        traffic_label=traffic_label,
        response_timeout_s=response_timeout_s,
        connect_timeout_s=connect_timeout_s,
    )


def disk_table(directory: str | Path, capacity: str | int, codec: str) -> dict[str, Any]:
    """The configuration's table of a disk tier."""
    return {"kind": "disk", "directory": str(directory), "capacity": capacity, "codec": codec}


def build_store(settings: Settings, record: Record | None = None) -> Store:
    """Build the store of a configuration. The cheap checks come first, the slab last.

    record: see `Store`.

    Raises ConfigError: an unknown name, or a missing resource (memory, a directory).
    """
    check_settings(settings)
    with ExitStack() as undo:
        lower_tiers: list[Tier] = []
        for index, tier_settings in enumerate(settings.tiers):
            tier = open_tier(tier_settings, f"tiers.{index}")
            undo.callback(tier.close)
            lower_tiers.append(_wrap(tier, tier_settings, settings.limits))
        slab = Slab.create(
            settings.l2.bytes // settings.l2.slot_bytes,
            settings.l2.slot_bytes,
            directory=settings.l2.shm_directory or None,
            huge_pages=settings.l2.huge_pages,
        )
        undo.callback(slab.close)
        store = Store(
            slab,
            lower_tiers,
            write_policy=_write_policy(settings),
            eviction=settings.l2.eviction,
            codecs={tier.label: tier.codec for tier in settings.tiers},
            limits=_store_limits(settings),
            record=record,
        )
        undo.pop_all()
    if settings.l2.warm_fraction:
        store.warmer.start(settings.l2.warm_fraction)
    return store


def check_settings(settings: Settings) -> None:
    """Raise ConfigError for the first invalid setting, before anything is created."""
    for _, message in config_errors(settings):
        raise ConfigError(message)


def config_errors(settings: Settings) -> Iterator[tuple[Sequence[str], str]]:
    """Check settings whose types are valid. Yields (keys or tables of the error, message).

    Creates no files, opens nothing and connects to nothing.
    """
    l2 = settings.l2
    if l2.bytes < l2.slot_bytes:
        yield (
            ("l2.bytes", "l2.slot_bytes"),
            f"l2.bytes = {format_bytes(l2.bytes)} is less than one slot of "
            f"{format_bytes(l2.slot_bytes)}; "
            "raise it (--l2) or lower l2.slot_bytes (--slot-bytes)",
        )
    checks: list[tuple[Sequence[str], Callable[[], object]]] = [
        (("l2.eviction",), lambda: check_eviction(l2.eviction)),
        (("l2.quota", "l2.slot_bytes"), lambda: _store_limits(settings).quota_slots(l2.slot_bytes)),
        (("write",), lambda: _write_policy(settings)),
        (("prefetch",), lambda: build_prefetch_policy(settings)),
        (("log",), lambda: logs.check(settings.log)),
        (("hash.algorithm",), lambda: check_algorithm(settings.hash.algorithm)),
        (("server",), lambda: _check_server(settings.server)),
        (("trace",), lambda: _check_trace(settings.trace)),
    ]
    labels = [tier.label for tier in settings.tiers]
    for index, tier in enumerate(settings.tiers):
        where = f"tiers.{index}"
        checks += [
            ((where,), partial(_check_tier_name, tier.label)),
            ((where,), partial(_check_codec, tier.codec)),
            ((where,), partial(tier_config, tier, where)),
        ]
        if tier.label in (L2, *labels[:index]):
            yield (
                (where,),
                f"{where}: tier name {tier.label!r} is used twice; tier names must be distinct",
            )
    for keys, function in checks:
        try:
            function()
        except ConfigError as error:
            named = not keys[0].startswith("tiers.") or keys[0] in str(error)
            yield keys, str(error) if named else f"{keys[0]}: {error}"


def _check_tier_name(name: str) -> None:
    """Check a tier's name: metrics, URLs and log lines contain it."""
    if not _TIER_NAME.fullmatch(name):
        raise ConfigError(f"invalid tier name {name[:80]!r}: use 1 to 64 letters, digits and _ . -")


def _check_server(server: ServerSettings) -> None:
    """Check auth tokens and tenants. No message contains a token."""
    for token, tenant in server.auth_tokens.items():
        if not token:
            raise ConfigError(f"server.auth_tokens: the token of {tenant[:80]!r} is empty")
        nbytes = len(tenant.encode("utf-8", "replace"))
        valid = 1 <= nbytes <= MAX_TENANT_BYTES and tenant.isprintable()
        if not valid or tenant in (OTHER_TENANTS, OTHER):
            raise ConfigError(
                f"server.auth_tokens: invalid tenant {tenant[:80]!r}: use 1 to {MAX_TENANT_BYTES} "
                f"bytes of printable text, except {OTHER_TENANTS!r} and {OTHER!r}"
            )
    if server.kv_events_replay and not server.kv_events_publish:
        raise ConfigError("server.kv_events_replay requires server.kv_events_publish")


def _check_trace(trace: TraceSettings) -> None:
    if trace.endpoint and not trace.endpoint.startswith(("http://", "https://")):
        raise ConfigError(
            f"trace.endpoint = {without_login(trace.endpoint)!r} must be an HTTP URL, such as "
            "http://127.0.0.1:4318"
        )


def _check_codec(name: str) -> None:
    for dtype in DTYPE_BYTES:
        codecs.codec_for(name, dtype)


def build_prefetch_policy(settings: Settings) -> PrefetchPolicy:
    """Build the configured prefetch policy, for a connector."""
    prefetch = settings.prefetch
    return prefetch_policy(
        prefetch.policy,
        base_wait_ms=prefetch.base_wait,
        per_1k_tokens_ms=prefetch.per_1k_tokens,
        max_wait_ms=prefetch.max_wait,
    )


def open_tier(settings: TierSettings, where: str = "tier") -> Tier:
    """Open one tier. where: its table in the configuration, for messages."""
    tier: Tier = tier_module(settings.kind).open(tier_config(settings, where))
    return tier


def tier_config(settings: TierSettings, where: str = "tier") -> BaseModel:
    """The validated configuration of one tier. Does not open the tier.

    Raises ConfigError: an unknown kind, an unknown key or an invalid value.
    """
    module = tier_module(settings.kind)
    values = {"name": settings.label, **(settings.model_extra or {})}
    config: BaseModel = validate(module.Config, values, where)
    check_config: Callable[[BaseModel], object] | None = getattr(module, "check", None)
    if check_config is not None:
        check_config(config)
    return config


def _wrap(tier: Tier, settings: TierSettings, limits: LimitSettings) -> Tier:
    """Wrap a tier: call timeout, circuit breaker, bandwidth limits and tenant quotas, from the
    inside out."""
    wrapped: Tier = CircuitBreaker(
        CallTimeout(tier, limits.tier_timeout / 1e3),
        failures=limits.breaker_failures,
        reset_s=limits.breaker_reset / 1e3,
    )
    wrapped = RateLimit(
        wrapped,
        read_bytes_per_s=settings.read_bandwidth_limit,
        write_bytes_per_s=settings.write_bandwidth_limit,
    )
    return TenantQuotas(wrapped, settings.quota)


def prepare_reload(store: Store, settings: Settings) -> Callable[[], None]:
    """Check new settings and return a function that applies them to a running store.

    That function cannot fail. It applies the keys in `reload.RELOADS`; all other keys must equal
    those that the store was built from.

    Raises ConfigError: invalid settings; the store is unchanged.
    """
    check_settings(settings)
    apply_limits = store.limit_applier.prepare(_store_limits(settings), _write_policy(settings))

    def apply() -> None:
        for tier, tier_settings in zip(store.limit_applier.tiers, settings.tiers, strict=True):
            for layer in iter_layers(tier):
                _apply_to_wrapper(layer, tier_settings, settings.limits)
        apply_limits()

    return apply


def _apply_to_wrapper(layer: Tier, settings: TierSettings, limits: LimitSettings) -> None:
    """Apply the settings to one wrapper of `_wrap`."""
    if isinstance(layer, CallTimeout):
        layer.timeout_s = limits.tier_timeout / 1e3
    elif isinstance(layer, CircuitBreaker):
        layer.set_limits(limits.breaker_failures, limits.breaker_reset / 1e3)
    elif isinstance(layer, RateLimit):
        layer.set_limits(settings.read_bandwidth_limit, settings.write_bandwidth_limit)
    elif isinstance(layer, TenantQuotas):
        layer.set_limits(settings.quota)


def _store_limits(settings: Settings) -> StoreLimits:
    return StoreLimits(
        queue_blocks=settings.limits.write_queue_blocks,
        queue_s={tier.label: tier.queue_time / 1e3 for tier in settings.tiers},
        quotas=settings.l2.quota,
        max_pinned_fraction=settings.l2.max_pinned_fraction,
        ttl_s=settings.l2.ttl / 1e3,
    )


def _write_policy(settings: Settings) -> WritePolicy:
    return write_policy(settings.write.policy, selective_hits=settings.write.selective_hits)


def tier_module(kind: str) -> ModuleType:
    """Import the module of a tier kind: a kvstore tier by name, a third-party one by dotted
    path."""
    if not all(part.isidentifier() for part in kind.split(".")):
        raise ConfigError(f"unknown tier kind {kind!r}; {suggest(kind, _tier_kinds())}")
    name = kind if "." in kind else f"{tiers.__name__}.{kind}"
    try:
        module = importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is None or not (name == error.name or name.startswith(f"{error.name}.")):
            raise ConfigError(
                f"tier kind {kind!r} needs the module {error.name!r}, which is not installed"
            ) from None
        raise ConfigError(f"unknown tier kind {kind!r}; {suggest(kind, _tier_kinds())}") from None
    if not _is_tier(module):
        raise ConfigError(
            f"tier kind {kind!r} does not define Config and open(); {suggest(kind, _tier_kinds())}"
        )
    return module


def _tier_kinds() -> list[str]:
    """kvstore's tier kinds, for error messages. Imports every tier module."""
    kinds = []
    for info in pkgutil.iter_modules(tiers.__path__):
        try:
            if _is_tier(importlib.import_module(f"{tiers.__name__}.{info.name}")):
                kinds.append(info.name)
        except ModuleNotFoundError:
            kinds.append(info.name)  # its library is not installed
    return kinds


def _is_tier(module: ModuleType) -> bool:
    return hasattr(module, "Config") and callable(getattr(module, "open", None))
