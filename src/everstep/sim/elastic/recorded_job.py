"""Makes the model of a job from a run of it: how long everything took there, out of its journal.

Medians; what the run never did (no loss, no checkpoint) stays assumed, and each number says which it is.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

from everstep.brain.brain import Brain
from everstep.brain.events import (
    CapacityChanged,
    CheckpointCommitted,
    Event,
    Granted,
    GroupAsked,
    GroupSynced,
    InstructionType,
    NodeJoined,
    Ok,
    OrderSnapshots,
    ProcessExited,
    PublishGroup,
    Reply,
    ShardAsked,
    ShardDone,
    StartProcess,
    StepsCommitted,
)
from everstep.config.parity import parse_code
from everstep.errors import ConfigError
from everstep.ids import Incarnation, LeaseNo, NodeId, Slot
from everstep.model.capacity import CapacityStep
from everstep.model.group import Committed
from everstep.model.member import Role
from everstep.monitor.node_costs import merged
from everstep.policies.placement_builder import How
from everstep.sim.elastic.job_model import Figure, MeasuredJob, speed_left
from everstep.sim.elastic.virtual_job import Work
from everstep.storage.journal import read_journal

JOURNAL_FILE = "journal.sqlite"
STEPS_LEAST = 40
"""Of groups of one size: fewer tell no speed."""
STARTS_LEAST = 3
"""Of workers, where so many started at a time: fewer tell no time."""
Life = tuple[Slot, Incarnation]


class _Start(NamedTuple):
    """Is a worker that starts. ``together``: so many were starting at that time, with those whose machine had only been
    granted."""

    at: float
    together: int
    node: NodeId


class RecordedJob:
    """Is the fold of a journal. Call ``take`` with every event."""

    def __init__(self) -> None:
        self.brain = Brain()
        self._ordered: dict[Life, _Start] = {}
        self._forks: list[tuple[float, int]] = []  # seconds, and of how many that started at a time
        self._granted: dict[NodeId, float] = {}
        self._agents: list[float] = []
        self._leases: dict[LeaseNo, tuple[Slot, float, int]] = {}
        self._spans: dict[Slot, list[tuple[float, float]]] = {}
        self._samples = 0
        self._lost: dict[int, float] = {}  # generation without a lost member -> when it was published
        self._sizes: dict[int, int] = {}
        self._reported: dict[int, list[tuple[float, int, int]]] = {}  # generation -> (when, steps, samples)
        self._counted: dict[int, int] = {}  # generation -> the last step that counts
        self._batch = 0
        self._asked: dict[Life, float] = {}
        self._copies: list[float] = []
        self._ordered_at: dict[int, float] = {}
        self._checkpoints: list[tuple[float, int, bool]] = []  # seconds, bytes, full
        self._rebuild = 0.0
        self._rebuilding = 0
        self._rebuilds: list[tuple[float, float]] = []  # seconds, share of all rows

    def __repr__(self) -> str:
        return f"<recorded job of {self._samples} samples>"

    def take(self, event: Event) -> None:
        """Take one event in."""
        out = self.brain.handle(event)
        fact, sender, at = event.fact, event.sender, event.at
        life = (sender.slot, sender.incarnation)
        match fact:
            case ShardAsked():
                self._begins(life, at)
                for one in out:
                    if isinstance(one, Reply) and isinstance(one.answer, Granted):
                        lease = one.answer.lease
                        self._leases.setdefault(lease.no, (sender.slot, at, lease.stop - lease.start))
            case ShardDone() if _taken(out) and fact.lease in self._leases:
                slot, since, samples = self._leases.pop(fact.lease)
                self._spans.setdefault(slot, []).append((since, at))
                self._samples += samples
            case GroupAsked():
                self._begins(life, at)
                self._batch = fact.batch_samples
                if fact.position is None and self.brain.state.groups.group is not None:
                    self._asked.setdefault(life, at)
            case GroupSynced() if life in self._asked:
                self._copies.append(at - self._asked.pop(life))
            case StepsCommitted() if _taken(out):
                for c in fact.steps:
                    self._committed(c, at)
            case CapacityChanged(step=CapacityStep.GRANTED):
                self._granted[fact.node] = at
            case CapacityChanged(step=CapacityStep.TAKEN_BACK | CapacityStep.GIVEN_BACK):
                self._granted.pop(fact.node, None)
                self._ordered = {of: start for of, start in self._ordered.items() if start.node != fact.node}
            case ProcessExited(role=Role.WORKER):
                self._ordered.pop((fact.slot, fact.incarnation), None)
            case NodeJoined() if fact.node in self._granted:
                self._agents.append(at - self._granted.pop(fact.node))
            case CheckpointCommitted() if not fact.error and fact.checkpoint in self._ordered_at:
                shown = self.brain.checkpoints.shown
                if shown is not None and shown.number == fact.checkpoint:
                    took = at - self._ordered_at.pop(fact.checkpoint)
                    self._checkpoints.append((took, shown.bytes_written, not shown.since))
            case _:
                pass
        for one in out:
            self._look(one, at)
        missing = self.brain.state.protection.missing
        reconstructing = sum(p.how is How.RECONSTRUCT for p in missing.values())
        if reconstructing and not self._rebuilding:
            self._rebuild, self._rebuilding = at, reconstructing
        elif not reconstructing and self._rebuilding:
            self._rebuilds.append((at - self._rebuild, self._rebuilding / self.brain.job.spec.partitions))
            self._rebuilding = 0

    def _committed(self, c: Committed, at: float) -> None:
        """Count steps that nobody reported before: each member that leaves a group tells of its last ones once more."""
        known = self._counted.get(c.generation, -1)
        new = c.last - max(c.first - 1, known)
        if new <= 0:
            return
        self._counted[c.generation] = c.last
        samples = (c.hi - c.lo) * new // (c.last + 1 - c.first)
        reported = self._reported.setdefault(c.generation, [])
        before = reported.pop() if reported and reported[-1][0] == at else (at, 0, 0)
        reported.append((at, before[1] + new, before[2] + samples))

    def _begins(self, life: Life, at: float) -> None:
        if life in self._ordered:
            start = self._ordered.pop(life)
            self._forks.append((at - start.at, start.together))

    def _look(self, one: InstructionType, at: float) -> None:
        match one:
            case StartProcess(role=Role.WORKER):
                together = len(self._granted) + len(self._ordered) + 1
                self._ordered[one.slot, one.incarnation] = _Start(at + one.after_s, together, one.node)
            case PublishGroup(group=group):
                self._sizes[group.generation] = group.size
                if group.lost and group.lineage < group.generation and not group.hold:
                    self._lost.setdefault(group.generation, at)
            case OrderSnapshots(checkpoint=number):
                self._ordered_at.setdefault(number, at)
            case _:
                pass

    # ------------------------------------------------------------ what came out

    def model(self, name: str) -> MeasuredJob:
        """Return the model. Raise ConfigError if the run trained too little to tell a speed."""
        source = f"measured in {name}"
        figures: dict[str, Figure] = {}

        def put(figure: str, values: list[float]) -> None:
            if values:
                figures[figure] = Figure(max(0.0, statistics.median(values)), f"{source}, median of {len(values)}")

        put("agent_s", self._agents)
        put("fork_s", [took for took, _ in self._forks])
        rates = self._rates()
        spans = [span for found in self._spans.values() for span in merged(found)]
        worked = sum(b - a for a, b in spans)
        if worked > 0 and self._samples:
            code = parse_code(self.brain.job.spec.parity)
            words = f"{source}, {worked:.0f} s of workers" + (f", without the cost of parity {code}" if code.m else "")
            left = speed_left(MeasuredJob().protecting, code.m)  # (a virtual job has that cost on top of its speed)
            figures["samples_per_s"] = Figure(self._samples / worked / left, words)
        elif rates:
            size, rate = rates[0]
            figures["samples_per_s"] = Figure(rate / size, source)
        else:
            raise ConfigError(f"{name}: it trained too little to tell how fast: name a run that ended, or --assume")
        if self._batch:
            figures["batch_s"] = Figure(self._batch / figures["samples_per_s"].value, source)
        put("meet_s", self._meets(rates))
        self._bytes(figures, source)
        return MeasuredJob(figures, rates, self._starts())

    def _bytes(self, figures: dict[str, Figure], source: str) -> None:
        full = [size for _, size, whole in self._checkpoints if whole and size]
        state = figures["state_bytes"] = (
            Figure(float(statistics.median(full)), f"{source}, a full checkpoint") if full else Figure(1e6, "assumed")
        )
        if any(took > 0 and size for took, size, _ in self._checkpoints):
            speeds = [size / took for took, size, _ in self._checkpoints if took > 0 and size]
            figures["checkpoint_bytes_per_s"] = Figure(statistics.median(speeds), source)
        parts = [size for _, size, whole in self._checkpoints if not whole]
        if full and parts:
            figures["changed"] = Figure(min(1.0, statistics.median(parts) / state.value), source)
        if self._copies:
            took = max(1e-3, statistics.median(self._copies))
            figures["copy_bytes_per_s"] = Figure(state.value / took, f"{source}: {took:.2f} s a newcomer")
        if self._rebuilds:
            speeds = [share * state.value / max(1e-3, took) for took, share in self._rebuilds]
            figures["rebuild_bytes_per_s"] = Figure(statistics.median(speeds), source)

    def _starts(self) -> list[tuple[int, float]]:
        """Return what a worker needed to start, by how many started at a time. Seldom ones tell nothing."""
        found: dict[int, list[float]] = {}
        for took, together in self._forks:
            found.setdefault(together, []).append(took)
        return [(n, statistics.median(times)) for n, times in found.items() if len(times) >= STARTS_LEAST]

    def _rates(self) -> list[tuple[int, float]]:
        """Return samples per second of groups by size: from a generation's first word of steps to its last one."""
        sums: dict[int, tuple[float, int, int]] = {}
        for generation, reported in self._reported.items():
            size = self._sizes.get(generation, 0)
            took, rest = reported[-1][0] - reported[0][0], reported[1:]
            if size and took > 0 and rest:
                before = sums.get(size, (0.0, 0, 0))
                steps, samples = sum(n for _, n, _ in rest), sum(n for _, _, n in rest)
                sums[size] = (before[0] + took, before[1] + steps, before[2] + samples)
        return [(size, samples / took) for size, (took, steps, samples) in sorted(sums.items()) if steps >= STEPS_LEAST]

    def _meets(self, rates: list[tuple[int, float]]) -> list[float]:
        out = []
        by_size = dict(rates)
        for generation, at in self._lost.items():
            reported, size = self._reported.get(generation), self._sizes.get(generation, 0)
            if reported and size in by_size:
                when, _, samples = reported[0]
                out.append(when - at - samples / by_size[size])
        return out

    def work(self) -> Work:
        """Return what the run was to train. Raise ConfigError if nobody asked for data."""
        datasets = [d for d in self.brain.shards.datasets if d.epochs_known]
        if not datasets:
            raise ConfigError("nobody asked for data in that run: give --samples")
        plan = datasets[0].plan
        return Work(plan.samples, datasets[0].epochs_known, plan.shard_samples)


def _taken(out: Iterable[InstructionType]) -> bool:
    return any(isinstance(one, Reply) and isinstance(one.answer, Ok) for one in out)


def read_recorded(run_dir: Path) -> RecordedJob:
    """Return the fold of a run's journal. Raise ConfigError or PlatformError."""
    found = RecordedJob()
    for _, event, _ in read_journal(run_dir / JOURNAL_FILE):
        found.take(event)
    return found
