"""Works out what a script's step applies to rows of tables, and what it makes of them. Pure."""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from everstep.errors import ScriptError
from everstep.ids import TableId
from everstep.model.table import OptimizerSpec, Rate
from everstep.native.row_update import update
from everstep.tables.step_pushes import Owed


class Stepped(NamedTuple):
    """Is what the script's step applies to one table: keys int64 [n], gradients float32 [n, dim] and what it goes
    by."""

    table: TableId
    keys: NDArray[np.int64]
    grads: NDArray[np.float32]
    rate: Rate


class PeekedRows(NamedTuple):
    """Holds rows that exist: keys int64 [n], values float32 [n, dim], optimizer state float32 [n, floats], and whether
    what was asked for is in them, bool [n]."""

    keys: NDArray[np.int64]
    values: NDArray[np.float32]
    states: NDArray[np.float32]
    done: NDArray[np.bool_]


class Ahead(NamedTuple):
    """Holds rows of a table with the steps of an iteration applied. ``keys`` int64 [n] ascending, ``values`` [n,
    dim]."""

    keys: NDArray[np.int64]
    values: NDArray[np.float32]

    @classmethod
    def of(cls, rows: PeekedRows, content: list[Stepped], optimizer: OptimizerSpec) -> Ahead:
        order = np.argsort(rows.keys, kind="stable")
        keys, values, states, done = rows.keys[order], rows.values[order], rows.states[order], rows.done[order]
        for found in content:
            lr = optimizer.lr if found.rate.lr < 0 else found.rate.lr
            twin = optimizer.with_options(found.rate.options)
            at = np.searchsorted(keys, found.keys)
            for i, key, grad in zip(at.tolist(), found.keys.tolist(), found.grads, strict=True):
                if i < len(keys) and keys[i] == key and not done[i]:
                    update(values[i], states[i], grad, twin, lr)
        return cls(keys, values)

    def put(self, keys: NDArray[np.int64], values: NDArray[np.float32]) -> None:
        """Put the rows into ``values`` [m, dim] of ``keys`` [m], in place."""
        if not len(self.keys):
            return
        at = np.minimum(np.searchsorted(self.keys, keys), len(self.keys) - 1)
        here = self.keys[at] == keys
        values[here] = self.values[at[here]]


def in_intervals(owed: Owed, content: list[Stepped]) -> list[tuple[Owed, list[Stepped]]]:
    """Return ``owed`` as intervals in each of which a table is stepped once; what was held back goes with the first.
    Raises ScriptError if it has too few positions."""
    parts: list[list[Stepped]] = [[]]
    for found in content:
        nth = sum(found.table == other.table for part in parts for other in part)
        if nth == len(parts):
            parts.append([])
        parts[nth].append(found)
    last = len(parts) - 1
    if last >= owed.hi - owed.lo:
        raise ScriptError(
            f"a table is stepped {len(parts)} times in one step of {owed.hi - owed.lo} samples: with tables on the ps "
            "there is at most one for each sample; use a larger batch_size"
        )
    ends = [owed.lo + n for n in range(len(parts))] + [owed.hi]
    before = [owed.before, *((),) * last]
    return [
        (replace(owed, lo=lo, hi=hi, before=held), part)
        for lo, hi, held, part in zip(ends, ends[1:], before, parts, strict=False)
    ]
