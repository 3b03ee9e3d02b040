"""Keys and namespaces: known sizes, invalid fields rejected, every field in the digest."""

from __future__ import annotations

from dataclasses import fields, replace

import pytest

from kvstore.blocks.key import Namespace
from kvstore.errors import ConfigError

BASE = Namespace(model="m", layers=2, kv_heads=3, head_dim=8, block_tokens=4)


def test_bytes_of_a_block() -> None:
    """Layers * heads * (K + V) * bytes of the dtype, for each token."""
    assert BASE.bytes_per_token == 2 * 3 * (8 + 8) * 2
    assert BASE.block_bytes == 4 * BASE.bytes_per_token
    latent = replace(BASE, attention="mla", kv_heads=1, head_dim=576, head_dim_v=0)
    assert latent.bytes_per_token == 2 * 576 * 2


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("dtype", "float8"),
        ("layers", 0),
        ("kv_heads", -1),
        ("head_dim", 0),
        ("head_dim_v", -8),
        ("block_tokens", 0),
        ("tp_size", 0),
        ("tp_rank", 1),
    ],
)
def test_an_invalid_field_is_named(field: str, value: object) -> None:
    with pytest.raises(ConfigError, match=str(value)) as caught:
        replace(BASE, **{field: value})  # type: ignore[arg-type]
    assert "\n" not in str(caught.value)


def test_every_field_is_part_of_the_digest() -> None:
    """Two engines that differ in any field never share a block."""
    other = {
        "model": "n",
        "revision": "r",
        "dtype": "float16",
        "quantisation": "q8",
        "layers": 3,
        "kv_heads": 1,
        "head_dim": 16,
        "head_dim_v": 4,
        "block_tokens": 8,
        "layout": "LTKHD",
        "attention": "mla",
        "tp_size": 2,
        "tp_rank": 1,
        "format_version": 2,
    }
    assert set(other) == {field.name for field in fields(Namespace)}
    wide = replace(BASE, tp_size=4)
    digests = {wide.digest}
    digests.update(replace(wide, **{name: value}).digest for name, value in other.items())
    assert len(digests) == 1 + len(other)
