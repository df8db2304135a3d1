"""What the operator decides: stories of one job, and whatever happens in any order."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from kube_world import START_S, Stale, World, job

from everstep.platforms.kubernetes.actions import Create, CreateRefused, OtherVersion, Refusal, SetSuspend
from everstep.platforms.kubernetes.kinds import API_VERSION, Condition, JobPhase, Kind, Object, name_of
from everstep.platforms.kubernetes.pods import stamp_of


def phase(world: World) -> str:
    return str(world.job["status"]["phase"])


def holds(world: World, condition: Condition) -> bool:
    found = {c["type"]: c["status"] for c in world.job["status"].get("conditions", [])}
    return found.get(condition.value) == "True"


def reason(world: World, condition: Condition) -> str:
    return str({c["type"]: c["reason"] for c in world.job["status"]["conditions"]}[condition.value])


def running(**spec: object) -> World:
    world = World(job(**spec))
    world.settle(4)
    assert world.there() == world.wanted()
    world.master_works = True
    return world


def test_a_job_without_ps_says_that_it_ignores_them() -> None:
    world = World(job(mode="AllReduce"))
    world.settle(4)
    assert world.job["spec"]["ps"] and not [pod for pod in world.pods if "-ps-" in pod]
    assert holds(world, Condition.FIELDS_IGNORED)
    said = next(c for c in world.job["status"]["conditions"] if c["type"] == Condition.FIELDS_IGNORED)
    assert said["message"].startswith("spec.ps") and "set spec.mode to Hybrid" in said["message"]
    assert not holds(running(mode="Hybrid"), Condition.FIELDS_IGNORED)


def request(world: World, kind: str, name: str = "more", **spec: object) -> Object:
    meta = {"name": name, "namespace": "team", "uid": f"uid-{name}", "resourceVersion": "1"}
    meta["creationTimestamp"] = stamp_of(world.now_s)
    body = {"jobName": "dlrm", "role": "worker", "timeoutSeconds": 100_000, "ttlSecondsAfterFinished": 86_400, **spec}
    world.requests[name] = {"apiVersion": API_VERSION, "kind": kind, "metadata": meta, "spec": body}
    return world.requests[name]


def test_a_job_gets_its_pods_and_what_they_need() -> None:
    world = running()
    kinds = sorted(kind.value for kind, _ in world.others)
    assert kinds == ["PersistentVolumeClaim", *["PodDisruptionBudget"] * 2, "Secret", "Service"]
    assert sorted(world.pods) == [
        "dlrm-master-0-1",
        "dlrm-ps-0-2",
        "dlrm-ps-1-3",
        "dlrm-worker-0-4",
        "dlrm-worker-1-5",
        "dlrm-worker-2-6",
    ]
    assert phase(world) == JobPhase.RUNNING and holds(world, Condition.READY)
    status = world.job["status"]["worker"]
    assert (status["desired"], status["ready"], status["selector"]) == (
        3,
        3,
        "everstep.io/job=dlrm,everstep.io/role=worker",
    )


def test_when_nothing_changes_nothing_is_written() -> None:
    world = running()
    world.settle(2)
    world.deliver(100)
    _, plan = world.look()
    assert plan.status is None and plan.actions == ()


def test_a_pod_that_vanishes_is_replaced_under_another_name() -> None:
    world = running()
    world.remove("dlrm-worker-1-5")
    world.settle(2)
    assert "dlrm-worker-1-7" in world.pods and world.there() == world.wanted()
    assert world.job["status"]["worker"]["restarts"] == 0


def test_a_pod_that_vanishes_before_it_was_listed_is_not_made_again_under_its_name() -> None:
    world = World(job())
    world.work()
    for name in list(world.pods):
        world.remove(name)
    world.settle(3)
    assert world.there() == world.wanted() and len(world.ever) == 12


def test_an_operator_that_is_killed_between_reserving_and_creating_uses_no_name_twice() -> None:
    for most in range(12):
        world = World(job())
        world.work(most)
        world.restart_operator()
        world.settle(3)
        assert world.there() == world.wanted()


def test_an_operator_with_an_old_view_of_the_job_makes_nothing() -> None:
    world = World(job())
    old, plan = world.look()
    world.work()
    assert plan.status is not None
    with pytest.raises(Stale):
        world.write_status(old, plan.status)


def test_failures_are_counted_once_and_limited() -> None:
    world = running(worker={"restartLimit": 2})
    for times in (1, 2):
        name = name_of(world.of("worker")[0])
        world.end(name, 9)
        for _ in range(3):
            world.deliver(100)
            world.work()
        assert world.job["status"]["worker"]["restarts"] == times
        assert name in world.pods, "it keeps its slot for a while"
        world.settle(3)
        assert name not in world.pods and world.there() == world.wanted()
    world.end(name_of(world.of("worker")[0]), 9)
    world.settle(3)
    assert phase(world) == JobPhase.FAILED and reason(world, Condition.FAILED) == "RestartLimit"
    assert world.there() == {"master": 0, "ps": 0, "worker": 0}


def test_what_the_cluster_takes_is_not_counted() -> None:
    world = running(worker={"restartLimit": 0})
    for code in (137, 143):
        world.end(name_of(world.of("worker")[0]), code)
        world.settle(3)
    assert phase(world) == JobPhase.RUNNING and world.job["status"]["worker"]["restarts"] == 0
    world.end(name_of(world.of("worker")[0]), 137, "OOMKilled")
    world.settle(3)
    assert phase(world) == JobPhase.FAILED, "too little memory is no matter of the cluster"


@pytest.mark.parametrize("code", [0, 1, 2, 4])
def test_the_master_says_how_the_job_ended(code: int) -> None:
    world = running()
    world.end("dlrm-master-0-1", code)
    world.settle(3)
    assert phase(world) == (JobPhase.FAILED if code else JobPhase.SUCCEEDED)
    assert world.there() == {"master": 0, "ps": 0, "worker": 0}
    assert "dlrm-master-0-1" in world.pods, "its log stays (cleanPodPolicy: Running)"
    if code:
        assert reason(world, Condition.FAILED) == f"ExitCode{code}"


def test_a_lost_master_is_replaced_and_the_job_goes_on() -> None:
    world = running()
    world.end("dlrm-master-0-1", 137)
    world.deliver(100)
    world.work()
    assert phase(world) == JobPhase.RECOVERING
    world.settle(3)
    assert phase(world) == JobPhase.RUNNING and "dlrm-master-0-7" in world.pods


def test_a_node_that_is_taken_back_is_emptied() -> None:
    world = running()
    taint = {"key": "karpenter.sh/disrupted", "effect": "NoSchedule"}
    world.nodes = {
        "n1": {"metadata": {"name": "n1"}, "spec": {"taints": [taint]}},
        "n2": {"metadata": {"name": "n2"}, "spec": {}},
    }
    old = set(world.pods)
    world.deliver(100)
    world.work()
    assert holds(world, Condition.RECLAIM_NOTICE)
    assert {d["source"] for d in world.job["status"]["disruptions"]} == {"NodeTaint"}
    for name, pod in world.pods.items():
        if name in old:
            assert pod["metadata"].get("deletionTimestamp"), "each is told to leave"
    for name in set(world.pods) - old:
        world.run(name, "n2")
    world.leave()
    world.deliver(100)
    world.work()
    assert world.there() == world.wanted() and not set(world.pods) & old


def test_pods_stuck_on_a_dead_node_are_deleted_by_force() -> None:
    world = running()
    world.nodes = {
        "n1": {"metadata": {"name": "n1"}, "status": {"conditions": [{"type": "Ready", "status": "Unknown"}]}}
    }
    name = "dlrm-worker-0-4"
    world.pods[name]["metadata"]["deletionTimestamp"] = stamp_of(world.now_s)
    world._change(world.pods[name])
    world.deliver(100)
    world.work()
    assert name in world.pods and world.there() == world.wanted(), "another one is there at once"
    world.now_s += 120
    world.work()
    assert name not in world.pods


def test_suspended_and_on_again() -> None:
    world = running()
    world.job["spec"]["suspend"] = True
    world._change(world.job)
    world.deliver(100)
    world.work()
    assert phase(world) == JobPhase.SUSPENDING
    world.settle(4)
    assert phase(world) == JobPhase.SUSPENDED and world.pods == {}
    assert not holds(world, Condition.SUSPENDING)
    world.job["spec"]["suspend"] = False
    world._change(world.job)
    world.settle(4)
    assert phase(world) == JobPhase.RUNNING and world.there() == world.wanted()
    env = {e["name"]: e.get("value") for e in world.of("master")[0]["spec"]["containers"][0]["env"]}
    assert env["EVERSTEP_POD_UNSUSPEND"] == "1"


def test_a_request_to_suspend_that_comes_late_does_not_suspend_the_job_that_goes_on() -> None:
    """The next master may have the address of the one that was asked."""
    world = running()
    for number in range(3):
        world.job["spec"]["suspend"] = True
        world._change(world.job)
        world.settle(4)
        assert phase(world) == JobPhase.SUSPENDED
        world.job["spec"]["suspend"] = False
        world._change(world.job)
        world.settle(4)
        assert set(world.asked_to_suspend) == set(range(number + 1))
        for late in world.asked_to_suspend:
            world.hear_suspend(late)
        world.settle(4)
        assert phase(world) == JobPhase.RUNNING and world.job["spec"]["suspend"] is False


def test_a_master_that_says_nothing_is_asked_to_suspend_when_it_does() -> None:
    world = running()
    world.job["spec"]["suspend"], world.master_works = True, False
    world._change(world.job)
    world.settle(2)
    assert world.asked_to_suspend == [] and phase(world) == JobPhase.SUSPENDING
    world.master_works = True
    world.settle(4)
    assert phase(world) == JobPhase.SUSPENDED


def test_no_pod_is_made_while_the_members_of_a_suspended_job_still_leave() -> None:
    """The master's pod goes at once, members have a minute: the next master ended again, and so on for ever."""
    world = running()
    world.job["spec"]["suspend"] = True
    world._change(world.job)
    world.deliver(100)
    world.work()  # (its master ends)
    for _ in range(4):
        world.deliver(100)
        world.work()
    assert not world.of("master") and len(world.pods) == 5, "members are still there"
    assert len(world.ever) == 6
    world.leave()
    world.settle(2)
    assert phase(world) == JobPhase.SUSPENDED and len(world.ever) == 6


def test_a_job_that_suspends_itself_says_so_in_its_spec() -> None:
    world = running()
    world.end("dlrm-master-0-1", 7)
    world.settle(4)
    assert world.job["spec"]["suspend"] is True and phase(world) == JobPhase.SUSPENDED and world.pods == {}


@pytest.mark.parametrize("then", ["Suspend", "Fail"])
def test_a_job_that_waits_for_too_long_frees_everything(then: str) -> None:
    world = World(job(elasticity={"maxWaitSeconds": 600, "onWaitTimeout": then}))
    for _ in range(9):
        world.deliver(100)
        world.work()
        world.leave()
        world.now_s += 200
    assert world.pods == {}
    assert phase(world) == (JobPhase.SUSPENDED if then == "Suspend" else JobPhase.FAILED)
    assert world.job["spec"].get("suspend", False) is (then == "Suspend")


def test_scale_out_and_in_by_requests() -> None:
    world = running()
    request(world, "ScaleOut", count=2)
    world.settle(5)
    assert world.there()["worker"] == 5 and world.wants[0] == 5
    assert world.requests["more"]["status"]["phase"] == "Succeeded"
    request(world, "ScaleIn", "less", podNames=["dlrm-worker-0-4"])
    world.settle(5)
    assert world.there()["worker"] == 4 and "dlrm-worker-0-4" not in world.pods
    assert world.requests["less"]["status"]["phase"] == "Succeeded"


@pytest.mark.parametrize(
    ("kind", "spec", "why"),
    [
        ("ScaleOut", {"count": 9}, "OutOfBounds"),
        ("ScaleIn", {"count": 3}, "OutOfBounds"),
        ("ScaleIn", {"podNames": ["dlrm-ps-0-2"]}, "NoSuchPod"),
    ],
)
def test_requests_that_are_refused(kind: str, spec: dict[str, object], why: str) -> None:
    world = running()
    request(world, kind, **spec)
    world.settle(2)
    status = world.requests["more"]["status"]
    assert status["phase"] == "Failed" and status["conditions"][0]["reason"] == why, status
    assert world.there() == world.wanted() == {"master": 1, "ps": 2, "worker": 3}


def test_requests_wait_for_each_other() -> None:
    world = running()
    request(world, "ScaleOut", "a", count=1)
    request(world, "ScaleOut", "b", count=1)
    for _ in range(2):
        world.deliver(100)
        world.work()
    assert "status" not in world.requests["b"]
    assert world.job["status"]["currentScaleRequest"] == "ScaleOut/a"
    world.settle(8)
    assert world.there()["worker"] == 5
    world.now_s += 100_000
    world.settle(1)
    assert world.requests == {}, "their time is over"


def test_without_word_of_the_master_no_worker_is_taken_away() -> None:
    world = running()
    world.master_works = False
    world.job["spec"]["worker"]["replicas"] = 1
    world._change(world.job)
    world.settle(3)
    assert world.there()["worker"] == 3
    world.master_works = True
    world.settle(3)
    assert world.there()["worker"] == 1 and world.wants[0] == 1


@pytest.mark.parametrize("why", [Refusal.QUOTA, Refusal.FORBIDDEN, Refusal.INVALID])
def test_what_the_server_refuses_is_a_condition_and_no_hot_loop(why: Refusal) -> None:
    world = World(job())
    world.refused = CreateRefused(why, "exceeded quota")
    for _ in range(3):
        world.deliver(100)
        plan = world.work()
    assert world.pods == {} and holds(world, Condition(why.value)) and plan.status is None
    assert not any(isinstance(a, Create) and a.kind is Kind.POD for a in plan.actions)
    world.refused = None
    world.settle(3)
    assert world.there() == world.wanted() and not holds(world, Condition(why.value))


@pytest.mark.parametrize(
    ("spec", "words"),
    [
        ({"settings": {"wrokers": 3}}, "wrokers"),
        ({"settings": {"lease_s": 1.0}}, "lease_s = 1.0"),
        ({"settings": {"bind": "x:1"}}, "the operator sets it"),
        ({"mode": "Pipeline"}, "spec.ps: not in mode Pipeline"),
        ({"stages": 2}, "spec.stages = 2: needs mode: Pipeline"),
        ({"scheduling": {"gang": "Slurm"}}, "expected one of None, Volcano"),
        ({"scheduling": {"queue": "team"}}, "only Volcano has queues"),
        ({"psProtection": {"strategy": "Parity", "dataShards": 4, "parityShards": 1}}, "parity"),
        ({"worker": {"template": {"spec": {"containers": [{"name": "main", "image": "x"}]}}}}, "spec.script"),
    ],
)
def test_a_wrong_job_is_a_condition_with_the_words_of_everstep_run(spec: dict[str, object], words: str) -> None:
    world = World(job(**spec))
    world.settle(3)
    message = {c["type"]: c["message"] for c in world.job["status"]["conditions"]}["InvalidSpec"]
    assert words in message and "\n" not in message and world.pods == {}


def test_an_image_that_is_not_there_or_has_no_everstep_is_told() -> None:
    """Such a container never ran: its log says nothing."""
    world = World(job(worker={"restartLimit": 1}))
    world.work()
    waiting = {"reason": "ImagePullBackOff", "message": 'Back-off pulling image "trian:1"'}
    name = name_of(world.of("worker")[0])
    world.pods[name]["status"]["containerStatuses"] = [{"name": "main", "state": {"waiting": waiting}}]
    world._change(world.pods[name])
    world.deliver(100)
    world.work()
    shown = {c["type"]: c for c in world.job["status"]["conditions"]}["CannotStart"]
    assert (
        shown["status"] == "True" and shown["message"] == f'{name}: ImagePullBackOff: Back-off pulling image "trian:1"'
    )
    for _ in range(6):
        for pod in world.of("worker"):
            if pod["status"]["phase"] == "Pending":
                world.run(name_of(pod))
                ended = {"exitCode": 128, "reason": "StartError", "message": 'exec: "everstep": not found in $PATH'}
                world.end(name_of(pod), 128)
                world.pods[name_of(pod)]["status"]["containerStatuses"][0]["state"] = {"terminated": ended}
                world._change(world.pods[name_of(pod)])
        world.deliver(1000)
        world.work()
        world.now_s += 61.0
    assert phase(world) == JobPhase.FAILED
    message = {c["type"]: c["message"] for c in world.job["status"]["conditions"]}["Failed"]
    assert 'StartError: exec: "everstep": not found in $PATH' in message and "restartLimit is 1" in message


REFUSED_AGENT = "the master is everstep 9.9.9 (wire 3), this is everstep 0.1.0 (wire 3): install the same version"


def condition(world: World, which: str) -> tuple[str, str, str]:
    found = {c["type"]: c for c in world.job["status"]["conditions"]}[which]
    return found["status"], found["reason"], found["message"]


def test_why_pods_fail_is_told_until_all_are_members_again() -> None:
    world = running()
    world.members = dict.fromkeys(world.pods, 1)
    name = name_of(world.of("worker")[0])
    log = f"[10:00:00] joins\neverstep: {REFUSED_AGENT}\n  a line of another library  \n\n"
    world.end(name, 4, message=log)
    world.deliver(100)
    world.work()
    assert condition(world, "PodsFail") == ("True", "ExitCode4", f"{name}: {REFUSED_AGENT}")
    world.now_s += 61.0
    world.settle(2)
    new = name_of(world.of("worker")[-1])
    assert new != name and world.there() == world.wanted()
    assert condition(world, "PodsFail")[0] == "True", "the new pod is no member yet"
    world.members = dict.fromkeys(world.pods, 1)
    world.settle(1)
    assert condition(world, "PodsFail")[0] == "False"


@pytest.mark.parametrize(
    ("log", "told"),
    [
        ("", "see kubectl logs {name}"),
        ("Traceback\n\x1b[31mKeyError: 3\n", r"{name}: \x1b[31mKeyError: 3"),
        ("x" * 5_000, "x" * 400 + "... (5,000 characters)"),
    ],
)
def test_last_words_of_any_program_are_one_line(log: str, told: str) -> None:
    world = running()
    name = name_of(world.of("worker")[0])
    world.end(name, 1, message=log)
    world.deliver(100)
    world.work()
    message = condition(world, "PodsFail")[2]
    assert told.format(name=name) in message and "\n" not in message and len(message) < 500


def test_a_pod_that_the_cluster_took_is_no_failure_to_tell() -> None:
    world = running()
    world.end(name_of(world.of("worker")[0]), 137, message="killed")
    world.settle(2)
    assert "PodsFail" not in {c["type"] for c in world.job["status"]["conditions"]}


def test_an_image_of_another_version_ends_the_job_with_its_words() -> None:
    """Agents of the image are refused by the master, again and again: the tries are bounded."""
    world = World(job(worker={"restartLimit": 2}))
    for _ in range(12):
        world.settle(1)
        for pod in world.of("worker"):
            if pod["status"]["phase"] == "Running":
                world.end(name_of(pod), 4, message=f"everstep: {REFUSED_AGENT}\n")
    assert phase(world) == JobPhase.FAILED
    _, reason, message = condition(world, "Failed")
    assert reason == "RestartLimit" and REFUSED_AGENT in message and "restartLimit is 2" in message


def test_a_master_that_ends_is_told_with_its_last_words() -> None:
    world = running()
    world.end(name_of(world.of("master")[0]), 2, message="everstep: No such option: --host (see everstep pod --help)")
    world.settle(2)
    assert "No such option: --host" in condition(world, "Failed")[2] and "kubectl logs" in condition(world, "Failed")[2]


def test_a_master_of_another_version_is_a_condition_and_the_job_trains_on() -> None:
    world = running()
    world.other = OtherVersion("everstep 9.9.9 (wire 3)", "everstep 0.1.0 (wire 3)")
    before = set(world.ever)
    world.settle(3)
    status, _, message = condition(world, "OtherVersion")
    assert status == "True" and "has everstep 9.9.9 (wire 3), the operator is everstep 0.1.0 (wire 3)" in message
    assert "use the same version for both" in message and "\n" not in message
    assert world.ever == before and phase(world) == JobPhase.RUNNING
    world.other = None
    world.settle(1)
    assert condition(world, "OtherVersion")[0] == "False"


def test_the_master_hears_of_pods_that_are_gone_before_their_silence_tells() -> None:
    """One has ended, one was deleted by force, one's machine is no more; one's node is only not heard of, and one only
    leaves: these may live."""
    world = running()
    world.members = dict.fromkeys(world.pods, 1) | {"node0": 1}
    ended, deleted, machine, silent, leaves = (
        "dlrm-worker-0-4",
        "dlrm-worker-1-5",
        "dlrm-worker-2-6",
        "dlrm-ps-0-2",
        "dlrm-ps-1-3",
    )
    quiet = {"metadata": {"name": "n3"}, "status": {"conditions": [{"type": "Ready", "status": "Unknown"}]}}
    world.nodes = {"n1": {"metadata": {"name": "n1"}}, "n3": quiet}
    world.pods[machine]["spec"]["nodeName"], world.pods[silent]["spec"]["nodeName"] = "n2", "n3"
    for name in (machine, silent):
        world._change(world.pods[name])
    world.deliver(100)
    world.end(ended, 137)
    world.remove(deleted)
    world.pods[leaves]["metadata"]["deletionTimestamp"] = stamp_of(world.now_s + 60)
    world._change(world.pods[leaves])
    world.deliver(100)
    world.work()
    assert world.told_gone == [(ended, deleted, machine)]
    assert machine not in world.pods, "nobody would delete it for a while"
    world.members = dict.fromkeys(world.members, 0)
    world.settle(2)
    assert len(world.told_gone) == 1 and world.there() == world.wanted()


def test_a_pod_that_is_new_on_its_node_is_not_lost_because_a_watch_lags() -> None:
    world = World(job())
    world.work()
    for name in list(world.pods):
        world.run(name, node="new")
    world.nodes, world.master_works, world.members = (
        {"old": {"metadata": {"name": "old"}}},
        True,
        dict.fromkeys(world.pods, 1),
    )
    world.now_s += 5
    world.deliver(100)
    world.work()
    assert world.there() == world.wanted() and not world.told_gone


def test_deadline_and_time_to_live() -> None:
    world = running(activeDeadlineSeconds=1000, ttlSecondsAfterFinished=100)
    world.now_s = START_S + 1001
    world.deliver(100)
    world.work()
    assert phase(world) == JobPhase.FAILED and reason(world, Condition.FAILED) == "DeadlineExceeded"
    world.now_s += 101
    _, plan = world.look()
    assert any(a.kind is Kind.JOB for a in plan.actions if hasattr(a, "kind"))


def test_a_job_of_another_controller_is_left_alone() -> None:
    world = World(job(managedBy="kueue.x-k8s.io/multikueue"))
    world.settle(2)
    assert world.pods == {} and "status" not in world.job


# ------------------------------------------------------------ whatever happens

happening = st.one_of(
    st.tuples(st.just("work"), st.integers(0, 12)),
    st.tuples(st.just("deliver"), st.integers(1, 8)),
    st.tuples(st.sampled_from(["run", "vanish", "fail", "kill", "delete"]), st.integers(0, 30)),
    st.tuples(st.just("restart"), st.just(0)),
    st.tuples(st.just("stale"), st.just(0)),
    st.tuples(st.just("scale"), st.integers(1, 6)),
    st.tuples(st.just("scale_ps"), st.integers(1, 4)),
    st.tuples(st.just("suspend"), st.booleans().map(int)),
    st.tuples(st.just("taint"), st.booleans().map(int)),
    st.tuples(st.just("leave"), st.just(0)),
    st.tuples(st.just("time"), st.integers(1, 200)),
    st.tuples(st.just("master"), st.booleans().map(int)),
)


def live(happenings: list[tuple[str, int]], gang: str = "None") -> None:
    """Let it all happen, then let everything work: the job has its pods, and no name ever came twice (``World.do``)."""
    world = World(job(scheduling={"gang": gang}))
    for what, n in happenings:
        names = sorted(world.pods)
        name = names[n % len(names)] if names else ""
        match what:
            case "work":
                world.work(n)
            case "deliver":
                world.deliver(n)
            case "restart":
                world.restart_operator()
            case "stale":  # somebody else has changed the job meanwhile
                world._change(world.job)
            case "scale":
                world.job["spec"]["worker"]["replicas"] = n
                world._change(world.job)
            case "scale_ps":
                world.job["spec"]["ps"]["replicas"] = n
                world._change(world.job)
            case "suspend":
                world.job["spec"]["suspend"] = bool(n)
                world._change(world.job)
            case "taint":
                taints = [{"key": "karpenter.sh/disrupted"}] if n else []
                world.nodes = {"n1": {"metadata": {"name": "n1"}, "spec": {"taints": taints}}}
            case "leave":
                world.leave()
            case "time":
                world.now_s += n
            case "master":
                world.master_works = bool(n)
            case "run" if name and world.pods[name]["status"]["phase"] == "Pending":
                world.run(name)
            case "vanish" if name:
                world.remove(name)
            case "kill" if name and world.pods[name]["status"]["phase"] == "Running":
                world.end(name, 137)
            case "fail" if name and world.pods[name]["status"]["phase"] == "Running":
                world.end(name, 9)
            case "delete" if name and not world.pods[name]["metadata"].get("deletionTimestamp"):
                world.pods[name]["metadata"]["deletionTimestamp"] = stamp_of(world.now_s + 60)
                world._change(world.pods[name])
    world.nodes, world.master_works = {}, True
    if world.job["spec"].get("suspend"):
        world.job["spec"]["suspend"] = False
        world._change(world.job)
    world.settle()
    for _ in range(3):  # (a job that had suspended itself by then is asked to go on)
        if world.job["spec"].get("suspend"):
            world.job["spec"]["suspend"] = False
            world._change(world.job)
            world.settle()
    assert world.there() == world.wanted(), (world.job["status"], sorted(world.pods))
    assert phase(world) == JobPhase.RUNNING
    world.deliver(1000)
    _, plan = world.look()
    assert plan.status is None and not [a for a in plan.actions if not isinstance(a, SetSuspend)]


@settings(derandomize=True, deadline=None, max_examples=60)
@given(st.lists(happening, max_size=60), st.sampled_from(["None", "Volcano", "Native"]))
def test_whatever_happens_it_converges_and_no_name_comes_twice(happenings: list[tuple[str, int]], gang: str) -> None:
    live(happenings, gang)


@pytest.mark.slow
@settings(deadline=None, max_examples=500)
@given(st.lists(happening, max_size=150), st.sampled_from(["None", "Volcano", "SchedulerPlugins", "Native"]))
def test_whatever_happens_at_length(happenings: list[tuple[str, int]], gang: str) -> None:
    live(happenings, gang)
