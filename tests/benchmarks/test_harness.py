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


def test_rounds_take_turns() -> None:
    from benchmarks._measure import interleaved

    order: list[str] = []
    sides = {name: (lambda name=name: order.append(name) or len(order)) for name in "abc"}
    found = interleaved(sides, 3, lambda line: None)
    assert "".join(order) == "abcbcacab"
    assert found == {"a": [1, 6, 8], "b": [2, 4, 9], "c": [3, 5, 7]}


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
