"""Records what a step did to the state, so that someone else does the same to a copy of it: same bits, without the
user's code.

What training does between the reduction and the optimizer (clipping, unscaling, a schedule) is the script's and is not
known here. What arrives at torch's optimizer is: the gradients and hyper-parameters that its ``step`` is given. A
``Recorder`` keeps those by hooks of torch, with buffers, tracked objects and hyper-parameters as they are at the end of
the step; ``replay`` gives them to the optimizer of another process. A step that cannot be told so (a closure, a sparse
gradient) ends the step log: who follows must copy the state anew.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch.utils.hooks import RemovableHandle

from everstep.allreduce.serialize import Packer, SerializedState, Unpacker
from everstep.allreduce.state import ReplicaState, load_groups, pack_groups
from everstep.errors import CheckpointError, EverstepError
from everstep.model.group import Position


class Did(NamedTuple):
    """Is one committed step, from position ``before`` to ``position``: a piece for each call of an optimizer, and the
    end."""

    before: Position
    position: Position
    parts: tuple[SerializedState, ...]

    @property
    def size_bytes(self) -> int:
        return sum(part.size_bytes for part in self.parts)

    def buffers(self) -> list[Any]:
        """Return headers and tensors in the order of the wire."""
        return [piece for part in self.parts for piece in (part.header, part.body.numpy())]


class Recorder:
    """Keeps what each step does, from a boundary of two steps on. ``broken``: why it cannot, "" if it can."""

    def __init__(self, state: ReplicaState) -> None:
        self._state = state
        self._names = {id(p): name for name, p in state.parameters()}
        self._parts: list[SerializedState] = []
        self._before = state.position
        self.broken = ""
        self._handles: list[RemovableHandle] = [
            optimizer.register_step_pre_hook(self._hook(number)) for number, optimizer in enumerate(state.optimizers)
        ]

    def __repr__(self) -> str:
        return f"<Recorder before {self._before} {self.broken or 'recording'}>"

    def _hook(self, number: int) -> Callable[[torch.optim.Optimizer, Any, Any], None]:
        def before_step(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
            if self.broken:
                return
            try:
                self._given(number, optimizer, args, kwargs)
            except EverstepError as error:
                self.broken = str(error)
            except KeyError:
                self.broken = f"optimizer {number} has a parameter that it did not have before"

        return before_step

    def _given(self, number: int, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        if any(a is not None for a in (*args[1:], *kwargs.values())):  # (args[0] is the optimizer)
            self.broken = f"optimizer {number} was stepped with a closure"
        elif getattr(optimizer, "grad_scale", None) is not None:
            self.broken = f"optimizer {number} unscales gradients itself"
        if self.broken:
            return
        packer = Packer()
        gradients = [
            [self._names[id(p)], packer.tensor(f"gradient of {self._names[id(p)]}", p.grad)]
            for group in optimizer.param_groups
            for p in group["params"]
            if p.grad is not None and id(p) in self._names
        ]
        groups = pack_groups(packer, f"optimizer{number}", optimizer, self._names)
        self._parts.append(_serialized(packer, self._state, {"step": [number, groups, gradients]}))

    def boundary(self) -> Did | None:
        """Return what a step did, at its end, ``state.position`` being the next one already; None: broken."""
        state = self._state
        if self.broken:
            return None
        try:
            packer = Packer()
            buffers = tuple(packer.tensor(name, b) for name, b in state.buffers())
            gradients: tuple[int, ...] = ()
            if state.carried:
                gradients = tuple(
                    packer.tensor(f"{n}.grad", p.grad) for n, p in state.parameters() if p.grad is not None
                )
            trees = state.pack_trees(packer, self._names, state=False)
            end = _serialized(packer, state, trees, buffers, gradients)
        except EverstepError as error:
            self.broken = str(error)
            return None
        except KeyError:
            self.broken = "an optimizer has a parameter that it did not have before"
            return None
        did = Did(self._before, state.position, (*self._parts, end))
        self._before, self._parts = state.position, []
        return did

    def close(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles.clear()


def _serialized(
    packer: Packer,
    state: ReplicaState,
    trees: dict[str, Any],
    buffers: tuple[int, ...] = (),
    gradients: tuple[int, ...] = (),
) -> SerializedState:
    header = packer.header(state.position, state.loop, trees, buffers=buffers, gradients=gradients)
    return packer.finish(header, "a step")


def replay(state: ReplicaState, position: Position, parts: Sequence[SerializedState], what: str) -> None:
    """Do to ``state`` what the step did, and put its position to ``position``. CheckpointError: it is not a step of
    such a state; the state is then neither the old nor the new one."""
    parameters = dict(state.parameters())
    for part in parts[:-1]:
        _step(state, parameters, Unpacker(part, what))
    end = Unpacker(parts[-1], what)
    buffers = dict(state.buffers())
    with torch.no_grad():
        for p in parameters.values():
            p.grad = None
        try:
            for number in end.header.buffers:
                buffers[end.name(number)].copy_(end.view(number))
            for number in end.header.gradients:
                p = parameters[end.name(number).removesuffix(".grad")]
                p.grad = end.copy(number).to(p.device)
            state.load_trees(end, parameters, state=False)
        except (KeyError, RuntimeError) as error:
            raise CheckpointError(f"{what} is of another model: {error}") from None
    state.carried = bool(end.header.gradients)
    state.position, state.loop = position, end.header.loop


def _step(state: ReplicaState, parameters: dict[str, torch.Tensor], given: Unpacker) -> None:
    try:
        number, groups, gradients = given.header.trees["step"]
        optimizer = state.optimizers[number]
        load_groups(given, f"optimizer{number}", optimizer, groups)
        for group in optimizer.param_groups:
            for p in group["params"]:
                p.grad = None
        for name, at in gradients:
            p = parameters[name]
            p.grad = given.view(at).to(p.device)  # (a view on the CPU: good until the step is over)
    except (KeyError, IndexError, TypeError, ValueError, RuntimeError) as error:
        raise CheckpointError(f"{given.what} is of another model: {error}") from None
    optimizer.step()
