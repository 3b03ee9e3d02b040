"""CSRF guard: rejects requests that a page of another site makes a visitor's browser send.

Without auth tokens, every client that reaches the port is an administrator. A browser on this
machine can send a POST for any page that it shows. The page cannot read the response, but the POST
would take effect. Browsers send the origin of a request. Other clients do not, and are accepted. A
request with credentials is accepted too: a page of another site cannot make a browser add them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final
from urllib.parse import urlsplit

from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Receive, Scope, Send

SAFE_METHODS: Final = frozenset({"GET", "HEAD", "OPTIONS"})
OWN_SITE: Final = frozenset({b"same-origin", b"none"})
"""Values of `Sec-Fetch-Site` for the dashboard itself, and for an address typed by a person."""


class CrossSiteGuard:
    """ASGI middleware: answers 403 to a cross-site request that may change something."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["method"] not in SAFE_METHODS:
            headers = dict(scope["headers"])
            if b"authorization" not in headers and is_cross_site(headers):
                rejection = JSONResponse({"error": "cross-site requests are not allowed"}, 403)
                await rejection(scope, receive, send)
                return
        await self._app(scope, receive, send)


def is_cross_site(headers: Mapping[bytes, bytes]) -> bool:
    """Whether the headers show that a page of another site sent the request."""
    site = headers.get(b"sec-fetch-site")
    if site is not None:
        return site not in OWN_SITE
    origin = headers.get(b"origin")
    if origin is None:
        return False
    return urlsplit(origin.decode("latin-1")).netloc != headers.get(b"host", b"").decode("latin-1")
