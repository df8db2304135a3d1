"""A job that is suspended for its budget and goes on in the same run with a larger one, with real processes."""

from __future__ import annotations

import json

import pytest
from local_jobs import Run

from everstep.cli.display import read_summary
from everstep.cli.replay import replay
from everstep.cli.run import SUSPENDED

pytestmark = [pytest.mark.processes, pytest.mark.timeout(600)]

PRICES = """class,market,usd_per_hour
g5,on_demand,3600
"""  # a dollar a second


def test_a_job_is_suspended_for_its_budget_and_goes_on_with_a_larger_one(run: Run) -> None:
    run.write(epochs=40, pause_s=0.5)
    prices = run.folder / "prices.csv"
    prices.write_text(PRICES)
    run.start("--hardware", "g5", "--prices", str(prices), "--budget", "30")
    assert run.wait() == SUSPENDED, run.story()
    assert "less than one hour of the first machine (g5, on-demand, 3600 USD/h)" in run.text()
    assert run.leftovers() == {}, "a suspended job holds nothing"
    summary = read_summary(run.run_dir)
    assert summary is not None and summary.budget_asked and not summary.by_itself
    spent = summary.spent_usd
    assert spent is not None and spent > 5
    code, text = run.everstep("unsuspend", str(run.run_dir))
    assert code == 2 and "give a larger one" in text, text
    code, text = run.everstep("cost", str(run.run_dir), "--prices", str(prices), "--json")
    assert code == 0 and json.loads(text)["spent"]["usd"] == pytest.approx(spent, abs=15.0), text
    run.hurry()
    run.go_on("--budget", "0")
    run.ended_well()
    run.check_audit()
    assert replay(run.run_dir).ok
    summary = read_summary(run.run_dir)
    assert summary is not None and summary.spent_usd is not None and summary.spent_usd > spent
