"""The composition root: a store out of the configuration, and the two ways to get one.

`open` runs a store inside this process; `connect` joins the one of the node's sidecar. Both give
the same verbs (`verbs.BlockStore`; of a store, `Store.session`).
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
from kvstore.cache.quotas import EVERYBODY
from kvstore.cache.write_policy import WritePolicy, write_policy
from kvstore.config.settings import (
    LimitSettings,
    ServerSettings,
    Settings,
    TierSettings,
    TraceSettings,
    nearest,
    validated,
)
from kvstore.config.units import format_bytes, without_login
from kvstore.errors import ConfigError
from kvstore.ipc.client import REPLY_LIMIT_S, Client
from kvstore.prefetch.policy import PrefetchPolicy, prefetch_policy
from kvstore.shm.slab import Slab
from kvstore.store.limits import Budgets
from kvstore.store.locator import L2
from kvstore.store.store import Store
from kvstore.telemetry import logs
from kvstore.telemetry.histogram import OTHER
from kvstore.telemetry.usage_counters import Record
from kvstore.tiers.base import Tier
from kvstore.tiers.tenant_quota import TenantQuotas
from kvstore.tiers.wrappers import Breaker, Deadline, RateLimit, layers_of

DISK_CAPACITY: Final = "10GiB"
"""Bytes a disk tier keeps where nothing else is said."""
_TIER_NAME: Final = re.compile(r"[A-Za-z0-9_.-]{1,64}")


def open(
    l2: str | int = "1GiB",
    slot: str | int = "2MiB",
    *,
    disk: str | Path | None = None,
    disk_capacity: str | int = DISK_CAPACITY,
    write: str = "write_through",
    eviction: str = "lru",
    codec: str = "auto",
    tiers: tuple[Mapping[str, Any], ...] = (),
    config: str | Path | None = None,
) -> Store:
    """A store inside this process, with no server: close it when done.

    l2: size of the slab; slot: size of its slots, at least one block. disk: a folder for the disk
    tier, which keeps at most disk_capacity and outlives the process. tiers: more tiers, as tables
    of the configuration. config: a TOML file that the other arguments are laid over; the
    environment is not read.

    Raises ConfigError: a wrong value, in one line.
    """
    lower = [dict(table) for table in tiers]
    if disk is not None:
        lower.insert(0, disk_table(disk, disk_capacity, codec))
    overrides: dict[str, Any] = {
        "l2": {"bytes": l2, "slot_bytes": slot, "eviction": eviction},
        "write": {"policy": write},
    }
    if lower or config is None:
        overrides["tiers"] = lower
    return build_store(Settings.load(config, overrides, environment=False))


def connect(
    socket_path: str,
    namespace: Namespace,
    token: str | None = None,
    *,
    name: str = "",
    route: str = "",
    reply_limit_s: float = REPLY_LIMIT_S,
    wait_ready_s: float = 0.0,
) -> Client:
    """A client of the sidecar at `socket_path`; see `client.Client`.

    Raises ConfigError: the sidecar refuses it (slot size, token, version).
    """
    return Client(
        socket_path,
        namespace,
        token=token,
        name=name,
        route=route,
        reply_limit_s=reply_limit_s,
        wait_ready_s=wait_ready_s,
    )


def disk_table(directory: str | Path, capacity: str | int, codec: str) -> dict[str, Any]:
    """The configuration's table of a disk tier."""
    return {"kind": "disk", "directory": str(directory), "capacity": capacity, "codec": codec}


def build_store(settings: Settings, record: Record | None = None) -> Store:
    """The store that the configuration describes. The cheap checks come first, the slab last.

    record: see `Store`.

    Raises ConfigError: a name that is none, or a part that cannot be had (memory, a folder).
    """
    check(settings)
    with ExitStack() as undo:
        lower: list[Tier] = []
        for index, tier_settings in enumerate(settings.tiers):
            tier = open_tier(tier_settings, f"tiers.{index}")
            undo.callback(tier.close)
            lower.append(_guarded(tier, tier_settings, settings.limits))
        slab = Slab.create(
            settings.l2.bytes // settings.l2.slot_bytes,
            settings.l2.slot_bytes,
            directory=settings.l2.directory or None,
            huge_pages=settings.l2.huge_pages,
        )
        undo.callback(slab.close)
        store = Store(
            slab,
            lower,
            write_policy=_write_policy(settings),
            eviction=settings.l2.eviction,
            codecs={tier.label: tier.codec for tier in settings.tiers},
            budgets=_budgets(settings),
            record=record,
        )
        undo.pop_all()
    if settings.l2.warm_share:
        store.warmer.start(settings.l2.warm_share)
    return store


def check(settings: Settings) -> None:
    """Refuse unknown names, and sizes that cannot be, before anything is made."""
    for _, mistake in faults(settings):
        raise ConfigError(mistake)


def faults(settings: Settings) -> Iterator[tuple[Sequence[str], str]]:
    """Everything that is wrong with a tree whose types are right: from which keys or tables that
    is seen, and what it is.

    Nothing is made, opened or asked for it.
    """
    l2 = settings.l2
    if l2.bytes < l2.slot_bytes:
        yield (
            ("l2.bytes", "l2.slot_bytes"),
            f"l2.bytes = {format_bytes(l2.bytes)} holds no slot of {format_bytes(l2.slot_bytes)}; "
            "raise it (--l2) or lower l2.slot_bytes (--slot)",
        )
    checks: list[tuple[Sequence[str], Callable[[], object]]] = [
        (("l2.eviction",), lambda: check_eviction(l2.eviction)),
        (("l2.quota", "l2.slot_bytes"), lambda: _budgets(settings).slots(l2.slot_bytes)),
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
            ((where,), partial(_check_name, tier.label)),
            ((where,), partial(_check_codec, tier.codec)),
            ((where,), partial(tier_config, tier, where)),
        ]
        if tier.label in (L2, *labels[:index]):
            yield (
                (where,),
                f"{where}: the name {tier.label!r} is taken; tiers' names must be distinct",
            )
    for keys, function in checks:
        try:
            function()
        except ConfigError as error:
            named = not keys[0].startswith("tiers.") or keys[0] in str(error)
            yield keys, str(error) if named else f"{keys[0]}: {error}"


def _check_name(name: str) -> None:
    """It stands in metrics, in addresses and in lines of a log."""
    if not _TIER_NAME.fullmatch(name):
        raise ConfigError(
            f"a tier's name {name[:80]!r}: at most 64 letters, digits and _ . - are right"
        )


def _check_server(server: ServerSettings) -> None:
    """A message names no token."""
    for token, tenant in server.tokens.items():
        if not token:
            raise ConfigError(f"server.tokens: the token of {tenant[:80]!r} is empty")
        nbytes = len(tenant.encode("utf-8", "replace"))
        right = 1 <= nbytes <= MAX_TENANT_BYTES and tenant.isprintable()
        if not right or tenant in (EVERYBODY, OTHER):
            raise ConfigError(
                f"server.tokens: a tenant {tenant[:80]!r}; 1 to {MAX_TENANT_BYTES} bytes of "
                f"printable text are right, other than {EVERYBODY!r} and {OTHER!r}"
            )
    if server.kv_events_replay and not server.kv_events_publish:
        raise ConfigError("server.kv_events_replay without server.kv_events_publish")


def _check_trace(trace: TraceSettings) -> None:
    if trace.endpoint and not trace.endpoint.startswith(("http://", "https://")):
        raise ConfigError(
            f"trace.endpoint = {without_login(trace.endpoint)!r} is no URL; "
            "http://127.0.0.1:4318 is right"
        )


def _check_codec(name: str) -> None:
    for dtype in DTYPE_BYTES:
        codecs.codec_for(name, dtype)


def build_prefetch_policy(settings: Settings) -> PrefetchPolicy:
    """The prefetch policy of the configuration, for a connector."""
    prefetch = settings.prefetch
    return prefetch_policy(
        prefetch.policy,
        base_ms=prefetch.base_ms,
        per_ki_token_ms=prefetch.per_ki_token_ms,
        cap_ms=prefetch.cap_ms,
    )


def open_tier(settings: TierSettings, where: str = "tier") -> Tier:
    """One tier by its kind; `where` is its place in the configuration, for messages."""
    tier: Tier = tier_module(settings.kind).open(tier_config(settings, where))
    return tier


def tier_config(settings: TierSettings, where: str = "tier") -> BaseModel:
    """A tier's own part of the configuration, checked as far as it can be unopened.

    Raises ConfigError: the kind is none, a key is unknown or a value is wrong.
    """
    module = tier_module(settings.kind)
    values = {"name": settings.label, **(settings.model_extra or {})}
    config: BaseModel = validated(module.Config, values, where)
    check_config: Callable[[BaseModel], object] | None = getattr(module, "check", None)
    if check_config is not None:
        check_config(config)
    return config


def _guarded(tier: Tier, settings: TierSettings, limits: LimitSettings) -> Tier:
    """The tier with the wrappers that keep its faults short (a deadline inside a breaker), and the
    ones around those that hold it to its budgets."""
    guarded: Tier = Breaker(
        Deadline(tier, limits.tier_deadline_ms / 1e3),
        failures=limits.breaker_failures,
        reset_s=limits.breaker_reset_ms / 1e3,
    )
    guarded = RateLimit(
        guarded, read_bytes_per_s=settings.read_rate, write_bytes_per_s=settings.write_rate
    )
    return TenantQuotas(guarded, settings.quota)


def retune(store: Store, settings: Settings) -> Callable[[], None]:
    """What, once called, has a running store follow `settings` in all that can be set while it
    runs (`reload.RELOADS`); it cannot fail. The store was built from settings that are the same in
    the rest.

    Raises ConfigError: they are wrong; the store is as it was.
    """
    check(settings)
    set_budgets = store.regulator.prepare(_budgets(settings), _write_policy(settings))

    def follow() -> None:
        for tier, own in zip(store.regulator.tiers, settings.tiers, strict=True):
            for layer in layers_of(tier):
                _set_guard(layer, own, settings.limits)
        set_budgets()

    return follow


def _set_guard(layer: Tier, settings: TierSettings, limits: LimitSettings) -> None:
    """Have one of the wrappers of `_guarded` follow the configuration."""
    if isinstance(layer, Deadline):
        layer.limit_s = limits.tier_deadline_ms / 1e3
    elif isinstance(layer, Breaker):
        layer.limit_to(limits.breaker_failures, limits.breaker_reset_ms / 1e3)
    elif isinstance(layer, RateLimit):
        layer.limit_to(settings.read_rate, settings.write_rate)
    elif isinstance(layer, TenantQuotas):
        layer.limit_to(settings.quota)


def _budgets(settings: Settings) -> Budgets:
    return Budgets(
        queue_blocks=settings.limits.queue_blocks,
        queue_s={tier.label: tier.queue_ms / 1e3 for tier in settings.tiers},
        quotas=settings.l2.quota,
        pin_share=settings.l2.pin_share,
        ttl_s=settings.l2.ttl_ms / 1e3,
    )


def _write_policy(settings: Settings) -> WritePolicy:
    return write_policy(settings.write.policy, selective_hits=settings.write.selective_hits)


def tier_module(kind: str) -> ModuleType:
    """The module of a kind: ours by its name, somebody else's by its dotted path."""
    if not all(part.isidentifier() for part in kind.split(".")):
        raise ConfigError(f"unknown tier kind {kind!r}; {nearest(kind, _tier_kinds())}")
    name = kind if "." in kind else f"{tiers.__name__}.{kind}"
    try:
        module = importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is None or not (name == error.name or name.startswith(f"{error.name}.")):
            raise ConfigError(
                f"tier kind {kind!r} needs the module {error.name!r}, which is not installed"
            ) from None
        raise ConfigError(f"unknown tier kind {kind!r}; {nearest(kind, _tier_kinds())}") from None
    if not _is_tier(module):
        raise ConfigError(
            f"tier kind {kind!r} offers no Config and open; {nearest(kind, _tier_kinds())}"
        )
    return module


def _tier_kinds() -> list[str]:
    """Our kinds of tier. Imports each module of the folder, so it is for error messages only."""
    kinds = []
    for info in pkgutil.iter_modules(tiers.__path__):
        try:
            if _is_tier(importlib.import_module(f"{tiers.__name__}.{info.name}")):
                kinds.append(info.name)
        except ModuleNotFoundError:
            kinds.append(info.name)  # ours, but the library it stands on is not installed
    return kinds


def _is_tier(module: ModuleType) -> bool:
    return hasattr(module, "Config") and callable(getattr(module, "open", None))
