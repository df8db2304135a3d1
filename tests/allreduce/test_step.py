"""The training step: what a script computes in a group is what plain PyTorch computes on the whole batch."""

from __future__ import annotations

import contextlib
import copy
import random
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from groups import ListLoader, Member, alone, run_group
from scripts import State, adam, close, data, loss_of, net, plain, same, trained, values
from torch import nn

from everstep.allreduce import gradient_buckets
from everstep.config.spec import JobSpec
from everstep.errors import ScriptError
from everstep.model.group import Position, StepSplit


def test_alone_it_is_bit_for_bit_plain_pytorch() -> None:
    same(alone(JobSpec(), lambda m: trained(m, norm=True)), plain(8, norm=True))


@pytest.mark.parametrize("n", [2, 3])
def test_a_group_computes_what_one_process_computes_on_the_whole_batch(n: int) -> None:
    results = run_group(n, JobSpec(workers=n), trained)
    for other in results[1:]:
        same(results[0], other)
    close(results[0], plain(8 * n))


def test_shares_and_micro_batches_change_nothing() -> None:
    def uneven(member: Member, split: StepSplit) -> State:
        member.session.split = split
        return trained(member)

    for split in (StepSplit(1, (3, 1)), StepSplit(1, (5, 11), (5, 2)), StepSplit(1, (16, 0), (1, 0))):
        results = run_group(2, JobSpec(workers=2), partial(uneven, split=split))
        same(*results)
        close(results[0], plain(16))


def test_the_last_step_of_an_epoch_takes_what_is_left() -> None:
    results = run_group(2, JobSpec(workers=2), lambda m: (trained(m, n=49), m.session.log))
    (state, log), (other, _) = results
    same(state, other)
    assert [entry[1:3] for entry in log] == [(0, 16), (16, 32), (32, 48), (48, 49)] * 2


def test_fewer_samples_left_than_members_counts_each_once() -> None:
    def script(member: Member) -> State:
        member.session.position = Position(0, 0, 0, 47)  # as after growing in mid-epoch
        return trained(member, epochs=1)

    model, samples = net(), data()
    opt = adam(model)
    loss_of(model, {k: v[47:] for k, v in samples.items()}).backward()
    opt.step()
    for state in run_group(3, JobSpec(workers=3), script):
        close(state, values(model))


# ---------------------------------------------------------------- steps that are done again


def everything(member: Member) -> Any:
    """A script with about all that an iteration can change."""
    model = member.replicate(net(norm=True))
    opt = member.optimizer(torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9))
    scheduler = torch.optim.lr_scheduler.StepLR(opt, 2, gamma=0.5)
    average = torch.optim.swa_utils.AveragedModel(model)
    member.track(scheduler=scheduler, average=average)
    for one in member.steps(ListLoader(data(), 8, 2)):
        opt.zero_grad()
        loss_of(model, one).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        opt.step()
        scheduler.step()
        average.update_parameters(model)
    return values(model), values(average), scheduler.get_last_lr()


@pytest.mark.filterwarnings("ignore:Detected call of `lr_scheduler.step")
def test_a_redone_step_leaves_no_trace() -> None:
    state, average, rates = run_group(2, JobSpec(workers=2), everything)[0]
    for result in run_group(2, JobSpec(workers=2), everything, redo=frozenset({0, 2, 3})):
        same(result[0], state)
        same(result[1], average)
        assert result[2] == rates == [0.1 * 0.5**3]


@pytest.mark.filterwarnings("ignore:Detected call of `lr_scheduler.step")
@pytest.mark.parametrize("parts", [0, 4])
def test_a_warm_up_step_leaves_no_trace(parts: int) -> None:
    """Who joins runs one iteration before it enters; its backward votes nothing, its opt.step() does nothing."""

    def warming_up(member: Member) -> Any:
        member.session.warm_up = True
        found = everything(member)
        assert not member.session.warm_up and not member.session.warming_up
        assert not member.engine.redone and member.engine.samples == 48
        return found

    spec = JobSpec(workers=2, logical_workers=parts)
    state, average, rates = run_group(2, spec, everything)[0]
    result = run_group(2, spec, warming_up)[0]
    same(result[0], state)
    same(result[1], average)
    assert result[2] == rates


def test_a_script_that_leaves_its_loop_in_the_warm_up_step() -> None:
    def script(member: Member) -> State:
        member.session.warm_up = True
        model = member.replicate(net(norm=True))
        member.optimizer(adam(model))
        for one in member.steps(ListLoader(data(), 8)):
            loss_of(model, one).backward()
            break
        assert not member.session.warming_up and member.session.left_warm_ups == 1
        return values(model)

    same(run_group(2, JobSpec(workers=2), script)[0], values(net(norm=True)))


@pytest.mark.parametrize("raises", [False, True])
def test_a_step_in_which_the_script_leaves_the_loop_is_not_told_yet(raises: bool) -> None:
    """Not even where it stepped: nobody knows whether an error is on its way."""

    def script(member: Member) -> list[int]:
        model = member.replicate(net())
        opt = member.optimizer(adam(model))
        with contextlib.suppress(ZeroDivisionError):
            for one in member.steps(ListLoader(data(), 8)):
                loss_of(model, one).backward()
                if member.engine.step_number == 1:
                    if raises:
                        raise ZeroDivisionError
                    break
                opt.step()
        assert [number for number, _, _, _ in member.session.log] == [0, 1]
        return member.session.left

    assert run_group(2, JobSpec(workers=2), script) == [[1], [1]]


@pytest.mark.filterwarnings("ignore:Detected call of `lr_scheduler.step")
def test_a_broken_collective_is_a_redo() -> None:
    def script(member: Member) -> Any:
        member.session.break_at = {1, 3}
        return everything(member)[0], member.session.log

    expected = run_group(2, JobSpec(workers=2), everything)[0][0]
    for state, log in run_group(2, JobSpec(workers=2), script):
        same(state, expected)
        assert [number for number, _, _, what in log if what == "broken"] == [1, 3]


# ---------------------------------------------------------------- what scripts do


def test_accumulation_over_steps_by_the_script() -> None:
    def script(member: Member) -> State:
        model = member.replicate(net())
        opt = member.optimizer(adam(model))
        for one in member.steps(ListLoader(data(), 4)):
            (loss_of(model, one) / 3).backward()
            if member.engine.step_number % 3 == 2:
                opt.step()
                opt.zero_grad()
        return values(model)

    close(alone(JobSpec(), script), plain(12, epochs=1))
    for redo in (frozenset[int](), frozenset({1, 2, 4})):
        for state in run_group(2, JobSpec(workers=2), script, redo=redo):
            close(state, plain(24, epochs=1))


@pytest.mark.parametrize("set_to_none", [True, False])
def test_zero_grad_both_ways_and_of_the_module(set_to_none: bool) -> None:
    def script(member: Member) -> State:
        model = member.replicate(net())
        opt = member.optimizer(adam(model))
        for one in member.steps(ListLoader(data(), 8, 2)):
            loss = loss_of(model, one)
            model.zero_grad(set_to_none)
            loss.backward()
            opt.step()
        return values(model)

    for state in run_group(2, JobSpec(workers=2), script):
        close(state, plain(16))


def test_amp_with_a_grad_scaler_that_meets_infinity() -> None:
    def script(member: Member) -> Any:
        model = member.replicate(net())
        opt = member.optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**127, growth_interval=3)
        member.track(scaler=scaler)
        for one in member.steps(ListLoader(data(), 4, 2)):
            opt.zero_grad()
            with torch.autocast("cpu", torch.bfloat16):
                loss = loss_of(model, one)
            scaler.scale(loss * 8).backward()
            scaler.unscale_(opt)
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            scaler.step(opt)
            scaler.update()
        return values(model), scaler.get_scale()

    one, two = run_group(2, JobSpec(workers=2), script)
    same(one[0], two[0])
    assert one[1] == two[1] < 2.0**127  # it was halved, and training went on
    assert all(torch.isfinite(v).all() for v in one[0].values())
    redone, _ = run_group(2, JobSpec(workers=2), script, redo=frozenset({0, 5}))
    same(redone[0], one[0])


def test_batch_norm_is_the_mean_over_members_and_the_same_on_all() -> None:
    same(*run_group(2, JobSpec(workers=2), lambda m: trained(m, norm=True, epochs=1)))
    model, samples = net(norm=True), data()
    norm = model[1]
    assert isinstance(norm, nn.BatchNorm1d)
    assert norm.running_mean is not None
    before, after = norm.running_mean.clone(), []
    for lo in (0, 8):
        other: Any = copy.deepcopy(model)
        other(samples["x"][lo : lo + 8])
        after.append(other[1].running_mean)
    expected = before + (after[0] - before + after[1] - before) / 2

    def first_step(member: Member) -> Any:
        m: Any = member.replicate(net(norm=True))
        opt = member.optimizer(adam(m))
        for number, one in enumerate(member.steps(ListLoader(data(), 8))):
            if number:
                break
            loss_of(m, one).backward()
            opt.step()
            m(one["x"])  # a forward pass after the commit is this member's own
        return m[1].running_mean, m[1].num_batches_tracked

    for mean, count in run_group(2, JobSpec(workers=2), first_step):
        torch.testing.assert_close(mean, expected)
        assert count == 1


def test_two_optimizers_over_two_models() -> None:
    def script(member: Member) -> Any:
        torch.manual_seed(5)
        body, head = member.replicate(nn.Linear(6, 8)), member.replicate(nn.Linear(8, 1))
        opts = [member.optimizer(adam(body)), member.optimizer(torch.optim.SGD(head.parameters(), lr=0.1))]
        for one in member.steps(ListLoader(data(), 8 * 2 // member.size)):
            for opt in opts:
                opt.zero_grad()
            loss_of(nn.Sequential(body, head), one).backward()
            for opt in opts:
                opt.step()
        return values(body) | {"head": head.weight.detach()}

    one, two = run_group(2, JobSpec(workers=2), script)
    same(one, two)
    close(one, alone(JobSpec(), script))


class Sometimes(nn.Module):
    """``extra`` is used only where the first feature is positive; ``never`` is not used at all."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(4)
        self.base, self.extra, self.never = nn.Linear(6, 1), nn.Linear(6, 1), nn.Linear(2, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.base(x)
        return out + self.extra(x) if float(x[0, 0]) > 0 else out


def test_a_parameter_without_gradient_on_some_members_counts_as_zero_there() -> None:
    def script(member: Member) -> Any:
        model = member.replicate(Sometimes())
        opt = member.optimizer(torch.optim.AdamW(model.parameters(), lr=0.01, weight_decay=0.5))
        seen = []
        for one in member.steps(ListLoader(data(), 4)):
            opt.zero_grad()
            loss_of(model, one).backward()
            seen.append(model.extra.weight.grad is not None)
            assert model.never.weight.grad is None
            opt.step()
        return values(model), seen

    one, two = run_group(2, JobSpec(workers=2), script)
    same(one[0], two[0])
    first = data()["x"][::4, 0] > 0
    assert one[1] == two[1] == [bool(a or b) for a, b in zip(first[::2], first[1::2], strict=True)]
    same({"never": one[0]["never.weight"]}, {"never": Sometimes().never.weight.detach()})


def test_two_losses_under_no_sync() -> None:
    def script(member: Member) -> State:
        model = member.replicate(net())
        opt = member.optimizer(adam(model))
        for one in member.steps(ListLoader(data(), 8, 2)):
            opt.zero_grad()
            with member.engine.no_sync():
                (loss_of(model, one) * 0.25).backward()
            (loss_of(model, one) * 0.75).backward()
            opt.step()
        return values(model)

    for state in run_group(2, JobSpec(workers=2), script):
        close(state, plain(16))


def test_iterations_that_all_workers_skip_commit_without_a_change() -> None:
    def script(member: Member) -> Any:
        model = member.replicate(net())
        opt = member.optimizer(adam(model))
        for one in member.steps(ListLoader(data(), 8)):
            opt.zero_grad()
            if member.engine.step_number == 1:
                continue
            loss_of(model, one).backward()
            opt.step()
        return values(model), len(member.session.log)

    one, two = run_group(2, JobSpec(workers=2), script)
    same(one[0], two[0])
    assert one[1] == 3


def test_leaving_the_loop_early_keeps_what_is_committed() -> None:
    def script(member: Member) -> State:
        model = member.replicate(net())
        opt = member.optimizer(adam(model))
        loader = ListLoader(data(), 8, 2)
        for one in member.steps(loader):
            opt.zero_grad()
            loss_of(model, one).backward()
            opt.step()
            if member.engine.step_number == 1:
                break
        for one in member.steps(loader):
            opt.zero_grad()
            if member.engine.step_number == 3:
                break  # nothing is committed of this one
            loss_of(model, one).backward()
            opt.step()
        for one in member.steps(loader):
            opt.zero_grad()
            loss_of(model, one).backward()
            opt.step()
        assert [entry[0] for entry in member.session.log] == list(range(6))
        return values(model)

    for state in run_group(2, JobSpec(workers=2), script):
        close(state, plain(16))


@pytest.mark.parametrize("at", [1, 2, 3])
def test_a_loop_that_was_left_is_not_begun_again(at: int) -> None:
    """Plain PyTorch would begin a new epoch (of three steps here). What was left with its last step is over."""

    def script(member: Member) -> tuple[int, str]:
        model = member.replicate(net())
        opt = member.optimizer(adam(model))
        loader = ListLoader(data(), 8)
        try:
            for number in range(2):
                for one in member.engine.steps(loader, 0, number + 1):
                    opt.zero_grad()
                    loss_of(model, one).backward()
                    opt.step()
                    if not number and member.engine.step_number == at - 1:
                        break
        except ScriptError as error:
            return len(member.session.log), str(error)
        return len(member.session.log), ""

    for steps, error in run_group(2, JobSpec(workers=2), script):
        assert (steps, "begins a new epoch" in error) == ((at, True) if at < 3 else (6, False)), error


def test_parameters_frozen_and_thawed_in_mid_loop_stay_the_same_on_all() -> None:
    def script(member: Member) -> State:
        model: Any = member.replicate(net())
        opt = member.optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
        for one in member.steps(ListLoader(data(), 8 * 2 // member.size, 2)):
            opt.zero_grad()
            loss_of(model, one).backward()
            opt.step()
            model[0].weight.requires_grad_(member.engine.step_number % 3 != 0)
        return values(model)

    one, two = run_group(2, JobSpec(workers=2), script)
    same(one, two)
    close(one, alone(JobSpec(), script))


def test_leaving_ends_the_script_with_the_status() -> None:
    def script(member: Member) -> int:
        member.session.leave_at = 2
        with pytest.raises(SystemExit) as end:
            trained(member)
        return int(end.value.code or 0)

    assert alone(JobSpec(), script) == 143


def test_learning_rate_rule_holds_for_the_step_only() -> None:
    def script(member: Member) -> Any:
        model = member.replicate(nn.Linear(6, 1))
        with torch.no_grad():
            for p in model.parameters():
                p.zero_()
        opt = member.optimizer(torch.optim.SGD(model.parameters(), lr=1.0))
        ratios = []
        for one in member.steps(ListLoader(data(), 48)):
            loss_of(model, one).backward()
            grad = model.weight.grad
            opt.step()
            assert opt.param_groups[0]["lr"] == 1.0
            ratios.append(-model.weight.detach() / grad)
        return ratios[0]

    ratio = alone(JobSpec(workers=4, lr_rule="sqrt"), script)
    torch.testing.assert_close(ratio, torch.full_like(ratio, 0.5))


# ---------------------------------------------------------------- logical workers


def logical(member: Member) -> State:
    model = member.replicate(net(norm=True, dropout=0.3))
    opt = member.optimizer(adam(model))
    for one in member.steps(ListLoader(data(50), 3, 2)):
        opt.zero_grad()
        loss_of(model, one).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        opt.step()
    return values(model)


@pytest.mark.parametrize("parts", [8, 5])
def test_logical_workers_give_the_same_bits_on_any_number_of_processes(parts: int) -> None:
    spec = JobSpec(workers=2, logical_workers=parts, seed=7)
    expected = alone(spec, logical)
    assert not torch.equal(expected["0.weight"], values(net(norm=True))["0.weight"])
    for n in (2, 3, 4, 8):
        if n <= parts:
            for state in run_group(n, spec, logical, redo=frozenset({1} if n == 3 else ())):
                same(state, expected)


def test_parts_are_reduced_in_buckets_while_backward_runs_with_the_same_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    spec = JobSpec(workers=2, logical_workers=5, seed=7)
    expected = alone(spec, logical)
    monkeypatch.setattr(gradient_buckets, "FIRST_BYTES", 64)
    monkeypatch.setattr(gradient_buckets, "BUCKET_BYTES", 64)

    def script(member: Member) -> tuple[bool, int, State]:
        member.session.break_at = {2} if member.size == 2 else set()  # of its all-reduces
        state = logical(member)
        reducer = member.engine._reducer
        assert reducer is not None
        return reducer._direct, len(reducer._layout.buckets), state

    for n in (2, 3):
        for direct, buckets, state in run_group(n, spec, script, redo=frozenset({1})):
            assert direct == (n == 2) and buckets > 2
            same(state, expected)


def test_more_members_than_parts_still_agree() -> None:
    spec = JobSpec(workers=3, logical_workers=2, seed=7)
    expected = alone(spec, logical)
    for state in run_group(3, spec, logical):
        same(state, expected)


# ---------------------------------------------------------------- random numbers


def drawn(member: Member) -> Any:
    member.replicate(nn.Linear(6, 1))
    model = member.engine.models[0]
    opt = member.optimizer(adam(model))
    seen = {}
    for one in member.steps(ListLoader(data(), 8, 2)):
        opt.zero_grad()
        loss_of(model, one).backward()
        opt.step()
        said = (float(torch.rand(())), random.random(), float(np.random.rand()))
        seen[float(one["x"].sum()), member.engine.step_number] = said
    return seen, float(torch.rand(())), random.random(), float(np.random.rand())


def test_random_numbers_belong_to_the_range_and_not_to_the_worker() -> None:
    first, second = run_group(2, JobSpec(workers=2), drawn)
    again, other = run_group(2, JobSpec(workers=2), drawn, redo=frozenset({0, 3}))
    assert (first[0], second[0]) == (again[0], other[0])  # a range that is computed again draws the same
    one = dict(first[0].items()) | second[0]
    assert len({values[0] for values in one.values()}) == len(one) == 12  # and no other one does, nor in another epoch
    assert first[1] == second[1] == again[1]  # what follows the loop is the same on all
