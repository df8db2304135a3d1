"""Holds one worker's place in its group: it connects, votes, gets through losses, goes over to newer groups.

Threads: the script's thread calls enter, begin, vote, broken, done, close. The control connection's thread brings
groups (``grouped``). A thread for each connection attempt. And one that tells the master about committed steps and
stalls, and closes what is left behind. What they share is the machine (``protocol``), under one lock.
"""

from __future__ import annotations

import contextlib
import os
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn, Protocol

import msgspec
import torch

from everstep.allreduce.collective import CONNECT_S, Alone, CollectiveError, GlooCollective, resolve
from everstep.allreduce.commits import Commits
from everstep.allreduce.device_group import DeviceCollective
from everstep.allreduce.group_machine import AbortGroup, Action, Connect, Counted, Follow, GroupMachine
from everstep.allreduce.group_store import GroupStore
from everstep.allreduce.member_runtime import CopyToBegin, MemberRuntime
from everstep.allreduce.serialize import SerializedState
from everstep.allreduce.step import BehindLoop, LeaveJob, StepAttempt, StepTables, VoteOutcome
from everstep.allreduce.tunnel import INSIDE, Tunnels
from everstep.brain.events import (
    Answer,
    EndOfData,
    GroupAsked,
    Grouped,
    GroupLeft,
    GroupStalled,
    GroupSynced,
    Refused,
    StepsCommitted,
    Wait,
)
from everstep.errors import (
    DeadlineError,
    EverstepError,
    InternalError,
    NonFiniteGradientError,
    PlatformError,
    ReplicasDifferError,
    ScriptError,
)
from everstep.model.group import Committed, Group, Position
from everstep.model.member import Address
from everstep.model.reasons import LeaveReason
from everstep.model.shard import ShardSchedule
from everstep.net import messages
from everstep.net.auth import Secret
from everstep.net.log import logger
from everstep.policies.step_split import StepCut as StepCut
from everstep.policies.step_split import cut_step, rate_of, within
from everstep.storage.chain import ChainWriter

NEWS_S = 300.0
"""A broken group waits so long for the master's word how to go on; so long a master may be away."""

STALL_S = 1.0
"""Who waits for longer in a collective says so: the master looks whether somebody is silent."""

AGAIN_S = 2.0
"""A group that broke without anybody lost (a connection failed) is connected again after so long."""

_STALL_AGAIN_S = 0.25  # until somebody does something about it
_ASK_S = 2.0  # between two questions to be let in
_CONFIRM_S = 0.1  # between two, whether the journal has the state that our script has to catch up with
_WARM_UP_ASK_S = 5.0  # to be told whether there is a group; then we enter it cold
_LEAVE_S = 8.0  # to be let go; then we go anyway, which is a loss to the others, before SIGKILL comes
_TELL_S = 0.05  # between two reports of committed steps, 20 a second
_TELL_ANYWAY_S = 2.0  # so long the lowest rank may take to have them confirmed; then everybody tells
_CLOSE_S = 5.0  # for the last reports, when the script is over
_TICK_S = 0.25
_WAIT_S = 0.1


class ReplicaOfMember(Protocol):
    """Of ``allreduce.state.ReplicaState``: ``position`` is where the state is, at the end of each step; ``loop``:
    which of the script's loops it is of."""

    position: Position
    loop: int

    def snapshot(self) -> SerializedState: ...

    def load(self, serialized: SerializedState, what: str) -> None: ...

    def devices(self) -> set[torch.device]:
        """Return the devices that the model is on."""
        ...


class ReplicaCopies(Protocol):
    """Is what is needed of ``allreduce.replica_sync.ReplicaSync``: copies of the state, for peers, joiners and
    checkpoints."""

    address: Address | None
    has_state: bool
    on_synced: Callable[[], None] | None
    on_error: Callable[[EverstepError], None] | None

    @property
    def copy(self) -> CopyToBegin | None: ...

    @property
    def lineage(self) -> int: ...

    @property
    def secret(self) -> Secret | None: ...

    def follow(self, group: Group) -> None: ...

    def agree(self, group: Group, rank: int, gather: Callable[[list[int]], list[list[int]]]) -> Position: ...

    def compare(self, group: Group, rank: int, gather: Callable[[list[int]], list[list[int]]]) -> None: ...

    def boundary(self, saves: bool = True) -> None: ...

    def idle(self) -> None: ...

    def committed_everywhere(self, step: int) -> None: ...

    def journaled(self) -> None: ...

    def close(self) -> None: ...


Connected = GlooCollective | Alone


class Session:
    """See the top of this file, and ``allreduce.step.GroupSession``."""

    def __init__(self, runtime: MemberRuntime, state: ReplicaOfMember, replica: ReplicaCopies) -> None:
        self.runtime, self.state, self.replica = runtime, state, replica
        self.machine = GroupMachine(runtime.slot, runtime.incarnation)
        self.commits = Commits()
        self.failure: EverstepError | None = None
        self.redone = 0  # steps that were begun and did not commit here
        self._lock = threading.RLock()
        self._changed = threading.Condition(self._lock)
        self._present: Connected | None = None
        self._ready: dict[int, Connected] = {}
        self._building: tuple[GlooCollective, GroupStore] | None = None
        self._retired: list[Connected] = []  # left; cut when the present group has met
        self._resolved = self._agreed = False  # of the present group
        self._agreed_at = 0  # step at which it did
        self._reported_agreed = 0  # generation
        self._came_at = 0  # step that our state was at in our first group of this lineage
        self._drifted = False  # a vote of the present group said that states differ; all of it know
        self._own_lineage: int | None = None  # of our state
        self._broke_at = 0.0
        self._waiting_since = 0.0  # for a newer group, while the present one is broken
        self._asked_at = 0.0
        self._voted: Committed | None = None  # in the script's hands
        self._done_in = 0  # generation in which the last step of the state was done here; 0: it was copied
        self._left_loop = False  # in the midst of the last iteration, and the script has not gone on since
        self._formed = False  # nobody of the present group had a state
        self._furthest = 0  # loop that a holder of the state was in when the present group met, or before a step of it
        self._loop = 0  # of the script, from 1: the one it is in, or was in last
        self._before_loop: SerializedState | None = (
            None  # the state, while the script passes loops that the state has behind it
        )
        self._over = False  # the master says: nothing left of what was asked for
        self._leaving: int | None = None  # exit status of the script
        self._leaving_since = 0.0
        self._leave_announced = False
        self._left = False  # before the script's end
        self._ended = False  # the script came to its end
        self._asked_to_end = False
        self._warming_up = False  # the script's thread uses the state before the first group
        self._held_back: Follow | None = None  # meanwhile
        self._synced = 0  # generation that we follow, and are up with; 0: none
        self._announced_loop = 0  # the journal has the followed state up to where this loop of it began
        self._entered = False
        self._looping = False
        self._closed = threading.Event()
        self._thread: threading.Thread | None = None
        self._telling = 0.0  # since when an answer to CommitSteps is awaited; 0.0: none is
        self._untold_since = 0.0
        self._announced_to = -1  # of the master's journal, when that was noted
        self._stalled_at = 0.0
        self._log: ChainWriter | None = None
        self._places: dict[int, tuple[int, int]] = {}  # by dataset: epoch and position, of those that we trained on
        self.dataset, self.until_epoch, self.batch_samples = 0, 0, 0
        self.largest = 0  # samples that fit into this worker at once; 0: unknown
        self.plan: ShardSchedule | None = None
        self.tables: StepTables | None = None
        self.before_end: Callable[[Any], None] | None = None
        replica.on_synced = self._on_synced
        replica.on_error = self.fail

    def __repr__(self) -> str:
        return f"<Session worker:{self.runtime.slot} {self.machine} at {self.state.position} {self.commits}>"

    @property
    def position(self) -> Position:
        return self.state.position

    @property
    def group(self) -> Group | None:
        """Return the group that this process is in."""
        return self.machine.present

    # ------------------------------------------------------------ the loop, on the script's thread

    def warm_up_step(
        self, dataset: int, until_epoch: int, plan: ShardSchedule, batch_samples: int, largest: int = 0
    ) -> StepAttempt | None:
        if self._entered or self.runtime.embedded or self.tables is not None or self._no_warm_up.exists():
            return None
        self.dataset, self.until_epoch, self.batch_samples = dataset, until_epoch, batch_samples
        self._warming_up = True
        with contextlib.suppress(EverstepError):  # (``enter`` asks again, and waits for as long as it takes)
            answer = self.runtime.call(self._question(), _WARM_UP_ASK_S)
            if isinstance(answer, Grouped) and answer.group is not None and self._has_time(answer.group):
                cut = cut_step(answer.position, plan, until_epoch, batch_samples, self.runtime.spec, 1)
                if cut is not None:
                    cut = msgspec.structs.replace(cut, micros=(within(cut.micros[0], largest)[:1],))
                    return StepAttempt.of(cut, answer.position, answer.group.generation, 0, Alone())
        self.warmed_up()
        return None

    def _has_time(self, group: Group) -> bool:
        """Return whether the others train without us meanwhile."""
        return not group.hold and not self.machine.member_of(group)

    def warmed_up(self) -> None:
        with self._changed:
            self._warming_up = False
            held_back, self._held_back = self._held_back, None
            if held_back is not None:
                self._do([held_back])

    @property
    def _no_warm_up(self) -> Path:
        return Path(self.runtime.run_dir) / "logs" / f"worker-{self.runtime.slot}.no-warm-up"

    def left_warm_up(self) -> None:
        if self._asked_to_end or self.failure is not None:
            return
        with contextlib.suppress(OSError):
            self._no_warm_up.touch()
        with contextlib.suppress(OSError, ValueError):
            print(
                f"everstep: worker:{self.runtime.slot}: the script left its loop in the warm-up step, of which no "
                "result and no error may come: it begins anew, without one",
                file=sys.stderr,
            )
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(PlatformError.exit_code)

    def enter(self, dataset: int, until_epoch: int, plan: ShardSchedule, batch_samples: int, largest: int = 0) -> None:
        """A loop over ``dataset`` begins. Returns when this process is a member of a group and has its state, or when
        the loop is over already (``begin`` returns None then). Raises LeaveJob."""
        if self.tables is not None:
            self.tables.settle_behind()
        with self._changed:
            self.dataset, self.until_epoch = dataset, until_epoch
            self.plan, self.batch_samples, self.largest = plan, batch_samples, largest
            self._over = False
            self._looping = True
        self._begin_loop()
        if not self._entered:
            self._entered = True
            if not self.runtime.embedded:
                path = (
                    Path(self.runtime.run_dir) / "audit" / f"worker-{self.runtime.slot}.{self.runtime.incarnation}.log"
                )
                header: dict[str, str | int] = {
                    "kind": "steps",
                    "slot": int(self.runtime.slot),
                    "incarnation": int(self.runtime.incarnation),
                }
                self._log = ChainWriter(path, header)
            if self.replica.copy is not None:
                self._tell_copied(self.replica.copy)
            self._thread = threading.Thread(target=self._attend, name="everstep-group", daemon=True)
            self._thread.start()
        self._turn_to(dataset)
        self._ask()
        self._say_synced()
        joined = self._join()
        left, self._left_loop = self._left_loop, False
        if left and joined is not None:  # the script has gone on: the next vote says that its last step is done
            self.replica.idle()

    def _tell_copied(self, copy: CopyToBegin) -> None:
        """Tell the steps of a copy that the worker which wrote it may not have told, in its name."""
        if not copy.steps:
            return
        runtime = self.runtime
        name = f"worker-{copy.slot}.{copy.incarnation}.copy-{runtime.incarnation}.log"
        header: dict[str, str | int] = {"kind": "steps", "slot": copy.slot, "incarnation": copy.incarnation}
        log = ChainWriter(Path(runtime.run_dir) / "audit" / name, header)
        try:
            for committed in copy.steps:
                log.append(msgspec.msgpack.encode(committed))
        finally:
            log.close()
        runtime.call(StepsCommitted(copy.steps), NEWS_S)

    def begin(self) -> StepAttempt | None:
        """Return the next step; None: the loop is over. Raises LeaveJob. Blocks while the group is on hold, or is
        rebuilt."""
        while True:
            joined = self._join()
            if joined is None:
                self._end_loop()
                return None
            group, collective, rank = joined
            if self._drifted:
                try:
                    self.replica.compare(group, rank, collective.gather)
                except CollectiveError:
                    self._broken_collective(collective)
                    continue
                self._drifted = False
            position = self.state.position
            assert self.plan is not None
            cut = self._cut_step(group)
            if self.tables is not None:
                try:
                    if cut is None:
                        self.tables.flush(group, collective)
                    else:
                        stop = self.tables.survey(group, collective, position, cut)
                        cut = self._cut_step(group, stop) if 0 < stop < cut.hi else cut
                except CollectiveError:
                    self._broken_collective(collective)
                    continue
            if cut is None:
                # (Others that are in a later loop have parted from this one. In theirs they wait for our vote.)
                if self._furthest > self._loop or self._confirm_last_step(collective):
                    self._end_loop()
                    return None
                continue
            self._furthest = 0
            return StepAttempt.of(cut, position, group.generation, rank, collective, self.largest)

    def _begin_loop(self) -> None:
        self._loop += 1
        if self._before_loop is not None:
            self.state.load(self._before_loop, "the state before the loop")
            if self.state.loop <= self._loop:
                self._before_loop = None
        if self.machine.present is not None or not self.replica.has_state:  # (else: of the one that we follow)
            self.state.loop = max(self.state.loop, self._loop)

    def _end_loop(self) -> None:
        """End a loop. A state that was copied from somebody who is in a later loop has it already: it is put back when
        that loop begins."""
        self._looping = False
        if self.state.loop > self._loop and self.machine.present is not None and self._before_loop is None:
            self._before_loop = self.state.snapshot()

    def _cut_step(self, group: Group, stop: int = 0) -> StepCut | None:
        assert self.plan is not None
        position, spec, split = self.state.position, self.runtime.spec, self.machine.split
        return cut_step(position, self.plan, self.until_epoch, self.batch_samples, spec, group.size, split, stop)

    def vote(self, step: StepAttempt, digest: int, nonfinite: bool, state: int = 0) -> VoteOutcome:
        """Every member has reduced gradients with this ``digest``, and began the step with a state of which a slice has
        the digest ``state``. Blocks through losses.

        Raises InternalError where members' gradients differ, NonFiniteGradientError by the policy "raise"."""
        votes = self._cast(step.collective, step.number, digest, nonfinite, state)
        committed = self._resolve_vote() if votes is None else True
        if not committed:
            self.redone += 1
            return VoteOutcome.REDO
        self._voted = Committed(
            step.generation,
            step.number,
            step.number,
            step.dataset,
            step.epoch,
            step.lo,
            step.hi,
            (),
            digest,
            self._loop,
        )
        if not (nonfinite if votes is None else votes):
            return VoteOutcome.COMMITTED
        if self.runtime.spec.nonfinite == "raise":
            raise NonFiniteGradientError(
                f"the gradient of step {step.number} (epoch {step.epoch}, samples {step.lo} to {step.hi}) has NaN or "
                "Inf; nothing of it was applied. Lower the learning rate, or run with --nonfinite skip"
            )
        self._voted = msgspec.structs.replace(self._voted, skipped=((step.lo, step.hi),))
        return VoteOutcome.SKIPPED

    def broken(self, step: StepAttempt) -> None:
        """A collective of this step failed: it will be done again."""
        self.redone += 1
        with self._changed:
            if step.collective is self._present:
                self._do(self._broke())

    def done(self, step: StepAttempt, stepped: bool = True, left: bool = False) -> None:
        """A committed (or skipped) step is over, the script's iteration too: the state is that of the next position.
        ``stepped``: the script called ``opt.step()`` in it. ``left``: see ``step.GroupSession``."""
        voted, self._voted = self._voted, None
        if voted is not None and not stepped and not voted.skipped:
            voted = msgspec.structs.replace(voted, unstepped=((step.lo, step.hi),))
        if voted is None or voted.first != step.number:
            raise InternalError(f"done({step.number}) without its vote")
        self.commits.done(voted)
        self.state.position = Position(step.number + 1, step.dataset, step.epoch, step.hi)
        self._places[step.dataset] = step.epoch, step.hi
        self._done_in, self._left_loop = step.generation, left
        if step.size == 1 and not left:
            self._settle(step.number + 1)
        if self.commits.confirmed >= self._came_at:
            self.replica.journaled()
        self.replica.boundary(saves=not left)

    def _settle(self, before: int) -> None:
        """Everybody has every step below ``before``: they may be told, and checkpoints of them, once the ps have what
        those have."""
        present = self.machine.present
        self.commits.settle(before, present.generation if present is not None else 0)
        self.replica.committed_everywhere(before if self.tables is None else min(before, self.tables.pushed))

    def behind_loop(self) -> BehindLoop:
        group, spec = self.machine.present, self.runtime.spec
        passing = self._before_loop is not None or group is None
        size = 1 if group is None else group.size
        factor = rate_of(spec, self.batch_samples, size, self.machine.split)
        return BehindLoop(self.state.position.step - 1, factor, passing)

    def close(self, error: str = "") -> None:
        """The script is over: tell what is untold, leave the group. Harmless when repeated. Raises PlatformError where
        this was not the end, since steps of it are void: this worker is to begin anew."""
        if self._closed.is_set():
            return
        failed = bool(error) or self.failure is not None
        void = False
        if not failed and self._entered:
            self._ended = self._leaving is None
            if self._leaving is None:
                self.state.loop = max(self.state.loop, self._loop + 1)  # what follows the last loop is done too
                newest = self.machine.newest
                if self.tables is not None and newest is not None:
                    self.tables.finish(self.state.position.step - 1, newest.lease)
            present = self.machine.present
            if self._left_loop and present is not None and present.size == 1 and not self._void:
                self._settle_end()
            void = not self._tell_rest()
        if not failed and self._entered and not self._left and not void:
            with contextlib.suppress(EverstepError):
                void = not self._say_done()
                if not void and self._left_loop:
                    self._abort_groups()  # others may have stayed in the loop, and wait for us
                if not void:
                    self._keep_the_state()
        self._closed.set()
        self._abort_groups()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(2.0)
        if self._log is not None:
            with contextlib.suppress(PlatformError):
                self._log.close()
        self.replica.close()
        if void and not self._left:
            raise PlatformError(
                f"the steps up to {self.state.position.step - 1} are void: the members that could tell the master of "
                "those before ours were lost. They are done again, by this worker too"
            )

    def _abort_groups(self) -> None:
        """Leave all groups: who waits for us in one is to wait no more. Harmless when repeated."""
        with self._changed:
            connected = [*self._ready.values(), *self._retired]
            if self._present is not None:
                connected.append(self._present)
            if self._building is not None:
                connected.append(self._building[0])
            self._ready.clear()
            self._retired.clear()
            self._present = self._building = None
            self._changed.notify_all()
        for collective in connected:
            collective.abort()

    def _settle_end(self) -> None:
        """The loop was left in the midst of an iteration: everybody is known to have done that step, too."""
        if self.tables is not None:
            self.tables.pushed = self.state.position.step
        self._settle(self.state.position.step)

    def _say_done(self) -> bool:
        """Say that our script came to its end. Others may be lost that could tell steps which we copied: it is no end
        before the journal has those. False: they were lost, and our steps are void."""
        copied = self._agreed_at if self._lineage == self._own_lineage else 0
        reached = self.state.position.step if self._done_in else 0
        left = GroupLeft(LeaveReason.DONE, self._lineage, copied, reached, self._done_in)
        while not self._void:
            answer = self.runtime.call(left, _CLOSE_S)
            if not isinstance(answer, Wait):
                return not isinstance(answer, Refused)
            self._closed.wait(answer.retry_after_s)
        return False

    def _keep_the_state(self) -> None:
        """Our script is over, that of the chief is not: should the chief be lost, the one in its place gets the state
        from us, and does again what stands behind the loop."""
        if self.runtime.embedded:
            return
        while self.failure is None and not self._over:
            answer = self.runtime.call(messages.MayEnd(), NEWS_S)
            if not isinstance(answer, messages.StillNeeded):
                return
            if self._left_loop and answer.committed_everywhere == self.state.position.step and not self._void:
                self._settle_end()
            until = time.monotonic() + answer.retry_after_s
            while time.monotonic() < until:
                self.replica.idle()
                time.sleep(0.01)

    def _tell_rest(self) -> bool:
        """Nobody else may be left to tell the last steps: until the master has them, be it away for a while. What was
        committed before we came is told by those who were there. False: they were lost, and our steps are void."""
        begun = time.monotonic()
        while self.commits.waiting and self.failure is None and not self._void:
            now = time.monotonic()
            mine = bool(self._telling or self.commits.to_tell())
            if now - begun > (NEWS_S if mine or not self._left else _CLOSE_S):
                return True
            self._tell(everybody=True)
            if not mine and now - self._asked_at > _ASK_S / 4:
                self._ask()  # the answer says what the master has
            time.sleep(0.01)
        return not self._void

    @property
    def _lineage(self) -> int:
        """Return the generation that began the lineage of our state; 0: we have none."""
        return self.replica.lineage if self.replica.lineage > 0 else self._own_lineage or 0

    @property
    def _void(self) -> bool:
        """Return whether the lineage of our state has ended: all who had it for certain were lost."""
        newest = self.machine.newest
        return newest is not None and newest.lineage > self._lineage > 0

    # ------------------------------------------------------------ from other threads

    def grouped(self, group: Group) -> None:
        """The master's word: this is the group now."""
        with self._changed:
            if self._closed.is_set():
                return
            if self._ended:  # no group changes what we have any more
                newest = self.machine.newest
                self.machine.newest = group if newest is None or group.generation > newest.generation else newest
                return
            self._do(self.machine.published(group))
            self._changed.notify_all()

    def welcomed(self) -> None:
        """Say again what the master, perhaps a new one, may not know: a connection to it was made."""
        if not self._entered or self._ended or self._closed.is_set():
            return
        with self._lock:
            building = self._building
        if building is not None:
            building[1].say_again()
        self._leave_announced = False
        self._ask()
        self._say_synced()

    def leave_soon(self, status: int) -> bool:
        """Leave the group between two steps; ``begin`` raises LeaveJob(status) then. False: not in a loop. May be
        called in a signal handler: takes no lock."""
        self._asked_to_end = True
        if not self._looping or self._leaving is not None:
            return False
        self._leaving_since = time.monotonic()
        self._leaving = status
        return True

    def fail(self, error: EverstepError) -> None:
        """This process is not wanted any more, or the master is gone for good: get the script's thread out."""
        with self._changed:
            self.failure = self.failure or error
            for collective in (self._present, *self._ready.values()):
                if collective is not None:
                    collective.abort(str(error))
            if self._building is not None:
                self._building[0].abort(str(error))
            self._changed.notify_all()

    def finish(self) -> None:
        """The job is over: who is not in the group need not wait for it."""
        with self._changed:
            self._over = True
            self._changed.notify_all()

    # ------------------------------------------------------------ being in a group

    def _join(self) -> tuple[Group, Connected, int] | None:
        """Join a group that is whole, not on hold, and of one mind about its state; None: the loop is over."""
        while True:
            if not self._get_in():
                return None
            with self._changed:
                group, collective = self.machine.present, self._present
                if group is None or collective is None or not self.machine.whole:
                    continue
            rank = group.rank(self.runtime.slot, self.runtime.incarnation)
            if not self._agreed and not self._agree_on_state(group, collective, rank):
                continue
            if not group.hold:
                return group, collective, rank
            if self.tables is not None:
                try:
                    if self.tables.rest(group, collective, self.state.position):
                        self._settle(self.state.position.step)
                except CollectiveError:
                    self._broken_collective(collective)
                    continue
            with self._changed:  # (who is to leave may have the only state: it is let go as soon as it is not)
                self._check()
                if self.machine.entry is None and self.machine.whole:
                    self._changed.wait(_WAIT_S)
            self.replica.idle()

    def _agree_on_state(self, group: Group, collective: Connected, rank: int) -> bool:
        """Agree on the state. False: the group broke meanwhile."""
        if self._own_lineage is not None and self._own_lineage != group.lineage:
            self.replica.has_state = False  # all who had it were lost: its steps are void
        before = self.state.position
        if self._formed and group.from_nothing:
            self._must_have_begun(1)
        try:
            position = self.replica.agree(group, rank, collective.gather)
        except CollectiveError:
            self._broken_collective(collective)
            return False
        with self._changed:
            if self._own_lineage != group.lineage:
                # Who joins cannot know what was told before it came; the votes will say.
                self.commits.begin(position.step if self._formed else 0)
                self._came_at = position.step
                if self.tables is not None:
                    self.tables.pushed = 0  # (what is known of another lineage does not count)
            elif position.step == before.step:
                position = before  # it may be turned to this loop's dataset already
            if position.step != before.step:
                self._done_in = 0
            self._own_lineage = group.lineage
            self._agreed, self._agreed_at = True, position.step
            self._synced = 0
            self._before_loop = None
            if self._formed and group.from_nothing:
                self.state.loop = self._loop
            self._must_have_begun(self.state.loop)
            self.state.position = position
        self._turn_to(self.dataset)
        self._settle(position.step)
        return True

    def _must_have_begun(self, loop: int) -> None:
        """The state is of this loop of the script (0: not said). Raises PlatformError where ours is in a later one: the
        loops that it passed belong to states that are lost, and only a new process does them again."""
        if 0 < loop < self._loop:
            raise PlatformError(
                f"the state of the group is of loop {loop} of the script, and this worker's script is in loop "
                f"{self._loop}: whoever had the state of that loop was lost. Its script begins anew"
            )

    def _get_in(self) -> bool:
        """Get into a whole group, where everybody knows which steps are committed. False: the loop is over."""
        while True:
            with self._changed:
                self._check()
                machine, present = self.machine, self._present
                part = machine.parting
            if part and present is not None:
                self._part(present)
            with self._changed:
                entry = machine.entry
                if entry is not None:
                    self._enter_group(entry)
                if machine.let_go or (self._leaving is not None and self._may_leave()):
                    self._leave()
                collective = self._present
                inside = collective is not None and machine.whole and not machine.outside
                if not inside:
                    if not machine.member_of(machine.newest) and (self._over or self._passed()):
                        return False
                    self._await_news()
                elif self._resolved:
                    return True
            if not inside:
                self.replica.idle()
            elif collective is not None and self._resolve(collective) is not None:
                return True

    def _part(self, collective: Connected) -> None:
        """Some of us are let go: know that the last step is everybody's, so that they can tell it before they go."""
        step = self.state.position.step
        try:
            collective.gather([step])
        except CollectiveError:
            self._broken_collective(collective)
            return
        self._settle(step)

    def _resolve(self, collective: Connected) -> bool | None:
        """Find out, first thing in a group, who has committed what. Whether our pending step is; None: the group
        broke."""
        with self._changed:
            group = self.machine.present
            void = group is None or (self._own_lineage is not None and self._own_lineage != group.lineage)
            followed = group is None or self.replica.lineage in (
                -1,
                group.lineage,
            )  # (else: of void states)
            has_state = self.replica.has_state and not void and followed
            word = self.machine.word(self.state.position.step if has_state else -1, self._loop)
        try:
            words = collective.gather(word)
        except CollectiveError:
            self._broken_collective(collective)
            return None
        with self._changed:
            self._resolved = True
            self._formed = all(w[0] < 0 for w in words)
            self._furthest = max((w[2] for w in words if w[0] >= 0), default=0)
            return self.machine.resolve(words) and not void

    def _resolve_vote(self) -> bool:
        """Wait, since the vote broke, for the next group, and ask there whether the step is committed."""
        while self.machine.pending is not None:
            with self._changed:
                self._check()
                machine = self.machine
                entry = machine.entry
                if entry is not None:
                    self._enter_group(entry)
                elif not machine.whole:
                    if machine.excluded:  # asked to leave, or dropped: the others decide without us
                        machine.pending = None
                        return False
                    self._await_news()
                    continue
                collective = self._present
                assert collective is not None
            committed = self._resolve(collective)
            if committed is not None:
                return committed
        return False  # it was not entered

    def _enter_group(self, group: Group) -> None:
        left = self._present
        self.machine.enter(group)
        self._present = self._ready.pop(group.generation)
        if left is not None:
            self._retired.append(left)
        self._resolved = self._agreed = self._drifted = False
        self._broke_at = self._waiting_since = 0.0

    def _await_news(self) -> None:
        """With the lock held: wait a little for the master's word, or for a connection."""
        now = time.monotonic()
        self._waiting_since = self._waiting_since or now
        if self._broke_at and now - self._broke_at > AGAIN_S:
            self._do(self.machine.reconnect())
        often = _CONFIRM_S if self._behind() else _ASK_S
        if not self.machine.member_of(self.machine.newest) and now - self._asked_at > often:
            self._ask()
        lost = self.machine.present is not None
        if lost and now - self._waiting_since > NEWS_S:
            raise DeadlineError(
                f"the group of generation {self.machine.present and self.machine.present.generation} broke, and for "
                f"{NEWS_S:g} s no master said how to go on: see logs/master.log, and start again with everstep resume"
            )
        self._changed.wait(_WAIT_S)

    def _behind(self) -> bool:
        """Not in the group, with a state (followed) of a later loop: the script has to catch up with it."""
        if not self.replica.has_state or self.plan is None or self._synced == 0:
            return False
        return self.state.loop > self._loop

    def _passed(self) -> bool:
        """The same, and it may: the journal has the steps up to there. (Else those who could tell them may be lost yet.
        Then the steps are done again, by us too, and our script must not have come to its end.)"""
        return self._behind() and self._announced_loop > self._loop

    def _turn_to(self, dataset: int) -> None:
        """Turn to another dataset, where members left it, all after the same step. Takes no lock: it may ask."""
        position = self.state.position
        if not self.replica.has_state or position.dataset == dataset or self.machine.present is None:
            return
        place = self._places.get(dataset)
        if place is None and position.step:  # we came later: the journal has it since long
            answer = self.runtime.call(self._question(), NEWS_S)
            if isinstance(answer, Grouped) and answer.position.dataset == dataset:
                place = answer.position.epoch, answer.position.sample
        epoch, sample = place or (0, 0)
        self.state.position = Position(position.step, dataset, epoch, sample)

    def _confirm_last_step(self, collective: Connected) -> bool:
        """The loop is over for all: one more vote, so that nobody goes before everybody has the last step."""
        position = self.state.position
        if self.before_end is not None:
            try:
                self.before_end(collective)
            except CollectiveError:
                self._broken_collective(collective)
                return False
        if self._cast(collective, position.step, 0, False) is None:
            with self._changed:
                self.machine.pending = None
            return False
        if self.tables is not None:
            self.tables.pushed = position.step  # everybody had pushed all before it voted
        self._settle(position.step)
        return True

    def _cast(self, collective: Any, step: int, digest: int, nonfinite: bool, state: int = 0) -> bool | None:
        """Vote. Whether anybody has gradients that are not finite; None: the vote broke, ``machine.pending`` says
        whether we were in it."""
        with self._changed:
            present = self._present
            if present is None or collective is not present or not self.machine.whole:
                return None
            ballot = self.machine.ballot(step, digest, nonfinite, self.commits.confirmed, state)
        try:
            values = present.vote(ballot)
        except CollectiveError:
            self._broken_collective(collective)
            return None
        with self._changed:
            tally, actions = self.machine.count(values)
            self._do(actions)
        if tally.counted is Counted.DIFFERENT_STEPS:
            self._fatal(f"members of a group vote on different steps (here {step})")
        if tally.counted is Counted.DIFFERENT_GRADIENTS:
            differ = ReplicasDifferError(
                f"in step {step} the members hold different reduced gradients or learning rates; nothing of it was "
                "applied. No learning rate may depend on the worker (its slot, the loss of its own batch); if none "
                "does, this is silent corruption: look at the memory and network of the workers' machines, then "
                "everstep resume"
            )
            self.fail(differ)
            raise differ
        self._drifted = self._drifted or tally.drifted
        if tally.behind and time.monotonic() - self._asked_at > _ASK_S:
            self._ask()
        self.commits.confirm(tally.confirmed)
        self._settle(step)
        return tally.nonfinite

    def _broken_collective(self, collective: Any) -> None:
        with self._changed:
            if collective is self._present:
                self._do(self._broke())

    def _broke(self) -> list[Action]:
        self._broke_at = self._broke_at or time.monotonic()
        return self.machine.broke()

    def _may_leave(self) -> bool:
        """Return whether this process may go: it is in no group; or the master was not to be waited for any longer: it
        lets us go as soon as somebody else has our state."""
        outside = self.machine.outside or self.machine.present is None
        return outside or time.monotonic() - self._leaving_since > _LEAVE_S

    def _leave(self) -> NoReturn:
        self._looping, self._left = False, True
        if not self._leave_announced:
            self._leave_announced = True
            self.runtime.ask(GroupLeft(LeaveReason.ASKED), lambda answer: None)
        status = self._leaving or 0
        raise LeaveJob(status)

    def _check(self) -> None:
        if self.failure is not None:
            raise self.failure
        if self._closed.is_set():
            raise InternalError("the session of this worker is closed")

    def _fatal(self, text: str) -> NoReturn:
        error = InternalError(text)
        self.fail(error)
        raise error

    # ------------------------------------------------------------ what the machine wants

    def _do(self, actions: list[Action]) -> None:
        """With the lock held."""
        for action in actions:
            if isinstance(action, Connect):
                self._connect(action.group, action.attempt)
            elif isinstance(action, AbortGroup):
                self._cut(action.generation)
            elif self._warming_up:
                self._held_back = action
            else:
                if action.group.lineage != self.replica.lineage:  # (else news of the same: it is up with that already)
                    self._synced = 0
                self.replica.follow(action.group)

    def _cut(self, generation: int) -> None:
        present = self.machine.present
        if self._building is not None and self._building[0].name.startswith(f"{generation}."):
            self._retired.append(self._building[0])
            self._building[0].abort("superseded")
            self._building = None
        ready = self._ready.pop(generation, None)
        if ready is not None:
            ready.abort("superseded")
            self._retired.append(ready)
        if present is not None and present.generation == generation and self._present is not None:
            self._broke_at = self._broke_at or time.monotonic()
            self._present.abort("a member is lost")

    def _connect(self, group: Group, attempt: int) -> None:
        if group.size == 1:
            self._ready[group.generation] = Alone()
            self._do(self.machine.connected(group.generation, attempt))
            return
        rank = group.rank(self.runtime.slot, self.runtime.incarnation)
        try:
            host = resolve(self._host(group, rank))
            tunnels = self._tunnels(group, rank, host)
        except EverstepError as error:
            self.fail(error)
            return
        name = f"{group.generation}.{attempt}"
        host = INSIDE if tunnels is not None else host
        collective = DeviceCollective(rank, group.size, host, name, self.state.devices())
        collective.tunnels = tunnels
        store = GroupStore(self.runtime, group.generation, attempt, host, group.size, CONNECT_S)
        self._building = (collective, store)
        threading.Thread(
            target=self._build,
            args=(group, attempt, collective, store),
            name=f"everstep-connect-{collective.name}",
            daemon=True,
        ).start()

    def _host(self, group: Group, rank: int) -> str:
        """Return where peers reach us: loopback on one machine, else what this node is reached by."""
        if len({m.node for m in group.members}) == 1:
            return "127.0.0.1"
        address = group.members[rank].address or self.replica.address
        if address is None or not address.host:
            raise PlatformError(
                f"worker:{self.runtime.slot} has peers on other nodes and no address they could reach it by: give the "
                "job --bind HOST:PORT, and everstep join --host HOST"
            )
        return address.host

    def _tunnels(self, group: Group, rank: int, host: str) -> Tunnels | None:
        """None: all members are on one node, or the job was told that gradients may travel in the clear."""
        if self.runtime.spec.tls != "all" or len({m.node for m in group.members}) == 1:
            return None
        secret = self.replica.secret
        if secret is None:
            raise PlatformError("this worker has no secret to reach members on other nodes with")
        try:
            return Tunnels(rank, secret, group.members[rank].node, host)
        except OSError as error:
            raise PlatformError(f"cannot listen at {host} for members on other nodes: {error}") from None

    def _build(self, group: Group, attempt: int, collective: GlooCollective, store: GroupStore) -> None:
        """Build a group, on its own thread."""
        if attempt:
            self._closed.wait(min(1.0, 0.1 * attempt))
        try:
            collective.connect(store)
        except EverstepError as error:
            logger.info("%s: %s", collective, error)
            store.say_failed()
            with self._changed:
                if not isinstance(error, CollectiveError):
                    self.fail(error)
                elif self._building is not None and self._building[0] is collective:
                    self._building = None
                    self._do(self.machine.failed(group.generation, attempt))
            return
        with self._changed:
            if self._building is None or self._building[0] is not collective:
                self._retired.append(collective)
                return
            self._building = None
            self._ready[group.generation] = collective
            self._do(self.machine.connected(group.generation, attempt))
            self._changed.notify_all()

    # ------------------------------------------------------------ the master

    def _ask(self) -> None:
        self._asked_at = time.monotonic()
        lineage, loop = self.replica.lineage, self.state.loop
        question = self._question()  # (of a mark that is not before the loop's begin)

        def answered(answer: Answer) -> None:
            self._answered(answer)
            if not isinstance(answer, Grouped) or answer.group is None or question.position is None:
                return
            if answer.group.lineage == lineage and answer.position.step >= question.position.step:
                self._announced_loop = max(self._announced_loop, loop)

        self.runtime.ask(question, answered)

    def _question(self) -> GroupAsked:
        position = self.state.position if self.replica.has_state else None
        copy = self.replica.copy.held if position is None and self.replica.copy is not None else None
        return GroupAsked(self.dataset, self.until_epoch, self.batch_samples, self.replica.address, position, copy)

    def _answered(self, answer: Answer) -> None:
        if isinstance(answer, Grouped):
            if answer.group is not None:
                with self._changed:
                    if answer.group.lineage == self._own_lineage:
                        self.commits.confirm(answer.position.step - 1)
                self.grouped(answer.group)
        elif isinstance(answer, EndOfData):
            self.finish()
        elif isinstance(answer, Refused):
            self.fail(ScriptError(answer.error))

    def _on_synced(self) -> None:
        """Note that this copy of the state is up with the group's. On its thread."""
        with self._changed:
            newest = self.machine.newest
            self._synced = newest.generation if newest is not None else 0
            self._changed.notify_all()
        self._say_synced()

    def _say_synced(self) -> None:
        """Not while our script is behind the group: the others would wait for it."""
        with self._changed:
            synced = self._synced
            if not synced or not self._looping or self._behind() or self.machine.present is not None:
                return
        self.runtime.ask(GroupSynced(synced), lambda answer: None)

    def _attend(self) -> None:
        """Run the thread beside the loop: reports, stalls, and closing what was left."""
        while not self._closed.wait(_TELL_S if self.commits.waiting and self._first else _TICK_S):
            try:
                self._say_leaving()
                self._log_committed()
                self._tell()
                self._report_agreed()
                self._say_stalled()
                self._close_retired()
            except EverstepError as error:
                self.fail(error)
            except Exception as error:
                logger.exception("the group's thread failed")
                self.fail(InternalError(f"the group's thread failed: {type(error).__name__}: {error}"))
        self._close_retired(everything=True)

    def _say_leaving(self) -> None:
        if self._leaving is not None and not self._leave_announced:
            self._leave_announced = True
            self.runtime.ask(GroupLeft(LeaveReason.ASKED), self._answered)

    def _report_agreed(self) -> None:
        """The present group has one state, and the journal has all steps before: who is new in it holds the state from
        now on, and need not wait for the group's first step."""
        with self._changed:
            group = self.machine.present
            if group is None or not self._agreed or group.generation == self._reported_agreed:
                return
            if group.size == 1 and not group.hold:
                return
            if self.commits.confirmed < self._agreed_at - 1:
                return
            if self.tables is not None and self.tables.pushed < self._agreed_at:
                return  # (who is new could not push what the ps lack of its state)
            self._reported_agreed = group.generation
        self.runtime.ask(GroupSynced(group.generation), lambda answer: None)

    def _log_committed(self) -> None:
        for committed in self.commits.to_log():
            if self._log is not None:
                self._log.append(msgspec.msgpack.encode(committed))

    @property
    def _first(self) -> bool:
        """Whether this is the lowest rank of its group: the others have no haste."""
        present = self.machine.present
        return present is not None and present.rank(self.runtime.slot, self.runtime.incarnation) == 0

    def _tell(self, everybody: bool = False) -> None:
        """Tell the master what it has not confirmed: the lowest rank at once, the others when that takes too long."""
        if everybody:
            self._log_committed()
        now = time.monotonic()
        steps = self.commits.to_tell()
        if not self.commits.waiting:
            self._untold_since = 0.0
            return
        if self.commits.confirmed != self._announced_to:  # somebody's reports get there
            self._announced_to, self._untold_since = self.commits.confirmed, now
        self._untold_since = self._untold_since or now
        if not steps:  # it has to be told first what came before we were here: has the master that?
            if now - self._untold_since > 1.0 and now - self._asked_at > _ASK_S and not everybody:
                self._ask()
            return
        if self._telling or not (self._first or everybody or now - self._untold_since > _TELL_ANYWAY_S):
            return
        self._telling, lineage = now, self._own_lineage

        def published(answer: Answer) -> None:
            with self._changed:
                if lineage == self._own_lineage:  # (else these steps are void, and their numbers were given again)
                    self.commits.confirm(steps[-1].last)
            self._telling = 0.0

        self.runtime.ask(StepsCommitted(steps), published)

    def _say_stalled(self) -> None:
        now = time.monotonic()
        with self._changed:
            group = self.machine.present or self.machine.newest
            waits = [self._waiting_since if self.machine.present is not None and not self.machine.whole else 0.0]
            if self._present is not None:
                waits.append(self._present.waiting_since)
            if self._building is not None and self.machine.idle:
                waits.append(self._building[0].waiting_since)
                group = self.machine.newest
            since = min((w for w in waits if w), default=0.0)
            if group is None or not since or now - since < STALL_S or now - self._stalled_at < _STALL_AGAIN_S:
                return
            self._stalled_at = now
        stalled = GroupStalled(group.generation, self.state.position.step, now - since)
        self.runtime.ask(stalled, self._answered)

    def _close_retired(self, everything: bool = False) -> None:
        with self._changed:
            if not (self._agreed or everything):
                return
            retired, self._retired = self._retired, []
        for collective in retired:
            collective.close()
