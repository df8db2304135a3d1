"""Scales rows of lookups down to a largest norm, as ``max_norm`` of torch does, where a job lets rows be changed so."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch

from everstep.api.batch_table import BatchTable
from everstep.api.nn import Lookup
from everstep.api.sparse import TableInfo
from everstep.api.whole_tables import WholeTables
from everstep.errors import ScriptError


class Renorming:
    """Decides whether lookups may change rows, and changes them."""

    def __init__(self, whole: WholeTables) -> None:
        self._put = whole.put
        self.refuses = ""  # why lookups may not change rows here
        self.ahead = False  # rows are pulled ahead, and may lack the step before
        self.keeps_outside: Callable[[], bool] | None = None
        """Whether rows that a lookup outside of a batch has changed may be stored: no worker's step is lost by it."""

    def __repr__(self) -> str:
        return f"<Renorming {self.refuses or 'allowed'}>"

    def check(self, table: str) -> None:
        """Raise ScriptError where lookups of this table may not change its rows."""
        if self.refuses:
            raise ScriptError(f"max_norm of table {table!r} {self.refuses}")

    def renorm(self, info: TableInfo, batch: BatchTable, lookup: Lookup, max_norm: float, norm_type: float) -> None:
        """Scale rows of a lookup down to ``max_norm``, as torch does: each once, and in place. In a batch this is a
        change of rows by hand; outside of one it is kept where the job lets it be."""
        table = info.spec.name
        self.check(table)
        if lookup.table is not None and not batch.renorms and self.ahead:
            raise ScriptError(
                f"max_norm of table {table!r} is given to a function, and rows are pulled ahead: give it to "
                "nn.Embedding, or set EVERSTEP_PREFETCH=0"
            )
        at = np.unique(lookup.inverse)
        if lookup.table is not None:
            batch.used()
            batch.renormed = True
        else:
            lookup.values = lookup.values.copy()
        before = lookup.values[at]
        with torch.no_grad():
            torch.embedding_renorm_(torch.from_numpy(lookup.values), torch.from_numpy(at), max_norm, norm_type)
        if lookup.table is None and self.keeps_outside is not None and self.keeps_outside():
            at = at[(lookup.values[at] != before).any(1)]
            ids = np.empty(len(lookup.values), np.int64)
            ids[lookup.inverse] = lookup.ids
            if len(at):
                self._put(info.spec, ids[at], lookup.values[at], replace=True)
