"""Make the read model of a job: the one place that turns what the brain and the readings say into what is shown. Pure.

The master makes a view of its brain and of what its members told. ``everstep explain`` makes one of a replayed journal,
where nobody told anything: what was only measured is missing then.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

import msgspec

from everstep.brain.brain import Brain
from everstep.brain.checkpoints import has_checkpoints
from everstep.brain.members import SlotRecord
from everstep.ids import Incarnation, NodeId, Slot
from everstep.model.graph_readings import GraphView
from everstep.model.job_view import (
    BindingView,
    CheckpointView,
    CostView,
    EpochView,
    GroupView,
    JobView,
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
from everstep.model.member import MemberKey, Role
from everstep.model.memory_limit import OUT_OF_MEMORY
from everstep.model.observation import Observations, ServerSeen, WorkerSeen
from everstep.model.partition_load import PartitionView
from everstep.monitor.slowness import fault_words, judge
from everstep.policies.dense_part import dense_words
from everstep.policies.node_selection import HOME_NODE
from everstep.policies.waits import longer_wait_s
from everstep.units import seconds

EPOCHS_SHOWN = 20  # of each dataset, the newest


def _nothing(key: MemberKey, incarnation: Incarnation) -> Mapping[str, float]:
    return {}


class Measured(msgspec.Struct, frozen=True, kw_only=True):
    """Is what the master knows beside its brain. ``of_member``: the newest readings of one process, {}: none.
    ``levels``: partitions by the losses that they survive (full, less, none), where they were counted already;
    ``cover``: the machine whose loss would cost most, and how many partitions, the same.
    ``samples_done``: -1: of shards that are done, only. Other fields: as in ``JobView``, ``GroupView`` and
    ``ProtectionView``."""

    samples_done: int = -1
    samples_total: int = 0
    samples_per_s: float = 0.0
    steps_per_s: float = 0.0
    batches_retried: int = 0
    reported: dict[str, float] = {}
    of_member: Callable[[MemberKey, Incarnation], Mapping[str, float]] = _nothing
    levels: dict[str, int] | None = None
    cover: tuple[str, int] | None = None
    done_share: float = 0.0
    left_s: float = -1.0
    hardware: Mapping[NodeId, str] = {}
    master_pid: int = 0
    master_peak_bytes: int = 0
    finishing: bool = False
    cost: CostView | None = None
    graph: GraphView | None = None
    hottest: tuple[PartitionView, ...] = ()


def make_job_view(brain: Brain, at: float, measured: Measured = Measured(), speed: SpeedView | None = None) -> JobView:
    """Return the whole model at ``at`` (seconds)."""
    job, shards = brain.job, brain.shards
    done = measured.samples_done if measured.samples_done >= 0 else shards.samples_done
    return JobView(
        job=job.spec.name,
        mode=job.spec.mode,
        consistency=job.spec.consistency,
        phase="finishing" if measured.finishing else str(job.phase),
        at=at,
        started_at=job.started_at,
        exit_code=job.exit_code,
        error=job.error,
        master_incarnation=job.master_incarnation,
        members=tuple(members_view(brain, measured)),
        members_wanted={"worker": job.workers_wanted, "ps": job.ps_wanted},
        sizes=tuple(SizeView(role, size.threads, size.memory_bytes) for role, size in sorted(job.sizes.items())),
        nodes=tuple(nodes_view(brain)),
        epochs=tuple(epochs_view(brain)),
        shards=shards_view(brain),
        samples_done=done,
        samples_total=max(done, measured.samples_total),
        samples_per_s=measured.samples_per_s,
        batches_retried=measured.batches_retried,
        failures=failures_view(brain),
        reported=measured.reported,
        placement=placement_view(brain, measured),
        protection=protection_view(brain, measured),
        checkpoint=checkpoint_view(brain),
        group=group_view(brain, measured.steps_per_s),
        plan=plan_view(brain),
        speed=speed,
        supervision=supervision_view(brain, at),
        cost=measured.cost,
        graph=measured.graph,
    )


# ---------------------------------------------------------------- members and nodes


def members_view(brain: Brain, measured: Measured) -> Iterable[MemberView]:
    """Return the master first, then workers and ps by slot."""
    job, placement = brain.job, brain.placement
    yield MemberView(
        Role.MASTER,
        Slot(0),
        job.master_incarnation,
        HOME_NODE,
        measured.master_pid,
        ShownState.LEFT if job.over and not measured.master_pid else ShownState.ALIVE,
        job.failures.master,
        peak_bytes=measured.master_peak_bytes,
    )
    for record in brain.members.all():
        member = record.member
        reported = measured.of_member(member.key, member.incarnation) if record.running else {}
        has = record.running and member.role is Role.PS and placement is not None
        yield MemberView(
            role=member.role,
            slot=member.slot,
            incarnation=member.incarnation,
            node=member.node,
            pid=member.pid,
            state=shown_state(record),
            losses=record.losses,
            works_on=brain.shards.name(record.held[0]) if record.held else brain.groups.words(record),
            samples_per_s=reported.get("samples_per_s", 0.0),
            rss_bytes=int(reported.get("rss_bytes", 0)),
            peak_bytes=int(reported.get("peak_bytes", 0)),
            partitions=len(placement.owned_by(member.slot)) if has and placement is not None else 0,
            mirrors=len(placement.mirrors_at(member.slot)) if has and placement is not None else 0,
            hardware=measured.hardware.get(member.node, ""),
            cold_bytes=int(reported.get("cold_bytes", 0)),
            cold_hit_share=_hit_share(reported),
        )


def _hit_share(reported: Mapping[str, float]) -> float:
    lookups = reported.get("cold_lookups", -1.0)
    return 1.0 - reported.get("cold_misses", 0.0) / max(1.0, lookups) if lookups >= 0 else -1.0


def shown_state(record: SlotRecord) -> ShownState:
    """Return what the process of a slot is doing."""
    if record.stopping and record.running:
        return ShownState.LEAVING
    return ShownState.WAITING if record.waiting else ShownState(record.member.state)


def nodes_view(brain: Brain) -> Iterable[NodeView]:
    """Return all nodes that have joined, in that order."""
    running: dict[tuple[NodeId, Role], int] = {}
    for record in brain.members.all():
        if record.running:
            key = record.member.node, record.member.role
            running[key] = running.get(key, 0) + 1
    for n in brain.members.nodes.values():
        yield NodeView(
            node=n.node,
            host=n.host,
            alive=n.alive,
            draining=n.draining,
            workers=running.get((n.node, Role.WORKER), 0),
            ps=running.get((n.node, Role.PS), 0),
            machine=n.machine,
            zone=n.zone,
            spot=not n.stays,
        )


def failures_view(brain: Brain) -> dict[str, int]:
    """Return the failures survived so far, by role; and how many of these were out of memory, if any."""
    job = brain.job
    memory = {OUT_OF_MEMORY: job.failures.memory} if job.failures.memory else {}
    return {
        "worker": job.failures.worker,
        "ps": job.failures.ps,
        "master": job.failures.master,
        "node": job.failures.node,
        **memory,
    }


# ---------------------------------------------------------------- data


def epochs_view(brain: Brain) -> Iterable[EpochView]:
    """Return the newest epochs of each dataset."""
    for dataset in brain.shards.datasets:
        for epoch in dataset.epochs[-EPOCHS_SHOWN:]:
            yield EpochView(
                dataset.plan.name,
                epoch.number,
                dataset.epochs_known,
                epoch.shards,
                epoch.todo,
                epoch.doing,
                epoch.done,
                dataset.plan.samples,
                epoch.samples_done,
            )


def shards_view(brain: Brain) -> ShardsView:
    """Return the newest epoch of each dataset together."""
    newest = [dataset.epochs[-1] for dataset in brain.shards.datasets if dataset.epochs]
    return ShardsView(
        todo=sum(e.todo for e in newest),
        doing=sum(e.doing for e in newest),
        done=sum(e.done for e in newest),
        returned=brain.shards.returns,
    )


# ---------------------------------------------------------------- where parameters are


def placement_view(brain: Brain, measured: Measured = Measured()) -> PlacementView | None:
    """None: there is no map."""
    placement = brain.placement
    if placement is None:
        return None
    return PlacementView(placement.version, placement.partitions, len(set(placement.owner)), measured.hottest)


def protection_view(brain: Brain, measured: Measured) -> ProtectionView | None:
    """None: nothing is protected, and nothing moves."""
    if not is_protected(brain):
        return None
    partitions, spec = brain.partitions, brain.job.spec
    levels = measured.levels if measured.levels is not None else partitions.levels()
    up = [record.member for record in brain.members.servers.values() if record.running]
    worst, lost = measured.cover if measured.cover is not None else partitions.lost_with_one_machine()

    def summed(reading: str) -> float:
        return sum(measured.of_member(m.key, m.incarnation).get(reading, 0.0) for m in up)

    return ProtectionView(
        parity=spec.parity,
        protect=spec.protect,
        full=levels["full"],
        less=levels["less"],
        none=levels["none"],
        moving=partitions.moving(),
        rebuilding=partitions.rebuilding(),
        building=partitions.building(),
        unconfirmed_bytes=int(summed("unconfirmed_bytes")),
        done_share=round(measured.done_share, 3),
        left_s=round(measured.left_s, 1),
        machines=len({brain.members.machine_of(m.node) for m in up}),
        lost_with_machine=lost,
        worst_machine=worst if lost else "",
        lag_s=seconds(spec.protect_lag) if spec.protect == "lag" else 0.0,
        behind_s=round(
            max((measured.of_member(m.key, m.incarnation).get("behind_s", 0.0) for m in up), default=0.0), 2
        ),
        pushes_waiting=int(summed("pushes_waiting")),
        pushes_waited_s=round(summed("pushes_waited_s"), 2),
        rebuild_share=spec.rebuild_share,
        contents_bytes=int(summed("contents_bytes")),
        contents_busy_s=round(summed("contents_busy_s"), 3),
        dense=dense_words(spec.grouped, spec.protect == "lag", partitions.code.m),
    )


def is_protected(brain: Brain) -> bool:
    """Return whether there are mirrors, or partitions that nobody holds yet."""
    partitions, placement = brain.partitions, brain.placement
    return placement is not None and bool(partitions.code.m or partitions.protection.missing or placement.mirrors)


def checkpoint_view(brain: Brain) -> CheckpointView | None:
    """None: this job has nothing to do with checkpoints so far."""
    found = brain.checkpoints
    if not found.numbers and not has_checkpoints(brain.job.spec):
        return None
    last, writing = found.shown, found.writing
    return CheckpointView(
        newest=found.newest.checkpoint if found.newest is not None else 0,
        at=found.newest.at if found.newest is not None else 0.0,
        incremental=last is not None and last.since > 0,
        bytes_written=last.bytes_written if last is not None else 0,
        took_s=last.took_s if last is not None else 0.0,
        writing=writing.number if writing is not None else 0,
        snapshots=len(writing.snapshots) if writing is not None else 0,
        partitions=brain.job.spec.partitions,
        given_up=found.given_up,
        resumed=found.resumed,
    )


def group_view(brain: Brain, steps_per_s: float) -> GroupView | None:
    """None: there is none, or not yet."""
    groups, spec = brain.state.groups, brain.job.spec
    if groups.group is None:
        return None
    return GroupView(
        generation=groups.group.generation,
        members=groups.group.size,
        joining=len(brain.groups.joining()),
        step=groups.step,
        steps_per_s=round(steps_per_s, 2),
        strategy=spec.strategy,
        paused=groups.group.hold,
        logical_workers=spec.logical_workers,
        steps_void=sum(v.last + 1 - v.first for v in groups.history.voids),
    )


def supervision_view(brain: Brain, at: float) -> SupervisionView | None:
    """Return None before the first fact."""
    supervision = brain.state.supervision
    if not supervision.changes:
        return None
    wait_s = longer_wait_s(brain.job.spec, supervision.in_vain)
    return SupervisionView(
        state=supervision.stage.value,
        since=supervision.since,
        why=supervision.why,
        lack=supervision.lack,
        until=supervision.short_since + wait_s if supervision.lack and wait_s and supervision.short_since else 0.0,
        suspending=supervision.suspending if not brain.job.over else "",
        suspensions=supervision.suspensions,
        seconds=supervision.seconds(at),
        on_demand=supervision.on_demand,
        stages=tuple(StageView(c.at, c.stage.value, c.why) for c in supervision.changes),
    )


def plan_view(brain: Brain) -> PlanView | None:
    """None: no policy has wanted anything so far."""
    control = brain.state.control
    if not control.version and not control.disabled:
        return None
    last = str(control.plan.decision) if control.plan is not None else ""
    return PlanView(control.version, last, control.restarts, control.disabled)


# ---------------------------------------------------------------- speed


def make_speed_view(
    seen: Observations,
    newest: Callable[[str, int], Mapping[str, float]],
    dropped: Mapping[str, int],
    faults: tuple[RunningFault, ...],
    binding: BindingView | None = None,
) -> SpeedView:
    """Return how fast members are; ``newest(member, incarnation)``: the last good readings of a process, {}: none.
    ``binding``: what keeps the job from being faster."""
    up: list[tuple[Role, WorkerSeen | ServerSeen]] = [(Role.WORKER, w) for w in seen.workers]
    up += [(Role.PS, s) for s in seen.servers]
    return SpeedView(
        seen=seen,
        judged=tuple(judge(seen, [(d.target, fault_words(d, seen.at)) for d in faults])),
        counters=tuple(process_counters(role, m.slot, newest(str(m), m.incarnation)) for role, m in up),
        dropped=dict(dropped),
        faults=faults,
        binding=binding,
    )


_PHASE = "phase."


def process_counters(role: Role, slot: Slot, reported: Mapping[str, float]) -> ProcessCounters:
    """Return what a process told, by the names of the model."""
    worker = role is Role.WORKER
    return ProcessCounters(
        role=role,
        slot=slot,
        samples=reported.get("computed") if worker else None,
        compute_s=reported.get("compute_s") if worker else None,
        phase_s={name.removeprefix(_PHASE): s for name, s in reported.items() if name.startswith(_PHASE)},
        bytes_in=reported.get("bytes_in"),
        bytes_out=reported.get("bytes_out"),
        requests=None if worker else reported.get("requests"),
        service_s=None if worker else reported.get("service_total_s"),
        rows=None if worker else reported.get("rows"),
        cpu_s=reported.get("cpu_s"),
        resident_memory_bytes=reported.get("rss_bytes"),
        throttled_s=reported.get("throttled_s"),
        throttled_periods=reported.get("throttled"),
    )
