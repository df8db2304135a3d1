"""What pushes feel of a checkpoint: longest stall, added time, bytes of bases and increments, time to restore.

One ps's store and its snapshot writer in one process, as in a ps: a thread pulls and pushes every STEP_S (a batch:
2,048 samples of 8 Zipf ids each, dim 16, Adagrad, in 64 partitions), while another writes snapshots to a local
directory. Sides in turns: no checkpoint (twice: ``.aa`` is what the second seems to add), a base, a base written no
faster than THROTTLE, an increment 100 and 3,000 batches (1 s and 30 s of this traffic) after a base. ``stall``: the
longest pull-and-push of a side; the machine's own hiccups are in the side
without a checkpoint. ``added_of_step``: how much longer pulls and pushes take on average while snapshots are written,
of STEP_S. ``added_of_time``: all that a checkpoint costs the pushing thread, spread over the 30 s to the next one. Rows
came into the table in the order in which Zipf traffic brings them. Restoring is loading all partitions (base and
increment) with all checks.
"""

from __future__ import annotations

import os
import shutil
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from benchmarks._measure import Result, each_round, median, say, spread
from everstep.brain.events import SnapshotsWritten
from everstep.ids import PartitionId
from everstep.model.snapshot import PartitionSnapshot
from everstep.model.table import OptimizerKind, OptimizerSpec, TableSpec
from everstep.native import Store, unique_route
from everstep.protect.restore import load_partition
from everstep.protect.snapshots import SnapshotWriter

PARTITIONS, DIM, BATCH, SLOTS = 64, 16, 2048, 8
ZIPF = 1.2
STEP_S = 0.01
EVERY_S = 30.0
INCREMENTS = {"increment_100": 100, "increment_3000": 3000}  # batches since the base
THROTTLE = 100e6  # bytes/s
TABLE = TableSpec("items", DIM, OptimizerSpec(OptimizerKind.ADAGRAD, 0.05))
RANKS = np.zeros(PARTITIONS, np.int32)


class Pusher:
    """Pulls and pushes batches of Zipf keys; ``times``: seconds of each."""

    def __init__(self, store: Store, rows: int) -> None:
        self.store, self.rows = store, rows
        self.at = 0
        rng = np.random.default_rng(7)
        weights = 1.0 / np.arange(1, rows + 1) ** ZIPF
        steps = np.cumsum(weights / weights.sum())
        came = np.argsort(np.argsort(rng.exponential(size=rows) / weights))  # of each rank: when it is seen first
        self.batches = []
        for _ in range(400):
            ranks = np.searchsorted(steps, rng.random(BATCH * SLOTS)).clip(max=rows - 1)
            keys, _, _ = unique_route(came[ranks], PARTITIONS, TABLE.id, RANKS)
            self.batches.append((keys, rng.normal(size=(len(keys), DIM)).astype(np.float32)))
        self.out = np.empty((BATCH * SLOTS, DIM), np.float32)

    def fill(self) -> None:
        """Every row there is, once."""
        for lo in range(0, self.rows, 200_000):
            keys, _, _ = unique_route(np.arange(lo, min(self.rows, lo + 200_000)), PARTITIONS, TABLE.id, RANKS)
            self._push(keys, np.zeros((len(keys), DIM), np.float32))

    def step(self) -> float:
        keys, grads = self.batches[self.at % len(self.batches)]
        began = time.perf_counter()
        self.store.pull(TABLE.id, keys, self.out[: len(keys)])
        self._push(keys, grads)
        return time.perf_counter() - began

    def paced(self, over: Callable[[list[float]], bool]) -> list[float]:
        """Steps every STEP_S until ``over(times)``; how long each took."""
        times: list[float] = []
        due = time.perf_counter()
        while not over(times):
            times.append(self.step())
            due = max(due + STEP_S, time.perf_counter())
            time.sleep(max(0.0, due - time.perf_counter()))
        return times

    def _push(self, keys: NDArray[np.int64], grads: NDArray[np.float32]) -> None:
        if not self.store.push(0, self.at, self.at + 1, 1, b"", [(int(TABLE.id), keys, grads, -1.0)]).applied:
            raise RuntimeError(f"push {self.at} was not applied")
        self.at += 1


def run(quick: bool) -> Result:
    rows, rounds = (300_000, 3) if quick else (2_000_000, 5)
    where = Path(tempfile.mkdtemp(prefix="everstep-bench-"))
    try:
        return _run(rows, rounds, where)
    finally:
        shutil.rmtree(where, ignore_errors=True)


def _run(rows: int, rounds: int, where: Path) -> Result:
    store = Store(PARTITIONS, 1)
    store.own(range(PARTITIONS))
    store.declare(TABLE)
    store.open(0, 0, 1)
    pusher = Pusher(store, rows)
    pusher.fill()
    for _ in range(50):
        pusher.step()
    number = 0
    values: dict[str, list[float]] = {}
    last: tuple[PartitionSnapshot, ...] = ()

    def note(name: str, value: float) -> None:
        values.setdefault(name, []).append(value)

    for turn in each_round(rounds):
        sides = ["none", "base", "throttled_base", *INCREMENTS, "again"]
        found: dict[str, tuple[list[float], float, int]] = {}
        for side in sides[turn % 6 :] + sides[: turn % 6]:  # another one first each time
            if side in ("none", "again"):
                found[side] = pusher.paced(lambda times: len(times) >= 200), 0.0, 0
                continue
            writer = SnapshotWriter(
                store, where, job="bench", bytes_per_s=THROTTLE if side == "throttled_base" else 0.0
            )
            since = 0
            if side in INCREMENTS:
                number += 1
                since = number
                _good(writer.write(number, 0, str(where), [PartitionId(b) for b in range(PARTITIONS)]))
                for _ in range(INCREMENTS[side]):
                    pusher.step()
            number += 1
            times, took_s, answer = _taken(writer, pusher, number, since, where)
            writer.close()
            found[side] = times, took_s, sum(i.bytes_written for i in answer.snapshots)
            if side in INCREMENTS:
                last = answer.snapshots
        plain = float(np.mean(found["none"][0]))
        note("step_ms", median(found["none"][0]) * 1e3)
        note("none_stall_ms", max(found["none"][0]) * 1e3)
        again_s = float(np.mean(found["again"][0])) - plain
        for side in sides[1:-1]:
            times, took_s, written = found[side]
            more_s = float(np.mean(times)) - plain
            note(f"{side}_stall_ms", max(times) * 1e3)
            note(f"{side}_added_of_step", more_s / STEP_S)
            note(f"{side}_added_of_time", more_s * len(times) / EVERY_S)
            note(f"{side}_added_of_time.aa", again_s * len(times) / EVERY_S)
            note(f"{side}_MB", written / 1e6)
            note(f"{side}_s", took_s)
        for side in INCREMENTS:
            note(f"{side}_of_base_bytes", found[side][2] / found["base"][2])
        note("plain_write_MB_per_s", _plain_write(where, found["base"][2]))
        took_s, n = _restored(where, last, store)
        note("restore_s", took_s)
        note("restore_MB_per_s", n / 1e6 / took_s)
        shutil.rmtree(where / "images")
        say(f"round {turn + 1}/{rounds}: " + ", ".join(f"{k} {v[-1]:.4g}" for k, v in values.items()))
    figures = {name: round(median(v), 5) for name, v in values.items()}
    figures["rows"], figures["row_bytes"] = float(rows), float(8 + 8 * DIM)
    aims = {f"{side}_added_of_time": "< 0.01" for side in ("base", *INCREMENTS)}
    holds = {name: figures[name] < 0.01 for name in aims}
    return {
        "figures": figures,
        "aims": aims,
        "holds": holds,
        "spread": {name: spread([round(x, 5) for x in v]) for name, v in values.items()},
    }


def _taken(
    writer: SnapshotWriter, pusher: Pusher, number: int, since: int, where: Path
) -> tuple[list[float], float, SnapshotsWritten]:
    """Times of all steps until the snapshots are durable, how long that took, and the answer."""
    done = threading.Event()
    answers: list[SnapshotsWritten] = []

    def on_done(answer: SnapshotsWritten) -> None:
        answers.append(answer)
        done.set()

    began = time.perf_counter()
    writer.take(number, since, str(where), range(PARTITIONS), on_done)
    times = pusher.paced(lambda times: done.is_set() and len(times) > 0)
    took_s = time.perf_counter() - began
    _good(answers[0])
    return times, took_s, answers[0]


def _good(answer: SnapshotsWritten) -> None:
    if answer.error or len(answer.snapshots) != PARTITIONS:
        raise RuntimeError(f"checkpoint {answer.checkpoint}: {answer.error or answer.snapshots}")


def _plain_write(where: Path, n: int) -> float:
    """MB/s of writing as many bytes to one file, with fsync: what the disk takes."""
    data = os.urandom(1 << 20)
    began = time.perf_counter()
    with (where / "plain").open("wb") as file:
        for _ in range(max(1, n >> 20)):
            file.write(data)
        file.flush()
        os.fsync(file.fileno())
    took_s = time.perf_counter() - began
    (where / "plain").unlink()
    return (max(1, n >> 20) << 20) / 1e6 / took_s


def _restored(where: Path, snapshots: Sequence[PartitionSnapshot], like: Store) -> tuple[float, int]:
    """Seconds to load all partitions from base and increment, and the bytes read."""
    store = Store(PARTITIONS, 1)
    began = time.perf_counter()
    for snapshot in snapshots:
        load_partition(store, str(where), snapshot)
    took_s = time.perf_counter() - began
    if store.stats().rows != like.stats().rows:
        raise RuntimeError(f"restored {store.stats().rows}, not {like.stats().rows}")
    return took_s, sum(file.size_bytes for snapshot in snapshots for file in snapshot.files)
