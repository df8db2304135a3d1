"""The read model, walked: each field has a unit, is shown, and each metric comes from one."""

from __future__ import annotations

import gzip
import io
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from everstep.brain.brain import Brain
from everstep.cli.explain import explain
from everstep.cli.status import RENAMED, as_builtins
from everstep.cli.top import lines
from everstep.cli.view_text import ending_text, fact_lines, head_text, picture, progress_line
from everstep.ids import Incarnation, NodeId, PartitionId, Slot
from everstep.model import graph_readings, job_view
from everstep.model.graph_readings import GraphView, ModuleView, TableView
from everstep.model.job_view import (
    BindingView,
    CheckpointView,
    CostView,
    EpochView,
    GroupView,
    JobView,
    Judged,
    MemberView,
    NodeView,
    PlacementView,
    PlanView,
    ProcessCounters,
    ProtectionView,
    RunningFault,
    ShardsView,
    ShownState,
    SizeView,
    SpeedView,
    StageView,
    SupervisionView,
)
from everstep.model.member import Role
from everstep.model.observation import Observations, ServerSeen, WorkerSeen
from everstep.model.partition_load import HotKey, PartitionView
from everstep.monitor.names import METRICS
from everstep.monitor.prometheus import MetricsPage, read_metric
from everstep.monitor.viewer import Measured, make_job_view
from everstep.storage.journal import read_journal

RECORDED = Path(__file__).parents[1] / "storage" / "recorded"
DOCS = Path(__file__).parents[2] / "docs" / "monitoring.md"
ONE, HOME = Incarnation(1), NodeId("node0")
STRUCTS = [s for s in vars(job_view).values() if isinstance(s, type) and issubclass(s, msgspec.Struct)]
VIEWS = [s for s in STRUCTS if s.__module__ == job_view.__name__ and s is not msgspec.Struct]


def counters(role: Role) -> ProcessCounters:
    values = {f: 100.0 + i for i, f in enumerate(ProcessCounters.__struct_fields__) if f not in ("role", "slot")}
    return ProcessCounters(role=role, slot=Slot(0), **{**values, "phase_s": {"forward": 7.0}})  # type: ignore[arg-type]


def whole() -> JobView:
    """A job of which everything is known, as no real one is."""
    seen = Observations(
        at=100.0,
        workers=(WorkerSeen(slot=Slot(0), incarnation=ONE, node=HOME),),
        servers=(ServerSeen(slot=Slot(0), incarnation=ONE, node=HOME),),
    )
    keys = (HotKey("ads", 7, 0.99),)
    hottest = PartitionView(PartitionId(5), Slot(0), 40.0, 800.0, 9000.0, 0.25, 1 << 20, 0.6, True, keys)
    return JobView(
        job="flights",
        consistency="sync",
        phase="failed",
        at=107.0,
        started_at=100.0,
        exit_code=4,
        error="the disk is full",
        master_incarnation=Incarnation(3),
        members=(
            MemberView(Role.WORKER, Slot(0), ONE, HOME, 71, ShownState.ALIVE, 2, "train e0 #4", 90.0, 1 << 30),
            MemberView(Role.PS, Slot(0), ONE, HOME, 72, ShownState.ALIVE, partitions=40, mirrors=3, hardware="EPYC"),
        ),
        members_wanted={"worker": 3, "ps": 2},
        sizes=(SizeView(Role.PS, 4, 3 << 30),),
        nodes=(NodeView(HOME, "rack1", workers=1, ps=1), NodeView(NodeId("node1"), draining=True)),
        epochs=(EpochView("train", 1, 3, 10, 3, 2, 5, 1000, 500),),
        shards=ShardsView(3, 2, 5, 1),
        samples_done=500,
        samples_total=600,
        samples_per_s=90.0,
        batches_retried=5,
        failures={"worker": 1},
        reported={"loss": 0.25},
        placement=PlacementView(7, 64, 2, (hottest,)),
        protection=ProtectionView("2+1", "acked", 40, 20, 4, 3, 2, 1, 4096, 0.5, 12.0, 3, 4, "m2"),
        checkpoint=CheckpointView(12, 99.0, True, 1 << 20, 0.4, 13, 20, 64, 1, 0),
        group=GroupView(5, 2, 1, 1204, 12.5, "fixed", "1 of 2 workers", 0, 6),
        plan=PlanView(2, "scale to 3 workers", 1, "it failed"),
        speed=SpeedView(
            seen,
            (Judged("worker:0", 1.5, 0.004, "throttled 40%"), Judged("ps:0", 1.5, 0.004, "queue 9", Role.PS)),
            (counters(Role.WORKER), counters(Role.PS)),
            {"negative": 2},
            (RunningFault("worker:0", "slow", 4.0, 130.0),),
            BindingView("ps service binds (60 % of the time)", {"ps": 0.6}),
        ),
        supervision=SupervisionView(
            state="waiting",
            since=95.0,
            why="too few",
            lack="1 of at least 3 workers are there",
            until=130.0,
            suspensions=2,
            seconds={"waiting": 7.0},
            stages=(StageView(90.0, "running", "enough"), StageView(95.0, "waiting", "too few")),
        ),
        cost=CostView(12.5, 0.9, 31.0, 2.0, 100.0, 3600.0),
        graph=GraphView(
            modules=(ModuleView("Net", "Net", 0, 1.0, 0.02, 0.01, 0.04, 15, 60, 64.0),),
            tables=(TableView("users", 1000, 72_000),),
        ),
    )


def variants() -> Iterator[JobView]:
    """Views in which other fields are shown."""
    view, replace = whole(), msgspec.structs.replace
    yield view
    # Of mode allreduce a step is shown in place of shards; resumed, logical workers: other words.
    yield replace(view, group=None, exit_code=None, phase="training")
    yield replace(view, group=replace(view.group, logical_workers=8))
    yield replace(view, supervision=replace(view.supervision, lack=""))
    yield replace(view, checkpoint=replace(view.checkpoint, resumed=12))
    yield replace(view, checkpoint=replace(view.checkpoint, resumed=11))


def shown(view: JobView) -> str:
    """All that people and Prometheus get to see of it."""
    from rich.console import Console

    out = io.StringIO()
    Console(file=out, width=240).print(picture(view))
    page = MetricsPage()
    page.fill(view)
    fold = [text for text, _ in fact_lines(view)]
    words = [out.getvalue(), progress_line(view), head_text(view), ending_text(view), *fold, *lines(view)]
    return "\n".join([*words, page.text()])


def others(value: Any) -> list[Any]:
    """What a field could have been instead."""
    match value:
        case bool():
            return [not value]
        case ShownState():
            return [ShownState.LOST]
        case Role():
            return [Role.PS if value is Role.WORKER else Role.WORKER]
        case int() | float():
            return [value + 12, 12, 11]
        case str():
            return ["elastic", "eager", "other"]
        case tuple():
            return [value + value[:1], ()]
        case dict():
            return [{"other": 3}]
        case Observations():
            return [msgspec.structs.replace(value, remaining_s=60.0)]
    return [None]


def changed(view: Any) -> Iterator[tuple[str, Any]]:
    """(struct and field, the view with only that changed), everywhere below ``view``."""
    for field in view.__struct_fields__:
        value = getattr(view, field)
        for other in others(value):
            yield f"{type(view).__name__}.{field}", msgspec.structs.replace(view, **{field: other})
        if type(value) in VIEWS:
            for name, inside in changed(value):
                yield name, msgspec.structs.replace(view, **{field: inside})
        elif isinstance(value, tuple):
            for i, element in enumerate(value):
                for name, inside in changed(element) if type(element) in VIEWS else ():
                    yield name, msgspec.structs.replace(view, **{field: (*value[:i], inside, *value[i + 1 :])})


def test_each_field_is_shown() -> None:
    wanted = {f"{view.__name__}.{field}" for view in VIEWS for field in view.__struct_fields__}
    seen: set[str] = set()
    for view in variants():
        before = shown(view)
        for name, other in changed(view):
            if name not in seen:
                try:
                    if shown(other) != before:
                        seen.add(name)
                except (AssertionError, AttributeError, KeyError):  # (it was read, and is not there)
                    seen.add(name)
    assert seen == wanted, f"not shown anywhere: {sorted(wanted - seen)}"


GRAPH = [s for s in vars(graph_readings).values() if isinstance(s, type) and s.__module__ == graph_readings.__name__]


@pytest.mark.parametrize("view", [*VIEWS, *GRAPH])
def test_each_field_has_a_unit_in_its_docstring(view: type[msgspec.Struct]) -> None:
    told = re.findall(r"^ *- ``(\w+)``: .*\[[^\[\]]+\]$", view.__doc__ or "", re.MULTILINE)
    assert sorted(told) == sorted(view.__struct_fields__)


OWN_NAMES = {
    "everstep_group_steps_total": "step",  # a counter of them
    "everstep_member_info": "members",  # as Prometheus calls such metrics
    "everstep_worker_sample_compute_seconds": "per_sample_s",
    "everstep_checkpoint_timestamp_seconds": "at",
    "everstep_readings_dropped_total": "dropped",
}
"""Metrics that are not named as their field is, with the last part of that."""


def test_each_metric_comes_from_a_field_of_its_name() -> None:
    view = whole()
    for metric in METRICS:
        found = list(read_metric(view, metric))
        assert found or metric.omit_zero, f"{metric.name}: nothing lies at {metric.field}"
        assert all(len(labels) == len(metric.labels) for labels, _ in found)
        path = re.sub(r"\[.*?\]|\.?\{.*?\}", "", metric.field).rstrip("_")
        last = path.rpartition(".")[2]
        name = re.sub(r"_s$", "_seconds", re.sub(r"_per_s$", "_per_second", last))
        assert name in metric.name or OWN_NAMES.get(metric.name) == last, f"{metric.name} of {metric.field}"


def test_old_names_say_so_and_are_in_the_docs() -> None:
    docs = DOCS.read_text()
    assert all(f"`{old}`" in docs for old in RENAMED)
    view = whole()
    out = as_builtins(view)
    assert out["renamed"][0].startswith("values is now reported; the old name works until everstep ")
    assert (out["values"], out["members"][1]["buckets"], out["group"]["hold"]) == ({"loss": 0.25}, 40, "1 of 2 workers")
    assert out["checkpoint"]["images"] == out["checkpoint"]["snapshots"] == 20
    assert out["members"][0]["shard"] == out["members"][0]["works_on"] == "train e0 #4"
    bare = as_builtins(msgspec.structs.replace(view, group=None, checkpoint=None))
    assert bare["group"] is None and bare["checkpoint"] is None


@pytest.mark.parametrize("name", ["ps", "allreduce"])
def test_a_recorded_job_has_a_view_and_a_head(name: str, tmp_path: Path) -> None:
    recorded = RECORDED / f"{name}.sqlite.gz"
    path = tmp_path / "journal.sqlite"
    path.write_bytes(gzip.decompress(recorded.read_bytes()))
    brain, at = Brain(), 0.0
    for entry in read_journal(path):
        brain.handle(entry.event)
        at = entry.event.at
    view = make_job_view(brain, at, Measured(samples_per_s=10.0))
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(view), type=JobView) == view
    text = list(explain(tmp_path))
    assert text[0].startswith(f"{view.job}  mode {view.mode}  ") and text[-1] == ending_text(view)
    assert {str(m) for m in view.members} >= {"master:0", "worker:0"} and view.samples_done > 0
