"""Does the shell's part of policies: it shows the job to the chosen one once a window, and takes its plans to the
brain.

The first look is when every worker has told what it takes: whoever is slow from the beginning is known then. A later
one waits a little for readings that are new, where steps take longer than windows; not while a step under way already
takes clearly longer than was shown: who makes all others wait is the only one that has any.

A policy runs on a thread of its own, never on the master's loop (``UserCall``). One that takes longer than ``LIMIT_S``,
raises, or makes an impossible plan is disabled, with one event; the job goes on with the last plan. Soft state: a new
master begins with a policy that has seen nothing. How often it restarted members is in the journal, and part of what it
is shown.
"""

from __future__ import annotations

import importlib
import traceback
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import msgspec

from everstep.brain.brain import Brain
from everstep.brain.events import FactType, PlanMade, PolicyDisabled, StepsCommitted
from everstep.brain.policy_control import as_plan, as_returned, batch_shares, error_words, line, refuse
from everstep.config.renamed import POLICIES as RENAMED_POLICIES
from everstep.config.spec import JobSpec
from everstep.ids import Incarnation, Slot
from everstep.master.callables import load_callable
from everstep.master.user_call import LIMIT_S, CallState, UserCall
from everstep.model.observation import Observations, ServerSeen, WorkerSeen
from everstep.model.plan import Plan
from everstep.model.step_schedule import BatchShare
from everstep.monitor.stepclock import NEWS
from everstep.policies.step_split import apportion
from everstep.policies.stragglers.policy import SHIPPED, Policy, composed

PEEK = 0.1
"""Of a window: so long after another it is looked whether all have readings."""

PATIENCE = 2.0
"""Windows that a look waits for new readings."""

EAGER = frozenset(("auto", "memory"))
"""Policies that also look as soon as a whole window lies behind the last change: readings may be in two looks then."""

Made = tuple[Plan | None, Any, str]
"""A plan that can be followed, the policy's new state, and what is wrong with the plan; "": nothing."""


class PolicyController:
    """Asks the policy: ``observe(at, span_s)`` gives what was seen, over windows of ``window_s`` seconds, of workers
    over ``span_s``. ``tell(event)``: to the brain. ``made()``, on any thread: a call has come to its end, so
    ``tick``."""

    def __init__(
        self,
        brain: Brain,
        spec: JobSpec,
        observe: Callable[[float, float], Observations],
        window_s: float,
        tell: Callable[[FactType], object],
        limit_s: float = LIMIT_S,
        made: Callable[[], object] = lambda: None,
    ) -> None:
        self._brain, self._spec, self._tell = brain, spec, tell
        self._observe, self._window_s = observe, window_s
        self._call: UserCall[Made] = UserCall("everstep-policy", limit_s, made)
        self._eager = EAGER.issuperset(spec.policy.split("+"))
        self._look_at = self._peek_at = 0.0
        self._looked_at = float("-inf")
        self._known: frozenset[tuple[Slot, Incarnation]] = frozenset()  # workers of which there were readings
        self._seconds: dict[tuple[Slot, Incarnation], float] = {}  # seconds per sample of the last look
        self._policy: Policy | None = None
        self._state: Any = None

    def __repr__(self) -> str:
        return f"<policy {self._spec.policy} {self._call!r}, looks again at {self._look_at:.1f}>"

    def tick(self, at: float) -> None:
        """Call several times a second, and when readings came; ``at`` in seconds. A clock that jumps is nobody's time:
        the call under way is not given up for it, and no look waits for a moment that has gone."""
        call = self._call.poll(at)
        self._look_at = min(self._look_at, at + self._window_s)
        self._peek_at = min(self._peek_at, at + self._window_s)
        control = self._brain.state.control
        if self._spec.policy == "none" or control.disabled or self._brain.job.over:
            return
        if call is CallState.ENDED:
            self._take(*self._call.result)
        elif call is CallState.LATE:
            self._disable(self._call.late_words)
        elif call is CallState.NONE and at >= self._peek_at and (due := self._due(at)) is not None:
            self._looked_at, self._look_at = at, at + self._window_s
            self._seconds = {(w.slot, w.incarnation): w.short.per_sample_s or w.long.per_sample_s for w in due.workers}
            # (the state as it is now goes along: a call that is given up must not change it later)
            self._call.begin(partial(self._made_of, due, self._state))

    def _due(self, at: float) -> Observations | None:
        """Return what the policy is shown now; None: nothing yet."""
        self._peek_at = at + PEEK * self._window_s
        early = at < self._look_at and bool(self._known)
        if early and not self._eager:
            self._peek_at = self._look_at
            return None
        if early and not self._is_whole(at):
            return None
        since_s = at - self._looked_at  # (a clock that went back: anything)
        seen = complete(self._observe(at, max(self._window_s, since_s)), self._brain, self._window_s)
        if (
            not seen.workers
        ):  # nobody is up, or no group trains: when somebody is, there is a window to tell readings in
            self._look_at = at + self._window_s
            return None
        known = frozenset((w.slot, w.incarnation) for w in seen.workers if w.short.per_sample_s or w.long.per_sample_s)
        if len(known) == len(seen.workers) and not known <= self._known:
            self._known = known
            return seen
        new = not seen.global_batch or all(w.short.per_sample_s > 0 for w in seen.workers)
        new = new or any(self._news(w) for w in seen.workers)
        return seen if early or at >= self._look_at + (0.0 if new else PATIENCE * self._window_s) else None

    def _is_whole(self, at: float) -> bool:
        """Return whether a whole window lies behind the last change, part of which was in the last look's."""
        seen = self._observe(at, self._window_s)
        newest = max([seen.rest_since, *(w.since for w in seen.workers), *(s.since for s in seen.servers)])
        return not seen.pending and self._looked_at < newest + self._window_s <= at

    def _news(self, seen: WorkerSeen) -> bool:
        """Return whether the step that it computes takes clearly longer than was known at the last look."""
        last_s = self._seconds.get((seen.slot, seen.incarnation), 0.0)
        return seen.short.under_way and seen.short.per_sample_s >= last_s * NEWS

    def _made_of(self, seen: Observations, state: Any) -> Made:
        """On the policy's thread, with all that is done to what it returned: any of it may be code of its own."""
        try:
            return self._ask(seen, state)
        except BaseException as error:  # whatever it is, it must not stay on this thread: SystemExit, too
            return None, None, f"it raised {error_words(error)}{_where(error)}"

    def _ask(self, seen: Observations, state: Any) -> Made:
        if self._policy is None:
            self._policy = load(self._spec.policy, Path(self._spec.script).parent)
        returned = self._policy(seen, state)
        try:
            wanted, state = as_returned(returned)
            plan = as_plan(wanted) if wanted is not None else None
        except ValueError as wrong:
            return None, None, str(wrong)
        return plan, state, refuse(plan, seen) if plan is not None else ""

    def _take(self, plan: Plan | None, state: Any, error: str) -> None:
        """Take in what a call came to."""
        self._state = state
        if error:
            self._disable(line(error))
        elif plan is not None:
            self._tell(PlanMade(self._spec.policy, plan))

    def _disable(self, error: str) -> None:
        self._tell(PolicyDisabled(self._spec.policy, error))


def load(name: str, folder: Path) -> Policy:
    """Return the policy of this name, or of several joined by +. ``module:callable`` is found beside the training
    script (``folder``), or where Python finds modules. Raises what importing raises, AttributeError, TypeError."""
    return composed([_load_one(part, folder) for part in name.split("+")])


def _load_one(name: str, folder: Path) -> Policy:
    name = RENAMED_POLICIES.get(name, name)  # (job.json of a job of before)
    if name in SHIPPED:
        return SHIPPED[name]
    policy: Policy = load_callable(name, folder)
    return policy


def _where(error: BaseException) -> str:
    """Return the line of the policy's own that raised, as " (mine.py, line 7)"; "": nobody's, or it says so itself."""
    frames = traceback.extract_tb(error.__traceback__)[1:]  # (the first one is ours)
    ours = (__file__, load_callable.__code__.co_filename, importlib.__file__)
    own = [f for f in frames if not f.filename.startswith("<") and f.filename not in ours]
    return f" ({Path(own[-1].filename).name}, line {own[-1].lineno})" if own else ""


# ---------------------------------------------------------------- what the brain knows


def complete(seen: Observations, brain: Brain, window_s: float) -> Observations:
    """Add how steps are divided, who has which partitions, and what policies did so far."""
    control = brain.state.control
    total, batch, workers = 0, 0, seen.workers
    if brain.takes(StepsCommitted):
        total, batch, workers = _divided(brain, seen.workers)
    elif seen.consistency == "sync":
        total, batch, workers = _divided_ps(brain, seen.workers)
    return msgspec.structs.replace(
        seen,
        window_s=window_s,
        global_batch=total,
        loader_batch=batch,
        restarts=control.restarts,
        restarted_at=control.restarted_at,
        workers=workers,
        servers=tuple(_with_partitions(brain, s) for s in seen.servers),
    )


def _divided(brain: Brain, workers: tuple[WorkerSeen, ...]) -> tuple[int, int, tuple[WorkerSeen, ...]]:
    """Return the samples of a step, of the loader's batch, and the members of the group with their part in a step. Who
    is not in the group, or lacks a reading of it, leaves nothing to divide: then the step counts as none."""
    groups, group, control = brain.groups, brain.state.groups.group, brain.state.control
    by_process = {(w.slot, w.incarnation): w for w in workers}
    if group is None or group.hold or not all((m.slot, m.incarnation) in by_process for m in group.members):
        return 0, 0, ()
    total = groups.samples()
    batch = max((ask.batch_samples for ask in brain.state.groups.asked.values()), default=0)
    shares = apportion(total, group.split.shares or (1,) * group.size)
    out = []
    for rank, m in enumerate(group.members):
        passes_before = group.split.passes[rank] if group.split.passes else 0
        seen = by_process[m.slot, m.incarnation]
        passes, micro = _passes(shares[rank], passes_before or -(-shares[rank] // max(1, batch)), seen.memory_batch)
        memory = control.memory(m.slot, seen.memory_batch, batch)
        out.append(msgspec.structs.replace(seen, batch=micro, accum=passes, share=shares[rank], memory_batch=memory))
    return total, batch, tuple(sorted(out, key=lambda w: w.slot))


def _divided_ps(brain: Brain, workers: tuple[WorkerSeen, ...]) -> tuple[int, int, tuple[WorkerSeen, ...]]:
    """Return the same in mode ps, sync. Who has told no batch of its loader yet, or steps less often than once a batch
    (then ``accum``, as it told it, is more than 1), leaves nothing to divide."""
    if not workers or any(w.loader_batch <= 0 or w.accum > 1 for w in workers):
        return 0, 0, workers
    shares = {p.slot: p for p in batch_shares(brain.state.control, {w.slot: w.incarnation for w in workers})}
    out = []
    for w in workers:
        batch_share = shares.get(w.slot, BatchShare(w.slot, w.loader_batch, 1))
        passes, micro = _passes(batch_share.samples, batch_share.in_passes(w.loader_batch), w.memory_batch)
        memory = brain.state.control.memory(w.slot, w.memory_batch, w.loader_batch)
        out.append(
            msgspec.structs.replace(w, batch=micro, accum=passes, share=batch_share.samples, memory_batch=memory)
        )
    return sum(w.share for w in out), max(w.loader_batch for w in out), tuple(out)


def _passes(samples: int, wanted: int, fits: int) -> tuple[int, int]:
    """Return in how many passes a worker computes its samples of a step, and of how many samples the largest is: in
    more than ``wanted`` where they would not fit (``fits``; 0: unknown)."""
    passes = max(1, wanted)
    micro = -(-samples // passes)
    if 0 < fits < micro:
        passes *= -(-micro // fits)
    return passes, -(-samples // passes)


def _with_partitions(brain: Brain, seen: ServerSeen) -> ServerSeen:
    owned = brain.placement.owned_by(seen.slot) if brain.placement is not None else ()
    closed = brain.partitions.closed_to(seen.slot)
    return msgspec.structs.replace(seen, owned=tuple(owned), partitions=len(owned), closed=closed)
