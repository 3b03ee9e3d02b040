"""The S3 tier: any S3-compatible object store, shared by any number of nodes.

`tier` has the verbs, `packer` groups writers, `catalog` is what this node knows, `keeper` learns
from the bucket and collects, `objects` are segments and graves in it, `layout` their bytes and
names, `client` the requests, `link` the connections, `faults` what goes wrong.
"""

from __future__ import annotations

import re
from typing import Annotated, Any, Final

from pydantic import AfterValidator, BeforeValidator, Field, SecretStr

from kvstore.config.settings import Bytes, Milliseconds, Section
from kvstore.errors import ConfigError
from kvstore.tiers.base import Tier
from kvstore.tiers.s3.client import Client
from kvstore.tiers.s3.layout import MAX_SHARDS
from kvstore.tiers.s3.reconciler import Rules
from kvstore.tiers.s3.tier import S3Tier

__all__ = ["Config", "S3Tier", "open"]

MIN_CAPACITY_BYTES: Final = 1 << 20
ENCRYPTIONS: Final = ("", "AES256", "aws:kms")

_PREFIX = re.compile(r"([A-Za-z0-9._-]+/)*")


def _secret(value: Any) -> SecretStr:
    """Whatever was given, hidden at once, so that no message can repeat it."""
    return value if isinstance(value, SecretStr) else SecretStr(str(value))


def _prefix(value: str) -> str:
    value = value.strip("/") + "/" if value.strip("/") else ""
    if not _PREFIX.fullmatch(value) or len(value) > 512:
        raise ValueError("a prefix is made of letters, digits and ._-/")
    return value


def _encryption(value: str) -> str:
    if value not in ENCRYPTIONS:
        raise ValueError("'', 'AES256' (SSE-S3) or 'aws:kms' is right")
    return value


Secret = Annotated[SecretStr, BeforeValidator(_secret)]
NO_SECRET: Final = SecretStr("")


class Config(Section):
    """The S3 tier's part of the configuration."""

    name: str = "s3"
    bucket: str = Field(min_length=3, max_length=255)
    """An existing bucket."""
    prefix: Annotated[str, AfterValidator(_prefix)] = "kvstore/"
    """What the names of all objects begin with; nothing else in the bucket is touched."""
    endpoint: str = ""
    """URL of the service; "": AWS, in `region`."""
    region: str = ""
    """"": as boto3 finds it, else us-east-1."""
    path_style: bool | None = None
    """The bucket in the path, not in the host's name. Unset: yes with an endpoint, no without."""
    access_key: Secret = NO_SECRET
    """"": credentials as boto3 finds them (environment, files, roles)."""
    secret_key: Secret = NO_SECRET
    """Belongs to `access_key`."""
    session_token: Secret = NO_SECRET
    """Of temporary credentials."""
    encryption: Annotated[str, AfterValidator(_encryption)] = ""
    """Of objects at rest, by the service: AES256 (SSE-S3), aws:kms; "": the bucket's default."""
    kms_key: str = ""
    """Id of the key for aws:kms; "": the account's own."""
    shards: int = Field(default=16, ge=1, le=MAX_SHARDS)
    """Names are spread over so many folders: services limit requests per prefix."""
    segment: Bytes = Field(default=16 << 20, ge=4096, le=4 << 30)
    """Most bytes of blocks packed into one object: beyond 16 MiB the first byte's 25-30 ms are
    lost in the transfer."""
    uploads: int = Field(default=4, ge=1, le=64)
    """Objects on their way up at once."""
    writers: int = Field(default=16, ge=1, le=256)
    """Blocks that may wait to be packed; each has a thread and a buffer of a slot."""
    downloads: int = Field(default=16, ge=1, le=256)
    """Reads in flight; each has a thread and a buffer of a slot."""
    linger: Milliseconds = Field(default=20.0, ge=0, le=10_000)
    """How long a block waits for others to share its object."""
    refresh: Milliseconds = Field(default=30_000.0, ge=50)
    """Time between two listings: how old the news of other nodes may be."""
    grace: Milliseconds = Field(default=600_000.0, ge=0)
    """What was written by another node less than this ago is not collected. Several times the
    refresh of the slowest node is right."""
    capacity: Bytes = Field(default=0, ge=0)
    """Most bytes of all objects under the prefix; 0: no limit."""
    ttl: Milliseconds = Field(default=0.0, ge=0)
    """Age at which objects are removed; 0: never."""
    timeout: Milliseconds = Field(default=5_000.0, ge=10)
    """Longest a connection may take to open, or stay without progress; a whole request, four
    times that."""


def check(config: Config) -> None:
    """Raises ConfigError for what can be seen to be wrong without asking the service."""
    if bool(config.access_key.get_secret_value()) != bool(config.secret_key.get_secret_value()):
        raise ConfigError(f"tier {config.name}: access_key and secret_key come together")
    if config.kms_key and config.encryption != "aws:kms":
        raise ConfigError(f"tier {config.name}: kms_key needs encryption = 'aws:kms'")
    if config.endpoint and not config.endpoint.startswith(("http://", "https://")):
        raise ConfigError(
            f"tier {config.name}: endpoint = {config.endpoint!r}; "
            "a URL like 'http://host:port' is right"
        )
    if 0 < config.capacity < MIN_CAPACITY_BYTES:
        raise ConfigError(f"tier {config.name}: capacity = {config.capacity}; 0, or 1 MiB and more")
    if config.grace < config.refresh:
        raise ConfigError(f"tier {config.name}: grace must be at least refresh")


def open(config: Config) -> Tier:
    """Open the tier. The service need not be up: what it holds is then found later.

    Raises ConfigError as `check` does.
    """
    check(config)
    headers = {}
    if config.encryption:
        headers["x-amz-server-side-encryption"] = config.encryption
    if config.kms_key:
        headers["x-amz-server-side-encryption-aws-kms-key-id"] = config.kms_key
    path_style = bool(config.endpoint) if config.path_style is None else config.path_style
    keys = (config.access_key, config.secret_key, config.session_token)
    access, secret, token = (key.get_secret_value() for key in keys)
    client = Client(
        bucket=config.bucket,
        endpoint=config.endpoint,
        region=config.region,
        path_style=path_style,
        keys=(access, secret, token),
        stall_s=config.timeout / 1e3,
        connections=config.uploads + config.downloads,
        put_headers=headers,
    )
    rules = Rules(
        capacity_bytes=config.capacity,
        ttl_s=config.ttl / 1e3,
        grace_s=config.grace / 1e3,
        refresh_s=config.refresh / 1e3,
    )
    segment_bytes = min(config.segment, config.capacity // 4) if config.capacity else config.segment
    return S3Tier(
        client,
        rules,
        name=config.name,
        prefix=config.prefix,
        shards=config.shards,
        segment_bytes=segment_bytes,
        uploads=config.uploads,
        writers=config.writers,
        readers=config.downloads,
        linger_s=config.linger / 1e3,
    )
