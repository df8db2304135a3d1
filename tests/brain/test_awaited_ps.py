"""After the loss of a ps, what it had is rebuilt first, and partitions move when the ps in its place has joined."""

from __future__ import annotations

import pytest
from test_machines_of_ps import Job

from everstep.brain import events as said
from everstep.brain.brain import Brain
from everstep.brain.concerns import ps_slots
from everstep.ids import Slot
from everstep.model.member import Role
from everstep.model.placement import MirrorKind, Placement
from everstep.policies.node_selection import HOME_NODE

LOST = Slot(1)


@pytest.fixture(autouse=True)
def _long(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each fact takes a tenth of a second here: a ps may be awaited through many of them."""
    monkeypatch.setattr(ps_slots, "AWAITED_S", 60.0)


def begun(awaits: bool = True, ps: int = 6, parity: str = "4+1") -> Job:
    job = Job(ps=ps, parity=parity, partitions=64, awaits=awaits, max_restarts=3)
    job.join(HOME_NODE, ps=8)
    assert job.brain.placement is not None and job.brain.partitions.at_rest()
    return job


def now(job: Job) -> Placement:
    assert job.brain.placement is not None
    return job.brain.placement


def kill(job: Job, slot: Slot = LOST) -> None:
    incarnation = job.brain.members.servers[slot].member.incarnation
    job.tell(said.ProcessExited(Role.PS, slot, incarnation, -9))


def rest(job: Job) -> None:
    """All that maps ask for is there; no ps that is starting says hello."""
    while job.work(now(job)):
        pass


def moves(job: Job) -> int:
    return sum(m.kind is MirrorKind.MOVE for m in now(job).mirrors)


def changes(job: Job) -> int:
    """Have all come to rest. Return how many changes of owners that took."""
    seen = 0
    while True:
        before = now(job)
        if job.starting:
            job.say_hello()
        elif not job.work(before):
            return seen
        seen += now(job).owner != before.owner


def test_what_is_lost_is_rebuilt_before_anything_else_is_made_or_moved() -> None:
    job = begun()
    before = now(job)
    kill(job)
    placement = now(job)
    lost = set(before.owned_by(LOST))
    assert lost and len(job.brain.state.protection.missing) == len(lost)
    assert {b for b, slot in enumerate(placement.owner) if slot != before.owner[b]} == lost
    assert {m.id for m in placement.mirrors} <= {m.id for m in before.mirrors}, "nothing is made yet"


def test_partitions_stay_until_the_ps_in_the_place_of_the_lost_one_has_joined() -> None:
    job = begun()
    before = now(job)
    kill(job)
    owner = now(job).owner
    rest(job)
    placement = now(job)
    assert not job.brain.state.protection.missing and placement.owner == owner and not moves(job)
    rows = {(m.members[0] // 4, m.row) for m in placement.mirrors}
    assert len(rows) == 16, "every stripe has a mirror again"
    had = {m.id for m in before.mirrors if m.at != LOST}
    assert {m.id for m in placement.mirrors if m.id in had} == had, "and those that were there are where they were"
    assert job.brain.partitions.levels()["full"] < 64, "some share their ps with a partition that was rebuilt"
    job.say_hello()
    assert moves(job) == len(before.owned_by(LOST)), "as many as it had, at once"
    job.settle()
    assert job.brain.partitions.at_rest() and job.brain.partitions.levels()["full"] == 64


@pytest.mark.parametrize(("ps", "parity"), [(6, "4+1"), (7, "4+2"), (5, "4+1"), (3, "1+1")])
def test_owners_change_twice_for_one_loss(ps: int, parity: str) -> None:
    """Each change has every worker open its shards again."""
    job = begun(ps=ps, parity=parity)
    owner = now(job).owner
    kill(job)
    assert now(job).owner != owner, "the first one"
    rest(job)
    assert changes(job) <= 1
    assert job.brain.partitions.at_rest() and job.brain.partitions.levels()["full"] == 64


def test_masters_of_before_moved_partitions_twice() -> None:
    job = begun(awaits=False)
    kill(job)
    assert moves(job), "while others were still rebuilt"
    assert changes(job) > 2


def test_a_ps_that_does_not_come_in_time_is_waited_for_no_longer() -> None:
    """The next fact after that time has partitions move: what shares a ps is not protected against its loss."""
    job = begun()
    kill(job)
    rest(job)
    assert not moves(job)
    assert job.at < job.brain.state.protection.awaited_until
    job.at = job.brain.state.protection.awaited_until - 0.2
    job.tell(said.RemarkMade("time has passed"))
    assert not moves(job)
    job.tell(said.RemarkMade("more time has passed"))
    assert moves(job)
    rest(job)
    assert job.brain.partitions.levels()["full"] == 64
    job.settle()  # now it comes
    assert job.brain.partitions.at_rest() and set(now(job).owner) == set(range(6))


def test_where_no_other_ps_can_be_started_nobody_is_waited_for() -> None:
    job = begun()
    for _ in range(4):  # the last loss in a row is one more than max_restarts
        kill(job)
        rest(job)
        if job.starting:
            job.starting.clear()
    assert not job.brain.state.protection.awaited_until
    assert job.brain.partitions.levels()["full"] == 64, "five ps have everything"


def test_a_ps_that_is_lost_again_while_it_starts_is_not_waited_for_longer() -> None:
    job = begun()
    kill(job)
    rest(job)
    job.starting.clear()
    until = job.brain.state.protection.awaited_until
    kill(job)
    assert until > 0.0 and job.brain.state.protection.awaited_until == until


def test_two_ps_that_are_lost_together_get_their_share_in_one_change() -> None:
    job = begun(ps=8, parity="4+2")
    kill(job)
    kill(job, Slot(4))
    rest(job)
    assert not moves(job)
    owner = now(job).owner
    job.say_hello()
    rest(job)
    assert not moves(job) and now(job).owner == owner, "the other one is still awaited"
    assert changes(job) <= 1
    assert job.brain.partitions.at_rest() and job.brain.partitions.levels()["full"] == 64


def test_a_ps_that_leaves_is_emptied_also_while_another_is_awaited() -> None:
    job = begun(ps=7)
    kill(job)
    rest(job)
    job.tell(said.DrainAsked("ps:3", 30.0), said.Sender("command"))
    assert moves(job), "it may go before the awaited one comes"
    job.settle()
    assert job.brain.partitions.levels()["full"] == 64 and Slot(3) not in now(job).owner


def test_what_is_awaited_outlives_the_master() -> None:
    job = begun()
    kill(job)
    rest(job)
    copy = Brain.restore(job.brain.snapshot())
    assert copy.state.protection.awaited_until == job.brain.state.protection.awaited_until > 0.0
