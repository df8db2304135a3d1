"""A job whose pods start together or not at all: its PodGroup, what its pods say, and what becomes of it while there is
no room. Pure."""

from __future__ import annotations

from typing import Any

import pytest
from kube_world import World, job

from everstep.platforms.kubernetes import gangs
from everstep.platforms.kubernetes.actions import Apply, Create, CreateRefused, Refusal
from everstep.platforms.kubernetes.job import settings_of
from everstep.platforms.kubernetes.kinds import Condition, JobPhase, Kind, Object, Place, name_of
from everstep.platforms.kubernetes.objects import out_pod, pod

SCHEDULERS = ["Volcano", "SchedulerPlugins", "Native"]
LEAST = 4  # the master, two ps, one worker: with these the job of these tests can run


def gang_job(gang: str, scheduling: Object | None = None, **spec: Any) -> Object:
    return job(scheduling={"gang": gang, **(scheduling or {})}, **spec)


def condition(world: World, which: Condition) -> Object:
    found = {c["type"]: c for c in world.job["status"].get("conditions", [])}
    return dict(found.get(which.value) or {"status": "False", "message": ""})


def count_of(group: Object | None) -> int:
    assert group is not None
    spec = group["spec"]
    return int(spec["minMember"] if "minMember" in spec else spec["schedulingPolicy"]["gang"]["minCount"])


@pytest.mark.parametrize("gang", SCHEDULERS)
def test_all_that_the_job_needs_starts_together_and_the_rest_follows(gang: str) -> None:
    world = World(gang_job(gang))
    world.settle(5, room=LEAST - 1)
    assert sum(world.there().values()) == LEAST, "no more than the gang is asked for while it waits"
    assert not any(p["spec"].get("nodeName") for p in world.pods.values()) and count_of(world.gang) == LEAST
    assert world.job["status"]["phase"] == JobPhase.WAITING
    assert condition(world, Condition.WAITING)["message"] == f"0 of the {LEAST} pods that the job needs have a node"
    world.settle(5, room=LEAST)
    assert world.job["status"]["phase"] != JobPhase.WAITING and condition(world, Condition.WAITING)["status"] == "False"
    world.settle(5)
    assert world.there() == world.wanted() and world.job["status"]["phase"] == JobPhase.RUNNING


@pytest.mark.parametrize("gang", SCHEDULERS)
def test_the_group_is_there_before_its_pods(gang: str) -> None:
    world = World(gang_job(gang))
    world.settle(1)
    assert world.pods == {} and world.gang is not None, "a scheduler may make a group of its own for a pod without one"


def test_a_job_is_not_suspended_before_its_group_is_gone() -> None:
    world = World(gang_job("Volcano", elasticity={"maxWaitSeconds": 600}))
    seen = set()
    for number in range(120):  # (the operator is killed after one thing that it did, or two, or three)
        world.deliver(len(world.log))
        world.work(1 + number % 3)
        world.leave()
        seen.add(world.job["status"].get("phase"))
        if world.job["status"].get("phase") == JobPhase.SUSPENDED:
            assert world.pods == {} and world.gang is None
        world.now_s += 20.0
    assert {JobPhase.WAITING, JobPhase.SUSPENDED} <= seen


@pytest.mark.parametrize("on_timeout", ["Suspend", "Fail"])
def test_what_is_held_is_given_back_when_the_wait_is_over(on_timeout: str) -> None:
    world = World(gang_job("Volcano", elasticity={"maxWaitSeconds": 200, "onWaitTimeout": on_timeout}))
    world.settle(12, room=LEAST - 1)
    assert world.pods == {} and world.gang is None, "the group keeps room in a queue, too"
    of, ended = (Condition.FAILED, True) if on_timeout == "Fail" else (Condition.SUSPENDED, False)
    assert condition(world, of)["status"] == "True"
    assert (world.job["status"]["phase"] == JobPhase.FAILED) is ended
    if not ended:
        assert world.job["spec"]["suspend"], "it stays suspended until somebody lets it go on"
        world.job["spec"]["suspend"] = False
        world._change(world.job)
        world.settle(8)
        assert world.there() == world.wanted() and world.gang is not None


def test_a_gang_that_has_lost_a_pod_keeps_what_it_has() -> None:
    world = World(gang_job("Volcano"))
    world.settle(5)
    world.remove(name_of(world.of("ps")[0]))
    world.settle(3, room=5)
    assert world.there() == {"master": 1, "ps": 2, "worker": 3}
    assert len([p for p in world.of("worker") if p["spec"].get("nodeName")]) == 3
    world.settle(3)
    assert world.there() == world.wanted()


def test_the_group_follows_the_size_of_the_job() -> None:
    world = World(gang_job("Volcano", scheduling={"queue": "team", "priorityClassName": "high"}))
    world.settle(4)
    assert world.gang is not None
    assert world.gang["spec"] == {
        "minMember": LEAST,
        "minTaskMember": {"master": 1, "ps": 2, "worker": 1},
        "queue": "team",
        "priorityClassName": "high",
    }
    world.job["spec"]["ps"]["replicas"] = 3
    world._change(world.job)
    world.settle(4)
    assert count_of(world.gang) == LEAST + 1
    world.gang["spec"]["minMember"] = 1  # by hand
    world.settle(2)
    assert count_of(world.gang) == LEAST + 1


def test_with_all_workers_needed_the_gang_is_all_of_them() -> None:
    assert count_of(gangs.pod_group(gang_job("Native", elasticity={"recovery": "WaitForAll"}))) == 1 + 2 + 3


@pytest.mark.parametrize("why", [Refusal.GANG, Refusal.FORBIDDEN])
def test_a_cluster_without_the_scheduler_is_a_condition_and_no_hot_loop(why: Refusal) -> None:
    world = World(gang_job("Volcano"))
    world.refused = CreateRefused(why, gangs.missing_words(Kind.VOLCANO_GROUP))
    world.deliver(100)
    world.work()
    _, plan = world.look()
    assert not any(isinstance(a, Apply) or (isinstance(a, Create) and a.kind is Kind.POD) for a in plan.actions)
    message = condition(world, Condition(why.value))["message"]
    assert "scheduling.volcano.sh/v1beta1" in message and "leave gang out" in message and world.pods == {}
    world.refused = None
    world.settle(5)
    assert world.there() == world.wanted() and condition(world, Condition(why.value))["status"] == "False"


def test_a_pod_says_which_group_it_belongs_to() -> None:
    made = {gang: pod(gang_job(gang), Place.PS, 0, 1, {}) for gang in (*SCHEDULERS, "None")}
    assert made["Volcano"]["spec"]["schedulerName"] == "volcano"
    assert made["Volcano"]["metadata"]["annotations"] == {
        "scheduling.k8s.io/group-name": "dlrm",
        "volcano.sh/task-spec": "ps",
    }
    assert made["SchedulerPlugins"]["spec"]["schedulerName"] == "scheduler-plugins-scheduler"
    assert made["SchedulerPlugins"]["metadata"]["labels"]["scheduling.x-k8s.io/pod-group"] == "dlrm"
    assert made["Native"]["spec"]["schedulingGroup"] == {"podGroupName": "dlrm"}
    assert "schedulerName" not in made["Native"]["spec"]
    own = gang_job("Volcano", scheduling={"schedulerName": "volcano-2"})
    assert pod(own, Place.PS, 0, 1, {})["spec"]["schedulerName"] == "volcano-2"
    plain = job()
    assert pod(plain, Place.PS, 0, 1, {}) == made["None"]


@pytest.mark.parametrize("gang", SCHEDULERS)
def test_the_pod_that_writes_what_a_job_leaves_waits_for_nobody(gang: str) -> None:
    text = str(out_pod(gang_job(gang, out="s3://team/x"), 9)["metadata"]) + str(
        out_pod(gang_job(gang), 9)["spec"].keys()
    )
    assert "pod-group" not in text and "group-name" not in text and "schedul" not in text


def test_settings_with_a_dollar_reach_the_master_as_they_are() -> None:
    """The cluster expands ``$(NAME)`` in what a pod's environment has."""
    from everstep.platforms.kubernetes.demo.pod_runner import _expanded

    about = job(settings={"comment": "1"}, args=["--name", "$(POD_NAME)", "$$(POD_IP)", "5 $"])
    settings = {**settings_of(job(args=about["spec"]["args"])), "args": about["spec"]["args"]}
    env = pod(about, Place.MASTER, 0, 1, settings)["spec"]["containers"][0]["env"]
    text = next(e["value"] for e in env if e["name"] == "EVERSTEP_POD_SETTINGS")
    assert "$" not in text

    from everstep.cli.pod import settings_of as read

    spec, _ = read({"EVERSTEP_POD_SETTINGS": _expanded(text, {"POD_NAME": "wrong", "POD_IP": "wrong"})})
    assert list(spec.args) == about["spec"]["args"]
