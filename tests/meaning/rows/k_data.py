"""Data: what arrives in the loop."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import nn
from torch.utils.data import ConcatDataset, DataLoader, Dataset, IterableDataset, Subset, TensorDataset

from meaning.kit import Script, data
from meaning.rows.f_random import STREAMS
from meaning.table import Result, row, topic

DATA = topic("Data")


def seen(es: Any, source: Any, raw: dict[str, Any], key: str = "0", row_key: str = "1", **options: Any) -> Result:
    """Whether ``batch[key]`` is what PyTorch's own collation gives for these samples: values and dtype."""
    s = Script(es)
    opt = s.sgd()
    same, dtype = True, True
    for batch in s.job.steps(s.job.loader(source, 8, **options)):
        wanted = torch.as_tensor(raw["x"])[batch[row_key]]
        same &= bool((batch[key].double() == wanted.double()).all())
        dtype &= batch[key].dtype == wanted.dtype
        opt.zero_grad()
        (s.model.total() * batch[key].double().mean().float()).backward()
        opt.step()
    s.note("the same values", np.array(True if es.plain else same))
    s.note("the same dtype", np.array(True if es.plain else dtype))
    return s.end()


def of_dtype(es: Any, dtype: torch.dtype) -> Result:
    x = (torch.arange(96 * 2).reshape(96, 2) % 100).to(dtype)
    return seen(es, TensorDataset(x, torch.arange(96)), {"x": x})


@row(DATA, "float64")
def data_float64(es: Any) -> Result:
    return of_dtype(es, torch.float64)


@row(DATA, "float16")
def data_float16(es: Any) -> Result:
    return of_dtype(es, torch.float16)


@row(DATA, "bfloat16")
def data_bfloat16(es: Any) -> Result:
    return of_dtype(es, torch.bfloat16)


@row(DATA, "uint8 (pictures)")
def data_uint8(es: Any) -> Result:
    return of_dtype(es, torch.uint8)


@row(DATA, "int32")
def data_int32(es: Any) -> Result:
    return of_dtype(es, torch.int32)


@row(DATA, "bool")
def data_bool(es: Any) -> Result:
    x = torch.arange(96 * 2).reshape(96, 2) % 3 == 0
    return seen(es, TensorDataset(x, torch.arange(96)), {"x": x})


@row(DATA, "a dict of numpy arrays in float64")
def dict_float64(es: Any) -> Result:
    x = np.random.default_rng(0).random((96, 2))
    return seen(es, {"x": x, "row": np.arange(96)}, {"x": x}, "x", "row")


class Items(Dataset[Any]):
    """A map-style dataset; ``give`` makes a sample of an index."""

    def __init__(self, give: Any, n: int = 96) -> None:
        self.give, self.n = give, n

    def __len__(self) -> int:
        return self.n

    def __getitem__(self, index: int) -> Any:
        return self.give(index)


@row(DATA, "a map-style dataset of dicts with Python numbers")
def python_numbers(es: Any) -> Result:
    x = torch.arange(96.0, dtype=torch.float64) / 7
    return seen(es, Items(lambda i: {"x": float(x[i]), "row": i}), {"x": x}, "x", "row")


@row(DATA, "a map-style dataset of tuples")
def tuples(es: Any) -> Result:
    x = torch.arange(96 * 2.0).reshape(96, 2)
    return seen(es, Items(lambda i: (x[i], i)), {"x": x})


@row(DATA, "text in a map-style dataset")
def text(es: Any) -> Result:
    s = Script(es)
    opt = s.sgd()
    words = [f"word {i}" for i in range(96)]
    right = True
    for batch in s.job.steps(s.job.loader(Items(lambda i: {"text": words[i], "row": i, "x": float(i)}), 8)):
        right &= list(batch["text"]) == [words[i] for i in batch["row"].tolist()]
        opt.zero_grad()
        s.model.total().backward()
        opt.step()
    s.note("right", np.array(True if es.plain else right))
    return s.end()


@row(DATA, "samples of different lengths (ragged lists) in a map-style dataset")
def ragged(es: Any) -> Result:
    s = Script(es)
    opt = s.sgd()
    for batch in s.job.steps(s.job.loader(Items(lambda i: {"ids": list(range(i % 5 + 1)), "row": i}), 8)):
        opt.zero_grad()
        (s.model.total() * len(batch["row"])).backward()
        opt.step()
    return s.end()


@row(DATA, "`Subset` and `ConcatDataset`")
def subset(es: Any) -> Result:
    x = torch.arange(96 * 2.0).reshape(96, 2)
    whole = TensorDataset(x, torch.arange(96))
    halves = ConcatDataset([Subset(whole, range(48)), Subset(whole, range(48, 96))])
    return seen(es, halves, {"x": x})


@row(DATA, "random augmentation in `__getitem__` by torch's global numbers", stated=STREAMS)
def augmented_items(es: Any) -> Result:
    s = Script(es)
    opt = s.sgd()
    x = torch.arange(96 * 4.0).reshape(96, 4) / 100

    def give(i: int) -> Any:
        return {"x": x[i] + 0.1 * torch.randn(4), "row": i}

    for batch in s.job.steps(s.job.loader(Items(give), 8)):
        opt.zero_grad()
        (s.model.total() * batch["x"].mean()).backward()
        opt.step()
    return s.end()


@row(DATA, "an `IterableDataset`")
def iterable(es: Any) -> Result:
    class Stream(IterableDataset[Any]):
        def __iter__(self) -> Any:
            return iter(range(96))

    s = Script(es)
    opt = s.sgd()
    for _ in s.job.steps(s.job.loader(Stream(), 8)):
        opt.zero_grad()
        s.model.total().backward()
        opt.step()
    return s.end()


@row(DATA, "a `DataLoader` given to `job.loader`")
def data_loader(es: Any) -> Result:
    x = torch.arange(96 * 2.0).reshape(96, 2)
    s = Script(es)
    opt = s.sgd()
    for _ in s.job.steps(s.job.loader(DataLoader(TensorDataset(x), batch_size=8), 8)):
        opt.zero_grad()
        s.model.total().backward()
        opt.step()
    return s.end()


@row(DATA, "a `DataLoader` given to `job.steps`")
def data_loader_steps(es: Any) -> Result:
    if es.plain:
        return {"out": np.zeros(1)}
    x = torch.arange(96 * 2.0).reshape(96, 2)
    s = Script(es)
    opt = s.sgd()
    for _ in s.job.steps(DataLoader(TensorDataset(x), batch_size=8)):
        opt.zero_grad()
        s.model.total().backward()
        opt.step()
    return s.end()


@row(DATA, "`shuffle=False`: the order of the data")
def in_order(es: Any) -> Result:
    s = Script(es, loader={"shuffle": False})
    opt = s.sgd()
    for batch in s.batches():
        s.each("row", batch["row"])
        opt.zero_grad()
        s.loss(batch).backward()
        opt.step()
    return s.end()


@row(DATA, "a transform of the loader: new columns, other dtypes")
def transform(es: Any) -> Result:
    def change(batch: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        return {**batch, "x": batch["x"] * 2, "z": batch["x"].double().sum(1)}

    s = Script(es, loader={"transform": change})
    opt = s.sgd()
    for batch in s.batches():
        opt.zero_grad()
        (s.loss(batch) + (s.model(batch) * batch["z"][:, None].float()).mean()).backward()
        opt.step()
    return s.end()


@row(DATA, "`DataLoader` by hand beside the loop, for validation")
def own_validation(es: Any) -> Result:
    s = Script(es)
    opt = s.sgd()
    held = {k: torch.as_tensor(v) for k, v in data(40, 8).items()}
    batches = DataLoader(Items(lambda i: {k: v[i] for k, v in held.items()}, 40), batch_size=10)
    for batch in s.batches():
        opt.zero_grad()
        s.loss(batch).backward()
        opt.step()
    with s.job.eval(s.model):
        s.note("out", torch.cat([s.model(b) for b in batches]))
    return s.end()


@row(DATA, "batches edited in place by the script")
def batch_in_place(es: Any) -> Result:
    s = Script(es)
    opt = s.sgd()
    for batch in s.batches():
        batch["x"].mul_(0.5)
        opt.zero_grad()
        s.loss(batch).backward()
        opt.step()
    return s.end()


@row(DATA, "sample weights in the data, a weighted mean as loss")
def weighted(es: Any) -> Result:
    s = Script(es)
    opt = s.sgd()
    for batch in s.batches():
        opt.zero_grad()
        each = nn.functional.mse_loss(s.model(batch), batch["y"], reduction="none").squeeze(1)
        (each * (1 + batch["row"] % 3)).mean().backward()
        opt.step()
    return s.end()


@row(
    DATA,
    "a batch of one sample, and a data set smaller than two batches",
    stated={
        "hybrid hybrid-2": "What is left at the end of an epoch joins the step before it, if it has fewer than two "
        "samples a worker."
    },
)
def small(es: Any) -> Result:
    s = Script(es, batch=1, of=data(7), epochs=3)
    opt = s.sgd(0.05)
    for batch in s.batches():
        opt.zero_grad()
        s.loss(batch).backward()
        opt.step()
    return s.end()
