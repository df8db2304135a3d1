"""Draws the picture of ``everstep simulate --out``: places, what trains, money and reclaims over time, as SVG."""

from __future__ import annotations

from typing import TYPE_CHECKING

from everstep.cli.svg import INK, LEFT, RIGHT, WIDTH, axis, begin, text, x_of
from everstep.monitor.node_costs import HOUR_S
from everstep.sim.elastic.outcome import Outcome

if TYPE_CHECKING:
    from everstep.cli.simulate import Report, Row

TOP, _PANEL, _GAP = 62, 120, 50
_COULD, _TRAINS, _GOODPUT, _SPENT, _EVENT = "#b9c7d6", "#2a7ab9", "#3c8d5a", "#c98a1b", "#b03a2e"
SHOWN = 6


def picture(report: Report) -> str:
    """Return an SVG: for each of the first settings, its first story in four panels."""
    rows = report.rows[:SHOWN]
    one = 4 * (_PANEL + _GAP) + 40
    out = begin(TOP + one * len(rows))
    out.append(text(LEFT, 22, f"{report.work.samples:,} samples on machines of {report.source}", 15))
    for n, row in enumerate(rows):
        out += _story(row, TOP + n * one)
    return "\n".join([*out, "</svg>", ""])


def _story(row: Row, top: float) -> list[str]:
    outcome, costs = row.outcomes[0], row.costs[0]
    length_s = max(outcome.length_s, 1.0)
    state = "ends" if outcome.ended else "is not over"
    words = f"{row.name}: {state} after {outcome.length_s / HOUR_S:.2f} h, goodput {outcome.goodput:.3f}"
    if costs.spent.complete and costs.spent.usd:
        words += f", {costs.spent.usd:,.2f} USD"
    out = [text(LEFT, top, words, 13)]
    base = top + 10 + _PANEL
    out += _places(outcome, length_s, base)
    base += _PANEL + _GAP
    out += _trained(outcome, length_s, base)
    base += _PANEL + _GAP
    out += _goodput(outcome, length_s, base)
    base += _PANEL + _GAP
    hours = [hour.usd for hour in costs.hours]
    total = max(sum(hours), 1e-12)
    points, spent = [f"{LEFT},{base}"], 0.0
    for n, usd in enumerate(hours):
        spent += usd
        points.append(f"{x_of((n + 1) * HOUR_S, length_s):.1f},{base - (_PANEL - 14) * spent / total:.1f}")
    out += [text(LEFT, base - _PANEL + 6, "USD spent", 12), *axis(base, _PANEL, length_s, f"{total:.3g}")]
    out.append(_line(points, _SPENT))
    return out


def _places(outcome: Outcome, length_s: float, base: float) -> list[str]:
    most = max([b.places for b in outcome.bins], default=1.0) or 1.0
    out = [text(LEFT, base - _PANEL + 6, "places for workers; below: machines that were taken back", 12)]
    out += axis(base, _PANEL, length_s, f"{most:.0f}")
    out.append(_steps([(b.begin_s, b.places) for b in outcome.bins], length_s, most, base, INK))
    taken = sorted({round(m.end, 1) for m in outcome.machines if m.end < outcome.length_s - 1e-6})
    step = max(1, len(taken) // 400)
    for at in taken[::step]:
        x = x_of(at, length_s)
        out.append(f'<line x1="{x:.1f}" y1="{base}" x2="{x:.1f}" y2="{base + 5}" stroke="{_EVENT}"/>')
    for at, words in outcome.notes[:20]:
        x = x_of(at, length_s)
        out.append(f'<circle cx="{x:.1f}" cy="{base + 3}" r="3" fill="{_EVENT}"/>')
        out.append(text(x + 5, base + 30, words, 9, _EVENT))
    return out


def _trained(outcome: Outcome, length_s: float, base: float) -> list[str]:
    most = max([b.could for b in outcome.bins], default=1.0) or 1.0
    out = [text(LEFT, base - _PANEL + 6, "samples per second", 12), *axis(base, _PANEL, length_s, f"{most:.3g}")]
    out.append(_steps([(b.begin_s, b.could) for b in outcome.bins], length_s, most, base, _COULD))
    out.append(_steps([(b.begin_s, b.trains) for b in outcome.bins], length_s, most, base, _TRAINS))
    out.append(text(WIDTH - RIGHT - 190, base - _PANEL + 6, "machines could", 12, _COULD))
    out.append(text(WIDTH - RIGHT - 80, base - _PANEL + 6, "trained", 12, _TRAINS))
    return out


def _goodput(outcome: Outcome, length_s: float, base: float) -> list[str]:
    shares = [(b.begin_s, min(1.0, b.trains / b.could) if b.could > 0 else 0.0) for b in outcome.bins]
    out = [text(LEFT, base - _PANEL + 6, "share that trained", 12), *axis(base, _PANEL, length_s, "1")]
    return [*out, _steps(shares, length_s, 1.0, base, _GOODPUT)]


def _steps(points: list[tuple[float, float]], length_s: float, most: float, base: float, colour: str) -> str:
    places = []
    for n, (at, value) in enumerate(points):
        y = base - (_PANEL - 14) * value / most
        after = points[n + 1][0] if n + 1 < len(points) else length_s
        places += [f"{x_of(at, length_s):.1f},{y:.1f}", f"{x_of(after, length_s):.1f},{y:.1f}"]
    return _line(places, colour)


def _line(points: list[str], colour: str) -> str:
    return f'<polyline points="{" ".join(points)}" fill="none" stroke="{colour}" stroke-width="1.5"/>'
