"""Compares what a witness counted (``es.testing.Witness``) with what the audit says.

The audit reads what the ps and the workers logged. The witness is a part of the model: its rows gain 1.0 for each
sample that was applied, and its steps 1.0 for each iteration that was. Both must say the same:

* every sample of every epoch was applied once, or not at all; how many not at all, the audit says: skipped, set aside,
  or left out by the script. (In mode allreduce it says in which steps ``opt.step()`` was not called; whether they were
  added to a later one is for the script to say, so that there it is a range.)
* a loop has steps in those epochs that it asked for, and in no others;
* as many steps were applied as the audit counts: in mode allreduce always, in mode ps (async, bounded) as long as no
  partition changed hands, since a worker that replaces another one may divide the rest of a shard otherwise.

A job that went on from a checkpoint has the counts of the runs before in its model; they are looked up in the run
directories that it names, as far as these are there.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path

import msgspec
import numpy as np
from numpy.typing import NDArray

from everstep.bounds import MALFORMED
from everstep.brain.events import StepsCommitted
from everstep.errors import ConfigError
from everstep.ids import LeaseNo, ShardKey
from everstep.model.group import Position
from everstep.model.shard import shard_key, split_key
from everstep.model.snapshot import Manifest
from everstep.monitor.journal_fold import JournalFold, JournalReader
from everstep.monitor.pslog import PsLog, read_log
from everstep.monitor.report import AuditReport, Verdict
from everstep.monitor.steps import StepCheck

ROWS = "witness_rows"
STEPS = "witness_steps"
SAMPLES_MAX = 1 << 40
EPOCHS_MAX = 1 << 16
OFF_MAX = 0.01
"""A count is a whole number, up to what float32 rounds off: the mean over a step, times its samples."""

ABOUT_FILE = "model.json"
_SHOWN = 5
_RUNS_BEFORE = 64

Spans = list[tuple[int, int]]
Where = tuple[int, int]  # dataset, epoch


def witness_key(dataset: int, epoch: int, sample: int) -> int:
    """Return the key of a sample's row."""
    return (dataset * EPOCHS_MAX + epoch) * SAMPLES_MAX + sample


class Counts(msgspec.Struct):
    """Is what a witness counted. ``rows``: by (dataset, epoch), the samples that have a row and its value; ``steps``:
    [loops, epochs], None: it had none."""

    rows: dict[Where, tuple[NDArray[np.int64], NDArray[np.float32]]]
    steps: NDArray[np.float32] | None = None

    @property
    def loops(self) -> set[int]:
        """Return the loops of the script, from 1, that have steps."""
        return set() if self.steps is None else {int(at) + 1 for at in np.flatnonzero((self.steps > 0.5).any(1))}


def read_counts(folder: Path) -> Counts:
    """Read the counts of a model as a job leaves it. Raises ConfigError where there is no witness in it."""
    from safetensors.numpy import load_file  # (of the extra that writes the model, too)

    rows: dict[Where, tuple[NDArray[np.int64], NDArray[np.float32]]] = {}
    steps: NDArray[np.float32] | None = None
    found = False
    for path in sorted(folder.glob("*.safetensors")):
        for name, values in load_file(path).items():
            last = name.rpartition(".")[2]
            if last == ROWS:
                found = True
                for epoch, counted in enumerate(values):
                    rows[0, epoch] = np.arange(len(counted)), counted
            elif last == STEPS:
                steps = values
    table = folder / "tables" / f"{ROWS}.safetensors"
    if table.is_file():
        found = True
        parts = load_file(table)
        keys, values = parts["keys"].astype(np.int64), parts["values"].reshape(-1)
        places = keys // SAMPLES_MAX
        for place in np.unique(places).tolist():
            mine = places == place
            rows[divmod(place, EPOCHS_MAX)] = keys[mine] % SAMPLES_MAX, values[mine]
    if not found:
        raise ConfigError(
            f"{folder}: no model with a witness in it; put es.testing.Witness into the script's model, and let the job "
            "leave its model (docs/endings.md)"
        )
    return Counts(rows, steps)


class Expected(msgspec.Struct):
    """Is what is expected of one epoch, by the audit. ``samples``: of the dataset; ``done``: how many were consumed;
    ``whole``: no more can have been. ``not_applied``: positions that were consumed and surely not applied; ``perhaps``:
    or perhaps not. ``unknown``: by a run before, of which nothing is known."""

    samples: int
    done: int = 0
    whole: bool = False
    not_applied: Spans = []
    perhaps: Spans = []
    unknown: bool = False

    @property
    def most(self) -> int:
        return (self.done if self.whole else self.samples) - _length(self.not_applied)

    @property
    def least(self) -> int:
        return 0 if self.unknown else max(0, self.done - _length([*self.not_applied, *self.perhaps]))


class Expectation(msgspec.Struct):
    """Is what is expected of a run."""

    epochs: dict[Where, Expected]
    steps: dict[tuple[int, int], tuple[int, int]] | None = None


def _length(spans: Iterable[tuple[int, int]]) -> int:
    """Return how many positions are in at least one of these."""
    total, at = 0, -1
    for lo, hi in sorted(spans):
        total += max(0, hi - max(lo, at))
        at = max(at, hi)
    return total


# ---------------------------------------------------------------- what the audit says


def expectation(run_dir: Path, checkpoint: int = 0, runs: int = 0) -> Expectation:
    """Return what a run, with those that it goes on from, applied; of one that is not done, what it had at this
    checkpoint (0: now). Raises ConfigError, PlatformError."""
    with JournalReader(run_dir / "journal.sqlite") as journal:
        journal.advance()
        fold = journal.fold
    at = None if fold.done_well else fold.manifests.get(checkpoint)
    made = _of_groups(fold, run_dir, at) if fold.brain.takes(StepsCommitted) else _of_servers(fold, run_dir, at)
    url = fold.brain.checkpoints.start.url
    if not url:
        return made
    before = _run_of(url)
    if before is None or runs > _RUNS_BEFORE:
        for one in made.epochs.values():
            one.unknown = True
        return Expectation(made.epochs)
    earlier = expectation(before, 0, runs + 1)
    for where, one in made.epochs.items():
        known = earlier.epochs.get(where)
        if known is not None:  # (what it did behind the checkpoint was done again, and may have gone otherwise)
            one.perhaps += known.not_applied + known.perhaps
            one.unknown = known.unknown
    return Expectation(made.epochs)


def _run_of(url: str) -> Path | None:
    """Return the run directory whose checkpoints these are."""
    path = Path(url.removeprefix("file://"))
    return next((p for p in (path, path.parent) if (p / "journal.sqlite").is_file()), None)


def _of_groups(fold: JournalFold, run_dir: Path, manifest: Manifest | None) -> Expectation:
    on_ps = fold.brain.job.spec.ps > 0
    check = StepCheck(fold.steps, fold.plans, AuditReport(""), over=False)
    check.run([])
    epochs: dict[Where, Expected] = {}
    saved = manifest.replica.position if manifest is not None and manifest.replica is not None else None
    for number, dataset in enumerate(fold.brain.shards.datasets):
        samples = dataset.plan.samples
        position = fold.brain.state.groups.position(number)
        if saved is not None and manifest is not None:
            finished = manifest.datasets[number].finished_epochs if number < len(manifest.datasets) else 0
            position = saved if saved.dataset == number else Position(saved.step, number, finished, 0)
        for epoch in range(position.epoch + (position.sample > 0)):
            done = samples if epoch < position.epoch else position.sample
            epochs[number, epoch] = Expected(samples, done, True)
        replica = manifest.replica if manifest is not None else None
        if replica is not None and replica.waits_in >= 0:  # (gradients that had not reached its tables yet)
            first = split_key(ShardKey(replica.waits_in))[:2]
            for where, known in epochs.items():
                if where[0] == first[0] == number and where >= first:
                    known.perhaps.append((replica.waits_from if where == first else 0, known.done))
        if saved is not None and on_ps:  # (its tables are of a little later than the rest)
            now = fold.brain.state.groups.position(number)
            for epoch in range(position.epoch, now.epoch + (now.sample > 0)):
                done = position.sample if epoch == position.epoch else 0
                epochs[number, epoch] = Expected(samples, done)
    steps: dict[tuple[int, int], tuple[int, int]] = {}
    for lineage, kept in check.lineages():
        for p in kept:
            one = epochs.get((p.dataset, p.epoch))
            last = p.last if saved is None else min(p.last, saved.step - 1)
            if one is None or last < p.first:
                continue
            hi = min(p.hi, one.done)
            announced = [c for c in lineage.announced if (c.dataset, c.epoch) == (p.dataset, p.epoch)]
            one.not_applied += _inside([s for c in announced for s in c.skipped], p.lo, hi)
            if not on_ps:  # (else a later step may have applied it: the ps have written down which are left out)
                one.perhaps += _inside([s for c in announced for s in c.unstepped], p.lo, hi)
            at = p.loop, p.epoch
            least, most = steps.get(at, (0, 0))
            steps[at] = least + last + 1 - p.first, most + last + 1 - p.first
    odd = any(one.not_applied or one.perhaps for one in epochs.values())
    odd = odd or (on_ps and any(c.unstepped for lineage, _ in check.lineages() for c in lineage.announced))
    for log in [read_log(p) for p in sorted((run_dir / "audit").glob("ps-*.log"))] if on_ps else ():
        for i in np.flatnonzero(log.skipped).tolist():
            number, of_epoch, _ = split_key(ShardKey(int(log.shard[i])))
            if (number, of_epoch) in epochs:
                epochs[number, of_epoch].perhaps.append((int(log.lo[i]), int(log.hi[i])))
    return Expectation(epochs, None if odd or any(loop == 0 for loop, _ in steps) else steps)


def _inside(spans: Iterable[tuple[int, int]], lo: int, hi: int) -> Spans:
    return sorted({(max(a, lo), min(b, hi)) for a, b in spans if max(a, lo) < min(b, hi)})


def _of_servers(fold: JournalFold, run_dir: Path, manifest: Manifest | None) -> Expectation:
    logs = [read_log(p) for p in sorted((run_dir / "audit").glob("ps-*.log"))]
    quiet = not any(log.moved for log in logs) and len({log.slot for log in logs}) == len(logs)
    epochs: dict[Where, Expected] = {}
    for number, dataset in enumerate(fold.brain.shards.datasets):
        for epoch in range(len(dataset.epochs)):
            epochs[number, epoch] = Expected(dataset.plan.samples, whole=dataset.epochs[epoch].finished)
    for key in fold.done if manifest is None else _covered(manifest):
        number, epoch, index = split_key(key)
        lo, hi = fold.plans[number].bounds(index)
        epochs[number, epoch].done += hi - lo
    if manifest is not None:  # (it has what it covers, and some of what came meanwhile)
        for epoch_of in epochs.values():
            epoch_of.whole = epoch_of.done == epoch_of.samples
    for key in fold.quarantined():
        number, epoch, index = split_key(key)
        lo, hi = fold.plans[number].bounds(index)
        epochs[number, epoch].done += hi - lo
        epochs[number, epoch].perhaps.append((lo, hi))  # (it may have been begun)
    partitions: dict[tuple[int, int, int], int] = {}
    for log in logs:
        for i in np.flatnonzero(log.skipped).tolist():
            at = (int(log.shard[i]), int(log.lo[i]), int(log.hi[i]))
            partitions[at] = partitions.get(at, 0) + int(log.applied[i])
    for (shard, lo, hi), count in partitions.items():
        number, epoch, _ = split_key(ShardKey(shard))
        one = epochs.get((number, epoch))
        if one is not None:
            (one.not_applied if quiet and count >= fold.partitions else one.perhaps).append((lo, hi))
    steps: dict[tuple[int, int], tuple[int, int]] | None = None
    spec = fold.brain.job.spec
    if quiet and not spec.consistency.startswith("sync") and all(one.whole for one in epochs.values()):
        steps = {}
        for log in logs:
            for owned in range(len(log.owned)):
                mine = [i for i in range(log.n) if not log.skipped[i] and log.mask(int(log.partitions[i]))[owned]]
                _count(steps, fold, log, mine)
    return Expectation(epochs, steps)


def _covered(manifest: Manifest) -> Iterator[ShardKey]:
    """Yield the shards that all snapshots of a checkpoint have."""
    for number, dataset in enumerate(manifest.datasets):
        begun = {one.epoch: one for one in dataset.epochs}
        for epoch in range(max((dataset.finished_epochs, *(e + 1 for e in begun)))):
            if epoch in begun:
                ranges: Iterable[tuple[int, int]] = begun[epoch].done
            else:
                ranges = [(0, dataset.plan.shards)] if epoch < dataset.finished_epochs else []
            for first, last in ranges:
                yield from (shard_key(number, epoch, index) for index in range(first, last))


def _count(steps: dict[tuple[int, int], tuple[int, int]], fold: JournalFold, log: PsLog, rows: list[int]) -> None:
    """Count the steps of one partition: they lie between those of the partition that has the fewest and the one that
    has the most. A single sample may be all of an iteration, or what the first of several steps in it consumed."""
    mine: dict[tuple[int, int], tuple[int, int]] = {}
    for i, after in zip(rows, [*rows[1:], -1], strict=True):
        shard, lease = int(log.shard[i]), int(log.lease[i])
        loop, _ = fold.loops.leases.get((LeaseNo(lease), ShardKey(shard)), (0, None))
        at = loop, split_key(ShardKey(shard))[1]
        part = after >= 0 and log.hi[i] - log.lo[i] == 1 and (log.shard[after], log.lo[after]) == (shard, log.hi[i])
        least, most = mine.get(at, (0, 0))
        mine[at] = least + (not part), most + 1
    for at, (fewest, most_here) in mine.items():
        least, most = steps.get(at, (fewest, most_here))
        steps[at] = min(least, fewest), max(most, most_here)


# ---------------------------------------------------------------- both


def compare(counts: Counts, expected: Expectation, fold: JournalFold) -> list[str]:
    """Return where the two differ, in words."""
    out: list[str] = []
    names = [plan.name for plan in fold.plans]
    for where in sorted({*counts.rows, *expected.epochs}):
        name = f"{names[where[0]] if where[0] < len(names) else f'dataset {where[0]}'} e{where[1]}"
        ids, values = counts.rows.get(where, (np.zeros(0, np.int64), np.zeros(0, np.float32)))
        whole = np.rint(values)
        out += _named(name, ids, values, np.abs(values - whole) > OFF_MAX, "is no whole number")
        out += _named(name, ids, values, whole > 1, "was applied more than once")
        applied = int((whole == 1).sum())
        one = expected.epochs.get(where)
        if one is None:
            if applied:
                out.append(f"{name}: {applied} samples were applied, and the audit knows of none")
        elif not one.least <= applied <= one.most:
            between = f"{one.most:,}" if one.least == one.most else f"{one.least:,} to {one.most:,}"
            out.append(f"{name}: {applied:,} samples were applied once, and the audit says {between}")
    return out + _steps(counts, expected, fold)


def _named(
    name: str, ids: NDArray[np.int64], values: NDArray[np.float32], wrong: NDArray[np.bool_], what: str
) -> list[str]:
    n = int(wrong.sum())
    if not n:
        return []
    first = ", ".join(f"{i} ({v:g})" for i, v in zip(ids[wrong][:_SHOWN], values[wrong][:_SHOWN], strict=True))
    return [f"{name}: the count of {n:,} samples {what}: {first}{', ...' if n > _SHOWN else ''}"]


def _steps(counts: Counts, expected: Expectation, fold: JournalFold) -> list[str]:
    out: list[str] = []
    if counts.steps is None:
        return out
    for at, epoch in np.argwhere(counts.steps > OFF_MAX).tolist():
        loop, found = at + 1, float(counts.steps[at, epoch])
        asked = fold.loops.asked.get(loop, set())
        fits = any(one.begin <= epoch < one.until or (one.dataset, epoch) in fold.loops.carried for one in asked)
        if asked and not fits:
            over = ", ".join(map(str, sorted(asked)))
            out.append(f"loop {loop} of the script is over {over}, and has {found:g} steps of epoch {epoch}")
    if expected.steps is None:
        return out
    for loop, epoch in sorted(
        {*expected.steps, *((a + 1, e) for a, e in np.argwhere(counts.steps > OFF_MAX).tolist())}
    ):
        least, most = expected.steps.get((loop, epoch), (0, 0))
        inside = loop <= len(counts.steps) and epoch < counts.steps.shape[1]
        found = float(counts.steps[loop - 1, epoch]) if inside else 0.0
        if not least - OFF_MAX <= found <= most + OFF_MAX:
            between = f"{most:,}" if least == most else f"{least:,} to {most:,}"
            out.append(f"loop {loop}, epoch {epoch}: {found:g} steps were applied, and the audit says {between}")
    return out


def witnessed(run_dir: Path, report: AuditReport, folder: Path | None = None) -> AuditReport:
    """Return ``report`` with what the witness in the model of ``folder`` (else the run's) says. A job that failed has
    no model to ask. Raises ConfigError where there is none though the job ended well, PlatformError."""
    with JournalReader(run_dir / "journal.sqlite") as journal:
        journal.advance()
        fold = journal.fold
    try:
        counts = read_counts(folder or run_dir / "model")
    except ConfigError:
        if report.verdict in (Verdict.EXACT, Verdict.LOOPS) or folder is not None:
            raise
        report.notes.append("the witness was not asked: the job left no model")
        return report
    expected = expectation(run_dir, _checkpoint_of(folder or run_dir / "model"))
    report.witness = compare(counts, expected, fold)
    applied = sum(int((np.rint(values) == 1).sum()) for _, values in counts.rows.values())
    steps = 0 if counts.steps is None else round(float(counts.steps.sum()))
    report.counts |= {"witnessed_samples": applied, "witnessed_steps": steps}
    if any(one.unknown for one in expected.epochs.values()):
        report.notes.append("the witness: of the run before nothing is known; epochs that it trained may lack samples")
    if counts.steps is not None and expected.steps is None:
        report.notes.append("the witness: steps were not compared, only in which epochs of which loop there are some")
    if report.witness and report.verdict is not Verdict.OFFENCES:
        report.verdict = Verdict.WITNESS
        more = f", and {len(report.witness) - 1} more" if report.witness[1:] else ""
        report.why = f"{report.witness[0]}{more}"
    return report


def _checkpoint_of(folder: Path) -> int:
    """Return of which checkpoint of its job a model is; 0: it does not say."""
    try:
        return _about_decoder.decode((folder / ABOUT_FILE).read_bytes()).checkpoint
    except (OSError, *MALFORMED):
        return 0


class _About(msgspec.Struct):
    checkpoint: int = 0


_about_decoder = msgspec.json.Decoder(_About)


__all__ = ["Counts", "Expectation", "Expected", "compare", "expectation", "read_counts", "witnessed"]
