"""``Resize``: processes that start next get other threads and memory; one that died of its memory gets more, once."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from everstep.brain.brain import Brain
from everstep.brain.events import (
    RULES,
    Event,
    Fenced,
    InstructionType,
    MasterStarted,
    MemberJoined,
    MemoryShort,
    NodeJoined,
    Note,
    Ok,
    PlanMade,
    ProcessExited,
    RaiseMemory,
    Refused,
    Reply,
    ResizeAsked,
    StartProcess,
    by_ps,
)
from everstep.brain.policy_control import refuse
from everstep.config.spec import JobSpec
from everstep.ids import Incarnation, NodeId, Slot
from everstep.model.decision import Decision
from everstep.model.failure import Failure
from everstep.model.member import Address, Role
from everstep.model.memory_limit import MemoryLimit, OutOfMemory
from everstep.model.observation import Observations, ServerSeen
from everstep.model.plan import Action, Plan, Resize, Scale
from everstep.model.process_size import ProcessSize

NODE, ONE, GB = NodeId("node0"), Incarnation(1), 1 << 30


class Told:
    """Is a job of two workers and two ps on one node that has told its memory."""

    def __init__(self, memory: int = 8 * GB, rules: dict[str, bool] = RULES, **spec: Any) -> None:
        self.brain, self.at = Brain(), 1.0
        self.tell(MasterStarted(ONE, JobSpec(**{"workers": 2, "ps": 2, "partitions": 4, **spec}), **rules))
        joined = NodeJoined(NODE, "", 0, 0)
        self.begun = self.tell(msgspec.structs.replace(joined, memory_bytes=memory, memory_limit=MemoryLimit.MACHINE))
        for role in (Role.PS, Role.WORKER):
            for slot in map(Slot, range(2)):
                if role is Role.WORKER or self.brain.job.spec.ps:
                    self.tell(MemberJoined(role, slot, ONE, NODE, 1, Address(NODE, f"{role}{slot}")))

    def tell(self, fact: Any) -> list[InstructionType]:
        self.at += 1.0
        out = self.brain.handle(Event(self.at, fact))
        self.brain.validate()
        return out

    def ask(self, **sizes: tuple[int, int]) -> Any:
        reply, *self.more = self.tell(ResizeAsked(tuple((Role(r), ProcessSize(*s)) for r, s in sizes.items())))
        assert isinstance(reply, Reply)
        return reply.answer

    def plan(self, *actions: Action) -> list[InstructionType]:
        return self.tell(PlanMade("mine:choose", Plan(actions=actions, decision=Decision("resize", "because"))))

    def dies(
        self, role: Role, slot: int = 1, limit: int = GB, kind: MemoryLimit = MemoryLimit.PROCESS, **more: Any
    ) -> list[InstructionType]:
        record = self.brain.members.of(role)[Slot(slot)]
        status = 12 if role is Role.PS else 1
        died = OutOfMemory(kind, limit)
        return self.tell(ProcessExited(role, Slot(slot), record.member.incarnation, status, memory=died, **more))


def started(out: list[InstructionType]) -> dict[str, ProcessSize]:
    return {f"{i.role}:{i.slot}": i.size for i in out if isinstance(i, StartProcess)}


def raised(out: list[InstructionType]) -> dict[str, int]:
    return {f"{i.role}:{i.slot} #{i.incarnation}": i.memory_bytes for i in out if isinstance(i, RaiseMemory)}


def said(out: list[InstructionType], action: str) -> list[str]:
    return [i.decision.reason for i in out if isinstance(i, Note) and i.decision.action == action]


def test_a_job_begins_with_the_sizes_of_its_settings() -> None:
    begun = Told(ps_memory="2GiB", threads_per_worker=3).begun
    assert started(begun) == {
        "ps:0": ProcessSize(0, 2 * GB), "ps:1": ProcessSize(0, 2 * GB),
        "worker:0": ProcessSize(3, 0), "worker:1": ProcessSize(3, 0),
    }  # fmt: skip


def test_those_that_start_next_get_it_and_nobody_is_restarted() -> None:
    t = Told()
    assert t.ask(ps=(4, 2 * GB), worker=(1, 0)) == Ok()
    assert started(t.more) == {} and len(said(t.more, "resize")) == 2
    assert said(t.more, "resize")[0] == "as asked: each ps that starts from now on gets 2.0 GiB, 4 threads"
    assert t.ask(ps=(0, 3 * GB)) == Ok()
    assert "gets 3.0 GiB, 4 threads instead of 2.0 GiB, 4 threads" in said(t.more, "resize")[0]
    assert t.ask(ps=(4, 3 * GB)) == Ok() and not t.more, "the same again changes nothing"
    out = t.tell(ProcessExited(Role.WORKER, Slot(0), ONE, -9))
    assert started(out)["worker:0"] == ProcessSize(1, 0)
    again = t.tell(NodeJoined(NODE, "", 0, 0))
    assert started(again)["worker:0"] == ProcessSize(1, 0), "ordered again, it has the size"


def test_sizes_outlive_the_master() -> None:
    t = Told()
    t.ask(ps=(2, GB))
    restored = Brain.restore(t.brain.snapshot())
    assert restored.concerns.sizes.of(Role.PS) == ProcessSize(2, GB)


def test_a_plan_resizes_with_other_actions_or_not_at_all() -> None:
    t = Told()
    out = t.plan(Resize(role=Role.PS, memory_bytes=2 * GB), Resize(role=Role.WORKER, threads=1), Scale(workers=3, ps=3))
    assert started(out) == {"ps:2": ProcessSize(0, 2 * GB), "worker:2": ProcessSize(1, 0)}
    assert "by plan 1: each ps that starts from now on gets 2.0 GiB" in said(out, "resize")
    dropped = t.plan(Resize(role=Role.PS, memory_bytes=100 * GB), Scale(workers=4))
    assert not started(dropped) and "node0 has 8.0 GiB" in said(dropped, "drop a plan")[0]
    assert not t.plan(Resize(role=Role.PS, memory_bytes=2 * GB))[1:], "the same plan twice changes nothing"


def test_a_plan_that_is_wrong_in_itself_is_its_policys_fault() -> None:
    seen = Observations(at=1.0, servers=(ServerSeen(slot=Slot(0), incarnation=ONE, node=NODE),))

    def why(*actions: Action) -> str:
        return refuse(Plan(actions=actions, decision=Decision("resize", "because")), seen)

    both = Resize(role=Role.PS, threads=1), Resize(role=Role.WORKER, threads=1)
    assert why(*both) == ""
    assert why(*both, Resize(role=Role.PS, threads=2)) == "RESIZE twice in one plan for ps"
    assert why(Resize(role=Role.PS)) == "RESIZE: nothing named for ps: threads, memory or both"
    assert why(Resize(role=Role.MASTER, threads=1)).startswith("RESIZE: master:")
    assert "at least 128.0 MiB" in why(Resize(role=Role.PS, memory_bytes=5))
    assert why(Resize(role=Role.PS, memory_bytes=GB, running=True)) == ""
    for wrong in (
        Resize(role=Role.PS, threads=1, running=True),
        Resize(role=Role.WORKER, memory_bytes=GB, running=True),
    ):
        assert "only the memory of ps that run can be raised" in why(wrong)
    none = refuse(Plan(actions=both, decision=Decision("resize", "because")), Observations(at=1.0, mode="allreduce"))
    assert none == "RESIZE: this job has no ps"


@pytest.mark.parametrize(
    ("spec", "sizes", "words"),
    [
        ({}, {"ps": (0, 100 * GB)}, "100.0 GiB for each ps: node0 has 8.0 GiB; its machine has no more"),
        ({"ps_memory": "1GiB", "max_memory": "4GiB"}, {"ps": (0, 3 * GB)}, "they exclude each other"),
        ({"mode": "allreduce", "ps": 0}, {"ps": (1, 0)}, "has no ps"),
        ({"mode": "allreduce", "ps": 0, "logical_workers": 4}, {"worker": (2, 0)}, "the bits of this job"),
        ({}, {}, "nothing named"),
        ({}, {"ps": (0, 1)}, "at least 128.0 MiB"),
    ],
)
def test_what_cannot_be_is_refused_in_one_line(spec: dict[str, Any], sizes: dict[str, Any], words: str) -> None:
    t = Told(**spec)
    before = t.brain.job.sizes
    answer = t.ask(**sizes)
    assert isinstance(answer, Refused) and words in answer.error and "\n" not in answer.error
    assert t.brain.job.sizes == before and not t.more


def test_a_ps_that_died_of_its_limit_comes_back_with_twice_as_much_once() -> None:
    t = Told(ps_memory="1GiB", parity="1+1")
    first = t.dies(Role.PS)
    assert said(first, "more memory") == [
        "it died of 1.0 GiB: each ps that starts from now on gets 2.0 GiB (2 times as much), and those that run get "
        "it at once; this is done once"
    ]
    assert raised(first) == {"ps:0 #1": 2 * GB}, "it is as full"
    assert started(first) == {"ps:1": ProcessSize(0, 2 * GB)}
    t.tell(MemberJoined(Role.PS, Slot(1), Incarnation(2), NODE, 1, Address(NODE, "ps1")))
    second = t.dies(Role.PS, limit=2 * GB)
    assert "got more once (2.0 GiB): everstep resize gives more" in said(second, "same memory")[0]
    assert t.brain.job.sizes[Role.PS] == ProcessSize(0, 2 * GB)
    assert t.brain.job.too_small[Role.PS] == OutOfMemory(MemoryLimit.PROCESS, 2 * GB), "the history gets the largest"
    assert t.brain.job.failures.memory == 2


def test_one_that_had_less_than_the_next_one_gets_is_no_second_time() -> None:
    t = Told(ps_memory="1GiB", parity="1+1")
    t.dies(Role.PS, slot=1)
    other = t.dies(Role.PS, slot=0)
    assert said(other, "more memory") == ["it had 1.0 GiB; the next one gets 2.0 GiB"]
    assert not said(other, "same memory")


def test_those_that_run_get_what_was_asked_for_by_hand_when_one_dies_of_less() -> None:
    t = Told(ps_memory="1GiB", parity="1+1")
    assert t.ask(ps=(0, 3 * GB)) == Ok() and raised(t.more) == {}, "a person names the next ones only"
    assert raised(t.dies(Role.PS, slot=1)) == {"ps:0 #1": 3 * GB}


def short(t: Told, slot: int = 0, limit: int = GB, incarnation: int = 1) -> list[InstructionType]:
    t.at += 1.0
    out = t.brain.handle(Event(t.at, MemoryShort(limit, limit - 1), by_ps(Slot(slot), Incarnation(incarnation))))
    t.brain.validate()
    return out


def test_a_ps_that_has_almost_reached_its_limit_gets_more_once_and_so_do_those_that_are_as_full() -> None:
    t = Told(ps_memory="1GiB", parity="1+1")
    first = short(t, slot=1)
    assert raised(first) == {"ps:0 #1": 2 * GB, "ps:1 #1": 2 * GB} and not started(first)
    (line,) = said(first, "more memory")
    assert line.startswith("it has almost reached the limit of its process (1.0 GiB): each ps that starts from now on ")
    assert "those that run get it at once; this is done once" in line
    other = short(t, slot=0)
    assert said(other, "more memory") == [
        "it has almost reached the limit of its process (1.0 GiB): it gets 2.0 GiB, as each ps that starts does"
    ]
    again = short(t, slot=0, limit=2 * GB)
    assert not raised(again) and "each ps has got more once" in said(again, "same memory")[0]
    died = t.dies(Role.PS, limit=2 * GB)
    assert not raised(died) and "has got more once" in said(died, "same memory")[0]
    assert t.brain.job.sizes[Role.PS] == ProcessSize(0, 2 * GB)


def test_what_is_asked_for_ahead_is_bounded_and_only_those_that_run_ask() -> None:
    t = Told(ps_memory="1GiB", max_memory="2GiB")
    out = short(t)
    assert not raised(out) and "max_memory 2GiB leaves each no more" in said(out, "same memory")[0]
    (reply,) = short(Told(ps_memory="1GiB"), incarnation=2)
    assert isinstance(reply, Reply) and isinstance(reply.answer, Fenced)
    before = Told(rules={**RULES, "raises": False}, ps_memory="1GiB")
    assert short(before) == [Reply(Ok())]


def test_ps_that_are_not_there_are_not_raised() -> None:
    t = Told(ps=3, ps_memory="1GiB", parity="1+1")
    t.tell(ProcessExited(Role.PS, Slot(0), ONE, -9))
    out = t.dies(Role.PS, slot=1)
    assert raised(out) == {}, "slots 0 and 2 are still starting: each begins with what is said then"
    assert started(out)["ps:1"] == ProcessSize(0, 2 * GB)
    assert not raised(Told(worker_memory="1GiB").dies(Role.WORKER)), "a worker holds nothing that is lost"


def test_a_plan_raises_those_that_run_even_if_the_next_ones_have_it_already() -> None:
    t = Told(ps_memory="1GiB")
    t.ask(ps=(0, 2 * GB))
    out = t.plan(Resize(role=Role.PS, memory_bytes=2 * GB, running=True))
    assert raised(out) == {"ps:0 #1": 2 * GB, "ps:1 #1": 2 * GB}
    assert not raised(t.plan(Resize(role=Role.PS, memory_bytes=3 * GB)))
    refused = t.plan(Resize(role=Role.PS, memory_bytes=100 * GB, running=True))
    assert said(refused, "drop a plan") and not raised(refused)


def test_a_limit_of_a_user_is_raised_too_if_it_is_known() -> None:
    t = Told(parity="1+1")
    assert started(t.dies(Role.PS, limit=GB)) == {"ps:1": ProcessSize(0, 2 * GB)}
    unknown = Told(parity="1+1").dies(Role.PS, limit=0)
    assert "nobody knows how high the limit of its process is" in said(unknown, "same memory")[0]
    assert started(unknown) == {"ps:1": ProcessSize()}


@pytest.mark.parametrize("kind", [MemoryLimit.CONTAINER, MemoryLimit.MACHINE])
def test_a_limit_that_is_not_the_jobs_is_said_with_what_to_do(kind: MemoryLimit) -> None:
    t = Told(parity="1+1")
    out = t.dies(Role.PS, kind=kind)
    (line,) = said(out, "same memory")
    assert "is not the job's to raise: " in line and ("pod" in line or "fewer processes" in line)
    assert started(out) == {"ps:1": ProcessSize()} and t.brain.job.too_small[Role.PS].limit is kind


@pytest.mark.parametrize(
    ("memory", "spec", "words"),
    [
        (GB, {}, "1.0 GiB: its machine has no more"),
        (8 * GB, {"ps_memory": "1GiB", "max_memory": "2GiB"}, "max_memory 2GiB leaves each no more"),
    ],
)
def test_bounds_hold_after_a_death(memory: int, spec: dict[str, Any], words: str) -> None:
    t = Told(memory, parity="1+1", **spec)
    out = t.dies(Role.PS)
    assert words in said(out, "same memory")[0] and not said(out, "more memory")


def test_a_worker_whose_script_got_no_memory() -> None:
    t = Told(worker_memory="1GiB")
    out = t.dies(Role.WORKER, error="MemoryError", failure=Failure("memory", "train.py:3"))
    assert started(out) == {"worker:1": ProcessSize(0, 2 * GB)} and said(out, "try again")


def test_masters_of_before_left_those_that_ran_alone() -> None:
    t = Told(rules={**RULES, "raises": False}, ps_memory="1GiB", parity="1+1")
    out = t.dies(Role.PS)
    assert not raised(out) and "(2 times as much); this is done once" in said(out, "more memory")[0]


def test_masters_of_before_gave_nobody_more() -> None:
    t = Told(rules={**RULES, "resizes": False}, ps_memory="1GiB", parity="1+1")
    out = t.dies(Role.PS)
    assert not said(out, "more memory") and not said(out, "same memory") and not t.brain.job.too_small
