"""Snapshots and blobs that no store has made, with checksums that are right, given to a store and to its twin.

Run as a program (``python crafted.py SEED COUNT``): a parser that does not look before it uses ends the process. It
writes the number of each attempt before it is made, and at the end what became of them.
"""

from __future__ import annotations

import random
import struct
import sys
from collections import Counter
from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from everstep.model.table import InitKind, InitSpec, OptimizerKind, OptimizerSpec, TableSpec
from everstep.native import BlobKind, Store, crc32c, unique_route
from everstep.native.blob import Blob, BlobMarks, build, parse, seal
from everstep.testing.twin import TwinStore, partition_of

PARTITIONS, PARTITION = 4, 2
ADAM = TableSpec("adam", 5, OptimizerSpec(OptimizerKind.ADAM, 0.01), InitSpec(InitKind.UNIFORM, -1.0, 1.0))
LATE = TableSpec("late", 3, OptimizerSpec(OptimizerKind.FTRL, 0.1), admit_after=2, expire_batches=50)
DENSE = TableSpec("dense", 8, OptimizerSpec(OptimizerKind.SGD, 0.1, momentum=0.9), rows=40, dense=True)
SPECS = (ADAM, LATE, DENSE)
Pages = dict[int, dict[int, NDArray[np.uint8]]]


def filled() -> Store:
    """A store with rows, open shards, and differences that wait in its outbox."""
    store = Store(PARTITIONS, 7)
    store.own(range(PARTITIONS))
    for spec in SPECS:
        store.declare(spec)
    store.protect(range(PARTITIONS), True)
    store.open(3, 0, 1)
    store.open(4, 0, 1)
    push(store, 0)
    store.initialise(DENSE.id)
    return store


def push(store: Any, at: int) -> None:
    rng = np.random.default_rng(at)
    parts = []
    for spec in SPECS:
        ids = np.arange(40) if spec.dense else rng.integers(-300, 300, 250)
        keys, _, _ = unique_route(ids, PARTITIONS, spec.id, np.zeros(PARTITIONS, np.int32))
        parts.append((int(spec.id), keys, rng.normal(size=(len(keys), spec.dim)).astype(np.float32), -1.0))
    assert store.push(3, at, at + 1, 1, b"", parts).applied


def snapshot(store: Store) -> tuple[bytes, Pages]:
    _, marks = store.snapshot_begin(PARTITION, -1)
    pages: Pages = {}
    while True:
        names, data = store.snapshot_next(PARTITION, 1 << 20)
        if not names:
            break
        at = 0
        for table, number in names:
            size = store.page_bytes(table)
            pages.setdefault(table, {})[number] = data[at : at + size].copy()
            at += size
    store.snapshot_end(PARTITION)
    return marks, pages


def flip(data: bytearray, rng: random.Random) -> None:
    for _ in range(rng.choice((1, 1, 2, 5))):
        if data:
            at = rng.randrange(len(data))
            data[at] = rng.choice((0, 0xFF, 0x80, data[at] ^ 1 << rng.randrange(8), rng.randrange(256)))


def word(data: bytearray, rng: random.Random) -> None:
    """A number of the blob becomes another one, of the kind that is forgotten in checks."""
    form = rng.choice(("<I", "<q"))
    most = len(data) - struct.calcsize(form)
    if most > 0:
        at = rng.randrange(min(most, 200))
        more = (-1, -(1 << 63), (1 << 63) - 1) if form == "<q" else (0xFFFFFFFF,)
        struct.pack_into(form, data, at, rng.choice((0, 1, 2, 0xFF, 1 << 16, 0x7FFFFFFF, 0xFEFFFFFF, *more)))


def other_kind(data: bytearray, rng: random.Random) -> None:
    """Of another kind than it is; with a part behind the marks, too, as other kinds have them."""
    struct.pack_into("<H", data, 6, rng.randrange(6))
    if rng.random() < 0.7:
        n = rng.randrange(4)
        struct.pack_into("<I", data, 12, rng.choice((1, 1, 2, 1 << 31)))
        table = rng.choice((ADAM.id, LATE.id, DENSE.id, 12345))
        data += struct.pack("<6I", table, n, 0, rng.choice((0, 64, 1 << 31)), rng.randrange(4), rng.choice((0, n)))
        data += rng.randbytes(rng.choice((0, 4 * n, 4 * n + 8, 4 * n + 8 * n, 400)))


def cut(data: bytearray, rng: random.Random) -> None:
    del data[rng.randrange(len(data)) :]


def longer(data: bytearray, rng: random.Random) -> None:
    data += rng.randbytes(rng.randrange(1, 60))


def crafted(blob: bytes, rng: random.Random) -> bytes:
    data = bytearray(blob)
    for _ in range(rng.choice((1, 1, 2))):
        if len(data) >= 32:
            rng.choice((flip, word, word, other_kind, cut, longer))(data, rng)
    return seal(bytes(data)) if len(data) >= 32 and rng.random() < 0.97 else bytes(data)


def number_of_page(rng: random.Random) -> int:
    return rng.choice((0, 1, 5, 33, -1, (1 << 24) - 1, 1 << 24, 1 << 31, 1 << 40))


def crafted_pages(pages: Pages, rng: random.Random) -> Pages:
    out = {table: {n: page.copy() for n, page in of.items()} for table, of in pages.items()}
    for _ in range(rng.choice((0, 1, 2))):
        table = rng.choice(list(out))
        if not out[table]:
            continue
        number = rng.choice(list(out[table]))
        what = rng.randrange(5)
        if what == 0:
            data = bytearray(out[table][number].tobytes())
            flip(data, rng)
            out[table][number] = np.frombuffer(bytes(data), np.uint8).copy()
        elif what == 1:
            out[table][number_of_page(rng)] = out[table].pop(number)
        elif what == 2:
            out[table][number_of_page(rng)] = out[table][number]  # all keys twice
        elif what == 3:
            out[table][number] = np.frombuffer(rng.randbytes(out[table][number].size), np.uint8).copy()
        else:
            words = out[table][number].view("<f4")
            at = rng.randrange(len(words) // 4, len(words))
            words[at] = rng.choice((-1.0, -1e30, np.nan, -np.inf, 3e38))
    return out


def load(store: Any, marks: bytes, pages: Pages) -> bool:
    try:
        store.load_begin(PARTITION)
        for table, of in pages.items():
            if of:
                store.load_pages(PARTITION, table, list(of), np.concatenate(list(of.values())))
        store.load_end(PARTITION, marks)
    except (ValueError, OverflowError):
        store.drop(PARTITION)
        return False
    return True


def empty(kind: Callable[[int, int], Any]) -> Any:
    store = kind(PARTITIONS, 7)
    for spec in SPECS:
        store.declare(spec)
    return store


def attempts(seed: int, count: int) -> Counter[str]:
    rng = random.Random(seed)
    source = filled()
    marks, pages = snapshot(source)
    store, twin = empty(Store), empty(TwinStore)
    outcomes: Counter[str] = Counter()
    for number in range(count):
        say(f"snapshot {number}")
        blob = crafted(marks, rng) if rng.random() < 0.7 else marks
        some = crafted_pages(pages, rng)
        there = load(store, blob, some)
        outcomes["loaded" if there else "refused"] += 1
        if number % 8 == 0:  # (the twin is slow)
            assert load(twin, blob, some) == there, f"attempt {number}: store {there}, twin {not there}"
            if there:
                assert store.digest(PARTITION) == twin.digest(PARTITION), f"attempt {number}: other rows"
            twin.drop(PARTITION)
        if there:
            use(store)
        store.drop(PARTITION)
    return outcomes


def use(store: Store) -> None:
    """What a ps does with rows that were loaded: whatever is in them, it holds."""
    store.open(5, 0, 1 << 60)
    for at in range(2):
        parts = []
        for spec in SPECS:
            ids = np.arange(40) if spec.dense else np.arange(-300, 300)
            keys, _, _ = unique_route(ids, PARTITIONS, spec.id, np.zeros(PARTITIONS, np.int32))
            mine = keys[partition_of(keys, spec.id, PARTITIONS) == PARTITION]
            parts.append((int(spec.id), mine, np.ones((len(mine), spec.dim), np.float32), -1.0))
        store.push(5, at, at + 1, 1 << 60, b"", parts)
    store.expire(PARTITION, 5)
    snapshot(store)


# ---------------------------------------------------------------- what ps send each other


def stream(store: Store) -> list[bytes]:
    """Contents of one partition and differences, as its mirror would get them."""
    for table in store.tables():
        for kind in (BlobKind.HEADS, BlobKind.BODIES):
            lo = 0
            while lo >= 0:
                lo = store.emit(PARTITION, kind, table, lo, lo + 4096)
    store.emit_marks(PARTITION)
    push(store, 1)
    _, entries, data = store.take_outbox(1 << 30)
    return [data[at : at + length].tobytes() for b, _, _, at, length in entries if b == PARTITION]


def mirror_attempts(seed: int, count: int) -> Counter[str]:
    rng = random.Random(seed)
    source = filled()
    source.take_outbox(1 << 30)
    blobs = stream(source)
    outcomes: Counter[str] = Counter()
    for number in range(count):
        say(f"mirror {number}")
        store = empty(Store)
        store.mirror_make(1, [PARTITION, 0], rng.randrange(2))
        for blob in blobs:
            if rng.random() < 0.5:
                outcomes[apply(store, crafted(blob, rng))] += 1
            if rng.random() < 0.9:
                apply(store, blob)
        store.mirror_drop(1)
    return outcomes


def sealed_rest(data: bytearray) -> bytes:
    """Contents of what is left of a mirror have their checksum elsewhere."""
    if len(data) >= 36:
        struct.pack_into("<I", data, 32, crc32c(bytes(data[36:]), crc32c(bytes(data[:32]))))
    return bytes(data)


def recovery_attempts(seed: int, count: int) -> Counter[str]:
    """Two members of four are lost, and come back out of two rows of parity: what survivors and the other row give is
    crafted."""
    rng = random.Random(seed)
    owner, rows = filled(), [empty(Store), empty(Store)]
    owner.take_outbox(1 << 30)
    lost = [1, PARTITION]
    survivors: list[bytes] = []
    for row, store in enumerate(rows):
        store.mirror_make(1, list(range(PARTITIONS)), row)
    for member in range(PARTITIONS):
        blobs = contents(owner, member)
        survivors += blobs if member not in lost else []
        for store in rows:
            for blob in blobs:
                store.mirror_apply(1, blob)
    outcomes: Counter[str] = Counter()
    for number in range(count):
        say(f"recovery {number}")
        for row, store in enumerate(rows):
            store.recover_begin(1, lost, lost if row == 0 else [])
        for blob in survivors:
            if rng.random() < 0.2:
                outcomes[answer(lambda b=crafted(blob, rng): rows[0].recover_fold(1, b))] += 1
            if rng.random() < 0.97:
                outcomes[answer(lambda b=blob: rows[0].recover_fold(1, b))] += 1
            rows[1].recover_fold(1, blob)
        for table in owner.tables():
            for kind in (BlobKind.HEADS, BlobKind.BODIES):
                _, rest = rows[1].emit_recovering(1, kind, table, 0, 4096)
                data = bytearray(rest)
                if rng.random() < 0.5:
                    rng.choice((flip, word, cut, longer))(data, rng)
                outcomes[answer(lambda b=sealed_rest(data): rows[0].recover_other(1, b))] += 1
        for store in rows:
            store.recover_end(1, abort=True)
    return outcomes


def contents(store: Store, member: int) -> list[bytes]:
    for kind in (BlobKind.HEADS, BlobKind.BODIES):
        for table in store.tables():
            lo = 0
            while lo >= 0:
                lo = store.emit(member, kind, table, lo, lo + 64)
    store.emit_marks(member)
    _, entries, data = store.take_outbox(1 << 30)
    return [data[at : at + length].tobytes() for _, _, _, at, length in entries]


def answer(attempt: Callable[[], int]) -> str:
    try:
        return f"answered {attempt()}"
    except ValueError:
        return "refused"


def apply(store: Store, blob: bytes) -> str:
    try:
        width = {t: store.layout(t)[2] for t in store.tables()}
        result = store.mirror_apply(1, blob)
    except ValueError:
        return "refused"
    parse(blob, lambda table: width[table])  # the twin reads whatever the store takes
    return f"answered {result}"


# ---------------------------------------------------------------- anything at all


def any_blobs(count: int) -> None:
    from hypothesis import HealthCheck, given, settings
    from hypothesis import strategies as st

    store = empty(Store)
    store.mirror_make(1, [PARTITION], 0)
    number = st.integers(0, 0xFFFFFFFF) | st.integers(0, 70)
    signed = st.integers(-(1 << 63), (1 << 63) - 1) | st.integers(-2, 70)
    mark = st.tuples(signed, signed, signed)
    part = st.tuples(st.sampled_from([*(s.id for s in SPECS), 1]), st.integers(0, 6), number, number, st.integers(0, 4))
    counter = iter(range(1 << 30))

    some = {"shards": st.lists(mark, max_size=3), "parts": st.lists(part, max_size=2), "rest": st.binary(max_size=300)}
    unhurried = {"deadline": None, "database": None, "suppress_health_check": list(HealthCheck)}

    @settings(max_examples=count, derandomize=True, **unhurried)
    @given(kind=st.integers(0, 5), partition=number, seq=signed, n_parts=number, **some)
    def check(kind: int, partition: int, seq: int, n_parts: int, shards: Any, parts: Any, rest: bytes) -> None:
        say(f"any {next(counter)}")
        blob = build(Blob(BlobKind.MARKS, partition, 0, BlobMarks(1, 0, shards, [1])))
        body = b"".join(struct.pack("<6I", t, n, lo, hi, flags, 0) for t, n, lo, hi, flags in parts) + rest
        data = bytearray(blob + body)
        n_parts = len(parts) if n_parts % 4 else n_parts
        struct.pack_into("<HII", data, 6, kind, PARTITION if partition % 2 else partition, n_parts)
        struct.pack_into("<q", data, 16, seq)
        sealed = seal(bytes(data))
        apply(store, sealed)
        load(store, sealed, {})
        store.drop(PARTITION)

    check()


def say(what: str) -> None:
    sys.stderr.write(what + "\n")
    sys.stderr.flush()


if __name__ == "__main__":
    seed, count = int(sys.argv[1]), int(sys.argv[2])
    found = {"snapshots": dict(attempts(seed, count)), "mirrors": dict(mirror_attempts(seed, count // 8))}
    found["recoveries"] = dict(recovery_attempts(seed, count // 8))
    any_blobs(count // 2)
    print(found)
