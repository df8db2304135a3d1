"""Records what the script has stepped tables with in one iteration, and rows as those steps leave them. Mode allreduce.

The ps do not have the iteration's steps yet, or not all of them. Rows that the script uses behind a step are asked for
with their optimizer state, and this member computes itself what the steps make of them.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from everstep.api.batch_table import BatchTable
from everstep.api.tables import TableSet
from everstep.errors import ScriptError
from everstep.ids import ShardKey
from everstep.tables.stepped_rows import Ahead, Stepped


class IterationSteps:
    """See the top of this file. ``content``: of the steps of this iteration; ``last``: the group's step that the rows
    in hand are of: number, shard and its end."""

    def __init__(self, tables: TableSet) -> None:
        self._tables = tables
        self._peek = tables.whole.peek
        self.content: list[Stepped] = []
        self.last: tuple[int, ShardKey, int] | None = None
        self._stale: set[str] = set()  # tables that were stepped since their rows were shown
        self._ahead: dict[str, Ahead] = {}
        self._edited = False  # the script ends with an error of ours
        tables.fresh = self._apply

    def __repr__(self) -> str:
        return f"<IterationSteps {len(self.content)} of {sorted(self._stale)}>"

    def check_edits(self) -> None:
        """Check the rows in hand, which go. Raises ScriptError if the script has changed them by hand: that would be
        lost."""
        if not self._edited:
            for table in self._tables.batches.values():
                self.check_edit(table)

    def check_edit(self, table: BatchTable) -> None:
        """Raises ScriptError if the script has changed the rows in hand of ``table`` by hand."""
        if table.name not in self._stale and table.changed():
            self._edited = True
            raise ScriptError(
                f"the script has changed rows of table {table.name!r} by hand (clamp_, copy_, mul_, ...): in mode "
                "allreduce only optimizers change a table on the ps; keep the embedding in the dense part, "
                "job.sparse(model, only=...), or run with --mode ps"
            )

    def add(self, name: str, stepped: Stepped) -> None:
        """The script has stepped table ``name``."""
        self._stale.add(name)
        self._tables.batches[name].stale = self._make_fresh
        self._ahead.pop(name, None)
        self.content.append(stepped)

    def forget(self) -> None:
        """The iteration is over, or does not count."""
        self.content = []
        self._ahead.clear()
        for name in self._stale:
            self._tables.batches[name].stale = None
        self._stale.clear()

    def _make_fresh(self) -> None:
        """The script is about to use rows: those in hand that it has stepped are to be as they are now."""
        stale, self._stale = self._stale, set()
        for name in stale:
            table = self._tables.batches[name]
            table.stale = None
            if len(table.keys):
                values = table.values.copy()
                self._apply(name, table.keys, values)
                table.renew(values)
                table.seen()

    def _apply(self, name: str, keys: NDArray[np.int64], values: NDArray[np.float32]) -> None:
        """Make of rows as the ps has them what the steps of this iteration make of them."""
        if not self.content or self.last is None:
            return
        spec, (_, shard, end) = self._tables.infos[name].spec, self.last
        content = [found for found in self.content if found.table == spec.id]
        if not content:
            return
        ahead = self._ahead.get(name)
        if ahead is None:
            wanted = np.unique(np.concatenate([found.keys for found in content]))
            rows = self._peek(spec, wanted, shard, end)
            ahead = self._ahead[name] = Ahead.of(rows, content, spec.optimizer)
        ahead.put(keys, values)
