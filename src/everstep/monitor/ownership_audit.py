"""Follows partitions that change hands through all their owners.

A partition's journey is a row of stints, one at each owner, in the order in which they began. Each stint after the
first begins with what the new owner says it took over (``Took``): for every open shard how far the partition had come,
and the fingerprint of all samples in it. That settles what came before:

* An interval that an earlier owner applied counts as far as the taken watermarks say. What lies beyond is **void**: the
  crash undid it, and it must be applied again. (An owner that was given up while it lived may go on for a moment;
  what it applied then is void too, and named.)
* What lies before them and is in no log is **vouched** for by the watermark: the owner died after the partition's
  mirror had it and before its log did.
* A shard that is open no more was released, so the partition had all of it, unless a later owner began it anew.
* A partition that began empty again had nothing that was released: all before is void.
* The sum over what counts must be the **fingerprint** that was taken, and from there on the one at every cut.

At the end, what counts must tile every shard once, in fence order, as for a partition that never moved.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
from numpy.typing import NDArray

from everstep.ids import ShardKey
from everstep.model.reasons import Arrival
from everstep.monitor.fingerprints import Fingerprints, tile
from everstep.monitor.journal_fold import JournalFold
from everstep.monitor.pslog import PartitionStint, PsLog
from everstep.monitor.report import AuditReport, Offence

_M64 = 2**64
_Where = tuple[str, str, str, int, int, str]  # of an offence, but for its partition


class _Counted:
    """Holds intervals that count for one partition so far, as columns. ``lease`` 0: vouched for by a watermark, in no
    log."""

    def __init__(self) -> None:
        self.shard: NDArray[np.int64] = np.zeros(0, np.int64)
        self.lo, self.hi, self.lease = self.shard, self.shard, self.shard
        self.value: NDArray[np.uint64] = np.zeros(0, np.uint64)  # fingerprint
        self.skipped: NDArray[np.bool_] = np.zeros(0, bool)

    def add(
        self,
        shard: NDArray[np.int64],
        lo: NDArray[np.int64],
        hi: NDArray[np.int64],
        lease: NDArray[np.int64],
        value: NDArray[np.uint64],
        skipped: NDArray[np.bool_],
    ) -> None:
        self.shard, self.lo, self.hi = np.r_[self.shard, shard], np.r_[self.lo, lo], np.r_[self.hi, hi]
        self.lease, self.value = np.r_[self.lease, lease], np.r_[self.value, value]
        self.skipped = np.r_[self.skipped, skipped]

    def keep(self, kept: NDArray[np.bool_]) -> None:
        self.shard, self.lo, self.hi, self.lease = self.shard[kept], self.lo[kept], self.hi[kept], self.lease[kept]
        self.value, self.skipped = self.value[kept], self.skipped[kept]

    def print(self) -> int:
        return int(self.value.sum(dtype=np.uint64))


class OwnershipCheck:
    """Checks ownership: ``run`` every partition that changed hands, then ``close``. ``skipped``: ranges that some ps
    logged as skipped."""

    def __init__(
        self,
        fold: JournalFold,
        done: set[ShardKey],
        report: AuditReport,
        fingerprints: Fingerprints,
        skipped: Iterable[tuple[int, int, int]],
    ) -> None:
        self.fold, self.done, self.report, self.fingerprints = fold, done, report, fingerprints
        self.handovers = 0
        self._values: dict[int, NDArray[np.uint64]] = {}  # id of a log -> value of its pushes
        self._positions: dict[int, list[dict[int, int]]] = {}  # id of a log -> per cut: partition -> place
        self._found: dict[_Where, list[int]] = {}
        self._fenced: dict[tuple[str, str], int] = {}
        self._skips: dict[int, list[tuple[int, int]]] = {}
        for shard, lo, hi in skipped:
            self._skips.setdefault(shard, []).append((lo, hi))
        self._whole = sum(int(fingerprints.whole(k)) for k in done) % _M64
        for name in ("taken", "void", "vouched"):
            report.counts.setdefault(name, 0)

    def run(self, partition: int, stints: list[PartitionStint]) -> None:
        stints = _in_order(stints)
        counted = _Counted()
        honest = True
        for i, stint in enumerate(stints):
            if stint.acquired is not None or i:
                honest = self._take(partition, counted, stints, i) and honest
            base = counted.print() if stint.acquired is None else stint.acquired.fingerprint
            log = stint.log
            rows = log.rows_of(partition, stint.first, stint.last)
            value = self._value(log)[rows]
            if honest:
                honest = self._cuts(partition, stint, rows, value, base)
            counted.add(log.shard[rows], log.lo[rows], log.hi[rows], log.lease[rows], value, log.skipped[rows])
        self._tile(partition, stints[-1], counted)
        if honest:
            self._against_plan(partition, stints, counted)

    def close(self) -> None:
        """Say what was found, offences that differ only in the partition as one."""
        for (what, ps, shard, lo, hi, detail), partitions in self._found.items():
            shown = ",".join(str(b) for b in partitions[:8]) + (",..." if len(partitions) > 8 else "")
            named = f"partition{'s' if len(partitions) > 1 else ''} {shown}"
            self.report.offenders.append(Offence(what, ps, shard, lo, hi, named, detail))
        for (old, new), n in sorted(self._fenced.items()):
            self.report.notes.append(f"{old} still applied {n} batches to partitions that {new} had taken over: void")

    # ------------------------------------------------------------ a partition changes hands

    def _take(self, partition: int, counted: _Counted, stints: list[PartitionStint], i: int) -> bool:
        """Settle what counts of all before stint ``i``; whether its fingerprint is the one that was taken."""
        stint = stints[i]
        acquired = stint.acquired
        counts = self.report.counts
        if acquired is None or acquired.how is Arrival.BEGUN:  # empty: nothing of the old one is left
            if acquired is not None:
                counts["taken"] += 1
                counts[Arrival.BEGUN] = counts.get(Arrival.BEGUN, 0) + 1
            counts["void"] += len(counted.shard)
            counted.keep(np.zeros(len(counted.shard), bool))
            return True
        counts["taken"] += 1
        counts[acquired.how] = counts.get(acquired.how, 0) + 1
        marks = dict(np.frombuffer(acquired.shards[: len(acquired.shards) // 16 * 16], "<i8").reshape(-1, 2).tolist())
        keys = np.array(sorted(marks), np.int64)
        upto = np.array([marks[k] for k in keys.tolist()], np.int64)
        where = np.searchsorted(keys, counted.shard)
        is_open = np.zeros(len(counted.shard), bool)
        mark = np.zeros(len(counted.shard), np.int64)
        if len(keys):
            where = np.minimum(where, len(keys) - 1)
            is_open = keys[where] == counted.shard
            mark = upto[where]
        again = self._shards_from(partition, stints[i:])
        shards = np.unique(counted.shard[~is_open]).tolist()
        over = np.array([k for k in shards if k in self.done and k not in again], np.int64)
        kept = np.where(is_open, counted.hi <= mark, np.isin(counted.shard, over))
        for r in np.flatnonzero(is_open & (counted.lo < mark) & (counted.hi > mark)).tolist():
            detail = f"taken over by {stint.log.name} at {mark[r]}, inside of it"
            self._offend(
                "torn", partition, stint, int(counted.shard[r]), int(counted.lo[r]), int(counted.hi[r]), detail
            )
        if i:
            self._name_fenced(partition, stints, i, marks)
        counts["void"] += int((~kept & (counted.lease > 0)).sum())
        counted.keep(kept)
        first = i == 0  # goes on from a checkpoint of another run
        self._vouch(counted, marks, over.tolist(), (self.fold.resumed - set(marks)) if first else set(), first)
        if counted.print() == acquired.fingerprint:
            return True
        # Shards that came and went in a log's lost tail: the plan knows them, and only the sum can tell.
        here = set(counted.shard.tolist()) | set(marks)
        lost = [k for k in self.done - self.fold.resumed if k not in here and k not in again]
        total = counted.print() + sum(int(self.fingerprints.whole(k)) for k in lost)
        if lost and total % _M64 == acquired.fingerprint:
            self._vouch(counted, {}, lost, set(), False)
            return True
        if first:
            return True  # what the run before skipped is not known here: its own audit says it
        detail = f"{stint.log.name} took it over ({acquired.how}) with other samples than its owners' logs say"
        self._offend("fingerprint", partition, stint, -1, -1, -1, detail)
        return False

    def _vouch(
        self, counted: _Counted, marks: dict[int, int], over: Sequence[int], whole: set[ShardKey], quiet: bool
    ) -> None:
        """Add what the watermarks say beyond what the logs have. ``over``: shards known to be complete; ``whole``: of
        an earlier run, to be counted without a word."""
        upto = dict(marks)
        for key in [*over, *whole]:
            bounds = self.fold.bounds(ShardKey(key))
            if bounds is not None:
                upto[key] = bounds[1]
        covered: dict[int, int] = {}
        for shard, hi in zip(counted.shard.tolist(), counted.hi.tolist(), strict=True):
            covered[shard] = max(hi, covered.get(shard, hi))
        added = []
        for shard, mark in upto.items():
            bounds = self.fold.bounds(ShardKey(shard))
            if bounds is None:
                continue
            start = covered.get(shard, bounds[0])
            if start < mark:
                value = int(self.fingerprints.ranges(shard, np.array([start]), np.array([mark]))[0])
                for lo, hi in self._skips.get(shard, ()):
                    if start <= lo and hi <= mark:
                        value -= int(self.fingerprints.ranges(shard, np.array([lo]), np.array([hi]))[0])
                added.append((shard, start, mark, value % _M64))
        if not added:
            return
        if not quiet:
            self.report.counts["vouched"] += sum(hi - lo for _, lo, hi, _ in added)
        columns = np.array([a[:3] for a in added], np.int64).T
        nothing = np.zeros(len(added), np.int64)
        values = np.array([a[3] for a in added], np.uint64)
        counted.add(columns[0], columns[1], columns[2], nothing, values, nothing.astype(bool))

    def _shards_from(self, partition: int, stints: list[PartitionStint]) -> set[int]:
        out: set[int] = set()
        for stint in stints:
            out |= set(stint.log.shard[stint.log.rows_of(partition, stint.first, stint.last)].tolist())
        return out

    def _name_fenced(self, partition: int, stints: list[PartitionStint], i: int, marks: dict[int, int]) -> None:
        """Name what the owner before applied after it had been replaced."""
        old, new = stints[i - 1], stints[i]
        log = old.log
        rows = log.rows_of(partition, old.first, old.last)
        late = rows[log.at[rows] > new.at]
        beyond = [r for r in late.tolist() if int(log.hi[r]) > marks.get(int(log.shard[r]), -1)]
        if beyond and old.log is not new.log:
            key = f"{log.name} #{log.life}", f"{new.log.name} #{new.log.life}"
            self._fenced[key] = self._fenced.get(key, 0) + len(beyond)

    # ------------------------------------------------------------ fingerprints

    def _value(self, log: PsLog) -> NDArray[np.uint64]:
        """Return the fingerprint of each push of a log, 0 where it was skipped."""
        found = self._values.get(id(log))
        if found is None:
            found = self._values[id(log)] = self.fingerprints.pushes(log)
            self.report.counts["cuts"] += len(log.cuts)
        return found

    def _places(self, log: PsLog) -> list[dict[int, int]]:
        found = self._positions.get(id(log))
        if found is None:
            found = [{b: i for i, b in enumerate(cut.owned.tolist())} for cut in log.cuts]
            self._positions[id(log)] = found
        return found

    def _cuts(
        self, partition: int, stint: PartitionStint, rows: NDArray[np.int64], value: NDArray[np.uint64], base: int
    ) -> bool:
        """Check that at every cut of the stint the partition holds what it came with and what was logged since."""
        sums = np.r_[np.uint64(0), np.cumsum(value, dtype=np.uint64)]
        for cut, places in zip(stint.log.cuts, self._places(stint.log), strict=True):
            place = places.get(partition)
            if place is None or not _within(stint, cut.before, cut.seq):
                continue
            self.report.counts["fingerprints"] += 1
            expected = (base + int(sums[np.searchsorted(rows, cut.before)])) % _M64
            if int(cut.found[place]) != expected:
                detail = f"the partition holds other samples than the log says, seen at record {cut.seq}"
                self._offend("fingerprint", partition, stint, -1, -1, -1, detail)
                return False
        return True

    def _against_plan(self, partition: int, stints: list[PartitionStint], counted: _Counted) -> None:
        """Compare with the final fingerprint from the plan: all of each done shard, less what was skipped. Of the
        others the logs must be believed."""
        stint = stints[-1]
        log = stint.log
        if not log.closed or not log.cuts or stint.released is not None or stints[0].acquired is not None:
            return
        place = self._places(log)[-1].get(partition)
        if place is None:
            return
        is_done = np.isin(counted.shard, np.fromiter(self.done, np.int64, len(self.done)))
        expected = self._whole + int(counted.value[~is_done].sum(dtype=np.uint64))
        for r in np.flatnonzero(is_done & (counted.skipped | (counted.lease == 0))).tolist():
            lo, hi = counted.lo[r : r + 1], counted.hi[r : r + 1]
            expected += int(counted.value[r]) - int(self.fingerprints.ranges(int(counted.shard[r]), lo, hi)[0])
        self.report.counts["fingerprints"] += 1
        if int(log.cuts[-1].found[place]) != expected % _M64:
            detail = "the final fingerprint is not that of the plan"
            self._offend("fingerprint", partition, stint, -1, -1, -1, detail)

    # ------------------------------------------------------------ tiling

    def _tile(self, partition: int, stint: PartitionStint, counted: _Counted) -> None:
        order = np.lexsort((counted.lo, counted.shard))
        shard, lo, hi, lease = counted.shard[order], counted.lo[order], counted.hi[order], counted.lease[order]
        for key in self.done - set(shard.tolist()):
            if key not in self.fold.resumed:
                bounds = self.fold.bounds(key)
                assert bounds is not None
                self._offend("missing", partition, stint, key, *bounds, "")
        if not len(shard):
            return
        starts = np.flatnonzero(np.r_[True, shard[1:] != shard[:-1]])
        ends = np.r_[starts[1:], len(shard)]
        inside = shard[1:] == shard[:-1]
        self.handovers = max(self.handovers, int((inside & (lease[1:] != lease[:-1])).sum()))
        uneven = inside & ((lo[1:] != hi[:-1]) | (lease[1:] < lease[:-1]))
        odd_at = np.r_[False, uneven] | (lo >= hi)
        for first, end in zip(starts.tolist(), ends.tolist(), strict=True):
            key = ShardKey(int(shard[first]))
            bounds = self.fold.bounds(key)
            if bounds is None:
                self._offend("unknown shard", partition, stint, key, int(lo[first]), int(hi[end - 1]), "no plan has it")
                continue
            stop = bounds[1] if key in self.done else None
            plain = lo[first] == bounds[0] and hi[end - 1] <= bounds[1] and (stop is None or hi[end - 1] == stop)
            if plain and not odd_at[first:end].any():
                continue
            spans, fence = [], 0
            rows = zip(lo[first:end].tolist(), hi[first:end].tolist(), lease[first:end].tolist(), strict=True)
            for low, high, no in rows:
                spans.append((low, high, no or fence))  # what is vouched for has no lease of its own
                fence = max(fence, no)
            for what, low, high, detail in tile(bounds[0], stop, bounds[1], spans):
                self._offend(what, partition, stint, key, low, high, detail)

    def _offend(
        self, what: str, partition: int, stint: PartitionStint, shard: int, lo: int, hi: int, detail: str
    ) -> None:
        name = self.fold.shard_name(ShardKey(shard)) if shard >= 0 else ""
        self._found.setdefault((what, stint.log.name, name, lo, hi, detail), []).append(partition)


def _within(stint: PartitionStint, before: int, seq: int) -> bool:
    """Return whether a cut was made during the stint."""
    after = stint.acquired is None or seq > stint.acquired.seq
    return after and (stint.released is None or seq < stint.released.seq) and stint.first <= before <= stint.last


def _in_order(stints: list[PartitionStint]) -> list[PartitionStint]:
    """Return stints by the placements under which they began; where a log does not know them, by time. One that began
    empty is the first, or the first sign of its new life."""
    if sum(s.acquired is None for s in stints) <= 1 and all(s.acquired is None or s.acquired.version for s in stints):
        return sorted(stints, key=lambda s: (s.acquired.version, s.acquired.at) if s.acquired is not None else (0, 0.0))
    fresh = sorted((s for s in stints if s.acquired is None), key=lambda s: s.log.life)
    timed = [(s.at, s) for s in stints if s.acquired is not None]
    for i, s in enumerate(fresh):
        if i == 0:
            timed.append((-1.0, s))
        elif s.log.n:
            timed.append((float(s.log.at[0]), s))
    return [s for _, s in sorted(timed, key=lambda pair: pair[0])]
