"""A real ``Master`` in this process, and requests made at random from their types, thrown at it by all kinds of "
"peers."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any, cast

import msgspec
from msgspec import inspect

from everstep.brain.events import GroupAsked, MasterStarted, MemberJoined, NodeJoined, PlanRegistered, ShardAsked
from everstep.config.spec import JobSpec
from everstep.ids import Incarnation, NodeId, Slot
from everstep.machines.rights import RIGHTS
from everstep.master.server import Master
from everstep.model.member import Role
from everstep.model.shard import ShardSchedule
from everstep.net import messages as wire
from everstep.net.auth import Identity, create_secret
from everstep.net.control_server import Peer

TYPES = inspect.type_info(wire.Call)
ORDERS = msgspec.msgpack.Decoder(wire.OrderType)
NODES = ("node0", "n1")


class FakePeer:
    """One connection, as the master sees it."""

    numbers = 0

    def __init__(self, identity: Identity) -> None:
        FakePeer.numbers += 1
        self.identity, self.number, self.tag, self.closed = identity, FakePeer.numbers, None, False
        self.orders: list[Any] = []

    def send(self, order: Any) -> None:
        self.orders.append(order)

    def send_encoded(self, order: bytes) -> None:
        self.orders.append(ORDERS.decode(order))

    def close(self) -> None:
        self.closed = True


def identity(role: str, slot: int = 0, incarnation: int = 0, node: str = "node0") -> Identity:
    return Identity(
        purpose="control",
        role=cast(Any, role),
        slot=Slot(slot),
        incarnation=Incarnation(incarnation),
        node=NodeId(node),
    )


class Thrower:
    """``master`` and the means to say things to it."""

    def __init__(self, run_dir: Path, **fields: Any) -> None:
        (run_dir / "logs").mkdir(parents=True)
        self.spec = JobSpec(**{"workers": 2, "ps": 2, "partitions": 8, **fields})
        self.master = Master(run_dir, self.spec, create_secret(run_dir / "secret"))
        self.master._tell(MasterStarted(self.master.journal.incarnation, self.spec))
        self.peers: dict[str, FakePeer] = {}

    @property
    def brain(self) -> Any:
        return self.master.brain

    def peer(self, role: str, slot: int = 0, incarnation: int = 0, node: str = "node0") -> FakePeer:
        who = identity(role, slot, incarnation, node)
        return self.peers.setdefault(str(who), FakePeer(who))

    def say(self, peer: FakePeer, request: wire.RequestType) -> Any:
        """The answer, as far as there is one before it is durable."""
        from everstep.brain.events import Reply
        from everstep.net.control_server import Later

        answer = self.master._request(cast(Peer, peer), request)
        if isinstance(answer, Later):
            if answer.given is not None:
                return answer.given
            last = self.master._undurable[-1] if self.master._undurable else None
            mine = next((u for u in reversed(self.master._undurable) if u[1] is answer), last)
            done = mine[0] if mine is not None else None
            assert not done or not done.instructions or not isinstance(done.instructions[0], Reply) or done.answer
            return done.answer if done is not None else None
        return answer

    def settle(self) -> None:
        """All that was decided is durable, and done."""
        self.master.journal.flush()
        self.master._durable(self.master.journal.durable_seq)

    def begin(self) -> None:
        """A job under way: agents, ps, workers, a dataset, and leases or a group."""
        running: dict[str, list[tuple[Role, Slot, Incarnation, int]]] = {node: [] for node in NODES}
        for node in NODES:
            self.say(self.peer("agent", node=node), NodeJoined(NodeId(node), "", 1 if node != "node0" else 0, 0, ()))
        for role, n in ((Role.PS, self.spec.ps), (Role.WORKER, self.spec.workers)):
            for slot in range(n):
                who = self.peer(str(role), slot, 1)
                self.say(who, MemberJoined(role, Slot(slot), Incarnation(1), NodeId("node0"), 7, _address(slot)))
                running["node0"].append((role, Slot(slot), Incarnation(1), 7))
        plan = ShardSchedule(name="d", samples=1000, shard_samples=10, seed=0)
        for slot in range(self.spec.workers):
            self.say(self.peer("worker", slot, 1), PlanRegistered(plan))
            if self.spec.mode == "allreduce":
                self.say(self.peer("worker", slot, 1), GroupAsked(0, 2, 10))
            else:
                self.say(self.peer("worker", slot, 1), ShardAsked(0, 2, 1))
        self.settle()

    # ------------------------------------------------------------ at random

    def any_peer(self, rng: random.Random) -> FakePeer:
        role = rng.choice(["worker", "worker", "ps", "agent", "command", "master"])
        slot, life = rng.choice([0, 0, 1, 1, 2, 9]), rng.choice([1, 1, 1, 2, 0, 77])
        return self.peer(role, slot, life, rng.choice(NODES))

    def fitting(self, rng: random.Random, request: wire.RequestType) -> tuple[FakePeer, wire.RequestType]:
        """A peer that may send such a request, and the request about itself."""
        role = rng.choice(sorted(RIGHTS[type(request)].roles))
        slot = rng.choice([0, 1])
        record = self.brain.members.of(Role(role)).get(slot) if role in ("worker", "ps") else None
        life = record.member.incarnation if record is not None else 0
        node = rng.choice(NODES)
        own = {"slot": Slot(slot), "incarnation": Incarnation(life)} if record is not None else {}
        own |= {"node": NodeId(node)} if role == "agent" else {}
        own |= {"role": Role(role)} if isinstance(request, MemberJoined) and record is not None else {}
        fields = {k: v for k, v in own.items() if k in request.__struct_fields__}
        return self.peer(role, slot, life, node), msgspec.structs.replace(request, **fields)

    def any_request(self, rng: random.Random) -> wire.RequestType:
        call = cast(inspect.StructType, TYPES)
        kinds = cast(inspect.UnionType, call.fields[1].type).types
        kind = cast(inspect.StructType, rng.choice(kinds))
        made = cast(wire.RequestType, self.make(rng, kind, kind.cls.__name__))
        data = msgspec.msgpack.encode(wire.Call(1, made))
        return msgspec.msgpack.decode(data, type=wire.Call).request  # (what the wire would refuse is made by mistake)

    def make(self, rng: random.Random, t: Any, at: str) -> Any:
        """A value of type ``t``: often something that is there, now and then the ends of its range."""
        match t:
            case inspect.Metadata():
                return self.make(rng, t.type, at)
            case inspect.StructType():
                known = self.known(rng, t.cls)
                if known is not None and rng.random() < 0.5:
                    return known
                return t.cls(**{f.name: self.make(rng, f.type, f.name) for f in t.fields})
            case inspect.UnionType():
                return self.make(rng, rng.choice(t.types), at)
            case inspect.TupleType():
                return tuple(self.make(rng, one, at) for one in t.item_types)
            case inspect.VarTupleType():
                length = max(rng.choice([0, 1, 1, 2, 5]), t.min_length or 0)
                length = length if t.max_length is None else min(length, t.max_length)
                return tuple(self.make(rng, t.item_type, at) for _ in range(length))
            case inspect.DictType():
                pairs = range(rng.choice([0, 1, 2]))
                return {self.make(rng, t.key_type, at): self.make(rng, t.value_type, at) for _ in pairs}
            case inspect.IntType():
                return self.number(rng, t, at)
            case inspect.FloatType():
                ends = [0.0, 1.0, t.ge if t.ge is not None else -1e308, t.le if t.le is not None else float("nan")]
                return rng.choice([*ends, rng.random() * 100])
            case inspect.StrType():
                return self.text(rng, t, at)
            case inspect.BytesType():
                return rng.randbytes(rng.choice([0, 1, 9]))
            case inspect.BoolType():
                return rng.random() < 0.5
            case inspect.NoneType():
                return None
            case inspect.EnumType():
                return rng.choice(list(t.cls))
            case inspect.LiteralType():
                return rng.choice(t.values)
        raise AssertionError(f"{at}: {t}")

    def number(self, rng: random.Random, t: inspect.IntType, at: str) -> int:
        brain = self.brain
        there = [0, 1, 2, 3, 10, 100, brain.checkpoints.numbers, brain.state.groups.generations]
        leases = list(brain.shards.leases.values())
        if leases:
            held = rng.choice(leases)
            there += [held.no, held.shard, held.start, held.stop] * 2
        if brain.placement is not None:
            there.append(brain.placement.version)
        low = t.ge if t.ge is not None else -(2**63)
        high = t.le if t.le is not None else 2**64 - 1
        if rng.random() < 0.15:
            there = [low, high, low + 1, high - 1, rng.randint(low, high)]
        return int(min(max(rng.choice(there), low), high))

    def text(self, rng: random.Random, t: inspect.StrType, at: str) -> str:
        if at == "path":
            return f"images/{rng.choice([0, 1, 2, 999999]):06d}/bucket-{rng.choice('ab')}.img"
        if t.pattern is not None:
            return rng.choice(["node0", "n1", "zz"]) if at == "node" else ""
        words = rng.choice(["", "d", "node0", "ps:0", "worker:1", "x\x1b[2J\n\u2028y", "e" * 300, "stuck", "../../x"])
        return words[: t.max_length]

    def known(self, rng: random.Random, kind: type) -> Any:
        if kind is ShardSchedule and self.brain.shards.datasets:
            return rng.choice(self.brain.shards.datasets).plan
        return None


def _address(slot: int) -> Any:
    from everstep.model.member import Address

    return Address(NodeId("node0"), f"sock/ps-{slot}.sock")
