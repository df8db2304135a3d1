"""Who is slow and why, in the words that ``everstep top`` shows."""

from __future__ import annotations

import msgspec

from everstep.ids import Incarnation, NodeId, Slot
from everstep.model.observation import Observations, Pace, ProcessLoad, ServerSeen, WorkerSeen
from everstep.monitor.slowness import by_the_step_under_way, judge

ONE, HOME = Incarnation(1), NodeId("node0")


def worker(
    slot: int, per_sample_s: float, hardware: str = "old", throttled: float = 0.0, **phases: float
) -> WorkerSeen:
    pace = Pace(samples=100, per_sample_s=per_sample_s, phases=phases)
    return WorkerSeen(
        slot=Slot(slot), incarnation=ONE, node=HOME, hardware=hardware, short=pace, throttled_share=throttled
    )


def ps(slot: int, service_s: float, queue: float = 0.0) -> ServerSeen:
    return ServerSeen(slot=Slot(slot), incarnation=ONE, node=HOME, service_s=service_s, queue=queue)


def words(seen: Observations, member: str) -> str:
    return next(j.why for j in judge(seen) if j.member == member)


def test_the_slow_one_comes_first_with_its_reason() -> None:
    slow = worker(2, 0.0039, throttled=0.4)
    seen = Observations(at=0, workers=(worker(0, 0.001), worker(1, 0.001), slow, worker(3, 0.00101)))
    first = judge(seen)[0]
    assert (first.member, first.why) == ("worker:2", "compute 3.9x the median of its class, throttled 40%")
    assert words(seen, "worker:3") == ""


def test_of_two_the_slow_one_is_told() -> None:
    seen = Observations(at=0, workers=(worker(0, 0.001), worker(1, 0.004)))
    assert words(seen, "worker:1").startswith("compute 4.0x")


def test_classes_are_not_compared() -> None:
    seen = Observations(at=0, workers=(worker(0, 0.001, "new"), worker(1, 0.004), worker(2, 0.004)))
    assert all(not j.why for j in judge(seen))


def test_servers_and_waits_and_faults() -> None:
    waits = worker(0, 0.001, forward=1.0, barrier=3.0, outside=100.0)
    seen = Observations(at=0, workers=(waits,), servers=(ps(0, 0.001), ps(1, 0.012, queue=12.2)))
    assert words(seen, "ps:1") == "service 12.0x the median of its class, queue 12"
    assert words(seen, "worker:0") == "waits for the others 75% of the time"
    assert (
        next(j.why for j in judge(seen, [("ps:0", "4 times slower")]) if j.member == "ps:0") == "fault: 4 times slower"
    )


def test_without_readings_nothing_is_judged() -> None:
    seen = Observations(at=0, workers=(worker(0, 0.0), worker(1, 0.0)))
    assert [(j.slowness, j.why) for j in judge(seen)] == [(0.0, "no reading yet")] * 2
    assert judge(Observations(at=0)) == []


def test_steps_longer_than_the_short_window_are_judged_by_the_long_one() -> None:
    long = Pace(samples=8, per_sample_s=3.0)
    stuck = WorkerSeen(slot=Slot(1), incarnation=ONE, node=HOME, hardware="old", short=Pace(), long=long)
    seen = Observations(at=0, workers=(worker(0, 0.5), stuck))
    assert words(seen, "worker:1") == "compute 6.0x the median of its class"


def test_a_ps_that_has_had_requests_and_has_none_now() -> None:
    idle = ServerSeen(slot=Slot(0), incarnation=ONE, node=HOME, long_load=ProcessLoad(service_s=0.001))
    assert words(Observations(at=0, servers=(idle, ps(1, 0.0))), "ps:0") == "no requests now"


def test_a_step_that_does_not_end_is_a_reading_where_it_says_more_than_the_last_one() -> None:
    def paces(*workers: tuple[float, float]) -> list[float]:
        """Of workers with these readings: per sample, and at least of the step under way."""
        seen = [worker(i, told) for i, (told, _) in enumerate(workers)]
        for i, (_, least) in enumerate(workers):
            seen[i] = msgspec.structs.replace(seen[i], short=msgspec.structs.replace(seen[i].short, at_least_s=least))
        return [w.short.per_sample_s for w in by_the_step_under_way(seen)]

    assert paces((0.01, 0.009), (0.01, 0.004), (0.0, 0.05)) == [0.01, 0.01, 0.05], "its first step"
    assert paces((0.01, 0.009), (0.01, 0.0), (0.01, 0.05)) == [0.01, 0.01, 0.05], "a change"
    assert paces((0.01, 0.0), (0.01, 0.0), (0.05, 0.06)) == [0.01, 0.01, 0.05], "as slow as before"
    assert paces((0.01, 0.0), (0.01, 0.0), (0.002, 0.012)) == [0.01, 0.01, 0.002], "no slower than the others"
    assert paces((0.0, 0.05), (0.0, 0.01)) == [0.0, 0.0], "nobody knows what is usual"
    assert paces() == []
