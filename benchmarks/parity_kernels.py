"""Parity: the kernels of GF(2^8) against a plain copy, a mirror's work against the push it follows, and recovery.

``xor`` and ``gf`` add a source (times a weight) onto a destination, far larger than the caches. A copy fetches the
lines that it writes over too, so a copy's speed is the ceiling. ``apply`` is the whole work of a mirror for a push of
random rows (dim 64, row-wise Adagrad), in units of the push itself without protection. ``recover`` is what one ps does
of a recovery of one of four: gigabytes of lost rows per second, with the contents made by the same core. ``dense`` and
``summed`` are a dense table (16 MB of values, Adam) whose mirror makes the updates again, and the same table as if
it were a sparse one: CPU of owner and mirror beyond the push, over the push; bytes sent over those of the gradients.
``dense_lag_20`` is that dense table with one difference for 20 pushes, per push.
``acked`` and ``lag_30`` are all of the protection of pushes with uneven keys (dim 16, Zipf 1.1), over the push: one
difference for each push, and one for 30; the push without protection takes turns with both
(``everstep/cli/kernel_probe.py``). ``lag_30.distinct``: rows in that difference over rows pushed.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from benchmarks._measure import Rounds, beside, interleaved, median, say, spread
from everstep.cli.kernel_probe import ProbeLoad, probe_kernels
from everstep.model.table import OptimizerKind, OptimizerSpec, TableSpec
from everstep.native import BlobKind, Store, _native, unique_route

SPEC = TableSpec("rows", 64, OptimizerSpec(OptimizerKind.ROWWISE_ADAGRAD, 0.01))
PARTITIONS = 4
AIMS = {"xor_of_memcpy": ">= 0.8", "gf_of_memcpy": ">= 0.8", "apply_row1_over_push": "<= 1"}


def _quiet(_: str) -> None:
    """Single rounds of milliseconds are not worth a line."""


def _kernels(mega: int, rounds: int) -> Rounds:
    """Bytes of the source per second, by side."""
    src: NDArray[np.uint8] = np.random.default_rng(0).integers(0, 256, mega << 20, np.uint8)
    dst = np.zeros_like(src)

    def timed(call: Callable[[], object]) -> Callable[[], float]:
        def side() -> float:
            began = time.perf_counter()
            call()
            return src.nbytes / (time.perf_counter() - began)

        return side

    sides = {
        "memcpy": timed(lambda: np.copyto(dst, src)),
        "xor": timed(lambda: _native.gf_add_mul(dst, src, 1)),
        "gf": timed(lambda: _native.gf_add_mul(dst, src, 29)),
    }
    return interleaved(sides, rounds, _quiet)


def _outbox(store: Store) -> list[tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.uint8]]]:
    """All that waits: (offsets, lengths, bytes) of one stretch of memory after another."""
    out = []
    while True:
        _, entries, data = store.take_outbox(1 << 40)
        if not entries:
            return out
        out.append((np.array([e[3] for e in entries], np.int64), np.array([e[4] for e in entries], np.int64), data))


class _Pushed:
    """One ps with one partition of ``rows`` rows, and a mirror of either row that follows it."""

    def __init__(self, rows: int, batch: int) -> None:
        self.batch = batch
        self.rng = np.random.default_rng(1)
        self.plain, self.protected = (self.filled(rows) for _ in range(2))
        self.home = Store(PARTITIONS, 1)
        self.home.declare(SPEC)
        self.protected.protect([0], True)
        for row in (0, 1):
            self.home.mirror_make(row + 1, [1, 0], row)  # second: its weight in row 1 is 2, not 1
        for kind in (BlobKind.HEADS, BlobKind.BODIES):
            lo = 0
            while lo >= 0:
                lo = self.protected.emit(0, kind, SPEC.id, lo, lo + 8192)
        self.protected.emit_marks(0)
        self.deliver()
        self.at = 0

    def filled(self, rows: int) -> Store:
        store = Store(PARTITIONS, 1)
        store.own([0])
        store.declare(SPEC)
        store.open(0, 0, 1)
        ids = np.arange(rows * PARTITIONS * 11 // 10)
        keys, _, counts = unique_route(ids, PARTITIONS, SPEC.id, np.arange(PARTITIONS, dtype=np.int32), PARTITIONS)
        self.keys = keys[: counts[0]][:rows]
        for lo in range(0, rows, 100_000):
            some = self.keys[lo : lo + 100_000]
            store.put_absent(SPEC.id, some, np.ones((len(some), SPEC.dim), np.float32))
        return store

    def deliver(self) -> dict[str, float]:
        """Seconds that applying what waits in the outbox took, at either mirror."""
        waiting = _outbox(self.protected)
        out = {}
        for row in (0, 1):
            began = time.perf_counter()
            for at, length, data in waiting:
                got = self.home.mirror_apply_many(np.full(len(at), row + 1), at, length, data)
                assert not got.any()
            out[f"apply_row{row}"] = time.perf_counter() - began
        assert all(self.home.mirror_state(row + 1)[1][2] for row in (0, 1))
        return out

    def round(self) -> dict[str, float]:
        """Seconds of one push: unprotected, protected, and of its differences at either mirror."""
        keys = self.rng.choice(self.keys, self.batch, replace=False)
        grads = self.rng.normal(size=(self.batch, SPEC.dim)).astype(np.float32)
        out = {}
        for name, store in (("push", self.plain), ("push_protected", self.protected)):
            began = time.perf_counter()
            assert store.push(0, self.at, self.at + 1, 1, b"", [(SPEC.id, keys, grads, -1.0)]).applied == 1
            out[name] = time.perf_counter() - began
        self.at += 1
        return out | self.deliver()


def _dense(dense: bool, rounds: int, pushes: int = 1) -> tuple[float, float]:
    """CPU that protection costs over that of the push, and bytes sent over those of the gradients. ``pushes``: that go
    into one difference (protect: lag); 1: each push has its own."""
    rows, dim, partitions = 4096, 1024, 64
    spec = TableSpec("net", dim, OptimizerSpec(OptimizerKind.ADAM, 0.01), dense=dense)
    plain, protected, home = (Store(partitions, 1) for _ in range(3))
    keys, _, _ = unique_route(np.arange(rows), partitions, spec.id, np.zeros(partitions, np.int32))
    for store in (plain, protected, home):
        store.declare(spec)
    for store in (plain, protected):
        store.own(range(partitions))
        store.open(0, 0, 1)
        store.put_absent(spec.id, keys, np.ones((rows, dim), np.float32))
    protected.protect(range(partitions), True)

    def deliver() -> tuple[float, int]:
        took, size = 0.0, 0
        while True:
            _, entries, data = protected.take_outbox(1 << 40)
            if not entries:
                return took, size
            ids, at, length = (np.array([e[i] for e in entries], np.int64) for i in (0, 3, 4))
            began = time.process_time()
            assert not home.mirror_apply_many(ids, at, length, data).any()
            took += time.process_time() - began
            size += data.nbytes

    for b in range(partitions):
        home.mirror_make(b, [(b + 1) % partitions, b], 1)
        for kind in (BlobKind.HEADS, BlobKind.BODIES):
            protected.emit(b, kind, spec.id, 0, rows)
        protected.emit_marks(b)
    deliver()
    if pushes > 1:
        protected.set_lag(1 << 40, 1 << 20, 1e6)
    grads = np.random.default_rng(0).normal(size=(rows, dim)).astype(np.float32)
    extra, sent, at = [], 0, 0
    for _ in range(rounds + 2):
        cpu = [0.0, 0.0]
        for _ in range(pushes):
            for i, store in enumerate((plain, protected)):
                began = time.process_time()
                assert store.push(0, at, at + 1, 1, b"", [(spec.id, keys, grads, -1.0)]).applied == partitions
                cpu[i] += time.process_time() - began
            at += 1
        if pushes > 1:
            began = time.process_time()
            for b in range(partitions):
                protected.flush(b)
            cpu[1] += time.process_time() - began
        applied, sent = deliver()
        extra.append((cpu[1] - cpu[0] + applied) / cpu[0])
    return median(extra[2:]), sent / pushes / grads.nbytes


def _recover(rows: int) -> float:
    """Bytes of lost rows per second: from the first contents of three survivors to the last row of the lost
    partition."""
    owners = [Store(PARTITIONS, 1) for _ in range(PARTITIONS)]
    home = Store(PARTITIONS, 1)
    home.declare(SPEC)
    home.mirror_make(1, list(range(PARTITIONS)), 0)
    ids = np.arange(rows * PARTITIONS)
    keys, _, counts = unique_route(ids, PARTITIONS, SPEC.id, np.arange(PARTITIONS, dtype=np.int32), PARTITIONS)
    ends = np.cumsum(counts)

    def contents(b: int) -> list[NDArray[np.uint8]]:
        for kind in (BlobKind.HEADS, BlobKind.BODIES):
            lo = 0
            while lo >= 0:
                lo = owners[b].emit(b, kind, SPEC.id, lo, lo + 4096)
        owners[b].emit_marks(b)
        return [
            data[at : at + length]
            for offsets, lengths, data in _outbox(owners[b])
            for at, length in zip(offsets, lengths, strict=True)
        ]

    for b, store in enumerate(owners):
        store.own([b])
        store.declare(SPEC)
        mine = keys[ends[b] - counts[b] : ends[b]]
        store.put_absent(SPEC.id, mine, np.ones((len(mine), SPEC.dim), np.float32))
        for blob in contents(b):
            assert home.mirror_apply(1, blob) == 0
    began = time.perf_counter()
    home.recover_begin(1, [0])
    for b in range(1, PARTITIONS):
        for blob in contents(b):
            home.recover_fold(1, blob)
    took = time.perf_counter() - began
    home.recover_end(1)
    assert home.digest(0) == owners[0].digest(0)
    return float(counts[0]) * (8 + 4 * (SPEC.dim + 1)) / took


def run(quick: bool) -> dict[str, Any]:
    """See the module."""
    rounds = 9 if quick else 31
    figures: dict[str, float] = {}
    spreads: dict[str, Any] = {}
    say(f"kernels for {_native.gf_isa()}")
    rates = _kernels(128 if quick else 256, rounds)
    figures["memcpy_gb_per_s"] = median(rates["memcpy"]) / 1e9
    noise = rates.noise()
    for name in ("xor", "gf"):
        ratios = [a / b for a, b in zip(rates[name], rates["memcpy"], strict=True)]
        figures[f"{name}_of_memcpy"], spreads[f"{name}_of_memcpy"] = median(ratios), spread(ratios)
        beside(figures, spreads, noise, f"{name}_of_memcpy")
        say(f"  {name}: {median(ratios):.2f} of memcpy")
    bench = _Pushed(400_000 if quick else 1_500_000, 20_000)
    times = [bench.round() for _ in range(rounds)][2:]
    figures["push_us_per_1000_rows"] = median([t["push"] for t in times]) / 20 * 1e6
    for name in ("push_protected", "apply_row0", "apply_row1"):
        ratios = [t[name] / t["push"] for t in times]
        figures[f"{name}_over_push"], spreads[f"{name}_over_push"] = median(ratios), spread(ratios)
        say(f"  {name}: {median(ratios):.2f} x the push")
    del bench
    recovered = [_recover(100_000 if quick else 400_000) / 1e9 for _ in range(3)]
    figures["recover_gb_per_s"], spreads["recover_gb_per_s"] = median(recovered), spread(recovered)
    say(f"  recover: {median(recovered):.2f} GB/s of lost rows")
    for name, dense, pushes in (("dense", True, 1), ("summed", False, 1), ("dense_lag_20", True, 20)):
        cpu, sent = _dense(dense, rounds if pushes == 1 else max(3, rounds // 6), pushes)
        figures[f"{name}_cpu_over_push"], figures[f"{name}_bytes_over_gradients"] = cpu, sent
        say(f"  {name} table: {cpu:.2f} x the CPU of the push, {sent:.2f} x the bytes of the gradients")
    with tempfile.TemporaryDirectory(prefix="everstep-bench-") as folder:
        uneven = probe_kernels(ProbeLoad(16, 8000, 30), Path(folder), total_s=10.0 if quick else 40.0)
    for name, costs in (("acked", uneven.acked), ("lag_30", uneven.lag)):
        figures[f"{name}_over_push"] = costs.protect_s / costs.push_s
        say(f"  {name}: {figures[f'{name}_over_push']:.2f} x the push")
    figures["lag_30.distinct"] = uneven.distinct
    holds = {
        "xor_of_memcpy": figures["xor_of_memcpy"] >= 0.8,
        "gf_of_memcpy": figures["gf_of_memcpy"] >= 0.8,
        "apply_row1_over_push": figures["apply_row1_over_push"] <= 1,
    }
    return {"figures": figures, "aims": AIMS, "holds": holds, "spread": spreads}
