"""What a job leaves is written to its ``spec.out``: after its end, after a suspension, before a deleted job goes."""

from __future__ import annotations

import json

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from kube_world import World, job

from everstep.errors import ConfigError
from everstep.platforms.kubernetes.job import settings_of
from everstep.platforms.kubernetes.kinds import FINALIZER, Condition, JobPhase, Object, name_of
from everstep.platforms.kubernetes.leavings import GO_S, SUSPEND_S, TRIES


def holds(world: World, condition: Condition) -> bool:
    return any(c["type"] == condition and c["status"] == "True" for c in world.job["status"].get("conditions", []))


def running(out: str = "s3://team/flights", **spec: object) -> World:
    world = World(job(out=out, **spec))
    world.settle(6)
    assert world.there() == world.wanted() and world.job["metadata"]["finalizers"] == [FINALIZER]
    world.master_works = True
    return world


def writer(world: World) -> str:
    """Let the operator work until a pod writes; return its name."""
    for _ in range(8):
        world.settle(1)
        if found := [pod for pod in world.of("out") if pod["status"]["phase"] == "Running"]:
            return name_of(found[0])
    raise AssertionError(world.job["status"])


def master(world: World) -> str:
    return name_of(world.of("master")[0])


def test_the_end_of_a_job_is_written_by_a_pod_with_the_masters_volume() -> None:
    world = running()
    world.end(master(world), 0)
    pod = world.pods[writer(world)]
    container = pod["spec"]["containers"][0]
    assert container["command"][:3] == ["everstep", "pod", "out"] and container["command"][-1] == "s3://team/flights"
    claims = [v.get("persistentVolumeClaim", {}).get("claimName") for v in pod["spec"]["volumes"]]
    assert claims == ["dlrm-master"]
    env = {each["name"]: each.get("value") for each in container["env"]}
    about = json.loads(env["EVERSTEP_POD_JOB"] or "")
    assert about["status"]["phase"] == "Succeeded" and "template" not in about["spec"]["worker"]
    assert "EVERSTEP_POD_SECRET" not in env, "it needs no secret of the job"
    world.end(name_of(pod), 0)
    world.settle(3)
    assert holds(world, Condition.OUT_WRITTEN) and not world.of("out")
    world.deliver(100)
    _, plan = world.look()
    assert plan.status is None and plan.actions == ()
    world.delete_job()
    world.settle(3)
    assert world.gone and len(world.ever) == 7, "it is not written twice"


def suspend(world: World, on: bool) -> None:
    world.job["spec"]["suspend"] = on
    world._change(world.job)


def test_each_suspension_is_written_and_a_job_that_goes_on_does_not_wait_for_the_writer() -> None:
    world = running()
    suspend(world, True)
    first = writer(world)
    suspend(world, False)
    world.settle(6)
    assert first not in world.pods and world.there() == world.wanted()
    suspend(world, True)
    second = writer(world)
    world.end(second, 0)
    world.settle(3)
    assert holds(world, Condition.OUT_WRITTEN) and world.pods == {}
    world.delete_job()
    world.settle(3)
    assert world.gone


def test_a_deleted_job_is_made_safe_and_written_before_it_goes() -> None:
    world = running()
    world.delete_job()
    world.deliver(100)
    world.work()
    name = writer(world)
    assert not world.of("master") and not world.gone, "its master was asked, and ended"
    world.end(name, 0)
    world.settle(4)
    assert world.gone and world.pods == {}


def test_a_master_that_does_not_answer_holds_a_deleted_job_for_a_time() -> None:
    world = running()
    deaf = World.do
    world.delete_job()
    world.do = lambda action: None if type(action).__name__ == "AskSuspend" else deaf(world, action)  # type: ignore[method-assign]
    world.deliver(100)
    world.work()
    world.deliver(100)
    world.work()
    assert world.of("master") and not world.of("out")
    world.now_s += SUSPEND_S
    assert writer(world)


def test_a_job_that_never_began_goes_at_once() -> None:
    world = World(job(out="s3://team/flights"))
    for _ in range(2):
        world.deliver(100)
        world.work(1)
    assert world.job["metadata"]["finalizers"] == [FINALIZER] and not world.ever
    world.delete_job()
    world.settle(4)
    assert world.gone


def test_tries_that_fail_are_counted_and_said() -> None:
    world = running()
    world.end(master(world), 0)
    for _ in range(TRIES):
        assert not holds(world, Condition.OUT_NOT_WRITTEN)
        world.end(writer(world), 4)
        world.work()
    world.settle(4)
    assert holds(world, Condition.OUT_NOT_WRITTEN) and not holds(world, Condition.OUT_WRITTEN)
    assert not world.of("out") and world.job["status"]["phase"] == JobPhase.SUCCEEDED
    world.delete_job()
    world.settle(4)
    assert world.gone


def test_what_the_cluster_takes_is_tried_again_and_wrong_settings_are_not() -> None:
    world = running()
    world.end(master(world), 0)
    for _ in range(2 * TRIES):
        world.end(writer(world), 137)
    world.end(writer(world), 2)
    world.settle(4)
    assert holds(world, Condition.OUT_NOT_WRITTEN)


def test_no_deleted_job_is_held_for_ever() -> None:
    world = running()
    world.delete_job()
    writer(world)
    world.now_s += GO_S
    world.settle(2)
    assert world.gone


@pytest.mark.parametrize("out", ["runs/flights", "nothing://flights"])
def test_a_wrong_place_is_refused(out: str) -> None:
    with pytest.raises(ConfigError, match=r"spec.out|protocol|nothing"):
        settings_of(job(out=out))


def test_model_and_checkpoints_are_beside_it() -> None:
    settings = settings_of(job(out="/mnt/out/"))
    assert settings["checkpoint_to"] == "/mnt/out/checkpoints" and settings["model_to"] == "/mnt/out/model"
    given_: Object = settings_of(job(out="/mnt/out", settings={"checkpoint_to": "s3://b/other"}))
    assert given_["checkpoint_to"] == "s3://b/other"


happening = st.one_of(
    st.tuples(st.just("work"), st.integers(0, 3)),
    st.tuples(st.just("deliver"), st.integers(1, 10)),
    st.tuples(st.just("restart"), st.just(0)),
    st.tuples(st.just("suspend"), st.booleans().map(int)),
    st.tuples(st.just("run"), st.integers(0, 20)),
    st.tuples(st.just("kill"), st.integers(0, 20)),
    st.tuples(st.just("vanish"), st.integers(0, 20)),
    st.tuples(st.just("leave"), st.just(0)),
    st.tuples(st.just("done"), st.just(0)),
    st.tuples(st.just("time"), st.sampled_from([1, 61])),
)


@settings(derandomize=True, deadline=None, max_examples=60, suppress_health_check=[HealthCheck.too_slow])
@given(st.lists(happening, max_size=40))
def test_an_operator_killed_anywhere_writes_once_it_is_back_and_the_job_goes(happened: list[tuple[str, int]]) -> None:
    world = World(job(out="s3://team/flights"))
    world.master_works = True
    for what, n in happened:
        names = sorted(world.pods)
        name = names[n % len(names)] if names else ""
        state = world.pods[name]["status"]["phase"] if name else ""
        match what:
            case "work":
                world.work(n)
            case "deliver":
                world.deliver(n)
            case "restart":
                world.restart_operator()
            case "suspend":
                suspend(world, bool(n))
            case "run" if state == "Pending":
                world.run(name)
            case "kill" if state == "Running":
                world.end(name, 137)
            case "vanish" if name:
                world.remove(name)
            case "leave":
                world.leave()
            case "done":
                for pod in [p for p in world.of("out") if p["status"]["phase"] == "Running"]:
                    world.end(name_of(pod), 0)
            case "time":
                world.now_s += n
    began = bool((world.job.get("status") or {}).get("podsMade"))
    world.delete_job()
    written = 0
    for _ in range(40):
        world.settle(1)
        for pod in [p for p in world.of("out") if p["status"]["phase"] == "Running"]:
            world.end(name_of(pod), 0)
            written += 1
        if world.gone:
            break
    assert world.gone and not world.there()["master"], (world.job["status"], sorted(world.pods))
    assert written or not began or holds(world, Condition.OUT_WRITTEN) or not world.job["metadata"].get("finalizers")
