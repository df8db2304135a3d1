"""Packs a state into bytes: a header that says what is where, and one flat buffer with all tensors.

The header is msgpack of plain structs; nothing is ever unpickled. Nested values (what a ``state_dict`` is made of) are
trees of tagged lists, with a tensor standing as its number. Types and bits come back exactly: bfloat16 and float8 too.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import msgspec
import numpy as np
import torch

from everstep.allreduce.dtensor import local, whole
from everstep.bounds import MALFORMED
from everstep.errors import CheckpointError, ScriptError
from everstep.model.group import Position

STATE_VERSION = 1
HEADER_MAX_BYTES = 64 << 20
BODY_MAX_BYTES = 1 << 40
DEPTH_MAX = 32
ALIGN_BYTES = 64

_DTYPES: dict[str, torch.dtype] = {
    str(t).removeprefix("torch."): t
    for t in vars(torch).values()
    if isinstance(t, torch.dtype) and not str(t).startswith(("torch.q", "torch.bits"))
}
_INT64 = range(-(2**63), 2**63)


class TensorEntry(msgspec.Struct, frozen=True, array_like=True):
    """Is one tensor of the body: bytes ``[at, at + its size)``. ``home``: it lay on a device, not on the CPU."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    at: int
    home: bool = False


class SerializedHeader(msgspec.Struct, frozen=True, kw_only=True, rename={"position": "mark"}):
    """Says what is where; ``trees``: by name: optimizers, tracked objects; ``loop``: see ``ReplicaState``; 0: not known
    (older files)."""

    version: int = STATE_VERSION
    position: Position = Position()
    loop: int = 0
    size_bytes: int
    tensors: tuple[TensorEntry, ...]
    parameters: tuple[int, ...] = ()
    buffers: tuple[int, ...] = ()
    gradients: tuple[int, ...] = ()
    trees: dict[str, Any] = {}


class SerializedState(NamedTuple):
    """Is a packed state; ``header``: msgpack of a PackedHeader; ``body``: uint8 [size_bytes] on the CPU."""

    header: bytes
    body: torch.Tensor

    @property
    def size_bytes(self) -> int:
        return len(self.header) + self.body.numel()


# ---------------------------------------------------------------- out of values


class Packer:
    """Collects tensors and trees; ``pack`` copies the tensors, so that they may change afterwards."""

    def __init__(self, *, local_only: bool = False) -> None:
        """Take ``local_only``: of sharded tensors only what this process has; else the whole, for which every process
        that has a part must come here too."""
        self._local_only = local_only
        self.entries: list[TensorEntry] = []
        self.tensors: list[torch.Tensor] = []
        self._end = 0

    def tensor(self, name: str, value: torch.Tensor) -> int:
        """Return its number. ScriptError: of a kind that has no plain bytes."""
        value = value.detach()
        value = local(value) if self._local_only else whole(value)
        dtype = str(value.dtype).removeprefix("torch.")
        if dtype not in _DTYPES or value.layout != torch.strided or value.is_quantized or type(value) not in _PLAIN:
            kind = type(value).__name__ if type(value) not in _PLAIN else f"{value.layout}, {value.dtype}"
            raise ScriptError(f"{name} is a tensor of kind {kind}: it cannot be saved, only plain dense tensors can")
        if value.device.type == "meta":
            raise ScriptError(f"{name} is on the meta device: give it values (to_empty and an initialisation) first")
        at = -(-self._end // ALIGN_BYTES) * ALIGN_BYTES
        self._end = at + value.numel() * value.element_size()
        self.entries.append(TensorEntry(name, dtype, tuple(value.shape), at, value.device.type != "cpu"))
        self.tensors.append(value)
        return len(self.entries) - 1

    def tree(self, name: str, value: Any, depth: int = 0) -> Any:
        """Return the value as a tree. ScriptError: it holds something that is neither a tensor nor a plain value."""
        if depth > DEPTH_MAX:
            raise ScriptError(f"{name} is nested deeper than {DEPTH_MAX}: it cannot be saved")
        kind = type(value)
        if value is None or kind in (bool, float, str, bytes):
            return value
        if kind is int:
            return value if value in _INT64 else ["i", str(value)]
        if isinstance(value, torch.Tensor):
            return ["t", self.tensor(name, value)]
        if isinstance(value, np.ndarray | np.generic):
            array = np.asarray(value)
            if array.dtype.hasobject or array.dtype.kind not in "biufc":
                raise ScriptError(f"{name} is an array of {array.dtype}: it cannot be saved, use plain numbers")
            found = self.tensor(name, torch.from_numpy(np.array(array, order="C")))
            return ["n", found, isinstance(value, np.generic)]
        if kind is complex:
            return ["c", value.real, value.imag]
        if isinstance(value, torch.dtype):
            return ["y", str(value).removeprefix("torch.")]
        if isinstance(value, torch.Size | list | tuple) and not hasattr(value, "_fields"):
            tag = "l" if isinstance(value, list) else "u"
            return [tag, [self.tree(f"{name}.{i}", v, depth + 1) for i, v in enumerate(value)]]
        if isinstance(value, Mapping):
            tag = "k" if isinstance(value, Counter) else "d"
            pairs = []
            for key, v in value.items():
                if type(key) not in (str, int, bool, float, type(None)):
                    raise ScriptError(f"{name} has a key of type {type(key).__name__}: it cannot be saved")
                pairs.append([key, self.tree(f"{name}.{key}", v, depth + 1)])
            return [tag, pairs]
        if isinstance(value, int):  # of a subclass: an enum, say; it comes back plain
            return self.tree(name, int(value), depth + 1)
        if isinstance(value, float):
            return float(value)
        if isinstance(value, str):
            return str.__str__(value)
        raise ScriptError(f"{name} has a value of type {kind.__module__}.{kind.__qualname__}: it cannot be saved")

    @property
    def size_bytes(self) -> int:
        return self._end

    def pack(self, into: torch.Tensor | None = None) -> torch.Tensor:
        """Return the body, in ``into`` if that is exactly as long, else in a new buffer."""
        body = into if into is not None and into.numel() == self._end else torch.empty(self._end, dtype=torch.uint8)
        end = 0
        for entry, tensor in zip(self.entries, self.tensors, strict=True):
            body[end : entry.at] = 0  # so that equal states are equal bytes
            _view(body, entry).copy_(tensor)
            end = entry.at + tensor.numel() * tensor.element_size()
        self.tensors.clear()
        return body

    def header(
        self,
        position: Position,
        loop: int,
        trees: dict[str, Any],
        *,
        parameters: tuple[int, ...] = (),
        buffers: tuple[int, ...] = (),
        gradients: tuple[int, ...] = (),
    ) -> SerializedHeader:
        """Return the header of all that was collected; nothing is copied yet."""
        return SerializedHeader(
            position=position,
            loop=loop,
            size_bytes=self._end,
            tensors=tuple(self.entries),
            parameters=parameters,
            buffers=buffers,
            gradients=gradients,
            trees=trees,
        )

    def finish(self, header: SerializedHeader, what: str, into: torch.Tensor | None = None) -> SerializedState:
        """Return what was collected, packed (see ``pack``). Raises ScriptError: ``what`` is too much for a header."""
        return SerializedState(encode_header(header, what), self.pack(into))


_PLAIN = (torch.Tensor, torch.nn.Parameter, torch.nn.Buffer)


def _view(body: torch.Tensor, entry: TensorEntry) -> torch.Tensor:
    dtype = _DTYPES[entry.dtype]
    end = entry.at + math.prod(entry.shape) * dtype.itemsize
    return body[entry.at : end].view(dtype).view(entry.shape)


def encode_header(header: SerializedHeader, what: str) -> bytes:
    data = msgspec.msgpack.encode(header)
    if len(data) > HEADER_MAX_BYTES:
        raise ScriptError(f"{what} has {len(header.tensors)} tensors and plain values of {len(data)} bytes: too many")
    return data


# ---------------------------------------------------------------- back


_header_decoder = msgspec.msgpack.Decoder(SerializedHeader)


class _StateVersion(msgspec.Struct):
    version: int


_version_decoder = msgspec.msgpack.Decoder(_StateVersion)


def decode_header(data: bytes, what: str) -> SerializedHeader:
    """Checked: every tensor lies inside of the body. CheckpointError, one line that begins with ``what``."""
    try:
        version = _version_decoder.decode(data).version
        if version != STATE_VERSION:
            raise CheckpointError(
                f"{what} is of version {version}, this everstep reads version {STATE_VERSION}: install a newer one"
            )
        header = _header_decoder.decode(data)
    except MALFORMED as error:
        raise CheckpointError(f"{what} cannot be read: {' '.join(str(error).split())}") from None
    if not 0 <= header.size_bytes <= BODY_MAX_BYTES:
        raise CheckpointError(f"{what} says {header.size_bytes} bytes of tensors")
    for entry in header.tensors:
        dtype = _DTYPES.get(entry.dtype)
        if dtype is None:
            raise CheckpointError(f"{what}: {entry.name!r} is of dtype {entry.dtype!r}: this torch does not have it")
        size = math.prod(entry.shape) * dtype.itemsize
        if min(entry.shape, default=0) < 0 or entry.at % ALIGN_BYTES or not 0 <= entry.at <= header.size_bytes - size:
            raise CheckpointError(f"{what}: {entry.name!r} does not lie inside of the state")
    numbers = (*header.parameters, *header.buffers, *header.gradients)
    if numbers and not 0 <= min(numbers) <= max(numbers) < len(header.tensors):
        raise CheckpointError(f"{what}: a tensor is named that is not there")
    return header


class Unpacker:
    """Reads a packed state. Tensors are views of the body: whoever keeps one clones it."""

    def __init__(self, serialized: SerializedState, what: str) -> None:
        """CheckpointError: the header is not sound."""
        self.what = what
        self.header = decode_header(serialized.header, what)
        if serialized.body.numel() != self.header.size_bytes:
            raise CheckpointError(f"{what} has {serialized.body.numel()} bytes of {self.header.size_bytes}")
        self._body = serialized.body

    def view(self, number: int) -> torch.Tensor:
        return _view(self._body, self.header.tensors[number])

    def name(self, number: int) -> str:
        return self.header.tensors[number].name

    def copy(self, number: int, device: torch.device | None = None) -> torch.Tensor:
        """Return a tensor of its own, on ``device`` if it came from one."""
        entry = self.header.tensors[number]
        found = self.view(number)
        if entry.home and device is not None and device.type != "cpu":
            return found.to(device)
        return found.clone()

    def value(self, tree: Any, device: torch.device | None = None, depth: int = 0) -> Any:
        """Return what ``Packer.tree`` was given. CheckpointError: it is not such a tree."""
        if depth > DEPTH_MAX + 1:
            raise CheckpointError(f"{self.what} is nested deeper than {DEPTH_MAX}")
        if not isinstance(tree, list):
            if isinstance(tree, dict):
                raise CheckpointError(f"{self.what} holds a value that it cannot hold")
            return tree
        try:
            return self._tagged(tree, device, depth)
        except (IndexError, TypeError, ValueError, KeyError) as error:
            raise CheckpointError(
                f"{self.what} holds a value that cannot be read: {' '.join(str(error).split())}"
            ) from None

    def _tagged(self, tree: Sequence[Any], device: torch.device | None, depth: int) -> Any:
        tag, first = tree[0], tree[1]
        match tag:
            case "t":
                return self.copy(self._number(first), device)
            case "n":
                array = self.copy(self._number(first)).numpy()
                return array[()] if tree[2] else array
            case "l":
                return [self.value(v, device, depth + 1) for v in first]
            case "u":
                return tuple(self.value(v, device, depth + 1) for v in first)
            case "d":
                return {key: self.value(v, device, depth + 1) for key, v in first}
            case "k":
                return Counter({key: self.value(v, device, depth + 1) for key, v in first})
            case "i":
                if len(first) > 1000:
                    raise ValueError("an integer of more than 1000 digits")
                return int(first)
            case "c":
                return complex(float(first), float(tree[2]))
            case "y":
                return _DTYPES[first]
        raise ValueError(f"tag {tag!r}")

    def _number(self, number: Any) -> int:
        if type(number) is not int or not 0 <= number < len(self.header.tensors):
            raise ValueError(f"tensor {number!r}")
        return number
