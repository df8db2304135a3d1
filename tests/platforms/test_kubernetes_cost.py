"""What a job in a cluster costs: counted at its prices, said, and bounded by its budget."""

from __future__ import annotations

from decimal import Decimal
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from kube_world import START_S, World, job

from everstep.cli.cluster_job import cost_lines, status_lines
from everstep.errors import ConfigError
from everstep.platforms.kubernetes.actions import MasterReport, Seen
from everstep.platforms.kubernetes.job import settings_of
from everstep.platforms.kubernetes.job_cost import LEAVE_S, count
from everstep.platforms.kubernetes.kinds import Condition, JobPhase, Object, name_of
from everstep.platforms.kubernetes.pods import facts_of
from everstep.platforms.kubernetes.reconcile import reconcile

PRICE = {"onDemandHourly": "3.60", "spotHourly": "0.90"}


def priced(budget: str = "", **spec: Any) -> Object:
    roles = {place: {"price": PRICE} for place in ("worker", "ps", "master")}
    cost: Object = {"spotNodeSelector": {"pool": "spot"}}
    if budget:
        cost["budget"] = budget
    return job(**roles, cost=cost, **spec)


def live(world: World, seconds: float, step_s: float = 5.0) -> None:
    """Time passes; the operator looks, pods start and go at once."""
    end = world.now_s + seconds
    while world.now_s < end:
        world.deliver(len(world.log))
        world.work()
        world.leave()
        for name, pod in list(world.pods.items()):
            if pod["status"]["phase"] == "Pending":
                world.run(name, "spot-1" if "worker" in name else "n1")
        world.now_s += step_s


def told(world: World) -> Object:
    return dict((world.job.get("status") or {}).get("cost") or {})


def test_a_small_case_by_hand() -> None:
    """Three workers on spot for an hour, two ps and a master on demand: 3 x 0.9 + 3 x 3.6 = 13.50 USD; else 21.60."""
    world = World(priced())
    world.nodes = {"spot-1": {"metadata": {"name": "spot-1", "labels": {"pool": "spot"}}}, "n1": {"metadata": {}}}
    live(world, 3600.0)
    found = told(world)
    assert found["spotPodSeconds"] == pytest.approx(3 * 3600, abs=3 * 70)
    assert found["onDemandPodSeconds"] == pytest.approx(3 * 3600, abs=3 * 70)
    assert float(found["spent"]) == pytest.approx(13.5, abs=0.3)
    assert float(found["onDemandEquivalent"]) == pytest.approx(21.6, abs=0.5)
    assert found["savedPercent"] == "37.5"
    assert "unpricedPodSeconds" not in found
    lines = cost_lines(world.job)
    assert "37.5 % saved" in lines[1] and lines[0] in status_lines(world.job)


def test_a_job_without_prices_counts_nothing() -> None:
    world = World(job())
    live(world, 600.0)
    assert "cost" not in world.job["status"]
    assert "names no prices" in cost_lines(world.job)[0]


def test_a_class_without_a_price_is_said() -> None:
    made = priced()
    made["spec"]["ps"]["price"] = {"spotHourly": "1"}
    world = World(made)
    live(world, 3600.0)
    assert told(world)["unpricedPodSeconds"] == pytest.approx(2 * 3600, abs=2 * 70)
    assert "without a price" in " ".join(cost_lines(world.job))


def test_time_suspended_costs_nothing() -> None:
    world = World(priced())
    world.master_works = True
    live(world, 600.0)
    world.job["spec"]["suspend"] = True
    world._change(world.job)
    live(world, 300.0)
    before = told(world)
    assert world.job["status"]["phase"] == JobPhase.SUSPENDED and not world.pods
    live(world, 7200.0)
    assert told(world) == before
    world.job["spec"]["suspend"] = False
    world._change(world.job)
    live(world, 600.0)
    more = told(world)["onDemandPodSeconds"] - before["onDemandPodSeconds"]
    assert more == pytest.approx(6 * 600, abs=6 * 70)


def test_a_budget_suspends_the_job_before_it_is_spent_and_more_lets_it_go_on() -> None:
    world = World(priced(budget="10"))  # of 21.60 an hour: about 27 minutes, less what leaving takes
    world.master_works = True
    live(world, 3600.0)
    assert world.job["status"]["phase"] == JobPhase.SUSPENDED and not world.pods
    spent = float(told(world)["spent"])
    assert 10 - 2 * LEAVE_S * 21.6 / 3600 < spent <= 10
    assert world.job["spec"]["suspend"] is True
    conditions = {c["type"]: c for c in world.job["status"]["conditions"]}
    assert conditions["BudgetSpent"]["status"] == "True" and "give more" in conditions["BudgetSpent"]["message"]
    assert "BudgetSpent" in {event["reason"] for event in world.events.values()}
    made = len(world.ever)
    world.job["spec"]["suspend"] = False  # without more money
    world._change(world.job)
    live(world, 300.0)
    assert len(world.ever) == made and world.job["status"]["phase"] == JobPhase.SUSPENDED
    world.job["spec"]["suspend"], world.job["spec"]["cost"]["budget"] = False, "20"
    world._change(world.job)
    live(world, 120.0)
    assert world.there() == world.wanted()
    live(world, 7200.0)
    assert spent < float(told(world)["spent"]) <= 20


@given(
    st.lists(
        st.tuples(st.sampled_from(["live", "end", "vanish", "operator", "stop"]), st.integers(1, 300)), max_size=30
    )
)
@settings(max_examples=40, deadline=None)
def test_costs_only_grow_and_are_never_counted_twice(story: list[tuple[str, int]]) -> None:
    """Never more than the seconds that pods were on nodes, whatever dies."""
    world = World(priced())
    for what, number in story:
        before = told(world)
        if what == "live":
            live(world, float(number))
        elif what == "operator":
            world.restart_operator()
        elif world.pods and what in ("end", "vanish"):
            name = sorted(world.pods)[number % len(world.pods)]
            if what == "vanish" or world.pods[name]["status"]["phase"] != "Running":
                world.remove(name)
            else:
                world.end(name, 9)
        elif what == "stop":
            world.job["spec"]["suspend"] = number % 2 == 0
            world._change(world.job)
        after = told(world)
        assert float(after.get("spent", 0)) >= float(before.get("spent", 0))
        seconds = after.get("spotPodSeconds", 0) + after.get("onDemandPodSeconds", 0)
        lived = world.now_s - START_S
        assert seconds <= 12 * (lived + 1)


def test_pods_whose_node_is_unknown_count_as_on_demand() -> None:
    world = World(priced())
    live(world, 60.0)
    facts = [f for pod in world.pods.values() if (f := facts_of(pod)) is not None]
    seen = count({**world.job, "status": {}}, facts, None, world.now_s)
    assert seen.spot_s == 0 and seen.spent == seen.on_demand_equivalent > Decimal(0)


@pytest.mark.parametrize(
    ("price", "budget", "words"),
    [
        ({}, "5", "needs prices; set spec.worker.price.onDemandHourly"),
        (PRICE, "0.5", "does not pay for an hour of one pod (0.90); give more"),
    ],
)
def test_a_budget_that_cannot_be_is_refused(price: Object, budget: str, words: str) -> None:
    made = job(cost={"budget": budget}, worker={"price": price})
    with pytest.raises(ConfigError, match=r"spec\.cost\.budget") as error:
        settings_of(made)
    assert words in str(error.value)
    world = World(made)
    world.work()
    condition = next(c for c in world.job["status"]["conditions"] if c["type"] == Condition.INVALID_SPEC)
    assert words in condition["message"]


def test_what_the_master_says_is_in_the_status() -> None:
    world = World(job())
    world.settle(4)
    report = MasterReport(3, 2, samples=512, percent=40, membership=7, checkpoint=3, checkpoint_at=START_S)
    seen = Seen(world.job, world.now_s, tuple(world.pods.values()), frozenset(world.others), report=report)
    status = reconcile(seen).status
    assert status is not None
    assert (status["progress"]["percent"], status["membershipEpoch"], status["checkpoint"]["number"]) == (40, 7, 3)
    assert "(40 %)" in status_lines({**world.job, "status": status})[0]


def test_each_change_of_a_condition_is_one_event() -> None:
    world = World(job(mode="AllReduce"))
    world.settle(4)
    reasons = [event["reason"] for event in world.events.values()]
    assert reasons.count("Ready") == 1
    world.remove(name_of(world.of("worker")[0]))
    world.settle(3)
    reasons = [event["reason"] for event in world.events.values()]
    assert reasons.count("NotReady") >= 1 and reasons.count("Ready") == reasons.count("NotReady") + 1
    for event in world.events.values():
        assert event["involvedObject"]["uid"] == "uid-job" and event["metadata"]["namespace"] == "team"
    assert [e["reason"] for e in world.events.values() if e["type"] != "Normal"] == ["FieldsIgnored"], "it has ps"


def scheduled(world: World, place: str) -> Object:
    return dict(world.of(place)[0]["spec"])


def test_reliable_roles_stand_on_machines_that_stay() -> None:
    labels = {"pool": "spot", "cloud": "x"}
    spot = {"policy": "SpotOnly", "roles": ["worker", "ps"], "reliableRoles": ["ps", "master"]}
    world = World(job(spot=spot, cost={"spotNodeSelector": labels}))
    world.work()
    assert scheduled(world, "worker")["nodeSelector"] == labels
    for place in ("ps", "master"):
        assert "nodeSelector" not in scheduled(world, place)
        node = scheduled(world, place)["affinity"]["nodeAffinity"]
        terms = node["requiredDuringSchedulingIgnoredDuringExecution"]["nodeSelectorTerms"]
        assert [t["matchExpressions"][0]["operator"] for t in terms] == ["NotIn", "NotIn"]
        assert {t["matchExpressions"][0]["key"] for t in terms} == set(labels)


def test_a_pod_that_no_spot_machine_takes_is_replaced_by_one_for_any_machine() -> None:
    spot = {"policy": "SpotOnly", "fallbackAfterSeconds": 600}
    world = World(job(spot=spot, cost={"spotNodeSelector": {"pool": "spot"}}))
    world.work()
    first = {name_of(pod) for pod in world.of("worker")}
    for name in list(world.pods):
        if "worker" not in name:
            world.run(name)
    for _ in range(4):
        world.now_s += 140.0
        world.deliver(100)
        world.work()
    assert {name_of(pod) for pod in world.of("worker")} == first
    world.now_s += 60.0
    world.work()
    world.deliver(100)
    workers = world.of("worker")
    assert len(workers) == 3 and not first & {name_of(pod) for pod in workers}
    assert all("nodeSelector" not in pod["spec"] for pod in workers)
    for _ in range(3):  # they wait as long as it takes
        world.now_s += 900.0
        world.deliver(100)
        world.work()
    assert {name_of(pod) for pod in world.of("worker")} == {name_of(pod) for pod in workers}
    world.end(name_of(workers[0]), 137)  # the next one tries a spot machine again
    for _ in range(3):
        world.now_s += 100.0
        world.deliver(100)
        world.work()
    assert [pod["spec"].get("nodeSelector") for pod in world.of("worker")].count({"pool": "spot"}) == 1
