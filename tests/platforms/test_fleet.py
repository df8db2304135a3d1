"""What is done about machines that come and go, and the sources that they come from."""

from __future__ import annotations

import queue
import threading
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from everstep.errors import ConfigError, PlatformError
from everstep.ids import NodeId
from everstep.model.capacity import CapacityNews, CapacityStep, Gone, Grant, Market, Offer, Warned
from everstep.platforms.agents import AgentEnded
from everstep.platforms.capacity import JoinedHosts, ThisMachine, first_machine
from everstep.platforms.command_capacity import CommandCapacity
from everstep.platforms.fleet import (
    STARTS,
    Complain,
    Fleet,
    ReleaseMachine,
    Remember,
    StartAgent,
    StopAgent,
    WarnAgent,
)
from everstep.platforms.fleet_runner import FleetRunner, StandIns

NODE = NodeId("n1")
OFFER = Offer("g5", "eu-1a", Market.SPOT, 0.3)
GRANT = Grant(NODE, OFFER)
NEWS = st.one_of(
    *(st.sampled_from([Grant(NodeId(n), OFFER), Warned(NodeId(n), 10.0), Gone(NodeId(n))]) for n in ("n1", "n2", "n3")),
    st.tuples(st.sampled_from(["n1", "n2", "n3"]), st.sampled_from([0, 1, -9]), st.sampled_from([1.0, 100.0])),
)


def test_a_machine_comes_is_warned_and_goes() -> None:
    fleet = Fleet()
    assert fleet.handle(GRANT) == [Remember(GRANT, CapacityStep.GRANTED), StartAgent(GRANT, 0)]
    assert fleet.handle(Warned(NODE, 30.0)) == [Remember(GRANT, CapacityStep.WARNED), WarnAgent(NODE, 30.0)]
    assert fleet.handle(Warned(NODE, 20.0)) == []
    assert fleet.ended(NODE, 143, 5.0) == []  # it goes: nobody starts it again
    assert fleet.handle(Gone(NODE)) == [StopAgent(NODE), Remember(GRANT, CapacityStep.TAKEN_BACK)]
    assert fleet.handle(GRANT) == [Remember(GRANT, CapacityStep.GRANTED, life=1), StartAgent(GRANT, 1)]
    assert fleet.over() == [ReleaseMachine(NODE)] and fleet.held == ()


def test_a_machine_that_the_job_has_emptied_is_given_back_once() -> None:
    fleet = Fleet()
    fleet.handle(GRANT)
    assert fleet.unwanted(NODE) == [
        StopAgent(NODE),
        ReleaseMachine(NODE),
        Remember(GRANT, CapacityStep.GIVEN_BACK),
    ]
    assert fleet.unwanted(NODE) == [] and fleet.held == ()


def test_an_agent_that_ends_again_and_again_gives_its_machine_back() -> None:
    fleet = Fleet()
    fleet.handle(GRANT)
    for n in range(1, STARTS):
        complaint, start = fleet.ended(NODE, 1, 2.0)
        assert isinstance(complaint, Complain) and isinstance(start, StartAgent)
        assert start.life == n and start.after_s == 4 ** (n - 1) and fleet.starts(start)
    actions = fleet.ended(NODE, 1, 2.0)
    assert [type(a) for a in actions] == [Complain, ReleaseMachine, Remember]
    assert not fleet.starts(start)


@settings(max_examples=60, deadline=None)
@given(st.lists(NEWS, max_size=30))
def test_agents_and_machines_stay_together(steps: list[CapacityNews | tuple[str, int, float]]) -> None:
    """Whatever a source says, in whatever order: at most one agent for a machine, and none without."""
    fleet = Fleet()
    started: set[str] = set()
    lives: dict[str, list[int]] = {}
    for step in steps:
        actions = fleet.ended(NodeId(step[0]), *step[1:]) if isinstance(step, tuple) else fleet.handle(step)
        for action in actions:
            match action:
                case StartAgent(grant, life, after_s):
                    assert after_s > 0 or grant.node not in started
                    started.add(grant.node)
                    lives.setdefault(grant.node, []).append(life)
                case StopAgent(node) | ReleaseMachine(node):
                    started.discard(node)
        assert started == set(fleet.held)
    assert all(seen == list(range(len(seen))) for seen in lives.values())


def test_this_machine_is_granted_once_and_stays() -> None:
    here = ThisMachine(Offer("cpu"))
    assert here.offers() == (Offer("cpu"),)
    here.request(3)
    here.request(3)
    assert here.watch() == (Grant(NodeId("node0"), Offer("cpu")),) and here.watch() == () and here.offers() == ()
    assert first_machine("cpu", "z", Market.SPOT).offer == Offer("cpu", "z", Market.SPOT)


def test_people_are_asked_for_hosts_once() -> None:
    said: list[str] = []
    hosts = JoinedHosts("h:1", "d/secret", said.append)
    hosts.request(1)
    hosts.request(2)
    assert said == ["other nodes: everstep agent --join h:1 --secret-file (a copy of d/secret)"]
    assert hosts.offers() == () and hosts.watch() == ()


# ------------------------------------------------------------ a user's own script


def script(folder: Path, body: str) -> str:
    path = folder / "cloud.sh"
    path.write_text(f"echo $EVERSTEP_JOIN $@ >> {folder}/calls\n{body}")
    return f"sh {path}"


def test_a_script_gives_machines(tmp_path: Path) -> None:
    body = """case $1 in
offers) echo '{"class": "g5", "zone": "eu-1a", "market": "spot", "price": 0.3, "count": 4}' ;;
watch) echo '{"what": "granted", "node": "n1", "class": "g5", "zone": "eu-1a", "market": "spot", "price": 0.3}'
       echo '{"what": "warned", "node": "n1", "in_s": 30}'
       echo '{"what": "gone", "node": "n1"}' ;;
esac"""
    cloud = CommandCapacity(script(tmp_path, body), {"EVERSTEP_JOIN": "h:1"})
    assert cloud.offers() == (Offer("g5", "eu-1a", Market.SPOT, 0.3, 4),)
    cloud.request(2)
    cloud.request(1, Market.ON_DEMAND)
    cloud.release(NODE)
    assert cloud.watch() == (GRANT, Warned(NODE, 30.0), Gone(NODE))
    assert (tmp_path / "calls").read_text().splitlines() == [
        "h:1 offers",
        "h:1 request 2",
        "h:1 request 1 on_demand",
        "h:1 release n1",
        "h:1 watch",
    ]


@pytest.mark.parametrize(
    ("body", "says"),
    [
        ("exit 3", "watch: exit code 3"),
        ("echo hello", "watch: its line 'hello' is not what was expected"),
        ("""echo '{"what": "granted", "node": "../x"}'""", "is not what was expected"),
        ("""echo '{"what": "granted", "node": "node0"}'""", "is no name of a further node"),
        ("""echo '{"what": "granted", "node": "n", "zone": "a\\u0007"}'""", "is not what was expected"),
        ("""echo '{"what": "granted", "node": "n", "price": -1}'""", "is not what was expected"),
        ("yes", "watch: prints more than 64 KB"),
        ("sleep 60", "watch: did not end within 0.2 s"),
    ],
)
def test_a_script_that_fails_is_one_line(tmp_path: Path, body: str, says: str) -> None:
    limit_s = 0.2 if body.startswith("sleep") else 60.0
    cloud = CommandCapacity(script(tmp_path, body), limit_s=limit_s)
    with pytest.raises(PlatformError) as error:
        cloud.watch()
    assert says in str(error.value) and "\n" not in str(error.value), str(error.value)


def test_what_a_script_says_before_a_wrong_line_counts(tmp_path: Path) -> None:
    body = """echo '{"what": "gone", "node": "n1"}'; echo junk; echo '{"what": "gone", "node": "n2"}'"""
    cloud = CommandCapacity(script(tmp_path, body))
    assert cloud.watch() == (Gone(NODE),)
    with pytest.raises(PlatformError, match="junk"):
        cloud.watch()
    assert cloud.watch() == (Gone(NodeId("n2")),)


def test_a_command_that_is_not_there_is_one_line() -> None:
    with pytest.raises(PlatformError, match="offers: cannot be started: No such file"):
        CommandCapacity("/nonexistent/cloud").offers()


# ------------------------------------------------------------ the thread


class Scripted:
    """A source that tells what a test puts into it; ``None`` stands for a failure."""

    name, every_s = "scripted", 0.01

    def __init__(self) -> None:
        self.news: queue.SimpleQueue[CapacityNews | None] = queue.SimpleQueue()
        self.released: list[str] = []
        self.requested: list[int] = []
        self.closed = threading.Event()

    def offers(self) -> tuple[Offer, ...]:
        return ()

    def request(self, count: int) -> None:
        self.requested.append(count)

    def release(self, node: NodeId) -> None:
        self.released.append(node)

    def watch(self) -> tuple[CapacityNews, ...]:
        if self.news.empty():
            return ()
        one = self.news.get()
        if one is None:
            raise PlatformError("it burns")
        return (one,)

    def close(self) -> None:
        self.closed.set()


class Noted:
    """A platform that starts nothing and says what it was told."""

    def __init__(self) -> None:
        self.done: queue.SimpleQueue[tuple[object, ...]] = queue.SimpleQueue()
        self.ends: queue.SimpleQueue[AgentEnded] = queue.SimpleQueue()

    def start(self, grant: Grant, life: int) -> None:
        self.done.put(("start", grant.node, life))

    def warn(self, node: NodeId, in_s: float | None) -> None:
        self.done.put(("warn", node, in_s))

    def stop(self, node: NodeId) -> None:
        self.done.put(("stop", node))

    def ended(self) -> tuple[AgentEnded, ...]:
        return () if self.ends.empty() else (self.ends.get(),)

    def close(self, wait_s: float) -> None:
        self.done.put(("close",))


def test_the_thread_does_what_the_fleet_says() -> None:
    source, platform = Scripted(), Noted()
    facts: queue.SimpleQueue[Remember] = queue.SimpleQueue()
    said: queue.SimpleQueue[str] = queue.SimpleQueue()
    runner = FleetRunner(source, platform, 2, lambda: True, facts.put, said.put)
    runner.start()
    for news in (None, GRANT, Warned(NODE, 5.0), Gone(NODE), Grant(NodeId("n2"), OFFER)):
        source.news.put(news)
    expected = [("start", "n1", 0), ("warn", "n1", 5.0), ("stop", "n1"), ("start", "n2", 0)]
    assert [platform.done.get(timeout=60) for _ in expected] == expected
    assert said.get(timeout=60) == "capacity: scripted: it burns; it is asked again"
    assert [facts.get(timeout=60).step.value for _ in range(4)] == ["granted", "warned", "taken back", "granted"]
    platform.ends.put(AgentEnded(NodeId("n2"), 1, 2.0))
    assert platform.done.get(timeout=60) == ("start", "n2", 1)
    runner.close()
    assert platform.done.get(timeout=60) == ("close",)
    assert source.closed.is_set() and source.released == ["n2"] and source.requested == [2, 0]


class Cloud(Scripted):
    """A source that also has machines that stay."""

    def __init__(self) -> None:
        super().__init__()
        self.asked: queue.SimpleQueue[tuple[int, Market]] = queue.SimpleQueue()

    def request(self, count: int, market: Market = Market.SPOT) -> None:
        self.asked.put((count, market))


def test_the_thread_asks_for_stand_ins_and_gives_back_those_that_were_emptied() -> None:
    source, platform, wanted = Cloud(), Noted(), [None, StandIns(1)]
    runner = FleetRunner(source, platform, 2, lambda: True, lambda fact: None, print, lambda: wanted[-1])
    runner.start()
    assert [source.asked.get(timeout=60) for _ in range(2)] == [(2, Market.SPOT), (1, Market.ON_DEMAND)]
    source.news.put(GRANT)
    assert platform.done.get(timeout=60) == ("start", "n1", 0)
    wanted.append(None)  # the master does not answer
    wanted.append(StandIns(0, (NODE, NodeId("unknown"))))
    assert source.asked.get(timeout=60) == (0, Market.ON_DEMAND)
    assert platform.done.get(timeout=60) == ("stop", "n1")
    runner.close()
    assert source.released == ["n1"] and source.asked.get(timeout=60) == (0, Market.SPOT)


# ------------------------------------------------------------ the setting


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"capacity": "moon:x"}, "'moon:x' is no source of machines"),
        ({"capacity": "trace:"}, "is no source of machines"),
        ({"capacity": "command:x 'y"}, "No closing quotation"),
        ({"capacity": "command:x"}, "give bind HOST:PORT"),
        ({"capacity": "command:x", "bind": "h:1"}, "give capacity_nodes"),
        ({"capacity_speed": 60.0}, "needs capacity: trace:FILE"),
        ({"capacity": "trace:x", "capacity_speed": 0.0}, "capacity_speed"),
        ({"capacity": "trace:x", "capacity_quiet": "soon"}, "expected a span such as '30s'"),
        ({"capacity_nodes": 3}, "needs capacity"),
        ({"zone": "a\nb"}, "zone = 'a\\nb' (--zone): expected one line"),
    ],
)
def test_a_wrong_setting_is_one_line(fields: dict[str, object], says: str) -> None:
    from everstep.config.load import load_spec

    with pytest.raises(ConfigError) as error:
        load_spec(None, fields, {})
    assert says in str(error.value) and "\n" not in str(error.value)
