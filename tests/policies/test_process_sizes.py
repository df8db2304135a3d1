"""Sizes of processes that start next: what is refused, and how much more one gets that died of its memory."""

from __future__ import annotations

import pytest

from everstep.config.spec import JobSpec
from everstep.model.decision import Decision
from everstep.model.member import Role
from everstep.model.memory_limit import MemoryLimit
from everstep.model.plan import Resize, Scale
from everstep.model.process_size import ProcessSize
from everstep.policies.process_sizes import (
    NodeMemory,
    asked_sizes,
    raised_memory,
    refuse_sizes,
    refuse_wish,
    size_words,
    wishes,
)

GB = 1 << 30
PS = {Role.PS: ProcessSize(0, 4 * GB)}


def test_a_job_asks_for_sizes_by_its_settings() -> None:
    assert asked_sizes(JobSpec()) == {}
    spec = JobSpec(threads_per_worker=2, ps_threads=3, ps_memory="2GiB")
    assert asked_sizes(spec) == {Role.WORKER: ProcessSize(2, 0), Role.PS: ProcessSize(3, 2 * GB)}


def test_a_wish_leaves_what_it_does_not_name() -> None:
    assert ProcessSize(2, GB).with_wish(ProcessSize(4, 0)) == ProcessSize(4, GB)
    actions = (Resize(role=Role.PS, threads=4), Scale(workers=2), Resize(role=Role.WORKER, memory_bytes=GB))
    assert wishes(actions) == {Role.PS: ProcessSize(4, 0), Role.WORKER: ProcessSize(0, GB)}
    assert size_words(ProcessSize(1, 2 * GB)) == "2.0 GiB, 1 thread" and size_words(ProcessSize()) == ""


@pytest.mark.parametrize(
    ("role", "threads", "memory", "words"),
    [
        (Role.MASTER, 1, 0, "workers and ps have a size"),
        (Role.PS, 0, 0, "nothing named for ps"),
        (Role.PS, 2000, 0, "2000 threads for ps: must be from 1 to 1024"),
        (Role.PS, -1, 0, "-1 threads for ps"),
        (Role.PS, 0, 1 << 20, "1.0 MiB for ps: a ps needs at least 128.0 MiB before it has a row"),
        (Role.WORKER, 0, 128 << 20, "a worker needs at least 512.0 MiB before it has a batch"),
        (Role.WORKER, 0, 1 << 60, "for worker"),
    ],
)
def test_a_wish_that_is_none(role: Role, threads: int, memory: int, words: str) -> None:
    assert words in refuse_wish(role, threads, memory)
    assert "\n" not in refuse_wish(role, threads, memory)


def test_bounds_that_exclude_each_other() -> None:
    spec = JobSpec(policy="auto", max_workers=2, max_ps=4, max_memory="10GiB")
    sizes = {**PS, Role.WORKER: ProcessSize(0, 2 * GB)}
    assert refuse_sizes(spec, sizes, {Role.PS: 2, Role.WORKER: 1}, []) == ""
    words = refuse_sizes(spec, sizes, {Role.PS: 2, Role.WORKER: 2}, [])
    assert words == "2 ps of 4.0 GiB and 2 workers of 2.0 GiB are more than max_memory 10GiB: they exclude each other"


@pytest.mark.parametrize(
    ("limit", "words"),
    [
        (MemoryLimit.MACHINE, "its machine has no more"),
        (MemoryLimit.CONTAINER, "give it more (resources of its pod, --mem of its Slurm job)"),
        (MemoryLimit.PROCESS, "ulimit -Hd"),
    ],
)
def test_more_than_the_machine_has(limit: MemoryLimit, words: str) -> None:
    counts = {Role.PS: 1, Role.WORKER: 1}
    small, large = NodeMemory("node0", 2 * GB, limit), NodeMemory("node1", 8 * GB, limit)
    refused = refuse_sizes(JobSpec(), PS, counts, [small])
    assert refused.startswith("4.0 GiB for each ps: node0 has 2.0 GiB; ") and words in refused
    assert refuse_sizes(JobSpec(), PS, counts, [small, large]) == "", "one node takes it"
    assert refuse_sizes(JobSpec(), PS, counts, [NodeMemory("node0")]) == "", "nobody has told"


def test_twice_as_much_within_the_bounds() -> None:
    node = NodeMemory("node0", 8 * GB, MemoryLimit.MACHINE)
    assert raised_memory(JobSpec(), Role.PS, GB, 0, 2, node) == (2 * GB, "2 times as much")
    assert raised_memory(JobSpec(), Role.PS, 5 * GB, 0, 2, node).memory_bytes == 8 * GB, "what its node has"
    none = raised_memory(JobSpec(), Role.PS, 8 * GB, 0, 2, node)
    assert none.memory_bytes == 0 and "its machine has no more" in none.why
    least = raised_memory(JobSpec(), Role.PS, 40 << 20, 0, 2, node)
    assert least == (128 << 20, "the least with which a ps comes up")
    bounded = JobSpec(ps_memory="1GiB", max_memory="5GiB")
    assert raised_memory(bounded, Role.PS, GB, 2 * GB, 2, node).memory_bytes == round(1.5 * GB)
    full = raised_memory(bounded, Role.PS, GB, 3 * GB, 2, node)
    assert full.memory_bytes == 0 and "max_memory 5GiB leaves each no more: raise it" in full.why


def test_a_plan_is_decoded_with_it() -> None:
    import msgspec

    from everstep.model.plan import Plan

    plan = Plan(actions=(Resize(role=Role.PS, memory_bytes=GB),), decision=Decision("resize", "because"))
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(plan), type=Plan) == plan
