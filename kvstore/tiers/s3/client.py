"""The S3 requests of the tier: get a range, put, delete and list.

boto3 finds and renews the credentials, and finds the endpoint. botocore signs the requests.
`http_pool` transfers the bytes.
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
from kvstore.tiers.s3.http_pool import HttpPool, Reply

MAX_LIST_PAGES: Final = 10_000
"""Maximum number of pages (of 1,000 names) in one listing."""
DEFAULT_REGION: Final = "us-east-1"
"""Region of signatures if neither the configuration nor boto3 has a region."""

_SIGNED: Final = "UNSIGNED-PAYLOAD"


@dataclass(frozen=True, slots=True)
class ListedObject:
    """One object in a listing. modified_s: seconds since 1970 by the service's clock."""

    name: str
    nbytes: int
    etag: str
    modified_s: float


@dataclass(frozen=True, slots=True)
class ObjectData:
    """The reply to a GET. total_bytes: size of the whole object, not of the range."""

    body: bytes
    total_bytes: int


class _Signer(S3SigV4Auth):  # type: ignore[misc]
    """Signs headers only. Frames have checksums already, and hashing the payload would take more
    CPU than sending it."""

    def payload(self, request: AWSRequest) -> str:
        return _SIGNED


class Client:
    """Sends requests to one bucket. Thread-safe. Does not connect before the first request.

    stall_timeout_s: see `HttpPool`. connections: maximum number of idle connections. put_headers:
    headers of every put (for encryption).

    Raises ConfigError: an argument is invalid.
    """

    def __init__(
        self,
        *,
        bucket: str,
        endpoint: str,
        region: str,
        path_style: bool,
        keys: tuple[str, str, str],
        stall_timeout_s: float,
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
                f"S3 tier: invalid address or credentials for bucket {bucket!r}: {why}"
            ) from None
        self.where = f"bucket {bucket!r} at {url.netloc}"
        self._base = url.path.rstrip("/") + "/"
        self._root = f"{url.scheme}://{url.netloc}"
        self._put_headers = dict(put_headers)
        self._conditional = True
        self._lock = threading.Lock()
        self._service_clock: tuple[float, float] | None = None
        self._counts = dict.fromkeys(("requests", *(f"errors_{kind}" for kind in faults.KINDS)), 0)
        self.last_error = ""
        """Error of the last request; "" if it succeeded."""
        self._http = HttpPool(
            url.netloc,
            secure=url.scheme == "https",
            stall_timeout_s=stall_timeout_s,
            max_idle=connections,
            ca_file=ca_file or None,
        )

    def _base_url(self, bucket: str, endpoint: str, path_style: bool) -> Any:
        """The URL of the bucket by botocore's endpoint rules."""
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
        object_bytes: int = 0,
    ) -> ObjectData:
        """Get bytes `first` to `last` (inclusive); with `first` None the final `last` bytes.

        into: buffers of exactly this length; without them the bytes are in `body`. object_bytes:
        expected size of the whole object; 0: unknown.

        Raises faults.Missing, faults.Invalid (another object than expected), TierUnavailable,
        TierError.
        """
        wanted = "bytes=" + (f"-{last}" if first is None else f"{first}-{last}")
        reply = self._send("GET", name, headers={"Range": wanted}, into=into)
        if reply.status == 416:
            raise self._count_error(faults.Invalid(f"{name} is shorter than expected"))
        if reply.status not in (200, 206):
            raise self._error_from(reply, f"GET {name}")
        total = reply.nbytes
        if reply.status == 206:
            total = int(reply.headers.get("content-range", "").rpartition("/")[2] or 0)
        if object_bytes and total != object_bytes:
            raise self._count_error(faults.Invalid(f"{name} has another size than expected"))
        if into and reply.body:
            raise self._count_error(
                faults.Invalid(f"{name}: the reply does not have the requested bytes")
            )
        return ObjectData(reply.body, total)

    def put(self, name: str, body: Sequence[memoryview], *, if_absent: bool) -> None:
        """Create an object from these views. if_absent: only if no object has the name.

        Raises faults.Exists, TierUnavailable, TierError.
        """
        headers = {
            "Content-Length": str(sum(map(len, body))),
            "Content-Type": "application/octet-stream",
            **self._put_headers,
        }
        if if_absent and self._conditional:
            headers["If-None-Match"] = "*"
        reply = self._send("PUT", name, headers=headers, body=body)
        if reply.status == 501 and "If-None-Match" in headers:
            # The service has no conditional put. All nodes put the same keys under this name, so
            # a second put costs an upload and does no harm.
            self._conditional = False
            self.put(name, body, if_absent=False)
            return
        if reply.status != 200:
            raise self._error_from(reply, f"PUT {name}")

    def delete(self, name: str) -> None:
        """Delete an object, if it exists. Raises TierUnavailable, TierError."""
        reply = self._send("DELETE", name)
        if reply.status not in (200, 202, 204, 404) or b"NoSuchBucket" in reply.body:
            raise self._error_from(reply, f"DELETE {name}")

    def list_objects(self, prefix: str) -> Iterator[ListedObject]:
        """Yield every object whose name starts with `prefix`."""
        for page in self._list_pages(prefix, ""):
            for item in page.iter("Contents"):
                text = {field.tag: field.text or "" for field in item}
                yield ListedObject(
                    unquote(text["Key"]),
                    int(text["Size"]),
                    text.get("ETag", ""),
                    _parse_date_s(text.get("LastModified")),
                )

    def list_folders(self, prefix: str) -> list[str]:
        """The folders below `prefix`: its extensions up to the next "/"."""
        pages = self._list_pages(prefix, "/")
        found = (item.findtext("Prefix") for page in pages for item in page.iter("CommonPrefixes"))
        return [unquote(name) for name in found if name]

    def now_s(self) -> float:
        """Seconds since 1970 by the service's clock; by this machine's before the first reply."""
        with self._lock:
            if self._service_clock is None:
                return time.time()
            service_s, received_s = self._service_clock
        return service_s + time.monotonic() - received_s

    def stats(self) -> dict[str, int | float | str]:
        """Number of requests, and of errors by kind."""
        with self._lock:
            return dict(self._counts)

    def close(self) -> None:
        self._http.close()

    # ------------------------------------------------------------------ internals

    def _list_pages(self, prefix: str, delimiter: str) -> Iterator[ElementTree.Element]:
        query = {"list-type": "2", "prefix": prefix, "encoding-type": "url"}
        if delimiter:
            query["delimiter"] = delimiter
        for _ in range(MAX_LIST_PAGES):
            reply = self._send("GET", "", query=query)
            if reply.status != 200:
                raise self._error_from(reply, f"listing of {prefix!r}")
            try:
                page = ElementTree.fromstring(reply.body)
            except ElementTree.ParseError as error:
                raise self._count_error(
                    faults.Unavailable("server", f"listing of {prefix!r}: invalid XML: {error}")
                ) from None
            for element in page.iter():
                element.tag = element.tag.rpartition("}")[2]
            yield page
            token = page.findtext("NextContinuationToken")
            if page.findtext("IsTruncated") != "true" or not token:
                return
            query["continuation-token"] = token
        raise self._count_error(
            faults.Rejected(f"listing of {prefix!r}: more than {MAX_LIST_PAGES} pages")
        )

    def _send(
        self,
        method: str,
        name: str,
        *,
        query: Mapping[str, str] | None = None,
        headers: Mapping[str, str] | None = None,
        body: Sequence[memoryview] = (),
        into: Sequence[memoryview] = (),
    ) -> Reply:
        """Send one signed request. Raises TierUnavailable: no complete reply."""
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
            raise self._count_error(faults.from_error(error, f"{method} {name}")) from None
        signed = {"Host": self._http.host, **dict(request.headers.items())}
        try:
            reply = self._http.exchange(method, target, signed, body, into)
        except faults.Unavailable as error:
            raise self._count_error(error) from error.__cause__
        date = reply.headers.get("date")
        with self._lock:
            if date:
                self._service_clock = (_parse_date_s(date), time.monotonic())
            if reply.status < 400:
                self.last_error = ""
        return reply

    def _error_from(self, reply: Reply, what: str) -> Exception:
        headers = {name.lower(): value for name, value in reply.headers.items()}
        error = faults.from_reply(reply.status, reply.body, headers, what)
        return error if isinstance(error, faults.Exists) else self._count_error(error)

    def _count_error(self, error: Any) -> Any:
        """Count an error; record it as `last_error` unless it concerns one object only."""
        with self._lock:
            self._counts[f"errors_{error.kind}"] += 1
            if isinstance(error, TierUnavailable | TierError):
                self.last_error = str(error)
        return error


def _parse_date_s(text: str | None) -> float:
    """Seconds since 1970 of a date in HTTP or XML format; the current time for other text."""
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
