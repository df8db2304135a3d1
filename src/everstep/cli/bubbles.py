"""Runs ``everstep bubbles``: where the stages of a pipeline wait, in words, as a picture and as a trace."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from everstep.cli.bubbles_picture import draw
from everstep.errors import ConfigError
from everstep.model.stage_spans import CopyTotals, StageIteration
from everstep.monitor.span_log import read_spans
from everstep.policies.bubble_schedule import SnapshotFit, StageFit, stage_fit
from everstep.policies.idle_spans import PipelineIdle, StageIdle, iterations, measure, typical

_SHOWN = 4  # pipelines, the newest


def show_bubbles(run_dir: Path, out: Path | None) -> str:
    """Return what there is to say; write ``out``, if given. Raises ConfigError."""
    if out is not None and out.suffix not in (".svg", ".json"):
        raise ConfigError(f"--out {out}: expected a name that ends with .svg (a picture) or .json (a Chrome trace)")
    records = read_spans(run_dir)
    found = measure(records)
    if not found:
        return f"{run_dir}: {len(records)} iterations of stages so far, too few to say how idle they are"
    if out is not None:
        out.write_text(_written(out, found[-1], records))
    lines = [line for one in found[-_SHOWN:] for line in described(one)]
    lines += copies_described(records)
    if len(found) > _SHOWN:
        lines.insert(0, f"the newest {_SHOWN} of {len(found)} (workers, generations of the group, sizes of batches):")
    return "\n".join(lines)


def described(idle: PipelineIdle) -> list[str]:
    """Return a pipeline in words."""
    expected = idle.expected
    formula = "-" if expected is None else f"{100 * expected:.1f} %"
    lines = [
        f"worker:{idle.worker}, generation {idle.generation}: {len(idle.stages)} stages, {idle.schedule}, "
        f"{idle.microbatches} microbatches of {idle.samples} samples, {idle.iterations} iterations measured",
        f"  {'stage':>5} {'computes':>11} {'idle':>11} {'idle share (10..90 %)':>26} {'formula':>9}  where",
    ]
    for stage in idle.stages:
        low, middle, high = (100 * share for share in stage.shares)
        share = f"{middle:.1f} % ({low:.1f}..{high:.1f})"
        spans = " ".join(f"{1e3 * s.offset_s:.1f}+{1e3 * s.length_s:.1f}" for s in stage.spans[:6])
        more = f" and {len(stage.spans) - 6} more" if len(stage.spans) > 6 else ""
        lines.append(
            f"  {stage.stage:>5} {1e3 * stage.compute_s:>8.1f} ms {1e3 * stage.idle_s:>8.1f} ms {share:>26} "
            f"{formula:>9}  {spans}{more}"
        )
        if (fit := stage_fit(stage, idle.window_s)) is not None:
            lines.append(f"        {_fits(stage, fit)}")
    lines.append(
        f"  an iteration: {1e3 * idle.window_s:.1f} ms from the first forward to the last backward, then "
        f"{1e3 * idle.reduce_s:.1f} ms to reduce and vote (medians); where: begin + length of idle spans, in ms"
    )
    return lines


def copies_described(records: Sequence[StageIteration]) -> list[str]:
    """Return what was copied of each stage, by the newest word of its process."""
    newest: dict[tuple[int, int], CopyTotals] = {}
    for record in sorted(records, key=lambda r: r.began_s):
        if record.copies is not None:
            newest[record.worker, record.stage] = record.copies
    lines = []
    for (worker, stage), copies in sorted(newest.items()):
        size = copies.copied_bytes
        inside = 100 * (copies.inside_bytes + copies.late_bytes) / size if size else 0.0
        more = [
            f"{number} {word}"
            for number, word in (
                (copies.discarded, "thrown away: the state was changed meanwhile"),
                (copies.skipped, "not begun: another stage was behind"),
                (copies.overruns, "OVERRAN THEIR WAIT BY MORE THAN A BLOCK: a defect"),
            )
            if number
        ]
        lines.append(
            f"  worker:{worker} stage {stage}: {copies.copies} copies, {size / 1e6:.1f} MB; {inside:.1f} % of it in "
            f"waits ({100 * copies.late_bytes / size if size else 0.0:.1f} % in blocks that ended behind one), the "
            f"rest before the optimizer's step: {1e3 * copies.stall_s:.1f} ms, and {1e3 * copies.begin_s:.1f} ms to "
            f"begin them{'; ' if more else ''}{', '.join(more)}"
        )
        lines.append(
            f"        a copy in {'each' if copies.interval == 1 else f'one of {copies.interval}'}: {copies.reason}"
        )
        if copies.neighbour:
            lines.append(_kept_described(copies))
    return ["copies (of each stage since its process began):", *lines] if lines else []


def _kept_described(copies: CopyTotals) -> str:
    """Return what the neighbour keeps of a stage's copies, and what that cost on both sides."""
    in_waits = 100 * (1 - copies.sent_late_bytes / copies.sent_bytes) if copies.sent_bytes else 0.0
    there = 100 * (1 - copies.received_late_bytes / copies.sent_bytes) if copies.sent_bytes else 0.0
    behind = f"; {copies.behind} copies are in the own memory only, as one was on its way" if copies.behind else ""
    return (
        f"        node {copies.neighbour} has acknowledged {copies.kept} of them: {copies.sent_bytes / 1e6:.1f} MB sent"
        f", {in_waits:.1f} % of it begun in waits; {1e3 * copies.sent_s:.1f} ms of the processor here, "
        f"{1e3 * copies.received_s:.1f} ms there, {there:.1f} % of it taken in while stages of that node waited{behind}"
    )


def _fits(stage: StageIdle, fit: StageFit) -> str:
    size = f"a copy of its state ({stage.state_bytes / 1e6:.1f} MB, at {stage.copy_bytes_per_s / 1e9:.1f} GB/s)"
    if fit.plan.fit is SnapshotFit.WHOLE:
        return f"{size} would fit the idle spans of each iteration"
    return (
        f"{size} would have {100 * fit.inside_bytes / stage.state_bytes:.0f} % in idle spans and stall "
        f"{1e3 * fit.plan.stall_s:.1f} ms: once in {fit.interval} iterations costs at most 1 %"
    )


def _written(out: Path, newest: PipelineIdle, records: Sequence[StageIteration]) -> str:
    if out.suffix == ".json":
        return msgspec.json.encode(chrome_trace(records)).decode()
    key = newest.generation, newest.worker, newest.samples
    alike = [i for i in iterations(records) if (i[0].generation, i[0].worker, i[0].samples) == key]
    return draw(typical([i for i in alike if min(r.seen for r in i) > 1]), newest)


def chrome_trace(records: Sequence[StageIteration]) -> dict[str, Any]:
    """Return a trace for chrome://tracing and Perfetto: workers as processes, stages as threads."""
    first = min(record.began_s for record in records)
    events: list[dict[str, Any]] = []
    for record in records:
        for span in record.spans:
            what = f" {span.part}.{span.chunk}" if span.chunk >= 0 else ""
            events.append(
                {
                    "name": f"{span.kind.value}{what}",
                    "cat": span.kind.value,
                    "ph": "X",
                    "ts": 1e6 * (record.began_s - first + span.begin_s),
                    "dur": 1e6 * span.length_s,
                    "pid": record.worker,
                    "tid": record.stage,
                    "args": {"step": record.step, "generation": record.generation},
                }
            )
    return {"traceEvents": events, "displayTimeUnit": "ms"}
