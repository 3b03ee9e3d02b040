"""Codecs: how a block is stored. One file per kind; its module offers `Config` and `open(config)`.
`base` is their contract, `chooser` picks one for each block.

A kind's name is its file's name ("zstd_planes.py" is "zstd-planes"); no table lists them. A
codec's full name adds the parameter that decoding needs: "zstd-planes/2".
"""

from __future__ import annotations

import difflib
import functools
import importlib
import pkgutil
from typing import Protocol, cast

from kvstore.blocks.key import DTYPE_BYTES
from kvstore.codecs.base import Codec
from kvstore.config.renamed import refuse_value
from kvstore.errors import ConfigError, FrameInvalid

AUTO = "auto"
"""The kind that means: what usually pays for this dtype, then what `chooser` finds."""
DEFAULT_KIND = "zstd-planes"
NOT_CODECS = ("base", "chooser")
"""Modules here that are no codecs."""

MAX_OPEN_CODECS = 64
"""Codecs kept for the next frame of the same name."""


class _Config(Protocol):
    @classmethod
    def for_dtype(cls, dtype: str) -> _Config: ...

    @classmethod
    def for_parameter(cls, parameter: str) -> _Config: ...


class _Module(Protocol):
    Config: type[_Config]

    def open(self, config: _Config) -> Codec: ...


def kinds() -> list[str]:
    """Names of all kinds of codec, in order."""
    names = (module.name for module in pkgutil.iter_modules(__path__))
    return sorted(name.replace("_", "-") for name in names if name not in NOT_CODECS)


@functools.lru_cache(maxsize=MAX_OPEN_CODECS)
def codec_by_frame_id(frame_id: str) -> Codec:
    """The codec that a frame's header names, such as "identity" or "zstd-planes/2".

    Raises FrameInvalid for a name that no codec of ours bears: it came with a frame.
    """
    kind, _, parameter = frame_id.partition("/")
    if kind not in kinds():
        raise FrameInvalid(f"a frame of the unknown codec {frame_id!r}")
    module = _module(kind)
    try:
        codec = module.open(module.Config.for_parameter(parameter))
    except ValueError:
        raise FrameInvalid(f"a frame of the unknown codec {frame_id!r}") from None
    if codec.frame_id != frame_id:
        raise FrameInvalid(f"a frame of the unknown codec {frame_id!r}")
    return codec


def codec_for(kind: str, dtype: str) -> Codec:
    """The codec of this kind for blocks of `dtype`; kind "auto" is what usually pays for it.

    Raises ConfigError for an unknown kind or dtype.
    """
    if dtype not in DTYPE_BYTES:
        raise ConfigError(f"unknown KV dtype {dtype!r}; one of {', '.join(DTYPE_BYTES)} is right")
    known = [AUTO, *kinds()]
    if kind not in known:
        refuse_value("codec", kind)
        near = difflib.get_close_matches(kind, known, n=1, cutoff=0.0)
        raise ConfigError(f"unknown codec {kind!r}; the nearest is {near[0]!r}")
    module = _module(DEFAULT_KIND if kind == AUTO else kind)
    return module.open(module.Config.for_dtype(dtype))


def _module(kind: str) -> _Module:
    name = kind.replace("-", "_")
    return cast(_Module, importlib.import_module(f"{__name__}.{name}"))
