"""What binds a job is told in words, from the model of speed."""

from __future__ import annotations

from everstep.ids import Incarnation, NodeId, Slot
from everstep.model.member import Role
from everstep.model.observation import Observations, Pace, ServerSeen, WorkerSeen
from everstep.policies.binding import BindingWatch, Cores, binding_of
from everstep.policies.speed_model import SizeSeen, SpeedModel

ONE, HOME = Incarnation(1), NodeId("node0")


def seen(workers: int, ps: int, phases: dict[str, float], samples: int, at: float = 100.0) -> Observations:
    pace = Pace(samples=samples, phases=phases)
    return Observations(
        at=at,
        window_s=10.0,
        wanted_workers=workers,
        wanted_ps=ps,
        workers=tuple(WorkerSeen(slot=Slot(i), incarnation=ONE, node=HOME, short=pace) for i in range(workers)),
        servers=tuple(ServerSeen(slot=Slot(i), incarnation=ONE, node=HOME, partitions=8) for i in range(ps)),
    )


def test_ps_bind_where_workers_wait_for_them() -> None:
    watch = BindingWatch()
    for _ in range(3):
        watch.take(seen(4, 2, {"pull": 6.0, "push": 2.5, "forward": 1.5}, 1000))
    binding = watch.look()
    assert binding is not None and (binding.resource, binding.role, binding.more) == ("ps", Role.PS, 1)
    assert binding.gain > 0.1
    words = binding.words({Role.PS: Cores(3.06, 4.0)})
    assert (
        words.startswith("ps service binds (")
        and "% of the time, 3.1 of 4 cores busy); 1 more ps would give +" in words
    )


def test_workers_bind_where_they_compute() -> None:
    watch = BindingWatch()
    watch.take(seen(2, 1, {"forward": 5.0, "backward": 4.9, "pull": 0.05, "push": 0.05}, 1000))
    binding = watch.look()
    assert binding is not None and (binding.resource, binding.role, binding.more) == ("workers", Role.WORKER, 1)
    assert 0.2 < binding.gain <= 0.5
    assert "1 more worker would give +" in binding.words({})


def test_data_that_all_share_are_helped_by_nobody() -> None:
    model = SpeedModel(
        {
            (1, 1): SizeSeen((100.0,) * 4, data=0.2, ps=0.02),
            (2, 1): SizeSeen((120.0,) * 4, data=0.6, ps=0.02),
            (4, 1): SizeSeen((120.0,) * 4, data=0.8, ps=0.01),
        }
    )
    binding = binding_of(model, (4, 1))
    assert binding.resource == "shared" and binding.gain < 0.05


def test_nothing_is_said_before_there_are_readings() -> None:
    watch = BindingWatch()
    assert watch.look() is None
    watch.take(seen(2, 1, {}, 0))
    assert watch.look() is None
