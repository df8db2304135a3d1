"""The tables of a job in mode allreduce: rows on the ps, their gradients summed up by the group.

In a step every member pulls the rows of its micro-batches, as they are after all steps before; the gradients of all
members go to all of them, as the dense ones do, and are part of the vote. Their sum, in order of position, is pushed
once the step is known to be committed by everybody (``tables.steps`` has the rules): each ps has one member that
pushes to it, and the others keep what it needs to take over.

Three kinds of threads meet here: the script's, which takes batches and waits; the links' with answers; and the control
connection's with newer maps. The machine is touched under one lock.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from everstep.allreduce import faults
from everstep.allreduce.collective import CollectiveError
from everstep.allreduce.flats import join_digests
from everstep.allreduce.state import bit_sum
from everstep.allreduce.step import Collective, Outcome, Step, Work
from everstep.api.seat import Seat
from everstep.api.tables import Item, TableSet
from everstep.errors import DeadlineError, EverstepError, InternalError, ScriptError
from everstep.ids import ShardKey, Slot, TableId
from everstep.model.group import Group, Mark
from everstep.model.placement import Placement
from everstep.native import bag_backward, isfinite_all
from everstep.net.messages import Bad, Closed, DataAnswer, Moved, Opened, OpenShard, Part, Push, Pushed
from everstep.policies.split import Cut
from everstep.tables.client import PsClient, Ticket
from everstep.tables.inputs import Inputs
from everstep.tables.protocol import watermarks_of
from everstep.tables.routing import BatchRows, HeldRows, Router, TableRows, parts_by_ps
from everstep.tables.steps import HELD_MAX, Action, Again, Open, Owed, Send, StepPushes, pusher_of, table_shard

GIVE_UP_S = 300.0
"""So long a ps may take to have its buckets back, before the job is given up."""

_TICK_S = 0.1
_AGAIN_S = 0.05
_GAP_S = 60.0  # a ps lacks what is before, and nobody pushes it
_MEMBER_BYTES = 1 << 30  # of one member's gradients of rows in one step

Entry = tuple[TableId, NDArray[np.int64], NDArray[np.float32]]
"""One table's part of one micro-batch: keys [u] and gradients [u, dim]."""


class _Sum(HeldRows):
    """The gradients of one committed step, of all members. They are merged when this member has to push them."""

    def __init__(self, blobs: list[torch.Tensor], client: PsClient, infos: TableSet, lr_factor: float) -> None:
        super().__init__()
        self._blobs, self._client, self._tables, self._lr_factor = blobs, client, infos, lr_factor
        self._version = -1
        self._parts: list[list[Part]] = []

    def parts(self, router: Router) -> list[list[Part]]:
        """By position of the ps; merged anew by each newer map."""
        if self._version != router.version:
            merged = list(self._merge(router))
            lrs = {r.table: r.spec.optimizer.lr * self._lr_factor for r in merged} if self._lr_factor != 1.0 else None
            self._parts = parts_by_ps(merged, len(router.slots), grads=True, lrs=lrs)
            self._version = router.version
        return self._parts

    def _merge(self, router: Router) -> Iterator[TableRows]:
        """Sums in order of rank, of micro-batches within: in order of position, whoever has computed them."""
        entries: dict[TableId, list[Entry]] = {}
        for blob in self._blobs:
            for entry in unpack(blob):
                entries.setdefault(entry[0], []).append(entry)
        specs = {info.spec.id: info.spec for info in self._tables.infos.values()}
        batch = BatchRows(self._client.memory, router)
        self.hold(batch)
        for table in sorted(entries):
            found = entries[table]
            keys = np.concatenate([e[1] for e in found])
            routed, inverse, counts = router.route(table, keys)
            (rows,) = batch.add([(specs[table], routed, counts)], values=False)
            bag_backward(np.concatenate([e[2] for e in found]), inverse, None, "sum", None, rows.u, rows.grads)
            yield rows


class GroupTables:
    """See the top of this file, and ``allreduce.step.StepTables``."""

    def __init__(self, seat: Seat, tables: TableSet) -> None:
        self.seat, self.tables = seat, tables
        self.client = seat.client
        self.pushes = StepPushes(seat.slot, seat.incarnation)
        self.failure: EverstepError | None = None
        self._lock = threading.RLock()
        self._changed = threading.Condition(self._lock)
        self._feed = Inputs(self._changed, self._do).feed  # gives the machine an input and does what it wants
        self._sums: dict[int, _Sum] = {}  # by step
        self._item: Item | None = None
        self._entries: list[Entry] = []
        self._blobs: list[torch.Tensor] = []
        self._agreed: tuple[int, bool] = (0, False)  # map that everybody had at the exchange, and whether all had it
        self._barrier: Work | None = None
        self._surveyed: tuple[Collective | None, int, int] = (None, 0, 0)  # in which group, dataset and epoch
        self._origin = 0
        self._stop = 0
        self._gap_since = 0.0
        self.pushed = 0
        self.client.on_wait = self._waits_for_rows

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

    def survey(self, group: Group, collective: Collective, mark: Mark, cut: Cut) -> int:
        if self._origin != group.origin:
            self._origin = group.origin
            with self._lock:
                for owed in self.pushes.void():
                    self._drop(owed)
        self.tables.since = (table_shard(mark.dataset, mark.epoch), mark.position)
        where = collective, mark.dataset, cut.epoch
        if where == self._surveyed and cut.lo != self._stop:
            return self._stop
        self.flush(group, collective)
        collective.gather([0])  # what the others still had to push is there as well
        shard = table_shard(mark.dataset, cut.epoch)
        marks = self._open(shard, group, collective)
        ahead = min((m for m in marks if m > cut.lo), default=0)
        lowest = min(marks, default=cut.lo)
        words = collective.gather([ahead, lowest])
        lowest = min(word[1] for word in words)
        if lowest < cut.lo:
            raise self._lacking(cut.epoch, lowest, cut.lo)
        self._stop = min((word[0] for word in words if word[0]), default=0)
        self._surveyed = where
        return self._stop

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
                if isinstance(answer, Closed):
                    raise CollectiveError(f"ps:{ps} has heard of a later generation than {group.generation}")
                if not isinstance(answer, Opened):
                    raise self._refused(ps, answer)
                marks += watermarks_of(answer)[1]
            if len(marks) == router.n_buckets:
                return marks
            time.sleep(_AGAIN_S)  # buckets are on their way

    # ------------------------------------------------------------ a step

    def take(self, step: Step, batch: Any) -> None:
        self.release()
        self._item = item = self.tables.prepare(None, batch, create=True)
        self.tables.take(item)

    def collect(self, weight: float) -> None:
        item = self._item
        if item is None:
            return
        for rows in item.rows.tables:
            if rows.touched and weight:
                rows.drop_padding()
                grads = rows.grads.copy() if weight == 1.0 else rows.grads * np.float32(weight)
                self._entries.append((rows.table, rows.keys.copy(), grads))
            rows.touched = False

    def release(self) -> None:
        item, self._item = self._item, None
        if item is not None:
            self.tables.release(item)
            item.close()

    def exchange(self, step: Step) -> tuple[int, bool] | None:
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
            if len(self.pushes.held) > HELD_MAX:
                raise InternalError(f"{self.pushes!r}: {len(self.pushes.held)} steps are not settled")
        self.pushed = min(word[2] for word in words)
        self._agreed = version, all(word[1] == version for word in words)
        self._blobs = blobs
        return join_digests([bit_sum(blob) for blob in blobs]), all(word[3] for word in words)

    def voted(self, step: Step, outcome: Outcome) -> None:
        blobs, self._blobs = self._blobs, []
        self._barrier = None
        self._entries = []
        if outcome is Outcome.REDO:
            return
        skipped = outcome is Outcome.SKIPPED
        faults.step("voted")
        owed = Owed(step.number, table_shard(step.dataset, step.epoch), step.lo, step.hi, skipped)
        with self._lock:
            self._sums[step.number] = _Sum([] if skipped else blobs, self.client, self.tables, step.lr_factor)
            self.pushes.hold(owed)
        # Who has the vote's result may be the only one: nobody pushes before everybody has come beyond the vote.
        if step.size > 1:
            try:
                self._barrier = step.collective.allreduce(torch.zeros(1), "max")
            except CollectiveError:
                self._agreed = -1, False

    def close_step(self, step: Step) -> bool:
        barrier, self._barrier = self._barrier, None
        if step.size > 1:
            try:
                if barrier is None:
                    return False
                barrier.wait()
            except CollectiveError:
                return False
        faults.step("push")
        version, all_same = self._agreed
        router = self.client.router
        mine = [ps for i, ps in enumerate(router.slots) if pusher_of(i, step.size) == step.rank]
        route = version if all_same and router.version == version else -1
        self._feed(lambda: self.pushes.committed(step.number, route, mine))
        return True

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
            if isinstance(answer, Opened | Closed):
                ok = isinstance(answer, Opened)
                self._feed(lambda: self.pushes.opened(action.ps, action.shard, action.life, ok))
            elif not isinstance(answer, Moved):  # what is owed is said anew by the newer map
                self.fail(self._refused(action.ps, answer))

        self.client.submit(action.ps, OpenShard(action.shard, 0, action.lease, router.version), then, router)

    def _send(self, action: Send) -> None:
        router, owed = self.client.router, action.owed
        held = self._sums.get(owed.step)
        if held is None or router.version != self.pushes.route:
            return
        parts = () if owed.skipped else tuple(held.parts(router)[router.slots.index(action.ps)])
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

        self.client.submit(action.ps, Push(router.version, action.token, parts, True, b"", owed.skipped), then, router)

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
        held = self._sums.pop(owed.step, None)
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
