"""A chaos schedule beside a job that ends before it."""

from __future__ import annotations

from pathlib import Path

import pytest

from everstep.cli import chaos
from everstep.monitor.schedules import Planned


def test_a_schedule_ends_with_its_job(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    ordered: list[Planned] = []
    monkeypatch.setattr(chaos, "need_running", lambda run_dir: None)
    monkeypatch.setattr(chaos, "in_use", lambda run_dir: not ordered)
    monkeypatch.setattr(chaos, "_order", lambda run_dir, plan, burn: ordered.append(plan))
    chaos.play(tmp_path, [Planned(0.0, "kill", "worker:0"), Planned(9999.0, "heal"), Planned(9999.0, "heal")], 0, False)
    assert ordered == [Planned(0.0, "kill", "worker:0")]
    assert capsys.readouterr().out.splitlines()[-1] == "the job is over; of 3 lines 1 were played"
