"""Fashion-MNIST: 28 x 28 grey pictures of ten kinds of clothes, in the files it is published in (gzipped IDX)."""

from __future__ import annotations

import argparse
import gzip
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

SAMPLE = Path(__file__).parent / "data" / "fashion_mnist"
"""The first 2,000 training and 500 test pictures."""
HOW = "the whole set: apt-get install dataset-fashion-mnist, then --data /usr/share/datasets/fashion-mnist"
KINDS = 10


def read(folder: Path, which: str) -> dict[str, NDArray[np.float32]]:
    """``which``: "train" or "t10k". ``image`` float32 [n, 1, 28, 28] in about -1..1, ``label`` float32 [n] (0..9)."""
    images = _idx(folder / f"{which}-images-idx3-ubyte.gz", (28, 28))
    labels = _idx(folder / f"{which}-labels-idx1-ubyte.gz", ())
    if len(images) != len(labels):
        raise SystemExit(f"{folder}: {len(images)} pictures but {len(labels)} labels in {which}-*: get {HOW}")
    return {"image": (images[:, None].astype(np.float32) - 73) / 90, "label": labels.astype(np.float32)}


def _idx(path: Path, row: tuple[int, ...]) -> NDArray[np.uint8]:
    """An IDX file of bytes: magic number, sizes as big-endian int32, values."""
    try:
        with gzip.open(path) as file:
            raw = file.read(200_000_000)
    except (OSError, EOFError) as error:
        raise SystemExit(f"{path}: {error}: get {HOW}") from None
    axes = 1 + len(row)
    sizes = np.frombuffer(raw, ">i4", 1 + axes)
    values = np.frombuffer(raw, np.uint8, offset=4 * (1 + axes))
    shape = tuple(int(n) for n in sizes[1:])
    if sizes[0] != 0x0800 + axes or shape[1:] != row or values.size != np.prod(shape):
        raise SystemExit(f"{path} is not the IDX file that its name says: get {HOW}")
    return values.reshape(shape)


def nearest_mean(train: dict[str, NDArray[np.float32]], test: dict[str, NDArray[np.float32]]) -> float:
    """Accuracy of taking the kind whose mean picture is nearest: what a model has to beat."""
    means = torch.stack([torch.from_numpy(train["image"][train["label"] == k]).mean(0).flatten() for k in range(KINDS)])
    nearest = torch.cdist(torch.from_numpy(test["image"]).flatten(1), means).argmin(1)
    return float((nearest.numpy() == test["label"]).mean())


def options(about: str | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=about)
    parser.add_argument("--data", type=Path, default=SAMPLE, help="folder of the four files (default: a small sample)")
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--batch-size", type=int, default=32, help="of each worker")
    parser.add_argument("--lr", type=float, default=2e-3)
    return parser.parse_args()
