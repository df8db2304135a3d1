"""Draws the picture of ``everstep cost --out``: machines and money over time, as SVG."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import TYPE_CHECKING

from everstep.cli.svg import LEFT, WIDTH, axis, begin, text, x_of
from everstep.model.capacity import Market
from everstep.monitor.node_costs import HOUR_S, MachineSpan

if TYPE_CHECKING:
    from everstep.cli.cost import CostReport

HEIGHT, TOP = 430, 62
_PANEL, _GAP = 130, 60
_SPOT, _STAYS, _KNOWN, _UNKNOWN = "#2a7ab9", "#c98a1b", "#3c8d5a", "#b9b9b9"


def picture(report: CostReport) -> str:
    """Return an SVG with two panels: machines that were held, and what each hour cost."""
    length_s = max(report.length_s, *(m.end for m in report.machines), 1.0)
    return "\n".join(
        [
            *begin(HEIGHT),
            text(LEFT, 22, _headline(report), 15),
            text(LEFT, 42, _second_line(report), 12),
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
    out = [text(LEFT, TOP + 6, "machines", 12), *axis(base, _PANEL, length_s, f"{most}")]
    for market, colour in ((Market.ON_DEMAND, _STAYS), (Market.SPOT, _SPOT)):
        points = steps[market]
        if len(points) < 2:
            continue
        path = []
        for (t, count), (after, _) in itertools.pairwise(points):
            y = base - (_PANEL - 14) * count / most
            path += [f"{x_of(t, length_s):.1f},{y:.1f}", f"{x_of(after, length_s):.1f},{y:.1f}"]
        out.append(f'<polyline points="{" ".join(path)}" fill="none" stroke="{colour}" stroke-width="1.5"/>')
    out.append(text(WIDTH - 210, TOP + 6, "on demand", 12, _STAYS))
    out.append(text(WIDTH - 120, TOP + 6, "spot", 12, _SPOT))
    return out


def _steps(machines: Sequence[MachineSpan], length_s: float) -> list[tuple[float, int]]:
    """Return (time, how many from then on), ending with the end."""
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
    out = [text(LEFT, base - _PANEL + 6, "USD in each hour", 12), *axis(base, _PANEL, length_s, f"{most:.3g}")]
    for n, hour in enumerate(hours):
        x = x_of(n * HOUR_S, length_s)
        width = max(0.5, x_of(min(length_s, (n + 1) * HOUR_S), length_s) - x - 0.5)
        height = (_PANEL - 14) * hour.usd / most if most > 0 else 0.0
        out.append(
            f'<rect x="{x:.1f}" y="{base - height:.1f}" width="{width:.1f}" height="{height:.1f}" fill="{_KNOWN}"/>'
        )
        if not hour.complete:
            out.append(f'<rect x="{x:.1f}" y="{base + 1:.1f}" width="{width:.1f}" height="4" fill="{_UNKNOWN}"/>')
    if any(not h.complete for h in hours):
        out.append(text(WIDTH - 250, base - _PANEL + 6, "grey below: hours with unknown prices", 12))
    return out
