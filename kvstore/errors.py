"""The faults kvstore names. A miss is never one of them.

Foreign exceptions (OSError, redis, botocore, ...) are mapped to these at the edge of the tier
that met them, so that everything above knows a handful of words.
"""

from __future__ import annotations


class KVStoreError(Exception):
    """Base of every fault raised on purpose; its text is one line a user can act on."""


class ConfigError(KVStoreError):
    """A user's mistake: names the value that was given and what would be right."""


class TierError(KVStoreError):
    """A tier could not do what was asked."""


class TierUnavailable(TierError):
    """The tier does not answer now (refused, hung, reset); it may again later."""


class TierFull(TierError):
    """The tier has no room and could make none."""


class FrameTooLarge(TierError):
    """A tier holds a frame that no block of its key can be: larger than the reader's buffer."""


class FrameInvalid(KVStoreError):
    """Bytes at rest or on the wire that are not a frame of ours."""


class ChecksumMismatch(FrameInvalid):
    """A frame whose bytes are not the bytes that were written."""


class NamespaceMismatch(FrameInvalid):
    """A frame, or a request, that speaks of another namespace, tenant or hash than expected."""


class StoreClosed(KVStoreError):
    """The store, session or connection behind this handle is gone."""
