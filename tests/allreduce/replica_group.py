"""Members of a group in threads of one process: real states, replicas and data servers, a barrier for the
collective."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from replica_runs import Run

from everstep.allreduce.replica_sync import ReplicaSync
from everstep.config.spec import JobSpec
from everstep.ids import Incarnation, NodeId, Slot
from everstep.model.group import Group, GroupMember, Position

WAIT_S = 60.0


class Broken(Exception):
    """A member did not come to the collective."""


class Exchange:
    """All-gather between threads."""

    def __init__(self, size: int) -> None:
        self.size = size
        self._barrier = threading.Barrier(size)
        self._rows: list[list[int]] = [[] for _ in range(size)]

    def gather(self, rank: int) -> Callable[[list[int]], list[list[int]]]:
        def call(values: list[int]) -> list[list[int]]:
            try:
                self._rows[rank] = [int(v) for v in values]
                self._barrier.wait(WAIT_S)
                rows = [list(r) for r in self._rows]
                self._barrier.wait(WAIT_S)
            except threading.BrokenBarrierError:
                raise Broken from None
            return rows

        return call

    def abort(self) -> None:
        self._barrier.abort()


class Place:
    """A runtime as the replica needs it."""

    def __init__(self, run_dir: Path, slot: int, incarnation: int, spec: JobSpec) -> None:
        self.run_dir, self.spec = run_dir, spec
        self.slot, self.incarnation = Slot(slot), Incarnation(incarnation)
        self.node = NodeId("node0")
        self.embedded = False
        self.on_replica = None

    def home_link(self) -> None:
        """Files are here."""


class Worker:
    def __init__(self, run_dir: Path, slot: int, incarnation: int = 1, seed: int = 0, **how: Any) -> None:
        self.run = Run(seed, **how)
        self.runtime = Place(run_dir, slot, incarnation, JobSpec(mode="allreduce"))
        self.replica = ReplicaSync(self.run.state, self.runtime)
        self.synced = threading.Event()
        self.errors: list[Exception] = []
        self.replica.on_synced = self.synced.set
        self.replica.on_error = self.errors.append

    @property
    def member(self) -> GroupMember:
        return GroupMember(self.runtime.slot, self.runtime.incarnation, self.runtime.node, self.replica.address)

    @property
    def step(self) -> int:
        return self.run.state.position.step

    def train(self, steps: int = 1, **how: bool) -> None:
        for _ in range(steps):
            self.run.step(**how)
            self.replica.boundary()


def group_of(generation: int, workers: Sequence[Worker], **more: Any) -> Group:
    return Group(generation=generation, members=tuple(w.member for w in workers), **{"lineage": 1, **more})


def agree(generation: int, workers: Sequence[Worker], **more: Any) -> list[Position]:
    """All at once; raises what the first of them raises."""
    group = group_of(generation, workers, **more)
    exchange = Exchange(len(workers))

    def one(rank: int) -> Position:
        try:
            return workers[rank].replica.agree(group, rank, exchange.gather(rank))
        except BaseException:
            exchange.abort()
            raise

    with ThreadPoolExecutor(len(workers)) as pool:
        futures = [pool.submit(one, rank) for rank in range(len(workers))]
        errors = [e for f in futures if (e := f.exception()) is not None]
        for error in errors:
            if not isinstance(error, Broken):
                raise error
        return [f.result() for f in futures]


def digests(workers: Sequence[Worker]) -> set[int]:
    return {w.run.state.digest() for w in workers}
