"""The short form of ``bubble_snapshots``, and of what emulated stages sleep as."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

torch.set_num_threads(1)  # other tests fork from this process


@pytest.fixture(autouse=True)
def _importable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(Path(__file__).resolve().parents[2]))


def test_whenever_a_process_is_killed_the_newest_copy_is_what_the_stages_had() -> None:
    from benchmarks.bubble_snapshots import after_kills

    counts = after_kills(12, limit_s=240.0)
    assert (counts.whole, counts.torn, counts.late, counts.before) == (12, 0, 0, 0)


def test_a_copy_of_two_states_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """The script changes parameters in a way that nobody sees, while they are copied."""
    from benchmarks.bubble_snapshots import SnapshotStage, after_kills

    was: Any = SnapshotStage.backward

    def backward(self: SnapshotStage) -> None:
        was(self)
        for p in self.model.parameters():
            p.data.add_(1.0)

    monkeypatch.setattr(SnapshotStage, "backward", backward)
    # A kill that comes before a copy is whole finds nothing: on a busy machine six of them may.
    assert any(after_kills(6, seed, limit_s=240.0).torn for seed in range(10))


@pytest.mark.slow
@pytest.mark.processes
@pytest.mark.timeout(300)
def test_each_copy_of_a_job_is_of_the_step_that_it_claims() -> None:
    from benchmarks.bubble_snapshots import in_a_job

    for stage in in_a_job(60, 240.0):
        assert (stage["whole"], stage["other"], stage["discarded"]) == (30, [], 0)


@pytest.mark.parametrize(
    ("stages", "recorded"), [(2, [0, 3]), (3, [0, 1, 3]), (4, [0, 1, 2, 3]), (8, [0, 1, 1, 1, 2, 2, 2, 3])]
)
def test_emulated_stages_sleep_as_recorded_ones(stages: int, recorded: list[int]) -> None:
    from benchmarks._bubble_job import RECORDED, emulated, recorded_as

    assert [recorded_as(n, stages) for n in range(stages)] == recorded and RECORDED.exists()
    parts: list[Any] = emulated(stages, stages, 10)
    slept = [sum(part.next_s(0) for _ in range(128)) for part in parts]  # all that is recorded of a stage
    assert slept[0] == pytest.approx(128 * 0.004) and slept[-1] > 1.2 * slept[0]
    firsts = [part.next_s(1) for part in parts]
    assert len(set(firsts)) == stages  # (also of those that sleep as one recorded stage)
