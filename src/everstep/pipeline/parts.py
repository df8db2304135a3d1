"""Cuts a model into parts, and checks that they can be trained apart from each other."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from everstep.errors import ScriptError

Child = tuple[int, str, nn.Module]
"""A module of the model: its number and its name there, and itself."""


class ModelParts:
    """Holds a model in parts. ``children[part]``: what this process keeps of each; none of parts of others. ``names``,
    ``buffers``: of all parameters and buffers of the model, in its order."""

    def __init__(self, count: int) -> None:
        self.children: list[list[Child]] = [[] for _ in range(count)]
        self.names: list[str] = []
        self.buffers: list[str] = []
        self._owners: dict[int, tuple[weakref.ref[Tensor], str, int]] = {}

    def add(self, part: int, number: int, name: str, module: nn.Module, keep: bool) -> None:
        """Take the next module. ``keep``: it is of this process. Raises ScriptError: it cannot be trained in parts."""
        if not isinstance(module, nn.Module):
            raise ScriptError(f"job.pipeline: part {part} is a {type(module).__name__}, not a torch.nn.Module")
        for at, inner in module.named_modules():
            label = f"{name}.{at}" if at else name
            if isinstance(inner, nn.modules.batchnorm._BatchNorm):
                raise ScriptError(
                    f"job.pipeline: {label!r} is a {type(inner).__name__}, which would see microbatches and not the "
                    "batch: use a norm of each sample (LayerNorm, GroupNorm, RMSNorm)"
                )
            if getattr(inner, "max_norm", None) is not None:
                raise ScriptError(
                    f"job.pipeline: max_norm of {label!r} changes weights in forward, in each microbatch: build it "
                    "without, and scale the rows down behind opt.step()"
                )
        for at, p in module.named_parameters():
            self._own(part, f"{name}.{at}", p)
            self.names.append(f"{name}.{at}")
        self.buffers += [f"{name}.{at}" for at, _ in module.named_buffers()]
        if keep:
            self.children[part].append((number, name, module))

    def _own(self, part: int, name: str, p: nn.Parameter) -> None:
        if isinstance(p, nn.parameter.UninitializedParameter):
            raise ScriptError(
                f"job.pipeline: parameter {name!r} has no shape yet (a lazy module): run the model on one batch first"
            )
        if isinstance(p, DTensor):
            raise ScriptError(f"job.pipeline: parameter {name!r} is sharded (FSDP2): a stage is one process")
        if p.device.type != "cpu":
            raise ScriptError(
                f"job.pipeline: parameter {name!r} is on {p.device}: pipelines train on the CPU only so far"
            )
        known = self._owners.get(id(p))
        if known is not None and known[0]() is p:
            where = f"part {known[2]} ({known[1]!r})"
            if known[2] != part:
                raise ScriptError(
                    f"job.pipeline: parameter {name!r} of part {part} is one of {where} too: parts of a model cannot "
                    "share parameters; give each its own"
                )
            raise ScriptError(f"job.pipeline: parameter {name!r} is one of {where} too, in another module of it")
        self._owners[id(p)] = weakref.ref(p), name, part


def cut(model: Any, split: Sequence[int] | None, count: int, homes: Callable[[int], list[int]], own: int) -> ModelParts:
    """Return a model in parts: of an nn.Sequential, whose modules are cut at ``split``, or else evenly into ``count``;
    of a list of modules, or of functions that build them, each of which is a part. ``homes``: of so many parts, the
    processes that have them; this one is ``own``. Raises ScriptError."""
    if isinstance(model, nn.Sequential):
        return _cut_sequential(model, split, count, homes, own)
    if isinstance(model, list | tuple) and model:
        if split is not None:
            raise ScriptError("job.pipeline(split=...): for an nn.Sequential; a list of parts is cut already")
        parts = ModelParts(len(model))
        where = homes(len(model))
        for number, made in enumerate(model):
            built = made if isinstance(made, nn.Module) or not callable(made) else made()
            parts.add(number, number, str(number), built, where[number] == own)
            _check_part(parts, number, [str(number)])
        return parts
    raise ScriptError(
        f"job.pipeline takes an nn.Sequential, or a list of its parts (modules, or functions that build them), not "
        f"{type(model).__name__}"
    )


def _cut_sequential(
    model: nn.Sequential, split: Sequence[int] | None, count: int, homes: Callable[[int], list[int]], own: int
) -> ModelParts:
    children = [(name, child) for name, child in model._modules.items() if child is not None]
    if split is None:
        if len(children) < count:
            raise ScriptError(f"job.pipeline: a model of {len(children)} modules cannot be cut into {count} parts")
        begins = _even([sum(p.numel() for p in child.parameters()) for _, child in children], count)
    else:
        begins = [0, *split]
        if any(a >= b for a, b in zip(begins, [*begins[1:], len(children)], strict=True)):
            raise ScriptError(
                f"job.pipeline(split={list(split)}): numbers of the modules that parts begin with, growing, from 1 to "
                f"{len(children) - 1}"
            )
    parts = ModelParts(len(begins))
    where = homes(len(begins))
    for part, (lo, hi) in enumerate(zip(begins, [*begins[1:], len(children)], strict=True)):
        for number in range(lo, hi):
            name, child = children[number]
            parts.add(part, number, name, child, where[part] == own)
        _check_part(parts, part, [name for name, _ in children[lo:hi]])
    return parts


def _check_part(parts: ModelParts, part: int, modules: list[str]) -> None:
    if not any(name.startswith(tuple(f"{module}." for module in modules)) for name in parts.names):
        raise ScriptError(
            f"job.pipeline: part {part} (modules {', '.join(modules)}) has no parameters: there is nothing to train in "
            "that stage; cut the model otherwise"
        )


def _even(sizes: list[int], count: int) -> list[int]:
    """Return where ``count`` parts begin that have about as many parameters, each at least one module with some."""
    total, begins, done = sum(sizes), [0], 0
    for number, size in enumerate(sizes):
        left = count - len(begins)
        owning = sum(1 for s in sizes[number:] if s)
        begun = any(sizes[begins[-1] : number])
        if left and begun and size and (done + size / 2 >= total * len(begins) / count or owning == left):
            begins.append(number)
        done += size
    if len(begins) < count:
        raise ScriptError(
            f"job.pipeline: {sum(1 for s in sizes if s)} modules with parameters cannot be cut into {count} parts"
        )
    return begins
