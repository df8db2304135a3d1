"""The first line of a docstring has a verb: it says what a thing does, or what it is."""

from __future__ import annotations

import runpy
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def test_first_lines_of_docstrings_have_a_verb() -> None:
    prose = runpy.run_path(str(ROOT / "tests" / "docs" / "prose.py"))
    found = [
        f"{path.relative_to(ROOT)}:{line}: {' '.join(text.split())[:80]}"
        for path in sorted((ROOT / "src" / "everstep").rglob("*.py"))
        for line, text in prose["docstrings"](path)
        if not prose["has_verb"](text)
    ]
    assert not found, "say what it does, or what it is:\n" + "\n".join(found)
