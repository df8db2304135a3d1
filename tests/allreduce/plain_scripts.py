"""Scripts as others write them, each run by plain PyTorch and by groups: what one computes the other computes.

A script gets a ``job`` with replicate, optimizer, track and step, and batches; it returns what it trained.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

import torch
from groups import ListLoader, Member
from scripts import State, data, loss_of, net, values
from torch import nn

SCRIPTS: dict[str, Callable[[Any, Callable[[], Iterator[Any]]], State]] = {}
GLOBAL = 16


def script(fn: Any) -> Any:
    SCRIPTS[fn.__name__] = fn
    return fn


class Plain:
    """What a script gets in plain PyTorch."""

    def __init__(self) -> None:
        self.step = 0

    def replicate(self, model: Any) -> Any:
        return model

    def optimizer(self, inner: torch.optim.Optimizer) -> torch.optim.Optimizer:
        return inner

    def track(self, **objects: Any) -> None: ...

    def reduce_gradients(self) -> None: ...

    def loop(self, loader: ListLoader) -> Iterator[Any]:
        for epoch in range(loader.epochs):
            n = loader.plan().samples
            for lo in range(0, n, loader.batch_size):
                yield loader.read(epoch, lo, min(n, lo + loader.batch_size))
                self.step += 1


class InGroup:
    """What a script gets in a group."""

    def __init__(self, member: Member) -> None:
        self.member = member
        self.replicate, self.optimizer, self.track = member.replicate, member.optimizer, member.track
        self.loop, self.reduce_gradients = member.steps, member.engine.reduce_gradients

    @property
    def step(self) -> int:
        return self.member.engine.step_number


def run_plain(name: str, epochs: int = 2) -> State:
    torch.manual_seed(0)
    job = Plain()
    return SCRIPTS[name](job, lambda: job.loop(ListLoader(data(), GLOBAL, epochs)))


def in_group(name: str, batch: int, epochs: int = 2) -> Callable[[Member], State]:
    def run(member: Member) -> State:
        job = InGroup(member)
        return SCRIPTS[name](job, lambda: job.loop(ListLoader(data(), batch, epochs)))

    return run


def sgd(model: nn.Module, **options: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), **{"lr": 0.1, "momentum": 0.9, **options})


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=0.01, weight_decay=0.1)


@script
def usual(job: Any, batches: Any) -> State:
    model = job.replicate(net())
    opt = job.optimizer(adamw(model))
    for b in batches():
        opt.zero_grad()
        loss_of(model, b).backward()
        opt.step()
    return values(model)


@script
def step_by_an_own_counter(job: Any, batches: Any) -> State:
    model = job.replicate(net())
    opt = job.optimizer(sgd(model))
    for i, b in enumerate(batches()):
        (loss_of(model, b) / 2).backward()
        if (i + 1) % 2 == 0:
            opt.step()
            opt.zero_grad()
    return values(model)


@script
def step_every_fourth_and_the_rest(job: Any, batches: Any) -> State:
    model = job.replicate(net())
    opt = job.optimizer(sgd(model))
    for b in batches():
        (loss_of(model, b) / 4).backward()
        if (job.step + 1) % 4 == 0 or job.step == 5:
            opt.step()
            opt.zero_grad()
    return values(model)


@script
def no_zero_grad_at_all(job: Any, batches: Any) -> State:
    model = job.replicate(net())
    opt = job.optimizer(sgd(model))
    for b in batches():
        loss_of(model, b).backward()
        opt.step()
    return values(model)


@script
def zero_grad_after_backward_is_a_mistake_that_stays(job: Any, batches: Any) -> State:
    model = job.replicate(net())
    opt = job.optimizer(adamw(model))
    for b in batches():
        loss_of(model, b).backward()
        opt.zero_grad()
        opt.step()
    return values(model)


@script
def zero_grad_only_every_second(job: Any, batches: Any) -> State:
    model = job.replicate(net())
    opt = job.optimizer(sgd(model))
    for b in batches():
        if job.step % 2 == 0:
            opt.zero_grad()
        loss_of(model, b).backward()
        opt.step()
    return values(model)


@script
def set_to_zero_with_decay(job: Any, batches: Any) -> State:
    model = job.replicate(net())
    opt = job.optimizer(adamw(model))
    for b in batches():
        opt.zero_grad(set_to_none=False)
        loss_of(model, b).backward()
        opt.step()
    return values(model)


@script
def skipped_by_continue(job: Any, batches: Any) -> State:
    model = job.replicate(net())
    opt = job.optimizer(adamw(model))
    for b in batches():
        if job.step % 3 == 1:
            continue
        opt.zero_grad()
        loss_of(model, b).backward()
        opt.step()
    return values(model)


@script
def continue_after_backward(job: Any, batches: Any) -> State:
    model = job.replicate(net())
    opt = job.optimizer(adamw(model))
    for b in batches():
        opt.zero_grad()
        loss_of(model, b).backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        if job.step % 3 == 1 or norm > 1e6:
            continue
        opt.step()
    return values(model)


@script
def spikes_by_the_norm(job: Any, batches: Any) -> State:
    model = job.replicate(net())
    opt = job.optimizer(sgd(model))
    for b in batches():
        opt.zero_grad()
        loss_of(model, b).backward()
        if torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0) > 0.4:
            continue
        opt.step()
    return values(model)


@script
def backward_twice(job: Any, batches: Any) -> State:
    model = job.replicate(net())
    opt = job.optimizer(adamw(model))
    for b in batches():
        opt.zero_grad()
        loss_of(model, b).backward()
        (0.01 * sum(p.square().sum() for p in model.parameters())).backward()
        opt.step()
    return values(model)


@script
def retained_graph_twice(job: Any, batches: Any) -> State:
    model = job.replicate(net())
    opt = job.optimizer(adamw(model))
    for b in batches():
        opt.zero_grad()
        loss = loss_of(model, b)
        loss.backward(retain_graph=True)
        loss.backward()
        opt.step()
    return values(model)


@script
def a_gan_as_dcgan_does_it(job: Any, batches: Any) -> State:
    torch.manual_seed(5)
    g = job.replicate(nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8, momentum=None, affine=False), nn.Linear(8, 6)))
    d = job.replicate(nn.Sequential(nn.Linear(6, 8), nn.LeakyReLU(0.2), nn.Linear(8, 1)))
    g[1].eval()
    opt_d = job.optimizer(torch.optim.Adam(d.parameters(), lr=0.01, betas=(0.5, 0.999)))
    opt_g = job.optimizer(torch.optim.Adam(g.parameters(), lr=0.01, betas=(0.5, 0.999)))
    bce = nn.functional.binary_cross_entropy_with_logits
    for b in batches():
        x = b["x"]
        d.zero_grad()
        out = d(x)
        bce(out, torch.ones_like(out)).backward()
        fake = g(x.flip(1).cos())
        out = d(fake.detach())
        bce(out, torch.zeros_like(out)).backward()
        opt_d.step()
        g.zero_grad()
        out = d(fake)
        bce(out, torch.ones_like(out)).backward()
        opt_g.step()
    return values(g) | {"d." + k: v for k, v in values(d).items()}


@script
def a_gan_with_set_requires_grad(job: Any, batches: Any) -> State:
    torch.manual_seed(5)
    g = job.replicate(nn.Linear(6, 6))
    d = job.replicate(nn.Sequential(nn.Linear(6, 8), nn.LeakyReLU(0.2), nn.Linear(8, 1)))
    opt_d = job.optimizer(torch.optim.Adam(d.parameters(), lr=0.01))
    opt_g = job.optimizer(torch.optim.Adam(g.parameters(), lr=0.01))
    for b in batches():
        x = b["x"]
        d.requires_grad_(True)
        opt_d.zero_grad()
        (d(g(x.cos()).detach()).mean() - d(x).mean()).backward()
        opt_d.step()
        d.requires_grad_(False)
        opt_g.zero_grad()
        (-d(g(x.cos())).mean()).backward()
        opt_g.step()
    return values(g) | {"d." + k: v for k, v in values(d).items()}


@script
def a_gan_whose_generator_learns_every_second_time(job: Any, batches: Any) -> State:
    torch.manual_seed(5)
    g = job.replicate(nn.Linear(6, 6))
    d = job.replicate(nn.Sequential(nn.Linear(6, 8), nn.LeakyReLU(0.2), nn.Linear(8, 1)))
    opt_d = job.optimizer(torch.optim.Adam(d.parameters(), lr=0.01))
    opt_g = job.optimizer(torch.optim.Adam(g.parameters(), lr=0.01))
    for b in batches():
        x = b["x"]
        opt_d.zero_grad()
        (d(g(x.cos()).detach()).mean() - d(x).mean()).backward()
        opt_d.step()
        for p in d.parameters():
            p.data.clamp_(-0.3, 0.3)
        if job.step % 2 == 1:
            opt_g.zero_grad()
            (-d(g(x.cos())).mean()).backward()
            opt_g.step()
    return values(g) | {"d." + k: v for k, v in values(d).items()}


class Sam(torch.optim.Optimizer):
    """As in the widespread implementation."""

    def __init__(self, params: Any, base: Any, rho: float = 0.05, **kwargs: Any) -> None:
        super().__init__(params, dict(rho=rho, **kwargs))
        self.base_optimizer = base(self.param_groups, **kwargs)
        self.param_groups = self.base_optimizer.param_groups

    @torch.no_grad()
    def first_step(self, zero_grad: bool = False) -> None:
        norms = [p.grad.norm(p=2) for g in self.param_groups for p in g["params"] if p.grad is not None]
        norm = torch.norm(torch.stack(norms), p=2)
        for group in self.param_groups:
            scale = group["rho"] / (norm + 1e-12)
            for p in group["params"]:
                if p.grad is None:
                    continue
                self.state[p]["old_p"] = p.data.clone()
                p.add_(p.grad * scale.to(p))
        if zero_grad:
            self.zero_grad()

    @torch.no_grad()
    def second_step(self, zero_grad: bool = False) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                p.data = self.state[p]["old_p"]
        self.base_optimizer.step()
        if zero_grad:
            self.zero_grad()

    def step(self, closure: Any = None) -> Any:
        raise NotImplementedError


@script
def sam_by_its_class(job: Any, batches: Any) -> State:
    model = job.replicate(net())
    opt = job.optimizer(Sam(model.parameters(), torch.optim.SGD, lr=0.1, momentum=0.9))
    for b in batches():
        loss_of(model, b).backward()
        opt.first_step(zero_grad=True)
        loss_of(model, b).backward()
        opt.second_step(zero_grad=True)
    return values(model)


@script
def sam_by_hand(job: Any, batches: Any) -> State:
    model = job.replicate(net())
    opt = job.optimizer(sgd(model))
    for b in batches():
        opt.zero_grad()
        loss_of(model, b).backward()
        with torch.no_grad():
            norm = torch.stack([p.grad.norm() for p in model.parameters()]).norm()
            moved = []
            for p in model.parameters():
                e = p.grad * (0.05 / (norm + 1e-12))
                p.add_(e)
                moved.append(e)
        opt.zero_grad()
        loss_of(model, b).backward()
        with torch.no_grad():
            for p, e in zip(model.parameters(), moved, strict=True):
                p.sub_(e)
        opt.step()
    return values(model)


@script
def weights_clamped_after_the_step(job: Any, batches: Any) -> State:
    model = job.replicate(net())
    opt = job.optimizer(adamw(model))
    for b in batches():
        opt.zero_grad()
        loss_of(model, b).backward()
        opt.step()
        with torch.no_grad():
            for p in model.parameters():
                p.mul_(0.99).clamp_(-0.3, 0.3)
    return values(model)


@script
def weights_assigned_after_the_step(job: Any, batches: Any) -> State:
    model = job.replicate(net())
    opt = job.optimizer(adamw(model))
    for b in batches():
        opt.zero_grad()
        loss_of(model, b).backward()
        opt.step()
        for p in model.parameters():
            p.data = p.data * 0.97
    return values(model)


@script
def an_average_tracked(job: Any, batches: Any) -> State:
    model = job.replicate(net())
    opt = job.optimizer(adamw(model))
    average = torch.optim.swa_utils.AveragedModel(model, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.9))
    job.track(average=average)
    for b in batches():
        opt.zero_grad()
        loss_of(model, b).backward()
        opt.step()
        average.update_parameters(model)
    return values(model) | {"a." + k: v for k, v in values(average).items()}


@script
def an_average_by_hand_outside(job: Any, batches: Any) -> State:
    model = job.replicate(net())
    opt = job.optimizer(adamw(model))
    ema = {k: v.clone() for k, v in model.state_dict().items()}
    for b in batches():
        opt.zero_grad()
        loss_of(model, b).backward()
        opt.step()
        for k, v in model.state_dict().items():
            ema[k].mul_(0.9).add_(v, alpha=0.1)
    return values(model) | {"a." + k: v for k, v in ema.items()}


class Averaging(nn.Module):
    """Keeps a moving average in its own buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.net = net()
        self.register_buffer("average", self.net[0].weight.detach().clone())
        self.register_buffer("updates", torch.zeros((), dtype=torch.int64))

    def forward(self, x: Any) -> Any:
        return self.net(x)


@script
def an_average_in_a_buffer(job: Any, batches: Any) -> State:
    model = job.replicate(Averaging())
    opt = job.optimizer(adamw(model))
    for b in batches():
        opt.zero_grad()
        loss_of(model, b).backward()
        opt.step()
        model.average.lerp_(model.net[0].weight.detach(), 0.1)
        model.updates += 1
    return values(model)


@script
def an_average_in_a_buffer_assigned(job: Any, batches: Any) -> State:
    model = job.replicate(Averaging())
    opt = job.optimizer(adamw(model))
    for b in batches():
        opt.zero_grad()
        loss_of(model, b).backward()
        opt.step()
        model.average = model.average * 0.9 + model.net[0].weight.detach() * 0.1
        model.updates = model.updates + 1
    return values(model)


@script
def a_teacher_of_momentum(job: Any, batches: Any) -> State:
    student = net()
    teacher = copy.deepcopy(student).requires_grad_(False)
    student, teacher = job.replicate(student), job.replicate(teacher)
    opt = job.optimizer(adamw(student))
    for b in batches():
        opt.zero_grad()
        loss = loss_of(student, b) + (student(b["x"]) - teacher(b["x"] * 1.1)).square().mean()
        loss.backward()
        opt.step()
        with torch.no_grad():
            for p, q in zip(student.parameters(), teacher.parameters(), strict=True):
                q.mul_(0.9).add_(p, alpha=0.1)
    return values(student) | {"t." + k: v for k, v in values(teacher).items()}


@script
def a_target_copied_every_third_step(job: Any, batches: Any) -> State:
    model = net()
    target = copy.deepcopy(model).requires_grad_(False)
    model, target = job.replicate(model), job.replicate(target)
    opt = job.optimizer(adamw(model))
    for b in batches():
        opt.zero_grad()
        (model(b["x"]) - target(b["x"].roll(1, 1)).detach() * 0.9 - b["y"]).square().mean().backward()
        opt.step()
        if job.step % 3 == 0:
            target.load_state_dict(model.state_dict())
    return values(model) | {"t." + k: v for k, v in values(target).items()}


@script
def a_forward_pass_behind_the_step(job: Any, batches: Any) -> State:
    """Of BatchNorm whose statistics do not depend on how the batch is divided: all samples are one another's copy."""
    torch.manual_seed(2)
    model = job.replicate(nn.Sequential(nn.Linear(6, 4), nn.BatchNorm1d(4), nn.Linear(4, 1)))
    opt = job.optimizer(sgd(model, lr=0.01))
    for b in batches():
        x = b["x"].mean() * 0 + torch.tensor([[1.0, 2, 3, 4, 5, 6], [0.5, 1, 0, 2, 1, 1]]).repeat(len(b["x"]) // 2, 1)
        opt.zero_grad()
        loss = model(x).square().mean()
        loss.backward()
        opt.step()
        with torch.no_grad():
            model(x * 2)
    found = values(model)
    return {k: v for k, v in found.items() if "running_var" not in k}  # (Bessel's correction knows the batch)


@script
def gradients_edited_by_hand(job: Any, batches: Any) -> State:
    model = job.replicate(net())
    opt = job.optimizer(sgd(model))
    for b in batches():
        opt.zero_grad()
        loss_of(model, b).backward()
        for p in model.parameters():
            p.grad.mul_(0.5)
            p.grad = p.grad + 0.001 * p.detach()
        opt.step()
    return values(model)


@script
def gradients_assigned_of_autograd_grad(job: Any, batches: Any) -> State:
    model = job.replicate(net())
    opt = job.optimizer(sgd(model))
    for b in batches():
        grads = torch.autograd.grad(loss_of(model, b), list(model.parameters()))
        for p, g in zip(model.parameters(), grads, strict=True):
            p.grad = g
        job.reduce_gradients()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.2)
        opt.step()
    return values(model)


@script
def gradients_assigned_of_torch_func(job: Any, batches: Any) -> State:
    model = job.replicate(net())
    opt = job.optimizer(sgd(model))

    def loss(params: Any, b: Any) -> Any:
        out = torch.func.functional_call(model, params, (b["x"],))
        return nn.functional.binary_cross_entropy_with_logits(out, b["y"])

    for b in batches():
        opt.zero_grad()
        grads = torch.func.grad(loss)({k: p.detach() for k, p in model.named_parameters()}, b)
        for k, p in model.named_parameters():
            p.grad = grads[k]
        job.reduce_gradients()
        opt.step()
    return values(model)


@script
def a_hook_on_a_parameter(job: Any, batches: Any) -> State:
    model = job.replicate(net())
    opt = job.optimizer(sgd(model))
    for p in model.parameters():
        p.register_hook(lambda g: g * 0.5)
    for b in batches():
        opt.zero_grad()
        loss_of(model, b).backward()
        opt.step()
    return values(model)


@script
def a_hook_of_a_parameter_behind_accumulation(job: Any, batches: Any) -> State:
    model = job.replicate(net())
    opt = job.optimizer(sgd(model))

    def halve(p: Any) -> None:
        if p.grad is not None:
            p.grad.mul_(0.5)

    for p in model.parameters():
        p.register_post_accumulate_grad_hook(halve)
    for b in batches():
        opt.zero_grad()
        loss_of(model, b).backward()
        opt.step()
    return values(model)


@script
def frozen_without_gradient_with_decay(job: Any, batches: Any) -> State:
    model: Any = job.replicate(net())
    model.unused = nn.Linear(3, 3)
    opt = job.optimizer(adamw(model))
    model[0].weight.requires_grad_(False)
    for b in batches():
        opt.zero_grad()
        loss_of(nn.Sequential(*list(model)[:4]), b).backward()
        opt.step()
    return values(model)


@script
def frozen_and_thawed(job: Any, batches: Any) -> State:
    model: Any = job.replicate(net())
    opt = job.optimizer(sgd(model))
    for b in batches():
        opt.zero_grad()
        loss_of(model, b).backward()
        opt.step()
        model[0].weight.requires_grad_(job.step % 3 != 0)
    return values(model)


@script
def thawed_at_the_begin_of_an_iteration(job: Any, batches: Any) -> State:
    model: Any = job.replicate(net())
    model[0].requires_grad_(False)
    opt = job.optimizer(sgd(model))
    for b in batches():
        if job.step == 2:
            model[0].requires_grad_(True)
        opt.zero_grad()
        loss_of(model, b).backward()
        opt.step()
    return values(model)


@script
def a_new_group_thawed(job: Any, batches: Any) -> State:
    model: Any = job.replicate(net())
    model[0].requires_grad_(False)
    opt = job.optimizer(torch.optim.SGD(model[3].parameters(), lr=0.1))
    for b in batches():
        if job.step == 2 and len(opt.param_groups) == 1:
            model[0].requires_grad_(True)
            opt.add_param_group({"params": list(model[0].parameters()), "lr": 0.01})
        opt.zero_grad()
        loss_of(model, b).backward()
        opt.step()
    return values(model)


@script
def schedules(job: Any, batches: Any) -> State:
    model = job.replicate(net())
    opt = job.optimizer(sgd(model))
    warm = torch.optim.lr_scheduler.OneCycleLR(opt, 0.2, total_steps=8)
    job.track(warm=warm)
    for b in batches():
        opt.zero_grad()
        loss_of(model, b).backward()
        opt.step()
        warm.step()
    return values(model)


@script
def rate_set_by_hand(job: Any, batches: Any) -> State:
    model = job.replicate(net())
    opt = job.optimizer(sgd(model))
    for b in batches():
        for g in opt.param_groups:
            g["lr"] = 0.1 / (1 + job.step)
        opt.zero_grad()
        loss_of(model, b).backward()
        opt.step()
    return values(model)


@script
def rate_multiplied_after_the_step(job: Any, batches: Any) -> State:
    model = job.replicate(net())
    opt = job.optimizer(sgd(model))
    for b in batches():
        opt.zero_grad()
        loss_of(model, b).backward()
        opt.step()
        for g in opt.param_groups:
            g["lr"] *= 0.8
    return values(model)


@script
def a_closure(job: Any, batches: Any) -> State:
    model = job.replicate(net())
    opt = job.optimizer(sgd(model))
    for b in batches():

        def closure(b: Any = b) -> Any:
            opt.zero_grad()
            loss = loss_of(model, b)
            loss.backward()
            return loss

        opt.step(closure)
    return values(model)


@script
def spectral_norm(job: Any, batches: Any) -> State:
    torch.manual_seed(6)
    model = nn.Sequential(nn.utils.parametrizations.spectral_norm(nn.Linear(6, 16)), nn.ReLU(), nn.Linear(16, 1))
    model = job.replicate(model)
    opt = job.optimizer(sgd(model))
    for b in batches():
        opt.zero_grad()
        loss_of(model, b).backward()
        opt.step()
    return values(model)


@script
def weight_norm(job: Any, batches: Any) -> State:
    torch.manual_seed(6)
    model = nn.Sequential(nn.utils.parametrizations.weight_norm(nn.Linear(6, 16)), nn.ReLU(), nn.Linear(16, 1))
    model = job.replicate(model)
    opt = job.optimizer(sgd(model))
    for b in batches():
        opt.zero_grad()
        loss_of(model, b).backward()
        opt.step()
    return values(model)


@script
def checkpointed(job: Any, batches: Any) -> State:
    from torch.utils.checkpoint import checkpoint

    model: Any = job.replicate(net())
    opt = job.optimizer(sgd(model))
    for b in batches():
        opt.zero_grad()
        h = checkpoint(model[0], b["x"], use_reentrant=False)
        nn.functional.binary_cross_entropy_with_logits(model[3](model[1](h)), b["y"]).backward()
        opt.step()
    return values(model)


@script
def checkpointed_reentrant(job: Any, batches: Any) -> State:
    from torch.utils.checkpoint import checkpoint

    model: Any = job.replicate(net())
    opt = job.optimizer(sgd(model))
    for b in batches():
        opt.zero_grad()
        x = b["x"].clone().requires_grad_()
        h = checkpoint(lambda t: model[1](model[0](t)), x, use_reentrant=True)
        h = checkpoint(lambda t: model[3](t), h, use_reentrant=True)
        nn.functional.binary_cross_entropy_with_logits(h, b["y"]).backward()
        opt.step()
    return values(model)


@script
def a_gradient_penalty(job: Any, batches: Any) -> State:
    model: Any = job.replicate(net())
    opt = job.optimizer(sgd(model))
    for b in batches():
        opt.zero_grad()
        x = b["x"].clone().requires_grad_()
        out = model(x)
        (g,) = torch.autograd.grad(out.sum(), x, create_graph=True)
        (nn.functional.binary_cross_entropy_with_logits(out, b["y"]) + g.square().sum(1).mean()).backward()
        opt.step()
    return values(model)


@script
def r1_now_and_then(job: Any, batches: Any) -> State:
    model: Any = job.replicate(net())
    opt = job.optimizer(sgd(model))
    for b in batches():
        opt.zero_grad()
        loss_of(model, b).backward()
        opt.step()
        if job.step == 4:
            opt.zero_grad()
            x = b["x"].clone().requires_grad_()
            (g,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
            g.square().sum(1).mean().backward()
            opt.step()
    return values(model)


@script
def several_steps_of_one_gradient(job: Any, batches: Any) -> State:
    model: Any = job.replicate(net())
    opt = job.optimizer(sgd(model))
    for b in batches():
        opt.zero_grad()
        loss_of(model, b).backward()
        opt.step()
        opt.step()
    return values(model)


@script
def two_losses_two_models_in_turn(job: Any, batches: Any) -> State:
    torch.manual_seed(5)
    a, c = job.replicate(nn.Linear(6, 1)), job.replicate(nn.Linear(6, 1))
    opt_a, opt_c = job.optimizer(sgd(a)), job.optimizer(sgd(c))
    for b in batches():
        opt_a.zero_grad()
        loss_of(a, b).backward()
        opt_a.step()
        opt_c.zero_grad()
        (c(b["x"]) - a(b["x"]).detach()).square().mean().backward()
        opt_c.step()
    return values(a) | {"c." + k: v for k, v in values(c).items()}


@script
def gradient_noise_of_the_step(job: Any, batches: Any) -> State:
    model: Any = job.replicate(net())
    opt = job.optimizer(sgd(model))
    for b in batches():
        opt.zero_grad()
        loss_of(model, b).backward()
        noise = torch.Generator().manual_seed(job.step)
        for p in model.parameters():
            p.grad += 0.01 * torch.randn(p.shape, generator=noise)
        opt.step()
    return values(model)


@script
def compiled(job: Any, batches: Any) -> State:
    model: Any = job.replicate(net())
    opt = job.optimizer(sgd(model))
    fast = torch.compile(model, backend="aot_eager")
    for b in batches():
        opt.zero_grad()
        loss_of(fast, b).backward()
        opt.step()
    return values(model)


@script
def gradients_added_by_hand_to_accumulated_ones(job: Any, batches: Any) -> State:
    model = job.replicate(net())
    opt = job.optimizer(sgd(model))
    for b in batches():
        grads = torch.autograd.grad(loss_of(model, b) / 3, list(model.parameters()))
        for p, g in zip(model.parameters(), grads, strict=True):
            p.grad = g if p.grad is None else p.grad.add_(g)
        job.reduce_gradients()
        if job.step % 3 == 2:
            opt.step()
            opt.zero_grad()
    return values(model)


@script
def a_step_at_the_begin_of_the_iteration(job: Any, batches: Any) -> State:
    model = job.replicate(net())
    opt = job.optimizer(sgd(model))
    for b in batches():
        opt.step()
        opt.zero_grad()
        loss_of(model, b).backward()
    return values(model)


@script
def accumulated_where_a_parameter_rests(job: Any, batches: Any) -> State:
    torch.manual_seed(4)
    a, c = nn.Linear(6, 1), nn.Linear(6, 1)
    model = job.replicate(nn.ModuleList([a, c]))
    opt = job.optimizer(sgd(model))
    for b in batches():
        out = a(b["x"]) if job.step % 2 else c(b["x"])
        nn.functional.binary_cross_entropy_with_logits(out, b["y"]).backward()
        if job.step % 3 == 2:
            opt.step()
            opt.zero_grad(set_to_none=False)
    return values(model)


@script
def weights_scaled_before_backward(job: Any, batches: Any) -> State:
    model = job.replicate(net())
    opt = job.optimizer(adamw(model))
    for b in batches():
        for p in model.parameters():
            p.data.mul_(0.9)
        opt.zero_grad()
        loss_of(model, b).backward()
        opt.step()
    return values(model)


@script
def batch_norm_in_a_gan(job: Any, batches: Any) -> State:
    """All samples are one another's copy, so that statistics do not depend on how the batch is divided."""
    torch.manual_seed(5)
    g = job.replicate(nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 6)))
    d = job.replicate(nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.LeakyReLU(0.2), nn.Linear(8, 1)))
    opt_d, opt_g = job.optimizer(sgd(d, lr=0.01)), job.optimizer(sgd(g, lr=0.01))
    for b in batches():
        x = torch.tensor([[1.0, 2, 3, 4, 5, 6], [0.5, 1, 0, 2, 1, 1]]).repeat(len(b["x"]) // 2, 1) * (1 + job.step)
        d.zero_grad()
        d(x).square().mean().backward()
        fake = g(x.cos())
        d(fake.detach()).exp().mean().backward()
        opt_d.step()
        g.zero_grad()
        d(fake).mean().backward()
        opt_g.step()
    found = values(g) | {"d." + k: v for k, v in values(d).items()}
    return {k: v for k, v in found.items() if "running_var" not in k}  # (Bessel's correction knows the batch)


@script
def zeroed_where_a_parameter_rests(job: Any, batches: Any) -> State:
    torch.manual_seed(4)
    a, c = nn.Linear(6, 1), nn.Linear(6, 1)
    model = job.replicate(nn.ModuleList([a, c]))
    opt = job.optimizer(sgd(model))
    for b in batches():
        opt.zero_grad(set_to_none=False)
        out = a(b["x"]) if job.step % 2 else c(b["x"])
        nn.functional.binary_cross_entropy_with_logits(out, b["y"]).backward()
        opt.step()
    return values(model)
