"""Runs mode allreduce with tables on the ps, under virtual time: committed steps reach every ps once, whoever is lost.

The group is that of ``sim.group``; ``tables.step_pushes`` is the machine under test, round it a model of its shell
(``api.group_tables``): rows are exchanged before the vote, a barrier follows the vote, each ps is served by one member,
and the others hold what it needs. The ps are ledgers that live on; the way to them loses, repeats and delays messages.
In some runs the script steps its tables in every second or third step only.

Where mirrors lag (``lag_s``), ps are lost, too: a new life begins with what the mirrors of each partition had. Members
keep steps until a ps has said that its mirrors have them (``ps.mirrored_pushes``, the real one).
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import partial
from typing import Any

import msgspec

from everstep.allreduce.group_machine import GroupMachine
from everstep.ids import Incarnation, LeaseNo, PartitionId, ShardKey, Slot
from everstep.model.group import Committed
from everstep.model.shard import split_key
from everstep.native.ledger import PushLedger, bitmap_partitions
from everstep.net.messages import Pushed
from everstep.policies.step_split import StepCut as StepCut
from everstep.ps.mirrored_pushes import NOTHING, MirroredPushes, SeenPush
from everstep.sim.group import GroupScenario, GroupSimulation, GroupWorker, Ring, group_scenario
from everstep.sim.kernel import SimProcess, Violation
from everstep.sim.simulation import Parts, SimOutcome
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

SERVERS = 2
PARTITIONS = 3
OVERDUE_S = 0.4  # a request to a ps without an answer is said again
Marks = dict[int, list[int]]  # of a partition: watermark and fence, by shard
TRIES = 200  # surveys that find a ps without what the group has, in a row
FULL = 0.02  # share of the steps before which a member waits for mirrors
WAIT_S = 1.0  # who waits for its own pushes so long takes over those of others, too


class TablePs(SimProcess):
    """Is a ledger. Every apply is told to the simulation."""

    def __init__(self, sim: HybridSimulation, slot: Slot) -> None:
        super().__init__(sim.kernel, f"ps:{slot}.1", "node0")
        self.sim, self.slot, self.incarnation = sim, slot, Incarnation(1)
        self.mine = [b for b in range(PARTITIONS) if b % SERVERS == slot]
        self.ledger: PushLedger = sim.parts.ledger(PARTITIONS, self.mine)
        self.pushes = MirroredPushes()
        self.safe: dict[int, Marks] = {b: {} for b in self.mine}  # what mirrors have
        self.opened: dict[int, int] = {}  # by partition: number of its open change
        self.changes = 0
        if sim.lag_s:
            self.later(sim.lag_s * self.kernel.random(), self.flush)

    def on_open(
        self, worker: HybridWorker, request: int, shard: ShardKey, lease: LeaseNo, mirrored: bool = False
    ) -> None:
        answer = self.ledger.open(shard, 0, lease)
        if mirrored:
            self.arrived(self.marks(self.mine))
            self.opened.clear()
        self.sim.net.send(self, worker, worker.answered, request, answer)

    def on_push(
        self,
        worker: HybridWorker,
        request: int,
        send: Send,
        content: tuple[Range, ...],
        lineage: int,
    ) -> None:
        token, more = send.token, [(s.shard, s.lo, s.hi, s.lease, s.learnt) for s in send.more]
        if token.ps_incarnation != self.incarnation:
            return  # (whoever sent it hears of the new life)
        r = self.ledger.push(token.shard, token.lo, token.hi, token.lease, b"", send.skipped, more)
        if r.applied:
            applied = bitmap_partitions(r.partitions) or self.mine
            self.sim.reached(self.slot, applied, lineage, send.owed, content, worker)
            for b in applied:
                if b not in self.opened:
                    self.changes += 1
                    self.opened[b] = self.changes
        if r.gap < 0 and not r.fenced:
            last = more[-1] if more else (token.shard, token.lo, token.hi)
            self.pushes.pushed((ShardKey(last[0]), last[2]))
        mirrored = self.pushes.mirrored if self.sim.lag_s else NOTHING
        answer = Pushed(r.applied, r.repeats, r.gap, r.fenced, mirrored=mirrored)
        self.sim.net.send(self, worker, worker.answered, request, answer)

    # ------------------------------------------------------------ mirrors that lag

    def marks(self, partitions: Iterable[int]) -> dict[int, Marks]:
        return {b: {of: list(found) for of, found in self.ledger.partitions[b].shards.items()} for b in partitions}

    def flush(self) -> None:
        """Send mirrors of some partitions what they lack. It arrives a little later, unless the ps is lost first."""
        rng = self.kernel.rng
        seen, sent = self.pushes.newest(), self.marks(b for b in self.mine if rng.random() < 0.8)
        for b in sent:
            self.opened.pop(b, None)
        closed = min(self.opened.values(), default=self.changes + 1) - 1
        self.later(rng.choice([0.001, 0.05, 0.3]) * rng.random(), self.looks, seen, closed, sent, self.incarnation)
        self.later(self.sim.lag_s * (0.5 + 0.5 * rng.random()), self.flush)

    def looks(self, seen: SeenPush, closed: int, sent: dict[int, Marks], life: Incarnation) -> None:
        if life == self.incarnation:
            self.arrived(sent)
            self.pushes.made(seen, self.changes, 0)
            self.pushes.confirmed(closed, 0)

    def arrived(self, sent: dict[int, Marks]) -> None:
        """Mirrors have this; what was sent earlier may come later, and is nothing new then."""
        for b, marks in sent.items():
            for shard, (mark, fence) in marks.items():
                known = self.safe[b].setdefault(shard, [0, 0])
                known[:] = max(known[0], mark), max(known[1], fence)

    def lose(self) -> None:
        """Begin another life, with what the mirrors had."""
        self.incarnation = Incarnation(self.incarnation + 1)
        self.ledger = self.sim.parts.ledger(PARTITIONS, self.mine)
        for b in self.mine:
            self.ledger.partitions[b].shards = {of: list(found) for of, found in self.safe[b].items()}
        self.opened.clear()
        self.pushes.came()


class HybridWorker(GroupWorker):
    """Has besides what it owes the ps. ``beside``: the barrier behind a vote is due, in this ring, for this step."""

    pushes_class: type[StepPushes] = StepPushes

    def __init__(self, sim: Any, slot: Slot, incarnation: Incarnation, node: str) -> None:
        super().__init__(sim, slot, incarnation, node)
        self.hsim: HybridSimulation = sim
        self.pushes = self.pushes_class(slot, incarnation, sim.lag_s > 0)
        self.tries = 0
        self.route = -1  # that all had at the exchange of this step; -1: they had different ones
        self.requests = 0
        self.asked_ps: dict[int, tuple[float, TablePs, str, tuple[Any, ...], Callable[[Any], None]]] = {}
        self.voting = False
        self.beside: tuple[Ring, Owed] | None = None
        self.known: tuple[Ring | None, int] = (None, -1)  # surveyed: in which ring, and epoch
        self.surveyed_at = -1  # where the step begins before which it was
        self.stop = 0  # a position that the ps are at; the next step ends there at the latest
        self.stage: tuple[Ring | None, str] = (None, "")  # of a survey
        self.marks: dict[tuple[Slot, ShardKey], list[int]] = {}
        self.held_back = HeldBack()
        self.held_of: int | None = 0  # state (its chain) that this is a part of
        self.contents: dict[tuple[int, int], tuple[Range, ...]] = {}  # of what is owed: whose gradients are in it
        self.lineage_of_held: int | None = None
        self.pushed = 0
        self.waits_for_ps = 0.0
        self.placed()

    # ------------------------------------------------------------ requests to the ps

    def placed(self) -> None:
        """Hear of the newest map. What was sent to a life that is over is never answered."""
        lives = {ps.slot: ps.incarnation for ps in self.hsim.ps.values()}
        for number, (_, ps, handler, args, _) in list(self.asked_ps.items()):
            if handler == "on_push" and args[0].token.ps_incarnation != lives[ps.slot]:
                del self.asked_ps[number]
        self.feed(self.pushes.placed(self.hsim.route, lives))

    def request(self, ps: TablePs, handler: str, args: tuple[Any, ...], then: Callable[[Any], None]) -> None:
        self.requests += 1
        self.asked_ps[self.requests] = self.kernel.now, ps, handler, args, then
        self.net.send(self, ps, getattr(ps, handler), self, self.requests, *args)

    def answered(self, request: int, answer: Any) -> None:
        """Each request is answered once, as on a connection."""
        found = self.asked_ps.pop(request, None)
        if found is not None:
            found[4](answer)
            self.pump()

    def attend(self) -> None:
        now = self.kernel.now
        for number, (at, ps, handler, args, then) in list(self.asked_ps.items()):
            if now - at > OVERDUE_S:
                self.asked_ps[number] = now, ps, handler, args, then
                self.net.send(self, ps, getattr(ps, handler), self, number, *args)
        if self.waits_for_ps and now - self.waits_for_ps > WAIT_S:
            self.waits_for_ps = now
            self.feed(self.pushes.take_over())
        super().attend()

    def feed(self, actions: list[Action]) -> None:
        for action in actions:
            if isinstance(action, Again):
                self.later(0.05, self.say_again, action)
                continue
            ps = self.hsim.ps[action.ps]
            if isinstance(action, Open):
                a = action
                self.request(
                    ps,
                    "on_open",
                    (a.shard, a.lease, a.mirrored),
                    lambda found, a=a: self.opened(a, found),  # type: ignore[misc]
                )
            else:
                s = action
                what = s, self.contents.get((s.owed.step, s.owed.lo), ()), self.lineage_of_held
                self.request(ps, "on_push", what, lambda found, s=s: self.landed(s, found))  # type: ignore[misc]

    def opened(self, action: Open, found: Any) -> None:
        mark = min(found[1], default=0) if found is not None else 0
        self.feed(self.pushes.opened(action.ps, action.shard, action.life, found is not None, mark))

    def landed(self, action: Send, found: Pushed) -> None:
        self.feed(self.pushes.pushed(action.ps, action.owed, action.life, found))

    def say_again(self, action: Again) -> None:
        self.feed(self.pushes.again(action.ps, action.life))
        self.pump()

    def clear_of_debts(self) -> bool:
        """Return whether it owes nothing of its own. A later generation at the ps: this group is over."""
        if self.pushes.stale and self.machine.whole:
            self.broke_at = self.broke_at or self.kernel.now
            self.do(self.machine.broke())
            self.interrupted()
            return False
        self.waits_for_ps = (self.waits_for_ps or self.kernel.now) if self.pushes.owes else 0.0
        return not self.pushes.owes

    def secured(self) -> bool:
        """Return whether mirrors have all that this member pushed."""
        if self.pushes.lags:
            self.feed(self.pushes.settle())
        return not self.pushes.lags

    # ------------------------------------------------------------ before a step

    def next_cut(self, size: int) -> StepCut | None:
        return self.gsim.cut_of(self.position, size, self.machine.split, self.stop)

    def surveyed(self, cut: StepCut | None) -> bool:
        """Do what ``GroupTables.flush`` and ``survey`` do, a stage at a time."""
        ring, group = self.ring, self.machine.present
        assert ring is not None and group is not None
        if self.lineage_of_held != self.lineage:
            self.lineage_of_held = self.lineage
            self.pushes.void()
            self.contents.clear()
            self.held_of = None
        self.sync_held_back()
        if self.stage[0] is not ring:
            self.stage = ring, ""
        if cut is None:
            self.feed(self.pushes.entered(group.lease))
            return self.clear_of_debts() and self.secured()
        if self.known == (ring, cut.epoch) and (cut.lo != self.stop or cut.lo == self.surveyed_at):
            return True
        stage = self.stage[1]
        if not stage:
            self.feed(self.pushes.entered(group.lease))
            if self.clear_of_debts():
                self.stage = ring, "flushing"
                self.post("flush", 0)
        elif stage == "flushed":
            self.stage = ring, "opening"
            self.marks = {}
            for shard in self.to_open(cut):
                for ps in self.hsim.ps.values():
                    marked = partial(self.marked, ring, ps, shard)
                    secure = self.pushes.keeps and self.known[0] is not ring
                    self.request(ps, "on_open", (shard, group.lease, secure), marked)
        elif stage == "opening" and len(self.marks) == SERVERS * len(self.to_open(cut)):
            by_shard = {
                shard: [mark for (_, of), found in self.marks.items() if of == shard for mark in found]
                for shard in self.to_open(cut)
            }
            marks = by_shard[table_shard(0, cut.epoch)]
            ahead = min((m for m in marks if m > cut.lo), default=0)
            self.stage = ring, "surveying"
            self.post("survey", (ahead, min(marks), cut.lo, cut.epoch, self.crossed(by_shard)))
        return False

    def to_open(self, cut: StepCut) -> list[ShardKey]:
        return list(dict.fromkeys((*self.held_back.shards, table_shard(0, cut.epoch))))

    def crossed(self, marks: dict[ShardKey, list[int]]) -> bool:
        return self.held_back.crossed(marks)

    def sync_held_back(self) -> None:
        """Take over what is carried: a state that was copied brings what is carried with it."""
        if self.held_of != self.chain:
            self.held_of, self.held_back = self.chain, HeldBack(self.hsim.held_back.get(self.chain, ()))

    def cut_held_back(self) -> None:
        """Do what ``GroupTables`` does of that name."""
        ranges = self.held_back.take()
        if ranges:
            self.owe(ranges, tuple(r for r in ranges if r.learnt))

    def owe(self, ranges: tuple[Range, ...], content: tuple[Range, ...]) -> None:
        """Owe the last step, without a step of its own."""
        *before, last = ranges
        skipped = not last.learnt
        owed = Owed(self.position.step - 1, last.shard, last.lo, last.hi, skipped, skipped, tuple(before))
        self.contents[owed.step, owed.lo] = content
        self.pushes.hold(owed)

    def marked(self, ring: Ring, ps: TablePs, shard: ShardKey, answer: tuple[list[int], list[int]] | None) -> None:
        if self.stage != (ring, "opening"):
            return
        if answer is None:
            self.pushes.stale = True
            self.clear_of_debts()
        else:
            self.marks[ps.slot, shard] = answer[1]

    # ------------------------------------------------------------ a step

    def gradients(self, step: tuple[Committed, StepCut]) -> None:
        full = self.pushes.keeps and self.kernel.random() < FULL
        if not self.clear_of_debts() or (full and not self.secured()):
            if self.machine.whole:
                ring = self.ring
                self.phase = "computing"
                self.later(0.01, self.computed, ring)
            else:
                self.step = None
                self.pump()
            return
        owes = self.pushes.owes_from
        self.post("words", (step[0].first if owes is None else owes, self.pushes.route))

    def on_result(self, ring: Ring, kind: str, values: list[Any]) -> None:
        if kind not in ("words", "flush", "survey", "beside"):
            self.voting = kind == "vote"
            if kind == "last vote" and ring is self.ring and self.phase == kind and self.machine.whole:
                self.pushed = self.position.step
            super().on_result(ring, kind, values)
            self.voting = False
            return
        if ring is not self.ring or self.phase != kind or not self.machine.whole:
            return
        self.waits_since = 0.0
        self.phase = "out"
        if kind == "words":
            assert self.step is not None
            self.pushed, routes = min(owes for owes, _ in values), {route for _, route in values}
            self.route = routes.pop() if len(routes) == 1 else -1
            self.pushes.consumed(self.pushed)
            self.hsim.most_held = max(self.hsim.most_held, len(self.pushes.held))
            if not self.pushes.keeps and len(self.pushes.held) > HELD_MAX:
                raise Violation(f"{self}: {self.pushes!r} holds too much")
            self.post("reduce", self.step)
            return
        if kind == "flush":
            self.stage = ring, "flushed"
            if not self.pushes.keeps:
                self.pushed = self.position.step
        elif kind == "survey":
            lowest, lo, epoch = min(v[1] for v in values), values[0][2], values[0][3]
            begin = self.held_back.begin(table_shard(0, epoch), lo)
            if lowest < begin:
                self.tries += 1
                if not self.pushes.keeps or self.tries > TRIES:
                    raise Violation(
                        f"a ps is at {lowest} of epoch {epoch}, the group at {begin}: nobody has what is between"
                    )
                self.stage = ring, ""  # a ps was lost meanwhile: what its mirrors lack is pushed first
                self.later(0.05, self.pump)
                return
            self.tries = 0
            self.stop = min((v[0] for v in values if v[0]), default=0)
            if any(v[4] for v in values):
                self.cut_held_back()
                self.known, self.stage = (None, -1), (ring, "")  # (flushed again, and looked at)
            else:
                if self.known[0] is not ring:
                    self.pushed = self.position.step
                self.known, self.surveyed_at, self.stage = (ring, epoch), lo, (ring, "")
        elif self.beside is not None:
            (_, owed), self.beside = self.beside, None
            self.known_by_all(owed)
        self.pump()

    def apply(self) -> None:
        assert self.step is not None
        c = self.step[0]
        self.sync_held_back()
        super().apply()
        owed = Owed(c.first, table_shard(0, c.epoch), c.lo, c.hi)
        mine = Range(owed.shard, owed.lo, owed.hi)
        if (c.first + 1) % self.hsim.accumulate:
            self.hold_back(owed, mine)
        else:
            before, content = self.consume(mine)
            self.contents[owed.step, owed.lo] = content
            self.pushes.hold(replace(owed, before=before))
        self.held_of = self.chain
        self.hsim.held_back[self.chain] = tuple(self.held_back.ranges)
        ring = self.ring
        if self.voting and ring is not None:
            self.beyond_the_vote(ring, owed)

    def hold_back(self, owed: Owed, mine: Range) -> None:
        """The script does not step its tables in this step."""
        self.held_back.add(mine)

    def consume(self, mine: Range) -> tuple[tuple[Range, ...], tuple[Range, ...]]:
        """It does: what is pushed besides, and all whose gradients are in it."""
        before = self.held_back.take()
        return before, (*(r for r in before if r.learnt), mine)

    def end(self, status: int, since: float) -> None:
        """Leave out what is held back, at the script's end."""
        newest = self.machine.newest
        if status == 0 and newest is not None and not self.pushes.stale:
            self.sync_held_back()
            self.held_back.zeroed()
            if ranges := self.held_back.take():
                self.lineage_of_held = self.lineage
                self.owe(ranges, ())
                self.feed(self.pushes.entered(self.pushes.lease or newest.lease))
            if self.pushes.owes or not self.secured():
                self.later(0.02, self.end, status, since)
                return
        super().end(status, since)

    def beyond_the_vote(self, ring: Ring, owed: Owed) -> None:
        """Who has the vote's result may be the only one: nobody pushes before everybody is beyond the vote."""
        self.beside = ring, owed

    def pump(self) -> None:
        if self.beside is not None and self.phase == "out" and self.alive and not self.closing:
            ring, owed = self.beside
            if ring is not self.ring or ring.broken or not self.machine.whole:
                self.beside = None  # the next group's flush brings it
            elif ring.group.size == 1:
                self.beside = None
                self.known_by_all(owed)
            else:
                self.post("beside", 0)
                return
        super().pump()

    def known_by_all(self, owed: Owed) -> None:
        """Everybody in the group has come beyond the vote on this step."""
        group = self.machine.present
        assert group is not None
        mine = [Slot(i) for i in range(SERVERS) if pusher_of(i, group.size) == self.rank]
        self.feed(self.pushes.committed(owed.step, self.route, mine))

    def agree(self, values: list[Any]) -> None:
        group = self.machine.present
        if group is not None and group.lineage != self.agreed_in:
            self.pushed = 0  # (what is known of another line does not count)
        super().agree(values)

    @property
    def pushed_to(self) -> int:
        return self.pushed

    def savable(self, before: int) -> int:
        return min(before, self.pushed)


class HybridSimulation(GroupSimulation):
    """Holds the truth. ``there``: what each ps applied, by origin and step: epoch, hi. ``counts``: by epoch, partition
    and position. ``held_back``: by state."""

    def __init__(
        self,
        seed: int,
        scenario: GroupScenario,
        parts: Parts = Parts(),
        trace: bool = False,
        validate: bool = True,
        worker: type[GroupWorker] = HybridWorker,
        machine: type[GroupMachine] = GroupMachine,
    ) -> None:
        super().__init__(seed, scenario, parts, trace, validate, worker, machine)
        self.counts = [[bytearray(scenario.samples) for _ in range(PARTITIONS)] for _ in range(scenario.epochs)]
        self.there: dict[tuple[Slot, int, int], tuple[int, int]] = {}
        self.held_back: dict[int, tuple[Range, ...]] = {}
        self.accumulate, self.lag_s = scenario.accumulate, scenario.lag_s
        self.route = self.most_held = 1
        self.ps_lost = self.replayed = 0
        self.ps = {Slot(slot): TablePs(self, Slot(slot)) for slot in range(SERVERS)}

    def strike(self, fault: str) -> None:
        if fault != "lose ps":
            super().strike(fault)
        elif self.over is None:
            self.faults += 1
            ps = self.ps[Slot(self.kernel.rng.randrange(SERVERS))]
            self.kernel.say("FAULT", f"{ps.name} is lost")
            ps.lose()
            self.ps_is_lost(ps)

    def ps_is_lost(self, ps: TablePs) -> None:
        """Forget what mirrors lack of it, and tell the workers of its new life, each at another time."""
        self.ps_lost += 1
        for b in ps.mine:
            for epoch, rows in enumerate(self.counts):
                mark = ps.safe[b].get(table_shard(0, epoch), [0])[0]
                self.replayed += sum(rows[b][mark:])
                rows[b][mark:] = bytes(len(rows[b]) - mark)
        self.route += 1
        for worker in [p for p in self.processes if isinstance(p, HybridWorker)]:
            worker.later(0.3 * self.kernel.random(), self.tell_placed, worker)

    def tell_placed(self, worker: HybridWorker) -> None:
        worker.placed()
        worker.pump()

    def reached(
        self,
        ps: Slot,
        partitions: Iterable[int],
        lineage: int,
        owed: Owed,
        content: tuple[Range, ...],
        worker: HybridWorker,
    ) -> None:
        """Note that partitions of ``ps`` applied a step of the lineage; the gradients of ``content`` are in it."""
        left_out = [r for r in owed.ranges if not r.learnt]
        for partition in partitions:
            for r in (*content, *left_out):
                epoch = split_key(r.shard)[1]
                row = self.counts[epoch][partition]
                if any(row[r.lo : r.hi]):
                    raise Violation(
                        f"partition {PartitionId(partition)} has [{r.lo}, {r.hi}) of epoch {epoch} twice: {worker}"
                    )
                row[r.lo : r.hi] = b"\1" * (r.hi - r.lo)
        what = split_key(owed.shard)[1], owed.hi
        if self.there.setdefault((ps, lineage, owed.step), what) != what:
            raise Violation(
                f"step {owed.step} of lineage {lineage} came to ps:{ps} as {what}, and before as another one"
            )

    def heal(self) -> None:
        super().heal()
        self.scenario = msgspec.structs.replace(self.scenario, straggle=0.0)

    def check(self) -> None:
        super().check()
        for epoch, partitions in enumerate(self.counts):
            for partition, row in enumerate(partitions):
                if not all(row):
                    raise Violation(f"partition {partition} lacks position {row.index(0)} of epoch {epoch} at the end")
        lineage = self.master.brain.state.groups.lineage
        chains = [chain for of, chain in self.ended_with if of == lineage]
        steps: dict[int, tuple[int, int]] = {}
        chain = chains[0]
        while chain in self.history:
            chain, c = self.history[chain]
            steps[c.first] = c.epoch, c.hi
        for (ps, of, step), what in self.there.items():
            if of == lineage and steps.get(step) != what:
                raise Violation(f"ps:{ps} has step {step} as {what}, which is {steps.get(step)} in the trained state")


def hybrid_scenario(seed: int) -> GroupScenario:
    """Return a scenario as those of groups, with results that come late to some, more loss, and more workers that
    die."""
    rng = random.Random(f"hybrid {seed}")
    calm = group_scenario(seed)
    kills = [(round(rng.uniform(0.3, calm.chaos_s), 3), "kill worker") for _ in range(rng.choice([0, 2, 5, 9]))]
    accumulate = 1
    if seed % 7 == 6:
        other = random.Random(f"accumulate {seed}")
        accumulate = other.choice([2, 3, 4])
        kills += [(round(other.uniform(0.3, calm.chaos_s), 3), "kill all workers") for _ in range(other.choice([1, 2]))]
    return msgspec.structs.replace(
        calm,
        workers=max(2, calm.workers),
        straggle=rng.choice([0.0, 0.1, 0.3]),
        loss=rng.choice([0.0, 0.01, 0.05]),
        batch_s=rng.choice([0.01, 0.03, 0.08]),
        faults=tuple(sorted([*calm.faults, *kills])),
        accumulate=accumulate,
        at_entry=False,
        kill_chief=False,
    )


def hybrid_lag_scenario(seed: int) -> GroupScenario:
    """Return a scenario as ``hybrid_scenario``, with mirrors that lag and ps that are lost."""
    rng = random.Random(f"hybrid lag {seed}")
    base = hybrid_scenario(seed)
    lost = [(round(rng.uniform(0.3, base.chaos_s), 3), "lose ps") for _ in range(rng.choice([1, 3, 6]))]
    all_at_once = [(when, "kill all workers") for when, _ in lost if rng.random() < 0.1]
    faults = tuple(sorted([*base.faults, *lost, *all_at_once]))
    return msgspec.structs.replace(base, faults=faults, lag_s=rng.choice([0.1, 0.5, 2.0, 8.0]))


def simulate_hybrid(
    seed: int,
    scenario: GroupScenario | None = None,
    parts: Parts = Parts(),
    trace: list[str] | None = None,
    validate: bool = True,
    worker: type[GroupWorker] = HybridWorker,
) -> SimOutcome:
    """Make one whole run, as ``sim.simulation.simulate``."""
    sim = HybridSimulation(seed, scenario or hybrid_scenario(seed), parts, trace is not None, validate, worker)
    return sim.run_traced(trace)
