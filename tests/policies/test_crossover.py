"""Where parity begins to cost less than checkpoints: the sweep, and its picture."""

from __future__ import annotations

import json
import math
import re
from itertools import pairwise
from pathlib import Path

import pytest
from click.testing import CliRunner

from everstep.cli.advise import as_papers, lines
from everstep.cli.advise_picture import draw
from everstep.cli.main import cli
from everstep.policies.advise import (
    Case,
    checkpoints,
    coded,
    every,
    options,
    paying_bytes,
    paying_mtbf_s,
    within,
)
from everstep.policies.crossover import MTBF_S, STEPS, WRITE_S, ProtectionWay, code_of, steps, sweep, turn_s, ways
from everstep.units import human_bytes

HOUR = 3600.0
CASE = Case(table_bytes=220e9, bandwidth=1.4e9, mtbf_s=8 * HOUR, ps=8)


@pytest.mark.parametrize("same_redo", [False, True])
def test_each_cell_has_the_cheapest_way(same_redo: bool) -> None:
    for row in sweep(CASE, same_redo, write_s=(1.0, 100.0, 1e4), mtbf_s=(60.0, HOUR, 1e6)):
        for cell in row:
            at = CASE._replace(table_bytes=cell.write_s * CASE.bandwidth, mtbf_s=cell.mtbf_s)
            losses = {
                ProtectionWay.CHECKPOINTS: within(at, at.lag_s).loss
                if same_redo
                else checkpoints(at, incremental=True).loss,
                ProtectionWay.PARITY: coded(at, 4, 1).loss,
                ProtectionWay.LAG: coded(at, 4, 1, lag=True).loss,
            }
            assert cell.loss == losses[cell.way] == min(losses.values())


def test_the_sweep_has_its_ends_at_equal_ratios() -> None:
    found = steps(WRITE_S)
    assert len(found) == STEPS and found[0] == WRITE_S[0] and found[-1] == pytest.approx(WRITE_S[1])
    ratios = [b / a for a, b in pairwise(found)]
    assert max(ratios) == pytest.approx(min(ratios))
    assert [len(row) for row in sweep(CASE, False)] == [STEPS] * STEPS
    assert steps(MTBF_S, 2) == pytest.approx(list(MTBF_S))


@pytest.mark.parametrize("same_redo", [False, True])
@pytest.mark.parametrize("mtbf_s", [600.0, 8 * HOUR])
def test_the_turn_is_where_the_cheapest_way_changes(same_redo: bool, mtbf_s: float) -> None:
    at_s = turn_s(CASE, same_redo, mtbf_s)
    assert WRITE_S[0] < at_s < WRITE_S[1]
    below, above = sweep(CASE, same_redo, write_s=(at_s * 0.99, at_s * 1.01), mtbf_s=(mtbf_s,))[0]
    assert below.way is ProtectionWay.CHECKPOINTS and above.way is not ProtectionWay.CHECKPOINTS


def test_at_equal_redo_parity_pays_much_sooner() -> None:
    assert turn_s(CASE, True, 8 * HOUR) < turn_s(CASE, False, 8 * HOUR) / 100


def test_ends_of_the_sweep_where_nothing_turns() -> None:
    assert turn_s(CASE._replace(lag=0.0, together=0.0), True, 8 * HOUR) == WRITE_S[0]
    assert turn_s(CASE._replace(lag=0.9, parity=0.9), False, 30 * 86400.0) == math.inf


def test_too_few_ps_for_a_stripe_have_a_replica_and_no_lag() -> None:
    few = CASE._replace(ps=2)
    assert code_of(few) == (1, 1) and ProtectionWay.LAG not in ways(few, False)
    assert "replica 1+1" in draw(few) and "behind" not in draw(few)


def test_the_picture_covers_each_panel_once_and_shows_the_case() -> None:
    svg = draw(CASE)
    boxes = re.findall(r'<rect x="([\d.]+)" y="[\d.]+" width="([\d.]+)" height="[\d.]+" fill="#(?!ffffff)', svg)
    widths = [float(width) for _, width in boxes if float(width) != 12]
    panel = sum(widths) / (2 * STEPS)
    assert panel == pytest.approx((860 - 60 - 20 - 60) / 2, abs=0.5)
    assert svg.count("<circle") == 2 and human_bytes(220e9) in svg
    assert draw(CASE._replace(mtbf_s=1e9)).count("<circle") == 0


def test_the_command_writes_the_picture(tmp_path: Path) -> None:
    to = tmp_path / "crossover.svg"
    base = ["advise", "--tables", "220GB", "--bandwidth", "1.4GB", "--mtbf", "8h", "--picture"]
    done = CliRunner().invoke(cli, [*base, str(to)])
    assert done.exit_code == 0 and str(to) in done.output, done.output
    assert to.read_text().startswith("<svg") and to.read_text().rstrip().endswith("</svg>")
    refused = CliRunner().invoke(cli, [*base, str(tmp_path / "none" / "x.svg")])
    assert refused.exit_code != 0 and not (tmp_path / "none").exists()


def test_what_papers_compare_parity_with_is_said_with_both_sides() -> None:
    """Full checkpoints every 30 minutes, as ECRM has them, at 220 GB, 1.4 GB/s and one loss in 8 h."""
    fixed = every(CASE, 1800.0)
    write_s = 220e9 / 1.4e9
    assert fixed.parts["trained again"] == pytest.approx(900.0 / (8 * HOUR))
    assert fixed.parts["writing"] == pytest.approx(0.02 * write_s / 1800.0)
    assert every(CASE, 1.0).interval_s == pytest.approx(write_s), "none is faster than its bytes"
    assert "lose 3.4% (trained again binds); parity 4+1 lag 4s loses 2.6%, 24% less; " in as_papers(CASE, options(CASE))
    dear, cheap = CASE._replace(lag=0.06), CASE._replace(lag=0.001, together=0.0)
    assert "parity 4+1 lag 4s loses 6.6%, more" in as_papers(dear, options(dear))
    assert "parity 4+1 lag 4s loses 0.3%, 93% less" in as_papers(cheap, options(cheap))
    for at in (CASE, dear, cheap):
        loss = at.lag + 4.0 / (8 * HOUR) + coded(at, 4, 1).parts["rebuilding"]
        words = f"{1 - loss / fixed.loss:.0%} less" if loss <= fixed.loss else "more"
        wanted = f"; without checkpoints beyond it, parity 4+1 lag 4s loses {loss:.1%}, {words}"
        assert as_papers(at, options(at)).endswith(wanted)
    few = CASE._replace(ps=2)
    assert as_papers(few, options(few)).endswith("binds)")


def test_parity_that_lags_turns_by_itself() -> None:
    assert paying_mtbf_s(CASE, 4, 1, lag=True)[1] > paying_mtbf_s(CASE, 4, 1)[1] == 0.0
    assert 0.0 < paying_bytes(CASE, 4, 1, lag=True)[0] < math.inf
    assert any("parity 4+1 lag 4s costs less than" in line for line in lines(CASE, options(CASE)))


def test_the_picture_in_the_documentation_is_what_the_command_draws() -> None:
    documented = Path(__file__).parents[2] / "docs" / "crossover.svg"
    assert documented.read_text() == draw(CASE), (
        "everstep advise --tables 220GB --bandwidth 1.4GB --mtbf 8h --picture docs/crossover.svg"
    )


def test_what_a_job_is_said_to_be_changes_what_parity_costs() -> None:
    def case(*flags: str) -> dict[str, float]:
        words = ["advise", "--tables", "220GB", "--bandwidth", "1.4GB", "--mtbf", "8h", "--json", *flags]
        found = CliRunner().invoke(cli, words)
        assert found.exit_code == 0, found.output
        return json.loads(found.output)["case"]

    shared, spare = case(), case("--spare-core")
    assert Case(**shared) == CASE and spare["lag"] < shared["lag"] and spare["parity"] < shared["parity"]
    assert case("--spare-core", "--lag-costs", "0.3", "--parity", "0.4")["lag"] == 0.3, "who says it is believed"
    assert case("--lag", "60s")["lag"] < shared["lag"] < case("--lag", "1s")["lag"]
    assert case("--hybrid")["hybrid"] is True
    nothing = CliRunner().invoke(
        cli, ["advise", "--tables", "1GB", "--bandwidth", "1GB", "--mtbf", "1h", "--lag", "0s"]
    )
    assert nothing.exit_code != 0 and "--lag 0s" in str(nothing.exception or nothing.output)


@pytest.mark.parametrize("share", ["0", "0.005", "1.5", "nan"])
def test_a_share_that_no_job_may_have_is_refused(share: str) -> None:
    words = ["advise", "--tables", "1GB", "--bandwidth", "1GB", "--mtbf", "1h", "--rebuild-share", share]
    found = CliRunner().invoke(cli, words)
    assert found.exit_code != 0 and "--rebuild-share" in str(found.exception or found.output)
