"""The backend from SGLang's factory, over SGLang's own pools of KV and of states."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hicache_rig import absent, driver, extra
from sidecar_rig import ForkedSidecar

from kvstore.errors import ConfigError

pytestmark = [pytest.mark.sglang, pytest.mark.skipif(bool(absent()), reason=absent())]

SLOT_BYTES = 64 << 10
TOKENS = 4


@pytest.fixture(scope="module")
def sidecar(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ForkedSidecar]:
    slab = {"l2": {"bytes": 128 * SLOT_BYTES, "slot_bytes": SLOT_BYTES}}
    sidecar = ForkedSidecar(tmp_path_factory.mktemp("sidecar"), slab)
    yield sidecar
    assert sidecar.stop() == 0


def storage_config(chosen: dict[str, Any], **changed: Any) -> Any:
    from sglang.srt.mem_cache.hicache_storage import HiCacheStorageConfig

    values: dict[str, Any] = {
        "tp_rank": 0,
        "tp_size": 1,
        "pp_rank": 0,
        "pp_size": 1,
        "attn_cp_rank": 0,
        "attn_cp_size": 1,
        "is_mla_model": False,
        "enable_storage_metrics": True,
        "is_page_first_layout": True,
        "model_name": "pools",
        "extra_config": chosen,
    }
    return HiCacheStorageConfig(**{**values, **changed})


def make(chosen: dict[str, Any], **changed: Any) -> Any:
    from sglang.srt.mem_cache.storage import StorageBackendFactory

    config = storage_config(chosen, **changed)
    return StorageBackendFactory.create_backend("dynamic", config, None)


@contextlib.contextmanager
def host_pool(folder: Path) -> Iterator[Any]:
    """SGLang's host pool of MHA, as its controller creates it."""
    drive = driver()
    drive.Drive.cfg = drive.CacheConfig(
        page_size=TOKENS, kv_size=64, max_context_len=64, num_layers=2, head_num=4, head_dim=64
    )
    options = SimpleNamespace(core="python", layout="page_first", backend="file")
    _, cache, _, _ = drive.make(options, None, str(folder))
    controller = cache.cache_controller
    yield controller.storage_host_pool
    controller._stop_storage_threads()


@pytest.fixture(scope="module")
def kv(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    with host_pool(tmp_path_factory.mktemp("file")) as pool:
        yield pool


@pytest.fixture(scope="module")
def kv_too(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """Another pool, of another rank."""
    with host_pool(tmp_path_factory.mktemp("file too")) as pool:
        yield pool


@pytest.fixture
def states() -> Any:
    """SGLang's host pool of Mamba states: one temporal and one convolutional state a slot."""
    from sglang.srt.mem_cache.device_pool_info import MambaStateBufferInfo
    from sglang.srt.mem_cache.pool_host.mamba import MambaPoolHost

    driver()
    count = 8
    info = MambaStateBufferInfo(
        temporal=torch.zeros((2, count, 4, 16), dtype=torch.float32),
        conv=(torch.zeros((2, count, 8, 3), dtype=torch.bfloat16),),
    )
    return MambaPoolHost(info, 1.0, 0, device_capacity=count, pin_memory=False, layout="page_first")


def fill(pool: Any, seed: int) -> None:
    noise = torch.Generator().manual_seed(seed)
    buffers = [pool.kv_buffer] if torch.is_tensor(pool.kv_buffer) else list(pool.kv_buffer)
    for buffer in buffers:
        buffer.copy_(torch.randn(buffer.shape, generator=noise).to(buffer.dtype))


def slots(pages: list[int], tokens: int = TOKENS) -> torch.Tensor:
    return (torch.tensor(pages).reshape(-1, 1) * tokens + torch.arange(tokens)).reshape(-1)


def keys_of(name: str, count: int) -> list[str]:
    from sglang.srt.mem_cache.utils import get_storage_hash_str

    first = sum(name.encode()) * 1000
    return get_storage_hash_str(list(range(first, first + count * TOKENS)), None, page_size=TOKENS)


def test_v1_and_generic_calls_on_a_real_pool(sidecar: ForkedSidecar, kv: Any) -> None:
    backend = make(extra(sidecar.socket))
    backend.register_mem_pool_host(kv)
    backend.on_host_pools_registered()
    fill(kv, 1)
    keys = keys_of("v1", 4)
    assert backend.batch_exists(keys) == 0
    assert backend.batch_set_v1(keys[:3], slots([0, 1, 2])) == [True] * 3
    assert backend.batch_exists(keys) == 3
    assert (backend.exists(keys[2]), backend.exists(keys[3])) == (True, False)
    assert backend.batch_get_v1(keys, slots([4, 5, 6, 7])) == [True] * 3 + [False]
    for source, target in ((0, 4), (1, 5), (2, 6)):
        assert torch.equal(kv.get_data_page(source * TOKENS), kv.get_data_page(target * TOKENS))

    page = kv.get_data_page(0)
    assert backend.set("a key without hex digits", page)
    got = backend.get("a key without hex digits", kv.get_dummy_flat_data_page())
    assert torch.equal(got, page)
    assert torch.equal(backend.batch_get(["a key without hex digits"])[0], page)
    assert backend.batch_get(["x", "a key without hex digits"])[0] is None
    assert backend.get("x") is None

    metrics = backend.get_stats()
    assert metrics.backup_pgs[0] == 3
    assert metrics.prefetch_pgs[0] == 3
    assert all(rate > 0 for rate in metrics.backup_bandwidth + metrics.prefetch_bandwidth)
    assert backend.get_stats().backup_pgs == []
    backend.close()


def test_side_pools_by_v2(sidecar: ForkedSidecar, kv: Any, states: Any) -> None:
    from sglang.srt.mem_cache.hicache_storage import PoolHitPolicy, PoolName, PoolTransfer

    backend = make(extra(sidecar.socket, model="v2"))
    backend.register_mem_pool_host(kv)
    for pool, name in ((kv, PoolName.KV), (states, PoolName.MAMBA), (kv, PoolName.DRAFT)):
        backend.register_mem_host_pool_v2(pool, name)
    backend.on_host_pools_registered()
    fill(kv, 2)
    fill(states, 3)
    keys = keys_of("v2", 4)

    def transfers(state_keys: list[str], state_slots: list[int], pages: list[int]) -> list[Any]:
        mamba = PoolTransfer(
            name=PoolName.MAMBA,
            keys=state_keys,
            host_indices=torch.tensor(state_slots),
            hit_policy=PoolHitPolicy.TRAILING_PAGES,
        )
        draft = PoolTransfer(
            name=PoolName.DRAFT, keys=keys[: len(pages)], host_indices=slots(pages)
        )
        return [mamba, draft]

    assert backend.batch_set_v1(keys, slots([0, 1, 2, 3])) == [True] * 4
    written = transfers([keys[1], keys[3]], [0, 1], [0, 1, 2])
    assert backend.batch_set_v2(written) == {"mamba": [True, True], "draft": [True] * 3}

    requested = transfers([keys[3]], [2], [4, 5, 6])
    hits = backend.batch_exists_v2(keys, requested)
    assert (hits.kv_hit_pages, hits.restorable_prefix_pages) == (2, [2])
    assert hits.extra_pool_hit_pages == {"kv": 4, "mamba": 4, "draft": 3}
    assert backend.batch_exists_v2(keys, requested[:1]).restorable_prefix_pages == [2, 4]
    assert backend.batch_exists_v2(keys).kv_hit_pages == 4

    assert backend.batch_get_v2(requested) == {"mamba": [True], "draft": [True] * 3}
    assert torch.equal(states.get_data_page(2), states.get_data_page(1))
    assert torch.equal(kv.get_data_page(4 * TOKENS), kv.get_data_page(0))
    absent_state = PoolTransfer(name=PoolName.MAMBA, keys=[keys[0]], host_indices=torch.tensor([3]))
    assert backend.batch_get_v2([absent_state]) == {"mamba": [False]}
    backend.close()


def test_no_call_raises_into_sglangs_threads(
    sidecar: ForkedSidecar, kv: Any, caplog: pytest.LogCaptureFixture
) -> None:
    from sglang.srt.mem_cache.hicache_storage import PoolTransfer

    backend = make(extra(sidecar.socket, model="wrong"))
    keys = keys_of("wrong", 2)
    assert backend.batch_exists(keys) == 0, "no pool is registered yet"
    backend.register_mem_pool_host(kv)
    assert backend.batch_get_v1(keys, slots([0])) == [False, False]
    assert backend.batch_set_v1(keys, None) == [False, False]
    assert backend.batch_get(keys, [torch.zeros(3), torch.zeros(3)]) == [None, None]
    assert not backend.batch_set(keys, [torch.zeros(3), torch.zeros(3)])
    transfer = PoolTransfer(name="unknown pool", keys=keys, host_indices=slots([0, 1]))
    assert backend.batch_get_v2([transfer]) == {"unknown pool": [False, False]}
    assert backend.batch_exists_v2(keys, [transfer]).kv_hit_pages == 0
    assert not backend.clear()
    assert "batch_exists raised an exception" in caplog.text
    backend.close()
    assert backend.batch_exists(keys) == 0
    assert backend.batch_set_v1(keys, slots([0, 1])) == [False, False]


@pytest.mark.parametrize(
    ("changed", "more", "line"),
    [
        (
            {"dcp_size": 2, "is_mla_model": True, "tp_size": 2, "logical_page_size": 64},
            {},
            "decode-context parallelism of 2 is not supported by kvstore",
        ),
        ({"should_split_heads": True, "tp_lcm_size": 4}, {}, "tp_lcm_size = 4 is not supported"),
        ({}, {"sokcet": "/x"}, "did you mean 'socket'"),
    ],
    ids=["dcp", "split heads", "unknown key"],
)
def test_an_invalid_setting_ends_sglangs_start_with_one_line(
    changed: dict[str, Any], more: dict[str, Any], line: str
) -> None:
    with pytest.raises(ConfigError) as told:
        make(extra("/nowhere", **more), **changed)
    assert line in str(told.value)
    assert "\n" not in str(told.value)


def test_a_page_larger_than_a_slot_ends_sglangs_start(tmp_path: Path, kv: Any) -> None:
    slab = {"l2": {"bytes": 64 * 4096, "slot_bytes": 4096}}
    sidecar = ForkedSidecar(tmp_path, slab)
    backend = make(extra(sidecar.socket))
    with pytest.raises(ConfigError, match="slot"):
        backend.register_mem_pool_host(kv)
    backend.close()
    assert sidecar.stop() == 0


def test_two_ranks_of_two_servers_share_a_sidecar(
    sidecar: ForkedSidecar, kv: Any, kv_too: Any
) -> None:
    """Each rank has separate pages under the same keys. The next server finds them by rank."""
    keys = keys_of("ranks", 4)
    pools = (kv, kv_too)
    servers = [
        [make(extra(sidecar.socket), tp_size=2, tp_rank=rank) for rank in (0, 1)] for _ in pools
    ]
    for server in servers:
        for backend, pool in zip(server, pools, strict=True):
            backend.register_mem_pool_host(pool)
    for seed, (backend, pool) in enumerate(zip(servers[0], pools, strict=True)):
        fill(pool, 40 + seed)
        assert backend.batch_exists(keys) == 0, "the other rank's pages are not shared"
        assert backend.batch_set_v1(keys, slots([0, 1, 2, 3])) == [True] * 4
    for backend, pool in zip(servers[1], pools, strict=True):
        assert backend.batch_exists(keys) == 4
        assert backend.batch_get_v1(keys, slots([4, 5, 6, 7])) == [True] * 4
        for page in range(4):
            came = pool.get_data_page((4 + page) * TOKENS)
            assert torch.equal(came, pool.get_data_page(page * TOKENS))
    assert not torch.equal(kv.get_data_page(0), kv_too.get_data_page(0))
    for backend in (*servers[0], *servers[1]):
        backend.close()


def test_a_pool_replaced_and_a_close_among_calls(
    sidecar: ForkedSidecar, kv: Any, kv_too: Any, caplog: pytest.LogCaptureFixture
) -> None:
    """Concurrent calls of other threads return correct pages or misses, and none raises. The
    backend is closed twice."""
    backend = make(extra(sidecar.socket, model="replaced"))
    backend.register_mem_pool_host(kv)
    fill(kv, 50)
    fill(kv_too, 50)
    keys = keys_of("replaced", 4)
    answers: list[Any] = []
    ending = threading.Event()

    def call() -> None:
        try:
            while not ending.is_set():
                answers.append(backend.batch_set_v1(keys, slots([0, 1, 2, 3])))
                answers.append(backend.batch_get_v1(keys, slots([4, 5, 6, 7])))
                answers.append([backend.batch_exists(keys) in (0, 4)] * 4)
                backend.get_stats()
        except Exception as error:  # reported below
            answers.append(error)

    threads = [threading.Thread(target=call) for _ in range(3)]
    for thread in threads:
        thread.start()
    for pool in (kv_too, kv, kv_too):
        backend.register_mem_pool_host(pool)
        backend.get_stats()
    closers = [threading.Thread(target=backend.close) for _ in range(2)]
    for thread in closers:
        thread.start()
    for thread in closers:
        thread.join(60)
    ending.set()
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive()
    assert [each for each in answers if not isinstance(each, list) or len(each) != 4] == []
    assert [True] * 4 in answers
    assert "raised an exception; returning a miss" not in caplog.text
    backend.close()
    assert backend.batch_get_v1(keys, slots([4, 5, 6, 7])) == [False] * 4
    assert not backend.clear()
    backend.get_stats()
    assert backend.get_stats().backup_pgs == []
