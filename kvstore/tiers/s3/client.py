"""The few S3 requests the tier needs: get a range, put, delete, list.

boto3 finds the credentials (and renews them), the endpoint and the region's rules; botocore
signs. The bytes travel over `link`.
"""

from __future__ import annotations

import email.utils
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Final
from urllib.parse import quote, unquote, urlsplit
from xml.etree import ElementTree

import boto3
import botocore.session
from botocore import UNSIGNED
from botocore.auth import S3SigV4Auth
from botocore.awsrequest import AWSRequest
from botocore.config import Config as BotoConfig
from botocore.exceptions import BotoCoreError, ClientError, NoCredentialsError

from kvstore.errors import ConfigError, TierError, TierUnavailable
from kvstore.tiers.s3 import faults
from kvstore.tiers.s3.http_pool import Link, Reply

MAX_PAGES: Final = 10_000
"""Pages of 1,000 names that one listing may have."""
DEFAULT_REGION: Final = "us-east-1"
"""Signed for where neither the configuration nor boto3's chain names a region."""

_SIGNED: Final = "UNSIGNED-PAYLOAD"


@dataclass(frozen=True, slots=True)
class Listed:
    """One object of a listing. modified_s: seconds since 1970, by the service's clock."""

    name: str
    nbytes: int
    etag: str
    modified_s: float


@dataclass(frozen=True, slots=True)
class Got:
    """What a reply says of the object. total_bytes: of the whole object, not of the range."""

    body: bytes
    total_bytes: int


class _Signer(S3SigV4Auth):  # type: ignore[misc]
    """Signs headers only: a frame has its own checksums, and hashing it would cost more CPU than
    sending it."""

    def payload(self, request: AWSRequest) -> str:
        return _SIGNED


class Client:
    """Requests to one bucket. Thread-safe. Nothing is asked for until the first request.

    stall_s, connections: see `Link`. put_headers: sent with every put (encryption).
    Raises ConfigError for what can be seen to be wrong without asking the service.
    """

    def __init__(
        self,
        *,
        bucket: str,
        endpoint: str,
        region: str,
        path_style: bool,
        keys: tuple[str, str, str],
        stall_s: float,
        connections: int,
        put_headers: Mapping[str, str],
    ) -> None:
        access, secret, token = keys
        try:
            core = botocore.session.Session()
            self._session = boto3.session.Session(
                botocore_session=core,
                aws_access_key_id=access or None,
                aws_secret_access_key=secret or None,
                aws_session_token=token or None,
                region_name=region or None,
            )
            self._region = self._session.region_name or DEFAULT_REGION
            url = self._base_url(bucket, endpoint, path_style)
            ca_file = core.get_config_variable("ca_bundle")
        except (BotoCoreError, ValueError) as error:
            why = " ".join(str(error).split())[:200]
            raise ConfigError(
                f"the S3 tier's bucket {bucket!r} cannot be asked for: {why}"
            ) from None
        self.where = f"bucket {bucket!r} at {url.netloc}"
        self._base = url.path.rstrip("/") + "/"
        self._root = f"{url.scheme}://{url.netloc}"
        self._put_headers = dict(put_headers)
        self._conditional = True
        self._lock = threading.Lock()
        self._clock: tuple[float, float] | None = None
        self._counts = dict.fromkeys(("requests", *(f"faults_{kind}" for kind in faults.KINDS)), 0)
        self.trouble = ""
        """What was wrong with the last request; empty when nothing was."""
        self._link = Link(
            url.netloc,
            secure=url.scheme == "https",
            stall_s=stall_s,
            idle=connections,
            ca_file=ca_file or None,
        )

    def _base_url(self, bucket: str, endpoint: str, path_style: bool) -> Any:
        """The URL of the bucket, by botocore's rules for endpoints."""
        client = self._session.client(
            "s3",
            region_name=self._region,
            endpoint_url=endpoint or None,
            aws_access_key_id="unused",
            aws_secret_access_key="unused",
            config=BotoConfig(
                signature_version=UNSIGNED,
                s3={"addressing_style": "path" if path_style else "virtual"},
            ),
        )
        try:
            signed = client.generate_presigned_url("get_object", {"Bucket": bucket, "Key": "k"})
        finally:
            client.close()
        url = urlsplit(signed)
        return url._replace(path=url.path.removesuffix("k"), query="")

    # ------------------------------------------------------------------ requests

    def get(
        self,
        name: str,
        first: int | None,
        last: int,
        into: Sequence[memoryview] = (),
        *,
        of_bytes: int = 0,
    ) -> Got:
        """Bytes `first` to `last` (both included); with `first` None the last `last` bytes.

        into: buffers for exactly these bytes; without, they are in `body`. of_bytes: the length
        the whole object should have, if known. Raises faults.Missing, faults.Invalid when the
        object is not as it should be, TierUnavailable, TierError.
        """
        wanted = "bytes=" + (f"-{last}" if first is None else f"{first}-{last}")
        reply = self._exchange("GET", name, headers={"Range": wanted}, into=into)
        if reply.status == 416:
            raise self._counted(faults.Invalid(f"{name} is shorter than was known"))
        if reply.status not in (200, 206):
            raise self._fault(reply, f"GET {name}")
        total = reply.nbytes
        if reply.status == 206:
            total = int(reply.headers.get("content-range", "").rpartition("/")[2] or 0)
        if of_bytes and total != of_bytes:
            raise self._counted(faults.Invalid(f"{name} is another object than was known"))
        if into and reply.body:
            raise self._counted(faults.Invalid(f"{name} has not the bytes that were asked for"))
        return Got(reply.body, total)

    def put(self, name: str, body: Sequence[memoryview], *, absent: bool) -> None:
        """Make an object of these views. absent: only if there is none of that name.

        Raises faults.Exists, TierUnavailable, TierError.
        """
        headers = {
            "Content-Length": str(sum(map(len, body))),
            "Content-Type": "application/octet-stream",
            **self._put_headers,
        }
        if absent and self._conditional:
            headers["If-None-Match"] = "*"
        reply = self._exchange("PUT", name, headers=headers, body=body)
        if reply.status == 501 and "If-None-Match" in headers:
            # The service has no conditional put. A name holds the same keys whoever puts it, so
            # a second put wastes an upload and harms nothing.
            self._conditional = False
            self.put(name, body, absent=False)
            return
        if reply.status != 200:
            raise self._fault(reply, f"PUT {name}")

    def delete(self, name: str) -> None:
        """Remove an object; one that is not there is no error."""
        reply = self._exchange("DELETE", name)
        if reply.status not in (200, 202, 204, 404) or b"NoSuchBucket" in reply.body:
            raise self._fault(reply, f"DELETE {name}")

    def listing(self, prefix: str) -> Iterator[Listed]:
        """Every object whose name begins with `prefix`, page by page."""
        for page in self._pages(prefix, ""):
            for item in page.iter("Contents"):
                text = {field.tag: field.text or "" for field in item}
                yield Listed(
                    unquote(text["Key"]),
                    int(text["Size"]),
                    text.get("ETag", ""),
                    _seconds(text.get("LastModified")),
                )

    def folders(self, prefix: str) -> list[str]:
        """The prefixes, one "/" longer, of the objects whose names begin with `prefix`."""
        pages = self._pages(prefix, "/")
        found = (item.findtext("Prefix") for page in pages for item in page.iter("CommonPrefixes"))
        return [unquote(name) for name in found if name]

    def now_s(self) -> float:
        """Seconds since 1970 by the service's clock, as far as it has told."""
        with self._lock:
            if self._clock is None:
                return time.time()
            said_s, heard_s = self._clock
        return said_s + time.monotonic() - heard_s

    def stats(self) -> dict[str, int | float | str]:
        """Requests, and faults by kind."""
        with self._lock:
            return dict(self._counts)

    def close(self) -> None:
        self._link.close()

    # ------------------------------------------------------------------ parts of them

    def _pages(self, prefix: str, delimiter: str) -> Iterator[ElementTree.Element]:
        query = {"list-type": "2", "prefix": prefix, "encoding-type": "url"}
        if delimiter:
            query["delimiter"] = delimiter
        for _ in range(MAX_PAGES):
            reply = self._exchange("GET", "", query=query)
            if reply.status != 200:
                raise self._fault(reply, f"listing of {prefix!r}")
            try:
                page = ElementTree.fromstring(reply.body)
            except ElementTree.ParseError as error:
                raise self._counted(
                    faults.Away("server", f"listing of {prefix!r}: unreadable: {error}")
                ) from None
            for element in page.iter():
                element.tag = element.tag.rpartition("}")[2]
            yield page
            token = page.findtext("NextContinuationToken")
            if page.findtext("IsTruncated") != "true" or not token:
                return
            query["continuation-token"] = token
        raise self._counted(faults.Refused(f"listing of {prefix!r}: more than {MAX_PAGES} pages"))

    def _exchange(
        self,
        method: str,
        name: str,
        *,
        query: Mapping[str, str] | None = None,
        headers: Mapping[str, str] | None = None,
        body: Sequence[memoryview] = (),
        into: Sequence[memoryview] = (),
    ) -> Reply:
        """One signed request. Raises TierUnavailable when there is no whole reply."""
        target = self._base + name
        if query:
            target += "?" + "&".join(f"{key}={quote(text, safe='')}" for key, text in query.items())
        request = AWSRequest(method=method, url=self._root + target, headers=dict(headers or {}))
        with self._lock:
            self._counts["requests"] += 1
        try:
            found = self._session.get_credentials()
            if found is None:
                raise NoCredentialsError
            _Signer(found.get_frozen_credentials(), "s3", self._region).add_auth(request)
        except (BotoCoreError, ClientError) as error:
            raise self._counted(faults.from_error(error, f"{method} {name}")) from None
        signed = {"Host": self._link.host, **dict(request.headers.items())}
        try:
            reply = self._link.exchange(method, target, signed, body, into)
        except faults.Away as error:
            raise self._counted(error) from error.__cause__
        date = reply.headers.get("date")
        with self._lock:
            if date:
                self._clock = (_seconds(date), time.monotonic())
            if reply.status < 400:
                self.trouble = ""
        return reply

    def _fault(self, reply: Reply, what: str) -> Exception:
        headers = {name.lower(): value for name, value in reply.headers.items()}
        fault = faults.from_reply(reply.status, reply.body, headers, what)
        return fault if isinstance(fault, faults.Exists) else self._counted(fault)

    def _counted(self, fault: Any) -> Any:
        """Count a fault, and keep its text if the tier is to blame and not one object."""
        with self._lock:
            self._counts[f"faults_{fault.kind}"] += 1
            if isinstance(fault, TierUnavailable | TierError):
                self.trouble = str(fault)
        return fault


def _seconds(text: str | None) -> float:
    """Seconds since 1970 of a date as HTTP or XML write it; now when it is neither."""
    if not text:
        return time.time()
    try:
        if text[:1].isdigit():
            text = text.replace("Z", "+00:00")
            whole, _, rest = text.partition(".")
            zone = rest.lstrip("0123456789") if rest else ""
            return datetime.fromisoformat(whole + zone).timestamp()
        return email.utils.parsedate_to_datetime(text).timestamp()
    except (ValueError, TypeError):
        return time.time()
