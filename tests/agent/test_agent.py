"""The agent's loop with real processes; the master and its orders are scripted here, so every race can be staged."""

from __future__ import annotations

import os
import resource
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from everstep.agent import agent as agent_module
from everstep.agent.agent import Agent, JobOutcome, free_number, last_error_line
from everstep.agent.mastersilence import CutOff
from everstep.brain.events import (
    DrainAsked,
    FinishJob,
    Ok,
    ProcessExited,
    RaiseMemory,
    Refused,
    StartProcess,
    StopAsked,
    StopProcess,
    SuspendAsked,
)
from everstep.config.spec import JobSpec
from everstep.errors import DeadlineError
from everstep.ids import Incarnation, NodeId, Slot
from everstep.model.decision import Decision
from everstep.model.member import Role
from everstep.model.notice import Notice
from everstep.model.process_size import ProcessSize
from everstep.net.messages import RequestType
from everstep.platforms.local import ended
from everstep.platforms.notices import Change

NODE, WHY = NodeId("node0"), Decision("why", "a test")

pytestmark = pytest.mark.processes

SLEEP = "import time; time.sleep(600)"


def until(what: Callable[[], object]) -> None:
    end = time.monotonic() + 60
    while not what():
        assert time.monotonic() < end, "it never happened"
        time.sleep(0.01)


class Told:
    """A control connection that takes note; ``away`` makes the master unreachable; ``refuses`` so many
    wishes that a node be emptied."""

    def __init__(self) -> None:
        self.requests: list[RequestType] = []
        self.away = False
        self.refuses = 0
        self.seen = threading.Condition()

    def call(self, request: RequestType, timeout_s: float) -> Ok | Refused:
        if self.away:
            time.sleep(0.01)
            raise DeadlineError("away")
        with self.seen:
            self.requests.append(request)
            self.seen.notify_all()
            if isinstance(request, DrainAsked) and self.refuses:
                self.refuses -= 1
                return Refused("no other ps could take its buckets")
        return Ok()

    def close(self) -> None: ...

    @property
    def connects(self) -> int:
        return 1

    @property
    def unheard_s(self) -> float:
        return 1e9 if self.away else 0.0

    @property
    def refused_s(self) -> float:
        return 0.0

    def exits(self) -> list[ProcessExited]:
        return [r for r in self.requests if isinstance(r, ProcessExited)]

    def wait_for(self, what: Callable[[], object]) -> None:
        with self.seen:
            assert self.seen.wait_for(what, 60), self.requests


class Stage:
    """An agent whose processes run the code given here; ``play`` runs beside its loop and drives it."""

    def __init__(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, keeps_master: bool = True) -> None:
        self.code = {"everstep.master": SLEEP, "everstep.ps": SLEEP}
        real = agent_module.python_argv

        def argv(module: str, *args: str) -> list[str]:
            return [sys.executable, "-c", self.code[module]] if module in self.code else real(module, *args)

        monkeypatch.setattr(agent_module, "python_argv", argv)
        self.run_dir = tmp_path / "run"
        for name in ("logs", "sock"):
            (self.run_dir / name).mkdir(parents=True)
        script = tmp_path / "train.py"
        script.write_text(SLEEP)
        self.script = script
        self.told = Told()
        self.said: list[str] = []
        self.agent = Agent(
            JobSpec(script=str(script)),
            self.run_dir,
            NodeId("node0"),
            lambda _: self.told,
            self.said.append,
            keeps_master=keeps_master,
        )
        self.failure: BaseException | None = None

    def run(self, play: Callable[[], None]) -> JobOutcome:
        def act() -> None:
            try:
                play()
            except BaseException as error:
                self.failure = error
            finally:
                self.finish(0)

        thread = threading.Thread(target=act, daemon=True)
        thread.start()
        outcome = self.agent.run()
        thread.join(30)
        if self.failure is not None:
            raise self.failure
        return outcome

    def finish(self, code: int, error: str = "") -> None:
        self.agent.on_order(FinishJob(code, error))

    def start(self, role: Role, incarnation: int, slot: int = 0) -> None:
        self.agent.on_order(StartProcess(NODE, role, Slot(slot), Incarnation(incarnation), WHY))

    def pid(self, role: Role, incarnation: int, slot: int = 0) -> int:
        """The process's id, once it runs."""
        end = time.monotonic() + 60
        while time.monotonic() < end:
            for r, s, i, pid in self.agent.hello().running:
                if (r, s, i) == (role, slot, incarnation) and pid:
                    return pid
            time.sleep(0.01)
        raise AssertionError(f"{role}:{slot} #{incarnation} never ran: {self.agent.hello()}")

    def master_pid(self, other_than: int = 0) -> int:
        found: list[int] = []

        def look() -> bool:
            master = self.agent._master  # (None again any moment: the loop runs meanwhile)
            if master is not None and master.pid != other_than:
                found.append(master.pid)
            return bool(found)

        until(look)
        return found[0]


@pytest.fixture
def stage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Stage:
    # processes of a stage do not end by themselves when told to finish
    monkeypatch.setattr(agent_module, "PS_GRACE_S", 0.1)
    monkeypatch.setattr(agent_module, "KILL_AFTER_S", 0.5)
    return Stage(tmp_path, monkeypatch)


def gone(pid: int) -> bool:
    try:
        fd = os.pidfd_open(pid)
    except ProcessLookupError:
        return True
    try:
        return ended(fd, 10.0)
    finally:
        os.close(fd)


def gone_now(pid: int) -> bool:
    return not Path(f"/proc/{pid}").exists()


def test_killed_members_are_reported_and_everything_ends_with_the_job(stage: Stage) -> None:
    pids: list[int] = []

    def play() -> None:
        for incarnation in (1, 2):  # every recovery twice in a row
            for role in (Role.WORKER, Role.PS):
                stage.start(role, incarnation)
                stage.start(role, incarnation)  # said again: nothing new
                pid = stage.pid(role, incarnation)
                pids.append(pid)
                os.kill(pid, signal.SIGKILL)
                report = ProcessExited(role, Slot(0), Incarnation(incarnation), -signal.SIGKILL)
                stage.told.wait_for(lambda report=report: report in stage.told.requests)  # type: ignore[misc]
        stage.start(Role.WORKER, 3)
        stage.start(Role.PS, 3)
        pids.extend((stage.pid(Role.WORKER, 3), stage.pid(Role.PS, 3), stage.master_pid()))

    assert stage.run(play).exit_code == 0
    assert all(gone(pid) for pid in pids)
    assert len(stage.told.exits()) >= 4
    assert list((stage.run_dir / "sock").iterdir()) == []


def test_a_newer_incarnation_replaces_an_older_one_that_still_runs(stage: Stage) -> None:
    def play() -> None:
        stage.start(Role.WORKER, 1)
        old = stage.pid(Role.WORKER, 1)
        stage.start(Role.WORKER, 2)
        assert stage.pid(Role.WORKER, 2) != old
        assert gone(old)
        stage.start(Role.WORKER, 1)  # a late order changes nothing
        assert stage.pid(Role.WORKER, 2)

    stage.run(play)


def test_a_ps_that_dies_is_told_at_once_and_the_next_one_is_started_when_it_is_gone(stage: Stage) -> None:
    """Its memory may be gigabytes, and takes a while to be free."""

    def play() -> None:
        stage.start(Role.PS, 1)
        old = stage.pid(Role.PS, 1)
        entry = stage.agent._running[Role.PS, Slot(0)]
        for _ in range(2):
            stage.agent.post(lambda: stage.agent._dies(entry, -signal.SIGKILL))
        stage.told.wait_for(stage.told.exits)
        stage.start(Role.PS, 2)
        stage.start(Role.PS, 3)
        until(lambda: stage.agent._newest[Role.PS, Slot(0)] == 3)
        time.sleep(0.2)
        assert stage.agent._running[Role.PS, Slot(0)].pid == 0 and not gone_now(old)
        os.kill(old, signal.SIGKILL)
        assert stage.pid(Role.PS, 3) != old
        assert not stage.agent._dying
        exits = [(e.incarnation, e.status) for e in stage.told.exits()]
        assert exits == [(1, -signal.SIGKILL), (2, -signal.SIGKILL)]
        stage.agent.post(lambda: stage.agent._dies(entry, -signal.SIGKILL))  # late

    assert stage.run(play).exit_code == 0


def test_a_job_may_end_while_a_ps_dies(stage: Stage) -> None:
    pids: list[int] = []

    def play() -> None:
        stage.start(Role.PS, 1)
        pids.append(stage.pid(Role.PS, 1))
        entry = stage.agent._running[Role.PS, Slot(0)]
        stage.agent.post(lambda: stage.agent._dies(entry, -signal.SIGKILL))
        stage.told.wait_for(stage.told.exits)
        stage.start(Role.PS, 2)
        threading.Timer(0.3, os.kill, (pids[0], signal.SIGKILL)).start()

    assert stage.run(play).exit_code == 0
    assert all(gone(pid) for pid in pids)


def test_end_is_sigterm_then_sigkill_and_harmless_when_repeated(stage: Stage) -> None:
    stage.script.write_text(
        "import signal, time, pathlib, os\nsignal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
        f"pathlib.Path({str(stage.script.parent / 'deaf')!r}).write_text('')\ntime.sleep(600)\n"
    )

    def play() -> None:
        stage.start(Role.WORKER, 1)
        pid = stage.pid(Role.WORKER, 1)
        deaf = stage.script.parent / "deaf"
        until(deaf.exists)
        for _ in range(3):
            stage.agent.on_order(StopProcess(NODE, Role.WORKER, Slot(0), Incarnation(1), 0.2, WHY))
        assert gone(pid)
        stage.told.wait_for(stage.told.exits)
        stage.agent.on_order(StopProcess(NODE, Role.WORKER, Slot(0), Incarnation(1), 0.2, WHY))
        assert [e.status for e in stage.told.exits()] == [-signal.SIGKILL]

    stage.run(play)


def test_an_exit_while_the_master_is_away_stays_in_hello_until_it_is_taken_note_of(stage: Stage) -> None:
    def play() -> None:
        stage.start(Role.PS, 1)
        pid = stage.pid(Role.PS, 1)
        stage.told.away = True
        os.kill(pid, signal.SIGKILL)
        assert gone(pid)
        assert (Role.PS, 0, 1, pid) in stage.agent.hello().running
        stage.told.away = False
        stage.told.wait_for(stage.told.exits)
        until(lambda: stage.agent.hello().running == ())

    stage.run(play)


def test_killed_master_is_restarted_twice(stage: Stage) -> None:
    def play() -> None:
        pid = stage.master_pid()
        for _ in range(2):
            os.kill(pid, signal.SIGKILL)
            pid = stage.master_pid(other_than=pid)

    assert stage.run(play).exit_code == 0
    assert sum("master lost (signal 9 (SIGKILL))" in line for line in stage.said) == 2


def test_killed_template_reports_its_workers_and_comes_back_twice(stage: Stage) -> None:
    def play() -> None:
        for incarnation in (1, 2):
            stage.start(Role.WORKER, incarnation)
            worker = stage.pid(Role.WORKER, incarnation)
            assert stage.agent._template is not None
            os.kill(stage.agent._template.process.pid, signal.SIGKILL)
            stage.told.wait_for(lambda n=incarnation: len(stage.told.exits()) == n)  # type: ignore[misc]
            assert gone(worker)
        stage.start(Role.WORKER, 3)
        assert stage.pid(Role.WORKER, 3)

    assert stage.run(play).exit_code == 0
    assert [e.status for e in stage.told.exits()][:2] == [-signal.SIGKILL] * 2


def test_a_master_that_cannot_live_ends_the_job_in_one_line(stage: Stage) -> None:
    stage.code["everstep.master"] = "import sys; sys.exit('Traceback: boom')"
    stage.agent._master_budget.first_pause_s = 0.001
    stage.agent._master_budget.longest_pause_s = 0.001
    outcome = stage.run(lambda: until(lambda: stage.agent.outcome))
    assert outcome.exit_code == 4
    assert "died 10 times in a row" in outcome.error and "boom" in outcome.error and "\n" not in outcome.error


def test_a_master_that_says_why_it_cannot_go_on_is_not_restarted(stage: Stage) -> None:
    stage.code["everstep.master"] = "import sys; print('everstep: port 7000 is in use', file=sys.stderr); sys.exit(4)"
    outcome = stage.run(lambda: until(lambda: stage.agent.outcome))
    assert (outcome.exit_code, outcome.error) == (4, "port 7000 is in use")
    assert not any("restarting" in line for line in stage.said)


def test_the_scripts_error_is_shown_once_with_its_log(stage: Stage) -> None:
    stage.script.write_text("def f():\n    raise ValueError('no good')\nf()\n")

    def play() -> None:
        stage.start(Role.WORKER, 1)
        stage.told.wait_for(stage.told.exits)
        stage.finish(1, stage.told.exits()[0].error)

    outcome = stage.run(play)
    assert (outcome.exit_code, outcome.error) == (1, "worker:0: ValueError: no good (train.py:2)")
    assert outcome.detail.startswith("Traceback") and outcome.log.endswith("worker-0.log")


@pytest.mark.parametrize("signo", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_signals_ask_the_master_to_stop_and_exit_by_their_number(stage: Stage, signo: int) -> None:
    old = signal.signal(signo, signal.SIG_DFL)  # not ignored, as under nohup

    def play() -> None:
        stage.start(Role.WORKER, 1)
        stage.pid(Role.WORKER, 1)
        os.kill(os.getpid(), signo)
        stage.told.wait_for(lambda: any(isinstance(r, StopAsked) for r in stage.told.requests))

    try:
        assert stage.run(play).exit_code == (143 if signo == signal.SIGTERM else 130)
    finally:
        signal.signal(signo, old)


def test_a_node_that_is_reclaimed_is_emptied_before_it_leaves(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stage = Stage(tmp_path, monkeypatch, keeps_master=False)

    def play() -> None:
        stage.start(Role.PS, 1)
        stage.pid(Role.PS, 1)
        os.kill(os.getpid(), signal.SIGTERM)
        stage.told.wait_for(lambda: any(isinstance(r, DrainAsked) for r in stage.told.requests))
        assert DrainAsked(NodeId("node0"), agent_module.RECLAIM_S) in stage.told.requests
        assert not stage.told.exits()  # it goes on until the master has emptied it
        stage.agent.on_order(StopProcess(NODE, Role.PS, Slot(0), Incarnation(1), 5.0, WHY))
        stage.told.wait_for(stage.told.exits)

    outcome = stage.run(play)
    assert outcome.exit_code == 143 and any("emptied" in line for line in stage.said)


BINDS_LATE = """
import pathlib, resource, time
while not pathlib.Path({go!r}).exists(): time.sleep(0.01)
resource.setrlimit(resource.RLIMIT_DATA, (300 << 20, resource.getrlimit(resource.RLIMIT_DATA)[1]))
time.sleep(600)
"""


def test_a_ps_that_runs_gets_more_memory_also_if_it_has_just_begun(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mb = 1 << 20
    stage = Stage(tmp_path, monkeypatch)
    stage.code["everstep.ps"] = BINDS_LATE.format(go=str(tmp_path / "go"))

    def limit(pid: int) -> int:
        return resource.prlimit(pid, resource.RLIMIT_DATA)[0]

    def play() -> None:
        stage.agent.on_order(StartProcess(NODE, Role.PS, Slot(0), Incarnation(1), WHY, size=ProcessSize(0, 300 * mb)))
        pid = stage.pid(Role.PS, 1)
        for incarnation, size in ((2, 900), (1, 700)):  # (the first is of another life)
            stage.agent.on_order(RaiseMemory(NODE, Role.PS, Slot(0), Incarnation(incarnation), size * mb))
        (tmp_path / "go").touch()
        until(lambda: limit(pid) == 700 * mb)
        stage.agent.on_order(RaiseMemory(NODE, Role.PS, Slot(0), Incarnation(1), 600 * mb))
        stage.agent.on_order(RaiseMemory(NODE, Role.PS, Slot(0), Incarnation(1), 800 * mb))
        until(lambda: limit(pid) == 800 * mb)
        assert stage.agent._running[(Role.PS, Slot(0))].size == ProcessSize(0, 800 * mb)

    stage.run(play)


def _going(stage: Stage, lead_s: float, over: bool = False) -> None:
    change = Change(Notice("a test", "k", "it goes", time.time() + lead_s), over)
    stage.agent.post(lambda: stage.agent._noticed(change))


def test_a_ps_stays_behind_its_time_until_it_is_empty(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A notice of 1 s: the ps is not ended by its own agent when that is over, and the agent ends once it is empty."""
    monkeypatch.setattr(agent_module, "_SPARE_S", 0.0)
    stage = Stage(tmp_path, monkeypatch, keeps_master=False)

    def play() -> None:
        stage.start(Role.PS, 1)
        stage.pid(Role.PS, 1)
        _going(stage, 1.0)
        until(lambda: any("is not empty: it goes on until this machine is gone" in line for line in stage.said))
        assert not stage.told.exits() and not stage.agent._leaving
        stage.agent.on_order(StopProcess(NODE, Role.PS, Slot(0), Incarnation(1), 5.0, WHY))
        stage.told.wait_for(stage.told.exits)

    outcome = stage.run(play)
    assert outcome.exit_code == 143 and stage.agent.emptied_for is not None


def test_a_node_that_could_not_be_emptied_asks_again_until_the_notice_is_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(agent_module, "ASK_AGAIN_S", 0.05)
    stage = Stage(tmp_path, monkeypatch, keeps_master=False)
    stage.told.refuses = 10**9

    def asked() -> int:
        return sum(isinstance(r, DrainAsked) for r in stage.told.requests)

    def play() -> None:
        stage.start(Role.PS, 1)
        stage.pid(Role.PS, 1)
        _going(stage, 60.0)
        stage.told.wait_for(lambda: asked() >= 3)
        assert not stage.told.exits() and sum("not emptied" in line for line in stage.said) == 1, stage.said
        _going(stage, 60.0, over=True)
        until(lambda: stage.agent.emptied_for is None)
        stage.told.refuses = 2
        _going(stage, 60.0)
        before = asked()
        stage.told.wait_for(lambda: asked() >= before + 3)
        stage.agent.on_order(StopProcess(NODE, Role.PS, Slot(0), Incarnation(1), 5.0, WHY))
        stage.told.wait_for(stage.told.exits)

    assert stage.run(play).exit_code == 143
    assert any("is over: it goes; nothing was moved" in line for line in stage.said)


def test_sigterm_behind_a_notice_leaves_what_moves_its_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stage = Stage(tmp_path, monkeypatch, keeps_master=False)
    stage.agent._reclaim_s = 0.5

    def play() -> None:
        stage.start(Role.PS, 1)
        stage.pid(Role.PS, 1)
        _going(stage, 60.0)
        until(lambda: stage.agent.emptied_for)
        os.kill(os.getpid(), signal.SIGTERM)
        until(lambda: any("this node leaves in at most" in line for line in stage.said))
        stage.told.wait_for(stage.told.exits)

    assert stage.run(play).exit_code == 143
    assert not any("stopping at once" in line for line in stage.said)


def test_ctrl_z_is_declined(stage: Stage) -> None:
    def play() -> None:
        stage.start(Role.PS, 1)
        stage.pid(Role.PS, 1)
        os.kill(os.getpid(), signal.SIGTSTP)
        until(lambda: any("suspended" in line for line in stage.said))

    assert stage.run(play).exit_code == 0


def test_a_second_ctrl_c_kills_at_once(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(agent_module, "STOP_ANSWER_S", 600.0)
    stage.told.away = True

    def play() -> None:
        stage.start(Role.PS, 1)
        stage.pid(Role.PS, 1)
        os.kill(os.getpid(), signal.SIGINT)
        until(lambda: stage.agent._asked_to_stop)
        os.kill(os.getpid(), signal.SIGINT)
        until(lambda: stage.agent._closed)

    assert stage.run(play).exit_code == 130
    assert stage.said[-1] == "stopping at once"


def test_a_worker_gets_the_lowest_number_on_its_node_that_is_free() -> None:
    assert [free_number(taken) for taken in ([], [0, 1], [1, 2], [0, 2, 3])] == [0, 2, 0, 1]


def test_last_error_line_of_a_log(tmp_path: Path) -> None:
    log = tmp_path / "master.log"
    assert last_error_line(log) == ""
    log.write_text("everstep: disk full\nTraceback\nKeyError: 'x'\n")
    assert last_error_line(log) == "disk full"
    log.write_text("Traceback\nKeyError: 'x'\n\n")
    assert (last_error_line(log), last_error_line(log, any_line=True)) == ("", "KeyError: 'x'")


def test_an_agent_elsewhere_gives_up_when_the_master_is_gone_for_long(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(agent_module, "LOOK_S", 0.05)
    stage = Stage(tmp_path, monkeypatch, keeps_master=False)
    stage.agent._cut_off = CutOff(0.5, 0.5)

    def play() -> None:
        stage.start(Role.WORKER, 1)
        stage.pid(Role.WORKER, 1)
        stage.told.away = True
        until(lambda: stage.agent.outcome)

    outcome = stage.run(play)
    assert outcome.exit_code == 4 and "could not be reached" in outcome.error
    assert "ending what runs here" in "".join(stage.said)


@pytest.mark.parametrize("keeps_master", [True, False])
def test_a_second_notice_counts_if_it_leaves_less_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, keeps_master: bool
) -> None:
    """The first notice says two minutes, the second one 10 s, the third one five minutes; a fourth is over."""
    stage = Stage(tmp_path, monkeypatch, keeps_master)
    agent = stage.agent

    def notice(key: str, lead_s: float, over: bool = False) -> None:
        change = Change(Notice("a test", key, f"event {key}", time.time() + lead_s), over)
        agent.post(lambda: agent._noticed(change))

    def asked() -> list[float]:
        return [r.deadline_s for r in stage.told.requests if isinstance(r, DrainAsked | SuspendAsked)]

    def play() -> None:
        stage.start(Role.WORKER, 1)
        stage.pid(Role.WORKER, 1)
        notice("first", 120.0)
        stage.told.wait_for(lambda: len(asked()) == 1)
        notice("third", 300.0)
        notice("second", 10.0)
        notice("fourth", 1.0, over=True)
        stage.told.wait_for(lambda: len(asked()) == 2)
        assert agent.within(600.0) <= 7.0, "the earlier one counts"

    outcome = stage.run(play)
    assert outcome.exit_code == 143
    first, second = asked()
    assert 100.0 < first <= 117.0 and 1.0 <= second <= 7.0, asked()
    assert any("event second" in text and "earlier than was said before" in text for text in stage.said)
    assert not any("event third" in text for text in stage.said)
