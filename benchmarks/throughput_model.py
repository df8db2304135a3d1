"""The model of the throughput benchmark, as an everstep script and as the bound it is measured against.

DLRM-style: 13 dense and 26 categorical features, bottom 512-256-dim, pairwise interaction, top 512-256-1.

    python benchmarks/throughput_model.py --dim 64                      train, alone in this process
    everstep run --workers 2 --ps 1 benchmarks/throughput_model.py ...  train, on a local cluster
    python benchmarks/throughput_model.py --bound --dim 64              the dense network alone, on one thread

Each prints one JSON line: samples/s of the steady state (after warm-up), CPU seconds, fraction of time waited.
"""

from __future__ import annotations

import argparse
import itertools
import json
import resource
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

N_DENSE, N_CAT = 13, 26
ZIPF = 1.1
GATE_S = 0.005


def mlp(sizes: list[int], last_relu: bool) -> nn.Sequential:
    layers: list[nn.Module] = []
    for i, (a, b) in enumerate(itertools.pairwise(sizes)):
        layers.append(nn.Linear(a, b))
        if last_relu or i < len(sizes) - 2:
            layers.append(nn.ReLU())
    return nn.Sequential(*layers)


class Dense(nn.Module):
    """Everything but the embeddings. ``dense`` float32 [b, 13], ``rows`` 26 x float32 [b, dim] -> logits [b]."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.bottom = mlp([N_DENSE, 512, 256, dim], True)
        n = N_CAT + 1
        self.top = mlp([dim + n * (n - 1) // 2, 512, 256, 1], False)
        pairs = torch.tril_indices(n, n, -1)
        self.register_buffer("pairs", pairs[0] * n + pairs[1], persistent=False)

    def forward(self, dense: Tensor, rows: list[Tensor]) -> Tensor:
        x = self.bottom(dense)
        z = torch.stack([x, *rows], 1)
        products = torch.bmm(z, z.transpose(1, 2)).flatten(1)
        assert isinstance(self.pairs, Tensor)
        out: Tensor = self.top(torch.cat([x, products[:, self.pairs]], 1))
        return out.squeeze(1)


class DLRM(nn.Module):
    """``rows`` per table; embeddings on ``device`` ("meta": they never exist here)."""

    def __init__(self, dim: int, rows: int, device: str = "meta") -> None:
        super().__init__()
        self.tables = nn.ModuleList(nn.EmbeddingBag(rows, dim, mode="sum", device=device) for _ in range(N_CAT))
        self.dense = Dense(dim)

    def forward(self, batch: dict[str, Tensor]) -> Tensor:
        cat = batch["cat"]
        out: Tensor = self.dense(batch["dense"], [t(cat[:, i : i + 1]) for i, t in enumerate(self.tables)])
        return out


def zipf_ids(rng: np.random.Generator, n: int, rows: int) -> NDArray[np.int64]:
    """Ids int64 [n] in [0, rows), the k-th most frequent with weight 1 / k ** ZIPF, scattered over the range."""
    weights = np.cumsum(1.0 / np.arange(1, rows + 1) ** ZIPF)
    ranks = np.searchsorted(weights, rng.random(n) * weights[-1])
    step = 2_654_435_761
    ids: NDArray[np.int64] = ranks.astype(np.int64) * step % rows
    return ids


def data(n: int, rows: int, seed: int = 0) -> dict[str, NDArray[Any]]:
    """``n`` samples: dense float32 [n, 13], cat int64 [n, 26], label float32 [n]."""
    rng = np.random.default_rng(seed)
    cat = np.stack([zipf_ids(rng, n, rows) for _ in range(N_CAT)], 1)
    dense = rng.standard_normal((n, N_DENSE), dtype=np.float32)
    label = (rng.random(n) < 0.25).astype(np.float32)
    return {"dense": dense, "cat": cat, "label": label}


def cached_data(n: int, rows: int, folder: str) -> dict[str, NDArray[Any]]:
    """``data``, kept in ``folder`` (if given) so that all processes of a run share its making."""
    if not folder:
        return data(n, rows)
    paths = {name: Path(folder) / f"{name}-{n}-{rows}.npy" for name in ("dense", "cat", "label")}
    if not all(p.exists() for p in paths.values()):
        Path(folder).mkdir(parents=True, exist_ok=True)
        for name, array in data(n, rows).items():
            part = paths[name].with_suffix(".part.npy")
            np.save(part, array)
            part.replace(paths[name])
    return {name: np.load(p) for name, p in paths.items()}


def cpu_s() -> float:
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


class Meter:
    """Samples/s and CPU seconds per sample after the first ``warm`` batches."""

    def __init__(self, warm: int) -> None:
        self.warm, self.batches, self.samples = warm, 0, 0
        self.began = self.cpu = 0.0

    def batch(self, n: int) -> None:
        self.batches += 1
        if self.batches == self.warm:
            self.began, self.cpu = time.perf_counter(), cpu_s()
        elif self.batches > self.warm:
            self.samples += n

    def result(self) -> dict[str, float]:
        wall = time.perf_counter() - self.began
        return {
            "samples": float(self.samples),
            "samples_per_s": self.samples / wall,
            "cpu_s_per_million": 1e6 * (cpu_s() - self.cpu) / max(1, self.samples),
            "wall_s": wall,
        }


def bound(dim: int, batch_size: int, batches: int, warm: int) -> dict[str, float]:
    """The dense network alone, with random leaf tensors in the place of embedding rows."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = Dense(dim)
    opt = torch.optim.Adam(model.parameters(), lr=1e-3)
    loss_fn = nn.BCEWithLogitsLoss()
    inputs = [torch.randn(batch_size, N_DENSE) for _ in range(4)]
    labels = [(torch.rand(batch_size) < 0.25).float() for _ in range(4)]
    rows = [torch.randn(batch_size, dim).mul_(0.1).requires_grad_() for _ in range(N_CAT)]
    meter = Meter(warm)
    for i in range(batches):
        for r in rows:
            r.grad = None
        loss = loss_fn(model(inputs[i % 4], rows), labels[i % 4])
        opt.zero_grad()
        loss.backward()
        opt.step()
        meter.batch(batch_size)
    return meter.result()


def train(args: argparse.Namespace) -> dict[str, float]:
    import everstep as es

    job = es.join()
    if args.threads:
        torch.set_num_threads(args.threads)
    source = cached_data(args.samples, args.rows, args.data)
    model = job.sparse(DLRM(args.dim, args.rows), optimizer=es.Adagrad(lr=0.02), init=es.Uniform(-0.05, 0.05))
    model = job.replicate(model)
    opt = job.optimizer(torch.optim.Adam(model.parameters(), lr=1e-3))
    loss_fn = nn.BCEWithLogitsLoss()
    loader = job.loader(source, batch_size=args.batch_size, epochs=args.epochs, drop_last=True)
    meter = Meter(args.warm)
    for batch in job.steps(loader):
        loss = loss_fn(model(batch), batch["label"])
        opt.zero_grad()
        loss.backward()
        opt.step()
        meter.batch(len(batch["label"]))
        if meter.batches % 20 == 0:
            job.report(loss=loss)
        if args.batches and meter.batches >= args.batches:
            break
        while args.gate and not Path(args.gate).exists():
            time.sleep(GATE_S)
    result = meter.result()
    readings = job.readings
    result["wait_fraction"] = readings["wait_fraction"]
    result["slot"] = float(job.slot)
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dim", type=int, default=16)
    parser.add_argument("--batch-size", type=int, default=2048)
    parser.add_argument("--rows", type=int, default=0, help="of each table; 0: 1M at dim 16, 100k at dim 64")
    parser.add_argument("--samples", type=int, default=400_000)
    parser.add_argument("--epochs", type=int, default=1)
    parser.add_argument("--batches", type=int, default=0, help="stop this worker after so many; 0: at the end of data")
    parser.add_argument("--warm", type=int, default=20, help="batches before the clock starts")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--data", default="", help="folder to keep the generated data in")
    parser.add_argument("--out", default="", help="also append the JSON line to this file")
    parser.add_argument("--gate", default="", help="train only while this file is there")
    parser.add_argument("--bound", action="store_true", help="the dense network alone")
    args = parser.parse_args()
    args.rows = args.rows or (100_000 if args.dim >= 64 else 1_000_000)
    if args.bound:
        result = bound(args.dim, args.batch_size, args.batches or 100, args.warm)
    else:
        result = train(args)
    line = json.dumps(result)
    print(line, flush=True)
    if args.out:
        with Path(args.out).open("a") as f:
            f.write(line + "\n")


if __name__ == "__main__":
    main()
