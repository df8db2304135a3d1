"""Holds the tables of a job in mode allreduce: rows on the ps, their gradients summed up by the group.

In a step every member pulls the rows of its micro-batches, as they are after all steps before; the gradients of all
members go to all of them, as the dense ones do, and are part of the vote. Their sum, in order of position, is pushed
once the step is known to be committed by everybody (``tables.step_pushes`` has the rules): each ps has one member that
pushes to it, and the others keep what it needs to take over.

The script may use rows behind its step, in the same iteration: an evaluation, a second pass of a GAN. Then the step is
not at the ps, or not at all of them. This member asks for the rows with their optimizer state, and computes itself what
the step makes of them; each answer says whether the ps has the step already.

All of this is on the script's thread. ``GroupPushDriver`` pushes, and meets other threads; ``CarriedRows`` has what
waits for a step; ``IterationSteps`` has what the script stepped with and sees behind it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from everstep import faultpoints
from everstep.allreduce.collective import CollectiveError
from everstep.allreduce.step import Collective, GroupWork, StepAttempt, VoteOutcome
from everstep.api.batch_item import BatchItem
from everstep.api.carried_rows import CarriedRows, left_out
from everstep.api.firing import TableFiring
from everstep.api.group_push_driver import AGAIN_S, GAP_S, GroupPushDriver
from everstep.api.iteration_steps import IterationSteps
from everstep.api.listeners import WorkerRuntime
from everstep.api.row_exchange import RowExchange
from everstep.api.tables import TableSet
from everstep.errors import EverstepError, InternalError, ScriptError
from everstep.ids import LeaseNo, ShardKey
from everstep.model.group import Group, Position
from everstep.model.placement import Placement
from everstep.model.saved_optimizer import NO_STATE
from everstep.native import isfinite_all
from everstep.policies.step_split import StepCut
from everstep.tables.step_pushes import Owed, table_shard
from everstep.tables.stepped_rows import Stepped

_NO_RENORM = (
    "changes rows in forward, and in mode allreduce only optimizers change a table on the ps: leave it out, "
    "keep the embedding in the dense part, job.sparse(model, only=...), or run with --mode ps"
)


class GroupTables:
    """See the top of this file, and ``allreduce.step.StepTables``. ``carried``: gradients that wait for a step."""

    def __init__(self, runtime: WorkerRuntime, tables: TableSet) -> None:
        self.tables = tables
        self._driver = GroupPushDriver(runtime, tables)
        self._steps = IterationSteps(tables)
        self.carried = CarriedRows(tables)
        self._item: BatchItem | None = None
        self._exchange = RowExchange(tables, self.carried)
        self._to_hold: Owed | None = None
        self._agreed = -1  # the map that everybody had at the exchange; -1: they had different ones
        self._barrier: GroupWork | None = None
        self._surveyed: tuple[Collective | None, int, int] = (None, 0, 0)  # in which group, dataset and epoch
        self._redo = False  # what is in hand will be done again
        self._lineage = 0
        self._stop = 0
        self.pushed = 0
        self.scale: Callable[[], float] = lambda: 1.0
        self.firing = TableFiring(tables)
        tables.all_since = True
        tables.renorming.refuses = _NO_RENORM

    def __repr__(self) -> str:
        return f"<GroupTables {self._driver.pushes}>"

    # ------------------------------------------------------------ from other threads

    def placed(self, placement: Placement) -> None:
        self._driver.placed(placement)

    def fail(self, error: EverstepError) -> None:
        """End whatever waits."""
        self._driver.fail(error)

    # ------------------------------------------------------------ between two steps

    def survey(self, group: Group, collective: Collective, position: Position, cut: StepCut) -> int:
        self._follow(group)
        self._show_since(table_shard(position.dataset, position.epoch), position.sample)
        where = collective, position.dataset, cut.epoch
        if where == self._surveyed and cut.lo != self._stop:
            return self._stop
        shard = table_shard(position.dataset, cut.epoch)
        secure = self._driver.keeps and collective is not self._surveyed[0]  # newcomers have not what mirrors lack
        carries = any(t.has_grad for t in self.tables.batches.values())
        limit = time.monotonic() + GAP_S
        while True:
            self._driver.flush(group, collective)
            collective.gather([0])  # what the others still had to push is there as well
            if not self._driver.keeps:
                self.pushed = position.step
            marks = {
                of: self._driver.open(of, group, collective, secure)
                for of in dict.fromkeys((*self.carried.held_back.shards, shard))
            }
            ahead = min((m for m in marks[shard] if m > cut.lo), default=0)
            crossed = self.carried.held_back.crossed(marks)  # (all members hold the same back: it is part of the state)
            over = time.monotonic() > limit or not self._driver.keeps
            words = collective.gather([ahead, min(marks[shard]), int(carries), int(crossed), int(over)])
            lowest, begin = min(word[1] for word in words), self.carried.held_back.begin(shard, cut.lo)
            if lowest >= begin:
                break
            if any(word[4] for word in words):
                raise _lacking(cut.epoch, lowest, begin)
            time.sleep(AGAIN_S)  # a ps was lost between: what its mirrors lack is pushed when its new life is known
        if len({word[2] for word in words}) > 1:
            self.carried.share(collective, [word[2] for word in words])
        self._stop = min((word[0] for word in words if word[0]), default=0)
        self._surveyed = where
        if any(word[3] for word in words):
            self._cut_held_back(position, cut.lr_factor)
            self._show_since(shard, cut.lo)
            self._driver.flush(group, collective)
        elif secure:
            self.pushed = position.step
        return self._stop

    def _follow(self, group: Group) -> None:
        """Keep what is owed to the lineage of ``group``; what belongs to another one is owed no more."""
        if self._lineage != group.lineage:
            self._lineage = group.lineage
            self._driver.void()

    def rest(self, group: Group, collective: Collective, position: Position) -> bool:
        self._follow(group)
        if self.pushed < position.step:
            self._driver.enter(group)
            shard, sample = self._consumed(table_shard(position.dataset, position.epoch), position.sample)
            if sample and min(self._driver.open(shard, group, collective, self._driver.keeps)) < sample:
                return False
            self.pushed = position.step
        return True

    def _consumed(self, shard: ShardKey, sample: int) -> tuple[ShardKey, int]:
        """Return the first place whose gradients no step has consumed: ``sample``, or the begin of what is held."""
        shards = self.carried.held_back.shards
        of = shards[0] if shards else shard
        return of, self.carried.held_back.begin(of, sample)

    def _show_since(self, shard: ShardKey, sample: int) -> None:
        """Rows to train with are those with all steps before ``sample``, as far as these are not held back."""
        self.tables.since = self._consumed(shard, sample)

    def _cut_held_back(self, position: Position, lr_factor: float) -> None:
        """Make of what is carried a step by itself, for the partitions that have not consumed its samples. Others have:
        with steps of a lineage that is over. Tables carry nothing any more."""
        ranges = self.carried.take()
        content = list(_carried_content(self.firing, self.tables, np.float32(self.scale()), lr_factor))
        for batch in self.tables.batches.values():
            batch.zero()
        if not content or not all(isfinite_all(found.grads) for found in content):
            ranges = left_out(ranges)
        *before, last = ranges
        skipped = not last.learnt
        self._driver.own(
            Owed(position.step - 1, last.shard, last.lo, last.hi, skipped, skipped, tuple(before)), content
        )

    def flush(self, group: Group, collective: Collective) -> None:
        self._driver.flush(group, collective)
        self._driver.secure(collective)

    # ------------------------------------------------------------ a step

    def take(self, step: StepAttempt, batch: Any) -> None:
        self.release()
        self.tables.asides.forget()
        self._steps.forget()
        self._steps.last = step.number, table_shard(step.dataset, step.epoch), step.hi
        self._item = item = self.tables.prepare(None, batch, create=True)
        self.tables.take(item)
        self.carried.begin_iteration()

    def collect(self, weight: float) -> None:
        if self._item is None:
            return
        self._exchange.collect(weight)

    def stepped(self, optimizer: Any, lr_factor: float) -> None:
        """The script steps: what ``grad`` holds now, of the tables that this optimizer fires, is the step's. Torch's
        own optimizer must not see it."""
        for held in self.firing.fired(optimizer):
            table = held.table
            self._steps.check_edit(table)
            found = table.take()
            if found is None:
                continue
            self.carried.consume()
            spec = self.tables.infos[table.name].spec
            grads = -found.grads if held.maximize else found.grads.copy()
            self._steps.add(table.name, Stepped(spec.id, found.keys.copy(), grads, held.rate(lr_factor)))
        self.tables.asides.forget()
        self._hide(True)

    def stepped_behind(self, optimizer: Any, lr_factor: float, last: int) -> None:
        if self.carried.consumed is None and not self.carried.held_back.ranges:
            for held in self.firing.fired(optimizer):
                if held.table.has_grad:
                    raise ScriptError(
                        f"opt.step() behind job.steps(): the gradient of table {held.table.name!r} has no samples that "
                        "a step in the loop has not used, and on the ps nothing is stepped without: call zero_grad() "
                        "behind each opt.step(), and step behind the loop only with what it has left"
                    )
        before = self.carried.consuming
        if before:
            self._steps.last = last, before[-1].shard, before[-1].hi
        self.stepped(optimizer, lr_factor)

    def settle_behind(self) -> None:
        """The script is through with what stands behind a loop. Before anybody can copy the state, what it has stepped
        with there is at the ps; or somebody in a later group has the same to push."""
        if self._own_behind():
            self._driver.push_rest()

    def _own_behind(self) -> bool:
        """Owe the ps what was stepped with behind the loop, in one push of what was held. Return whether any was."""
        content, before, last = self._steps.content, self.carried.consumed, self._steps.last
        if not content or not before or last is None or self._to_hold is not None:
            return False
        self.carried.take_consumed()
        self._steps.forget()
        *others, end = before
        self._driver.own(Owed(last[0], end.shard, end.lo, end.hi, before=tuple(others)), content)
        self._show_since(end.shard, end.hi)
        return True

    def zeroed(self, optimizer: Any) -> None:
        """Drop the gradients of the tables that this optimizer fires."""
        for held in self.firing.fired(optimizer):
            held.table.zero()

    def has_stepped(self) -> None:
        """Torch's own optimizer is through."""
        self._hide(False)

    def _hide(self, hidden: bool) -> None:
        for table in self.tables.batches.values():
            table.hidden = hidden

    def check(self, scaled: bool) -> None:
        self.firing.check(scaled)

    def hold(self, optimizer: Any, inner: torch.optim.Optimizer) -> None:
        self.firing.hold(optimizer, inner)

    def check_state(self, optimizer: Any) -> None:
        """Raises ScriptError where tables go by this optimizer: their momenta are on the ps."""
        if self.firing.goes_by(optimizer):
            raise ScriptError(NO_STATE.format("opt.load_state_dict"))

    def release(self) -> None:
        item, self._item = self._item, None
        if item is not None:
            if not self._redo:
                self._steps.check_edits()
            self.tables.release(item)
            self.tables.over()
            item.close()

    def exchange(self, step: StepAttempt) -> tuple[int, bool] | None:
        try:
            self._driver.owes_nothing(step.collective)
            if self._driver.full:
                self._driver.secure(step.collective)
            found = self._exchange.exchange(step.collective, *self._driver.progress(step.number))
        except CollectiveError:
            return None
        self.pushed, self._agreed = found.owes, found.version
        self._driver.consumed(self.pushed)
        return found.digest, found.finite

    def voted(self, step: StepAttempt, outcome: VoteOutcome) -> None:
        self._exchange.forget()
        self._redo = outcome is VoteOutcome.REDO
        if self._redo:
            self._barrier = self._to_hold = None
            self._steps.forget()
            self.carried.put_back()
            return
        if self._to_hold is not None:
            return  # (a further round of a step that is committed)
        self._barrier = None
        faultpoints.reach("voted")
        skipped = outcome is VoteOutcome.SKIPPED
        self._to_hold = Owed(step.number, table_shard(step.dataset, step.epoch), step.lo, step.hi, skipped)
        # Who has the vote's result may be the only one: nobody pushes before everybody has come beyond the vote.
        if step.size > 1:
            try:
                self._barrier = step.collective.allreduce(torch.zeros(1), "max")
            except CollectiveError:
                self._agreed = -1

    def put_back(self) -> None:
        """The iteration does not count, or not yet: its gradients, and what the script did to those of before."""
        self.carried.put_back()

    def hold_step(self) -> None:
        """The script's part of a committed step is over: what it stepped with is owed to the ps; or its range is held
        back, while its gradients wait for a step."""
        owed, self._to_hold = self._to_hold, None
        content, before = self._steps.content, self.carried.take_consumed()
        self._steps.forget()
        if owed is None:
            return
        if content and not owed.skipped:
            self._driver.own(replace(owed, before=before), content)
        elif not self.carried.hold_back(owed):
            waited = left_out(self.carried.take())
            self._driver.own(replace(owed, skipped=True, left_out=not owed.skipped, before=waited), [])

    def close_step(self, step: StepAttempt) -> bool:
        self._show_since(table_shard(step.dataset, step.epoch), step.hi)
        barrier, self._barrier = self._barrier, None
        if step.size > 1:
            try:
                if barrier is None:
                    return False
                barrier.wait()
            except CollectiveError:
                return False
        faultpoints.reach("push")
        self._driver.committed(step.number, step.rank, step.size, self._agreed)
        return True

    def finish(self, step: int, lease: LeaseNo) -> None:
        """The script is over: what it has accumulated and not stepped with is left out. ``step``: the last one;
        ``lease``: of a group, for one that was in none."""
        behind = self._own_behind()
        ranges = left_out(self.carried.take())
        if ranges:
            *before, last = ranges
            self._driver.own(Owed(step, last.shard, last.lo, last.hi, True, True, tuple(before)), [])
        if ranges or behind:
            self._driver.push_rest(lease)

    def close(self) -> None:
        self.release()
        self._driver.void()


def _lacking(epoch: int, lo: int, hi: int) -> EverstepError:
    return InternalError(
        f"a ps lacks samples {lo}..{hi} of epoch {epoch}, which are committed, and no worker has their gradients "
        "any more: more was lost than the parity of this job covers"
    )


def _carried_content(firing: TableFiring, tables: TableSet, scale: np.float32, lr_factor: float) -> Iterator[Stepped]:
    """Yield what a step would apply of what all tables carry."""
    for held in firing.all_fired():
        found = held.table.take()
        if found is not None:
            table = tables.infos[held.table.name].spec.id
            grads = found.grads / (-scale if held.maximize else scale)
            yield Stepped(table, found.keys.copy(), grads, held.rate(lr_factor))
