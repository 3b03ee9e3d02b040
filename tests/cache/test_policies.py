"""Write policies and the LRU policy, and the names of both kinds."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstore.blocks.key import Key
from kvstore.cache.eviction import check_eviction, eviction_policy
from kvstore.cache.write_policy import WRITE_POLICIES, write_policy
from kvstore.errors import ConfigError

KEYS = [Key("t", "n", bytes([n])) for n in range(6)]


def test_names() -> None:
    assert [write_policy(name).name for name in WRITE_POLICIES] == list(WRITE_POLICIES)
    assert eviction_policy("lru", 6).name == "lru"


@pytest.mark.parametrize(
    ("make", "wrong", "right"),
    [(write_policy, "writeback", "write_back"), (check_eviction, "LRU", "lru")],
)
def test_an_unknown_name_is_corrected(make: object, wrong: str, right: str) -> None:
    assert callable(make)
    with pytest.raises(ConfigError) as caught:
        make(wrong)
    assert repr(wrong) in str(caught.value)
    assert repr(right) in str(caught.value)


def test_each_write_policy_writes_at_its_own_moment() -> None:
    moments = {
        name: (policy.on_commit, policy.on_hit(2), policy.on_hit(3), policy.on_evict)
        for name in WRITE_POLICIES
        for policy in [write_policy(name, selective_hits=3)]
    }
    assert moments == {
        "write_through": (True, False, False, False),
        "selective": (False, False, True, False),
        "write_back": (False, False, False, True),
    }
    with pytest.raises(ConfigError):
        write_policy("selective", selective_hits=0)


@given(st.lists(st.tuples(st.sampled_from("itr"), st.sampled_from(KEYS)), max_size=60))
def test_lru_yields_the_least_recently_used_first(events: list[tuple[str, Key]]) -> None:
    policy = eviction_policy("lru", 6)
    order: list[Key] = []
    for event, key in events:
        if event == "i" and key not in order:
            policy.on_insert(key)
            order.append(key)
        elif event == "t" and key in order:
            policy.on_access(key)
            order.remove(key)
            order.append(key)
        elif event == "r" and key in order:
            policy.on_remove(key)
            order.remove(key)
        assert list(policy.eviction_order()) == order
