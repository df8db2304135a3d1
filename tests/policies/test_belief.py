"""Which changes of somebody's pace are believed, and when."""

from __future__ import annotations

from everstep.ids import Incarnation, Slot
from everstep.policies.stragglers.change_detector import Changes, Key, review

KEYS: list[Key] = [(Slot(i), Incarnation(1)) for i in range(4)]
EVEN = dict.fromkeys(KEYS, 64)
UNEVEN = dict(zip(KEYS, (79, 79, 79, 19), strict=True))


def look(
    changes: Changes, usual: list[float], now: list[float], shares: dict[Key, int] = EVEN
) -> tuple[Changes, set[int], set[int]]:
    expected = {key: (s, s) for key, s in zip(KEYS, usual, strict=True)}
    changes, believed, doubted = review(changes, expected, dict(zip(KEYS, now, strict=True)), shares)
    return changes, {slot for slot, _ in believed}, {slot for slot, _ in doubted}


def test_who_gets_slow_is_believed_at_once_until_hiccups_were_seen_and_then_at_the_second_look() -> None:
    changes, calm, slow = Changes(), [2.0] * 4, [2.0, 2.0, 2.0, 8.0]
    changes, believed, doubted = look(changes, calm, slow)
    assert (believed, doubted) == ({3}, set()), "as likely as not that it lasts, and a window of it costs three windows"
    for _ in range(16):
        changes, believed, _ = look(changes, slow, calm, UNEVEN)
        assert believed == {3}, "nothing looks faster than it is"
        changes, *_ = look(changes, calm, calm)
        changes, *_ = look(changes, calm, slow)
    changes, *_ = look(changes, slow, calm, UNEVEN)
    changes, *_ = look(changes, calm, calm)
    changes, believed, doubted = look(changes, calm, slow)
    assert (believed, doubted) == (set(), {3}), "it has always passed"
    changes, believed, doubted = look(changes, calm, slow)
    assert (believed, doubted) == ({3}, set()), "it lasts"


def test_what_lasts_mostly_is_believed_at_once_again() -> None:
    changes = Changes(slower=(1.0, 20.0))
    calm, slow = [2.0] * 4, [2.0, 2.0, 2.0, 8.0]
    for _ in range(20):
        changes, _, doubted = look(changes, calm, slow)
        if not doubted:
            return
        changes, believed, _ = look(changes, calm, slow)
        assert believed == {3}
        changes, *_ = look(changes, slow, calm, UNEVEN)
        changes, *_ = look(changes, calm, calm)
    raise AssertionError(f"it lasted each time: {changes}")


def test_readings_that_are_alike_change_nothing_and_whoever_has_none_is_left_as_it_was() -> None:
    changes, believed, doubted = look(Changes(), [2.0] * 4, [2.2, 1.8, 2.0, 2.5])
    assert not believed and not doubted and changes == Changes()
    changes, *_ = look(Changes(slower=(1.0, 20.0)), [2.0] * 4, [2.0, 2.0, 2.0, 8.0])
    expected = dict.fromkeys(KEYS, (2.0, 2.0))
    mute, *_ = review(changes, expected, {KEYS[0]: 2.0}, EVEN)
    assert mute.open == changes.open
    gone, *_ = review(changes, {KEYS[0]: (2.0, 2.0)}, {KEYS[0]: 2.0}, EVEN)
    assert not gone.open


def test_that_a_step_under_way_takes_longer_still_is_no_outcome() -> None:
    usual, shares = dict.fromkeys(KEYS, (2.0, 2.0)), EVEN
    changes, believed, _ = review(Changes(), usual, {KEYS[3]: 6.0}, shares, {KEYS[3]})
    assert believed == {KEYS[3]}
    longer, *_ = review(changes, {**usual, KEYS[3]: (6.0, 6.0)}, {KEYS[3]: 9.0}, shares, {KEYS[3]})
    assert longer.slower == changes.slower and longer.open == {KEYS[3]: (9.0, 6.0)}
    alike, *_ = review(longer, {**usual, KEYS[3]: (9.0, 9.0)}, {KEYS[3]: 9.5}, shares, {KEYS[3]})
    assert alike == longer
    passed, *_ = review(alike, {**usual, KEYS[3]: (9.0, 9.0)}, {KEYS[3]: 2.0}, shares)
    assert passed.slower[1] > changes.slower[1] and passed.slower[0] <= changes.slower[0]
