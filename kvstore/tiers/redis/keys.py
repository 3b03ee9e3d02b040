"""What a block is called on a server: `prefix:tenant:namespace:hash`, and back.

Tenant and namespace are percent-encoded and the hash is hexadecimal, so that no part can hold a
colon: two keys never share a name, whatever their tenants are called. Nor can a part hold a brace,
which would be a hash tag that puts all blocks of a tenant on one node of a cluster, or a character
that means something in a pattern of SCAN.
"""

from __future__ import annotations

import re
from functools import lru_cache
from typing import Final
from urllib.parse import quote, unquote

from kvstore.blocks.key import Key

PREFIX: Final = re.compile(r"[A-Za-z0-9._:-]{1,64}")
"""Prefixes there can be."""

STEMS_CACHED: Final = 1024
"""Encoded (tenant, namespace) pairs that are remembered."""


def encode_name(prefix: str, key: Key) -> bytes:
    """The name of a block. Two keys have two names; so have equal keys under two prefixes."""
    return _stem(prefix, key.tenant, key.namespace) + key.hash.hex().encode()


def decode_name(prefix: str, name: bytes) -> Key | None:
    """The key that `encode_name` gave this name; None when it gave it to none."""
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


def pattern(prefix: str) -> bytes:
    """What SCAN is given to find all names of a prefix; it may find more than those."""
    return f"{prefix}:*".encode()


@lru_cache(maxsize=STEMS_CACHED)
def _stem(prefix: str, tenant: str, namespace: str) -> bytes:
    parts = (quote(part, safe="", errors="surrogatepass") for part in (tenant, namespace))
    return ":".join((prefix, *parts, "")).encode()
