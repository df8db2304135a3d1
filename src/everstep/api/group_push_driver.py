"""Drives a member's machine of step pushes: what the group owes the ps for committed steps. Mode allreduce.

The links' threads bring answers, the control connection's brings maps, the script's thread waits. The machine is
touched under one lock.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator

from everstep.allreduce.collective import CollectiveError
from everstep.allreduce.step import Collective
from everstep.api.listeners import WorkerRuntime
from everstep.api.tables import TableSet
from everstep.brain.checkpoints import waits_for_mirrors
from everstep.errors import DeadlineError, EverstepError, InternalError
from everstep.ids import LeaseNo, ShardKey, Slot
from everstep.model.group import Group
from everstep.model.placement import Placement
from everstep.net.messages import Bad, DataAnswer, LeaseClosed, Moved, Opened, OpenShard, Push, Pushed, RowsPart
from everstep.tables.client import PsClient, Ticket
from everstep.tables.inputs import Inputs
from everstep.tables.routing import BatchRows, HeldRows, Router, TableRows, parts_by_ps
from everstep.tables.step_pushes import HELD_MAX, Action, Again, Open, Owed, Send, StepPushes, pusher_of
from everstep.tables.stepped_rows import Stepped, in_intervals
from everstep.tables.worker_protocol import watermarks_of

GIVE_UP_S = 300.0
"""So long a ps may take to have its partitions back, before the job is given up."""

KEPT_BYTES = 256 << 20
"""Gradients of steps that mirrors may lack, at most: with more, the next step waits until mirrors have them."""

GAP_S = 60.0
"""So long a ps may lack what is before, and nobody pushes it."""

AGAIN_S = 0.05
"""After this, what a ps was not ready for is tried again."""

_TICK_S = 0.1
_REST_S = 60.0  # for the rest of an accumulation, when the script is over


class _StepSum:
    """Holds the gradients of one committed step, of all members. They are routed, in memory that the ps see, while this
    member has to push them."""

    def __init__(self, content: list[Stepped], client: PsClient, infos: TableSet) -> None:
        self._content, self._client, self._tables = content, client, infos
        self.size_bytes = sum(found.keys.nbytes + found.grads.nbytes for found in content)
        self._version = -1
        self._parts: list[list[RowsPart]] = []
        self._rows: HeldRows | None = None

    def routed(self, router: Router) -> tuple[HeldRows, list[list[RowsPart]]]:
        """Return the rows, and their parts by position of the ps; routed anew by each newer map."""
        if self._rows is None or self._version != router.version:
            self.settle()
            self._rows = HeldRows()
            merged = list(self._route(self._rows, router))
            rates = {found.table: found.rate for found in self._content}
            self._parts = parts_by_ps(merged, len(router.slots), grads=True, rates=rates)
            self._version = router.version
        return self._rows, self._parts

    def settle(self) -> None:
        """Nobody has to be sent them now."""
        rows, self._rows = self._rows, None
        if rows is not None:
            rows.settle()

    def _route(self, held: HeldRows, router: Router) -> Iterator[TableRows]:
        specs = {info.spec.id: info.spec for info in self._tables.infos.values()}
        batch = BatchRows(self._client.memory, router)
        held.hold(batch)
        for found in self._content:
            routed, inverse, counts = router.route(found.table, found.keys)
            (rows,) = batch.add([(specs[found.table], routed, counts)], values=False)
            rows.grads[inverse] = found.grads
            yield rows


class GroupPushDriver:
    """See the top of this file."""

    def __init__(self, runtime: WorkerRuntime, tables: TableSet) -> None:
        self._runtime, self._tables, self.client = runtime, tables, runtime.client
        self.keeps = waits_for_mirrors(runtime.spec)
        self.pushes = StepPushes(runtime.slot, runtime.incarnation, self.keeps)
        self.failure: EverstepError | None = None
        self._lock = threading.RLock()
        self._changed = threading.Condition(self._lock)
        self._feed = Inputs(self._changed, self._do).feed  # gives the machine an input and does what it wants
        self._sums: dict[tuple[int, int], _StepSum] = {}  # by step and position
        self._gap_since = 0.0
        self.client.on_wait = self._waits_for_rows

    def __repr__(self) -> str:
        return f"<GroupPushDriver {self.pushes}>"

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
        """Note that the script waits for rows for long: whoever should have pushed what is before them may be lost."""
        self._feed(self.pushes.take_over)

    # ------------------------------------------------------------ steps

    def own(self, owed: Owed, content: list[Stepped]) -> None:
        """``owed`` is to be pushed, once it is known that everybody has it."""
        parts = in_intervals(owed, content if owed.learns else [])
        with self._lock:
            for part, found in parts:
                self._sums[part.step, part.lo] = _StepSum(found, self.client, self._tables)
                self.pushes.hold(part)

    def committed(self, step: int, rank: int, size: int, version: int) -> None:
        """Everybody in the group knows that ``step`` is committed: push this member's part of it. ``version``: of the
        map that all members had when they exchanged its gradients; -1: they had different ones."""
        router = self.client.router
        mine = [ps for i, ps in enumerate(router.slots) if pusher_of(i, size) == rank]
        route = version if router.version == version else -1
        self._feed(lambda: self.pushes.committed(step, route, mine))

    def progress(self, step: int) -> tuple[int, int]:
        """Return the first step of which this member has not done its part (``step`` where there is none), and the
        map."""
        with self._lock:
            owes = self.pushes.owes_from
            return step if owes is None else owes, self.client.router.version

    def consumed(self, before: int) -> None:
        """Forget the steps below ``before``, of which nobody owes anything. Raises InternalError where too many are
        held."""
        with self._lock:
            for owed in self.pushes.consumed(before):
                self._drop(owed)
            if not self.keeps and len(held := {owed.step for owed in self.pushes.held}) > HELD_MAX:
                raise InternalError(f"{self.pushes!r}: {len(held)} steps are not consumed")

    def void(self) -> None:
        """Drop all held steps: the state that they led to is lost everywhere, or nobody needs it."""
        with self._lock:
            for owed in self.pushes.void():
                self._drop(owed)

    def enter(self, group: Group) -> None:
        """Push all that this member holds: it is committed, as the members of ``group`` know."""
        self._feed(lambda: self.pushes.entered(group.lease))

    def flush(self, group: Group, collective: Collective) -> None:
        self.enter(group)
        self._wait(lambda: not self.pushes.owes, collective)

    def secure(self, collective: Collective) -> None:
        """Wait until mirrors have all that this member pushed. Raises CollectiveError as ``flush`` does."""
        self._feed(self.pushes.settle)
        self._wait(lambda: not self.pushes.lags and not self.pushes.owes, collective)

    @property
    def full(self) -> bool:
        """Return whether so much is kept that mirrors have to catch up now."""
        return self.keeps and sum(held.size_bytes for held in self._sums.values()) > KEPT_BYTES

    def push_rest(self, lease: LeaseNo = LeaseNo(0)) -> None:
        """Push what is owed, behind a loop, where all members do the same. Returns when it is acknowledged, and mirrors
        have it."""
        self._feed(lambda: self.pushes.entered(self.pushes.lease or lease))
        self._feed(self.pushes.settle)
        limit = time.monotonic() + _REST_S
        with self._changed:  # (stale: somebody in a later group is at the same end)
            while (self.pushes.owes or self.pushes.lags) and not self.pushes.stale and time.monotonic() < limit:
                if self.failure is not None or self.client.failure is not None:
                    return
                self._changed.wait(_TICK_S)

    def owes_nothing(self, collective: Collective) -> None:
        """Wait until nothing is owed. Raises CollectiveError as ``flush`` does."""
        self._wait(lambda: not self.pushes.owes, collective)

    def open(self, shard: ShardKey, group: Group, collective: Collective, mirrored: bool = False) -> list[int]:
        """Open ``shard`` everywhere under the group's lease; the watermarks of all partitions. ``mirrored``: when all
        mirrors have them."""
        while True:
            router = self.client.router
            request = OpenShard(shard, 0, group.lease, router.version, mirrored)
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
            if len(marks) == router.n_partitions:
                return marks
            time.sleep(AGAIN_S)  # partitions are on their way

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
                marks = watermarks_of(answer)[1] if isinstance(answer, Opened) else []
                known = action.ps, action.shard, action.life, isinstance(answer, Opened), min(marks, default=0)
                self._feed(lambda: self.pushes.opened(*known))
            elif not isinstance(answer, Moved):  # what is owed is said anew by the newer map
                self.fail(self._refused(action.ps, answer))

        request = OpenShard(action.shard, 0, action.lease, router.version, action.mirrored)
        self.client.submit(action.ps, request, then, router)

    def _send(self, action: Send) -> None:
        router, owed = self.client.router, action.owed
        held = self._sums.get((owed.step, owed.lo))
        if held is None or router.version != self.pushes.route:
            return
        rows, parts = held.routed(router) if owed.learns else (HeldRows(), [()] * len(router.slots))
        its_parts = tuple(parts[router.slots.index(action.ps)])
        rows.sent()

        def then(answer: DataAnswer, body: memoryview) -> None:
            with self._lock:
                rows.landed()
            if isinstance(answer, Pushed):
                if answer.nonfinite >= 0:
                    self.fail(InternalError(f"ps:{action.ps} found NaN or Inf in step {owed.step}, which is committed"))
                self._feed(lambda: self.pushes.pushed(action.ps, owed, action.life, answer))
                with self._lock:
                    if not self.pushes.waits(owed):
                        held.settle()
            elif not isinstance(answer, Moved):
                self.fail(self._refused(action.ps, answer))

        left_out = action.skipped and (owed.left_out or owed.learns)
        message = Push(
            router.version, action.token, its_parts, True, b"", action.skipped, left_out=left_out, more=action.more
        )
        self.client.submit(action.ps, message, then, router)

    def _say_again(self, action: Again) -> None:
        now = time.monotonic()
        self._gap_since = self._gap_since or now if self.pushes.gaps > 1 else now
        if now - self._gap_since > GAP_S:
            self.fail(InternalError(f"ps:{action.ps} lacks steps before those that it is sent, and nobody has them"))
            return
        self._runtime.later(AGAIN_S, lambda: self._feed(lambda: self.pushes.again(action.ps, action.life)))

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
