"""Bytes of a model's weights, computed from its config.json.

Each layer has the projections of attention and of the feed-forward part: three matrices if gated,
two in GPT-2 and GPT-NeoX. A mixture of experts has them per expert, plus a router. The model also
has the embeddings, and an output matrix unless tied. Norms and biases, about a thousandth, are not
counted. Llama-3-8B: 8.03e9 parameters.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from kvstore.analysis.planning.spans import text_config
from kvstore.blocks.key import DTYPE_BYTES, Namespace
from kvstore.errors import ConfigError

PLAIN_FEED_FORWARD: Final = ("gpt2", "gpt_neox")
TIED_BY_DEFAULT: Final = ("gemma", "gemma2", "gemma3", "gemma3_text", "gpt2")


def parameters(config: Mapping[str, Any], namespace: Namespace) -> int:
    """Return the parameters of the language model. namespace: of the same config, any rank.

    Raises ConfigError: the config does not determine them (MLA, unknown fields).
    """
    text = text_config(config)
    family = str(text.get("model_type"))
    if namespace.attention == "mla":
        raise ConfigError("cannot compute the weights of a model with MLA; give --weights")
    hidden = _size(text, "hidden_size", "n_embd")
    layers = namespace.layers
    heads = _size(text, "num_attention_heads", "n_head")
    kv_heads = text.get("num_key_value_heads") or heads
    attention = 2 * hidden * namespace.head_dim * (heads + kv_heads)
    experts = text.get("num_local_experts") or text.get("num_experts") or 0
    if experts:
        inner = text.get("moe_intermediate_size") or _size(text, "intermediate_size")
        shared = text.get("shared_expert_intermediate_size") or 0
        feed = 3 * hidden * (experts * inner + shared) + hidden * experts
    elif family in PLAIN_FEED_FORWARD:
        inner = text.get("n_inner") or text.get("intermediate_size") or 4 * hidden
        feed = 2 * hidden * inner
    else:
        feed = 3 * hidden * _size(text, "intermediate_size")
    tied = text.get("tie_word_embeddings", family in TIED_BY_DEFAULT)
    embeddings = _size(text, "vocab_size") * hidden * (1 if tied else 2)
    return int(layers * (attention + feed) + embeddings)


def weight_bytes(config: Mapping[str, Any], namespace: Namespace) -> int:
    """Return the bytes of the whole model's weights, as its config stores them.

    Raises ConfigError: the config does not determine them.
    """
    text = text_config(config)
    quantised = text.get("quantization_config") or config.get("quantization_config")
    bits: Any = None
    if isinstance(quantised, Mapping):
        bits = quantised.get("bits")
        if bits is None and "fp8" in str(quantised.get("quant_method")):
            bits = 8
        if type(bits) is not int:
            raise ConfigError("the config does not state the bits per weight; give --weights")
    else:
        name = text.get("dtype") or text.get("torch_dtype") or config.get("torch_dtype")
        bits = 8 * DTYPE_BYTES.get(str(name or "float32").removeprefix("torch."), 4)
    return parameters(config, namespace) * int(bits) // 8


def activation_bytes(config: Mapping[str, Any], batch_tokens: int) -> int:
    """Return the bytes of activations of a step of so many tokens, with 2 bytes per value.

    They are both halves of a gated feed-forward part, and four rows of the hidden size (input,
    residual, two in attention).
    """
    text = text_config(config)
    hidden = _size(text, "hidden_size", "n_embd")
    inner = text.get("intermediate_size") or text.get("n_inner") or 4 * hidden
    return batch_tokens * 2 * (2 * int(inner) + 4 * hidden)


def _size(text: Mapping[str, Any], *names: str) -> int:
    for name in names:
        value = text.get(name)
        if type(value) is int and value > 0:
            return value
    raise ConfigError(f"cannot compute the weights: the config has no {names[0]!r}; give --weights")
