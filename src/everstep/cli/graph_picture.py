"""Draws the picture of ``everstep graph --out``: modules with bars of their time, tables below, as SVG."""

from __future__ import annotations

from everstep.cli.graph import TABLE_HEAD, headline, table_row
from everstep.cli.svg import LEFT, RIGHT, WIDTH, begin, text
from everstep.cli.top import span
from everstep.model.graph_readings import ModuleView
from everstep.monitor.graph_file import GraphRecord
from everstep.units import human_bytes

_ROW, _TOP, _BARS = 18, 84, 360
_FORWARD, _BACKWARD = "#2a7ab9", "#3c8d5a"
_COLUMNS = (0, 150, 230, 300, 360, 420, 480, 540, 600, 660)  # of tables, from LEFT


def draw(record: GraphRecord, job: str) -> str:
    """Return an SVG of the readings of ``job``."""
    graph = record.graph
    longest_s = max((m.forward_s + m.backward_s for m in graph.modules), default=0.0) or 1e-9
    below = _TOP + _ROW * len(graph.modules) + 30
    notes = [record.binding.words] if record.binding is not None else []
    notes += graph.notes
    height = below + _ROW * (len(graph.tables) + 2 + len(notes))
    out = [*begin(height), text(LEFT - 45, 22, f"{job}: {headline(graph)}", 14)]
    for x, (name, colour) in zip((LEFT - 45, LEFT + 45), (("forward", _FORWARD), ("backward", _BACKWARD)), strict=True):
        out += [f'<rect x="{x}" y="44" width="12" height="12" fill="{colour}"/>', text(x + 16, 54, name, 12)]
    for row, module in enumerate(graph.modules):
        out += _module(module, _TOP + _ROW * row, longest_s)
    if graph.tables:
        for y, cells in enumerate((TABLE_HEAD[:-1], *(table_row(t)[:-1] for t in graph.tables))):
            places = zip(_COLUMNS, cells, strict=False)
            out += [text(LEFT - 45 + x, below + _ROW * y, cell, 11) for x, cell in places]
    base = below + _ROW * (len(graph.tables) + 2)
    out += [text(LEFT - 45, base + _ROW * i - 8, words, 11) for i, words in enumerate(notes)]
    return "\n".join([*out, "</svg>", ""])


def _module(m: ModuleView, y: int, longest_s: float) -> list[str]:
    """Return one row: the name by its depth, and bars of forward and backward."""
    name = m.module.rpartition(".")[2] if m.depth else m.module
    scale = (WIDTH - _BARS - RIGHT - 130) / longest_s
    out = [text(LEFT - 45 + 14 * m.depth, y, f"{name} ({m.kind})", 11)]
    x = float(_BARS)
    for seconds, colour in ((m.forward_s, _FORWARD), (m.backward_s, _BACKWARD)):
        width = seconds * scale
        if width >= 0.1:
            out.append(f'<rect x="{x:.1f}" y="{y - 10}" width="{width:.1f}" height="12" fill="{colour}"/>')
        x += width
    memory = f", {human_bytes(m.parameter_bytes)}" if m.parameters else ""
    words = span(m.forward_s + m.backward_s) + memory if m.calls else f"not called{memory}"
    return [*out, text(round(x + 6, 1), y, words, 11)]
