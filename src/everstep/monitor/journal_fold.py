"""Folds what the journal says about leases and shards, for the audit: every event goes through the real brain."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import Self

import msgspec

from everstep.brain.brain import Brain
from everstep.brain.earlier import decode_event
from everstep.brain.events import (
    CommitManifest,
    Event,
    Granted,
    JobResumed,
    MemberJoined,
    Ok,
    PlanRegistered,
    PublishGroup,
    Registered,
    Reply,
    ShardAsked,
    ShardDone,
    StepsCommitted,
)
from everstep.brain.job import Phase
from everstep.errors import PlatformError
from everstep.ids import Incarnation, LeaseNo, NodeId, ShardKey, Slot
from everstep.model.member import Role
from everstep.model.shard import ShardSchedule, ShardState, shard_key, split_key
from everstep.model.snapshot import Manifest
from everstep.monitor.loops import LoopFold
from everstep.monitor.steps import StepFold
from everstep.storage.journal import SQL_ERRORS, check_version, sound_row


class JournalFold:
    """Holds what the journal says of a job. ``resumed``: shards that were done before this job went on from a
    checkpoint. ``steps``: mode allreduce; ``groups``: who may push under the lease of a generation there. ``loops``:
    what the loops of the script asked for. ``ps_on``, ``workers_on``: where each life of a ps, of a worker ran;
    ``lost_with``: ps that were running on a node when it was lost. ``manifests``: of its checkpoints, by number, also
    of those that were dropped."""

    def __init__(self) -> None:
        self.brain = Brain()
        self.grants: dict[LeaseNo, set[tuple[ShardKey, Slot, Incarnation]]] = {}
        self.resumed: set[ShardKey] = set()
        self.loops = LoopFold()
        self.manifests: dict[int, Manifest] = {}
        self.steps = StepFold(self.loops)
        self.groups: dict[LeaseNo, set[tuple[Slot, Incarnation]]] = {}
        self.ps_on: dict[tuple[Slot, Incarnation], NodeId] = {}
        self.lost_with: dict[NodeId, set[tuple[Slot, Incarnation]]] = {}
        self.workers_on: dict[tuple[Slot, Incarnation], NodeId] = {}
        self._reported_done: set[ShardKey] = set()

    def __repr__(self) -> str:
        return (
            f"<journal fold {len(self.plans)} plans, {len(self.grants)} leases, {len(self._reported_done)} shards done>"
        )

    def take(self, event: Event) -> None:
        """Add one event to the facts."""
        nodes = self.brain.members.nodes
        up = {node.node for node in nodes.values() if node.alive} if len(nodes) > 1 else set()
        out, fact, sender = self.brain.handle(event), event.fact, event.sender
        if isinstance(fact, PlanRegistered):
            for reply in out:
                if isinstance(reply, Reply) and isinstance(reply.answer, Registered):
                    self.loops.registered(fact, sender, reply.answer.dataset)
        elif isinstance(fact, ShardAsked):
            for no in fact.pending:
                self.loops.carried |= {split_key(shard)[:2] for shard, _, _ in self.grants.get(no, ())}
            for reply in out:
                if isinstance(reply, Reply) and isinstance(reply.answer, Granted):
                    self._grant(reply.answer.lease.no, reply.answer.lease.shard, sender.slot, sender.incarnation)
        elif isinstance(fact, ShardDone):
            if any(isinstance(reply, Reply) and isinstance(reply.answer, Ok) for reply in out):
                self._reported_done.add(fact.shard)
        elif isinstance(fact, StepsCommitted):
            if any(isinstance(reply, Reply) and isinstance(reply.answer, Ok) for reply in out):
                self.steps.announced(fact.steps)
        elif isinstance(fact, JobResumed):
            self.resumed = {k for k in self._all_shards() if self._is_done(k)}
            self.steps.before = {n: (d.finished_epochs, 0) for n, d in enumerate(fact.manifest.datasets)}
        elif isinstance(fact, MemberJoined):
            on = self.ps_on if fact.role is Role.PS else self.workers_on
            on[fact.slot, fact.incarnation] = fact.node
            for lease in fact.leases:  # adopted: granted by a master whose journal lost its tail
                held = self.brain.leases.get(lease.shard)
                if held is not None and (held.no, held.worker) == (lease.no, fact.slot):
                    self._grant(lease.no, lease.shard, fact.slot, fact.incarnation)

        for node in up:
            if not nodes[node].alive:
                here = {life for life, at in self.ps_on.items() if at == node}
                self.lost_with.setdefault(node, set()).update(here)
                self.steps.lost |= {life for life, at in self.workers_on.items() if at == node}
        for instruction in out:
            if isinstance(instruction, CommitManifest):
                self.manifests[instruction.manifest.checkpoint] = instruction.manifest
            elif isinstance(instruction, PublishGroup):
                group = instruction.group
                self.steps.published(group)
                self.groups[group.lease] = {(m.slot, m.incarnation) for m in group.members}

    def _grant(self, no: LeaseNo, shard: ShardKey, worker: Slot, incarnation: Incarnation) -> None:
        self.grants.setdefault(no, set()).add((shard, worker, incarnation))
        self.loops.granted(no, shard, worker, incarnation)

    def holders(self, lease: LeaseNo, shard: ShardKey) -> set[tuple[ShardKey, Slot, Incarnation]] | None:
        """Return who held ``lease``, and for which shards (that of a group: for all); None: it was never given."""
        if lease in self.groups:
            return {(shard, slot, incarnation) for slot, incarnation in self.groups[lease]}
        return self.grants.get(lease)

    @property
    def done(self) -> set[ShardKey]:
        """Shards that are done, and did not come back since."""
        if self.brain.takes(StepsCommitted):
            return {key for key in self._all_shards() if self._is_done(key)}
        return {key for key in self._reported_done | self.resumed if self._is_done(key)}

    def _is_done(self, key: ShardKey) -> bool:
        return self.brain.shards.state(key) in (ShardState.DONE, ShardState.RELEASED)

    def _all_shards(self) -> Iterator[ShardKey]:
        for dataset in self.brain.shards.datasets:
            for epoch in dataset.epochs:
                for index in range(dataset.plan.shards):
                    if index not in epoch.quarantined:
                        yield shard_key(dataset.number, epoch.number, index)

    @property
    def plans(self) -> list[ShardSchedule]:
        """Return the plans by dataset number."""
        return [dataset.plan for dataset in self.brain.shards.datasets]

    @property
    def owner(self) -> tuple[Slot, ...]:
        """Return partition -> ps slot; empty before every ps has joined."""
        return self.brain.placement.owner if self.brain.placement is not None else ()

    @property
    def partitions(self) -> int:
        return len(self.owner)

    @property
    def done_well(self) -> bool:
        """Return whether every script ran to its end."""
        return self.brain.job.phase is Phase.DONE

    @property
    def over(self) -> bool:
        """Return whether the job ended by its own decision, with success."""
        return self.brain.job.exit_code == 0

    def bounds(self, shard: ShardKey) -> tuple[int, int] | None:
        """Return the positions ``[start, stop)`` of a shard; None if no plan has it."""
        number, _, index = split_key(shard)
        if number >= len(self.plans) or index >= self.plans[number].shards:
            return None
        return self.plans[number].bounds(index)

    def shard_name(self, shard: ShardKey) -> str:
        """Return a shard's name: ``train e0 #12``."""
        return self.brain.shards.name(shard)

    def quarantined(self) -> dict[ShardKey, str]:
        """Return the shards set aside, and why."""
        return {
            shard_key(dataset.number, epoch.number, index): reason
            for dataset in self.brain.shards.datasets
            for epoch in dataset.epochs
            for index, reason in epoch.quarantined.items()
        }


class JournalReader:
    """Reads a journal (``storage/journal.py``) without changing it, also while a master writes it."""

    def __init__(self, path: Path) -> None:
        self.fold = JournalFold()
        self._path = path
        self._seq = 0
        try:
            self._db = sqlite3.connect(f"{path.resolve().as_uri()}?mode=ro", uri=True, timeout=10.0)
        except SQL_ERRORS as error:
            raise PlatformError(f"cannot open {path}: {error}") from error

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self._db.close()

    def advance(self) -> None:
        """Add every event journaled since the last call. Raises PlatformError on a journal that cannot be read,
        ConfigError on one of a version that is not known."""
        try:
            check_version(self._db, self._path)
            query = "SELECT seq, event, digest FROM events WHERE seq > ? ORDER BY seq"
            for seq, raw, digest in self._db.execute(query, (self._seq,)):
                sound_row(self._path, self._seq, seq, raw, digest)
                self.fold.take(decode_event(raw))
                self._seq = seq
        except (*SQL_ERRORS, msgspec.MsgspecError) as error:
            raise PlatformError(f"cannot read {self._path} after event {self._seq}: {error}") from error
