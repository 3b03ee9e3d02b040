"""The only list of public names that changed, old name to new name.

An old name is an error. Its message is one line with the new name, such as
`server.tokens is now server.auth_tokens`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Final, ParamSpec, TypeVar

from kvstore.errors import ConfigError

P = ParamSpec("P")
R = TypeVar("R")

KEYS: Final[Mapping[str, str]] = {
    "l2.directory": "l2.shm_directory",
    "l2.ttl_ms": "l2.ttl",
    "l2.pin_share": "l2.max_pinned_fraction",
    "l2.warm_share": "l2.warm_fraction",
    "tiers.read_rate": "tiers.read_bandwidth_limit",
    "tiers.write_rate": "tiers.write_bandwidth_limit",
    "tiers.queue_ms": "tiers.queue_time",
    "prefetch.base_ms": "prefetch.base_wait",
    "prefetch.per_ki_token_ms": "prefetch.per_1k_tokens",
    "prefetch.cap_ms": "prefetch.max_wait",
    "prefetch.min_tokens": "prefetch.min_load_tokens",
    "server.tokens": "server.auth_tokens",
    "server.admin_token": "server.admin_auth_token",
    "limits.clients": "limits.max_clients",
    "limits.transfers": "limits.max_http_transfers",
    "limits.queue_blocks": "limits.write_queue_blocks",
    "limits.tier_deadline_ms": "limits.tier_timeout",
    "limits.breaker_reset_ms": "limits.breaker_reset",
    "limits.hello_ms": "limits.handshake_timeout",
    "limits.transfer_ms": "limits.http_transfer_timeout",
    "limits.flush_ms": "limits.shutdown_drain_timeout",
    "trace.ratio": "trace.sample_ratio",
}
"""Paths of configuration keys, without the number of the tier."""

TIER_KEYS: Final[Mapping[str, Mapping[str, str]]] = {
    "disk": {"direct": "direct_io", "durable": "sync_writes"},
    "redis": {
        "service": "sentinel_master",
        "timeout_ms": "timeout",
        "connect_timeout_ms": "connect_timeout",
    },
    "s3": {
        "refresh": "list_interval",
        "grace": "gc_grace",
        "writers": "writer_threads",
        "downloads": "reader_threads",
    },
}
"""Kind of tier to the keys that only this kind has."""

_STORE_KEYS: Final = {
    "token": "auth_token",
    "route": "traffic_label",
    "wait_ready_ms": "store_connect_timeout",
}
_PREFETCH_KEYS: Final = {old: new for old, new in KEYS.items() if old.startswith("prefetch.")}

EXTRA_KEYS: Final[Mapping[str, Mapping[str, str]]] = {
    "kv_connector_extra_config": {
        **_STORE_KEYS,
        **_PREFETCH_KEYS,
        "reply_limit_ms": "response_timeout",
    },
    "embedded": {"slot": "slot_bytes"},
    "secondary_tiers": {
        **_STORE_KEYS,
        "reply_limit_ms": "response_timeout",
        "deadline_ms": "max_wait",
    },
    "hicache-storage-backend-extra-config": {
        **_STORE_KEYS,
        "admin_token": "admin_auth_token",
        "deadline.base_ms": "max_wait.base",
        "deadline.per_gib_ms": "max_wait.per_gib",
        "deadline.cap_ms": "max_wait.max",
        "deadline": "max_wait",
    },
}
"""Keys of vLLM's and SGLang's extra configurations, and of the table `embedded` in them."""

VALUES: Final[Mapping[str, Mapping[str, str]]] = {
    "codec": {"identity": "none", "zstd-planes": "byteshuffle-zstd"},
    "eviction policy": {"cost": "gdsf"},
}

_TOKEN: Final = {"--token": "--auth-token"}
_SPEEDS: Final = {"--l2-speed": "--l2-bandwidth", "--l3-speed": "--l3-bandwidth"}

FLAGS: Final[Mapping[str, Mapping[str, str]]] = {
    "bench breakeven": {"--memory": "--l2", "--png": "--plot"},
    "bench serve": {
        "--replies": "--history",
        "--silence-s": "--idle-timeout",
        "--request-s": "--request-timeout",
        "--limit-s": "--max-duration",
        "--png": "--plot",
    },
    "clear": _TOKEN,
    "config reload": _TOKEN,
    "doctor sidecar": _TOKEN,
    "doctor vllm": _TOKEN,
    "engine": {
        "--store-token": "--store-auth-token",
        "--wait-store-s": "--store-connect-timeout",
        "--deadline-ms": "--max-wait",
        "--route": "--traffic-label",
    },
    "hash": {"--tokens": "--token-ids"},
    "ls": _TOKEN,
    "pin": {**_TOKEN, "--tokens": "--token-ids"},
    "plan": {
        **_SPEEDS,
        "--ram": "--l2",
        "--disk": "--l3",
        "--ram-gb-month": "--l2-gb-month",
        "--disk-gb-month": "--l3-gb-month",
    },
    "serve": {"--slot": "--slot-bytes", "--slab-dir": "--l2-shm-dir"},
    "simulate": {
        **_SPEEDS,
        "--prefetch": "--load-policy",
        "--optimum": "--offline-optimal",
        "--no-optimum": "--no-offline-optimal",
        "--engines": "--concurrency",
        "--picture": "--plot",
    },
    "stats": {**_TOKEN, "--every": "--interval", "--times": "--count"},
    "unpin": {**_TOKEN, "--tokens": "--token-ids"},
    "warm": {**_TOKEN, "--share": "--fraction"},
}
"""Command to its options."""

ARGUMENTS: Final[Mapping[str, Mapping[str, str]]] = {
    "open": {"slot": "slot_bytes"},
    "connect": {
        "token": "auth_token",
        "route": "traffic_label",
        "reply_limit_s": "response_timeout_s",
        "wait_ready_s": "connect_timeout_s",
    },
}
"""Function of `kvstore` to its keyword arguments."""

HEADERS: Final[Mapping[str, str]] = {"X-KVStore-Route": "X-KVStore-Traffic-Label"}
"""HTTP request headers of the reference engine."""


BODY_KEYS: Final[Mapping[str, Mapping[str, str]]] = {
    "/v1/pin": {"tokens": "token_ids"},
    "/v1/unpin": {"tokens": "token_ids"},
    "/v1/warm": {"share": "fraction"},
}
"""Path of the sidecar's HTTP API to the keys of a request's JSON body."""


def refusal(old: str, new: str) -> str:
    """Return the message for an old name."""
    return f"{old} is now {new}"


def new_key(path: str, kind: str = "") -> str | None:
    """Return the new path of a renamed key, or None.

    path: the path in the user's configuration, such as "tiers.0.read_rate". kind: kind of the tier,
    or its module. "": any kind.
    """
    parts = path.split(".")
    start = 2 if parts[0] == "tiers" and len(parts) > 2 and parts[1].isdigit() else 1
    front, rest = parts[:start], ".".join(parts[start:])
    if parts[0] in EXTRA_KEYS:
        new = EXTRA_KEYS[parts[0]].get(rest)
    else:
        new = KEYS.get(f"{parts[0]}.{rest}", "").removeprefix(f"{parts[0]}.") or None
        if new is None and parts[0] == "tiers":
            new = _own_key(rest, kind)
    return None if new is None else ".".join([*front, new])


def _own_key(key: str, kind: str) -> str | None:
    if kind.startswith("kvstore.tiers."):
        kind = kind.split(".")[2]
    tables = [TIER_KEYS.get(kind, {})] if kind else TIER_KEYS.values()
    return next((table[key] for table in tables if key in table), None)


def refuse_key(path: str) -> None:
    """Raises ConfigError if `path`, or a table that contains it, is the old path of a key."""
    parts = path.split(".")
    for end in range(2, len(parts) + 1):
        old = ".".join(parts[:end])
        new = new_key(old)
        if new is not None:
            raise ConfigError(refusal(old, new))


def new_variable(name: str, prefix: str, nested: str) -> str | None:
    """Return the new name of a renamed environment variable, or None.

    prefix: "KVSTORE_". nested: separator of the parts of the path, "__".
    """
    section, _, key = name.upper().removeprefix(prefix).partition(nested)
    old = f"{section}.{key.partition(nested)[0]}".lower()
    new = KEYS.get(old)
    return None if new is None else prefix + new.replace(".", nested).upper()


def new_flag(command: str, flag: str) -> str | None:
    """Return the new name of a renamed option of `command` (such as "bench serve"), or None."""
    return FLAGS.get(command, {}).get(flag)


def refuse_value(what: str, value: str) -> None:
    """Raises ConfigError if `value` is an old value of `what`, a key of `VALUES`."""
    new = VALUES.get(what, {}).get(value)
    if new is not None:
        raise ConfigError(f"{what} {value!r} is now {new!r}")


def refuse_headers(names: Iterable[str]) -> None:
    """Raises ConfigError if one of the header names of a request is an old name."""
    given = {name.lower() for name in names}
    for old, new in HEADERS.items():
        if old.lower() in given:
            raise ConfigError(refusal(f"header {old}", new))


def refuse_body(path: str, body: Any) -> None:
    """Raises ConfigError if a JSON body for `path` has an old key."""
    for old, new in BODY_KEYS[path].items():
        if isinstance(body, dict) and old in body:
            raise ConfigError(f"{path}: {refusal(old, new)}")


def refuses_old_arguments(function: Callable[P, R]) -> Callable[P, R]:
    """Decorate a function of `ARGUMENTS`: an old keyword argument raises ConfigError."""
    names = ARGUMENTS[function.__name__]

    @functools.wraps(function)
    def checked(*args: P.args, **kwargs: P.kwargs) -> R:
        for old, new in names.items():
            if old in kwargs:
                raise ConfigError(refusal(f"kvstore.{function.__name__}({old}=...)", f"{new}=..."))
        return function(*args, **kwargs)

    return checked


def refusal_in_table(values: Mapping[str, Any], where: str) -> str | None:
    """Return the message for the first old key of the table at path `where`, or None."""
    for key in values:
        new = new_key(f"{where}.{key}")
        if new is not None:
            return refusal(f"{where}.{key}", new)
    return None
