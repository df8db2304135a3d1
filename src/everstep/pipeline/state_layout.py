"""Says what of a stage's state is where in its copies, and keeps that from one copy to the next.

To describe a state takes longer than to begin to copy it. Tensors of a model and of its optimizers stay the same
objects from step to step, and so does where their bytes belong. A copy begins with what was found at an earlier one. In
its first wait it is checked whether that is still so; if not, the copy is thrown away, and the next one looks anew."""

from __future__ import annotations

from typing import Any, Final, NamedTuple

import msgspec
import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from everstep.allreduce.serialize import Packer, SerializedHeader, encode_header
from everstep.allreduce.state import ReplicaState, pack_groups
from everstep.model.group import Position

SMALL_BYTES: Final = 4 << 10
"""What is smaller is copied at once."""

_PLAIN: Final = (bool, int, float, str, type(None))
_KINDS: Final = (torch.Tensor, nn.Parameter, nn.Buffer)
_WHAT: Final = "the training state"


class _StateContents(NamedTuple):
    """Is what a state consists of. ``same``: objects that have to be the same ones; ``equal``: facts that have to be
    equal. ``tensors``: of models and optimizers."""

    same: list[Any]
    equal: list[Any]
    tensors: list[torch.Tensor]

    def fits(self, other: _StateContents | None) -> bool:
        return (
            other is not None
            and len(self.same) == len(other.same)
            and all(map(_is, self.same, other.same))
            and self.equal == other.equal
        )


def _is(a: object, b: object) -> bool:
    return a is b


def _contents(state: ReplicaState) -> _StateContents | None:
    """Return what ``state`` consists of; None: something that cannot be compared fast, so it is described each time."""
    if state.carried or state.rows is not None:
        return None
    same: list[Any] = []
    tensors: list[torch.Tensor] = []
    todo: list[nn.Module] = list(state.models)
    for module in todo:  # (grows)
        if type(module).get_extra_state is not nn.Module.get_extra_state:
            return None
        for held in (module._parameters, module._buffers):
            same += held
            tensors += [value for value in held.values() if value is not None]
        same += module._modules
        todo += [child for child in module._modules.values() if child is not None]
    equal: list[Any] = [sorted(state.reserve), len(todo)]
    same += todo
    for optimizer in state.optimizers:
        for group in optimizer.param_groups:
            same += group["params"]
            equal.append(len(group["params"]))
        for key, kept in optimizer.state.items():
            if type(key) not in _KINDS or type(kept) is not dict:
                return None
            same.append(key)
            same += kept
            for value in kept.values():
                if isinstance(value, torch.Tensor):
                    tensors.append(value)
                elif type(value) in _PLAIN:
                    equal.append(value)
                else:
                    return None
    same += tensors
    for tensor in tensors:
        if type(tensor) not in _KINDS:
            return None
        equal.append((tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype, tensor.requires_grad))
    return _StateContents(same, equal, tensors)


def _groups(state: ReplicaState) -> list[Any] | None:
    """Return the hyper-parameters of all optimizers; None: there are tensors among them."""
    found = [
        [pair for pair in group.items() if pair[0] != "params"]
        for optimizer in state.optimizers
        for group in optimizer.param_groups
    ]
    return None if any(isinstance(value, torch.Tensor) for pairs in found for _, value in pairs) else found


def _tracked(state: ReplicaState) -> dict[str, Any] | None:
    """Return tracked objects as the header has them; None: they hold tensors."""
    if not state.tracked:
        return {}
    packer = Packer()
    found = {f"tracked.{name}": packer.tree(name, thing.state_dict()) for name, thing in state.tracked.items()}
    return None if packer.tensors else found


class StateLayout:
    """Is where the bytes of a state belong in a copy: ``addresses`` uint64, ``places`` and ``sizes`` int64, one for
    each tensor that has any bytes, in the order of ``held``; ``device``: where they lie. What may change before the
    optimizer steps, and parameters that are small, are copied into memory of its own by ``capture``; the addresses are
    of that memory then."""

    def __init__(self, state: ReplicaState) -> None:
        """Raises ScriptError: something is of a kind that cannot be saved."""
        header, packer = state.described(Position(), 0)
        self._header: SerializedHeader = header
        self.size_bytes = packer.size_bytes
        self.text = encode_header(header, _WHAT)
        changes = set(header.buffers) | set(header.gradients)
        self._watched: list[torch.Tensor] = []  # that are copied from where they are
        self._from: list[torch.Tensor] = []  # that ``capture`` copies
        self._into: list[torch.Tensor] = []
        held: list[tuple[torch.Tensor, int]] = []  # with its place
        optimizers = {value.data_ptr() for value in _kept(state)}
        for number, (tensor, entry) in enumerate(zip(packer.tensors, packer.entries, strict=True)):
            size = tensor.numel() * tensor.element_size()
            if not size:
                continue
            small = size < SMALL_BYTES and tensor.data_ptr() not in optimizers
            if number in changes or small or not tensor.is_contiguous():
                own = torch.empty(tensor.shape, dtype=tensor.dtype, device=tensor.device)
                self._from.append(tensor)
                self._into.append(own)
                tensor = own
            else:
                self._watched.append(tensor)
            held.append((tensor, entry.at))
        self.held = held
        self.device = next((t.device for t, _ in held if t.device.type != "cpu"), torch.device("cpu"))
        self.addresses: NDArray[np.uint64] = np.array([t.data_ptr() for t, _ in held], np.uint64)
        self.places: NDArray[np.int64] = np.array([at for _, at in held], np.int64)
        self.sizes: NDArray[np.int64] = np.array([t.numel() * t.element_size() for t, _ in held], np.int64)
        self._names = {id(p): name for name, p in state.parameters()}
        self._contents, self._groups, self._tracked = _contents(state), _groups(state), _tracked(state)
        self._tensors = [] if self._contents is None else self._contents.tensors
        self._at = list(map(torch.Tensor.data_ptr, self._tensors))
        self._counts = _counts(state)
        self._versions: list[int] = []
        self._checked = True

    def __repr__(self) -> str:
        return f"<StateLayout of {len(self.sizes)} tensors, {self.size_bytes} bytes>"

    def follows(self, state: ReplicaState) -> bool:
        """Return whether this is still how ``state`` is laid out, as far as that is told at once: ``check`` tells the
        rest. A header whose values have changed is made anew. Raises ScriptError."""
        if self._contents is None or self._groups is None or self._tracked is None or state.carried:
            return False
        if self._counts != _counts(state) or self._at != list(map(torch.Tensor.data_ptr, self._tensors)):
            return False
        groups, tracked = _groups(state), _tracked(state)
        if groups is None or tracked is None or tracked.keys() != self._tracked.keys():
            return False
        if groups != self._groups or tracked != self._tracked:
            trees = {**self._header.trees, **tracked}
            for number, optimizer in enumerate(state.optimizers):
                what = f"optimizer{number}"
                trees[what] = {**trees[what], "groups": pack_groups(Packer(), what, optimizer, self._names)}
            self._header = msgspec.structs.replace(self._header, trees=trees)
            self.text = encode_header(self._header, _WHAT)
            self._groups, self._tracked = groups, tracked
        self._checked = False
        return True

    def capture(self) -> None:
        """Copy what may change soon, and note the versions of the rest."""
        if self._from:
            torch._foreach_copy_(self._into, self._from)
        self._versions = [tensor._version for tensor in self._watched]

    def check(self, state: ReplicaState) -> bool:
        """Return whether this is how ``state`` is laid out; once for each copy. It takes a while: for a wait."""
        if not self._checked:
            self._checked = self._contents is not None and self._contents.fits(_contents(state))
        return self._checked

    @property
    def changed(self) -> bool:
        """Return whether something was changed since ``capture`` that must not."""
        return self._versions != [tensor._version for tensor in self._watched]


def _kept(state: ReplicaState) -> list[torch.Tensor]:
    """Return what optimizers keep of each parameter: nothing but the optimizer changes it."""
    values = [
        value
        for optimizer in state.optimizers
        for kept in optimizer.state.values()
        if isinstance(kept, dict)
        for value in kept.values()
    ]
    return [value for value in values if isinstance(value, torch.Tensor)]


def _counts(state: ReplicaState) -> list[int]:
    return [
        count
        for optimizer in state.optimizers
        for count in (len(optimizer.state), *(len(group["params"]) for group in optimizer.param_groups))
    ]


__all__ = ["SMALL_BYTES", "StateLayout"]
