"""The loader: the same samples in any cut, for any number of workers, train and test kept apart."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from everstep.data.keys import cross, field_keys
from everstep.data.loader import Loader
from everstep.errors import DataError

N = 5003


def loader(batch_size: int = 64, **options: Any) -> Loader:
    return Loader({"id": np.arange(N), "x": np.arange(N) / 7}, batch_size, **options)


def ids(made: Loader, epoch: int, lo: int, hi: int) -> list[int]:
    return made.read(epoch, lo, hi)["id"].tolist()


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 5), st.lists(st.integers(0, 4500), max_size=5), st.booleans())
def test_reading_in_any_cut_gives_the_same(epoch: int, cuts: list[int], shuffle: bool) -> None:
    made = loader(split="90/10", shuffle=shuffle)
    n = made.samples
    bounds = sorted({0, n, *(min(c, n) for c in cuts)})
    parts = [made.read(epoch, lo, hi) for lo, hi in itertools.pairwise(bounds)]
    whole = made.read(epoch, 0, n)
    assert torch.equal(torch.cat([p["id"] for p in parts]), whole["id"])
    assert torch.equal(torch.cat([p["x"] for p in parts]), whole["x"])


@pytest.mark.parametrize("workers", [1, 2, 3, 7])
def test_workers_together_read_each_sample_once(workers: int) -> None:
    """Shards dealt to any number of workers, each with its own loader, in batches of its own size."""
    seen: list[int] = []
    loaders = [loader(64 if w % 2 == 0 else 50, seed=9) for w in range(workers)]
    plan = loaders[0].plan()
    for index in range(plan.shards):
        worker = loaders[index % workers]
        start, stop = plan.bounds(index)
        for lo in range(start, stop, worker.batch_size):
            seen += ids(worker, 0, lo, min(lo + worker.batch_size, stop))
    assert seen == ids(loader(seed=9), 0, 0, N)
    assert sorted(seen) == list(range(N))


def test_plan_does_not_depend_on_who_asks() -> None:
    assert loader(seed=3).plan() == loader(seed=3).plan()
    assert loader(seed=3).plan() != loader(seed=4).plan()
    assert loader().plan().fingerprint != loader(split="90/10").plan().fingerprint


def test_train_and_test_are_apart_and_complete() -> None:
    made = loader(split="80/20", seed=1)
    held_out = torch.cat([b["id"] for b in made.eval_batches(100)]).tolist()
    assert made.samples + made.test_samples == N and len(held_out) == made.test_samples
    for epoch in range(2):
        train = ids(made, epoch, 0, made.samples)
        assert not set(train) & set(held_out) and len(set(train) | set(held_out)) == N
    other_seed = loader(split="80/20", seed=2)
    assert torch.cat([b["id"] for b in other_seed.eval_batches()]).tolist() == held_out


def test_epochs_differ_and_repeat() -> None:
    made = loader()
    assert ids(made, 0, 0, 50) != ids(made, 1, 0, 50)
    assert ids(made, 1, 0, 50) == ids(loader(), 1, 0, 50)
    assert ids(loader(shuffle=False), 1, 10, 13) == [10, 11, 12]


@pytest.mark.parametrize("shuffle", [True, False])
def test_a_probe_reads_the_same_first_samples_again(shuffle: bool) -> None:
    def loader() -> Loader:
        return Loader({"x": np.arange(1000)}, 16, shuffle=shuffle, drop_last=True)

    whole, few = loader(), loader()
    few.repeat_first(100)
    assert few.samples == few.plan().samples == 96 and few.batch_size == 16
    first = whole.read(0, 0, 96)["x"]
    assert not few.comes_again
    assert torch.equal(few.read(0, 0, 96)["x"], first) and not few.comes_again
    assert torch.equal(few.read(1, 32, 96)["x"], first[32:]) and few.comes_again
    small = loader()
    small.repeat_first(3)
    assert small.samples == 16, "a batch, in any case"
    large = loader()
    large.repeat_first(10**6)
    assert large.samples == 992


def test_drop_last_drops_other_samples_each_epoch() -> None:
    made = loader(batch_size=1000, drop_last=True)
    assert made.samples == 5000
    dropped = [set(range(N)) - set(ids(made, e, 0, 5000)) for e in range(3)]
    assert all(len(d) == 3 for d in dropped) and dropped[0] != dropped[1]
    assert loader(batch_size=1000).samples == N


def test_types_and_transform() -> None:
    made = loader(transform=lambda b: {**b, "double": b["id"] * 2})
    batch = made.read(0, 0, 10)
    assert batch["id"].dtype == torch.int64 and batch["x"].dtype == torch.float64
    assert torch.equal(batch["double"], batch["id"] * 2)
    assert made.read(0, 5, 5)["id"].shape == (0,)


def test_seeds_follow_the_sample() -> None:
    made = loader(seeds=True)
    batch = made.read(3, 0, N)
    again = made.read(3, 100, 200)
    assert torch.equal(batch["seeds"][100:200], again["seeds"])
    assert len(batch["seeds"].unique()) == N


def test_seeded_datasets_are_given_the_seed() -> None:
    class Noisy:
        def __len__(self) -> int:
            return 30

        def __getitem__(self, i: int) -> dict[str, Any]:
            return {"id": i, "noise": 0}

        def seeded(self, i: int, seed: int) -> dict[str, Any]:
            return {"id": i, "noise": seed}

    made = Loader(Noisy(), 10, seeds=True)
    batch = made.read(1, 0, 30)
    assert torch.equal(batch["noise"], batch["seeds"])


def test_big_files_are_shuffled_by_window(tmp_path: Path) -> None:
    pq.write_table(pa.table({"id": np.arange(N)}), tmp_path / "t.parquet", row_group_size=100)
    made = Loader(tmp_path / "t.parquet", 64, split="90/10", memory_bytes=0)
    assert made.source.chunk == 100
    train = ids(made, 0, 0, made.samples)
    held_out = torch.cat([b["id"] for b in made.eval_batches()]).tolist()
    assert sorted(train + held_out) == list(range(N))
    parts = [i for lo in range(0, made.samples, 64) for i in ids(made, 0, lo, min(lo + 64, made.samples))]
    assert parts == train


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"batch_size": 0}, "batch_size=0"),
        ({"batch_size": N + 1}, "larger than its 5,003 training rows"),
        ({"batch_size": N, "split": "90/10"}, "larger than its 4,503"),
        ({"epochs": 0}, "epochs=0"),
        ({"epochs": 1.5}, "epochs=1.5"),
        ({"largest_batch": 0}, "largest_batch=0"),
        ({"largest_batch": True}, "largest_batch=True"),
        ({"largest_batch": 12.5}, "largest_batch=12.5"),
        ({"split": "0/100"}, "no rows to train on"),
        ({"split": "99999/1"}, "no rows to test on"),
        ({"split": "x"}, "split='x'"),
        ({"columns": ["idd"]}, "did you mean 'id'"),
    ],
)
def test_mistakes_are_one_line(options: dict[str, Any], words: str) -> None:
    with pytest.raises(DataError) as error:
        loader(**options)
    assert words in str(error.value) and "\n" not in str(error.value)


def test_evaluation_without_a_split() -> None:
    with pytest.raises(DataError, match="holds no rows out"):
        next(loader().eval_batches())


def test_positions_outside_are_refused() -> None:
    for lo, hi in [(-1, 5), (0, N + 1), (5, 4)]:
        with pytest.raises(DataError, match="positions"):
            loader().read(0, lo, hi)


# ---- keys ----------------------------------------------------------------------------------------------------


def test_field_keys_differ_by_field_and_value() -> None:
    keys = field_keys(torch.tensor([[1, 1, 2], [1, 3, 2]]))
    assert keys.dtype == torch.int64 and (keys >= 0).all()
    assert keys[0, 0] == keys[1, 0] and len(keys.unique()) == 4
    everything = field_keys(torch.arange(-50_000, 50_000).reshape(-1, 4))
    assert len(everything.unique()) == 100_000


def test_crosses_are_ordered_and_distinct() -> None:
    a, b = torch.arange(300).repeat_interleave(300), torch.arange(300).repeat(300)
    assert len(cross(a, b).unique()) == 90_000
    assert not torch.equal(cross(a, b), cross(b, a))
    assert torch.equal(cross(a, b)[:10], cross(a[:10], b[:10]))
    assert cross(torch.tensor([1]), torch.tensor([2])).tolist() == [
        1503752899901731505
    ]  # frozen: keys are in people's tables
