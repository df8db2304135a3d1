"""Plants bugs of mode allreduce with tables on the ps on purpose, to see that the simulator finds them.

``HYBRID_LAG_MUTATIONS`` are of steps that are kept because mirrors may lag.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any

from everstep.ids import LeaseNo, ShardKey, Slot
from everstep.policies.step_split import StepCut as StepCut
from everstep.ps.mirrored_pushes import MirroredPushes, PushEnd
from everstep.sim.group import Ring
from everstep.sim.hybrid import HybridWorker, hybrid_lag_scenario, hybrid_scenario, simulate_hybrid
from everstep.sim.mutations import Mutation
from everstep.sim.simulation import Parts, SimOutcome
from everstep.tables.step_pushes import Action, HeldBack, Owed, Range, StepPushes

_committed, _entered, _anew = StepPushes.committed, StepPushes.entered, StepPushes._anew
_next = StepPushes._next


def hybrid(seed: int, parts: Parts = Parts()) -> SimOutcome:
    """Return the run of ``seed`` of a group with tables."""
    return simulate_hybrid(seed, hybrid_scenario(seed), parts)


def hybrid_lag(seed: int, parts: Parts = Parts()) -> SimOutcome:
    """Return the run of ``seed`` of a group with tables whose mirrors lag."""
    return simulate_hybrid(seed, hybrid_lag_scenario(seed), parts)


def _no_barrier(self: HybridWorker, ring: Ring, owed: Owed) -> None:
    self.known_by_all(owed)


def _drops_what_others_push(self: StepPushes, step: int, route: int, mine: Collection[Slot]) -> list[Action]:
    out = _committed(self, step, route, mine)
    self._held = [h for h in self._held if h.waiting or not h.confirmed]
    return out


def _takes_over_nothing(self: StepPushes) -> list[Action]:
    self._life += 1
    self._busy.clear()
    self._open.clear()
    return self._next_all()


def _owes_nothing(self: StepPushes) -> None:
    """Do not tell the others what one owes, ..."""


def _waits_for_nothing(self: HybridWorker) -> bool:
    """Go on before what another one owes is pushed."""
    return True


def _one_lease(self: StepPushes, lease: LeaseNo) -> list[Action]:
    return _entered(self, self.lease or lease)


def _steps_over_watermarks(self: HybridWorker, size: int) -> StepCut | None:
    return self.gsim.cut_of(self.position, size, self.machine.split)


def _pushes_what_waits(self: HybridWorker, owed: Owed, mine: Range) -> None:
    self.held_back.add(mine)
    self.pushes.hold(replace(owed, skipped=True, left_out=True))


def _consumes_its_own(self: HybridWorker, mine: Range) -> tuple[tuple[Range, ...], tuple[Range, ...]]:
    return (), (*self.held_back.take(), mine)


def _crosses_nothing(self: HeldBack, marks: Mapping[ShardKey, Sequence[int]]) -> bool:
    return False


def _carries_nothing_over(self: HybridWorker) -> None:
    if self.held_of != self.chain:
        self.held_of, self.held_back = self.chain, HeldBack()


def _patch(name: str, what: str, owner: object, attribute: str, value: object) -> Mutation:
    return Mutation(name, what, Parts(), ((owner, attribute, value),))


HYBRID_MUTATIONS: tuple[Mutation, ...] = (
    _patch("no-barrier", "who knows that a step is committed pushes it", HybridWorker, "beyond_the_vote", _no_barrier),
    _patch(
        "drops-others-part", "a step is forgotten with one's own part", StepPushes, "committed", _drops_what_others_push
    ),
    _patch("takes-over-nothing", "nobody pushes what a lost member owed", StepPushes, "_anew", _takes_over_nothing),
    Mutation(
        "settles-too-early",
        "a step is forgotten before it is at the ps",
        Parts(),
        (
            (StepPushes, "owes_from", property(_owes_nothing)),
            (HybridWorker, "clear_of_debts", _waits_for_nothing),
        ),
    ),
    _patch("one-lease", "the lease of the first generation is kept", StepPushes, "entered", _one_lease),
    _patch(
        "steps-over-watermarks",
        "a lineage that begins anew cuts its steps across watermarks",
        HybridWorker,
        "next_cut",
        _steps_over_watermarks,
    ),
    Mutation(
        "waits-at-the-ps",
        "watermarks pass gradients that only the members have",
        Parts(),
        (
            (HybridWorker, "hold_back", _pushes_what_waits),
            (HybridWorker, "consume", _consumes_its_own),
            (HeldBack, "crossed", _crosses_nothing),
        ),
    ),
    _patch("carries-across", "a step consumes what some partitions have", HeldBack, "crossed", _crosses_nothing),
    _patch(
        "carries-nothing-over",
        "a newcomer does not get what is held back",
        HybridWorker,
        "sync_held_back",
        _carries_nothing_over,
    ),
)


# ---------------------------------------------------------------- mirrors that lag


def _keeps_nothing(self: StepPushes, h: Any, ps: Slot) -> None:
    h.waiting.discard(ps)


def _believes_watermarks(self: StepPushes, ps: Slot) -> list[Action]:
    for h in self._held:
        if ps in h.waiting and self._open.get(ps, {}).get(h.owed.shard, -1) >= h.owed.hi:
            h.waiting.discard(ps)
    return _next(self, ps)


def _asks_no_mirrors(self: StepPushes, ps: Slot) -> list[Action]:
    if ps not in self._mine:
        for h in self._held:
            h.lagging.discard(ps)
    return []


def _pushes_nothing_again(self: StepPushes) -> list[Action]:
    """A map with another life of a ps is no reason to push anything."""
    self._life += 1
    self._busy.clear()
    self._open.clear()
    return self._next_all()


def _tells_at_once(self: MirroredPushes, end: PushEnd) -> None:
    self.mirrored = end


def _ends_at_once(self: HybridWorker) -> bool:
    return True


def _saves_at_once(self: HybridWorker, before: int) -> int:
    return before


HYBRID_LAG_MUTATIONS: tuple[Mutation, ...] = (
    _patch("keeps-nothing", "a step is forgotten when the ps have it", StepPushes, "_acknowledged", _keeps_nothing),
    _patch("believes-watermarks", "what a ps has counts as mirrored", StepPushes, "_next", _believes_watermarks),
    _patch(
        "asks-no-mirrors",
        "mirrors of a ps that others push to from now on are forgotten",
        StepPushes,
        "_ask_mirrors",
        _asks_no_mirrors,
    ),
    _patch(
        "pushes-nothing-again",
        "a new life of a ps is not sent what is kept",
        StepPushes,
        "_anew",
        _pushes_nothing_again,
    ),
    _patch("tells-at-once", "a ps says that its mirrors have what it has", MirroredPushes, "pushed", _tells_at_once),
    _patch("ends-at-once", "members end before mirrors have everything", HybridWorker, "secured", _ends_at_once),
    _patch("saves-at-once", "a checkpoint has steps that mirrors lack", HybridWorker, "savable", _saves_at_once),
)
