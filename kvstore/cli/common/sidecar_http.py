"""JSON over a sidecar's HTTP side."""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from typing import Any, Final

from kvstore.errors import ConfigError, TierUnavailable

LIMIT_S: Final = 10.0
"""Longest silence of a sidecar that is asked something quick."""


def ask(
    url: str,
    path: str,
    body: Any = None,
    *,
    token: str | None = None,
    limit_s: float = LIMIT_S,
) -> dict[str, Any]:
    """The answer to a GET, or to a POST of `body`.

    Raises:
        ConfigError: `url` is none, or the sidecar refuses the request as wrong.
        TierUnavailable: no sidecar answers there, or it cannot now.
    """
    if not url.startswith(("http://", "https://")):
        raise ConfigError(f"{url!r} is no URL of a sidecar; http://127.0.0.1:8100 is right")
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url.rstrip("/") + path, data=data)
    if data is not None:
        request.add_header("Content-Type", "application/json")
    if token:
        request.add_header("Authorization", f"Bearer {token}")
    try:
        with urllib.request.urlopen(request, timeout=limit_s) as response:
            answer: dict[str, Any] = json.load(response)
            return answer
    except urllib.error.HTTPError as error:
        reason = _reason(error)
        if error.code in (400, 404, 409, 422):
            raise ConfigError(reason) from None
        raise TierUnavailable(f"{url} answers {error.code}: {reason}") from None
    except (OSError, ValueError) as error:
        raise TierUnavailable(f"no sidecar at {url}: {getattr(error, 'reason', error)}") from None


def address(url: str | None) -> str:
    """The sidecar's HTTP side: as given, or where the configuration puts it."""
    if url:
        return url
    from kvstore.config.settings import Settings

    server = Settings.load().server
    return f"http://{server.host}:{server.port}"


def _reason(error: urllib.error.HTTPError) -> str:
    """The one line that the sidecar gives for a refusal."""
    try:
        return str(json.load(error)["error"])
    except (OSError, ValueError, KeyError, TypeError):
        return str(error.reason)
