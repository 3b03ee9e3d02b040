"""JSON requests to a sidecar's HTTP server."""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from typing import Any, Final

from kvstore.errors import ConfigError, TierUnavailable

TIMEOUT_S: Final = 10.0
"""Timeout of a request that the sidecar answers at once."""


def request_json(
    url: str,
    path: str,
    body: Any = None,
    *,
    auth_token: str | None = None,
    timeout_s: float = TIMEOUT_S,
) -> dict[str, Any]:
    """Send a GET, or a POST of `body`, and return the JSON response.

    Raises:
        ConfigError: `url` is invalid, or the sidecar rejects the request as invalid.
        TierUnavailable: no sidecar responds there, or it cannot serve the request now.
    """
    if not url.startswith(("http://", "https://")):
        raise ConfigError(f"invalid sidecar URL {url!r}: use one like http://127.0.0.1:8100")
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url.rstrip("/") + path, data=data)
    if data is not None:
        request.add_header("Content-Type", "application/json")
    if auth_token:
        request.add_header("Authorization", f"Bearer {auth_token}")
    try:
        with urllib.request.urlopen(request, timeout=timeout_s) as response:
            answer: dict[str, Any] = json.load(response)
            return answer
    except urllib.error.HTTPError as error:
        reason = _reason(error)
        if error.code in (400, 404, 409, 422):
            raise ConfigError(reason) from None
        raise TierUnavailable(f"{url} returned {error.code}: {reason}") from None
    except (OSError, ValueError) as error:
        raise TierUnavailable(f"no sidecar at {url}: {getattr(error, 'reason', error)}") from None


def sidecar_url(url: str | None) -> str:
    """Return the sidecar's HTTP URL: the given one, or the configured one."""
    if url:
        return url
    from kvstore.config.settings import Settings

    server = Settings.load().server
    return f"http://{server.host}:{server.port}"


def _reason(error: urllib.error.HTTPError) -> str:
    """Return the one-line reason in the sidecar's error response."""
    try:
        return str(json.load(error)["error"])
    except (OSError, ValueError, KeyError, TypeError):
        return str(error.reason)
