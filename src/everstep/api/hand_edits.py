"""Stores values that a script changes by itself, and not by an optimizer, on the ps, or refuses them. Mode ps."""

from __future__ import annotations

from collections.abc import Callable

from everstep.api.batch_table import BatchTable
from everstep.api.dense import FlatGroup
from everstep.api.loop_ending import LoopEnding
from everstep.api.ps_buffers import BufferGroup, ModelBuffers
from everstep.api.tables import TableSet
from everstep.errors import ScriptError
from everstep.tables.step_admission import StepAdmission


class HandEdits:
    """See the top of this file. They are kept where no other worker's steps can be lost by that: alone, as the only
    worker, and in consistency sync, where all workers make a change between the same two steps.

    ``behind``: the values in hand were pulled ahead, and may lack a step that is pushed."""

    def __init__(
        self,
        tables: TableSet,
        buffers: ModelBuffers,
        admission: StepAdmission,
        ending: LoopEnding,
        *,
        alone: bool,
        only: bool,
        before_store: Callable[[], None],
    ) -> None:
        """Take ``only``: no other worker steps. ``before_store``: sees to it that a change can be stored."""
        self._tables, self._buffers, self._ending = tables, buffers, ending
        self._alone, self._only, self._sync = alone, only, admission.sync
        self._before_store = before_store
        self.behind = False

    def __repr__(self) -> str:
        return f"<HandEdits {'kept' if self._kept else 'refused'}>"

    @property
    def _kept(self) -> bool:
        return self._only or (self._sync and self._tables.current is not None)

    def keep(self) -> None:
        """Store what the script has changed. Raises ScriptError where other workers' steps could be lost by that."""
        if self._ending.over:
            return
        self._buffers.check()
        stored = False
        for group in self._tables.dense:
            if isinstance(group, BufferGroup):
                if self._alone and group.changed():
                    self._tables.whole.put(group.spec, None, group.store(), replace=True)
                continue  # else it goes with the next step
            if group.changed():
                self._store_group(group, stored)
                stored = True
        if self._tables.current is None:
            return
        for name, table in self._tables.batches.items():
            if len(table.keys) and (table.changed() or self._renormed(table)):
                self._store_rows(name, table, stored)
                stored = True

    def _store_group(self, group: FlatGroup, stored: bool) -> None:
        if not self._kept:
            raise self._refused(group)
        self._check_fresh("parameters")
        if not stored:
            self._before_store()
        self._tables.whole.put(group.spec, None, group.initial(), replace=True)
        group.seen()

    def _refused(self, group: FlatGroup) -> ScriptError:
        item = self._tables.current
        if item is None:
            return ScriptError(
                "the script changed parameters outside of the loop (an average, say, was copied into the "
                "model), and job.eval, job.steps or state_dict would overwrite them with those of the ps: "
                "evaluate with model.eval() and torch.no_grad() instead of job.eval, and put the old values "
                "back afterwards, or change them in the loop and run with --consistency sync"
            )
        names = group.changed_names(item.dense.get(group.spec.id))
        return ScriptError(
            f"the script changed parameter {names[0] if names else group.spec.name!r} in place (not through an "
            "optimizer): with several workers and no common step, steps of the others would be lost by that; "
            "run with --consistency sync or --mode allreduce, or put the change into the loss"
        )

    def _store_rows(self, name: str, table: BatchTable, stored: bool) -> None:
        if table.renormed and not self._kept:
            raise ScriptError(
                f"max_norm of table {name!r} changes rows in forward: with several workers and no common step, "
                "steps of the others would be lost by that; run with --consistency sync, with --mode allreduce "
                "without ps, or leave it out"
            )
        if not self._kept:
            raise ScriptError(
                f"the script changed rows of table {name!r} in place (not through an optimizer): with several "
                "workers and no common step, steps of the others would be lost by that; run with --consistency "
                "sync, with --mode allreduce without ps, or put the change into the loss"
            )
        self._check_fresh(f"rows of table {name!r}")
        if not stored:
            self._before_store()
        self._tables.whole.put(self._tables.infos[name].spec, table.keys, table.values, replace=True)
        table.seen()
        table.renormed = False

    def _check_fresh(self, what: str) -> None:
        """Refuse to store values that lack a step over those that have it. Raises ScriptError."""
        if self.behind and self._tables.current is not None:
            raise ScriptError(
                f"the script changed {what} in place before opt.step(), and their values were pulled ahead: the step "
                "of the batch before would be lost by that; change them behind opt.step(), or set EVERSTEP_PREFETCH=0"
            )

    def _renormed(self, table: BatchTable) -> bool:
        """Sync: each worker's lookups change rows of its own; all take the step that lies before such changes."""
        return table.renormed and self._sync and not self._alone
