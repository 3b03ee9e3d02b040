"""The configuration: one frozen, typed tree.

Where values come from, later ones winning: the defaults here, a TOML file, the environment
(`KVSTORE_L2__BYTES=4GiB`: the path in the tree, joined by two underscores; lists and tables as
JSON), the command line. An unknown key is an error that names the nearest right one, wherever it
stands. Sizes and times take units ("4GiB", "250ms"). This is the only file that reads the
environment.

Names of policies, tiers and codecs are plain text here: the part that owns them knows which are
right and says so (`wire.check`).

    [l2]
    bytes = "4GiB"
    slot_bytes = "2MiB"

    [[tiers]]
    kind = "disk"
    directory = "/var/lib/kvstore"
    capacity = "50GiB"

    [server]
    socket = "/run/kvstore.sock"
    [server.tokens]
    "a long secret" = "team-a"
"""

from __future__ import annotations

import difflib
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any, TypeVar

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ValidationError,
    WithJsonSchema,
)
from pydantic_settings import (
    BaseSettings,
    EnvSettingsSource,
    PydanticBaseSettingsSource,
    SettingsConfigDict,
    SettingsError,
)

from kvstore.config.units import parse_bytes, parse_duration_s
from kvstore.errors import ConfigError

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ENV_PREFIX = "KVSTORE_"
ENV_NESTED = "__"

_SECRET = frozenset({"tokens", "admin_token"})
"""Keys whose contents no message repeats."""

ModelT = TypeVar("ModelT", bound=BaseModel)


def parse_ms(value: str | float) -> float:
    """Milliseconds of "250ms", "1.5s", "2m"; a bare number is milliseconds.

    Raises ConfigError for anything else, and for negative times.
    """
    try:
        number = float(value)
    except ValueError:
        return parse_duration_s(value) * 1e3
    if not 0 <= number < float("inf"):
        raise ConfigError(f"{value!r} is no time; write one like '250ms', '1.5s' or '2m'")
    return number


def _in_units(parse: Callable[[Any], Any]) -> BeforeValidator:
    """A validator that keeps the key's path in the message when `parse` refuses."""

    def validate(value: Any) -> Any:
        try:
            return parse(value)
        except ConfigError as error:
            raise ValueError(str(error)) from None

    return BeforeValidator(validate)


def _also_text(number: str, pattern: str) -> WithJsonSchema:
    """For a value that may be written with a unit."""
    text = {"type": "string", "pattern": rf"^\s*[0-9]+(\.[0-9]+)?\s*{pattern}\s*$"}
    return WithJsonSchema({"anyOf": [{"type": number, "minimum": 0}, text]})


Bytes = Annotated[
    int,
    _in_units(lambda v: parse_bytes(v) if isinstance(v, str) else v),
    _also_text("integer", "([KkMmGgTtPp]?[Ii]?[Bb])?"),
]
"""A size: an int of bytes, or text with a unit."""
Milliseconds = Annotated[float, _in_units(parse_ms), _also_text("number", "([Uu]s|ms|[smhd])?")]
"""A time: a number of milliseconds, or text with a unit."""


class Section(BaseModel):
    """A part of the tree: frozen, and closed to unknown keys."""

    model_config = ConfigDict(frozen=True, extra="forbid")


class L2Settings(Section):
    """The slab of host memory."""

    bytes: Bytes = Field(default=1 << 30, ge=4096)
    """Size of the slab; its slots are `bytes // slot_bytes`."""
    slot_bytes: Bytes = Field(default=2 << 20, ge=4096)
    """Bytes of one slot: at least the largest block of any client."""
    directory: str = ""
    """A memory file system (/dev/shm, a hugetlbfs mount) to make the slab in; "": anonymous."""
    huge_pages: bool = False
    """Ask for huge pages behind the slab."""
    eviction: str = "lru"
    """Order in which blocks leave L2: lru, lfu, s3fifo, cost, auto."""
    ttl_ms: Milliseconds = Field(default=0.0, ge=0)
    """How long a block stays at most; 0: for ever."""
    pin_share: float = Field(default=0.25, ge=0, le=1)
    """Share of the slots that may be pinned."""
    warm_share: float = Field(default=0.0, ge=0, le=1)
    """Share of the slots that is filled from the tiers below at start."""
    quota: Mapping[str, Bytes] = Field(default_factory=dict)
    """Most bytes by tenant, whole slots; "*": of each tenant that is not named."""


class TierSettings(BaseModel):
    """One lower tier, fastest first. Keys not named here belong to the tier's own module."""

    model_config = ConfigDict(frozen=True, extra="allow")

    kind: str
    """A module of kvstore.tiers ("disk", "memory"), or a dotted module of somebody else's."""
    name: str = ""
    """Name in locations and metrics; "": the last part of `kind`."""
    codec: str = "auto"
    """How blocks are encoded on it: auto, identity, zstd, zstd-planes."""
    read_rate: Bytes = Field(default=0, ge=0)
    """Most bytes read a second; 0: as many as it gives."""
    write_rate: Bytes = Field(default=0, ge=0)
    """Most bytes written a second; 0: as many as it takes."""
    queue_ms: Milliseconds = Field(default=5000.0, ge=0)
    """Writes wait for it at most as long as this takes at its measured rate; 0: no such bound."""
    quota: Mapping[str, Bytes] = Field(default_factory=dict)
    """Most bytes by tenant; "*": of each tenant that is not named."""

    def __repr_args__(self) -> Iterator[tuple[str | None, Any]]:
        """Without the keys of the tier's own module: there may be a password among them."""
        return ((name, getattr(self, name)) for name in TierSettings.model_fields)

    @property
    def label(self) -> str:
        """The tier's name."""
        return self.name or self.kind.rpartition(".")[2]


class WriteSettings(Section):
    """When a block goes from L2 to the tiers below."""

    policy: str = "write_through"
    """write_through, selective, write_back."""
    selective_hits: int = Field(default=2, ge=1)
    """Hits after which `selective` writes a block."""


class PrefetchSettings(Section):
    """How long an engine lets a request wait for blocks from below L2."""

    policy: str = "timeout"
    """best_effort, wait_complete, timeout, adaptive."""
    base_ms: Milliseconds = 50.0
    """`timeout`: what every request may wait."""
    per_ki_token_ms: Milliseconds = 100.0
    """`timeout`: what it may wait more for each 1,024 tokens wanted."""
    cap_ms: Milliseconds = 2000.0
    """No request waits longer, whatever the policy."""
    min_tokens: int = Field(default=256, ge=0)
    """Shorter runs are recomputed at once."""


class HashSettings(Section):
    """How tokens become block hashes. Engines that share blocks must agree."""

    algorithm: str = "sha256_cbor"
    """sha256_cbor, xxhash_cbor."""
    seed: str = ""
    """Seed of the first block's parent; "": none."""


class ServerSettings(Section):
    """Where the sidecar listens, and who may talk to it."""

    socket: str = "/tmp/kvstore.sock"
    """Unix socket of the hot path."""
    host: str = "127.0.0.1"
    """Address of the HTTP side."""
    port: int = Field(default=8100, ge=0, le=65535)
    """Port of the HTTP side; 0: any free one."""
    tokens: Mapping[str, str] = Field(default_factory=dict, repr=False)
    """Token to tenant. Empty: no token is asked for, and everybody is tenant "default"."""
    admin_token: str = Field(default="", repr=False)
    """Bearer token of flush and clear, when tokens are set."""
    kv_events: tuple[str, ...] = ()
    """Endpoints of engines that publish KV events, "tcp://HOST:5557"; needs pyzmq."""
    kv_events_publish: str = ""
    """Where the sidecar publishes what its L2 takes and drops, "tcp://*:5558"; "": nowhere."""
    kv_events_replay: str = ""
    """Where a subscriber can ask again for what it missed of that; "": nowhere."""


class LimitSettings(Section):
    """Bounds on what waits, and for how long."""

    clients: int = Field(default=64, ge=1, le=65536)
    """Engine connections at once."""
    transfers: int = Field(default=4, ge=1, le=1024)
    """HTTP block transfers at once; each owns a slot-sized buffer. More answer 503. Where there are
    several, one is kept free of reads of tiers, which may hang."""
    queue_blocks: int = Field(default=256, ge=1)
    """Blocks waiting to be written, per tier; more are dropped and counted. See `queue_ms`."""
    tier_deadline_ms: Milliseconds = Field(default=2000.0, gt=0)
    """Longest a call to a tier is waited for."""
    breaker_failures: int = Field(default=3, ge=1)
    """Failures in a row after which a tier is left alone."""
    breaker_reset_ms: Milliseconds = Field(default=5000.0, gt=0)
    """How long it is left alone before the next try."""
    hello_ms: Milliseconds = Field(default=5000.0, gt=0)
    """How long a new connection may take to say who it is."""
    transfer_ms: Milliseconds = Field(default=30_000.0, gt=0)
    """Longest one HTTP block transfer may take."""
    flush_ms: Milliseconds = Field(default=10_000.0, gt=0)
    """Longest the sidecar writes what is queued when it is told to stop."""


class LogSettings(Section):
    """The log of a server, on stderr."""

    format: str = "logfmt"
    """logfmt, json, text. The first two write one line for each event."""
    level: str = "warning"
    """Least that is written: debug, info, warning, error. Requests are info."""


class TraceSettings(Section):
    """Traces, by OpenTelemetry; needs the extra `otel`."""

    endpoint: str = ""
    """A collector that takes OTLP over HTTP, "http://127.0.0.1:4318"; "": no traces."""
    ratio: float = Field(default=1.0, ge=0, le=1)
    """Share of what nobody has decided on that is traced."""


class Settings(BaseSettings):
    """The whole tree. Make it by `Settings.load`."""

    model_config = SettingsConfigDict(
        frozen=True,
        extra="forbid",
        case_sensitive=True,  # of keys; names in the environment are not
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
        overrides: what the command line said, as nested maps; wins over all else.
        environment: False leaves `KVSTORE_*` unread (the embedded store says all in its call).

        Raises:
            ConfigError: the file cannot be read, a key is unknown or a value is wrong; one line
                that names it.
        """
        tree: dict[str, Any] = {}
        for source in sources(file, overrides, environment=environment).values():
            tree = merged(tree, source)
        return validated(cls, tree)

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,
        file_secret_settings: PydanticBaseSettingsSource,
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        """Only what `load` has merged: it reads file and environment itself, in one order."""
        return (init_settings,)


def sources(
    file: str | Path | None = None,
    overrides: Mapping[str, Any] | None = None,
    *,
    environment: bool = True,
) -> dict[str, dict[str, Any]]:
    """What each source says, unchecked: "file", "environment", "flag", in the order in which they
    win. Raises ConfigError: one cannot be read."""
    return {
        "file": _read_toml(Path(file)) if file is not None else {},
        "environment": _read_environment() if environment else {},
        "flag": dict(overrides or {}),
    }


def merged(base: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    """`base` with `over` laid over it, table by table; lists are replaced whole."""
    result = dict(base)
    for key, value in over.items():
        known = result.get(key)
        both = isinstance(known, Mapping) and isinstance(value, Mapping)
        result[key] = merged(known, value) if both else value  # type: ignore[arg-type]
    return result


def validated(model: type[ModelT], values: Mapping[str, Any], where: str = "") -> ModelT:
    """Build `model` from untyped values; `where` is its path in the tree.

    Raises ConfigError: the first thing wrong, in one line, with the nearest right name for an
    unknown key. Tiers' own `Config` models come through here too.
    """
    try:
        return model(**values)
    except ValidationError as error:
        raise ConfigError(_one_line(model, error, where)) from None


def nearest(word: str, right: Iterable[str]) -> str:
    """Which of `right` the user may have meant, as an end of a sentence."""
    names = sorted(right)
    close = difflib.get_close_matches(word, names, n=1, cutoff=0.5)
    if close:
        return f"did you mean {close[0]!r}?"
    return f"known: {', '.join(names)}"


def mistakes(
    model: type[BaseModel], values: Mapping[str, Any], where: str = ""
) -> list[tuple[tuple[str | int, ...], str]]:
    """Everything that is wrong with untyped values for `model`: where, and in one line what."""
    try:
        model(**values)
    except ValidationError as error:
        faults = error.errors(include_url=False)
        return [(fault["loc"], _line(model, fault, where)) for fault in faults]
    return []


def _one_line(model: type[BaseModel], error: ValidationError, where: str) -> str:
    """The first fault of a validation, in words of the tree."""
    faults = error.errors(include_url=False)
    # A misspelt key is also a missing one: the spelling is what helps.
    fault = next((f for f in faults if f["type"] == "extra_forbidden"), faults[0])
    return _line(model, fault, where)


def _line(model: type[BaseModel], fault: Mapping[str, Any], where: str) -> str:
    """One fault of a validation."""
    path = [str(part) for part in fault["loc"]]
    name = ".".join(([where] if where else []) + path)
    if fault["type"] == "extra_forbidden":
        right = _keys_at(model, path[:-1])
        if where.startswith("tiers."):  # a tier's own part; its table has the common keys too
            right += difflib.get_close_matches(path[-1], TierSettings.model_fields, n=1)
        return f"unknown key {name!r}; {nearest(path[-1], right)}"
    if fault["type"] == "missing":
        return f"missing key {name!r}"
    reason = fault["msg"].removeprefix("Value error, ")
    reason = reason[:1].lower() + reason[1:] if reason.startswith("Input") else reason
    if any(part in _SECRET for part in path):
        return f"{'.'.join(path[:2])}: {reason}"
    return f"{name} = {fault['input']!r}: {reason}"


def _keys_at(model: type[BaseModel], path: list[str]) -> list[str]:
    """Names of the fields of the model that `path` leads to from `model`."""
    here: type[BaseModel] = model
    for part in path:
        field = here.model_fields.get(part)
        if field is not None and isinstance(field.annotation, type):
            here = field.annotation
    return list(here.model_fields)


def _read_toml(path: Path) -> dict[str, Any]:
    """The file as nested maps; every way of being unreadable is one line."""
    try:
        with path.open("rb") as file:
            return tomllib.load(file)
    except OSError as error:
        raise ConfigError(f"config file {str(path)!r}: {error.strerror}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"config file {str(path)!r} is not TOML: {error}") from None


def _read_environment() -> dict[str, Any]:
    """What `KVSTORE_*` says, as nested maps. An unknown name is an error like an unknown key."""
    source = EnvSettingsSource(Settings, case_sensitive=False)
    prefix = ENV_PREFIX.lower()
    for name in source.env_vars:
        section = name.lower().removeprefix(prefix).split(ENV_NESTED)[0]
        if name.lower().startswith(prefix) and section not in Settings.model_fields:
            raise ConfigError(
                f"unknown environment variable {name.upper()!r}: "
                f"no section {section!r}; {nearest(section, Settings.model_fields)}"
            )
    try:
        return source()
    except SettingsError as error:
        raise ConfigError(f"environment: {error}") from None


def hash_seed() -> str | None:
    """What vLLM's xxhash begins its chains with; None: bytes that each process makes up."""
    return os.environ.get("PYTHONHASHSEED")
