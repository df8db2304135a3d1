"""The audit of partitions that change hands: what counts, what is void, what is vouched for, and what is an offence.

As in test_audit the brain, the journal and the ledgers are real; a partition is taken over by giving its books, or an
older copy of them, to another ledger.
"""

from __future__ import annotations

import copy
import random
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import msgspec
import numpy as np
import pytest
from test_audit import PARTITIONS, Run, whats

from everstep.config.spec import JobSpec
from everstep.ids import Incarnation, Slot
from everstep.model.shard import Lease
from everstep.monitor.audit import AuditReport, audit
from everstep.monitor.records import (
    AcquiredRecord,
    Applied,
    AuditRecord,
    CutRecord,
    FinalCutRecord,
    ReleasedRecord,
    audit_header,
)
from everstep.native.ledger import PartitionLedger, PushLedger
from everstep.storage.chain import ChainWriter

Life = tuple[Slot, Incarnation]
P0, P1 = (Slot(0), Incarnation(1)), (Slot(1), Incarnation(1))


class Journey(Run):
    """``lives``: every ps process that ever was, with its log."""

    def __init__(self, run_dir: Path, **more: int) -> None:
        spec = JobSpec(workers=2, ps=2, partitions=PARTITIONS, max_restarts=1000, quarantine_after=1000)
        super().__init__(run_dir, spec=spec, **more)
        self.lives: dict[Life, PushLedger] = {P0: self.ledgers[Slot(0)], P1: self.ledgers[Slot(1)]}
        self.first = {life: sorted(ledger.partitions) for life, ledger in self.lives.items()}
        self.logs: dict[Life, list[AuditRecord]] = {P0: [], P1: []}
        self.closed: set[Life] = set()
        self.seqs: dict[int, int] = {}
        self.clock = 0.0
        self.version = 1  # of the placement
        self.ahead: dict[Life, float] = {}  # clocks that are wrong

    def now(self, life: Life | None = None) -> float:
        self.clock += 1.0
        return self.clock + (self.ahead.get(life, 0.0) if life is not None else 0.0)

    def grant(self, worker: int, until_epoch: int = 9) -> Lease | None:
        self.ledgers = {Slot(100 * s + i): ledger for (s, i), ledger in self.lives.items() if ledger.partitions}
        return super().grant(worker, until_epoch)

    def reopen(self, lease: Lease) -> None:
        """As workers do when the map changed."""
        for ledger in self.lives.values():
            assert ledger.open(lease.shard, lease.start, lease.no)

    def apply(self, life: Life, worker: int, lease: Lease, lo: int, hi: int, log: bool = True) -> int:
        r = self.lives[life].push(lease.shard, lo, hi, lease.no)
        w = Slot(worker)
        if r.applied and log:
            seq = len(self.logs[life])
            applied = (
                seq,
                lease.shard,
                lo,
                hi,
                lease.no,
                w,
                self.workers[w],
                r.applied,
                r.partitions,
                False,
                self.now(),
            )
            self.logs[life].append(Applied(*applied))
        return r.applied

    def everywhere(self, worker: int, lease: Lease, lo: int, hi: int) -> None:
        """As workers do: each partition gets just what it lacks of ``[lo, hi)``."""
        levels = {lo, hi}
        for ledger in self.lives.values():
            levels |= {b.shards[lease.shard][0] for b in ledger.partitions.values() if lease.shard in b.shards}
        cuts = sorted(v for v in levels if lo <= v <= hi)
        for low, high in pairwise(cuts):
            for life in self.lives:
                self.apply(life, worker, lease, low, high)

    def cut_life(self, life: Life, kind: type[CutRecord] | type[FinalCutRecord] = CutRecord) -> None:
        fingerprints = np.array([b.fingerprint for b in self.lives[life].partitions.values()], np.uint64).tobytes()
        self.logs[life].append(kind(len(self.logs[life]), fingerprints))

    def copy(self, life: Life, partition: int) -> PartitionLedger:
        return copy.deepcopy(self.lives[life].partitions[partition])

    def take(self, life: Life, partition: int, ledgers: PartitionLedger, how: str = "promoted") -> None:
        self.seqs[partition] = self.seqs.get(partition, 0) + 1
        shards = b"".join(np.array([s, m[0]], "<i8").tobytes() for s, m in sorted(ledgers.shards.items()))
        self.version += 1
        at, version = self.now(life), self.version
        acquired = AcquiredRecord(
            len(self.logs[life]), partition, how, self.seqs[partition], shards, ledgers.fingerprint, at, version
        )
        self.logs[life].append(acquired)
        ledger = self.lives[life]
        ledger.partitions = dict(sorted({**ledger.partitions, partition: ledgers}.items()))

    def give(self, life: Life, partition: int) -> PartitionLedger:
        self.logs[life].append(ReleasedRecord(len(self.logs[life]), partition, self.seqs.get(partition, 0), self.now()))
        return self.lives[life].partitions.pop(partition)

    def die(self, life: Life) -> PushLedger:
        """kill -9: its log ends, its books are gone."""
        self.closed.add(life)
        return self.lives.pop(life)

    def begin(self, life: Life) -> None:
        self.lives[life] = PushLedger(PARTITIONS, [])
        self.logs[life], self.first[life] = [], []

    def report(self, close: bool = True) -> AuditReport:
        for life, records in self.logs.items():
            if close and life not in self.closed:
                self.cut_life(life, FinalCutRecord)
                self.closed.add(life)
            path = self.run_dir / "audit" / f"ps-{life[0]}.{life[1]}.log"
            path.unlink(missing_ok=True)
            writer = ChainWriter(path, audit_header(*life, PARTITIONS, self.first[life]))
            for record in records:
                writer.append(msgspec.msgpack.encode(record))
            writer.close()
        self.journal.flush()
        return audit(self.run_dir)

    def rest(self, worker: int = 0, epochs: int = 1) -> None:
        """Train what is left."""
        while (lease := self.grant(worker, epochs)) is not None:
            for lo in range(lease.start, lease.stop, 10):
                self.everywhere(worker, lease, lo, min(lo + 10, lease.stop))
            self.done(worker, lease)

    def opened(self, hi: int) -> Lease:
        """A lease of worker 0, whose samples up to ``hi`` are everywhere."""
        lease = self.grant(0)
        assert lease is not None
        self.everywhere(0, lease, 0, hi)
        return lease

    def good(self, epochs: int = 1) -> AuditReport:
        """What is left is trained, and the audit finds nothing."""
        self.rest(epochs=epochs)
        report = self.report()
        assert report.ok, report.text()
        return report


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Journey]:
    made = Journey(tmp_path)
    yield made
    made.journal.close()


def test_a_partition_that_moves_in_the_middle_of_a_shard_is_exactly_once(run: Journey) -> None:
    lease = run.opened(10)
    run.cut_life(P0)
    partition = run.first[P0][0]
    run.take(P1, partition, run.give(P0, partition))
    run.cut_life(P0)
    run.cut_life(P1)
    run.everywhere(0, lease, 10, 30)
    run.done(0, lease)
    report = run.good(epochs=2)
    assert report.finished == ["train e0", "train e1"]
    assert (report.counts["taken"], report.counts["void"], report.counts["vouched"]) == (1, 0, 0)
    assert report.counts["fingerprints"] > PARTITIONS
    assert "1 partitions taken over (1 promoted)" in report.text()


def test_what_a_lost_ps_did_beyond_its_mirror_is_void_and_applied_again(run: Journey) -> None:
    lease = run.opened(10)
    mirrors = {b: run.copy(P0, b) for b in run.first[P0]}
    run.everywhere(0, lease, 10, 20)  # not yet at the mirrors (eager)
    run.die(P0)
    for partition, ledgers in mirrors.items():
        run.take(P1, partition, ledgers, "rebuilt")
    run.reopen(lease)
    run.everywhere(0, lease, 10, 30)
    run.done(0, lease)
    report = run.good()
    assert report.counts["void"] == len(mirrors) and report.counts["rebuilt"] == len(mirrors)
    assert "4 intervals void" in report.text()


def test_what_a_dead_ps_could_not_log_is_vouched_for(run: Journey) -> None:
    lease = run.opened(10)
    run.apply(P0, 0, lease, 10, 20, log=False)  # its mirror has it; it was killed before it wrote the record
    run.apply(P1, 0, lease, 10, 20)
    for partition, ledgers in run.die(P0).partitions.items():
        run.take(P1, partition, ledgers)
    run.everywhere(0, lease, 20, 30)
    run.done(0, lease)
    report = run.good()
    assert report.counts["vouched"] == 10 * 4


def test_a_partition_that_comes_back_to_where_it_was_and_one_restarted_ps(run: Journey) -> None:
    partition = run.first[P0][1]
    again = (Slot(0), Incarnation(2))
    for step in range(2):
        lease = run.grant(0)
        assert lease is not None
        run.everywhere(0, lease, lease.start, lease.stop)
        run.done(0, lease)
        (source, target) = ((P0, P1), (P1, P0))[step]
        run.take(target, partition, run.give(source, partition))
    ledgers = run.die(P0).partitions
    run.begin(again)
    for b, held in ledgers.items():
        run.take(again, b, held, "rebuilt")
    report = run.good()
    assert report.counts["taken"] == 2 + len(ledgers)


def test_owners_are_ordered_by_placements_and_not_by_their_clocks(run: Journey) -> None:
    """Two nodes whose clocks are an hour apart: by time, the partition would have been at its first owner last."""
    run.ahead[P1] = -3600.0
    partition = run.first[P0][1]
    for source, target in ((P0, P1), (P1, P0), (P0, P1)):
        lease = run.grant(0)
        assert lease is not None
        run.everywhere(0, lease, lease.start, lease.stop)
        run.done(0, lease)
        run.take(target, partition, run.give(source, partition))
    report = run.good()
    assert (report.counts["taken"], report.counts["void"]) == (3, 0)


def test_partitions_that_begin_empty_again_have_all_of_it_trained_again(run: Journey) -> None:
    """Their ps was lost before any mirror was complete; nothing was released."""
    lease = run.opened(20)
    lost = sorted(run.die(P0).partitions)
    for partition in lost:
        run.take(P1, partition, PartitionLedger(), "begun")
    run.reopen(lease)
    run.everywhere(0, lease, 0, 30)
    run.done(0, lease)
    report = run.good()
    assert report.counts["begun"] == len(lost) and f"{len(lost)} begun" in report.text()


def test_a_partition_that_is_said_to_begin_empty_and_is_not_trained_again_is_missing(run: Journey) -> None:
    lease = run.opened(30)
    run.done(0, lease)
    for partition in sorted(run.die(P0).partitions):
        run.take(P1, partition, PartitionLedger(), "begun")
    run.rest()
    assert "missing" in whats(run.report())


def test_a_released_shard_counts_though_no_mark_speaks_of_it(run: Journey) -> None:
    lease = run.opened(30)
    run.done(0, lease)
    for ledger in run.lives.values():
        ledger.release([lease.shard])
    for partition, ledgers in run.die(P0).partitions.items():
        run.take(P1, partition, ledgers)
    report = run.good()
    assert report.counts["void"] == 0


def test_a_shard_that_the_mirror_never_heard_of_is_begun_anew(run: Journey) -> None:
    mirrors = {b: run.copy(P0, b) for b in run.first[P0]}
    lease = run.opened(30)
    run.die(P0)
    for partition, ledgers in mirrors.items():
        run.take(P1, partition, ledgers, "loaded")
    run.reopen(lease)
    run.everywhere(0, lease, 0, 30)
    run.done(0, lease)
    report = run.good()
    assert report.counts["void"] == len(mirrors)


def test_what_a_fenced_ps_still_applied_is_void_and_named(run: Journey) -> None:
    lease = run.opened(10)
    for partition in run.first[P0]:
        run.take(P1, partition, run.copy(P0, partition))
    run.apply(P0, 0, lease, 10, 20)  # it was given up, and does not know
    run.die(P0)
    run.everywhere(0, lease, 10, 30)
    run.done(0, lease)
    report = run.good()
    assert any(
        "ps:0 #1 still applied 4 batches to partitions that ps:1 #1 had taken over: void" in n for n in report.notes
    )


# ---------------------------------------------------------------- offences


def moved(run: Journey, **lie: int | bytes) -> AuditReport:
    """A partition moves after 10 of 30 samples, and the new owner's record of it is changed."""
    lease = run.opened(10)
    partition = run.first[P0][0]
    run.take(P1, partition, run.give(P0, partition))
    if lie:
        run.logs[P1][-1] = msgspec.structs.replace(run.logs[P1][-1], **lie)
    run.everywhere(0, lease, 10, 30)
    run.done(0, lease)
    run.rest()
    return run.report()


def test_a_false_fingerprint(run: Journey) -> None:
    report = moved(run, fingerprint=12345)
    assert whats(report) == {"fingerprint"}
    assert {o.partitions for o in report.offenders} == {f"partition {run.first[P0][0]}"}


def test_watermarks_that_say_less_than_was_taken(run: Journey) -> None:
    """The partition lost ten samples on its way, and nobody applied them again."""
    report = moved(run, shards=np.array([0, 0], "<i8").tobytes())
    assert {"missing", "fingerprint"} <= whats(report)
    offence = next(o for o in report.offenders if o.what == "missing")
    assert (offence.shard, offence.lo, offence.hi) == ("train e0 #0", 0, 10)


def test_a_batch_applied_by_both_owners(run: Journey) -> None:
    lease = run.opened(20)
    partition = run.first[P0][0]
    ledgers = run.give(P0, partition)
    old = copy.deepcopy(ledgers)
    old.shards[lease.shard][0] = 10  # rows of now, watermarks of before
    run.take(P1, partition, old)
    run.logs[P1][-1] = msgspec.structs.replace(run.logs[P1][-1], shards=np.array([0, 20], "<i8").tobytes())
    run.everywhere(0, lease, 10, 30)
    run.done(0, lease)
    run.rest()
    report = run.report()
    assert {"twice", "fingerprint"} <= whats(report)
    offence = next(o for o in report.offenders if o.what == "twice")
    assert (offence.lo, offence.hi, offence.partitions) == (10, 20, f"partition {partition}")


def test_what_was_void_and_never_applied_again_is_missing(run: Journey) -> None:
    lease = run.opened(10)
    mirrors = {b: run.copy(P0, b) for b in run.first[P0]}
    run.everywhere(0, lease, 10, 30)
    run.done(0, lease)  # and yet the job calls it done
    run.die(P0)
    for partition, ledgers in mirrors.items():
        run.take(P1, partition, ledgers)
    run.rest()
    report = run.report()
    found = [(o.lo, o.hi, o.partitions) for o in report.offenders if o.what == "missing"]
    assert found == [(10, 30, f"partitions {','.join(map(str, mirrors))}")]


def test_a_partition_that_leaves_though_it_never_came(run: Journey) -> None:
    run.rest()
    foreign = run.first[P1][0]
    run.logs[P0].append(ReleasedRecord(len(run.logs[P0]), foreign, 0, run.now()))
    assert "bad record" in whats(run.report())


# ---------------------------------------------------------------- at random


@pytest.mark.parametrize("seed", range(30))
def test_random_moves_and_losses_are_exactly_once(tmp_path: Path, seed: int) -> None:
    """Moves, losses with mirrors that lag or do not, restarts; some log tails are lost."""
    rng = random.Random(seed)
    run = Journey(tmp_path, samples=rng.randint(30, 150), shard_samples=rng.randint(10, 40))
    mirrors: dict[int, PartitionLedger] = {}
    number = {Slot(0): 1, Slot(1): 1}
    while (lease := run.grant(0, 2)) is not None:
        at = lease.start
        while at < lease.stop:
            for life in run.lives:  # acked: a mirror has at least what was answered
                mirrors |= {b: run.copy(life, b) for b in run.lives[life].partitions}
            hi = min(at + rng.randint(1, 15), lease.stop)
            run.everywhere(0, lease, at, hi)
            at = hi
            what = rng.random()
            lives = list(run.lives)
            if what < 0.3:
                source, target = rng.sample(lives, 2)
                held = list(run.lives[source].partitions)
                for partition in rng.sample(held, min(len(held), rng.randint(1, 3))):
                    run.take(target, partition, run.give(source, partition))
            elif what < 0.5:
                dead = rng.choice(lives)
                lost = run.die(dead).partitions
                slot = dead[0]
                number[slot] += 1
                (other,) = run.lives
                run.begin((slot, Incarnation(number[slot])))
                fresh = rng.random() < 0.5
                for partition, ledgers in lost.items():
                    run.take(
                        rng.choice([other, (slot, Incarnation(number[slot]))]),
                        partition,
                        ledgers if fresh else mirrors[partition],
                    )
                run.reopen(lease)
                at = lease.start
            if rng.random() < 0.3:
                for life in run.lives:
                    run.cut_life(life)
        run.done(0, lease)
        if rng.random() < 0.5:
            for ledger in run.lives.values():
                ledger.release([lease.shard])
    report = run.report()
    run.journal.close()
    assert report.ok, report.text()
    assert report.finished == ["train e0", "train e1"]
