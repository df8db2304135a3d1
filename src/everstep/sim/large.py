"""``python -m everstep.sim.large``: a large group in virtual time, one worker lost every so often: what it costs.

Steps lost: begun and done again by the others. Goodput: committed steps by those that the same time would have
committed without a loss. The master's CPU is that of this machine: brain and journal's events, no sockets.
"""

from __future__ import annotations

import argparse
import time
from typing import Any

from everstep.brain.events import PublishGroup, StepsCommitted
from everstep.sim.group import TELL_S, GroupMaster, GroupScenario, GroupSimulation, GroupWorker


class LargeWorker(GroupWorker):
    """Is a member that, unless it is the first member tells steps only if nobody else has for seconds: it need not look
    often."""

    @property
    def tell_s(self) -> float:  # type: ignore[override]
        return TELL_S if self.rank == 0 else 0.25


class Large(GroupSimulation):
    """Counts what the master does. ``hold_up``: virtual seconds between a loss and the next committed step."""

    def __init__(self, seed: int, scenario: GroupScenario) -> None:
        self.cpu_s = 0.0
        self.generations = self.reports = 0
        self.kills = 0
        self.killed_at = 0.0
        self.hold_up: list[float] = []
        self.begun: set[tuple[int, int]] = set()  # generation, step
        self.committed_at: dict[int, float] = {}  # by the first member to know, by step
        super().__init__(seed, scenario, validate=False, worker=LargeWorker)

    def new_master(self) -> Any:
        self.masters += 1
        self.master = Metered(self, self.masters)
        return self.master

    def kill_one(self, every_s: float) -> None:
        workers = [p for p in self.processes if isinstance(p, GroupWorker) and p.machine.present is not None]
        if workers:
            self.kills += 1
            self.killed_at = self.kernel.now
            self.kernel.rng.choice(workers).exit(-9)
        self.kernel.after(every_s, self.kill_one, every_s)

    def begins(self, worker: Any, c: Any) -> None:
        self.begun.add((c.generation, c.first))

    @property
    def redone(self) -> int:
        """Return steps that were begun once more, by another generation."""
        return len(self.begun) - len({step for _, step in self.begun})

    def applies(self, lineage: int, c: Any) -> None:
        self.committed_at.setdefault(c.first, self.kernel.now)
        if self.killed_at:
            self.hold_up.append(self.kernel.now - self.killed_at)
            self.killed_at = 0.0


class Metered(GroupMaster):
    def record(self, fact: Any, *rest: Any, **named: Any) -> None:
        sim: Any = self.sim
        began = time.process_time()
        super().record(fact, *rest, **named)
        sim.cpu_s += time.process_time() - began
        sim.reports += isinstance(fact, StepsCommitted)

    def carry_out(self, instructions: Any, conn: Any, handler: Any, args: Any, event: Any) -> None:
        sim: Any = self.sim
        sim.generations += sum(isinstance(i, PublishGroup) for i in instructions)
        super().carry_out(instructions, conn, handler, args, event)


def formed(workers: int, step_s: float, seed: int) -> Large:
    """Return a calm job in which everybody is there."""
    scenario = GroupScenario(
        workers=workers,
        ps=0,
        samples=10**9,
        shard_samples=10**6,
        epochs=1,
        batch_s=step_s,
        chaos_s=0.0,
        snapshot_every=10**9,
    )
    sim = Large(seed, scenario)
    sim.kernel.run(2.0)
    return sim


def measure(workers: int, seconds: float, every_s: float, step_s: float, seed: int = 1) -> dict[str, float]:
    """Run for ``seconds`` (virtual) after everybody is there, losing a worker every ``every_s``."""
    sim = formed(workers, step_s, seed)
    groups = sim.master.brain.state.groups
    before, cpu, events, started = groups.step, sim.cpu_s, sim.brain_events, sim.kernel.now
    sim.kernel.after(every_s / 2, sim.kill_one, every_s)
    sim.kernel.run(started + seconds)
    groups = sim.master.brain.state.groups
    steps = groups.step - before
    calm = measure_calm(workers, step_s, seed) if sim.kills else steps / seconds
    return {
        "workers": workers,
        "losses": sim.kills,
        "steps_redone": sim.redone,
        "generations": groups.generations,
        "steps": steps,
        "steps_per_s": round(steps / seconds, 3),
        "goodput": round(steps / seconds / calm, 4),
        "hold_up_s": round(max(sim.hold_up, default=0.0), 3),
        "events_per_s": round((sim.brain_events - events) / seconds, 2),
        "cpu_us_per_step": round((sim.cpu_s - cpu) / max(1, steps) * 1e6, 1),
        "void": float(sum(v.last + 1 - v.first for v in groups.history.voids)),
    }


def measure_calm(workers: int, step_s: float, seed: int) -> float:
    """Steps per second without losses, from one commit to another some 20 s later."""
    sim = formed(workers, step_s, seed)
    sim.kernel.run(sim.kernel.now + 20.0)
    first, last = min(sim.committed_at), max(sim.committed_at)
    return (last - first) / (sim.committed_at[last] - sim.committed_at[first])


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m everstep.sim.large", description=__doc__.splitlines()[0])
    parser.add_argument("--workers", type=int, default=1000)
    parser.add_argument("--seconds", type=float, default=120.0)
    parser.add_argument("--every", type=float, default=60.0, help="seconds between two losses")
    parser.add_argument("--step", type=float, default=0.5, help="seconds that a step computes")
    chosen = parser.parse_args()
    for name, value in measure(chosen.workers, chosen.seconds, chosen.every, chosen.step).items():
        print(f"{name:16} {value:,}")


if __name__ == "__main__":
    main()
