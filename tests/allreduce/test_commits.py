"""Committed steps on their way to the journal."""

from __future__ import annotations

from everstep.allreduce.commits import Commits, merge
from everstep.model.group import Committed


def step(number: int, generation: int = 1, epoch: int = 0, skipped: bool = False) -> Committed:
    lo, hi = 10 * number, 10 * number + 10
    return Committed(generation, number, number, 0, epoch, lo, hi, ((lo, hi),) if skipped else (), number)


def commits(first: int, last: int) -> Commits:
    c = Commits()
    c.begin(first)
    for number in range(first, last + 1):
        c.done(step(number))
    return c


def test_consecutive_steps_become_one_range() -> None:
    ranges: list[Committed] = []
    for committed in (step(0), step(1, skipped=True), step(2), step(3, generation=2), step(4, generation=2, epoch=1)):
        merge(ranges, committed)
    assert [(r.first, r.last, r.lo, r.hi, r.skipped, r.digest) for r in ranges] == [
        (0, 2, 0, 30, ((10, 20),), 2),
        (3, 3, 30, 40, (), 3),
        (4, 4, 40, 50, (), 4),
    ]


def test_only_what_everybody_has_is_told() -> None:
    c = commits(0, 5)
    assert c.to_log() == [] and c.to_tell() == ()
    assert c.settle(5)
    assert not c.settle(5)
    assert [(r.first, r.last) for r in c.to_log()] == [(0, 4)]
    assert [(r.first, r.last) for r in c.to_tell()] == [(0, 4)]


def test_it_is_told_until_it_is_confirmed() -> None:
    c = commits(0, 9)
    c.settle(6)
    c.to_log()
    assert c.to_tell() == c.to_tell() != ()
    c.confirm(5)
    assert c.to_tell() == () and c.waiting == 0
    c.settle(10)
    c.to_log()
    assert [(r.first, r.last) for r in c.to_tell()] == [(6, 9)]
    c.confirm(3)  # an older answer
    assert c.confirmed == 5


def test_who_came_later_keeps_silent_while_that_would_leave_a_gap() -> None:
    c = Commits()
    c.begin(0)  # it cannot know what was told before it came
    c.done(step(40))
    c.settle(41)
    c.to_log()
    assert c.to_tell() == ()
    c.confirm(39)
    assert [(r.first, r.last) for r in c.to_tell()] == [(40, 40)]


def test_a_new_beginning_forgets_what_is_void() -> None:
    c = commits(0, 9)
    c.settle(10)
    c.to_log()
    c.begin(0)
    assert c.to_tell() == () and c.waiting == 0 and c.confirmed == -1


def test_nothing_is_told_across_a_gap() -> None:
    """Others went on without us, and we came back: step 3 is theirs to tell."""
    c = commits(0, 2)
    c.done(step(4, generation=3))
    assert c.settle(5)
    c.to_log()
    assert [(r.first, r.last) for r in c.to_tell()] == [(0, 2)]
    c.confirm(2)
    assert c.to_tell() == () and c.waiting == 1
    c.confirm(3)
    assert [(r.first, r.last) for r in c.to_tell()] == [(4, 4)]


def test_a_step_says_in_which_later_generation_everybody_was_known_to_have_it() -> None:
    """Simulator, mix hybrid, seed 16311: a leaver was cut off in the step, and only the group without it had that."""
    c = Commits()
    for number in range(4):
        c.done(step(number, generation=1))
    c.settle(2, generation=1)
    c.settle(4, generation=3)
    told = c.to_log()
    assert [(r.first, r.last, r.generation, r.agreed) for r in told] == [(0, 1, 1, 0), (2, 3, 1, 3)]
