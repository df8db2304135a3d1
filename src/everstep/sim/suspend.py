"""Runs jobs that are suspended and go on, by hand and by themselves, under virtual time.

A suspended job has no processes: its journal and its checkpoints are all that is left. Then a new master of the same
journal goes on with it. Nodes come and go meanwhile, also every second, so that jobs with ``max_wait`` suspend
themselves, run with fewer, or wait.
"""

from __future__ import annotations

import random
from typing import Any

import msgspec

from everstep.brain.brain import Brain
from everstep.brain.events import FactType, JobUnsuspended, SuspendAsked
from everstep.brain.job import Phase
from everstep.brain.supervision import JobStage
from everstep.config.spec import JobSpec
from everstep.sim.group import GroupScenario, GroupSimulation, group_scenario
from everstep.sim.kernel import Violation
from everstep.sim.scenario import Scenario, storm_scenario
from everstep.sim.simulation import Parts, SimOutcome, Simulation

TRY_AGAIN_S = 0.4
HASTY_S = 0.02
NEVER_S = 1e6  # of checkpoints: only what is asked for
DRIVES_S = 60.0  # after the last fault a job with enough members must not be suspended by itself any more


class SuspendSettings(msgspec.Struct, frozen=True, kw_only=True):
    """Says what a job that may be suspended has besides. ``suspensions``: when it is asked to, and after how many
    seconds it goes on. ``flaps``: when a second node is killed, and after how many seconds it is back."""

    min_workers: int = 1
    max_wait: str = "off"
    on_wait_timeout: str = "suspend"
    recovery: str = "run_with_available"
    stabilization: str = "0s"
    suspensions: tuple[tuple[float, float], ...] = ()
    flaps: tuple[tuple[float, float], ...] = ()
    hasty: float = 0.0  # how likely the first master after a suspension dies at once


class SuspendScenario(Scenario, frozen=True, kw_only=True):
    settings: SuspendSettings = SuspendSettings()

    def spec(self) -> JobSpec:
        return supervised(Scenario.spec(self), self.settings, self.checkpoint_s)


class SuspendGroupScenario(GroupScenario, frozen=True, kw_only=True):
    settings: SuspendSettings = SuspendSettings()

    def spec(self) -> JobSpec:
        return supervised(GroupScenario.spec(self), self.settings, self.checkpoint_s)


def supervised(spec: JobSpec, settings: SuspendSettings, checkpoint_s: float) -> JobSpec:
    names = ("min_workers", "max_wait", "on_wait_timeout", "recovery", "stabilization")
    every = "" if checkpoint_s == NEVER_S else spec.checkpoint_every
    given = {name: getattr(settings, name) for name in names}
    return msgspec.structs.replace(spec, checkpoint_every=every, **given)


def suspend_scenario(seed: int) -> SuspendScenario | SuspendGroupScenario:
    """Return the scenario of ``seed``; every third one is of mode allreduce."""
    rng = random.Random(f"suspend {seed}")
    group = seed % 3 == 2
    base = group_scenario(seed) if group else storm_scenario(seed)
    chaos_s = max(3.0, base.chaos_s)
    count = rng.choice([1, 1, 2, 3])
    suspensions = tuple((round(rng.uniform(0.2, chaos_s), 3), round(rng.uniform(0.1, 3.0), 3)) for _ in range(count))
    flaps: list[tuple[float, float]] = []
    second = group or rng.random() < 0.6
    if second and rng.random() < 0.6:
        at = rng.uniform(0.3, chaos_s)
        for _ in range(rng.choice([1, 2, 6])):
            flaps.append((round(at, 3), round(rng.choice([0.3, 0.5, 2.0, 5.0]), 3)))
            at += rng.choice([1.0, 1.0, 3.0])
    waits = rng.random() < 0.7
    settings = SuspendSettings(
        min_workers=rng.choice([1, 1, min(2, base.workers)]),
        max_wait=rng.choice(["1s", "2s", "5s"]) if waits else "off",
        on_wait_timeout=rng.choice(["suspend", "suspend", "run"]) if waits else "suspend",
        recovery=rng.choice(["run_with_available", "run_with_available", "wait_for_all"]),
        stabilization=rng.choice(["0s", "1s", "3s"]),
        suspensions=tuple(sorted(suspensions)),
        flaps=tuple(flaps),
        hasty=rng.choice([0.0, 0.3]),
    )
    fields = {name: getattr(base, name) for name in base.__struct_fields__}
    fields |= {"settings": settings, "second_node": second, "chaos_s": chaos_s, "heal_s": base.heal_s + DRIVES_S}
    fields["checkpoint_s"] = base.checkpoint_s or rng.choice([0.6, NEVER_S])
    if group:
        return SuspendGroupScenario(**{**fields, "min_workers": settings.min_workers})
    return SuspendScenario(**fields)


class SuspendedJobs(Simulation):
    """Has what both ways of training share. ``suspended``: so often it was, so far."""

    settings: SuspendSettings
    suspended = 0

    def plan_suspensions(self, settings: SuspendSettings) -> None:
        self.settings = settings
        for at, back_s in settings.suspensions:
            self.kernel.at(at, self.ask_to_suspend, back_s)
        for at, back_s in settings.flaps:
            self.kernel.at(at, self.kill_node, "node1", back_s)

    def ask_to_suspend(self, back_s: float) -> None:
        if self.over is None:
            self.kernel.say("FAULT", "the job is asked to be suspended")
            self.back_s = back_s
            self.record(SuspendAsked("asked"))

    def first_facts(self, brain: Brain) -> list[FactType]:
        """What a new master says first: a suspended job goes on (also if it was said before)."""
        if self.suspended and self.suspended_at < self.kernel.now:
            return [JobUnsuspended(self.suspended, "the simulator says so")]
        return []

    back_s = 1.0
    suspended_at = -1.0

    def job_over(self, exit_code: int, error: str) -> None:
        master = self.master
        if not master.alive:
            return  # said twice
        brain = master.brain
        if brain.job.phase is not Phase.SUSPENDED:
            super().job_over(exit_code, error)
            return
        supervision = brain.state.supervision
        if supervision.stage is not JobStage.SUSPENDED or supervision.suspensions != self.suspended + 1:
            raise Violation(f"suspended for the {self.suspended + 1}. time, and the brain says {supervision!r}")
        if supervision.by_itself and self.healed and self.kernel.now > self.scenario.chaos_s + DRIVES_S:
            raise Violation(f"suspended by itself long after the last fault: {supervision.suspending}")
        self.suspended, self.suspended_at = supervision.suspensions, self.kernel.now
        self.faults += 1
        self.kernel.say("FAULT", f"the job is suspended: {supervision.suspending}")
        self.end_all()
        self.kernel.after(self.back_s, self.unsuspend)

    def end_all(self) -> None:
        """End every process of the job; its journal and its checkpoints stay."""
        for process in (*self.agents.values(), *self.processes):
            process.alive = False
            if process.conn is not None:
                process.conn.up = False
        self.master.die()
        self.processes.clear()
        self.forget_processes()

    @property
    def is_suspended(self) -> bool:
        return not self.master.alive and self.master.brain.job.phase is Phase.SUSPENDED

    def strike(self, fault: str) -> None:
        if not self.is_suspended:
            super().strike(fault)

    def kill_node(self, node: str, back_s: float) -> None:
        if not self.is_suspended:
            super().kill_node(node, back_s)

    def node_back(self, node: str) -> None:
        if not self.is_suspended:  # (else it is there when the job goes on)
            super().node_back(node)

    def forget_processes(self) -> None:
        self.servers.clear()
        self.lives.clear()
        self.doomed.clear()

    def unsuspend(self) -> None:
        """A new master goes on, and agents say hello to it."""
        self.kernel.say("job", "goes on")
        if not self.manifests and self.scenario.mirrors:
            self.truth.holder.clear()  # (nothing was trained, and nobody has what nobody had)
        self.new_master()
        for node, (places, ps_places) in self.nodes_there.items():
            agent = self.agents[node] = type(self.home)(self, node, places, ps_places)
            if node == "node0":
                self.home = agent
            agent.start()
        if self.kernel.random() < self.settings.hasty:
            self.kernel.after(HASTY_S * self.kernel.random(), self.kill_master)

    @property
    def nodes_there(self) -> dict[str, tuple[int, int]]:
        return {name: (agent.places, agent.ps_places) for name, agent in self.agents.items()}


class SuspendPsSimulation(SuspendedJobs):
    """Runs mode ps."""

    def __init__(
        self, seed: int, scenario: SuspendScenario, parts: Parts = Parts(), trace: bool = False, validate: bool = True
    ) -> None:
        super().__init__(seed, scenario, parts, trace, validate)
        self.plan_suspensions(scenario.settings)


class SuspendGroupSimulation(SuspendedJobs, GroupSimulation):
    """Runs mode allreduce."""

    def __init__(self, seed: int, scenario: SuspendGroupScenario, *args: Any) -> None:
        GroupSimulation.__init__(self, seed, scenario, *args)
        self.plan_suspensions(scenario.settings)

    def forget_processes(self) -> None:
        self.ends.append(self.kernel.now)
        for ring in self.rings.values():
            ring.dead = True


def simulate_suspend(
    seed: int,
    scenario: SuspendScenario | SuspendGroupScenario | None = None,
    parts: Parts = Parts(),
    trace: list[str] | None = None,
    validate: bool = True,
) -> SimOutcome:
    """Run one whole job, as ``sim.simulation.simulate``."""
    scenario = scenario or suspend_scenario(seed)
    sim: SuspendedJobs
    if isinstance(scenario, SuspendGroupScenario):
        sim = SuspendGroupSimulation(seed, scenario, parts, trace is not None, validate)
    else:
        sim = SuspendPsSimulation(seed, scenario, parts, trace is not None, validate)
    return sim.run_traced(trace)
