"""Which samples made up each step of a job of consistency sync: the order of shards among workers is not fixed there.

Each worker notes what it took for which step; plain PyTorch then takes batches of just these samples.
"""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path

from everstep.model.shard import split_key
from everstep.tables.gate import Gate
from everstep.tables.protocol import Work

Part = tuple[int, int, int, int]  # dataset, epoch, lo, hi
Steps = tuple[tuple[Part, ...], ...]


def note_parts(path: str) -> None:
    """From now on this worker writes a line for each batch that it begins."""
    begin = Gate.begin

    def noted(self: Gate, work: Work) -> None:
        begin(self, work)
        dataset, epoch, _ = split_key(work.lease.shard)
        with Path(path).open("a") as file:
            file.write(f"{self._step} {dataset} {epoch} {work.lo} {work.hi}\n")

    Gate.begin = noted  # type: ignore[method-assign]


def steps_of(folder: Path) -> Steps:
    """All steps of the job, from what its workers noted."""
    found: dict[int, list[Part]] = defaultdict(list)
    for path in folder.glob("*.parts-*"):
        for line in path.read_text().splitlines():
            step, *part = map(int, line.split())
            found[step].append((part[0], part[1], part[2], part[3]))
    return tuple(tuple(sorted(found[step])) for step in sorted(found))
