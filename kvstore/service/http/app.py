"""The sidecar's HTTP side: health, metrics, statistics, and blocks for who cannot map the slab.

Blocks travel as frames (`frame.py`), streamed into and out of a few aligned buffers made at start;
a request that finds none free is told 503. A frame is verified before anybody can see it, and its
tenant must be the one the bearer token names. What may hang below L2 runs in lanes of its own
(`lanes`): past its time it is answered 504, and blocks in L2 are served meanwhile.

    GET  /healthz, /readyz, /metrics
    GET  /v1/stats
    POST /v1/contains                  {"namespace": digest, "hashes": [hex, ...]}
    GET  /v1/blocks/{namespace}/{hash} a frame
    PUT  /v1/blocks/{namespace}/{hash} a frame

What only administrators may do is in `care`. Every error is `{"error": "one line"}`.
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

from kvstore.blocks.frame import HEADER_BYTES, MAX_HASH_BYTES, aligned_buffer, padded
from kvstore.blocks.key import Key
from kvstore.config.settings import HashSettings
from kvstore.errors import (
    ConfigError,
    FrameInvalid,
    NamespaceMismatch,
    StoreClosed,
    TierFull,
    TierUnavailable,
)
from kvstore.ipc.protocol import MAX_HASHES
from kvstore.service.auth import Tenants, Unauthorised
from kvstore.service.http.call_limits import Lane, answer_of, busy
from kvstore.service.http.csrf import SameOrigin
from kvstore.service.http.request_log import RequestCounts, Requests
from kvstore.service.http.visibility import seen_by
from kvstore.store.store import Store
from kvstore.telemetry.prometheus import StoreCollector
from kvstore.telemetry.tracing import Tracer

MAX_BODY_BYTES: Final = 16 << 20
"""Bound on the JSON of a request: 65,536 hashes of 64 bytes in hex, and some."""
SEND_BYTES: Final = 256 << 10
"""Bytes handed to the server at a time: a copy each, so that the buffer is ours again when the
last one is out, whatever the transport still holds."""

CONTAINS_AT_ONCE: Final = 4
"""Contains requests at once, from their first byte on: each may have a body of that bound."""
CARE_AT_ONCE: Final = 2
"""Flushes and clears at once."""
LOOKS_AT_ONCE: Final = 4
"""Views of the dashboard made at once."""
CLOSE_WAIT_S: Final = 2.0
"""How long the end waits for calls that are inside the store."""

_HEX = re.compile(r"(?:[0-9a-f]{2})+")
_NAMESPACE = re.compile(r"[0-9a-f]{32}")
_STATUS: Final = {
    Unauthorised: 401,
    NamespaceMismatch: 409,
    FrameInvalid: 400,
    ConfigError: 400,
    TierFull: 507,
    TierUnavailable: 503,
    StoreClosed: 503,
}

log = logging.getLogger(__name__)

T = TypeVar("T")


class Buffer:
    """A header page and a payload, until the last of those who hold it has dropped it."""

    def __init__(self, view: memoryview, give: Callable[[memoryview], None]) -> None:
        self.view = view
        self._give = give
        self._holders = 1

    def hold(self) -> None:
        """One more holder."""
        assert self._holders > 0, "a buffer that was given back"
        self._holders += 1

    def drop(self, *_: object) -> None:
        """One holder less."""
        assert self._holders > 0, "a buffer given back twice"
        self._holders -= 1
        if not self._holders:
            self._give(self.view)


class Transfers:
    """The buffers of frames under way: `count` of them, each a header page and a payload."""

    def __init__(self, count: int, payload_bytes: int) -> None:
        self._free = [aligned_buffer(HEADER_BYTES + padded(payload_bytes)) for _ in range(count)]
        self.count = count
        self.refused = 0

    @property
    def taken(self) -> int:
        """Buffers in use."""
        return self.count - len(self._free)

    def take(self) -> Buffer:
        """A buffer, held by the caller; 503 when all are in use."""
        if not self._free:
            self.refused += 1
            raise busy(f"{self.count} transfers are under way already")
        return Buffer(self._free.pop(), self._free.append)


class FrameResponse(Response):
    """Streams the first `nbytes` of a buffer, and drops the buffer however that ends."""

    def __init__(self, buffer: Buffer, nbytes: int, limit_s: float) -> None:
        super().__init__(
            media_type="application/octet-stream", headers={"content-length": str(nbytes)}
        )
        self._buffer = buffer
        self._nbytes = nbytes
        self._limit_s = limit_s

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await asyncio.wait_for(self._stream(send), self._limit_s)
        except (TimeoutError, asyncio.TimeoutError):
            log.warning("a reader took more than %g s for one block; cut off", self._limit_s)
        finally:
            self._buffer.drop()

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
    """What the routes stand on.

    stats: everything `/v1/stats` shows. ready: whether the sidecar serves (readiness).
    transfer_s: bound on one block's way in or out, and on each call for it.
    flush_s: bound on a flush. hash: how token ids become hashes. tracer: where spans go.
    """

    store: Store
    tenants: Tenants
    stats: Callable[[], dict[str, Any]]
    ready: Callable[[], bool]
    max_transfers: int
    transfer_s: float
    flush_s: float
    hash: HashSettings = field(default_factory=HashSettings)
    tracer: Tracer | None = None
    requests: RequestCounts = field(default_factory=RequestCounts)

    def __post_init__(self) -> None:
        self.transfers = Transfers(self.max_transfers, self.store.frames.payload_bytes)
        # Whoever is in these has a buffer. Reads of tiers leave one to the blocks in L2, where
        # there is more than one.
        self.memory = Lane("transfers", self.max_transfers)
        self.below = Lane("reads of tiers", max(1, self.max_transfers - 1))
        self.contains = Lane("contains requests", CONTAINS_AT_ONCE)
        self.care = Lane("flushes and clears", CARE_AT_ONCE)
        # May take long, and hang with a tier; what an administrator does then must not wait.
        self.warming = Lane("warmings", 1)
        self.looking = Lane("looks at the dashboard", LOOKS_AT_ONCE)
        self.listing = Lane("listings", 1)

    async def read(self, key: Key, buffer: Buffer) -> int:
        """Have a block's frame in the buffer; payload bytes, 0 for a miss."""
        return await self.transfer(
            self.memory, self.store.frames.resident, key, buffer
        ) or await self.transfer(self.below, self.store.frames.stored, key, buffer)

    async def transfer(
        self,
        lane: Lane,
        function: Callable[[Key, memoryview, memoryview], T],
        key: Key,
        buffer: Buffer,
        end: int | None = None,
    ) -> T:
        """Call the store on a buffer (its first `end` bytes), which the call holds until its own
        end."""
        lane.enter()
        running = lane.start(
            function, key, buffer.view[:HEADER_BYTES], buffer.view[HEADER_BYTES:end]
        )
        buffer.hold()
        running.add_done_callback(buffer.drop)
        return await answer_of(running, self.transfer_s)

    async def look_after(
        self, function: Callable[..., T], *args: Any, lane: Lane | None = None
    ) -> T:
        """Run a flush or a clear."""
        lane = lane or self.care
        lane.enter()
        return await answer_of(lane.start(function, *args), self.flush_s + self.transfer_s)

    def close(self) -> None:
        """Wait a little for calls under way. The event loop has ended."""
        deadline_s = time.monotonic() + CLOSE_WAIT_S
        lanes = [self.memory, self.below, self.contains, self.care]
        lanes += [self.warming, self.listing, self.looking]
        left = sum(lane.join(deadline_s) for lane in lanes)
        if left:
            log.error("%d calls hang inside the store; left as they are", left)

    def snapshot(self) -> dict[str, Any]:
        """For statistics."""
        return {
            "transfers": self.transfers.taken,
            "transfers_refused": self.transfers.refused + self.below.refused,
            "contains_refused": self.contains.refused,
            "requests": self.requests.snapshot(),
        }

    def tenant(self, request: Request) -> str:
        """The tenant that the request's bearer token names."""
        return self.tenants.of(bearer(request))

    async def receive(self, request: Request, buffer: memoryview) -> int:
        """Stream a request's body into `buffer`; its length. 413 as soon as it is too much."""
        announced = request.headers.get("content-length", "0")
        if announced.isdigit() and int(announced) > len(buffer):
            raise HTTPException(413, f"a frame here has at most {len(buffer)} bytes")
        end = 0
        async for part in request.stream():
            start, end = end, end + len(part)
            if end > len(buffer):
                raise HTTPException(413, f"a frame here has at most {len(buffer)} bytes")
            buffer[start:end] = part
        return end


def bearer(request: Request) -> str | None:
    """The token of `Authorization: Bearer ...`, or None."""
    scheme, _, token = request.headers.get("authorization", "").partition(" ")
    return token.strip() if scheme.lower() == "bearer" else None


async def in_time(receiving: Coroutine[Any, Any, T], limit_s: float) -> T:
    """What a request brings; 408 when it is not all here in time."""
    try:
        return await asyncio.wait_for(receiving, limit_s)
    except (TimeoutError, asyncio.TimeoutError):
        raise HTTPException(408, f"the request was not here within {limit_s:g} s") from None


def build_app(service: Service) -> FastAPI:
    """The application over one store, without the administrator's routes (`care.add_care`)."""
    app = FastAPI(title="kvstore sidecar", docs_url=None, redoc_url=None)
    app.add_middleware(SameOrigin)
    app.add_middleware(Requests, counts=service.requests, tracer=service.tracer)
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
        return seen_by(service.tenants.sees(bearer(request)), service.stats())


def _add_blocks(app: FastAPI, service: Service) -> None:
    @app.post("/v1/contains")
    async def contains(request: Request) -> dict[str, list[Any]]:
        tenant = service.tenant(request)
        lane = service.contains
        lane.enter()
        try:
            body = await in_time(small_body(request), service.transfer_s)
            namespace, hashes = _contains_body(body)
        except BaseException:
            lane.leave()
            raise
        keys = [Key(tenant, namespace, hash_) for hash_ in hashes]
        found = await answer_of(lane.start(service.store.frames.contains, keys), service.transfer_s)
        return {"contains": [bool(tier) for tier in found], "tiers": found}

    @app.get("/v1/blocks/{namespace}/{hash_hex}")
    async def get_block(namespace: str, hash_hex: str, request: Request) -> Response:
        key = _key(service.tenant(request), namespace, hash_hex)
        buffer = service.transfers.take()
        try:
            nbytes = await service.read(key, buffer)
            if not nbytes:
                raise HTTPException(404, "no such block")
        except BaseException:
            buffer.drop()
            raise
        return FrameResponse(buffer, HEADER_BYTES + nbytes, service.transfer_s)

    @app.put("/v1/blocks/{namespace}/{hash_hex}", status_code=204)
    async def put_block(namespace: str, hash_hex: str, request: Request) -> Response:
        key = _key(service.tenant(request), namespace, hash_hex)
        buffer = service.transfers.take()
        try:
            nbytes = await in_time(service.receive(request, buffer.view), service.transfer_s)
            if nbytes <= HEADER_BYTES:
                raise HTTPException(400, f"a frame of {nbytes} bytes has no payload")
            await service.transfer(service.memory, service.store.frames.write, key, buffer, nbytes)
        finally:
            buffer.drop()
        return Response(status_code=204)


def _add_errors(app: FastAPI) -> None:
    """Every way a request can fail is one line of JSON."""

    async def by_status(request: Request, error: Exception) -> JSONResponse:
        assert isinstance(error, StarletteHTTPException)
        return _error(error.status_code, str(error.detail), dict(error.headers or {}))

    async def by_validation(request: Request, error: Exception) -> JSONResponse:
        assert isinstance(error, RequestValidationError)
        first = error.errors()[0]
        return _error(422, f"{'.'.join(str(part) for part in first['loc'])}: {first['msg']}")

    async def by_fault(request: Request, error: Exception) -> JSONResponse:
        status = next(code for kind, code in _STATUS.items() if isinstance(error, kind))
        return _error(status, str(error))

    async def by_mistake(request: Request, error: Exception) -> JSONResponse:
        return _error(500, f"{type(error).__name__} inside the sidecar; its log says more")

    app.add_exception_handler(StarletteHTTPException, by_status)
    app.add_exception_handler(RequestValidationError, by_validation)
    for kind in _STATUS:
        app.add_exception_handler(kind, by_fault)
    app.add_exception_handler(Exception, by_mistake)


def _error(status: int, text: str, headers: dict[str, str] | None = None) -> JSONResponse:
    return JSONResponse({"error": " ".join(text.split())}, status, headers)


def _key(tenant: str, namespace: str, hash_hex: str) -> Key:
    """The key a path names, or 422."""
    return Key(tenant, namespace_in(namespace), _hash_in(hash_hex))


def namespace_in(value: Any) -> str:
    """A namespace's digest out of a request, or 422."""
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


async def small_body(request: Request) -> Any:
    """A JSON body, read up to a bound."""
    body = bytearray()
    async for part in request.stream():
        body += part
        if len(body) > MAX_BODY_BYTES:
            raise HTTPException(413, f"a request here has at most {MAX_BODY_BYTES} bytes")
    try:
        return json.loads(body)
    except (ValueError, RecursionError):
        raise HTTPException(400, "the body is not JSON") from None


def _contains_body(body: Any) -> tuple[str, list[bytes]]:
    """(namespace, hashes) of a contains request, or 422."""
    if not isinstance(body, dict) or set(body) != {"namespace", "hashes"}:
        raise HTTPException(
            422, f'the body is {{"namespace": hex, "hashes": [hex, ...]}}, at most {MAX_HASHES}'
        )
    return namespace_in(body["namespace"]), hashes_in(body["hashes"])
