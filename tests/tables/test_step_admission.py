"""The pure machines of a worker in mode ps: which steps go to the ps and when, and what no step has consumed."""

from __future__ import annotations

from typing import Any, cast

import pytest

from everstep.config.consistency import parse_consistency
from everstep.ids import Incarnation, LeaseNo, ShardKey, Slot
from everstep.model.shard import Lease
from everstep.model.step_schedule import BatchShare, ComputedShare, StepSchedule
from everstep.tables.batches_in_hand import BatchesInHand
from everstep.tables.computed_step import ComputedStep, StepPayload
from everstep.tables.step_admission import AdmittedStep, LateStep, StepAdmission
from everstep.tables.worker_protocol import RangeWork

ONE = Incarnation(1)
ME, OTHER = Slot(0), Slot(1)
LEASE = Lease(LeaseNo(1), ShardKey(0), 0, 1000)
GRADIENTS = cast(StepPayload, object())  # the machine looks only whether there are any


def work(lo: int, hi: int) -> RangeWork:
    return RangeWork(LEASE, lo, hi, {}, 0)


def step(lo: int, hi: int, payload: StepPayload | None = GRADIENTS, skipped: bool = False) -> ComputedStep:
    learnt = payload is not None
    return ComputedStep(((work(lo, hi), learnt),), payload, (hi - lo) * learnt, skipped)


def admission(text: str, batch: int = 8, largest: int = 0) -> StepAdmission:
    made = StepAdmission(parse_consistency(text), ME, ONE, BatchesInHand())
    made.loader_batch, made.largest_batch = batch, largest
    return made


def schedule(
    number: int, order: int, parts: tuple[ComputedShare, ...] = (), batch_shares: tuple[BatchShare, ...] = ()
) -> StepSchedule:
    return StepSchedule(ONE, order, number, parts, batch_shares)


def begin(made: StepAdmission, lo: int, hi: int) -> None:
    assert made.gate is not None and made.gate.may_begin()
    made.gate.begin(work(lo, hi))


# ---------------------------------------------------------------- batches in hand


def test_what_no_step_has_consumed_is_counted_until_it_is_taken() -> None:
    hand = BatchesInHand()
    hand.take(work(0, 8))
    left = hand.take_left()
    assert left == work(0, 8) and hand.left is None and hand.samples == 0
    hand.keep(work(0, 8), learnt=True)
    hand.take(work(8, 12))
    assert (hand.kept, hand.learnt, hand.samples, hand.works()) == (True, True, 12, [work(0, 8)])
    assert hand.take_kept() == [(work(0, 8), True)]
    assert (hand.kept, hand.samples) == (False, 4)


def test_batches_whose_gradients_are_gone_are_consumed_without_being_learnt_from() -> None:
    hand = BatchesInHand()
    hand.keep(work(0, 8), learnt=True)
    hand.keep(work(8, 16), learnt=True)
    hand.leave_out()
    hand.keep(work(16, 24), learnt=True)
    assert hand.learnt
    assert hand.take_kept() == [(work(0, 8), False), (work(8, 16), False), (work(16, 24), True)]


# ---------------------------------------------------------------- async, bounded


@pytest.mark.parametrize("text", ["async", "bounded:2"])
def test_without_common_steps_each_step_goes_at_once(text: str) -> None:
    made = admission(text)
    assert made.ready(step(0, 8)) == (AdmittedStep(step(0, 8)),)
    assert not made.open and not made.planned and made.next_batch() == 8
    assert (made.gate is None) == (text == "async")
    assert made.due() is None or text != "async"


# ---------------------------------------------------------------- sync


def test_a_part_waits_for_its_verdict_and_is_weighed_by_it() -> None:
    made = admission("sync")
    assert made.schedule(schedule(0, 0)) == ()
    begin(made, 0, 8)
    assert made.ready(step(0, 8)) == () and made.judging
    said = made.due()
    assert said is not None and (said.state, said.step, said.samples) == ("ready", 0, 8)
    parts = (ComputedShare(ME, ONE, 8), ComputedShare(OTHER, ONE, 24))
    assert made.schedule(schedule(0, 1, parts)) == (AdmittedStep(step(0, 8), 0.25, 0),)
    assert not made.judging and made.schedule(schedule(0, 1, parts)) == ()


def test_a_part_that_the_master_has_not_named_is_late() -> None:
    made = admission("sync")
    made.schedule(schedule(0, 0))
    begin(made, 0, 8)
    made.ready(step(0, 8))
    assert made.schedule(schedule(0, 1, (ComputedShare(OTHER, ONE, 8),))) == (LateStep(step(0, 8)),)
    assert not made.judging


def test_a_planned_part_is_several_batches_and_one_verdict() -> None:
    made = admission("sync")
    made.schedule(schedule(0, 0, batch_shares=(BatchShare(ME, 20, 3),)))
    assert made.size() == 7 and made.planned  # three batches as alike as they can be
    begin(made, 0, 7)
    assert made.ready(step(0, 7)) == () and made.open
    assert made.size() == 7
    begin(made, 7, 14)
    made.ready(step(7, 14))
    assert made.next_batch() == 6 and made.share(7) == 7 / 20
    begin(made, 14, 20)
    assert made.ready(step(14, 20)) == () and made.judging
    found = made.schedule(schedule(0, 1, (ComputedShare(ME, ONE, 20),)))
    assert [(f.step.samples, f.weight, f.number) for f in cast(Any, found)] == [(7, 1.0, 0), (7, 1.0, 0), (6, 1.0, 0)]


def test_a_batch_that_does_not_fit_is_taken_in_passes_and_a_part_may_stay_smaller() -> None:
    made = admission("sync", batch=8, largest=3)
    made.schedule(schedule(0, 0))
    assert made.one_pass == 3 and made.size() == 3
    begin(made, 0, 3)
    made.ready(step(0, 3))
    assert made.next_batch() == 3 and made.open
    assert made.close() == () and made.judging and not made.open
    (found,) = made.schedule(schedule(0, 1, (ComputedShare(ME, ONE, 3),)))
    assert isinstance(found, AdmittedStep) and found.weight == 8 / 3  # it was weighed as 3 of 8 before


def test_what_the_script_has_in_hand_counts_for_the_size_and_its_own_accumulation_rules() -> None:
    hand = BatchesInHand()
    made = StepAdmission(parse_consistency("sync"), ME, ONE, hand)
    made.loader_batch = 8
    made.schedule(schedule(0, 0, batch_shares=(BatchShare(ME, 20, 3),)))
    assert made.size() == 7
    hand.keep(work(0, 7), learnt=True)
    assert made.next_batch() == 7
    made.accumulates = True
    assert made.size() == 7  # in the middle of an accumulation nothing changes
    hand.take_kept()
    assert made.size() == 8 and not made.planned  # a script that accumulates decides itself


def test_steps_without_gradients_count_for_nothing() -> None:
    made = admission("sync")
    made.schedule(schedule(0, 0))
    begin(made, 0, 8)
    made.ready(step(0, 8, payload=None))
    said = made.due()
    assert said is not None and (said.state, said.samples) == ("ready", 0)
