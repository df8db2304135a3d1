"""Jobs to show to policies: ``n`` workers of equal shares, some slower than others."""

from __future__ import annotations

from everstep.ids import Incarnation, NodeId, PartitionId, Slot
from everstep.model.observation import Observations, Pace, ServerSeen, WorkerSeen

NODES = (NodeId("node0"), NodeId("node1"))


def worker(slot: int, pace_s: float, share: int, history: tuple[float, ...] = (), hardware: str = "") -> WorkerSeen:
    pace = Pace(samples=100, compute_s=100 * pace_s, per_sample_s=pace_s)
    return WorkerSeen(
        slot=Slot(slot),
        incarnation=Incarnation(1),
        node=NODES[slot % 2],
        hardware=hardware,
        batch=share,
        share=share,
        short=pace,
        long=pace,
        history=history or (pace_s,) * 10,
    )


def job(paces_s: list[float], shares: list[int] | None = None, at: float = 100.0, **more: object) -> Observations:
    """In mode allreduce, with nothing pending, two nodes that take more, and ten hours left."""
    shares = shares or [32] * len(paces_s)
    facts = {
        "mode": "allreduce",
        "consistency": "sync",
        "global_batch": sum(shares),
        "loader_batch": 32,
        "wanted_workers": len(paces_s),
        "remaining_s": 36_000.0,
        "places": NODES,
        **more,
    }
    workers = tuple(worker(i, p, n) for i, (p, n) in enumerate(zip(paces_s, shares, strict=True)))
    return Observations(at=at, workers=workers, **facts)  # type: ignore[arg-type]


def server(slot: int, service_s: float, owned: tuple[int, ...], history: tuple[float, ...] = ()) -> ServerSeen:
    return ServerSeen(
        slot=Slot(slot),
        incarnation=Incarnation(1),
        node=NODES[slot % 2],
        service_s=service_s,
        partitions=len(owned),
        owned=tuple(map(PartitionId, owned)),
        history=history or (service_s,) * 10,
    )
