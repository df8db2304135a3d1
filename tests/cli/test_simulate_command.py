"""``everstep simulate``: rows, numbers, the picture, and one line for each mistake."""

from __future__ import annotations

import json
from pathlib import Path
from xml.etree import ElementTree

import pytest
from click.testing import CliRunner

from everstep.cli.main import cli
from everstep.cli.simulate import Request, report_lines, show_simulation, simulate_job
from everstep.errors import ConfigError, EverstepError
from everstep.ids import Incarnation
from everstep.platforms.trace_variants import by_chance
from everstep.platforms.traces import Trace
from everstep.sim.elastic.virtual_job import VirtualJob, Work
from everstep.storage.journal import Journal

TRACES = Path(__file__).parents[2] / "benchmarks" / "traces"
SPOT = TRACES / "spot" / "us-west-2c_v100_1.json.gz"
PRICES = "class,zone,market,from,usd_per_hour\nv100,us-west-2c,spot,,0.9\nv100,,on_demand,,3.0\nhome,,on_demand,,3.0\n"


def request(**more: object) -> Request:
    flags = {"capacity": f"trace:{SPOT}", "hardware": "home", **dict(more.pop("flags", {}))}  # type: ignore[call-overload]
    return Request((), flags, **{"samples": 20_000_000, **more})  # type: ignore[arg-type]


def test_settings_side_by_side(tmp_path: Path) -> None:
    prices = tmp_path / "prices.csv"
    prices.write_text(PRICES)
    asked = request(compare=("mode=ps,allreduce", "checkpoint=60s,10m"), seeds=2, prices=prices)
    report = simulate_job(asked)
    assert [row.name for row in report.rows] == [
        f"mode={mode} checkpoint={every}" for mode in ("ps", "allreduce") for every in ("60s", "10m")
    ]
    for row in report.rows:
        found = row.as_dict()
        assert found["ended"] and len(found["stories"]) == 2
        assert 0.9 < found["goodput"]["median"] <= 1.0
        usd = [o.node_hours for o in row.outcomes]
        assert found["spent_usd"]["most"] <= 3.0 * max(usd)
        assert 0.0 < found["saved"]["median"] < 1.0
        cost, outcome = row.costs[0], row.outcomes[0]
        assert cost.price_part is not None
        assert found["stories"][0]["saved"] == pytest.approx(1 - cost.price_part / outcome.goodput)
    assert len({row.outcomes[1].length_s for row in report.rows}) > 1
    text = "\n".join(report_lines(report))
    assert "samples_per_s" in text and "(assumed)" in text and "saved" in text


def test_others_stand_below(tmp_path: Path) -> None:
    picture = tmp_path / "out.svg"
    said: list[str] = []
    shown = show_simulation(request(baselines=True, nodes=12, flags={"mode": "allreduce"}), True, picture, said.append)
    found = json.loads(shown)
    names = [row["name"] for row in found["settings"]]
    assert names[0] == "job" and any("restart" in name for name in names) and said
    assert all(row["goodput"]["median"] < found["settings"][0]["goodput"]["median"] for row in found["settings"][1:4])
    assert found["settings"][0]["unknown_prices"] and found["settings"][0]["spent_usd"] is None
    assert ElementTree.parse(picture).getroot().tag.endswith("svg")


def test_a_run_of_the_job_gives_its_numbers(tmp_path: Path) -> None:
    """A journal as a master leaves it (here of a virtual job) is what --like reads."""
    from everstep.config.spec import JobSpec
    from everstep.model.capacity import Market, Offer
    from everstep.platforms.traces import TraceMarket, timeline_of
    from everstep.sim.elastic.job_model import MeasuredJob

    trace: Trace = by_chance(3, 20_000.0, between_s=1500.0, back_s=60.0, seed=1)
    market = TraceMarket(trace, timeline_of(trace, 1.0), Offer("v100", "us-west-2c", Market.SPOT))
    job = VirtualJob(JobSpec(ps=1), Work(5_000_000, 2, 20_000), MeasuredJob(), market, 3, keep_events=True)
    job.run(1e6)
    journal = Journal(tmp_path / "journal.sqlite", Incarnation(1))
    for event in job.events or ():
        journal.append(event)
    journal.close()
    report = simulate_job(request(samples=0, like=tmp_path))
    assert report.work == job.work
    assert any("measured in" in line for line in report.model)
    assert report.rows[0].outcomes[0].samples == 10_000_000


def test_job_files_are_rows(tmp_path: Path) -> None:
    for name, mode in (("one", "ps"), ("two", "allreduce")):
        (tmp_path / f"{name}.yaml").write_text(f"mode: {mode}\ncapacity: 'trace:{SPOT}'\n")
    ran = CliRunner().invoke(
        cli, ["simulate", str(tmp_path / "one.yaml"), str(tmp_path / "two.yaml"), "--samples", "5000000"]
    )
    assert ran.exit_code == 0, ran.output
    assert "\none " in ran.output and "\ntwo " in ran.output


def test_a_spot_policy_of_ones_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "my_spot.py").write_text(
        "from everstep.policies.spot import SpotPlan\n"
        "def often(seen):\n"
        "    assert seen.hazard.reclaims and seen.machines > 1\n"
        "    return SpotPlan(77.0, why='mine')\n"
        "def wrong(seen):\n    return 3\n"
        "def fails(seen):\n    raise KeyError('x')\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    shipped = simulate_job(request(spot_policy="hazard", flags={"mode": "allreduce"}))
    assert shipped.rows[0].about.startswith("hazard: a checkpoint every ")
    own = simulate_job(request(spot_policy="my_spot:often"))
    assert own.rows[0].about.startswith("my_spot:often: a checkpoint every 77s")
    assert own.rows[0].outcomes[0].ended
    for name, words in [
        ("my_spot:wrong", "expected a SpotPlan"),
        ("my_spot:fails", "it raised KeyError: 'x'"),
        ("my_spot:none", "no attribute"),
        ("no_such_module:x", "No module named"),
        ("sometimes", "expected none, hazard, or module:callable"),
    ]:
        with pytest.raises(ConfigError) as caught:
            simulate_job(request(spot_policy=name))
        assert words in str(caught.value) and "\n" not in str(caught.value)


def broken(tmp_path: Path, text: str) -> dict[str, object]:
    path = tmp_path / "trace.csv"
    path.write_text(text)
    return {"flags": {"capacity": f"trace:{path}"}}


@pytest.mark.parametrize(
    ("asked", "words"),
    [
        ({"flags": {"capacity": ""}}, "no capacity is given"),
        ({"flags": {"capacity": "command:x", "bind": "127.0.0.1:0", "capacity_nodes": 1}}, "plays recordings"),
        ({"flags": {"capacity": "trace:/nowhere"}}, "cannot be read"),
        ({"samples": 0}, "give --samples"),
        ({"seeds": 0}, "--seeds 0"),
        ({"limit": "soon"}, "time span"),
        ({"nodes": 10**6}, "--nodes 1000000: 1000000 machines"),
        ({"compare": ("mode",)}, "expected NAME=VALUE"),
        ({"compare": ("nothing=1,2",)}, "nothing"),
        ({"compare": ("meet_s=1s,x",)}, "--assume 'meet_s=x'"),
        ({"compare": ("seed=" + ",".join(map(str, range(11))), "lead=" + ",".join("1" * 11))}, "121 settings"),
        ({"assume": ("stall=7",)}, "a share from 0 to 1"),
        ({"like": Path("/nowhere")}, "does not exist"),
        ({"kind": "@zone"}, "expected CLASS"),
        ({"flags": {"checkpoint_every": "100batches"}}, "give a span of time"),
    ],
)
def test_a_mistake_is_one_line(asked: dict[str, object], words: str) -> None:
    with pytest.raises(EverstepError) as caught:
        simulate_job(request(**asked))
    assert words in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("1000,add,a\n500,remove,a\n", "line 2: out of order"),
        ("1000,add,a\n2000,remo", "truncated"),
        ("1000,add,a\n2000,remove,b\n", "no such machine"),
        ("", "it is empty"),
    ],
)
def test_a_broken_recording_is_one_line(tmp_path: Path, text: str, words: str) -> None:
    with pytest.raises(ConfigError) as caught:
        simulate_job(request(**broken(tmp_path, text)))
    assert words in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("row", "words"),
    [("v100,,spot,,-1", "line 2: usd_per_hour = '-1'"), ("v100,,spot,,", "line 2: usd_per_hour is missing")],
)
def test_wrong_prices_are_one_line(tmp_path: Path, row: str, words: str) -> None:
    prices = tmp_path / "prices.csv"
    prices.write_text(f"class,zone,market,from,usd_per_hour\n{row}\n")
    with pytest.raises(ConfigError) as caught:
        simulate_job(request(prices=prices))
    assert words in str(caught.value) and "\n" not in str(caught.value)


def test_a_picture_is_svg(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"ends in .svg"):
        show_simulation(request(), False, tmp_path / "out.png", lambda line: None)
