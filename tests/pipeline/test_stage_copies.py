"""Copies of stages are of one step, bit for bit, whatever happens between them; and what outlives a worker is whole."""

from __future__ import annotations

import os
import random
import time
from collections.abc import Iterator

import pytest
import torch
from torch import nn

from everstep.allreduce.serialize import SerializedState
from everstep.allreduce.stage_parts import WholeModel
from everstep.allreduce.state import ReplicaState
from everstep.errors import ConfigError, PlatformError
from everstep.model.group import Position
from everstep.model.stage_spans import COPIES_VARIABLE, COPY_SLOTS, SpanKind
from everstep.pipeline import slot_memory
from everstep.pipeline.copy_recovery import KeptCopy
from everstep.pipeline.copy_slots import CopyMemory, CopyMeta
from everstep.pipeline.spans import SpanRecorder
from everstep.pipeline.stage_copies import StageCopies

torch.set_num_threads(1)
STAGES = 2


class Stage:
    """One stage: a module with its own kind of state, AdamW and a scheduler."""

    def __init__(self, memory: CopyMemory, number: int, width: int, life: int = 1, every: int = 1) -> None:
        torch.manual_seed(number)
        self.model = nn.Linear(width, width)
        self.model.register_buffer("seen", torch.zeros(3))
        self.number = number
        self.opt = torch.optim.AdamW([{"params": [self.model.weight]}, {"params": [self.model.bias]}], lr=0.1)
        self.rate = torch.optim.lr_scheduler.StepLR(self.opt, 3)
        self.state = ReplicaState([self.model], [self.opt], {"rate": self.rate})
        self.copies = StageCopies(memory, number, life, self.state, every)
        self.truth: dict[int, SerializedState] = {}

    def begin(self, step: int) -> None:
        self.truth[step] = self.state._serialized(Position(), 0, None)
        meta = CopyMeta(Position(step, 0, 0, 8 * step), 1, 1, 0, 1) if self.number == 0 else None
        self.copies.begin(step, meta)

    def forward(self) -> None:
        self.model.seen += 1.0
        for p in self.model.parameters():
            p.grad = torch.randn_like(p)

    def optimize(self) -> None:
        self.copies.finish()
        self.opt.step()
        self.rate.step()


@pytest.fixture
def fds() -> Iterator[list[int]]:
    made = [os.memfd_create("test") for _ in range(1 + COPY_SLOTS * STAGES)]
    yield made
    for fd in made:
        os.close(fd)


def equal(a: SerializedState, b: SerializedState) -> bool:
    return a.header == b.header and torch.equal(a.body, b.body)


def found(fds: list[int], stages: list[Stage]) -> int:
    """The step of the copy that another process finds; it is what all stages had before that step."""
    newest = CopyMemory(fds, STAGES).newest()
    if newest is None:
        return -1
    meta, parts = newest
    for stage, part in zip(stages, parts, strict=True):
        assert equal(part, stage.truth[meta.position.step]), (
            f"the copy of stage {stage.number}, step {meta.position.step}"
        )
    return meta.position.step


def pair(fds: list[int], width: int = 40, life: int = 1, every: int = 1) -> list[Stage]:
    memory = [CopyMemory(fds, STAGES) for _ in range(STAGES)]
    stages = [Stage(memory[n], n, width + n, life, every) for n in range(STAGES)]
    stages[0].copies.adopt(-1)
    return stages


def iterate(stages: list[Stage], step: int, draws: random.Random) -> None:
    stages[0].copies.choose(step)
    for stage in stages:
        stage.begin(step)
    for _ in range(draws.randrange(3)):
        for stage in stages:
            stage.copies.wait_begins()
            stage.copies.wait_ends()
            stage.forward()
    for stage in stages:
        stage.forward()
        stage.optimize()


def test_each_copy_of_many_is_of_the_step_that_it_claims(fds: list[int]) -> None:
    stages, draws = pair(fds), random.Random(1)
    for step in range(150):
        iterate(stages, step, draws)
        assert found(fds, stages) == step
        for stage in stages:
            stage.truth = {k: v for k, v in stage.truth.items() if k >= step - 2}
    totals = stages[1].copies.totals
    assert totals.copies == 150 and not (totals.discarded or totals.skipped or totals.overruns)
    assert totals.copied_bytes > 150 * 3 * 41 * 41 * 4 * 0.99


@pytest.mark.parametrize("seed", range(12))
def test_whenever_a_worker_ends_a_copy_of_one_of_the_last_two_steps_is_left(fds: list[int], seed: int) -> None:
    """Two stages, each at its own pace as far as votes let it, end at any point; also in the midst of a copy."""
    draws = random.Random(seed)
    stages = pair(fds)
    ends = draws.randrange(40, 400)
    at = [0, 0]  # of each stage: twelve points in each iteration
    for _ in range(ends):
        ready = [n for n in range(STAGES) if (at[n] % 12 != 7 or min(at) >= at[n]) and (n == 0 or at[1] < at[0])]
        n = draws.choice(ready or [min(range(STAGES), key=lambda i: at[i])])
        step, point = divmod(at[n], 12)
        stage = stages[n]
        match point:
            case 0:
                if n == 0:
                    stage.copies.choose(step)
                stage.begin(step)
            case 1 | 3 | 5:
                stage.copies.wait_begins()
            case 2 | 4 | 6:
                stage.copies.wait_ends()
            case 8:
                stage.forward()
            case 9:
                stage.copies.finish()
            case 10:
                stage.optimize()
        at[n] += 1
        newest = found(fds, stages)
        assert newest >= min(at) // 12 - 1, (newest, at)


def test_a_state_that_is_changed_meanwhile_is_not_copied(fds: list[int]) -> None:
    stages, draws = pair(fds), random.Random(2)
    iterate(stages, 0, draws)
    stages[0].copies.choose(1)
    for stage in stages:
        stage.begin(1)
    with torch.no_grad():
        stages[1].model.weight.mul_(0.5)
    for stage in stages:
        stage.forward()
        stage.optimize()
    assert found(fds, stages) == 0
    assert stages[1].copies.totals.discarded == 1
    for step in range(2, 6):
        iterate(stages, step, draws)
    assert found(fds, stages) == 5


def test_copies_are_taken_in_one_of_several_iterations(fds: list[int]) -> None:
    stages, draws = pair(fds, every=3), random.Random(3)
    seen = []
    for step in range(8):
        iterate(stages, step, draws)
        seen.append(found(fds, stages))
    assert seen == [0, 0, 0, 3, 3, 3, 6, 6]


def test_a_damaged_copy_is_passed_over_and_an_older_one_is_taken(fds: list[int]) -> None:
    stages, draws = pair(fds), random.Random(4)
    for step in range(5):
        iterate(stages, step, draws)
    memory = CopyMemory(fds, STAGES)
    slot = next(s for s in memory.slots[1] if (h := s.head()) is not None and h.step == 4)
    head = slot.head()
    assert head is not None
    slot._mapped(0)[head.body_at + 77] ^= 1
    assert found(fds, stages) == 3
    slot = next(s for s in memory.slots[0] if (h := s.head()) is not None and h.step == 3)
    head = slot.head()
    assert head is not None
    slot._mapped(0)[head.text_at + 3] ^= 1
    assert found(fds, stages) == -1


def test_a_copy_that_lacks_a_stage_is_none(fds: list[int]) -> None:
    stages, draws = pair(fds), random.Random(5)
    for step in range(3):
        iterate(stages, step, draws)
    for slot in CopyMemory(fds, STAGES).slots[1]:
        slot.clear()
    assert found(fds, stages) == -1


def test_parts_of_different_steps_are_no_copy(fds: list[int]) -> None:
    stages, draws = pair(fds), random.Random(6)
    for step in range(3):
        iterate(stages, step, draws)
    memory = CopyMemory(fds, STAGES)
    next(s for s in memory.slots[0] if (h := s.head()) is not None and h.step == 2).clear()
    next(s for s in memory.slots[1] if (h := s.head()) is not None and h.step == 1).clear()
    assert found(fds, stages) == -1


def test_a_job_goes_on_without_copies_where_there_is_no_memory(
    fds: list[int], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    stages, draws = pair(fds), random.Random(7)
    iterate(stages, 0, draws)
    monkeypatch.setattr(slot_memory, "free_memory", lambda: 1000)
    for step in range(1, 5):
        iterate(stages, step, draws)
    assert "no memory for a copy of this stage" in caplog.text and "goes on without copies" in caplog.text
    assert found(fds, stages) in (-1, 0) and stages[0].copies.totals.copies == 1
    with pytest.raises(PlatformError, match="MB more, and the machine has 0 MB to spare"):
        CopyMemory(fds, STAGES).slots[0][1].begin(1, 1, b"", b"", 1 << 30)


def test_the_whole_model_comes_out_of_its_stages(fds: list[int]) -> None:
    memory = CopyMemory(fds, STAGES)
    whole = WholeModel()
    whole.parameters = [f"{n}.{kind}" for n in range(STAGES) for kind in ("weight", "bias")]
    states = []
    memory.clear()
    for n in range(STAGES):
        torch.manual_seed(n)
        model = nn.ModuleDict({str(n): nn.Linear(3, 3)})
        opt = torch.optim.SGD(model.parameters(), lr=0.1)
        state = ReplicaState([model], [opt], {})
        copies = StageCopies(memory, n, 1, state, 1)
        memory.page.step = 4
        copies.begin(4, CopyMeta(Position(4, 0, 0, 32), 2, 1, 3, 5) if n == 0 else None)
        copies.finish()
        states.append((model, opt))
    kept = KeptCopy.find(CopyMemory(fds, STAGES), whole)
    assert kept is not None and (kept.held.position.step, kept.held.lineage, kept.slot, kept.incarnation) == (
        4,
        1,
        3,
        5,
    )
    both = nn.ModuleDict({str(n): nn.Linear(3, 3) for n in range(STAGES)})
    state = ReplicaState([both], [torch.optim.SGD(both.parameters(), lr=0.1)], {})
    state.load(kept.serialized())
    assert (state.position, state.loop) == (Position(4, 0, 0, 32), 2)
    for n, (model, _) in enumerate(states):
        assert torch.equal(both[str(n)].weight, model[str(n)].weight)


def test_files_that_are_not_of_the_template_are_refused(fds: list[int]) -> None:
    assert CopyMemory.from_environment({}, STAGES) is None
    assert CopyMemory.from_environment({COPIES_VARIABLE: "1,2"}, 1) is None
    for text in ("1,2", "a,b,c,d,e", "991,992,993,994,995"):
        with pytest.raises(ConfigError, match=COPIES_VARIABLE):
            CopyMemory.from_environment({COPIES_VARIABLE: text}, STAGES)


def test_what_was_measured_in_one_generation_does_not_count_in_the_next(fds: list[int]) -> None:
    stages, draws = pair(fds), random.Random(4)
    for step in range(12):
        iterate(stages, step, draws)
    copies = stages[0].copies
    measured = copies._lengths, copies._costs
    assert all(measured)
    copies.choose(12)
    copies.begin(12, None, 1)
    assert not copies._lengths and not copies._costs
    copies.finish()
    copies.begin(13, None, 1)
    copies.wait_begins()
    copies.wait_ends()
    assert copies._lengths


def test_a_wait_says_how_long_it_copied(fds: list[int]) -> None:
    """The recorder keeps that as spans inside of the wait; a wait in which nothing is copied has none."""
    stages = pair(fds, width=700)
    recorder = SpanRecorder()
    recorder.copies = stages[0].copies
    stages[0].copies.choose(0)
    for stage in stages:
        stage.begin(0)
    recorder.begin()
    with recorder.measure(SpanKind.WAIT):
        end = time.monotonic() + 60
        while stages[0].copies._copier.left and time.monotonic() < end:
            time.sleep(0.001)
        time.sleep(0.01)  # (the last block is claimed, and ends in the wait)
    stages[0].copies.finish()
    with recorder.measure(SpanKind.WAIT):
        pass
    wait, copied, after = recorder.spans
    assert [one.kind for one in recorder.spans] == [SpanKind.WAIT, SpanKind.COPY, SpanKind.WAIT]
    assert copied.begin_s == wait.begin_s and 0 < copied.length_s <= wait.length_s <= after.begin_s - wait.begin_s
