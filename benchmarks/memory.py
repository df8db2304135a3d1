"""What protection costs in memory: bytes held by all ps over the bytes of their rows, for 4+1, 4+2 and no protection.

Real processes, one a ps, each with its share of the partitions; every partition is a member of a stripe of four, whose
one or two mirrors are at other ps. Rows are made and changed by pushes, whose differences travel from process to
process; the mirrors are swept first, as in a job. ``accounted`` is what the stores say they hold (pages, indexes,
mirrors), ``rss`` what the processes have grown by since their stores were empty; both over rows times (key + values +
state). Half of the rows are there before protection begins and come by the sweep, half come as differences.
"""

from __future__ import annotations

import multiprocessing
from multiprocessing.connection import Connection
from typing import Any

import numpy as np
import psutil

from benchmarks._measure import say
from everstep.model.table import OptimizerKind, OptimizerSpec, TableSpec
from everstep.native import BlobKind, Store, unique_route

MEMBERS = 4
PUSH = 20_000
# 1.25 and 1.5 times what the job needs without protection, and a tenth on top.
AIMS = {"rss_4+1_over_unprotected": "<= 1.375", "rss_4+2_over_unprotected": "<= 1.65"}


def stripes(servers: int, per_server: int, m: int) -> tuple[list[int], list[tuple[int, tuple[int, ...], int, int]]]:
    """``owner[partition]``, and mirrors (id, members, row, at): of stripe s at the servers s, s + 1, ..."""
    owner: list[int] = []
    mirrors = []
    for s in range(servers * per_server // MEMBERS):
        homes = [(s + r) % servers for r in range(m)]
        places = [p for p in (np.arange(servers) + s) % servers if p not in homes][:MEMBERS]
        members = tuple(range(len(owner), len(owner) + MEMBERS))
        owner += [int(p) for p in places]
        mirrors += [(1 + s * m + r, members, r, home) for r, home in enumerate(homes)]
    return owner, mirrors


def _ps(pipe: Connection, spec: TableSpec, n_partitions: int) -> None:
    """One ps: does what the pipe says, answers (what waits in its outbox)."""
    store = Store(n_partitions, 1)
    store.declare(spec)
    store.open(0, 0, 1)
    process = psutil.Process()
    at = 0
    warm = np.zeros((PUSH, spec.dim), np.float32)
    base = process.memory_info().rss
    while True:
        what, *args = pipe.recv()
        match what:
            case "own":
                store.own(args[0])
                store.open(0, 0, 1)
            case "protect":
                store.protect(args[0], True)
            case "mirror":
                store.mirror_make(*args)
            case "push":
                keys = args[0]
                assert store.push(0, at, at + 1, 1, b"", [(spec.id, keys, warm[: len(keys)] + 1, -1.0)]).applied
                at += 1
            case "emit":
                partition, kind, lo = args
                pipe.send(store.emit(partition, kind, spec.id, lo, lo + 8192))
            case "marks":
                store.emit_marks(args[0])
            case "take":
                _, entries, data = store.take_outbox(4 << 20)
                pipe.send([(partition, data[o : o + n].tobytes()) for partition, _, _, o, n in entries])
            case "apply":
                for mirror, blob in args[0]:
                    assert store.mirror_apply(mirror, blob) == 0
            case "measure":
                rows = store.stats().rows[spec.name]
                held = sum(store.partition_bytes(b) for b in store.owned())
                mirrored = sum(store.mirror_bytes(m) for m in store.mirrors())
                assert all(done for m in store.mirrors() for _, _, done in store.mirror_state(m))
                pipe.send((rows, held, mirrored, process.memory_info().rss - base))
            case _:
                return


class _Job:
    def __init__(self, spec: TableSpec, servers: int, per_server: int, m: int) -> None:
        self.spec = spec
        self.owner, self.mirrors = stripes(servers, per_server, m)
        self.home_of: dict[int, list[tuple[int, int]]] = {}
        context = multiprocessing.get_context("spawn")
        self.pipes = []
        self.processes = []
        for _ in range(servers):
            ours, theirs = context.Pipe()
            process = context.Process(target=_ps, args=(theirs, spec, len(self.owner)), daemon=True)
            process.start()
            self.pipes.append(ours)
            self.processes.append(process)
        for ps, pipe in enumerate(self.pipes):
            pipe.send(("own", self.of(ps)))

    def of(self, ps: int) -> list[int]:
        return [b for b, p in enumerate(self.owner) if p == ps]

    def push(self, ids: np.ndarray) -> None:
        keys, _, counts = unique_route(
            ids, len(self.owner), self.spec.id, np.array(self.owner, np.int32), len(self.pipes)
        )
        ends = np.cumsum(counts)
        for ps, pipe in enumerate(self.pipes):
            pipe.send(("push", keys[ends[ps] - counts[ps] : ends[ps]]))
        self.carry()

    def carry(self) -> None:
        """Differences and contents to the mirrors of their partitions, until nothing waits."""
        for pipe in self.pipes:
            while True:
                pipe.send(("take",))
                entries = pipe.recv()
                if not entries:
                    break
                by_home: dict[int, list[tuple[int, bytes]]] = {}
                for partition, blob in entries:
                    for mirror, home in self.home_of.get(partition, ()):
                        by_home.setdefault(home, []).append((mirror, blob))
                for home, blobs in by_home.items():
                    self.pipes[home].send(("apply", blobs))

    def protect(self) -> None:
        for mirror, members, row, home in self.mirrors:
            self.pipes[home].send(("mirror", mirror, list(members), row))
            for b in members:
                self.home_of.setdefault(b, []).append((mirror, home))
        for ps, pipe in enumerate(self.pipes if self.mirrors else ()):
            pipe.send(("protect", self.of(ps)))
            for b in self.of(ps):
                for kind in (BlobKind.HEADS, BlobKind.BODIES):
                    lo = 0
                    while lo >= 0:
                        pipe.send(("emit", b, int(kind), lo))
                        lo = pipe.recv()
                    self.carry()
                pipe.send(("marks", b))
            self.carry()

    def measure(self) -> tuple[int, int, int, int]:
        """Rows, bytes of partitions, bytes of mirrors, growth of the resident memory; of all ps."""
        for pipe in self.pipes:
            pipe.send(("measure",))
        return tuple(int(x) for x in np.sum([pipe.recv() for pipe in self.pipes], axis=0))  # type: ignore[return-value]

    def close(self) -> None:
        for pipe, process in zip(self.pipes, self.processes, strict=True):
            pipe.send(("end",))
            process.join(10)
            if process.is_alive():
                process.kill()


def run(quick: bool) -> dict[str, Any]:
    """See the module. ``quick``: a quarter of the rows."""
    servers, per_server = 6, 8  # 4+2 needs six
    # Between two doublings of the indexes: they are half full.
    rows = servers * per_server * (16_384 if quick else 65_536)
    spec = TableSpec("rows", 64, OptimizerSpec(OptimizerKind.ROWWISE_ADAGRAD, 0.01))
    row_bytes = 8 + 4 * (spec.dim + spec.optimizer.state_floats(spec.dim))
    figures: dict[str, float] = {"row_bytes": float(row_bytes)}
    for name, m in (("unprotected", 0), ("4+1", 1), ("4+2", 2)):
        job = _Job(spec, servers, per_server, m)
        try:
            order = np.random.default_rng(0).permutation(rows)
            for lo in range(0, rows // 2, PUSH):
                job.push(order[lo : lo + PUSH])
            job.protect()
            for lo in range(rows // 2, rows, PUSH):
                job.push(order[lo : lo + PUSH])
            made, partitions, mirrors, rss = job.measure()
        finally:
            job.close()
        assert made == rows, (made, rows)
        figures[f"accounted_{name}_over_rows"] = (partitions + mirrors) / (rows * row_bytes)
        figures[f"mirrors_{name}_over_rows"] = mirrors / (rows * row_bytes)
        figures[f"rss_{name}_over_rows"] = rss / (rows * row_bytes)
        say(
            f"{name}: {rows} rows of {row_bytes} bytes: partitions {partitions / 1e6:.0f} MB, "
            f"mirrors {mirrors / 1e6:.0f} MB, resident {rss / 1e6:.0f} MB"
        )
    for name in ("4+1", "4+2"):
        figures[f"rss_{name}_over_unprotected"] = (
            figures[f"rss_{name}_over_rows"] / figures["rss_unprotected_over_rows"]
        )
    holds = {name: figures[name] <= float(aim.split()[1]) for name, aim in AIMS.items()}
    return {"figures": figures, "aims": AIMS, "holds": holds, "spread": {}}
