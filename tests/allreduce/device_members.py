"""Groups whose members are threads, each with a device; what holds on any device."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from group_hub import Hub
from groups import ListLoader, Member, group_of_one
from scripts import adam, data, loss_of, net, same, values

from everstep.allreduce.collective import CollectiveError
from everstep.allreduce.device_group import DeviceCollective
from everstep.allreduce.group_store import GroupStore
from everstep.allreduce.nccl import NcclGroup
from everstep.allreduce.state import ReplicaState
from everstep.config.spec import JobSpec
from everstep.net.retry import Deadline

CPU = torch.device("cpu")
LONG_S = 30.0


@contextlib.contextmanager
def connected(size: int = 2, on: Sequence[torch.device] = ()) -> Any:
    hub = Hub()
    at = on or [CPU] * size
    group = [DeviceCollective(rank, size, "127.0.0.1", "1.0", [at[rank]]) for rank in range(size)]
    with ThreadPoolExecutor(size) as pool:
        list(pool.map(lambda c: c.connect(GroupStore(hub, 1, 0, "127.0.0.1", size, LONG_S), LONG_S), group))
    try:
        yield group
    finally:
        for collective in group:
            collective.close()


def over(collective: DeviceCollective) -> NcclGroup:
    assert collective._nccl is not None, collective.chosen
    return collective._nccl


def waits(collective: DeviceCollective, on: torch.device = CPU) -> tuple[threading.Thread, list[Exception]]:
    """A thread in an all-reduce that the others do not come to."""
    raised: list[Exception] = []

    def wait() -> None:
        try:
            over(collective).allreduce(torch.ones(2, device=on)).wait(LONG_S)
        except CollectiveError as error:
            raised.append(error)

    thread = threading.Thread(target=wait)
    thread.start()
    until = Deadline(LONG_S)
    while not collective.waiting_since:
        until.check()
        time.sleep(0.001)
    return thread, raised


def redone_leaves_no_trace(device: torch.device) -> None:
    """Steps that are redone change nothing; state goes to the host's memory and back."""

    def script(member: Member) -> Any:
        model = member.replicate(net(norm=True, dropout=0.3).to(device))
        opt = member.optimizer(adam(model))
        for one in member.steps(ListLoader(data(), 8, 2)):
            opt.zero_grad()
            loss_of(model, {name: value.to(device) for name, value in one.items()}).backward()
            opt.step()
        state = ReplicaState(member.engine.models, member.engine.inner, {})
        serialized, before = state.snapshot(), state.quick_digest()
        with torch.no_grad():
            for p in model.parameters():
                p.zero_()
        state.load(serialized)
        assert serialized.body.device == CPU and state.quick_digest() == before
        return values(model)

    once, redone = group_of_one(JobSpec(), script), group_of_one(JobSpec(), script, frozenset({0, 3}))
    same(once, redone)
    assert all(value.device == device for value in once.values())
