"""Finds averages of the model that a script keeps outside of what the job knows.

A moving average or a target network in the script's own variables is not given to a worker that joins, and an iteration
that is done again changes it twice. In the first steps of a loop the script's variables are compared before and behind
the iteration: a tensor that moved towards a parameter is such an average.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from types import FrameType, ModuleType
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor, nn

from everstep.allreduce.dtensor import local

STEPS: Final = 3
"""The first steps of a loop, which are looked at."""

_FRAMES = 6
_DEPTH = 3
_OBJECTS = 4000
_BYTES = 1 << 28  # of tensors that are copied for comparing
_CLOSE = 1e-3


class HeldTensor(NamedTuple):
    """Is a tensor in a variable of the script."""

    path: str
    tensor: Tensor
    in_module: bool


class Outside:
    """Holds the script's tensors that the job does not know, as they were when the iteration began."""

    def __init__(
        self, frame: FrameType | None, known: Sequence[Tensor], params: Sequence[Tensor], single: bool = False
    ) -> None:
        """Take ``known``: what the job knows. Compared are tensors of the shapes of ``params``; ``single``: also those
        of one element, which may be anything else."""
        self._frame = frame
        self._known = {id(t) for t in known} | {id(p) for p in params}
        self._storages = {_address(t) for t in known} | {_address(p) for p in params}
        like = [p.detach() for p in params if p.numel() > (not single) and p.is_floating_point()]
        self._shapes = {p.shape for p in like}
        self._params = [p for p in like if local(p) is p]
        self._before: dict[str, Tensor] = {}
        self._held: list[tuple[Tensor, Tensor]] = []
        size = 0
        for held in self._find():
            size += held.tensor.nbytes
            if size > _BYTES:
                break
            old = self._before[held.path] = held.tensor.detach().clone()
            self._held.append((held.tensor, old))

    def __repr__(self) -> str:
        return f"<Outside {sorted(self._before)}>"

    def moved(self) -> str:
        """Return the variable with an average of a parameter; "": none."""
        if not self._before:
            return ""
        for held in self._find():
            old = self._before.get(held.path)
            if old is None or old.shape != held.tensor.shape or torch.equal(old, held.tensor):
                continue
            if any(
                _towards(old, held.tensor.detach(), p, held.in_module) for p in self._params if p.shape == old.shape
            ):
                return held.path
        return ""

    def put_back(self) -> None:
        """The iteration does not commit: what it changed is as before."""
        with torch.no_grad():
            for tensor, old in self._held:
                if old.shape == tensor.shape and not torch.equal(old, tensor):
                    tensor.data.copy_(old)

    # ------------------------------------------------------------ the script's variables

    def _find(self) -> Iterator[HeldTensor]:
        seen: set[int] = set()
        frame, count = self._frame, 0
        while frame is not None and count < _FRAMES:
            name = frame.f_globals.get("__name__", "")
            if not str(name).startswith(("everstep.", "_pytest", "torch.")):
                count += 1
                variables = dict(frame.f_locals)
                if "__file__" in frame.f_globals and frame.f_code.co_name == "<module>":
                    variables |= {k: v for k, v in frame.f_globals.items() if not k.startswith("__")}
                for variable, value in variables.items():
                    yield from self._within(variable, value, _DEPTH, seen, False)
            frame = frame.f_back

    def _within(self, path: str, value: Any, depth: int, seen: set[int], in_module: bool) -> Iterator[HeldTensor]:
        if isinstance(value, Tensor):
            if self._unknown(value):
                yield HeldTensor(path, value, in_module)
            return
        plain = value is None or isinstance(value, str | bytes | int | float | ModuleType | type)
        if plain or (callable(value) and not isinstance(value, nn.Module) and not hasattr(value, "__dict__")):
            return
        if depth == 0 or id(value) in seen or len(seen) > _OBJECTS:
            return
        seen.add(id(value))
        if isinstance(value, nn.Module):
            for name, tensor in (*value.named_parameters(), *value.named_buffers()):
                if self._unknown(tensor):
                    yield HeldTensor(f"{path}.{name}", tensor, True)
            return
        for name, item in _items(value):
            yield from self._within(f"{path}{name}", item, depth - 1, seen, in_module)

    def _unknown(self, tensor: Tensor) -> bool:
        if type(tensor) not in (Tensor, nn.Parameter) or tensor.shape not in self._shapes or not tensor.is_leaf:
            return False
        return id(tensor) not in self._known and _address(tensor) not in self._storages


def _items(value: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(value, torch.optim.Optimizer) or type(value).__module__.startswith(("everstep.", "torch.utils")):
        return
    if isinstance(value, dict):
        yield from ((f"[{key!r}]", item) for key, item in list(value.items())[:_OBJECTS])
    elif isinstance(value, list | tuple):
        yield from ((f"[{n}]", item) for n, item in enumerate(value[:_OBJECTS]))
    elif isinstance(getattr(value, "__dict__", None), dict):
        yield from ((f".{key}", item) for key, item in list(vars(value).items())[:_OBJECTS])


def _address(tensor: Tensor) -> int:
    here = local(tensor)  # (a sharded tensor has no storage of its own)
    return here.untyped_storage().data_ptr() if here.layout == torch.strided else id(tensor)


def _towards(old: Tensor, new: Tensor, param: Tensor, in_module: bool) -> bool:
    """Return whether ``new`` is ``old``, moved a part of the way to ``param``; in a module also the whole way."""
    if param.device != old.device:
        return False
    way, went = (param - old).double(), (new - old).double()
    length = float((way * way).sum())
    if not 0.0 < length < float("inf"):
        return False
    part = float((way * went).sum()) / length
    rest = float(((went - part * way) ** 2).sum()) ** 0.5
    most = 1.0 + _CLOSE if in_module else 1.0 - _CLOSE
    return 0.0 < part < most and rest <= _CLOSE * part * length**0.5
