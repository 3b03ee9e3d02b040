"""The lookup cache of the tier: one batch a step, answered later, without waiting."""

from __future__ import annotations

from tier_rig import MAX_WAIT_MS, LookupRig, block_of, keys_of

from kvstore.connectors.vllm.tier.lookups import KEYS_MAX, MISS_CACHE_S, SUFFIX_KEYS_MAX
from kvstore.interface import LookupStatus


def test_a_step_sends_its_keys_as_one_batch_and_answers_in_the_next() -> None:
    rig = LookupRig("match")
    keys = keys_of(5)
    for key in keys[:3]:
        rig.store.put(key, block_of(0))
    assert rig.look_up(keys) == [LookupStatus.PENDING] * 5
    assert [operation.hashes for operation in rig.store.operations] == [tuple(keys)]
    assert rig.next_step(keys) == [LookupStatus.HIT] * 3 + [LookupStatus.MISS] * 2
    assert len(rig.store.operations) == 1, "an answer is cached while its request lives"
    rig.lookups.finish_request("r")
    assert len(rig.lookups) == 0


def test_a_missing_answer_is_a_miss_after_the_timeout() -> None:
    rig = LookupRig()
    keys = keys_of(2)
    rig.look_up(keys)
    rig.clock.advance(MAX_WAIT_MS / 1e3 - 0.01)
    assert rig.next_step(keys) == [LookupStatus.PENDING] * 2
    rig.clock.advance(0.02)
    assert rig.next_step(keys) == [LookupStatus.MISS] * 2
    assert rig.lookups.counts["lookups_timed_out"] == 1


def test_a_window_looked_up_from_its_end_is_found_beyond_a_gap() -> None:
    rig = LookupRig("match")
    keys = keys_of(6)
    for key in keys[4:]:
        rig.store.put(key, block_of(0))
    rig.look_up(keys, backwards=True)
    assert rig.next_step(keys) == [LookupStatus.MISS] * 4 + [LookupStatus.HIT] * 2


def test_a_long_window_lookup_is_bounded() -> None:
    rig = LookupRig("match")
    keys = keys_of(SUFFIX_KEYS_MAX + 10)
    for key in keys:
        rig.store.put(key, block_of(0))
    rig.look_up(keys, backwards=True)
    assert len(rig.store.operations) == SUFFIX_KEYS_MAX
    assert rig.next_step(keys) == [LookupStatus.MISS] * 10 + [LookupStatus.HIT] * SUFFIX_KEYS_MAX


def test_a_key_that_could_not_be_loaded_stays_a_miss() -> None:
    rig = LookupRig("match")
    keys = keys_of(2)
    for key in keys:
        rig.store.put(key, block_of(0))
    rig.look_up(keys, "first")
    assert rig.next_step(keys, "first") == [LookupStatus.HIT] * 2
    rig.lookups.mark_missing([keys[1]])
    for _ in range(3):
        assert rig.next_step(keys, "first") == [LookupStatus.HIT, LookupStatus.MISS]
    assert rig.next_step(keys, "second") == [LookupStatus.HIT, LookupStatus.MISS]
    assert len(rig.store.operations) == 1


def test_keys_of_an_ended_request_are_sent_for_the_others() -> None:
    rig = LookupRig("match")
    keys = keys_of(2)
    rig.store.put(keys[0], block_of(0))
    rig.lookups.lookup(keys[0], "first", 0, 1)
    rig.lookups.lookup(keys[0], "second", 0, 1)
    rig.lookups.lookup(keys[1], "first", 0, 2)
    rig.lookups.finish_request("first")
    assert rig.next_step([keys[0]], "second") == [LookupStatus.HIT]
    rig.lookups.finish_request("second")
    assert len(rig.lookups) == 0


def test_a_late_answer_does_not_revive_a_failed_key() -> None:
    rig = LookupRig()
    (key,) = keys = keys_of(1)
    rig.store.put(key, block_of(0))
    rig.look_up(keys, "first")
    rig.lookups.finish_request("first")
    rig.look_up(keys, "second")
    earlier, later = rig.store.operations
    rig.store.answer(later)
    assert rig.next_step(keys, "second") == [LookupStatus.HIT]
    rig.lookups.mark_missing(keys)
    rig.store.answer(earlier)
    assert rig.next_step(keys, "second") == [LookupStatus.MISS]


def test_a_store_that_raises_is_a_miss() -> None:
    rig = LookupRig()
    rig.store.raising = True
    rig.look_up(keys_of(2))
    assert rig.next_step(keys_of(2)) == [LookupStatus.MISS] * 2


def test_the_number_of_keys_is_bounded() -> None:
    rig = LookupRig()
    for number in range(KEYS_MAX):
        rig.lookups.lookup(number.to_bytes(36, "big"), "r", 0, number)
    assert rig.lookups.lookup(bytes(36) + b"x", "r", 0, 1) is LookupStatus.MISS


def test_a_later_request_looks_a_miss_up_again_and_the_first_keeps_it() -> None:
    """Overlapping requests could otherwise keep a MISS cached forever."""
    rig = LookupRig("match")
    keys = keys_of(2)
    rig.look_up(keys, "first")
    assert rig.next_step(keys, "first") == [LookupStatus.MISS] * 2
    rig.store.put(keys[0], block_of(1))
    assert rig.next_step(keys, "soon") == [LookupStatus.MISS] * 2
    rig.clock.advance(MISS_CACHE_S)
    assert rig.next_step(keys, "soon") == [LookupStatus.MISS] * 2, "it got MISS before"
    assert rig.next_step(keys, "later") == [LookupStatus.PENDING] * 2
    assert rig.next_step(keys, "later") == [LookupStatus.HIT, LookupStatus.MISS]
    assert rig.next_step(keys, "first") == rig.next_step(keys, "soon") == [LookupStatus.MISS] * 2
    assert len(rig.store.operations) == 2
    for name in ("first", "soon", "later"):
        rig.lookups.finish_request(name)
    assert len(rig.lookups) == 0


def test_a_request_loads_a_failing_key_at_most_once() -> None:
    rig = LookupRig("match")
    (key,) = keys = keys_of(1)
    rig.store.put(key, block_of(0))
    for number in range(3):
        assert rig.next_step(keys, f"r{number}") == [LookupStatus.PENDING]
        assert rig.next_step(keys, f"r{number}") == [LookupStatus.HIT]
        rig.clock.advance(2 * MISS_CACHE_S)
        rig.lookups.mark_missing(keys)
        assert rig.next_step(keys, f"soon-{number}") == [LookupStatus.MISS], "just lost"
        rig.clock.advance(2 * MISS_CACHE_S)
        for _ in range(3):
            assert rig.next_step(keys, f"r{number}") == [LookupStatus.MISS]


def test_a_block_evicted_from_the_pool_is_a_miss_for_the_request_that_loaded_it() -> None:
    rig = LookupRig("match")
    keys = keys_of(3)
    for key in keys:
        rig.store.put(key, block_of(0))
    rig.look_up(keys, "first")
    assert rig.next_step(keys, "first") == [LookupStatus.HIT] * 3
    assert rig.next_step(keys[2:], "first") == [LookupStatus.HIT], (
        "the pool had no room, but may have room by now"
    )
    rig.lookups.end_load("first")
    for _ in range(2):
        assert rig.next_step(keys[:1], "first") == [LookupStatus.MISS]
    assert rig.next_step(keys[2:], "first") == [LookupStatus.MISS], (
        "it would evict the loaded blocks"
    )
    assert rig.next_step(keys, "second") == [LookupStatus.HIT] * 3
    assert rig.lookups.counts["requests_truncated"] == 1
    rig.lookups.preempt_request("first")
    assert rig.next_step(keys, "first") == [LookupStatus.HIT] * 3
    for name in ("first", "second"):
        rig.lookups.finish_request(name)
    rig.lookups.end_load("first")
    rig.look_up(keys, "first")
    assert rig.next_step(keys, "first") == rig.next_step(keys, "first") == [LookupStatus.HIT] * 3


def test_after_a_reset_old_keys_are_misses_and_late_answers_are_ignored() -> None:
    rig = LookupRig()
    old, sent, new = keys_of(3)
    for key in (old, sent, new):
        rig.store.put(key, block_of(0))
    rig.look_up([old], "r")
    rig.store.answer(rig.store.operations[0])
    assert rig.next_step([old], "r") == [LookupStatus.HIT]
    rig.look_up([sent], "r")
    rig.lookups.lookup(new, "r", 0, 1)
    rig.guarded.start_epoch()
    rig.lookups.mark_all_missing()
    assert rig.next_step([old, sent, new], "r") == [LookupStatus.MISS] * 3
    assert len(rig.store.operations) == 2, "unsent keys are not sent"
    rig.clock.advance(0.9 * MAX_WAIT_MS / 1e3)
    rig.lookups.finish_request("r")
    rig.look_up([sent], "later")
    rig.store.answer(rig.store.operations[1])
    assert rig.next_step([sent], "later") == [LookupStatus.PENDING], "an answer for the old hash"
    rig.store.answer(rig.store.operations[-1])
    assert rig.next_step([sent], "later") == [LookupStatus.MISS], "it has another hash by now"
