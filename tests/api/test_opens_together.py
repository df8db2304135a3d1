"""A worker opens all leases that it holds at one ps in one request."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from everstep.api.protocol_driver import OpenTogether, together
from everstep.ids import LeaseNo, Slot
from everstep.model.shard import Lease, shard_key
from everstep.net.messages import OPEN_TOGETHER
from everstep.tables.worker_protocol import SendOpen, WorkerAction, WorkFinished


def lease(number: int) -> Lease:
    return Lease(LeaseNo(number), shard_key(0, 0, number), 0, 10)


actions = st.lists(
    st.one_of(
        st.builds(lambda ps, number: SendOpen(Slot(ps), lease(number)), st.integers(0, 2), st.integers(1, 60)),
        st.just(WorkFinished()),
    ),
    max_size=80,
)


@given(actions)
def test_each_lease_is_opened_once_for_each_time_in_its_order_and_no_request_has_too_many(
    wanted: list[WorkerAction],
) -> None:
    out = together(wanted)
    for ps in (Slot(0), Slot(1), Slot(2)):
        asked = [a.lease for a in wanted if isinstance(a, SendOpen) and a.ps == ps]
        found = [a for a in out if isinstance(a, OpenTogether) and a.ps == ps]
        assert [one for a in found for one in a.leases] == asked
        assert all(1 <= len(a.leases) <= OPEN_TOGETHER for a in found)
        assert len(found) == -(-len(asked) // OPEN_TOGETHER)
    assert sum(isinstance(a, WorkFinished) for a in out) == sum(isinstance(a, WorkFinished) for a in wanted)
