"""Reads a GGUF file: metadata, tensors, tokenizer.

Format: the GGUF specification, versions 2 and 3, little-endian
(github.com/ggml-org/ggml/blob/master/docs/gguf.md). This module parses the header itself, because
the reader of the `gguf` package makes an array per vocabulary entry (5.5 s for 49k tokens, compared
with 0.1 s). It uses that package's quantisation tables and decoders.
"""

from __future__ import annotations

import mmap
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import numpy.typing as npt
import torch

from kvstore.engine.model_config import FAMILIES, ModelConfig
from kvstore.engine.rope import RopeConfig
from kvstore.engine.tokenizer import Tokenizer, TokenizerFacts, byte_level_bpe
from kvstore.errors import ConfigError

MAGIC = b"GGUF"
VERSIONS = (2, 3)
MAX_ENTRIES = 1 << 16
"""Maximum number of metadata entries, and of tensors, in a file."""
MAX_ARRAY = 1 << 24
MAX_STRING_BYTES = 1 << 24
MAX_DEPTH = 4
MAX_DIMENSIONS = 4

_SCALARS = {
    0: "B",
    1: "b",
    2: "H",
    3: "h",
    4: "I",
    5: "i",
    6: "f",
    7: "?",
    10: "Q",
    11: "q",
    12: "d",
}
_STRING, _ARRAY = 8, 9

_LAYER_NAMES = {
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
_TOP_NAMES = {
    "model.embed_tokens.weight": "token_embd.weight",
    "model.norm.weight": "output_norm.weight",
    "lm_head.weight": "output.weight",
}


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """Location of one tensor: shape with rows first, quantisation, position in the file."""

    shape: tuple[int, ...]
    kind: gguf.GGMLQuantizationType
    offset: int
    nbytes: int


class _Cursor:
    """Reads values one after another. Reading past the end raises ConfigError."""

    def __init__(self, view: memoryview, where: str) -> None:
        self._view = view
        self._where = where
        self.at = 0

    def invalid(self, what: str) -> ConfigError:
        return ConfigError(f"{self._where} is not a valid GGUF file: {what}")

    def take(self, nbytes: int) -> memoryview:
        if nbytes > len(self._view) - self.at:
            raise self.invalid(f"it ends at byte {len(self._view)}, inside a value")
        self.at += nbytes
        return self._view[self.at - nbytes : self.at]

    def scalar(self, letter: str) -> Any:
        return struct.unpack("<" + letter, self.take(struct.calcsize("<" + letter)))[0]

    def count(self, limit: int, what: str) -> int:
        value = int(self.scalar("Q"))
        if value > limit:
            raise self.invalid(f"{value} {what}, the limit is {limit}")
        return value

    def string(self) -> str:
        return bytes(self.take(self.count(MAX_STRING_BYTES, "bytes in a string"))).decode(
            "utf-8", errors="replace"
        )

    def value(self, kind: int, depth: int = 0) -> Any:
        if kind in _SCALARS:
            return self.scalar(_SCALARS[kind])
        if kind == _STRING:
            return self.string()
        if kind != _ARRAY or depth >= MAX_DEPTH:
            raise self.invalid(f"value type {kind} at depth {depth}")
        inner = self.scalar("I")
        count = self.count(MAX_ARRAY, "entries in an array")
        if inner in _SCALARS:
            form = f"<{count}{_SCALARS[inner]}"
            return list(struct.unpack(form, self.take(struct.calcsize(form))))
        return [self.value(inner, depth + 1) for _ in range(count)]


class GGUFFile:
    """An open GGUF file. fields: its metadata. tensors: its tensor directory.

    Raises:
        ConfigError: the file is not GGUF, is truncated, or has an unknown quantisation.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        with path.open("rb") as file:
            if path.stat().st_size < 24:
                raise ConfigError(f"{path} is not a valid GGUF file: it is too short")
            self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        self._view = memoryview(self._map)
        cursor = _Cursor(self._view, str(path))
        if bytes(cursor.take(4)) != MAGIC:
            raise cursor.invalid("its first four bytes are not 'GGUF'")
        version = cursor.scalar("I")
        if version not in VERSIONS:
            raise cursor.invalid(f"version {version}; 2 and 3 are supported")
        tensor_count = cursor.count(MAX_ENTRIES, "tensors")
        field_count = cursor.count(MAX_ENTRIES, "metadata entries")
        self.fields: dict[str, Any] = {}
        for _ in range(field_count):
            name = cursor.string()
            self.fields[name] = cursor.value(cursor.scalar("I"))
        self.tensors = self._directory(cursor, tensor_count)

    def _directory(self, cursor: _Cursor, count: int) -> dict[str, TensorInfo]:
        found: list[tuple[str, tuple[int, ...], int, int]] = []
        for _ in range(count):
            name = cursor.string()
            dimensions = cursor.scalar("I")
            if not 1 <= dimensions <= MAX_DIMENSIONS:
                raise cursor.invalid(f"tensor {name!r} has {dimensions} dimensions")
            sizes = [int(cursor.scalar("Q")) for _ in range(dimensions)]
            found.append((name, tuple(reversed(sizes)), cursor.scalar("I"), cursor.scalar("Q")))
        align = int(self.fields.get("general.alignment", 32))
        if align < 1:
            raise cursor.invalid(f"an alignment of {align}")
        data = -(-cursor.at // align) * align
        tensors: dict[str, TensorInfo] = {}
        for name, shape, kind_id, offset in found:
            try:
                kind = gguf.GGMLQuantizationType(kind_id)
            except ValueError:
                raise ConfigError(
                    f"{self.path}: tensor {name!r} has the unknown quantisation {kind_id}"
                ) from None
            per, each = gguf.GGML_QUANT_SIZES[kind]
            if shape[-1] % per:
                raise cursor.invalid(f"tensor {name!r} of {shape[-1]} columns in groups of {per}")
            nbytes = int(np.prod(shape, dtype=object)) // per * each
            if data + offset + nbytes > len(self._view):
                raise cursor.invalid(f"it ends inside tensor {name!r}")
            tensors[name] = TensorInfo(shape, kind, data + offset, nbytes)
        return tensors

    def read(self, name: str) -> tuple[npt.NDArray[np.uint8], torch.Tensor]:
        """Return a tensor's bytes as in the file, and its values as float32.

        Raises:
            ConfigError: its quantisation cannot be decoded.
        """
        # A copy: the digest must be of the bytes that are used, even if the mapped file changes.
        raw = self._raw(name).copy()
        return raw, self._decode(name, raw)

    def tensor(self, name: str) -> torch.Tensor:
        """Return a tensor dequantised to float32.

        Raises:
            ConfigError: its quantisation cannot be decoded.
        """
        return self._decode(name, self._raw(name))

    def _raw(self, name: str) -> npt.NDArray[np.uint8]:
        info = self.tensors[name]
        return np.frombuffer(self._view, np.uint8, info.nbytes, info.offset)

    def _decode(self, name: str, raw: npt.NDArray[np.uint8]) -> torch.Tensor:
        info = self.tensors[name]
        per, each = gguf.GGML_QUANT_SIZES[info.kind]
        if info.kind == gguf.GGMLQuantizationType.F32:
            return torch.from_numpy(raw.view(np.float32).reshape(info.shape).copy())
        if info.kind == gguf.GGMLQuantizationType.F16:
            return torch.from_numpy(raw.view(np.float16).reshape(info.shape).astype(np.float32))
        rows = raw.reshape(*info.shape[:-1], info.shape[-1] // per * each)
        try:
            decoded = gguf.quants.dequantize(rows, info.kind)
        except (NotImplementedError, KeyError) as error:
            raise ConfigError(
                f"{self.path}: tensor {name!r} has quantisation {info.kind.name}, which is not "
                f"supported; use Q4_0, Q4_1, Q8_0, Q4_K, Q6_K, F16, BF16 or F32"
            ) from error
        return torch.from_numpy(np.ascontiguousarray(decoded, dtype=np.float32))

    def name_of(self, name: str) -> str:
        """Return GGUF's name of a tensor with this Hugging Face name."""
        if name in _TOP_NAMES:
            return _TOP_NAMES[name]
        layer, _, rest = name.removeprefix("model.layers.").partition(".")
        stem, _, suffix = rest.rpartition(".")
        return f"blk.{layer}.{_LAYER_NAMES[stem]}.{suffix}"

    def config(self) -> ModelConfig:
        """Return the model's shape.

        Raises:
            ConfigError: the architecture is not supported, or an entry is missing or invalid.
        """
        try:
            return self._config()
        except (TypeError, ValueError, ZeroDivisionError) as error:
            raise ConfigError(f"{self.path}: invalid metadata: {error}") from error

    def _config(self) -> ModelConfig:
        family = str(self._field("general.architecture"))
        if family not in FAMILIES:
            raise ConfigError(
                f"{self.path}: architecture {family!r} is not supported; "
                f"use one of {', '.join(FAMILIES)}"
            )
        heads = int(self._field(f"{family}.attention.head_count"))
        hidden = int(self._field(f"{family}.embedding_length"))
        head_dim = int(self.fields.get(f"{family}.attention.key_length", hidden // heads))
        embedding = self.tensors.get("token_embd.weight")
        if embedding is None:
            raise ConfigError(f"{self.path}: tensor 'token_embd.weight' is missing")
        tokenizer = self.facts()
        return ModelConfig(
            family=family,
            layers=int(self._field(f"{family}.block_count")),
            heads=heads,
            kv_heads=int(self.fields.get(f"{family}.attention.head_count_kv", heads)),
            head_dim=head_dim,
            hidden=hidden,
            intermediate=int(self._field(f"{family}.feed_forward_length")),
            vocab=embedding.shape[0],
            max_positions=int(self._field(f"{family}.context_length")),
            norm_eps=float(self._field(f"{family}.attention.layer_norm_rms_epsilon")),
            rope=self._rope(family, head_dim),
            qkv_bias="blk.0.attn_q.bias" in self.tensors,
            output_bias="blk.0.attn_output.bias" in self.tensors,
            mlp_bias="blk.0.ffn_gate.bias" in self.tensors,
            qk_norm="blk.0.attn_q_norm.weight" in self.tensors,
            tied_embeddings="output.weight" not in self.tensors,
            bos_id=tokenizer.bos_id,
            eos_ids=tokenizer.eos_ids,
        )

    def _field(self, name: str) -> Any:
        if name not in self.fields:
            raise ConfigError(f"{self.path}: missing metadata entry {name!r}")
        return self.fields[name]

    def _rope(self, family: str, head_dim: int) -> RopeConfig:
        kind = str(self.fields.get(f"{family}.rope.scaling.type", "none"))
        turned = int(self.fields.get(f"{family}.rope.dimension_count", head_dim))
        if turned != head_dim:
            raise ConfigError(
                f"{self.path}: rotary positions over {turned} of {head_dim} dimensions are not "
                f"supported; all dimensions must be rotary"
            )
        divisors: tuple[float, ...] = ()
        if "rope_freqs.weight" in self.tensors:
            divisors = tuple(self.tensor("rope_freqs.weight").flatten().tolist())
        return RopeConfig(
            theta=float(self.fields.get(f"{family}.rope.freq_base", 10000.0)),
            # GGUF stores llama's q and k with interleaved rows, but not the Qwens'.
            interleaved=family == "llama",
            scaling=kind,
            factor=float(self.fields.get(f"{family}.rope.scaling.factor", 1.0)),
            divisors=divisors,
        )

    def facts(self) -> TokenizerFacts:
        """Return the tokenizer's settings from the metadata."""
        tokens = self.fields.get("tokenizer.ggml.tokens", [])
        bos = self.fields.get("tokenizer.ggml.bos_token_id")
        ends = [
            self.fields.get(f"tokenizer.ggml.{name}_token_id") for name in ("eos", "eot", "eom")
        ]
        eos_ids = tuple(dict.fromkeys(int(end) for end in ends if end is not None))
        return TokenizerFacts(
            bos_id=None if bos is None else int(bos),
            eos_ids=eos_ids,
            add_bos=bool(self.fields.get("tokenizer.ggml.add_bos_token", False)),
            chat_template=self.fields.get("tokenizer.chat_template"),
            bos_token="" if bos is None else tokens[bos],
            eos_token=tokens[eos_ids[0]] if eos_ids else "",
        )

    def tokenizer(self) -> Tokenizer | None:
        """Return the tokenizer described by the metadata, or None if there is no description.

        Raises:
            ConfigError: it is not byte-level BPE, or splits text in an unknown way.
        """
        kind = self.fields.get("tokenizer.ggml.model", "none")
        if kind in ("none", "no_vocab"):
            return None
        if kind != "gpt2":
            raise ConfigError(
                f"{self.path}: tokenizer {kind!r} is not supported in a GGUF file; use byte-level "
                f"BPE ('gpt2'), or a Hugging Face folder with tokenizer.json"
            )
        tokens = self._field("tokenizer.ggml.tokens")
        kinds = self.fields.get("tokenizer.ggml.token_type", [1] * len(tokens))
        inner = byte_level_bpe(
            tokens,
            self._field("tokenizer.ggml.merges"),
            split=str(self.fields.get("tokenizer.ggml.pre", "default")),
            special=[index for index, what in enumerate(kinds) if what in (2, 3)],
            user_defined=[index for index, what in enumerate(kinds) if what == 4],
        )
        return Tokenizer(inner, self.facts())
