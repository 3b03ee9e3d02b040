"""Makes models: from a Hugging Face folder, from a GGUF file, or random from a seed.

Weights are read one tensor at a time, digested as they are stored, converted, and moved to the
device. The digest becomes the namespace's revision: different weights never share KV, equal weights
do on every node, whatever their folder is called.
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
"""Tensors that may be there unread: angles, which the config gives; a head that is tied."""

Get = Callable[[str], torch.Tensor]


@dataclass
class LoadedModel:
    """A model ready to run.

    name: for humans and the API; namespace_fields: what of a Namespace the model fixes (everything
    but block_tokens).
    """

    model: Transformer
    config: ModelConfig
    tokenizer: Tokenizer | None
    name: str
    namespace_fields: dict[str, Any] = field(default_factory=dict)

    def namespace(self, block_tokens: int) -> Namespace:
        """The namespace of this model's blocks of `block_tokens` tokens, on one rank."""
        return Namespace(**self.namespace_fields, block_tokens=block_tokens)


class _Source(Protocol):
    """A folder or file that holds weights under Hugging Face's names or its own."""

    @property
    def tensors(self) -> Any: ...
    def name_of(self, name: str) -> str: ...
    def read(self, name: str) -> tuple[npt.NDArray[np.uint8], torch.Tensor]: ...


def default_device() -> str:
    """ "cuda" where there is one, else "cpu"."""
    return "cuda" if torch.cuda.is_available() else "cpu"


def load_model(
    path: str | Path,
    *,
    dtype: str = "auto",
    device: str = "auto",
) -> LoadedModel:
    """Load a Hugging Face model folder or a GGUF file.

    dtype: "float32", "bfloat16" or "float16", for weights and KV alike; "auto": bfloat16 on CUDA,
    float32 on CPU (where bfloat16 matrix products are the slower ones without AMX).
    device: "cpu", "cuda", "cuda:1", ...; "auto": CUDA where there is one.

    Raises:
        ConfigError: in one line: a path that is neither, a folder without weights, an unsupported
            architecture or quantisation, a tensor missing, of the wrong shape, or without a place
            in the model.
    """
    where = Path(path)
    torch_device, torch_dtype = _place(device, dtype)
    if not where.exists():
        raise ConfigError(
            f"no model at {str(where)!r}; a Hugging Face model folder or a .gguf file is right"
        )
    source: GGUFFile | HFFolder
    try:
        source = HFFolder(where) if where.is_dir() else GGUFFile(where)
        config = source.config()
        tokenizer = source.tokenizer()
    except OSError as error:
        raise ConfigError(f"{where} cannot be read: {error}") from error
    digest = xxhash.xxh3_128()
    model = _assemble(config, _reader(source, where, digest, torch_device, torch_dtype))
    _check_all_used(source, config, where)
    if tokenizer is not None and not config.eos_ids:
        config = replace(config, eos_ids=tokenizer.eos_ids)
    name = where.name if where.is_dir() else where.stem
    return _loaded(model, config, tokenizer, name, digest.hexdigest())


def load_tokenizer(path: str | Path) -> Tokenizer:
    """The tokenizer of a folder with a tokenizer.json, or of a GGUF file; no weights are read.

    Raises:
        ConfigError: no such path, or no tokenizer in it that can be read.
    """
    where = Path(path)
    if not where.exists():
        raise ConfigError(
            f"no tokenizer at {str(where)!r}; a folder with tokenizer.json or a .gguf file is right"
        )
    try:
        found = (TokenizerFolder(where) if where.is_dir() else GGUFFile(where)).tokenizer()
    except OSError as error:
        raise ConfigError(f"{where} cannot be read: {error}") from error
    if found is None:
        raise ConfigError(f"{where} has no tokenizer; tokenizer.json or GGUF's own is right")
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
    """A model with random weights from a seed: the same on every machine of one torch version.

    Weights keep activations near unit size, so that attention matters and the best token is seldom
    a near tie. From BYTE_VOCAB tokens on it has a byte tokenizer.

    made_on_device: draw the weights there, in seconds for a large model; they are others than those
        drawn on the CPU, and named by seed and kind of device instead of by their digest.

    Raises:
        ConfigError: an unsupported family, or sizes that do not fit together.
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
        # A device draws other numbers than one of another kind.
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
    # The shape is digested too: rotary settings, for one, change KV and are not in the weights.
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
            # By shape and digest, not by name: a folder is called differently on every node.
            "model": f"{config.family}-{config.layers}x{config.hidden}",
            "revision": revision,
            "dtype": dtype,
            "layers": config.layers,
            "kv_heads": config.kv_heads,
            "head_dim": config.head_dim,
        },
    )


def _place(device: str, dtype: str) -> tuple[torch.device, torch.dtype]:
    """The device and dtype that were asked for."""
    if device == "auto":
        device = default_device()
    try:
        torch_device = torch.device(device)
    except RuntimeError:
        raise ConfigError(f"device {device!r} is not known; 'cpu' or 'cuda' is right") from None
    if torch_device.type not in ("cpu", "cuda"):
        raise ConfigError(f"device {device!r} is not supported; 'cpu' or 'cuda' is right")
    if torch_device.type == "cuda" and not torch.cuda.is_available():
        raise ConfigError(f"device {device!r} is not here: torch sees no CUDA; 'cpu' is right")
    if dtype == "auto":
        dtype = "bfloat16" if torch_device.type == "cuda" else "float32"
    if dtype not in TORCH_DTYPES:
        raise ConfigError(f"dtype {dtype!r} is not supported; one of {', '.join(TORCH_DTYPES)} is")
    return torch_device, TORCH_DTYPES[dtype]


def _shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Every tensor this model has, by Hugging Face's names."""
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
    """A function that reads one tensor by Hugging Face's name, digesting its stored bytes."""

    def get(name: str) -> torch.Tensor:
        stored = source.name_of(name)
        if stored not in source.tensors:
            raise ConfigError(f"{where}: tensor {stored!r} is missing")
        raw, tensor = source.read(stored)
        digest.update(name.encode())
        digest.update(raw.data)
        # A copy also where nothing changes: matrix products round by their operands' alignment,
        # and a tensor that lies in a mapped file is aligned by chance.
        return tensor.to(device=device, dtype=dtype, copy=True)

    return get


def _check_all_used(source: _Source, config: ModelConfig, where: Path) -> None:
    """A tensor that the model has no place for means another model than the one that would run."""
    used = {source.name_of(name) for name in _shapes(config)}
    for name in source.tensors:
        if name not in used and not name.endswith(DERIVED):
            raise ConfigError(
                f"{where}: tensor {name!r} has no place in a {config.family} model as supported"
            )


def _assemble(config: ModelConfig, get: Get) -> Transformer:
    """Read every tensor, check its shape, and stack those that read the same input."""
    shapes = _shapes(config)

    def read(name: str) -> torch.Tensor:
        tensor = get(name)
        if tuple(tensor.shape) != shapes[name]:
            raise ConfigError(
                f"tensor {name!r} has shape {tuple(tensor.shape)}; the config asks for "
                f"{shapes[name]}"
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
