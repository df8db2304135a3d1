"""The table of ``everstep top`` fits its terminal, and says what policies see."""

from __future__ import annotations

import io

from rich.console import Console

from everstep.cli.top import lines, span, table
from everstep.ids import Incarnation, NodeId, Slot
from everstep.model.job_view import JobView, RunningFault
from everstep.model.observation import Observations, Pace, ServerSeen, WorkerSeen
from everstep.monitor.viewer import make_speed_view

ONE, HOME = Incarnation(1), NodeId("node0")


def report() -> JobView:
    pace = Pace(samples=10, per_sample_s=0.004, phases={"forward": 1.0, "barrier": 3.0, "outside": 9.0})
    slow = Pace(samples=10, per_sample_s=0.016, phases={"forward": 4.0})
    workers = tuple(WorkerSeen(slot=Slot(i), incarnation=ONE, node=HOME, short=p) for i, p in enumerate((pace, slow)))
    servers = (ServerSeen(slot=Slot(0), incarnation=ONE, node=HOME),)
    seen = Observations(at=100.0, wanted_workers=3, remaining_s=60.0, workers=workers, servers=servers)
    faults = (RunningFault("worker:1", "slow", 4.0, 130.0),)
    return JobView(
        job="a job",
        phase="training",
        at=100.0,
        started_at=0.0,
        master_incarnation=ONE,
        members=(),
        members_wanted={"worker": 3},
        epochs=(),
        samples_done=0,
        samples_per_s=0.0,
        batches_retried=0,
        failures={},
        reported={},
        speed=make_speed_view(seen, lambda member, incarnation: {}, {"negative": 2}, faults),
    )


def test_plain_lines_have_the_slowest_first_and_its_reason() -> None:
    head, names, first, *_ = lines(report())
    assert head == (
        "mode ps, 2 of 3 workers, 1 ps, about 60 s left; faults: worker:1 4 times slower for 30 s more; "
        "readings dropped: 2 negative"
    )
    assert names.split()[:2] == ["member", "slower"]
    assert first.startswith("worker:1") and "4.00x" in first and "16 ms" in first
    assert first.endswith("compute 4.0x the median of its class, fault: 4 times slower for 30 s more")


def test_a_narrow_terminal_shows_whole_cells() -> None:
    for width in (80, 200):
        console = Console(width=width, record=True, file=io.StringIO())
        console.print(table(report(), width))
        text = console.export_text()
        assert "worker:1" in text and "4.00x" in text and "16 ms" in text and "\u2026" not in text
        assert max(map(len, text.splitlines())) <= width


def test_a_master_that_is_silent_is_told() -> None:
    title = str(table(report(), 200, silent_s=7.0).title)
    assert title.startswith("no answer of the master since 7 s; until then: mode ps, 2 of 3 workers")


def test_times_have_a_unit_that_fits() -> None:
    assert [span(s) for s in (0.0, 2.0, 0.0123, 4.5e-5, 3e-9)] == ["-", "2 s", "12.3 ms", "45 us", "3 ns"]
