"""Writes the list of docs/decisions/README.md from the titles of the records: ``python tools.py decisions``."""

from __future__ import annotations

import re
from pathlib import Path

FOLDER = Path(__file__).resolve().parents[2] / "docs" / "decisions"


def records() -> list[tuple[str, str, str]]:
    """Return number, title and file name of each record, by number. Raises ValueError: a record without a title."""
    found = []
    for path in sorted(FOLDER.glob("[0-9]*.md")):
        first = path.read_text().partition("\n")[0]
        match = re.fullmatch(r"# (\d{4}):? (\S.*[^.])", first)
        if match is None or not path.name.startswith(match[1] + "-"):
            raise ValueError(f"{path.name}: the first line must be '# NUMBER: The decision', not {first!r}")
        found.append((match[1], match[2], path.name))
    return found


def page(text: str) -> str:
    """Return the page ``text`` with the list that belongs there."""
    head = text.partition("| number |")[0].rstrip("\n")
    lines = [f"| [{number}]({name}) | {title} |" for number, title, name in records()]
    return "\n".join([head, "", "| number | decision |", "| --- | --- |", *lines]) + "\n"


if __name__ == "__main__":
    readme = FOLDER / "README.md"
    readme.write_text(page(readme.read_text()))
