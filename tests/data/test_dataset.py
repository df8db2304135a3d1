"""Map-style datasets: a batch is what torch's DataLoader makes of the same samples."""

from __future__ import annotations

import itertools
import random
import threading
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch.utils.data import (
    DataLoader,
    Dataset,
    IterableDataset,
    RandomSampler,
    Subset,
    SubsetRandomSampler,
    TensorDataset,
    WeightedRandomSampler,
    default_collate,
)

from everstep.data.columns import text_key
from everstep.data.loader import Loader
from everstep.data.random_streams import STREAMS
from everstep.data.source import open_source
from everstep.errors import DataError


class Samples(Dataset[Any]):
    """``make(i)`` for each i."""

    def __init__(self, make: Any, n: int = 24) -> None:
        self.make, self.n = make, n

    def __len__(self) -> int:
        return self.n

    def __getitem__(self, i: int) -> Any:
        return self.make(i)


class Point(NamedTuple):
    x: torch.Tensor
    label: int


def full(dtype: str) -> Any:
    return lambda i: np.full(3, i, dtype)


def full_tensor(dtype: torch.dtype) -> Any:
    return lambda i: torch.full((2,), i).to(dtype)


NUMPY = ["bool", "uint8", "int8", "int16", "int32", "int64", "float16", "float32", "float64", "complex64"]
KINDS: dict[str, Any] = {
    **{f"numpy {d}": full(d) for d in NUMPY},
    **{f"scalar {d}": np.dtype(d).type for d in NUMPY},
    **{f"tensor {d}": full_tensor(d) for d in (torch.bfloat16, torch.uint16)},
    "int": lambda i: i,
    "float": lambda i: i / 7,
    "bool": lambda i: i % 2 == 0,
    "text": lambda i: f"sample {i}",
    "bytes": lambda i: b"%d" % i,
    "pair": lambda i: (torch.full((2, 3), float(i)), i % 3),
    "list": lambda i: [i, f"n{i}", float(i)],
    "dict": lambda i: {"image": torch.full((2,), float(i)), "name": f"n{i}", "y": i},
    "namedtuple": lambda i: Point(torch.full((2,), i), i),
    "nested": lambda i: {"a": {"b": (i, [torch.tensor(i), np.float16(i)])}, "c": Point(torch.ones(2), i)},
    "one tuple": lambda i: (i,),
}


def same(a: Any, b: Any) -> bool:
    if isinstance(a, torch.Tensor):
        return isinstance(b, torch.Tensor) and a.dtype == b.dtype and torch.equal(a, b)
    if isinstance(a, dict):
        return isinstance(b, dict) and list(a) == list(b) and all(same(a[k], b[k]) for k in a)
    if isinstance(a, list | tuple):
        alike = isinstance(b, list) if type(a) is list else type(a) is type(b)
        return alike and len(a) == len(b) and all(same(x, y) for x, y in zip(a, b, strict=True))
    return type(a) is type(b) and bool(a == b)


@pytest.mark.parametrize("kind", KINDS)
def test_a_batch_is_what_default_collate_makes(kind: str) -> None:
    dataset = Samples(KINDS[kind])
    made = Loader(dataset, 5, shuffle=False)
    for lo, plain in enumerate(DataLoader(dataset, 5)):
        got = made.read(0, 5 * lo, min(5 * lo + 5, 24))
        assert same(plain, got), (plain, got)
    rows = made.indices(3, 2, 9)
    shuffled = Loader(dataset, 5)
    rows = shuffled.indices(3, 2, 9)
    assert same(default_collate([dataset[int(i)] for i in rows]), shuffled.read(3, 2, 9))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64, torch.uint8, torch.bool, torch.int16])
def test_tensor_datasets_come_as_they_are(dtype: torch.dtype) -> None:
    tensors = (torch.arange(40).reshape(20, 2).to(dtype), torch.arange(20))
    x, y = Loader(TensorDataset(*tensors), 4, shuffle=False).read(0, 3, 9)
    assert x.dtype == dtype and torch.equal(x, tensors[0][3:9]) and torch.equal(y, tensors[1][3:9])
    got = Loader(Subset(TensorDataset(*tensors), [5, 1, 7]), 2, shuffle=False).read(0, 0, 3)
    assert torch.equal(got[0], tensors[0][[5, 1, 7]])
    assert torch.equal(Loader(tensors[0], 2, shuffle=False).read(0, 1, 3), tensors[0][1:3])  # one tensor alone


def test_a_tuples_fields_are_found_by_number_too() -> None:
    batch = Loader(Samples(lambda i: (i, i * 2)), 4, shuffle=False).read(0, 0, 4)
    x, y = batch
    assert torch.equal(batch["0"], x) and torch.equal(batch["1"], y) and torch.equal(batch[1], y)
    assert {**batch}.keys() == {"0", "1"}
    with pytest.raises(KeyError):
        batch["2"]


def test_batches_fetched_at_once() -> None:
    asked: list[list[int]] = []

    class AtOnce(Samples):
        def __getitems__(self, rows: list[int]) -> list[Any]:
            asked.append(rows)
            return [self.make(i) for i in rows]

    made = Loader(AtOnce(lambda i: {"x": i}), 6, shuffle=False)
    assert made.read(0, 6, 12)["x"].tolist() == [6, 7, 8, 9, 10, 11] and asked == [[6, 7, 8, 9, 10, 11]]


def ragged(i: int) -> dict[str, Any]:
    return {"x": torch.arange(i % 4 + 1), "n": i}


def padded(samples: list[dict[str, Any]]) -> dict[str, Any]:
    x = torch.nn.utils.rnn.pad_sequence([s["x"] for s in samples], batch_first=True, padding_value=-1)
    return {"x": x, "lengths": [len(s["x"]) for s in samples]}


def test_samples_of_different_lengths_go_through_collate_fn() -> None:
    dataset = Samples(ragged)
    made = Loader(dataset, 5, shuffle=False, collate_fn=padded)
    for lo, plain in enumerate(DataLoader(dataset, 5, collate_fn=padded)):
        assert same(plain, made.read(0, 5 * lo, min(5 * lo + 5, 24)))
    with pytest.raises(DataError, match="collate_fn="):
        Loader(dataset, 5).read(0, 0, 5)
    with pytest.raises(DataError, match=r"collate_fn= is for map-style datasets.*transform="):
        Loader({"x": np.arange(4)}, 2, collate_fn=padded)


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda i: None, "NoneType"),
        (lambda i: {"x": i, "y": None}, "NoneType"),
        (lambda i: object(), "object"),
        (lambda i: [[1] * (i % 3)], "equal size"),
        (lambda i: np.array(["a", "b"]), "<U1"),
    ],
)
def test_samples_that_torch_refuses_are_refused_in_one_line(make: Any, words: str) -> None:
    with pytest.raises(DataError) as error:
        Loader(Samples(make), 4, shuffle=False).read(0, 0, 4)
    text = str(error.value)
    assert words in text and "collate_fn=" in text and "\n" not in text


def test_what_is_no_map_style_dataset() -> None:
    class Endless(IterableDataset[int]):
        def __iter__(self) -> Iterator[int]:
            yield 1

    class NoLength(Dataset[int]):
        def __getitem__(self, i: int) -> int:
            return i

    for given, words in ((Endless(), "IterableDataset"), (NoLength(), "no length"), (Samples(int, 0), "is empty")):
        with pytest.raises(DataError, match=words) as error:
            Loader(given, 4)
        assert "\n" not in str(error.value)


def test_columns_and_dtypes_of_datasets() -> None:
    dataset = Samples(KINDS["dict"])
    source = open_source(dataset, {"x": "image", "n": "name", "m": ["y", "y"]}, dtypes={"n": "hash", "m": "float32"})
    batch = source.collate(source.fetch(np.array([4]), np.array([0]), False))  # type: ignore[union-attr]
    assert batch["x"].tolist() == [[4, 4]] and batch["n"].tolist() == [text_key("n4")]
    assert batch["m"].dtype == torch.float32 and batch["m"].tolist() == [[4, 4]]
    assert Loader(dataset, 2, dtypes={"image": "float64"}).read(0, 0, 2)["image"].dtype == torch.float64
    assert Loader(dataset, 2, dtypes="float16").read(0, 0, 2)["image"].dtype == torch.float16
    assert Loader(Samples(KINDS["pair"]), 2, dtypes={"0": "float64"}).read(0, 0, 2)[0].dtype == torch.float64
    for dtypes, words in (
        ({"name": "float32"}, "'hash'"),
        ({"image": "int64"}, "holds floats"),
        ({"label": "int64"}, "dtypes names 'label'"),
        ({"y": "str2"}, "expected one of"),
        ({"y": "hash"}, "is int64, where 'hash'"),
    ):
        with pytest.raises(DataError, match=words):
            Loader(dataset, 4, shuffle=False, dtypes=dtypes).read(0, 0, 4)
    with pytest.raises(DataError, match="'name' of group 'g' is text"):
        Loader(dataset, 4, columns={"g": ["y", "name"]})
    with pytest.raises(DataError, match="no column 'labl'"):
        Loader(dataset, 4, columns=["labl"])


# ---- torch's DataLoader and its options ----------------------------------------------------------------------


def test_a_data_loader_is_taken_over() -> None:
    dataset = Samples(ragged)
    made = Loader(DataLoader(dataset, 5, collate_fn=padded, drop_last=True), epochs=2)
    assert (made.batch_size, made.shuffle, made.drop_last, made.samples) == (5, False, True, 20)
    assert same(padded([dataset[i] for i in range(5, 10)]), made.read(0, 5, 10))
    made = Loader(DataLoader(Samples(KINDS["pair"]), 5, shuffle=True, num_workers=2, pin_memory=True))
    assert made.shuffle and made.samples == 24 and not made.drop_last
    assert Loader(DataLoader(Samples(KINDS["pair"]), 5), 7).batch_size == 7


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"sampler": WeightedRandomSampler([1.0] * 24, 24)}, "sampler=WeightedRandomSampler"),
        ({"sampler": SubsetRandomSampler([1, 2])}, "Subset"),
        ({"sampler": RandomSampler(range(24), replacement=True)}, "replacement=True"),
        ({"batch_size": 1, "batch_sampler": [[1, 2]]}, "batch_sampler=list"),
        ({"batch_size": None}, "batch_size=None"),
        ({"worker_init_fn": print, "num_workers": 1}, "worker_init_fn=print"),
    ],
)
def test_what_a_data_loader_says_is_kept_or_refused(options: dict[str, Any], words: str) -> None:
    loader: DataLoader[Any] = DataLoader(
        Samples(int), **{"batch_size": 1 if "batch_sampler" in options else 4, **options}
    )
    with pytest.raises(DataError) as error:
        Loader(loader)
    assert words in str(error.value) and "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("sampler", [1, 2]),
        ("batch_sampler", [[1, 2]]),
        ("num_workers", 4),
        ("generator", torch.Generator()),
        ("worker_init_fn", print),
        ("prefetch_factor", 2),
        ("persistent_workers", True),
        ("pin_memory", True),
        ("timeout", 3),
        ("multiprocessing_context", "fork"),
    ],
)
def test_options_of_torch_are_refused_with_a_way_out(option: str, value: Any) -> None:
    with pytest.raises(DataError, match=f"{option}=.*leave it out"):
        Loader(Samples(int), 4, **{option: value})
    if option in ("num_workers", "persistent_workers", "pin_memory", "timeout"):
        Loader(Samples(int), 4, **{option: 0})  # as torch has it by default
    with pytest.raises(TypeError, match="'shufle'"):
        Loader(Samples(int), 4, shufle=True)


# ---- random numbers ------------------------------------------------------------------------------------------


def drawn(i: int) -> dict[str, Any]:
    return {"i": i, "t": torch.rand(2), "n": np.random.rand(), "r": random.random()}


SOMETIMES = [
    drawn,
    lambda i: {"i": i, "t": torch.rand(2) if i % 5 == 4 else torch.zeros(2)},
    lambda i: {"i": i, "r": random.random() if i > 20 else 0.0},
]


def state() -> tuple[Any, ...]:
    kept = torch.get_rng_state(), np.random.get_state(), random.getstate()
    out = (torch.rand(1).item(), np.random.rand(), random.random())
    torch.set_rng_state(kept[0])
    np.random.set_state(kept[1])
    random.setstate(kept[2])
    return out


@pytest.mark.parametrize("at_once", [False, True])
@pytest.mark.parametrize("make", SOMETIMES)
def test_a_sample_keeps_its_bits_in_any_cut_and_any_process(make: Any, at_once: bool) -> None:
    class AtOnce(Samples):
        def __getitems__(self, rows: list[int]) -> list[Any]:
            return [self.make(i) for i in rows]

    def loader(**options: Any) -> Loader:
        made = Loader((AtOnce if at_once else Samples)(make), 6, **options)
        made.apart = True
        return made

    torch.manual_seed(1)
    whole = loader().read(2, 0, 24)
    before = state()
    for cuts in ([0, 24], [0, 6, 12, 18, 24], [0, 1, 5, 17, 24]):
        made = loader()
        made.read(0, 0, 3)
        parts = [made.read(2, lo, hi) for lo, hi in itertools.pairwise(cuts)]
        assert state() == before  # the script's streams are as they were
        for key in whole:
            assert torch.equal(torch.cat([p[key] for p in parts]), whole[key]), (key, cuts)
    assert torch.equal(whole["i"], loader().read(2, 0, 24)["i"])
    other = loader().read(3, 0, 24)
    places = {int(i): n for n, i in enumerate(whole["i"])}
    at = torch.tensor([places[int(i)] for i in other["i"]])
    assert any(not torch.equal(other[k], whole[k][at]) for k in whole if k != "i")  # another epoch draws others
    assert not any(torch.equal(loader(seed=1).read(2, 0, 24)[k], whole[k]) for k in whole)


def test_samples_of_one_batch_draw_differently() -> None:
    made = Loader(Samples(drawn), 6)
    made.apart = True
    batch = made.read(0, 0, 24)
    assert all(len(batch[k].unique(dim=0)) == 24 for k in ("t", "n", "r"))


def test_alone_draws_come_from_the_scripts_own_streams() -> None:
    dataset = Samples(drawn)
    torch.manual_seed(5)
    np.random.seed(5)
    random.seed(5)
    made = Loader(dataset, 6, shuffle=False)  # making it draws nothing
    got = [made.read(0, lo, lo + 6) for lo in range(0, 24, 6)]
    torch.manual_seed(5)
    np.random.seed(5)
    random.seed(5)
    plain = [default_collate([dataset[i] for i in range(lo, lo + 6)]) for lo in range(0, 24, 6)]
    assert all(same(a, b) for a, b in zip(plain, got, strict=True))


@pytest.mark.parametrize("which", ["collate_fn", "transform"])
def test_a_batch_that_draws_when_it_is_put_together(which: str) -> None:
    def masked(batch: Any) -> Any:
        batch = default_collate(batch) if which == "collate_fn" else batch
        return {"x": batch["x"], "mask": torch.rand(len(batch["x"]))}

    def loader() -> Loader:
        made = Loader(Samples(lambda i: {"x": i}), 6, **{which: masked})
        made.apart = True
        return made

    torch.manual_seed(2)
    before = state()
    first = loader().read(1, 6, 12)
    other = loader()
    other.read(1, 0, 6)
    torch.rand(3)
    assert same(first, other.read(1, 6, 12))
    torch.manual_seed(2)
    loader().read(1, 6, 12)
    assert state() == before


def test_another_thread_reads_only_while_the_script_waits() -> None:
    """A reader's draws never mix with those of the script that runs meanwhile."""
    made = Loader(Samples(drawn), 6)
    made.apart = True
    want = [made.read(0, lo, lo + 6) for lo in range(0, 24, 6)]
    torch.manual_seed(7)
    plain = torch.rand(4000)
    got: list[Any] = []

    def read() -> None:
        for _ in range(20):
            got.extend(made.read(0, lo, lo + 6) for lo in range(0, 24, 6))

    thread = threading.Thread(target=read)
    torch.manual_seed(7)
    mine = []
    STREAMS.take()
    try:
        thread.start()
        for step in range(40):
            mine.append(torch.rand(100))
            with STREAMS.lent():
                thread.join(0.001 if step < 39 else 60.0)
    finally:
        STREAMS.give()
    assert not thread.is_alive()
    assert torch.equal(torch.cat(mine), plain)
    assert len(got) == 80 and all(same(want[i % 4], batch) for i, batch in enumerate(got))


def test_a_lookup_of_sample_kinds_asks_no_stream() -> None:
    """Making a loader looks at the first sample; the script's streams do not notice."""
    torch.manual_seed(3)
    before = state()
    Loader(Samples(drawn), 6)
    assert state() == before
