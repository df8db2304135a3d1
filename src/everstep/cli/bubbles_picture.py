"""Draws the picture of ``everstep bubbles --out``: one iteration, stages as rows, as SVG."""

from __future__ import annotations

from everstep.cli.svg import INK, LEFT, RIGHT, WIDTH, begin, text
from everstep.model.stage_spans import SpanKind
from everstep.policies.idle_spans import Iteration, PipelineIdle, window

_ROW, _TOP = 44, 76
_COLOURS = {
    SpanKind.WAIT: "#e3e3e3",
    SpanKind.COPY: "#d98880",
    SpanKind.PERSIST: "#7d3c98",
    SpanKind.FORWARD: "#2a7ab9",
    SpanKind.BACKWARD: "#3c8d5a",
    SpanKind.WEIGHT: "#8a6fb0",
    SpanKind.REDUCE: "#c98a1b",
}


def draw(iteration: Iteration, idle: PipelineIdle) -> str:
    """Return an SVG of an iteration."""
    begin_s, _ = window(iteration)
    end_s = max(r.began_s + s.end_s for r in iteration for s in r.spans)
    length_s = max(end_s - begin_s, 1e-9)
    base = _TOP + _ROW * len(iteration)
    first = iteration[0]
    expected = "" if idle.expected is None else f"; by the formula {100 * idle.expected:.1f} %"
    shares = ", ".join(f"{100 * stage.shares[1]:.1f} %" for stage in idle.stages)
    lines = [
        *begin(base + 40),
        text(LEFT, 22, f"step {first.step}: {first.schedule}, {first.microbatches} microbatches", 15),
        text(LEFT, 42, f"idle share of stages, median: {shares}{expected}", 12),
    ]
    for number, (kind, colour) in enumerate(_COLOURS.items()):
        x = LEFT + 90 * number
        lines += [f'<rect x="{x}" y="52" width="12" height="12" fill="{colour}"/>', text(x + 16, 62, kind.value, 12)]
    for row, record in enumerate(iteration):
        y = _TOP + _ROW * row
        lines.append(text(8, y + 24, f"stage {record.stage}", 12))
        for span in sorted(record.spans, key=lambda s: list(_COLOURS).index(s.kind)):
            left = record.began_s + span.begin_s - begin_s
            lines += _box(left, left + span.length_s, length_s, y, span.kind, span.chunk)
    lines += [
        f'<line x1="{LEFT}" y1="{base}" x2="{WIDTH - RIGHT}" y2="{base}" stroke="{INK}"/>',
        text(LEFT, base + 18, "0", 12),
        text(WIDTH - RIGHT - 60, base + 18, f"{1e3 * length_s:.1f} ms", 12),
        "</svg>",
        "",
    ]
    return "\n".join(lines)


def _box(begin_s: float, end_s: float, length_s: float, y: float, kind: SpanKind, chunk: int) -> list[str]:
    scale = (WIDTH - LEFT - RIGHT) / length_s
    left, right = (LEFT + max(0.0, at) * scale for at in (begin_s, end_s))
    if right - left < 0.2:
        return []
    box = f'<rect x="{left:.1f}" y="{y + 4}" width="{right - left:.1f}" height="{_ROW - 10}" fill="{_COLOURS[kind]}"/>'
    if chunk < 0 or right - left < 14:
        return [box]
    return [box, text(round(left + 3, 1), y + 24, str(chunk), 11, "white")]
