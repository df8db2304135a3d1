"""Holds gradients of rows that wait for a step, and the ranges that they are of (accumulation). Mode allreduce.

They are a part of the training state: all members carry the same, newcomers copy it, checkpoints have it.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import torch

from everstep.allreduce.step import Collective
from everstep.api.batch_table import BatchTable
from everstep.api.row_entries import Entry, pack, unpack
from everstep.api.tables import TableSet
from everstep.errors import CheckpointError
from everstep.ids import ShardKey, TableId
from everstep.tables.step_pushes import HeldBack, Owed, Range


class CarriedRows:
    """See the top of this file. ``held_back``: ranges of committed steps that no step of a table has consumed;
    ``consumed``: those that this iteration's first step has, None: there was none."""

    def __init__(self, tables: TableSet) -> None:
        self._tables = tables
        self.held_back = HeldBack()
        self._drops: dict[str, int] = {}  # of the tables that have gradients of these ranges
        self.consumed: tuple[Range, ...] | None = None
        self._saved: dict[str, Any] = {}  # the gradients that an iteration began with
        self._saved_back: tuple[tuple[Range, ...], dict[str, int]] = (), {}  # with which the iteration began
        self._backwards = 0  # gradients that had come before it

    def __repr__(self) -> str:
        return f"<CarriedRows {self.held_back}>"

    # ------------------------------------------------------------ iterations

    def begin_iteration(self) -> None:
        """Remember all, in case that the iteration does not count."""
        self._saved = {name: table.save() for name, table in self._tables.batches.items()}
        self._saved_back = tuple(self.held_back.ranges), dict(self._drops)
        self._backwards = self._count_backwards()

    def put_back(self) -> None:
        """The iteration does not count, or not yet: its gradients, and what the script did to those of before."""
        for name, saved in self._saved.items():
            self._tables.batches[name].restore(saved)
        self.held_back, self._drops = HeldBack(self._saved_back[0]), dict(self._saved_back[1])
        self.consumed = None

    def consume(self) -> None:
        """The iteration's first step has the gradients of all that was held back."""
        if self.consumed is None:
            self.consumed = self.take()

    @property
    def consuming(self) -> tuple[Range, ...]:
        """What a step of this iteration has consumed, or would."""
        return self.consumed or tuple(self.held_back.ranges)

    def take_consumed(self) -> tuple[Range, ...]:
        """Return what the iteration's steps have consumed, which is the caller's now."""
        before, self.consumed = self.consumed or (), None
        return before

    def take(self) -> tuple[Range, ...]:
        """Return all that is held back, which is the caller's now."""
        if self._was_zeroed():
            self.held_back.zeroed()
        self._drops = {}
        return self.held_back.take()

    def hold_back(self, owed: Owed) -> bool:
        """An iteration is over without a step of a table. Whether its range is held back: False, where no gradients
        wait for a step."""
        if self.held_back.ranges and self._was_zeroed():
            self.held_back.zeroed()
        waiting = {name: table.drops for name, table in self._tables.batches.items() if table.waits}
        if not waiting or (owed.skipped and not self.held_back.ranges):
            return False
        learnt = not owed.skipped and self._backwards != self._count_backwards()
        self.held_back.add(Range(owed.shard, owed.lo, owed.hi, learnt))
        self._drops = waiting
        return True

    def _was_zeroed(self) -> bool:
        """Return whether the script has dropped the gradients of what is held back."""
        return all(self._tables.batches[name].drops != drops for name, drops in self._drops.items())

    def _count_backwards(self) -> int:
        return sum(table.backwards for table in self._tables.batches.values())

    # ------------------------------------------------------------ other members

    def share(self, collective: Collective, carries: list[int]) -> None:
        """Send gradients that are accumulated over steps to newcomers, from the first member that has them."""
        entries: list[Entry] = []
        for name, table in self._tables.batches.items():
            found = table.take() if carries[collective.rank] else None
            if found is not None:
                entries.append((self._tables.infos[name].spec.id, found.keys, found.grads))
        mine = pack(entries)
        size = max(row[0] for row in collective.gather([len(mine)]))
        padded = torch.zeros(size, dtype=torch.uint8)
        padded[: len(mine)] = torch.from_numpy(mine)
        blobs = collective.exchange(padded)
        if not carries[collective.rank]:
            for of, keys, grads in unpack(blobs[carries.index(1)]):
                self.by_id()[of].arrive(keys.copy(), grads.copy())

    def by_id(self) -> dict[TableId, BatchTable]:
        """Return the tables of the script."""
        return {self._tables.infos[name].spec.id: table for name, table in self._tables.batches.items()}

    # ------------------------------------------------------------ a part of the training state

    def state_dict(self) -> dict[str, Any]:
        """Return, between two steps, gradients that wait for a step, and of which ranges; {}: there are none."""
        if not self.held_back.ranges:
            return {}
        kept = {name: (table.kept(), table.waits) for name, table in self._tables.batches.items()}
        return {
            "ranges": [[r.shard, r.lo, r.hi, r.learnt] for r in self.held_back.ranges],
            "zeroed": self._was_zeroed(),
            "tables": {name: [*found, waits] for name, (found, waits) in kept.items() if found is not None},
        }

    @property
    def begin(self) -> tuple[int, int]:
        """Return shard and position from which on ranges are held back; (-1, 0): there are none."""
        ranges = self.held_back.ranges
        return (ranges[0].shard, ranges[0].lo) if ranges else (-1, 0)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load what ``state_dict`` gave at another member, or before. Raises CheckpointError."""
        if not state and not self.held_back.ranges:
            return
        for table in self._tables.batches.values():
            table.zero()
        try:
            for name, (keys, grads, waits) in state.get("tables", {}).items():
                self._tables.batches[name].put_kept(keys, grads, waits)
            self.held_back = HeldBack(
                [Range(ShardKey(s), lo, hi, learnt) for s, lo, hi, learnt in state.get("ranges", [])]
            )
        except (KeyError, TypeError, ValueError) as error:
            raise CheckpointError(
                f"the state has gradients of a table that this script does not have: {error}"
            ) from None
        waiting = {name: table.drops for name, table in self._tables.batches.items() if table.waits}
        self._drops = {name: -1 if state["zeroed"] else drops for name, drops in waiting.items()} if state else {}


def left_out(ranges: Iterable[Range]) -> tuple[Range, ...]:
    """Return ``ranges``, of which nothing is learnt."""
    return tuple(replace(r, learnt=False) for r in ranges)
