"""Holds one batch and its rows, from the pull to the step that consumes them."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from everstep.ids import TableId
from everstep.native import same_ids
from everstep.tables.client import Ticket
from everstep.tables.prefetch import ViewKey
from everstep.tables.routing import BatchRows, TableRows
from everstep.tables.worker_protocol import RangeWork


class Known(NamedTuple):
    """Says where the ids of one view were found to stand. ``ids`` int64 [n]: what they were then."""

    rows: TableRows
    inverse: NDArray[np.int32]
    ids: NDArray[np.int64]

    def shows(self, ids: Tensor) -> bool:
        """Return whether these are the ids still: the script may have written into them."""
        now: NDArray[np.int64] = ids.numpy()
        return same_ids(now if now.ndim <= 2 else now.reshape(-1), self.ids)


class Fetched(NamedTuple):
    """Is one pull of a batch: what was wanted, and the rows that were added for it."""

    wanted: list[tuple[str, list[Tensor]]]
    create: bool
    dense: bool
    added: list[TableRows]


class BatchItem:
    """Is one batch and its rows. ``work`` is None for an evaluation."""

    def __init__(self, work: RangeWork | None, batch: Any, rows: BatchRows) -> None:
        self.work = work
        self.batch = batch
        self.rows = rows
        self.create = False  # it is trained with
        self.found: dict[str, TableRows] = {}  # what was pulled, by table
        self.lookups: dict[tuple[str, ViewKey], Known] = {}
        self.predicted: list[tuple[str, list[Tensor]]] = []
        self.asked: dict[str, set[ViewKey]] = {}
        self.dense: dict[TableId, TableRows] = {}
        self.ticket: Ticket | None = None
        self.fetched: Fetched | None = None  # what the ticket is for

    def __repr__(self) -> str:
        return f"<Item {self.work} {self.rows}>"

    def close(self) -> None:
        """Free the memory, as soon as no ps writes into it any more."""
        self.lookups.clear()
        self.found.clear()
        if self.ticket is None:
            self.rows.close()
        else:
            self.ticket.then(self._free)

    def _free(self) -> None:
        if self.ticket is not None and self.ticket.adrift:
            self.rows.abandon()
        else:
            self.rows.close()
