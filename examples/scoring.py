"""What the examples measure with: the exact AUC, and logistic regression to be better than."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from everstep.data.loader import Loader, TensorBatch


def auc(scores: NDArray[np.float32], labels: NDArray[np.float32]) -> float:
    """Exact area under the ROC curve: the chance that a positive scores above a negative, ties half. NaN without both.

    ``scores``, ``labels``: float [n]; a label above 0.5 is positive.
    """
    positive = labels > 0.5
    _, place, count = np.unique(scores, return_inverse=True, return_counts=True)
    rank = np.cumsum(count) - (count - 1) / 2  # mean rank of each distinct score, from 1
    p = int(positive.sum())
    n = len(labels) - p
    return float((rank[place][positive].sum() - p * (p + 1) / 2) / (p * n)) if p and n else float("nan")


def score(model: nn.Module, batches: Iterator[TensorBatch]) -> float:
    """AUC of a model whose output for a batch is one logit a row."""
    scores, labels = [], []
    with torch.no_grad():
        for batch in batches:
            scores.append(model(batch).numpy())
            labels.append(batch["label"].numpy())
    return auc(np.concatenate(scores), np.concatenate(labels))


class LogisticRegression(nn.Module):
    """One weight per key of ``batch["cat"]`` (hashed to 2**18), one per value of ``batch["dense"]``."""

    def __init__(self, dense: int) -> None:
        super().__init__()
        self.weight = nn.EmbeddingBag(1 << 18, 1, mode="sum", sparse=True)
        nn.init.zeros_(self.weight.weight)
        self.dense = nn.Linear(dense, 1)

    def forward(self, batch: TensorBatch) -> torch.Tensor:
        out = self.weight(batch["cat"] % (1 << 18)) + self.dense(batch["dense"])
        return out.squeeze(1)  # type: ignore[no-any-return]


def logistic_auc(loader: Loader, epochs: int = 1, lr: float = 0.03) -> float:
    """Test AUC of logistic regression on the same features and rows: plain PyTorch, in this process, in seconds."""
    sample = loader.read(0, 0, min(loader.samples, 100_000))
    model = LogisticRegression(sample["dense"].shape[1])
    # Begin at the mean: with rare labels the weights of frequent keys would else spend the epoch going there.
    nn.init.constant_(model.dense.bias, float(torch.logit(sample["label"].mean(), eps=1e-6)))
    sparse_opt = torch.optim.SparseAdam(list(model.weight.parameters()), lr=lr)
    dense_opt = torch.optim.Adam(model.dense.parameters(), lr=lr)
    for epoch in range(epochs):
        for lo in range(0, loader.samples, loader.batch_size):
            batch = loader.read(epoch, lo, min(lo + loader.batch_size, loader.samples))
            loss = nn.functional.binary_cross_entropy_with_logits(model(batch), batch["label"])
            sparse_opt.zero_grad()
            dense_opt.zero_grad()
            loss.backward()  # type: ignore[no-untyped-call]
            sparse_opt.step()
            dense_opt.step()
    return score(model, loader.eval_batches())
