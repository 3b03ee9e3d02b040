"""Codecs: how blocks are encoded in a tier. Each kind is one module.

A module's name is the kind in the configuration: "byteshuffle_zstd.py" is "byteshuffle-zstd". The
module defines

    KIND       the kind
    FRAME_ID   its name in frame headers, without the parameter; it never changes
    Config     the parameters of decoding: `for_dtype`, and `for_parameter` of a frame ID
    open       creates the codec from a `Config`

A frame header contains the frame ID with its parameter: "zstd-planes/2". `base` is the contract of
a codec, and `chooser` selects a codec for each block.
"""

from __future__ import annotations

import contextlib
import difflib
import functools
import importlib
import pkgutil
from typing import Protocol, cast

from kvstore.blocks.frame import decode_header
from kvstore.blocks.key import DTYPE_BYTES
from kvstore.codecs.base import Codec
from kvstore.config.renamed import refuse_value
from kvstore.errors import ConfigError, FrameInvalid, FrameUnsupported

AUTO = "auto"
"""The kind that starts with `DEFAULT_KIND` and then follows `chooser`."""
DEFAULT_KIND = "byteshuffle-zstd"
"""The kind that compresses most dtypes best."""
NOT_CODECS = ("base", "chooser")
"""Modules in this package that are not codecs."""

MAX_OPEN_CODECS = 64
"""Maximum number of cached codecs."""


class _Config(Protocol):
    @classmethod
    def for_dtype(cls, dtype: str) -> _Config: ...

    @classmethod
    def for_parameter(cls, parameter: str) -> _Config: ...


class _Module(Protocol):
    KIND: str
    FRAME_ID: str
    Config: type[_Config]

    def open(self, config: _Config) -> Codec: ...


def kinds() -> list[str]:
    """All kinds, sorted."""
    names = (module.name for module in pkgutil.iter_modules(__path__))
    return sorted(name.replace("_", "-") for name in names if name not in NOT_CODECS)


@functools.lru_cache(maxsize=MAX_OPEN_CODECS)
def codec_by_frame_id(frame_id: str) -> Codec:
    """The codec of a frame ID, such as "identity" or "zstd-planes/2".

    Raises FrameUnsupported: the frame ID, which comes from a frame header, is unknown.
    """
    name, _, parameter = frame_id.partition("/")
    for module in map(_module, kinds()):
        if name == module.FRAME_ID:
            with contextlib.suppress(ValueError):
                codec = module.open(module.Config.for_parameter(parameter))
                if codec.frame_id == frame_id:
                    return codec
    raise FrameUnsupported(f"frame with an unknown codec {frame_id!r}")


def check_supported(header: memoryview) -> None:
    """Raise FrameUnsupported if this release does not understand a frame with this header.

    A corrupt header passes: it is not a matter of releases.
    """
    try:
        codec_by_frame_id(decode_header(header).codec)
    except FrameUnsupported:
        raise
    except FrameInvalid:
        return


def codec_for(kind: str, dtype: str) -> Codec:
    """The codec of a kind for blocks of `dtype`. kind: "auto" means `DEFAULT_KIND` here.

    Raises ConfigError: the kind or the dtype is unknown.
    """
    if dtype not in DTYPE_BYTES:
        raise ConfigError(f"unknown KV dtype {dtype!r}; use one of {', '.join(DTYPE_BYTES)}")
    known = [AUTO, *kinds()]
    if kind not in known:
        refuse_value("codec", kind)
        near = difflib.get_close_matches(kind, known, n=1, cutoff=0.0)
        raise ConfigError(f"unknown codec {kind!r}; the closest one is {near[0]!r}")
    module = _module(DEFAULT_KIND if kind == AUTO else kind)
    return module.open(module.Config.for_dtype(dtype))


def _module(kind: str) -> _Module:
    name = kind.replace("-", "_")
    return cast(_Module, importlib.import_module(f"{__name__}.{name}"))
