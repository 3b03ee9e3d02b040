"""Refuses what a page of another site has a visitor's browser send.

Without tokens whoever reaches the port is its administrator, and a browser on this machine reaches
it for any page it shows: such a page cannot read an answer, but a POST would be done all the same.
Browsers say where a request comes from; other clients do not, and are let through, as is whoever
brings a credential, which no page of another site can make a browser add.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final
from urllib.parse import urlsplit

from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Receive, Scope, Send

READS: Final = frozenset({"GET", "HEAD", "OPTIONS"})
OWN: Final = frozenset({b"same-origin", b"none"})
"""What `Sec-Fetch-Site` says of our own page, and of what a person typed in."""


class SameOrigin:
    """ASGI middleware."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["method"] not in READS:
            headers = dict(scope["headers"])
            if b"authorization" not in headers and from_elsewhere(headers):
                refusal = JSONResponse({"error": "a page of another site may not do this"}, 403)
                await refusal(scope, receive, send)
                return
        await self._app(scope, receive, send)


def from_elsewhere(headers: Mapping[bytes, bytes]) -> bool:
    """Whether a browser says that another site's page has sent this."""
    site = headers.get(b"sec-fetch-site")
    if site is not None:
        return site not in OWN
    origin = headers.get(b"origin")
    if origin is None:
        return False
    return urlsplit(origin.decode("latin-1")).netloc != headers.get(b"host", b"").decode("latin-1")
