"""Training state: out and in again, bit for bit; and what cannot be saved is said in one line."""

from __future__ import annotations

import math
from collections import Counter
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from replica_runs import Run
from torch import nn

from everstep.allreduce.serialize import DEPTH_MAX, Packer, SerializedHeader, SerializedState, Unpacker, encode_header
from everstep.allreduce.state import ReplicaState
from everstep.errors import CheckpointError, EverstepError, ScriptError
from everstep.model.group import Position


@pytest.mark.parametrize("optimizer", ["adam", "sgd", "adagrad"])
def test_a_loaded_state_trains_on_with_the_same_bits(optimizer: str) -> None:
    one = Run(0, optimizer)
    for _ in range(5):
        one.step()
    other = Run(1, optimizer)  # never stepped: its optimizers have no state yet
    assert other.state.digest() != one.state.digest()
    other.state.load(one.state.snapshot())
    assert other.state.position == one.state.position == Position(5, 0, 0, 80)
    assert other.state.digest() == one.state.digest() and other.state.quick_digest() == one.state.quick_digest()
    for _ in range(20):
        one.step()
        other.step()
    assert other.state.digest() == one.state.digest()
    assert other.state.parameter_digests() == one.state.parameter_digests()
    assert one.schedulers[1].milestones == other.schedulers[1].milestones == Counter({3: 2, 20: 1})


def test_load_keeps_the_tensors_that_are_there() -> None:
    """Addresses stay: captured graphs and views of parameters go on being right."""
    one, other = Run(0), Run(1)
    one.step()
    other.step()
    kept = [p.data_ptr() for p in other.model.parameters()]
    moments = [s["exp_avg"].data_ptr() for s in other.optimizers[0].state.values()]
    other.state.load(one.state.snapshot())
    assert kept == [p.data_ptr() for p in other.model.parameters()]
    assert moments == [s["exp_avg"].data_ptr() for s in other.optimizers[0].state.values()]


def test_a_snapshot_does_not_change_afterwards_and_its_buffer_is_used_again() -> None:
    run = Run()
    run.step()
    digest = run.state.digest()
    serialized = run.state.snapshot()
    run.step()
    later = run.state.snapshot()
    fresh = Run(7)
    fresh.state.load(serialized)
    assert fresh.state.digest() == digest
    assert run.state.snapshot(later.body).body.data_ptr() == later.body.data_ptr()


def test_carried_gradients_are_part_of_the_state() -> None:
    one, other = Run(0), Run(1)
    one.step()
    one.model(torch.ones(4, 4)).sum().backward()
    one.state.carried = True
    other.state.load(one.state.snapshot())
    assert other.state.carried
    for p, q in zip(one.model.parameters(), other.model.parameters(), strict=True):
        assert p.grad is not None and torch.equal(p.grad, q.grad)
    one.state.carried = False
    other.state.load(one.state.snapshot())
    assert not other.state.carried and all(q.grad is None for q in other.model.parameters())


def test_every_bit_counts_in_every_digest() -> None:
    run = Run()
    run.step()
    for tensor in (
        run.model[3].weight.data,
        run.model[1].running_var,
        run.optimizers[0].state[run.model[0].bias]["exp_avg"],
    ):
        digests = run.state.digest(), run.state.quick_digest()
        bits = tensor.view(torch.int32).view(-1)
        bits[0] ^= 1
        assert run.state.digest() != digests[0] and run.state.quick_digest() != digests[1]
        bits[0] ^= 1
        assert (run.state.digest(), run.state.quick_digest()) == digests
    digests = run.state.digest(), run.state.quick_digest()
    run.schedulers[0].step()
    assert run.state.digest() != digests[0] and run.state.quick_digest() != digests[1]


def test_dtypes_and_layouts_come_back_exactly() -> None:
    class Odd(nn.Module):
        def __init__(self, fill: int) -> None:
            super().__init__()
            for dtype in (torch.bfloat16, torch.float16, torch.float64, torch.float8_e4m3fn, torch.complex64):
                values = torch.full((3, 2, 1, 1), fill).to(dtype)
                self.register_buffer(
                    "b_" + str(dtype).rpartition(".")[2], values.contiguous(memory_format=torch.channels_last)
                )
            self.register_buffer("flag", torch.tensor(bool(fill)))
            self.register_buffer("nothing", torch.empty(0, 3))
            self.register_buffer("nan", torch.tensor([math.nan, -0.0, math.inf]) if fill else torch.zeros(3))
            self.register_buffer("hidden", torch.tensor(fill), persistent=False)
            self.weight = nn.Parameter(torch.full((2, 3), float(fill)).t())
            self.extra = fill

        def get_extra_state(self) -> Any:
            return {"extra": self.extra}

        def set_extra_state(self, state: Any) -> None:
            self.extra = state["extra"]

    one, other = Odd(1), Odd(0)
    a, b = ReplicaState([one], [], {}), ReplicaState([other], [], {})
    b.load(a.snapshot())
    assert a.digest() == b.digest() and other.extra == 1
    assert other.weight.stride() == one.weight.stride()
    assert [x.dtype for x in other.buffers()] == [x.dtype for x in one.buffers()]


trees = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**80), 2**80)
    | st.floats(allow_nan=False)
    | st.text(max_size=5)
    | st.binary(max_size=5)
    | st.complex_numbers(allow_nan=False)
    | st.sampled_from([torch.float32, torch.bfloat16]),
    lambda t: (
        st.lists(t, max_size=3)
        | st.lists(t, max_size=3).map(tuple)
        | st.dictionaries(st.integers(-5, 5) | st.text(max_size=3), t, max_size=3)
    ),
    max_leaves=20,
)


@settings(deadline=None)
@given(trees)
def test_plain_values_come_back_as_they_were(value: Any) -> None:
    packer = Packer()
    tree = packer.tree("x", value)
    header = encode_header(SerializedHeader(size_bytes=0, tensors=(), trees={"x": tree}), "x")
    back = Unpacker(SerializedState(header, torch.empty(0, dtype=torch.uint8)), "x")
    assert back.value(back.header.trees["x"]) == value


def test_tensors_and_arrays_within_values() -> None:
    packer = Packer()
    value = {"a": [torch.arange(3), np.float32(1.5)], "b": (np.arange(4).reshape(2, 2), torch.tensor(2.0))}
    tree = packer.tree("x", value)
    header = SerializedHeader(size_bytes=packer.size_bytes, tensors=tuple(packer.entries), trees={"x": tree})
    back = Unpacker(SerializedState(encode_header(header, "x"), packer.pack()), "x").value(tree)
    assert torch.equal(back["a"][0], value["a"][0]) and back["a"][1] == np.float32(1.5)
    assert np.array_equal(back["b"][0], value["b"][0]) and back["b"][1] == torch.tensor(2.0)


@pytest.mark.parametrize(
    ("value", "words"),
    [
        ({"f": print}, "x.f has a value of type builtins.builtin_function_or_method: it cannot be saved"),
        ({"a": [object()]}, "x.a.0 has a value of type builtins.object: it cannot be saved"),
        ({(1, 2): 3}, "x has a key of type tuple: it cannot be saved"),
        (np.array(["a"], object), "x is an array of object: it cannot be saved"),
        (torch.eye(2).to_sparse(), "x is a tensor of kind torch.sparse_coo, torch.float32: it cannot be saved"),
        (torch.empty(2, device="meta"), "x is on the meta device"),
    ],
)
def test_what_cannot_be_saved_is_named(value: Any, words: str) -> None:
    with pytest.raises(ScriptError, match="^" + words.replace(".", r"\.").replace("(", r"\(")):
        Packer().tree("x", value)


def test_a_value_without_end_is_refused() -> None:
    value: list[Any] = []
    value.append(value)
    with pytest.raises(ScriptError, match=f"deeper than {DEPTH_MAX}"):
        Packer().tree("x", value)


def _other(**change: Any) -> ReplicaState:
    run = Run(1, **change)
    return run.state


def test_a_state_of_another_script_is_refused_in_one_line() -> None:
    run = Run()
    run.step()
    serialized = run.state.snapshot()
    with pytest.raises(CheckpointError, match=r"parameter '0.weight' is float32 \[8, 4\] there, and float32 \[9, 4\]"):
        _other(width=9).load(serialized)
    two = Run(1)
    two.model.add_module("more", nn.Linear(1, 1))
    with pytest.raises(CheckpointError, match=r"has no parameter 'more.weight' of this model"):
        two.state.load(serialized)
    with pytest.raises(CheckpointError, match=r"has parameter 'more.weight', which this model does not have"):
        Run(2).state.load(two.state.snapshot())
    two = Run(1)
    del two.state.tracked["average"]  # type: ignore[attr-defined]
    with pytest.raises(CheckpointError, match=r"has 'average' \(of job.track\), which this script does not have"):
        two.state.load(serialized)
    two = Run(1)
    two.optimizers.pop()
    with pytest.raises(CheckpointError, match="has optimizer 1, which this script does not have"):
        two.state.load(serialized)


@settings(deadline=None)
@given(st.data())
def test_a_damaged_state_is_a_clear_error_or_the_same_values(data: st.DataObject) -> None:
    """Of the header no byte can be changed so that something else than CheckpointError comes of it."""
    run = Run()
    run.step()
    serialized = run.state.snapshot()
    header = bytearray(serialized.header)
    for _ in range(data.draw(st.integers(1, 3))):
        header[data.draw(st.integers(0, len(header) - 1))] = data.draw(st.integers(0, 255))
    try:
        unpacker = Unpacker(SerializedState(bytes(header), serialized.body), "it")
        for number in range(len(unpacker.header.tensors)):
            unpacker.view(number)
        for tree in unpacker.header.trees.values():
            if isinstance(tree, list):
                unpacker.value(tree)
    except EverstepError as error:
        assert isinstance(error, CheckpointError) and "\n" not in str(error)


def test_cut_and_newer_states_are_refused() -> None:
    run = Run()
    serialized = run.state.snapshot()
    with pytest.raises(CheckpointError, match="cannot be read"):
        run.state.load(SerializedState(serialized.header[:-1], serialized.body))
    with pytest.raises(CheckpointError, match=r"has \d+ bytes of \d+"):
        run.state.load(SerializedState(serialized.header, serialized.body[:-1]))
    newer = msgspec.msgpack.encode({**msgspec.msgpack.decode(serialized.header), "version": 9})
    with pytest.raises(CheckpointError, match="is of version 9, this everstep reads version 1: install a newer one"):
        run.state.load(SerializedState(newer, serialized.body))
