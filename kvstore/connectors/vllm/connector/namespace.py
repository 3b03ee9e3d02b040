"""Maps vLLM's configuration to the namespaces of its KV, or rejects it with the reason.

The module reads attributes of vLLM's configuration objects only. It does not import vllm.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any, Final

from kvstore.blocks.hashing import ALGORITHMS
from kvstore.blocks.key import Namespace
from kvstore.connectors.vllm.common.kv_settings import compute_dtype, kv_settings, settings_digest
from kvstore.connectors.vllm.common.settings import StoreSettings
from kvstore.connectors.vllm.common.unsupported import (
    check_causal,
    check_multimodal,
    check_prefix_caching,
    check_remote_code,
)
from kvstore.connectors.vllm.common.weights_id import model_id, revision_of
from kvstore.errors import ConfigError
from kvstore.kernels import BlockFormat

BLOCK_AXES: Final = "LHTC"
"""Axes of a block in a slot. vLLM's pages have the same bytes where heads come before tokens
(LBHNC), so each layer is one copy. Other physical orders are permuted by the copy."""

SUPPORTED_GROUP_KINDS: Final = ("FullAttentionSpec", "MLAAttentionSpec")
"""Kinds of KV group whose blocks do not change until the request ends."""
SUPPORTED_QUANT_MODES: Final = ("NONE", "FP8_PER_TENSOR")
"""Modes of quantised KV that can be read back from its bytes alone."""
IN_PROCESS_EXECUTORS: Final = (None, "uni", "external_launcher")
"""vLLM's executors that run a single rank in the scheduler's process."""
FP8_DTYPES: Final = {"fp8": "fp8_e4m3", "fp8_e4m3": "fp8_e4m3", "fp8_e5m2": "fp8_e5m2"}


def set_engine_flags(vllm_config: Any, hash_seed: str | None) -> list[str]:
    """Set the engine flags that a store below vLLM needs. Returns one line for each changed flag.

    Called in the scheduler's process before it reads the flags. hash_seed: `config.hash_seed`.
    """
    lines = []
    transfer, cache = vllm_config.kv_transfer_config, vllm_config.cache_config
    if transfer.kv_load_failure_policy != "recompute":
        transfer.kv_load_failure_policy = "recompute"
        lines.append(
            "kv_load_failure_policy is set to 'recompute': with vLLM's default a block that "
            "cannot be loaded would abort its request"
        )
    algorithm = cache.prefix_caching_hash_algo
    if algorithm not in ALGORITHMS:
        cache.prefix_caching_hash_algo = ALGORITHMS[0]
        lines.append(
            f"prefix_caching_hash_algo is set to {ALGORITHMS[0]!r}: {algorithm!r} hashes pickled "
            "objects, which other programs cannot reproduce"
        )
    elif hash_is_per_process(algorithm, hash_seed):
        cache.prefix_caching_hash_algo = ALGORITHMS[0]
        lines.append(
            f"prefix_caching_hash_algo is set to {ALGORITHMS[0]!r}: without PYTHONHASHSEED, "
            f"{algorithm!r} starts from random bytes in each process, so no stored block would be "
            "found again"
        )
    return lines


def hash_is_per_process(algorithm: str, hash_seed: str | None) -> bool:
    """True if each process has other hashes for the same blocks."""
    return algorithm.startswith("xxhash") and hash_seed is None


def single_group(kv_cache_config: Any) -> Any:
    """The single group of KV layers.

    Raises ConfigError: there are several groups, or the blocks of the group may change.
    """
    groups = kv_cache_config.kv_cache_groups
    kinds = [type(group.kv_cache_spec).__name__ for group in groups]
    if len(groups) != 1 or kinds[0] not in SUPPORTED_GROUP_KINDS:
        raise ConfigError(
            "KVStoreConnector requires one KV group of full attention, but this model has "
            f"{', '.join(kinds) or 'no KV group'}; start vLLM with "
            "--disable-hybrid-kv-cache-manager, or use KVStoreTier, which supports several groups "
            "(docs/vllm.md)"
        )
    return groups[0]


def check_embedded(parallel: Any) -> None:
    """Raises ConfigError: the two sides of an embedded store would be in two processes."""
    backend = parallel.distributed_executor_backend
    if parallel.world_size > 1 or backend not in IN_PROCESS_EXECUTORS:
        raise ConfigError(
            "an embedded store supports one process only, but this engine has "
            f"{parallel.world_size} ranks and distributed_executor_backend = "
            f"{_executor_name(backend)!r}; use a sidecar (kvstore serve, and "
            '"socket" in kv_connector_extra_config)'
        )


def check_outermost(own: Any, outermost: Any) -> None:
    """Check the load failure policy under a MultiConnector.

    own: the connector's configuration. outermost: the configuration that vLLM uses, which is the
    MultiConnector's if there is one.

    Raises ConfigError: the flag that `set_engine_flags` sets would have no effect.
    """
    if outermost is own or outermost.kv_load_failure_policy == "recompute":
        return
    raise ConfigError(
        f"kv_load_failure_policy = {outermost.kv_load_failure_policy!r} beside kv_connector "
        f"{outermost.kv_connector!r}: a block that cannot be loaded would abort its request; set "
        "'recompute' there (inside the MultiConnector it has no effect)"
    )


def _executor_name(backend: Any) -> str:
    return backend.__name__ if isinstance(backend, type) else str(backend)


def check_parallel(parallel: Any) -> None:
    """Raises ConfigError: a kind of parallelism that the connector does not support."""
    if getattr(parallel, "enable_elastic_ep", False):
        raise ConfigError(
            "KVStoreConnector does not support enable_elastic_ep: a new rank gets its weights from "
            "other ranks, so they cannot be identified; omit --enable-elastic-ep"
        )
    backend = getattr(parallel, "distributed_executor_backend", None)
    if backend == "external_launcher" and parallel.tensor_parallel_size > 1:
        raise ConfigError(
            "KVStoreConnector does not support distributed_executor_backend = 'external_launcher' "
            "with several ranks: each rank would schedule by its own lookups; use 'mp'"
        )
    for name in (
        "pipeline_parallel_size",
        "prefill_context_parallel_size",
        "decode_context_parallel_size",
    ):
        if getattr(parallel, name, 1) > 1:
            raise ConfigError(
                f"KVStoreConnector does not support {name} = {getattr(parallel, name)}; use 1, or "
                "tensor parallelism"
            )


def namespaces_of(
    vllm_config: Any, kv_cache_config: Any, settings: StoreSettings, *, fnuz: bool = False
) -> list[Namespace]:
    """The namespace of each tensor-parallel rank, in the order of ranks.

    With MLA every rank has the same latent, so all ranks share one namespace.

    fnuz: this device has AMD's fp8 (MI300), whose bytes are other numbers.

    Raises ConfigError: KV that the connector does not support; the line says what to change.
    """
    check_parallel(vllm_config.parallel_config)
    check_prefix_caching(vllm_config.model_config)
    check_multimodal(vllm_config)
    check_remote_code(vllm_config.model_config)
    group = single_group(kv_cache_config)
    check_causal(vllm_config, kv_cache_config)
    spec = group.kv_cache_spec
    check_kv_format(spec, vllm_config.cache_config)
    mla = type(spec).__name__ == "MLAAttentionSpec"
    ranks = vllm_config.parallel_config.tensor_parallel_size
    dtype = kv_dtype(spec, vllm_config.cache_config)
    revision = revision_of(vllm_config, settings.revision)
    if others := kv_settings(vllm_config, settings.revision):
        revision += f"-{settings_digest(others)}"
    engine = {
        "model": model_id(vllm_config.model_config, settings.model),
        "revision": revision,
        "dtype": dtype,
        "quantisation": _quantisation(vllm_config, dtype, fnuz),
        "layers": len(group.layer_names),
        "kv_heads": spec.num_kv_heads,
        "head_dim": spec.head_size,
        "head_dim_v": spec.head_size_v,
        "block_tokens": spec.block_size,
        "attention": "mla" if mla else "mha",
    }
    if mla or ranks == 1:
        return [_rank_namespace(engine, 1, 0)] * ranks
    return [_rank_namespace(engine, ranks, rank) for rank in range(ranks)]


def _quantisation(vllm_config: Any, kv_dtype: str, fnuz: bool) -> str:
    """The quantisation of the weights, the variant of fp8, and the dtype that computed the KV if it
    is not the KV's: KV that was computed in float16 and in bfloat16 differs."""
    name = str(vllm_config.model_config.quantization or "none")
    if fnuz and kv_dtype == "fp8_e4m3":
        name += "-fnuz"
    computed = compute_dtype(vllm_config, kv_dtype)
    return f"{name}+computed-{computed}" if computed else name


def _rank_namespace(engine: Mapping[str, Any], tp_size: int, tp_rank: int) -> Namespace:
    namespace = Namespace(**engine, tp_size=tp_size, tp_rank=tp_rank)
    return BlockFormat(BLOCK_AXES).namespace(namespace)


def check_kv_format(spec: Any, cache_config: Any) -> None:
    """Raises ConfigError: KV that needs more than its bytes to be read back, or is not one vector
    for each token and head."""
    mode = getattr(getattr(spec, "kv_quant_mode", None), "name", "NONE")
    packed = getattr(spec, "state_content_bytes", None) is not None
    slots = getattr(spec, "num_head_slots", None) not in (None, spec.num_kv_heads)
    dense = getattr(spec, "tokens_per_state", 1) == 1
    if mode not in SUPPORTED_QUANT_MODES or packed or slots or not dense:
        raise ConfigError(
            f"KVStoreConnector does not support kv_cache_dtype = {cache_config.cache_dtype!r} with "
            "this model, whose KV is packed; use 'auto' or 'fp8', or use KVStoreTier"
        )


def kv_dtype(spec: Any, cache_config: Any) -> str:
    """The namespace's name for the dtype of the KV."""
    mode = getattr(getattr(spec, "kv_quant_mode", None), "name", "NONE")
    if mode == "FP8_PER_TENSOR":
        name = str(cache_config.cache_dtype)
        if name not in FP8_DTYPES:
            raise ConfigError(
                f"unknown kv_cache_dtype {name!r}; use one of {', '.join(FP8_DTYPES)}"
            )
        return FP8_DTYPES[name]
    return str(spec.dtype).removeprefix("torch.")


def hashes_per_block(kv_cache_config: Any, block_tokens: int) -> int:
    """Number of vLLM's hashes in one block; the last one is the block's.

    Raises ConfigError: the block size is not a multiple of the hash size.
    """
    per_hash = kv_cache_config.hash_block_size or block_tokens
    if block_tokens % per_hash:
        raise ConfigError(
            f"vLLM hashes every {per_hash} tokens, but its blocks have {block_tokens} tokens; use "
            "a hash size that divides the block size"
        )
    return block_tokens // per_hash


def in_layer_order(names: Iterable[str]) -> list[str]:
    """Sort the names of layers by their numbers: layers.2 before layers.10."""
    return sorted(names, key=lambda name: [_part(part) for part in re.split(r"(\d+)", name)])


def _part(text: str) -> tuple[int, int, str]:
    return (0, int(text), "") if text.isdigit() else (1, 0, text)
