"""Handing state over between members, with real sockets: formation, joining while others train, losses on the way."""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from replica_group import Worker, agree, digests, group_of

from everstep.allreduce import handover, state_source
from everstep.allreduce.replica_sync import ReplicaSync
from everstep.allreduce.state import ReplicaState
from everstep.errors import EverstepError, ScriptError
from everstep.model.group import Position
from everstep.net.auth import create_secret
from everstep.net.rendezvous import SECRET_FILE


@pytest.fixture
def hire(tmp_path: Path) -> Iterator[object]:
    create_secret(tmp_path / SECRET_FILE)
    made: list[Worker] = []

    def one(slot: int, incarnation: int = 1, seed: int = 0, **how: str) -> Worker:
        made.append(Worker(tmp_path, slot, incarnation, seed, **how))
        return made[-1]

    yield one
    for worker in made:
        worker.replica.close()


def train_until(workers: list[Worker], done: threading.Event, most: int = 400) -> None:
    """Others go on while somebody joins, the slower the longer that takes (a thread of the joiner's may have to wait
    for its turn, and its script's schedule has 1000 steps), and say so if it never comes to an end."""
    for step in range(most):
        for worker in workers:
            worker.train()
        if done.wait(0.0005 * 1.02**step):
            return
    raise AssertionError(f"nobody joined within {most} steps")


def test_a_first_group_begins_where_the_script_began(hire) -> None:
    workers = [hire(0), hire(1), hire(2)]
    assert agree(1, workers) == [Position()] * 3
    assert len(digests(workers)) == 1 and all(w.replica.has_state for w in workers)


def test_models_that_differ_are_named_with_the_slots(hire) -> None:
    workers = [hire(0), hire(1), hire(2)]
    with torch.no_grad():
        workers[2].run.model[3].bias[1] += 1e-6
    with pytest.raises(ScriptError, match=r"'3.bias' of worker:2 is not that of worker:0: build the same model"):
        agree(1, workers)
    workers[1] = hire(3, optimizer="adam")
    workers[1].run.model.add_module("more", torch.nn.Linear(1, 1))
    with pytest.raises(ScriptError, match=r"are 9 on worker:0, 11 on worker:3, 9 on worker:2"):
        agree(2, workers)


def test_a_joiner_follows_and_enters_with_nothing_left_to_copy(hire) -> None:
    old = [hire(0), hire(1)]
    agree(1, old)
    for w in old:
        w.train(5)
    new = hire(2, seed=9)  # (its model is not the others': it copies theirs)
    new.replica.follow(group_of(1, old))
    train_until(old, new.synced)
    for w in old:
        w.train(50)
    before = [w.step for w in old]
    positions = agree(2, [*old, new])
    assert [m.step for m in positions] == [before[0]] * 3
    assert len(digests([*old, new])) == 1
    for w in (*old, new):
        w.train(5)
    assert len(digests([*old, new])) == 1


def test_a_state_that_cannot_be_followed_is_copied_where_the_scripts_of_all_others_have_ended(
    hire, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As that of a worker of several processes. In a group that trains it says that it can enter, and copies there."""
    monkeypatch.setattr(ReplicaState, "follows", False)
    old, new = [hire(0), hire(1)], hire(2, seed=9)
    agree(1, old)
    for w in old:
        w.train(3)
    new.replica.follow(group_of(1, old))
    assert new.synced.wait(60) and not new.replica.has_state and new.step == 0
    new.synced.clear()
    new.replica.follow(group_of(1, old, over=True))

    end = time.monotonic() + 60
    while not new.synced.wait(0.01):
        assert time.monotonic() < end
        for w in old:
            w.replica.idle()  # (as a worker does behind its script)
    assert new.replica.has_state and new.replica.lineage == 1 and new.step == old[0].step == 3
    assert len(digests([*old, new])) == 1
    new.replica.follow(group_of(1, old, over=True))  # (as often as it is told)
    agree(2, [new], lineage=2)
    assert new.run.state.digest() == hire(3, seed=9).run.state.digest(), "the state that the script made was not kept"


def test_a_joiner_that_followed_is_not_sent_the_state_again(hire, monkeypatch: pytest.MonkeyPatch) -> None:
    old, new = [hire(0), hire(1)], hire(2)
    agree(1, old)
    new.replica.follow(group_of(1, old))
    train_until(old, new.synced)
    for w in old:
        w.train(20)
    monkeypatch.setattr(
        state_source.StateSource, "provide", lambda self: pytest.fail("the whole state was copied again")
    )
    agree(2, [*old, new])
    assert len(digests([*old, new])) == 1


def test_a_joiner_in_the_middle_of_a_step_when_the_group_changes_over_is_not_sent_the_state_again(
    hire, monkeypatch: pytest.MonkeyPatch
) -> None:
    """That is where it mostly is: the last step was committed a moment ago."""
    old, new = [hire(0), hire(1)], hire(2)
    agree(1, old)
    new.replica.follow(group_of(1, old))
    train_until(old, new.synced)
    replay, level = handover.replay, ReplicaSync._level
    inside, go_on = threading.Event(), threading.Event()

    def slowly(*args):
        inside.set()
        assert go_on.wait(60)
        replay(*args)

    def levels(self, *args):  # everybody has said what it has
        go_on.set()
        level(self, *args)

    monkeypatch.setattr(handover, "replay", slowly)
    monkeypatch.setattr(ReplicaSync, "_level", levels)
    monkeypatch.setattr(
        state_source.StateSource, "provide", lambda self: pytest.fail("the whole state was copied again")
    )
    for w in old:
        w.train(1)
    assert inside.wait(60)
    agree(2, [*old, new])
    assert len(digests([*old, new])) == 1


def test_a_script_that_changes_parameters_beside_the_optimizer_is_found_out_and_copied(hire) -> None:
    old, new = [hire(0), hire(1)], hire(2)
    agree(1, old)
    new.replica.follow(group_of(1, old))
    train_until(old, new.synced)
    for w in old:
        w.train(3)
        w.run.model[0].weight.data.clamp_(-0.1, 0.1)
        w.train(3)
    agree(2, [*old, new])
    assert len(digests([*old, new])) == 1


def test_the_source_is_lost_in_mid_transfer(hire, monkeypatch: pytest.MonkeyPatch) -> None:
    """The joiner goes on with another member, from the beginning."""
    monkeypatch.setattr(handover, "PART_BYTES", 64)
    old, new = [hire(0), hire(1)], hire(2)
    agree(1, old)
    for w in old:
        w.train(2)
    reading = threading.Event()
    read = state_source.StateSource._read

    def dies(self, request):
        if request.at > 500 and self is old[0].replica.source:
            reading.set()
            return handover.SnapshotGone("this worker dies"), ()
        return read(self, request)

    monkeypatch.setattr(state_source.StateSource, "_read", dies)
    new.replica.follow(group_of(1, old))
    train_until(old, reading)
    old[0].replica.close()
    survivors = [old[1]]
    new.replica.follow(group_of(2, survivors))
    train_until(survivors, new.synced)
    agree(3, [old[1], new])
    assert len(digests([old[1], new])) == 1


def test_a_joiner_that_is_lost_costs_the_source_nothing(hire, monkeypatch: pytest.MonkeyPatch) -> None:
    old, new = [hire(0)], hire(1)
    agree(1, old)
    new.replica.follow(group_of(1, old))
    train_until(old, new.synced)
    new.replica.close()
    found = old[0].replica.source
    looks = itertools.count(1)  # (its last question may still be waited with, and was heard then)
    monkeypatch.setattr(found, "_now", lambda: time.monotonic() + 2 * state_source.SILENT_S * next(looks))
    for _ in range(400):
        old[0].train()
        if not found._followers:
            break
        time.sleep(0.005)
    old[0].train(2)
    assert not found._followers and not found._log and found._recorder is None and not found._busy


def test_a_joiner_that_is_too_slow_enters_all_the_same(hire, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is kept for it is bounded; what it lacks is copied at the change-over."""
    old, new = [hire(0)], hire(1)
    old[0].replica.source._keep_bytes = 1
    agree(1, old)
    monkeypatch.setattr(handover.StateFollower, "_apply", lambda *a: time.sleep(0.05))
    new.replica.follow(group_of(1, old))
    train_until(old, new.synced)
    agree(2, [*old, new])
    assert len(digests([*old, new])) == 1


def test_a_joiner_that_gave_up_following_hears_of_the_next_group(hire, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its thread has ended by then, and a thread starts once."""
    monkeypatch.setattr(handover, "TRIES", 1)
    old, new = [hire(0)], hire(1)
    agree(1, old)
    monkeypatch.setattr(handover.StateFollower, "_step_by_step", _too_late)
    new.replica.follow(group_of(1, old))
    train_until(old, new.synced)
    assert new.replica._follower is not None
    new.replica._follower._thread.join(60)
    new.synced.clear()
    new.replica.follow(group_of(2, old))
    assert new.synced.is_set(), "of this one it can say so at once"
    agree(3, [*old, new])
    assert len(digests([*old, new])) == 1


def _too_late(*_: object) -> None:
    raise handover.GoneError("kept no longer")


def test_a_survivor_that_is_behind_copies(hire) -> None:
    workers = [hire(0), hire(1), hire(2)]
    agree(1, workers)
    for w in workers[:2]:
        w.train(4)
    workers[2].train(3)
    assert [m.step for m in agree(2, workers)] == [4] * 3
    assert len(digests(workers)) == 1


def test_a_state_of_a_void_origin_counts_as_none(hire) -> None:
    """All were lost, and a worker that had begun to copy their state is to begin anew with the others."""
    old, new = [hire(0)], hire(1)
    agree(1, old)
    old[0].train(5)
    new.replica.follow(group_of(1, old))
    train_until(old, new.synced)
    old[0].replica.close()
    fresh = hire(0, incarnation=2)
    assert agree(7, [new, fresh], lineage=7) == [Position()] * 2
    assert len(digests([new, fresh])) == 1
    assert new.run.state.parameter_digests() == hire(5).run.state.parameter_digests()


def test_a_group_that_breaks_in_mid_agreement_agrees_in_the_next(hire) -> None:
    old, new = [hire(0), hire(1)], hire(2)
    agree(1, old)
    new.replica.follow(group_of(1, old))
    train_until(old, new.synced)
    for w in old:
        w.train(3)

    class LostError(Exception):
        pass

    rounds = 0

    def gather(values: list[int]) -> list[list[int]]:
        nonlocal rounds
        rounds += 1
        if rounds == 2:
            raise LostError
        there = [1, 0, *(old[0].run.state.position.step, 0, 0, 0)]
        return [there, there, values]

    with pytest.raises(LostError):
        new.replica.agree(group_of(2, [*old, new]), 2, gather)
    agree(3, [old[0], new])
    assert len(digests([old[0], new])) == 1


def test_a_joiner_of_another_script_gets_one_line(hire) -> None:
    old, new = [hire(0)], hire(1, optimizer="sgd")
    agree(1, old)
    new.run.model.add_module("more", torch.nn.Linear(1, 1))
    failed = threading.Event()
    new.replica.on_error = lambda error: (new.errors.append(error), failed.set())
    new.replica.follow(group_of(1, old))
    train_until(old, failed)
    assert isinstance(new.errors[0], EverstepError)
    assert "no parameter 'more.weight' of this model" in str(new.errors[0])
