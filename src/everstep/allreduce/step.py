"""Says what the training step (``group_engine``) and the group (``session``) say to each other."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from enum import Enum
from typing import Any, NamedTuple, Protocol

from everstep.ids import LeaseNo
from everstep.model.group import Group, Micro, Position
from everstep.model.shard import ShardSchedule
from everstep.policies.step_split import StepCut, within


class VoteOutcome(Enum):
    """Is the outcome of a vote."""

    COMMITTED = "committed"  # at every survivor: the optimizer may step
    REDO = "redo"  # at none: the step begins anew, perhaps divided anew
    SKIPPED = "skipped"  # at every survivor, without being applied: its gradients were not finite (policy skip)


class GroupWork(Protocol):
    def wait(self, timeout_s: float | None = None) -> None:
        """Wait until the tensor holds the result. Raises an exception where the collective failed or was aborted."""
        ...


class Collective(Protocol):
    """Is a connected group. All members call the same things in the same order."""

    rank: int
    size: int
    host_sums: bool
    """An all-reduce is added up in the host's memory, by gloo, wherever tensors are; the same at all members."""

    def allreduce(self, tensor: Any, op: str = "sum") -> GroupWork:
        """Reduce in place, over a contiguous tensor; ``op``: sum, max, min. Begins at once, in the background."""
        ...

    def send(self, tensor: Any, peer: int) -> GroupWork: ...

    def recv(self, tensor: Any, peer: int) -> GroupWork: ...

    def gather(self, values: Sequence[int]) -> list[list[int]]:
        """Return everybody's ``values``, as many at each member, by rank."""
        ...

    def exchange(self, tensor: Any) -> list[Any]:
        """Return everybody's ``tensor``, of one shape and type, by rank."""
        ...

    def abort(self) -> None: ...

    def close(self) -> None: ...


@dataclass(frozen=True, kw_only=True)
class StepWork:
    """Is one attempt at a step, as a process has to do it: what its leader can tell it (``units.Train``)."""

    number: int
    generation: int
    dataset: int
    epoch: int
    lo: int
    hi: int
    micros: tuple[Micro, ...]  # of this member (of several processes: of this one); at least one
    rank: int
    size: int
    lr_factor: float = 1.0


@dataclass(frozen=True, kw_only=True)
class StepAttempt(StepWork):
    """Is one attempt at a step, as this member has to do it, with its group."""

    collective: Collective
    parts: tuple[tuple[int, int], ...] = ()  # logical workers: parts ``[a, b)`` of each member, by rank

    @classmethod
    def of(
        cls, cut: StepCut, position: Position, generation: int, rank: int, collective: Collective, largest: int = 0
    ) -> StepAttempt:
        """Return the step that ``cut`` (of ``policies.step_split``) means for the member at ``rank``; ``largest``:
        samples that fit into it at once, 0: any number."""
        return cls(
            number=position.step,
            generation=generation,
            dataset=position.dataset,
            epoch=cut.epoch,
            lo=cut.lo,
            hi=cut.hi,
            micros=within(cut.micros[rank], largest),
            rank=rank,
            size=len(cut.micros),
            collective=collective,
            lr_factor=cut.lr_factor,
            parts=tuple(_parts(m) for m in cut.micros),
        )

    def work(self, micros: tuple[Micro, ...]) -> StepWork:
        """Return this step for another process of the member."""
        facts = {f.name: getattr(self, f.name) for f in fields(StepWork)}
        return StepWork(**facts | {"micros": micros})

    @property
    def total(self) -> int:
        """Return the samples of the step, over all members."""
        return self.hi - self.lo

    @property
    def position(self) -> Position:
        """Return the position of the state that this step begins with."""
        return Position(self.number, self.dataset, self.epoch, self.lo)


def _parts(micros: tuple[Micro, ...]) -> tuple[int, int]:
    held = [m.part for m in micros if m.part >= 0]
    return (held[0], held[-1] + 1) if held else (0, 0)


class BehindLoop(NamedTuple):
    """Says where a script is that stands behind its loop. ``last``: number of the state's last step; ``lr_factor``: of
    a step that the present group would do; ``passing``: the state has this place behind it, and what the script does
    here is undone."""

    last: int
    lr_factor: float
    passing: bool


class StepTables(Protocol):
    """Is the tables of a job whose rows live on the ps, for engine and session; on the script's thread.

    ``pushed``: of all steps below it everybody's pushes are acknowledged and at all mirrors, as far as known here."""

    pushed: int

    def survey(self, group: Group, collective: Collective, position: Position, cut: StepCut) -> int:
        """Own to the ps, before a step at ``position`` that would be ``cut``, what was committed before, and learn
        where they are. Returns the position at which this step has to end at the latest; 0: anywhere. Raises
        CollectiveError where the group broke meanwhile."""
        ...

    def rest(self, group: Group, collective: Collective, position: Position) -> bool:
        """The group is on hold, and every member calls this now and then: what it owes to the ps goes there. Whether
        all ps have all steps before ``position``, so that a checkpoint has the tables of its step."""
        ...

    def flush(self, group: Group, collective: Collective) -> None:
        """Return when this member owes nothing to any ps, and mirrors have what it pushed. Raises CollectiveError as
        above."""
        ...

    def take(self, step: StepAttempt, batch: Any) -> None:
        """Have the rows that ``batch`` needs, as they are after all steps before this one."""
        ...

    def collect(self, weight: float) -> None:
        """The gradients of the batch's rows, times ``weight``, are part of the step."""
        ...

    def release(self) -> None:
        """The script is done with the batch."""
        ...

    def exchange(self, step: StepAttempt) -> tuple[int, bool] | None:
        """Give everybody the gradients of all. Their digest, and whether all are finite; None: the group broke."""
        ...

    def voted(self, step: StepAttempt, outcome: VoteOutcome) -> None: ...

    def check(self, scaled: bool) -> None:
        """Raises ScriptError if a table has no optimizer that fires it; ``scaled``: a GradScaler is tracked, which
        unscales only what an optimizer holds."""
        ...

    def hold(self, optimizer: Any, inner: Any) -> None:
        """The script gave an optimizer to the job: it fires the tables whose parameters it holds."""
        ...

    def stepped(self, optimizer: Any, lr_factor: float) -> None:
        """The optimizer is about to step: what ``grad`` of its tables holds now belongs to the step."""
        ...

    def stepped_behind(self, optimizer: Any, lr_factor: float, last: int) -> None:
        """Step behind the loop, whose last step was ``last``: the rest of an accumulation. Raises ScriptError if there
        are gradients and no samples of them."""
        ...

    def settle_behind(self) -> None:
        """The script is about to enter its next loop: what it has stepped with behind the last one goes to the ps."""
        ...

    def has_stepped(self) -> None: ...

    def zeroed(self, optimizer: Any) -> None: ...

    def put_back(self) -> None:
        """The iteration does not count, or not yet: gradients of before it are as they were."""
        ...

    def hold_step(self) -> None:
        """The script's part of a committed (or skipped) step is over: what is left of it belongs to the state."""
        ...

    def finish(self, step: int, lease: LeaseNo) -> None:
        """The script is over; ``step`` was the last one. ``lease``: of the newest group."""
        ...

    def close_step(self, step: StepAttempt) -> bool:
        """Close a committed step, after the script's part of it. False: the group broke; the step is committed all the
        same."""
        ...


class LeaveJob(Exception):
    """This worker was asked to leave, and has left its group: the script ends, with ``status``."""

    def __init__(self, status: int = 0) -> None:
        super().__init__(f"left the group (status {status})")
        self.status = status


class GroupSession(Protocol):
    """Is the group, for the engine (``allreduce.session``). Called from the script's thread only."""

    before_end: Callable[[Any], None] | None
    """Called with the collective when all members are at the end of the loop. Raises CollectiveError."""

    def warm_up_step(
        self, dataset: int, until_epoch: int, plan: ShardSchedule, batch_samples: int, largest: int = 0
    ) -> StepAttempt | None:
        """Before ``enter``: where a group trains already without this process, a step like the next one, of one member
        and one micro-batch, to do once without its ever being committed; until ``warmed_up`` nobody changes the
        state. None: there is no such group, or somebody waits for this process. ``largest``: see ``StepAttempt.of``."""
        ...

    def warmed_up(self) -> None:
        """The state is again as it was before the warm-up step."""
        ...

    def left_warm_up(self) -> None:
        """The script left its loop in the warm-up step, of which nothing may count: neither what stands behind the loop
        nor an error, since the model was not yet the group's. Ends this process, unless it was to end anyway; the next
        one in its slot has no warm-up step."""
        ...

    def enter(self, dataset: int, until_epoch: int, plan: ShardSchedule, batch_samples: int, largest: int = 0) -> None:
        """Returns when this process is a member of a group and has its state."""
        ...

    def begin(self) -> StepAttempt | None:
        """The next step to do; None: the loop over the data is over. Raises LeaveJob."""
        ...

    def vote(self, step: StepAttempt, digest: int, nonfinite: bool, state: int = 0) -> VoteOutcome:
        """Every member has reduced gradients with this ``digest``, and began the step with a state of which a slice has
        the digest ``state``. Blocks through losses."""
        ...

    def broken(self, step: StepAttempt) -> None:
        """A collective of this step failed: it will be done again."""
        ...

    def behind_loop(self) -> BehindLoop:
        """The script stands behind a loop."""
        ...

    def done(self, step: StepAttempt, stepped: bool = True, left: bool = False) -> None:
        """A committed (or skipped) step is over, the script's iteration too: the state is now that of the next
        position. ``stepped``: the script called ``opt.step()`` in it. ``left``: the script left the loop in it, perhaps
        by an error, which nobody knows yet: nothing is told or written of the step before the script has gone on."""
        ...
