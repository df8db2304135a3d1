"""The picture of ``everstep cost --out``: machines and money over time, as SVG."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import TYPE_CHECKING
from xml.sax.saxutils import escape

from everstep.model.capacity import Market
from everstep.monitor.node_costs import HOUR_S, MachineSpan

if TYPE_CHECKING:
    from everstep.cli.cost import CostReport

WIDTH, HEIGHT, LEFT, RIGHT, TOP = 860, 430, 60, 20, 62
_PANEL, _GAP = 130, 60
_SPOT, _STAYS, _KNOWN, _UNKNOWN, _INK = "#2a7ab9", "#c98a1b", "#3c8d5a", "#b9b9b9", "#333333"


def picture(report: CostReport) -> str:
    """Return an SVG with two panels: machines that were held, and what each hour cost."""
    length_s = max(report.length_s, *(m.end for m in report.machines), 1.0)
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{HEIGHT}" font-family="sans-serif" '
            f'font-size="12" fill="{_INK}">',
            f'<rect width="{WIDTH}" height="{HEIGHT}" fill="white"/>',
            _text(LEFT, 22, _headline(report), 15),
            _text(LEFT, 42, _second_line(report), 12),
            *_machines(report.machines, length_s),
            *_hours(report, length_s),
            "</svg>",
            "",
        ]
    )


def _headline(report: CostReport) -> str:
    spent = report.costs.spent
    known = f"{spent.usd:.4g} USD" if spent.complete else f"{spent.usd:.4g} USD and what has no known price"
    return f"spent {known} for {spent.seconds / HOUR_S:.2f} node-hours, {report.samples:,} samples"


def _second_line(report: CostReport) -> str:
    if report.saved is None or report.costs.price_part is None or report.goodput is None:
        return "saved: unknown"
    return (
        f"saved {100 * report.saved:.1f} % = 1 - price part {report.costs.price_part:.3f} / goodput part "
        f"{report.goodput:.3f}"
    )


def _machines(machines: Sequence[MachineSpan], length_s: float) -> list[str]:
    steps = {m: _steps([s for s in machines if s.market is m], length_s) for m in (Market.ON_DEMAND, Market.SPOT)}
    most = max([1, *(count for points in steps.values() for _, count in points)])
    base = TOP + _PANEL
    out = [_text(LEFT, TOP + 6, "machines", 12), *_axis(base, length_s, f"{most}")]
    for market, colour in ((Market.ON_DEMAND, _STAYS), (Market.SPOT, _SPOT)):
        points = steps[market]
        if len(points) < 2:
            continue
        path = []
        for (t, count), (after, _) in itertools.pairwise(points):
            y = base - (_PANEL - 14) * count / most
            path += [f"{_x(t, length_s):.1f},{y:.1f}", f"{_x(after, length_s):.1f},{y:.1f}"]
        out.append(f'<polyline points="{" ".join(path)}" fill="none" stroke="{colour}" stroke-width="1.5"/>')
    out.append(_text(WIDTH - 210, TOP + 6, "on demand", 12, _STAYS))
    out.append(_text(WIDTH - 120, TOP + 6, "spot", 12, _SPOT))
    return out


def _steps(machines: Sequence[MachineSpan], length_s: float) -> list[tuple[float, int]]:
    """(time, how many from then on), ending with the end."""
    if not machines:
        return []
    changes = sorted([*((m.begin, 1) for m in machines), *((m.end, -1) for m in machines)])
    out, count = [(0.0, 0)], 0
    for t, change in changes:
        count += change
        out.append((t, count))
    return [*out, (length_s, count)]


def _hours(report: CostReport, length_s: float) -> list[str]:
    hours = report.costs.hours
    most = max([h.usd for h in hours], default=0.0)
    base = TOP + 2 * _PANEL + _GAP
    out = [_text(LEFT, base - _PANEL + 6, "USD in each hour", 12), *_axis(base, length_s, f"{most:.3g}")]
    for n, hour in enumerate(hours):
        x = _x(n * HOUR_S, length_s)
        width = max(0.5, _x(min(length_s, (n + 1) * HOUR_S), length_s) - x - 0.5)
        height = (_PANEL - 14) * hour.usd / most if most > 0 else 0.0
        out.append(
            f'<rect x="{x:.1f}" y="{base - height:.1f}" width="{width:.1f}" height="{height:.1f}" fill="{_KNOWN}"/>'
        )
        if not hour.complete:
            out.append(f'<rect x="{x:.1f}" y="{base + 1:.1f}" width="{width:.1f}" height="4" fill="{_UNKNOWN}"/>')
    if any(not h.complete for h in hours):
        out.append(_text(WIDTH - 250, base - _PANEL + 6, "grey below: hours with unknown prices", 12))
    return out


def _axis(base: float, length_s: float, most: str) -> list[str]:
    end = f"{length_s / HOUR_S:.1f} h" if length_s >= HOUR_S else f"{length_s:.0f} s"
    return [
        f'<line x1="{LEFT}" y1="{base}" x2="{WIDTH - RIGHT}" y2="{base}" stroke="{_INK}"/>',
        f'<line x1="{LEFT}" y1="{base}" x2="{LEFT}" y2="{base - _PANEL + 14}" stroke="{_INK}"/>',
        _text(LEFT - 45, base - _PANEL + 20, most, 12),
        _text(LEFT - 45, base, "0", 12),
        _text(LEFT, base + 18, "0", 12),
        _text(WIDTH - RIGHT - 50, base + 18, end, 12),
    ]


def _x(t: float, length_s: float) -> float:
    return LEFT + (WIDTH - LEFT - RIGHT) * min(max(t, 0.0), length_s) / length_s


def _text(x: float, y: float, text: str, size: int, colour: str = _INK) -> str:
    return f'<text x="{x}" y="{y}" font-size="{size}" fill="{colour}">{escape(text)}</text>'
