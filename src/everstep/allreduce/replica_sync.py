"""Keeps one member's training state: a source for others, a copy of others', checkpoints, and agreement.

``agree`` is the heart: the first thing that members of a new group do is to have the same state, bit for bit. Who has
followed the others catches up, states are compared, and who lacks something or differs copies it while the others wait;
where nobody has a state (the first group, or after all were lost) everybody begins with the same checkpoint, or as the
script made the model, which must then be the same everywhere.
"""

from __future__ import annotations

import hashlib
import logging
import os
import socket
import threading
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

from everstep import faultpoints
from everstep.allreduce.handover import Connect, StateFollower, fetch
from everstep.allreduce.member_runtime import CopyToBegin, MemberRuntime
from everstep.allreduce.replica_checkpoint import ReplicaWriter, find_replica, read_replica
from everstep.allreduce.serialize import SerializedState
from everstep.allreduce.state import ReplicaState
from everstep.allreduce.state_source import StateSource
from everstep.errors import (
    DeadlineError,
    EverstepError,
    PlatformError,
    ReplicasDifferError,
    ScriptError,
    WireError,
)
from everstep.ids import Incarnation, NodeId, Slot
from everstep.model.group import Group, GroupMember, Position
from everstep.model.member import Address
from everstep.net.auth import Identity, Secret, load_secret, worker_identity
from everstep.net.data import DataClient, DataServer
from everstep.net.messages import TakeReplica
from everstep.net.rendezvous import SECRET_FILE, worker_socket
from everstep.net.sockets import listen_tcp, listen_unix

CATCH_UP_S = 10.0  # so long the others wait for one that follows; then it copies everything
FETCH_TRIES = 5

Gather = Callable[[list[int]], list[list[int]]]
logger = logging.getLogger("everstep.worker")


class ReplicaSync:
    """``boundary``, ``idle`` and ``agree`` are for the thread that trains; ``follow`` and ``close`` for any.

    ``on_synced``: a joiner can enter now (called on a thread of its own). ``on_error``: it never can.
    ``has_state``: this member's state is one of the group's; whoever learns that all of them are void puts it to False.
    """

    def __init__(self, state: ReplicaState, runtime: MemberRuntime, *, host: str | None = None) -> None:
        """Take ``host``: by which other nodes reach this one ("EVERSTEP_HOST" of the environment). Raises ConfigError
        (secret), PlatformError (sockets)."""
        self._state, self._runtime = state, runtime
        self.source = StateSource(state)
        self.writer = ReplicaWriter(state, runtime)
        self._rank = -1
        self.on_synced: Callable[[], None] | None = None
        self.on_error: Callable[[EverstepError], None] | None = None
        self.own_lineage = -1
        self.healed = 0  # times that this member took over the majority's state
        self.address: Address | None = None
        self.copy: CopyToBegin | None = None  # to begin with, where nobody has a state
        self.adopted = -1  # step of the copy that the state began with
        self._has = False
        self._copied = False  # followed, and not compared with others' yet
        self._initial: SerializedState | None = None  # as the script made it, once it may be overwritten
        self._follower: StateFollower | None = None
        self._lock = threading.Lock()
        self._server: DataServer | None = None
        self._secret: Secret | None = None
        if not runtime.embedded:
            faultpoints.begin("worker", runtime.slot, runtime.incarnation)
            orders: Any = runtime  # a ProcessRuntime: the embedded one has no master that would order anything
            orders.on_replica = self.order
            self._listen(os.environ.get("EVERSTEP_HOST", "") if host is None else host)

    def __repr__(self) -> str:
        return f"<ReplicaSync at {self._state.position}, lineage {self.own_lineage}, {self._follower or self.source!r}>"

    def _listen(self, host: str) -> None:
        runtime = self._runtime
        self._secret = load_secret(runtime.run_dir / SECRET_FILE)
        path = worker_socket(runtime.slot)
        listeners: list[socket.socket] = [listen_unix(runtime.run_dir / path)]
        port = 0
        if runtime.spec.bind and host:
            listeners.append(listen_tcp(host, 0))
            port = listeners[-1].getsockname()[1]
        self.address = Address(runtime.node, path, host if port else "", port)
        tls = runtime.spec.tls == "all" and bool(port)
        self._server = DataServer(self.source, listeners, self._secret, self._identity(), tls=tls)

    @property
    def secret(self) -> Secret | None:
        """Return the job's; None: this is no job of several processes."""
        return self._secret

    def _identity(self) -> Identity:
        return worker_identity(*self._me, self._runtime.node)

    @property
    def _me(self) -> tuple[Slot, Incarnation]:
        return self._runtime.slot, self._runtime.incarnation

    # ------------------------------------------------------------ facts

    @property
    def has_state(self) -> bool:
        """Also of one that follows: its state is whole, if behind."""
        follower = self._follower
        if follower is not None:
            return follower.holds
        return self._has

    @has_state.setter
    def has_state(self, has: bool) -> None:
        self._has = has
        if not has:
            self.own_lineage = -1

    @property
    def lineage(self) -> int:
        """Of states (the generation that began it) that this one belongs to; -1: none is known."""
        follower = self._follower
        return follower.lineage if follower is not None else self.own_lineage

    # ------------------------------------------------------------ while training

    def boundary(self, saves: bool = True) -> None:
        """A step is over and ``state.position`` is that of the next one. ``saves``: a checkpoint may be of it."""
        self.source.boundary()
        if saves:
            self.writer.boundary()

    def idle(self) -> None:
        """Do as ``boundary`` does, where nothing was trained: now and then while waiting between two steps."""
        self.source.idle()
        self.writer.boundary(trained=False)

    def committed_everywhere(self, step: int) -> None:
        """Every member has committed all steps before ``step``."""
        self.writer.committed_everywhere(step)

    def journaled(self) -> None:
        """The journal reaches to where this member came in: its state is not given up while it lives."""
        self._initial = None

    def order(self, order: TakeReplica) -> None:
        """Take an order from the master, on any thread: write the state at the next boundary."""
        self.writer.order(order)

    # ------------------------------------------------------------ joining

    def follow(self, group: Group) -> None:
        """Copy the state of a member of ``group`` and follow it, in the background; harmless when repeated. A state
        that cannot be followed is copied when this member enters, while the others wait; or here, if the scripts of the
        others have come to their end."""
        if not self._state.follows and (self._has or not group.over):
            if not self._has:
                self._synced()
            return
        sources = [m for m in group.members if (m.slot, m.incarnation) != self._me]
        with self._lock:
            if self._follower is None:
                if not sources:
                    return
                if self._state.follows:
                    self._keep_initial()
                state, me = self._state, self._me
                self._follower = StateFollower(state, me, self._connect, self._synced, self._failed, self._keep_initial)
            follower = self._follower
        follower.follow(sources, group.over)

    def _keep_initial(self) -> None:
        """The state is about to be overwritten: keep the one that the script made."""
        if self._initial is None and not self._has:
            self._initial = self._state.snapshot()

    def _connect(self, member: GroupMember) -> DataClient:
        assert self._secret is not None and member.address is not None
        return DataClient(
            member.address,
            secret=self._secret,
            identity=self._identity(),
            run_dir=self._runtime.run_dir,
            tls=self._runtime.spec.tls,
            expect=(member.slot, member.incarnation),
        )

    def _synced(self) -> None:
        if self.on_synced is not None:
            self.on_synced()

    def _failed(self, error: EverstepError) -> None:
        logger.error("worker:%s cannot join: %s", self._runtime.slot, error)
        if self.on_error is not None:
            self.on_error(error)

    # ------------------------------------------------------------ a new group

    def agree(self, group: Group, rank: int, gather: Gather) -> Position:
        """Have the same state as every other member; the position of it. The first thing in a group, between two steps.

        ``gather``: all-gather of some int64 over the group; what it raises passes through, and nothing is harmed then.
        Raises ScriptError (models differ), CheckpointError (nothing to begin from), PlatformError."""
        if group.copied == self._me and self.copy is not None and not (self._has and self.own_lineage == group.lineage):
            self._begin_with(self.copy, group)
        follower = self._follower
        has = self.has_state and self.lineage == group.lineage
        joins = has and (follower is not None or self._copied)
        formed = False
        words = gather([has, joins, self._state.loop, *_numbers(self._state.position)])
        faultpoints.reach("agree")
        positions, loops = [Position(*w[3:]) for w in words], [w[2] for w in words]
        holders = [r for r, w in enumerate(words) if w[0] and not w[1]] or [r for r, w in enumerate(words) if w[0]]
        if not holders:
            formed = True
            self._form(group, gather)
        else:
            step = max(positions[r].step for r in holders)
            newest = [r for r in holders if positions[r].step == step]
            reference = min(newest, key=lambda r: (-loops[r], r))
            if any(not w[0] or w[1] or m.step != step for w, m in zip(words, positions, strict=True)):
                self._level(group, rank, gather, reference, (positions[reference], loops[reference]), has)
        self._has, self.own_lineage, self.source.lineage = True, group.lineage, group.lineage
        self._rank, self.writer.lineage = rank, group.lineage
        self._copied = False
        if formed:
            self._initial = None
        self.copy = None  # (it is older than the state from here on)
        self.source.leave((m.slot, m.incarnation) for m in (*group.members, *_lost(group)))
        faultpoints.reach("agreed")
        return self._state.position

    def compare(self, group: Group, rank: int, gather: Gather) -> None:
        """A vote said that members have different states. Find which, and let those that are in the minority have the
        state of the others. Raises ReplicasDifferError where there is no majority, and no setting says
        whom to take."""
        digests = self._state.tensor_digests()
        words = gather([len(digests), _int64(hashlib.blake2b("\n".join(digests).encode(), digest_size=8))])
        alike = all(w == words[0] for w in words)
        if alike:
            rows = gather(list(digests.values()))
        else:  # (of different kinds: the whole of each)
            digests = {"what is kept of the parameters": self._state.quick_digest()}
            rows = gather(list(digests.values()))
        differing = [n for at, n in enumerate(digests) if any(row[at] != rows[0][at] for row in rows)]
        if not differing:
            return
        what = f"{differing[0]!r}" + (f" and {len(differing) - 1} more" if len(differing) > 1 else "")
        reference = self._truth(group, rows)
        first = list(digests).index(differing[0])
        shown = ", ".join(
            f"{row[first] & (1 << 64) - 1:016x} on worker:{m.slot}" for m, row in zip(group.members, rows, strict=False)
        )
        step = self._state.position.step
        if reference < 0:
            raise ReplicasDifferError(
                f"the replicas have drifted apart: before step {step} the digest of {what} is {shown}, and no majority "
                "says which is right. Something in the script depends on the worker (random numbers, gradients or "
                "weights that are set by hand, kernels that are not deterministic): find it; or run with "
                "--heal-from lowest, which takes the state of the lowest worker"
            )
        behind = [r for r, row in enumerate(rows) if row != rows[reference]]
        logger.error(
            "the replicas have drifted apart: before step %d the digest of %s is %s; %s take the state of %s",
            step,
            what,
            shown,
            _names(group, behind),
            group.members[reference],
        )
        self.healed += rank in behind
        self._level(group, rank, gather, reference, (self._state.position, self._state.loop), True)

    def _truth(self, group: Group, rows: Sequence[Sequence[int]]) -> int:
        """Return the rank whose state is right; -1: nobody knows."""
        counts = Counter(tuple(row) for row in rows)
        most, times = counts.most_common(1)[0]
        if 2 * times > len(rows):
            return [tuple(row) for row in rows].index(most)
        ranks = sorted(range(len(rows)), key=lambda r: group.members[r].slot)
        match self._runtime.spec.heal_from:
            case "lowest":
                return ranks[0]
            case "highest":
                return ranks[-1]
        return -1

    def _level(
        self, group: Group, rank: int, gather: Gather, reference: int, at: tuple[Position, int], has: bool
    ) -> None:
        """Somebody is new, or behind: all get the state of rank ``reference``, which is ``at`` that position and
        loop."""
        whole, (position, loop) = has, at
        if self._follower is not None:
            self._follower.reach(position, CATCH_UP_S)
            whole = self._end_following() and has
        for _ in range(FETCH_TRIES):
            there = whole and (self._state.position.step, self._state.loop) == (position.step, loop)
            words = gather([there, self._state.quick_digest() if there else 0])
            behind = [r for r, w in enumerate(words) if w != words[reference]]
            if not behind:
                return
            if rank == reference:
                logger.warning("state of step %d is copied to %s", position.step, _names(group, behind))
                self.source.provide()
            if rank in behind:
                if has and self.own_lineage == group.lineage and there:
                    logger.error("worker:%s: our state differs from that of others", self._runtime.slot)
                whole = self._copy(group.members[reference], position.step, whole)
        raise PlatformError(
            f"worker:{self._runtime.slot} could not get the state of {group.members[reference]} in "
            f"{FETCH_TRIES} attempts"
        )

    def _copy(self, member: GroupMember, step: int, whole: bool) -> bool:
        """Copy a member's state; return whether the state is whole afterwards, be it the old one."""
        try:
            client = self._connect(member)
        except (WireError, DeadlineError) as error:
            logger.warning("cannot copy the state of %s: %s", member, error)
            return whole
        try:
            _, serialized = fetch(client, self._me, step=step, timeout_s=60.0)
        except (WireError, DeadlineError) as error:
            logger.warning("cannot copy the state of %s: %s", member, error)
            return whole
        finally:
            client.close()
        self.source.reset()
        self._state.load(serialized, f"the state of {member}")
        return True

    def _end_following(self) -> bool:
        """End the following; return whether the state is whole."""
        follower = self._follower
        assert follower is not None
        follower.stop()
        self._has, self.own_lineage = follower.whole, follower.lineage
        self._copied, self._follower = True, None
        return follower.whole

    # ------------------------------------------------------------ nobody has a state

    def _begin_with(self, copy: CopyToBegin, group: Group) -> None:
        """Take the copy that outlived this worker's former life as the state; others get it from here."""
        self._state.load(copy.serialized(), f"the copy of step {copy.held.position.step}")
        self._state.position = group.begin
        self._has, self.own_lineage, self.adopted = True, group.lineage, group.begin.step
        self.source.reset()
        logger.info("begins with the copy of step %d", group.begin.step)

    def _form(self, group: Group, gather: Gather) -> None:
        if self._follower is not None:
            self._end_following()
        if self._initial is not None:  # the state of a group that is gone lies over it
            self._state.load(self._initial, "the state that the script made")
        self.adopted = -1
        if group.restore:
            self._restore(group.restore)
        else:
            digests = self._state.parameter_digests()
            self._compare(group, gather, digests)
        self._state.position = group.begin
        self.source.reset()

    def _restore(self, checkpoint: int) -> None:
        runtime = self._runtime
        key = self._secret.checkpoint_key if self._secret is not None else b""
        place, manifest = find_replica(runtime.spec, runtime.run_dir, checkpoint, key, runtime.home_link())
        self._state.load(read_replica(place, manifest), f"checkpoint {checkpoint} of {place.url}")
        logger.info("loaded checkpoint %d of %s: step %d", checkpoint, place.url, self._state.position.step)

    def _compare(self, group: Group, gather: Gather, digests: dict[str, int]) -> None:
        """Compare the members' states; ScriptError, at all members alike, names the first parameter that differs and
        the slots."""
        names = hashlib.blake2b("\n".join(digests).encode(), digest_size=8)
        values = hashlib.blake2b(repr(list(digests.values())).encode(), digest_size=8)
        words = gather([len(digests), _int64(names), _int64(values)])
        if all(w == words[0] for w in words):
            return
        advice = (
            "build the same model on every worker, after es.join() (which seeds torch; random and numpy are seeded "
            "when a worker starts), whatever its slot"
        )
        if any(w[:2] != words[0][:2] for w in words):
            counts = ", ".join(f"{w[0]} on worker:{m.slot}" for w, m in zip(words, group.members, strict=True))
            raise ScriptError(f"the models differ between workers: parameters and buffers are {counts}: {advice}")
        rows = gather(list(digests.values()))
        for at, name in enumerate(digests):
            others = [f"worker:{m.slot}" for m, row in zip(group.members, rows, strict=True) if row[at] != rows[0][at]]
            if others:
                raise ScriptError(
                    f"the models differ between workers: {name!r} of {', '.join(others[:8])} is not that of "
                    f"worker:{group.members[0].slot}: {advice}"
                )

    # ------------------------------------------------------------ end

    def close(self) -> None:
        """No peer gets anything from here any more. Harmless when repeated."""
        follower = self._follower
        if follower is not None:
            follower.stop()
        self.source.close()
        self.writer.close()
        if self._server is not None:
            self._server.close(timeout_s=1.0)


def _numbers(position: Position) -> tuple[int, int, int, int]:
    return position.step, position.dataset, position.epoch, position.sample


def _int64(hashed: Any) -> int:
    return int.from_bytes(hashed.digest(), "little", signed=True)


def _names(group: Group, ranks: list[int]) -> str:
    return ", ".join(str(group.members[r]) for r in ranks)


def _lost(group: Group) -> list[GroupMember]:
    return [GroupMember(slot, incarnation, NodeId("")) for slot, incarnation in group.lost]


__all__ = ["Connect", "ReplicaSync"]
