"""The configuration: one frozen, typed tree.

Sources, lowest priority first: the defaults here, a TOML file, the environment, the command line.
An environment variable is the path in the tree, joined by two underscores
(`KVSTORE_L2__BYTES=4GiB`); lists and tables are JSON. An unknown key is an error that suggests the
closest valid key. Sizes and durations accept units ("4GiB", "250ms"). A duration is a float of
milliseconds. Only this module reads the environment.

Names of policies, tiers and codecs are plain text here. The package that implements them validates
the names (`assembly.check`).

    [l2]
    bytes = "4GiB"
    slot_bytes = "2MiB"

    [[tiers]]
    kind = "disk"
    directory = "/var/lib/kvstore"
    capacity = "50GiB"

    [server]
    socket = "/run/kvstore.sock"
    [server.auth_tokens]
    "a long secret" = "team-a"
"""

from __future__ import annotations

import difflib
import os
import sys
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError
from pydantic_settings import (
    BaseSettings,
    EnvSettingsSource,
    PydanticBaseSettingsSource,
    SettingsConfigDict,
    SettingsError,
)

from kvstore.config import renamed
from kvstore.config.field_types import Bytes, Milliseconds
from kvstore.errors import ConfigError

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ENV_PREFIX = "KVSTORE_"
ENV_NESTED = "__"

_SECRET = frozenset({"auth_tokens", "admin_auth_token", "auth_token"})
"""Keys whose values never appear in a message."""

ModelT = TypeVar("ModelT", bound=BaseModel)


class Section(BaseModel):
    """A section of the tree: frozen, and without unknown keys."""

    model_config = ConfigDict(frozen=True, extra="forbid")


class L2Settings(Section):
    """L2: a slab of host memory, divided into slots."""

    bytes: Bytes = Field(default=1 << 30, ge=4096)
    """Size of the slab. The number of slots is `bytes // slot_bytes`."""
    slot_bytes: Bytes = Field(default=2 << 20, ge=4096)
    """Size of one slot, at least the largest block of any engine."""
    shm_directory: str = ""
    """Memory file system for the slab, such as /dev/shm or a hugetlbfs mount. "": anonymous
    memory."""
    huge_pages: bool = False
    """Request huge pages for the slab."""
    eviction: str = "lru"
    """Eviction policy: lru, lfu, s3fifo, gdsf or auto."""
    ttl: Milliseconds = Field(default=0.0, ge=0)
    """Maximum age of a block. 0: no limit."""
    max_pinned_fraction: float = Field(default=0.25, ge=0, le=1)
    """Maximum fraction of the slots that can be pinned."""
    warm_fraction: float = Field(default=0.0, ge=0, le=1)
    """Fraction of the slots to fill from the lower tiers at start. 0: none."""
    quota: Mapping[str, Bytes] = Field(default_factory=dict)
    """Maximum size per tenant, in whole slots. "*": each tenant without an entry."""


class TierSettings(BaseModel):
    """One lower tier. Tiers are listed fastest first. Other keys belong to the tier's module."""

    model_config = ConfigDict(frozen=True, extra="allow")

    kind: str
    """Module of kvstore.tiers ("disk", "memory"), or the dotted name of a third-party module."""
    name: str = ""
    """Name in locations and metrics. "": the last part of `kind`."""
    codec: str = "auto"
    """Codec of the blocks: auto, none, zstd or byteshuffle-zstd."""
    read_bandwidth_limit: Bytes = Field(default=0, ge=0)
    """Maximum bytes read per second. 0: no limit."""
    write_bandwidth_limit: Bytes = Field(default=0, ge=0)
    """Maximum bytes written per second. 0: no limit."""
    queue_time: Milliseconds = Field(default=60_000.0, ge=0)
    """Maximum write queue, as time at the tier's measured write rate. L2 keeps queued blocks until
    they are written. Further blocks are queued later, unless L2 evicts them before. 0: no limit."""
    quota: Mapping[str, Bytes] = Field(default_factory=dict)
    """Maximum size per tenant. "*": each tenant without an entry."""

    def __repr_args__(self) -> Iterator[tuple[str | None, Any]]:
        """Leave out the keys of the tier's module, because one can be a password."""
        return ((name, getattr(self, name)) for name in TierSettings.model_fields)

    @property
    def label(self) -> str:
        """Name of the tier."""
        return self.name or self.kind.rpartition(".")[2]


class WriteSettings(Section):
    """When the sidecar writes a block from L2 to the lower tiers."""

    policy: str = "write_through"
    """Write policy: write_through, selective or write_back."""
    selective_hits: int = Field(default=2, ge=1)
    """Number of hits after which `selective` writes a block."""


class PrefetchSettings(Section):
    """How long a request of an engine waits for blocks from the lower tiers."""

    policy: str = "timeout"
    """Prefetch policy: best_effort, wait_complete, timeout or adaptive."""
    base_wait: Milliseconds = 50.0
    """Policy `timeout`: maximum wait of every request, before `per_1k_tokens`."""
    per_1k_tokens: Milliseconds = 100.0
    """Policy `timeout`: additional maximum wait per 1,024 requested tokens."""
    max_wait: Milliseconds = 2000.0
    """Maximum wait of a request, for every policy."""
    min_load_tokens: int = Field(default=256, ge=0)
    """Minimum number of tokens to load. Shorter prefixes are recomputed at once."""


class HashSettings(Section):
    """How tokens become block hashes. Engines that share blocks must use the same values."""

    algorithm: str = "sha256_cbor"
    """Hash algorithm: sha256_cbor or xxhash_cbor."""
    seed: str = ""
    """Seed of the first block's parent hash. "": no seed."""


class ServerSettings(Section):
    """Addresses of the sidecar, and who can use it."""

    socket: str = "/tmp/kvstore.sock"
    """Path of the Unix socket for engines."""
    host: str = "127.0.0.1"
    """Address of the HTTP API."""
    port: int = Field(default=8100, ge=0, le=65535)
    """Port of the HTTP API. 0: any free port."""
    auth_tokens: Mapping[str, str] = Field(default_factory=dict, repr=False)
    """Table of auth token to tenant. Empty: no token is required, and the tenant is "default"."""
    admin_auth_token: str = Field(default="", repr=False)
    """Bearer token of the administrator, required if `auth_tokens` has entries."""
    kv_events: tuple[str, ...] = ()
    """Endpoints of engines that publish KV events, such as "tcp://HOST:5557". Requires pyzmq."""
    kv_events_publish: str = ""
    """Endpoint on which the sidecar publishes L2 events, such as "tcp://*:5558". "": no events."""
    kv_events_replay: str = ""
    """Endpoint on which a subscriber can request missed L2 events. "": no replay."""


class LimitSettings(Section):
    """Bounds of queues, connections and waits."""

    max_clients: int = Field(default=64, ge=1, le=65536)
    """Maximum number of engine connections."""
    max_http_transfers: int = Field(default=4, ge=1, le=1024)
    """Maximum concurrent HTTP block transfers. Further requests get 503. Each transfer uses one
    slot-sized buffer. If there are several, one never reads a tier: such a read can hang."""
    write_queue_blocks: int = Field(default=4096, ge=1)
    """Maximum number of blocks queued for writing, per tier. See also `tiers.queue_time`."""
    tier_timeout: Milliseconds = Field(default=2000.0, gt=0)
    """Timeout of one call to a tier. A read or write may take longer, by the measured time of as
    many bytes."""
    breaker_failures: int = Field(default=3, ge=1)
    """Consecutive failures that open the circuit breaker of a tier."""
    breaker_reset: Milliseconds = Field(default=5000.0, gt=0)
    """Time from the opening of a circuit breaker to the next try."""
    handshake_timeout: Milliseconds = Field(default=5000.0, gt=0)
    """Handshake timeout of a new connection."""
    http_transfer_timeout: Milliseconds = Field(default=30_000.0, gt=0)
    """Timeout of one HTTP block transfer."""
    shutdown_drain_timeout: Milliseconds = Field(default=10_000.0, gt=0)
    """Maximum time the sidecar writes queued blocks at shutdown."""


class LogSettings(Section):
    """Log of the sidecar or the engine, on stderr."""

    format: str = "logfmt"
    """Log format: logfmt, json or text. The first two write one line per event."""
    level: str = "warning"
    """Minimum log level: debug, info, warning or error. Requests are logged at info."""


class TraceSettings(Section):
    """OpenTelemetry traces. Requires the extra `otel`."""

    endpoint: str = ""
    """URL of a collector for OTLP over HTTP, such as "http://127.0.0.1:4318". "": no traces."""
    sample_ratio: float = Field(default=1.0, ge=0, le=1)
    """Sampling ratio for requests without an incoming trace decision (`traceparent`)."""


class Settings(BaseSettings):
    """The whole tree. Use `Settings.load` to create it."""

    model_config = SettingsConfigDict(
        frozen=True,
        extra="forbid",
        case_sensitive=True,  # for keys, not for environment variables
        env_prefix=ENV_PREFIX,
        env_nested_delimiter=ENV_NESTED,
    )

    l2: L2Settings = L2Settings()
    tiers: tuple[TierSettings, ...] = ()
    write: WriteSettings = WriteSettings()
    prefetch: PrefetchSettings = PrefetchSettings()
    hash: HashSettings = HashSettings()
    server: ServerSettings = ServerSettings()
    limits: LimitSettings = LimitSettings()
    log: LogSettings = LogSettings()
    trace: TraceSettings = TraceSettings()

    @classmethod
    def load(
        cls,
        file: str | Path | None = None,
        overrides: Mapping[str, Any] | None = None,
        *,
        environment: bool = True,
    ) -> Settings:
        """Read the tree.

        file: a TOML file, or None.
        overrides: values of the command line, as nested maps. They have the highest priority.
        environment: False ignores `KVSTORE_*` (an embedded store takes all values as arguments).

        Raises:
            ConfigError: the file cannot be read, a key is unknown or renamed, or a value is wrong.
                The message is one line that names the key.
        """
        tree: dict[str, Any] = {}
        for source in read_sources(file, overrides, environment=environment).values():
            tree = merge(tree, source)
        settings = validate(cls, tree)
        for index, tier in enumerate(settings.tiers):
            for key in tier.model_extra or {}:
                path = f"tiers.{index}.{key}"
                new = renamed.new_key(path, tier.kind)
                if new is not None:
                    raise ConfigError(renamed.refusal(path, new))
        return settings

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,
        file_secret_settings: PydanticBaseSettingsSource,
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        """Use only the values that `load` merged: it reads file and environment itself."""
        return (init_settings,)


def read_sources(
    file: str | Path | None = None,
    overrides: Mapping[str, Any] | None = None,
    *,
    environment: bool = True,
) -> dict[str, dict[str, Any]]:
    """Return the unvalidated values of each source ("file", "environment", "flag"), lowest priority
    first. Raises ConfigError if a source cannot be read."""
    return {
        "file": _read_toml(Path(file)) if file is not None else {},
        "environment": _read_environment() if environment else {},
        "flag": dict(overrides or {}),
    }


def merge(base: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    """Merge `over` into a copy of `base`, table by table. A list replaces the whole list."""
    result = dict(base)
    for key, value in over.items():
        known = result.get(key)
        both = isinstance(known, Mapping) and isinstance(value, Mapping)
        result[key] = merge(known, value) if both else value  # type: ignore[arg-type]
    return result


def validate(model: type[ModelT], values: Mapping[str, Any], where: str = "") -> ModelT:
    """Build `model` from untyped values. `where` is its path in the tree.

    Tiers use this function for their own `Config` models too.

    Raises ConfigError for the first error, in one line. For an unknown key the line suggests the
    closest valid key.
    """
    try:
        return model(**values)
    except ValidationError as error:
        raise ConfigError(_first_message(model, error, where)) from None


def suggest(word: str, valid: Iterable[str]) -> str:
    """Suggest one of `valid`, as the end of a sentence."""
    names = sorted(valid)
    close = difflib.get_close_matches(word, names, n=1, cutoff=0.5)
    if close:
        return f"did you mean {close[0]!r}?"
    return f"known: {', '.join(names)}"


def validation_errors(
    model: type[BaseModel], values: Mapping[str, Any], where: str = ""
) -> list[tuple[tuple[str | int, ...], str]]:
    """Return every error of untyped values for `model`: its location and a one-line message."""
    try:
        model(**values)
    except ValidationError as error:
        errors = error.errors(include_url=False)
        return [(each["loc"], _message(model, each, where)) for each in errors]
    return []


def _first_message(model: type[BaseModel], error: ValidationError, where: str) -> str:
    """Return the message for the first error of a validation."""
    errors = error.errors(include_url=False)
    # A misspelt required key is also a missing key. Report the spelling.
    first = next((each for each in errors if each["type"] == "extra_forbidden"), errors[0])
    return _message(model, first, where)


def _message(model: type[BaseModel], error: Mapping[str, Any], where: str) -> str:
    """Return the message for one error of a validation."""
    path = [str(part) for part in error["loc"]]
    name = ".".join(([where] if where else []) + path)
    if error["type"] == "extra_forbidden":
        old = _renamed(model, name, error["input"])
        if old is not None:
            return old
        valid = _keys_at(model, path[:-1])
        if where.startswith("tiers."):  # the table also has the keys of every tier
            valid += difflib.get_close_matches(path[-1], TierSettings.model_fields, n=1)
        return f"unknown key {name!r}; {suggest(path[-1], valid)}"
    if error["type"] == "missing":
        return f"missing key {name!r}"
    reason = error["msg"].removeprefix("Value error, ")
    reason = reason[:1].lower() + reason[1:] if reason.startswith("Input") else reason
    if any(part in _SECRET for part in path):
        return f"{'.'.join(path[:2])}: {reason}"
    return f"{name} = {error['input']!r}: {reason}"


def _renamed(model: type[BaseModel], name: str, value: Any) -> str | None:
    """Return the message for an unknown key that was renamed, or for a table of renamed keys."""
    if isinstance(value, Mapping):
        inner = renamed.refusal_in_table(value, name)
        if inner is not None:
            return inner
    new = renamed.new_key(name, model.__module__)
    return None if new is None else renamed.refusal(name, new)


def _keys_at(model: type[BaseModel], path: list[str]) -> list[str]:
    """Return the field names of the model at `path` below `model`."""
    here: type[BaseModel] = model
    for part in path:
        field = here.model_fields.get(part)
        if field is not None and isinstance(field.annotation, type):
            here = field.annotation
    return list(here.model_fields)


def _read_toml(path: Path) -> dict[str, Any]:
    """Read the file as nested maps. Raises ConfigError, in one line, if that fails."""
    try:
        with path.open("rb") as file:
            return tomllib.load(file)
    except OSError as error:
        raise ConfigError(f"config file {str(path)!r}: {error.strerror}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"config file {str(path)!r} is not TOML: {error}") from None


def _read_environment() -> dict[str, Any]:
    """Read `KVSTORE_*` as nested maps. Raises ConfigError for an unknown or renamed variable."""
    source = EnvSettingsSource(Settings, case_sensitive=False)
    prefix = ENV_PREFIX.lower()
    for name in source.env_vars:
        section = name.lower().removeprefix(prefix).split(ENV_NESTED)[0]
        if not name.lower().startswith(prefix):
            continue
        new = renamed.new_variable(name, ENV_PREFIX, ENV_NESTED)
        if new is not None:
            old = ENV_NESTED.join(name.upper().split(ENV_NESTED)[:2])
            raise ConfigError(renamed.refusal(old, new))
        if section not in Settings.model_fields:
            raise ConfigError(
                f"unknown environment variable {name.upper()!r}: "
                f"no section {section!r}; {suggest(section, Settings.model_fields)}"
            )
    try:
        return source()
    except SettingsError as error:
        raise ConfigError(f"environment: {error}") from None


def hash_seed() -> str | None:
    """Return the seed of vLLM's xxhash chains. None: each process uses its own random bytes."""
    return os.environ.get("PYTHONHASHSEED")
