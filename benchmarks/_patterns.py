"""Patterns of slowness as words that can be handed to another process (JSON), and recorded ones."""

from __future__ import annotations

import csv
import gzip
from pathlib import Path
from statistics import median
from typing import Any

from everstep.sim.stragglers import ConstantSlowness, Pattern, Recorded, Spells

TRACES = Path(__file__).parent / "traces" / "alibaba-pai-minibatch"


def from_words(words: dict[str, Any]) -> Pattern:
    """``{"kind": "constant", "s", "begins"}``, ``{"kind": "spells", "s", "spell", "gap", "seed"}`` or
    ``{"kind": "recorded", "job", "width", "begin", "workers"}``; times in seconds."""
    if words["kind"] == "constant":
        return ConstantSlowness(words["s"], words.get("begins", 0.0))
    if words["kind"] == "spells":
        return Spells(words["s"], words["spell"], words["gap"], words["seed"])
    return recorded(words["job"], words["width"], words.get("begin", 0), words.get("workers"))


def recorded(job: int, width: float = 1.0, begin: int = 0, workers: list[int] | None = None) -> Recorded:
    """Factors of the ten workers of a real job, from its ``begin``-th batch on, ``width`` of time a batch: each
    worker's times over the median of the fastest half of workers. ``workers``: which of them; None: all."""
    by_worker: dict[int, list[float]] = {}
    with gzip.open(TRACES / f"job_{job}_norm.csv.gz", "rt") as file:
        for row in csv.DictReader(file):
            by_worker.setdefault(int(row["worker"]), []).append(float(row["batch_time_norm"]))
    columns = [by_worker[worker] for worker in sorted(by_worker)]
    healthy = median(sorted(map(median, columns))[: len(columns) // 2])
    rows = [[max(0.05, value / healthy) for value in row] for row in zip(*columns, strict=False)][begin:]
    return Recorded([[row[k] for k in workers] for row in rows] if workers is not None else rows, width)
