"""Runs whole jobs that end, and others that go on from their newest checkpoint: ``everstep resume``, under virtual
time.

All of a job is lost at once, or it is stopped, or it comes to its end by itself; then nothing of it is left but the
files of its checkpoints. The next job begins with one of them, on other numbers of ps and workers, perhaps with another
parity. What the snapshots hold is the truth from then on (``lineage.py``): what they lack must be trained once more in
just the partitions that lack it, and nothing else.
"""

from __future__ import annotations

import random
from typing import Any

import msgspec

from everstep.brain.events import (
    MASTER,
    FactType,
    JobResumed,
    MemberSilent,
    NodeLost,
    PartitionsReady,
    ProcessExited,
    Sender,
    StopAsked,
)
from everstep.brain.job import Phase
from everstep.ids import Incarnation
from everstep.model.member import Role
from everstep.model.reasons import Arrival
from everstep.model.snapshot import Manifest
from everstep.sim.cluster import Disk, SimAgent, SimMaster
from everstep.sim.kernel import Conn, Violation
from everstep.sim.scenario import CODES, PS_FAULTS, Scenario, hold_of, least_ps
from everstep.sim.simulation import Parts, SimOutcome, Simulation

STOP_S = 4.0  # so long a job that is stopped may take for its last checkpoint; then it is ended
TRY_AGAIN_S = 0.6  # a job without any checkpoint is left alone for so long


class Resumption(msgspec.Struct, frozen=True):
    """Says that at ``at`` the job ends (``stopped``: it is asked to stop; else all of it is lost); the next one has so
    many members. ``older``: the newest checkpoint is damaged, where there is another. ``hasty``: its first master dies
    at once."""

    at: float
    stopped: bool
    ps: int
    workers: int
    parity: str
    older: bool = False
    hasty: bool = False


class ResumeScenario(Scenario, frozen=True, kw_only=True, rename={"partitions": "buckets"}):
    resumptions: tuple[Resumption, ...] = ()


def resume_scenario(seed: int) -> ResumeScenario:
    """Return the scenario of ``seed`` in which whole jobs end and are resumed."""
    rng = random.Random(f"resume {seed}")
    parity = rng.choice(CODES)
    ps = least_ps(parity) + rng.choice([0, 0, 1, 2])
    names, weights = list(PS_FAULTS), list(PS_FAULTS.values())
    chaos_s = rng.uniform(2.0, 7.0)
    count = rng.choice([0, 0, 1, 2, 4, 7])
    faults = sorted((round(rng.uniform(0.3, chaos_s), 3), name) for name in rng.choices(names, weights, k=count))
    resumptions = []
    for _ in range(rng.choice([1, 1, 1, 2, 3])):
        code = parity if rng.random() < 0.5 else rng.choice(CODES)
        resumptions.append(
            Resumption(
                at=round(rng.uniform(0.6, chaos_s), 3),
                stopped=rng.choice([False, False, True]),
                ps=least_ps(code) + rng.choice([0, 0, 1, 2]),
                workers=rng.randint(1, 3),
                parity=code,
                older=rng.random() < 0.15,
                hasty=rng.random() < 0.2,
            )
        )
    return ResumeScenario(
        workers=rng.randint(1, 3),
        ps=ps,
        partitions=rng.choice([2, 3, 4, 6]),
        samples=rng.randint(30, 120),
        shard_samples=rng.choice([5, 8, 15, 20]),
        epochs=rng.choice([1, 2, 3]),
        batch=rng.choice([(1, 4), (2, 6), (3, 9)]),
        batch_s=rng.choice([0.03, 0.08, 0.15]),
        loss=rng.choice([0.0, 0.0, 0.01]),
        duplicate=rng.choice([0.0, 0.02, 0.1]),
        straggle=rng.choice([0.0, 0.01]),
        lease_s=rng.choice([2.0, 5.0, 1000.0]),
        fsync_s=rng.choice([0.001, 0.004]),
        restart_s=rng.choice([0.01, 0.3]),
        snapshot_every=rng.choice([10, 40, 10_000]),
        chaos_s=chaos_s,
        heal_s=70.0,
        faults=tuple(faults),
        hold=hold_of(seed),
        mirrors=True,
        parity=parity,
        protect=rng.choice(["acked", "acked", "eager"]),
        ps_range=(least_ps(parity), least_ps(parity) + 2),
        checkpoint_s=rng.choice([0.3, 0.6, 1.5]),
        resumptions=tuple(sorted(resumptions, key=lambda r: r.at)),
    )


class ResumedMaster(SimMaster):
    """Is a master whose first events say where the job goes on from, as ``MasterCheckpoints.start`` has it."""

    def __init__(self, sim: ResumeSimulation, life: int) -> None:
        super().__init__(sim, life)
        if sim.origin is not None and not self.brain.checkpoints.resumed and sim.announces_resume():
            manifest, numbers = sim.origin
            self.record(JobResumed(manifest, "old", numbers))

    def record(
        self,
        fact: FactType,
        conn: Conn | None = None,
        handler: Any = None,
        args: tuple[Any, ...] = (),
        sender: Sender = MASTER,
    ) -> None:
        if tells_of_a_loss(fact):
            self.sim.truth.kept = set()  # a ps was lost: whether something is missing may be looked into
        super().record(fact, conn, handler, args, sender)

    def committed(self, manifest: Manifest) -> None:
        there = self.sim.manifests.get(manifest.checkpoint)
        if there is not None and there != manifest:
            raise Violation(f"checkpoint {manifest.checkpoint} is written over another one of this number")
        super().committed(manifest)


def tells_of_a_loss(fact: FactType) -> bool:
    """Return whether a ps may have been lost, by this."""
    if isinstance(fact, PartitionsReady):
        return fact.how is Arrival.STUCK
    if isinstance(fact, ProcessExited | MemberSilent):
        return fact.role is not Role.WORKER
    return isinstance(fact, NodeLost)


class ResumeSimulation(Simulation):
    """See the top of this file. ``jobs``: how many there were so far."""

    def __init__(
        self, seed: int, scenario: ResumeScenario, parts: Parts = Parts(), trace: bool = False, validate: bool = True
    ) -> None:
        self.to_come = list(scenario.resumptions)
        super().__init__(seed, scenario, parts, trace, validate)
        for resumption in scenario.resumptions:
            self.kernel.at(resumption.at, self.end, resumption)

    def new_master(self) -> SimMaster:
        self.masters += 1
        master = self.master = ResumedMaster(self, self.masters)
        return master

    # ------------------------------------------------------------ the end of a job

    def end(self, resumption: Resumption) -> None:
        """This one is due. A job without a checkpoint could not be resumed: a little later then."""
        if self.over is not None or resumption not in self.to_come:
            return
        brain = self.master.brain
        trains = brain.job.phase is Phase.TRAINING and any(d.epochs for d in brain.shards.datasets)
        resumable = bool(self.manifests) or (resumption.stopped and trains)
        if resumption is not self.to_come[0] or not resumable or not self.agents["node0"].alive:
            self.kernel.after(TRY_AGAIN_S, self.end, resumption)
        elif resumption.stopped:
            self.kernel.say("FAULT", "the job is asked to stop")
            self.record(StopAsked("asked", True))
            self.kernel.after(STOP_S, self.lose, resumption)
        else:
            self.lose(resumption)

    def job_over(self, exit_code: int, error: str) -> None:
        if not self.master.alive:
            return  # said twice
        if exit_code == 0 and self.to_come and self.manifests:
            self.kernel.say("job", "over, and to be resumed")
            self.lose(self.to_come[0])
        else:
            super().job_over(exit_code, error)

    def lose(self, resumption: Resumption) -> None:
        """Every process of the job is gone, and so is its journal."""
        if self.over is not None or resumption not in self.to_come:
            return
        if not self.manifests:
            self.kernel.after(TRY_AGAIN_S, self.lose, resumption)
            return
        self.to_come.remove(resumption)
        self.faults += 1
        self.kernel.say("FAULT", f"all of job {self.jobs} is lost")
        for process in (*self.agents.values(), *self.processes):
            process.alive = False
            if process.conn is not None:
                process.conn.up = False
        self.master.die()
        self.processes.clear()
        self.servers.clear()
        self.lives.clear()
        self.doomed.clear()
        self.net.cut.clear()
        self.kernel.after(0.1 + self.kernel.random(), self.resume, resumption)

    # ------------------------------------------------------------ the next one

    def resume(self, resumption: Resumption) -> None:
        numbers = sorted(self.manifests)
        manifest = self.manifests[numbers[-2 if resumption.older and len(numbers) > 1 else -1]]
        self.jobs += 1
        least = least_ps(resumption.parity)
        self.scenario = msgspec.structs.replace(
            self.scenario,
            ps=resumption.ps,
            workers=resumption.workers,
            parity=resumption.parity,
            ps_range=(least, least + 2),
        )
        self.spec = msgspec.structs.replace(self.scenario.spec(), resume_from="old")
        self.kernel.say("job", f"{self.jobs} goes on from checkpoint {manifest.checkpoint} of {numbers}: {resumption}")
        snapshots = {snapshot.partition: self.files[snapshot.files[0].path] for snapshot in manifest.snapshots}
        self.truth.resumed(snapshots, manifest.datasets)
        self.origin = manifest, numbers[-1]
        self.disk = Disk()
        self.disk.incarnation = self.first_incarnation(manifest)
        self.new_master()
        self.home = SimAgent(self, "node0", 0, self.scenario.ps)
        self.agents = {"node0": self.home}
        self.home.start()
        if resumption.hasty:
            self.kernel.after(4.0 * self.kernel.random() * self.scenario.fsync_s, self.kill_master)

    def first_incarnation(self, manifest: Manifest) -> Incarnation:
        """Masters after this one: leases must be later than every fence in the snapshots."""
        return manifest.master_incarnation

    def announces_resume(self) -> bool:
        return True


def simulate_resume(
    seed: int,
    scenario: ResumeScenario | None = None,
    parts: Parts = Parts(),
    trace: list[str] | None = None,
    validate: bool = True,
) -> SimOutcome:
    """Make one whole run, as ``sim.simulation.simulate``."""
    sim = ResumeSimulation(seed, scenario or resume_scenario(seed), parts, trace is not None, validate)
    return sim.run_traced(trace)
