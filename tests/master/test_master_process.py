"""A real master process, with agents, ps and workers that are only control clients."""

from __future__ import annotations

import json
import queue
import resource
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from everstep.brain.events import (
    EndOfData,
    Fenced,
    FinishJob,
    Granted,
    MemberJoined,
    NodeJoined,
    Ok,
    PlanRegistered,
    ProcessExited,
    Refused,
    Registered,
    ScaleAsked,
    ShardAsked,
    ShardDone,
    StartProcess,
    StopAsked,
    StopProcess,
    Welcome,
)
from everstep.cli.replay import replay
from everstep.config.load import save_spec
from everstep.config.spec import JobSpec
from everstep.ids import Incarnation, NodeId, Slot
from everstep.model.member import Address, Role
from everstep.model.shard import Lease, ShardSchedule
from everstep.net import messages as wire
from everstep.net.auth import Identity, create_secret
from everstep.net.control import ControlClient
from everstep.net.rendezvous import master_address, read_master
from everstep.storage.journal import Journal

pytestmark = [pytest.mark.processes, pytest.mark.cold]

NODE = NodeId("node0")
ONE = Incarnation(1)
LONG_S = 60.0  # a deadline, never waited for when all is well
PLAN = ShardSchedule(name="d", samples=100, shard_samples=10, seed=0)


class Client:
    """One member; ``orders`` and ``welcomes`` collect what it was told."""

    def __init__(
        self,
        stage: Stage,
        role: Any,
        slot: int,
        incarnation: int,
        hello: Callable[[], Any],
        beats: bool,
        beat: Callable[[], wire.Beat] | None = None,
    ) -> None:
        self.orders: queue.Queue[wire.OrderType] = queue.Queue()
        self.welcomes: queue.Queue[Any] = queue.Queue()
        self.slot = slot
        self.control = ControlClient(
            address=lambda: master_address(stage.run_dir),
            run_dir=stage.run_dir,
            secret=stage.secret,
            identity=Identity(
                purpose="control", role=role, slot=Slot(slot), incarnation=Incarnation(incarnation), node=NODE
            ),
            hello=hello,
            on_order=self.orders.put,
            on_welcome=self.welcomes.put,
            beat=(beat or (lambda: wire.Beat())) if beats else None,
            beat_s=0.2,
        )

    def call(self, request: wire.RequestType) -> Any:
        return self.control.call(request, LONG_S)

    def order(self, kind: type) -> Any:
        """The next order of this kind; others before it are dropped."""
        while True:
            order = self.orders.get(timeout=LONG_S)
            if isinstance(order, kind):
                return order


class Stage:
    def __init__(self, run_dir: Path) -> None:
        self.run_dir = run_dir
        (run_dir / "logs").mkdir()
        self.secret = create_secret(run_dir / "secret")
        self.running: list[tuple[Role, Slot, Incarnation, int]] = []
        self.clients: list[Client] = []
        self.masters: list[subprocess.Popen[str]] = []

    def spec(self, **fields: Any) -> None:
        """Nobody is lost by silence, unless ``fields`` say so: all members live in this one process, which may have to
        wait for its turn."""
        usual = {"workers": 1, "ps": 1, "partitions": 4, "suspect_after_s": LONG_S, "lost_after_s": 2 * LONG_S}
        save_spec(self.run_dir, JobSpec(**{**usual, **fields}), {})

    def master(self, limit_bytes: int = 0) -> subprocess.Popen[str]:
        def limits() -> None:
            if limit_bytes:
                resource.setrlimit(resource.RLIMIT_FSIZE, (limit_bytes, limit_bytes))

        command = [sys.executable, "-m", "everstep.master", str(self.run_dir)]
        process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, preexec_fn=limits)
        self.masters.append(process)
        return process

    def agent(self, beat: Callable[[], wire.Beat] | None = None) -> Client:
        """Connected: what is started after it is news to it."""
        hello = lambda: NodeJoined(NODE, "", 0, 0, tuple(self.running))  # noqa: E731
        client = self._client("agent", 0, 0, hello, True, beat)
        assert client.welcomes.get(timeout=LONG_S) == Ok()
        return client

    def ps(self, slot: int = 0) -> Client:
        """A member: the master has taken it up."""
        self.running.append((Role.PS, Slot(slot), ONE, 1))
        address = Address(NODE, f"sock/ps-{slot}.sock")
        hello = lambda: MemberJoined(Role.PS, Slot(slot), ONE, NODE, 1, address)  # noqa: E731
        client = self._client("ps", slot, 1, hello, True)
        assert isinstance(client.welcomes.get(timeout=LONG_S), Welcome)
        return client

    def worker(
        self, slot: int = 0, incarnation: int = 1, leases: Callable[[], list[Lease]] = list, beats: bool = True
    ) -> Client:
        self.running.append((Role.WORKER, Slot(slot), Incarnation(incarnation), 1))

        def hello() -> MemberJoined:
            return MemberJoined(Role.WORKER, Slot(slot), Incarnation(incarnation), NODE, 1, leases=tuple(leases()))

        return self._client("worker", slot, incarnation, hello, beats)

    def _client(
        self,
        role: str,
        slot: int,
        incarnation: int,
        hello: Callable[[], Any],
        beats: bool,
        beat: Callable[[], wire.Beat] | None = None,
    ) -> Client:
        client = Client(self, role, slot, incarnation, hello, beats, beat)
        self.clients.append(client)
        return client

    def close(self) -> None:
        for client in self.clients:
            client.control.close()
        for master in self.masters:
            if master.poll() is None:
                master.kill()
            master.communicate()


@pytest.fixture
def stage(tmp_path: Path) -> Iterator[Stage]:
    made = Stage(tmp_path)
    yield made
    made.close()


SERVERS = ((Slot(0), ONE),)


def finish(agent: Client, ps: Client, master: subprocess.Popen[str]) -> None:
    assert agent.call(ProcessExited(Role.WORKER, Slot(0), ONE, 0)) == Ok()
    assert ps.order(FinishJob).exit_code == 0
    ps.control.close()
    assert master.wait(LONG_S) == 0


def test_kill_9_of_the_master_twice_changes_nothing_for_its_members(stage: Stage) -> None:
    stage.spec()
    masters = [stage.master()]
    agent, ps = stage.agent(), stage.ps()
    held: list[Lease] = []
    worker = stage.worker(leases=lambda: held)
    assert worker.call(PlanRegistered(PLAN)) == Registered(0)
    done: list[Lease] = []
    for ask in range(1, 200):
        answer = worker.call(ShardAsked(0, 1, ask))
        if not isinstance(answer, Granted):
            break
        held.append(answer.lease)
        if len(held) in (4, 8) and len(masters) <= len(held) // 4:
            masters[-1].kill()
            masters[-1].wait()
            masters.append(stage.master())
        lease = held.pop()
        assert worker.call(ShardDone(lease.shard, lease.no, SERVERS)) == Ok()
        done.append(lease)
        if len(done) in (3, 6):
            masters[-1].kill()
            masters[-1].wait()
            masters.append(stage.master())
    assert answer == EndOfData()
    assert sorted(lease.start for lease in done) == list(range(0, 100, 10)), "each shard once"
    assert len(masters) == 3
    info = read_master(stage.run_dir)
    assert info is not None and info.incarnation == 3
    assert worker.call(wire.ValuesReported({"auc": 0.79})) == Ok()
    status = agent.call(wire.GetStatus())
    assert status.failures == {"worker": 0, "ps": 0, "master": 2, "node": 0}
    assert {(m.role, m.incarnation) for m in status.members} == {
        (Role.MASTER, 3),
        (Role.PS, 1),
        (Role.WORKER, 1),
    }
    finish(agent, ps, masters[-1])
    summary = json.loads((stage.run_dir / "summary.json").read_text())
    assert summary["phase"] == "done" and summary["samples_done"] == 100 and summary["values"] == {"auc": 0.79}
    result = replay(stage.run_dir)
    assert result.ok and result.masters == 3, result.lines()


def test_a_silent_worker_is_replaced_and_its_old_life_is_fenced(stage: Stage) -> None:
    stage.spec(suspect_after_s=0.8, lost_after_s=2.5)
    master = stage.master()
    agent, ps = stage.agent(), stage.ps()
    worker = stage.worker(beats=False)
    worker.call(PlanRegistered(PLAN))
    lease = worker.call(ShardAsked(0, 1, 1)).lease
    assert agent.order(StopProcess).slot == 0
    start = agent.order(StartProcess)
    while start.role is not Role.WORKER or start.incarnation < 2:
        start = agent.order(StartProcess)
    assert (start.slot, start.incarnation) == (0, 2)
    assert isinstance(worker.call(ShardDone(lease.shard, lease.no, SERVERS)), Fenced)
    stage.running = [entry for entry in stage.running if entry[0] is Role.PS]
    second = stage.worker(incarnation=2)
    again = second.call(ShardAsked(0, 1, 1)).lease
    assert again.shard == lease.shard and again.no > lease.no
    events = [json.loads(line) for line in (stage.run_dir / "events.jsonl").read_text().splitlines()]
    actions = [event["action"] for event in events if event["member"] == "worker:0"]
    expected = ["joined", "dataset registered", "suspect", "stop", "lost", "shard returned", "waiting", "joined"]
    assert [action for action in actions if action in expected] == expected
    assert master.poll() is None and ps.control.connected


def test_scale_stop_and_refusals(stage: Stage) -> None:
    stage.spec()
    master = stage.master()
    agent, ps = stage.agent(), stage.ps()
    command = stage._client("command", 0, 0, lambda: wire.GetStatus(), False)
    assert command.call(ScaleAsked(Role.WORKER, 2)) == Ok()
    start = agent.order(StartProcess)
    while (start.role, start.slot) != (Role.WORKER, 1):
        start = agent.order(StartProcess)
    assert isinstance(command.call(ScaleAsked(Role.PS, 0)), Refused)
    assert isinstance(command.call(NodeJoined(NodeId("evil"), "", 0, 0, ())), Refused)
    assert isinstance(command.call(MemberJoined(Role.PS, Slot(0), ONE, NODE, 1)), Refused)
    assert isinstance(command.call(ShardAsked(0, 1, 1)), Refused)
    assert command.call(wire.GetSpec()).spec.partitions == 4
    assert command.call(StopAsked("enough")) == Ok()
    assert ps.order(FinishJob).exit_code == 0
    assert agent.order(FinishJob).exit_code == 0
    ps.control.close()
    assert master.wait(LONG_S) == 0
    assert json.loads((stage.run_dir / "summary.json").read_text())["phase"] == "stopped"


def test_a_lost_ps_ends_the_job_with_one_clear_line(stage: Stage) -> None:
    stage.spec(ps=2)
    master = stage.master()
    agent = stage.agent()
    stage.ps(0)
    second = stage.ps(1)
    worker = stage.worker()
    worker.call(PlanRegistered(PLAN))
    assert isinstance(worker.call(ShardAsked(0, 1, 1)), Granted)
    second.control.close()
    assert agent.call(ProcessExited(Role.PS, Slot(1), ONE, -9)) == Ok()
    told = worker.order(FinishJob)
    assert told.exit_code == 4
    assert "ps:1 was lost" in told.error and "2 of 4 partitions" in told.error and "last export" in told.error
    assert "\n" not in told.error
    stage.clients[1].control.close()
    assert master.wait(LONG_S) == 0
    assert json.loads((stage.run_dir / "summary.json").read_text())["exit_code"] == 4


def test_no_space_for_the_journal_ends_the_job_and_says_so(stage: Stage) -> None:
    stage.spec()
    master = stage.master(limit_bytes=400_000)
    agent = stage.agent()
    stage.ps()
    worker = stage.worker()
    worker.call(PlanRegistered(ShardSchedule(name="d", samples=10**9, shard_samples=10, seed=0)))
    assert isinstance(worker.call(ShardAsked(0, 1, 1)), Granted)
    calls = [worker.control.submit(ShardAsked(0, 1, ask), LONG_S) for ask in range(2, 8000)]
    assert agent.order(FinishJob).exit_code == 4
    assert master.wait(LONG_S) == 4
    assert master.stderr is not None
    (line,) = [line for line in master.stderr.read().splitlines() if line.startswith("everstep:")]
    assert "cannot write the journal" in line
    # Whatever was answered is in the journal: nothing is acted on that is not durable.
    granted = 1 + sum(call.done() and not call.exception() and isinstance(call.result(), Granted) for call in calls)
    journal = Journal(stage.run_dir / "journal.sqlite")
    leases = len(journal.restore().brain.leases)
    journal.close()
    assert 0 < granted <= leases


def test_a_second_master_takes_over_and_the_first_one_leaves(stage: Stage) -> None:
    stage.spec()
    first = stage.master()
    agent = stage.agent()
    agent.call(wire.GetStatus())
    second = stage.master()
    deadline = time.monotonic() + LONG_S
    while (info := read_master(stage.run_dir)) is None or info.pid != second.pid:
        assert time.monotonic() < deadline and second.poll() is None
        time.sleep(0.01)
    agent.control.submit(ScaleAsked(Role.WORKER, 2), LONG_S)  # goes to the first one: its connection is still up
    assert first.wait(LONG_S) == 4
    assert first.stderr is not None and "was replaced" in first.stderr.read()
    stage.running.clear()
    assert agent.call(wire.GetStatus()).master_incarnation == 2
    assert second.poll() is None


@pytest.mark.parametrize("case", ["no spec", "damaged journal", "port in use", "no secret"])
def test_a_master_that_cannot_start_says_why_in_one_line(stage: Stage, case: str) -> None:
    stage.spec()
    taken = socket.socket()
    expected = 4
    match case:
        case "no spec":
            (stage.run_dir / "job.json").unlink()
            words, expected = "job.json", 2
        case "damaged journal":
            (stage.run_dir / "journal.sqlite").write_bytes(b"garbage" * 1000)
            words = "damaged or no journal"
        case "port in use":
            taken.bind(("127.0.0.1", 0))
            taken.listen()
            stage.spec(bind=f"127.0.0.1:{taken.getsockname()[1]}")
            words = "is in use"
        case _:
            (stage.run_dir / "secret").unlink()
            words, expected = "secret", 2
    master = stage.master()
    _, text = master.communicate(timeout=LONG_S)
    taken.close()
    assert master.returncode == expected
    (line,) = text.splitlines()
    assert line.startswith("everstep: ") and words in line


def test_sigterm_ends_a_master_but_not_the_job(stage: Stage) -> None:
    stage.spec()
    master = stage.master()
    stage.agent().call(wire.GetStatus())
    master.send_signal(signal.SIGTERM)
    assert master.wait(LONG_S) == 128 + signal.SIGTERM
    assert not (stage.run_dir / "summary.json").exists()


def test_an_agent_that_was_stopped_until_its_node_was_lost_joins_anew(stage: Stage) -> None:
    """Its connection lived on, so it never said hello again, and every slot waited for a place for ever (simulator,
    seed 52577)."""
    stage.spec(suspect_after_s=0.3, lost_after_s=0.6)
    stage.master()
    silent = threading.Event()
    beats = wire.Beat()

    def beat() -> wire.Beat:
        while silent.is_set():
            time.sleep(0.01)
        return beats

    agent = stage.agent(beat)
    assert isinstance(agent.order(StartProcess), StartProcess)
    silent.set()
    events = stage.run_dir / "events.jsonl"
    limit = time.monotonic() + LONG_S
    while "node lost" not in events.read_text() and time.monotonic() < limit:
        time.sleep(0.02)
    silent.clear()
    while agent.order(StartProcess).incarnation < 2:  # the first ones, of before
        pass
