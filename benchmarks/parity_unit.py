"""Rows or pages: what one difference of a lag costs by how much of a table has changed.

A partition has changed in a share of its rows, chosen by chance, since its mirrors' last difference. Sides, in turns,
in CPU seconds per changed row:

- *rows*: what a ps does. The old record of each row is kept at its first change; a flush makes one difference of these
  rows; a mirror adds it. The same push without protection is taken off.
- *pages*: the least that pages of ``PAGE_ROWS`` rows could cost. Each page with a changed row is copied, its difference
  is made, and a mirror adds it. These are three passes over memory that lies in order: no bits, no ids, no messages.

``bytes``: bytes of pages over those of rows; ``pages_over_rows``: CPU likewise. ``pages_over_rows_sent``: with the CPU
that a socket within this machine takes for these bytes (``send_ns_per_kb``), as a ps has it; nothing for TLS. Below 1
pages would be cheaper. ``job_density``: share of a table of a million rows that 30 pushes of 8,000 rows change (Zipf
1.1), which is what two or three seconds of lag hold.
"""

from __future__ import annotations

import socket
import time

import numpy as np
from numpy.typing import NDArray

from benchmarks._measure import Result, interleaved, median, say, spread
from everstep.model.table import OptimizerKind, OptimizerSpec, TableSpec
from everstep.native import BlobKind, Store, _native, unique_route

PAGE_ROWS = 64
DENSITIES = (0.01, 0.05, 0.25, 0.5, 0.75, 1.0)
DIMS = (16, 64)


def _quiet(_: str) -> None:
    """Single rounds of milliseconds are not worth a line."""


class _Partition:
    """Is one partition of ``rows`` rows three times: without protection, with a lag, and the mirror that follows."""

    def __init__(self, dim: int, rows: int) -> None:
        self.spec = TableSpec("rows", dim, OptimizerSpec(OptimizerKind.ROWWISE_ADAGRAD, 0.01))
        self.plain, self.lagging, self.home = (Store(1, 1) for _ in range(3))
        self.keys = unique_route(np.arange(rows), 1, self.spec.id, np.zeros(1, np.int32))[0]
        self.grads = np.random.default_rng(0).normal(size=(rows, dim)).astype(np.float32)
        self.rng = np.random.default_rng(1)
        self.at = 0
        for store in (self.plain, self.lagging, self.home):
            store.declare(self.spec)
        for store in (self.plain, self.lagging):
            store.own([0])
            store.open(0, 0, 1)
            for lo in range(0, rows, 100_000):
                some = self.keys[lo : lo + 100_000]
                store.put_absent(self.spec.id, some, np.ones((len(some), dim), np.float32))
        self.home.mirror_make(1, [0], 0)
        self.lagging.protect([0], True)
        for kind in (BlobKind.HEADS, BlobKind.BODIES):
            lo = 0
            while lo >= 0:
                lo = self.lagging.emit(0, kind, self.spec.id, lo, lo + 8192)
        self.lagging.emit_marks(0)
        self._deliver()
        self.lagging.set_lag(1 << 40, 1 << 20, 1e6)
        self.record_bytes = 4 * (dim + 1)
        self.pages = [np.ones((rows, self.record_bytes), np.uint8) for _ in range(3)]

    def _deliver(self) -> int:
        """Bring what waits to the mirror; return its bytes."""
        size = 0
        while True:
            _, entries, data = self.lagging.take_outbox(1 << 40)
            if not entries:
                return size
            at, length = (np.array([e[i] for e in entries], np.int64) for i in (3, 4))
            assert not self.home.mirror_apply_many(np.full(len(at), 1), at, length, data).any()
            size += data.nbytes

    def rows(self, density: float) -> tuple[float, float]:
        """Return CPU seconds and bytes per changed row."""
        chosen = self.rng.random(len(self.keys)) < density
        keys = self.keys[chosen] if density < 1 else self.keys
        grads = self.grads[: len(keys)]
        cpu = []
        for store in (self.plain, self.lagging):
            began = time.process_time()
            assert store.push(0, self.at, self.at + 1, 1, b"", [(self.spec.id, keys, grads, -1.0)]).applied == 1
            cpu.append(time.process_time() - began)
        self.at += 1
        began = time.process_time()
        self.lagging.flush(0)
        size = self._deliver()
        return (cpu[1] - cpu[0] + time.process_time() - began) / len(keys), size / len(keys)

    def least_of_pages(self, density: float) -> tuple[float, float]:
        """Return CPU seconds and bytes per changed row, of a ps that knows pages only."""
        n = len(self.keys)
        touched = 1.0 - (1.0 - density) ** PAGE_ROWS
        now, old, mirror = (side[: int(n * touched)].reshape(-1) for side in self.pages)
        began = time.process_time()
        np.copyto(old, now)
        _native.gf_add_mul(old, now, 1)
        _native.gf_add_mul(mirror, old, 1)
        took = time.process_time() - began
        return took / (n * density), len(now) / (n * density)


def _send_s_per_byte() -> float:
    """Return CPU seconds per byte of sending and receiving through a socket, in blocks as a ps sends them."""
    data, took = bytes(1 << 16), []
    sender, receiver = socket.socketpair()
    with sender, receiver:
        sender.setblocking(False)
        for _ in range(9):
            began = time.process_time()
            for _ in range(256):
                left = sender.send(data)
                while left:
                    left -= len(receiver.recv(left))
            took.append((time.process_time() - began) / (256 * len(data)))
    return median(took)


def _job_density(rows: int, pushes: int) -> float:
    """Return the share of a table of ``rows`` rows that ``pushes`` pushes of 8,000 distinct rows change."""
    rng = np.random.default_rng(1)
    ends = np.cumsum(1.0 / np.arange(1, rows + 1) ** 1.1)
    seen: NDArray[np.bool_] = np.zeros(rows, np.bool_)
    for _ in range(pushes):
        chosen: NDArray[np.int64] = np.empty(0, np.int64)
        while len(chosen) < 8000:
            chosen = np.union1d(chosen, np.searchsorted(ends, rng.random(16_000) * ends[-1]))
        seen[rng.permutation(chosen)[:8000]] = True
    return float(seen.mean())


def run(quick: bool) -> Result:
    """See the module."""
    rounds, rows = (9, 200_000) if quick else (31, 1_000_000)
    send_s = _send_s_per_byte()
    figures = {"job_density": _job_density(1_000_000, 30), "send_ns_per_kb": send_s * 1e12}
    spreads: dict[str, tuple[float, float]] = {}
    for dim in DIMS:
        partition = _Partition(dim, rows)
        for density in DENSITIES:
            sides = {
                "rows": lambda d=density, p=partition: p.rows(d),
                "pages": lambda d=density, p=partition: p.least_of_pages(d),
            }
            found = interleaved(sides, rounds, _quiet)
            name = f"dim{dim}.changed_{density:.0%}".replace("%", "")
            both = list(zip(found["rows"], found["pages"], strict=True))
            figures[f"{name}.rows_ns"] = median([a[0] for a, _ in both]) * 1e9
            figures[f"{name}.bytes"] = median([b[1] / a[1] for a, b in both])
            ratios = {
                "pages_over_rows": [b[0] / a[0] for a, b in both],
                "pages_over_rows_sent": [(b[0] + b[1] * send_s) / (a[0] + a[1] * send_s) for a, b in both],
            }
            for kind, values in ratios.items():
                figures[f"{name}.{kind}"], spreads[f"{name}.{kind}"] = median(values), spread(values)
            cpu, sent, size = (figures[f"{name}.{kind}"] for kind in (*ratios, "bytes"))
            say(
                f"  dim {dim}, {density:.0%} changed: pages {cpu:.2f} x the CPU of rows, {sent:.2f} with sending, "
                f"{size:.2f} x their bytes"
            )
    return {"figures": figures, "aims": {}, "holds": {}, "spread": spreads}
