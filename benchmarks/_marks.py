"""Marks of docs/benchmarks.md: a row that no recorded run backs has a dagger.

``python -m benchmarks._marks`` names the rows whose mark is wrong, and ``--write`` corrects the page. A run backs a row
if ``benchmarks/results/`` holds it with the same command and the same figure, if it was not ``--quick``, had at least
five rounds, and the machine was quiet when it began and before each round.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from benchmarks.__main__ import RESULTS, shown

PAGE = Path(__file__).resolve().parent.parent / "docs" / "benchmarks.md"
DAGGER = "†"
ROUNDS = 5


def recorded(folder: Path = RESULTS) -> list[dict[str, Any]]:
    """All recorded runs, by file name. Raises ValueError that names a file that is no JSON."""
    found = []
    for path in sorted(folder.glob("*.json")):
        try:
            found.append(json.loads(path.read_text()))
        except ValueError as error:
            raise ValueError(f"{path.name}: {error}") from None
    return found


def backed(runs: Iterable[Mapping[str, Any]]) -> set[tuple[str, str, str]]:
    """``(command, claim, figure)`` of all rows that these runs allow without a mark."""
    return {
        (" ".join(["python -m benchmarks", run["name"], *run["arguments"]]), claim, shown(value))
        for run in runs
        if run["quiet"] and run["rounds"] >= ROUNDS and not run["quick"]
        for claim, value in run["figures"].items()
    }


def marked(page: str, allowed: set[tuple[str, str, str]]) -> str:
    """The page with a dagger behind the figure of each row that is not allowed without, and without one elsewhere."""
    lines = []
    for line in page.splitlines(keepends=True):
        if line.startswith("| `python -m benchmarks "):
            cells = line.split("|")
            figure = cells[3].replace(DAGGER, "").strip()
            row = cells[1].strip().strip("`"), cells[2].strip().strip("`"), figure
            cells[3] = f" {figure} " if row in allowed else f" {figure} {DAGGER} "
            line = "|".join(cells)
        lines.append(line)
    return "".join(lines)


def wrong(page: str, allowed: set[tuple[str, str, str]]) -> list[str]:
    """Rows whose mark is wrong."""
    pairs = zip(page.splitlines(), marked(page, allowed).splitlines(), strict=True)
    return [is_now for is_now, shall_be in pairs if is_now != shall_be]


if __name__ == "__main__":
    text, allowed = PAGE.read_text(), backed(recorded())
    rows = wrong(text, allowed)
    if "--write" in sys.argv[1:]:
        PAGE.write_text(marked(text, allowed))
        print(f"{len(rows)} rows marked anew")
    else:
        print(*rows, f"{len(rows)} rows with a wrong mark", sep="\n")
        sys.exit(1 if rows else 0)
