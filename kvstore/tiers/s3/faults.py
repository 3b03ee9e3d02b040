"""Maps errors of requests to the exceptions of the tier contract.

Errors of sockets, TLS, HTTP, botocore and the service become one of a few exceptions. Each has a
kind, which is counted. No message contains the service's error text, because some services put
keys and signatures there.
"""

from __future__ import annotations

import http.client
import re
import ssl
from collections.abc import Mapping
from typing import Final

from botocore.exceptions import BotoCoreError, ClientError

from kvstore.errors import TierError, TierFull, TierUnavailable

KINDS: Final = (
    "connect",
    "timeout",
    "reset",
    "truncated",
    "slow_down",
    "server",
    "credentials",
    "bucket",
    "full",
    "request",
    "missing",
    "invalid",
)
"""Kinds of error that are counted. The last two are misses: an object is missing or invalid."""

_CODE = re.compile(rb"<Code>\s*([A-Za-z0-9._-]{1,64})\s*</Code>")
_SLOW_DOWN_CODES = frozenset({"SlowDown", "RequestLimitExceeded", "Throttling", "TooManyRequests"})
_CREDENTIALS_CODES = frozenset({"ExpiredToken", "ExpiredTokenException", "TokenRefreshRequired"})
_CREDENTIALS_CODES |= frozenset(
    {"InvalidToken", "InvalidAccessKeyId", "AuthorizationHeaderMalformed"}
)
_BUCKET_CODES = frozenset({"NoSuchBucket", "InvalidBucketName", "PermanentRedirect"})
_BUCKET_CODES |= frozenset({"TemporaryRedirect", "AllAccessDisabled"})
_FULL_CODES = frozenset({"InsufficientStorage", "QuotaExceeded", "XMinioStorageFull"})
_RETRYABLE_CODES = frozenset({"RequestTimeout", "OperationAborted", "ConditionalRequestConflict"})


class Unavailable(TierUnavailable):
    """The service fails or rejects this client now. A later request may succeed."""

    def __init__(self, kind: str, text: str) -> None:
        super().__init__(text)
        self.kind = kind


class Rejected(TierError):
    """This request can never succeed."""

    kind = "request"


class Full(TierFull):
    """The service has no room."""

    kind = "full"


class Missing(Exception):
    """The object does not exist."""

    kind = "missing"


class Exists(Exception):
    """A conditional put failed: an object with this name exists."""


class Invalid(Exception):
    """The object does not have the expected contents."""

    kind = "invalid"


class Unsupported(Invalid):
    """An object of a later version. It is left as it is, for the release that wrote it."""


def code_of(body: bytes) -> str:
    """The error code in a reply's XML; "" if it has none."""
    found = _CODE.search(body)
    return found[1].decode() if found else ""


def from_reply(
    status: int, body: bytes, headers: Mapping[str, str], what: str
) -> Unavailable | Full | Rejected | Missing | Exists:
    """The exception for an error reply."""
    code = code_of(body) or f"status {status}"
    if code in _SLOW_DOWN_CODES or status == 429:
        return Unavailable("slow_down", f"{what}: the service limits the request rate ({code})")
    if code in _FULL_CODES or status == 507:
        return Full(f"{what}: the service has no room ({code})")
    if status in (409, 412) and code not in _RETRYABLE_CODES:
        return Exists(code)
    if code in _BUCKET_CODES or status in (301, 307):
        region = headers.get("x-amz-bucket-region")
        hint = f"the bucket is in region {region!r}" if region else "check bucket, region, endpoint"
        return Unavailable("bucket", f"{what}: cannot access the bucket ({code}); {hint}")
    if status in (401, 403) or code in _CREDENTIALS_CODES:
        return Unavailable("credentials", f"{what}: the service rejects the credentials ({code})")
    if status == 404:
        return Missing(code)
    if status == 503:
        return Unavailable("slow_down", f"{what}: the service is busy ({code})")
    if (status >= 500 and status != 501) or code in _RETRYABLE_CODES:
        return Unavailable("server", f"{what}: the service failed ({code})")
    return Rejected(f"{what}: the service rejects the request ({code})")


def from_error(error: Exception, what: str) -> Unavailable:
    """The exception for a request without a complete reply."""
    if isinstance(error, TimeoutError):
        return Unavailable("timeout", f"{what}: timeout")
    if isinstance(error, BotoCoreError | ClientError):
        return Unavailable("credentials", f"{what}: no credentials: {type(error).__name__}")
    if isinstance(error, ssl.SSLError):
        return Unavailable("connect", f"{what}: TLS: {error.reason or error}")
    if isinstance(error, ConnectionResetError | BrokenPipeError | http.client.HTTPException):
        return Unavailable("reset", f"{what}: connection lost ({type(error).__name__})")
    return Unavailable("connect", f"{what}: {error}")
