"""The exactly-once ledger, as stories; and the store under many threads."""

from __future__ import annotations

import threading

import numpy as np
import pytest

from everstep.model.shard import shard_key
from everstep.model.table import OptimizerKind, OptimizerSpec, TableSpec
from everstep.native import PushLedger, PushResult, Store, batch_fingerprint, bitmap, bitmap_partitions, unique_route

S = shard_key(0, 2, 5)
PUSHES = 40


def test_watermarks_tile_a_shard() -> None:
    ledger = PushLedger(4)
    assert ledger.open(S, 100, 1) == ([0, 1, 2, 3], [100] * 4)
    assert ledger.push(S, 100, 110, 1) == PushResult(4, 0)
    assert ledger.push(S, 100, 110, 1) == PushResult(0, 4)
    assert ledger.push(S, 100, 105, 1) == PushResult(0, 4)
    assert ledger.push(S, 120, 130, 1) == PushResult(0, 0, gap=110)
    assert ledger.push(S, 105, 115, 1) == PushResult(0, 0, gap=110)  # half of it is there already
    assert ledger.push(S, 110, 130, 1) == PushResult(4, 0)
    assert ledger.fingerprints() == [batch_fingerprint(S, 100, 130)] * 4


def test_a_ragged_interval_goes_only_to_the_partitions_behind() -> None:
    ledger = PushLedger(4)
    ledger.open(S, 0, 1)
    ahead = bitmap([1, 3], 4)
    assert ledger.push(S, 0, 8, 1, ahead) == PushResult(2, 0, partitions=ahead)
    assert ledger.open(S, 0, 2) == ([0, 1, 2, 3], [0, 8, 0, 8])
    behind = bitmap([0, 2], 4)
    assert ledger.push(S, 0, 8, 2, behind) == PushResult(2, 0, partitions=behind)
    assert len(set(ledger.fingerprints())) == 1


def test_fences_only_rise() -> None:
    ledger = PushLedger(2)
    assert ledger.push(S, 0, 1, 1).fenced  # never opened here
    ledger.open(S, 0, 5)
    assert ledger.open(S, 0, 4) is None
    assert ledger.push(S, 0, 1, 4) == PushResult(0, 0, fenced=True)
    assert ledger.push(S, 0, 1, 6).applied == 2  # a later lease fences at its first push, too
    assert ledger.push(S, 1, 2, 5).fenced


def test_released_shards_never_come_back() -> None:
    ledger = PushLedger(2)
    ledger.open(S, 0, 1)
    ledger.push(S, 0, 4, 1)
    prints = ledger.fingerprints()
    ledger.release([S, S])
    assert ledger.open(S, 0, 9) is None
    assert ledger.push(S, 0, 4, 9) == PushResult(0, 0, fenced=True)
    assert ledger.watermarks(S) is None and ledger.shards() == []
    assert ledger.fingerprints() == prints


def test_skipped_samples_are_in_no_fingerprint() -> None:
    ledger = PushLedger(2)
    ledger.open(S, 0, 1)
    ledger.push(S, 0, 4, 1, skipped=True)
    ledger.push(S, 4, 6, 1)
    assert ledger.fingerprints() == [batch_fingerprint(S, 4, 6)] * 2


@pytest.mark.parametrize("args", [(S, 5, 5, 1), (S, -1, 5, 1), (-1, 0, 1, 1), (S, 0, 1 << 25, 1), (S, 0, 1, -1)])
def test_nonsense_is_refused_alike(args: tuple[int, int, int, int]) -> None:
    store = Store(2, 0)
    store.own([0, 1])
    with pytest.raises(ValueError, match=r"."):
        store.push(*args, b"", [])
    with pytest.raises(ValueError, match=r"."):
        PushLedger(2).push(*args)


def test_bitmaps() -> None:
    assert bitmap([0, 9], 12) == b"\x01\x02"
    assert bitmap_partitions(bitmap([0, 3, 63], 64)) == [0, 3, 63]


def test_many_threads_count_every_sample_once() -> None:
    """Several workers push the same batches of several shards at once: each is applied once, by whoever is first.

    The counting model: SGD with lr 1 and gradient -1 adds exactly 1.0 per applied batch to every row.
    """
    spec = TableSpec("count", 16, OptimizerSpec(OptimizerKind.SGD, 1.0))
    store = Store(16, 0)
    store.own(range(16))
    store.declare(spec)
    shards = [shard_key(0, 0, i) for i in range(3)]
    for shard in shards:
        store.open(shard, 0, 1)
    keys, _, _ = unique_route(np.arange(3000), 16, spec.id, np.zeros(16, np.int32))
    grads = np.full((len(keys), 16), -1, np.float32)
    applied: list[int] = []
    errors: list[BaseException] = []

    def work(shard: int) -> None:
        out = np.empty((len(keys), 16), np.float32)
        try:
            lo = 0
            while lo < PUSHES:
                result = store.push(shard, lo, lo + 1, 1, b"", [(spec.id, keys, grads, -1.0)])
                assert result.applied + result.repeats + (result.gap >= 0) >= 1
                applied.append(result.applied)
                lo += result.gap < 0
                store.pull(spec.id, keys, out)
                assert (out == np.floor(out)).all()  # never a torn row
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(shards[i % 3],)) for i in range(6)]
    for t in threads:
        t.start()
    for t in threads:
        t.join(100)
    assert not errors, errors
    assert sum(applied) == 3 * PUSHES * 16
    out = np.empty((len(keys), 16), np.float32)
    store.pull(spec.id, keys, out)
    assert (out == 3 * PUSHES).all()
    whole = sum(batch_fingerprint(shard, 0, PUSHES) for shard in shards) % 2**64
    assert store.fingerprints().tolist() == [whole] * 16


def test_wrong_arrays_are_value_errors() -> None:
    spec = TableSpec("t", 4, OptimizerSpec(OptimizerKind.SGD, 1.0))
    store = Store(4, 0)
    store.own(range(4))
    store.declare(spec)
    store.open(S, 0, 1)
    keys, _, _ = unique_route(np.arange(10), 4, spec.id, np.zeros(4, np.int32))
    rows = np.zeros((10, 4), np.float32)
    wrong = [
        (keys.astype(np.int32), rows),
        (keys, rows.astype(np.float64)),
        (keys, np.zeros((10, 5), np.float32)),
        (keys, np.zeros((9, 4), np.float32)),
        (keys, np.zeros((4, 10), np.float32).T),
        (keys.reshape(5, 2), rows),
        (np.zeros(20, np.int64)[::2], rows),
        (keys[::-1].copy(), rows),
        (np.full(2, keys[0]), rows[:2]),
        (np.full(2, 10**9), rows[:2]),  # new rows may not stand twice either
    ]
    for k, r in wrong:
        with pytest.raises(ValueError, match=r"."):
            store.push(S, 0, 1, 1, b"", [(spec.id, k, r, -1.0)])
    for parts in ([(99, keys, rows, -1.0)], [(spec.id, keys, rows, float("nan"))], [(spec.id, keys, rows, -1.0)] * 2):
        with pytest.raises(ValueError, match=r"."):
            store.push(S, 0, 1, 1, b"", parts)
    with pytest.raises(ValueError, match="length"):
        store.push(S, 0, 1, 1, b"\x01\x01", [])
    with pytest.raises(ValueError, match="exists as"):
        store.declare(TableSpec("t", 8, OptimizerSpec(OptimizerKind.SGD, 1.0)))
    assert store.watermarks(S)[1].tolist() == [0] * 4  # type: ignore[index]


def test_a_key_of_a_partition_not_owned_is_a_key_error() -> None:
    spec = TableSpec("t", 4, OptimizerSpec(OptimizerKind.SGD, 1.0))
    store = Store(4, 0)
    store.own([1])
    store.declare(spec)
    keys, _, _ = unique_route(np.arange(10), 4, spec.id, np.zeros(4, np.int32))
    with pytest.raises(KeyError, match="not owned"):
        store.pull(spec.id, keys, np.zeros((10, 4), np.float32))
    assert store.stats().rows == {"t": 0}
