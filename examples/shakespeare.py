"""Shakespeare's plays, letter by letter: 1,115,394 characters of 65 kinds."""

from __future__ import annotations

import argparse
import gzip
import hashlib
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

PATH = Path(__file__).parent / "data" / "tinyshakespeare.txt.gz"


def letters() -> tuple[NDArray[np.int64], str]:
    """The text as numbers (int64 [n]), and the character of each number."""
    text = gzip.decompress(PATH.read_bytes()).decode("ascii")
    alphabet = "".join(sorted(set(text)))
    table = np.zeros(128, np.int64)
    table[[ord(c) for c in alphabet]] = np.arange(len(alphabet))
    return table[np.frombuffer(text.encode("ascii"), np.uint8)], alphabet


def windows(text: NDArray[np.int64], length: int) -> NDArray[np.int64]:
    """Pieces of ``length`` characters and the one that follows, one after the other: int64 [n, length + 1]."""
    n = (len(text) - 1) // length
    return np.stack([text[i * length : (i + 1) * length + 1] for i in range(n)])


def bigram_loss(train: NDArray[np.int64], test: NDArray[np.int64], kinds: int) -> float:
    """Cross entropy (nats a character) of guessing from the last character alone: what a model has to beat."""
    counts = np.ones((kinds, kinds))
    np.add.at(counts, (train[:-1], train[1:]), 1)
    chance = counts / counts.sum(1, keepdims=True)
    return float(-np.log(chance[test[:-1], test[1:]]).mean())


def options(about: str | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=about)
    parser.add_argument("--epochs", type=int, default=1)
    parser.add_argument("--rows", type=int, help="train on the first ROWS windows only")
    parser.add_argument("--batch-size", type=int, default=32, help="windows of each worker")
    parser.add_argument("--length", type=int, default=64, help="characters of a window")
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--dropout", type=float, default=0.0)
    parser.add_argument("--lr", type=float, default=3e-3)
    parser.add_argument("--digest", action="store_true", help="every worker prints a digest of its final weights")
    return parser.parse_args()


def digest(model: torch.nn.Module) -> str:
    """Of all weights, bit for bit; of a sharded model, all processes of a worker have to ask."""
    found = hashlib.sha256()
    for name, value in model.state_dict().items():
        value = value.full_tensor() if hasattr(value, "full_tensor") else value
        found.update(name.encode() + value.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes())
    return found.hexdigest()[:32]


def mean_loss(model: torch.nn.Module, rows: NDArray[np.int64], batch: int = 256) -> float:
    """Cross entropy of ``model`` over all windows ``rows``, nats a character."""
    total = 0.0
    for i in range(0, len(rows), batch):
        piece = torch.from_numpy(rows[i : i + batch])
        logits = model(piece[:, :-1])
        total += float(torch.nn.functional.cross_entropy(logits.flatten(0, 1), piece[:, 1:].flatten())) * len(piece)
    return total / len(rows)
