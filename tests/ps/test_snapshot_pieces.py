"""What a ps tells of its snapshots fits into control messages, however much it is."""

from __future__ import annotations

import msgspec

from everstep.brain.events import SnapshotsWritten
from everstep.ids import PartitionId, ShardKey
from everstep.model.snapshot import CheckpointFile, PartitionSnapshot
from everstep.ps.ps_process import in_pieces


def written(partitions: int, marks: int) -> SnapshotsWritten:
    watermarks = tuple((ShardKey(s), 10 * s) for s in range(marks))
    snapshots = tuple(
        PartitionSnapshot(
            partition=PartitionId(b),
            seq=b,
            fingerprint=b,
            watermarks=watermarks,
            files=(CheckpointFile(f"images/{b}", 9, "x"),),
        )
        for b in range(partitions)
    )
    return SnapshotsWritten(7, snapshots, (), "")


def test_pieces_are_small_and_together_the_whole() -> None:
    whole = written(256, 2000)
    pieces = list(in_pieces(whole, 64 << 10))
    assert len(pieces) > 20
    assert tuple(snapshot for piece in pieces for snapshot in piece.snapshots) == whole.snapshots
    assert max(len(msgspec.msgpack.encode(piece)) for piece in pieces) < 128 << 10
    assert {p.checkpoint for p in pieces} == {7}


def test_an_error_and_a_small_report_are_one_message() -> None:
    failed = SnapshotsWritten(7, (), (), "no space left")
    assert list(in_pieces(failed)) == [failed]
    assert list(in_pieces(written(3, 2))) == [written(3, 2)]
