"""Handles plans of policies: checked, numbered, and turned into what the brain does anyway.

The policy itself is called outside, by the master's shell: a user's own may be slow, or fail. What comes of it enters
the brain as an event, a plan or the end of the policy; so replaying a journal runs no policy. ``refuse`` is the check
of a plan against what the policy was shown: what it finds is the policy's fault, and ends it. What has changed since
(a member has left, partitions are under way) is nobody's fault: the plan is dropped, all of it, and the next will know.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec

from everstep.brain.job import JobState
from everstep.ids import Incarnation, Slot
from everstep.model.decision import Decision
from everstep.model.member import Role
from everstep.model.observation import Observations
from everstep.model.plan import (
    Action,
    AdjustAccum,
    AdjustBatch,
    AdjustRate,
    BackupWorkers,
    KillRestart,
    MovePartitions,
    Plan,
    Resize,
    Scale,
)
from everstep.model.step_schedule import BatchShare
from everstep.policies.process_sizes import refuse_wish
from everstep.policies.scaling import MAX_PS, refuse_workers

MAX_ACTIONS = 16
MAX_BYTES = 1 << 20
MAX_WORDS = 400  # letters of a line in a decision
MOST_WORKERS = MOST_PS = 4  # times as many as the job was begun with: without bounds a policy may go so far alone
_ADJUSTS = (AdjustBatch, AdjustAccum, AdjustRate)
_plan_decoder = msgspec.msgpack.Decoder(Plan)


class PolicyControl(msgspec.Struct, kw_only=True):
    """``version``: plans taken so far. ``plan``: the last of them. ``disabled``: why the policy is asked no more; "".
    ``restarts``, ``restarted_at``: by plans. ``backup``: workers that a step does not wait for, by plans; -1: by the
    job's spec. ``divided``: mode ps, sync: what the workers take of a step, by plans, and the processes that it was
    made for. ``fits``: largest passes that plans may give workers whose memory was too small for a larger one; a batch
    of the loader is always one."""

    version: int = 0
    plan: Plan | None = None
    disabled: str = ""
    restarts: int = 0
    restarted_at: float = 0.0
    backup: int = -1
    divided: dict[Slot, tuple[Incarnation, BatchShare]] = {}
    fits: dict[Slot, int] = {}

    def too_large(self, slot: Slot, samples: int) -> int:
        """A worker's memory was too small for so many at once. How many it may get now: half of them."""
        most = self.fits[slot] = max(1, min(samples // 2, self.fits.get(slot, samples)))
        return most

    def memory(self, slot: Slot, reported: int, batch: int) -> int:
        """The largest pass of a worker that says ``reported`` and whose loader has batches of ``batch``; 0: unknown."""
        return max(min(reported, batch), min(reported, self.fits.get(slot, reported)))


def as_returned(made: Any) -> tuple[Any, Any]:
    """Return what a policy returned, as a plan (or None) and its state. Raises ValueError."""
    if not isinstance(made, tuple | list) or len(made) != 2:
        raise ValueError(f"it returned {_short(made)} instead of two things: a plan or None, and its state")
    return made[0], made[1]


def as_plan(made: Any) -> Plan:
    """What a policy returned, as a plan: built anew, so nothing of it is the policy's any more. Raises ValueError."""
    if not isinstance(made, Plan):
        raise ValueError(f"it returned {_short(made)} instead of a plan or None")
    actions = made.actions if isinstance(made.actions, tuple | list) else ()
    if len(actions) > MAX_ACTIONS:
        raise ValueError(f"its plan has {len(actions)} actions, more than {MAX_ACTIONS}")
    for action in actions:
        if not isinstance(action, Action):
            raise ValueError(f"unknown action {_short(action)}")
    try:
        encoded = msgspec.msgpack.encode(made)
        if len(encoded) > MAX_BYTES:
            raise ValueError(f"its plan has {len(encoded)} bytes, more than {MAX_BYTES}")
        plan = _plan_decoder.decode(encoded)
    except (msgspec.MsgspecError, TypeError, OverflowError, RecursionError) as error:
        raise ValueError(f"its plan is none: {error}") from None
    why = plan.decision
    inputs = {line(k): line(v) if isinstance(v, str) else v for k, v in why.inputs.items()}
    why = Decision(line(why.action), line(why.reason), inputs, tuple(map(line, why.rejected)))
    return msgspec.structs.replace(plan, decision=why)


def line(text: str) -> str:
    """Return somebody else's words as one line that a terminal shows and does not obey."""
    return " ".join("".join(c if c.isprintable() else " " for c in text).split())[:MAX_WORDS]


def refuse(plan: Plan, seen: Observations) -> str:
    """Return what is wrong with a plan made of these observations, in one line; "": nothing."""
    batch: Mapping[Slot, int] = {w.slot: w.share for w in seen.workers}
    accum: Mapping[Slot, int] = {}
    kinds = [type(action) for action in plan.actions]
    about = [(type(action), action.role if isinstance(action, Resize) else None) for action in plan.actions]
    for kind, role in about:
        if about.count((kind, role)) > 1:
            return f"{_tag(kind)} twice in one plan" + (f" for {role}" if role is not None else "")
    for action in plan.actions:
        error = _refuse(action, seen)
        if error:
            return f"{_tag(type(action))}: {error}"
        if isinstance(action, AdjustBatch):
            batch = {**batch, **action.batch}
        elif isinstance(action, AdjustAccum):
            accum = action.accum
    if not any(kind in _ADJUSTS for kind in kinds):
        return ""
    if sum(batch.values()) != seen.global_batch:
        return f"ADJUST_BS: the batches sum up to {sum(batch.values())}, the global batch is {seen.global_batch}"
    for w in seen.workers:
        passes = accum.get(w.slot, 0)
        if passes > batch[w.slot]:
            return f"ADJUST_ACCUM: {passes} passes of {batch[w.slot]} samples for {w}: one must have at least a sample"
        limit = w.memory_batch or seen.loader_batch
        if passes and limit and -(-batch[w.slot] // passes) > limit:
            return (
                f"ADJUST_ACCUM: {w} would compute {-(-batch[w.slot] // passes)} samples at once, "
                f"its memory holds {limit}"
            )
    return ""


def _refuse(action: Action, seen: Observations) -> str:
    workers = {w.slot for w in seen.workers}
    match action:
        case AdjustBatch(batch=numbers) | AdjustAccum(accum=numbers):
            if not seen.global_batch:
                return f"mode {seen.mode} ({seen.consistency}) has no common step"
            for slot, n in numbers.items():
                if slot not in workers:
                    return f"worker:{slot} is not there"
                if n < 1:
                    return f"{n} for worker:{slot}: must be at least 1"
        case AdjustRate(factor=factor):
            if not seen.global_batch:
                return f"mode {seen.mode} ({seen.consistency}) has no common step"
            if seen.mode == "ps":
                return "mode ps: the samples of a step stay what they are"
            if not (math.isfinite(factor) and factor > 0):
                return f"factor {factor}: must be above 0"
        case BackupWorkers(backup=backup) if seen.mode == "ps" and seen.consistency == "sync":
            if not 0 <= backup < max(1, seen.wanted_workers):
                return f"{backup} of {seen.wanted_workers} workers: a step would wait for nobody"
        case BackupWorkers():
            return f"mode {seen.mode} ({seen.consistency}) has no quorum: every worker's part of a step counts"
        case KillRestart(role=role, slot=slot, incarnation=incarnation):
            members = seen.workers if role is Role.WORKER else seen.servers if role is Role.PS else ()
            if not any((m.slot, m.incarnation) == (slot, incarnation) for m in members):
                return f"{role}:{slot} #{incarnation} is not there"
            if seen.pending:
                return f"{seen.pending} members are still starting, or being emptied"
            if not (seen.places if role is Role.WORKER else seen.ps_places):
                return f"no node would take another {role}"
        case MovePartitions(owners=owners):
            servers = {s.slot for s in seen.servers}
            known = {b for s in seen.servers for b in s.owned}
            for partition, slot in owners.items():
                if slot not in servers:
                    return f"ps:{slot} is not there"
                if partition not in known:
                    return f"there is no partition {partition}"
        case Scale(workers=count, ps=servers):
            if servers and not seen.servers:
                return f"{servers} ps: this job has none"
            if not 0 <= servers <= MAX_PS:
                return f"{servers} ps: must be from 0 (as many as there are) to {MAX_PS}"
            return refuse_workers(count)
        case Resize(role=role, threads=threads, memory_bytes=memory_bytes, running=running):
            if role is Role.PS and not seen.servers:
                return "this job has no ps"
            if running and not (role is Role.PS and memory_bytes):
                return f"running, for {role}: only the memory of ps that run can be raised"
            return refuse_wish(role, threads, memory_bytes)
    return ""


def stale(
    plan: Plan,
    job: JobState,
    here: Mapping[Role, Mapping[Slot, int]],
    waiting: str,
    cannot_follow: Callable[[Action], str],
) -> str:
    """Return why a plan cannot be followed any more; "": it can. ``here``: incarnations of the members that are up, by
    role; ``waiting``: who is not, "" if nobody; ``cannot_follow``: why an action is none for this job, "": it is
    one."""
    for action in plan.actions:
        if why := cannot_follow(action):
            return why
        match action:
            case KillRestart(role=role, slot=slot, incarnation=incarnation):
                if here[role].get(slot) != incarnation:
                    return f"{role}:{slot} #{incarnation} is gone"
                if waiting:
                    return f"{waiting} is still starting"
                if role is Role.WORKER and len(here[role]) <= max(1, job.spec.min_workers):
                    return f"without worker:{slot} there would be fewer than min_workers={job.spec.min_workers}"
            case AdjustBatch(batch=numbers) | AdjustAccum(accum=numbers):
                gone = [slot for slot in numbers if slot not in here[Role.WORKER]]
                if gone:
                    return f"worker:{gone[0]} is gone"
            case Scale(workers=count) if job.spec.max_workers and count > job.spec.max_workers:
                return f"{count} workers: more than max_workers={job.spec.max_workers}"
            case Scale(workers=count) if not job.spec.max_workers and count > max(
                job.workers_wanted, MOST_WORKERS * job.spec.workers
            ):
                return f"{count} workers: more than {MOST_WORKERS} times the {job.spec.workers} it was begun with"
            case Scale(ps=servers) if not job.spec.max_ps and servers > max(job.ps_wanted, MOST_PS * job.spec.ps):
                return f"{servers} ps: more than {MOST_PS} times the {job.spec.ps} it was begun with"
            case MovePartitions(owners=owners):
                gone = [slot for slot in owners.values() if slot not in here[Role.PS]]
                if gone:
                    return f"ps:{gone[0]} is gone"
    return ""


def divide(control: PolicyControl, actions: Sequence[Action], here: Mapping[Slot, Incarnation]) -> None:
    """Have these workers (``here``: all that run) take what the actions say, from the next step on (mode ps, sync). Who
    is not named takes what it took."""
    before = {p.slot: p for p in batch_shares(control, here)}
    for action in actions:
        if isinstance(action, AdjustBatch):  # (passes are of the samples that they were made for)
            before |= {slot: BatchShare(slot, samples) for slot, samples in action.batch.items()}
    for action in actions:
        if isinstance(action, AdjustAccum):
            reported = {slot: passes for slot, passes in action.accum.items() if slot in before}
            before |= {slot: msgspec.structs.replace(before[slot], passes=passes) for slot, passes in reported.items()}
    control.divided = {slot: (here[slot], batch_share) for slot, batch_share in before.items()}


def batch_shares(control: PolicyControl, here: Mapping[Slot, Incarnation]) -> tuple[BatchShare, ...]:
    """Return what the workers take of a step (mode ps, sync). Nothing of a plan is left once one of those that it names
    is gone: what the others take would be no whole step, and a new process may be faster or slower."""
    if any(here.get(slot) != incarnation for slot, (incarnation, _) in control.divided.items()):
        return ()
    return tuple(batch_share for _, (_, batch_share) in sorted(control.divided.items()))


def _tag(kind: type[Action]) -> str:
    return str(kind.__struct_config__.tag)


def _short(thing: object) -> str:
    try:
        text = repr(thing)
    except Exception:  # of its own
        text = f"a {type(thing).__name__}"
    return text if len(text) <= 80 else f"{text[:77]}..."


def error_words(error: BaseException) -> str:
    """Return an exception in one line."""
    try:
        return f"{type(error).__name__}: {error}"
    except Exception:  # of its own
        return type(error).__name__
