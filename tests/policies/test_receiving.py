"""A node takes in a neighbour's copy in waits of its own stages."""

from __future__ import annotations

from everstep.policies.receiving import SHARE, StageNow, has_room

COMPUTES = StageNow(-1.0)


def test_a_node_that_trains_nothing_always_has_room() -> None:
    assert has_room([], 5.0, 1.0)


def test_a_block_goes_where_one_stage_waits() -> None:
    assert not has_room([COMPUTES, COMPUTES], 5.0, 0.001)
    assert has_room([COMPUTES, StageNow(4.9)], 5.0, 0.001)  # (nobody knows yet how long that wait is)


def test_the_rest_of_the_wait_has_to_hold_the_block() -> None:
    wait = StageNow(10.0, 0.1)
    assert has_room([wait], 10.0, 0.079)
    assert not has_room([wait], 10.0, 0.081)  # more than is used of a wait, whose length varies
    assert has_room([wait], 10.05, 0.029) and not has_room([wait], 10.05, 0.031)
    assert not has_room([wait], 10.1, 0.0)
    assert wait.left_s(10.02) == 10.0 + SHARE * 0.1 - 10.02
