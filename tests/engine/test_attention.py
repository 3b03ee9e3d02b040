"""CUDA's attention call, run on CPU, gives the same values as an explicit mask."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from kvstore.engine.attention import lower_right_attention

torch.set_num_threads(1)


@pytest.mark.parametrize(("new", "kv_len"), [(1, 1), (1, 9), (5, 5), (5, 9), (8, 64)])
@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 4), (4, 2), (6, 1)])
def test_lower_right_equals_the_mask(new: int, kv_len: int, heads: int, kv_heads: int) -> None:
    torch.manual_seed(0)
    q = torch.randn(1, heads, new, 16)
    k, v = torch.randn(2, 1, kv_heads, kv_len, 16)
    mask = torch.full((new, kv_len), float("-inf")).triu_(kv_len - new + 1)
    wanted = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=True)
    torch.testing.assert_close(lower_right_attention(q, k, v), wanted)
