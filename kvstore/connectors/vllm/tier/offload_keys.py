"""What a tier's units are called in the store: the namespace they lie in, and their names there."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Sequence
from typing import Any, Final

from kvstore.blocks.key import DTYPE_BYTES, Namespace
from kvstore.connectors.common.guarded_store import GuardedStore
from kvstore.connectors.vllm.settings import StoreSettings
from kvstore.connectors.vllm.weights_id import fingerprint_of_name
from kvstore.errors import ConfigError
from kvstore.interface import BlockStore, Load, Match, Save

EPOCH_BYTES: Final = 16
GROUP_BYTES: Final = 4
"""vLLM's keys end with the number of the KV group, big-endian."""
FIRST: Final = bytes(GROUP_BYTES)


class UnitStore(GuardedStore):
    """A guarded store that is asked by vLLM's keys: a block's hash and the number of its KV group.

    A store's names are uniform in their first bytes (its catalogue goes by 16 of them), and one
    block's keys in two groups begin alike, so all but the first group's are hashed. After `forget`
    all are, with a random prefix that no other engine and no later start knows: the store is
    shared, so nothing is deleted, and nothing saved before is found again.
    """

    def __init__(self, store: BlockStore) -> None:
        super().__init__(store)
        self._epoch = b""

    def forget(self) -> None:
        self._epoch = os.urandom(EPOCH_BYTES)

    def match(self, hashes: Sequence[bytes]) -> Match | None:
        return super().match(self._names(hashes))

    def load(self, hashes: Sequence[bytes]) -> Load | None:
        return super().load(self._names(hashes))

    def save(self, hashes: Sequence[bytes]) -> Save | None:
        return super().save(self._names(hashes))

    def _names(self, keys: Sequence[bytes]) -> Sequence[bytes]:
        epoch = self._epoch
        return [
            hashlib.sha256(epoch + key).digest() if epoch or key[-GROUP_BYTES:] != FIRST else key
            for key in keys
        ]


def namespace_of_units(spec: Any, unit_bytes: int, settings: StoreSettings) -> Namespace:
    """What fixes the bytes of a unit: opaque, all ranks and layers of a group of blocks in a row.

    vLLM tells the tier the model's name only, so its weights are known by a local folder's files or
    by the revision the user gives.

    Raises:
        ConfigError: by neither; two revisions of a model would share blocks.
    """
    config = spec.config
    model, revision = fingerprint_of_name(config.model.name)
    if not (settings.revision or revision):
        raise ConfigError(
            f'set "revision" in the table of KVStoreTier: vLLM tells a tier the name '
            f"{config.model.name!r} and nothing of its weights; the hub's commit is right"
        )
    dtype = str(config.model.dtype).removeprefix("torch.")
    element = DTYPE_BYTES.get(dtype, 1)
    if unit_bytes % element:
        element = 1
    parts = {
        "groups": [
            [group.group_id, group.tokens_per_block, list(group.layer_names)]
            for group in config.groups
        ],
        "tokens_per_hash": config.cache.tokens_per_hash,
        "blocks": spec.blocks_per_chunk,
        "bytes": config.worker_kv_bytes_per_block,
        "ranks": [
            config.parallel.world_size,
            config.parallel.tp_size,
            config.parallel.pp_size,
            config.parallel.pcp_size,
            config.parallel.dcp_size,
        ],
        "replicated": bool(spec.replicated_layout),
        "canonical": bool(config.canonical_layout),
        "order": config.kv_cache_layout,
        "dtype": dtype,
    }
    digest = hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:16]
    return Namespace(
        model=settings.model or model,
        revision=settings.revision or revision,
        dtype=dtype if element > 1 else "int8",
        layers=1,
        kv_heads=1,
        head_dim=unit_bytes // element,
        head_dim_v=0,
        block_tokens=1,
        layout=f"vllm-offload-{digest}",
    )
