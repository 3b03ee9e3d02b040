"""The SGLang backend over real sidecars: what one rank keeps, another gets, byte for byte, and
nothing else."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
import torch
from sglang_rig import (
    LAYOUTS,
    PAGE_BYTES,
    HostMemory,
    Rank,
    clear,
    config,
    flush,
    keys_of,
    settings,
    slots,
)
from sidecar_rig import ForkedSidecar, disk, wait_until
from store_rig import RemoteTier

import kvstore
from kvstore.blocks.key import Key, Namespace
from kvstore.config.settings import merge
from kvstore.connectors.sglang.copies import Copies
from kvstore.connectors.sglang.namespace import EXTENTS, FLAT, HostPool, namespace_of
from kvstore.connectors.sglang.page_pool import PagePool, hashes_of
from kvstore.connectors.sglang.page_pools import PagePools
from kvstore.connectors.sglang.settings import MaxWaitSettings
from kvstore.errors import ConfigError
from kvstore.shm.slab import Slab
from kvstore.store.store import Store

GUARD = MaxWaitSettings(base=60_000, max=60_000)


@pytest.fixture(scope="module")
def sidecar(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ForkedSidecar]:
    sidecar = ForkedSidecar(tmp_path_factory.mktemp("sidecar"), slots(256))
    yield sidecar
    assert sidecar.stop() == 0


@pytest.mark.parametrize("zero_copy", [True, False], ids=["addresses", "flat"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_another_rank_gets_what_one_kept(
    sidecar: ForkedSidecar, layout: str, zero_copy: bool
) -> None:
    chosen = settings(sidecar.socket)
    writer, reader = HostMemory(12, layout), HostMemory(12, layout)
    writer.fill(1)
    reader.fill(2)
    before = [reader.page(number) for number in range(12)]
    keys = keys_of(f"{layout} {zero_copy}", 8)
    with (
        Rank(chosen, writer, zero_copy=zero_copy) as first,
        Rank(chosen, reader, zero_copy=zero_copy) as second,
    ):
        assert second.cached_prefix_len(keys) == 0
        assert first.set(keys[:6], [5, 0, 3, 9, 1, 2]) == [True] * 6
        assert second.cached_prefix_len(keys) == 6
        assert second.get(keys, [11, 2, 4, 0, 7, 6, 8, 9]) == [True] * 6 + [False] * 2
    for source, target in zip([5, 0, 3, 9, 1, 2], [11, 2, 4, 0, 7, 6], strict=True):
        assert reader.page(target) == writer.page(source)
    for untouched in (1, 3, 5, 8, 9, 10):
        assert reader.page(untouched) == before[untouched]


def test_the_sidecar_counts_traffic_by_label(sidecar: ForkedSidecar) -> None:
    host = HostMemory(4)
    host.fill(9)
    with Rank(settings(sidecar.socket, traffic_label="rag"), host, model="labelled") as rank:
        assert rank.set(keys_of("labelled", 2), [0, 1]) == [True, True]
    by_label = {user["traffic"]: user for user in sidecar.stats()["usage"]["users"]}
    assert by_label["rag"]["saved_tokens"] > 0


def test_a_stored_page_is_not_written_again(sidecar: ForkedSidecar) -> None:
    host = HostMemory(4)
    host.fill(3)
    was = host.page(0)
    keys = keys_of("first writer", 1)
    with Rank(settings(sidecar.socket), host) as rank:
        assert rank.set(keys, [0]) == [True]
        assert rank.set(keys, [1]) == [True], "already stored"
        assert rank.get(keys, [3]) == [True]
    assert host.page(3) == was


def test_pages_beyond_a_gap_are_loaded(sidecar: ForkedSidecar) -> None:
    host = HostMemory(8)
    host.fill(4)
    keys = keys_of("hole", 6)
    with Rank(settings(sidecar.socket), host) as rank:
        assert rank.set([keys[0], keys[2], keys[5]], [0, 1, 2]) == [True] * 3
        assert rank.cached_prefix_len(keys) == 1
        assert rank.get(keys, [3, 4, 5, 6, 7, 7]) == [True, False, True, False, False, True]
        assert rank.page_pools.stats()["kv/extents"] == {
            "pages_loaded": 3,
            "pages_missed": 3,
            "pages_saved": 3,
            "pages_dropped": 0,
        }


def test_exists_is_one_trip_at_most(tmp_path: Path) -> None:
    sidecar = ForkedSidecar(tmp_path, merge(slots(64), disk(tmp_path / "disk")))
    namespace = Namespace(model="trips", layers=2, kv_heads=2, head_dim=64, block_tokens=4)
    client = kvstore.connect(sidecar.socket, namespace)
    copies = Copies(1)
    pool = PagePool(client, copies, GUARD)
    host = HostMemory(8)
    keys = keys_of("trips", 100)
    wait_until(
        lambda: client.block_states([hashes_of(keys)[99]]) == [False], "the shared index is filled"
    )
    assert pool.set(keys[:8], HostPool(host, "kv").extents(host.indices(range(8)))) == [True] * 8
    requests = client.stats()["requests"]
    assert pool.cached_prefix_len(keys) == 8
    assert pool.cached_prefix_len(keys[8:]) == 0
    assert pool.contains(keys[4:10]) == [True] * 4 + [False] * 2
    assert pool.cached_prefix_len([]) == 0
    assert client.stats()["requests"] == requests, "the shared index answers"
    flush(sidecar)
    clear(sidecar, "l2")
    assert pool.cached_prefix_len(keys) == 8
    assert client.stats()["requests"] == requests + 1, "one match for the pages on disk"
    pool.close()
    copies.close()
    assert sidecar.stop() == 0


def different_namespaces() -> list[Namespace]:
    """Namespaces that differ from the first one in one attribute each."""
    plain = HostMemory(2)
    tagged = HostMemory(2)
    tagged.storage_format_tag = "packed"  # type: ignore[attr-defined]
    shifted = HostMemory(2)
    shifted.start_layer = 2
    split = HostMemory(2)
    split.head_num, split.head_dim, split.v_head_dim = 4, 32, 32
    pools = [
        plain,
        tagged,
        shifted,
        split,
        HostMemory(2, "page_first_direct"),
        HostMemory(2, "layer_first"),
        HostMemory(2, dtype=torch.float16),
        HostMemory(2, dtype=torch.float8_e4m3fn),
        HostMemory(2, dtype=torch.float8_e5m2),
        HostMemory(2, dtype=torch.uint8),
        HostMemory(2, page_size=8),
    ]
    identity = {"model": "m", "revision": "r"}

    def of(
        pool: HostMemory, page_format: str = EXTENTS, name: str = "kv", **more: object
    ) -> Namespace:
        host = HostPool(pool, name)
        changed = {key: value for key, value in more.items() if key in identity}
        ranked = {key: value for key, value in more.items() if key not in identity}
        return namespace_of(host, config(**ranked), page_format, **{**identity, **changed})  # type: ignore[arg-type]

    return [
        *(of(pool) for pool in pools),
        of(plain, FLAT),
        of(plain, name="draft"),
        of(plain, model="n"),
        of(plain, revision="s"),
        of(plain, tp_size=2),
        of(plain, tp_size=2, tp_rank=1),
        of(plain, pp_size=2),
        of(plain, pp_size=2, pp_rank=1),
        of(plain, attn_cp_size=2),
        of(plain, attn_cp_size=2, attn_cp_rank=1),
    ]


def test_every_attribute_of_a_page_is_in_its_namespace() -> None:
    spaces = different_namespaces()
    assert len({space.digest for space in spaces}) == len(spaces)
    assert spaces[0].block_bytes == PAGE_BYTES
    assert spaces[0] == different_namespaces()[0]


def test_the_same_key_of_another_kind_is_another_page(sidecar: ForkedSidecar) -> None:
    """Other dtype, other layout, other weights: never the first one's bytes."""
    keys = keys_of("kinds", 2)
    chosen = settings(sidecar.socket)
    host = HostMemory(2)
    host.fill(5)
    with Rank(chosen, host) as rank:
        assert rank.set(keys, [0, 1]) == [True, True]
    for other, revision in (
        (HostMemory(2, dtype=torch.float16), "r"),
        (HostMemory(2, "layer_first"), "r"),
        (HostMemory(2, "page_first_direct"), "r"),
        (HostMemory(2), "r2"),
    ):
        empty = other.page(0)
        with Rank(chosen, other, revision=revision) as rank:
            assert rank.cached_prefix_len(keys) == 0
            assert rank.get(keys, [0, 1]) == [False, False]
        assert other.page(0) == empty


def test_replicated_kv_is_one_page_for_all_ranks_and_its_states_are_not() -> None:
    class Latents(HostMemory):
        head_num = 0  # type: ignore[assignment]

        def __init__(self) -> None:
            super().__init__(2)
            self.head_num = 0

    def digests(pool: HostMemory, name: str) -> set[str]:
        host = HostPool(pool, name)
        spaces = [
            namespace_of(
                host,
                config(tp_size=2, tp_rank=rank, is_mla_model=True),
                EXTENTS,
                model="m",
                revision="r",
            )
            for rank in range(2)
        ]
        assert all(space.block_bytes == PAGE_BYTES for space in spaces)
        return {space.digest for space in spaces}

    assert len(digests(Latents(), "kv")) == 1
    assert len(digests(Latents(), "mamba")) == 2
    assert len(digests(HostMemory(2), "draft")) == 2, "KV divided by heads beside an MLA model"


def test_ranks_of_several_servers_share_a_sidecar(sidecar: ForkedSidecar) -> None:
    keys = keys_of("ranks", 4)
    chosen = settings(sidecar.socket)
    pools = [HostMemory(8) for _ in range(4)]
    ranks = [
        Rank(chosen, pool, model=f"shared {server}", tp_size=2, tp_rank=rank)
        for pool, (server, rank) in zip(pools, [(0, 0), (0, 1), (1, 0), (1, 1)], strict=True)
    ]
    for number, (pool, rank) in enumerate(zip(pools, ranks, strict=True)):
        pool.fill(number)
        assert rank.cached_prefix_len(keys) == 0, "nobody else's"
        assert rank.set(keys, range(4)) == [True] * 4
    for pool, rank in zip(pools, ranks, strict=True):
        assert rank.get(keys, range(4, 8)) == [True] * 4
        assert [pool.page(n) for n in range(4)] == [pool.page(n) for n in range(4, 8)]
        rank.close()


def test_threads_look_up_read_and_write_concurrently(sidecar: ForkedSidecar) -> None:
    """As SGLang does: one thread each, over one connection."""
    host = HostMemory(64)
    host.fill(6)
    rank = Rank(settings(sidecar.socket), host)
    batches = [keys_of(f"batch {number}", 8) for number in range(24)]
    stored = [threading.Event() for _ in batches]
    faults: list[str] = []

    def write() -> None:
        for keys, event in zip(batches, stored, strict=True):
            if rank.set(keys, range(8)) != [True] * 8:
                faults.append("set")
            event.set()

    def look_up() -> None:
        for keys, event in zip(batches, stored, strict=True):
            event.wait(60)
            if rank.cached_prefix_len(keys) != 8:
                faults.append("lookup")

    def read(first: int) -> None:
        for keys, event in zip(batches, stored, strict=True):
            event.wait(60)
            if rank.get(keys, range(first, first + 8)) != [True] * 8:
                faults.append("get")
            if [host.page(n) for n in range(8)] != [host.page(first + n) for n in range(8)]:
                faults.append("bytes")

    threads = [
        threading.Thread(target=write),
        *(threading.Thread(target=look_up) for _ in range(2)),
        threading.Thread(target=read, args=(16,)),
        threading.Thread(target=read, args=(32,)),
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    rank.close()
    assert faults == []


def test_a_batch_larger_than_the_slab_goes_through_it(tmp_path: Path) -> None:
    sidecar = ForkedSidecar(tmp_path, {**slots(24), **disk(tmp_path / "disk", codec="none")})
    writer, reader = HostMemory(128), HostMemory(128)
    writer.fill(7)
    keys = keys_of("large", 128)
    with Rank(settings(sidecar.socket), writer) as first:
        for at in range(0, 128, 16):
            assert first.set(keys[at : at + 16], range(at, at + 16)) == [True] * 16
            flush(sidecar)
    with Rank(settings(sidecar.socket), reader) as second:
        assert second.cached_prefix_len(keys) == 128
        assert second.get(keys, range(128)) == [True] * 128
    assert [reader.page(n) for n in range(128)] == [writer.page(n) for n in range(128)]
    with Rank(settings(sidecar.socket), writer, model="more") as third:
        assert third.set(keys, range(128)) == [True] * 128, "taken part by part"
    assert sidecar.stop() == 0


def test_compressed_pages_come_back_whole(tmp_path: Path) -> None:
    """Through the codec, from disk alone, to the pool's own addresses."""
    folder = tmp_path / "disk"
    overrides = {**slots(16 * 8), **disk(folder, codec="byteshuffle-zstd")}
    overrides["l2"]["slot_bytes"] = 8 * PAGE_BYTES
    writer, reader = HostMemory(8, page_size=32), HostMemory(8, page_size=32)
    writer.kv_buffer.copy_(torch.randn(writer.kv_buffer.shape))
    keys = keys_of("compressed", 8)
    sidecar = ForkedSidecar(tmp_path, overrides)
    with Rank(settings(sidecar.socket), writer) as first:
        assert first.set(keys, range(8)) == [True] * 8
    assert sidecar.stop() == 0
    on_disk = b"".join(path.read_bytes() for path in sorted(folder.rglob("*.kvseg")))
    assert on_disk.count(b"zstd-planes/2") >= 8
    assert writer.page(0) not in on_disk
    sidecar.start()
    with Rank(settings(sidecar.socket), reader) as second:
        assert second.get(keys, range(8)) == [True] * 8
    assert [reader.page(n) for n in range(8)] == [writer.page(n) for n in range(8)]
    assert sidecar.stop() == 0


def test_side_pools_have_separate_pages(sidecar: ForkedSidecar) -> None:
    kv, draft, states = HostMemory(8), HostMemory(8, page_size=2), Unaddressed(8)
    page_pools = PagePools(
        settings(sidecar.socket), config(), zero_copy=True, model="sides", revision=""
    )
    for pool, name in ((kv, "kv"), (draft, "draft"), (states, "mamba")):
        pool.fill(8)
        page_pools.add_host_pool(pool, name)
        page_pools.add_host_pool(pool, name)
    keys = keys_of("sides", 6)
    assert page_pools.set_addressed("kv", keys, kv.indices(range(6))) == [True] * 6
    assert page_pools.set_addressed("draft", keys[:5], draft.indices(range(5))) == [True] * 5
    some = [keys[1], keys[3], keys[5]]
    assert page_pools.set_addressed("mamba", some, states.indices([1, 3, 5])) == [True] * 3

    whole = page_pools.restorable_prefixes(keys, [])
    assert (whole.pages, whole.lengths) == (6, [1, 2, 3, 4, 5, 6])
    prefixes = page_pools.restorable_prefixes(
        keys, [("draft", "all_pages", 0), ("mamba", "trailing_pages", 1)]
    )
    assert prefixes.lengths == [2, 4]
    assert prefixes.by_pool == {"kv": 6, "draft": 5, "mamba": 4}
    assert page_pools.restorable_prefixes(keys, [("draft", "block_groups", 0)]).pages == 6, (
        "never truncates KV"
    )
    assert (
        page_pools.restorable_prefixes(keys_of("none", 3), [("mamba", "trailing_pages", 1)]).pages
        == 0
    )

    assert page_pools.get_addressed("draft", keys[:2], draft.indices([6, 7])) == [True] * 2
    assert [draft.page(6), draft.page(7)] == [draft.page(0), draft.page(1)]
    assert page_pools.get_addressed("mamba", [keys[3]], states.indices([7])) == [True]
    assert states.page(7) == states.page(3)
    was = states.page(0)
    assert page_pools.get_addressed("mamba", [keys[0]], states.indices([0])) == [False]
    assert states.page(0) == was
    page_pools.close()


class Unaddressed(HostMemory):
    """A pool without addresses for its layout, like SGLang's pool of states in some layouts."""

    def get_page_buffer_meta(self, indices: torch.Tensor) -> tuple[list[int], list[int]]:
        raise ValueError(f"Unsupported layout: {self.layout}")


def test_pages_without_addresses_need_the_generic_interface(sidecar: ForkedSidecar) -> None:
    with pytest.raises(ConfigError, match="omit interface_v1 in the extra config"):
        Rank(settings(sidecar.socket), Unaddressed(2))
    host = Unaddressed(2)
    host.fill(9)
    keys = keys_of("unaddressed", 1)
    with Rank(settings(sidecar.socket), host, zero_copy=False) as rank:
        assert rank.set(keys, [0]) == [True]
        assert rank.get(keys, [1]) == [True]
    assert host.page(1) == host.page(0)


def test_only_the_side_pools_of_an_index_space_count(sidecar: ForkedSidecar) -> None:
    anchor = HostMemory(4)
    anchor.kv_buffer = None  # type: ignore[assignment]
    page_pools = PagePools(
        settings(sidecar.socket), config(), zero_copy=True, model="a", revision=""
    )
    page_pools.add_host_pool(anchor, "kv")
    keys = keys_of("anchor", 3)
    assert page_pools.cached_prefix_len(keys) == 3
    assert page_pools.get_addressed("kv", keys, anchor.indices(range(3))) == [True] * 3
    page_pools.close()


def test_a_page_larger_than_a_slot_is_one_line_at_start(sidecar: ForkedSidecar) -> None:
    with pytest.raises(ConfigError, match="slot") as told:
        Rank(settings(sidecar.socket), HostMemory(2, page_size=2 * 4))
    assert "\n" not in str(told.value)


def test_clear_asks_the_sidecar_over_http(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    token = {"server": {"auth_tokens": {"secret": "team"}, "admin_auth_token": "boss"}}
    sidecar = ForkedSidecar(tmp_path, {**slots(64), **token})
    host = HostMemory(2)
    keys = keys_of("clear", 2)
    with Rank(settings(sidecar.socket, auth_token="secret"), host) as rank:
        assert rank.set(keys, [0, 1]) == [True, True]
        assert not rank.page_pools.clear()
        assert "set 'http' (and 'admin_auth_token') in the extra config" in caplog.text
        assert rank.cached_prefix_len(keys) == 2
    wrong = settings(sidecar.socket, auth_token="secret", http=sidecar.url, admin_auth_token="no")
    with Rank(wrong, host) as rank:
        assert not rank.page_pools.clear()
        assert rank.cached_prefix_len(keys) == 2
    right = settings(sidecar.socket, auth_token="secret", http=sidecar.url, admin_auth_token="boss")
    with Rank(right, host) as rank:
        assert rank.page_pools.clear()
        assert rank.cached_prefix_len(keys) == 0
    assert sidecar.stop() == 0


def test_an_embedded_store(tmp_path: Path) -> None:
    own = {"l2": "1MiB", "disk": str(tmp_path / "disk"), "disk_capacity": "64MiB"}
    host = HostMemory(8)
    host.fill(10)
    keys = keys_of("embedded", 4)
    with Rank(settings(embedded=own), host) as rank:
        assert rank.set(keys, range(4)) == [True] * 4
    with Rank(settings(embedded=own), host) as rank:
        assert rank.cached_prefix_len(keys) == 4, "on disk"
        assert rank.get(keys, range(4, 8)) == [True] * 4
        assert [host.page(n) for n in range(4, 8)] == [host.page(n) for n in range(4)]
        assert rank.page_pools.clear()
        assert rank.cached_prefix_len(keys) == 0
    with pytest.raises(ConfigError, match=r"unknown key 'embedded.dsk'; did you mean 'disk'\?"):
        Rank(settings(embedded={"dsk": "x"}), host)


SOME = [0, 1, 5, 6, 20, 39]
"""Indices of the stored pages, of forty."""


def test_pages_with_gaps_need_one_match(tmp_path: Path) -> None:
    sidecar = ForkedSidecar(tmp_path, merge(slots(64), disk(tmp_path / "disk")))
    namespace = Namespace(model="holes", layers=2, kv_heads=2, head_dim=64, block_tokens=4)
    client = kvstore.connect(sidecar.socket, namespace)
    copies = Copies(1)
    pool = PagePool(client, copies, GUARD)
    host = HostMemory(8)
    keys = keys_of("holes", 40)
    pages = HostPool(host, "kv").extents(host.indices(range(len(SOME))))
    assert pool.set([keys[n] for n in SOME], pages) == [True] * len(SOME)
    assert pool.contains(keys) == [n in SOME for n in range(40)]
    flush(sidecar)
    clear(sidecar, "l2")
    for first in (0, 2, 7):
        requests = client.stats()["requests"]
        assert pool.contains(keys[first:]) == [n in SOME for n in range(first, 40)]
        assert client.stats()["requests"] <= requests + 1
    pool.close()
    copies.close()
    assert sidecar.stop() == 0


class Network(RemoteTier):
    """Counts the calls of `contains`."""

    trips = 0

    def contains(self, keys: Sequence[Key]) -> list[bool]:
        self.trips += 1
        return super().contains(keys)


def test_a_remote_tier_is_queried_once_for_pages_with_gaps() -> None:
    namespace = Namespace(model="holes", layers=2, kv_heads=2, head_dim=64, block_tokens=4)
    tier = Network(1 << 20)
    with Store(Slab.create(64, PAGE_BYTES), [tier]) as store:
        copies = Copies(1)
        pool = PagePool(store.session(namespace), copies, GUARD)
        host = HostMemory(8)
        keys = keys_of("far", 40)
        pages = HostPool(host, "kv").extents(host.indices(range(len(SOME))))
        assert pool.set([keys[n] for n in SOME], pages) == [True] * len(SOME)
        assert store.flush(60)
        store.clear("l2")
        with store.manager.lock:
            store.manager.remote_locations.remove(0)
        tier.trips = 0
        assert pool.contains(keys) == [n in SOME for n in range(40)]
        assert tier.trips == 1
        pool.close()
        copies.close()
