"""Loads models: from a Hugging Face folder, from a GGUF file, or random from a seed.

Weights are read one tensor at a time, digested as stored, converted, and moved to the device. The
digest becomes the revision of the namespace. So different weights never share KV, and equal weights
share it on every node, whatever the name of their folder.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch
import xxhash

from kvstore.blocks.key import Namespace
from kvstore.engine.gguf_file import GGUFFile
from kvstore.engine.hf_folder import HFFolder, TokenizerFolder
from kvstore.engine.model import Layer, Transformer
from kvstore.engine.model_config import STACKS, TORCH_DTYPES, ModelConfig
from kvstore.engine.rope import RopeConfig
from kvstore.engine.tokenizer import BYTE_VOCAB, Tokenizer, byte_tokenizer
from kvstore.errors import ConfigError

__all__ = ["LoadedModel", "default_device", "load_model", "load_tokenizer", "random_model"]

DERIVED = ("rotary_emb.inv_freq", "rope_freqs.weight", "lm_head.weight")
"""Tensors that are not read: angles, which the config determines, and a tied head."""

Get = Callable[[str], torch.Tensor]


@dataclass
class LoadedModel:
    """A model ready to run.

    name: for people and the API. namespace_fields: the fields of a Namespace that the model
    determines (all but block_tokens).
    """

    model: Transformer
    config: ModelConfig
    tokenizer: Tokenizer | None
    name: str
    namespace_fields: dict[str, Any] = field(default_factory=dict)

    def namespace(self, block_tokens: int) -> Namespace:
        """Return the namespace of this model's blocks of `block_tokens` tokens, on one rank."""
        return Namespace(**self.namespace_fields, block_tokens=block_tokens)


class _Source(Protocol):
    """A folder or file with weights, under Hugging Face's names or its own."""

    @property
    def tensors(self) -> Any: ...
    def name_of(self, name: str) -> str: ...
    def read(self, name: str) -> tuple[npt.NDArray[np.uint8], torch.Tensor]: ...


def default_device() -> str:
    """Return "cuda" if available, else "cpu"."""
    return "cuda" if torch.cuda.is_available() else "cpu"


def load_model(
    path: str | Path,
    *,
    dtype: str = "auto",
    device: str = "auto",
) -> LoadedModel:
    """Load a Hugging Face model folder or a GGUF file.

    dtype: "float32", "bfloat16" or "float16", for weights and KV. "auto": bfloat16 on CUDA, float32
    on CPU (where bfloat16 matrix products are slower without AMX).
    device: "cpu", "cuda", "cuda:1", ... "auto": CUDA if available.

    Raises:
        ConfigError: the path is neither, the folder has no weights, the architecture or
            quantisation is not supported, or a tensor is missing, unknown, or of the wrong shape.
    """
    where = Path(path)
    torch_device, torch_dtype = _place(device, dtype)
    if not where.exists():
        raise ConfigError(
            f"no model at {str(where)!r}; give a Hugging Face model folder or a .gguf file"
        )
    source: GGUFFile | HFFolder
    try:
        source = HFFolder(where) if where.is_dir() else GGUFFile(where)
        config = source.config()
        tokenizer = source.tokenizer()
    except OSError as error:
        raise ConfigError(f"cannot read {where}: {error}") from error
    digest = xxhash.xxh3_128()
    model = _assemble(config, _reader(source, where, digest, torch_device, torch_dtype))
    _check_all_used(source, config, where)
    if tokenizer is not None and not config.eos_ids:
        config = replace(config, eos_ids=tokenizer.eos_ids)
    name = where.name if where.is_dir() else where.stem
    return _loaded(model, config, tokenizer, name, digest.hexdigest())


def load_tokenizer(path: str | Path) -> Tokenizer:
    """Load the tokenizer of a folder with tokenizer.json, or of a GGUF file, without weights.

    Raises:
        ConfigError: the path does not exist, or has no valid tokenizer.
    """
    where = Path(path)
    if not where.exists():
        raise ConfigError(
            f"no tokenizer at {str(where)!r}; give a folder with tokenizer.json or a .gguf file"
        )
    try:
        found = (TokenizerFolder(where) if where.is_dir() else GGUFFile(where)).tokenizer()
    except OSError as error:
        raise ConfigError(f"cannot read {where}: {error}") from error
    if found is None:
        raise ConfigError(f"{where} has no tokenizer (tokenizer.json or GGUF metadata)")
    return found


def random_model(
    seed: int,
    *,
    family: str = "llama",
    layers: int = 4,
    hidden: int = 256,
    heads: int = 4,
    kv_heads: int = 2,
    head_dim: int | None = None,
    intermediate: int | None = None,
    vocab: int = 512,
    max_positions: int = 4096,
    rope: RopeConfig | None = None,
    tied_embeddings: bool = False,
    dtype: str = "float32",
    device: str = "auto",
    made_on_device: bool = False,
) -> LoadedModel:
    """Make a model with random weights from a seed, the same on every machine with one torch.

    Weights keep activations near unit size, so that attention matters and the best token rarely
    ties. With at least BYTE_VOCAB tokens the model has a byte tokenizer.

    made_on_device: draw the weights on the device, in seconds for a large model. They differ from
        those drawn on the CPU. Their revision is from seed and kind of device, not from a digest.

    Raises:
        ConfigError: the family is not supported, or the sizes do not fit together.
    """
    torch_device, torch_dtype = _place(device, dtype)
    config = ModelConfig(
        family=family,
        layers=layers,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim if head_dim is not None else hidden // max(heads, 1),
        hidden=hidden,
        intermediate=intermediate if intermediate is not None else 3 * hidden,
        vocab=vocab,
        max_positions=max_positions,
        rope=rope if rope is not None else RopeConfig(),
        qkv_bias=family == "qwen2",
        qk_norm=family == "qwen3",
        tied_embeddings=tied_embeddings,
        eos_ids=(256,) if vocab >= BYTE_VOCAB else (),
    )
    digest = xxhash.xxh3_128()
    source = torch_device if made_on_device else torch.device("cpu")
    generator = torch.Generator(source).manual_seed(seed)
    if made_on_device:
        # Devices of different kinds draw different numbers.
        kind = torch.cuda.get_device_name(source) if source.type == "cuda" else source.type
        digest.update(f"seed {seed} on {kind}, torch {torch.__version__}".encode())
    shapes = _shapes(config)

    def get(name: str) -> torch.Tensor:
        shape = shapes[name]
        tensor = torch.randn(shape, generator=generator, device=source)
        if name.endswith("norm.weight"):
            tensor = 1.0 + 0.1 * tensor
        elif len(shape) == 2 and name != "model.embed_tokens.weight":
            tensor *= 2.0 / math.sqrt(shape[1])
        digest.update(name.encode())
        if not made_on_device:
            digest.update(tensor.numpy().data)
        return tensor.to(device=torch_device, dtype=torch_dtype)

    model = _assemble(config, get)
    tokenizer = byte_tokenizer() if vocab >= BYTE_VOCAB else None
    name = f"random-{family}-{layers}x{hidden}-{seed}"
    return _loaded(model, config, tokenizer, name, digest.hexdigest())


def _loaded(
    model: Transformer,
    config: ModelConfig,
    tokenizer: Tokenizer | None,
    name: str,
    weights_digest: str,
) -> LoadedModel:
    # The digest includes the shape: rotary settings, for one, affect KV but are not in the weights.
    fields = asdict(config)
    for unrelated in ("bos_id", "eos_ids", "max_positions"):
        del fields[unrelated]
    shape = json.dumps(fields, sort_keys=True)
    revision = xxhash.xxh3_128((weights_digest + shape).encode()).hexdigest()
    dtype = str(model.dtype).removeprefix("torch.")
    return LoadedModel(
        model=model,
        config=config,
        tokenizer=tokenizer,
        name=name,
        namespace_fields={
            # By shape and digest, not by name: the folder's name differs between nodes.
            "model": f"{config.family}-{config.layers}x{config.hidden}",
            "revision": revision,
            "dtype": dtype,
            "layers": config.layers,
            "kv_heads": config.kv_heads,
            "head_dim": config.head_dim,
        },
    )


def _place(device: str, dtype: str) -> tuple[torch.device, torch.dtype]:
    """Return the requested device and dtype."""
    if device == "auto":
        device = default_device()
    try:
        torch_device = torch.device(device)
    except RuntimeError:
        raise ConfigError(f"unknown device {device!r}; use 'cpu' or 'cuda'") from None
    if torch_device.type not in ("cpu", "cuda"):
        raise ConfigError(f"device {device!r} is not supported; use 'cpu' or 'cuda'")
    if torch_device.type == "cuda" and not torch.cuda.is_available():
        raise ConfigError(f"device {device!r} is not available: torch finds no CUDA; use 'cpu'")
    if dtype == "auto":
        dtype = "bfloat16" if torch_device.type == "cuda" else "float32"
    if dtype not in TORCH_DTYPES:
        raise ConfigError(f"dtype {dtype!r} is not supported; use one of {', '.join(TORCH_DTYPES)}")
    return torch_device, TORCH_DTYPES[dtype]


def _shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Return the shapes of all tensors of the model, by Hugging Face's names."""
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (config.vocab, config.hidden)
    }
    linear = config.linear_shapes()
    biased = {
        "qkv": config.qkv_bias,
        "output": config.output_bias,
        "gate_up": config.mlp_bias,
        "down": config.mlp_bias,
    }
    for index in range(config.layers):
        prefix = f"model.layers.{index}."
        shapes[prefix + "input_layernorm.weight"] = (config.hidden,)
        shapes[prefix + "post_attention_layernorm.weight"] = (config.hidden,)
        if config.qk_norm:
            shapes[prefix + "self_attn.q_norm.weight"] = (config.head_dim,)
            shapes[prefix + "self_attn.k_norm.weight"] = (config.head_dim,)
        for stack, (block, names) in STACKS.items():
            for name in names:
                shapes[f"{prefix}{block}.{name}.weight"] = linear[name]
                if biased[stack]:
                    shapes[f"{prefix}{block}.{name}.bias"] = linear[name][:1]
    shapes["model.norm.weight"] = (config.hidden,)
    if not config.tied_embeddings:
        shapes["lm_head.weight"] = (config.vocab, config.hidden)
    return shapes


def _reader(
    source: _Source, where: Path, digest: Any, device: torch.device, dtype: torch.dtype
) -> Get:
    """Return a function that reads one tensor by Hugging Face's name and digests its bytes."""

    def get(name: str) -> torch.Tensor:
        stored = source.name_of(name)
        if stored not in source.tensors:
            raise ConfigError(f"{where}: missing tensor {stored!r}")
        raw, tensor = source.read(stored)
        digest.update(name.encode())
        digest.update(raw.data)
        # Copy also without conversion: matrix products round by the alignment of their operands,
        # and the alignment of a tensor in a mapped file is arbitrary.
        return tensor.to(device=device, dtype=dtype, copy=True)

    return get


def _check_all_used(source: _Source, config: ModelConfig, where: Path) -> None:
    """Raise ConfigError for an unknown tensor: the model would not be the intended one."""
    used = {source.name_of(name) for name in _shapes(config)}
    for name in source.tensors:
        if name not in used and not name.endswith(DERIVED):
            raise ConfigError(f"{where}: unexpected tensor {name!r} in a {config.family} model")


def _assemble(config: ModelConfig, get: Get) -> Transformer:
    """Read all tensors, check their shapes, and stack those with the same input."""
    shapes = _shapes(config)

    def read(name: str) -> torch.Tensor:
        tensor = get(name)
        if tuple(tensor.shape) != shapes[name]:
            raise ConfigError(
                f"tensor {name!r} must have shape {shapes[name]} by the config "
                f"(got {tuple(tensor.shape)})"
            )
        return tensor

    def stacked(prefix: str, stack: str, kind: str) -> list[torch.Tensor]:
        block, names = STACKS[stack]
        full = [f"{prefix}{block}.{name}.{kind}" for name in names]
        return [read(name) for name in full if name in shapes]

    def optional(name: str) -> torch.Tensor | None:
        return read(name) if name in shapes else None

    embedding = read("model.embed_tokens.weight")
    layers: list[Layer] = []
    for index in range(config.layers):
        prefix = f"model.layers.{index}."
        matrices = {stack: torch.cat(stacked(prefix, stack, "weight")) for stack in STACKS}
        parts = {f"{stack}_bias": stacked(prefix, stack, "bias") for stack in STACKS}
        biases = {name: torch.cat(found) for name, found in parts.items() if found}
        layers.append(
            Layer(
                input_norm=read(prefix + "input_layernorm.weight"),
                mlp_norm=read(prefix + "post_attention_layernorm.weight"),
                q_norm=optional(prefix + "self_attn.q_norm.weight"),
                k_norm=optional(prefix + "self_attn.k_norm.weight"),
                **matrices,
                **biases,
            )
        )
    return Transformer(
        config,
        layers,
        embedding=embedding,
        final_norm=read("model.norm.weight"),
        lm_head=optional("lm_head.weight"),
    )
