"""LoRA adapters (Hu et al. 2021, arXiv 2106.09685): W x becomes W x + (alpha / r) B A x.

An adapter changes K and V, so KV of one adapter is invalid for all others. The engine's cache has a
tree per adapter, and the hash of every block includes the adapter's name.
"""

from __future__ import annotations

import json
import math
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import safetensors
import safetensors.torch
import torch
import xxhash

from kvstore.engine.model_config import STACKS, ModelConfig
from kvstore.errors import ConfigError

CONFIG_FILE = "adapter_config.json"
WEIGHTS_FILE = "adapter_model.safetensors"
MAX_CONFIG_BYTES = 1 << 20
MAX_RANK = 1024

_NAME = re.compile(
    r"(?:base_model\.model\.)?model\.layers\.(\d+)\.(?:self_attn|mlp)\.(\w+)\.lora_([AB])\.weight"
)
_PLACE = {name: stack for stack, (_, names) in STACKS.items() for name in names}


class LoraPart(NamedTuple):
    """One adapted matrix within a stacked one.

    a: [rank, in]. b: [out, rank], already scaled. first: its first output column in the stack.
    """

    a: torch.Tensor
    b: torch.Tensor
    first: int


@dataclass(slots=True)
class LoraAdapter:
    """One adapter's matrices for one model's shape.

    parts: (layer, stack) -> parts, where stack is one of STACKS. digest: of the weights, in hex.
    """

    rank: int
    digest: str
    parts: dict[tuple[int, str], list[LoraPart]] = field(default_factory=dict)

    def to(self, device: torch.device, dtype: torch.dtype) -> LoraAdapter:
        """Return a copy of the adapter on a device, in a dtype."""
        moved = {
            place: [
                LoraPart(part.a.to(device, dtype), part.b.to(device, dtype), part.first)
                for part in parts
            ]
            for place, parts in self.parts.items()
        }
        return LoraAdapter(self.rank, self.digest, moved)


@dataclass(slots=True)
class LoraSlice:
    """Consecutive tokens of one step (first..end) that use one adapter."""

    adapter: LoraAdapter
    first: int
    end: int

    def apply(self, layer: int, stack: str, x: torch.Tensor, out: torch.Tensor) -> None:
        """Add the adapter's result to out [tokens, width], in place, for this slice's tokens."""
        for part in self.adapter.parts.get((layer, stack), ()):
            delta = x[self.first : self.end] @ part.a.T @ part.b.T
            out[self.first : self.end, part.first : part.first + len(part.b)] += delta


def load_adapter(path: str | Path, config: ModelConfig) -> LoraAdapter:
    """Load a PEFT adapter folder for a model of this shape (float32, on CPU).

    Raises:
        ConfigError: a file is missing or unreadable, the adapter uses an unsupported feature (DoRA,
            biases, whole modules, different ranks), or it does not fit the model.
    """
    folder = Path(path)
    rank, scale = _settings(folder)
    weights = folder / WEIGHTS_FILE
    if not weights.is_file():
        raise ConfigError(f"{folder} has no {WEIGHTS_FILE}; give a PEFT adapter folder")
    try:
        tensors = safetensors.torch.load_file(str(weights))
    except (OSError, safetensors.SafetensorError) as error:
        raise ConfigError(f"cannot read {weights} as safetensors: {error}") from error
    pairs: dict[tuple[int, str], dict[str, torch.Tensor]] = {}
    for name, tensor in tensors.items():
        found = _NAME.fullmatch(name)
        if found is None or found[2] not in _PLACE:
            raise ConfigError(
                f"{folder}: tensor {name!r} is not supported; use LoRA of {', '.join(_PLACE)}"
            )
        pairs.setdefault((int(found[1]), found[2]), {})[found[3]] = tensor.float()
    return _adapter(pairs, config, rank, scale, str(folder))


def random_adapter(
    seed: int, config: ModelConfig, *, rank: int = 4, scale: float = 1.0
) -> LoraAdapter:
    """Return an adapter of all seven matrices with random weights from a seed (float32, CPU)."""
    generator = torch.Generator().manual_seed(seed)
    pairs: dict[tuple[int, str], dict[str, torch.Tensor]] = {}
    for layer in range(config.layers):
        for name, (wide, narrow) in config.linear_shapes().items():
            pairs[layer, name] = {
                "A": torch.randn(rank, narrow, generator=generator) / math.sqrt(narrow),
                "B": torch.randn(wide, rank, generator=generator) / math.sqrt(rank),
            }
    return _adapter(pairs, config, rank, scale, f"random adapter {seed}")


def _settings(folder: Path) -> tuple[int, float]:
    """Return rank and scale from adapter_config.json."""
    file = folder / CONFIG_FILE
    try:
        if file.stat().st_size > MAX_CONFIG_BYTES:
            raise ConfigError(f"{file} is larger than {MAX_CONFIG_BYTES} bytes")
        raw: dict[str, Any] = dict(json.loads(file.read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError) as error:
        raise ConfigError(f"cannot read {file}: {error}") from error
    if raw.get("peft_type", "LORA") != "LORA":
        raise ConfigError(f"{file}: peft_type must be 'LORA' (got {raw['peft_type']!r})")
    for option in ("use_dora", "modules_to_save", "rank_pattern", "alpha_pattern"):
        if raw.get(option):
            raise ConfigError(f"{file}: {option} is not supported; use plain LoRA")
    if raw.get("bias", "none") != "none":
        raise ConfigError(f"{file}: bias must be 'none' (got {raw['bias']!r})")
    rank = raw.get("r")
    if not isinstance(rank, int) or not 1 <= rank <= MAX_RANK:
        raise ConfigError(f"{file}: r must be 1 to {MAX_RANK} (got {rank!r})")
    alpha = float(raw.get("lora_alpha", rank))
    return rank, alpha / (math.sqrt(rank) if raw.get("use_rslora") else rank)


def _adapter(
    pairs: dict[tuple[int, str], dict[str, torch.Tensor]],
    config: ModelConfig,
    rank: int,
    scale: float,
    where: str,
) -> LoraAdapter:
    """Check the pairs against the model, scale B, and place each pair within its stack."""
    shapes = config.linear_shapes()
    digest = xxhash.xxh3_128(f"{rank} {scale}".encode())
    parts: dict[tuple[int, str], list[LoraPart]] = {}
    for (layer, name), pair in sorted(pairs.items()):
        wide, narrow = shapes[name]
        expected = {"A": (rank, narrow), "B": (wide, rank)}
        shown = {side: tuple(tensor.shape) for side, tensor in sorted(pair.items())}
        if layer >= config.layers or shown != expected:
            raise ConfigError(
                f"{where}: layer {layer} {name} does not fit this model of {config.layers} layers: "
                f"must have {expected} (got {shown})"
            )
        digest.update(f"{layer} {name}".encode())
        for side in ("A", "B"):
            digest.update(pair[side].contiguous().numpy().data)
        b = pair["B"] * scale
        if config.rope.interleaved and name in ("q_proj", "k_proj"):
            b = _paired(b, config.head_dim)
        stack = _PLACE[name]
        names = STACKS[stack][1]
        first = sum(shapes[before][0] for before in names[: names.index(name)])
        parts.setdefault((layer, stack), []).append(LoraPart(pair["A"], b, first))
    return LoraAdapter(rank, digest.hexdigest(), parts)


def _paired(rows: torch.Tensor, head_dim: int) -> torch.Tensor:
    """Reorder rows of q or k from half-split to interleaved pairs, as GGUF stores llama's."""
    split = rows.view(-1, 2, head_dim // 2, rows.shape[-1])
    return split.transpose(1, 2).reshape(rows.shape)
