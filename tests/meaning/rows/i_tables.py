"""Tables: embeddings, bags, and what is done with them."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from meaning.kit import DIM, KEYS, Net, Script, data, unsharded, whole
from meaning.table import Result, row, topic

TABLES = topic("Embeddings and bags")
STEPS = {
    "alone async bounded sync hybrid hybrid-2": "Adam of a table counts the steps of each row; SparseAdam counts the "
    "optimizer's."
}
FREQUENCY = {
    "sync elastic fixed logical logical-2 passes hybrid-2 shard": "How often an id occurs is counted in "
    "one worker's batch, or in one pass."
}


def train(s: Script, opt: Any = None) -> Result:
    opt = opt or s.sgd()
    for batch in s.batches():
        opt.zero_grad()
        s.loss(batch).backward()
        opt.step()
    return s.end()


class Own(Net):
    """A net whose ``look`` gives [n, 4] for a batch in the place of the embedding's rows."""

    def look(self, batch: dict[str, Tensor]) -> Tensor:
        raise NotImplementedError

    def _hidden(self, batch: dict[str, Tensor]) -> Tensor:
        x = torch.cat([self.look(batch), self.bag(batch["ids"][:, 1:]), batch["x"]], 1)
        out: Tensor = torch.tanh(self.first(x))
        return out


@row(TABLES, "a bag, mode mean")
def bag_mean(es: Any) -> Result:
    return train(Script(es, lambda: Net(mode="mean")))


@row(TABLES, "a bag, mode max")
def bag_max(es: Any) -> Result:
    return train(Script(es, lambda: Net(mode="max")))


@row(TABLES, "a bag with offsets")
def offsets(es: Any) -> Result:
    class Flat(Own):
        def look(self, batch: dict[str, Tensor]) -> Tensor:
            n = len(batch["ids"])
            out: Tensor = self.bag(batch["ids"].reshape(-1), torch.arange(0, 3 * n, 3))
            return out

    return train(Script(es, Flat))


@row(TABLES, "a bag with offsets of bags of unequal lengths, some empty")
def ragged_offsets(es: Any) -> Result:
    class Ragged(Own):
        def look(self, batch: dict[str, Tensor]) -> Tensor:
            lengths = batch["row"] % 4
            keep = torch.arange(3)[None] < lengths[:, None]
            begin = torch.cat([torch.zeros(1, dtype=torch.int64), keep.sum(1).cumsum(0)[:-1]])
            out: Tensor = self.bag(batch["ids"][keep], begin)
            return out

    return train(Script(es, Ragged))


@row(TABLES, "`include_last_offset=True`")
def last_offset(es: Any) -> Result:
    class Last(Own):
        def __init__(self) -> None:
            super().__init__()
            self.flat = nn.EmbeddingBag(KEYS, DIM, mode="sum", include_last_offset=True)

        def look(self, batch: dict[str, Tensor]) -> Tensor:
            n = len(batch["ids"])
            out: Tensor = self.flat(batch["ids"].reshape(-1), torch.arange(0, 3 * n + 1, 3))
            return out

    return train(Script(es, Last))


@row(TABLES, "`per_sample_weights` given by the data")
def sample_weights(es: Any) -> Result:
    class Weighted(Own):
        def look(self, batch: dict[str, Tensor]) -> Tensor:
            out: Tensor = self.bag(batch["ids"], per_sample_weights=batch["x"][:, :3].contiguous())
            return out

    return train(Script(es, Weighted))


@row(TABLES, "`per_sample_weights` that are learned")
def learned_sample_weights(es: Any) -> Result:
    class Weighted(Own):
        def __init__(self) -> None:
            super().__init__()
            self.gate = nn.Linear(4, 3)

        def look(self, batch: dict[str, Tensor]) -> Tensor:
            out: Tensor = self.bag(batch["ids"], per_sample_weights=self.gate(batch["x"]))
            return out

    return train(Script(es, Weighted))


@row(TABLES, "`padding_idx` of an embedding")
def padding(es: Any) -> Result:
    return train(Script(es, lambda: Net(padding_idx=0)))


@row(TABLES, "`padding_idx` of a bag")
def padding_bag(es: Any) -> Result:
    class Padded(Net):
        def __init__(self) -> None:
            super().__init__()
            self.bag = nn.EmbeddingBag(KEYS, DIM, mode="mean", padding_idx=3)

    return train(Script(es, Padded))


@row(TABLES, "`padding_idx` with weights that are not zero there (loaded)")
def padding_loaded(es: Any) -> Result:
    class Padded(Net):
        def __init__(self) -> None:
            super().__init__()
            values = torch.randn(KEYS, DIM, generator=torch.Generator().manual_seed(3))
            self.emb = nn.Embedding.from_pretrained(values, freeze=False, padding_idx=0)

    return train(Script(es, Padded))


@row(TABLES, "`max_norm`")
def max_norm(es: Any) -> Result:
    class Normed(Net):
        def __init__(self) -> None:
            super().__init__()
            self.emb = nn.Embedding(KEYS, DIM, max_norm=1.0)

    return train(Script(es, Normed))


@row(TABLES, "`scale_grad_by_freq`", stated=FREQUENCY)
def by_frequency(es: Any) -> Result:
    class Scaled(Net):
        def __init__(self) -> None:
            super().__init__()
            self.emb = nn.Embedding(KEYS, DIM, scale_grad_by_freq=True)

    return train(Script(es, Scaled))


@row(TABLES, "`nn.Embedding(sparse=True)` with SGD")
def sparse(es: Any) -> Result:
    class Sparse(Net):
        def __init__(self) -> None:
            super().__init__()
            self.emb = nn.Embedding(KEYS, DIM, sparse=True)

    s = Script(es, Sparse)
    opt = s.sgd()
    for batch in s.batches():
        opt.zero_grad()
        s.loss(batch).backward()
        opt.step()
    return s.end()


@row(TABLES, "`sparse=True` with `torch.optim.SparseAdam` beside Adam for the dense part", stated=STEPS, lazy=True)
def sparse_adam(es: Any) -> Result:
    class Sparse(Net):
        def __init__(self) -> None:
            super().__init__()
            self.emb = nn.Embedding(KEYS, DIM, sparse=True)
            self.bag = nn.EmbeddingBag(KEYS, DIM, mode="sum", sparse=True)

    s = Script(es, Sparse, table=None)
    tables = s.of(torch.optim.SparseAdam([s.model.emb.weight, s.model.bag.weight], lr=0.01))
    dense = s.of(torch.optim.Adam(s.model.dense(), lr=0.01))
    for batch in s.batches():
        tables.zero_grad()
        dense.zero_grad()
        s.loss(batch).backward()
        tables.step()
        dense.step()
    return s.end()


@row(TABLES, "one embedding module used twice in forward")
def used_twice(es: Any) -> Result:
    class Twice(Own):
        def look(self, batch: dict[str, Tensor]) -> Tensor:
            out: Tensor = self.emb(batch["ids"][:, 0]) * self.emb(batch["ids"][:, 1])
            return out

    return train(Script(es, Twice))


@row(TABLES, "an embedding and a bag that share one weight")
def shared_weight(es: Any) -> Result:
    class Shared(Net):
        def __init__(self) -> None:
            super().__init__()
            self.bag.weight = self.emb.weight

    return train(Script(es, Shared))


@row(TABLES, "one embedding module under two names")
def two_names(es: Any) -> Result:
    class Named(Own):
        def __init__(self) -> None:
            super().__init__()
            self.alias = self.emb

        def look(self, batch: dict[str, Tensor]) -> Tensor:
            out: Tensor = self.emb(batch["ids"][:, 0]) + self.alias(batch["ids"][:, 2])
            return out

    return train(Script(es, Named))


@row(TABLES, "an embedding over a sequence, mean over a mask")
def masked_sequence(es: Any) -> Result:
    class Masked(Own):
        def look(self, batch: dict[str, Tensor]) -> Tensor:
            mask = (batch["ids"] % 3 != 0).float().unsqueeze(-1)
            out: Tensor = (self.emb(batch["ids"]) * mask).sum(1) / mask.sum(1).clamp(min=1)
            return out

    return train(Script(es, Masked))


@row(TABLES, "ids computed in the model: hashed")
def hashed_ids(es: Any) -> Result:
    class Hashed(Own):
        def look(self, batch: dict[str, Tensor]) -> Tensor:
            out: Tensor = self.emb((batch["ids"][:, 0] * 7 + batch["ids"][:, 1] * 3) % KEYS)
            return out

    return train(Script(es, Hashed))


@row(
    TABLES,
    "ids changed in place through `.numpy()` after a lookup",
    stated={
        "alone async bounded sync hybrid hybrid-2": "The gradient goes to the rows that were looked up; PyTorch's "
        "`backward` reads the ids again, and then they are others."
    },
)
def ids_in_place(es: Any) -> Result:
    class Masked(Own):
        def look(self, batch: dict[str, Tensor]) -> Tensor:
            ids = batch["ids"][:, 0].clone()
            before = self.emb(ids)
            ids.numpy()[ids.numpy() % 2 == 0] = 1
            out: Tensor = before + self.emb(ids)
            return out

    return train(Script(es, Masked))


@row(TABLES, "ids in int32")
def ids_int32(es: Any) -> Result:
    class Small(Own):
        def look(self, batch: dict[str, Tensor]) -> Tensor:
            out: Tensor = self.emb(batch["ids"][:, 0].int())
            return out

    return train(Script(es, Small))


@row(TABLES, "a lookup of no ids")
def no_ids(es: Any) -> Result:
    class Empty(Own):
        def look(self, batch: dict[str, Tensor]) -> Tensor:
            out: Tensor = self.emb(batch["ids"][:, 0]) + self.emb(batch["ids"][:0, 0]).sum()
            return out

    return train(Script(es, Empty))


@row(TABLES, "`F.embedding(ids, emb.weight)`")
def functional(es: Any) -> Result:
    class Functional(Own):
        def look(self, batch: dict[str, Tensor]) -> Tensor:
            return nn.functional.embedding(batch["ids"][:, 0], self.emb.weight)

    return train(Script(es, Functional))


@row(TABLES, "scores of all rows: `h @ emb.weight.T` (a recommender's softmax)")
def all_rows(es: Any) -> Result:
    class Softmax(Net):
        def forward(self, batch: dict[str, Tensor]) -> Tensor:
            scores = batch["x"] @ self.emb.weight.T
            out: Tensor = self.last(self._hidden(batch)) + torch.logsumexp(scores, 1, keepdim=True)
            return out

    return train(Script(es, Softmax))


@row(TABLES, "an Embedding subclass")
def subclass(es: Any) -> Result:
    class Doubled(nn.Embedding):
        def forward(self, input: Tensor) -> Tensor:
            return 2 * super().forward(input)

    class Sub(Net):
        def __init__(self) -> None:
            super().__init__()
            self.emb = Doubled(KEYS, DIM)

    return train(Script(es, Sub))


@row(TABLES, "tables by `only=`, the others dense")
def only_one(es: Any) -> Result:
    return train(Script(es, sparse={"only": ["bag"]}))


@row(TABLES, "a table read outside of the loop: `model.emb(ids)` before and after")
def read_outside(es: Any) -> Result:
    s = Script(es)
    ids = torch.arange(KEYS)
    with unsharded(s.model), torch.no_grad():
        s.note("before", s.model.emb(ids).clone())
    out = train(s)
    with unsharded(s.model), torch.no_grad():
        out["after"] = s.model.emb(ids).numpy().copy()
    return out


@row(TABLES, "a table's rows read between two loops, through a numpy buffer that is used again")
def read_reused(es: Any) -> Result:
    s = Script(es)
    opt = s.sgd()
    buffer = np.zeros(5, np.int64)
    for epoch in range(2):
        for batch in s.batches(epochs=1):
            opt.zero_grad()
            s.loss(batch).backward()
            opt.step()
        with s.job.eval(s.model), unsharded(s.model):
            for start in (0, 5, 10):
                buffer[:] = np.arange(start, start + 5)
                s.note(f"rows{epoch}.{start}", s.model.emb(torch.from_numpy(buffer)).clone())
    return s.end()


@row(TABLES, "`emb.weight` read after training")
def weight_read(es: Any) -> Result:
    s = Script(es)
    out = train(s)
    out["weight"] = whole(s.model.emb.weight.detach()).numpy().copy()
    return out


@row(TABLES, "`model.state_dict()` with tables, loaded into a plain model")
def state_loaded(es: Any) -> Result:
    s = Script(es)
    train(s)
    state = {k: v for k, v in s.job.state_dict()["models"][0].items() if k != "emb.keys"}
    net = Net()
    net.load_state_dict(state)
    with torch.no_grad():
        out = net({k: torch.as_tensor(v) for k, v in s.data.items()})
    return {"out": out.numpy()}


@row(TABLES, "a table without a vocabulary: `es.nn.Embedding(name, dim)`")
def no_vocabulary(es: Any) -> Result:
    class Open(Own):
        def __init__(self) -> None:
            super().__init__()
            self.emb = es.nn.Embedding("users", DIM, init=es.Constant(0.1))

        def look(self, batch: dict[str, Tensor]) -> Tensor:
            out: Tensor = self.emb(batch["ids"][:, 0])
            return out

    s = Script(es, Open)
    opt = s.sgd()
    for batch in s.batches():
        opt.zero_grad()
        s.loss(batch).backward()
        opt.step()
    with s.job.eval(s.model):
        rows = s.model.emb(torch.arange(KEYS)).clone()
    out = {k: v for k, v in s.end().items() if not k.startswith("0.emb")}
    return out | {"rows": rows.numpy()}


@row(TABLES, "two es.nn modules of one name")
def one_name(es: Any) -> Result:
    class Open(Own):
        def __init__(self) -> None:
            super().__init__()
            self.emb = es.nn.Embedding("items", DIM, vocabulary=KEYS, init=es.Constant(0.1))
            self.bag = es.nn.EmbeddingBag("items", DIM, "sum", vocabulary=KEYS, init=es.Constant(0.1))

        def look(self, batch: dict[str, Tensor]) -> Tensor:
            out: Tensor = self.emb(batch["ids"][:, 0])
            return out

    return train(Script(es, Open))


@row(TABLES, "twenty tables of different sizes")
def many_tables(es: Any) -> Result:
    class Many(Own):
        def __init__(self) -> None:
            super().__init__()
            self.tables = nn.ModuleList(nn.Embedding(KEYS + i, DIM) for i in range(20))

        def look(self, batch: dict[str, Tensor]) -> Tensor:
            return torch.stack([t(batch["ids"][:, i % 3]) for i, t in enumerate(self.tables)]).mean(0)

    return train(Script(es, Many))


@row(TABLES, "a table that only some iterations use")
def sometimes(es: Any) -> Result:
    class Short(Net):
        def short(self, batch: dict[str, Tensor]) -> Tensor:
            out: Tensor = self.last(torch.tanh(batch["x"]).repeat(1, 2))
            return out

    s = Script(es, Short)
    opt = s.sgd()
    for batch in s.batches():
        opt.zero_grad()
        if s.job.step % 2:
            s.loss(batch).backward()
        else:
            nn.functional.mse_loss(s.model.short(batch), batch["y"]).backward()
        opt.step()
    return s.end()


@row(TABLES, "an id outside of the vocabulary")
def outside_vocabulary(es: Any) -> Result:
    s = Script(es, of={**data(), "ids": data()["ids"] + 1})
    try:
        return train(s)
    except (IndexError, RuntimeError) as error:
        if not es.plain and "range" not in str(error):
            raise
        return {"refused": np.array(True)}
    except Exception as error:
        if "vocabulary" in str(error) or "rows" in str(error):
            return {"refused": np.array(True)}
        raise
