"""The page ``docs/compatibility.md``, made from rows and recorded cells."""

from __future__ import annotations

from pathlib import Path

from meaning.cells import OPEN, REFUSED, SAME, STATED, Cell
from meaning.table import MODES, Row

PAGE = Path(__file__).parents[2] / "docs" / "compatibility.md"

_HEAD = """# What a script means here, and what it means in plain PyTorch

This page is generated from tests: `python tests/meaning --whole` runs every row in every column and writes it. Each row
is a small script that does one thing which training scripts do. The same script runs with plain PyTorch on one process,
with batches as large as a step of the job, and all parameters, table rows and buffers are compared in the end (and each
iteration's loss, where one iteration is one of plain PyTorch's).

- **same**: equal within 1e-5 + 1e-4 of the value, or what the row states.
- **note**: a difference that is stated in one sentence below the table.
- **refused**: the script ends with the one line below the table, which says what to do instead.
"""


def page(rows: dict[str, Row], cells: dict[str, dict[str, Cell]]) -> str:
    out = [_HEAD]
    some_open = any(c.verdict == OPEN for found in cells.values() for c in found.values())
    if some_open:
        out.append(
            "- **open**: the script trains something else, or ends with an error that does not name the construct.\n"
        )
    out.append("\n| column | how it is run |\n| --- | --- |")
    out += [f"| {m.title} | {m.means} |" for m in MODES.values()]
    out.append(
        "\nWith several workers in mode ps and consistency async or bounded, gradients are applied as they come: that\n"
        "has no counterpart on one process. Those columns are shown with one worker.\n"
    )
    n = sum(len(found) for found in cells.values())
    counts = {
        v: sum(c.verdict == v for found in cells.values() for c in found.values())
        for v in (SAME, STATED, REFUSED, OPEN)
    }
    out.append(
        f"{len(rows)} rows, {n} cells: {counts[SAME]} same, {counts[STATED]} stated, {counts[REFUSED]} refused"
        + (f", {counts[OPEN]} open" if some_open else "")
        + ".\n"
    )
    topics = dict.fromkeys(r.topic for r in rows.values())
    for topic in topics:
        out += _topic(topic, [r for r in rows.values() if r.topic == topic], cells)
    return "\n".join(out).rstrip("\n") + "\n"


def _topic(topic: str, rows: list[Row], cells: dict[str, dict[str, Cell]]) -> list[str]:
    out = [f"\n## {topic}\n", "| what the script does | " + " | ".join(m.title for m in MODES.values()) + " |"]
    out.append("| --- |" + " --- |" * len(MODES))
    notes: dict[str, int] = {}
    for row in rows:
        shown = []
        for mode in MODES:
            cell = cells.get(row.name, {}).get(mode)
            if cell is None:
                shown.append("")
                continue
            word = {SAME: "same", STATED: "note", REFUSED: "refused", OPEN: "open"}[cell.verdict]
            if cell.detail and cell.verdict != OPEN:
                word += f" [{notes.setdefault(cell.detail, len(notes) + 1)}]"
            shown.append(word)
        out.append(f"| {row.title} | " + " | ".join(shown) + " |")
    if notes:
        out.append("")
    for detail, number in notes.items():
        out.append(f"{number}. {' '.join(detail.split())}")
    return out
