"""One name for one thing: no two classes have the same name, nor two files, unless they are about the same noun."""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from collections.abc import Iterator
from functools import cache
from pathlib import Path

SOURCE = Path(__file__).resolve().parents[2] / "src" / "everstep"


@cache
def trees() -> dict[str, ast.Module]:
    """Return the parsed sources by their path."""
    return {str(path.relative_to(SOURCE)): ast.parse(path.read_text()) for path in sorted(SOURCE.rglob("*.py"))}


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
    "suspend.py",
    "witness.py",
}


def test_no_two_classes_have_one_name() -> None:
    where = defaultdict(list)
    for path, tree in trees().items():
        for node in ast.walk(tree):
            if isinstance(node, ast.ClassDef):
                where[node.name].append(path)
    assert {name: paths for name, paths in where.items() if len(paths) > 1} == {}


def test_no_two_unrelated_files_have_one_name() -> None:
    where = defaultdict(list)
    for path in trees():
        where[Path(path).name].append(path)
    twice = {name for name, paths in where.items() if len(paths) > 1} - {"__init__.py", "__main__.py"}
    assert twice <= SAME_NOUN, "files of one name that are not about the same thing"
    assert twice >= SAME_NOUN, "a name that is no longer used twice"


OLD_WORDS = {
    "bucket": "partition",
    "carrier": "replication sender",
    "cursor": "position",
    "draft": "builder (PlacementBuilder)",
    "drag": "slowdown",
    "drill": "fault (made by chaos)",
    "farewell": "refusal, last vote, or what it is",
    "flats": "gradient buckets",
    "image": "snapshot",
    "inbox": "replication receiver",
    "journey": "owners, history",
    "keeper": "controller, or what it is",
    "leading": "leader",
    "mate": "follower",
    "pacing": "step scheduler",
    "portion": "batch share",
    "rehearsal": "warm-up step",
    "said": "reported, announced, or what it is",
    "seat": "record (SlotRecord) or runtime (WorkerRuntime)",
    "settled": "committed everywhere",
    "strand": "what it is",
    "tape": "step log",
    "told": "reported, announced, or what it is",
}
"""Words that code had for things of the glossary: they are in no name of a file, class, function or variable."""

OLD_NAMES = {
    "FOLD": "RECONSTRUCT",
    "Mark": "Position",
    "Packed": "SerializedState",
    "PackedHeader": "SerializedHeader",
    "Settled": "BatchFinished",
    "Tails": "RetainedLog",
    "Torn": "MirrorDiscarded",
    "Want": "FetchContents",
    "Hit": "SignalProcess",
    "Prints": "Fingerprints",
    "books": "state, records, ledger",
    "prints": "fingerprints",
    "Share": "ComputedShare or BatchShare",
    "TellPlace": "ClockReported",
    "Turn": "StepSchedule",
    "tell_place": "report_clock",
}
"""Whole names of before; their words are plain English elsewhere."""

STILL = {
    "image": (r"cli/(main|cluster_(job|operator))\.py", r"platforms/kubernetes/.*"),  # of a container
    "told": (r"ps/mirror_server\.py",),  # a name of the kernels in C++
    "bucket": (
        r"allreduce/(gradient_buckets|reducer|unit_reducer|logical|sharded)\.py",  # they are called so everywhere
        r"pipeline/stage_reducer\.py",
        r"model/observation\.py",  # an old name for policies, for one version
    ),
}


def names(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Yield each name in a source, with its line."""
    for node in ast.walk(tree):
        match node:
            case ast.Name(id=name) | ast.Attribute(attr=name) | ast.arg(arg=name) | ast.keyword(arg=str(name)):
                yield node.lineno, name
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) | ast.ClassDef(name=name):
                yield node.lineno, name
            case ast.alias(name=name):
                yield node.lineno, name


def test_no_name_has_an_old_word() -> None:
    found = []
    for path, tree in trees().items():
        for line, name in [(0, path), *names(tree)]:
            if name in OLD_NAMES:
                found.append(f"{path}:{line}: {name}: say {OLD_NAMES[name]}")
            for word in re.findall(r"[A-Z]?[a-z]+|[A-Z]+", name):
                old = word.lower() if word.lower() in OLD_WORDS else word.lower().removesuffix("s")
                if old in OLD_WORDS and not any(re.fullmatch(one, path) for one in STILL.get(old, ())):
                    found.append(f"{path}:{line}: {name}: say {OLD_WORDS[old]}")
    assert found == [], "old words (docs/glossary.md has the new ones)"
