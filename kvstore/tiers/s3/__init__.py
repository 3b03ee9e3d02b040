"""The S3 tier: any S3-compatible object store, shared by any number of nodes.

tier            the tier's operations
packer          grouping of concurrent writes into segments
segment_index   the segments that this node knows, and the location of each block
reconciler      listing of the bucket, and garbage collection
objects         segments and tombstones in the bucket
layout          bytes and names of these objects
client          S3 requests
http_pool       HTTP connections
faults          mapping of errors
"""

from __future__ import annotations

import re
from typing import Annotated, Any, Final

from pydantic import AfterValidator, BeforeValidator, Field, SecretStr

from kvstore.config.field_types import Bytes, Milliseconds
from kvstore.config.settings import Section
from kvstore.errors import ConfigError
from kvstore.tiers.base import Tier
from kvstore.tiers.s3.client import Client
from kvstore.tiers.s3.layout import MAX_SHARDS
from kvstore.tiers.s3.reconciler import RetentionRules
from kvstore.tiers.s3.tier import S3Tier

__all__ = ["Config", "S3Tier", "open"]

MIN_CAPACITY_BYTES: Final = 1 << 20
ENCRYPTIONS: Final = ("", "AES256", "aws:kms")

_PREFIX = re.compile(r"([A-Za-z0-9._-]+/)*")


def _secret(value: Any) -> SecretStr:
    """Wrap any value in SecretStr, so that no message repeats it."""
    return value if isinstance(value, SecretStr) else SecretStr(str(value))


def _prefix(value: str) -> str:
    value = value.strip("/") + "/" if value.strip("/") else ""
    if not _PREFIX.fullmatch(value) or len(value) > 512:
        raise ValueError("use letters, digits and ._-/ (at most 512)")
    return value


def _encryption(value: str) -> str:
    if value not in ENCRYPTIONS:
        raise ValueError("use '', 'AES256' (SSE-S3) or 'aws:kms'")
    return value


Secret = Annotated[SecretStr, BeforeValidator(_secret)]
NO_SECRET: Final = SecretStr("")


class Config(Section):
    """Configuration of the S3 tier."""

    name: str = "s3"
    bucket: str = Field(min_length=3, max_length=255)
    """Name of an existing bucket."""
    prefix: Annotated[str, AfterValidator(_prefix)] = "kvstore/"
    """Prefix of all object names. The tier does not touch other objects of the bucket."""
    endpoint: str = ""
    """URL of the service. "": AWS in `region`."""
    region: str = ""
    """Region of the bucket. "": the default of boto3, else us-east-1."""
    path_style: bool | None = None
    """Put the bucket into the URL's path instead of its host name. Unset: only if `endpoint` is
    set."""
    access_key: Secret = NO_SECRET
    """Access key ID. "": credentials from boto3's default sources (environment, files, roles)."""
    secret_key: Secret = NO_SECRET
    """Secret access key of `access_key`."""
    session_token: Secret = NO_SECRET
    """Session token, for temporary credentials."""
    encryption: Annotated[str, AfterValidator(_encryption)] = ""
    """Server-side encryption of objects: AES256 (SSE-S3) or aws:kms. "": the bucket's default."""
    kms_key: str = ""
    """ID of the KMS key for aws:kms. "": the account's default key."""
    shards: int = Field(default=16, ge=1, le=MAX_SHARDS)
    """Number of folders over which object names are spread, since services limit requests per
    prefix."""
    segment: Bytes = Field(default=16 << 20, ge=4096, le=4 << 30)
    """Maximum size of the blocks packed into one object. At 16 MiB the latency of a request
    (25-30 ms) is small compared with its transfer."""
    uploads: int = Field(default=4, ge=1, le=64)
    """Maximum number of concurrent uploads."""
    writer_threads: int = Field(default=16, ge=1, le=256)
    """Number of threads that write blocks. Each uses one slot-sized buffer."""
    reader_threads: int = Field(default=16, ge=1, le=256)
    """Number of threads that read blocks. Each uses one slot-sized buffer."""
    linger: Milliseconds = Field(default=20.0, ge=0, le=10_000)
    """Time that a block waits for other blocks to share its object."""
    list_interval: Milliseconds = Field(default=30_000.0, ge=50)
    """Time between two listings of the bucket, which find the blocks of other nodes."""
    gc_grace: Milliseconds = Field(default=600_000.0, ge=0)
    """Objects of other nodes younger than this are not garbage-collected. Use several times the
    longest `list_interval` of any node."""
    capacity: Bytes = Field(default=0, ge=0)
    """Maximum size of all objects under the prefix. 0: no limit."""
    ttl: Milliseconds = Field(default=0.0, ge=0)
    """Age at which objects are deleted. 0: never."""
    timeout: Milliseconds = Field(default=5_000.0, ge=10)
    """Maximum time to open a connection, and maximum time without progress. A whole request may
    take four times as long, and once more for each 256 KiB that it sends."""


def check(config: Config) -> None:
    """Raises ConfigError: a value is invalid. Does not connect to the service."""
    if bool(config.access_key.get_secret_value()) != bool(config.secret_key.get_secret_value()):
        raise ConfigError(f"tier {config.name}: set both access_key and secret_key, or neither")
    if config.kms_key and config.encryption != "aws:kms":
        raise ConfigError(f"tier {config.name}: kms_key needs encryption = 'aws:kms'")
    if config.endpoint and not config.endpoint.startswith(("http://", "https://")):
        raise ConfigError(
            f"tier {config.name}: endpoint = {config.endpoint!r} is not a URL; "
            "use one such as 'http://host:port'"
        )
    if 0 < config.capacity < MIN_CAPACITY_BYTES:
        raise ConfigError(
            f"tier {config.name}: capacity = {config.capacity} is too small; use 0, or at least 1 "
            "MiB"
        )
    if config.gc_grace < config.list_interval:
        raise ConfigError(f"tier {config.name}: gc_grace must be at least list_interval")


def open(config: Config) -> Tier:
    """Open the tier. If the service is unreachable, a later listing finds its blocks.

    Raises ConfigError, like `check`.
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
        stall_timeout_s=config.timeout / 1e3,
        connections=config.uploads + config.reader_threads,
        put_headers=headers,
    )
    rules = RetentionRules(
        capacity_bytes=config.capacity,
        ttl_s=config.ttl / 1e3,
        gc_grace_s=config.gc_grace / 1e3,
        list_interval_s=config.list_interval / 1e3,
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
        writer_threads=config.writer_threads,
        reader_threads=config.reader_threads,
        linger_s=config.linger / 1e3,
    )
