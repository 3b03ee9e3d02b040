"""The sidecar's HTTP server: health, metrics, statistics, and blocks for clients without the slab.

Blocks travel as frames (`frame.py`). They are streamed into and out of a few aligned buffers made
at start; without a free buffer a request gets 503. A frame is verified before any reader sees it,
and its tenant must be the tenant of the auth token. Calls that can hang in a tier have separate
bulkheads (`call_limits`). After its timeout such a call gets 504, and blocks in L2 are served
meanwhile.

    GET  /healthz, /readyz, /metrics
    GET  /v1/stats
    POST /v1/contains                  {"namespace": digest, "hashes": [hex, ...]}
    GET  /v1/blocks/{namespace}/{hash} a frame
    PUT  /v1/blocks/{namespace}/{hash} a frame

Administration is in `admin_routes`. Every error is `{"error": "one line"}`.
"""

from __future__ import annotations

import asyncio
import json
import logging
import re
import time
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from typing import Any, Final, TypeVar

from fastapi import FastAPI, HTTPException, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, PlainTextResponse, Response
from prometheus_client import CollectorRegistry, ProcessCollector, generate_latest
from prometheus_client.exposition import CONTENT_TYPE_LATEST
from starlette.exceptions import HTTPException as StarletteHTTPException
from starlette.types import Receive, Scope, Send

from kvstore.blocks.frame import HEADER_BYTES, MAX_HASH_BYTES, aligned_buffer, padded_bytes
from kvstore.blocks.key import Key
from kvstore.config.settings import HashSettings
from kvstore.errors import (
    ConfigError,
    FrameInvalid,
    FrameUnsupported,
    NamespaceMismatch,
    StoreClosed,
    TierFull,
    TierUnavailable,
)
from kvstore.ipc.protocol import MAX_HASHES
from kvstore.service.access.auth import Tenants, Unauthorised
from kvstore.service.access.visibility import visible_stats
from kvstore.service.http.call_limits import Bulkhead, busy, result_of
from kvstore.service.http.csrf import CrossSiteGuard
from kvstore.service.http.request_log import RequestCounts, RequestMiddleware
from kvstore.store.store import Store
from kvstore.telemetry.prometheus import StoreCollector
from kvstore.telemetry.tracing import Tracer

MAX_BODY_BYTES: Final = 16 << 20
"""Maximum JSON body: 65,536 hashes of 64 bytes in hex, and some more."""
SEND_BYTES: Final = 256 << 10
"""Bytes passed to the server at a time. Each part is a copy, so the buffer can be reused after the
last part, even if the transport still has some."""

MAX_CONTAINS_CALLS: Final = 4
"""Maximum contains requests at the same time: each may have a body of `MAX_BODY_BYTES`."""
MAX_ADMIN_CALLS: Final = 2
"""Maximum flushes and clears at the same time."""
MAX_DASHBOARD_CALLS: Final = 4
"""Maximum dashboard views built at the same time."""
CLOSE_WAIT_S: Final = 2.0
"""Longest wait at the end for calls in the store."""

_HEX = re.compile(r"(?:[0-9a-f]{2})+")
_NAMESPACE = re.compile(r"[0-9a-f]{32}")
_STATUS: Final = {
    Unauthorised: 401,
    NamespaceMismatch: 409,
    FrameUnsupported: 415,
    FrameInvalid: 400,
    ConfigError: 400,
    TierFull: 507,
    TierUnavailable: 503,
    StoreClosed: 503,
}

log = logging.getLogger(__name__)

T = TypeVar("T")


class Buffer:
    """A header sector and a payload, shared by its users until the last one releases it."""

    def __init__(self, view: memoryview, give_back: Callable[[memoryview], None]) -> None:
        self.view = view
        self._give_back = give_back
        self._users = 1

    def retain(self) -> None:
        """Add one user."""
        assert self._users > 0, "the buffer was already given back"
        self._users += 1

    def release(self, *_: object) -> None:
        """Remove one user."""
        assert self._users > 0, "the buffer was given back twice"
        self._users -= 1
        if not self._users:
            self._give_back(self.view)


class HttpTransferLimit:
    """The buffers of frames in transfer: `count` of them, each a header sector and a payload."""

    def __init__(self, count: int, payload_bytes: int) -> None:
        self._free = [
            aligned_buffer(HEADER_BYTES + padded_bytes(payload_bytes)) for _ in range(count)
        ]
        self.count = count
        self.rejected = 0

    @property
    def in_use(self) -> int:
        """Buffers in use."""
        return self.count - len(self._free)

    def acquire(self) -> Buffer:
        """A buffer with the caller as its user. 503 when all are in use."""
        if not self._free:
            self.rejected += 1
            raise busy(f"{self.count} transfers are already in progress")
        return Buffer(self._free.pop(), self._free.append)


class FrameResponse(Response):
    """Streams the first `nbytes` of a buffer, and always releases the buffer at the end."""

    def __init__(self, buffer: Buffer, nbytes: int, timeout_s: float) -> None:
        super().__init__(
            media_type="application/octet-stream", headers={"content-length": str(nbytes)}
        )
        self._buffer = buffer
        self._nbytes = nbytes
        self._timeout_s = timeout_s

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await asyncio.wait_for(self._stream(send), self._timeout_s)
        except (TimeoutError, asyncio.TimeoutError):
            log.warning(
                "transfer aborted: the client took over %g s for one block", self._timeout_s
            )
        finally:
            self._buffer.release()

    async def _stream(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
        for start in range(0, self._nbytes, SEND_BYTES):
            end = min(start + SEND_BYTES, self._nbytes)
            part = bytes(self._buffer.view[start:end])
            await send(
                {"type": "http.response.body", "body": part, "more_body": end < self._nbytes}
            )


@dataclass
class Service:
    """State shared by the routes.

    stats: everything that `/v1/stats` shows. ready: whether the sidecar serves (readiness).
    transfer_timeout_s: longest transfer of one block, and longest call for it.
    flush_timeout_s: longest flush. hash: settings for hashing token ids. tracer: records spans.
    """

    store: Store
    tenants: Tenants
    stats: Callable[[], dict[str, Any]]
    ready: Callable[[], bool]
    max_transfers: int
    transfer_timeout_s: float
    flush_timeout_s: float
    hash: HashSettings = field(default_factory=HashSettings)
    tracer: Tracer | None = None
    requests: RequestCounts = field(default_factory=RequestCounts)

    def __post_init__(self) -> None:
        self.transfers = HttpTransferLimit(self.max_transfers, self.store.frames.payload_bytes)
        # Each of these calls has a buffer. Tier reads leave one buffer for blocks in L2, if there
        # is more than one.
        self.transfer_calls = Bulkhead("transfers", self.max_transfers)
        self.tier_reads = Bulkhead("tier reads", max(1, self.max_transfers - 1))
        self.contains_calls = Bulkhead("contains requests", MAX_CONTAINS_CALLS)
        self.admin_calls = Bulkhead("flushes and clears", MAX_ADMIN_CALLS)
        # A warm request may take long or hang in a tier. Administration must not wait for it.
        self.warm_calls = Bulkhead("warm requests", 1)
        self.dashboard_calls = Bulkhead("dashboard views", MAX_DASHBOARD_CALLS)
        self.list_calls = Bulkhead("list requests", 1)

    async def read_frame(self, key: Key, buffer: Buffer) -> int:
        """Read a block's frame into the buffer. Returns the payload bytes, 0 for a miss."""
        return await self.transfer(
            self.transfer_calls, self.store.frames.read_l2, key, buffer
        ) or await self.transfer(self.tier_reads, self.store.frames.read_tiers, key, buffer)

    async def transfer(
        self,
        bulkhead: Bulkhead,
        function: Callable[[Key, memoryview, memoryview], T],
        key: Key,
        buffer: Buffer,
        end: int | None = None,
    ) -> T:
        """Call the store with a buffer (its first `end` bytes). The call uses the buffer until it
        ends, even after its timeout."""
        bulkhead.acquire()
        running = bulkhead.start(
            function, key, buffer.view[:HEADER_BYTES], buffer.view[HEADER_BYTES:end]
        )
        buffer.retain()
        running.add_done_callback(buffer.release)
        return await result_of(running, self.transfer_timeout_s)

    async def run_admin_call(
        self, function: Callable[..., T], *args: Any, bulkhead: Bulkhead | None = None
    ) -> T:
        """Run a blocking call for an administrator; default bulkhead: flushes and clears."""
        bulkhead = bulkhead or self.admin_calls
        bulkhead.acquire()
        return await result_of(
            bulkhead.start(function, *args), self.flush_timeout_s + self.transfer_timeout_s
        )

    def close(self) -> None:
        """Wait a short time for running calls. The event loop has ended."""
        deadline_s = time.monotonic() + CLOSE_WAIT_S
        bulkheads = [self.transfer_calls, self.tier_reads, self.contains_calls, self.admin_calls]
        bulkheads += [self.warm_calls, self.list_calls, self.dashboard_calls]
        left = sum(each.join(deadline_s) for each in bulkheads)
        if left:
            log.error("%d calls in the store did not end", left)

    def snapshot(self) -> dict[str, Any]:
        """For statistics."""
        return {
            "transfers": self.transfers.in_use,
            "transfers_rejected": self.transfers.rejected + self.tier_reads.rejected,
            "contains_rejected": self.contains_calls.rejected,
            "requests": self.requests.snapshot(),
        }

    def tenant_of(self, request: Request) -> str:
        """The tenant of the request's auth token."""
        return self.tenants.tenant_of(bearer_token(request))

    async def receive_body(self, request: Request, buffer: memoryview) -> int:
        """Stream a request's body into `buffer`. Returns its length; 413 if it is too long."""
        announced = request.headers.get("content-length", "0")
        if announced.isdigit() and int(announced) > len(buffer):
            raise HTTPException(413, f"the maximum size of a frame is {len(buffer)} bytes")
        end = 0
        async for part in request.stream():
            start, end = end, end + len(part)
            if end > len(buffer):
                raise HTTPException(413, f"the maximum size of a frame is {len(buffer)} bytes")
            buffer[start:end] = part
        return end


def bearer_token(request: Request) -> str | None:
    """The auth token of `Authorization: Bearer ...`, or None."""
    scheme, _, token = request.headers.get("authorization", "").partition(" ")
    return token.strip() if scheme.lower() == "bearer" else None


async def receive_within(receiving: Coroutine[Any, Any, T], timeout_s: float) -> T:
    """Receive a request's body; 408 after `timeout_s`."""
    try:
        return await asyncio.wait_for(receiving, timeout_s)
    except (TimeoutError, asyncio.TimeoutError):
        raise HTTPException(408, f"no complete request body within {timeout_s:g} s") from None


def build_app(service: Service) -> FastAPI:
    """The application over one store, without the administrator's routes (`admin_routes`)."""
    app = FastAPI(title="kvstore sidecar", docs_url=None, redoc_url=None)
    app.add_middleware(CrossSiteGuard)
    app.add_middleware(RequestMiddleware, counts=service.requests, tracer=service.tracer)
    _add_errors(app)
    _add_health(app, service)
    _add_blocks(app, service)
    return app


def _add_health(app: FastAPI, service: Service) -> None:
    registry = CollectorRegistry()
    registry.register(StoreCollector(service.stats))
    ProcessCollector(registry=registry)

    @app.get("/healthz")
    async def healthz() -> dict[str, str]:
        return {"status": "ok"}

    @app.get("/readyz")
    async def readyz() -> JSONResponse:
        ready = service.ready()
        status = "ready" if ready else "not ready"
        return JSONResponse({"status": status}, 200 if ready else 503)

    @app.get("/metrics")
    async def metrics() -> PlainTextResponse:
        return PlainTextResponse(generate_latest(registry), media_type=CONTENT_TYPE_LATEST)

    @app.get("/v1/stats")
    async def stats(request: Request) -> dict[str, Any]:
        return visible_stats(service.tenants.visible_tenant(bearer_token(request)), service.stats())


def _add_blocks(app: FastAPI, service: Service) -> None:
    @app.post("/v1/contains")
    async def contains(request: Request) -> dict[str, list[Any]]:
        tenant = service.tenant_of(request)
        bulkhead = service.contains_calls
        bulkhead.acquire()
        try:
            body = await receive_within(json_body(request), service.transfer_timeout_s)
            namespace, hashes = _contains_body(body)
        except BaseException:
            bulkhead.release()
            raise
        keys = [Key(tenant, namespace, hash_) for hash_ in hashes]
        found = await result_of(
            bulkhead.start(service.store.frames.contains, keys), service.transfer_timeout_s
        )
        return {"contains": [bool(tier) for tier in found], "tiers": found}

    @app.get("/v1/blocks/{namespace}/{hash_hex}")
    async def get_block(namespace: str, hash_hex: str, request: Request) -> Response:
        key = _key(service.tenant_of(request), namespace, hash_hex)
        buffer = service.transfers.acquire()
        try:
            nbytes = await service.read_frame(key, buffer)
            if not nbytes:
                raise HTTPException(404, "no such block")
        except BaseException:
            buffer.release()
            raise
        return FrameResponse(buffer, HEADER_BYTES + nbytes, service.transfer_timeout_s)

    @app.put("/v1/blocks/{namespace}/{hash_hex}", status_code=204)
    async def put_block(namespace: str, hash_hex: str, request: Request) -> Response:
        key = _key(service.tenant_of(request), namespace, hash_hex)
        buffer = service.transfers.acquire()
        try:
            nbytes = await receive_within(
                service.receive_body(request, buffer.view), service.transfer_timeout_s
            )
            if nbytes <= HEADER_BYTES:
                raise HTTPException(400, f"a frame of {nbytes} bytes has no payload")
            await service.transfer(
                service.transfer_calls, service.store.frames.write, key, buffer, nbytes
            )
        finally:
            buffer.release()
        return Response(status_code=204)


def _add_errors(app: FastAPI) -> None:
    """Return every error as one line of JSON."""

    async def by_status(request: Request, error: Exception) -> JSONResponse:
        assert isinstance(error, StarletteHTTPException)
        return _error(error.status_code, str(error.detail), dict(error.headers or {}))

    async def by_validation(request: Request, error: Exception) -> JSONResponse:
        assert isinstance(error, RequestValidationError)
        first = error.errors()[0]
        return _error(422, f"{'.'.join(str(part) for part in first['loc'])}: {first['msg']}")

    async def by_store_error(request: Request, error: Exception) -> JSONResponse:
        status = next(code for kind, code in _STATUS.items() if isinstance(error, kind))
        return _error(status, str(error))

    async def by_internal_error(request: Request, error: Exception) -> JSONResponse:
        return _error(500, f"internal error: {type(error).__name__}; see the sidecar's log")

    app.add_exception_handler(StarletteHTTPException, by_status)
    app.add_exception_handler(RequestValidationError, by_validation)
    for kind in _STATUS:
        app.add_exception_handler(kind, by_store_error)
    app.add_exception_handler(Exception, by_internal_error)


def _error(status: int, text: str, headers: dict[str, str] | None = None) -> JSONResponse:
    return JSONResponse({"error": " ".join(text.split())}, status, headers)


def _key(tenant: str, namespace: str, hash_hex: str) -> Key:
    """The key in a path, or 422."""
    return Key(tenant, namespace_in(namespace), _hash_in(hash_hex))


def namespace_in(value: Any) -> str:
    """The digest of a namespace in a request, or 422."""
    if not isinstance(value, str) or not _NAMESPACE.fullmatch(value):
        raise HTTPException(422, "namespace must be a digest of 32 hex digits")
    return value


def hashes_in(value: Any) -> list[bytes]:
    """The block hashes in a request's JSON, or 422."""
    if not isinstance(value, list) or len(value) > MAX_HASHES:
        raise HTTPException(422, f"hashes must be a list of at most {MAX_HASHES}")
    return [_hash_in(item) for item in value]


def _hash_in(value: Any) -> bytes:
    if not isinstance(value, str) or not _HEX.fullmatch(value) or len(value) > 2 * MAX_HASH_BYTES:
        raise HTTPException(422, f"hash must be 1 to {MAX_HASH_BYTES} bytes in lower-case hex")
    return bytes.fromhex(value)


async def json_body(request: Request) -> Any:
    """Read a JSON body of at most `MAX_BODY_BYTES`."""
    body = bytearray()
    async for part in request.stream():
        body += part
        if len(body) > MAX_BODY_BYTES:
            raise HTTPException(413, f"the maximum request body is {MAX_BODY_BYTES} bytes")
    try:
        return json.loads(body)
    except (ValueError, RecursionError):
        raise HTTPException(400, "the body is not JSON") from None


def _contains_body(body: Any) -> tuple[str, list[bytes]]:
    """(namespace, hashes) of a contains request, or 422."""
    if not isinstance(body, dict) or set(body) != {"namespace", "hashes"}:
        raise HTTPException(
            422,
            f'the body must be {{"namespace": hex, "hashes": [hex, ...]}}, at most {MAX_HASHES}',
        )
    return namespace_in(body["namespace"]), hashes_in(body["hashes"])
