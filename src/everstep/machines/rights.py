"""Says who may ask the master for what: by role, for whom, and about what exists.

``RIGHTS`` has an entry for every request. ``refused`` is asked before a request becomes an event: what speaks for
another member, names what is not there, or counts to more than there is, is refused in one line and never journaled.
All members have the same secret, so a role is what a connection says of itself: this keeps a member that is wrong, or
taken over through its script, from speaking for others by its own connection; it is no wall against who has the secret.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, Final, NamedTuple

from everstep.bounds import MEMBERS_MAX
from everstep.brain.brain import Brain
from everstep.brain.events import (
    AnswerType,
    CapacityChanged,
    CheckpointAsked,
    ChiefAsked,
    DrainAsked,
    Fenced,
    GroupAsked,
    GroupLeft,
    GroupStalled,
    GroupSynced,
    LoadFailed,
    MemberJoined,
    MemoryShort,
    MirrorsReady,
    NodeJoined,
    OnceAsked,
    PartitionsReady,
    PlanRegistered,
    ProcessExited,
    Refused,
    RemarkMade,
    ReplicaWritten,
    ResizeAsked,
    ScaleAsked,
    Sender,
    ShardAsked,
    ShardDone,
    ShardReturned,
    SnapshotsWritten,
    StepsCommitted,
    StopAsked,
    SuspendAsked,
)
from everstep.brain.policy_control import line
from everstep.ids import PartitionId, ShardKey
from everstep.model.member import Role
from everstep.model.reasons import CheckpointReason
from everstep.model.shard import split_key
from everstep.model.snapshot import CheckpointFile
from everstep.net import messages as wire
from everstep.policies.node_selection import HOME_NODE

DATASETS_MAX: Final = 1 << 10  # what a shard key has bits for
EPOCHS_MAX: Final = 1 << 20
SHARDS_MAX: Final = 1 << 32
NODES_MAX: Final = 4096
REMARK_MAX: Final = 400

Check = Callable[[Brain, Sender, Any], str]
"""What is wrong with a request, in words; "": nothing."""


class Right(NamedTuple):
    """Is the right to send one kind of request: the roles that have it, for whom, and what it may name."""

    roles: frozenset[str]
    speaks: Check  # whether the sender is the one that it speaks of
    exists: Check  # whether what it names is there


# ------------------------------------------------------------ for whom


def _anyone(brain: Brain, who: Sender, r: Any) -> str:
    return ""


def _itself(brain: Brain, who: Sender, r: Any) -> str:
    """Return what is wrong unless the request names its sender's own slot and incarnation (and perhaps role)."""
    role = str(getattr(r, "role", who.role))
    if (role, r.slot, r.incarnation) != (who.role, who.slot, who.incarnation):
        return f"it speaks of {role}:{r.slot} #{r.incarnation}"
    return ""


def _own_node(brain: Brain, who: Sender, r: NodeJoined) -> str:
    return "" if r.node == who.node else f"it speaks of node {r.node!r}"


def _on_its_node(brain: Brain, who: Sender, r: Any) -> str:
    """Return what is wrong unless the agent speaks of a process on its node, or of none that is current."""
    role = getattr(r, "role", Role.WORKER)
    if role is Role.MASTER:
        return f"{role}:{r.slot} is no member"
    record = brain.members.of(role).get(r.slot)
    if record is not None and r.incarnation >= record.member.incarnation and record.member.node != who.node:
        return f"{role}:{r.slot} is on {record.member.node}"
    return ""


def _may_drain(brain: Brain, who: Sender, r: DrainAsked) -> str:
    if who.role == "agent" and r.target != who.node:
        return f"it speaks of {r.target!r}"
    if who.role == "ps" and r.target != f"ps:{who.slot}":
        return f"it speaks of {r.target!r}"
    return ""


# ------------------------------------------------------------ what is there


def _shard(brain: Brain, key: ShardKey) -> str:
    return "" if brain.state.shards.epoch_of(key) is not None else f"there is no shard {key}"


def _datasets(brain: Brain, number: int) -> str:
    return "" if 0 <= number < len(brain.shards.datasets) else f"dataset {number} is not registered"


def _ranges(ranges: Iterable[tuple[int, int]], lo: int, hi: int) -> str:
    """Return what is wrong unless the ranges ascend, are apart, and lie within ``[lo, hi)``."""
    at = lo
    for a, b in ranges:
        if not at <= a < b <= hi:
            return f"[{a}, {b}) is no part of [{lo}, {hi}), or not in order"
        at = b
    return ""


def _partitions(brain: Brain, partitions: Iterable[PartitionId]) -> str:
    n = brain.job.spec.partitions
    bad = next((b for b in partitions if not 0 <= b < n), None)
    return "" if bad is None else f"there is no partition {bad}: the job has {n}"


def _mirrors(brain: Brain, mirrors: Iterable[int]) -> str:
    last = brain.state.protection.mirrors
    bad = next((m for m in mirrors if not 0 <= m <= last), None)
    return "" if bad is None else f"there is no mirror {bad}"


def _hello_node(brain: Brain, who: Sender, r: NodeJoined) -> str:
    if any(role is Role.MASTER for role, *_ in r.running):
        return "a master is no member"
    if r.node in brain.members.nodes:
        return ""
    if len(brain.members.nodes) >= NODES_MAX:
        return f"the job has {NODES_MAX} nodes already"
    if brain.job.workers_wanted + r.worker_places > MEMBERS_MAX:
        return f"its {r.worker_places} places would make more than {MEMBERS_MAX} workers"
    return ""


def _hello_member(brain: Brain, who: Sender, r: MemberJoined) -> str:
    for lease in r.leases:
        number, _, index = split_key(lease.shard)
        if number < len(brain.shards.datasets):
            plan = brain.shards.datasets[number].plan
            if index < plan.shards and (lease.start, lease.stop) != plan.bounds(index):
                return f"shard {lease.shard} is not [{lease.start}, {lease.stop})"
    if r.holds is not None:
        return _partitions(brain, r.holds.partitions) or _mirrors(brain, r.holds.mirrors)
    return ""


def _register(brain: Brain, who: Sender, r: PlanRegistered) -> str:
    plan = r.plan
    if not plan.name or len(plan.name) > 255 or len(plan.fingerprint) > 255:
        return "the name of a dataset has 1 to 255 characters"
    if plan.samples < 1 or plan.shard_samples < 1 or plan.shards > SHARDS_MAX:
        return f"{plan.samples} samples in shards of {plan.shard_samples}: there must be 1 to {SHARDS_MAX} shards"
    if brain.shards.find(plan.name) is None and len(brain.shards.datasets) >= DATASETS_MAX:
        return f"the job has {DATASETS_MAX} datasets already"
    return ""


def _ask_shard(brain: Brain, who: Sender, r: ShardAsked) -> str:
    if not brain.takes(ShardAsked):
        return "there are no leases in mode allreduce"
    return _datasets(brain, r.dataset) or _epochs(r.until_epoch)


def _epochs(until: int) -> str:
    return "" if 0 <= until < EPOCHS_MAX else f"until_epoch={until}: a job has at most {EPOCHS_MAX - 1} epochs"


def _done(brain: Brain, who: Sender, r: ShardDone) -> str:
    if wrong := _shard(brain, r.shard):
        return wrong
    known = brain.state.members.servers
    for slot, _ in r.servers:
        if slot not in known:
            return f"there is no ps:{slot}"
    if not r.skipped:
        return ""
    number, _, index = split_key(r.shard)
    return _ranges(r.skipped, *brain.shards.datasets[number].plan.bounds(index))


def _give_back(brain: Brain, who: Sender, r: ShardReturned) -> str:
    return _shard(brain, r.shard)


def _mirror_ready(brain: Brain, who: Sender, r: MirrorsReady) -> str:
    return _mirrors(brain, (*r.mirrors, *r.inconsistent))


def _partitions_ready(brain: Brain, who: Sender, r: PartitionsReady) -> str:
    newest = brain.placement.version if brain.placement is not None else 0
    if r.placement > newest:
        return f"placement {r.placement} is later than the newest, {newest}"
    return _partitions(brain, r.partitions)


def _load_failed(brain: Brain, who: Sender, r: LoadFailed) -> str:
    newest = brain.placement.version if brain.placement is not None else 0
    if r.placement > newest:
        return f"placement {r.placement} is later than the newest, {newest}"
    return _partitions(brain, (r.partition,)) or _checkpoint(brain, r.checkpoint)


def _files(files: Iterable[CheckpointFile], checkpoint: int) -> str:
    """Files of a snapshot are named after the checkpoint that they were written for, or an earlier one."""
    for file in files:
        if int(file.path.split("/")[1]) > checkpoint:  # (the form of a path is checked where it is decoded)
            return f"{file.path!r} is no file of checkpoint {checkpoint}"
    return ""


def _checkpoint(brain: Brain, number: int) -> str:
    return "" if 0 < number <= brain.checkpoints.numbers else f"checkpoint {number} was not ordered"


def _marked(brain: Brain, key: ShardKey) -> str:
    """Check as ``_shard`` does, but for a watermark. In mode allreduce the tables count an epoch as one shard, from its
    first step on, which the master hears of later."""
    number, epoch, index = split_key(key)
    if not brain.takes(ShardAsked) and number < len(brain.shards.datasets) and epoch < EPOCHS_MAX and index == 0:
        return ""
    return _shard(brain, key)


def _snapshots_written(brain: Brain, who: Sender, r: SnapshotsWritten) -> str:
    wrong = _checkpoint(brain, r.checkpoint) or _partitions(brain, (snapshot.partition for snapshot in r.snapshots))
    for snapshot in r.snapshots:
        wrong = wrong or _files(snapshot.files, r.checkpoint)
        unknown = next((key for key, _ in snapshot.watermarks if _marked(brain, key)), None)
        if not wrong and unknown is not None:
            wrong = f"there is no shard {unknown}"
    return wrong


def _position(brain: Brain, position: Any) -> str:
    if position is None or (not position.step and not position.epoch and not position.sample):
        return ""
    if wrong := _datasets(brain, position.dataset):
        return wrong
    samples = brain.shards.datasets[position.dataset].plan.samples
    return "" if position.sample <= samples and position.epoch < EPOCHS_MAX else f"there is no place {position}"


def _replica_written(brain: Brain, who: Sender, r: ReplicaWritten) -> str:
    wrong = _grouped(brain) or _checkpoint(brain, r.checkpoint)
    if wrong or r.replica is None:
        return wrong
    return _files(r.replica.files, r.checkpoint) or _position(brain, r.replica.position)


def _grouped(brain: Brain) -> str:
    return "" if brain.takes(StepsCommitted) else "there is no group in mode ps"


def _ask_group(brain: Brain, who: Sender, r: GroupAsked) -> str:
    if not brain.takes(StepsCommitted):
        return ""  # (the brain's own answer says what to do)
    if r.batch_samples < 1:
        return "batch_samples must be at least 1"
    return _datasets(brain, r.dataset) or _epochs(r.until_epoch) or _position(brain, r.position)


def _generation(brain: Brain, who: Sender, r: Any) -> str:
    newest = brain.state.groups.generations
    return _grouped(brain) or ("" if 0 <= r.generation <= newest else f"there is no generation {r.generation}")


def _commit_steps(brain: Brain, who: Sender, r: StepsCommitted) -> str:
    if wrong := _grouped(brain):
        return wrong
    for c in r.steps:
        if wrong := _datasets(brain, c.dataset):
            return wrong
        samples = brain.shards.datasets[c.dataset].plan.samples
        if not (c.first <= c.last and c.lo < c.hi <= samples and c.epoch < EPOCHS_MAX):
            return f"steps {c.first}..{c.last} at [{c.lo}, {c.hi}) of {samples} are none"
        if c.generation > brain.state.groups.generations:
            return f"there is no generation {c.generation}"
        if wrong := _ranges(c.skipped, c.lo, c.hi):
            return wrong
    return ""


def _scale(brain: Brain, who: Sender, r: ScaleAsked) -> str:
    if any(role is Role.MASTER for role in (r.role, *(role for role, _ in r.also))):
        return "there is one master"
    return ""


def _resize(brain: Brain, who: Sender, r: ResizeAsked) -> str:
    if any(role is Role.MASTER for role, _ in r.sizes):
        return "the master has no size"
    return ""


def _place(brain: Brain, who: Sender, r: wire.ClockReported) -> str:
    bad = next((p.slot for p in r.clock.parts if p.slot not in brain.members.workers), None)
    return "" if bad is None else f"there is no worker:{bad}"


def _checkpoint_asked(brain: Brain, who: Sender, r: CheckpointAsked) -> str:
    return "" if r.reason is CheckpointReason.ASKED else f"{r.reason} is the master's own reason"


def _remark(brain: Brain, who: Sender, r: RemarkMade) -> str:
    if not 0 < len(r.text) <= REMARK_MAX or line(r.text) != r.text:
        return f"a remark is one line of 1 to {REMARK_MAX} characters"
    return ""


def _capacity(brain: Brain, who: Sender, r: CapacityChanged) -> str:
    if not r.node or r.node == HOME_NODE:
        return f"{r.node!r} is no further machine"
    return ""


def _exited(brain: Brain, who: Sender, r: ProcessExited) -> str:
    return ""


_WORKER, _PS, _AGENT, _COMMAND = (frozenset({role}) for role in ("worker", "ps", "agent", "command"))

RIGHTS: Final[dict[type, Right]] = {
    NodeJoined: Right(_AGENT, _own_node, _hello_node),
    MemberJoined: Right(_WORKER | _PS, _itself, _hello_member),
    wire.Beat: Right(_WORKER | _PS | _AGENT, _anyone, _anyone),
    ProcessExited: Right(_AGENT, _on_its_node, _exited),
    wire.StackTaken: Right(_AGENT, _on_its_node, _anyone),
    PlanRegistered: Right(_WORKER, _anyone, _register),
    ShardAsked: Right(_WORKER, _anyone, _ask_shard),
    ShardDone: Right(_WORKER, _anyone, _done),
    ShardReturned: Right(_WORKER, _anyone, _give_back),
    wire.ClockReported: Right(_WORKER, _anyone, _place),
    wire.ValuesReported: Right(_WORKER, _anyone, _anyone),
    ChiefAsked: Right(_WORKER, _anyone, _anyone),
    OnceAsked: Right(_WORKER, _anyone, lambda brain, who, r: "" if len(r.key) <= 255 else "its key is too long"),
    wire.MayEnd: Right(_WORKER, _anyone, _anyone),
    wire.CopyPlacesAsked: Right(_WORKER, _anyone, _anyone),
    GroupAsked: Right(_WORKER, _anyone, _ask_group),
    GroupSynced: Right(_WORKER, _anyone, _generation),
    GroupLeft: Right(_WORKER, _anyone, lambda brain, who, r: _grouped(brain)),
    StepsCommitted: Right(_WORKER, _anyone, _commit_steps),
    GroupStalled: Right(_WORKER, _anyone, _generation),
    wire.StoreSet: Right(_WORKER, _anyone, _generation),
    wire.StoreGet: Right(_WORKER, _anyone, _generation),
    ReplicaWritten: Right(_WORKER, _anyone, _replica_written),
    MirrorsReady: Right(_PS, _anyone, _mirror_ready),
    PartitionsReady: Right(_PS, _anyone, _partitions_ready),
    LoadFailed: Right(_PS, _anyone, _load_failed),
    MemoryShort: Right(_PS, _anyone, _anyone),
    SnapshotsWritten: Right(_PS, _anyone, _snapshots_written),
    DrainAsked: Right(_COMMAND | _AGENT | _PS, _may_drain, _anyone),
    CheckpointAsked: Right(_COMMAND | _WORKER, _anyone, _checkpoint_asked),
    ScaleAsked: Right(_COMMAND, _anyone, _scale),
    ResizeAsked: Right(_COMMAND, _anyone, _resize),
    RemarkMade: Right(_COMMAND, _anyone, _remark),
    CapacityChanged: Right(_COMMAND, _anyone, _capacity),
    StopAsked: Right(_COMMAND | _AGENT, _anyone, _anyone),
    SuspendAsked: Right(_COMMAND | _AGENT, _anyone, _anyone),
    wire.FaultAsked: Right(_COMMAND, _anyone, _anyone),
    wire.GetStatus: Right(_COMMAND | _WORKER | _PS | _AGENT, _anyone, _anyone),
    wire.GetSpec: Right(_COMMAND | _AGENT, _anyone, _anyone),
}
"""Requests of which the check is ``_anyone`` name nobody: they are about their sender."""


_MEMBERS: Final = ("worker", "ps")


def refused(brain: Brain, who: Sender, request: wire.RequestType) -> AnswerType | None:
    """Return the answer to a request that must not become an event; None: it may. ``who``: as its connection proved to
    be."""
    roles, speaks, exists = RIGHTS[type(request)]
    role = who.role
    if role not in roles:
        name = type(request).__name__
        return Refused(f"{who} must not send {name}: that is for {' or '.join(sorted(roles))}")
    if speaks is not _anyone and (wrong := speaks(brain, who, request)):
        return Refused(f"{type(request).__name__} of {who}: {wrong}")
    if role in _MEMBERS and (later := _never_given(brain, who)):
        return Fenced(later)
    if exists is not _anyone and (wrong := exists(brain, who, request)):
        return Refused(f"{type(request).__name__} of {who}: {wrong}")
    return None


def _never_given(brain: Brain, who: Sender) -> str:
    """An incarnation is what the master gave: a later one than it knows is nobody's."""
    members = brain.state.members
    record = (members.workers if who.role == "worker" else members.servers).get(who.slot)
    if record is not None and who.incarnation > record.member.incarnation:
        return f"{who} was never started: {who.role}:{who.slot} is at #{record.member.incarnation}"
    return ""
