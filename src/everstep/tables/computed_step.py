"""Is a step that a worker of mode ps has computed: the batches that it consumes, and the gradients that are pushed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from everstep.ids import LeaseNo, TableId
from everstep.model.table import Rate, TableSpec
from everstep.net.messages import RowsPart
from everstep.tables.routing import BatchRows, HeldRows, Router, TableRows, parts_by_ps
from everstep.tables.worker_protocol import RangeWork

StepKey = tuple[LeaseNo, int, int]
"""Names a step: lease, its life and the first sample of the first work."""

Consumed = tuple[RangeWork, bool]
"""A batch that a step consumes, and whether something was learnt from it."""


def key_of(work: RangeWork) -> StepKey:
    """Return the key of the step whose first work is ``work``."""
    return work.lease.no, work.life, work.lo


def samples_of(works: Sequence[Consumed]) -> int:
    """Return the number of samples of ``works``."""
    return sum(work.hi - work.lo for work, _ in works)


def learnt_samples(works: Sequence[Consumed]) -> int:
    """Return the number of those samples of ``works`` from which something was learnt."""
    return sum(work.hi - work.lo for work, learnt in works if learnt)


class ComputedStep(NamedTuple):
    """Is a computed step. ``payload``: None where there is nothing to apply. ``counted``: samples that it has learnt
    from (sync: workers' steps are weighed by them). ``skipped``: its gradient was not finite."""

    works: tuple[Consumed, ...]
    payload: StepPayload | None
    counted: int = 0
    skipped: bool = False

    @property
    def key(self) -> StepKey:
        return key_of(self.works[0][0])

    @property
    def samples(self) -> int:
        return samples_of(self.works)


class StepPayload(HeldRows):
    """Holds the gradients of one push. They are kept until every ps has acknowledged them and no link holds them any
    more."""

    __slots__ = ("bad", "parts", "rates", "router", "seen", "step", "tables")

    def __init__(
        self, tables: list[TableRows], holders: list[BatchRows], router: Router, rates: dict[TableId, Rate]
    ) -> None:
        """Take ``tables``: rows grouped by ``router``; ``holders``: their memory, which ``settle`` frees."""
        super().__init__(holders)
        self.tables, self.router, self.rates = tables, router, rates
        self.parts: list[list[RowsPart]] = []  # by position of the ps, once ``route`` was called
        self.step = -1  # sync: the step of which this is one push of several
        self.bad = ""  # the table whose gradient is not finite
        self.seen: list[TableRows] = []  # of ``tables``: those that lie where the script sees its gradient

    def route(self, router: Router) -> None:
        """Sort the gradients by ``router``, if they are not."""
        if self.router.version == router.version and self.parts:
            return
        for i, rows in enumerate(self.tables):
            if rows.router.version != router.version:
                batch = BatchRows(rows.batch.memory, router)
                self.tables[i] = put_rows(batch, rows.spec, rows.keys, rows.grads)
                self.hold(batch)
        self.router = router
        self.parts = parts_by_ps(self.tables, len(router.slots), grads=True, rates=self.rates)

    def weigh(self, weight: float) -> None:
        """Scale the gradients, before they are sent. What the script sees stays as it is: it may step with it again."""
        for i, rows in enumerate(self.tables):
            own = rows
            if any(rows is seen for seen in self.seen):
                batch = BatchRows(rows.batch.memory, rows.router)
                self.hold(batch)
                (own,) = batch.add([(rows.spec, rows.keys, rows.counts)], values=False)
                own.touched = True
                self.tables[i] = own
                self.parts = []
            np.multiply(rows.grads, np.float32(weight), out=own.grads)
        self.seen = []


def put_rows(batch: BatchRows, spec: TableSpec, keys: NDArray[np.int64], grads: NDArray[np.float32]) -> TableRows:
    """Copy gradients (float32 [n, dim]) of ``keys`` (int64 [n]) into ``batch``, from where they can be pushed."""
    routed, inverse, counts = batch.router.route(spec.id, keys)
    (rows,) = batch.add([(spec, routed, counts)], values=False)
    rows.grads[inverse] = grads
    rows.touched = True
    return rows
