"""The jobs of ``before_after --blocks``: they train until they are killed, and count what is done.

``python _block_job.py throughput|allreduce_step COUNTS DATA`` is a job's script, ``client COUNTS SLOT RUN_DIR`` one
client of the benchmark control_plane. The script runs unchanged with both versions. ``COUNTS`` is a file of int64
numbers, one for each slot: samples, steps or answers so far.
"""

from __future__ import annotations

import mmap
import struct
import sys
import time
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent


class Count:
    """A number in a mapped file that another process reads."""

    def __init__(self, path: str, slot: int) -> None:
        with open(path, "r+b") as file:  # noqa: PTH123
            self._memory = mmap.mmap(file.fileno(), 0)
        self._at, self._sum = 8 * slot, 0

    def add(self, n: int) -> None:
        self._sum += n
        struct.pack_into("<q", self._memory, self._at, self._sum)


def throughput(counts: str, folder: str) -> None:
    sys.path.insert(0, str(HERE))
    import torch

    import everstep as es
    import throughput_model as model

    job = es.join()
    torch.set_num_threads(1)
    source = model.cached_data(200_000, 1_000_000, folder)
    net = job.sparse(model.DLRM(16, 1_000_000), optimizer=es.Adagrad(lr=0.02), init=es.Uniform(-0.05, 0.05))
    net = job.replicate(net)
    opt = job.optimizer(torch.optim.Adam(net.parameters(), lr=1e-3))
    loss_fn = torch.nn.BCEWithLogitsLoss()
    count = Count(counts, job.slot)
    loader = job.loader(source, batch_size=2048, epochs=1000, drop_last=True)
    for n, batch in enumerate(job.steps(loader)):
        loss = loss_fn(net(batch), batch["label"])
        opt.zero_grad()
        loss.backward()
        opt.step()
        count.add(len(batch["label"]))
        if n % 20 == 0:
            job.report(loss=loss)


def allreduce_step(counts: str, folder: str) -> None:
    sys.path.insert(0, str(HERE / "baselines"))
    import torch
    from replica import network, optimizer, pictures

    import everstep as es

    torch.set_num_threads(1)
    job = es.join(mode="allreduce")
    net = job.replicate(network(1))
    opt = job.optimizer(optimizer(net))
    count = Count(counts, job.slot)
    for batch in job.steps(job.loader(pictures(), 32, epochs=100_000)):
        loss = torch.nn.functional.cross_entropy(net(batch["image"]), batch["label"])
        opt.zero_grad()
        loss.backward()
        opt.step()
        count.add(1)


class _CountedTime:
    """``time`` for a client: it asks for the time once an answer."""

    def __init__(self, count: Count) -> None:
        self._count = count

    def perf_counter(self) -> float:
        self._count.add(1)
        return time.perf_counter()


def client(counts: str, slot: str, run_dir: str) -> None:
    from benchmarks import control_plane

    stand_in: Any = _CountedTime(Count(counts, int(slot)))
    control_plane.time = stand_in
    control_plane.client_main(Path(run_dir), int(slot), 1e6, control_plane.IN_FLIGHT)


if __name__ == "__main__":
    {"throughput": throughput, "allreduce_step": allreduce_step, "client": client}[sys.argv[1]](*sys.argv[2:])
