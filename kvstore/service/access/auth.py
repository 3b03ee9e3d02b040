"""Authentication: the tenant of an auth token. A request never names its own tenant."""

from __future__ import annotations

import hmac
from collections.abc import Mapping
from typing import Any, Final

from kvstore.errors import KVStoreError

DEFAULT_TENANT: Final = "default"


class Unauthorised(KVStoreError):
    """The auth token is missing or unknown."""


class Tenants:
    """The configured auth tokens.

    auth_tokens: token to tenant; empty: no token is required.
    admin_auth_token: required for administration, such as flush and clear. If it is "" while
        `auth_tokens` are set, administration is rejected.
    """

    def __init__(self, auth_tokens: Mapping[str, str], admin_auth_token: str = "") -> None:
        self.replace(auth_tokens, admin_auth_token)

    def replace(self, auth_tokens: Mapping[str, str], admin_auth_token: str) -> None:
        """Replace the tokens. Connected engines keep their tenant."""
        self._tokens = {token.encode(): tenant for token, tenant in auth_tokens.items()}
        self._admin = admin_auth_token.encode()

    def tenant_of(self, token: Any) -> str:
        """The tenant of an auth token (None: no token was sent). Raises Unauthorised."""
        if not self._tokens:
            return DEFAULT_TENANT
        if not isinstance(token, str) or not token:
            raise Unauthorised("this sidecar requires an auth token, and none was sent")
        sent = token.encode("utf-8", "replace")
        found = ""
        for known, tenant in self._tokens.items():
            # Every token is compared, in constant time, so the time taken reveals nothing.
            if hmac.compare_digest(known, sent):
                found = tenant
        if not found:
            raise Unauthorised("this sidecar does not know the auth token")
        return found

    def visible_tenant(self, token: str | None) -> str | None:
        """The tenant whose statistics a caller may see; None: all tenants. Raises Unauthorised."""
        if not self._tokens or (self._admin and self._is_admin(token)):
            return None
        return self.tenant_of(token)

    def check_admin(self, token: str | None) -> None:
        """Raise Unauthorised unless the caller is the administrator."""
        if not self._tokens and not self._admin:
            return
        if not self._admin or not self._is_admin(token):
            raise Unauthorised("this requires the admin auth token")

    def _is_admin(self, token: str | None) -> bool:
        sent = (token or "").encode("utf-8", "replace")
        return hmac.compare_digest(self._admin, sent)
