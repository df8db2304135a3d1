"""Flights that left New York in 2013: will this one arrive more than 15 minutes late?

12 plain fields and 4 crosses make 16 fields and about 62,000 keys. Nothing that is known only after departure is used.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import torch

from everstep.data.keys import cross, field_keys
from everstep.data.loader import TensorBatch

PATH = Path(__file__).parent / "data" / "flights.parquet"
FIELDS = (
    *("month", "day", "hour", "minute", "sched_dep_time", "sched_arr_time"),
    *("carrier", "flight", "tailnum", "origin", "dest", "distance"),
)
COLUMNS = {"plain": FIELDS, "delay": "arr_delay"}
DTYPES = {"plain": "hash"}  # text becomes keys
N_DENSE, N_FIELDS = 4, len(FIELDS) + 4


def features(batch: TensorBatch) -> TensorBatch:
    """``dense`` float32 [n, 4], ``cat`` int64 [n, 16] (keys for one shared table), ``label`` float32 [n]."""
    plain = batch["plain"]
    month, day, hour, minute, _, arrival, carrier, _, _, origin, dest, distance = plain.unbind(1)
    date = month * 32 + day
    crosses = (cross(date, hour, origin), cross(date, dest), cross(date, origin), cross(carrier, hour))
    dense = torch.stack(
        [
            (hour * 60 + minute) / 1440,
            (arrival // 100 * 60 + arrival % 100) / 1440,
            torch.log(distance.float()) - 6.5,
            date / 416,
        ],
        dim=1,
    ).float()
    return {
        "dense": dense,
        "cat": field_keys(torch.cat([plain, torch.stack(crosses, dim=1)], dim=1)),
        "label": (batch["delay"] > 15).float(),
    }


def source(rows: int | None = None) -> Any:
    """The file, or a table of its first ``rows`` rows for a quick try."""
    if rows is None:
        return str(PATH)
    return pa.Table.from_batches([next(pq.ParquetFile(PATH).iter_batches(rows))])  # (the file is one row group)


def options(about: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=about)
    parser.add_argument("--epochs", type=int, default=1)
    parser.add_argument("--rows", type=int, help="use the first ROWS rows only")
    parser.add_argument("--batch-size", type=int, default=1024)
    return parser.parse_args()
