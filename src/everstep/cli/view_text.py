"""Puts the read model of a job into words: lines for a log, a picture for a terminal. Pure."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from everstep.model.job_view import (
    CheckpointView,
    CostView,
    EpochView,
    GroupView,
    JobView,
    MemberView,
    NodeView,
    PlacementView,
    PlanView,
    ProtectionView,
    ShownState,
    SizeView,
    SupervisionView,
)
from everstep.model.member import Role
from everstep.model.memory_limit import OUT_OF_MEMORY
from everstep.model.partition_load import PartitionView
from everstep.model.process_size import ProcessSize
from everstep.policies.process_sizes import size_words
from everstep.units import human_bytes

if TYPE_CHECKING:
    from rich.console import RenderableType

HOT_SHARE = 0.3
"""Of the load of its ps, from which on a partition is named."""

_STATE_COLOURS = {
    ShownState.ALIVE: "green",
    ShownState.STARTING: "yellow",
    ShownState.SUSPECT: "yellow",
    ShownState.LOST: "red",
    ShownState.LEFT: "dim",
}


def count(value: float) -> str:
    """Return a number of things: ``1,234``."""
    return f"{value:,.0f}"


def time_of_day(at: float = 0.0) -> str:
    """Return the local time at ``at`` (seconds since 1970; 0: now): ``12:34:56``."""
    return time.strftime("%H:%M:%S", time.localtime(at or None))


def clock(seconds: float) -> str:
    """Return a span of time: ``0:07``, ``1:02:03``."""
    whole = max(0, round(seconds))
    hours, rest = divmod(whole, 3600)
    minutes, secs = divmod(rest, 60)
    return f"{hours}:{minutes:02}:{secs:02}" if hours else f"{minutes}:{secs:02}"


def eta_s(view: JobView) -> float | None:
    """Return seconds until the epochs known so far are done, at the present speed."""
    left = sum(e.samples - e.samples_done for e in view.epochs)
    if not view.epochs or view.samples_per_s <= 0:
        return None
    return left / view.samples_per_s


def values_text(values: dict[str, float]) -> str:
    """Return ``auc 0.79  loss 0.4321``."""
    return "  ".join(f"{name} {value:.4g}" for name, value in sorted(values.items()))


def failures_text(failures: dict[str, int]) -> str:
    """Return ``2 worker, 1 master``; "" if there were none."""
    roles = ", ".join(f"{n} {role}" for role, n in sorted(failures.items()) if n and role != OUT_OF_MEMORY)
    memory = failures.get(OUT_OF_MEMORY, 0)
    return f"{roles} ({memory} out of memory)" if memory else roles


# ---------------------------------------------------------------- the job


def head_text(view: JobView) -> str:
    """Return ``mode ps  training  0:07  1,000 samples  90 samples/s``: the job in one line, without its name."""
    text = f"mode {view.mode}  {view.phase}  {clock(view.at - view.started_at)}  {count(view.samples_done)} samples"
    text += f"  {count(view.samples_per_s)} samples/s" if view.samples_per_s > 0 else ""
    return text + (f"  {view.consistency}" if view.consistency != "async" else "")


def ending_text(view: JobView) -> str:
    """Return ``the job is failed, exit code 4: ...``."""
    if view.exit_code is None:
        return f"the job is {view.phase}"
    return f"the job is {view.phase}, exit code {view.exit_code}" + (f": {view.error}" if view.error else "")


def members_text(view: JobView) -> str:
    """Return ``worker 3/4  ps 2/2``: how many of those that have not left are alive."""
    parts = []
    for role in (Role.WORKER, Role.PS):
        there = [m for m in view.members if m.role is role and m.state is not ShownState.LEFT]
        if there:
            parts.append(f"{role} {sum(m.state is ShownState.ALIVE for m in there)}/{len(there)}")
    return "  ".join(parts)


def survived_text(view: JobView) -> str:
    """Return ``survived: 1 worker  3 batches retried, 2 shards returned``; "": nothing happened."""
    failures = failures_text(view.failures)
    if not failures and not view.batches_retried and not view.shards.returned:
        return ""
    text = f"survived: {failures or 'nothing yet'}  {view.batches_retried} batches retried"
    return text + (f", {view.shards.returned} shards returned" if view.shards.returned else "")


def current_epoch(view: JobView) -> int | None:
    """Return index in ``view.epochs`` of the one being trained: the first that is not done, else the last."""
    for index, epoch in enumerate(view.epochs):
        if epoch.done < epoch.shards:
            return index
    return len(view.epochs) - 1 if view.epochs else None


def epoch_text(epoch: EpochView) -> str:
    """Return ``train epoch 2/3``."""
    return f"{epoch.dataset} epoch {epoch.epoch + 1}/{max(epoch.epochs, epoch.epoch + 1)}"


def epoch_share(epoch: EpochView) -> float:
    """Return how much of it is done, in percent."""
    return 100.0 * epoch.samples_done / epoch.samples if epoch.samples else 100.0


def shards_text(epoch: EpochView) -> str:
    """Return ``shards 4/10, 3 held, 3 to do``."""
    return f"shards {epoch.done}/{epoch.shards}, {epoch.doing} held, {epoch.todo} to do"


# ---------------------------------------------------------------- its parts


def node_text(node: NodeView) -> str:
    """Return ``node1 on rack7 (m-1f2e, eu-1a): 2 workers, 1 ps, draining``."""
    name = f"{node.node} on {node.host}" if node.host and node.host != node.node else str(node.node)
    spot = "spot" if node.spot else ""
    stands = ", ".join(part for part in (node.machine, node.zone, spot) if part and part != node.node)
    name += f" ({stands})" if stands else ""
    parts = [f"{node.workers} workers"] if node.workers else []
    parts += [f"{node.ps} ps"] if node.ps else []
    parts += ["draining"] if node.draining else []
    parts += [] if node.alive else ["lost"]
    return f"{name}: {', '.join(parts) or 'nothing runs there'}"


def sizes_text(sizes: tuple[SizeView, ...]) -> str:
    """Return ``each new process gets: ps 2.0 GiB, 4 threads; worker 2 threads``; "": nothing is named."""
    found = [f"{one.role} {size_words(ProcessSize(one.threads, one.memory_bytes))}" for one in sizes]
    return f"each new process gets: {'; '.join(found)}" if found else ""


def placement_text(found: PlacementView) -> str:
    """Return ``placement 7: 64 partitions on 3 ps; partition 5 at ps:0 has 40 % of its load``."""
    text = f"placement {found.version}: {found.partitions} partitions on {found.ps} ps"
    hot = [one for one in found.hottest if one.alone or one.ps_share >= HOT_SHARE]
    return "; ".join((text, *(partition_text(one) for one in hot[:1])))


def partition_text(one: PartitionView) -> str:
    """Return ``partition 5 at ps:0 has 40 % of its load, more than one ps should have: keys 7 of ads (99 %)``."""
    text = f"partition {one.partition} at ps:{one.ps} has {100 * one.ps_share:.0f} % of its load"
    text += ", more than one ps should have" if one.alone else ""
    return f"{text}: keys {keys_text(one)}" if one.keys else text


def cold_text(view: JobView) -> str:
    """Return ``on disk: ps:0 1.2 GiB, 99.1 % of its rows were in memory when pulled``; "": no ps has rows on disk."""
    parts = [
        f"{m} {human_bytes(m.cold_bytes)}, {100 * m.cold_hit_share:.1f} % of its rows were in memory when pulled"
        for m in view.members
        if m.up and m.cold_hit_share >= 0
    ]
    return f"on disk: {'; '.join(parts)}" if parts else ""


def keys_text(one: PartitionView) -> str:
    """Return ``7 of ads (99 %), 12 of ads (80 %)``: keys with the share of the partition's requests that want them."""
    return ", ".join(f"{hot.key} of {hot.table} ({100 * hot.share:.0f} %)" for hot in one.keys)


def protection_text(found: ProtectionView) -> str:
    """Return ``parity 4+1: 52 of 64 partitions protected, 12 not; 11 rebuilding; 3 moving; 2 mirrors being made``."""
    partitions = found.full + found.less + found.none
    if found.parity in ("", "0"):
        text = "parity off"
    else:
        kind = f"parity {found.parity}" + (" eager" if found.protect == "eager" else "")
        kind += f" (at most {found.lag_s:g} s behind, now {found.behind_s:.1f} s)" if found.lag_s else ""
        text = f"{kind}: {found.full} of {partitions} partitions protected"
        text += f", {found.less} less" if found.less else ""
        text += f", {found.none} not" if found.none else ""
    text += f"; {found.dense}" if found.dense else ""
    if found.pushes_waiting:
        text += f"; {found.pushes_waiting} pushes wait until mirrors have caught up"
    if found.machines > 1 and found.lost_with_machine:
        text += f"; the loss of {found.worst_machine}, one of {found.machines} machines, would cost "
        text += f"{found.lost_with_machine} of {partitions}"
    elif found.machines > 1 and found.parity not in ("", "0"):
        text += f"; any one of {found.machines} machines but the master's may be lost"
    if found.rebuilding:
        text += f"; {found.rebuilding} rebuilding"
    text += f"; {found.moving} moving" if found.moving else ""
    text += f"; {found.building} mirrors being made" if found.building else ""
    if found.done_share > 0:
        text += f" ({found.done_share:.0%}" + (f", {found.left_s:.0f} s left)" if found.left_s >= 0 else ")")
    if found.rebuilding or found.building:
        text += f"; for this at most {found.rebuild_share:.0%} of a ps' time"
    return text


def checkpoint_text(found: CheckpointView, at: float) -> str:
    """Return ``checkpoint 12 0:34 ago (incremental, 3.4 MiB in 0.2 s); writing 13: 20/64``."""
    text = "no checkpoint yet"
    if found.newest:
        text = f"checkpoint {found.newest} {clock(at - found.at)} ago"
        if found.newest == found.resumed:
            text += " (resumed from it)"
        else:
            kind = "incremental" if found.incremental else "full"
            text += f" ({kind}, {human_bytes(found.bytes_written)} in {found.took_s:.1f} s)"
    if found.writing:
        text += f"; writing {found.writing}: {found.snapshots}/{found.partitions}"
    if found.given_up:
        text += f"; {found.given_up} given up"
    return text


def group_text(found: GroupView) -> str:
    """Return ``group 5: 3 workers, step 1,204, 12.3 steps/s; 1 joining; paused: ...``."""
    text = f"group {found.generation}: {found.members} workers, step {count(found.step)}"
    text += f", {found.steps_per_s:.1f} steps/s" if found.steps_per_s > 0 else ""
    text += f", {found.logical_workers} logical workers" if found.logical_workers else ""
    text += ", fixed batch" if found.strategy == "fixed" and not found.logical_workers else ""
    text += f"; {found.joining} joining" if found.joining else ""
    text += f"; paused: {found.paused}" if found.paused else ""
    text += f"; {count(found.steps_void)} steps were done again" if found.steps_void else ""
    return text


def plan_text(found: PlanView) -> str:
    """Return ``plan 3: scale to 5 workers: ...; 1 restarts by plans; the policy is off: ...``."""
    parts = [f"plan {found.version}: {found.last}"] if found.last else []
    parts += [f"{found.restarts} restarts by plans"] if found.restarts else []
    parts += [f"the policy is off: {found.disabled}"] if found.disabled else []
    return "; ".join(parts)


def held_text(member: MemberView) -> str:
    """Return what a ps has: ``11 partitions, 3 mirrors``."""
    parts = [f"{member.partitions} partitions"] if member.partitions else []
    parts += [f"{member.mirrors} mirrors"] if member.mirrors else []
    return ", ".join(parts)


# ---------------------------------------------------------------- all of it


def supervision_text(found: SupervisionView, at: float) -> str:
    """Return ``waiting for 0:12: 1 of at least 4 workers are there; for another 0:48 at most; before: running for
    2:10``; "": it runs, and always did."""
    parts = []
    if found.suspending:
        parts.append(f"is being suspended: {found.suspending}")
    elif found.state != "running":
        parts.append(f"{found.state} for {clock(at - found.since)}: {found.lack or found.why}")
        parts += [f"for another {clock(max(0.0, found.until - at))} at most"] if found.until else []
    parts += [f"{state} {clock(s)} in all" for state, s in found.seconds.items() if state == "waiting" and s >= 1.0]
    parts += [f"{found.on_demand} on-demand machines stand in for spot ones"] if found.on_demand else []
    parts += [f"suspended {found.suspensions} times"] if found.suspensions else []
    if parts and len(found.stages) > 1:
        before, now = found.stages[-2:]
        parts.append(f"before: {before.state} for {clock(now.at - before.at)} ({before.why})")
    return "; ".join(parts)


def cost_text(found: CostView) -> str:
    """Return ``12.40 USD of 100 for 31.0 node-hours, 0.918 USD/h; suspended in 95:25:00 at this rate``."""
    budget = f" of {found.budget:g}" if found.budget else ""
    words = f"cost: {found.usd:.4f} USD{budget} for {found.node_hours:.2f} node-hours, {found.usd_per_hour:.4g} USD/h"
    words += f"; {found.unknown_node_hours:.2f} node-hours have no price" if found.unknown_node_hours else ""
    return words + (f"; suspended in {clock(found.left_s)} at this rate" if found.left_s >= 0 else "")


def progress_line(view: JobView) -> str:
    """Return one plain line for a log."""
    parts = []
    index = current_epoch(view)
    if index is None:
        parts.append(view.phase)
    else:
        epoch = view.epochs[index]
        parts.append(f"{epoch_text(epoch)} {epoch_share(epoch):.1f}%")
        parts.append(f"{count(view.samples_per_s)} samples/s")
        eta = eta_s(view)
        if eta is not None:
            parts.append(f"ETA {clock(eta)}")
    if view.reported:
        parts.append(values_text(view.reported))
    if view.group is not None:
        parts.append(group_text(view.group))
    if view.protection is not None:
        parts.append(protection_text(view.protection))
    if view.checkpoint is not None:
        parts.append(checkpoint_text(view.checkpoint, view.at))
    if members := members_text(view):
        parts.append(members)
    return "  ".join(parts)


def fact_lines(view: JobView) -> Iterator[tuple[str, bool]]:
    """Yield a line for each thing that the job has, and whether it needs a look. ``picture`` and the head of ``everstep
    explain`` show them."""
    if view.supervision is not None and (found := supervision_text(view.supervision, view.at)):
        yield found, view.supervision.state != "running"
    if len(view.nodes) > 1 or any(n.draining or not n.alive for n in view.nodes):
        yield from ((node_text(node), node.draining or not node.alive) for node in view.nodes)
    if sizes := sizes_text(view.sizes):
        yield sizes, False
    if view.group is not None:
        yield group_text(view.group), bool(view.group.paused)
    if view.placement is not None:
        yield placement_text(view.placement), False
    if cold := cold_text(view):
        yield cold, False
    if view.protection is not None:
        yield protection_text(view.protection), bool(view.protection.less or view.protection.none)
    if view.checkpoint is not None:
        yield checkpoint_text(view.checkpoint, view.at), False
    if view.cost is not None:
        yield cost_text(view.cost), bool(view.cost.unknown_node_hours)
    if view.plan is not None:
        yield plan_text(view.plan), bool(view.plan.disabled)
    if survived := survived_text(view):
        yield survived, False


def picture(view: JobView) -> RenderableType:
    """Return the whole of it for a terminal; its speed is in ``cli.top``."""
    from rich.console import Group
    from rich.progress_bar import ProgressBar
    from rich.table import Table
    from rich.text import Text

    parts: list[RenderableType] = [Text.assemble((view.job, "bold"), f"  {head_text(view)}")]
    if view.exit_code is not None:
        parts.append(Text(ending_text(view), "yellow" if view.exit_code else ""))
    index = current_epoch(view)
    if index is not None:
        epoch = view.epochs[index]
        grid: Any = Table.grid(padding=(0, 1))
        eta = eta_s(view)
        grid.add_row(
            epoch_text(epoch),
            ProgressBar(total=max(1, epoch.samples), completed=epoch.samples_done, width=36),
            f"{epoch_share(epoch):5.1f}%",
            shards_text(epoch) if view.group is None else f"step {count(view.group.step)}",
            f"ETA {clock(eta)}" if eta is not None else "",
        )
        parts.append(grid)
    if view.reported:
        parts.append(Text(values_text(view.reported)))
    parts.append(members_table(view))
    parts += [Text(text, "yellow" if notable else "dim") for text, notable in fact_lines(view)]
    return Group(*parts)


_COLUMNS = {
    "member": "left",
    "state": "left",
    "#": "right",
    "lost": "right",
    "pid": "right",
    "node": "left",
    "memory": "right",
    "peak": "right",
    "samples/s": "right",
    "works on": "left",
}


def members_table(view: JobView) -> RenderableType:
    """Return a line for each member; ``#``: its incarnation, ``lost``: processes of its slot that were lost."""
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim")
    for column, justify in _COLUMNS.items():
        table.add_column(column, justify=justify)  # type: ignore[arg-type]
    for m in sorted(view.members, key=lambda m: (m.role, m.slot)):
        table.add_row(
            str(m),
            Text(m.state, _STATE_COLOURS.get(m.state, "")),
            str(m.incarnation),
            str(m.losses or ""),
            str(m.pid or ""),
            m.node,
            human_bytes(m.rss_bytes) if m.rss_bytes else "",
            human_bytes(m.peak_bytes) if m.peak_bytes else "",
            count(m.samples_per_s) if m.samples_per_s else "",
            m.works_on or held_text(m),
        )
    return table
