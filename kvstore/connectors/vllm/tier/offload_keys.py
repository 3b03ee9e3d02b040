"""The namespace and the block hashes of vLLM's offloaded blocks in the store."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Sequence
from typing import Any, Final

from kvstore.blocks.key import DTYPE_BYTES, Namespace
from kvstore.connectors.common.guarded_store import GuardedStore
from kvstore.connectors.vllm.common.kv_settings import (
    compute_dtype,
    settings_digest,
    tier_settings,
)
from kvstore.connectors.vllm.common.settings import StoreSettings
from kvstore.connectors.vllm.common.weights_id import identity_of_name
from kvstore.errors import ConfigError
from kvstore.interface import BlockStore, Load, Match, Save

EPOCH_BYTES: Final = 16
GROUP_BYTES: Final = 4
"""vLLM's offload keys end with the number of the KV group, big-endian."""
FIRST_GROUP: Final = bytes(GROUP_BYTES)


class OffloadKeyMap(GuardedStore):
    """A guarded store with vLLM's offload keys: a block's hash and the number of its KV group.

    The store's shared index uses the first 16 bytes of a block hash, which must be uniform. The
    keys of one block in two groups begin alike, so the keys of all groups but the first are hashed.
    `start_epoch` hashes all keys with a random prefix from then on, so that blocks saved before are
    not found again. It deletes nothing, because other engines share the store.
    """

    def __init__(self, store: BlockStore) -> None:
        super().__init__(store)
        self._epoch = b""

    def start_epoch(self) -> None:
        self._epoch = os.urandom(EPOCH_BYTES)

    def match(self, hashes: Sequence[bytes]) -> Match | None:
        return super().match(self._block_hashes(hashes))

    def load(self, hashes: Sequence[bytes]) -> Load | None:
        return super().load(self._block_hashes(hashes))

    def save(self, hashes: Sequence[bytes]) -> Save | None:
        return super().save(self._block_hashes(hashes))

    def _block_hashes(self, keys: Sequence[bytes]) -> Sequence[bytes]:
        epoch = self._epoch
        return [
            hashlib.sha256(epoch + key).digest()
            if epoch or key[-GROUP_BYTES:] != FIRST_GROUP
            else key
            for key in keys
        ]


def offload_namespace(
    spec: Any, block_bytes: int, settings: StoreSettings, vllm_config: Any, kv_cache_config: Any
) -> Namespace:
    """The namespace of offloaded blocks: opaque bytes of all ranks and layers of several blocks.

    The files of a local folder identify the weights, or the revision that the user sets.
    vllm_config, kv_cache_config: see `engine_config`.

    Raises:
        ConfigError: neither is known; two revisions of a model would share blocks.
    """
    config = spec.config
    model, revision = identity_of_name(config.model.name)
    if not (settings.revision or revision):
        raise ConfigError(
            f"cannot identify the weights of {config.model.name!r}: vLLM passes only the model's "
            'name to a tier; set "revision" in the table of KVStoreTier, such as the hub commit'
        )
    dtype = str(config.model.dtype).removeprefix("torch.")
    element = DTYPE_BYTES.get(dtype, 1)
    if block_bytes % element:
        element = 1
    parts: dict[str, Any] = {
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
    if computed := compute_dtype(vllm_config, dtype):
        parts["computed"] = computed
    if others := tier_settings(vllm_config, kv_cache_config, settings.revision):
        parts["settings"] = settings_digest(others)
    digest = hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:16]
    return Namespace(
        model=settings.model or model,
        revision=settings.revision or revision,
        dtype=dtype if element > 1 else "int8",
        layers=1,
        kv_heads=1,
        head_dim=block_bytes // element,
        head_dim_v=0,
        block_tokens=1,
        layout=f"vllm-offload-{digest}",
    )
