"""The times of the kill matrix come from the records: who pushed what when, who granted when."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from everstep.ids import Incarnation, LeaseNo, ShardKey, Slot
from everstep.monitor.audit import PsLog
from everstep.monitor.records import Applied

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(autouse=True)
def _importable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT))


def log_of(*pushes: tuple[float, int, int, int, int]) -> PsLog:
    """A log of ``(at, worker, incarnation, shard, lease)``, ten samples each."""
    log = PsLog(Slot(0), Incarnation(1), 4, [0, 1, 2, 3])
    log.fill(
        msgspec.msgpack.encode(
            Applied(i, ShardKey(shard), 0, 10, LeaseNo(lease), Slot(worker), Incarnation(life), 4, at=at)
        )
        for i, (at, worker, life, shard, lease) in enumerate(pushes)
    )
    return log


def test_the_replacement_s_first_push_and_the_shard_s_next_range() -> None:
    from benchmarks.kill_matrix import Kill, _first_push, _shard_again

    log = log_of(
        (1.0, 0, 1, 7, 1),
        (1.2, 1, 1, 8, 2),
        (2.0, 0, 1, 7, 1),  # killed after this one, at 2.1, in shard 7
        (2.3, 1, 1, 8, 2),
        (2.6, 1, 1, 7, 3),  # the other worker takes its shard over
        (3.1, 0, 2, 9, 4),  # and its replacement begins another
    )
    kill = Kill(2.1, slot=0, incarnation=1)
    assert _first_push([log], kill) == pytest.approx(1.0)
    assert _shard_again([log], kill) == pytest.approx(0.5)
    assert _first_push([log], Kill(3.2, slot=0, incarnation=2)) is None
    assert _shard_again([log], Kill(2.4, slot=1, incarnation=2)) is None


def test_rate_and_life() -> None:
    from benchmarks.kill_matrix import _life_at, _rate

    log = log_of((1.0, 0, 1, 7, 1), (1.5, 0, 1, 7, 1), (2.0, 0, 1, 7, 1), (9.0, 0, 1, 7, 1))
    assert _rate(log, 1.0, 2.0) == pytest.approx(20.0)
    assert _life_at([(1.0, 1), (2.0, 1), (3.0, 2)], 2.5) == 1
    assert _life_at([], 2.5) == 1
