"""Following: a copy that is given what each step did is the same bit for bit, whatever the script does between."""

from __future__ import annotations

import pytest
import torch
from replica_runs import Run
from torch import nn

from everstep.allreduce.state import ReplicaState
from everstep.allreduce.step_log import Did, Recorder, replay
from everstep.errors import CheckpointError
from everstep.model.group import Position


def follow(run: Run, copy: ReplicaState, recorder: Recorder, steps: int, **how: bool) -> None:
    for _ in range(steps):
        run.step(**how)
        did = recorder.boundary()
        assert did is not None, recorder.broken
        replay(copy, did.position, did.parts, "a step")


@pytest.mark.parametrize("optimizer", ["adam", "sgd", "adagrad"])
def test_fifty_steps_with_clipping_schedules_scaler_and_average(optimizer: str) -> None:
    run, copy = Run(0, optimizer), Run(1, optimizer)
    run.step()
    copy.state.load(run.state.snapshot())
    recorder = Recorder(run.state)
    follow(run, copy.state, recorder, 50)
    assert copy.state.digest() == run.state.digest() and copy.state.quick_digest() == run.state.quick_digest()
    recorder.close()
    for _ in range(5):  # the copy is a full member now
        run.step()
        copy.step()
    assert copy.state.digest() == run.state.digest()


def test_following_from_the_first_step_on() -> None:
    """Optimizers have no state before it."""
    run, copy = Run(0), Run(1)
    copy.state.load(run.state.snapshot())
    follow(run, copy.state, Recorder(run.state), 5)
    assert copy.state.digest() == run.state.digest()


def test_a_step_without_an_optimizer_and_one_with_two_calls() -> None:
    run, copy = Run(0), Run(1)
    copy.state.load(run.state.snapshot())
    recorder = Recorder(run.state)
    run.state.position = Position(1, 0, 0, 16)  # skipped: nothing was applied
    did = recorder.boundary()
    assert did is not None and len(did.parts) == 1
    replay(copy.state, did.position, did.parts, "a step")
    assert copy.state.digest() == run.state.digest()
    for p in run.model.parameters():
        p.grad = torch.ones_like(p)
    run.optimizers[0].step()
    run.optimizers[0].param_groups[0]["lr"] *= 3  # a learning-rate rule round the inner step
    run.optimizers[0].step()
    run.optimizers[0].param_groups[0]["lr"] /= 3
    run.state.position = Position(2, 0, 0, 32)
    did = recorder.boundary()
    assert did is not None and len(did.parts) == 3
    replay(copy.state, did.position, did.parts, "a step")
    assert copy.state.digest() == run.state.digest()


def test_carried_gradients_and_parameters_without_gradient() -> None:
    run, copy = Run(0), Run(1)
    copy.state.load(run.state.snapshot())
    recorder = Recorder(run.state)
    run.step()
    run.model[0].weight.grad = None  # (as an unused parameter)
    run.optimizers[0].step()
    run.model(torch.ones(4, 4)).sum().backward()
    run.state.carried = True
    did = recorder.boundary()
    assert did is not None
    replay(copy.state, did.position, did.parts, "a step")
    assert copy.state.digest() == run.state.digest() and copy.state.carried


def test_what_cannot_be_followed_breaks_the_tape_and_training_goes_on() -> None:
    embedding = nn.Embedding(4, 2, sparse=True)
    state = ReplicaState([embedding], [torch.optim.SGD(embedding.parameters(), lr=0.1)], {})
    recorder = Recorder(state)
    embedding(torch.tensor([1])).sum().backward()
    state.optimizers[0].step()
    assert recorder.boundary() is None and "torch.sparse_coo" in recorder.broken

    model = nn.Linear(2, 2)
    lbfgs = torch.optim.LBFGS(model.parameters())
    state = ReplicaState([model], [lbfgs], {})
    recorder = Recorder(state)

    def closure() -> torch.Tensor:
        lbfgs.zero_grad()
        loss = model(torch.ones(1, 2)).square().sum()
        loss.backward()
        return loss

    lbfgs.step(closure)  # type: ignore[arg-type]
    assert recorder.boundary() is None and "closure" in recorder.broken


def test_a_step_of_another_model_is_refused() -> None:
    run = Run(0)
    recorder = Recorder(run.state)
    run.step()
    did = recorder.boundary()
    assert isinstance(did, Did)
    model = nn.Linear(2, 2)
    other = ReplicaState([model], [torch.optim.SGD(model.parameters(), lr=0.1)] * 2, {})
    with pytest.raises(CheckpointError, match=r"is not|of another model|groups of parameters"):
        replay(other, did.position, did.parts, "a step")
