"""Single bits that change on the way: 1,000 of them in frames, differences, contents and what is left of parity rows.
Not one goes unnoticed, and nothing of the damaged piece is applied. (Checkpoints, chained logs and the journal: see
test_snapshots.py and tests/storage.)
"""

from __future__ import annotations

import random

import msgspec
import numpy as np
import pytest

from everstep.errors import WireError
from everstep.model.table import OptimizerKind, OptimizerSpec, TableSpec
from everstep.native import BlobKind, Store
from everstep.native.blob import seal
from everstep.net.frames import DATA_LIMITS, FrameDecoder, encode_frame
from everstep.net.frames import FrameKind as FrameKind
from everstep.testing.twin import partition_of

TABLE = TableSpec("t", 6, OptimizerSpec(OptimizerKind.ADAGRAD, 0.1))
B, LOST = 4, [1, 2]


def flipped(data: bytes, rng: random.Random) -> bytes:
    at = rng.randrange(8 * len(data))
    out = bytearray(data)
    out[at >> 3] ^= 1 << (at & 7)
    return bytes(out)


@pytest.mark.parametrize("kind", [FrameKind.REQUEST, FrameKind.ANSWER])
def test_every_flip_in_a_frame_is_noticed_at_once(kind: FrameKind) -> None:
    rng = random.Random(1)
    header, body = msgspec.msgpack.encode({"type": "push", "version": 3}), rng.randbytes(700)
    good = encode_frame(kind, header, body)
    assert [f.header for f in FrameDecoder(DATA_LIMITS).feed(good)] == [header]
    for number in range(8 * 24 + 200):  # each bit of the preamble, then any
        bad = bytearray(good) if number < 8 * 24 else bytearray(flipped(good, rng))
        if number < 8 * 24:
            bad[number >> 3] ^= 1 << (number & 7)
        with pytest.raises(WireError):
            FrameDecoder(DATA_LIMITS).feed(bytes(bad))


def emitted(store: Store) -> list[bytes]:
    _, entries, data = store.take_outbox(1 << 30)
    return [data[at : at + length].tobytes() for _, _, _, at, length in entries]


def synced(store: Store, partition: int) -> list[bytes]:
    for kind in (BlobKind.HEADS, BlobKind.BODIES):
        lo = 0
        while lo >= 0:
            lo = store.emit(partition, kind, TABLE.id, lo, lo + 64)
    store.emit_marks(partition)
    return emitted(store)


def test_every_flip_in_a_blob_is_noticed_and_changes_nothing() -> None:
    rng = random.Random(2)
    values = np.random.default_rng(2)
    keys = np.arange(600)
    where = partition_of(keys, TABLE.id, B)
    owners, rows = [Store(B, 1) for _ in range(B)], [Store(B, 1), Store(B, 1)]
    for store in [*owners, *rows]:
        store.declare(TABLE)
    for row, store in enumerate(rows):
        store.mirror_make(1, list(range(B)), row)
    noticed = 0

    def damage(n: int, blob: bytes, row: int, what: str) -> None:
        nonlocal noticed
        store = rows[row]
        before = store.mirror_pages(1, TABLE.id), store.mirror_state(1)
        for _ in range(n):
            with pytest.raises(ValueError, match=r"blob|mirror"):
                getattr(store, what)(1, flipped(blob, rng))
            noticed += 1
        assert (store.mirror_pages(1, TABLE.id), store.mirror_state(1)) == before

    for b, owner in enumerate(owners):
        owner.own([b])
        owner.protect([b], True)
        mine = keys[where == b]
        owner.put_absent(TABLE.id, mine, values.standard_normal((len(mine), TABLE.dim), np.float32))
        owner.open(0, 0, 1)
        emitted(owner)
        for number, blob in enumerate(synced(owner, b)):
            for row in range(2):
                if number % 3 == b % 3:
                    damage(10, blob, row, "mirror_apply")
                assert rows[row].mirror_apply(1, blob) == 0
        for lo in range(3):
            grads = values.standard_normal((len(mine[:20]), TABLE.dim)).astype(np.float32)
            owner.push(0, lo, lo + 1, 1, b"", [(TABLE.id, mine[:20], grads, -1.0)])
            (change,) = emitted(owner)
            for row in range(2):
                damage(15, change, row, "mirror_apply")
                assert rows[row].mirror_apply(1, change) == 0
    truth = [owners[b].digest(b) for b in LOST]
    for store, here in zip(rows, ([1, 2], []), strict=True):
        store.recover_begin(1, LOST, here)
    for b in set(range(B)) - set(LOST):
        for number, blob in enumerate(synced(owners[b], b)):
            for row in range(2):
                if number % 4 == b % 4:
                    damage(15, blob, row, "recover_fold")
                assert rows[row].recover_fold(1, blob) in (0, 1)
    for kind in (BlobKind.HEADS, BlobKind.BODIES):
        lo = 0
        while lo >= 0:
            lo, rest = rows[1].emit_recovering(1, kind, TABLE.id, lo, lo + 64)
            damage(20, rest, 0, "recover_other")
            assert rows[0].recover_other(1, rest) == 0
    rows[0].recover_end(1)
    assert [rows[0].digest(b) for b in LOST] == truth
    assert noticed >= 600, noticed  # and 2 x 392 in frames


def test_a_message_with_one_damaged_blob_changes_nothing() -> None:
    owner, home = Store(1, 1), Store(1, 1)
    for store in (owner, home):
        store.declare(TABLE)
    home.mirror_make(1, [0])
    owner.own([0])
    owner.protect([0], True)
    for blob in synced(owner, 0):
        assert home.mirror_apply(1, blob) == 0
    owner.open(0, 0, 1)
    owner.open(1, 0, 1)
    blobs = emitted(owner)
    sizes = np.array([len(blob) for blob in blobs], np.int64)
    at = np.array([0, *np.cumsum(sizes)[:-1]], np.int64)
    ids = np.ones(len(blobs), np.int64)
    bad = bytearray(b"".join(blobs))
    bad[-1] ^= 4
    before = home.mirror_state(1)
    with pytest.raises(ValueError, match="a blob is damaged: its checksum is wrong"):
        home.mirror_apply_many(ids, at, sizes, bytes(bad))
    assert home.mirror_state(1) == before
    assert home.mirror_apply_many(ids, at, sizes, seal(blobs[0]) + b"".join(blobs[1:])).tolist() == [0] * len(blobs)
