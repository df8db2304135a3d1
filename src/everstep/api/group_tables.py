"""The tables of a job in mode allreduce: rows on the ps, their gradients summed up by the group.

In a step every member pulls the rows of its micro-batches, as they are after all steps before; the gradients of all
members go to all of them, as the dense ones do, and are part of the vote. Their sum, in order of position, is pushed
once the step is known to be committed by everybody (``tables.step_pushes`` has the rules): each ps has one member that
pushes to it, and the others keep what it needs to take over.

The script may use rows behind its step, in the same iteration: an evaluation, a second pass of a GAN. Then the step is
not at the ps, or not at all of them. This member asks for the rows with their optimizer state, and computes itself what
the step makes of them; each answer says whether the ps has the step already.

Three kinds of threads meet here: the script's, which takes batches and waits; the links' with answers; and the control
connection's with newer maps. The machine is touched under one lock.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from everstep import faultpoints
from everstep.allreduce.collective import CollectiveError
from everstep.allreduce.flats import join_digests
from everstep.allreduce.state import bit_sum
from everstep.allreduce.step import Collective, GroupWork, StepAttempt, VoteOutcome
from everstep.api.firing import TableFiring
from everstep.api.rows import BatchTable
from everstep.api.seat import WorkerRuntime
from everstep.api.tables import BatchItem, PeekedRows, TableSet
from everstep.errors import CheckpointError, DeadlineError, EverstepError, InternalError, ScriptError
from everstep.ids import LeaseNo, ShardKey, Slot, TableId
from everstep.model.group import Group, Mark
from everstep.model.placement import Placement
from everstep.model.table import OptimizerSpec, Rate
from everstep.native import isfinite_all
from everstep.native.row_update import update
from everstep.net.messages import Bad, DataAnswer, LeaseClosed, Moved, Opened, OpenShard, Push, Pushed, RowsPart
from everstep.policies.step_split import StepCut
from everstep.tables.client import PsClient, Ticket
from everstep.tables.inputs import Inputs
from everstep.tables.routing import BatchRows, HeldRows, Router, TableRows, parts_by_ps
from everstep.tables.step_pushes import (
    HELD_MAX,
    Action,
    Again,
    HeldBack,
    Open,
    Owed,
    Range,
    Send,
    StepPushes,
    pusher_of,
    table_shard,
)
from everstep.tables.worker_protocol import watermarks_of

GIVE_UP_S = 300.0
"""So long a ps may take to have its buckets back, before the job is given up."""

_TICK_S = 0.1
_AGAIN_S = 0.05
_GAP_S = 60.0  # a ps lacks what is before, and nobody pushes it
_REST_S = 60.0  # for the rest of an accumulation, when the script is over
_MEMBER_BYTES = 1 << 30  # of one member's gradients of rows in one step

Entry = tuple[TableId, NDArray[np.int64], NDArray[np.float32]]
"""One table's part of one micro-batch: keys [u] and gradients [u, dim]."""


class Stepped(NamedTuple):
    """What the script's step applies to one table: keys int64 [n], gradients float32 [n, dim] and what it goes by."""

    table: TableId
    keys: NDArray[np.int64]
    grads: NDArray[np.float32]
    rate: Rate


class _StepSum(HeldRows):
    """The gradients of one committed step, of all members. They are routed when this member has to push them."""

    def __init__(self, content: list[Stepped], client: PsClient, infos: TableSet) -> None:
        super().__init__()
        self._content, self._client, self._tables = content, client, infos
        self._version = -1
        self._parts: list[list[RowsPart]] = []

    def parts(self, router: Router) -> list[list[RowsPart]]:
        """By position of the ps; routed anew by each newer map."""
        if self._version != router.version:
            merged = list(self._route(router))
            rates = {found.table: found.rate for found in self._content}
            self._parts = parts_by_ps(merged, len(router.slots), grads=True, rates=rates)
            self._version = router.version
        return self._parts

    def _route(self, router: Router) -> Iterator[TableRows]:
        specs = {info.spec.id: info.spec for info in self._tables.infos.values()}
        batch = BatchRows(self._client.memory, router)
        self.hold(batch)
        for found in self._content:
            routed, inverse, counts = router.route(found.table, found.keys)
            (rows,) = batch.add([(specs[found.table], routed, counts)], values=False)
            rows.grads[inverse] = found.grads
            yield rows


class Ahead(NamedTuple):
    """Rows of a table with the steps of an iteration applied. ``keys`` int64 [n] ascending, ``values`` [n, dim]."""

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
        """Into ``values`` [m, dim] of ``keys`` [m], in place."""
        if not len(self.keys):
            return
        at = np.minimum(np.searchsorted(self.keys, keys), len(self.keys) - 1)
        here = self.keys[at] == keys
        values[here] = self.values[at[here]]


def in_intervals(owed: Owed, content: list[Stepped]) -> list[tuple[Owed, list[Stepped]]]:
    """``owed`` as intervals in each of which a table is stepped once; what was held back goes with the first. Raises
    ScriptError if it has too few positions."""
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


class GroupTables:
    """See the top of this file, and ``allreduce.step.StepTables``."""

    def __init__(self, seat: WorkerRuntime, tables: TableSet) -> None:
        self.seat, self.tables = seat, tables
        self.client = seat.client
        self.pushes = StepPushes(seat.slot, seat.incarnation)
        self.failure: EverstepError | None = None
        self._lock = threading.RLock()
        self._changed = threading.Condition(self._lock)
        self._feed = Inputs(self._changed, self._do).feed  # gives the machine an input and does what it wants
        self._sums: dict[tuple[int, int], _StepSum] = {}  # by step and position
        self._last: tuple[int, ShardKey, int] | None = None  # the step of the rows in hand: number, shard and its end
        self._stale: set[str] = set()  # tables that were stepped since their rows were shown
        self._ahead: dict[str, Ahead] = {}
        self._item: BatchItem | None = None
        self._entries: list[Entry] = []
        self._saved: dict[str, Any] = {}  # the gradients that an iteration began with
        self._content: list[Stepped] = []  # of the steps of this iteration
        self._held_back = HeldBack()
        self._drops: dict[str, int] = {}  # of the tables that have gradients of these ranges
        self._before: tuple[Range, ...] | None = None  # that this iteration's first step consumes
        self._saved_back: tuple[tuple[Range, ...], dict[str, int]] = (), {}  # with which the iteration began
        self._backwards = 0  # gradients that had come before it
        self._to_hold: Owed | None = None
        self._agreed: tuple[int, bool] = (0, False)  # map that everybody had at the exchange, and whether all had it
        self._barrier: GroupWork | None = None
        self._surveyed: tuple[Collective | None, int, int] = (None, 0, 0)  # in which group, dataset and epoch
        self._redo = False  # what is in hand will be done again
        self._edited = False  # the script ends with an error of ours
        self._origin = 0
        self._stop = 0
        self._gap_since = 0.0
        self.pushed = 0
        self.scale: Callable[[], float] = lambda: 1.0
        self.firing = TableFiring(tables)
        self.client.on_wait = self._waits_for_rows
        tables.fresh, tables.all_since = self._apply_steps, True
        tables.refuses_renorm = (
            "changes rows in forward, and in mode allreduce only optimizers change a table on the ps: leave it out, "
            "keep the embedding in the dense part, job.sparse(model, only=...), or run with --mode ps"
        )

    def __repr__(self) -> str:
        return f"<GroupTables {self.pushes}>"

    # ------------------------------------------------------------ from other threads

    def placed(self, placement: Placement) -> None:
        owners = set(placement.owner)
        servers = {p.slot: p.incarnation for p in placement.servers if p.slot in owners}
        self._feed(lambda: self.pushes.placed(placement.route, servers))

    def fail(self, error: EverstepError) -> None:
        """Ends whatever waits."""
        self.client.fail(error)
        with self._changed:
            self.failure = self.failure or error
            self._changed.notify_all()

    def _waits_for_rows(self) -> None:
        """The script waits for rows for long: whoever should have pushed what is before them may be lost."""
        self._feed(self.pushes.take_over)

    # ------------------------------------------------------------ between two steps

    def survey(self, group: Group, collective: Collective, mark: Mark, cut: StepCut) -> int:
        if self._origin != group.origin:
            self._origin = group.origin
            with self._lock:
                for owed in self.pushes.void():
                    self._drop(owed)
        self._show_since(table_shard(mark.dataset, mark.epoch), mark.position)
        where = collective, mark.dataset, cut.epoch
        if where == self._surveyed and cut.lo != self._stop:
            return self._stop
        self.flush(group, collective)
        collective.gather([0])  # what the others still had to push is there as well
        shard = table_shard(mark.dataset, cut.epoch)
        marks = {of: self._open(of, group, collective) for of in dict.fromkeys((*self._held_back.shards, shard))}
        ahead = min((m for m in marks[shard] if m > cut.lo), default=0)
        crossed = self._held_back.crossed(marks)  # (all members hold the same back: it is a part of the state)
        carries = any(t.has_grad for t in self.tables.batches.values())
        words = collective.gather([ahead, min(marks[shard]), int(carries), int(crossed)])
        if len({word[2] for word in words}) > 1:
            self._share_carried(collective, [word[2] for word in words])
        lowest, begin = min(word[1] for word in words), self._held_back.begin(shard, cut.lo)
        if lowest < begin:
            raise self._lacking(cut.epoch, lowest, begin)
        self._stop = min((word[0] for word in words if word[0]), default=0)
        self._surveyed = where
        if any(word[3] for word in words):
            self._cut_held_back(mark, cut.lr_factor)
            self._show_since(shard, cut.lo)
            self.flush(group, collective)
        return self._stop

    def _show_since(self, shard: ShardKey, position: int) -> None:
        """Rows to train with are those with all steps before ``position``, as far as these are not held back."""
        shards = self._held_back.shards
        of = shards[0] if shards else shard
        self.tables.since = (of, self._held_back.begin(of, position))

    def _cut_held_back(self, mark: Mark, lr_factor: float) -> None:
        """Some buckets have samples already whose gradients are carried: a line of states that is over has consumed
        them with steps of its own. What is carried becomes a step by itself, for the buckets that have not, and tables
        carry nothing any more."""
        ranges = self._take_held_back()
        scale = np.float32(self.scale())
        content: list[Stepped] = []
        for held in self.firing.all_fired():
            found = held.table.take()
            if found is not None:
                table = self.tables.infos[held.table.name].spec.id
                grads = found.grads / (-scale if held.maximize else scale)
                content.append(Stepped(table, found.keys.copy(), grads, held.rate(lr_factor)))
        for batch in self.tables.batches.values():
            batch.zero()
        if not content or not all(isfinite_all(found.grads) for found in content):
            ranges = _left_out(ranges)
        *before, last = ranges
        skipped = not last.learnt
        self._hold(Owed(mark.step - 1, last.shard, last.lo, last.hi, skipped, skipped, tuple(before)), content)

    def _share_carried(self, collective: Collective, carries: list[int]) -> None:
        """Gradients that are accumulated over steps go to newcomers, from the first member that has them."""
        entries: list[Entry] = []
        for name, table in self.tables.batches.items():
            found = table.take() if carries[collective.rank] else None
            if found is not None:
                entries.append((self.tables.infos[name].spec.id, found.keys, found.grads))
        mine = pack(entries)
        size = max(row[0] for row in collective.gather([len(mine)]))
        padded = torch.zeros(size, dtype=torch.uint8)
        padded[: len(mine)] = torch.from_numpy(mine)
        blobs = collective.exchange(padded)
        if not carries[collective.rank]:
            for of, keys, grads in unpack(blobs[carries.index(1)]):
                self._by_id[of].arrive(keys.copy(), grads.copy())

    def _lacking(self, epoch: int, lo: int, hi: int) -> EverstepError:
        return InternalError(
            f"a ps lacks samples {lo}..{hi} of epoch {epoch}, which are committed, and no worker has their gradients "
            "any more: more was lost than the parity of this job covers"
        )

    def flush(self, group: Group, collective: Collective) -> None:
        self._feed(lambda: self.pushes.entered(group.lease))
        self._wait(lambda: not self.pushes.owes, collective)

    def _open(self, shard: ShardKey, group: Group, collective: Collective) -> list[int]:
        """Open ``shard`` everywhere under the group's lease; the watermarks of all buckets."""
        while True:
            router = self.client.router
            request = OpenShard(shard, 0, group.lease, router.version)
            ticket = self.client.everywhere(lambda i, ps, r=request: r, router)  # type: ignore[misc]
            self._await(ticket, collective)
            if ticket.moved:
                continue
            marks: list[int] = []
            for ps, answer, _ in ticket.answers:
                if isinstance(answer, LeaseClosed):
                    raise CollectiveError(f"ps:{ps} has heard of a later generation than {group.generation}")
                if not isinstance(answer, Opened):
                    raise self._refused(ps, answer)
                marks += watermarks_of(answer)[1]
            if len(marks) == router.n_buckets:
                return marks
            time.sleep(_AGAIN_S)  # buckets are on their way

    # ------------------------------------------------------------ a step

    def take(self, step: StepAttempt, batch: Any) -> None:
        self.release()
        self.tables.forget_asides()
        self._forget_steps()
        self._last = step.number, table_shard(step.dataset, step.epoch), step.hi
        self._item = item = self.tables.prepare(None, batch, create=True)
        self.tables.take(item)
        self._saved = {name: table.save() for name, table in self.tables.batches.items()}
        self._saved_back = tuple(self._held_back.ranges), dict(self._drops)
        self._backwards = self._count_backwards()

    def collect(self, weight: float) -> None:
        if self._item is None:
            return
        for name, table in self.tables.batches.items():
            found = table.take_local()
            if found is not None and weight:
                grads = found.grads if weight == 1.0 else found.grads * np.float32(weight)
                self._entries.append((self.tables.infos[name].spec.id, found.keys, grads))

    def stepped(self, optimizer: Any, lr_factor: float) -> None:
        """The script steps: what ``grad`` holds now, of the tables that this optimizer fires, is the step's. Torch's
        own optimizer must not see it."""
        for held in self.firing.fired(optimizer):
            table = held.table
            self._check_edit(table)
            found = table.take()
            if found is None:
                continue
            if self._before is None:
                self._before = self._take_held_back()
            spec = self.tables.infos[table.name].spec
            self._stale.add(table.name)
            table.stale = self._make_fresh
            self._ahead.pop(table.name, None)
            grads = -found.grads if held.maximize else found.grads.copy()
            self._content.append(Stepped(spec.id, found.keys.copy(), grads, held.rate(lr_factor)))
        self.tables.forget_asides()
        self._hide(True)

    def stepped_behind(self, optimizer: Any, lr_factor: float, last: int) -> None:
        if self._before is None and not self._held_back.ranges:
            for held in self.firing.fired(optimizer):
                if held.table.has_grad:
                    raise ScriptError(
                        f"opt.step() behind job.steps(): the gradient of table {held.table.name!r} has no samples that "
                        "a step in the loop has not used, and on the ps nothing is stepped without: call zero_grad() "
                        "behind each opt.step(), and step behind the loop only with what it has left"
                    )
        before = self._before or tuple(self._held_back.ranges)
        if before:
            self._last = last, before[-1].shard, before[-1].hi
        self.stepped(optimizer, lr_factor)

    def settle_behind(self) -> None:
        """The script is through with what stands behind a loop. Before anybody can copy the state, what it has stepped
        with there is at the ps; or somebody in a later group has the same to push."""
        if self._own_behind():
            self._push_rest()

    def _own_behind(self) -> bool:
        """What was stepped with behind the loop is owed to the ps from now on: as one push of all that was held back.
        Whether there was anything."""
        content, before, last = self._content, self._before, self._last
        if not content or not before or last is None or self._to_hold is not None:
            return False
        self._before = None
        self._forget_steps()
        *others, end = before
        self._hold(Owed(last[0], end.shard, end.lo, end.hi, before=tuple(others)), content)
        self._show_since(end.shard, end.hi)
        return True

    def _make_fresh(self) -> None:
        """The script is about to use rows: those in hand that it has stepped are to be as they are now."""
        stale, self._stale = self._stale, set()
        for name in stale:
            table = self.tables.batches[name]
            table.stale = None
            if len(table.keys):
                values = table.values.copy()
                self._apply_steps(name, table.keys, values)
                table.renew(values)
                table.seen()

    def _apply_steps(self, name: str, keys: NDArray[np.int64], values: NDArray[np.float32]) -> None:
        """Rows as the ps has them become what the steps of this iteration make of them."""
        if not self._content or self._last is None:
            return
        spec, (_, shard, end) = self.tables.infos[name].spec, self._last
        content = [found for found in self._content if found.table == spec.id]
        if not content:
            return
        ahead = self._ahead.get(name)
        if ahead is None:
            wanted = np.unique(np.concatenate([found.keys for found in content]))
            rows = self.tables.peek(spec, wanted, shard, end)
            ahead = self._ahead[name] = Ahead.of(rows, content, spec.optimizer)
        ahead.put(keys, values)

    def _forget_steps(self) -> None:
        self._content = []
        self._ahead.clear()
        for name in self._stale:
            self.tables.batches[name].stale = None
        self._stale.clear()

    def zeroed(self, optimizer: Any) -> None:
        """The gradients of the tables that this optimizer fires are dropped."""
        for held in self.firing.fired(optimizer):
            held.table.zero()

    def has_stepped(self) -> None:
        """Torch's own optimizer is through."""
        self._hide(False)

    def _hide(self, hidden: bool) -> None:
        for table in self.tables.batches.values():
            table.hidden = hidden

    def check(self, scaled: bool) -> None:
        free, optimizers = self.firing.free, self.firing.optimizers
        if free and (scaled or optimizers > 1):
            why = "a GradScaler is tracked, which unscales only what an optimizer holds"
            several = f"there are {optimizers} optimizers, so no step() is its own"
            raise ScriptError(
                f"table {free[0]!r} is in no optimizer, and {why if scaled else several}: give its weight to the "
                "optimizer that shall step it (model.parameters() has it after job.sparse)"
            )

    def hold(self, optimizer: Any, inner: torch.optim.Optimizer) -> None:
        self.firing.hold(optimizer, inner)

    def release(self) -> None:
        item, self._item = self._item, None
        if item is not None:
            self._check_edits()
            self.tables.release(item)
            self.tables.over()
            item.close()

    def _check_edits(self) -> None:
        """The rows in hand go. Raises ScriptError if the script has changed them by hand: that would be lost."""
        if self._redo or self._edited:
            return
        for table in self.tables.batches.values():
            self._check_edit(table)

    def _check_edit(self, table: BatchTable) -> None:
        if table.name not in self._stale and table.changed():
            self._edited = True
            raise ScriptError(
                f"the script has changed rows of table {table.name!r} by hand (clamp_, copy_, mul_, ...): in mode "
                "allreduce only optimizers change a table on the ps; keep the embedding in the dense part, "
                "job.sparse(model, only=...), or run with --mode ps"
            )

    def exchange(self, step: StepAttempt) -> tuple[int, bool] | None:
        entries, self._entries = self._entries, []
        finite = all(isfinite_all(grads) for _, _, grads in entries)
        mine = pack(entries if finite else [])
        if len(mine) > _MEMBER_BYTES:
            raise ScriptError(
                f"the gradients of rows of one worker in one step are {len(mine) >> 20} MiB, over "
                f"{_MEMBER_BYTES >> 20}: use a smaller batch_size"
            )
        try:
            self._wait(lambda: not self.pushes.owes, step.collective)
            with self._lock:
                owes = self.pushes.owes_from
                version = self.client.router.version
            words = step.collective.gather([len(mine), version, step.number if owes is None else owes, int(finite)])
            padded = torch.zeros(max(word[0] for word in words), dtype=torch.uint8)
            padded[: len(mine)] = torch.from_numpy(mine)
            blobs = step.collective.exchange(padded)
        except CollectiveError:
            return None
        with self._lock:
            for owed in self.pushes.settled(min(word[2] for word in words)):
                self._drop(owed)
            if len(held := {owed.step for owed in self.pushes.held}) > HELD_MAX:
                raise InternalError(f"{self.pushes!r}: {len(held)} steps are not settled")
        self.pushed = min(word[2] for word in words)
        self._agreed = version, all(word[1] == version for word in words)
        for blob in blobs:  # in order of rank
            for table, keys, grads in unpack(blob):
                self._by_id[table].arrive(keys, grads)
        return join_digests([bit_sum(blob) for blob in blobs]), all(word[3] for word in words)

    @property
    def _by_id(self) -> dict[TableId, BatchTable]:
        return {self.tables.infos[name].spec.id: table for name, table in self.tables.batches.items()}

    def voted(self, step: StepAttempt, outcome: VoteOutcome) -> None:
        self._entries = []
        self._redo = outcome is VoteOutcome.REDO
        if self._redo:
            self._barrier = self._to_hold = None
            self._forget_steps()
            self.put_back()
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
                self._agreed = -1, False

    def put_back(self) -> None:
        """The iteration does not count, or not yet: its gradients, and what the script did to those of before."""
        for name, saved in self._saved.items():
            self.tables.batches[name].restore(saved)
        self._held_back, self._drops = HeldBack(self._saved_back[0]), dict(self._saved_back[1])
        self._before = None

    def hold_step(self) -> None:
        """The script's part of a committed step is over: what it stepped with is owed to the ps; or its range is held
        back, while its gradients wait for a step."""
        owed, self._to_hold = self._to_hold, None
        content, before = self._content, self._before or ()
        self._before = None
        self._forget_steps()
        if owed is None:
            return
        if content and not owed.skipped:
            self._hold(replace(owed, before=before), content)
            return
        if self._held_back.ranges and self._was_zeroed():
            self._held_back.zeroed()
        waiting = {name: table.drops for name, table in self.tables.batches.items() if table.waits}
        if waiting and (self._held_back.ranges or not owed.skipped):
            learnt = not owed.skipped and self._backwards != self._count_backwards()
            self._held_back.add(Range(owed.shard, owed.lo, owed.hi, learnt))
            self._drops = waiting
            return
        self._hold(replace(owed, skipped=True, left_out=not owed.skipped, before=_left_out(self._take_held_back())), [])

    def _hold(self, owed: Owed, content: list[Stepped]) -> None:
        """``owed`` is to be pushed, once it is known that everybody has it."""
        parts = in_intervals(owed, content if owed.learns else [])
        with self._lock:
            for part, found in parts:
                self._sums[part.step, part.lo] = _StepSum(found, self.client, self.tables)
                self.pushes.hold(part)

    def _take_held_back(self) -> tuple[Range, ...]:
        if self._was_zeroed():
            self._held_back.zeroed()
        self._drops = {}
        return self._held_back.take()

    def _was_zeroed(self) -> bool:
        """Whether the script has dropped the gradients of what is held back."""
        return all(self.tables.batches[name].drops != drops for name, drops in self._drops.items())

    def _count_backwards(self) -> int:
        return sum(table.backwards for table in self.tables.batches.values())

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
        version, all_same = self._agreed
        router = self.client.router
        mine = [ps for i, ps in enumerate(router.slots) if pusher_of(i, step.size) == step.rank]
        route = version if all_same and router.version == version else -1
        self._feed(lambda: self.pushes.committed(step.number, route, mine))
        return True

    def finish(self, step: int, lease: LeaseNo) -> None:
        """The script is over: what it has accumulated and not stepped with is left out. ``step``: the last one;
        ``lease``: of a group, for one that was in none."""
        behind = self._own_behind()
        ranges = _left_out(self._take_held_back())
        if ranges:
            *before, last = ranges
            self._hold(Owed(step, last.shard, last.lo, last.hi, True, True, tuple(before)), [])
        if ranges or behind:
            self._push_rest(lease)

    def _push_rest(self, lease: LeaseNo = LeaseNo(0)) -> None:
        """Behind a loop, where all members do the same: push what is owed. Returns when it is acknowledged."""
        self._feed(lambda: self.pushes.entered(self.pushes.lease or lease))
        limit = time.monotonic() + _REST_S
        with self._changed:  # (stale: somebody in a later group is at the same end)
            while self.pushes.owes and not self.pushes.stale and time.monotonic() < limit:
                if self.failure is not None or self.client.failure is not None:
                    return
                self._changed.wait(_TICK_S)

    # ------------------------------------------------------------ a part of the training state

    def state_dict(self) -> dict[str, Any]:
        """Between two steps: gradients that wait for a step, and of which ranges; {}: there are none."""
        if not self._held_back.ranges:
            return {}
        kept = {name: (table.kept(), table.waits) for name, table in self.tables.batches.items()}
        return {
            "ranges": [[r.shard, r.lo, r.hi, r.learnt] for r in self._held_back.ranges],
            "zeroed": self._was_zeroed(),
            "tables": {name: [*found, waits] for name, (found, waits) in kept.items() if found is not None},
        }

    @property
    def begin(self) -> tuple[int, int]:
        """Shard and position from which on ranges are held back; (-1, 0): there are none."""
        ranges = self._held_back.ranges
        return (ranges[0].shard, ranges[0].lo) if ranges else (-1, 0)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """What ``state_dict`` gave at another member, or before. Raises CheckpointError."""
        if not state and not self._held_back.ranges:
            return
        for table in self.tables.batches.values():
            table.zero()
        try:
            for name, (keys, grads, waits) in state.get("tables", {}).items():
                self.tables.batches[name].put_kept(keys, grads, waits)
            self._held_back = HeldBack(
                [Range(ShardKey(s), lo, hi, learnt) for s, lo, hi, learnt in state.get("ranges", [])]
            )
        except (KeyError, TypeError, ValueError) as error:
            raise CheckpointError(
                f"the state has gradients of a table that this script does not have: {error}"
            ) from None
        waiting = {name: table.drops for name, table in self.tables.batches.items() if table.waits}
        self._drops = {name: -1 if state["zeroed"] else drops for name, drops in waiting.items()} if state else {}

    def close(self) -> None:
        self.release()
        with self._lock:
            for owed in self.pushes.void():
                self._drop(owed)

    # ------------------------------------------------------------ the machine

    def _do(self, action: Action) -> None:
        if isinstance(action, Send):
            self._send(action)
        elif isinstance(action, Open):
            self._send_open(action)
        else:
            self._say_again(action)

    def _send_open(self, action: Open) -> None:
        router = self.client.router
        if router.version != self.pushes.route:
            return  # the machine is about to hear of a newer map, and will say this anew

        def then(answer: DataAnswer, body: memoryview) -> None:
            if isinstance(answer, Opened | LeaseClosed):
                ok = isinstance(answer, Opened)
                self._feed(lambda: self.pushes.opened(action.ps, action.shard, action.life, ok))
            elif not isinstance(answer, Moved):  # what is owed is said anew by the newer map
                self.fail(self._refused(action.ps, answer))

        self.client.submit(action.ps, OpenShard(action.shard, 0, action.lease, router.version), then, router)

    def _send(self, action: Send) -> None:
        router, owed = self.client.router, action.owed
        held = self._sums.get((owed.step, owed.lo))
        if held is None or router.version != self.pushes.route:
            return
        parts = tuple(held.parts(router)[router.slots.index(action.ps)]) if owed.learns else ()
        held.sent()

        def then(answer: DataAnswer, body: memoryview) -> None:
            with self._lock:
                held.landed()
            if isinstance(answer, Pushed):
                if answer.nonfinite >= 0:
                    self.fail(InternalError(f"ps:{action.ps} found NaN or Inf in step {owed.step}, which is committed"))
                self._feed(lambda: self.pushes.pushed(action.ps, owed, action.life, answer))
            elif not isinstance(answer, Moved):
                self.fail(self._refused(action.ps, answer))

        left_out = action.skipped and (owed.left_out or owed.learns)
        message = Push(
            router.version, action.token, parts, True, b"", action.skipped, left_out=left_out, more=action.more
        )
        self.client.submit(action.ps, message, then, router)

    def _say_again(self, action: Again) -> None:
        now = time.monotonic()
        self._gap_since = self._gap_since or now if self.pushes.gaps > 1 else now
        if now - self._gap_since > _GAP_S:
            self.fail(InternalError(f"ps:{action.ps} lacks steps before those that it is sent, and nobody has them"))
            return
        self.seat.later(_AGAIN_S, lambda: self._feed(lambda: self.pushes.again(action.ps, action.life)))

    def _refused(self, ps: Slot, answer: DataAnswer) -> EverstepError:
        return InternalError(f"ps:{ps} refused: {answer.error if isinstance(answer, Bad) else repr(answer)}")

    def _drop(self, owed: Owed) -> None:
        held = self._sums.pop((owed.step, owed.lo), None)
        if held is not None:
            held.settle()

    # ------------------------------------------------------------ waiting

    def _wait(self, done: Callable[[], bool], collective: Collective) -> None:
        """Raises CollectiveError where the group is broken, or a later one is out, before ``done``."""
        limit = time.monotonic() + GIVE_UP_S
        with self._changed:
            while not done():
                if (failure := self.failure or self.client.failure) is not None:
                    raise failure
                why = getattr(collective, "broken", "")
                if why or self.pushes.stale:
                    raise CollectiveError(f"the group is broken: {why or 'a later generation is at the ps'}")
                if time.monotonic() > limit:
                    raise DeadlineError(
                        f"{self.pushes!r}: not acknowledged for {GIVE_UP_S:g} s: see the logs of the ps"
                    )
                self._changed.wait(_TICK_S)

    def _await(self, ticket: Ticket, collective: Collective) -> None:
        def landed() -> None:
            with self._changed:
                self._changed.notify_all()

        ticket.then(landed)
        self._wait(lambda: ticket.ready, collective)
        ticket.wait()


def _left_out(ranges: Iterable[Range]) -> tuple[Range, ...]:
    return tuple(replace(r, learnt=False) for r in ranges)


# ---------------------------------------------------------------- gradients on their way


def pack(entries: list[Entry]) -> NDArray[np.uint8]:
    """int64: how many entries; of each table, rows and width; then of each the keys and the gradients (float32), padded
    to eight bytes."""
    head = np.array([len(entries), *(n for t, k, g in entries for n in (t, len(k), g.shape[1]))], np.int64)
    pieces = [head.view(np.uint8)]
    for _, keys, grads in entries:
        pieces += [np.ascontiguousarray(keys).view(np.uint8), np.ascontiguousarray(grads).reshape(-1).view(np.uint8)]
        pieces.append(np.zeros(-pieces[-1].nbytes % 8, np.uint8))
    return np.concatenate(pieces)


def unpack(blob: torch.Tensor) -> list[Entry]:
    """Views of what ``pack`` made. Raises InternalError where it cannot be."""
    raw: NDArray[np.uint8] = blob.numpy()
    words = raw[: len(raw) // 8 * 8].view(np.int64)
    count = int(words[0]) if len(words) else -1
    if not 0 <= count <= (len(words) - 1) // 3:
        raise InternalError(f"gradients of rows: {count} tables in {len(raw)} bytes")
    out: list[Entry] = []
    at = 8 * (1 + 3 * count)
    for table, rows, dim in words[1 : 1 + 3 * count].reshape(-1, 3).tolist():
        size = 4 * rows * dim
        if rows < 0 or dim < 0 or at + 8 * rows + size > len(raw):
            raise InternalError(f"gradients of rows: {rows} x {dim} do not fit into {len(raw)} bytes")
        keys = raw[at : at + 8 * rows].view(np.int64)
        at += 8 * rows
        out.append((TableId(table), keys, raw[at : at + size].view(np.float32).reshape(rows, dim)))
        at += size + -size % 8
    return out
