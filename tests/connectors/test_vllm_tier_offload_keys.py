"""Namespace and block hashes of offloaded blocks: everything that the bytes depend on is in the
namespace, and no two hashes begin alike."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from manual_store import ManualStore
from sidecar_rig import LIMIT_S, NAMESPACE, ForkedSidecar, fill, until_done

import kvstore
from kvstore.blocks.key import Namespace
from kvstore.connectors.vllm.common.settings import TierSettings
from kvstore.connectors.vllm.tier.engine_config import engine_config
from kvstore.connectors.vllm.tier.offload_keys import OffloadKeyMap, offload_namespace
from kvstore.errors import ConfigError

UNIT_BYTES = 4096


def a_folder(path: Path, weights: bytes = b"weights") -> Path:
    path.mkdir(parents=True)
    (path / "config.json").write_text("{}")
    (path / "model.safetensors").write_bytes(weights)
    return path


def a_tier_spec(model: str) -> Any:
    """The attributes of vLLM's `OffloadingSpec` that are read."""
    return SimpleNamespace(
        blocks_per_chunk=1,
        replicated_layout=False,
        config=SimpleNamespace(
            canonical_layout=False,
            model=SimpleNamespace(name=model, dtype="torch.bfloat16"),
            groups=[SimpleNamespace(group_id=0, tokens_per_block=32, layer_names=("a", "b"))],
            cache=SimpleNamespace(tokens_per_hash=32),
            worker_kv_bytes_per_block=UNIT_BYTES,
            parallel=SimpleNamespace(world_size=1, tp_size=1, pp_size=1, pcp_size=1, dcp_size=1),
            kv_cache_layout="BLHNC",
        ),
    )


def an_engine(dtype: str = "torch.bfloat16", **over: Any) -> Any:
    """vLLM's configuration with its defaults. over: of the model."""
    model = {
        "model": "org/model",
        "dtype": dtype,
        "quantization": None,
        "hf_overrides": {},
        "hf_config_path": None,
        "config_format": "auto",
        "max_model_len": 4096,
        "hf_config": HfConfig(),
    }
    return SimpleNamespace(
        model_config=SimpleNamespace(**{**model, **over}),
        cache_config=SimpleNamespace(cache_dtype="auto"),
    )


class HfConfig(SimpleNamespace):
    def to_dict(self) -> dict[str, Any]:
        return dict(vars(self))


class MambaSpec(SimpleNamespace):
    """Named like vLLM's, by whose name it is known."""


def groups(*specs: Any) -> Any:
    """vLLM's KVCacheConfig."""
    return SimpleNamespace(kv_cache_groups=[SimpleNamespace(kv_cache_spec=each) for each in specs])


PLAIN = groups(SimpleNamespace())


def named(
    spec: Any, vllm_config: Any = None, kv_cache_config: Any = PLAIN, **settings: Any
) -> Namespace:
    return offload_namespace(
        spec, UNIT_BYTES, TierSettings(**settings), vllm_config or an_engine(), kv_cache_config
    )


def test_a_model_that_is_not_a_folder_needs_a_revision(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"'org/model'.*set \"revision\""):
        named(a_tier_spec("org/model"))
    with pytest.raises(ConfigError, match='set "revision"'):
        named(a_tier_spec("org/model"), model="mine")
    (tmp_path / "elsewhere").mkdir()
    with pytest.raises(ConfigError, match='set "revision"'):
        named(a_tier_spec(str(tmp_path / "elsewhere")))  # a folder without weights
    first, second = (named(a_tier_spec("org/model"), revision=word) for word in ("one", "two"))
    assert (first.model, first.revision) == ("org/model", "one")
    assert first.digest != second.digest


def of_config(path: str, value: Any) -> Callable[[Any], None]:
    def change(spec: Any) -> None:
        *parents, last = path.split(".")
        for parent in parents:
            spec = getattr(spec, parent)
        setattr(spec, last, value)

    return change


@pytest.mark.parametrize(
    "change",
    [
        of_config("blocks_per_chunk", 2),
        of_config("replicated_layout", True),
        of_config("config.canonical_layout", True),
        of_config("config.model.dtype", "torch.float16"),
        of_config("config.groups", []),
        of_config("config.cache.tokens_per_hash", 16),
        of_config("config.worker_kv_bytes_per_block", 2 * UNIT_BYTES),
        of_config("config.parallel.tp_size", 2),
        of_config("config.parallel.dcp_size", 2),
        of_config("config.kv_cache_layout", "LBHNC"),
    ],
)
def test_everything_the_bytes_depend_on_is_in_the_namespace(
    tmp_path: Path, change: Callable[[Any], None]
) -> None:
    spec = a_tier_spec(str(a_folder(tmp_path / "model")))
    before = named(spec)
    change(spec)
    assert named(spec).digest != before.digest


def test_engines_with_default_settings_still_find_what_earlier_releases_stored() -> None:
    assert (
        named(a_tier_spec("org/model"), revision="one").digest == "cd5f74e1772311322c65a2a1e290d229"
    )


def test_settings_that_vllm_does_not_tell_a_tier_are_in_the_namespace() -> None:
    """One revision, one name: the rest is in the engine's configuration."""

    def digest(vllm_config: Any = None, kv_cache_config: Any = PLAIN) -> str:
        spec = a_tier_spec("org/model")
        return named(spec, vllm_config, kv_cache_config, revision="one").digest

    long = HfConfig(rope_parameters={"rope_type": "longrope"})
    own = {"quantization_config": {"quant_method": "gptq"}}
    states = an_engine()
    states.cache_config.mamba_ssm_cache_dtype = "float16"
    processor = SimpleNamespace(mm_processor_kwargs={"num_crops": 4})
    digests = [
        digest(),
        digest(an_engine("torch.float16")),
        digest(an_engine(quantization="fp8")),
        digest(an_engine(hf_overrides={"a": 1}, hf_config=HfConfig(a=1))),
        digest(an_engine(hf_overrides={"a": 2}, hf_config=HfConfig(a=2))),
        digest(an_engine(hf_config=long)),
        digest(an_engine(hf_config=long, max_model_len=8192)),
        digest(an_engine(multimodal_config=processor)),
        digest(states, groups(MambaSpec())),
    ]
    assert len(set(digests)) == len(digests)
    same = [
        digest(an_engine(max_model_len=8192)),
        digest(an_engine(quantization="gptq_marlin", hf_config=HfConfig(**own))),
        digest(states),
    ]
    assert set(same) == {digest()}


def test_a_tier_reads_the_configuration_of_the_engine_that_creates_it() -> None:
    def creates(vllm_config: Any, kv_cache_config: Any, then: Callable[[], Any]) -> Any:
        return then()

    outer, inner = (
        SimpleNamespace(kv_transfer_config=SimpleNamespace(engine_id=name)) for name in "oi"
    )
    found = creates(inner, PLAIN, lambda: creates(outer, PLAIN, lambda: engine_config("i")))
    assert found == (inner, PLAIN)
    with pytest.raises(ConfigError, match="use KVStoreConnector") as caught:
        engine_config("i")
    assert "\n" not in str(caught.value)


def test_folders_of_one_name_differ_by_their_files(tmp_path: Path) -> None:
    one, same, other = (
        named(a_tier_spec(str(a_folder(tmp_path / place / "model", weights))))
        for place, weights in (("1", b"weights"), ("2", b"weights"), ("3", b"others"))
    )
    assert one.digest == same.digest != other.digest


CATALOGUE_BYTES = 16
"""Leading bytes of a hash that the shared index uses."""


def test_one_block_in_two_groups_has_two_hashes_that_begin_differently() -> None:
    store = ManualStore(NAMESPACE, 4)
    key_map = OffloadKeyMap(store)
    keys = [bytes(range(32)) + group.to_bytes(4, "big") for group in range(40)]
    for call in (key_map.match, key_map.load, key_map.save):
        call(keys)
    key_map.start_epoch()
    key_map.match(keys)
    before, *others, after = (operation.hashes for operation in store.operations)
    assert others == [before, before]
    assert before[0] == keys[0], "vLLM's own hash if there is one group"
    assert len({name[:CATALOGUE_BYTES] for name in (*before, *after)}) == 2 * len(keys)


def test_a_sidecar_distinguishes_the_groups_of_a_block(tmp_path: Path) -> None:
    keys = [bytes(range(32)) + group.to_bytes(4, "big") for group in range(2)]
    sidecar = ForkedSidecar(tmp_path)
    client = kvstore.connect(sidecar.socket, NAMESPACE)
    key_map = OffloadKeyMap(client)
    save = key_map.save(keys[1:])
    assert save is not None
    until_done(client, save)
    fill(client, save)
    key_map.commit(save)
    assert client.sync(LIMIT_S)
    tiers = []
    for key in keys:
        match = key_map.match([key])
        assert match is not None
        tiers.append(until_done(client, match).tiers)
    assert tiers == [[], ["l2"]]
    client.close()
    assert sidecar.stop() == 0
