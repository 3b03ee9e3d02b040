"""The index of looked-up prefixes, against plain sets; the ring of samples."""

from __future__ import annotations

from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from kvstore.blocks.key import Key
from kvstore.service.http.dashboard import quantile_s
from kvstore.service.http.prefix_index import MAX_PREFIX_BLOCKS, MAX_WAITING, Chain, PrefixIndex
from kvstore.telemetry.history import MAX_POINTS, History, sample_of, thinned


def every_tenant(tenant: str) -> bool:
    return True


def look_up(index: PrefixIndex, words: list[str], tenant: str = "t") -> None:
    index.record_lookup(tenant, "n", chain(words))
    index.process_lookups()


def chain(words: list[str]) -> list[bytes]:
    """Names like chained hashes: each covers all words up to it."""
    return ["/".join(words[: i + 1]).encode() for i in range(len(words))]


def flat(chains: list[Chain]) -> list[Chain]:
    return [each for top in chains for each in [top, *flat(top.children)]]


def test_prompts_branch_after_their_common_front() -> None:
    index = PrefixIndex()
    for _ in range(3):
        look_up(index, ["s", "y", "s", "a"])
    look_up(index, ["s", "y", "s", "b", "c"])
    [top], more = index.tree(10, every_tenant)
    assert (len(top.keys), top.lookups, top.depth, more) == (3, 4, 0, 0)
    assert [(len(each.keys), each.lookups, each.depth) for each in top.children] == [
        (1, 3, 3),
        (2, 1, 3),
    ]
    last = top.children[1].keys[-1]
    assert index.prefix_to(last) == chain(["s", "y", "s", "b", "c"])


def test_the_rest_of_a_known_prefix_gets_its_place() -> None:
    index = PrefixIndex()
    whole = chain(["a", "b", "c"])
    index.record_lookup("t", "n", whole[1:])  # the engine already had its front
    index.process_lookups()
    assert len(index.tree(10, every_tenant)[0]) == 1
    index.record_lookup("t", "n", whole)
    index.process_lookups()
    assert index.prefix_to(Key("t", "n", whole[-1])) == whole


def test_tenants_are_separate() -> None:
    index = PrefixIndex()
    look_up(index, ["a"], "one")
    look_up(index, ["a"], "two")
    only, _ = index.tree(10, lambda tenant: tenant == "two")
    assert [each.keys[0].tenant for each in only] == ["two"]
    assert index.prefix_to(Key("three", "n", b"a")) == []


def test_the_tree_is_bounded_and_counts_the_rest() -> None:
    index = PrefixIndex()
    for number in range(30):
        look_up(index, ["stem", str(number)])
        look_up(index, [f"root {number}"])
    chains, more = index.tree(12, every_tenant)
    shown = flat(chains)
    assert len(shown) == 12
    assert sum(each.more for each in shown) + more + 12 == 30 + 1 + 30


def test_queued_lookups_are_bounded_and_counted() -> None:
    index = PrefixIndex()
    for number in range(MAX_WAITING + 7):
        index.record_lookup("t", "n", [b"%d" % number])
    index.process_lookups()
    assert index.counts() == {"blocks": MAX_WAITING, "lookups": MAX_WAITING, "dropped": 7}


def test_a_cycle_of_hashes_ends() -> None:
    index = PrefixIndex()
    for run in ([b"a", b"b", b"a"], [b"b", b"a", b"c"], [b"c", b"a"], [b"a", b"a"]):
        index.record_lookup("t", "n", run)
    index.process_lookups()
    assert len(index.prefix_to(Key("t", "n", b"c"))) <= 3
    assert len(flat(index.tree(10, every_tenant)[0])) <= 3


@settings(max_examples=60)
@given(
    st.lists(st.lists(st.sampled_from("abc"), min_size=1, max_size=5), max_size=40),
    st.integers(4, 20),
)
def test_against_a_plain_list(runs: list[list[str]], most: int) -> None:
    index = PrefixIndex(max_blocks=most)
    roomy = PrefixIndex()
    for run in runs:
        look_up(index, run)
        look_up(roomy, run)
    assert index.counts()["blocks"] <= most
    # Every prefix is complete from its root, and the latest lookup is kept if it fits.
    for node in index._nodes.values():
        words = node.key.hash.decode().split("/")
        assert index.prefix_to(node.key) == chain(words)
    if runs and len(runs[-1]) <= most:
        assert index.prefix_to(Key("t", "n", chain(runs[-1])[-1])) == chain(runs[-1])
    # Every block is listed once, with the number of lookups that contained it.
    lookups: dict[bytes, int] = {}
    for run in runs:
        for name in chain(run):
            lookups[name] = lookups.get(name, 0) + 1
    seen = {
        k.hash: each.lookups for each in flat(roomy.tree(999, every_tenant)[0]) for k in each.keys
    }
    assert seen == lookups


def stats_at(tokens: int) -> dict[str, Any]:
    users = [
        {"tenant": "a", "lookup_tokens": tokens, "hit_tokens": {"l2": tokens // 2}},
        {"tenant": "b", "lookup_tokens": 10, "hit_tokens": {"disk": 5}},
    ]
    return {
        "l2": {"slots_ready": 3, "slot_bytes": 100, "evictions": 1},
        "tiers": {"disk": {"bytes_used": 7, "queued_writes": 2, "evictions": 0}},
        "usage": {"users": users},
    }


def test_samples_by_tenant() -> None:
    tokens = iter(range(0, 100, 10))
    history = History(lambda: stats_at(next(tokens)), lambda: None, samples=3, clock=lambda: 1.0)
    for _ in range(5):
        history.sample()
    columns = history.columns()
    assert columns["lookup_tokens"] == [
        30,
        40,
        50,
    ]  # of all tenants; the first two samples were dropped
    assert columns["hit_tokens"] == {"l2": [10, 15, 20], "disk": [5, 5, 5]}
    assert columns["used_bytes"] == {"l2": [300] * 3, "disk": [7] * 3}
    assert history.columns("b")["lookup_tokens"] == [10, 10, 10]
    assert history.columns("nobody")["hit_tokens"] == {"l2": [0] * 3, "disk": [0] * 3}


def test_an_empty_history() -> None:
    history = History(dict, lambda: None)
    assert history.columns()["time_s"] == []
    history.close()
    assert set(sample_of(stats_at(1), 2.0)) == {
        "time_s",
        "tenants",
        "used_bytes",
        "queued_writes",
        "evictions",
    }


@given(st.integers(0, 2000))
def test_thinning_keeps_the_last(count: int) -> None:
    kept = thinned(list(range(count)), MAX_POINTS)
    assert len(kept) <= MAX_POINTS
    assert kept[-1:] == list(range(count))[-1:]
    assert kept == sorted(kept)


def test_quantiles() -> None:
    histogram = {"bounds": [1.0, 2.0, 4.0], "counts": [10, 10, 0, 0], "count": 20, "sum": 0}
    assert quantile_s(histogram, 0.5) == 1.0
    assert quantile_s(histogram, 0.75) == 1.5
    assert quantile_s({**histogram, "counts": [0, 0, 0, 5], "count": 5}, 0.5) == 4.0
    assert quantile_s({**histogram, "counts": [0, 0, 0, 0], "count": 0}, 0.5) == 0.0


def test_a_queued_lookup_keeps_only_its_front() -> None:
    index = PrefixIndex()
    index.record_lookup("t", "n", [b"%d" % number for number in range(MAX_PREFIX_BLOCKS + 500)])
    [(_, _, waiting)] = index._waiting
    assert len(waiting) == MAX_PREFIX_BLOCKS
    index.process_lookups()
    assert index.counts()["blocks"] == MAX_PREFIX_BLOCKS


def test_a_sample_does_not_grow_with_traffic_labels() -> None:
    users = [
        {
            "tenant": f"t{number % 2}",
            "traffic": f"r{number}",
            "lookup_tokens": 4,
            "hit_tokens": {"l2": 1, "disk": 2},
        }
        for number in range(100)
    ]
    stats = {
        "l2": {"slots_ready": 1, "slot_bytes": 8, "evictions": 0},
        "tiers": {},
        "usage": {"users": users},
    }
    each = (200, {"l2": 50, "disk": 100})
    assert sample_of(stats, 1.0)["tenants"] == [("t0", *each), ("t1", *each)]
