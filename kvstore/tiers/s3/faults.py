"""What can go wrong with a request, in the words of the tier contract.

Everything foreign (sockets, TLS, HTTP, the service's error codes, botocore's) becomes one of a few
exceptions here, each with a kind that is counted. None of them repeats what the service said in
prose: some services put keys and signatures there.
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
"""Kinds of fault that are counted. The last two are misses: an object is gone, or is not what it
should be."""

_CODE = re.compile(rb"<Code>\s*([A-Za-z0-9._-]{1,64})\s*</Code>")
_SLOW = frozenset({"SlowDown", "RequestLimitExceeded", "Throttling", "TooManyRequests"})
_CREDENTIALS = frozenset({"ExpiredToken", "ExpiredTokenException", "TokenRefreshRequired"})
_CREDENTIALS |= frozenset({"InvalidToken", "InvalidAccessKeyId", "AuthorizationHeaderMalformed"})
_BUCKET = frozenset({"NoSuchBucket", "InvalidBucketName", "PermanentRedirect"})
_BUCKET |= frozenset({"TemporaryRedirect", "AllAccessDisabled"})
_FULL = frozenset({"InsufficientStorage", "QuotaExceeded", "XMinioStorageFull"})
_LATER = frozenset({"RequestTimeout", "OperationAborted", "ConditionalRequestConflict"})


class Away(TierUnavailable):
    """The service does not do it now, or not for us; it may again later."""

    def __init__(self, kind: str, text: str) -> None:
        super().__init__(text)
        self.kind = kind


class Refused(TierError):
    """This request can never succeed."""

    kind = "request"


class Full(TierFull):
    """The service has no room."""

    kind = "full"


class Missing(Exception):
    """There is no such object (any more)."""

    kind = "missing"


class Exists(Exception):
    """A conditional put met an object of that name."""


class Invalid(Exception):
    """An object that is not what its name says."""

    kind = "invalid"


def code_of(body: bytes) -> str:
    """The error code in a reply's XML; empty when there is none."""
    found = _CODE.search(body)
    return found[1].decode() if found else ""


def from_reply(
    status: int, body: bytes, headers: Mapping[str, str], what: str
) -> Away | Full | Refused | Missing | Exists:
    """The exception for a reply that is no success."""
    code = code_of(body) or f"status {status}"
    if code in _SLOW or status == 429:
        return Away("slow_down", f"{what}: the service asks for fewer requests ({code})")
    if code in _FULL or status == 507:
        return Full(f"{what}: the service has no room ({code})")
    if status in (409, 412) and code not in _LATER:
        return Exists(code)
    if code in _BUCKET or status in (301, 307):
        region = headers.get("x-amz-bucket-region")
        hint = f"; it is in region {region!r}" if region else "; see bucket, region and endpoint"
        return Away("bucket", f"{what}: the bucket cannot be had ({code}){hint}")
    if status in (401, 403) or code in _CREDENTIALS:
        return Away("credentials", f"{what}: the credentials are refused ({code})")
    if status == 404:
        return Missing(code)
    if status == 503:
        return Away("slow_down", f"{what}: the service is busy ({code})")
    if (status >= 500 and status != 501) or code in _LATER:
        return Away("server", f"{what}: the service failed ({code})")
    return Refused(f"{what}: the service refuses the request ({code})")


def from_error(error: Exception, what: str) -> Away:
    """The exception for a request that got no whole reply."""
    if isinstance(error, TimeoutError):
        return Away("timeout", f"{what}: no answer in time")
    if isinstance(error, BotoCoreError | ClientError):
        return Away("credentials", f"{what}: no credentials: {type(error).__name__}")
    if isinstance(error, ssl.SSLError):
        return Away("connect", f"{what}: TLS: {error.reason or error}")
    if isinstance(error, ConnectionResetError | BrokenPipeError | http.client.HTTPException):
        return Away("reset", f"{what}: the connection broke ({type(error).__name__})")
    return Away("connect", f"{what}: {error}")
