"""Scripts that cannot work in a group: one clear error each, never a hang."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from groups import ListLoader, Member, alone, run_group
from scripts import adam, data, loop, loss_of, net, values
from torch import nn

from everstep.config.spec import JobSpec
from everstep.errors import ScriptError


def run_one(script: Any) -> None:
    alone(JobSpec(), script)


def test_nan_raises_and_names_the_parameter_or_is_skipped() -> None:
    def script(member: Member) -> Any:
        model = member.replicate(net())
        opt = member.optimizer(adam(model))
        for one in member.steps(ListLoader(data(), 8)):
            opt.zero_grad()
            bad = float("nan") if member.engine.step_number == 1 and member.rank == 1 else 1.0
            (loss_of(model, one) * bad).backward()
            opt.step()
        return values(model), [what for *_, what in member.session.log]

    with pytest.raises(AssertionError, match=r"NonFiniteGradientError: the gradient of '0.weight' has NaN"):
        run_group(2, JobSpec(workers=2), script)
    for state, log in run_group(2, JobSpec(workers=2, nonfinite="skip"), script):
        assert log == ["committed", "skipped", "committed"]
        assert all(torch.isfinite(v).all() for v in state.values())


def test_an_untracked_scheduler() -> None:
    def script(member: Member) -> None:
        model = member.replicate(net())
        opt = member.optimizer(adam(model))
        _scheduler = torch.optim.lr_scheduler.StepLR(opt, 2)
        loop(member, model, opt)

    with pytest.raises(ScriptError, match=r"scheduler works on .* not tracked: call job.track"):
        run_one(script)


def test_an_untracked_scaler() -> None:
    def script(member: Member) -> None:
        model = member.replicate(net())
        opt = member.optimizer(adam(model))
        scaler = torch.amp.GradScaler("cpu")
        for one in member.steps(ListLoader(data(), 8)):
            scaler.scale(loss_of(model, one)).backward()
            scaler.step(opt)

    with pytest.raises(ScriptError, match="GradScaler is used and not tracked"):
        run_one(script)


def test_an_optimizer_that_the_job_does_not_know() -> None:
    def script(member: Member) -> None:
        model = member.replicate(net())
        opt = member.optimizer(adam(model))
        other = torch.optim.SGD(model.parameters(), lr=0.1)
        loop(member, model, opt, lambda one: other.step())

    with pytest.raises(ScriptError, match=r"torch.optim.SGD that job.optimizer does not know"):
        run_one(script)


def test_the_inner_optimizer_stepped_by_itself() -> None:
    def script(member: Member) -> None:
        model = member.replicate(net())
        inner = adam(model)
        member.optimizer(inner)
        for _ in member.steps(ListLoader(data(), 8)):
            inner.step()

    with pytest.raises(ScriptError, match=r"use what job.optimizer returned"):
        run_one(script)


def test_no_model_no_optimizer() -> None:
    with pytest.raises(ScriptError, match=r"no model: call model = job.replicate"):
        run_one(lambda m: list(m.steps(ListLoader(data(), 8))))

    def script(member: Member) -> None:
        member.replicate(net())
        list(member.steps(ListLoader(data(), 8)))

    with pytest.raises(ScriptError, match=r"no optimizer: call opt = job.optimizer"):
        run_one(script)


def test_a_model_that_is_not_replicated() -> None:
    def script(member: Member) -> None:
        model, other = member.replicate(net()), net()
        opt = member.optimizer(torch.optim.SGD([*model.parameters(), *other.parameters()], lr=0.1))
        loop(member, model, opt)

    with pytest.raises(ScriptError, match=r"of no model: call job.replicate"):
        run_one(script)


def test_step_outside_of_the_loop() -> None:
    with pytest.raises(ScriptError, match=r"opt.step\(\) before job.steps"):
        run_one(lambda m: m.optimizer(adam(m.replicate(net()))).step())


def test_members_that_do_not_run_the_same_rounds_are_found() -> None:
    def script(member: Member) -> None:
        model = member.replicate(net())
        opt = member.optimizer(adam(model))
        for one in member.steps(ListLoader(data(), 4)):
            loss_of(model, one).backward()
            opt.step()
            if member.rank == 0 or member.engine.step_number < 2:
                loss_of(model, one).backward()

    with pytest.raises(AssertionError, match=r"did not call backward\(\) equally often") as error:
        run_group(2, JobSpec(workers=2), script)
    assert str(error.value).count("errors.ScriptError") == 2


def test_gradients_that_were_assigned_are_not_everybodys() -> None:
    def script(member: Member) -> None:
        model = member.replicate(net())
        opt = member.optimizer(adam(model))
        for one in member.steps(ListLoader(data(), 8)):
            grads = torch.autograd.grad(loss_of(model, one), list(model.parameters()))
            for p, g in zip(model.parameters(), grads, strict=True):
                p.grad = g
            opt.step()

    with pytest.raises(
        AssertionError, match=r"was not made by backward.* call job.reduce_gradients\(\) after assigning"
    ):
        run_group(2, JobSpec(workers=2), script)


def test_own_counters_that_differ_between_workers_are_found() -> None:
    def script(member: Member) -> None:
        model = member.replicate(net())
        opt = member.optimizer(adam(model))
        for i, one in enumerate(member.steps(ListLoader(data(), 8, 2))):
            loss_of(model, one).backward()
            if (i + member.rank) % 2:
                opt.step()
                opt.zero_grad()

    with pytest.raises(AssertionError, match=r"some workers called opt.step"):
        run_group(2, JobSpec(workers=2), script)


def test_a_worker_that_skips_what_others_train_is_found() -> None:
    def script(member: Member) -> None:
        model = member.replicate(net())
        opt = member.optimizer(adam(model))
        for one in member.steps(ListLoader(data(), 8)):
            opt.zero_grad()
            if member.rank == 1 and member.engine.step_number == 1:
                continue
            loss_of(model, one).backward()
            opt.step()

    with pytest.raises(AssertionError, match="without backward"):
        run_group(2, JobSpec(workers=2), script)


def test_learning_rates_that_differ_between_workers_are_found() -> None:
    def script(member: Member) -> None:
        model = member.replicate(net())
        opt = member.optimizer(adam(model))
        opt.param_groups[0]["lr"] = 0.1 * (1 + member.rank)
        loop(member, model, opt)

    with pytest.raises(AssertionError, match="members disagree in step 0"):
        run_group(2, JobSpec(workers=2), script)


class Shadow:
    """As in many a repository."""

    def __init__(self, model: nn.Module) -> None:
        self.model, self.shadow = model, {k: p.data.clone() for k, p in model.named_parameters()}

    def update(self) -> None:
        for name, param in self.model.named_parameters():
            new_average = 0.1 * param.data + 0.9 * self.shadow[name]
            self.shadow[name] = new_average.clone()


@pytest.mark.parametrize("kind", ["shadow", "module", "target"])
def test_an_average_that_the_job_does_not_know(kind: str) -> None:
    def script(member: Member) -> None:
        model = member.replicate(net())
        opt = member.optimizer(adam(model))
        shadow, other = Shadow(model), copy.deepcopy(model)
        norms: list[torch.Tensor] = []
        for one in member.steps(ListLoader(data(), 8)):
            opt.zero_grad()
            loss_of(model, one).backward()
            opt.step()
            norms.append(model[0].weight.detach().clone())
            if kind == "shadow":
                shadow.update()
            elif kind == "module":
                with torch.no_grad():
                    for p, q in zip(model.parameters(), other.parameters(), strict=True):
                        q.lerp_(p, 0.1)
            else:
                other.load_state_dict(model.state_dict())

    with pytest.raises(
        AssertionError, match=r"(shadow.shadow.*|other.*) in the script is an average .* job.replicate\("
    ):
        run_group(2, JobSpec(workers=2), script)


class Big(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 1)
        self.register_buffer("seen", torch.zeros(100_000))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen.add_(1)  # type: ignore[operator]
        out: torch.Tensor = self.linear(x)
        return out


def test_a_large_buffer_that_changes() -> None:
    def script(member: Member) -> None:
        model = member.replicate(Big())
        loop(member, model, member.optimizer(adam(model)))

    with pytest.raises(ScriptError, match=r"buffer 'seen' with 100,000 elements changes"):
        run_one(script)


def test_parameters_that_are_added_in_the_loop() -> None:
    def script(member: Member) -> None:
        model: Any = member.replicate(net())
        opt = member.optimizer(adam(model))

        def grow(one: Any) -> None:
            model.append(nn.Linear(1, 1))
            opt.add_param_group({"params": model[-1].parameters()})

        loop(member, model, opt, grow)

    with pytest.raises(ScriptError, match=r"add_param_group in the loop: a parameter of shape \(1, 1\)"):
        run_one(script)


def test_sparse_gradients() -> None:
    def script(member: Member) -> None:
        model = member.replicate(nn.Embedding(10, 2, sparse=True))
        member.optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
        for _ in member.steps(ListLoader(data(), 8)):
            model(torch.tensor([1, 2])).sum().backward()

    with pytest.raises(ScriptError, match="is sparse"):
        run_one(script)
