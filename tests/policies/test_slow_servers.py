"""A slow ps gives partitions away, gets them back when it is well, and is left alone where that would cost more."""

from __future__ import annotations

import math
import random

import msgspec
import pytest
from slow_ps import Pss
from straggler_jobs import NODES, server, worker

from everstep.config.parity import parse_code
from everstep.ids import Incarnation, PartitionId, Slot
from everstep.model.member import Role
from everstep.model.observation import Observations, Pace
from everstep.model.plan import KillRestart, MovePartitions, Plan
from everstep.policies.stragglers.servers import PATIENCE, replacing_saves_s, waited_share
from everstep.policies.stragglers.shared import SharedState, shared
from everstep.policies.stripes import arrange


@pytest.mark.parametrize("s", [2.0, 4.0, 8.0])
def test_parts_become_alike_in_one_round(s: float) -> None:
    job = Pss(lambda window: s)
    healthy_s = job.part_s(1)
    job.run(20)
    assert len(job.plans) == 1 and job.plans[0][0] <= PATIENCE + 1
    assert job.slowest_s() <= 1.07 * healthy_s * 4 / (3 + 1 / s), "as fast as can be, but for whole buckets"


def test_what_is_fixed_of_a_part_takes_one_more_round() -> None:
    job = Pss(lambda window: 4.0, fixed=4.0)
    job.run(40)
    assert len(job.plans) == 2
    assert job.state is not None and job.state.servers.fixed == pytest.approx(4.0)
    best_s = min(max(4 * (4 + n), 4 + -(-(64 - n) // 3)) for n in range(1, 17)) * 0.001
    assert job.slowest_s() <= 1.12 * best_s


@pytest.mark.parametrize("fixed", [0.0, 4.0])
def test_a_ps_that_is_well_again_gets_its_partitions_back(fixed: float) -> None:
    job = Pss(lambda window: 4.0 if window < 60 else 1.0, fixed=fixed)
    job.run(60)
    few = job.count(0)
    job.run(62)
    assert job.count(0) == few <= 6, "not for a moment"
    job.run(100)
    assert [plan.decision.action for at, plan in job.plans if at >= 60] == ["give partitions back"]
    assert job.count(0) >= 15
    plans = len(job.plans)
    job.run(200)
    assert len(job.plans) == plans


def test_half_well_is_half_way_back() -> None:
    job = Pss(lambda window: 8.0 if window < 60 else 2.0)
    job.run(60)
    few = job.count(0)
    job.run(100)
    assert few < job.count(0) < 12


@pytest.mark.parametrize("spell", [1, 2])
def test_moments_are_left_alone(spell: int) -> None:
    job = Pss(lambda window: 8.0 if window % 7 < spell else 1.0)
    job.run(200)
    assert not job.plans


@pytest.mark.parametrize("spell", [4, 6, 9, 15])
def test_one_that_is_slow_every_now_and_then_soon_is_left_alone(spell: int) -> None:
    """Moved there and back for each spell, up to fifty times, its partitions would be in the wrong place as often."""
    job = Pss(lambda window: 4.0 if window % (2 * spell) < spell else 1.0)
    job.run(400)
    assert len(job.plans) <= 8
    assert not [at for at, _ in job.plans if at > 200]


def test_noise_moves_nothing() -> None:
    rng = random.Random(7)
    job = Pss(lambda window: 1.0, noise=lambda slot, window: rng.uniform(0.75, 1.3))
    job.run(300)
    assert not job.plans


def test_noise_does_not_move_them_to_and_fro() -> None:
    rng = random.Random(8)
    job = Pss(lambda window: 4.0, noise=lambda slot, window: rng.uniform(0.9, 1.1))
    job.run(300)
    assert 1 <= len(job.plans) <= 3 and 4 <= job.count(0) <= 6


@pytest.mark.parametrize("seed", range(3))
def test_where_all_readings_jump_partitions_soon_stay_where_they_are(seed: int) -> None:
    """A machine that many share: each ps answers late for moments, by turns. Every plan is out of date when its
    partitions have arrived: 39 to 60 of them, and up to a sixth slower than doing nothing, before plans were judged."""
    rng, windows = random.Random(seed), 400
    late = [[rng.gauss(0.0, 0.6) for _ in range(4)]]
    for _ in range(windows):  # half of what it was, and something new
        late.append([0.5 * was + 0.75**0.5 * rng.gauss(0.0, 0.6) for was in late[-1]])
    job = Pss(lambda window: 1.0, noise=lambda slot, window: math.exp(late[window][slot]))
    took_s = idle_s = 0.0
    for window in range(windows):
        noise = [math.exp(late[window][slot]) for slot in range(4)]
        took_s += max(job.part_s(slot) * n for slot, n in enumerate(noise))
        idle_s += 16 * 0.001 * max(noise)
        job.run(window + 1)
    assert len(job.plans) <= 25
    assert took_s < idle_s / 0.94


def test_a_ps_of_hot_partitions_is_not_slow() -> None:
    owned = [tuple(range(i * 16, i * 16 + 16)) for i in range(3)]
    busy = msgspec.structs.replace(server(2, 0.008, owned[2]), bytes_per_s=4e6)
    calm = [msgspec.structs.replace(server(i, 0.002, owned[i]), bytes_per_s=1e6) for i in range(2)]
    assert not _plans(Observations(at=0.0, window_s=10.0, ps_places=NODES, remaining_s=36e3, servers=(*calm, busy)), 12)


def test_nothing_goes_where_it_must_not_be() -> None:
    owned = [tuple(range(i * 16, i * 16 + 16)) for i in range(3)]
    mirrors = tuple(map(PartitionId, range(32, 48, 2)))
    seen = Observations(
        at=0.0,
        servers=(
            msgspec.structs.replace(server(0, 0.002, owned[0]), closed=mirrors),
            server(1, 0.002, owned[1]),
            server(2, 0.008, owned[2]),
        ),
    )
    move = _plans(seen, 6)[0].actions[0]
    assert isinstance(move, MovePartitions) and len(move.owners) == 11
    assert all(slot == 1 for partition, slot in move.owners.items() if partition in mirrors)


@pytest.mark.parametrize(("parity", "ps"), [("1+1", 3), ("1+1", 4), ("2+1", 4), ("4+2", 8)])
def test_partitions_find_a_way_past_a_ps_that_has_their_mirrors(parity: str, ps: int) -> None:
    """One ps may have the mirrors of all that another one has: what it gets comes from a third one."""
    code, partitions = parse_code(parity), 16 * ps
    layout = arrange(code, partitions, map(Slot, range(ps)))
    stripes = [set(layout.stripe(code, j)) for j in range(len(layout.sites))]
    servers = []
    for slot in range(ps):
        owned = tuple(b for b, owner in enumerate(layout.owner) if owner == slot)
        beside = [b for b in range(partitions) if slot in stripes[b // code.k] and layout.owner[b] != slot]
        closed = tuple(map(PartitionId, beside))
        seen = server(slot, 0.008 if slot == 0 else 0.002, owned)
        servers.append(msgspec.structs.replace(seen, closed=closed))
    move = _plans(Observations(at=0.0, servers=tuple(servers)), 6)[0].actions[0]
    assert isinstance(move, MovePartitions)
    counts = [layout.owner.count(Slot(slot)) for slot in range(ps)]
    for partition, slot in move.owners.items():
        assert partition not in servers[slot].closed
        counts[layout.owner[partition]] -= 1
        counts[slot] += 1
    assert counts[0] <= 6 and max(counts[1:]) - min(counts[1:]) <= 1


def test_moves_that_the_brain_refused_are_tried_with_other_partitions() -> None:
    owned = [tuple(range(i * 16, i * 16 + 16)) for i in range(3)]
    seen = Observations(
        at=0.0, servers=(server(0, 0.002, owned[0]), server(1, 0.002, owned[1]), server(2, 0.008, owned[2]))
    )
    first, second = (p.actions[0] for p in _plans(seen, 14)[:2])
    assert isinstance(first, MovePartitions) and isinstance(second, MovePartitions)
    assert first.owners != second.owners


def test_partitions_go_also_to_a_ps_without_a_reading() -> None:
    owned = [tuple(range(i * 16, i * 16 + 16)) for i in range(3)]
    seen = Observations(
        at=0.0, servers=(server(0, 0.002, owned[0]), server(1, 0.0, owned[1]), server(2, 0.008, owned[2]))
    )
    move = _plans(seen, 6)[0].actions[0]
    assert isinstance(move, MovePartitions) and set(move.owners.values()) == {0, 1}


def test_a_slow_ps_whose_answers_take_no_longer_any_more_keeps_what_it_has() -> None:
    owned = [tuple(range(i * 16, i * 16 + 16)) for i in range(3)]
    seen = Observations(
        at=0.0, servers=(server(0, 0.002, owned[0]), server(1, 0.002, owned[1]), server(2, 0.0021, owned[2][:3]))
    )  # a request's fixed part: seven times as long for each partition, and nobody waits for it
    assert not _plans(seen, 20)


def test_it_is_replaced_where_others_do_its_work_and_workers_wait_for_rows() -> None:
    owned = [tuple(range(i * 16, i * 16 + 16)) for i in range(3)]
    servers = (server(0, 0.002, owned[0]), server(1, 0.002, owned[1]), server(2, 0.002, owned[2][:4]))
    waiting = msgspec.structs.replace(worker(0, 0.01, 32), short=Pace(phases={"pull": 5.0, "forward": 5.0}))
    busy = msgspec.structs.replace(waiting, short=Pace(phases={"pull": 0.0, "forward": 10.0, "outside": 9.0}))
    seen = Observations(at=0.0, ps_places=NODES, remaining_s=36e3, servers=servers, workers=(waiting,))
    plan = _plans(seen, 12)[0]
    assert plan.actions == (KillRestart(role=Role.PS, slot=Slot(2), incarnation=Incarnation(1)),)
    assert not _plans(msgspec.structs.replace(seen, workers=(busy,)), 20), "nobody waits for it"
    assert not _plans(msgspec.structs.replace(seen, remaining_s=60.0), 20), "too late"
    assert not _plans(msgspec.structs.replace(seen, ps_places=(), places=NODES), 20), "only workers go there"


def test_in_its_own_place_it_is_started_anew_once() -> None:
    owned = [tuple(range(i * 16, i * 16 + 16)) for i in range(3)]
    servers = (server(0, 0.002, owned[0]), server(1, 0.002, owned[1]), server(2, 0.002, owned[2][:4]))
    seen = Observations(at=0.0, ps_places=NODES[:1], remaining_s=36e3, servers=servers)
    state: SharedState | None = None
    asked = []
    for window in range(40):
        if window == 20:  # until then no plan was followed: something else came between
            slow = msgspec.structs.replace(servers[2], incarnation=Incarnation(2))
            seen = msgspec.structs.replace(seen, servers=(*servers[:2], slow), restarts=1)
        plan, state = shared(msgspec.structs.replace(seen, at=400.0 * window), state)
        asked += [window] if plan is not None else []
    assert len(asked) > 1 and max(asked) < 20


def test_it_is_not_replaced_when_it_is_well_again_and_has_to_wait_for_its_partitions() -> None:
    slow = {*range(20), *range(40, 60), *range(80, 110)}
    job = Pss(lambda window: 4.0 if window in slow else 1.0, fixed=6.0)
    job.run(111)
    job.facts = {"ps_places": NODES, "remaining_s": 36e3}
    assert job.state is not None and job.state.servers.windows(Slot(0)) >= 12 and job.count(0) <= 4
    job.run(200)
    assert "restart" not in {plan.decision.action for _, plan in job.plans}
    assert job.count(0) >= 13


def test_what_replacing_one_saves() -> None:
    assert replacing_saves_s(4, 4.0, 1.0, 100.0) == pytest.approx(100 * 3 / 16)
    assert replacing_saves_s(4, 4.0, 0.1, 100.0) == pytest.approx(10.0), "no more than what is waited"
    assert replacing_saves_s(4, 1.0, 1.0, 100.0) == 0.0
    assert waited_share([]) == 1.0


def _plans(seen: Observations, windows: int) -> list[Plan]:
    """What is planned where every window looks like this one."""
    state: SharedState | None = None
    out = []
    for window in range(windows):
        plan, state = shared(msgspec.structs.replace(seen, at=10.0 * window), state)
        out += [plan] if plan is not None else []
    return out


def test_owners_are_in_proportion() -> None:
    job = Pss(lambda window: 3.0, ps=3, partitions=30)
    job.run(20)
    move = job.plans[0][1].actions[0]
    assert isinstance(move, MovePartitions) and all(job.owner[PartitionId(b)] != 0 for b in move.owners)
    assert [job.count(slot) for slot in range(3)] == [4, 13, 13]
