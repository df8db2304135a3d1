"""The benchmark harness: lists what is there, runs one, ends with one JSON line."""

from __future__ import annotations

import ast
import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(autouse=True)
def _importable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT))


def test_the_list_names_every_benchmark_with_a_line() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks"], cwd=ROOT, capture_output=True, text=True, timeout=60, check=True
    )
    lines = dict(line.split(maxsplit=1) for line in done.stdout.splitlines())
    assert {"throughput", "kill_matrix"} <= set(lines)
    assert not set(lines) & {"_measure", "throughput_model"}
    assert all(len(line) > 10 for line in lines.values())


def test_a_wrong_name_is_one_clear_line() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks", "speed"], cwd=ROOT, capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 2
    assert done.stderr.startswith("no benchmark 'speed': there are ") and done.stderr.count("\n") == 1


def test_the_last_line_is_the_result(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    from benchmarks import __main__ as harness

    result = {"figures": {"a": 0.5, "b": 2}, "aims": {"a": ">= 0.4"}, "holds": {"a": True}, "spread": {"a": (0.4, 0.6)}}
    monkeypatch.setattr(harness, "available", lambda: {"mine": "a line"})
    monkeypatch.setitem(sys.modules, "benchmarks.mine", SimpleNamespace(run=lambda quick: result))
    assert harness.main(["mine", "--quick"]) == 0
    last = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert last["name"] == "mine" and last["figures"] == result["figures"] and last["spread"] == {"a": [0.4, 0.6]}
    assert last["quick"] is True and "cores" in last["machine"]
    result["holds"]["a"] = False  # type: ignore[index]
    assert harness.main(["mine"]) == 1


def test_every_row_of_the_document_names_a_benchmark_that_exists() -> None:
    text = (ROOT / "docs" / "benchmarks.md").read_text()
    named = {word for line in text.splitlines() if line.startswith("| `") for word in line.split("`")[1:2]}
    for command in named:
        assert command.startswith("python -m benchmarks "), command
        path = ROOT / "benchmarks" / f"{command.split()[3]}.py"
        assert any(isinstance(n, ast.FunctionDef) and n.name == "run" for n in ast.parse(path.read_text()).body)


def test_rounds_take_turns_and_one_side_is_measured_twice() -> None:
    from benchmarks._measure import begin, interleaved

    order: list[str] = []
    conditions = begin()
    sides = {name: (lambda name=name: order.append(name) or len(order)) for name in "abc"}
    found = interleaved(sides, 3, lambda line: None, "b")
    assert "".join(order) == "abcbbcbacbab"
    assert found == {"a": [1, 8, 11], "b": [2, 5, 12], "c": [3, 6, 9]}
    assert found.again == [(2, 4), (5, 7), (12, 10)] and found.noise() == [2, 7 / 5, 10 / 12]
    assert conditions.rounds == len(conditions.loads) == 3
    assert conditions.raw == [{**found, "b again": [4, 7, 10]}]
    with pytest.raises(KeyError, match="no side 'd': there are a, b, c"):
        interleaved(sides, 1, lambda line: None, "d")


def test_a_quick_run_leaves_out_the_second_measurement_that_it_has_no_time_for() -> None:
    from benchmarks._measure import begin, interleaved

    sides = {"a": lambda: 1.0, "b": lambda: 2.0}
    begin(limit_s=-1.0)
    assert interleaved(sides, 2, lambda line: None).again == []
    begin(limit_s=3600.0)
    assert interleaved(sides, 2, lambda line: None).noise() == [1.0, 1.0]
    begin()


def test_a_machine_is_quiet_if_all_loads_are_low(monkeypatch: pytest.MonkeyPatch) -> None:
    from benchmarks import _measure

    loads = iter([0.1, 0.2, 0.2, 0.49, 0.49, 0.5, 0.5])
    monkeypatch.setattr(_measure.os, "getloadavg", lambda: (next(loads), 9.0, 9.0))
    conditions = _measure.Conditions()
    conditions.series()
    conditions.round()
    conditions.round()
    assert conditions.quiet and conditions.rounds == 2
    conditions.round()
    conditions.round()
    conditions.round()
    assert not conditions.quiet
    assert conditions.facts()["loads"] == [0.2, 0.2, 0.49, 0.49, 0.5]


def test_a_recorded_run_takes_the_mark_off_its_rows(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    from benchmarks._marks import DAGGER, backed, marked, recorded, wrong
    from benchmarks._measure import Conditions, interleaved

    from benchmarks import __main__ as harness

    def run(quick: bool) -> dict[str, object]:
        found = interleaved({"a": lambda: 1.0, "b": lambda: 3.0}, 5, lambda line: None)
        assert found.noise() == [1.0] * 5
        return {"figures": {"ratio": 3.0, "ratio.aa": 1.01}, "aims": {}, "holds": {}, "spread": {"ratio": (3.0, 3.0)}}

    monkeypatch.setattr(harness, "available", lambda: {"mine": "a line"})
    monkeypatch.setattr(harness, "RESULTS", tmp_path)
    monkeypatch.setattr(Conditions, "quiet", True)
    monkeypatch.setitem(sys.modules, "benchmarks.mine", SimpleNamespace(run=run))
    assert harness.main(["mine", "--quick", "--record"]) == 0
    out = capsys.readouterr().out
    assert "A/A 1.01" in out and not any(line.startswith("ratio.aa") for line in out.splitlines())
    [whole] = recorded(tmp_path)
    assert whole["raw"] == [{"a": [1.0] * 5, "b": [3.0] * 5, "a again": [1.0] * 5}] and whole["rounds"] == 5
    page = "| `python -m benchmarks mine` | `ratio` | 3 | 3 .. 3 |  |  |\n| command | claim |\n"
    assert backed([whole]) == set()  # quick
    assert marked(page, set()) == page.replace("| 3 |", f"| 3 {DAGGER} |")
    allowed = backed([{**whole, "quick": False}])
    assert ("python -m benchmarks mine", "ratio", "3") in allowed
    assert wrong(page, allowed) == [] and marked(marked(page, set()), allowed) == page
    assert not backed([{**whole, "quick": False, "quiet": False}]) | backed([{**whole, "quick": False, "rounds": 4}])
    assert harness.record(whole, tmp_path).name.endswith("-2.json")


def test_rows_of_the_document_are_marked_as_the_recorded_runs_say() -> None:
    from benchmarks._marks import backed, recorded, wrong

    rows = wrong((ROOT / "docs" / "benchmarks.md").read_text(), backed(recorded()))
    assert not rows, f"run python -m benchmarks._marks --write; wrong: {rows[:3]}"


def test_p95_is_a_value_that_was_measured() -> None:
    from benchmarks._measure import p95

    assert p95([3.0]) == 3.0
    assert p95([float(i) for i in range(1, 21)]) == 19.0
    assert p95([float(i) for i in range(1, 101)]) == 95.0


@pytest.mark.processes
def test_a_child_that_fails_or_hangs_is_told_and_gone() -> None:
    from benchmarks._measure import Child, last_json, python

    with Child(python("-c", "print('{\"a\": 1}')")) as child:
        assert last_json(child.finish(30)) == {"a": 1}
    with Child(python("-c", "raise SystemExit('no luck')")) as child, pytest.raises(RuntimeError, match="no luck"):
        child.finish(30)
    with Child(python("-c", "import time; time.sleep(600)")) as child:
        with pytest.raises(RuntimeError, match="took more than"):
            child.finish(0.2)
        assert child.process.poll() is not None
