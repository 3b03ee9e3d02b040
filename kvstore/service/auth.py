"""Who a caller is: the tenant its token names. A request never says its tenant itself."""

from __future__ import annotations

import hmac
from collections.abc import Mapping
from typing import Any, Final

from kvstore.errors import KVStoreError

DEFAULT_TENANT: Final = "default"


class Unauthorised(KVStoreError):
    """No token, or none that is known here."""


class Tenants:
    """The configured tokens.

    tokens: token to tenant; empty means that nobody is asked for one.
    admin_token: what flush and clear ask for once tokens are set; "" then refuses them.
    """

    def __init__(self, tokens: Mapping[str, str], admin_token: str = "") -> None:
        self.replace(tokens, admin_token)

    def replace(self, tokens: Mapping[str, str], admin_token: str) -> None:
        """From here on, these. Engines that are connected stay who they are."""
        self._tokens = {token.encode(): tenant for token, tenant in tokens.items()}
        self._admin = admin_token.encode()

    def of(self, token: Any) -> str:
        """The tenant of a token (None: no token was sent). Raises Unauthorised."""
        if not self._tokens:
            return DEFAULT_TENANT
        if not isinstance(token, str) or not token:
            raise Unauthorised("this sidecar asks for a token, and none was sent")
        sent = token.encode("utf-8", "replace")
        found = ""
        for known, tenant in self._tokens.items():
            # Every token is compared, in constant time: how long this takes tells nothing.
            if hmac.compare_digest(known, sent):
                found = tenant
        if not found:
            raise Unauthorised("the token is not known to this sidecar")
        return found

    def sees(self, token: str | None) -> str | None:
        """Whose use a caller may see: a tenant's, or None: everybody's. Raises Unauthorised."""
        if not self._tokens or (self._admin and self._is_admin(token)):
            return None
        return self.of(token)

    def check_admin(self, token: str | None) -> None:
        """Pass the administrator. Raises Unauthorised."""
        if not self._tokens and not self._admin:
            return
        if not self._admin or not self._is_admin(token):
            raise Unauthorised("this needs the admin token")

    def _is_admin(self, token: str | None) -> bool:
        sent = (token or "").encode("utf-8", "replace")
        return hmac.compare_digest(self._admin, sent)
