"""Map-style datasets: samples become the batch that ``torch.utils.data.default_collate``, or the script's own
``collate_fn``, makes of them."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import TensorDataset, default_collate

from everstep.data.columns import (
    HASH,
    STR,
    ColumnGroup,
    ColumnsLike,
    Dtypes,
    TextKeys,
    check_cast,
    dtype_name,
    one_line,
    parse_columns,
)
from everstep.data.order import Int64s
from everstep.data.random_streams import Drawing, untouched
from everstep.errors import DataError

Collate = Callable[[list[Any]], Any]


class Fields(list[Any]):
    """Is the batch of a dataset of tuples: the list that ``default_collate`` makes, ``x, y = batch``. Its fields are
    also found by their numbers as text: ``batch["0"]``."""

    def keys(self) -> Iterator[str]:
        return map(str, range(len(self)))

    def values(self) -> Iterator[Any]:
        return iter(self)

    def items(self) -> Iterator[tuple[str, Any]]:
        return zip(self.keys(), self, strict=True)

    def __getitem__(self, at: Any) -> Any:
        if isinstance(at, str):
            if not at.isdecimal() or int(at) >= len(self):
                raise KeyError(at)
            at = int(at)
        return super().__getitem__(at)


class DatasetSource:
    """Reads any map-style dataset: ``len(dataset)`` and ``dataset[i]``, or ``dataset.__getitems__([i, ...])``.

    Types, nesting and names are those of ``default_collate``, or whatever ``collate_fn`` makes of a list of samples.
    ``columns`` and ``dtypes`` choose, rename and convert fields at the top. A dataset that has ``seeded(index, seed)``
    is asked by that instead of ``dataset[i]``.
    """

    chunk = 0
    hashed: tuple[str, ...] = ()

    def __init__(
        self, dataset: Any, columns: ColumnsLike = None, dtypes: Dtypes = None, collate_fn: Collate | None = None
    ) -> None:
        self._dataset = dataset
        self._where = f"dataset {type(dataset).__name__}"
        try:
            self._n = len(dataset)
        except (TypeError, NotImplementedError):
            raise DataError(
                f"{self._where} has no length; a map-style dataset with __len__ and __getitem__ is needed"
            ) from None
        if self._n < 1:
            raise DataError(f"{self._where} is empty")
        self.collate_fn = collate_fn
        self._keys = TextKeys()
        self._drawing = Drawing()
        self._groups: list[ColumnGroup] = []
        self._dtypes: dict[str, str] = {}
        with untouched():
            first = self._collate([self._dataset[0]])
        self._choose(columns, dtypes, first)
        self.schema = dict(_schema(self._chosen(first)))

    def __len__(self) -> int:
        return self._n

    def __repr__(self) -> str:
        return f"<DatasetSource {self._where}, {self._n:,} rows>"

    @property
    def seeded(self) -> bool:
        """The dataset takes a seed per sample."""
        return hasattr(self._dataset, "seeded")

    @property
    def draws(self) -> bool:
        """Return whether reading may draw random numbers from the process's streams."""
        return type(self._dataset) is not TensorDataset or self.collate_fn is not None

    def fetch(self, rows: Int64s, seeds: Int64s, apart: bool) -> Any:
        """Return the samples ``rows``, not yet a batch. ``seeds``: one for each. ``apart``: whatever a sample's
        ``__getitem__`` draws comes from streams of the sample's seed; else from the process's streams as they are."""
        at: list[int] = rows.tolist()
        if type(self._dataset) is TensorDataset and self.collate_fn is None:
            return _Taken([tensor[torch.from_numpy(rows)] for tensor in self._dataset.tensors])
        several = getattr(self._dataset, "__getitems__", None)
        with_seed = seeds.tolist()

        def one(i: int) -> Any:
            if self.seeded:
                return self._dataset.seeded(at[i], with_seed[i])
            if several:
                (sample,) = several([at[i]])
                return sample
            return self._dataset[at[i]]

        def together() -> Any:
            if several and not self.seeded:
                return several(at)
            return [one(i) for i in range(len(at))]

        return self._drawing.calls(with_seed, one, together) if apart else together()

    def collate(self, samples: Any) -> Any:
        """Return the batch of ``samples``."""
        if isinstance(samples, _Taken):
            return self._chosen(Fields(samples))
        return self._chosen(self._collate(samples))

    def fingerprint(self) -> str:
        text = f"{type(self._dataset).__qualname__}:{self._n}:{sorted(self.schema.items())}"
        return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()

    def _collate(self, samples: Any) -> Any:
        if self.collate_fn is not None:
            return self.collate_fn(samples)
        try:
            batch = default_collate(samples)
        except (TypeError, RuntimeError, ValueError) as error:
            raise DataError(
                f"{self._where}: samples do not stack to a batch ({one_line(error)}); give job.loader a collate_fn= "
                "that "
                "pads or packs them, as torch's DataLoader takes one"
            ) from None
        return Fields(batch) if type(batch) is list else batch

    # ------------------------------------------------------------ columns and dtypes

    def _choose(self, columns: ColumnsLike, dtypes: Dtypes, first: Any) -> None:
        if columns is None and dtypes is None:
            return
        fields = self._fields(first)
        if columns is not None:
            self._groups = parse_columns(columns, fields, self._where, dtypes)
        elif isinstance(dtypes, Mapping):
            for key, dtype in dtypes.items():
                if key not in fields:
                    raise DataError(f"{self._where}: dtypes names {key!r}, but a batch has {', '.join(fields)}")
                self._dtypes[key] = dtype_name(key, dtype, self._where)
        else:
            floats = dtype_name("", dtypes, self._where)
            self._dtypes = {k: floats for k, v in fields.items() if isinstance(v, Tensor) and v.is_floating_point()}

    def _fields(self, batch: Any) -> dict[str, Any]:
        if isinstance(batch, Mapping | Fields):
            return {str(k): v for k, v in batch.items()}
        if isinstance(batch, tuple) and hasattr(batch, "_fields"):
            return dict(zip(batch._fields, batch, strict=True))
        if isinstance(batch, tuple | list):
            return {str(i): v for i, v in enumerate(batch)}
        if isinstance(batch, Tensor):
            return {"0": batch}
        raise DataError(
            f"{self._where}: columns= and dtypes= cannot be used with a batch that is {type(batch).__name__}"
        )

    def _chosen(self, batch: Any) -> Any:
        if self._groups:
            fields = self._fields(batch)
            return {group.key: self._group(group, [fields[name] for name in group.names]) for group in self._groups}
        if not self._dtypes:
            return batch
        fields = self._fields(batch)
        changed = {k: self._cast(k, v, self._dtypes[k]) if k in self._dtypes else v for k, v in fields.items()}
        if isinstance(batch, Mapping):
            return changed
        if isinstance(batch, Tensor):
            return changed["0"]
        if hasattr(batch, "_fields"):
            return type(batch)(**changed)
        return Fields(changed.values())

    def _group(self, group: ColumnGroup, parts: list[Any]) -> Any:
        dtype = group.dtype
        if not dtype and group.floats and all(isinstance(p, Tensor) and p.is_floating_point() for p in parts):
            dtype = group.floats
        if not group.stacked:
            return self._cast(group.names[0], parts[0], dtype)
        rows = []
        for name, part in zip(group.names, parts, strict=True):
            if isinstance(part, list) and dtype != HASH:
                raise DataError(
                    f"{self._where}: {name!r} of group {group.key!r} is text; dtypes={{{group.key!r}: 'hash'}}"
                )
            tensor = self._cast(name, part, dtype) if isinstance(part, list) else part
            if not isinstance(tensor, Tensor) or tensor.dim() > 2:
                raise DataError(f"{self._where}: {name!r} of group {group.key!r} does not stack")
            rows.append(tensor[:, None] if tensor.dim() == 1 else tensor)
        return self._cast(group.key, torch.cat(rows, 1), "" if dtype == HASH else dtype)

    def _cast(self, name: str, part: Any, dtype: str) -> Any:
        if dtype in ("", STR):
            return part
        text = isinstance(part, list | tuple) and all(isinstance(v, str | bytes) for v in part)
        if dtype == HASH and text:
            return torch.from_numpy(self._keys.of(part))
        if text:
            raise DataError(
                f"{self._where}: field {name!r} is text, where {dtype} was asked for; dtypes={{{name!r}: 'hash'}} "
                "gives its "
                "keys, transform= or collate_fn= can tokenise it"
            )
        if dtype == HASH or not isinstance(part, Tensor):
            raise DataError(f"{self._where}: field {name!r} is {_kind(part)}, where {dtype!r} was asked for")
        target: torch.dtype = getattr(torch, dtype)
        if part.dtype != torch.bfloat16:
            check_cast(part.numpy(), _numpy(target), f"{self._where}: field {name!r}")
        elif not target.is_floating_point:
            raise DataError(f"{self._where}: field {name!r} holds floats, where {dtype} was asked for")
        return part.to(target)


class _Taken(list[Any]):
    """Holds tensors of a batch that were taken at once."""


def _numpy(dtype: torch.dtype) -> Any:
    return torch.empty(0, dtype=dtype).numpy().dtype


def _kind(value: Any) -> str:
    return str(value.dtype).removeprefix("torch.") if isinstance(value, Tensor) else type(value).__name__


def _schema(batch: Any, name: str = "") -> Iterator[tuple[str, str]]:
    """Place in the batch -> type; without lengths, which may differ from sample to sample."""
    inner: Sequence[tuple[Any, Any]] = ()
    if isinstance(batch, Mapping | Fields):
        inner = list(batch.items())
    elif isinstance(batch, tuple) and hasattr(batch, "_fields"):
        inner = list(zip(batch._fields, batch, strict=True))
    elif isinstance(batch, list | tuple) and not all(isinstance(v, str | bytes) for v in batch):
        inner = list(enumerate(batch))
    if not inner:
        yield name or "0", str(batch.dtype).removeprefix("torch.") if isinstance(batch, Tensor) else _kind(batch)
    for key, value in inner:
        yield from _schema(value, f"{name}.{key}" if name else str(key))
