"""How many bytes of KV a context takes, where some layers look back only so far.

Which layers do is told by `layer_types` where a config has it, and else by the rules of the
families' configuration classes in transformers: Mistral and Mixtral with a `sliding_window` use it
in every layer; Qwen in the layers from `max_window_layers` on, if `use_sliding_window`; Gemma 2 in
every second layer, beginning with the first; Gemma 3 in all but every sixth
(`sliding_window_pattern`).
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
    """full_layers look at the whole context, window_layers at its last window_tokens.

    layer_bytes: of one token's K and V in one layer of one rank.
    """

    full_layers: int
    window_layers: int
    window_tokens: int
    layer_bytes: int

    def bytes_at(self, tokens: int) -> int:
        """Bytes of KV that a context of so many tokens takes on one rank."""
        windowed = min(tokens, self.window_tokens)
        return self.layer_bytes * (self.full_layers * tokens + self.window_layers * windowed)

    @property
    def bytes_per_token(self) -> int:
        """What each further token of a long context takes: that of the layers that look at all of
        it. Where none does: what one within the window takes."""
        return self.layer_bytes * (self.full_layers or self.window_layers)

    @property
    def window_bytes(self) -> int:
        """What a context longer than the window takes besides, whatever its length."""
        return self.bytes_at(self.window_tokens) - self.layer_bytes * self.full_layers * (
            self.window_tokens
        )


def spans_of(config: Mapping[str, Any], namespace: Namespace) -> Spans:
    """The spans of a model's layers. `namespace`: of the same config.

    Raises ConfigError: a field about them is none.
    """
    text = text_config(config)
    layers = namespace.layers
    windowed = _windowed(text, layers)
    window = 0
    if windowed:
        window = text.get("sliding_window") or GEMMA_WINDOW
        if type(window) is not int or window < 1:
            raise ConfigError(f"sliding_window is {window!r} in the config; tokens are right")
    return Spans(layers - windowed, windowed, window, namespace.bytes_per_token // layers)


def attention_kind(config: Mapping[str, Any], namespace: Namespace) -> str:
    """mha (each query head its own K and V), gqa (several share them), mqa (all do), or mla."""
    if namespace.attention == "mla":
        return "mla"
    text = text_config(config)
    heads = text.get("num_attention_heads") or text.get("n_head")
    kv_heads = text.get("num_key_value_heads") or heads
    if heads == kv_heads or heads is None:
        # A family's class may have the numbers that its config leaves out (Gemma 3: 8 and 4).
        return "gqa" if heads is None and namespace.kv_heads > 1 else "mha"
    return "mqa" if kv_heads == 1 else "gqa"


def text_config(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """The language model's part of a config."""
    nested = config.get("text_config")
    return nested if isinstance(nested, Mapping) else config


def _windowed(text: Mapping[str, Any], layers: int) -> int:
    """Layers that look back only so far."""
    types = text.get("layer_types")
    if isinstance(types, list):
        if len(types) != layers:
            raise ConfigError(f"layer_types names {len(types)} layers, the config has {layers}")
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
        raise ConfigError(f"{name} is {value!r} in the config; it must be a positive integer")
    return value
