"""Is the worker's side of the exactly-once protocol, as a pure machine: no sockets, threads, clock or tensors.

Theory
------
A partition applies a push of ``[lo, hi)`` if and only if ``lo`` is its watermark for that shard and no later lease has
opened the shard. So a worker can never harm by pushing twice, late, or what somebody else pushed before; all it has
to see to is that nothing is *missing*. It does so with four rules:

1. **Open first.** A granted lease is opened at every ps (this fences older leases and returns the watermarks), and
   nothing is computed for it before all have answered.
2. **Reconcile.** Partitions may be at different watermarks ``v0 < v1 < ... < vk`` (the last owner died between its ps).
   Each *ragged* interval ``[vi, vi+1)`` is recomputed and pushed only to the partitions behind; from ``vk`` on
   everybody gets everything. Batch boundaries may therefore change at any moment, also in the middle of a shard.
3. **In order.** Pushes to one ps go in the order of their ranges. What is not acknowledged is sent again (a repeat is
   acknowledged as such); an answer "gap", a ps in a new life, or partitions that moved, lead back to rule 1 with the
   same lease.
4. **Done last.** "done" goes to the master only when every ps of the map has acknowledged up to the shard's end, and
   names the lives (incarnations) of those ps. "fenced" or "closed" ends a lease: it is dropped and given back.

**Kept work.** Opening a lease again does not void what was computed or is being computed: gradients are of samples,
not of the map they were routed by. Once all have opened, the batches in hand (computed and unacknowledged, or handed
out) are walked in order from the lowest watermark on: while the next one begins where that is and no partition stands
inside its range, it is kept, for the partitions that stand at its beginning. The first that does not fit ends this, and
the rest is computed again. So a partition that moves with its watermarks costs no computation; one that fell back to an
older snapshot costs just what it lacks.

One lease goes through::

    OPENING --all opened--> ACTIVE --all acknowledged--> REPORTED --Ok--> gone (finished)
       ^                      |           any state: fenced, closed, revoked, refused --> gone (dropped)
       +--- gap, new routing -+           leave() --> gone (given back)

Driving it
----------
Every input returns a list of actions for the driver. The driver owns sockets, time and gradients::

    begin -> AskShard -> answered -> SendOpen* -> opened* -> next_work -> computed -> SendPush* -> pushed* -> SendDone
          -> done_answered -> AskShard ... -> answered(EndOfData) -> Finished

* ``next_work`` hands out batches in order; compute them in that order and call ``step`` with those that one optimizer
  step consumes (also with those that turn out stale, see ``current``). They may be of several shards: a partition takes
  the step whole or not at all. Until then they are *held back*: ``hold_back`` says that the script is through with
  one. Each request for a shard names the leases of which nothing else is left (``pending``). When that is so of all
  shards that are not done, it counts as the end of the data.
* Keep a batch's gradients until its ``Settled``: they may be needed again, routed by another map.
* A connection that was lost and works again, or an answer that took too long: ``lost(ps)`` or ``master_lost()``; what
  is still owed is said again. Any answer may come twice or late; one that nothing waits for is ignored.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence
from enum import IntEnum
from itertools import pairwise

import msgspec

from everstep.brain.events import Answer, EndOfData, Fenced, Granted, Ok, Refused, Wait
from everstep.ids import Incarnation, LeaseNo, ShardKey, Slot
from everstep.model.placement import Placement
from everstep.model.shard import Lease, Span, Token
from everstep.net.messages import Opened, Pushed

# ---------------------------------------------------------------- work


class RangeWork(msgspec.Struct, frozen=True):
    """Is the samples ``[lo, hi)`` of ``lease.shard`` to compute once and push to ``partitions``.

    ``partitions``: by ps slot the bitmap for ``Push.partitions`` (little-endian bits; b"" = all partitions of that ps);
    a ps that is not in it has applied these samples already and gets nothing. ``retried``: somebody computed them
    before.
    """

    lease: Lease
    lo: int
    hi: int
    partitions: dict[Slot, bytes]
    life: int  # of the lease when it was handed out; it grows with each reopening
    retried: bool = False

    @property
    def key(self) -> tuple[LeaseNo, int, int, int]:
        """Names this work among all of a worker's."""
        return self.lease.no, self.life, self.lo, self.hi

    def joins(self, later: RangeWork) -> bool:
        """Return whether ``later`` can be computed and pushed together with this one (gradient accumulation)."""
        return (
            later.lease.no == self.lease.no
            and later.life == self.life
            and later.lo == self.hi
            and later.partitions == self.partitions
        )

    def join(self, later: RangeWork) -> RangeWork:
        """Return one work of both. Raises ValueError if they do not join."""
        if not self.joins(later):
            raise ValueError(f"{self!r} and {later!r} cannot be pushed together")
        return RangeWork(self.lease, self.lo, later.hi, self.partitions, self.life, self.retried or later.retried)


# ---------------------------------------------------------------- actions


class WorkerAction(msgspec.Struct, frozen=True, gc=False):
    """Is the base of what the machine wants done. Doing one twice is harmless."""


class AskShard(WorkerAction, frozen=True, gc=False):
    """Call the master (``ShardAsked``); bring its answer to ``answered``."""

    dataset: int
    until_epoch: int
    ask: int
    pending: tuple[LeaseNo, ...] = ()


class AskLater(WorkerAction, frozen=True, gc=False):
    """Nothing to do now: call ``ask_again(ask)`` in ``after_s`` seconds."""

    ask: int
    after_s: float


class SendOpen(WorkerAction, frozen=True, gc=False):
    """Open ``lease`` at ``ps``, with others or alone; bring the answer to ``opened`` or ``closed``."""

    ps: Slot
    lease: Lease


class SendPush(WorkerAction, frozen=True):
    """Send the gradients of ``work`` to ``ps`` with ``token`` and ``Push.partitions = bitmap``; answer to ``pushed``.

    ``skipped``: no gradients, only the watermarks move; ``left_out``: because the script left them out. ``more``: what
    the step consumed besides the token's range, in order. ``life``: to be given to ``pushed`` with the answer."""

    ps: Slot
    work: RangeWork
    token: Token
    bitmap: bytes
    skipped: bool = False
    life: int = 0
    left_out: bool = False
    more: tuple[Span, ...] = ()


class SendDone(WorkerAction, frozen=True):
    """Call the master (``ShardDone``); bring its answer to ``done_answered``."""

    lease: Lease
    servers: tuple[tuple[Slot, Incarnation], ...]
    skipped: tuple[tuple[int, int], ...] = ()
    route: int = 0  # of the map by which they acknowledged


class SendGiveBack(WorkerAction, frozen=True, gc=False):
    """Call the master (``ShardReturned``); when answered, ``given_back``. ``late``: the step of what was computed
    went on without it."""

    lease: Lease
    reason: str
    late: bool = False


class BatchFinished(WorkerAction, frozen=True):
    """The gradients of ``work`` are not needed any more. ``applied``: by every ps addressed; else it was given up.
    ``others``: what the same step consumed besides."""

    work: RangeWork
    applied: bool
    others: tuple[RangeWork, ...] = ()


class Drop(WorkerAction, frozen=True, gc=False):
    """This lease is over before its shard was done; nothing of it counts for this worker."""

    lease: Lease
    reason: str


class Halt(WorkerAction, frozen=True, gc=False):
    """This worker has been replaced, or must not go on: end, change nothing."""

    reason: str


class WorkFinished(WorkerAction, frozen=True, gc=False):
    """Nothing is left to do: the data ended, or everything was given back after ``leave``."""


# ---------------------------------------------------------------- the machine


class _State(IntEnum):
    OPENING = 0
    ACTIVE = 1
    REPORTED = 2


class _Batch:
    """Is a work handed out. ``partitions``: as in Work, by this map. ``held_back``: the script is through with it."""

    __slots__ = ("held_back", "partitions", "work")

    def __init__(self, work: RangeWork) -> None:
        self.work, self.partitions, self.held_back = work, work.partitions, False


class _Step:
    """Is a computed step, pushed to ``partitions``; ``waiting``: the ps that have not acknowledged it.

    ``wholes``: what it consumed of each lease, as one work each. ``spans``: the same in order, with what was learnt of;
    adjacent ones are one. ``left_out``: nothing was, by the script's own doing."""

    __slots__ = ("left_out", "partitions", "spans", "waiting", "wholes")

    def __init__(
        self, wholes: tuple[RangeWork, ...], spans: tuple[Span, ...], partitions: dict[Slot, bytes], left_out: bool
    ) -> None:
        self.wholes, self.spans, self.partitions, self.left_out = wholes, spans, partitions, left_out
        self.waiting: dict[Slot, Token] = {}

    @property
    def work(self) -> RangeWork:
        return self.wholes[0]

    @property
    def shared(self) -> bool:
        """Return whether it is of several leases."""
        return len(self.wholes) > 1


class _HeldLease:
    """Is a lease in this worker's hands."""

    __slots__ = (
        "everyone",
        "furthest",
        "handed",
        "lease",
        "life",
        "opened",
        "position",
        "ragged",
        "route",
        "sent",
        "skipped",
        "state",
    )

    def __init__(self, lease: Lease) -> None:
        self.lease = lease
        self.state = _State.OPENING
        self.life = 0
        self.route = 0  # of the map by which it was opened last
        self.opened: dict[Slot, tuple[Incarnation, Sequence[int], Sequence[int]]] = {}
        self.everyone: dict[Slot, bytes] = {}
        self.ragged: list[tuple[int, int, dict[Slot, bytes]]] = []  # last one is next
        self.position = lease.start  # next to hand out once nothing is ragged
        self.furthest = lease.start  # computed up to here before, by anyone
        self.handed: list[_Batch] = []  # handed out, not yet computed, in order
        self.sent: dict[tuple[int, int], _Step] = {}  # computed, in order of their ranges, all before those handed
        self.skipped: list[tuple[int, int]] = []

    def left(self) -> int:
        """Return how many samples are not handed out yet."""
        return self.lease.stop - self.position + sum(hi - lo for lo, hi, _ in self.ragged)

    @property
    def pending(self) -> bool:
        """Return whether all that its shard lacks is held back."""
        if self.state is not _State.ACTIVE or self.sent or self.left():
            return False
        return bool(self.handed) and all(batch.held_back for batch in self.handed)


class WorkerProtocol:
    """See the top of this file.

    ``window``: at most so many batches computed but not acknowledged before ``next_work`` says None. ``ask_ahead``: the
    next shard is asked for when at most so many batches of the current one are left to hand out (0: only at its end),
    so that it is open by the time it is needed.
    """

    def __init__(
        self, *, worker: Slot, incarnation: Incarnation, batch_samples: int, window: int = 2, ask_ahead: int = 2
    ) -> None:
        if batch_samples < 1 or window < 1:
            raise ValueError(f"batch_samples and window must be at least 1, not {batch_samples} and {window}")
        self.worker, self.incarnation = worker, incarnation
        self.batch_samples, self.window, self.ask_ahead = batch_samples, window, int(ask_ahead)
        self.retried = 0  # batches computed again: ragged intervals and what was lost on the way
        self.shards_done = 0
        self.halted = ""
        self._dataset, self._until = -1, 0
        self._asked = 0  # number of the newest request
        self._asking = False  # it has no final answer yet
        self._waiting = False  # it was answered "wait"
        self._ended = self._finished = False
        self._leaving = ""  # why
        self._route = -1
        self._lacking = False  # some partition's owner is not up
        self._partitions = 0
        self._owned: dict[Slot, tuple[int, ...]] = {}
        self._servers: dict[Slot, Incarnation] = {}
        self._held: dict[LeaseNo, _HeldLease] = {}  # in the order in which they are worked on
        self._returning: dict[LeaseNo, SendGiveBack] = {}
        self._unacknowledged = 0

    def __repr__(self) -> str:
        held = " ".join(f"{h.lease.shard:x}[{h.lease.start}:{h.lease.stop}]{h.state.name}" for h in self._held.values())
        return f"<worker:{self.worker} #{self.incarnation} ask={self._asked} {held}>"

    # ------------------------------------------------------------ facts for the driver

    def held(self) -> tuple[Lease, ...]:
        """Return all leases in hand: for the hello after a reconnect."""
        return tuple(h.lease for h in self._held.values())

    def progress(self) -> tuple[tuple[LeaseNo, int], ...]:
        """Return, by lease, the first position that not every ps has acknowledged: for the beat."""
        out = []
        for no, held in self._held.items():
            if held.sent:
                at = next(iter(held.sent))[0]
            elif held.handed:
                at = held.handed[0].work.lo
            elif held.ragged:
                at = held.ragged[-1][0]
            else:
                at = held.position
            out.append((no, at))
        return tuple(out)

    @property
    def pending(self) -> bool:
        """Whether all that is in hand is held back: the script is through with it, and has not stepped."""
        helds = [h for h in self._held.values() if h.state is not _State.REPORTED]
        return bool(helds) and all(h.pending for h in helds)

    @property
    def ended(self) -> bool:
        """Whether nothing more will be handed out: the data is at its end, or all that is left of it is pending."""
        return self._finished or (self._ended and self.pending)

    @property
    def unacknowledged(self) -> int:
        """Return how many batches are computed and not acknowledged by every ps."""
        return self._unacknowledged

    @property
    def finished(self) -> bool:
        return self._finished

    @property
    def asked(self) -> int:
        """Return number of the newest request for a shard."""
        return self._asked

    @property
    def asking(self) -> bool:
        """Return whether it has no final answer yet."""
        return self._asking

    @property
    def waiting(self) -> bool:
        """Whether the master had no shard for us, and we are to ask again."""
        return self._asking and self._waiting

    @property
    def route(self) -> int:
        """Return the route of the newest map (``Placement.route``), -1 before the first."""
        return self._route

    def current(self, work: RangeWork) -> bool:
        """Return whether ``work`` is still wanted; if not, its computation may be skipped (``computed`` says
        Settled)."""
        held = self._held.get(work.lease.no)
        return held is not None and any(b.work.life == work.life and b.work.lo == work.lo for b in held.handed)

    def awaits_open(self, ps: Slot, lease: LeaseNo) -> bool:
        """Return whether ``ps`` still owes the answer to a ``SendOpen`` (what it said did not fit the map: it is
        behind)."""
        held = self._held.get(lease)
        return held is not None and held.state is _State.OPENING and ps in self._servers and ps not in held.opened

    def set_batch_samples(self, batch_samples: int) -> None:
        """Use this many samples from the next ``next_work`` on. Any number at any moment is fine."""
        if batch_samples < 1:
            raise ValueError(f"batch_samples must be at least 1, not {batch_samples}")
        self.batch_samples = batch_samples

    # ------------------------------------------------------------ inputs: the master

    def begin(self, dataset: int, until_epoch: int) -> list[WorkerAction]:
        """Work on ``dataset`` until every epoch below ``until_epoch`` is done. Again after Finished: the next loop."""
        self._dataset, self._until = dataset, until_epoch
        self._ended = self._finished = False
        self._leaving = ""
        return self._more()

    def placement(self, placement: Placement) -> list[WorkerAction]:
        """Take in the map. A new routing (a ps in a new life, or with other partitions) reopens all that is in hand;
        one that differs in mirrors only, or is older, changes nothing."""
        if placement.route <= self._route:
            return []
        servers = {s.slot: s.incarnation for s in placement.servers}
        owned: dict[Slot, list[int]] = {s: [] for s in servers}
        for partition, slot in enumerate(placement.owner):
            owned.setdefault(slot, []).append(partition)
        self._owned = {s: tuple(b) for s, b in owned.items() if b}
        self._servers = {s: i for s, i in servers.items() if s in self._owned}
        self._lacking = len(self._servers) < len(self._owned)
        self._route, self._partitions = placement.route, placement.partitions
        out: list[WorkerAction] = []
        for held in self._held.values():
            if held.state is not _State.REPORTED:
                self._open(held, out)
        return out

    def ask_again(self, ask: int) -> list[WorkerAction]:
        """The time of an ``AskLater`` has come."""
        if not (self._asking and self._waiting and ask == self._asked):
            return []
        self._waiting = False
        return [self._ask()]

    def answered(self, ask: int, answer: Answer) -> list[WorkerAction]:
        """Take in the answer to an ``AskShard``: Granted, Wait, EndOfData, Fenced, or Refused (nobody registered the
        plan)."""
        if not self._asking or ask != self._asked:
            return []
        out: list[WorkerAction] = []
        if isinstance(answer, Granted):
            self._asking = self._waiting = False
            lease = answer.lease
            if lease.no in self._held or lease.no in self._returning:
                return self._more()
            for held in [h for h in self._held.values() if h.lease.shard == lease.shard]:
                self._drop(held, "the shard was granted anew", out)
            if self._leaving:
                self._give_back(lease, self._leaving, out)
                return out
            self._held[lease.no] = held = _HeldLease(lease)
            self._open(held, out)
            out += self._more()
        elif isinstance(answer, Wait):
            if self._leaving:  # nothing was granted, so nothing can come of it
                self._asking = False
                self._finish(out)
            else:
                self._waiting = True
                out.append(AskLater(ask, answer.retry_after_s))
        elif isinstance(answer, EndOfData):
            self._asking = self._waiting = False
            self._ended = True
            self._finish(out)
        elif isinstance(answer, Fenced):
            return self.fenced(answer.reason)
        elif isinstance(answer, Refused):
            return self.fenced(answer.error)
        return out

    def done_answered(self, lease: LeaseNo, answer: Answer) -> list[WorkerAction]:
        """Take in the answer to a ``SendDone``: Ok (the shard is finished), Refused (the lease was not current),
        Fenced."""
        held = self._held.get(lease)
        if isinstance(answer, Fenced):
            return self.fenced(answer.reason)
        if held is None or held.state is not _State.REPORTED:
            return []
        out: list[WorkerAction] = []
        if isinstance(answer, Ok):
            del self._held[lease]
            self.shards_done += 1
        elif isinstance(answer, Refused):
            self._drop(held, answer.error, out)
        # What we waited for may have been our own shard.
        out += self.ask_again(self._asked) if self._waiting else self._more()
        self._finish(out)
        return out

    def given_back(self, lease: LeaseNo) -> list[WorkerAction]:
        """A ``SendGiveBack`` was answered."""
        self._returning.pop(lease, None)
        out: list[WorkerAction] = []
        self._finish(out)
        return out

    def revoked(self, lease: LeaseNo) -> list[WorkerAction]:
        """The master took this lease back (``Revoke`` order, or ``Welcome.revoked``)."""
        out: list[WorkerAction] = []
        held = self._held.get(lease)
        if held is not None:
            self._drop(held, "revoked by the master", out)
            out += self._more()
        self._returning.pop(lease, None)
        self._finish(out)
        return out

    def fenced(self, reason: str) -> list[WorkerAction]:
        """The master says that this worker was replaced."""
        out: list[WorkerAction] = []
        for held in list(self._held.values()):
            self._drop(held, reason, out)
        self._returning.clear()
        self._asking = self._waiting = False
        self._ended = self._finished = True
        self.halted = reason or "fenced"
        out.append(Halt(self.halted))
        return out

    def master_lost(self) -> list[WorkerAction]:
        """The connection to the master works again, or an answer is overdue: says again what it owes us."""
        out: list[WorkerAction] = []
        if self._asking and not self._waiting:
            out.append(self._ask())
        out += [self._done(h) for h in self._held.values() if h.state is _State.REPORTED]
        out += self._returning.values()
        return out

    def leave(self, reason: str) -> list[WorkerAction]:
        """Give back what is not finished and end; shards whose "done" is on its way are waited for."""
        self._leaving = reason or "leaving"
        out: list[WorkerAction] = []
        for held in [h for h in self._held.values() if h.state is not _State.REPORTED]:
            self._drop(held, reason, out)
            self._give_back(held.lease, reason, out)
        if self._waiting:  # nothing was granted, so nothing can come of it
            self._asking = self._waiting = False
        self._finish(out)
        return out

    # ------------------------------------------------------------ inputs: the ps

    def opened(
        self, ps: Slot, lease: LeaseNo, incarnation: Incarnation, partitions: Sequence[int], watermarks: Sequence[int]
    ) -> list[WorkerAction]:
        """Take in that a ps opened the shard. ``partitions`` ascending and, aligned with them, their ``watermarks``."""
        held = self._held.get(lease)
        if held is None or held.state is not _State.OPENING or self._servers.get(ps) != incarnation:
            return []
        if tuple(partitions) != self._owned[ps]:  # it moves partitions: a new map, or a repeated open, is on its way
            return []
        held.opened[ps] = (incarnation, partitions, watermarks)
        if len(held.opened) < len(self._servers) or self._lacking:
            return []
        out: list[WorkerAction] = []
        self._reconcile(held)
        held.state = _State.ACTIVE
        self._keep(held, out)
        if held.ragged or held.position > held.lease.start:
            # Somebody began it and was lost: finish it before what nobody has touched.
            self._held = {held.lease.no: held, **self._held}
        self._report(held, out)
        out += self._more()
        return out

    def closed(self, ps: Slot, lease: LeaseNo, reason: str) -> list[WorkerAction]:
        """A ps refused to open: a later lease did, or the shard is over."""
        return self._over(lease, reason)

    def pushed(self, ps: Slot, token: Token, answer: Pushed, life: int = -1) -> list[WorkerAction]:
        """Take in the answer of ``ps`` to the push with ``token``. ``life``: of its ``SendPush``; -1: answers of one ps
        come in the order of what it was sent."""
        held = self._held.get(token.lease)
        sent = self._sent(held, token) if held is not None else None
        # A late answer from before a reopening may match a token of now (same range, same life of the ps), though the
        # ps owns other partitions now: it does not count for them.
        if held is None or sent is None or ps not in sent.waiting or life not in (-1, held.life):
            return []
        if sent.waiting[ps].ps_incarnation != token.ps_incarnation:
            return []
        if answer.nonfinite >= 0:
            return [Halt(f"the gradient of samples {token.lo}..{token.hi} holds NaN or Inf (table {answer.nonfinite})")]
        if answer.fenced:
            return self._over(token.lease, f"ps:{ps} says that the lease is over")
        out: list[WorkerAction] = []
        if answer.gap >= 0:
            if sent.shared:
                self._dissolve(sent, out)
            else:
                self._open(held, out)
            return out
        del sent.waiting[ps]
        if not sent.waiting:
            self._unacknowledged -= 1
            out.append(BatchFinished(sent.work, True, sent.wholes[1:]))
            for whole in sent.wholes:
                of = self._held[whole.lease.no]
                del of.sent[whole.lo, whole.hi]
                if not of.sent:
                    self._report(of, out)
        return out

    def lost(self, ps: Slot) -> list[WorkerAction]:
        """The connection to ``ps`` works again, or an answer is overdue: opens and pushes it owes us, in order."""
        out: list[WorkerAction] = []
        for held in self._held.values():
            if held.state is _State.OPENING:
                if ps in self._servers and ps not in held.opened:
                    out.append(SendOpen(ps, held.lease))
                continue
            for sent in held.sent.values():
                if ps in sent.waiting and sent.work.lease.no == held.lease.no:
                    out.append(self._push(held, sent, ps))
        return out

    # ------------------------------------------------------------ work

    def next_work(self) -> RangeWork | None:
        """Return the next batch to compute, or None: wait for an answer (or the data is at its end, see
        ``finished``)."""
        if self._unacknowledged >= self.window or not self._servers:
            return None
        for held in self._held.values():
            if held.state is not _State.ACTIVE:
                if held.state is _State.OPENING:
                    return None  # in order: the shard behind it waits too
                continue
            if held.ragged:
                lo, end, partitions = held.ragged[-1]
                hi = min(end, lo + self.batch_samples)
                if hi == end:
                    held.ragged.pop()
                else:
                    held.ragged[-1] = (hi, end, partitions)
            elif held.position < held.lease.stop:
                lo = held.position
                held.position = hi = min(held.lease.stop, lo + self.batch_samples)
                partitions = held.everyone
            else:
                continue
            retried = lo < held.furthest
            self.retried += retried
            work = RangeWork(held.lease, lo, hi, partitions, held.life, retried)
            held.handed.append(_Batch(work))
            return work
        return None

    def more(self) -> list[WorkerAction]:
        """Call after ``next_work``: asks for the next shard when the current one is about to run out."""
        return self._more()

    def put_back(self, work: RangeWork) -> bool:
        """The newest work handed out is not computed after all: ``next_work`` begins there again. False: it is not
        the newest one, or not wanted any more."""
        held = self._held.get(work.lease.no)
        if held is None or held.state is not _State.ACTIVE or not held.handed or held.handed[-1].work != work:
            return False
        partitions = held.handed.pop().partitions
        self.retried -= work.retried
        if held.position == work.hi and partitions == held.everyone and not held.ragged:
            held.position = work.lo
        elif held.ragged and held.ragged[-1][0] == work.hi and held.ragged[-1][2] == partitions:
            held.ragged[-1] = (work.lo, held.ragged[-1][1], partitions)
        else:
            held.ragged.append((work.lo, work.hi, partitions))
        return True

    def alike(self, works: Sequence[RangeWork]) -> bool:
        """Whether all of ``works`` are still wanted, and by the same partitions: then one step can consume them."""
        found = []
        for work in works:
            held = self._held.get(work.lease.no)
            found.append(next((b for b in held.handed if b.work == work), None) if held is not None else None)
        return all(b is not None and found[0] is not None and b.partitions == found[0].partitions for b in found)

    def split(self, work: RangeWork, at: int) -> tuple[RangeWork, RangeWork] | None:
        """Return two works of one that is handed out, cut at ``at``; None: it is not wanted any more."""
        held = self._held.get(work.lease.no)
        for i, batch in enumerate(held.handed if held is not None else ()):
            if batch.work == work and held is not None:
                first, rest = msgspec.structs.replace(work, hi=at), msgspec.structs.replace(work, lo=at)
                pair = _Batch(first), _Batch(rest)
                for half in pair:
                    half.partitions = batch.partitions
                held.handed[i : i + 1] = pair
                return first, rest
        return None

    def hold_back(self, work: RangeWork) -> list[WorkerAction]:
        """The script is through with ``work``, and no step has consumed it: one to come will."""
        held = self._held.get(work.lease.no)
        batch = next((b for b in held.handed if b.work == work), None) if held is not None else None
        if batch is None:
            return []
        batch.held_back = True
        return self._more()

    def computed(self, work: RangeWork, skipped: bool = False) -> list[WorkerAction]:
        """``work`` (possibly joined of several) is computed; ``skipped``: its gradients are not finite and dropped."""
        return self.step([(work, not skipped)], skipped=skipped)

    def step(self, works: Sequence[tuple[RangeWork, bool]], *, skipped: bool = False) -> list[WorkerAction]:
        """One optimizer step consumes ``works``, in the order in which they were handed out.

        With each: whether something was learnt from it. ``skipped``: its gradients are not finite, and dropped; else a
        step that learnt nothing was left out by the script."""
        wholes = wholes_of(work for work, _ in works)
        spans: list[Span] = []
        for work, learnt in works:
            if spans and (spans[-1].lease, spans[-1].hi, spans[-1].learnt) == (work.lease.no, work.lo, learnt):
                spans[-1] = msgspec.structs.replace(spans[-1], hi=work.hi)
            else:
                spans.append(Span(work.lease.shard, work.lo, work.hi, work.lease.no, learnt))
        step = _Step(tuple(wholes), tuple(spans), {}, not skipped and not any(learnt for _, learnt in works))
        mine = self._take(wholes, works)
        helds = [self._held[no] for no in mine if no in self._held]
        fits = len(helds) == len(wholes) and self._fit(wholes, mine, [work for work, _ in works])
        if step.shared and any(held.state is not _State.ACTIVE for held in helds):
            fits = False
        if not fits:
            # Handed out before a reopening that kept only some of it: no partition takes the sum.
            out: list[WorkerAction] = [BatchFinished(step.work, False, step.wholes[1:])]
            for held in helds:
                if held.state is _State.ACTIVE and mine[held.lease.no]:
                    self._open(held, out)
            return out
        step.partitions = mine[wholes[0].lease.no][0].partitions
        for held, whole in zip(helds, wholes, strict=True):
            held.furthest = max(held.furthest, whole.hi)
            held.sent[whole.lo, whole.hi] = step
            if skipped and (whole.lo, whole.hi) not in held.skipped:
                held.skipped.append((whole.lo, whole.hi))
        self._unacknowledged += 1
        if all(held.state is _State.ACTIVE for held in helds):
            return self._send(step)
        return []  # once it is open again

    def _take(
        self, wholes: Sequence[RangeWork], works: Sequence[tuple[RangeWork, bool]]
    ) -> dict[LeaseNo, list[_Batch]]:
        """Take the batches that ``works`` are made of out of what is handed out. Those still wanted, by lease."""
        mine: dict[LeaseNo, list[_Batch]] = {whole.lease.no: [] for whole in wholes}
        for no, found in mine.items():
            held = self._held.get(no)
            if held is None or held.state is _State.REPORTED:
                continue
            ours = [work for work, _ in works if work.lease.no == no]
            found += [
                b
                for b in held.handed
                if any(b.work.life == w.life and w.lo <= b.work.lo and b.work.hi <= w.hi for w in ours)
            ]
            held.handed = [b for b in held.handed if b not in found]
        return mine

    def _fit(self, wholes: Sequence[RangeWork], mine: dict[LeaseNo, list[_Batch]], works: Sequence[RangeWork]) -> bool:
        """Return whether all of a step is wanted still, by the same partitions, and each sample is in it once: a work
        from before a reopening may stand beside the one that was handed out anew for it."""
        batches = [b for found in mine.values() for b in found]
        for no in mine:
            if any(a.hi != b.lo for a, b in pairwise(work for work in works if work.lease.no == no)):
                return False
        if not all(mine.values()) or any(b.partitions != batches[0].partitions for b in batches):
            return False
        return all(
            found[0].work.lo == whole.lo
            and found[-1].work.hi == whole.hi
            and all(a.work.hi == b.work.lo for a, b in pairwise(found))
            for whole, found in zip(wholes, mine.values(), strict=True)
        )

    def late(self, work: RangeWork) -> list[WorkerAction]:
        """``work`` is computed, but its step went on without it: none of it is pushed. Its lease goes back, so that
        whoever is free computes it again."""
        out: list[WorkerAction] = [BatchFinished(work, False)]
        return out + self._over(work.lease.no, "its step went on without it", late=True)

    # ------------------------------------------------------------ inside

    def _sent(self, held: _HeldLease, token: Token) -> _Step | None:
        """Return the step whose push had this token."""
        return next(
            (
                s
                for (lo, _), s in held.sent.items()
                if lo == token.lo and s.spans[0].hi == token.hi and s.work.lease.no == token.lease
            ),
            None,
        )

    def _dissolve(self, step: _Step, out: list[WorkerAction]) -> None:
        """Give up a step of several leases: partitions differ in what they have of them. Each lease is opened again,
        and what its partitions lack is computed anew."""
        self._unacknowledged -= 1
        out.append(BatchFinished(step.work, False, step.wholes[1:]))
        helds = [self._held[whole.lease.no] for whole in step.wholes if whole.lease.no in self._held]
        for held in helds:
            held.sent = {at: s for at, s in held.sent.items() if s is not step}
        for held in helds:
            if held.state is _State.ACTIVE:
                self._open(held, out)

    def _token(self, work: RangeWork, ps_incarnation: Incarnation) -> Token:
        return Token(work.lease.shard, work.lo, work.hi, work.lease.no, ps_incarnation, self.worker, self.incarnation)

    def _send(self, step: _Step) -> list[WorkerAction]:
        """Push a computed step to all its partitions."""
        held = self._held[step.work.lease.no]
        step.waiting = {ps: self._token(step.work, held.opened[ps][0]) for ps in step.partitions}
        return [self._push(held, step, ps) for ps in step.waiting]

    def _push(self, held: _HeldLease, step: _Step, ps: Slot) -> SendPush:
        first, *more = step.spans
        token = step.waiting[ps]
        if more:
            token = msgspec.structs.replace(token, lo=first.lo, hi=first.hi)
        skipped, nothing = not first.learnt, not any(span.learnt for span in step.spans)
        left_out = skipped and (step.left_out or not nothing)
        return SendPush(ps, step.work, token, step.partitions[ps], skipped, self._life(step), left_out, tuple(more))

    def _life(self, step: _Step) -> int:
        return self._held[step.work.lease.no].life

    def _more(self) -> list[WorkerAction]:
        """Ask for a shard if there is too little left to do."""
        if self._asking or self._dataset < 0 or self._ended or self._leaving:
            return []
        left = 0
        for held in self._held.values():
            if held.state is _State.OPENING:
                return []
            left += held.left()
        if left > self.ask_ahead * self.batch_samples or (left and not self.ask_ahead):
            return []
        self._asked += 1
        self._asking, self._waiting = True, False
        return [self._ask()]

    def _ask(self) -> AskShard:
        pending = tuple(no for no, held in self._held.items() if held.pending)
        return AskShard(self._dataset, self._until, self._asked, pending)

    def _open(self, held: _HeldLease, out: list[WorkerAction]) -> None:
        """Forget all positions of this lease and open it (again) everywhere; ``_keep`` will see what still fits."""
        held.state = _State.OPENING
        held.route = self._route
        held.life += 1
        held.opened.clear()
        held.ragged = []
        for step in held.sent.values():
            step.waiting = {}
        out += [SendOpen(ps, held.lease) for ps in self._servers]
        for step in [s for s in held.sent.values() if s.shared]:
            self._dissolve(step, out)

    def _forget(self, held: _HeldLease, out: list[WorkerAction]) -> None:
        alone = [step for step in held.sent.values() if not step.shared]
        shared = [step for step in held.sent.values() if step.shared]
        self._unacknowledged -= len(alone)
        out += [BatchFinished(step.work, False) for step in alone]
        held.sent = {}
        for step in shared:
            self._dissolve(step, out)

    def _reconcile(self, held: _HeldLease) -> None:
        """Turn the watermarks of all partitions into ragged intervals and a common position."""
        levels = sorted({max(w, held.lease.start) for _, _, marks in held.opened.values() for w in marks})
        held.everyone = dict.fromkeys(held.opened, b"")
        held.position = min(levels[-1], held.lease.stop)
        held.furthest = max(held.furthest, held.position)
        held.ragged = []
        for lo, hi in pairwise(levels):
            behind: dict[Slot, bytes] = {}
            for ps, (_, partitions, marks) in held.opened.items():
                late = [b for b, w in zip(partitions, marks, strict=True) if w <= lo]
                if len(late) == len(partitions):
                    behind[ps] = b""
                elif late:
                    behind[ps] = bitmap(late, self._partitions)
            held.ragged.append((lo, hi, behind))
        held.ragged.reverse()

    def _keep(self, held: _HeldLease, out: list[WorkerAction]) -> None:
        """Keep, of the batches in hand, those that the partitions still need as they are (see the top of this file)."""
        in_hand: list[_Step | _Batch] = [*held.sent.values(), *held.handed]
        held.sent, held.handed = {}, []
        at = lowest = held.ragged[-1][0] if held.ragged else held.position
        for batch in in_hand:
            work = batch.work
            partitions = self._cut(held, work.lo, work.hi) if work.lo == at else None
            if partitions is not None:
                at, batch.partitions = work.hi, partitions
                if isinstance(batch, _Step):
                    held.sent[work.lo, work.hi] = batch
                    out += self._send(batch)
                else:
                    held.handed.append(batch)
            else:
                at = at if work.hi <= lowest else -1  # nothing after it fits
                if isinstance(batch, _Step):
                    self._unacknowledged -= 1
                    out.append(BatchFinished(work, work.hi <= lowest))

    def _cut(self, held: _HeldLease, lo: int, hi: int) -> dict[Slot, bytes] | None:
        """Take ``[lo, hi)``, which begins at the next position, out of what is to be handed out; the partitions that
        need it, or None where some partition stands inside it."""
        if not held.ragged:
            if hi > held.lease.stop:
                return None
            held.position = hi
            return held.everyone
        _, end, partitions = held.ragged[-1]
        if hi > end:
            return None
        if hi == end:
            held.ragged.pop()
        else:
            held.ragged[-1] = (hi, end, partitions)
        return partitions

    def _report(self, held: _HeldLease, out: list[WorkerAction]) -> None:
        """Say "done" if nothing of this shard is left to hand out, to compute or to acknowledge."""
        if held.position >= held.lease.stop and not held.ragged and not held.handed and not held.sent:
            held.state = _State.REPORTED
            out.append(self._done(held))

    def _done(self, held: _HeldLease) -> SendDone:
        servers = tuple(sorted((ps, opened[0]) for ps, opened in held.opened.items()))
        return SendDone(held.lease, servers, tuple(sorted(held.skipped)), held.route)

    def _over(self, lease: LeaseNo, reason: str, late: bool = False) -> list[WorkerAction]:
        out: list[WorkerAction] = []
        held = self._held.get(lease)
        if held is not None and held.state is not _State.REPORTED:
            self._drop(held, reason, out)
            self._give_back(held.lease, reason, out, late)
            out += self._more()
        return out

    def _drop(self, held: _HeldLease, reason: str, out: list[WorkerAction]) -> None:
        del self._held[held.lease.no]
        self._forget(held, out)
        out.append(Drop(held.lease, reason))

    def _give_back(self, lease: Lease, reason: str, out: list[WorkerAction], late: bool = False) -> None:
        back = self._returning[lease.no] = SendGiveBack(lease, reason, late)
        out.append(back)

    def _finish(self, out: list[WorkerAction]) -> None:
        over = self._ended or (bool(self._leaving) and not self._asking)
        if over and not self._finished and not self._held and not self._returning:
            self._finished = True
            out.append(WorkFinished())


# ---------------------------------------------------------------- helpers


def wholes_of(works: Iterable[RangeWork]) -> list[RangeWork]:
    """Return what a step of these works consumes of each lease, as one work each."""
    wholes: dict[LeaseNo, RangeWork] = {}
    for work in works:
        known = wholes.get(work.lease.no)
        if known is not None:
            work = msgspec.structs.replace(known, hi=work.hi, retried=known.retried or work.retried)
        wholes[work.lease.no] = work
    return list(wholes.values())


def bitmap(partitions: Iterable[int], n_partitions: int) -> bytes:
    """Return ``Push.partitions`` for these partitions: little-endian bits, bit b = partition b."""
    bits = 0
    for b in partitions:
        bits |= 1 << b
    return bits.to_bytes((n_partitions + 7) // 8, "little")


def watermarks_of(message: Opened) -> tuple[list[int], list[int]]:
    """Return the partitions and watermarks inside an ``Opened``, for ``WorkerProtocol.opened``."""
    return partitions_of(message.partitions), marks_of(message.watermarks)


def partitions_of(encoded: bytes) -> list[int]:
    """Return partitions from their bytes, int32 each."""
    found = array("i")
    found.frombytes(encoded)
    return found.tolist()


def marks_of(encoded: bytes) -> list[int]:
    """Return watermarks from their bytes, int64 each."""
    found = array("q")
    found.frombytes(encoded)
    return found.tolist()


def shards_held(protocol: WorkerProtocol) -> tuple[ShardKey, ...]:
    """Return the shards in hand, in the order in which they are worked on."""
    return tuple(lease.shard for lease in protocol.held())
