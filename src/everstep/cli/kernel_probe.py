"""Runs the real kernels of protection on this machine for some seconds (``everstep advise --measure``).

Three stores take the same pushes, as a ps does: one is unprotected, one makes a difference at each push, and one has
mirrors that may lag. What comes into the outbox goes as a message through a socket, and into a mirror in another store.
The three take turns within each round, so that what else runs on the machine falls on all. Before each piece, other
memory is read: in a job the workers' steps empty the caches between two pushes. A store is written as a snapshot, too,
to the folder that checkpoints would go to. Not in it: threads that wait for each other, and the work per message of a
ps beyond encoding it.
"""

from __future__ import annotations

import shutil
import socket
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray

from everstep.errors import ConfigError, EverstepError
from everstep.ids import Incarnation, PartitionId, Slot
from everstep.model.table import OptimizerKind, OptimizerSpec, TableSpec
from everstep.native import BlobKind, Store, unique_route
from everstep.net.messages import Append, StreamEntry
from everstep.policies.measured_costs import KernelCosts, MeasuredCosts
from everstep.protect.snapshots import SnapshotWriter

PARTITIONS = 8
MOST_ROWS = 1_000_000
"""Rows of the probe's table: far more than caches hold, and made in a second."""
MOST_TABLE_BYTES = 256 << 20
MOST_PUSHES = 400
"""Pushes that go into one difference; a longer lag is measured as this one, which costs more."""
BLOCK_BYTES = 1 << 16
OPEN_BYTES = 1 << 40
TOTAL_S = 28.0
COLD_BYTES = 64 << 20
LEAST_ROUNDS = 3
LEAST_PUSHES = 3


class ProbeLoad(NamedTuple):
    """Says what is pushed. ``rows``: distinct keys of one push; ``pushes``: in one lag; ``zipf``: how uneven."""

    dim: int
    rows: int
    pushes: int
    zipf: float = 1.1


class _Copy:
    """Is a store that is pushed to, and the mirror that follows it."""

    def __init__(self, spec: TableSpec, keys: NDArray[np.int64], protected: bool, lag: bool) -> None:
        self.spec = spec
        self.store, self.home = Store(PARTITIONS, 1), Store(PARTITIONS, 1)
        self.sender, self.receiver = socket.socketpair()
        self.sender.setblocking(False)
        for store in (self.store, self.home):
            store.declare(spec)
        self.store.own(range(PARTITIONS))
        self.store.open(0, 0, 1)
        for lo in range(0, len(keys), 100_000):
            some = keys[lo : lo + 100_000]
            self.store.put_absent(spec.id, some, np.full((len(some), spec.dim), 0.5, np.float32))
        self.at = 0
        if not protected:
            return
        for b in range(PARTITIONS):
            self.home.mirror_make(b + 1, [b], 0)
        self.store.protect(range(PARTITIONS), True)
        for b in range(PARTITIONS):
            for kind in (BlobKind.HEADS, BlobKind.BODIES):
                lo = 0
                while lo >= 0:
                    lo = self.store.emit(b, kind, spec.id, lo, lo + 8192)
            self.store.emit_marks(b)
            self.deliver()
        if lag:
            self.store.set_lag(OPEN_BYTES, 1 << 20, 1e6)

    def close(self) -> None:
        self.sender.close()
        self.receiver.close()

    def push(self, keys: NDArray[np.int64], rows: NDArray[np.float32]) -> None:
        done = self.store.push(0, self.at, self.at + 1, 1, b"", [(self.spec.id, keys, rows, -1.0)])
        if done.applied != PARTITIONS:
            raise EverstepError(f"the probe's push reached {done.applied} of {PARTITIONS} partitions")
        self.at += 1

    def flush(self) -> None:
        for b in range(PARTITIONS):
            self.store.flush(b)

    def deliver(self) -> tuple[float, float]:
        """Bring what waits to the mirrors. Return the processor seconds of sending it, and of applying it."""
        sent = applied = 0.0
        while True:
            began = time.process_time()
            first, entries, data = self.store.take_outbox(4 << 20)
            if not entries:
                return sent + time.process_time() - began, applied
            listed = tuple(StreamEntry(PartitionId(e[0]), e[1], int(e[2]), e[4]) for e in entries)
            feed = Append(1, Slot(0), Incarnation(1), (), listed, (0,) * len(listed), (), first)
            self._through(msgspec.msgpack.encode(feed))
            for entry in entries:
                self._through(data.data[entry[3] : entry[3] + entry[4]])
            between = time.process_time()
            which = np.array([e[0] + 1 for e in entries], np.int64)
            offsets, lengths = (np.array([e[i] for e in entries], np.int64) for i in (3, 4))
            if self.home.mirror_apply_many(which, offsets, lengths, data.data).any():
                raise EverstepError("the probe's mirror does not take a difference")
            sent += between - began
            applied += time.process_time() - between

    def _through(self, data: bytes | memoryview) -> None:
        view = memoryview(data).cast("B")
        while view:
            n = self.sender.send(view[:BLOCK_BYTES])
            view = view[n:]
            while n:
                n -= len(self.receiver.recv(n))


class _ZipfKeys:
    """Draws the keys of batches, as uneven as a power law: the same rows are hot in all of them."""

    def __init__(self, spec: TableSpec, n: int, power: float) -> None:
        self.table_id = spec.id
        self.rng = np.random.default_rng(1)
        self.all = self.rng.permutation(n).astype(np.int64)
        self.ends = np.cumsum(1.0 / np.arange(1, n + 1) ** power)
        self.here = np.zeros(PARTITIONS, np.int32)

    def batch(self, rows: int) -> NDArray[np.int64]:
        """Return ``rows`` distinct keys, in the order in which a worker sends them."""
        chosen = np.empty(0, np.int64)
        while len(chosen) < rows:
            drawn = np.searchsorted(self.ends, self.rng.random(2 * rows) * self.ends[-1])
            chosen = np.unique(np.concatenate([chosen, self.all[drawn]]))
        return unique_route(self.rng.permutation(chosen)[:rows], PARTITIONS, self.table_id, self.here)[0]


def probe_kernels(
    load: ProbeLoad, folder: Path, say: Callable[[str], None] = lambda _: None, total_s: float | None = None
) -> MeasuredCosts:
    """Measure for about ``total_s`` seconds (default: TOTAL_S), and at least ``LEAST_ROUNDS`` rounds. Raises
    ConfigError: the folder cannot be written, or ``load`` is too large for the probe's table."""
    total_s = TOTAL_S if total_s is None else total_s
    began = time.monotonic()
    spec = TableSpec("probe", load.dim, OptimizerSpec(OptimizerKind.ROWWISE_ADAGRAD, 0.01))
    rows_there = min(MOST_ROWS, MOST_TABLE_BYTES // (4 * load.dim + 16))
    if load.rows * 4 > rows_there:
        raise ConfigError(
            f"--rows-per-step {load.rows}: at dim {load.dim} the probe's table has {rows_there} rows; at most "
            f"{rows_there // 4} can be measured"
        )
    keys = _ZipfKeys(spec, rows_there, load.zipf)
    table = unique_route(keys.all, PARTITIONS, spec.id, keys.here)[0]
    say(f"measuring: {rows_there:,} rows of dim {load.dim}, {load.rows:,} a push, up to {total_s:g} s")
    sides = {
        "plain": _Copy(spec, table, False, False),
        "acked": _Copy(spec, table, True, False),
        "lag": _Copy(spec, table, True, True),
    }
    try:
        write_bytes_per_s, write_cpu_s_per_byte = _write(sides["plain"].store, folder)
        pushes = min(load.pushes, MOST_PUSHES)
        per_row: dict[str, list[float]] = {}
        distinct: list[float] = []
        rounds = 0
        while rounds < LEAST_ROUNDS or time.monotonic() - began < total_s:
            found, share = _round(sides, keys, load, pushes, began + total_s)
            for name, seconds in found.items():
                per_row.setdefault(name, []).append(seconds)
            distinct.append(share)
            rounds += 1
    finally:
        for side in sides.values():
            side.close()
    middle = {name: median(values) for name, values in per_row.items()}
    acked, lag = (
        KernelCosts(
            push_s=middle["plain.push"],
            difference_s=max(0.0, middle[f"{name}.push"] - middle["plain.push"]),
            send_s=middle[f"{name}.send"],
            apply_s=middle[f"{name}.apply"],
        )
        for name in ("acked", "lag")
    )
    return MeasuredCosts(
        acked,
        lag,
        pushes,
        median(distinct),
        write_bytes_per_s,
        write_cpu_s_per_byte,
        time.monotonic() - began,
    )


def _round(
    sides: dict[str, _Copy], keys: _ZipfKeys, load: ProbeLoad, pushes: int, until: float
) -> tuple[dict[str, float], float]:
    """Push one lag's batches to each side in turn; fewer than ``pushes`` once it is later than ``until``. Return
    processor seconds for each row pushed, by side and piece, and the rows in the lag's differences as a share of the
    rows pushed."""
    cold = np.ones(COLD_BYTES // 8)
    used = dict.fromkeys([f"{name}.{piece}" for name in sides for piece in ("push", "send", "apply")], 0.0)
    grads = keys.rng.normal(size=(load.rows, load.dim)).astype(np.float32)
    pushed = 0
    for i in range(pushes):
        if i >= LEAST_PUSHES and time.monotonic() > until:
            break
        some = keys.batch(load.rows)
        for name, side in sides.items():
            cold.sum()
            began = time.process_time()
            side.push(some, grads)
            used[f"{name}.push"] += time.process_time() - began
            if name == "acked":
                _add(used, name, side.deliver())
        pushed += len(some)
    distinct = sides["lag"].store.lag().rows / pushed
    cold.sum()
    began = time.process_time()
    sides["lag"].flush()
    used["lag.push"] += time.process_time() - began
    _add(used, "lag", sides["lag"].deliver())
    return {name: seconds / pushed for name, seconds in used.items()}, distinct


def _add(used: dict[str, float], name: str, found: tuple[float, float]) -> None:
    used[f"{name}.send"] += found[0]
    used[f"{name}.apply"] += found[1]


def _write(store: Store, folder: Path) -> tuple[float, float]:
    """Write the store as a snapshot. Return bytes a second until it is durable, and processor seconds a byte."""
    try:
        home = Path(tempfile.mkdtemp(prefix="everstep-advise-", dir=folder))
    except OSError as error:
        raise ConfigError(
            f"--write-to {folder}: cannot be written ({error.strerror}); give the folder for checkpoints"
        ) from None
    try:
        writer = SnapshotWriter(store, home, job="advise", retry_s=0.0)
        began, cpu = time.monotonic(), time.process_time()
        done = writer.write(1, 0, str(home), [PartitionId(b) for b in range(PARTITIONS)])
        took, used = time.monotonic() - began, time.process_time() - cpu
        if done.error:
            raise ConfigError(f"--write-to {folder}: {done.error}")
        size = sum(s.bytes_written for s in done.snapshots)
        return size / took, used / size
    finally:
        shutil.rmtree(home, ignore_errors=True)
