"""Reads a Hugging Face model folder: config.json, *.safetensors, tokenizer.json."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import safetensors
import tokenizers
import torch

from kvstore.engine.model_config import FAMILIES, ModelConfig
from kvstore.engine.rope import RopeConfig
from kvstore.engine.tokenizer import Tokenizer, TokenizerFacts
from kvstore.errors import ConfigError

MAX_JSON_BYTES = 256 << 20
INDEX_FILE = "model.safetensors.index.json"
_FLOATS = (torch.float32, torch.bfloat16, torch.float16)


def read_json(path: Path) -> dict[str, Any]:
    """Read a JSON object from a file.

    Raises:
        ConfigError: the file cannot be read, is not a JSON object, or is over MAX_JSON_BYTES.
    """
    try:
        if path.stat().st_size > MAX_JSON_BYTES:
            raise ConfigError(f"{path} is larger than {MAX_JSON_BYTES} bytes")
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"cannot read {path} as JSON: {error}") from error
    if not isinstance(found, dict):
        raise ConfigError(f"{path} is not a JSON object")
    return found


class TokenizerFolder:
    """A model folder without its weights. A tokenizer.json alone is enough."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.raw_config = self._optional("config.json")

    def facts(self) -> TokenizerFacts:
        """Return the folder's settings of special tokens and chat."""
        tokenizer_config = self._optional("tokenizer_config.json")
        generation = self._optional("generation_config.json")
        template = tokenizer_config.get("chat_template")
        if isinstance(template, list):  # Several named templates: [{"name":, "template":}].
            named = {item.get("name"): item.get("template") for item in template}
            template = named.get("default")
        separate = self.path / "chat_template.jinja"
        if template is None and separate.is_file():
            template = separate.read_text(encoding="utf-8")
        ends = [*_ids(generation.get("eos_token_id")), *_ids(self.raw_config.get("eos_token_id"))]
        bos = _ids(self.raw_config.get("bos_token_id"))
        return TokenizerFacts(
            bos_id=bos[0] if bos else None,
            eos_ids=tuple(dict.fromkeys(ends)),
            # The post-processor in tokenizer.json adds the tokens around a prompt.
            add_bos=False,
            chat_template=template,
            bos_token=_token_text(tokenizer_config.get("bos_token")),
            eos_token=_token_text(tokenizer_config.get("eos_token")),
        )

    def tokenizer(self) -> Tokenizer | None:
        """Return the folder's tokenizer, or None without tokenizer.json.

        Raises:
            ConfigError: tokenizer.json cannot be read.
        """
        path = self.path / "tokenizer.json"
        if not path.is_file():
            return None
        try:
            inner = tokenizers.Tokenizer.from_file(str(path))
        except Exception as error:  # The library raises Exception itself for a malformed file.
            raise ConfigError(f"cannot read {path} as a tokenizer: {error}") from error
        # A tokenizer.json can enable truncation or padding. The engine needs the ids unchanged.
        inner.no_truncation()
        inner.no_padding()
        facts = self.facts()
        if not facts.eos_ids and facts.eos_token:
            end = inner.token_to_id(facts.eos_token)
            if end is not None:
                facts = TokenizerFacts(**{**vars(facts), "eos_ids": (end,)})
        return Tokenizer(inner, facts)

    def _optional(self, name: str) -> dict[str, Any]:
        path = self.path / name
        return read_json(path) if path.is_file() else {}


class HFFolder(TokenizerFolder):
    """A model folder. Tensors are read one at a time from mapped files.

    Raises:
        ConfigError: config.json or weights are missing, or weights cannot be read.
    """

    def __init__(self, path: Path) -> None:
        if not (path / "config.json").is_file():
            raise ConfigError(f"{path} has no config.json; give a Hugging Face model folder")
        super().__init__(path)
        files = self._files()
        self._where: dict[str, Any] = {}
        for file in files:
            try:
                opened: Any = safetensors.safe_open(str(file), framework="pt")
            except (OSError, safetensors.SafetensorError) as error:
                raise ConfigError(f"cannot read {file} as safetensors: {error}") from error
            for name in opened.keys():  # noqa: SIM118 (safe_open is not a mapping)
                self._where[name] = opened

    def _files(self) -> list[Path]:
        """Return the weight files: those in the index, or else all *.safetensors."""
        index = self.path / INDEX_FILE
        if not index.is_file():
            files = sorted(self.path.glob("*.safetensors"))
            if not files:
                raise ConfigError(
                    f"{self.path} has no weights: *.safetensors files are required "
                    f"(pickled .bin weights are not read)"
                )
            return files
        names = read_json(index).get("weight_map", {}).values()
        files = [self.path / Path(str(name)).name for name in sorted(set(names))]
        for file in files:
            if not file.is_file():
                raise ConfigError(f"{self.path} has no {file.name}, which is in {INDEX_FILE}")
        return files

    @property
    def tensors(self) -> dict[str, Any]:
        """Tensors in the files, by name."""
        return self._where

    def name_of(self, name: str) -> str:
        return name

    def read(self, name: str) -> tuple[npt.NDArray[np.uint8], torch.Tensor]:
        """Return a tensor's bytes as in the file, and the tensor in its stored dtype.

        Raises:
            ConfigError: it is quantised (not float32, bfloat16 or float16).
        """
        # A copy: the digest must be of the bytes that are used, even if the mapped file changes.
        tensor: torch.Tensor = self._where[name].get_tensor(name).clone()
        if tensor.dtype not in _FLOATS:
            raise ConfigError(
                f"{self.path}: tensor {name!r} has dtype {tensor.dtype}; use float32, bfloat16 or "
                f"float16 weights, or GGUF for quantised ones"
            )
        return tensor.contiguous().view(torch.uint8).numpy().reshape(-1), tensor

    def config(self) -> ModelConfig:
        """Return the model's shape."""
        return config_from_hf(
            self.raw_config,
            where=str(self.path),
            eos_ids=self.facts().eos_ids,
            tied=self.raw_config.get("tie_word_embeddings", "lm_head.weight" not in self._where),
            qkv_bias="model.layers.0.self_attn.q_proj.bias" in self._where,
        )


def _ids(value: Any) -> list[int]:
    """Return token ids from a JSON null, number or list."""
    if value is None:
        return []
    return [int(item) for item in (value if isinstance(value, list) else [value])]


def _token_text(value: Any) -> str:
    """Return the text of a token from a JSON null, string or {"content": ...}."""
    if isinstance(value, dict):
        value = value.get("content")
    return value if isinstance(value, str) else ""


def config_from_hf(
    raw: dict[str, Any],
    *,
    where: str = "config.json",
    eos_ids: tuple[int, ...] = (),
    tied: bool | None = None,
    qkv_bias: bool | None = None,
) -> ModelConfig:
    """Return a model's shape from its Hugging Face config.

    tied, qkv_bias: as found in the weights. None: as in the config.

    Raises:
        ConfigError: an architecture or option is not supported, or an entry is missing.
    """
    family = str(raw.get("model_type", "missing"))
    if family not in FAMILIES:
        raise ConfigError(
            f"{where}: architecture {family!r} is not supported; use one of {', '.join(FAMILIES)}"
        )
    if raw.get("hidden_act", "silu") != "silu":
        raise ConfigError(f"{where}: hidden_act must be 'silu' (got {raw['hidden_act']!r})")
    if raw.get("quantization_config"):
        raise ConfigError(f"{where}: quantised weights are not supported here; use GGUF for them")
    if raw.get("use_sliding_window"):
        raise ConfigError(f"{where}: sliding-window attention is not supported")
    try:
        heads = int(raw["num_attention_heads"])
        hidden = int(raw["hidden_size"])
        bias = bool(raw.get("attention_bias", family == "qwen2"))
        return ModelConfig(
            family=family,
            layers=int(raw["num_hidden_layers"]),
            heads=heads,
            kv_heads=int(raw.get("num_key_value_heads") or heads),
            head_dim=int(raw.get("head_dim") or hidden // heads),
            hidden=hidden,
            intermediate=int(raw["intermediate_size"]),
            vocab=int(raw["vocab_size"]),
            max_positions=int(raw["max_position_embeddings"]),
            norm_eps=float(raw.get("rms_norm_eps", 1e-6)),
            rope=_rope(raw, where),
            qkv_bias=bias if qkv_bias is None else qkv_bias,
            output_bias=bias and family == "llama",
            mlp_bias=bool(raw.get("mlp_bias", False)),
            qk_norm=family == "qwen3",
            tied_embeddings=bool(raw.get("tie_word_embeddings", False)) if tied is None else tied,
            bos_id=next(iter(_ids(raw.get("bos_token_id"))), None),
            eos_ids=eos_ids or tuple(_ids(raw.get("eos_token_id"))),
        )
    except KeyError as error:
        raise ConfigError(f"{where}: missing entry {error.args[0]!r}") from error
    except (TypeError, ValueError, ZeroDivisionError) as error:
        raise ConfigError(f"{where}: an entry has an invalid value: {error}") from error


def _rope(raw: dict[str, Any], where: str) -> RopeConfig:
    """Return rotary settings, from the older form (rope_theta, rope_scaling) or the newer one
    (rope_parameters)."""
    if float(raw.get("partial_rotary_factor", 1.0)) != 1.0:
        raise ConfigError(f"{where}: partial rotary positions are not supported")
    newer = raw.get("rope_parameters") or {}
    scaling = newer or raw.get("rope_scaling") or {}
    kind = scaling.get("rope_type", scaling.get("type", "default"))
    return RopeConfig(
        theta=float(newer.get("rope_theta", raw.get("rope_theta", 10000.0))),
        scaling="none" if kind == "default" else str(kind),
        factor=float(scaling.get("factor", 1.0)),
        low_freq_factor=float(scaling.get("low_freq_factor", 1.0)),
        high_freq_factor=float(scaling.get("high_freq_factor", 4.0)),
        original_max_positions=int(scaling.get("original_max_position_embeddings", 8192)),
    )
