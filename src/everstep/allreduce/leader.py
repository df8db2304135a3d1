"""A worker of several processes in its group: its leader takes part, and the others do with it what it does.

``LeaderSession`` is the leader's session: the group's (``session``), and after each of its answers a word to the
followers. ``FollowerSession`` is a follower's: it does what the leader says, until that is a step, or the end.
``UnitState`` is the leader's state: to read out or to load the whole one, the followers are asked to help.
"""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from everstep.allreduce.replica_group import (
    Leave,
    LoadState,
    Message,
    Over,
    ReadOut,
    Sum,
    Summed,
    Train,
    Unit,
    Voted,
    split,
)
from everstep.allreduce.serialize import SerializedState
from everstep.allreduce.state import ReplicaState
from everstep.allreduce.step import BehindLoop, LeaveJob, StepAttempt, VoteOutcome
from everstep.errors import EverstepError, InternalError
from everstep.model.group import Group, Micro
from everstep.model.shard import ShardSchedule

_HALF = 1 << 63


class UnitState(ReplicaState):
    """Is the state of the leader. The same to others as that of a model which is not sharded."""

    follows = False  # whole gradients of every step would take all processes: it is copied at the entry

    def __init__(
        self,
        models: Sequence[nn.Module],
        optimizers: Sequence[torch.optim.Optimizer],
        tracked: Mapping[str, Any],
        unit: Unit,
    ) -> None:
        super().__init__(models, optimizers, tracked)
        self.unit = unit

    def snapshot(self, into: torch.Tensor | None = None) -> SerializedState:
        with self.unit.ordered(ReadOut("snapshot")):
            return super().snapshot(into)

    def load(self, serialized: SerializedState, what: str = "the state") -> None:
        with self.unit.ordered(LoadState(len(serialized.header), serialized.body.numel(), what)):
            self.unit.share(torch.frombuffer(bytearray(serialized.header), dtype=torch.uint8))
            self.unit.share(serialized.body)
            self._load(serialized, what)

    def _load(self, serialized: SerializedState, what: str) -> None:
        """Load what all processes have got."""
        super().load(serialized, what)

    def digest(self) -> int:
        with self.unit.ordered(ReadOut("digest")):
            return super().digest()

    def quick_digest(self) -> int:
        with self.unit.ordered(Sum()):
            parts = [super().quick_digest()]
            parts += [self.unit.hear(Summed, follower).digest for follower in self.unit.followers]
        hashed = hashlib.blake2b(repr(parts).encode(), digest_size=8)
        return int.from_bytes(hashed.digest(), "little") - _HALF

    def parameter_digests(self) -> dict[str, int]:
        with self.unit.ordered(ReadOut("parameters")):
            return super().parameter_digests()


class LeaderSession:
    """See the top of this file. ``inner``: the group's session (``allreduce.session.Session``). ``spread``: over how
    many processes the samples of a step are spread; 1: all of them have the same ones."""

    def __init__(self, inner: Any, unit: Unit, spread: int = 0) -> None:
        self.inner, self.unit = inner, unit
        self._spread = spread or unit.size
        self._left = False
        self.before_end: Callable[[Any], None] | None = None  # (of models that are not sharded)
        self.before_step: Callable[[int], None] | None = None  # with its number, before followers hear of it

    def __repr__(self) -> str:
        return f"<LeadingSession {self.unit!r} {self.inner!r}>"

    def warm_up_step(
        self, dataset: int, until_epoch: int, plan: ShardSchedule, batch_samples: int, largest: int = 0
    ) -> StepAttempt | None:
        """None: it would take all processes of this worker."""
        return None

    def warmed_up(self) -> None:
        """There is none."""

    def left_warm_up(self) -> None:
        """There is none."""

    def enter(self, dataset: int, until_epoch: int, plan: ShardSchedule, batch_samples: int, largest: int = 0) -> None:
        size = self._spread  # (``largest`` is of each process)
        self.inner.enter(dataset, until_epoch, plan, batch_samples * size, largest * size)

    def begin(self) -> StepAttempt | None:
        unit = self.unit
        try:
            step: StepAttempt | None = self.inner.begin()
        except LeaveJob as leave:
            self._left = True
            unit.tell_all(Leave(leave.status))
            raise
        if step is None:
            unit.chief = bool(self.inner.runtime.chief())
            where = self.behind_loop()
            unit.tell_all(Over(unit.chief, where.lr_factor, where.passing))
            return None
        unit.chief = self.inner.runtime.slot == 0  # (who stands in for it is asked for where the loop is over)
        if self.before_step is not None:
            self.before_step(step.number)
        for follower in unit.followers:
            micros = tuple(self._part(m, follower) for m in step.micros)
            unit.tell(follower, Train(step.work(micros), unit.chief))
        return replace(step, micros=tuple(self._part(m, 0) for m in step.micros))

    def _part(self, micro: Micro, process: int) -> Micro:
        return micro if self._spread == 1 else split(micro, process, self._spread)

    def vote(self, step: StepAttempt, digest: int, nonfinite: bool, state: int = 0) -> VoteOutcome:
        outcome: VoteOutcome = self.inner.vote(step, digest, nonfinite, state)
        self.unit.tell_all(Voted(outcome.value))
        return outcome

    def broken(self, step: StepAttempt) -> None:
        self.inner.broken(step)

    def done(self, step: StepAttempt, stepped: bool = True, left: bool = False) -> None:
        self.inner.done(step, stepped, left)

    def behind_loop(self) -> BehindLoop:
        where: BehindLoop = self.inner.behind_loop()
        return where

    # ------------------------------------------------------------ the master's orders

    def grouped(self, group: Group) -> None:
        self.inner.grouped(group)

    def welcomed(self) -> None:
        self.inner.welcomed()

    def leave_soon(self, status: int) -> bool:
        left: bool = self.inner.leave_soon(status)
        return left

    def fail(self, error: EverstepError) -> None:
        self.inner.fail(error)

    def finish(self) -> None:
        self.inner.finish()

    def close(self, error: str = "") -> None:
        if not error and getattr(sys, "last_value", None) is not None:
            error = "the script failed"  # its other processes are anywhere, and cannot help with a last checkpoint
        self.inner.close(error)
        if not error and not self._left:
            self._left = True
            with suppress(EverstepError):
                self.unit.tell_all(Leave(0))


class FollowerSession:
    """See the top of this file."""

    def __init__(self, state: ReplicaState, unit: Unit) -> None:
        self.state, self.unit = state, unit
        self._left = False
        self._behind = (1.0, False)
        self.before_end: Callable[[Any], None] | None = None

    def __repr__(self) -> str:
        return f"<FollowingSession {self.unit!r}>"

    def warm_up_step(
        self, dataset: int, until_epoch: int, plan: ShardSchedule, batch_samples: int, largest: int = 0
    ) -> StepAttempt | None:
        """None: the leader has none."""
        return None

    def warmed_up(self) -> None:
        """There is none."""

    def left_warm_up(self) -> None:
        """There is none."""

    def enter(self, dataset: int, until_epoch: int, plan: ShardSchedule, batch_samples: int, largest: int = 0) -> None:
        """The leader does."""

    def begin(self) -> StepAttempt | None:
        match self._serve():
            case Train(step, chief):
                self.unit.chief = chief
                return StepAttempt(**vars(step), collective=_LEADERS)
            case Over(chief, lr_factor, passing):
                self.unit.chief, self._behind = chief, (lr_factor, passing)
                return None
            case Leave(status):
                self._left = True
                raise LeaveJob(status)
            case other:
                raise InternalError(f"between two steps the leader of this worker says {other!r}")

    def _serve(self) -> Message:
        """Help with the state, until the leader says something else."""
        while True:
            match message := self.unit.hear_any():
                case ReadOut(what):
                    self._read(what)
                case LoadState() as load:
                    self._load(load)
                case Sum():
                    self.unit.answer(Summed(self.state.quick_digest()))
                case _:
                    return message

    def _read(self, what: str) -> None:
        if what == "snapshot":
            self.state.snapshot()
        elif what == "digest":
            self.state.digest()
        else:
            self.state.parameter_digests()

    def _load(self, load: LoadState) -> None:
        header = torch.empty(load.header_bytes, dtype=torch.uint8)
        body = torch.empty(load.body_bytes, dtype=torch.uint8)
        self.unit.share(header)
        self.unit.share(body)
        self.state.load(SerializedState(header.numpy().tobytes(), body), load.what)

    def vote(self, step: StepAttempt, digest: int, nonfinite: bool, state: int = 0) -> VoteOutcome:
        return VoteOutcome(self.unit.hear(Voted).outcome)

    def broken(self, step: StepAttempt) -> None:
        """The leader knows."""

    def done(self, step: StepAttempt, stepped: bool = True, left: bool = False) -> None:
        """The leader says so."""

    def behind_loop(self) -> BehindLoop:
        return BehindLoop(self.state.position.step - 1, *self._behind)

    def grouped(self, group: Group) -> None:
        """Orders come to the leader."""

    def welcomed(self) -> None:
        """Orders come to the leader."""

    def leave_soon(self, status: int) -> bool:
        return False

    def fail(self, error: EverstepError) -> None:
        """Orders come to the leader."""

    def finish(self) -> None:
        """Orders come to the leader."""

    def close(self, error: str = "") -> None:
        """The leader leaves the group; a last checkpoint takes all of us."""
        if not (error or self._left or getattr(sys, "last_value", None) is not None):
            self._left = True
            self._serve()


class _Leaders:
    """The group of a follower's step: its leader reduces."""

    rank, size = 0, 1

    def __getattr__(self, name: str) -> Any:
        raise InternalError(f"{name} of the group was asked for in a process that is not its worker's leader")


_LEADERS: Any = _Leaders()
__all__ = ["FollowerSession", "LeaderSession", "UnitState"]
