"""Which ps may not have which partitions, as policies are told, is what placements go by."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from transcript import Story

from everstep.ids import PartitionId, Slot


@pytest.mark.parametrize("parity", ["0", "1+1", "2+1"])
def test_closed_is_where_nothing_may_move(parity: str) -> None:
    story = Story()
    for line in (
        f"""master 1 workers=1 ps=4 buckets=12 parity='"{parity}"'""",
        "node node0",
        *(f"join ps:{i}#1" for i in range(4)),
    ):
        story.say(line)
    brain = story.brain
    assert brain is not None and brain.placement is not None
    for slot in map(Slot, range(4)):
        others = [PartitionId(b) for b in range(12) if brain.placement.owner[b] != slot]
        closed = brain.partitions.closed_to(slot)
        assert closed == tuple(b for b in others if not brain.partitions.may_move(b, slot))
        assert bool(closed) == (parity != "0")
