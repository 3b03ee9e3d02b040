"""What vLLM's own configuration says of the KV: the namespaces, or why it cannot be kept.

Reads attributes of vLLM's configuration objects only, so it needs no vLLM.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any, Final

from kvstore.blocks.hashing import ALGORITHMS
from kvstore.blocks.key import Namespace
from kvstore.connectors.vllm.settings import StoreSettings
from kvstore.connectors.vllm.weights_id import revision_of
from kvstore.errors import ConfigError
from kvstore.kernels import BlockFormat

ORDER: Final = "LHTC"
"""Axes of a block in a slot: the bytes of vLLM's pages where heads come before tokens (LBHNC), so
that they copy in one run per layer; other physical orders are permuted on the way."""

WHOLE_GROUPS: Final = ("FullAttentionSpec", "MLAAttentionSpec")
"""Kinds of KV group of which every block stays as it is until the request ends."""
PLAIN_MODES: Final = ("NONE", "FP8_PER_TENSOR")
"""Quantised KV that needs nothing but its own bytes to be read again."""
IN_PROCESS: Final = (None, "uni", "external_launcher")
"""vLLM's executors of which a single rank runs in the scheduler's process."""
FP8: Final = {"fp8": "fp8_e4m3", "fp8_e4m3": "fp8_e4m3", "fp8_e5m2": "fp8_e5m2"}


def set_engine_flags(vllm_config: Any, hash_seed: str | None) -> list[str]:
    """Set what a store below vLLM needs; a line for each flag that was otherwise.

    Called in the scheduler's process before it reads them. hash_seed: `config.hash_seed`.
    """
    lines = []
    transfer, cache = vllm_config.kv_transfer_config, vllm_config.cache_config
    if transfer.kv_load_failure_policy != "recompute":
        transfer.kv_load_failure_policy = "recompute"
        lines.append(
            "kv_load_failure_policy is set to 'recompute': with vLLM's default a block that "
            "cannot be loaded would end its request"
        )
    algorithm = cache.prefix_caching_hash_algo
    if algorithm not in ALGORITHMS:
        cache.prefix_caching_hash_algo = ALGORITHMS[0]
        lines.append(
            f"prefix_caching_hash_algo is set to {ALGORITHMS[0]!r}: {algorithm!r} hashes pickled "
            "objects, which other programs cannot repeat"
        )
    elif is_random(algorithm, hash_seed):
        cache.prefix_caching_hash_algo = ALGORITHMS[0]
        lines.append(
            f"prefix_caching_hash_algo is set to {ALGORITHMS[0]!r}: without PYTHONHASHSEED, "
            f"{algorithm!r} begins with bytes that no other process has, so nothing would be found "
            "again"
        )
    return lines


def is_random(algorithm: str, hash_seed: str | None) -> bool:
    """Whether each process names the same blocks otherwise."""
    return algorithm.startswith("xxhash") and hash_seed is None


def the_group(kv_cache_config: Any) -> Any:
    """The one group of KV layers.

    Raises ConfigError: several, or one whose blocks do not stay.
    """
    groups = kv_cache_config.kv_cache_groups
    kinds = [type(group.kv_cache_spec).__name__ for group in groups]
    if len(groups) != 1 or kinds[0] not in WHOLE_GROUPS:
        raise ConfigError(
            f"KVStoreConnector keeps models of one group of full attention; this one has "
            f"{', '.join(kinds) or 'none'}: start vLLM with --disable-hybrid-kv-cache-manager, or "
            "use KVStoreTier, which keeps groups apart (docs/vllm.md)"
        )
    return groups[0]


def check_embedded(parallel: Any) -> None:
    """Raises ConfigError: an embedded store whose two sides would be in two processes."""
    backend = parallel.distributed_executor_backend
    if parallel.world_size > 1 or backend not in IN_PROCESS:
        raise ConfigError(
            "an embedded store serves one process; with several ranks, or with "
            f"distributed_executor_backend {_named(backend)!r}, a sidecar is right (kvstore serve, "
            'and "socket" in kv_connector_extra_config)'
        )


def check_outermost(transfer: Any, engines: Any) -> None:
    """transfer: the connector's own configuration; engines: the one that vLLM goes by, which is
    another under MultiConnector.

    Raises ConfigError: there the flag that `set_engine_flags` sets would be without effect.
    """
    if engines is transfer or engines.kv_load_failure_policy == "recompute":
        return
    raise ConfigError(
        f"set kv_load_failure_policy 'recompute' beside kv_connector {engines.kv_connector!r}: "
        "inside it, it has no effect, and a block that cannot be loaded would end its request"
    )


def _named(backend: Any) -> str:
    return backend.__name__ if isinstance(backend, type) else str(backend)


def check_parallel(parallel: Any) -> None:
    """Raises ConfigError: a way of sharing the work that the connector does not know."""
    backend = getattr(parallel, "distributed_executor_backend", None)
    if backend == "external_launcher" and parallel.tensor_parallel_size > 1:
        raise ConfigError(
            "KVStoreConnector does not support distributed_executor_backend 'external_launcher' "
            "with several ranks, each of which would schedule by its own answers of the store; "
            "'mp' is right"
        )
    for name in (
        "pipeline_parallel_size",
        "prefill_context_parallel_size",
        "decode_context_parallel_size",
    ):
        if getattr(parallel, name, 1) > 1:
            raise ConfigError(
                f"KVStoreConnector does not support {name} {getattr(parallel, name)}; 1 is right "
                "(tensor parallelism is supported)"
            )


def check_reuse(model_config: Any) -> None:
    """Raises ConfigError: a model of which vLLM itself must compute every token of a prompt."""
    if not getattr(model_config, "is_prefix_caching_supported", True):
        raise ConfigError(
            "KVStoreConnector does not support this model or pooling (MEAN, CLS, STEP), for which "
            "vLLM must compute all of a prompt at once; leave --kv-transfer-config out"
        )


def check_items(vllm_config: Any) -> None:
    """Raises ConfigError: with both of its caches off vLLM calls images and sounds by a counter, so
    the names of blocks do not say what they show."""
    items = getattr(vllm_config.model_config, "multimodal_config", None)
    if items is None or vllm_config.cache_config.enable_prefix_caching:
        return
    if items.mm_processor_cache_gb == 0:
        raise ConfigError(
            "KVStoreConnector does not support mm_processor_cache_gb 0 without prefix caching: "
            "vLLM then names images and sounds by a counter, not by what they are; leave one of "
            "the two caches on"
        )


def namespaces_of(
    vllm_config: Any, kv_cache_config: Any, settings: StoreSettings, *, fnuz: bool = False
) -> list[Namespace]:
    """The namespace of each tensor-parallel rank, in the order of ranks.

    Of MLA every rank holds the same latent: one namespace for all of them.

    fnuz: this device's fp8 is AMD's own (MI300), whose bytes mean other numbers.

    Raises ConfigError: KV that the connector cannot keep; one line says what would be right.
    """
    check_parallel(vllm_config.parallel_config)
    check_reuse(vllm_config.model_config)
    check_items(vllm_config)
    group = the_group(kv_cache_config)
    spec = group.kv_cache_spec
    check_spec(spec, vllm_config.cache_config)
    mla = type(spec).__name__ == "MLAAttentionSpec"
    ranks = vllm_config.parallel_config.tensor_parallel_size
    dtype = kv_dtype(spec, vllm_config.cache_config)
    quantisation = str(vllm_config.model_config.quantization or "none")
    engine = {
        "model": model_id(vllm_config.model_config, settings),
        "revision": revision_of(vllm_config, settings.revision),
        "dtype": dtype,
        "quantisation": f"{quantisation}-fnuz" if fnuz and dtype == "fp8_e4m3" else quantisation,
        "layers": len(group.layer_names),
        "kv_heads": spec.num_kv_heads,
        "head_dim": spec.head_size,
        "head_dim_v": spec.head_size_v,
        "block_tokens": spec.block_size,
        "attention": "mla" if mla else "mha",
    }
    if mla or ranks == 1:
        return [_in_slots(engine, 1, 0)] * ranks
    return [_in_slots(engine, ranks, rank) for rank in range(ranks)]


def _in_slots(engine: Mapping[str, Any], tp_size: int, tp_rank: int) -> Namespace:
    namespace = Namespace(**engine, tp_size=tp_size, tp_rank=tp_rank)
    return BlockFormat(ORDER).namespace(namespace)


def check_spec(spec: Any, cache_config: Any) -> None:
    """Raises ConfigError: KV whose bytes alone do not say what they mean, that are not one vector
    for each token and head, or that depend on later tokens."""
    if getattr(spec, "non_causal", False):
        raise ConfigError(
            "KVStoreConnector does not support non-causal attention (prefix-LM), where the KV of a "
            "token depends on those after it; leave --kv-transfer-config out"
        )
    mode = getattr(getattr(spec, "kv_quant_mode", None), "name", "NONE")
    packed = getattr(spec, "state_content_bytes", None) is not None
    slots = getattr(spec, "num_head_slots", None) not in (None, spec.num_kv_heads)
    dense = getattr(spec, "tokens_per_state", 1) == 1
    if mode not in PLAIN_MODES or packed or slots or not dense:
        raise ConfigError(
            f"KVStoreConnector does not support kv_cache_dtype {cache_config.cache_dtype!r} of "
            "this model, whose KV is packed; 'auto' or 'fp8' is right, or use KVStoreTier"
        )


def kv_dtype(spec: Any, cache_config: Any) -> str:
    """The namespace's name for the dtype of the KV."""
    mode = getattr(getattr(spec, "kv_quant_mode", None), "name", "NONE")
    if mode == "FP8_PER_TENSOR":
        said = str(cache_config.cache_dtype)
        if said not in FP8:
            raise ConfigError(f"unknown kv_cache_dtype {said!r}; one of {', '.join(FP8)} is right")
        return FP8[said]
    return str(spec.dtype).removeprefix("torch.")


def model_id(model_config: Any, settings: StoreSettings) -> str:
    """What the model is called, the same on every node: of a local folder, its last part."""
    name = settings.model or str(model_config.model)
    return name.rstrip("/").rpartition("/")[2] if name.startswith(("/", ".")) else name


def hashes_per_block(kv_cache_config: Any, block_tokens: int) -> int:
    """How many of vLLM's hashes lie within one block; the last of them names it.

    Raises ConfigError: hashes that do not end where blocks do.
    """
    per_hash = kv_cache_config.hash_block_size or block_tokens
    if block_tokens % per_hash:
        raise ConfigError(
            f"vLLM hashes every {per_hash} tokens, its blocks have {block_tokens}; a hash size "
            "that divides the block is right"
        )
    return block_tokens // per_hash


def in_layer_order(names: Iterable[str]) -> list[str]:
    """Names of layers by their numbers: layers.2 before layers.10."""
    return sorted(names, key=lambda name: [_part(part) for part in re.split(r"(\d+)", name)])


def _part(text: str) -> tuple[int, int, str]:
    return (0, int(text), "") if text.isdigit() else (1, 0, text)
