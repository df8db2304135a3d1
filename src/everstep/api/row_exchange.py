"""Sums up the gradients of rows that the members of a group have in one step."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch

from everstep.allreduce.gradient_buckets import join_digests
from everstep.allreduce.state import bit_sum
from everstep.allreduce.step import Collective
from everstep.api.carried_rows import CarriedRows
from everstep.api.row_entries import Entry, pack, unpack
from everstep.api.tables import TableSet
from everstep.errors import ScriptError
from everstep.native import isfinite_all

_MEMBER_BYTES = 1 << 30  # of one member's gradients of rows in one step


class Exchanged(NamedTuple):
    """Is what all members said and sent. ``owes``: the first step that a ps may lack; ``version``: of the map that all
    of them have, -1: they have different ones."""

    digest: int
    finite: bool
    owes: int
    version: int


class RowExchange:
    """Collects what this member's micro-batches leave in the tables; gives it to all members, and takes theirs."""

    def __init__(self, tables: TableSet, carried: CarriedRows) -> None:
        self._tables, self._carried = tables, carried
        self._entries: list[Entry] = []

    def collect(self, weight: float) -> None:
        """Take the gradients that a micro-batch has left, times ``weight``; 0: they do not count."""
        for name, table in self._tables.batches.items():
            found = table.take_local()
            if found is not None and weight:
                grads = found.grads if weight == 1.0 else found.grads * np.float32(weight)
                self._entries.append((self._tables.infos[name].spec.id, found.keys, grads))

    def forget(self) -> None:
        """Drop what was collected and not exchanged."""
        self._entries = []

    def exchange(self, collective: Collective, owes: int, version: int) -> Exchanged:
        """Put the sum of what all members collected, in order of rank, where the step is taken from. Raises
        CollectiveError; ScriptError: this member has too much."""
        entries, self._entries = self._entries, []
        finite = all(isfinite_all(grads) for _, _, grads in entries)
        mine = pack(entries if finite else [])
        if len(mine) > _MEMBER_BYTES:
            raise ScriptError(
                f"the gradients of rows of one worker in one step are {len(mine) >> 20} MiB, over "
                f"{_MEMBER_BYTES >> 20}: use a smaller batch_size"
            )
        words = collective.gather([len(mine), version, owes, int(finite)])
        padded = torch.zeros(max(word[0] for word in words), dtype=torch.uint8)
        padded[: len(mine)] = torch.from_numpy(mine)
        blobs = collective.exchange(padded)
        tables = self._carried.by_id()
        for blob in blobs:
            for table, keys, grads in unpack(blob):
                tables[table].arrive(keys, grads)
        digest = join_digests([bit_sum(blob) for blob in blobs])
        agreed = version if all(word[1] == version for word in words) else -1
        return Exchanged(digest, all(word[3] for word in words), min(word[2] for word in words), agreed)
