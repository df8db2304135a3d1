"""``everstep explain`` follows chains from cause to effect: a death, the new placement, the new process."""

from __future__ import annotations

import gzip
from pathlib import Path

import pytest

from everstep.brain.brain import Brain
from everstep.brain.events import (
    MASTER,
    Fact,
    MasterStarted,
    MemberJoined,
    MirrorsReady,
    NodeJoined,
    PartitionsReady,
    ProcessExited,
    Sender,
    by_ps,
)
from everstep.cli.explain import chain, explain
from everstep.config.spec import JobSpec
from everstep.errors import ConfigError
from everstep.ids import Incarnation, NodeId, Slot
from everstep.machines.causes import Causes
from everstep.machines.dispatch import Dispatch
from everstep.model.member import Address, Role
from everstep.model.reasons import Arrival
from everstep.net.messages import GetSpec
from everstep.storage.journal import Journal, read_journal

RECORDED = Path(__file__).parents[1] / "storage" / "recorded"
NODE, ONE = NodeId("node0"), Incarnation(1)
AGENT = Sender("agent", node=NODE)


class Job:
    """A master of three ps with parity, told by requests."""

    def __init__(self, run_dir: Path) -> None:
        self.brain, self.at = Brain(), 0.0
        self.journal = Journal(run_dir / "journal.sqlite")
        self.machine = Dispatch(
            self.brain, self._now, self.journal.append, lambda f, who: self.machine.tell(f, who), {}
        )
        self.machine.tell(MasterStarted(ONE, JobSpec(ps=3, partitions=4, parity="2+1")))
        self.say(NodeJoined(NODE, "", 0, 0), AGENT)
        for slot in range(3):
            self.joins(slot, 1)

    def _now(self) -> float:
        self.at += 1.0
        return self.at

    def say(self, fact: Fact, who: Sender) -> int:
        """The number of its entry."""
        return int(self.machine.dispatch(fact, who).seq)

    def joins(self, slot: int, life: int) -> int:
        hello = MemberJoined(Role.PS, Slot(slot), Incarnation(life), NODE, 1, Address(NODE, f"sock/ps-{slot}.sock"))
        return self.say(hello, by_ps(Slot(slot), Incarnation(life)))


def test_a_death_the_new_placement_and_the_new_process_are_one_chain(tmp_path: Path) -> None:
    job = Job(tmp_path)
    placement = job.brain.placement
    assert placement is not None
    for mirror in placement.mirrors:
        job.say(MirrorsReady((mirror.id,)), by_ps(mirror.at, ONE))
    died = job.say(ProcessExited(Role.PS, Slot(1), ONE, -9), AGENT)
    placement = job.brain.placement
    assert placement is not None and placement.version > 1
    owned = placement.owned_by(Slot(0))
    got = job.say(PartitionsReady(placement.version, tuple(owned), Arrival.REBUILT), by_ps(Slot(0), ONE))
    back = job.joins(1, 2)
    job.journal.close()

    stamped = {
        entry.seq: (entry.event.sender, entry.event.cause) for entry in read_journal(tmp_path / "journal.sqlite")
    }
    assert stamped[1] == (MASTER, 0)
    assert stamped[died] == (AGENT, 0), "nobody told it to die"
    assert stamped[got] == (by_ps(Slot(0), ONE), died)
    assert stamped[back] == (by_ps(Slot(1), Incarnation(2)), died)

    text = "\n".join(explain(tmp_path, "ps:1"))
    assert f"because of event {died} (ps:1 #1 ended: it was killed by SIGKILL)" in text
    assert f"because of event {back} (ps:1 #2 joined) with pid=1, incarnation=2\n" in text
    behind = text[text.index("(ps:1 #2 joined)") :]
    assert f"which came of event {died} (ps:1 #1 ended: it was killed by SIGKILL)" in behind

    lines = list(chain(tmp_path, died))
    assert f"event {died}: ps:1 #1 ended: it was killed by SIGKILL" in lines[0]
    whole = "\n".join(lines)
    order = ["ps:1: lost", "recover partitions", "ps:1: restart"]
    order += [f"event {got}: ps:0 #1", f"event {back}: ps:1 #2 joined"]
    at = [whole.index(words) for words in order]
    assert at == sorted(at), whole
    from_the_end = "\n".join(chain(tmp_path, back))
    assert f"event {died}:" in from_the_end and f"event {got}:" not in from_the_end
    with pytest.raises(ConfigError, match="there is no event 999"):
        list(chain(tmp_path, 999))


def test_a_query_that_this_master_does_not_take_is_refused(tmp_path: Path) -> None:
    job = Job(tmp_path)
    answer = job.machine.dispatch(GetSpec(), Sender("command"))
    assert "does not take it" in answer.error
    job.journal.close()


def test_chains_of_a_journal_of_before_are_found(tmp_path: Path) -> None:
    path = tmp_path / "journal.sqlite"
    path.write_bytes(gzip.decompress((RECORDED / "ps.sqlite.gz").read_bytes()))
    assert not any(entry.event.cause for entry in read_journal(path))
    text = "\n".join(explain(tmp_path))
    assert "(ps:1 #2 joined)" in text and "which came of event 68 (ps:1 #1 ended: it was killed by SIGKILL)" in text
    whole = "\n".join(chain(tmp_path, 68))
    assert whole.index("job: recover partitions") < whole.index("ps:1: restart") < whole.index("ps:1 #2 joined")


def test_few_causes_are_remembered(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("everstep.machines.causes.KEPT", 2)
    path = tmp_path / "journal.sqlite"
    path.write_bytes(gzip.decompress((RECORDED / "ps.sqlite.gz").read_bytes()))
    brain, causes = Brain(), Causes()
    for entry in read_journal(path):
        causes.note(entry.seq, entry.event, brain.handle(entry.event))
        assert len(causes._by) <= 2
