"""Draws the picture of ``everstep advise --picture``: where parity costs less than checkpoints, as SVG."""

from __future__ import annotations

import math

from everstep.cli.svg import INK, LEFT, RIGHT, WIDTH, begin, text
from everstep.policies.advise import Case
from everstep.policies.crossover import MTBF_S, STEPS, WRITE_S, ProtectionWay, code_of, sweep
from everstep.units import human_bytes

_COLOURS = {ProtectionWay.CHECKPOINTS: "#d8d8d8", ProtectionWay.PARITY: "#2a7ab9", ProtectionWay.LAG: "#3c8d5a"}
_TOP, _PANEL, _GAP = 96, 360, 60
_TICKS_S = ((1, "1 s"), (60, "1 min"), (3600, "1 h"), (86400, "1 d"))
_TICKS_MTBF = ((60, "1 min"), (3600, "1 h"), (28800, "8 h"), (86400, "1 d"), (604800, "1 week"))


def draw(case: Case) -> str:
    """Return an SVG with two panels: each way at its best, and all with as little to be trained again."""
    width = (WIDTH - LEFT - RIGHT - _GAP) / 2
    k, m = code_of(case)
    code = f"{'replica' if k == 1 else 'parity'} {k}+{m}"
    names = {
        ProtectionWay.CHECKPOINTS: "incremental checkpoints",
        ProtectionWay.PARITY: code,
        ProtectionWay.LAG: f"{code}, mirrors {case.lag_s:g} s behind",
    }
    lines = [
        *begin(_TOP + _PANEL + 76),
        text(LEFT, 24, f"The cheapest way that loses no sample, on {case.ps} ps", 15),
        text(
            LEFT,
            42,
            f"parity costs {case.parity:.1%}, with lag {case.lag:.1%}; a checkpoint costs {case.stall:.0%} of its "
            f"writing time, and writes {case.changed:.0%}",
            12,
        ),
    ]
    for number, way in enumerate(way for way in ProtectionWay if k > 1 or way is not ProtectionWay.LAG):
        x = LEFT + 230 * number
        lines += [
            f'<rect x="{x}" y="52" width="12" height="12" fill="{_COLOURS[way]}"/>',
            text(x + 16, 62, names[way], 12),
        ]
    for same_redo in (False, True):
        left = LEFT + (width + _GAP) * same_redo
        title = f"at most {case.lag_s:g} s trained again after a loss" if same_redo else "each at its best interval"
        lines += [text(left, _TOP - 12, title, 13), *_panel(case, same_redo, left, width)]
    lines += [
        text(LEFT, _TOP + _PANEL + 62, "up: mean time between losses of a ps; right: table bytes over bandwidth", 12)
    ]
    return "\n".join([*lines, "</svg>", ""])


def _panel(case: Case, same_redo: bool, left: float, width: float) -> list[str]:
    across, up = width / STEPS, _PANEL / STEPS
    lines = []
    for row, cells in enumerate(sweep(case, same_redo)):
        y = _TOP + _PANEL - up * (row + 1)
        at = 0
        while at < len(cells):  # equal neighbours are one box
            end = at
            while end < len(cells) and cells[end].way is cells[at].way:
                end += 1
            lines.append(
                f'<rect x="{left + across * at:.1f}" y="{y:.1f}" width="{across * (end - at):.1f}" '
                f'height="{up + 0.5:.1f}" fill="{_COLOURS[cells[at].way]}"/>'
            )
            at = end
    for seconds, words in _TICKS_S:
        x = left + width * _along(WRITE_S, seconds)
        lines += [_line(x, _TOP + _PANEL, x, _TOP + _PANEL + 4), text(x - 10, _TOP + _PANEL + 18, words, 11)]
    for seconds, words in _TICKS_MTBF:
        y = _TOP + _PANEL * (1 - _along(MTBF_S, seconds))
        lines += [_line(left - 4, y, left, y), text(left - 46, y + 4, words, 11)]
    write_s = case.table_bytes / case.bandwidth
    if WRITE_S[0] <= write_s <= WRITE_S[1] and MTBF_S[0] <= case.mtbf_s <= MTBF_S[1]:
        x, y = left + width * _along(WRITE_S, write_s), _TOP + _PANEL * (1 - _along(MTBF_S, case.mtbf_s))
        words = f"{human_bytes(case.table_bytes)} at {human_bytes(case.bandwidth)}/s"
        lines += [
            f'<circle cx="{x:.1f}" cy="{y:.1f}" r="5" fill="white" stroke="{INK}"/>',
            text(round(x + 8), round(y + 4), words, 11),
        ]
    return lines


def _along(ends: tuple[float, float], value: float) -> float:
    return math.log(value / ends[0]) / math.log(ends[1] / ends[0])


def _line(x1: float, y1: float, x2: float, y2: float) -> str:
    return f'<line x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}" stroke="{INK}"/>'
