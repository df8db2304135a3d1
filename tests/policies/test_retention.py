"""What is kept of checkpoints."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from everstep.policies.retention import CheckpointTaken, to_drop


def test_the_newest_and_the_first_of_each_stretch() -> None:
    taken = [CheckpointTaken(n, 600.0 * n) for n in range(1, 31)]  # every ten minutes, five hours
    assert to_drop(taken, 3) == tuple(range(1, 28))
    kept = set(range(1, 31)) - set(to_drop(taken, 3, 3600.0))
    assert kept == {1, 6, 12, 18, 24, 28, 29, 30}
    assert to_drop([], 3) == () and to_drop(taken[:2], 0) == (1,)


@given(st.lists(st.integers(0, 500), unique=True, min_size=1), st.integers(0, 5), st.sampled_from([0.0, 7.0, 60.0]))
def test_dropping_as_one_goes_is_dropping_at_the_end(times: list[int], keep: int, every: float) -> None:
    taken = [CheckpointTaken(i + 1, float(at)) for i, at in enumerate(sorted(times))]
    held: list[CheckpointTaken] = []
    for one in taken:
        held.append(one)
        gone = to_drop(held, keep, every)
        assert one.checkpoint not in gone
        held = [t for t in held if t.checkpoint not in gone]
    assert {t.checkpoint for t in held} == {t.checkpoint for t in taken} - set(to_drop(taken, keep, every))
