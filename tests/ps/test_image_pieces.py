"""What a ps tells of its images fits into control messages, however much it is."""

from __future__ import annotations

import msgspec

from everstep.brain.events import ImagesWritten
from everstep.ids import BucketId, ShardKey
from everstep.model.image import BucketImage, ImageFile
from everstep.ps.ps_process import in_pieces


def written(buckets: int, marks: int) -> ImagesWritten:
    watermarks = tuple((ShardKey(s), 10 * s) for s in range(marks))
    images = tuple(
        BucketImage(
            bucket=BucketId(b), seq=b, fingerprint=b, watermarks=watermarks, files=(ImageFile(f"images/{b}", 9, "x"),)
        )
        for b in range(buckets)
    )
    return ImagesWritten(7, images, (), "")


def test_pieces_are_small_and_together_the_whole() -> None:
    whole = written(256, 2000)
    pieces = list(in_pieces(whole, 64 << 10))
    assert len(pieces) > 20
    assert tuple(image for piece in pieces for image in piece.images) == whole.images
    assert max(len(msgspec.msgpack.encode(piece)) for piece in pieces) < 128 << 10
    assert {p.checkpoint for p in pieces} == {7}


def test_an_error_and_a_small_report_are_one_message() -> None:
    failed = ImagesWritten(7, (), (), "no space left")
    assert list(in_pieces(failed)) == [failed]
    assert list(in_pieces(written(3, 2))) == [written(3, 2)]
