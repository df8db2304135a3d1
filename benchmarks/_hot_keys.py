"""Has the keys of ``hot_cold``: which partitions are wanted how much, and the best placement that never changes."""

from __future__ import annotations

import functools

import numpy as np
from numpy.typing import NDArray

from everstep.model.table import table_id
from everstep.native import unique_route

PARTITIONS, PS = 64, 4
BATCH, FIELDS, DIM = 128, 64, 16
EXPONENT = 1.2
KEYS = 4000  # of each partition


@functools.cache
def keys_of_partitions() -> NDArray[np.int64]:
    """Return int64 [PARTITIONS, KEYS]: keys of each partition, ascending."""
    everywhere = np.arange(PARTITIONS, dtype=np.int32)
    found: list[list[NDArray[np.int64]]] = [[] for _ in range(PARTITIONS)]
    for begin in range(0, 2 * PARTITIONS * KEYS, 100_000):
        keys = np.arange(begin, begin + 100_000, dtype=np.int64)
        routed, _, counts = unique_route(keys, PARTITIONS, table_id("hot"), everywhere, PARTITIONS)
        ends = np.cumsum(np.asarray(counts))
        for b in range(PARTITIONS):
            found[b].append(np.asarray(routed)[ends[b] - counts[b] : ends[b]].copy())
    return np.stack([np.concatenate(some)[:KEYS] for some in found])


def weights_of(phase: int) -> NDArray[np.float64]:
    """Return float64 [PARTITIONS]: the share of lookups that goes to each partition in this half of the job."""
    ranks = np.random.default_rng(10 + phase).permutation(PARTITIONS)
    weights = 1.0 / (1.0 + ranks) ** EXPONENT
    return np.asarray(weights / weights.sum())


def rows_of(phase: int) -> NDArray[np.float64]:
    """Return float64 [PARTITIONS]: different rows of each partition that a batch asks for, expected."""
    return np.asarray(KEYS * (1.0 - (1.0 - weights_of(phase) / KEYS) ** (BATCH * FIELDS)))


def best_static() -> list[int]:
    """Return the ps of each partition, so that both halves together take least time: the sum of what the slowest ps
    has to do in each. From the largest to the smallest, then changed one by one, and two by two, while that helps."""
    rows = np.stack([rows_of(0), rows_of(1)])

    def slowest(owner: NDArray[np.int64]) -> float:
        return float(sum(np.bincount(owner, rows[phase], PS).max() for phase in (0, 1)))

    owner = np.zeros(PARTITIONS, np.int64)
    load = np.zeros((2, PS))
    for b in np.argsort(-rows.sum(0)):
        tried = [float(np.maximum(load.max(1), load[:, p] + rows[:, b]).sum()) for p in range(PS)]
        owner[b] = int(np.lexsort((load.sum(0), tried))[0])
        load[:, owner[b]] += rows[:, b]
    best, better = slowest(owner), True
    while better:
        better = False
        for b in range(PARTITIONS):
            for other in range(b, PARTITIONS):
                for p in range(PS) if other == b else (int(owner[other]),):
                    trial = owner.copy()
                    trial[b], trial[other] = p, (p if other == b else owner[b])
                    if (value := slowest(trial)) < best - 1e-9:
                        owner, best, better = trial, value, True
    return [int(p) for p in owner]
