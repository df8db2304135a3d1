"""One name for one thing: no two classes have the same name, nor two files, unless they are about the same noun."""

from __future__ import annotations

import ast
from collections import defaultdict
from pathlib import Path

SOURCE = Path(__file__).resolve().parents[2] / "src" / "everstep"

SAME_NOUN = {
    "advise.py",  # the verb, and what it works out
    "capacity.py",  # where machines come from: its name, its facts, the ports, the command line
    "checkpoints.py",  # when they are due, what the brain knows of them, who writes them
    "group.py",  # the model of a group, the brain's part, the simulator's
    "hot.py",  # hot partitions: what is seen, and what to do
    "job.py",  # the script's, and the brain's
    "model.py",  # the model that is left: how it is written, and by whom
    "notices.py",  # their names, and their sources
    "placement.py",
    "policy.py",
    "resume.py",
    "witness.py",
}


def test_no_two_classes_have_one_name() -> None:
    where = defaultdict(list)
    for path in sorted(SOURCE.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ClassDef):
                where[node.name].append(str(path.relative_to(SOURCE)))
    assert {name: paths for name, paths in where.items() if len(paths) > 1} == {}


def test_no_two_unrelated_files_have_one_name() -> None:
    where = defaultdict(list)
    for path in sorted(SOURCE.rglob("*.py")):
        where[path.name].append(str(path.relative_to(SOURCE)))
    twice = {name for name, paths in where.items() if len(paths) > 1} - {"__init__.py", "__main__.py"}
    assert twice <= SAME_NOUN, "files of one name that are not about the same thing"
    assert twice >= SAME_NOUN, "a name that is no longer used twice"
