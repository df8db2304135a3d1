"""``everstep graph``: text, JSON and a picture of what a job left behind; a line where there is nothing."""

from __future__ import annotations

import json
from pathlib import Path
from xml.etree import ElementTree

import msgspec
import pytest
from click.testing import CliRunner, Result

from everstep.cli.graph import lines
from everstep.cli.main import cli
from everstep.config.load import load_spec, save_spec
from everstep.errors import ConfigError
from everstep.model.graph_readings import GraphView, ModuleView, TableView
from everstep.model.job_view import BindingView
from everstep.monitor.graph_file import GRAPH_FILE, GraphRecord

RECORD = GraphRecord(
    at=100.0,
    graph=GraphView(
        workers=2,
        every=340,
        steps=12,
        step_s=0.0081,
        cost_share=0.0019,
        left_out=3,
        notes=("modules are not measured: body is compiled by torch.compile",),
        modules=(
            ModuleView("Net", "Net", 0, 1.0, 0.004, 0.001, 0.006, 15, 60, 64.0),
            ModuleView("Net.body", "Sequential", 1, 2.0, 0.003, 0.003, 0.005, 10, 40, 64.0),
            ModuleView("Net.old", "Linear", 1, 0.0, 0.0, 0.0, 0.0, 5, 20, 0.0),
        ),
        tables=(TableView("users", 1000, 72_000, 12.5, 0.8, 0.5, 0.347, 4096, 0.1, 2.0, ((7, 0.03), (8, 0.01))),),
    ),
    binding=BindingView("ps service binds (60 % of the time); 1 more ps would give +38 % +- 6", {"ps": 0.6}),
)


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    save_spec(tmp_path, *load_spec(None, {"script": "train.py"}, {}))
    return tmp_path


def run(run_dir: Path, *flags: str) -> Result:
    return CliRunner().invoke(cli, ["graph", str(run_dir), *flags])


def left(run_dir: Path) -> None:
    (run_dir / GRAPH_FILE).write_bytes(msgspec.json.encode(RECORD))


def test_an_ended_job_is_shown_in_words(run_dir: Path) -> None:
    left(run_dir)
    shown = run(run_dir).output.splitlines()
    assert shown == lines(RECORD)
    assert shown[0] == "12 steps of 2 workers sampled (one in 340, 0.19 % of the time): 8.1 ms each"
    assert (
        shown[1].startswith("ps service binds") and "compiled" in shown[2] and shown[3].startswith("3 modules are not")
    )
    assert shown[7].split() == ["body", "Sequential", "2", "3", "ms", "3", "ms", "5", "ms", "10", "40", "B", "64", "B"]
    assert "not called" in shown[8]
    assert "+12" in shown[-1] and "80.0 %" in shown[-1] and "34.7 %" in shown[-1]
    assert shown[-1].endswith("7 (3 %), 8 (1 %)")


def test_json_has_everything(run_dir: Path) -> None:
    left(run_dir)
    found = msgspec.convert(json.loads(run(run_dir, "--json").output), GraphRecord)
    assert found == RECORD


def test_a_picture_is_written(run_dir: Path, tmp_path: Path) -> None:
    left(run_dir)
    out = tmp_path / "graph.svg"
    assert run(run_dir, "--out", str(out)).exit_code == 0
    words = [e.text or "" for e in ElementTree.fromstring(out.read_text()).iter() if e.tag.endswith("text")]
    assert "body (Sequential)" in words and "users" in words and RECORD.binding is not None
    assert RECORD.binding.words in words


@pytest.mark.parametrize(
    ("data", "words"),
    [(None, "no step has been sampled yet"), (b'{"at": "x"}', "graph.json is damaged or from another")],
)
def test_nothing_to_show_is_one_line(run_dir: Path, data: bytes | None, words: str) -> None:
    if data is not None:
        (run_dir / GRAPH_FILE).write_bytes(data)
    result = run(run_dir)
    assert result.exit_code != 0 and words in f"{result.output}{result.exception}"


@pytest.mark.parametrize("every", ["auto", "off", "1", "500"])
def test_how_often_is_a_setting(every: str) -> None:
    assert load_spec(None, {"graph_every": every}, {})[0].graph_every == every


@pytest.mark.parametrize("every", ["0", "-3", "often", "2s"])
def test_a_wrong_setting_is_refused_in_one_line(every: str) -> None:
    words = rf"graph_every = '{every}' \(--graph-every\): expected auto, off, or a whole number of steps"
    with pytest.raises(ConfigError, match=words):
        load_spec(None, {"graph_every": every}, {})
