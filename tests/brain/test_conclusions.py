"""What nobody would ever tell is concluded, instead of waited for without end."""

from __future__ import annotations

import pytest
from test_machines_of_ps import Job

from everstep.brain import events as said
from everstep.brain.events import RULES
from everstep.ids import Slot
from everstep.model.member import MemberState, Role
from everstep.policies.node_selection import HOME_NODE

LAST = Slot(5)


@pytest.mark.parametrize("concludes", [True, False])
def test_a_ps_that_was_told_to_end_before_it_began_has_left_when_its_agent_does_not_know_it(
    concludes: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Seed 11416 of suspended jobs: the agent lost its connection, and with it the order to start the ps and the one to
    end it. The map waited for that ps' hello, so that the next loss was never made good. (False: as masters of before
    did; their journals are replayed so.)"""
    monkeypatch.setitem(RULES, "concludes", concludes)
    job = Job(ps=6, parity="3+1", partitions=12)
    job.join(HOME_NODE)
    lost = job.brain.members.servers[LAST].member
    job.tell(said.ProcessExited(Role.PS, LAST, lost.incarnation, -9))
    job.tell(said.ScaleAsked(Role.PS, 5))
    (order,) = [one for one in job.starting if one.slot == LAST]
    assert [s.incarnation for s in job.stopping] == [order.incarnation]
    job.starting.clear()
    job.stopping.clear()

    servers = job.brain.members.servers
    running = tuple((Role.PS, slot, servers[slot].member.incarnation, 7) for slot in map(Slot, range(5)))
    job.tell(said.NodeJoined(HOME_NODE, "", 1, 8, running))
    state = servers[LAST].member.state
    assert state is (MemberState.LEFT if concludes else MemberState.STARTING)

    job.settle()
    first = servers[Slot(0)].member
    job.tell(said.ProcessExited(Role.PS, first.slot, first.incarnation, -9))
    job.settle()
    assert job.brain.partitions.at_rest() is concludes
