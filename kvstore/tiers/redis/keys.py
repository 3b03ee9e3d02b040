"""Key names on a server: `prefix:tenant:namespace:hash`, encoded and decoded.

Tenant and namespace are percent-encoded, and the hash is hexadecimal, so no part contains a colon.
Two blocks therefore never have the same name, whatever the tenant's name is. The parts contain no
braces either: these would form a hash tag and put all blocks of a tenant on one node of a cluster.
They contain no special character of SCAN patterns.
"""

from __future__ import annotations

import re
from functools import lru_cache
from typing import Final
from urllib.parse import quote, unquote

from kvstore.blocks.key import Key

PREFIX: Final = re.compile(r"[A-Za-z0-9._:-]{1,64}")
"""Valid prefixes."""

MAX_CACHED_STEMS: Final = 1024
"""Maximum number of cached encodings of (tenant, namespace)."""


def encode_name(prefix: str, key: Key) -> bytes:
    """The name of a block, different for different keys and for different prefixes."""
    return _stem(prefix, key.tenant, key.namespace) + key.hash.hex().encode()


def decode_name(prefix: str, name: bytes) -> Key | None:
    """The key of a name that `encode_name` made; None for any other name."""
    parts = name.removeprefix(prefix.encode() + b":").split(b":")
    if len(parts) != 3:
        return None
    try:
        tenant, namespace = (
            unquote(part.decode("ascii"), errors="surrogatepass") for part in parts[:2]
        )
        key = Key(tenant, namespace, bytes.fromhex(parts[2].decode("ascii")))
        return key if encode_name(prefix, key) == name else None
    except ValueError:
        return None


def scan_pattern(prefix: str) -> bytes:
    """The SCAN pattern for all names of a prefix. It may match other names too."""
    return f"{prefix}:*".encode()


@lru_cache(maxsize=MAX_CACHED_STEMS)
def _stem(prefix: str, tenant: str, namespace: str) -> bytes:
    parts = (quote(part, safe="", errors="surrogatepass") for part in (tenant, namespace))
    return ":".join((prefix, *parts, "")).encode()
