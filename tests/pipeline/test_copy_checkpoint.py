"""Checkpoints are written from the copies of the stages: of one step, bit for bit, or not at all."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from torch import nn

from everstep.allreduce.parts_checkpoint import PartsIndex
from everstep.allreduce.replica_checkpoint import ReplicaWriter, read_replica
from everstep.allreduce.serialize import SerializedState
from everstep.allreduce.stage_parts import WholeModel, joined
from everstep.allreduce.state import ReplicaState
from everstep.brain.events import Answer, Ok, ReplicaWritten
from everstep.config.spec import JobSpec
from everstep.errors import CheckpointError
from everstep.model.group import Position
from everstep.model.snapshot import PARTS_VERSION, CheckpointFile, Manifest, ReplicaCopy
from everstep.model.stage_spans import COPY_SLOTS
from everstep.net.messages import RequestType, TakeReplica
from everstep.net.retry import Deadline
from everstep.pipeline.copy_checkpoint import CopyCheckpoint
from everstep.pipeline.copy_slots import CopyMemory, CopyMeta
from everstep.pipeline.stage_copies import StageCopies
from everstep.protect.manifest import drop_checkpoints, latest_intact, problems, write_manifest
from everstep.protect.replicafile import ReplicaHead, write_replica_file
from everstep.storage.places import open_place

torch.set_num_threads(1)
STAGES = 3
WAIT_S = 60.0


class Runtime:
    """Keeps what the master is told."""

    embedded = True
    slot, incarnation = 0, 1
    spec = JobSpec(name="toy", mode="pipeline")

    def __init__(self) -> None:
        self.told: list[ReplicaWritten] = []

    def home_link(self) -> None:
        """Files are here."""

    def call(self, request: RequestType, timeout_s: float) -> Answer:
        assert isinstance(request, ReplicaWritten)
        self.told.append(request)
        return Ok()


class Pipeline:
    """Three stages with AdamW in one process, and the writer of the first one. Stage 1 is frozen."""

    def __init__(self, place: Path, copies: bool = True) -> None:
        self.fds = [os.memfd_create("test") for _ in range(1 + COPY_SLOTS * STAGES)]
        self.place, self.step = place, 0
        self.whole = WholeModel()
        self.models, self.opts, self.states, self.copies = [], [], [], []
        memories = [CopyMemory(self.fds, STAGES) for _ in range(STAGES)]
        for n in range(STAGES):
            torch.manual_seed(n)
            model = nn.Sequential()
            model.add_module(f"part{n}", nn.Linear(70 + n, 90))
            model.requires_grad_(n != 1)
            opt = torch.optim.AdamW(model.parameters(), lr=0.1)
            state = ReplicaState([model], [opt], {})
            self.whole.parameters += [name for name, _ in model.named_parameters()]
            self.models.append(model)
            self.opts.append(opt)
            self.states.append(state)
            self.copies.append(StageCopies(memories[n], n, 1, state, 1))
        self.copies[0].adopt(-1)
        self.memory = memories[0]
        self.runtime: Any = Runtime()
        self.writer = ReplicaWriter(self.states[0], self.runtime)
        self.source = CopyCheckpoint(self.memory, self.copies[0], self.whole, 1)
        self.writer.copies = self.source if copies else None
        self.truth: dict[int, SerializedState] = {}

    def train(self, times: int = 1, change: bool = False) -> None:
        for _ in range(times):
            step = self.step
            position = Position(step, 0, 0, 8 * step)
            parts = [state._serialized(Position(), 0, None) for state in self.states]
            self.truth[step] = joined(parts, self.whole, position, 1)
            self.writer.next_step(step)
            self.copies[0].choose(step)
            for n, copies in enumerate(self.copies):
                copies.begin(step, CopyMeta(position, 1, 1, 0, 1) if n == 0 else None)
            for n, copies in enumerate(self.copies):
                copies.wait_begins()
                copies.wait_ends()
                for p in self.models[n].parameters():
                    p.grad = torch.randn_like(p) if n != 1 else None
                if change:
                    with torch.no_grad():
                        self.models[n].get_submodule(f"part{n}").weight.add_(1.0)
                copies.finish()
                self.opts[n].step()
            self.step += 1
            self.states[0].position = Position(self.step, 0, 0, 8 * self.step)
            self.writer.boundary()
            self.writer.committed_everywhere(self.step)

    def take(self, number: int, since: int = 0, steps: int = 3) -> ReplicaWritten:
        """As the worker and its master do it; training goes on meanwhile."""
        self.writer.order(TakeReplica(number, str(self.place), since=since, copies=True))
        before = len(self.runtime.told)
        self.train(steps)
        deadline = Deadline(WAIT_S, "a checkpoint")
        while not (len(self.runtime.told) > before and self.writer.idle):
            self.train()
            deadline.check()
        told: ReplicaWritten = self.runtime.told[-1]
        return told

    def commit(self, number: int, told: ReplicaWritten) -> Manifest:
        assert told.replica is not None, told.error
        made = manifest(number, told.replica)
        write_manifest(open_place(self.place), made)
        return made


def manifest(number: int, replica: ReplicaCopy) -> Manifest:
    return Manifest(
        version=PARTS_VERSION,
        job="toy",
        checkpoint=number,
        at=1.0,
        seed=0,
        partitions=1,
        snapshots=(),
        replica=replica,
    )


@pytest.fixture
def pipeline(tmp_path: Path) -> Iterator[Pipeline]:
    made = Pipeline(tmp_path)
    yield made
    made.writer.close()
    for fd in made.fds:
        os.close(fd)


def read(pipeline: Pipeline, number: int = 0) -> SerializedState:
    place = open_place(pipeline.place)
    found = latest_intact(place)
    assert not number or found.checkpoint == number
    return read_replica(place, found)


def same(a: SerializedState, b: SerializedState) -> bool:
    return a.header == b.header and torch.equal(a.body, b.body)


def test_a_checkpoint_is_the_state_of_one_step_bit_for_bit(pipeline: Pipeline) -> None:
    pipeline.train(2)
    for number in range(1, 6):
        told = pipeline.take(number, since=number - 1)
        made = pipeline.commit(number, told)
        assert made.replica is not None and len(made.replica.parts) == STAGES
        assert same(read(pipeline, number), pipeline.truth[made.replica.position.step])
        assert pipeline.memory.page.held == -1


def test_nothing_is_copied_between_two_steps(pipeline: Pipeline, monkeypatch: pytest.MonkeyPatch) -> None:
    def never(*_: Any) -> SerializedState:
        raise AssertionError("a second copy of the state")

    monkeypatch.setattr(ReplicaState, "snapshot", never)
    pipeline.commit(1, pipeline.take(1))
    assert pipeline.writer.saved is not None


def test_a_stage_that_did_not_change_is_not_written_again(pipeline: Pipeline) -> None:
    pipeline.train()
    first = pipeline.commit(1, pipeline.take(1)).replica
    second = pipeline.commit(2, pipeline.take(2, since=1)).replica
    assert first is not None and second is not None
    assert second.parts[1] == first.parts[1] and second.parts[0] != first.parts[0] != second.parts[2]
    assert 0 < second.written_bytes(2) < second.size_bytes
    place = open_place(pipeline.place)
    drop_checkpoints(place, [1])  # what the second one needs of the first stays
    assert not list(problems(place, latest_intact(place)))
    assert same(read(pipeline, 2), pipeline.truth[second.position.step])
    third = pipeline.take(3, since=0).replica  # nobody says that the second one was committed: nothing builds on it
    assert third is not None and third.written_bytes(3) == third.size_bytes


def test_while_it_is_written_no_stage_writes_over_it(pipeline: Pipeline, monkeypatch: pytest.MonkeyPatch) -> None:
    """The thread that writes is slower than ten steps; each of them is copied too."""
    check = CopyCheckpoint.check
    reached: list[int] = []

    def slowly(self: CopyCheckpoint, held: Any, stage: int, lo: int, hi: int) -> None:
        reached.append(stage)
        deadline = Deadline(WAIT_S, "ten steps")
        while pipeline.step < held.position.step + 10 * (stage + 1):
            deadline.check()
        check(self, held, stage, lo, hi)

    monkeypatch.setattr(CopyCheckpoint, "check", slowly)
    told = pipeline.take(1)
    assert told.replica is not None and reached == [0, 1, 2]
    pipeline.commit(1, told)
    assert same(read(pipeline), pipeline.truth[told.replica.position.step])
    assert pipeline.memory.page.common == pipeline.step - 1  # copies went on


def test_a_state_that_is_lost_meanwhile_is_no_checkpoint(pipeline: Pipeline, monkeypatch: pytest.MonkeyPatch) -> None:
    check = CopyCheckpoint.check

    def lost(self: CopyCheckpoint, held: Any, stage: int, lo: int, hi: int) -> None:
        check(self, held, stage, lo, hi)
        if stage == 2:
            pipeline.memory.clear()

    monkeypatch.setattr(CopyCheckpoint, "check", lost)
    told = pipeline.take(1)
    assert told.replica is None and told.error == "the state that it is of was lost meanwhile"


def test_a_damaged_block_is_no_checkpoint(pipeline: Pipeline, monkeypatch: pytest.MonkeyPatch) -> None:
    check = CopyCheckpoint.check

    def flip(self: CopyCheckpoint, held: Any, stage: int, lo: int, hi: int) -> None:
        if stage == 1:
            held.parts[1].body[77] ^= 1
        check(self, held, stage, lo, hi)

    monkeypatch.setattr(CopyCheckpoint, "check", flip)
    told = pipeline.take(1)
    assert told.replica is None and told.error == "the copy of stage 1: block 0 is damaged"


def test_where_no_copy_becomes_whole_the_state_is_copied_between_two_steps(pipeline: Pipeline) -> None:
    """The script changes parameters before its optimizer steps, so each copy is thrown away."""
    pipeline.writer.order(TakeReplica(1, str(pipeline.place), copies=True))
    deadline = Deadline(WAIT_S, "a checkpoint")
    while not pipeline.runtime.told:
        pipeline.train(change=True)
        deadline.check()
    found = pipeline.runtime.told[-1].replica
    assert found is not None and found.parts == ()


def test_where_nothing_is_trained_any_more_nobody_waits_for_a_copy(pipeline: Pipeline) -> None:
    pipeline.train()
    pipeline.writer.order(TakeReplica(1, str(pipeline.place), copies=True))
    deadline = Deadline(WAIT_S, "a checkpoint")
    while not pipeline.runtime.told:
        pipeline.writer.boundary(trained=False)
        deadline.check()
    found = pipeline.runtime.told[-1].replica
    assert found is not None and found.parts == () and found.position.step == 1


def test_a_copy_that_was_begun_and_never_ends_is_given_up(pipeline: Pipeline) -> None:
    pipeline.train()
    pipeline.writer.order(TakeReplica(1, str(pipeline.place), copies=True))
    assert pipeline.writer.next_step(1) and pipeline.memory.page.held == 1
    deadline = Deadline(WAIT_S, "a checkpoint")
    while not pipeline.runtime.told:
        pipeline.writer.boundary(trained=False)
        deadline.check()
    assert pipeline.runtime.told[-1].replica.parts == () and pipeline.memory.page.held == -1


# ---------------------------------------------------------------- what is refused


def parts_of(pipeline: Pipeline) -> ReplicaCopy:
    pipeline.train()
    replica = pipeline.commit(1, pipeline.take(1)).replica
    assert replica is not None
    return replica


def refused(pipeline: Pipeline, replica: ReplicaCopy, words: str) -> None:
    with pytest.raises(CheckpointError, match=words):
        read_replica(open_place(pipeline.place), manifest(1, replica))


def test_a_checkpoint_that_lacks_a_stage(pipeline: Pipeline) -> None:
    replica = parts_of(pipeline)
    one_less = msgspec.structs.replace(replica, parts=replica.parts[:2])
    refused(pipeline, one_less, "is of 3 stages, and the manifest names files of 2")


def test_parts_of_different_steps(pipeline: Pipeline) -> None:
    first = parts_of(pipeline)
    second = pipeline.commit(2, pipeline.take(2)).replica
    assert second is not None
    mixed = msgspec.structs.replace(second, parts=(first.parts[0], *second.parts[1:]))
    refused(
        pipeline,
        mixed,
        f"is of step {first.position.step}, and the checkpoint needs stage 0 of step {second.position.step}",
    )


def test_stages_that_are_exchanged(pipeline: Pipeline) -> None:
    replica = parts_of(pipeline)
    swapped = msgspec.structs.replace(replica, parts=(replica.parts[2], replica.parts[1], replica.parts[0]))
    refused(pipeline, swapped, "bytes, and stage 0 has")


def test_a_damaged_and_a_missing_part_are_named(pipeline: Pipeline) -> None:
    replica = parts_of(pipeline)
    path = pipeline.place / replica.parts[2].path
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)
    found = list(problems(open_place(pipeline.place), manifest(1, replica)))
    assert len(found) == 1 and replica.parts[2].path in found[0]
    path.unlink()
    found = list(problems(open_place(pipeline.place), manifest(1, replica)))
    assert len(found) == 1 and found[0].endswith("is missing: checkpoint 1 needs that file")


def test_an_index_that_names_what_no_stage_has(pipeline: Pipeline) -> None:
    replica = parts_of(pipeline)
    place = open_place(pipeline.place)
    data = (pipeline.place / replica.file.path).read_bytes()
    assert b"part2.weight" in data
    index = PartsIndex(
        position=replica.position, loop=0, parameters=("elsewhere",), buffers=(), stages=_stages(pipeline, replica)
    )
    text = msgspec.msgpack.encode(index)
    head = ReplicaHead(job="toy", checkpoint=1, position=replica.position, header_bytes=len(text), body_bytes=0)
    path = "images/000001/replica-0.1-other.rep"
    with place.create(path) as file:
        written = write_replica_file(file.write, head, text, memoryview(b""))
        file.commit()
    made: CheckpointFile = msgspec.structs.replace(written, path=path)
    refused(pipeline, msgspec.structs.replace(replica, file=made), "no stage has 'elsewhere'")


def _stages(pipeline: Pipeline, replica: ReplicaCopy) -> Any:
    from everstep.allreduce.replica_checkpoint import _read_file

    _, read_file = _read_file(open_place(pipeline.place), replica.file, "")
    return msgspec.msgpack.decode(read_file.header, type=PartsIndex).stages


def test_whatever_bytes_an_index_has_it_is_read_or_refused_in_one_line(pipeline: Pipeline) -> None:
    from everstep.allreduce.parts_checkpoint import read_index

    replica = parts_of(pipeline)
    data = bytearray((pipeline.place / replica.file.path).read_bytes())
    draws = np.random.default_rng(0)
    for _ in range(300):
        cut = bytes(data[draws.integers(0, 60) : draws.integers(60, len(data))])
        try:
            read_index(cut, STAGES, "the index")
        except CheckpointError as error:
            assert "\n" not in str(error) and str(error).startswith("the index")
