"""The exceptions of kvstore. A cache miss is never an exception.

A tier maps foreign exceptions (OSError, redis, botocore, ...) to these, so the code above the tiers
handles only the classes in this module.
"""

from __future__ import annotations


class KVStoreError(Exception):
    """Base class of all errors of kvstore; the text is one line that tells the user what to do."""


class ConfigError(KVStoreError):
    """An invalid setting or argument: the text names the value and a valid one."""


class TierError(KVStoreError):
    """A tier could not carry out a call."""


class TierUnavailable(TierError):
    """The tier does not answer now (connection refused, timeout, reset); it may answer later."""


class TierFull(TierError):
    """The tier has no room and cannot make any."""


class FrameTooLarge(TierError):
    """A tier has a frame larger than the reader's buffer; no block of its key has that size."""


class FrameInvalid(KVStoreError):
    """Bytes at rest or on the wire that this release cannot use as the frame of a block.

    The frame is corrupt and may be deleted, unless it is FrameUnsupported.
    """


class FrameUnsupported(FrameInvalid):
    """A frame that another release may understand: an unknown version, field or codec.

    It is a miss and is never deleted. The text is the same for all frames of the kind.
    """


class ChecksumMismatch(FrameInvalid):
    """A corrupt frame: its bytes do not match their checksum."""


class NamespaceMismatch(FrameInvalid):
    """A frame or a request has another namespace, tenant or hash than expected."""


class StoreClosed(KVStoreError):
    """The store, session or connection is closed."""
