"""Reads out whole, and puts back whole, what training changes on one member of a group.

That is the models' parameters and buffers, the optimizers' state and hyper-parameters, whatever the script tracks
(schedulers, GradScaler, averages), gradients that are carried from one step to the next, and the position: the place
in the data. All members have the same state at the same mark; a snapshot is taken at a boundary of two steps only.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from msgspec import structs
from torch import nn

from everstep.allreduce import dtensor
from everstep.allreduce.rolling import RollingDigest
from everstep.allreduce.serialize import Packer, SerializedHeader, SerializedState, Unpacker, encode_header
from everstep.errors import CheckpointError, ScriptError
from everstep.model.group import Position

_INTS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_HALF = 1 << 63
_TABLE = "everstep_table"  # attribute of a parameter that stands for rows on the ps: they are no part of a replica
_TRAINABLE = "trainable"  # the tree of what is frozen
_ROWS = "rows"  # the tree of gradients of tables on the ps that wait for a step


class Named(NamedTuple):
    """Is a parameter or buffer, by its fully qualified name (with several models: ``NUMBER.NAME``)."""

    name: str
    tensor: torch.Tensor


class ReplicaState:
    """References to all of it, alive: the lists may grow until the first snapshot.

    ``position``: of the state as it is now. ``loop``: which of the script's loops (``job.steps``, from 1) it is of:
    what the script did before that one is in it. ``carried``: ``p.grad`` is part of the state at this boundary. Not
    thread-safe: whoever trains calls it.
    """

    follows = True  # it can be told step by step (``allreduce.step_log``)

    def __init__(
        self,
        models: Sequence[nn.Module],
        optimizers: Sequence[torch.optim.Optimizer],
        tracked: Mapping[str, Any],
    ) -> None:
        """Take ``optimizers``: torch's own, not wrappers of ours. ``tracked``: with state_dict and load_state_dict."""
        self.models, self.optimizers, self.tracked = models, optimizers, tracked
        self.position = Position()
        self.loop = 0
        self.carried = False
        self._rolling = RollingDigest(self)
        self.reserve: set[str] = set()  # see ``GroupEngine.reserve``
        self.rows: Any = None  # with state_dict and load_state_dict: gradients of tables on the ps

    def __repr__(self) -> str:
        return f"<ReplicaState {len(self.models)} models, {len(self.optimizers)} optimizers, {self.position}>"

    # ------------------------------------------------------------ what there is

    @property
    def waits(self) -> tuple[int, int]:
        """Return from which position of which shard on gradients of tables wait for a step; (-1, 0): there are none."""
        found: tuple[int, int] = (-1, 0) if self.rows is None else self.rows.begin
        return found

    def parameters(self) -> Iterator[Named]:
        """Yield all that are trained, each once, in a fixed order; also those that only an optimizer knows."""
        seen: set[int] = set()
        dtensor.settle(self.models)
        for prefix, model in self._models():
            for name, p in model.named_parameters():
                if id(p) not in seen and not hasattr(p, _TABLE):
                    seen.add(id(p))
                    yield Named(prefix + name, p)
        for o, optimizer in enumerate(self.optimizers):
            for g, group in enumerate(optimizer.param_groups):
                for i, p in enumerate(group["params"]):
                    if id(p) not in seen and not hasattr(p, _TABLE):
                        seen.add(id(p))
                        yield Named(f"optimizer{o}.group{g}.{i}", p)

    def buffers(self) -> Iterator[Named]:
        for prefix, model in self._models():
            for name, buffer in model.named_buffers():
                yield Named(prefix + name, buffer)

    def tensors(self) -> Iterator[Named]:
        """Yield parameters, buffers, what optimizers keep of each parameter, and tracked modules; in a fixed order."""
        parameters = list(self.parameters())
        yield from parameters
        yield from self.buffers()
        for o, optimizer in enumerate(self.optimizers):
            for name, p in parameters:
                kept: Any = optimizer.state.get(p)
                for key in sorted(kept, key=str) if isinstance(kept, dict) else ():
                    if isinstance(kept[key], torch.Tensor):
                        yield Named(f"{key} of {name} (optimizer {o})", kept[key])
        for tracked, thing in self.tracked.items():
            if isinstance(thing, nn.Module):
                for name, tensor in (*thing.named_parameters(), *thing.named_buffers()):
                    yield Named(f"{tracked}.{name}", tensor)

    def devices(self) -> set[torch.device]:
        """Return the devices that parameters are on. Rows of tables on the ps come to the host and are not of these."""
        return {p.device for model in self.models for p in model.parameters() if not hasattr(p, _TABLE)}

    def _models(self) -> Iterator[tuple[str, nn.Module]]:
        several = len(self.models) > 1
        for i, model in enumerate(self.models):
            yield f"{i}." if several else "", model

    # ------------------------------------------------------------ out

    def snapshot(self, into: torch.Tensor | None = None) -> SerializedState:
        """Return a copy, at the speed of memory. ``into``: uint8, used if it is exactly as long. Raises ScriptError:
        something is of a kind that cannot be saved."""
        return self._serialized(self.position, self.loop, into)

    def _serialized(self, position: Position, loop: int, into: torch.Tensor | None) -> SerializedState:
        header, packer = self.described(position, loop)
        return packer.finish(header, "the training state", into)

    def described(self, position: Position, loop: int) -> tuple[SerializedHeader, Packer]:
        """Return the header of the packed state, and its tensors as they are: nothing is copied yet."""
        packer = Packer()
        parameters = list(self.parameters())
        numbers = tuple(packer.tensor(name, p) for name, p in parameters)
        buffers = tuple(packer.tensor(name, b) for name, b in self.buffers())
        gradients = (
            tuple(packer.tensor(f"{name}.grad", p.grad) for name, p in parameters if p.grad is not None)
            if self.carried
            else ()
        )
        trees = self.pack_trees(packer, {id(p): name for name, p in parameters})
        header = packer.header(position, loop, trees, parameters=numbers, buffers=buffers, gradients=gradients)
        return header, packer

    def pack_trees(self, packer: Packer, names: Mapping[int, str], state: bool = True) -> dict[str, Any]:
        """Return optimizers (``state``: also what they keep of each parameter) and tracked objects, by name."""
        trees: dict[str, Any] = {
            f"optimizer{o}": _pack_optimizer(packer, f"optimizer{o}", optimizer, names, state)
            for o, optimizer in enumerate(self.optimizers)
        }
        frozen = [names[id(p)] for model in self.models for p in model.parameters() if self._frozen(p, names)]
        trees[_TRAINABLE] = [frozen, sorted(self.reserve)]
        if self.rows is not None and (rows := self.rows.state_dict()):
            trees[_ROWS] = packer.tree("gradients of tables", rows)
        for name, thing in self.tracked.items():
            trees[f"tracked.{name}"] = packer.tree(f"tracked.{name}", thing.state_dict())
        for prefix, model in self._models():
            for at, module in model.named_modules():
                if type(module).get_extra_state is not nn.Module.get_extra_state:
                    trees[f"extra.{prefix}{at}"] = packer.tree(f"extra.{prefix}{at}", module.get_extra_state())
        return trees

    @staticmethod
    def _frozen(p: torch.Tensor, names: Mapping[int, str]) -> bool:
        return not p.requires_grad and id(p) in names

    # ------------------------------------------------------------ in

    def load(self, serialized: SerializedState, what: str = "the state") -> None:
        """Become what was packed. Raises CheckpointError, one line: not sound, or of another model; nothing was changed
        then as far as parameters and buffers go."""
        unpacker = Unpacker(serialized, what)
        header = unpacker.header
        parameters, buffers = list(self.parameters()), list(self.buffers())
        into = _matched(unpacker, "parameter", header.parameters, parameters)
        into += _matched(unpacker, "buffer", header.buffers, buffers)
        known: dict[str, torch.Tensor] = dict(parameters)
        self._check_trees(unpacker)
        with torch.no_grad():
            for number, tensor in into:
                dtensor.fill(tensor, unpacker.view(number))
            for p in known.values():
                p.grad = None
            for number in header.gradients:
                owner = known.get(unpacker.name(number).removesuffix(".grad"))
                if owner is not None:
                    owner.grad = dtensor.as_owner(unpacker.copy(number).to(owner.device), owner)
        self.load_trees(unpacker, known)
        self.carried = bool(header.gradients)
        self.position, self.loop = header.position, header.loop

    def _check_trees(self, unpacker: Unpacker) -> None:
        mine = [f"optimizer{o}" for o in range(len(self.optimizers))] + [f"tracked.{name}" for name in self.tracked]
        others = ("extra.", _TRAINABLE, _ROWS)
        theirs = [name for name in unpacker.header.trees if not name.startswith(others)]
        for name in theirs:
            if name not in mine:
                raise CheckpointError(f"{unpacker.what} has {_words(name)}, which this script does not have")
        for name in mine:
            if name not in theirs:
                raise CheckpointError(f"{unpacker.what} does not have {_words(name)} of this script")

    def load_trees(self, unpacker: Unpacker, known: Mapping[str, torch.Tensor], state: bool = True) -> None:
        """Load optimizers and tracked objects, as ``pack_trees`` packed them. Raises CheckpointError."""
        trees = unpacker.header.trees
        for o, optimizer in enumerate(self.optimizers):
            _load_optimizer(unpacker, f"optimizer{o}", optimizer, trees[f"optimizer{o}"], known, state)
        if _TRAINABLE in trees:  # (an older checkpoint says nothing)
            frozen, reserve = trees[_TRAINABLE]
            self.reserve.clear()
            self.reserve.update(str(name) for name in reserve)
            for name, p in known.items():
                if p.is_leaf and p.requires_grad != (name not in set(frozen)) and p.is_floating_point():
                    p.requires_grad_(name not in frozen)
        device = next((p.device for p in known.values()), None)
        for name, thing in self.tracked.items():
            thing.load_state_dict(unpacker.value(trees[f"tracked.{name}"], device))
        if self.rows is not None:
            self.rows.load_state_dict(unpacker.value(trees[_ROWS]) if _ROWS in trees else {})
        for prefix, model in self._models():
            for at, module in model.named_modules():
                if f"extra.{prefix}{at}" in trees:
                    module.set_extra_state(unpacker.value(trees[f"extra.{prefix}{at}"], device))

    # ------------------------------------------------------------ comparing

    def digest(self) -> int:
        """Of every byte, but of neither position nor loop: equal states have equal digests. About a second per
        gigabyte."""
        serialized = self._serialized(Position(), 0, None)
        hashed = hashlib.blake2b(serialized.header, digest_size=8)
        hashed.update(serialized.body.numpy().data)
        return _signed(hashed)

    def quick_digest(self) -> int:
        """Digest as ``digest`` does, at the speed of memory: sums of the bits, which find what happens by mistake. Of a
        sharded model: of what this process has."""
        packer = Packer(local_only=True)
        parameters = list(self.parameters())
        for name, tensor in (*parameters, *self.buffers()):
            packer.tensor(name, tensor)
        trees = self.pack_trees(packer, {id(p): name for name, p in parameters})
        if self.carried:
            for name, p in parameters:
                if p.grad is not None:
                    packer.tensor(f"{name}.grad", p.grad)
        sums = [bit_sum(tensor) for tensor in packer.tensors]
        # Where a tensor lies is not part of what it is: some members may have GPUs and others not.
        entries = tuple(entry if not entry.home else structs.replace(entry, home=False) for entry in packer.entries)
        header = SerializedHeader(size_bytes=packer.size_bytes, tensors=entries, trees={"all": [trees, sums]})
        return _signed(hashlib.blake2b(encode_header(header, "the training state"), digest_size=8))

    def tensor_digests(self) -> dict[str, int]:
        """Digest as ``quick_digest`` does, int64 by name; of a sharded model: of what this process has."""
        return {name: bit_sum(dtensor.local(tensor)) for name, tensor in self.tensors()}

    def slice_digest(self, step: int) -> int:
        """Return the digest of the slice of the state that ``step`` is about, before that step
        (``allreduce.rolling``)."""
        return self._rolling.of(step)

    def parameter_digests(self) -> dict[str, int]:
        """Return digests, int64 by parameter's and buffer's name."""
        out: dict[str, int] = {}
        for name, tensor in (*self.parameters(), *self.buffers()):
            plain = dtensor.whole(tensor).detach().cpu().contiguous()
            head = f"{name} {plain.dtype} {tuple(plain.shape)}".encode()
            hashed = hashlib.blake2b(head, digest_size=8)
            if plain.numel():
                hashed.update(plain.reshape(-1).view(torch.uint8).numpy().data)
            out[name] = _signed(hashed)
        return out


def bit_sum(tensor: torch.Tensor) -> int:
    """Return the sum of the bit patterns, as an int64: eight bytes at a time where they lie so."""
    if not tensor.numel():
        return 0
    ints = _INTS.get(tensor.element_size())
    if ints is None:  # complex128
        return bit_sum(torch.view_as_real(tensor))
    if tensor.is_conj() or tensor.is_neg():
        tensor = tensor.resolve_conj().resolve_neg()
    tensor = tensor.detach()
    if not tensor.is_contiguous() or tensor.storage_offset() * tensor.element_size() % 8:
        tensor = tensor.contiguous() if not tensor.is_contiguous() else tensor.clone()
    flat = tensor.view(-1)
    whole = flat.numel() * flat.element_size() // 8 * 8 // flat.element_size()
    total = int(flat[:whole].view(torch.int64).sum()) if whole else 0
    if whole < flat.numel():
        total += int(flat[whole:].view(ints).sum(dtype=torch.int64))
    return (total + _HALF) % (2 * _HALF) - _HALF


def _signed(hashed: hashlib.blake2b) -> int:
    return int.from_bytes(hashed.digest(), "little") - _HALF


def _words(tree: str) -> str:
    kind, _, name = tree.partition(".")
    if kind != "tracked":
        return f"optimizer {kind.removeprefix('optimizer')}"
    return f"{name!r} (of job.track)"


def _matched(
    unpacker: Unpacker, what: str, numbers: Sequence[int], mine: Sequence[Named]
) -> list[tuple[int, torch.Tensor]]:
    """Return what goes where. CheckpointError names the first that does not fit."""
    theirs = {unpacker.name(n): n for n in numbers}
    here = {m.name for m in mine}
    for name in theirs:
        if name not in here:
            raise CheckpointError(f"{unpacker.what} has {what} {name!r}, which this model does not have")
    out = []
    for name, tensor in mine:
        number = theirs.get(name)
        if number is None:
            raise CheckpointError(f"{unpacker.what} has no {what} {name!r} of this model")
        entry = unpacker.header.tensors[number]
        dtype = str(tensor.dtype).removeprefix("torch.")
        if (entry.shape, entry.dtype) != (tuple(tensor.shape), dtype):
            raise CheckpointError(
                f"{unpacker.what}: {what} {name!r} is {entry.dtype} {list(entry.shape)} there, and {dtype} "
                f"{list(tensor.shape)} in this model"
            )
        out.append((number, tensor))
    return out


# ---------------------------------------------------------------- optimizers


def _pack_optimizer(
    packer: Packer, what: str, optimizer: torch.optim.Optimizer, names: Mapping[int, str], state: bool
) -> dict[str, Any]:
    """Return {"groups": [{"names": [...], "values": tree}], "state": [[parameter's name, tree]], "other": [[key,
    tree]]}"""
    out: dict[str, Any] = {"groups": pack_groups(packer, what, optimizer, names)}
    if not state:
        return out
    of_parameters: list[Any] = []
    other: list[Any] = []
    for key, value in optimizer.state.items():
        if isinstance(key, torch.Tensor):
            if hasattr(key, _TABLE):
                continue
            name = names.get(id(key))
            if name is None:
                raise ScriptError(f"{what} keeps state of a tensor that is not one of its parameters")
            of_parameters.append([name, packer.tree(f"{what}.{name}", value)])
        else:
            other.append([str(key), packer.tree(f"{what}.{key}", value)])
    order = {name: i for i, name in enumerate(names.values())}
    out["state"] = sorted(of_parameters, key=lambda one: order[one[0]])
    out["other"] = other
    return out


def pack_groups(
    packer: Packer, what: str, optimizer: torch.optim.Optimizer, names: Mapping[int, str]
) -> list[dict[str, Any]]:
    """Return the hyper-parameters of each group, with the names of its parameters."""
    return [
        {
            "names": [names[id(p)] for p in group["params"] if not hasattr(p, _TABLE)],
            "values": packer.tree(what, {k: v for k, v in group.items() if k != "params"}),
        }
        for group in optimizer.param_groups
    ]


def load_groups(unpacker: Unpacker, what: str, optimizer: torch.optim.Optimizer, groups: Any) -> None:
    """Load hyper-parameters back into the groups; values that are tensors are changed in place."""
    if len(groups) != len(optimizer.param_groups):
        raise CheckpointError(
            f"{unpacker.what}: {what} has {len(groups)} groups of parameters there, and {len(optimizer.param_groups)} "
            "in this script"
        )
    for saved, group in zip(groups, optimizer.param_groups, strict=True):
        held = sum(not hasattr(p, _TABLE) for p in group["params"])
        if len(saved["names"]) != held:
            raise CheckpointError(
                f"{unpacker.what}: a group of {what} has {len(saved['names'])} parameters there, and {held} in this "
                "script"
            )
        values = unpacker.value(saved["values"], group["params"][0].device if group["params"] else None)
        for key in [k for k in group if k != "params" and k not in values]:
            del group[key]
        for key, value in values.items():
            old = group.get(key)
            if isinstance(old, torch.Tensor) and isinstance(value, torch.Tensor) and old.shape == value.shape:
                old.copy_(value)
            else:
                group[key] = value


def _load_optimizer(
    unpacker: Unpacker,
    what: str,
    optimizer: torch.optim.Optimizer,
    tree: Any,
    known: Mapping[str, torch.Tensor],
    state: bool,
) -> None:
    try:
        load_groups(unpacker, what, optimizer, tree["groups"])
        if not state:
            return
        of_parameters, other = tree["state"], tree["other"]
        old = dict(optimizer.state)
        optimizer.state.clear()
        on_device = {
            id(p) for g in optimizer.param_groups if g.get("capturable") or g.get("fused") for p in g["params"]
        }
        for name, values in of_parameters:
            p = known.get(name)
            if p is None:
                raise CheckpointError(f"{unpacker.what}: {what} keeps state of {name!r}, not a parameter here")
            before = old.get(p, {})
            now = unpacker.value(values, p.device)
            if isinstance(now, dict):
                for key, value in now.items():
                    if isinstance(value, torch.Tensor):
                        on_cpu = key == "step" and id(p) not in on_device
                        now[key] = _placed(value, p, before.get(key), on_cpu)
            optimizer.state[p] = now
        for key, values in other:
            optimizer.state[key] = unpacker.value(values)
    except (KeyError, TypeError, ValueError) as error:
        raise CheckpointError(f"{unpacker.what}: {what} cannot be read: {error!r}") from None


def _placed(value: torch.Tensor, p: torch.Tensor, old: Any, on_cpu: bool) -> torch.Tensor:
    """Return a tensor of an optimizer's state where it belongs; one that is there already is filled, so that its
    address stays."""
    value = dtensor.as_owner(value, p)
    if isinstance(old, torch.Tensor) and (old.shape, old.dtype) == (value.shape, value.dtype):
        old.copy_(value)
        return old
    if on_cpu or value.device == p.device:
        return value
    return value.to(p.device)
