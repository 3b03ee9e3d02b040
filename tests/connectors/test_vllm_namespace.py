"""What is read of vLLM's configuration: namespaces, refusals, flags, versions, weights."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from fork_rig import IGNORE_FORK_WARNING, in_child
from sidecar_rig import LIMIT_S, NAMESPACE, ForkedSidecar, hashes_of, put

import kvstore
from kvstore.blocks.key import Namespace
from kvstore.connectors.common.pending_lookups import ROUND_TRIP_MS
from kvstore.connectors.common.weights_digest import fingerprint
from kvstore.connectors.vllm.common.open_store import EMBEDDED, open_store
from kvstore.connectors.vllm.common.settings import (
    StoreSettings,
    check_version,
    connector_settings,
)
from kvstore.connectors.vllm.common.weights_id import identity_of_name
from kvstore.connectors.vllm.connector.namespace import (
    check_embedded,
    check_outermost,
    hashes_per_block,
    in_layer_order,
    namespaces_of,
    set_engine_flags,
)
from kvstore.errors import ConfigError

pytestmark = pytest.mark.filterwarnings(IGNORE_FORK_WARNING)
COMMIT = "0123456789abcdef" * 2 + "01234567"


class FullAttentionSpec(SimpleNamespace):
    """Named like vLLM's, by whose name it is known."""


class MLAAttentionSpec(SimpleNamespace):
    pass


class SlidingWindowSpec(SimpleNamespace):
    pass


class HfConfig(SimpleNamespace):
    def to_dict(self) -> dict[str, Any]:
        return dict(vars(self))


def a_spec(kind: type = FullAttentionSpec, **over: Any) -> Any:
    values = {
        "block_size": 32,
        "num_kv_heads": 2,
        "head_size": 64,
        "head_size_v": 64,
        "dtype": "torch.bfloat16",
        "kv_quant_mode": SimpleNamespace(name="NONE"),
    }
    return kind(**{**values, **over})


def a_config(*specs: Any, hash_block_size: int = 32, layers: int = 4) -> Any:
    groups = [
        SimpleNamespace(kv_cache_spec=spec, layer_names=[f"l.{n}" for n in range(layers)])
        for spec in specs
    ]
    return SimpleNamespace(kv_cache_groups=groups, hash_block_size=hash_block_size)


def a_model(**over: Any) -> HfConfig:
    """Its configuration, of a repository of the hub."""
    return HfConfig(hidden_size=8, _commit_hash=COMMIT, **over)


def an_items(cache_gb: float, **over: Any) -> Any:
    """vLLM's configuration of images and sounds."""
    values = {"mm_processor_cache_gb": cache_gb, "mm_processor_kwargs": None}
    return SimpleNamespace(**{**values, **over})


def an_engine(**over: Any) -> Any:
    parallel = {"tensor_parallel_size": 1, "pipeline_parallel_size": 1}
    cache = {
        "cache_dtype": "auto",
        "prefix_caching_hash_algo": "sha256_cbor",
        "enable_prefix_caching": True,
    }
    model = {
        "model": "org/model",
        "dtype": "torch.bfloat16",
        "revision": None,
        "quantization": None,
        "max_model_len": 4096,
        "hf_config": a_model(),
    }
    load_format = over.pop("load_format", "auto")
    others = over.pop("others", {})
    for section, values in (("parallel", parallel), ("cache", cache), ("model", model)):
        values.update(over.pop(section, {}))
    assert not over
    return SimpleNamespace(
        parallel_config=SimpleNamespace(**parallel),
        cache_config=SimpleNamespace(**cache),
        model_config=SimpleNamespace(**model),
        load_config=SimpleNamespace(load_format=load_format),
        kv_transfer_config=SimpleNamespace(kv_load_failure_policy="fail"),
        **others,
    )


def test_the_namespace_says_what_the_tensors_are() -> None:
    (namespace,) = namespaces_of(an_engine(), a_config(a_spec()), StoreSettings())
    assert (namespace.model, namespace.dtype, namespace.layout) == (
        "org/model", "bfloat16", "LHTC",
    )  # fmt: skip
    assert (namespace.layers, namespace.kv_heads, namespace.head_dim) == (4, 2, 64)
    assert namespace.block_bytes == 4 * 2 * 32 * 128 * 2
    assert namespace.revision.startswith(f"{COMMIT[:16]}-")


def test_whatever_changes_the_bytes_changes_the_namespace() -> None:
    def digest(engine: Any = None, config: Any = None, **settings: Any) -> str:
        engine, config = engine or an_engine(), config or a_config(a_spec())
        return namespaces_of(engine, config, StoreSettings(**settings))[0].digest

    rope = {"rope_type": "longrope"}
    long = a_model(rope_parameters=rope)
    layered = a_model(rope_parameters={"full_attention": rope, "sliding_attention": {}})
    digests = [
        digest(),
        digest(an_engine(model={"model": "org/other"})),
        digest(an_engine(model={"hf_config": HfConfig(hidden_size=8, _commit_hash="f" * 40)})),
        digest(an_engine(model={"hf_config": a_model(rope_theta=1e6)})),
        digest(an_engine(model={"quantization": "awq"})),
        digest(an_engine(model={"hf_config": long})),
        digest(an_engine(model={"hf_config": long, "max_model_len": 8192})),
        digest(an_engine(model={"hf_config": layered})),
        digest(an_engine(model={"hf_config": layered, "max_model_len": 8192})),
        digest(config=a_config(a_spec(dtype="torch.float16"))),
        digest(config=a_config(a_spec(block_size=64), hash_block_size=64)),
        digest(config=a_config(a_spec(), layers=5)),
        digest(revision="mine"),
        digest(an_engine(model={"hf_config": a_model(rope_theta=1e6)}), revision="mine"),
        digest(model="mine"),
        digest(an_engine(model={"multimodal_config": an_items(4)})),
        digest(an_engine(model={"multimodal_config": an_items(4, mm_processor_kwargs={"a": 1})})),
        digest(an_engine(model={"multimodal_config": an_items(4, media_io_kwargs={"a": 1})})),
        digest(an_engine(model={"multimodal_config": an_items(4, video_pruning_rate=0.5)})),
    ]
    assert len(set(digests)) == len(digests)
    assert digest(an_engine(model={"max_model_len": 8192})) == digest()


def test_engines_with_default_settings_still_find_what_earlier_releases_stored() -> None:
    (namespace,) = namespaces_of(an_engine(), a_config(a_spec()), StoreSettings())
    assert namespace.digest == "00a160e76af5e1c311d25dc070128676"


def a_drafter(method: str = "eagle3", **over: Any) -> Any:
    """vLLM's configuration of speculative decoding. over: fields of the drafter's model."""
    draft = {
        "model": "org/drafter",
        "dtype": "torch.bfloat16",
        "revision": None,
        "max_model_len": 4096,
        "hf_config": a_model(),
    }
    return SimpleNamespace(
        method=method,
        num_speculative_tokens=2,
        draft_model_config=SimpleNamespace(**{**draft, **over}),
        draft_parallel_config=SimpleNamespace(tensor_parallel_size=1),
    )


def test_the_drafter_of_speculative_decoding_is_part_of_the_namespace() -> None:
    def digest(speculative: Any, revision: str = "") -> str:
        engine = an_engine(others={"speculative_config": speculative})
        settings = StoreSettings(revision=revision)
        return namespaces_of(engine, a_config(a_spec()), settings)[0].digest

    other_weights = HfConfig(hidden_size=8, _commit_hash="ffff" * 10)
    more_tokens = a_drafter()
    more_tokens.num_speculative_tokens = 3
    digests = [
        digest(None),
        digest(a_drafter()),
        digest(a_drafter("eagle")),
        digest(more_tokens),
        digest(a_drafter(model="org/other")),
        digest(a_drafter(hf_config=other_weights)),
        digest(a_drafter(hf_config=a_model(rope_theta=1e6))),
        digest(a_drafter(dtype="torch.float16")),
    ]
    assert len(set(digests)) == len(digests)
    for without_kv in ("ngram", "suffix", "medusa"):
        assert digest(a_drafter(without_kv)) == digest(None)
    unknown = a_drafter(hf_config=HfConfig(hidden_size=8))
    with pytest.raises(ConfigError, match=r"'org/drafter'.*set \"revision\""):
        digest(unknown)
    assert digest(unknown, "mine") != digest(None, "mine"), "the user's revision covers it"


def test_the_dtype_that_computed_is_named_where_it_is_not_the_kvs() -> None:
    def found(dtype: str, spec: Any, cache_dtype: str = "auto") -> Namespace:
        engine = an_engine(model={"dtype": dtype}, cache={"cache_dtype": cache_dtype})
        return namespaces_of(engine, a_config(spec), StoreSettings())[0]

    half = a_spec(dtype="torch.float16")
    fp8 = a_spec(dtype="torch.uint8", kv_quant_mode=SimpleNamespace(name="FP8_PER_TENSOR"))
    namespaces = [
        found("torch.float16", half, "float16"),
        found("torch.bfloat16", half, "float16"),
        found("torch.float32", half, "float16"),
        found("torch.bfloat16", fp8, "fp8"),
        found("torch.float16", fp8, "fp8"),
    ]
    assert [each.quantisation for each in namespaces] == [
        "none",
        "none+computed-bfloat16",
        "none+computed-float32",
        "none+computed-bfloat16",
        "none+computed-float16",
    ]
    assert len({each.digest for each in namespaces}) == 5


def test_fp8_is_named_by_its_kind() -> None:
    spec = a_spec(dtype="torch.uint8", kv_quant_mode=SimpleNamespace(name="FP8_PER_TENSOR"))
    engine = an_engine(cache={"cache_dtype": "fp8"})
    (here,) = namespaces_of(engine, a_config(spec), StoreSettings())
    assert here.dtype == "fp8_e4m3"
    (amd,) = namespaces_of(engine, a_config(spec), StoreSettings(), fnuz=True)
    assert amd.digest != here.digest
    (plain,) = namespaces_of(an_engine(), a_config(a_spec()), StoreSettings())
    (same,) = namespaces_of(an_engine(), a_config(a_spec()), StoreSettings(), fnuz=True)
    assert same == plain


def test_ranks_have_namespaces_of_their_own_unless_they_hold_the_same() -> None:
    engine = an_engine(parallel={"tensor_parallel_size": 2})
    first, second = namespaces_of(engine, a_config(a_spec()), StoreSettings())
    assert replace(first, tp_rank=1) == second
    latent = a_spec(MLAAttentionSpec, num_kv_heads=1, head_size=576, head_size_v=0)
    first, second = namespaces_of(engine, a_config(latent), StoreSettings())
    assert (first, first.attention, first.tp_size) == (second, "mla", 1)


@pytest.mark.parametrize(
    ("engine", "config", "words"),
    [
        ({}, a_config(a_spec(), a_spec(SlidingWindowSpec)), "--disable-hybrid-kv-cache-manager"),
        ({}, a_config(a_spec(SlidingWindowSpec)), "has SlidingWindowSpec"),
        ({}, a_config(), "has no KV group"),
        ({"parallel": {"pipeline_parallel_size": 2}}, a_config(a_spec()), "pipeline"),
        ({"parallel": {"decode_context_parallel_size": 2}}, a_config(a_spec()), "context"),
        (
            {"cache": {"cache_dtype": "nvfp4"}},
            a_config(a_spec(kv_quant_mode=SimpleNamespace(name="NVFP4"))),
            "'nvfp4'",
        ),
        (
            {
                "parallel": {
                    "tensor_parallel_size": 2,
                    "distributed_executor_backend": "external_launcher",
                }
            },
            a_config(a_spec()),
            "'external_launcher'",
        ),
        ({}, a_config(a_spec(state_content_bytes=9)), "packed"),
        ({}, a_config(a_spec(tokens_per_state=4)), "packed"),
        ({}, a_config(a_spec(non_causal=True)), "non-causal"),
        (
            {"others": {"attention_config": SimpleNamespace(use_non_causal=True)}},
            a_config(a_spec()),
            "non-causal",
        ),
        (
            {
                "model": {
                    "trust_remote_code": True,
                    "code_revision": None,
                    "using_transformers_backend": lambda: True,
                    "hf_config": a_model(auto_map={"AutoModel": "org/code--modeling.Model"}),
                }
            },
            a_config(a_spec()),
            "set --code-revision",
        ),
        ({"others": {"diffusion_config": object()}}, a_config(a_spec()), "diffusion"),
        ({"parallel": {"enable_elastic_ep": True}}, a_config(a_spec()), "enable_elastic_ep"),
        ({"model": {"is_prefix_caching_supported": False}}, a_config(a_spec()), "MEAN"),
        (
            {
                "model": {"multimodal_config": an_items(0)},
                "cache": {"enable_prefix_caching": False},
            },
            a_config(a_spec()),
            "mm_processor_cache_gb = 0",
        ),
    ],
)
def test_an_unsupported_configuration_is_rejected_in_one_line(
    engine: dict[str, Any], config: Any, words: str
) -> None:
    with pytest.raises(ConfigError, match=words) as caught:
        namespaces_of(an_engine(**engine), config, StoreSettings())
    assert "\n" not in str(caught.value)


def test_weights_without_identity_need_a_revision(tmp_path: Path) -> None:
    """A stream of tensors, an object store beside local JSON, a name without a commit."""
    (tmp_path / "config.json").write_text("{}")
    folder = str(tmp_path)
    unlike: list[dict[str, Any]] = [
        {"model": {"model": folder}},
        {"load_format": "tensorizer"},
        {"model": {"model_weights": "s3://bucket/model"}},
        {"model": {"hf_config": HfConfig(hidden_size=8)}},
        {"model": {"hf_config_path": "org/config"}},  # whose commit says nothing of the weights
    ]
    for over in unlike:
        with pytest.raises(ConfigError, match='set "revision"') as caught:
            namespaces_of(an_engine(**over), a_config(a_spec()), StoreSettings())
        assert "\n" not in str(caught.value)
        settings = StoreSettings(revision="mine")
        (named,) = namespaces_of(an_engine(**over), a_config(a_spec()), settings)
        assert named.revision.startswith("mine-")
    (tmp_path / "model.safetensors").write_bytes(b"weights")
    for over in ({"model": {"model": folder}}, {"load_format": "dummy"}):
        assert len(namespaces_of(an_engine(**over), a_config(a_spec()), StoreSettings())) == 1


def test_the_commit_is_of_the_weights_not_of_the_configuration() -> None:
    class Resolved(str):
        resolved = COMMIT[::-1]

    model = {"revision": Resolved("main"), "hf_config_path": "org/config"}
    (namespace,) = namespaces_of(an_engine(model=model), a_config(a_spec()), StoreSettings())
    assert namespace.revision.startswith(f"{COMMIT[::-1][:16]}-")


def test_how_a_folder_prepares_sounds_is_part_of_the_namespace(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes(b"weights")
    engine = an_engine(model={"model": str(tmp_path), "multimodal_config": an_items(4)})
    found = {namespaces_of(engine, a_config(a_spec()), StoreSettings())[0].digest}
    names = {identity_of_name(str(tmp_path))}
    for name in ("preprocessor_config.json", "processor_config.json"):
        (tmp_path / name).write_text("{}")
        found.add(namespaces_of(engine, a_config(a_spec()), StoreSettings())[0].digest)
        names.add(identity_of_name(str(tmp_path)))
    assert len(found) == len(names) == 3


def test_an_embedded_store_is_for_one_process() -> None:
    def parallel(backend: object, ranks: int = 1) -> Any:
        return SimpleNamespace(world_size=ranks, distributed_executor_backend=backend)

    for backend in (None, "uni", "external_launcher"):
        check_embedded(parallel(backend))
    for backend, ranks in (("mp", 1), ("ray", 1), (HfConfig, 1), ("uni", 2)):
        with pytest.raises(ConfigError, match="use a sidecar") as caught:
            check_embedded(parallel(backend, ranks))
        assert "\n" not in str(caught.value)


def test_under_another_connector_its_load_failure_policy_is_checked() -> None:
    own, outer = (
        SimpleNamespace(kv_connector=name, kv_load_failure_policy="fail")
        for name in ("KVStoreConnector", "MultiConnector")
    )
    check_outermost(own, own)
    with pytest.raises(
        ConfigError, match=r"'fail' beside kv_connector 'MultiConnector'.*set 'recompute'"
    ):
        check_outermost(own, outer)
    outer.kv_load_failure_policy = "recompute"
    check_outermost(own, outer)


def test_one_cache_of_vllms_is_enough_for_items_to_have_names() -> None:
    for items, caching in ((an_items(0), True), (an_items(4), False), (None, False)):
        engine = an_engine(
            model={"multimodal_config": items}, cache={"enable_prefix_caching": caching}
        )
        assert len(namespaces_of(engine, a_config(a_spec()), StoreSettings())) == 1


def test_flags_are_set_and_said_once() -> None:
    engine = an_engine(cache={"prefix_caching_hash_algo": "sha256"})
    lines = set_engine_flags(engine, None)
    assert engine.kv_transfer_config.kv_load_failure_policy == "recompute"
    assert engine.cache_config.prefix_caching_hash_algo == "sha256_cbor"
    assert [line.split()[0] for line in lines] == [
        "kv_load_failure_policy", "prefix_caching_hash_algo",
    ]  # fmt: skip
    assert set_engine_flags(engine, None) == []


def test_hashes_that_begin_with_made_up_bytes_are_not_left_so() -> None:
    for seed, algorithm in ((None, "sha256_cbor"), ("0", "xxhash_cbor")):
        engine = an_engine(cache={"prefix_caching_hash_algo": "xxhash_cbor"})
        lines = [line for line in set_engine_flags(engine, seed) if "PYTHONHASHSEED" in line]
        assert engine.cache_config.prefix_caching_hash_algo == algorithm
        assert len(lines) == (seed is None)


def test_hashes_of_a_block() -> None:
    assert hashes_per_block(a_config(hash_block_size=16), 32) == 2
    with pytest.raises(ConfigError, match="hashes every 24"):
        hashes_per_block(a_config(hash_block_size=24), 32)


def test_layers_are_ordered_by_number() -> None:
    assert in_layer_order(["m.10.a", "m.9.a", "m.2.a"]) == ["m.2.a", "m.9.a", "m.10.a"]


def test_versions() -> None:
    check_version("0.32.0")
    check_version("0.32.7.dev1+cpu")
    for version in ("0.31.9", "0.33.0", "1.0.0", "dev"):
        with pytest.raises(ConfigError, match=r"use 0\.32"):
            check_version(version)


@pytest.mark.parametrize("name", ["KVStoreConnector", "KVStoreTier"])
def test_another_release_is_rejected_before_its_modules_are_imported(
    tmp_path: Path, name: str
) -> None:
    (tmp_path / "vllm").mkdir()
    (tmp_path / "vllm" / "__init__.py").write_text('__version__ = "0.31.2"')
    program = f"import kvstore.connectors.vllm as module; module.{name}"
    path = f"{tmp_path}:{Path(kvstore.__file__).parents[1]}"
    run = subprocess.run(
        [sys.executable, "-c", program],
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
    )
    last = run.stderr.splitlines()[-1]
    assert last == "kvstore.errors.ConfigError: vLLM 0.31.2 is not supported; use 0.32"


def test_unknown_settings_are_rejected() -> None:
    assert (
        connector_settings({"socket": "/s", "prefetch": {"max_wait": "3s"}}).prefetch.max_wait
        == 3e3
    )
    with pytest.raises(ConfigError, match=r"kv_connector_extra_config.sockt.*'socket'"):
        connector_settings({"sockt": "/s"})
    with pytest.raises(ConfigError, match="timeout"):
        connector_settings({"prefetch": {"policy": "timout"}})


def test_a_save_may_wait_for_an_answer_even_if_loads_may_not() -> None:
    assert connector_settings({"prefetch": {"max_wait": 0}}).max_save_wait == ROUND_TRIP_MS
    assert connector_settings({"prefetch": {"max_wait": "3s"}}).max_save_wait == 3e3


def test_the_sidecar_counts_traffic_by_label(tmp_path: Path) -> None:
    sidecar = ForkedSidecar(tmp_path)
    settings = connector_settings({"socket": sidecar.socket, "traffic_label": "chat"})
    opened = open_store(settings, NAMESPACE, engine="e", name="n")
    put(opened.store, hashes_of("labelled", 2))
    assert opened.store.sync(LIMIT_S)
    [user] = sidecar.stats()["usage"]["users"]
    opened.close()
    assert (user["traffic"], user["saved_tokens"]) == ("chat", 2 * NAMESPACE.block_tokens)
    with pytest.raises(ConfigError, match="traffic label 'no label'"):
        open_store(
            connector_settings({"socket": sidecar.socket, "traffic_label": "no label"}),
            NAMESPACE,
            engine="e",
            name="n",
        )
    assert sidecar.stop() == 0


def test_a_fingerprint_sees_names_sizes_and_bytes(tmp_path: Path) -> None:
    weights = tmp_path / "model.safetensors"
    weights.write_bytes(bytes(range(256)) * 4096)
    first = fingerprint(tmp_path)
    (tmp_path / "notes.txt").write_text("not weights")
    assert fingerprint(tmp_path) == first
    changed = bytearray(weights.read_bytes())
    for place in (0, len(changed) - 1, len(changed) // 2):
        changed[place] ^= 1
        weights.write_bytes(changed)
        assert fingerprint(tmp_path) != first
        changed[place] ^= 1
    weights.write_bytes(changed)
    assert fingerprint(tmp_path) == first
    assert fingerprint(weights) == first
    weights.rename(tmp_path / "other.safetensors")
    assert fingerprint(tmp_path) != first
    weights.write_bytes(b"")
    fingerprint(weights)


def test_a_name_is_its_own_id_and_a_folder_is_known_by_its_files(tmp_path: Path) -> None:
    assert identity_of_name("org/model") == ("org/model", "")
    folder = tmp_path / "mine"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    assert identity_of_name(str(folder)) == ("mine", ""), "its weights are elsewhere"
    (folder / "model.safetensors").write_bytes(b"weights")
    name, revision = identity_of_name(str(folder))
    (folder / "config.json").write_text('{"rope_theta": 1}')
    assert name == "mine"
    assert identity_of_name(str(folder))[1] != revision


def test_both_sides_of_an_engine_meet_in_one_embedded_store() -> None:
    (namespace,) = namespaces_of(an_engine(), a_config(a_spec()), StoreSettings())
    settings = StoreSettings(embedded={"l2": "4MiB"})
    one = open_store(settings, namespace, engine="e", name="scheduler")
    two = open_store(settings, namespace, engine="e", name="worker")
    save = two.store.save([b"k" * 32])
    two.store.commit(save)
    assert one.store.match([b"k" * 32]).tiers == ["l2"]
    other = open_store(settings, namespace, engine="f", name="scheduler")
    assert other.store.match([b"k" * 32]).tiers == []
    for opened in (one, two, other):
        opened.close()
    assert EMBEDDED._stores == {}
    with pytest.raises(ConfigError, match=r"embedded\.l3.*'l2'"):
        open_store(StoreSettings(embedded={"l3": "1GiB"}), namespace, engine="g", name="x")


def test_a_forked_engine_opens_its_own_embedded_store() -> None:
    (namespace,) = namespaces_of(an_engine(), a_config(a_spec()), StoreSettings())
    settings = StoreSettings(embedded={"l2": "4MiB"})
    parents = open_store(settings, namespace, engine="e", name="parent")

    def work() -> list[object]:
        own = open_store(settings, namespace, engine="e", name="child")
        parents.close()
        save = own.store.save([b"k" * 32])
        own.store.commit(save)
        found = own.store.match([b"k" * 32]).tiers
        own.close()
        return [found, len(EMBEDDED._stores)]

    with EMBEDDED._lock:
        assert in_child(work) == [["l2"], 0]
    assert parents.store.match([b"k" * 32]).tiers == []
    parents.close()


def test_an_unsupported_prefetch_policy_is_rejected() -> None:
    with pytest.raises(ConfigError, match="use 'timeout'"):
        connector_settings({"prefetch": {"policy": "adaptive"}})
