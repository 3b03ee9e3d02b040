"""The decoder of the Llama, Qwen2 and Qwen3 families, over a paged KV pool.

One implementation serves all three: RMSNorm, rotary positions, grouped-query attention, SwiGLU.
Qwen2 adds biases to q, k and v. Qwen3 normalizes each head of q and k. Weights with the same input
are stacked (q, k, v; gate and up), so a step makes four matrix products per layer.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from kvstore.engine.attention import AttentionPlan
from kvstore.engine.lora import LoraSlice
from kvstore.engine.model_config import ModelConfig
from kvstore.engine.rope import RopeTable

__all__ = ["Layer", "ModelConfig", "Transformer"]


@dataclass(slots=True)
class Layer:
    """Weights of one layer. Matrices are [out, in]. None: the family has no such weight."""

    input_norm: torch.Tensor
    qkv: torch.Tensor
    output: torch.Tensor
    mlp_norm: torch.Tensor
    gate_up: torch.Tensor
    down: torch.Tensor
    qkv_bias: torch.Tensor | None = None
    output_bias: torch.Tensor | None = None
    gate_up_bias: torch.Tensor | None = None
    down_bias: torch.Tensor | None = None
    q_norm: torch.Tensor | None = None
    k_norm: torch.Tensor | None = None


class Transformer:
    """Weights on one device, and the forward pass over a paged pool."""

    def __init__(
        self,
        config: ModelConfig,
        layers: Sequence[Layer],
        *,
        embedding: torch.Tensor,
        final_norm: torch.Tensor,
        lm_head: torch.Tensor | None = None,
    ) -> None:
        """embedding: [vocab, hidden]. lm_head: the same shape. None: tied to the embedding."""
        assert len(layers) == config.layers, (len(layers), config.layers)
        assert (lm_head is None) == config.tied_embeddings
        self.config = config
        self.layers = list(layers)
        self.embedding = embedding
        self.final_norm = final_norm
        self.lm_head = embedding if lm_head is None else lm_head
        self.rope = RopeTable(config.rope, config.head_dim, config.max_positions, embedding.device)

    @property
    def device(self) -> torch.device:
        return self.embedding.device

    @property
    def dtype(self) -> torch.dtype:
        return self.embedding.dtype

    def forward(
        self,
        ids: torch.Tensor,
        positions: torch.Tensor,
        pool: torch.Tensor,
        plan: AttentionPlan,
        lora: Sequence[LoraSlice] = (),
    ) -> torch.Tensor:
        """Compute these tokens, write their K and V into the pool, and return the next logits.

        ids, positions: [tokens] int64, the new tokens of all rows in sequence.
        pool: [layers, 2, num_pages, page_tokens, kv_heads, head_dim], written in place.
        Returns: [rows, vocab] float32, the logits of each row's last token.
        """
        config = self.config
        eps = config.norm_eps
        cos, sin = self.rope.at(positions)
        x = F.embedding(ids, self.embedding)
        for index, layer in enumerate(self.layers):
            plan.begin_layer(index)
            normed = F.rms_norm(x, (config.hidden,), layer.input_norm, eps)
            x = x + self._attend(index, layer, normed, cos, sin, pool[index], plan, lora)
            normed = F.rms_norm(x, (config.hidden,), layer.mlp_norm, eps)
            x = x + self._mlp(index, layer, normed, lora)
        last = F.rms_norm(x[plan.last_tokens], (config.hidden,), self.final_norm, eps)
        return F.linear(last, self.lm_head).float()

    def _attend(
        self,
        index: int,
        layer: Layer,
        x: torch.Tensor,
        cos: torch.Tensor,
        sin: torch.Tensor,
        layer_pool: torch.Tensor,
        plan: AttentionPlan,
        lora: Sequence[LoraSlice],
    ) -> torch.Tensor:
        """Compute attention of one layer: normalized x [tokens, hidden] to [tokens, hidden]."""
        config = self.config
        qkv = F.linear(x, layer.qkv, layer.qkv_bias)
        for part in lora:
            part.apply(index, "qkv", x, qkv)
        heads = qkv.view(len(x), -1, config.head_dim)
        rotary = heads[:, : config.heads + config.kv_heads]
        if layer.q_norm is not None and layer.k_norm is not None:
            q = F.rms_norm(
                rotary[:, : config.heads], (config.head_dim,), layer.q_norm, config.norm_eps
            )
            k = F.rms_norm(
                rotary[:, config.heads :], (config.head_dim,), layer.k_norm, config.norm_eps
            )
            rotary = torch.cat((q, k), dim=1)
        rotated = self.rope.rotate(rotary, cos, sin)
        q, k = rotated[:, : config.heads], rotated[:, config.heads :]
        plan.write(layer_pool, k, heads[:, config.heads + config.kv_heads :])
        mixed = plan.attend(q, layer_pool)
        out = F.linear(mixed, layer.output, layer.output_bias)
        for part in lora:
            part.apply(index, "output", mixed, out)
        return out

    def _mlp(
        self, index: int, layer: Layer, x: torch.Tensor, lora: Sequence[LoraSlice]
    ) -> torch.Tensor:
        """SwiGLU (Shazeer 2020, arXiv 2002.05202): down(silu(gate(x)) * up(x))."""
        gate_up = F.linear(x, layer.gate_up, layer.gate_up_bias)
        for part in lora:
            part.apply(index, "gate_up", x, gate_up)
        gate, up = gate_up.tensor_split(2, dim=-1)
        inner = F.silu(gate).mul_(up)
        out = F.linear(inner, layer.down, layer.down_bias)
        for part in lora:
            part.apply(index, "down", inner, out)
        return out
