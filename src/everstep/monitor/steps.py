"""Mode allreduce: was every sample trained exactly once? From the journal's committed steps and the workers' own logs.

1. **Tiling.** The steps that the journal was told, less those that a total loss made void, tile every epoch.
2. **Agreement.** Each worker logged, by itself, what it committed: wherever two logs, or a log and the journal, know
   where a step begins, they know the same place; no worker committed a step twice, or left one out of a generation that
   it was in and outlived; and what was told is in somebody's log.

A *lineage* is what follows from one formation of the group; the next one begins from a checkpoint, or from nothing, and
makes void what the one before committed behind that place.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

import msgspec

from everstep.bounds import MALFORMED
from everstep.ids import Incarnation, Slot
from everstep.model.group import Committed, Group, Position
from everstep.model.shard import ShardSchedule
from everstep.monitor.loops import LoopFold
from everstep.monitor.report import AuditReport, Offence
from everstep.storage.chain import BROKEN_CHAIN, read_chain

LOG_KIND = "steps"


class StepLog(msgspec.Struct):
    """Is what one worker says that it committed, in the order in which it did. ``problem``: of the file."""

    slot: Slot
    incarnation: Incarnation
    steps: list[Committed]
    problem: str | None = None

    @property
    def name(self) -> str:
        return f"worker:{self.slot} #{self.incarnation}"


class StateLineage(msgspec.Struct):
    """Is the lineage from generation ``lineage`` on, beginning at ``begin`` (``restore``: from this checkpoint, 0: from
    nothing)."""

    begun_by: int
    begin: Position
    restore: int
    copied: bool = False
    announced: list[Committed] = []


class StepFold:
    """Holds what the journal says of groups and their steps. ``lines`` by origin; ``members`` by generation.
    ``before``: by dataset, where a job that goes on from a checkpoint begins (but for the dataset of the first
    lineage's begin). ``loops``: what the script asked for. ``lost``: workers whose node was lost, and perhaps the end
    of their logs with it."""

    def __init__(self, loops: LoopFold | None = None) -> None:
        self.loops = loops or LoopFold()
        self.lineages: list[StateLineage] = []
        self.members: dict[int, set[tuple[Slot, Incarnation]]] = {}
        self.before: dict[int, tuple[int, int]] = {}
        self.lost: set[tuple[Slot, Incarnation]] = set()

    def published(self, group: Group) -> None:
        if group.generation in self.members:
            return  # the same one, divided anew
        self.members[group.generation] = {(m.slot, m.incarnation) for m in group.members}
        if group.lineage == group.generation:
            self.lineages.append(StateLineage(group.lineage, group.begin, group.restore, group.copied is not None))

    def announced(self, steps: Sequence[Committed]) -> None:
        for committed in steps:
            if (lineage := self.lineage(committed.generation)) is not None:
                lineage.announced.append(committed)

    def lineage(self, generation: int) -> StateLineage | None:
        """Return the one that this generation belongs to."""
        return next((lineage for lineage in reversed(self.lineages) if lineage.begun_by <= generation), None)


class StepsPiece(msgspec.Struct, array_like=True):
    """Steps ``[first, last]`` of a lineage, as far as not told before: positions ``[lo, hi)``."""

    first: int
    last: int
    dataset: int
    epoch: int
    lo: int
    hi: int
    generation: int
    loop: int = 0


def read_step_log(path: Path) -> StepLog:
    """Return one worker's log. What is wrong with it is in ``problem``; raises only if it cannot be read at all."""
    header, records, problem = read_chain(path)
    slot, life = 0, 0
    steps: list[Committed] = []
    try:
        if header or not problem:
            if header["kind"] != LOG_KIND:
                raise ValueError(header["kind"])
            slot, life = int(header["slot"]), int(header["incarnation"])
        decoder = msgspec.msgpack.Decoder(Committed)
        steps = [decoder.decode(record) for record in records]
    except (KeyError, TypeError, *MALFORMED):
        problem = problem or f"{BROKEN_CHAIN}: {path.name} is no log of a worker's steps"
    return StepLog(Slot(slot), Incarnation(life), steps, problem)


class StepCheck:
    """See the top of this file. ``over``: the job ended well, so everything must be there."""

    def __init__(self, fold: StepFold, plans: Sequence[ShardSchedule], report: AuditReport, over: bool) -> None:
        self.fold, self.plans, self.report, self.over = fold, plans, report, over
        self.places: dict[tuple[int, int], tuple[int, int, int]] = {}  # (origin, step) -> dataset, epoch, position
        self.pieces: dict[int, list[StepsPiece]] = {}  # by origin, told
        self.steps = self.voided = self.samples = self.skipped = 0

    def run(self, logs: Sequence[StepLog]) -> None:
        lineages = self.fold.lineages
        for i, lineage in enumerate(lineages):
            positions = dict(self.fold.before)
            for earlier in range(i):
                for p in self._kept(lineages[earlier], self._until(earlier, i)):
                    positions[p.dataset] = self._turned(p.epoch, p.hi, self.plans[p.dataset].samples)
            if lineage.begin != Position():
                positions[lineage.begin.dataset] = (lineage.begin.epoch, lineage.begin.sample)
            self._walk(lineage, positions)
        count: dict[tuple[int, int], list[tuple[int, int]]] = {}
        for i, lineage in enumerate(lineages):
            until = self._until(i, len(lineages) - 1)
            kept = list(self._kept(lineage, until))
            steps = sum(p.last + 1 - p.first for p in kept)
            self.steps += steps
            self.voided += sum(p.last + 1 - p.first for p in self.pieces[lineage.begun_by]) - steps
            for p in kept:
                count.setdefault((p.dataset, p.epoch), []).append((p.lo, p.hi))
            self._skips(lineage, kept)
            for p in kept:
                self._loop("journal", p)
        self._tile(count)
        for log in logs:
            self._log(log)
        if self.over and logs:
            self._witnessed(logs)

    def lineages(self) -> Iterable[tuple[StateLineage, list[StepsPiece]]]:
        """Return each lineage with what counts of it; after ``run``."""
        lineages = self.fold.lineages
        for i, lineage in enumerate(lineages):
            yield lineage, list(self._kept(lineage, self._until(i, len(lineages) - 1)))

    def _until(self, i: int, last: int) -> Position | None:
        """Return where lineage ``i`` is cut by those behind it, up to lineage ``last``."""
        return min((lineage.begin for lineage in self.fold.lineages[i + 1 : last + 1]), default=None)

    # ------------------------------------------------------------ the journal

    def _walk(self, lineage: StateLineage, positions: dict[int, tuple[int, int]]) -> None:
        """Each range continues the one before; repeats say the same."""
        step = lineage.begin.step
        pieces = self.pieces[lineage.begun_by] = []
        for c in sorted(lineage.announced, key=lambda c: (c.first, -c.last)):
            if not 0 <= c.dataset < len(self.plans) or not 0 <= c.lo < c.hi <= self.plans[c.dataset].samples:
                self._offend("outside", "journal", c)
                continue
            self._position(lineage, c, "journal")
            if c.last < step:
                continue
            epoch, at = positions.get(c.dataset, (0, 0))
            if c.first > step:
                self._offend("missing", "journal", c, f"steps {step}..{c.first - 1} before them were never told")
            elif c.first == step and (c.epoch, c.lo) != (epoch, at):
                what = "twice" if (c.epoch, c.lo) < (epoch, at) else "missing"
                self._offend(what, "journal", c, f"step {step} continues e{epoch} at {at}")
            elif c.first < step and not (c.epoch == epoch and c.lo < at < c.hi):
                self._offend("conflict", "journal", c, f"step {step} continues e{epoch} at {at}")
            else:
                pieces.append(
                    StepsPiece(max(c.first, step), c.last, c.dataset, c.epoch, at, c.hi, c.generation, c.loop)
                )
            step = c.last + 1
            positions[c.dataset] = self._turned(c.epoch, c.hi, self.plans[c.dataset].samples)

    def _kept(self, lineage: StateLineage, until: Position | None) -> Iterable[StepsPiece]:
        """Return what is not void."""
        for p in self.pieces[lineage.begun_by]:
            if until is None or p.last < until.step:
                yield p
            elif p.first < until.step:
                hi = until.sample if p.epoch == until.epoch else p.hi
                yield StepsPiece(p.first, until.step - 1, p.dataset, p.epoch, p.lo, hi, p.generation, p.loop)

    def _skips(self, lineage: StateLineage, kept: Sequence[StepsPiece]) -> None:
        found = {(c.dataset, c.epoch, lo, hi) for c in lineage.announced for lo, hi in c.skipped}
        for dataset, epoch, lo, hi in sorted(found):
            spans = [(max(lo, p.lo), min(hi, p.hi)) for p in kept if (p.dataset, p.epoch) == (dataset, epoch)]
            samples = sum(max(0, b - a) for a, b in spans)
            if samples:
                self.skipped += samples
                self.report.skipped.append(f"{self._epoch(dataset, epoch)} [{lo}, {hi}): gradient not finite")

    def _tile(self, count: dict[tuple[int, int], list[tuple[int, int]]]) -> None:
        """Check that every epoch's ranges, from whatever lines, meet without hole or overlap."""
        first = self.fold.lineages[0].begin if self.fold.lineages else Position()
        last = {d: max(e for x, e in count if x == d) for d, _ in count}
        for (dataset, epoch), spans in sorted(count.items()):
            at = first.sample if (dataset, epoch) == (first.dataset, first.epoch) else 0
            began = at
            samples = self.plans[dataset].samples
            for lo, hi in sorted(spans):
                if lo != at:
                    self.report.offenders.append(
                        Offence("missing" if lo > at else "twice", "journal", self._epoch(dataset, epoch), lo, hi)
                    )
                at = max(at, hi)
            if at == samples and began == 0:
                self.report.finished.append(self._epoch(dataset, epoch))
                self.samples += samples
            elif at == samples:
                self.report.notes.append(f"{self._epoch(dataset, epoch)}: below {began} by the job that was resumed")
            elif epoch < last[dataset]:
                name = self._epoch(dataset, epoch)
                self.report.offenders.append(Offence("missing", "journal", name, at, samples, detail="never trained"))

    # ------------------------------------------------------------ the workers' logs

    def _log(self, log: StepLog) -> None:
        if log.problem is not None:
            if log.problem.startswith(BROKEN_CHAIN):
                self.report.offenders.append(Offence("broken chain", log.name, detail=log.problem))
            else:
                self.report.notes.append(f"{log.name}: {log.problem}")
        next_step: dict[int, int] = {}
        last = len(self.fold.lineages) - 1
        cuts = {lineage.begun_by: self._until(i, last) for i, lineage in enumerate(self.fold.lineages)}
        for c in log.steps:
            lineage = self.fold.lineage(c.generation)
            if lineage is None or (log.slot, log.incarnation) not in self.fold.members.get(c.generation, ()):
                self._offend("outside", log.name, c, f"it is not in generation {c.generation}")
                continue
            expected = next_step.get(lineage.begun_by)
            if expected is not None and c.first < expected:
                self._offend("twice", log.name, c, f"it logged steps below {expected} before")
            elif expected is not None and c.first > expected:
                self._missed(log, lineage, expected, c)
            next_step[lineage.begun_by] = c.last + 1
            if (cut := cuts[lineage.begun_by]) is None or c.first < cut.step:
                self._loop(log.name, StepsPiece(c.first, c.last, c.dataset, c.epoch, c.lo, c.hi, c.generation, c.loop))
            self._position(lineage, c, log.name)
            announced = max((p.last for p in self.pieces.get(lineage.begun_by, ())), default=-1)
            if self.over and lineage is self.fold.lineages[-1] and c.last > announced:
                self._offend(
                    "missing", "journal", c, f"{log.name} committed them, the journal has steps up to {announced}"
                )

    def _loop(self, who: str, p: StepsPiece) -> None:
        """These steps are of an epoch that their loop of the script asked for."""
        wrong = self.fold.loops.of_steps(p.loop, p.dataset, p.epoch)
        if wrong:
            words = f"{who}: {self._epoch(p.dataset, p.epoch)} [{p.lo}, {p.hi}) was trained {wrong}"
            self.report.loops.append(words)

    def _missed(self, log: StepLog, lineage: StateLineage, expected: int, c: Committed) -> None:
        """A hole in a worker's log is right only where it was not in the group."""
        me = (log.slot, log.incarnation)
        for p in self.pieces.get(lineage.begun_by, ()):
            if p.first < c.first and p.last >= expected and me in self.fold.members.get(p.generation, ()):
                words = f"it was in generation {p.generation}, but did not log steps {expected}..{c.first - 1}"
                self._offend("missing", log.name, c, words)
                return

    def _witnessed(self, logs: Sequence[StepLog]) -> None:
        """Check that every step that was told is in the log of a worker. If all workers of its generation were lost
        with their nodes, the end of their logs may be missing: the journal alone says it then."""
        alone: list[StepsPiece] = []
        for lineage in self.fold.lineages:
            logged = sorted(
                (c.first, c.last) for log in logs for c in log.steps if self.fold.lineage(c.generation) is lineage
            )
            merged: list[list[int]] = []
            for first, last in logged:
                if merged and first <= merged[-1][1] + 1:
                    merged[-1][1] = max(merged[-1][1], last)
                else:
                    merged.append([first, last])
            for p in self.pieces[lineage.begun_by]:
                if not any(first <= p.first and p.last <= last for first, last in merged):
                    if self.fold.members.get(p.generation, set()) <= self.fold.lost:
                        alone.append(p)
                        continue
                    name = self._epoch(p.dataset, p.epoch)
                    words = f"steps {p.first}..{p.last} are in no worker's log"
                    self.report.offenders.append(Offence("no log", "journal", name, p.lo, p.hi, detail=words))
        if alone:
            names = ", ".join(f"worker:{slot} #{life}" for slot, life in sorted(self.fold.lost))
            self.report.notes.append(
                f"the node of {names} was lost with the end of its log: of steps {alone[0].first}..{alone[-1].last} "
                "the journal alone says that they are committed"
            )

    # ------------------------------------------------------------ both

    def _position(self, lineage: StateLineage, c: Committed, who: str) -> None:
        """Compare where these steps begin and end with what is known of that."""
        if not 0 <= c.dataset < len(self.plans):
            self._offend("outside", who, c)
            return
        ends = ((c.first, (c.dataset, c.epoch, c.lo)), (c.last + 1, (c.dataset, *self._end(c))))
        for step, place in ends:
            known = self.places.setdefault((lineage.begun_by, step), place)
            if known != place and known[0] == place[0]:
                words = f"step {step} is at {place[1:]} there, at {known[1:]} elsewhere (epoch, position)"
                self._offend("conflict", who, c, words)

    def _end(self, c: Committed) -> tuple[int, int]:
        return self._turned(c.epoch, c.hi, self.plans[c.dataset].samples)

    @staticmethod
    def _turned(epoch: int, position: int, samples: int) -> tuple[int, int]:
        return (epoch + 1, 0) if position == samples else (epoch, position)

    def _epoch(self, dataset: int, epoch: int) -> str:
        name = self.plans[dataset].name if dataset < len(self.plans) else f"dataset {dataset}"
        return f"{name} e{epoch}"

    def _offend(self, what: str, who: str, c: Committed, detail: str = "") -> None:
        words = f"steps {c.first}..{c.last} of generation {c.generation}" + (f": {detail}" if detail else "")
        self.report.offenders.append(Offence(what, who, self._epoch(c.dataset, c.epoch), c.lo, c.hi, detail=words))


def check_steps(
    fold: StepFold, plans: Sequence[ShardSchedule], logs: Sequence[StepLog], run_dir: str, over: bool
) -> AuditReport:
    """Audit committed steps. ``over``: the job ended well."""
    report = AuditReport(run_dir)
    check = StepCheck(fold, plans, report, over)
    check.run(logs)
    for lineage in fold.lineages[1:]:
        source = f"checkpoint {lineage.restore}" if lineage.restore else "the beginning"
        source = "the copy of its stages" if lineage.copied else source
        report.notes.append(
            f"every state was lost before generation {lineage.begun_by}: steps from {lineage.begin.step} on were"
            f" void, and done again from {source}"
        )
    report.counts = {
        "steps": check.steps,
        "void": check.voided,
        "samples": check.samples,
        "generations": len(fold.members),
        "lines": len(fold.lineages),
        "logs": len(logs),
        "skipped_samples": check.skipped,
    }
    return report
