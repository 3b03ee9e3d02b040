"""Request middleware: gives each HTTP request an id, a log line, a count and a trace span.

The id is the caller's `X-Request-Id`, or a new one. It is returned with the response, and is in
every log line of the request. The reference engine's server uses this middleware too.
"""

from __future__ import annotations

import logging
import re
import time
import uuid
from collections import Counter
from contextlib import ExitStack
from typing import Any, Final

from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from kvstore.telemetry.histogram import Histogram
from kvstore.telemetry.logs import REQUEST_ID, TRACE_ID
from kvstore.telemetry.tracing import Tracer

QUIET_PATHS: Final = frozenset({"/healthz", "/readyz", "/metrics", "/health", "/v1/dashboard"})
"""Polled every few seconds: logged at debug level."""
METHODS: Final = frozenset({"GET", "POST", "PUT", "DELETE", "HEAD", "OPTIONS", "PATCH"})
MAX_PATHS: Final = 128
"""Pairs of method and route with their own counters; an application has fewer."""
CLIENT_GONE: Final = 499
"""Logged status of a request whose client closed the connection before the response began."""
HEADER: Final = b"x-request-id"

_ID = re.compile(rb"[A-Za-z0-9._:-]{1,64}")

log = logging.getLogger(__name__)


class RequestCounts:
    """Counts requests by method, route and status. On the event loop."""

    def __init__(self) -> None:
        self._rows: dict[tuple[str, str], tuple[Counter[str], Histogram]] = {}

    def count(self, method: str, path: str, status: int, seconds: float) -> None:
        """Count one answered request. path: the route's template, not the URL's path."""
        name = (method if method in METHODS else "OTHER", path)
        if name not in self._rows and len(self._rows) >= MAX_PATHS:
            name = ("OTHER", "(other)")
        statuses, histogram = self._rows.setdefault(name, (Counter(), Histogram()))
        statuses[str(status)] += 1
        histogram.observe(seconds)

    def snapshot(self) -> list[dict[str, Any]]:
        """method, path, statuses (counts), seconds (a histogram)."""
        return [
            {
                "method": method,
                "path": path,
                "statuses": dict(statuses),
                "seconds": histogram.snapshot(),
            }
            for (method, path), (statuses, histogram) in list(self._rows.items())
        ]


class RequestMiddleware:
    """ASGI middleware. A handler can add fields to its request's log line: `scope["state"]["log"]`.

    counts: counts the requests. tracer: records their spans.
    """

    def __init__(
        self, app: ASGIApp, *, counts: RequestCounts | None = None, tracer: Tracer | None = None
    ) -> None:
        self._app = app
        self._counts = counts or RequestCounts()
        self._tracer = tracer

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = dict(scope["headers"])
        given = headers.get(HEADER, b"")
        request_id = given.decode() if _ID.fullmatch(given) else uuid.uuid4().hex
        # Each request has its own task, and so its own context.
        REQUEST_ID.set(request_id)
        fields: dict[str, Any] = {}
        scope.setdefault("state", {})["log"] = fields
        began_s, status = time.perf_counter(), CLIENT_GONE

        async def send_marked(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                message["headers"] = [*message["headers"], (HEADER, request_id.encode())]
            await send(message)

        with ExitStack() as spans:
            span = None
            if self._tracer is not None:
                span = spans.enter_context(self._tracer.request(scope["method"], headers))
                TRACE_ID.set(span.trace_id)
            try:
                await self._app(scope, receive, send_marked)
            except ClientDisconnect:
                pass  # in the middle of its request: there is no client left to answer
            except BaseException:
                status = 500
                raise
            finally:
                path = getattr(scope.get("route"), "path", "(none)")
                seconds = time.perf_counter() - began_s
                self._counts.count(scope["method"], path, status, seconds)
                about = {"method": scope["method"], "path": scope["path"], "status": status}
                if span is not None:
                    span.end(path, {**about, "request_id": request_id, **fields})
                level = _level(path, status)
                line = {**about, "ms": round(seconds * 1e3, 3), **fields}
                log.log(level, "request", extra={"fields": line})


def _level(path: str, status: int) -> int:
    if status >= 500:
        return logging.WARNING
    return logging.DEBUG if path in QUIET_PATHS and status < 400 else logging.INFO
