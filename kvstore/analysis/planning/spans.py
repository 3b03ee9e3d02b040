"""Bytes of KV that a context takes, in models with sliding-window layers.

`layer_types` in a config names these layers. Without it, the rules are those of the families'
configuration classes in transformers. Mistral and Mixtral: all layers, if `sliding_window` is set.
Qwen: the layers from `max_window_layers` on, if `use_sliding_window` is set. Gemma 2: every second
layer, starting with the first. Gemma 3: all but every sixth (`sliding_window_pattern`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from kvstore.blocks.key import Namespace
from kvstore.errors import ConfigError

GEMMA_WINDOW: Final = 4096
GEMMA3_PATTERN: Final = 6
SLIDING: Final = "sliding_attention"


@dataclass(frozen=True)
class Spans:
    """Layers by how far they attend: full_layers to the whole context, window_layers to its last
    window_tokens.

    layer_bytes: K and V of one token in one layer of one rank.
    """

    full_layers: int
    window_layers: int
    window_tokens: int
    layer_bytes: int

    def bytes_at(self, tokens: int) -> int:
        """Return the bytes of KV of a context of so many tokens, on one rank."""
        windowed = min(tokens, self.window_tokens)
        return self.layer_bytes * (self.full_layers * tokens + self.window_layers * windowed)

    @property
    def bytes_per_token(self) -> int:
        """Return the bytes of each further token of a long context: those of the full layers. If
        all layers have a window, the bytes of a token inside the window."""
        return self.layer_bytes * (self.full_layers or self.window_layers)

    @property
    def window_bytes(self) -> int:
        """Return the fixed bytes of a context longer than the window, for the window layers."""
        return self.bytes_at(self.window_tokens) - self.layer_bytes * self.full_layers * (
            self.window_tokens
        )


def spans_of(config: Mapping[str, Any], namespace: Namespace) -> Spans:
    """Return the spans of a model's layers. namespace: of the same config.

    Raises ConfigError: a field about windows is invalid.
    """
    text = text_config(config)
    layers = namespace.layers
    windowed = _windowed(text, layers)
    window = 0
    if windowed:
        window = text.get("sliding_window") or GEMMA_WINDOW
        if type(window) is not int or window < 1:
            raise ConfigError(f"config: sliding_window must be a number of tokens (got {window!r})")
    return Spans(layers - windowed, windowed, window, namespace.bytes_per_token // layers)


def attention_kind(config: Mapping[str, Any], namespace: Namespace) -> str:
    """Return mha (K and V per query head), gqa (shared by several), mqa (by all) or mla."""
    if namespace.attention == "mla":
        return "mla"
    text = text_config(config)
    heads = text.get("num_attention_heads") or text.get("n_head")
    kv_heads = text.get("num_key_value_heads") or heads
    if heads == kv_heads or heads is None:
        # The family's class may have numbers that the config omits (Gemma 3: 8 and 4).
        return "gqa" if heads is None and namespace.kv_heads > 1 else "mha"
    return "mqa" if kv_heads == 1 else "gqa"


def text_config(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the part of a config that describes the language model."""
    nested = config.get("text_config")
    return nested if isinstance(nested, Mapping) else config


def _windowed(text: Mapping[str, Any], layers: int) -> int:
    """Return the number of layers with a sliding window."""
    types = text.get("layer_types")
    if isinstance(types, list):
        if len(types) != layers:
            raise ConfigError(f"config: layer_types has {len(types)} entries for {layers} layers")
        return sum(kind == SLIDING for kind in types)
    family = str(text.get("model_type"))
    if family in ("mistral", "mixtral"):
        return layers if text.get("sliding_window") else 0
    if family.startswith("qwen") and text.get("use_sliding_window"):
        return max(0, layers - _whole(text, "max_window_layers", layers))
    if family == "gemma2":
        return (layers + 1) // 2
    if family in ("gemma3", "gemma3_text"):
        return layers - layers // _whole(text, "sliding_window_pattern", GEMMA3_PATTERN)
    return 0


def _whole(text: Mapping[str, Any], name: str, default: int) -> int:
    value = text.get(name, default)
    if type(value) is not int or value < 1:
        raise ConfigError(f"config: {name} must be a positive integer (got {value!r})")
    return value
