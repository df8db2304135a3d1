"""Kernels of the ps and the worker, as fractions of the memory-copy speed of the same rounds, and of pandas' Index.

Every side works on 100,000 random rows of a table far larger than the caches (dim 64: 1 GB of values), in huge pages,
new rows every time. A fraction is bytes of payload moved per second (rows read + rows written, gradients read, state
read and written; no credit for the index) over the same of a plain copy of as many bytes from random places of an
array as large. ``gather`` and ``bare`` figures know where the rows are; ``store`` figures are whole calls of ``Store``
as a ps makes them: hash, placement check, lock, index, ledger, finite check, rows. ``ceiling`` figures are loops that
only read, or read and write, random rows, counted as a gather and a row-wise Adagrad step would be: what the memory of
this machine allows at best (left out where there is no C++ compiler).
"""

from __future__ import annotations

import ctypes
import gc
import mmap
import platform
import shutil
import subprocess
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from benchmarks._measure import beside, interleaved, median, say, spread
from everstep.model.table import OptimizerKind, OptimizerSpec, TableSpec
from everstep.native import Store, bag_backward, gather_rows, isa, isfinite_all, unique_route

BATCH = 100_000
PARTITIONS = 64
AIMS = {
    "gather_dim64_of_memcpy": ">= 0.6",
    "bare_rowwise_adagrad_dim64_of_memcpy": ">= 0.65",
    "store_rowwise_adagrad_dim64_of_memcpy": ">= 0.65",
    "lookup_over_pandas": ">= 8",
}

F32 = NDArray[np.float32]


def _bare_kernels() -> ctypes.CDLL | None:
    """``kernels_bare.cpp`` with the row kernels, compiled as the module is; None without sources or a compiler."""
    here = Path(__file__).parent
    native = here.parent / "native"
    compiler = shutil.which("g++") or shutil.which("c++")
    if compiler is None or not native.is_dir() or platform.machine() not in ("x86_64", "AMD64"):
        return None
    flags = ["-O3", "-std=c++17", "-fPIC", "-ffp-contract=off", "-fno-math-errno", "-fno-trapping-math", f"-I{native}"]
    wide = {
        "rows_avx2": ["-mavx2"],
        "rows_avx512": ["-mavx512f", "-mavx512bw", "-mavx512dq", "-mavx512vl", "-mprefer-vector-width=512"],
    }
    with tempfile.TemporaryDirectory() as folder:
        objects = []
        for source in (*native.glob("rows*.cpp"), here / "kernels_bare.cpp"):
            objects.append(f"{folder}/{source.stem}.o")
            command = [compiler, *flags, *wide.get(source.stem, []), "-c", str(source), "-o", objects[-1]]
            subprocess.run(command, check=True, timeout=120)
        library = f"{folder}/bare.so"
        subprocess.run([compiler, "-shared", *objects, "-o", library], check=True, timeout=120)
        return ctypes.CDLL(library)


def _quiet(_: str) -> None:
    """Single rounds of milliseconds are not worth a line."""


def _huge(rows: int, dim: int) -> F32:
    """Zeros in huge pages, every page touched."""
    size = (rows * dim * 4 + (2 << 20)) & ~((2 << 20) - 1)
    memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    memory.madvise(mmap.MADV_HUGEPAGE)
    array: F32 = np.frombuffer(memory, np.float32, rows * dim)
    array[:] = 1.0
    return array.reshape(rows, dim)


def _filled(spec: TableSpec, rows: int) -> Store:
    store = Store(PARTITIONS, 1)
    store.own(range(PARTITIONS))
    store.declare(spec)
    store.open(0, 0, 1)
    ranks = np.zeros(PARTITIONS, np.int32)
    for lo in range(0, rows, 200_000):
        keys, _, _ = unique_route(np.arange(lo, min(rows, lo + 200_000)), PARTITIONS, spec.id, ranks)
        store.put_absent(spec.id, keys, np.zeros((len(keys), spec.dim), np.float32))
    return store


class _Bench:
    """The sides of one dim. Each prepares new random rows, then returns the seconds of the one call measured."""

    def __init__(self, dim: int, rows: int, kinds: list[OptimizerKind], bare: ctypes.CDLL | None) -> None:
        self.dim, self.rows = dim, rows
        self.rng = np.random.default_rng(dim)
        self.table = _huge(rows, dim)
        self.out = _huge(BATCH, dim)
        self.grads = self.rng.normal(size=(BATCH, dim)).astype(np.float32)
        self.positions: dict[str, int] = {}
        self.bytes: dict[str, float] = {}  # payload moved by one call
        self.sides: dict[str, Callable[[], float]] = {"memcpy": self.memcpy, "gather": self.gather}
        self.stores: dict[OptimizerKind, tuple[TableSpec, Store]] = {}
        self.bytes["memcpy"] = self.bytes["gather"] = 2 * BATCH * dim * 4
        if bare is not None:
            self.bare = bare
            self.records = _huge(rows, dim + 1)  # as a ps keeps them: values, then one float of state
            self.sides["ceiling_read"] = self.ceiling_read
            self.sides["ceiling_update"] = self.ceiling_update
            self.sides["bare_rowwise_adagrad"] = self.bare_update
            self.bytes["ceiling_read"] = self.bytes["gather"]
            self.bytes["ceiling_update"] = self.bytes["bare_rowwise_adagrad"] = BATCH * 4 * (3 * dim + 2)
        for kind in kinds:
            spec = TableSpec(kind.value, dim, OptimizerSpec(kind, 0.01))
            self.stores[kind] = spec, _filled(spec, rows)
            name = f"store_{kind.value}"
            self.sides[name] = lambda kind=kind: self.push(kind)  # type: ignore[misc]
            self.bytes[name] = BATCH * 4 * (3 * dim + 2 * spec.optimizer.state_floats(dim))
        if OptimizerKind.ROWWISE_ADAGRAD in self.stores:
            self.sides["store_pull"] = self.pull
            self.bytes["store_pull"] = 2 * BATCH * dim * 4
        self.sides["segment_sum"] = self.segment_sum
        self.bytes["segment_sum"] = (BATCH + 2 * BATCH // 4) * dim * 4

    def ids(self) -> NDArray[np.int64]:
        return self.rng.choice(self.rows, BATCH, replace=False)

    def keys(self, spec: TableSpec) -> NDArray[np.int64]:
        """As a worker sends them: unique, grouped by partition."""
        return unique_route(self.ids(), PARTITIONS, spec.id, np.zeros(PARTITIONS, np.int32))[0]

    def memcpy(self) -> float:
        at = int(self.rng.integers(0, self.rows - BATCH))
        began = time.perf_counter()
        np.copyto(self.out, self.table[at : at + BATCH])
        return time.perf_counter() - began

    def gather(self) -> float:
        inverse = self.ids().astype(np.int32)
        began = time.perf_counter()
        gather_rows(self.table, inverse, self.out)
        return time.perf_counter() - began

    def _bare(self, call: str, *before: Any, grads: bool = False) -> float:
        at = self.ids().astype(np.uint32)
        size = ctypes.c_size_t
        pointers = [self.records.ctypes.data_as(ctypes.c_void_p), at.ctypes.data_as(ctypes.c_void_p)]
        if grads:
            pointers.append(self.grads.ctypes.data_as(ctypes.c_void_p))
        function = getattr(self.bare, call)
        began = time.perf_counter()
        function(*before, *pointers, size(BATCH), size(self.dim), size(self.dim + 1))
        return time.perf_counter() - began

    def ceiling_read(self) -> float:
        return self._bare("ceiling_read")

    def ceiling_update(self) -> float:
        return self._bare("ceiling_update")

    def bare_update(self) -> float:
        return self._bare(
            "bare_update", ctypes.c_int(list(OptimizerKind).index(OptimizerKind.ROWWISE_ADAGRAD)), grads=True
        )

    def pull(self) -> float:
        spec, store = self.stores[OptimizerKind.ROWWISE_ADAGRAD]
        keys = self.keys(spec)
        began = time.perf_counter()
        store.pull(spec.id, keys, self.out)
        return time.perf_counter() - began

    def push(self, kind: OptimizerKind) -> float:
        spec, store = self.stores[kind]
        keys = self.keys(spec)
        at = self.positions[kind] = self.positions.get(kind, -1) + 1
        parts = [(spec.id, keys, self.grads, -1.0)]
        began = time.perf_counter()
        done = store.push(0, at, at + 1, 1, b"", parts)
        took = time.perf_counter() - began
        assert done.applied == PARTITIONS
        return took

    def segment_sum(self) -> float:
        """Gradients of ids that stand four times each, in random order, summed per row."""
        inverse = self.rng.integers(0, BATCH // 4, BATCH).astype(np.int32)
        out = self.out[: BATCH // 4]
        began = time.perf_counter()
        bag_backward(self.grads, inverse, None, "sum", None, BATCH // 4, out)
        return time.perf_counter() - began


def _lookup(rows: int, rounds: int, figures: dict[str, float], spreads: dict[str, Any]) -> None:
    spec = TableSpec("lookup", 1, OptimizerSpec(OptimizerKind.SGD, 0.1))
    store = _filled(spec, rows)
    rng = np.random.default_rng(0)
    index = pd.Index(rng.permutation(rows))
    index.get_indexer(pd.Index(np.arange(3)))  # builds its hash table
    slots = np.empty(BATCH, np.int64)

    def keys() -> NDArray[np.int64]:
        ids = rng.choice(rows, BATCH, replace=False)
        return unique_route(ids, PARTITIONS, spec.id, np.zeros(PARTITIONS, np.int32))[0]

    def ours() -> float:
        wanted = keys()
        began = time.perf_counter()
        store.locate(spec.id, wanted, slots)
        took = time.perf_counter() - began
        assert slots.min() >= 0
        return took

    def theirs() -> float:
        wanted = keys()
        began = time.perf_counter()
        found = index.get_indexer(wanted)
        took = time.perf_counter() - began
        assert found.min() >= 0
        return took

    times = interleaved({"ours": ours, "pandas": theirs}, rounds, _quiet)
    ratios = [b / a for a, b in zip(times["ours"], times["pandas"], strict=True)]
    figures["lookup_over_pandas"] = median(ratios)
    spreads["lookup_over_pandas"] = spread(ratios)
    beside(figures, spreads, times.noise(), "lookup_over_pandas")
    figures["lookup_ns_per_key"] = median(times["ours"]) / BATCH * 1e9


def run(quick: bool) -> dict[str, Any]:
    """See the module. ``quick``: dim 64 only (2M rows), fewer rounds."""
    rounds = 9 if quick else 25
    figures: dict[str, float] = {}
    spreads: dict[str, Any] = {}
    say(f"kernels for {isa()}")
    bare = _bare_kernels()
    kinds = [OptimizerKind.ROWWISE_ADAGRAD, OptimizerKind.ADAGRAD, OptimizerKind.ADAM][: 1 if quick else 3]
    for dim in (64,) if quick else (16, 32, 64):
        rows = 2_000_000 if quick else 4_000_000
        say(f"dim {dim}: filling {rows} rows for each of {len(kinds)} optimizers")
        bench = _Bench(dim, rows, kinds, bare)
        times = interleaved(bench.sides, rounds, _quiet, "memcpy")
        copy_per_s = [bench.bytes["memcpy"] / t for t in times["memcpy"]]
        figures[f"memcpy_dim{dim}_gb_per_s"] = median(copy_per_s) / 1e9
        for name in bench.sides:
            if name == "memcpy":
                continue
            ratios = [bench.bytes[name] / t / c for t, c in zip(times[name], copy_per_s, strict=True)]
            figures[f"{name}_dim{dim}_of_memcpy"] = median(ratios)
            spreads[f"{name}_dim{dim}_of_memcpy"] = spread(ratios)
            beside(figures, spreads, times.noise(), f"{name}_dim{dim}_of_memcpy")
            say(f"  {name}: {median(ratios):.2f} of memcpy")
        began = time.perf_counter()
        assert isfinite_all(bench.grads)
        figures[f"finite_check_dim{dim}_of_memcpy"] = (
            bench.grads.nbytes / (time.perf_counter() - began) / median(copy_per_s)
        )
        del bench
        gc.collect()  # its sides refer to it; gigabytes
    _lookup(1_000_000 if quick else 4_000_000, rounds, figures, spreads)
    say(f"  lookup: {figures['lookup_over_pandas']:.1f} x pandas")
    holds = {
        "gather_dim64_of_memcpy": figures["gather_dim64_of_memcpy"] >= 0.6,
        "bare_rowwise_adagrad_dim64_of_memcpy": figures.get("bare_rowwise_adagrad_dim64_of_memcpy", 0.0) >= 0.65,
        "store_rowwise_adagrad_dim64_of_memcpy": figures["store_rowwise_adagrad_dim64_of_memcpy"] >= 0.65,
        "lookup_over_pandas": figures["lookup_over_pandas"] >= 8,
    }
    return {"figures": figures, "aims": AIMS, "holds": holds, "spread": spreads}
