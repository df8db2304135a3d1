"""The spot policy of a running job: what it is shown, how its choice holds, and what a wrong one costs."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from msgspec import structs

from everstep.brain.brain import Brain
from everstep.brain.events import (
    CapacityChanged,
    Event,
    FactType,
    MasterStarted,
    NodeJoined,
    NodeLost,
    Note,
)
from everstep.config.load import check_policy_module, load_spec
from everstep.config.spec import JobSpec
from everstep.errors import ConfigError
from everstep.ids import Incarnation, NodeId
from everstep.master.spot_policy import LOOK_S, SpotController, refuse_plan
from everstep.master.user_call import LIMIT_S
from everstep.model.capacity import CapacityStep, Market
from everstep.model.decision import Decision
from everstep.model.spot_choice import ReclaimsSeen
from everstep.monitor.reclaims import MOMENT_S, ReclaimCounter
from everstep.policies.node_selection import HOME_NODE
from everstep.policies.spot import SpotPlan, by_hazard, hazard_of

HOUR_S = 3600.0


def machine(name: str, step: CapacityStep, market: Market = Market.SPOT) -> CapacityChanged:
    return CapacityChanged(NodeId(name), step, "g5", "a", market)


def node(name: str, market: Market | None = Market.SPOT) -> NodeJoined:
    return NodeJoined(NodeId(name), "", 1, 0, hardware="g5", market=market)


def counted(*told: tuple[float, FactType]) -> ReclaimCounter:
    counter = ReclaimCounter()
    for at, fact in told:
        counter.take(Event(at, fact))
    return counter


# ------------------------------------------------------------ the count


def test_machines_that_are_taken_back_are_counted_and_those_that_are_given_back_were_held() -> None:
    found = counted(
        (1000.0, machine("a", CapacityStep.GRANTED)),
        (1001.0, node("a")),  # (its hello is no second machine)
        (1100.0, machine("b", CapacityStep.GRANTED)),
        (1200.0, machine("b", CapacityStep.GIVEN_BACK)),
        (1300.0, NodeLost(NodeId("a"), "silent")),  # its source says when it goes
        (1400.0, machine("a", CapacityStep.TAKEN_BACK)),
        (1400.0, machine("a", CapacityStep.TAKEN_BACK)),
    )
    assert found.seen(9000.0) == ReclaimsSeen(400.0 + 100.0, 1, 1, 0, 1) and not found.held


def test_a_node_that_joined_as_spot_counts_and_one_that_stays_does_not() -> None:
    found = counted(
        (1000.0, node("a")),
        (1000.0, node("b", Market.ON_DEMAND)),
        (1000.0, node("c", None)),
        (1500.0, NodeLost(NodeId("a"), "silent")),
        (1500.0, NodeLost(NodeId("b"), "silent")),
    )
    assert found.seen(2000.0) == ReclaimsSeen(500.0, 1, 1, 0, 1)


def test_machines_that_go_together_are_one_moment() -> None:
    told = [(1000.0, machine(name, CapacityStep.GRANTED)) for name in "abcd"]
    gone = [(1100.0, "a"), (1100.0 + MOMENT_S, "b"), (1101.0 + MOMENT_S, "c"), (5000.0, "d")]
    found = counted(*told, *((at, machine(name, CapacityStep.TAKEN_BACK)) for at, name in gone))
    seen = found.seen(6000.0)
    assert (seen.reclaims, seen.moments, seen.shared, seen.most) == (4, 3, 1, 2)
    assert hazard_of(seen).together == pytest.approx(1 / 3) and hazard_of(seen).most == 2


def test_a_clock_that_goes_back_adds_nothing() -> None:
    found = counted((1000.0, machine("a", CapacityStep.GRANTED)), (10.0, node("b")), (1060.0, node("b")))
    assert found.seen(1060.0).held_s == pytest.approx(2 * 60.0 - 60.0 + 60.0)


# ------------------------------------------------------------ a job


class Job:
    """A brain with a controller, whose calls are made at once, unless ``hangs``."""

    def __init__(
        self, policy: str = "hazard", hangs: bool = False, folder: Path = Path(), market: Any = "on_demand"
    ) -> None:
        self.brain, self.at, self.notes = Brain(), 1000.0, list[Decision]()
        script = str(folder / "train.py")
        self.spec = JobSpec(workers=1, spot_policy=policy, checkpoint_every="10m", capacity="trace:x", script=script)
        self.spec = structs.replace(self.spec, market=market)
        self.hangs, self.calls = hangs, 0
        self.hanging: list[Callable[[], None]] = []
        self.tell(MasterStarted(Incarnation(1), self.spec))
        self.controller = self.made()

    def made(self) -> SpotController:
        return SpotController(self.brain, self.spec, self.tell, self.call)

    def call(self, call: Callable[[], None]) -> None:
        self.calls += 1
        if self.hangs:
            self.hanging.append(call)
        else:
            call()

    def returns(self) -> None:
        """Let the call that hangs end."""
        self.hanging.pop()()

    def tell(self, fact: FactType) -> None:
        event = Event(self.at, fact)
        self.notes += [i.decision for i in self.brain.handle(event) if isinstance(i, Note)]
        if hasattr(self, "controller"):
            self.controller.take(event)

    def run(self, seconds: float) -> None:
        end = self.at + seconds
        while self.at < end:
            self.at += 1.0
            self.controller.tick(self.at)

    @property
    def interval_s(self) -> float:
        return self.brain.state.spot.interval_s

    def decided(self, action: str) -> list[Decision]:
        return [note for note in self.notes if note.action == action]


def test_the_interval_follows_what_was_seen() -> None:
    job = Job()
    job.run(2 * LOOK_S)
    assert job.calls == 0 and job.interval_s == 0.0, "no machine that may be taken back was there"
    for name in "abcdefgh":
        job.tell(machine(name, CapacityStep.GRANTED))
    job.run(3.0)
    calm_s = job.interval_s
    (first,) = job.decided("checkpoint interval")
    assert calm_s > 0 and "spot policy hazard: a checkpoint every" in first.reason
    assert first.rejected[0] == "go on with 10m"
    job.run(10 * LOOK_S)
    assert len(job.decided("checkpoint interval")) == 1, "what differs little is no news"
    for name in "abcdefg":
        job.run(20.0)
        job.tell(machine(name, CapacityStep.TAKEN_BACK))
        job.tell(machine(name, CapacityStep.GRANTED))
    job.run(3.0)
    assert 0 < job.interval_s < calm_s / 1.25
    seen = job.brain.state.spot.seen
    assert seen.reclaims == 7 and job.interval_s == pytest.approx(
        by_hazard(job.controller._seen(job.at)).interval_s,  # type: ignore[arg-type]
        rel=0.25,
    )


def test_a_new_master_goes_on_from_what_was_seen() -> None:
    job = Job()
    for name in "abc":
        job.tell(machine(name, CapacityStep.GRANTED))
    job.run(100.0)
    job.tell(machine("a", CapacityStep.TAKEN_BACK))
    job.run(3.0)
    before = job.brain.state.spot
    job.brain = Brain.restore(job.brain.snapshot())
    assert job.brain.state.spot == before and before.seen.reclaims == 1
    job.controller = job.made()
    job.tell(node("b"))
    job.run(3.0)
    job.tell(NodeLost(NodeId("b"), "silent"))
    job.run(3.0)
    assert job.brain.state.spot.seen.reclaims == 2


def write(folder: Path, text: str) -> None:
    (folder / "spotty.py").write_text("from everstep.policies.spot import SpotPlan\n" + text)


def test_a_policy_of_ones_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(tmp_path))
    write(
        tmp_path,
        "def mine(seen):\n    return SpotPlan(33.0, '2+1', 4, 'mine\\nand yours')\n"
        "def wrong(seen):\n    return 7\n"
        "def never(seen):\n    return SpotPlan(0.0)\n"
        "def nan(seen):\n    return SpotPlan(float('nan'))\n"
        "def text(seen):\n    return SpotPlan('soon')\n"
        "def parity(seen):\n    return SpotPlan(60.0, 'lots')\n"
        "def leaves(seen):\n    raise SystemExit(3)\n",
    )
    job = Job("spotty:mine", folder=tmp_path)
    job.tell(machine("a", CapacityStep.GRANTED))
    job.run(3.0)
    (note,) = job.decided("checkpoint interval")
    assert job.interval_s == 33.0 and note.inputs["safe_ps"] == 4 and note.inputs["parity"] == "2+1"
    assert note.reason == "spot policy spotty:mine: a checkpoint every 33 s: mine and yours"
    assert any("a running job keeps its own (0)" in words for words in note.rejected)
    assert any("no --reliable ps" in words for words in note.rejected)
    for name, words in [
        ("wrong", "it returned 7: expected a SpotPlan"),
        ("never", "its interval_s is 0.0: a running job needs at least 1"),
        ("nan", "its interval_s is nan"),
        ("text", "it returned SpotPlan(interval_s='soon'"),
        ("parity", "expected K+M such as '4+1'"),
        ("leaves", "it raised SystemExit: 3"),
        ("absent", "it raised AttributeError"),
    ]:
        bad = Job(f"spotty:{name}", folder=tmp_path)
        bad.tell(machine("a", CapacityStep.GRANTED))
        bad.run(5 * LOOK_S)
        (said,) = bad.decided("disable the spot policy")
        assert words in said.reason and "\n" not in said.reason and bad.interval_s == 0.0
        assert bad.calls == 1, "it is asked no more"


def test_a_policy_that_never_returns_is_given_up_and_the_job_goes_on() -> None:
    job = Job(hangs=True)
    job.tell(machine("a", CapacityStep.GRANTED))
    job.run(LIMIT_S + 5)
    (said,) = job.decided("disable the spot policy")
    assert "it takes longer than 10 s" in said.reason and job.brain.state.spot.failed
    job.run(5 * LOOK_S)
    assert job.calls == 1 and len(job.decided("disable the spot policy")) == 1


@pytest.mark.parametrize("jump_s", [7200.0, -7200.0, -500.0, LIMIT_S + 1])
def test_a_clock_that_jumps_disables_no_spot_policy_and_keeps_none_from_looking(jump_s: float) -> None:
    job = Job(hangs=True)
    job.tell(machine("a", CapacityStep.GRANTED))
    job.run(2.0)
    assert job.calls == 1
    job.at += jump_s  # in the middle of a call
    job.run(LIMIT_S / 2)
    assert not job.decided("disable the spot policy") and not job.brain.state.spot.failed
    job.returns()
    job.run(2.0)
    assert job.interval_s > 0 and not job.brain.state.spot.failed
    job.at += jump_s  # between two calls
    job.run(LOOK_S + 2)
    assert job.calls >= 2, "it waits for its old clock"
    job.run(LIMIT_S + 1)
    assert job.decided("disable the spot policy"), "a call that never returns is still given up"


def test_plans_that_a_running_job_cannot_follow() -> None:
    assert refuse_plan(SpotPlan(60.0)) == "" and refuse_plan(SpotPlan(60.0, "1+1", 3, "why")) == ""
    assert "safe_ps is -1" in refuse_plan(SpotPlan(60.0, "", -1))


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        (
            {"spot_policy": "sometimes"},
            "spot_policy = 'sometimes' (--spot-policy): no such spot policy; there are none,",
        ),
        ({"spot_policy": "mine:not a name"}, "expected module:callable"),
        ({"spot_policy": "hazard", "checkpoint_every": "10m"}, "no machine of this job can be taken back"),
        ({"spot_policy": "hazard", "capacity": "trace:x"}, "give a first one: checkpoint_every 10m"),
        ({"spot_policy": "hazard", "capacity": "trace:x", "checkpoint_every": "9batches"}, "give a first one"),
    ],
)
def test_settings_that_go_together(settings: dict[str, object], says: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_spec(None, settings, dict.fromkeys(settings, ""))
    assert str(caught.value).startswith(f"spot_policy = {settings['spot_policy']!r}") and says in str(caught.value)


def test_a_module_that_is_not_there_is_named_before_the_start(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"spot_policy = 'nowhere_at_all:f': there is no module"):
        check_policy_module("nowhere_at_all:f", tmp_path, "spot_policy")
    write(tmp_path, "def mine(seen): ...\n")
    with pytest.raises(ConfigError, match=r"has no 'mein'; did you mean 'mine'"):
        check_policy_module("spotty:mein", tmp_path, "spot_policy")


@pytest.mark.parametrize("market", ["on_demand", "spot"])
def test_whether_a_machine_that_stays_has_all_state(market: str) -> None:
    """The ps are on the first machine, which stays unless the job says that it may go, too."""
    job = Job(market=market)
    job.tell(NodeJoined(HOME_NODE, "", 2, 2))
    assert [s.member.node for s in job.brain.members.servers.values() if s.running] == [HOME_NODE]
    for name in "ab":
        job.tell(machine(name, CapacityStep.GRANTED))
    seen = job.controller._seen(job.at)
    assert seen is not None and seen.saves_itself and seen.stays is (market == "on_demand")
