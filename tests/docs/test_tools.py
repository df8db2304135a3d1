"""All commands in one place: what is listed runs, and what the pages name is listed."""

from __future__ import annotations

import re
import runpy
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def tools() -> dict[str, Any]:
    return runpy.run_path(str(ROOT / "tools.py"))


def test_every_command_is_listed_and_its_programs_are_there(tools: dict[str, Any]) -> None:
    names = [line.split()[0] for line in tools["listing"]().splitlines()]
    assert names == list(tools["TASKS"])
    assert {"check", "test", "test-thorough", "sanitize", "fuzz", "format-native", "meaning", "benchmarks"} <= set(
        names
    )
    for _, commands in tools["TASKS"].values():
        for first, *rest in commands:
            assert (ROOT / first).is_file() or first == sys.executable or not first.startswith((".", "tests")), first
            if first == sys.executable and rest[0] != "-m":
                assert (ROOT / rest[0]).exists(), rest[0]


def test_the_pages_name_commands_that_exist(tools: dict[str, Any]) -> None:
    found = set()
    for name in ("README.md", "CONTRIBUTING.md", "AGENTS.md", "ARCHITECTURE.md"):
        found |= set(re.findall(r"python tools\.py ([a-z-]+)", (ROOT / name).read_text()))
    assert found and found <= set(tools["TASKS"])


def test_a_command_runs_and_says_how_it_ended(tools: dict[str, Any], capfd: pytest.CaptureFixture[str]) -> None:
    assert tools["main"]([]) == 0
    assert tools["main"](["chek"]) == 2
    tools["TASKS"]["fails"] = "", [[sys.executable, "-c", "import sys; sys.exit(3)"], ["never"]]
    assert tools["main"](["fails"]) == 3
    tools["TASKS"]["gone"] = "", [["everstep-no-such-program"]]
    assert tools["main"](["gone"]) == 127 and "everstep-no-such-program is not there" in capfd.readouterr().err
    tools["TASKS"]["echoes"] = "", [[sys.executable, "-c", "import sys; print(sys.argv[1:])"]]
    assert tools["main"](["echoes", "a", "-b"]) == 0 and "['a', '-b']" in capfd.readouterr().out
