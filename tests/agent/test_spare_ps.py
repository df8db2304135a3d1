"""A ps that is started ahead takes the place of the next one that is ordered, and leaves nothing behind."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

import msgspec
import pytest
from test_agent import Stage, gone, until

from everstep.agent import agent as agent_module
from everstep.agent import spare_ps
from everstep.agent.spare_ps import SparePs, environment
from everstep.model.member import Role
from everstep.platforms.local import LocalProcess
from everstep.ps.spare import FLAG, PsRole

WAITS = """
import time
from everstep.ps.spare import wait_for_role
role = wait_for_role()
if role is not None:
    print("role", *role.arguments, flush=True)
    time.sleep(600)
"""


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Processes that only wait for their role, started ahead at once."""
    monkeypatch.setattr(agent_module, "SPARE_AFTER_S", 0.01)
    monkeypatch.setattr(agent_module, "PS_GRACE_S", 0.1)
    monkeypatch.setattr(agent_module, "KILL_AFTER_S", 0.5)
    monkeypatch.setattr(spare_ps, "python_argv", lambda module, *args: [sys.executable, "-c", WAITS, *args])


def spare_of(stage: Stage, other_than: int = 0) -> int:
    found: list[int] = []

    def look() -> bool:
        spare = stage.agent._spare
        if spare is not None and spare.process.pid != other_than:
            found.append(spare.process.pid)
        return bool(found)

    until(look)
    return found[0]


def protected(stage: Stage, parity: str = "4+1") -> None:
    stage.agent.spec = msgspec.structs.replace(stage.agent.spec, parity=parity)


@pytest.mark.processes
@pytest.mark.usefixtures("quick")
def test_the_next_ps_is_the_one_that_was_started_ahead(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stage = Stage(tmp_path, monkeypatch)
    protected(stage)
    spares: list[int] = []
    log = stage.run_dir / "logs" / "ps-0.log"

    def play() -> None:
        stage.start(Role.PS, 1)
        killed = stage.pid(Role.PS, 1)
        for incarnation in (2, 3):
            spares.append(spare_of(stage, spares[-1] if spares else 0))
            os.kill(killed, signal.SIGKILL)
            stage.told.wait_for(lambda n=incarnation: len(stage.told.exits()) == n - 1)  # type: ignore[misc]
            stage.start(Role.PS, incarnation)
            killed = stage.pid(Role.PS, incarnation)
            assert killed == spares[-1]
            until(lambda n=incarnation: f"role {stage.run_dir} 0 {n} node0" in log.read_text())  # type: ignore[misc]
        spares.append(spare_of(stage, spares[-1]))

    assert stage.run(play).exit_code == 0
    assert all(gone(pid) for pid in spares)


@pytest.mark.processes
@pytest.mark.usefixtures("quick")
def test_a_spare_that_died_is_no_ps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stage = Stage(tmp_path, monkeypatch)
    protected(stage)

    def play() -> None:
        stage.start(Role.PS, 1)
        first = spare_of(stage)
        os.kill(first, signal.SIGKILL)
        until(lambda: stage.agent._spare is None)
        stage.start(Role.PS, 2)
        assert stage.pid(Role.PS, 2) != first

    stage.run(play)


@pytest.mark.processes
@pytest.mark.usefixtures("quick")
def test_nothing_is_started_ahead_without_parity(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stage = Stage(tmp_path, monkeypatch)
    protected(stage, "0")

    def play() -> None:
        stage.start(Role.PS, 1)
        stage.pid(Role.PS, 1)

    stage.run(play)
    assert "spare" not in (stage.run_dir / "logs" / "agent.log").read_text()


@pytest.mark.processes
def test_a_spare_ends_with_whoever_started_it(tmp_path: Path) -> None:
    """The real process: it has no role yet, and its socket ends."""
    (tmp_path / "logs").mkdir()
    spare = SparePs(tmp_path, environment(tmp_path, "node0"))
    try:
        assert FLAG in Path(f"/proc/{spare.process.pid}/cmdline").read_text().split("\0")
        spare._conn.close()
        assert spare.process.wait(60.0)
        assert spare.process.reap() == 0
    finally:
        spare.end()


@pytest.mark.processes
def test_a_role_that_cannot_be_is_refused_in_its_own_log(tmp_path: Path) -> None:
    """The real process takes its arguments from its role, and writes to the log of its role."""
    (tmp_path / "logs").mkdir()
    spare = SparePs(tmp_path, environment(tmp_path, "node0"))
    log = tmp_path / "logs" / "ps-0.log"
    process: LocalProcess | None = spare.become("ps:0", PsRole((str(tmp_path), "none", "1", "node0"), str(log)))
    try:
        assert process is not None and process.name == "ps:0"
        assert process.wait(60.0) and process.reap() == 2
        assert "argument slot: invalid int value: 'none'" in log.read_text()
    finally:
        spare.end()
