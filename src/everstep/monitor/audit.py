"""Was every batch applied exactly once? Answered from what the ps and the journal recorded; no worker is asked.

Three independent looks at each ps:

1. **Tiling.** For every shard and partition, the intervals that the ps says it applied tile ``[start, stop)``: without
   a hole up to the last one, without overlap, and up to ``stop`` for a shard that the journal calls done.
2. **Right.** Every interval was applied under a lease that the journal granted for that shard to that life of that
   worker, and, along the positions of a partition, lease numbers never fall (a later lease fences the earlier ones).
3. **Fingerprint.** Each partition carries, beside its rows, the sum (mod 2**64) of
   ``mix64(mix64(epoch_key) + position)`` over the samples applied to it. At every cut it must equal the sum over the
   logged intervals, and at the end the sum over the plan. It does not depend on order, nor on how the log was cut.

A log ends where its process was killed; a record missing inside, changed or moved breaks its chain and is an offence.
Partitions that change hands are followed through all their owners (``owners``).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import pairwise
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from everstep.brain.events import StepsCommitted
from everstep.brain.job import Phase
from everstep.errors import ConfigError
from everstep.ids import Incarnation, LeaseNo, ShardKey, Slot
from everstep.model.shard import ShardSchedule, shard_key, split_key
from everstep.monitor.fingerprints import Fingerprints, mix64, tile
from everstep.monitor.journal_fold import JournalFold, JournalReader
from everstep.monitor.ownership_audit import OwnershipCheck
from everstep.monitor.pslog import ALL, PartitionStint, PsLog, bits, read_log
from everstep.monitor.report import AuditReport, Offence, Verdict
from everstep.monitor.steps import check_steps, read_step_log
from everstep.storage.chain import BROKEN_CHAIN

__all__ = ["AuditReport", "Offence", "PsLog", "audit", "check", "mix64", "read_log", "tile"]

# ---------------------------------------------------------------- one ps


class _PsCheck:
    """Does all checks of one ps's log; offences go to ``report``."""

    def __init__(
        self, fold: JournalFold, done: set[ShardKey], log: PsLog, report: AuditReport, sums: Fingerprints
    ) -> None:
        self.fold, self.done, self.log, self.report, self.fingerprints = fold, done, log, report, sums
        self.handovers = 0
        self.skipped: dict[tuple[int, int, int], int] = {}  # (shard, lo, hi) -> partitions
        self.left_out: dict[tuple[int, int, int], int] = {}  # the same, by the script's own doing

    def run(self, followed: bool) -> None:
        """``followed``: its partitions change hands and are looked at by their journeys."""
        log = self.log
        if log.problem is not None:
            if log.problem.startswith(BROKEN_CHAIN):
                self._offend("broken chain", detail=log.problem)
            else:
                self.report.notes.append(f"{log.name}: {log.problem}")
        for line in log.bad:
            what, _, detail = line.partition(": ")
            self._offend(what, detail=detail)
        self._counts()
        self._leases()
        for i in np.flatnonzero(log.skipped).tolist():
            where = (int(log.shard[i]), int(log.lo[i]), int(log.hi[i]))
            found = self.left_out if log.left_out[i] else self.skipped
            found[where] = found.get(where, 0) + int(log.applied[i])
        if not followed:
            self._tiling()
            self._fingerprints()

    def _offend(
        self, what: str, shard: int = -1, lo: int = -1, hi: int = -1, mask: NDArray[np.bool_] | None = None, **more: str
    ) -> None:
        name = self.fold.shard_name(ShardKey(shard)) if shard >= 0 else ""
        self.report.offenders.append(
            Offence(what, self.log.name, name, int(lo), int(hi), "" if mask is None else self._named(mask), **more)
        )

    def _named(self, mask: NDArray[np.bool_]) -> str:
        chosen = self.log.owned[mask]
        if len(chosen) == len(self.log.owned):
            return f"all {len(chosen)} partitions"
        shown = ",".join(str(b) for b in chosen[:8]) + (",..." if len(chosen) > 8 else "")
        return f"partition{'s' if len(chosen) > 1 else ''} {shown}"

    def _counts(self) -> None:
        """Each record's partition count is that of its bitmap, and the bitmap holds no partition of somebody else."""
        log = self.log
        size = np.array([bits(b, log.n_partitions).sum() for b in log.bitmaps] + [0], np.int64)
        for first, last, owned in log.owned_spans():
            size[ALL] = len(owned)
            theirs = [bits(b, log.n_partitions)[owned].sum() for b in log.bitmaps] + [len(owned)]
            foreign = size != np.array(theirs, np.int64)
            which = log.partitions[first:last]
            for i in np.flatnonzero((log.applied[first:last] != size[which]) | foreign[which]).tolist():
                row = first + i
                detail = f"says {log.applied[row]} partitions, its bitmap has {size[which[i]]}"
                if foreign[which[i]]:
                    detail = "names partitions that this ps does not own"
                self._offend("bad record", log.shard[row], log.lo[row], log.hi[row], detail=detail)

    def _leases(self) -> None:
        """Every lease was granted, for this shard, to this worker."""
        log = self.log
        if not log.n:
            return
        rows = np.stack([log.lease, log.shard, log.worker, log.incarnation])
        used, first = np.unique(rows, axis=1, return_index=True)
        for (lease, shard, worker, life), i in zip(used.T.tolist(), first.tolist(), strict=True):
            holders = self.fold.holders(LeaseNo(lease), ShardKey(shard))
            if wrong := self.fold.loops.of_lease(LeaseNo(lease), ShardKey(shard)):
                words = f"{self.fold.shard_name(ShardKey(shard))} was trained by worker:{worker} #{life} {wrong}"
                if words not in self.report.loops:  # (each ps says it)
                    self.report.loops.append(words)
            where = (shard, log.lo[i], log.hi[i])
            if holders is None:
                self._offend("unknown lease", *where, detail=f"lease {lease} of worker:{worker} was never granted")
            elif (ShardKey(shard), Slot(worker), Incarnation(life)) not in holders:
                granted = ", ".join(f"{self.fold.shard_name(s)} to worker:{w} #{n}" for s, w, n in holders)
                what = "wrong worker" if any(s == shard for s, _, _ in holders) else "unknown lease"
                self._offend(what, *where, detail=f"lease {lease} used by worker:{worker} #{life}, granted: {granted}")

    def _tiling(self) -> None:
        log = self.log
        order = np.lexsort((log.lo, log.shard))
        shard, lo, hi, lease = log.shard[order], log.lo[order], log.hi[order], log.lease[order]
        starts = np.flatnonzero(np.r_[True, shard[1:] != shard[:-1]]) if log.n else np.zeros(0, np.int64)
        ends = np.r_[starts[1:], log.n] if log.n else starts
        shards = shard[starts]
        for key in self.done - set(shards.tolist()):
            bounds = self.fold.bounds(key)
            assert bounds is not None
            self._offend("missing", key, *bounds, mask=np.ones(len(log.owned), bool))
        if not log.n:
            return
        # One look at all shards at once; only those where something is not plain are looked at one by one.
        bounds_of = [self.fold.bounds(ShardKey(k)) for k in shards.tolist()]
        first = np.array([b[0] if b else -1 for b in bounds_of])
        stop = np.array([b[1] if b else -1 for b in bounds_of])
        is_done = np.array([k in self.done for k in shards.tolist()])
        odd = (lo[starts] != first) | (hi[ends - 1] > stop) | (is_done & (hi[ends - 1] != stop)) | (stop < 0)
        group = np.repeat(np.arange(len(starts)), ends - starts)
        inside = group[1:] == group[:-1]
        uneven = inside & ((lo[1:] != hi[:-1]) | (lease[1:] < lease[:-1]))
        odd[np.unique(group[1:][uneven])] = True
        odd[np.unique(group[lo >= hi])] = True
        partial = log.partitions[order] != ALL
        odd[np.unique(group[partial])] = True
        self.handovers += int((inside & (lease[1:] != lease[:-1]) & ~odd[group[1:]]).sum())
        for g in np.flatnonzero(odd).tolist():
            self._one_shard(int(shards[g]), bounds_of[g], bool(is_done[g]), order[starts[g] : ends[g]])

    def _one_shard(self, shard: int, bounds: tuple[int, int] | None, is_done: bool, rows: NDArray[np.int64]) -> None:
        """Check tiling and fence order of one shard, for each group of partitions with the same records."""
        log = self.log
        if bounds is None:
            self._offend("unknown shard", shard, log.lo[rows[0]], log.hi[rows[-1]], detail="no plan has it")
            return
        member = np.stack([log.mask(i) for i in log.partitions[rows].tolist()])  # [records, owned]
        patterns, of_partition = np.unique(member, axis=1, return_inverse=True)
        for p in range(patterns.shape[1]):
            mask = of_partition.reshape(-1) == p
            mine = rows[patterns[:, p]]
            spans = list(zip(log.lo[mine].tolist(), log.hi[mine].tolist(), log.lease[mine].tolist(), strict=True))
            for what, lo, hi, detail in tile(bounds[0], bounds[1] if is_done else None, bounds[1], spans):
                self._offend(what, shard, lo, hi, mask=mask, detail=detail)
            self.handovers += sum(a[2] != b[2] for a, b in pairwise(spans))

    def _fingerprints(self) -> None:
        log = self.log
        if not len(log.owned):
            return
        value = self.fingerprints.pushes(log)
        everywhere = np.r_[np.uint64(0), np.cumsum(np.where(log.partitions == ALL, value, 0), dtype=np.uint64)]
        some = np.flatnonzero((log.partitions != ALL) & (value != 0))
        extra = np.zeros(len(log.owned), np.uint64)
        taken, last_seq = 0, -1
        for before, seq, _, found in log.cuts:
            while taken < len(some) and some[taken] < before:
                row = some[taken]
                extra[log.mask(int(log.partitions[row]))] += value[row]
                taken += 1
            wrong = found != everywhere[before] + extra
            self.report.counts["cuts"] += 1
            self.report.counts["fingerprints"] += len(found)
            if wrong.any():
                detail = (
                    f"the partitions hold other samples than the log says, since record {last_seq + 1}, seen at {seq}"
                )
                self._offend("fingerprint", mask=wrong, detail=detail)
                return
            last_seq = seq
        if log.closed and log.cuts:
            self._against_plan(log.cuts[-1].found, value)

    def _against_plan(self, found: NDArray[np.uint64], value: NDArray[np.uint64]) -> None:
        """Compare with the final fingerprints from the plan alone: all of each done shard, less what was skipped. Of
        the other shards the log must be believed."""
        log = self.log
        total = np.uint64(0)
        for key in self.done:
            total = np.uint64((int(total) + int(self.fingerprints.whole(key))) % 2**64)
        expected = np.full(len(log.owned), total, np.uint64)
        is_done = np.isin(log.shard, np.fromiter(self.done, np.int64, len(self.done)))
        for i in np.flatnonzero(~is_done & ~log.skipped).tolist():
            expected[log.mask(int(log.partitions[i]))] += value[i]
        for i in np.flatnonzero(is_done & log.skipped).tolist():
            expected[log.mask(int(log.partitions[i]))] -= self.fingerprints.ranges(
                int(log.shard[i]), log.lo[i : i + 1], log.hi[i : i + 1]
            )[0]
        self.report.counts["fingerprints"] += len(found)
        if (found != expected).any():
            self._offend("fingerprint", mask=found != expected, detail="the final fingerprint is not that of the plan")


# ---------------------------------------------------------------- the whole run


def check(fold: JournalFold, done: set[ShardKey], logs: Sequence[PsLog], run_dir: str = "") -> AuditReport:
    """Audit the logs of all ps against what the journal says. ``done``: shards done before the logs were read
    (a running job: later ones may be newer than the logs)."""
    report = AuditReport(run_dir, counts={"cuts": 0, "fingerprints": 0})
    fingerprints = Fingerprints(fold)
    owners: dict[int, list[PartitionStint]] = {}
    for log in logs:
        for partition, stints in log.stints.items():
            owners.setdefault(partition, []).extend(stints)
    newest = {log.slot: log for log in sorted(logs, key=lambda log: log.life)}
    handovers, batches = 0, 0
    skipped: dict[tuple[int, int, int], int] = {}
    left_out: dict[tuple[int, int, int], int] = {}
    followed: set[int] = set()
    for log in logs:
        plain = not log.moved and bool(log.stints) and all(len(owners[b]) == 1 for b in log.stints)
        one = _PsCheck(fold, done, log, report, fingerprints)
        one.run(not plain)
        if not plain:
            followed |= set(log.stints)
        handovers = max(handovers, one.handovers)
        batches += log.n - int(log.joined.sum())
        for found, all_found in ((one.skipped, skipped), (one.left_out, left_out)):
            for where, partitions in found.items():
                all_found[where] = all_found.get(where, 0) + partitions
    travelled = OwnershipCheck(fold, done, report, fingerprints, [*skipped, *left_out])
    for partition in sorted(followed):
        travelled.run(partition, owners[partition])
    travelled.close()
    handovers = max(handovers, travelled.handovers)
    for log in newest.values():
        if fold.over and not log.closed and any(log in [s.log for s in owners[b][-1:]] for b in log.stints):
            report.notes.append(f"{log.name} did not close its log: its final fingerprint is not checked")
    _check_owners(fold, owners, report, bool(done))
    _name_lost_machines(fold, logs, report)
    n_partitions = fold.partitions
    for (shard, lo, hi), partitions in sorted(skipped.items()):
        share = "" if partitions >= n_partitions else f" at {partitions} of {n_partitions} partitions"
        report.skipped.append(f"{fold.shard_name(ShardKey(shard))} [{lo}, {hi}){share}: gradient not finite")
    quarantined = fold.quarantined()
    for key in sorted(quarantined):
        start, stop = fold.bounds(key) or (-1, -1)
        report.skipped.append(f"{fold.shard_name(key)} [{start}, {stop}): quarantined, {quarantined[key]}")
    samples = 0
    for number, epoch, plan in _finished_epochs(fold, done, set(quarantined)):
        report.finished.append(f"{plan.name} e{epoch}")
        samples += plan.samples
        assert number >= 0
    report.counts |= {
        "shards_done": len(done),
        "samples": samples,
        "batches": batches,
        "ps": len(newest),
        "logs": len(logs),
        "buckets": n_partitions,
        "leases": len(fold.grants) or len(fold.groups),
        "handovers": handovers,
        "skipped_samples": sum(hi - lo for _, lo, hi in skipped),
        "left_out_samples": sum(hi - lo for _, lo, hi in left_out),
        "quarantined": len(quarantined),
    }
    return report


def _check_owners(
    fold: JournalFold, owners: dict[int, list[PartitionStint]], report: AuditReport, needed: bool
) -> None:
    """Every partition of the placement has a log that speaks for it: that of its owner, unless it is on its way."""
    silent: dict[Slot, int] = {}
    for partition, slot in enumerate(fold.owner):
        stints = owners.get(partition)
        if needed and not stints:
            silent[slot] = silent.get(slot, 0) + 1
        elif partition in fold.brain.state.protection.missing:
            continue  # (the job was over before its new owner had it)
        elif stints and fold.over and slot not in {s.log.slot for s in stints}:
            detail = f"partition {partition} is placed there, but only {stints[-1].log.name} speaks for it"
            report.offenders.append(Offence("bad record", f"ps:{slot}", detail=detail))
    for slot, n in sorted(silent.items()):
        report.offenders.append(Offence("no log", f"ps:{slot}", detail=f"it owned {n} partitions"))


def _name_lost_machines(fold: JournalFold, logs: Sequence[PsLog], report: AuditReport) -> None:
    """Say whose logs are gone with their machine, and what vouches for them."""
    here = {(log.slot, log.life): log for log in logs}
    for node, lives in sorted(fold.lost_with.items()):
        ended = sorted(life for life in lives if life not in here or not here[life].closed)
        if not ended:
            continue
        parts = []
        for slot, life in ended:
            log = here.get((slot, life))
            parts.append(
                f"ps:{slot} #{life} (" + (f"{log.n} pushes are here)" if log is not None else "no log is here)")
            )
        report.notes.append(
            f"{node} was lost with the end of the logs of {', '.join(parts)}. What is missing, the watermarks of the "
            f"partitions that others took over vouch for ({report.counts.get('vouched', 0):,} samples of partitions in "
            "all), and their fingerprints prove it"
        )


def _finished_epochs(
    fold: JournalFold, done: set[ShardKey], away: set[ShardKey]
) -> Iterable[tuple[int, int, ShardSchedule]]:
    count: dict[tuple[int, int], int] = {}
    for key in done | away:
        number, epoch, _ = split_key(key)
        count[number, epoch] = count.get((number, epoch), 0) + 1
    for (number, epoch), n in sorted(count.items()):
        plan = fold.plans[number]
        if n == plan.shards and all(shard_key(number, epoch, i) in done | away for i in range(plan.shards)):
            yield number, epoch, plan


def audit(run_dir: Path, progress: Callable[[str], None] | None = None) -> AuditReport:
    """Audit a run directory, also of a running job. Raises ConfigError when it holds no journal."""
    path = run_dir / "journal.sqlite"
    if not path.is_file():
        raise ConfigError(f"{run_dir}: no journal.sqlite in it; name the run directory that everstep run printed")
    # Three readings in this order: what was done by now must be in the logs, and whatever is in the logs was granted
    # before it was written.
    with JournalReader(path) as journal:
        journal.advance()
        if journal.fold.brain.takes(StepsCommitted):
            step_logs = [read_step_log(p) for p in sorted((run_dir / "audit").glob("worker-*.log"))]
            journal.advance()
            fold = journal.fold
            report = check_steps(fold.steps, fold.plans, step_logs, str(run_dir), fold.done_well)
            return judged(_with_tables(report, fold, run_dir) if fold.brain.job.spec.ps else report, fold)
        done = journal.fold.done
        logs = [read_log(p) for p in sorted((run_dir / "audit").glob("ps-*.log"))]
        journal.advance()
        # What was done and came back meanwhile (its partition fell back to an older snapshot) is not done.
        return judged(check(journal.fold, done & journal.fold.done, logs, str(run_dir)), journal.fold)


_BY_EXIT_CODE = {5: Verdict.LOST, 6: Verdict.REPLICAS}


def judged(report: AuditReport, fold: JournalFold) -> AuditReport:
    """Return ``report`` with the verdict about the job: what was found of its samples is not all that counts."""
    job = fold.brain.job
    if not report.ok:
        report.verdict = Verdict.OFFENCES
    elif report.loops:
        report.verdict = Verdict.LOOPS
        report.why = f"{report.loops[0]}{f', and {len(report.loops) - 1} more' if report.loops[1:] else ''}"
    elif job.exit_code:
        report.verdict = _BY_EXIT_CODE.get(job.exit_code, Verdict.FAILED)
        report.why = f"exit code {job.exit_code}: {job.error}; what was committed is exactly once"
    elif not fold.brain.shards.samples_done and not report.counts.get("skipped_samples"):
        report.verdict = Verdict.NOTHING
        report.why = "no sample was trained"
    elif 0 < fold.brain.shards.samples_done <= report.counts.get("left_out_samples", 0):
        report.verdict = Verdict.NOTHING
        report.why = "the script stepped with no sample: all of them were left out"
    elif job.phase is not Phase.DONE:
        report.verdict = Verdict.OPEN
        ended = job.phase in (Phase.STOPPED, Phase.SUSPENDED)
        report.why = f"{job.phase.value if ended else 'running, or ended without a word'}; so far each sample once"
    return report


def _with_tables(report: AuditReport, fold: JournalFold, run_dir: Path) -> AuditReport:
    """Mode allreduce with tables on the ps: ``report`` is of the steps; the logs of the ps are looked at beside it,
    an epoch as one shard. Of an epoch that is not over only the order is checked: pushes follow commits. If the job
    ended before its time, the end of its newest epoch may have waited for a step that was to consume it."""
    logs = [read_log(p) for p in sorted((run_dir / "audit").glob("ps-*.log"))]
    done = fold.done if fold.over else set()
    if not fold.done_well:
        newest = {(d.number, len(d.epochs) - 1) for d in fold.brain.shards.datasets}
        done = {key for key in done if split_key(key)[:2] not in newest}
    tables = check(fold, done, logs, str(run_dir))
    report.offenders += tables.offenders
    report.notes += tables.notes
    report.counts |= {name: count for name, count in tables.counts.items() if name not in report.counts}
    return report
