"""What the processes of one worker share: samples, words, and the memory of gradients."""

from __future__ import annotations

import os
import socket
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from everstep.allreduce.gradient_buckets import BucketLayout
from everstep.allreduce.leader import FollowerSession, LeaderSession
from everstep.allreduce.replica_group import Full, GradientsReduced, Over, Unit, Voted, split
from everstep.allreduce.step import StepAttempt
from everstep.allreduce.unit_reducer import mapped, shared_buckets
from everstep.errors import ConfigError, InternalError, PlatformError
from everstep.model.group import Micro


@pytest.mark.parametrize("size", [1, 2, 3, 5])
@pytest.mark.parametrize("count", [0, 1, 4, 7])
def test_the_samples_of_a_micro_batch_are_divided_in_order(count: int, size: int) -> None:
    whole = Micro(30, 30 + count)
    parts = [split(whole, i, size) for i in range(size)]
    assert [p for part in parts for p in range(part.lo, part.hi)] == list(range(30, 30 + count))
    sizes = [part.hi - part.lo for part in parts]
    assert max(sizes) - min(sizes) <= 1
    assert count == 0 or sizes[0]  # who has none computes its neighbour's: there is one before it


def pair() -> tuple[Unit, Unit]:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    return Unit(0, 2, [ours]), Unit(1, 2, [theirs])


def test_gradients_of_a_follower_lie_in_memory_that_its_leader_maps() -> None:
    leader, follower = pair()
    layout = BucketLayout([torch.zeros(7), torch.zeros(3, dtype=torch.float64), torch.zeros(0)], 5)
    buckets, fd = shared_buckets(layout)
    buckets.views[0].fill_(2.0)
    buckets.tail.fill_(3.0)
    kinds = tuple((n, str(k[0]).removeprefix("torch.")) for n, k in zip(layout.numels, layout.kinds, strict=True))
    follower.answer(Full(layout.tail, kinds), fd)
    os.close(fd)
    full, got = leader.hear_full(1)
    assert got is not None
    found = mapped(got, [(n, getattr(torch, d)) for n, d in full.tensors])
    os.close(got)
    for mine, theirs in zip(buckets.tensors, found, strict=True):
        assert torch.equal(mine, theirs)
    found[-1].add_(1.0)
    assert buckets.tail.tolist() == [4.0] * 5


def test_a_word_out_of_turn_and_the_end_of_a_process_are_errors_not_waits() -> None:
    leader, follower = pair()
    leader.tell_all(Over(True, 1.0, False))
    with pytest.raises(InternalError, match="expected Voted and got Over"):
        follower.hear(Voted)
    follower.answer(GradientsReduced(True, True))
    with pytest.raises(InternalError, match="at the end of backward"):
        leader.hear_full(1)
    del leader
    with pytest.raises(PlatformError, match="is gone"):
        follower.hear_any()
    with pytest.raises(ConfigError, match="EVERSTEP_UNIT"):
        Unit.from_environment({"EVERSTEP_UNIT": "1/x:"})
    assert Unit.from_environment({}).size == 1


def test_a_follower_gets_the_leaders_step_with_its_own_samples() -> None:
    leader, follower = pair()
    group: Any = "the leaders' collective"
    step = StepAttempt(
        number=7,
        generation=3,
        dataset=1,
        epoch=2,
        lo=40,
        hi=50,
        micros=(Micro(40, 45), Micro(45, 50, 4)),
        rank=1,
        size=2,
        lr_factor=0.5,
        collective=group,
        parts=((0, 1), (1, 2)),
    )
    inner = SimpleNamespace(begin=lambda: step, runtime=SimpleNamespace(slot=0))
    mine = LeaderSession(inner, leader).begin()
    assert mine == replace(step, micros=(Micro(40, 43), Micro(45, 48, 4)))
    state: Any = None
    theirs = FollowerSession(state, follower).begin()
    assert theirs is not None and follower.chief
    assert replace(theirs, collective=group) == replace(step, micros=(Micro(43, 45), Micro(48, 50, 4)), parts=())
