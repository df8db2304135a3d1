"""Was every batch applied exactly once? Answered from what the ps and the journal recorded; no worker is asked.

Three independent looks at each ps:

1. **Tiling.** For every shard and bucket, the intervals that the ps says it applied tile ``[start, stop)``: without a
   hole up to the last one, without overlap, and up to ``stop`` for a shard that the journal calls done.
2. **Right.** Every interval was applied under a lease that the journal granted for that shard to that life of that
   worker, and, along the positions of a bucket, lease numbers never fall (a later lease fences the earlier ones).
3. **Fingerprint.** Each bucket carries, beside its rows, the sum (mod 2**64) of
   ``mix64(mix64(epoch_key) + position)`` over the samples applied to it. At every cut it must equal the sum over the
   logged intervals, and at the end the sum over the plan. It does not depend on order, nor on how the log was cut.

A log ends where its process was killed; a record missing inside, changed or moved breaks its chain and is an offence.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import pairwise
from pathlib import Path

import msgspec
import numpy as np
from numpy.typing import NDArray

from everstep.errors import ConfigError
from everstep.ids import Incarnation, LeaseNo, ShardKey, Slot
from everstep.model.shard import Plan, epoch_key, shard_key, split_key
from everstep.monitor.facts import JobFacts, JournalReader
from everstep.monitor.records import Applied, AuditRecord, Closed, Cut, Gave, Took
from everstep.storage.chain import BROKEN_CHAIN, read_chain

_OFFENDERS_SHOWN = 50
_ALL = -1  # in PsLog.buckets: every owned bucket


class Offence(msgspec.Struct, frozen=True):
    """One thing that is not as promised. ``what``: missing, twice, outside, unknown lease, wrong worker, after fence,
    unknown shard, fingerprint, broken chain, sequence, bad record, no log."""

    what: str
    ps: str
    shard: str = ""
    lo: int = -1
    hi: int = -1
    buckets: str = ""
    detail: str = ""

    def __str__(self) -> str:
        where = f"{self.shard} [{self.lo}, {self.hi})" if self.lo >= 0 else self.shard
        parts = [f"{self.what}:", where, f"at {self.ps}", self.buckets, f"({self.detail})" if self.detail else ""]
        return " ".join(part for part in parts if part)


class AuditReport(msgspec.Struct):
    """``ok``: no offence. ``finished``: epochs proven complete. ``counts``: what was looked at."""

    run_dir: str
    finished: list[str] = []
    counts: dict[str, int] = {}
    offenders: list[Offence] = []
    skipped: list[str] = []
    notes: list[str] = []

    @property
    def ok(self) -> bool:
        return not self.offenders

    def text(self) -> str:
        """The report for a person, several lines."""
        c = self.counts
        lines = [f"audit of {self.run_dir}: {'exactly once' if self.ok else f'{len(self.offenders)} offences'}"]
        lines.append(f"  finished epochs: {', '.join(self.finished) or 'none yet'}")
        lines.append(
            f"  shards done {c['shards_done']}, samples of finished epochs {c['samples']:,}, batches applied"
            f" {c['batches']:,} at {c['ps']} ps x {c['buckets']} buckets, leases {c['leases']}"
        )
        lines.append(
            f"  ranges taken over in the middle {c['handovers']}, skipped samples {c['skipped_samples']},"
            f" quarantined shards {c['quarantined']}"
        )
        lines.append(f"  fingerprints: {c['fingerprints']} compared at {c['cuts']} cuts")
        lines += [f"  skipped: {line}" for line in self.skipped[:_OFFENDERS_SHOWN]]
        lines += [f"  note: {line}" for line in self.notes]
        lines += [f"  OFFENCE {offence}" for offence in self.offenders[:_OFFENDERS_SHOWN]]
        if len(self.offenders) > _OFFENDERS_SHOWN:
            lines.append(f"  ... and {len(self.offenders) - _OFFENDERS_SHOWN} more (all of them with --json)")
        return "\n".join(lines)

    def json(self) -> bytes:
        """Everything, for machines."""
        return msgspec.json.encode(
            {"ok": self.ok, **msgspec.structs.asdict(self), "offenders": [str(o) for o in self.offenders]}
        )


class PsLog:
    """One ps's records as columns, in the order in which they were written.

    ``shard, lo, hi, lease, worker, incarnation, applied: int64 [n]``; ``skipped: bool [n]``; ``at: float64 [n]``
    (seconds since 1970); ``buckets: int64 [n]``, an index into ``bitmaps`` or -1 for all owned; ``cuts``: how many
    pushes precede each, and its fingerprints (uint64 [owned]).
    """

    def __init__(self, slot: Slot, incarnation: Incarnation, n_buckets: int, owned: Sequence[int]) -> None:
        self.slot = slot
        self.life = incarnation
        self.n_buckets = n_buckets
        self.owned: NDArray[np.int64] = np.array(owned, np.int64)
        self.bitmaps: list[bytes] = []
        self.cuts: list[tuple[int, int, NDArray[np.uint64]]] = []  # pushes before, seq, fingerprints
        self.closed = False
        self.problem: str | None = None
        self.bad: list[str] = []
        self.n = 0
        self._rows: list[tuple[int, ...]] = []
        self._at: list[float] = []

    def __repr__(self) -> str:
        return f"<log of {self.name} #{self.life} {self.n} pushes {len(self.cuts)} cuts closed={self.closed}>"

    @property
    def name(self) -> str:
        return f"ps:{self.slot}"

    def fill(self, records: Iterable[bytes]) -> None:
        """Take the records of the file in; what is wrong with one by itself goes to ``bad``."""
        decoder = msgspec.msgpack.Decoder(AuditRecord)
        known: dict[bytes, int] = {}
        for seq, raw in enumerate(records):
            try:
                record = decoder.decode(raw)
            except msgspec.DecodeError as error:
                self.bad.append(f"bad record: number {seq} cannot be read: {error}")
                continue
            if record.seq != seq:
                self.bad.append(f"sequence: record {seq} says it is number {record.seq}")
            if self.closed:
                self.bad.append(f"bad record: number {seq} comes after the log was closed")
            if isinstance(record, Applied):
                index = _ALL
                if record.buckets:
                    index = known.setdefault(record.buckets, len(known))
                    if index == len(self.bitmaps):
                        self.bitmaps.append(record.buckets)
                self._rows.append(
                    (
                        record.shard,
                        record.lo,
                        record.hi,
                        record.lease,
                        record.worker,
                        record.worker_incarnation,
                        record.applied,
                        index,
                        record.skipped,
                    )
                )
                self._at.append(record.at)
            elif isinstance(record, Took | Gave):
                self.bad.append(f"bad record: number {seq}: buckets that change hands are not followed yet")
            else:
                self._take_cut(record, seq)
        self.n = len(self._rows)
        columns = np.array(self._rows, np.int64).reshape(self.n, 9).T
        self.shard, self.lo, self.hi, self.lease, self.worker, self.incarnation = columns[:6]
        self.applied, self.buckets = columns[6], columns[7]
        self.skipped = columns[8].astype(bool)
        self.at = np.array(self._at)
        self._rows, self._at = [], []

    def _take_cut(self, record: Cut | Closed, seq: int) -> None:
        self.closed = self.closed or isinstance(record, Closed)
        if len(record.fingerprints) != 8 * len(self.owned):
            self.bad.append(f"bad record: number {seq} has fingerprints of {len(record.fingerprints) // 8} buckets")
            return
        self.cuts.append((len(self._rows), seq, np.frombuffer(record.fingerprints, "<u8").astype(np.uint64)))

    def mask(self, index: int) -> NDArray[np.bool_]:
        """Which owned buckets (bool [owned]) a record with this ``buckets`` index was applied to."""
        if index == _ALL:
            return np.ones(len(self.owned), bool)
        return _bits(self.bitmaps[index], self.n_buckets)[self.owned]


def _bits(bitmap: bytes, n: int) -> NDArray[np.bool_]:
    bits = np.unpackbits(np.frombuffer(bitmap, np.uint8), bitorder="little").astype(bool)
    out = np.zeros(n, bool)
    out[: min(n, len(bits))] = bits[:n]
    return out


def read_log(path: Path) -> PsLog:
    """One audit log. What is wrong with it is in ``problem`` and ``bad``; raises only if it cannot be read at all."""
    header, records, problem = read_chain(path)
    try:
        slot, life, n = int(header["slot"]), int(header["incarnation"]), int(header["buckets"])
        owned = np.flatnonzero(_bits(bytes.fromhex(str(header["owned"])), n)).tolist()
    except (KeyError, ValueError):
        problem = problem or f"{BROKEN_CHAIN}: the header of {path.name} is not that of an audit log"
        slot, life = _from_name(path)
        n, owned, records = 0, [], []
    log = PsLog(Slot(slot), Incarnation(life), n, owned)
    log.problem = problem
    log.fill(records)
    return log


def _from_name(path: Path) -> tuple[int, int]:
    slot, _, life = path.stem.removeprefix("ps-").partition(".")
    return (int(slot), int(life)) if slot.isdecimal() and life.isdecimal() else (-1, 0)


# ---------------------------------------------------------------- fingerprints


def mix64(z: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Finalizer of splitmix64 (uint64 [n] -> uint64 [n]), as in ``native/hash.h``."""
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))


def _prefix(shard: int, start: int, stop: int) -> NDArray[np.uint64]:
    """``out[i]``: fingerprint of ``[start, start + i)``; uint64 [stop - start + 1]."""
    salt = mix64(np.full(1, epoch_key(ShardKey(shard)), dtype=np.uint64))
    out = np.zeros(stop - start + 1, np.uint64)
    positions: NDArray[np.uint64] = np.arange(start, stop).astype(np.uint64)
    np.cumsum(mix64(salt + positions), out=out[1:])
    return out


class _Prints:
    """Fingerprints of ranges, keeping the prefix sums of the shard last asked for."""

    def __init__(self, facts: JobFacts) -> None:
        self._facts = facts
        self._kept: dict[int, NDArray[np.uint64]] = {}

    def ranges(self, shard: int, lo: NDArray[np.int64], hi: NDArray[np.int64]) -> NDArray[np.uint64]:
        """Fingerprints of ``[lo[i], hi[i])`` of one shard; clipped to it."""
        bounds = self._facts.bounds(ShardKey(shard))
        if bounds is None:
            return np.zeros(len(lo), np.uint64)
        start, stop = bounds
        prefix = self._kept.get(shard)
        if prefix is None:
            if len(self._kept) >= 4096:
                self._kept.clear()
            prefix = self._kept[shard] = _prefix(shard, start, stop)
        low = np.clip(lo, start, stop) - start
        high = np.maximum(np.clip(hi, start, stop) - start, low)
        return np.asarray(prefix[high] - prefix[low])

    def whole(self, shard: int) -> np.uint64:
        bounds = self._facts.bounds(ShardKey(shard))
        assert bounds is not None
        return np.uint64(self.ranges(shard, np.array([bounds[0]]), np.array([bounds[1]]))[0])


# ---------------------------------------------------------------- one ps


class _PsCheck:
    """All checks of one ps's log; offences go to ``report``."""

    def __init__(self, facts: JobFacts, done: set[ShardKey], log: PsLog, report: AuditReport, prints: _Prints) -> None:
        self.facts, self.done, self.log, self.report, self.prints = facts, done, log, report, prints
        self.handovers = 0
        self.skipped: dict[tuple[int, int, int], int] = {}  # (shard, lo, hi) -> buckets

    def run(self) -> None:
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
        self._tiling()
        self._fingerprints()

    def _offend(
        self, what: str, shard: int = -1, lo: int = -1, hi: int = -1, mask: NDArray[np.bool_] | None = None, **more: str
    ) -> None:
        name = self.facts.shard_name(ShardKey(shard)) if shard >= 0 else ""
        self.report.offenders.append(
            Offence(what, self.log.name, name, int(lo), int(hi), "" if mask is None else self._named(mask), **more)
        )

    def _named(self, mask: NDArray[np.bool_]) -> str:
        chosen = self.log.owned[mask]
        if len(chosen) == len(self.log.owned):
            return f"all {len(chosen)} buckets"
        shown = ",".join(str(b) for b in chosen[:8]) + (",..." if len(chosen) > 8 else "")
        return f"bucket{'s' if len(chosen) > 1 else ''} {shown}"

    def _counts(self) -> None:
        """Each record's bucket count is that of its bitmap, and the bitmap holds no bucket of somebody else."""
        log = self.log
        size = np.full(len(log.bitmaps) + 1, len(log.owned), np.int64)  # [-1]: all
        foreign = np.zeros(len(log.bitmaps) + 1, bool)
        for i, bitmap in enumerate(log.bitmaps):
            size[i] = np.unpackbits(np.frombuffer(bitmap, np.uint8)).sum()
            foreign[i] = size[i] != log.mask(i).sum()
        for i in np.flatnonzero((log.applied != size[log.buckets]) | foreign[log.buckets]).tolist():
            detail = f"says {log.applied[i]} buckets, its bitmap has {size[log.buckets[i]]}"
            if foreign[log.buckets[i]]:
                detail = "names buckets that this ps does not own"
            self._offend("bad record", log.shard[i], log.lo[i], log.hi[i], detail=detail)

    def _leases(self) -> None:
        """Every lease was granted, for this shard, to this worker."""
        log = self.log
        if not log.n:
            return
        rows = np.stack([log.lease, log.shard, log.worker, log.incarnation])
        used, first = np.unique(rows, axis=1, return_index=True)
        for (lease, shard, worker, life), i in zip(used.T.tolist(), first.tolist(), strict=True):
            holders = self.facts.grants.get(LeaseNo(lease))
            where = (shard, log.lo[i], log.hi[i])
            if holders is None:
                self._offend("unknown lease", *where, detail=f"lease {lease} of worker:{worker} was never granted")
            elif (ShardKey(shard), Slot(worker), Incarnation(life)) not in holders:
                granted = ", ".join(f"{self.facts.shard_name(s)} to worker:{w} #{n}" for s, w, n in holders)
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
            bounds = self.facts.bounds(key)
            assert bounds is not None
            self._offend("missing", key, *bounds, mask=np.ones(len(log.owned), bool))
        if not log.n:
            return
        # One look at all shards at once; only those where something is not plain are looked at one by one.
        bounds_of = [self.facts.bounds(ShardKey(k)) for k in shards.tolist()]
        first = np.array([b[0] if b else -1 for b in bounds_of])
        stop = np.array([b[1] if b else -1 for b in bounds_of])
        is_done = np.array([k in self.done for k in shards.tolist()])
        odd = (lo[starts] != first) | (hi[ends - 1] > stop) | (is_done & (hi[ends - 1] != stop)) | (stop < 0)
        group = np.repeat(np.arange(len(starts)), ends - starts)
        inside = group[1:] == group[:-1]
        uneven = inside & ((lo[1:] != hi[:-1]) | (lease[1:] < lease[:-1]))
        odd[np.unique(group[1:][uneven])] = True
        odd[np.unique(group[lo >= hi])] = True
        partial = log.buckets[order] != _ALL
        odd[np.unique(group[partial])] = True
        self.handovers += int((inside & (lease[1:] != lease[:-1]) & ~odd[group[1:]]).sum())
        for g in np.flatnonzero(odd).tolist():
            self._one_shard(int(shards[g]), bounds_of[g], bool(is_done[g]), order[starts[g] : ends[g]])
        for i in np.flatnonzero(log.skipped).tolist():
            where = (int(log.shard[i]), int(log.lo[i]), int(log.hi[i]))
            self.skipped[where] = self.skipped.get(where, 0) + int(log.applied[i])

    def _one_shard(self, shard: int, bounds: tuple[int, int] | None, is_done: bool, rows: NDArray[np.int64]) -> None:
        """Tiling and fence order of one shard, for each group of buckets with the same records."""
        log = self.log
        if bounds is None:
            self._offend("unknown shard", shard, log.lo[rows[0]], log.hi[rows[-1]], detail="no plan has it")
            return
        member = np.stack([log.mask(i) for i in log.buckets[rows].tolist()])  # [records, owned]
        patterns, of_bucket = np.unique(member, axis=1, return_inverse=True)
        for p in range(patterns.shape[1]):
            mask = of_bucket.reshape(-1) == p
            mine = rows[patterns[:, p]]
            spans = list(zip(log.lo[mine].tolist(), log.hi[mine].tolist(), log.lease[mine].tolist(), strict=True))
            for what, lo, hi, detail in tile(bounds[0], bounds[1] if is_done else None, bounds[1], spans):
                self._offend(what, shard, lo, hi, mask=mask, detail=detail)
            self.handovers += sum(a[2] != b[2] for a, b in pairwise(spans))

    def _fingerprints(self) -> None:
        log = self.log
        if not len(log.owned):
            return
        value = np.zeros(log.n, np.uint64)
        order = np.argsort(log.shard, kind="stable")
        keys, first = np.unique(log.shard[order], return_index=True)
        for key, rows in zip(keys.tolist(), np.split(order, first[1:]), strict=False):
            value[rows] = self.prints.ranges(key, log.lo[rows], log.hi[rows])
        value[log.skipped] = 0
        everywhere = np.r_[np.uint64(0), np.cumsum(np.where(log.buckets == _ALL, value, 0), dtype=np.uint64)]
        some = np.flatnonzero((log.buckets != _ALL) & (value != 0))
        extra = np.zeros(len(log.owned), np.uint64)
        taken, last_seq = 0, -1
        for before, seq, found in log.cuts:
            while taken < len(some) and some[taken] < before:
                row = some[taken]
                extra[log.mask(int(log.buckets[row]))] += value[row]
                taken += 1
            wrong = found != everywhere[before] + extra
            self.report.counts["cuts"] += 1
            self.report.counts["fingerprints"] += len(found)
            if wrong.any():
                detail = f"the buckets hold other samples than the log says, since record {last_seq + 1}, seen at {seq}"
                self._offend("fingerprint", mask=wrong, detail=detail)
                return
            last_seq = seq
        if log.closed and log.cuts:
            self._against_plan(log.cuts[-1][2], value)

    def _against_plan(self, found: NDArray[np.uint64], value: NDArray[np.uint64]) -> None:
        """The final fingerprints from the plan alone: all of each done shard, less what was skipped. Of the other
        shards the log must be believed."""
        log = self.log
        total = np.uint64(0)
        for key in self.done:
            total = np.uint64((int(total) + int(self.prints.whole(key))) % 2**64)
        expected = np.full(len(log.owned), total, np.uint64)
        is_done = np.isin(log.shard, np.fromiter(self.done, np.int64, len(self.done)))
        for i in np.flatnonzero(~is_done & ~log.skipped).tolist():
            expected[log.mask(int(log.buckets[i]))] += value[i]
        for i in np.flatnonzero(is_done & log.skipped).tolist():
            expected[log.mask(int(log.buckets[i]))] -= self.prints.ranges(
                int(log.shard[i]), log.lo[i : i + 1], log.hi[i : i + 1]
            )[0]
        self.report.counts["fingerprints"] += len(found)
        if (found != expected).any():
            self._offend("fingerprint", mask=found != expected, detail="the final fingerprint is not that of the plan")


def tile(
    start: int, stop: int | None, limit: int, spans: Sequence[tuple[int, int, int]]
) -> Iterable[tuple[str, int, int, str]]:
    """What keeps ``(lo, hi, lease)`` intervals from tiling ``[start, stop)`` once, in fence order.

    ``stop`` None: an open shard, complete only up to its last interval; ``limit``: the shard's end. Yields
    ``(what, lo, hi, detail)``.
    """
    at, fence = start, 0
    for lo, hi, lease in sorted(spans):
        if lo >= hi or lo < start or hi > limit:
            yield "outside", lo, hi, f"the shard is [{start}, {limit})"
            continue
        if lo > at:
            yield "missing", at, lo, ""
        elif lo < at:
            yield "twice", lo, min(at, hi), f"lease {lease}"
        if lease < fence:
            yield "after fence", lo, hi, f"lease {lease}, though {fence} had opened the shard"
        at, fence = max(at, hi), max(fence, lease)
    if stop is not None and at < stop:
        yield "missing", at, stop, ""


# ---------------------------------------------------------------- the whole run


def check(facts: JobFacts, done: set[ShardKey], logs: Sequence[PsLog], run_dir: str = "") -> AuditReport:
    """Audit the newest log of each ps against what the journal says. ``done``: shards done before the logs were read
    (a running job: later ones may be newer than the logs)."""
    report = AuditReport(run_dir, counts={"cuts": 0, "fingerprints": 0})
    newest: dict[int, PsLog] = {}
    for log in sorted(logs, key=lambda log: log.life):
        if log.slot in newest:
            old = newest[log.slot]
            report.notes.append(f"{old.name} #{old.life} was replaced by #{log.life}; what it held died with it")
        newest[log.slot] = log
    prints = _Prints(facts)
    handovers, batches = 0, 0
    skipped: dict[tuple[int, int, int], int] = {}
    for log in newest.values():
        one = _PsCheck(facts, done, log, report, prints)
        one.run()
        handovers = max(handovers, one.handovers)
        batches += log.n
        for where, buckets in one.skipped.items():
            skipped[where] = skipped.get(where, 0) + buckets
        if facts.over and not log.closed:
            report.notes.append(f"{log.name} did not close its log: its final fingerprint is not checked")
    _check_owners(facts, newest, report, bool(done))
    n_buckets = facts.buckets
    for (shard, lo, hi), buckets in sorted(skipped.items()):
        share = "" if buckets >= n_buckets else f" at {buckets} of {n_buckets} buckets"
        report.skipped.append(f"{facts.shard_name(ShardKey(shard))} [{lo}, {hi}){share}: gradient not finite")
    quarantined = facts.quarantined()
    for key in sorted(quarantined):
        start, stop = facts.bounds(key) or (-1, -1)
        report.skipped.append(f"{facts.shard_name(key)} [{start}, {stop}): quarantined, {quarantined[key]}")
    samples = 0
    for number, epoch, plan in _finished_epochs(facts, done, set(quarantined)):
        report.finished.append(f"{plan.name} e{epoch}")
        samples += plan.samples
        assert number >= 0
    report.counts |= {
        "shards_done": len(done),
        "samples": samples,
        "batches": batches,
        "ps": len(newest),
        "buckets": n_buckets,
        "leases": len(facts.grants),
        "handovers": handovers,
        "skipped_samples": sum(hi - lo for _, lo, hi in skipped),
        "quarantined": len(quarantined),
    }
    return report


def _check_owners(facts: JobFacts, newest: dict[int, PsLog], report: AuditReport, needed: bool) -> None:
    """Every bucket of the placement has a log that speaks for it."""
    for slot in sorted(set(facts.owner)):
        mine = [b for b, s in enumerate(facts.owner) if s == slot]
        if slot not in newest:
            if needed:
                report.offenders.append(Offence("no log", f"ps:{slot}", detail=f"it owned {len(mine)} buckets"))
        elif newest[slot].n and newest[slot].owned.tolist() != mine:
            report.offenders.append(
                Offence("bad record", f"ps:{slot}", detail="its log speaks for other buckets than the placement says")
            )


def _finished_epochs(facts: JobFacts, done: set[ShardKey], away: set[ShardKey]) -> Iterable[tuple[int, int, Plan]]:
    count: dict[tuple[int, int], int] = {}
    for key in done | away:
        number, epoch, _ = split_key(key)
        count[number, epoch] = count.get((number, epoch), 0) + 1
    for (number, epoch), n in sorted(count.items()):
        plan = facts.plans[number]
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
        done = set(journal.facts.done)
        logs = [read_log(p) for p in sorted((run_dir / "audit").glob("ps-*.log"))]
        journal.advance()
        return check(journal.facts, done, logs, str(run_dir))
