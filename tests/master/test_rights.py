"""Whatever a peer says, in whatever order: the master goes on, its state holds, and its journal can be replayed."""

from __future__ import annotations

import asyncio
import os
import random
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, get_args

import msgspec
import pytest

sys.path.insert(0, str(Path(__file__).parent))

from thrown import NODES, Thrower, identity

from everstep.brain.events import (
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
    Ok,
    OnceAsked,
    PartitionsReady,
    PlanRegistered,
    ProcessExited,
    Refused,
    RemarkMade,
    ReplicaWritten,
    ResizeAsked,
    ScaleAsked,
    ShardAsked,
    ShardDone,
    ShardReturned,
    SnapshotsWritten,
    StepsCommitted,
    StopAsked,
    StopProcess,
    SuspendAsked,
)
from everstep.cli.explain import explain
from everstep.cli.replay import replay
from everstep.ids import Incarnation, LeaseNo, NodeId, ShardKey, Slot
from everstep.machines.rights import RIGHTS, refused
from everstep.model.member import Role
from everstep.net import messages as wire

MODES: dict[str, dict[str, Any]] = {
    "ps": {},
    "ps checkpoints": {"checkpoint_every": "1000batches"},
    "parity": {"parity": "1+1"},
    "sync": {"consistency": "sync"},
    "allreduce": {"mode": "allreduce", "ps": 0},
    "hybrid": {"mode": "allreduce"},
}


def within(run_dir: Path, do: Callable[[Thrower], None], **fields: Any) -> None:
    """``do(thrower)`` with a running loop, and a master whose job is under way."""

    async def run() -> None:
        thrower = Thrower(run_dir, **fields)
        try:
            thrower.begin()
            do(thrower)
        finally:
            thrower.settle()
            thrower.master.journal.close()

    asyncio.run(run())


def throw(t: Thrower, seed: int, requests: int, seconds: float = 1e9) -> None:
    rng = random.Random(seed)
    end = time.monotonic() + seconds
    for n in range(requests):
        peer, request = t.any_peer(rng), t.any_request(rng)
        if rng.random() < 0.7:
            peer, request = t.fitting(rng, request)
        try:
            t.say(peer, request)
            assert not t.master._faults, "the brain failed on it"
            if n % 20 == 0:
                t.settle()
            if n % (1 + len(t.brain.members.workers) // 100) == 0:  # (it looks at everybody, and a few scale to 10,000)
                t.brain.validate()
        except Exception as error:
            raise AssertionError(f"seed {seed}, request {n}: {request} of {peer.identity}: {error!r}") from error
        if time.monotonic() > end:
            break


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("seed", range(int(os.environ.get("EVERSTEP_THROW_SEEDS", "3"))))
def test_random_requests_end_nothing(mode: str, seed: int, tmp_path: Path) -> None:
    """EVERSTEP_THROW_SEEDS=1000 for an hour of it."""

    def do(t: Thrower) -> None:
        before = t.master.journal.seq
        throw(t, seed, 700)
        assert t.master.journal.seq > before + 20 or t.brain.job.over  # not all of them were refused

    within(tmp_path, do, **MODES[mode])
    assert replay(tmp_path).difference is None


def test_a_shard_that_is_not_there_is_refused(tmp_path: Path) -> None:
    def do(t: Thrower) -> None:
        worker = t.peer("worker", 0, 1)
        (held,) = [h for h in t.brain.leases.values() if h.worker == 0]
        before = t.master.journal.seq
        for shard in (-(2**63), 2**63 - 1, 1 << 52, held.shard + 500):
            answer = t.say(worker, ShardDone(ShardKey(shard), LeaseNo(1), ()))
            assert isinstance(answer, Refused) and "there is no shard" in answer.error
        for skipped in (((0, 5), (3, 6)), ((0, 2**50),), ((9, 2),)):
            answer = t.say(worker, ShardDone(held.shard, held.no, (), skipped))
            assert isinstance(answer, Refused) and "is no part of" in answer.error
        assert t.master.journal.seq == before
        assert held.shard in t.brain.leases

    within(tmp_path, do)


def test_what_the_brain_fails_on_is_refused_and_undone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A bug in the brain costs the request that found it: not the master, and not the next one."""

    def do(t: Thrower) -> None:
        worker = t.peer("worker", 0, 1)
        before = t.brain.snapshot()
        seq = t.master.journal.seq
        handle = type(t.brain).handle

        def broken(brain: Any, event: Any) -> Any:
            out = handle(brain, event)
            if isinstance(event.fact, ShardDone):
                raise KeyError("half of it was done")
            return out

        monkeypatch.setattr(type(t.brain), "handle", broken)
        (held,) = [h for h in t.brain.leases.values() if h.worker == 0]
        for _ in range(15):
            answer = t.say(
                worker, ShardDone(held.shard, held.no, ((Slot(0), Incarnation(1)), (Slot(1), Incarnation(1))))
            )
            assert isinstance(answer, Refused)
        assert "could not be handled" in answer.error  # it is not asked any more
        assert t.brain.snapshot() == before and t.master.journal.seq == seq
        monkeypatch.setattr(type(t.brain), "handle", handle)
        other = t.peer("worker", 1, 1)
        (held,) = [h for h in t.brain.leases.values() if h.worker == 1]
        done = ShardDone(held.shard, held.no, ((Slot(0), Incarnation(1)), (Slot(1), Incarnation(1))))
        assert t.say(other, done) == Ok()
        t.brain.validate()

    within(tmp_path, do)


# ---- who may say what ----------------------------------------------------------------------------------------

ROLES = ("worker", "ps", "agent", "command", "master")


def example(kind: type, role: str, slot: int, incarnation: int, node: str) -> Any:
    """A request of this kind about the process in ``slot``, as good as can be."""
    rng = random.Random(0)
    made = Example(rng).make_kind(kind)
    for name, value in (("slot", Slot(slot)), ("incarnation", Incarnation(incarnation)), ("node", NodeId(node))):
        if name in made.__struct_fields__:
            made = msgspec.structs.replace(made, **{name: value})
    if "role" in made.__struct_fields__ and kind is not ScaleAsked:
        made = msgspec.structs.replace(made, role=Role(role if role in ("worker", "ps") else "worker"))
    return made


class Example:
    def __init__(self, rng: random.Random) -> None:
        self.rng = rng

    def make_kind(self, kind: type) -> Any:
        from msgspec import inspect

        plain = Thrower.__new__(Thrower)
        info = inspect.type_info(kind)
        assert isinstance(info, inspect.StructType)
        values: dict[str, Any] = {}
        for f in info.fields:
            if f.required:
                values[f.name] = _plain(f.type, plain)
        return kind(**values)


def _plain(t: Any, maker: Any) -> Any:
    from msgspec import inspect

    match t:
        case inspect.Metadata():
            return _plain(t.type, maker)
        case inspect.IntType():
            return 0
        case inspect.FloatType():
            return 0.0
        case inspect.StrType():
            return ""
        case inspect.EnumType():
            return Role.WORKER if t.cls is Role else next(iter(t.cls))
        case inspect.LiteralType():
            return t.values[0]
        case inspect.VarTupleType():
            return ()
        case inspect.DictType():
            return {}
        case inspect.StructType():
            return t.cls(**{f.name: _plain(f.type, maker) for f in t.fields if f.required})
        case inspect.BoolType():
            return False
    raise AssertionError(t)


def test_every_request_has_its_right() -> None:
    assert set(RIGHTS) == set(get_args(wire.RequestType))


MAY: dict[type, str] = {  # who may send what, said a second time
    NodeJoined: "agent",
    MemberJoined: "worker ps",
    wire.Beat: "worker ps agent",
    ProcessExited: "agent",
    wire.StackTaken: "agent",
    PlanRegistered: "worker",
    ShardAsked: "worker",
    ShardDone: "worker",
    ShardReturned: "worker",
    wire.ClockReported: "worker",
    wire.ValuesReported: "worker",
    ChiefAsked: "worker",
    OnceAsked: "worker",
    wire.MayEnd: "worker",
    wire.CopyPlacesAsked: "worker",
    GroupAsked: "worker",
    GroupSynced: "worker",
    GroupLeft: "worker",
    StepsCommitted: "worker",
    GroupStalled: "worker",
    wire.StoreSet: "worker",
    wire.StoreGet: "worker",
    ReplicaWritten: "worker",
    MirrorsReady: "ps",
    PartitionsReady: "ps",
    LoadFailed: "ps",
    MemoryShort: "ps",
    SnapshotsWritten: "ps",
    DrainAsked: "command agent ps",
    CheckpointAsked: "command worker",
    ResizeAsked: "command",
    ScaleAsked: "command",
    StopAsked: "command agent",
    SuspendAsked: "command agent",
    RemarkMade: "command",
    CapacityChanged: "command",
    wire.FaultAsked: "command",
    wire.GetStatus: "command worker ps agent",
    wire.GetSpec: "command agent",
}


@pytest.mark.parametrize("mode", ["ps", "allreduce"])
def test_every_request_of_every_role_for_every_member(mode: str, tmp_path: Path) -> None:
    def do(t: Thrower) -> None:
        brain = t.brain
        for kind in get_args(wire.RequestType):
            for role in ROLES:
                for slot, life in ((0, 1), (1, 1), (0, 2), (7, 1)):
                    for node in NODES:
                        who = identity(role, slot, life, node)
                        own = example(kind, role, slot, life, node)
                        answer = refused(brain, who, own)
                        allowed = role in MAY[kind].split()
                        if not allowed:
                            assert isinstance(answer, Refused) and "must not send" in answer.error, (kind, who)
                            continue
                        if role in ("worker", "ps") and (slot, life) == (0, 2) and role in _seated(brain):
                            assert isinstance(answer, Fenced | Refused), (kind, who)  # never started
                        if "slot" in own.__struct_fields__ and role in ("worker", "ps"):
                            other = example(kind, role, 1 - slot if slot < 2 else 0, life, node)
                            answer = refused(brain, who, other)
                            assert isinstance(answer, Refused) and "it speaks of" in answer.error, (kind, who)
                        if role == "agent" and node == "n1" and kind in (ProcessExited, wire.StackTaken) and slot < 2:
                            assert isinstance(answer, Refused) and "is on node0" in answer.error, (kind, who)
                        if kind is NodeJoined:
                            elsewhere = example(kind, role, slot, life, "somewhere")
                            assert isinstance(refused(brain, who, elsewhere), Refused)

    def _seated(brain: Any) -> set[str]:
        return {"worker"} | ({"ps"} if brain.members.servers else set())

    within(tmp_path, do, **MODES[mode])


def test_a_remark_is_one_line_of_a_command(tmp_path: Path) -> None:
    def do(t: Thrower) -> None:
        me = t.peer("command")
        for text in ("", "x" * 401, "two\nlines", "\x1b[2J"):
            assert isinstance(t.say(me, RemarkMade(text)), Refused), text
        assert t.say(me, RemarkMade("the switch of rack 7 was replaced")) == Ok()
        assert isinstance(t.say(t.peer("worker", 0, 1), RemarkMade("it is me")), Refused)

    within(tmp_path, do)
    assert replay(tmp_path).ok
    text = "\n".join(explain(tmp_path))
    assert "remark: the switch of rack 7 was replaced" in text and "(remark made by command)" in text


def test_a_worker_cannot_speak_as_a_ps(tmp_path: Path) -> None:
    def do(t: Thrower) -> None:
        written = SnapshotsWritten(1)
        for peer in (t.peer("worker", 0, 1), t.peer("ps", 1, 1), t.peer("agent", node="node0")):
            assert isinstance(t.say(peer, written), Refused)

    within(tmp_path, do, checkpoint_every="1000batches")


def test_a_life_that_was_never_given_takes_nobodys_place(tmp_path: Path) -> None:
    def do(t: Thrower) -> None:
        t.master._young = 0.0
        leases = dict(t.brain.leases)
        thief = t.peer("worker", 0, 9)
        answer = t.say(thief, MemberJoined(Role.WORKER, Slot(0), Incarnation(9), NodeId("node0"), 1))
        assert isinstance(answer, Fenced) and "was never started" in answer.reason
        assert t.brain.leases == leases and t.brain.members.workers[0].member.incarnation == 1
        # nor by way of an agent of another node, which is told to end it
        agent = t.peer("agent", node="n1")
        running = ((Role.WORKER, Slot(0), Incarnation(9), 5),)
        t.say(agent, NodeJoined(NodeId("n1"), "", 1, 0, running))
        assert t.brain.leases == leases and t.brain.members.workers[0].member.incarnation == 1
        assert any(isinstance(o, StopProcess) and o.incarnation == 9 for o in agent.orders)

    within(tmp_path, do)


def test_a_beat_keeps_only_its_own_leases_alive(tmp_path: Path) -> None:
    def do(t: Thrower) -> None:
        (other,) = [h for h in t.brain.leases.values() if h.worker == 1]
        t.master.watch.look(t.brain, t.master.clock.now())
        t.say(t.peer("worker", 0, 1), wire.Beat(((other.no, other.stop),)))
        assert t.master.watch.position(other.no, other.start) == other.start
        t.say(t.peer("worker", 1, 1), wire.Beat(((other.no, other.stop),)))
        assert t.master.watch.position(other.no, other.start) == other.stop

    within(tmp_path, do)


def test_reported_values_are_bounded(tmp_path: Path) -> None:
    def do(t: Thrower) -> None:
        for n in range(30):
            t.say(
                t.peer("worker", 0, 1), wire.ValuesReported({f"{n}/{i}": 1.0 for i in range(100)} | {"x" * 5000: 1.0})
            )
        assert len(t.master.readings.values) <= 1000 and "x" * 5000 not in t.master.readings.values

    within(tmp_path, do)
