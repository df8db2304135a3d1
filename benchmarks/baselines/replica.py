"""What every side of the AllReduce benchmarks trains: the same network on the same pictures, and a record of its steps.

Needs torch and numpy alone, so that a baseline's own environment can import it.
"""

from __future__ import annotations

import gzip
import hashlib
import json
import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch
from torch import nn

DATA = Path(__file__).resolve().parents[2] / "examples" / "data" / "fashion_mnist"
HIDDEN = {1: 256, 50: 2320}
"""MB of gradients (float32) -> width of the two hidden layers: 1.08 MB, 50.4 MB."""


def pictures() -> dict[str, np.ndarray]:
    """The sample of Fashion-MNIST in examples/data: ``image`` float32 [2000, 784], ``label`` int64 [2000]."""
    images = gzip.decompress((DATA / "train-images-idx3-ubyte.gz").read_bytes())[16:]
    labels = gzip.decompress((DATA / "train-labels-idx1-ubyte.gz").read_bytes())[8:]
    image = np.frombuffer(images, np.uint8).reshape(-1, 784).astype(np.float32) / 255
    return {"image": image, "label": np.frombuffer(labels, np.uint8).astype(np.int64)}


def network(gradient_mb: int) -> nn.Module:
    hidden = HIDDEN[gradient_mb]
    layers = [nn.Linear(784, hidden), nn.ReLU(), nn.Linear(hidden, hidden), nn.ReLU()]
    if gradient_mb > 1:
        layers += [nn.Linear(hidden, hidden), nn.ReLU()]
    return nn.Sequential(*layers, nn.Linear(hidden, 10))


def optimizer(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)


def batches(rank: int, size: int, batch: int, begin: int = 0) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """This rank's share of endless epochs: cut from tensors in memory, the cheapest loader there is."""
    data = {k: torch.from_numpy(v) for k, v in pictures().items()}
    step, rows = begin, len(data["label"])
    while True:
        lo = (step * size + rank) * batch % (rows - batch)
        yield data["image"][lo : lo + batch], data["label"][lo : lo + batch]
        step += 1


class StepLog:
    """A line a step, ``seconds-since-1970 step note``, in FOLDER/NAME.PID.log: what a kill is measured by."""

    def __init__(self, folder: str, name: str) -> None:
        Path(folder).mkdir(parents=True, exist_ok=True)
        path = Path(folder) / f"{name}.{os.getpid()}.log"
        self._file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT)

    def step(self, number: int, note: str = "-") -> None:
        os.write(self._file, f"{time.time():.6f} {number} {note}\n".encode())


def digest(*states: object) -> str:
    """Of every tensor in nested dicts and lists, by name: equal digests are equal bits."""
    found = hashlib.sha256()

    def take(name: str, value: object) -> None:
        if isinstance(value, torch.Tensor):
            found.update(f"{name}:{value.dtype}:{tuple(value.shape)};".encode())
            found.update(value.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes())
        elif isinstance(value, dict):
            for key in sorted(value, key=str):
                take(f"{name}.{key}", value[key])
        elif isinstance(value, list | tuple):
            for i, item in enumerate(value):
                take(f"{name}.{i}", item)
        else:
            found.update(f"{name}={value!r};".encode())

    for i, state in enumerate(states):
        take(str(i), state)
    return found.hexdigest()[:32]


def say_times(ends: list[float], skip: int = 20) -> None:
    """The last line of a step benchmark: seconds of a step after the first ``skip``; ``p10_s``: the 10th percentile,
    what a step takes where nothing else on the machine disturbs it."""
    times = np.diff(np.array(ends[min(skip, len(ends) // 4) :]))
    found = {"median_s": np.median(times), "p10_s": np.percentile(times, 10), "mean_s": times.mean()}
    print(json.dumps({"steps": len(times), **{name: float(value) for name, value in found.items()}}))
    sys.stdout.flush()
