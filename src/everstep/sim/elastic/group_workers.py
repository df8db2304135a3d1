"""The workers of a virtual job in mode allreduce: one group trains step by step, and is rebuilt as the brain says."""

from __future__ import annotations

from typing import TYPE_CHECKING

from everstep.brain.events import (
    EndOfData,
    Fenced,
    GroupAsked,
    GroupLeft,
    GroupSynced,
    MemberJoined,
    PlanRegistered,
    PublishGroup,
    ReplicaWritten,
    StepsCommitted,
    by_worker,
)
from everstep.ids import Incarnation, Slot
from everstep.model.group import Committed, Group, Position
from everstep.model.member import Role
from everstep.model.reasons import LeaveReason
from everstep.model.snapshot import CheckpointFile, ReplicaCopy

if TYPE_CHECKING:
    from everstep.sim.elastic.virtual_job import VirtualJob, VirtualProcess

Life = tuple[Slot, Incarnation]


class Run:
    """Is a group that has met. ``begun``: when its first step began; ``reported``: steps since that the brain knows of;
    ``end``: when a member was gone, None: all are there. ``step_s`` 0: no step may begin."""

    __slots__ = ("begun", "end", "generation", "lives", "members", "reported", "samples", "step_s")

    def __init__(
        self, generation: int, members: list[VirtualProcess], begun: float, step_s: float, samples: int
    ) -> None:
        self.generation, self.members, self.begun, self.step_s, self.samples = (
            generation,
            members,
            begun,
            step_s,
            samples,
        )
        self.lives = {(m.slot, m.incarnation) for m in members}
        self.reported = 0
        self.end: float | None = None


class GroupWorkers:
    """Has all workers of a job. ``_newest``: the group that the brain published last; ``_run``: the one that trains."""

    def __init__(self, job: VirtualJob) -> None:
        self._job = job
        self._newest: Group | None = None
        self._run: Run | None = None
        self._workers: dict[Life, VirtualProcess] = {}
        self._copying: dict[Life, int] = {}  # the lineage that a newcomer copies
        self._telling = False
        self._share = 1.0
        self._armed = 0
        self._over = False

    # ------------------------------------------------------------ newcomers

    def hello(self, worker: VirtualProcess) -> None:
        job, me = self._job, by_worker(worker.slot, worker.incarnation)
        answer = job.tell(MemberJoined(Role.WORKER, worker.slot, worker.incarnation, worker.node.name, 1), me)
        if isinstance(answer, Fenced) or not worker.alive:
            return
        job.tell(PlanRegistered(job.work.schedule, 1, 0, job.work.epochs), me)
        self._workers[worker.slot, worker.incarnation] = worker
        self._ask(worker)

    def _ask(self, worker: VirtualProcess) -> None:
        job = self._job
        if not worker.alive:
            return
        if job.placement is None and job.spec.ps:
            job.kernel.after(1.0, self._ask, worker)
            return
        me = by_worker(worker.slot, worker.incarnation)
        batch, until = job.model.batch_samples, job.work.epochs
        answer = job.tell(GroupAsked(0, until, batch, None, None), me)
        if isinstance(answer, EndOfData):
            return
        self._copy(worker)

    def _copy(self, worker: VirtualProcess) -> None:
        """Have it copy the state of the line that trains, if one does."""
        groups, life = self._job.brain.state.groups, (worker.slot, worker.incarnation)
        if not groups.lineage or self._copying.get(life) == groups.lineage or groups.group is None:
            return
        if groups.group.rank(*life) >= 0:
            return
        self._copying[life] = groups.lineage
        self._job.after(self._job.model.copy_s, self._copied, worker, groups.lineage)

    def _copied(self, worker: VirtualProcess, lineage: int) -> None:
        groups = self._job.brain.state.groups
        if not worker.alive or worker.leaving or groups.lineage != lineage:
            return
        self._job.tell(GroupSynced(groups.generations), by_worker(worker.slot, worker.incarnation))

    # ------------------------------------------------------------ steps

    def _done_steps(self, run: Run) -> int:
        now = self._job.kernel.now if run.end is None else run.end
        if run.step_s <= 0 or now <= run.begun:
            return 0
        return int((now - run.begun) / run.step_s + 1e-9)

    def before(self) -> None:
        """Tell the steps that the group has committed meanwhile."""
        run = self._run
        if run is None or self._telling:
            return
        steps = self._done_steps(run) - run.reported
        teller = next((m for m in run.members if m.alive), None)
        if steps <= 0 or teller is None:
            return
        run.reported += steps
        ranges = self._ranges(run, steps)
        if not ranges:
            return
        self._telling = True
        try:
            self._job.tell_now(StepsCommitted(tuple(ranges)), by_worker(teller.slot, teller.incarnation))
        finally:
            self._telling = False

    def _ranges(self, run: Run, steps: int) -> list[Committed]:
        groups, work = self._job.brain.state.groups, self._job.work
        first, (epoch, position) = groups.step, groups.positions.get(0, (0, 0))
        out: list[Committed] = []
        while steps > 0 and epoch < work.epochs:
            take = min(steps, -(-(work.epoch_samples - position) // run.samples))
            hi = min(work.epoch_samples, position + take * run.samples)
            out.append(Committed(run.generation, first, first + take - 1, 0, epoch, position, hi))
            first, steps = first + take, steps - take
            epoch, position = (epoch + 1, 0) if hi == work.epoch_samples else (epoch, hi)
        return out

    def _steps_left(self, run: Run) -> int:
        work = self._job.work
        epoch, position = self._job.brain.state.groups.positions.get(0, (0, 0))
        if epoch >= work.epochs:
            return 0
        whole = -(-work.epoch_samples // run.samples)
        return -(-(work.epoch_samples - position) // run.samples) + whole * (work.epochs - epoch - 1)

    def through(self) -> bool:
        return self._over or (bool(self._job.brain.shards.datasets) and self._job.brain.groups.data_done())

    def in_hand(self) -> int:
        return 0

    def speed(self, share: float) -> None:
        self._share = share
        if self._run is not None and self._run.end is None and self._run.step_s > 0:
            self.before()
            self._begin(self._run.generation, self._run.members, 0.0)

    def _begin(self, generation: int, members: list[VirtualProcess], pause_s: float) -> None:
        """Have these train from now on, after a pause."""
        job, spec = self._job, self._job.spec
        group, n = self._newest, len(members)
        batch = job.model.batch_samples
        samples = batch * (spec.logical_workers or (n if spec.strategy == "elastic" else spec.workers))
        hold = group is None or bool(group.hold) or not members
        rate = 0.0 if hold else job.model.rate(n) * self._share
        run = Run(generation, members, job.kernel.now + pause_s, samples / rate if rate > 0 else 0.0, samples)
        self._run = run
        job.meter.trains(job.kernel.now, rate)
        if run.step_s > 0:
            job.kernel.at(run.begun + run.step_s + 1e-6, self._first_step, run)
        self._arm(run)

    def _first_step(self, run: Run) -> None:
        """Tell the first step at once: the journal says then how long the group needed to meet."""
        if self._run is run and run.end is None:
            self.before()

    def _arm(self, run: Run) -> None:
        """Have the end of the data come up."""
        self._armed += 1
        if run.step_s > 0:
            end = run.begun + self._steps_left(run) * run.step_s
            self._job.kernel.at(max(self._job.kernel.now, end) + 1e-6, self._data_ends, self._armed)

    def _data_ends(self, armed: int) -> None:
        run = self._run
        if armed != self._armed or run is None or run.end is not None:
            return
        self.before()
        if not self.through():
            self._arm_again(run)

    def _arm_again(self, run: Run) -> None:
        left = self._steps_left(run)
        self._armed += 1
        end = run.begun + (run.reported + left) * run.step_s
        self._job.kernel.at(max(self._job.kernel.now, end) + 1e-6, self._data_ends, self._armed)

    # ------------------------------------------------------------ groups

    def published(self, instruction: PublishGroup) -> None:
        group = instruction.group
        job, run = self._job, self._run
        known = self._newest
        self._newest = group
        if known is not None and known.generation == group.generation:
            return  # (another split of the same group, which virtual workers do not follow)
        whole = run is not None and run.end is None
        delay_s = job.model.switch_s if whole else job.model.meet_s
        if group.lineage == group.generation:  # nobody had a state
            delay_s += job.model.restore_s if group.restore else 0.0
            self._copying.clear()
        job.kernel.after(delay_s, self._meet, group, whole)

    def _meet(self, group: Group, planned: bool, in_step: bool = True) -> None:
        job, run = self._job, self._run
        if self._newest is not group:
            return
        if planned and in_step and run is not None and run.end is None and job.kernel.now > run.begun:
            left_s = run.begun + (self._done_steps(run) + 1) * run.step_s - job.kernel.now
            job.kernel.after(max(0.0, left_s), self._meet, group, planned, False)  # (the step in hand ends first)
            return
        members = []
        for m in group.members:
            worker = self._workers.get((m.slot, m.incarnation))
            if worker is None or not worker.alive:
                return  # the brain will hear of it
            members.append(worker)
        self.before()
        if self._newest is not group or job.kernel.stopped:
            return
        pause_s = job.model.switch_s if planned else 0.0
        self._begin(group.generation, members, pause_s)
        for m in group.members:
            if job.brain.groups.holds(m):
                job.tell(GroupSynced(group.generation), by_worker(m.slot, m.incarnation))
                break
        for m in group.joining:
            worker = self._workers.get((m.slot, m.incarnation))
            if worker is not None and worker.alive:
                self._copy(worker)

    def placed(self) -> None:
        pass

    def after(self) -> None:
        pass

    def gone(self, worker: VirtualProcess) -> None:
        life = (worker.slot, worker.incarnation)
        self._workers.pop(life, None)
        self._copying.pop(life, None)
        run = self._run
        if run is not None and run.end is None and life in run.lives:
            run.end = self._job.kernel.now
            self._job.meter.trains(run.end, 0.0)

    def asked_to_stop(self, worker: VirtualProcess, grace_s: float) -> None:
        """A member says that it wants to leave, trains on until a group without it has met, and ends."""
        job, life = self._job, (worker.slot, worker.incarnation)
        inside = self._run is not None and life in self._run.lives and self._run.end is None
        if inside and not worker.leaving:
            worker.leaving = True
            job.kernel.after(0.01, self._says_leave, worker)
            job.kernel.after(max(0.1, grace_s), job.exit, worker, -9)
        elif not inside or (self._newest is not None and self._newest.rank(*life) < 0):
            job.kernel.after(0.05, job.exit, worker, 0)

    def _says_leave(self, worker: VirtualProcess) -> None:
        if worker.alive:
            self._job.tell(GroupLeft(LeaveReason.ASKED), by_worker(worker.slot, worker.incarnation))

    # ------------------------------------------------------------ checkpoints

    def order(self, checkpoint: int, since: int) -> bool:
        job = self._job
        writing = job.brain.checkpoints.writing
        if writing is not None and writing.partial is not None:
            return False  # (now the ps write theirs)
        groups = job.brain.state.groups
        took_s = job.model.write_s(full=True)
        run = self._run
        if run is not None and run.end is None:
            run.begun += took_s * job.model.stall
        position = groups.position(0)
        job.after(took_s, self._written, checkpoint, position, groups.lineage)
        return True

    def _written(self, checkpoint: int, position: Position, lineage: int) -> None:
        job = self._job
        writing = job.brain.checkpoints.writing
        if writing is None or writing.number != checkpoint or self._newest is None:
            return
        alive = [self._workers.get((m.slot, m.incarnation)) for m in self._newest.members]
        writer = next((w for w in alive if w is not None and w.alive), None)
        if writer is None:
            return
        file = CheckpointFile(f"images/{checkpoint:06d}/replica-v", 1, "")
        copy = ReplicaCopy(position=position, file=file, lineage=lineage)
        job.tell(ReplicaWritten(checkpoint, copy), by_worker(writer.slot, writer.incarnation))
