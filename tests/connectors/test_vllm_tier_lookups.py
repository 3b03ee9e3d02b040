"""What the tier knows of keys: asked once a step, answered later, never waited for."""

from __future__ import annotations

from tier_rig import DEADLINE_MS, Asking, keys_of, unit

from kvstore.connectors.vllm.tier.lookups import KEYS_MAX, MISS_KEPT_S, SUFFIX_KEYS_MAX
from kvstore.interface import Answer


def test_a_step_asks_its_keys_as_one_run_and_answers_in_the_next() -> None:
    rig = Asking("match")
    keys = keys_of(5)
    for key in keys[:3]:
        rig.store.put(key, unit(0))
    assert rig.ask(keys) == [Answer.PENDING] * 5
    assert [ticket.hashes for ticket in rig.store.asked] == [tuple(keys)]
    assert rig.again(keys) == [Answer.HIT] * 3 + [Answer.MISS] * 2
    assert len(rig.store.asked) == 1, "a verdict is kept while its request lives"
    rig.lookups.request_finished("r")
    assert len(rig.lookups) == 0


def test_nobody_is_waited_for_and_no_answer_is_a_miss_in_the_end() -> None:
    rig = Asking()
    keys = keys_of(2)
    rig.ask(keys)
    rig.clock.advance(DEADLINE_MS / 1e3 - 0.01)
    assert rig.again(keys) == [Answer.PENDING] * 2
    rig.clock.advance(0.02)
    assert rig.again(keys) == [Answer.MISS] * 2
    assert rig.lookups.counts["lookups_past_deadline"] == 1


def test_a_window_looked_up_from_its_end_is_found_behind_a_gap() -> None:
    rig = Asking("match")
    keys = keys_of(6)
    for key in keys[4:]:
        rig.store.put(key, unit(0))
    rig.ask(keys, backwards=True)
    assert rig.again(keys) == [Answer.MISS] * 4 + [Answer.HIT] * 2


def test_a_long_window_lookup_is_bounded() -> None:
    rig = Asking("match")
    keys = keys_of(SUFFIX_KEYS_MAX + 10)
    for key in keys:
        rig.store.put(key, unit(0))
    rig.ask(keys, backwards=True)
    assert len(rig.store.asked) == SUFFIX_KEYS_MAX
    assert rig.again(keys) == [Answer.MISS] * 10 + [Answer.HIT] * SUFFIX_KEYS_MAX


def test_a_key_that_could_not_be_loaded_is_a_miss_at_once_and_stays_one() -> None:
    rig = Asking("match")
    keys = keys_of(2)
    for key in keys:
        rig.store.put(key, unit(0))
    rig.ask(keys, "first")
    assert rig.again(keys, "first") == [Answer.HIT] * 2
    rig.lookups.forget([keys[1]])
    for _ in range(3):
        assert rig.again(keys, "first") == [Answer.HIT, Answer.MISS]
    assert rig.again(keys, "second") == [Answer.HIT, Answer.MISS]
    assert len(rig.store.asked) == 1


def test_a_request_that_ends_before_its_question_leaves_it_to_the_others() -> None:
    rig = Asking("match")
    keys = keys_of(2)
    rig.store.put(keys[0], unit(0))
    rig.lookups.lookup(keys[0], "first", 0, 1)
    rig.lookups.lookup(keys[0], "second", 0, 1)
    rig.lookups.lookup(keys[1], "first", 0, 2)
    rig.lookups.request_finished("first")
    assert rig.again([keys[0]], "second") == [Answer.HIT]
    rig.lookups.request_finished("second")
    assert len(rig.lookups) == 0


def test_a_late_answer_to_an_earlier_question_does_not_revive_a_key_that_failed() -> None:
    rig = Asking()
    (key,) = keys = keys_of(1)
    rig.store.put(key, unit(0))
    rig.ask(keys, "first")
    rig.lookups.request_finished("first")
    rig.ask(keys, "second")
    earlier, later = rig.store.asked
    rig.store.answer(later)
    assert rig.again(keys, "second") == [Answer.HIT]
    rig.lookups.forget(keys)
    rig.store.answer(earlier)
    assert rig.again(keys, "second") == [Answer.MISS]


def test_a_store_that_raises_is_a_miss() -> None:
    rig = Asking()
    rig.store.raising = True
    rig.ask(keys_of(2))
    assert rig.again(keys_of(2)) == [Answer.MISS] * 2


def test_known_keys_are_bounded() -> None:
    rig = Asking()
    for number in range(KEYS_MAX):
        rig.lookups.lookup(number.to_bytes(36, "big"), "r", 0, number)
    assert rig.lookups.lookup(bytes(36) + b"x", "r", 0, 1) is Answer.MISS


def test_a_later_request_asks_again_for_what_was_missing_and_the_first_goes_on_without() -> None:
    """Requests that overlap without end would else keep a MISS for ever."""
    rig = Asking("match")
    keys = keys_of(2)
    rig.ask(keys, "first")
    assert rig.again(keys, "first") == [Answer.MISS] * 2
    rig.store.put(keys[0], unit(1))
    assert rig.again(keys, "soon") == [Answer.MISS] * 2
    rig.clock.advance(MISS_KEPT_S)
    assert rig.again(keys, "soon") == [Answer.MISS] * 2, "it was told so before"
    assert rig.again(keys, "later") == [Answer.PENDING] * 2
    assert rig.again(keys, "later") == [Answer.HIT, Answer.MISS]
    assert rig.again(keys, "first") == rig.again(keys, "soon") == [Answer.MISS] * 2
    assert len(rig.store.asked) == 2
    for name in ("first", "soon", "later"):
        rig.lookups.request_finished(name)
    assert len(rig.lookups) == 0


def test_a_key_that_cannot_be_loaded_is_tried_at_most_once_by_a_request() -> None:
    rig = Asking("match")
    (key,) = keys = keys_of(1)
    rig.store.put(key, unit(0))
    for number in range(3):
        assert rig.again(keys, f"r{number}") == [Answer.PENDING]
        assert rig.again(keys, f"r{number}") == [Answer.HIT]
        rig.clock.advance(2 * MISS_KEPT_S)
        rig.lookups.forget(keys)
        assert rig.again(keys, f"soon-{number}") == [Answer.MISS], "just lost"
        rig.clock.advance(2 * MISS_KEPT_S)
        for _ in range(3):
            assert rig.again(keys, f"r{number}") == [Answer.MISS]


def test_what_the_pool_dropped_again_is_no_hit_for_the_request_that_loaded_it() -> None:
    rig = Asking("match")
    keys = keys_of(3)
    for key in keys:
        rig.store.put(key, unit(0))
    rig.ask(keys, "first")
    assert rig.again(keys, "first") == [Answer.HIT] * 3
    assert rig.again(keys[2:], "first") == [Answer.HIT], "the pool had no room, and may have by now"
    rig.lookups.load_ended("first")
    for _ in range(2):
        assert rig.again(keys[:1], "first") == [Answer.MISS]
    assert rig.again(keys[2:], "first") == [Answer.MISS], "it would drive out what is loaded"
    assert rig.again(keys, "second") == [Answer.HIT] * 3
    assert rig.lookups.counts["requests_cut"] == 1
    rig.lookups.preempted("first")
    assert rig.again(keys, "first") == [Answer.HIT] * 3
    for name in ("first", "second"):
        rig.lookups.request_finished(name)
    rig.lookups.load_ended("first")
    rig.ask(keys, "first")
    assert rig.again(keys, "first") == rig.again(keys, "first") == [Answer.HIT] * 3


def test_after_a_reset_nothing_known_before_is_found_and_late_answers_do_not_count() -> None:
    rig = Asking()
    old, asked, new = keys_of(3)
    for key in (old, asked, new):
        rig.store.put(key, unit(0))
    rig.ask([old], "r")
    rig.store.answer(rig.store.asked[0])
    assert rig.again([old], "r") == [Answer.HIT]
    rig.ask([asked], "r")
    rig.lookups.lookup(new, "r", 0, 1)
    rig.guarded.forget()
    rig.lookups.forget_all()
    assert rig.again([old, asked, new], "r") == [Answer.MISS] * 3
    assert len(rig.store.asked) == 2, "what was still to be asked is not"
    rig.clock.advance(0.9 * DEADLINE_MS / 1e3)
    rig.lookups.request_finished("r")
    rig.ask([asked], "later")
    rig.store.answer(rig.store.asked[1])
    assert rig.again([asked], "later") == [Answer.PENDING], "an answer to the old name"
    rig.store.answer(rig.store.asked[-1])
    assert rig.again([asked], "later") == [Answer.MISS], "it has another name by now"
