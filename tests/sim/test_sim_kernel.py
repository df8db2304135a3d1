"""Virtual time, pauses, connections: the ground the simulator stands on."""

from __future__ import annotations

import pytest

from everstep.ids import Incarnation, LeaseNo, ShardKey, Slot
from everstep.model.shard import Lease, ShardSchedule, shard_key
from everstep.native.ledger import PushLedger
from everstep.sim.kernel import Conn, Kernel, Network, SimClient, SimProcess, Violation
from everstep.sim.truth import Truth, epoch_fingerprint


def test_events_run_in_order_of_time_and_then_of_asking() -> None:
    kernel, seen = Kernel(0), []
    for name, delay in [("c", 2.0), ("a", 1.0), ("b", 1.0)]:
        kernel.after(delay, seen.append, name)
    kernel.run(1.5)
    assert seen == ["a", "b"] and kernel.now == 1.0
    kernel.run(9.0)
    assert seen == ["a", "b", "c"]


def test_a_stopped_process_acts_when_it_is_continued_and_a_dead_one_never() -> None:
    kernel, seen = Kernel(0), []
    process = SimProcess(kernel, "p", "node0")
    process.pause(5.0)
    process.later(1.0, seen.append, "first")
    process.later(2.0, seen.append, "second")
    kernel.run(4.0)
    assert seen == []
    kernel.run(6.0)
    assert seen == ["first", "second"]
    process.later(1.0, seen.append, "never")
    process.alive = False
    kernel.run(9.0)
    assert seen == ["first", "second"]


class Peer(SimClient):
    def __init__(self, kernel: Kernel) -> None:
        super().__init__(kernel, "client", "node1")
        self.lost: list[Conn] = []

    def connection_lost(self, conn: Conn) -> None:
        self.lost.append(conn)


def test_a_connection_is_in_order_until_it_breaks_and_silent_after() -> None:
    kernel, seen = Kernel(1), []
    net, client, server = Network(kernel), Peer(kernel), SimProcess(kernel, "server", "node0")
    conn = net.connect(client, server)
    for i in range(50):
        net.to_server(conn, seen.append, i)
    kernel.run(1.0)
    assert seen == list(range(50))
    net.loss = 1.0
    net.to_server(conn, seen.append, "lost")
    net.loss = 0.0
    net.to_server(conn, seen.append, "lost too")
    kernel.run(2.0)
    assert seen == list(range(50)) and client.lost == [conn]


def test_a_partition_by_node_or_process_cuts_one_way_or_both() -> None:
    kernel, seen = Kernel(1), []
    net, a, b = Network(kernel), SimProcess(kernel, "a", "node0"), SimProcess(kernel, "b", "node1")
    net.partition("node0", "node1", both=False)
    net.send(a, b, seen.append, "a to b")
    net.send(b, a, seen.append, "b to a")
    kernel.run(1.0)
    assert seen == ["b to a"]
    net.partition("b", "a", both=True)
    net.send(b, a, seen.append, "again")
    kernel.run(2.0)
    assert seen == ["b to a"]


def truth() -> Truth:
    return Truth(ShardSchedule(name="t", samples=20, shard_samples=10, seed=0), epochs=2, partitions=2)


S0, S1, NEXT = (shard_key(0, e, i) for e, i in [(0, 0), (0, 1), (1, 0)])


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        (lambda t: t.applies(0, 0, S0, 3, 6, LeaseNo(5)), "twice"),
        (lambda t: t.applies(0, 1, S0, 0, 3, LeaseNo(4)), "fenced lease"),
        (lambda t: t.applies(0, 0, S0, 8, 12, LeaseNo(5)), "shard 0 is"),
        (lambda t: t.opens(0, S0, LeaseNo(4)), "after the later"),
        (lambda t: t.opens(0, NEXT, LeaseNo(6)), "of epoch 1 opened"),
        (lambda t: t.is_done(S0, LeaseNo(5)), "lacks position 5"),
        (lambda t: t.acknowledges(0, (0, 1), S0, 0, 5), "partition 1 lacks"),
        (lambda t: t.releases(0, (S0,)), "before it was done"),
        (lambda t: t.grants(0, 1, 7, Lease(LeaseNo(9), S1, 10, 20), True), "answered with"),
        (lambda t: t.confirms(Lease(LeaseNo(4), S0, 0, 10), True), "fenced it"),
        (lambda t: t.finished({}), "lacks position"),
    ],
)
def test_the_truth_tells_what_is_wrong(wrong: object, words: str) -> None:
    t = truth()
    t.opens(Slot(0), S0, LeaseNo(5))
    t.applies(Slot(0), 0, S0, 0, 5, LeaseNo(5))  # type: ignore[arg-type]
    t.grants(Slot(0), Incarnation(1), 7, Lease(LeaseNo(5), S0, 0, 10), False)
    with pytest.raises(Violation, match=words):
        wrong(t)  # type: ignore[operator]


def test_the_fingerprint_of_an_epoch_is_that_of_its_batches_in_any_order() -> None:
    ledger = PushLedger(1)
    for shard, start, stop in [(S1, 10, 20), (S0, 0, 10)]:
        ledger.open(shard, start, 1)
        for lo in range(start, stop, 2):
            ledger.push(shard, lo, lo + 2, 1)
    assert ledger.fingerprints() == [epoch_fingerprint(0, 20)]
    assert ShardKey(0) == S0
