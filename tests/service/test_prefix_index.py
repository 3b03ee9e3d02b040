"""The index of what is asked for, against plain sets; the ring of samples."""

from __future__ import annotations

from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from kvstore.blocks.key import Key
from kvstore.service.http.dashboard import quantile_s
from kvstore.service.prefix_index import MAX_RUN, MAX_WAITING, Chain, PrefixIndex
from kvstore.telemetry.history import MAX_POINTS, History, sample_of, thinned


def everybody(tenant: str) -> bool:
    return True


def ask(index: PrefixIndex, run: list[str], tenant: str = "t") -> None:
    index.asked(tenant, "n", chain(run))
    index.digest()


def chain(words: list[str]) -> list[bytes]:
    """Names as a chained hash gives them: each is of all words up to it."""
    return ["/".join(words[: i + 1]).encode() for i in range(len(words))]


def flat(chains: list[Chain]) -> list[Chain]:
    return [each for top in chains for each in [top, *flat(top.children)]]


def test_prompts_that_share_a_front_branch_after_it() -> None:
    index = PrefixIndex()
    for _ in range(3):
        ask(index, ["s", "y", "s", "a"])
    ask(index, ["s", "y", "s", "b", "c"])
    [top], more = index.tree(10, everybody)
    assert (len(top.keys), top.asks, top.depth, more) == (3, 4, 0, 0)
    assert [(len(each.keys), each.asks, each.depth) for each in top.children] == [
        (1, 3, 3),
        (2, 1, 3),
    ]
    last = top.children[1].keys[-1]
    assert index.run_to(last) == chain(["s", "y", "s", "b", "c"])


def test_the_rest_of_a_known_run_is_put_in_its_place() -> None:
    index = PrefixIndex()
    whole = chain(["a", "b", "c"])
    index.asked("t", "n", whole[1:])  # its front was in the engine already
    index.digest()
    assert len(index.tree(10, everybody)[0]) == 1
    index.asked("t", "n", whole)
    index.digest()
    assert index.run_to(Key("t", "n", whole[-1])) == whole


def test_tenants_are_apart() -> None:
    index = PrefixIndex()
    ask(index, ["a"], "one")
    ask(index, ["a"], "two")
    only, _ = index.tree(10, lambda tenant: tenant == "two")
    assert [each.keys[0].tenant for each in only] == ["two"]
    assert index.run_to(Key("three", "n", b"a")) == []


def test_what_is_shown_is_bounded_and_says_so() -> None:
    index = PrefixIndex()
    for number in range(30):
        ask(index, ["stem", str(number)])
        ask(index, [f"root {number}"])
    chains, more = index.tree(12, everybody)
    shown = flat(chains)
    assert len(shown) == 12
    assert sum(each.more for each in shown) + more + 12 == 30 + 1 + 30


def test_runs_that_nobody_takes_in_are_bounded_and_counted() -> None:
    index = PrefixIndex()
    for number in range(MAX_WAITING + 7):
        index.asked("t", "n", [b"%d" % number])
    index.digest()
    assert index.counts() == {"blocks": MAX_WAITING, "runs": MAX_WAITING, "skipped": 7}


def test_hashes_in_a_circle_end() -> None:
    index = PrefixIndex()
    for run in ([b"a", b"b", b"a"], [b"b", b"a", b"c"], [b"c", b"a"], [b"a", b"a"]):
        index.asked("t", "n", run)
    index.digest()
    assert len(index.run_to(Key("t", "n", b"c"))) <= 3
    assert len(flat(index.tree(10, everybody)[0])) <= 3


@settings(max_examples=60)
@given(
    st.lists(st.lists(st.sampled_from("abc"), min_size=1, max_size=5), max_size=40),
    st.integers(4, 20),
)
def test_against_a_plain_list(runs: list[list[str]], most: int) -> None:
    index = PrefixIndex(max_blocks=most)
    roomy = PrefixIndex()
    for run in runs:
        ask(index, run)
        ask(roomy, run)
    assert index.counts()["blocks"] <= most
    # What is remembered is whole from its root: the last asked for as far as there is room.
    for node in index._nodes.values():
        words = node.key.hash.decode().split("/")
        assert index.run_to(node.key) == chain(words)
    if runs and len(runs[-1]) <= most:
        assert index.run_to(Key("t", "n", chain(runs[-1])[-1])) == chain(runs[-1])
    # Every block once, asked for as often as runs went through it.
    asks: dict[bytes, int] = {}
    for run in runs:
        for name in chain(run):
            asks[name] = asks.get(name, 0) + 1
    seen = {k.hash: each.asks for each in flat(roomy.tree(999, everybody)[0]) for k in each.keys}
    assert seen == asks


def stats_at(asked: int) -> dict[str, Any]:
    users = [
        {"tenant": "a", "asked": asked, "hits": {"l2": asked // 2}},
        {"tenant": "b", "asked": 10, "hits": {"disk": 5}},
    ]
    return {
        "l2": {"slots_ready": 3, "slot_bytes": 100, "evictions": 1},
        "tiers": {"disk": {"bytes_used": 7, "queued_writes": 2, "evictions": 0}},
        "use": {"users": users},
    }


def test_samples_by_tenant() -> None:
    asked = iter(range(0, 100, 10))
    history = History(lambda: stats_at(next(asked)), lambda: None, samples=3, clock=lambda: 1.0)
    for _ in range(5):
        history.sample()
    columns = history.columns()
    assert columns["asked"] == [30, 40, 50]  # of everybody; the first two have gone
    assert columns["hits"] == {"l2": [10, 15, 20], "disk": [5, 5, 5]}
    assert columns["used"] == {"l2": [300] * 3, "disk": [7] * 3}
    assert history.columns("b")["asked"] == [10, 10, 10]
    assert history.columns("nobody")["hits"] == {"l2": [0] * 3, "disk": [0] * 3}


def test_an_empty_history() -> None:
    history = History(dict, lambda: None)
    assert history.columns()["time_s"] == []
    history.close()
    assert set(sample_of(stats_at(1), 2.0)) == {"time_s", "users", "used", "queued", "evictions"}


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


def test_a_run_longer_than_is_taken_does_not_wait_whole() -> None:
    index = PrefixIndex()
    index.asked("t", "n", [b"%d" % number for number in range(MAX_RUN + 500)])
    [(_, _, waiting)] = index._waiting
    assert len(waiting) == MAX_RUN
    index.digest()
    assert index.counts()["blocks"] == MAX_RUN


def test_a_sample_does_not_grow_with_routes() -> None:
    users = [
        {
            "tenant": f"t{number % 2}",
            "route": f"r{number}",
            "asked": 4,
            "hits": {"l2": 1, "disk": 2},
        }
        for number in range(100)
    ]
    stats = {
        "l2": {"slots_ready": 1, "slot_bytes": 8, "evictions": 0},
        "tiers": {},
        "use": {"users": users},
    }
    each = (200, {"l2": 50, "disk": 100})
    assert sample_of(stats, 1.0)["users"] == [("t0", *each), ("t1", *each)]
