"""Every HTTP request: its id, its line in the log, its count, its span where traces are made.

The id is the caller's (`X-Request-Id`) or a new one; it goes back with the answer and stands in
every line that is logged while the request is served. Also what the reference engine's server is
wrapped in.
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

QUIET: Final = frozenset({"/healthz", "/readyz", "/metrics", "/health", "/v1/dashboard"})
"""Asked every few seconds by machines: logged as details."""
METHODS: Final = frozenset({"GET", "POST", "PUT", "DELETE", "HEAD", "OPTIONS", "PATCH"})
MAX_PATHS: Final = 128
"""Pairs of method and route that are counted apart; an application has fewer."""
CLIENT_GONE: Final = 499
"""Status in the log of a request whose client hung up before an answer began."""
HEADER: Final = b"x-request-id"

_ID = re.compile(rb"[A-Za-z0-9._:-]{1,64}")

log = logging.getLogger(__name__)


class RequestCounts:
    """Requests by method, route and status. On the event loop."""

    def __init__(self) -> None:
        self._rows: dict[tuple[str, str], tuple[Counter[str], Histogram]] = {}

    def count(self, method: str, path: str, status: int, seconds: float) -> None:
        """One request was answered. path: the route's template, not what was asked for."""
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


class Requests:
    """ASGI middleware. A handler may add to its request's line: `scope["state"]["log"]`, a dict.

    counts: where to count; tracer: where to send spans.
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
        # Each request has a task, and so a context, of its own.
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
                pass  # in the middle of its request: nobody is left to answer
            except BaseException:
                status = 500
                raise
            finally:
                path = getattr(scope.get("route"), "path", "(none)")
                seconds = time.perf_counter() - began_s
                self._counts.count(scope["method"], path, status, seconds)
                about = {"method": scope["method"], "path": scope["path"], "status": status}
                if span is not None:
                    span.ends(path, {**about, "request_id": request_id, **fields})
                level = _level(path, status)
                line = {**about, "ms": round(seconds * 1e3, 3), **fields}
                log.log(level, "request", extra={"fields": line})


def _level(path: str, status: int) -> int:
    if status >= 500:
        return logging.WARNING
    return logging.DEBUG if path in QUIET and status < 400 else logging.INFO
