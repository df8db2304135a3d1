"""Sources of samples: anything that knows its length and reads rows by index.

``open_source`` takes whatever the user has: a path, a list of paths, a glob or a directory (Parquet, Arrow, CSV,
NumPy files), a ``pyarrow.Table``, a dict or tuple of arrays, a map-style dataset, or a Source.
"""

from __future__ import annotations

import glob
import hashlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final, Protocol, runtime_checkable

import numpy as np

from everstep.data.columns import (
    Array,
    Batch,
    ColumnsLike,
    Dtypes,
    Fill,
    TextKeys,
    numpy_to_batch,
    parse_columns,
    schema_of,
    stack,
    wanted,
)
from everstep.data.order import Int64s
from everstep.errors import DataError

MEMORY_BYTES: Final = 1 << 30
"""A Parquet source whose decoded columns are at most this big is held in memory; a bigger one is read as needed."""


@runtime_checkable
class Source(Protocol):
    """What a loader reads. Thread-safe: several threads may call ``read`` at once."""

    chunk: int
    """Rows that are cheap to read together; 0: any row is as near as any other."""

    @property
    def schema(self) -> dict[str, str]:
        """Batch key -> ``"int64"``, ``"float32[13]"``: type and shape of one row."""
        ...

    def __len__(self) -> int: ...

    def read(self, indices: Int64s) -> Batch:
        """Rows ``indices`` (int64 [n], each in [0, len), any order, repeats allowed): key -> array [n, ...]."""
        ...

    def fingerprint(self) -> str:
        """Short text that differs for different data; equal on every process that reads the same data."""
        ...


class ArraySource:
    """Columns held as arrays of equal length; a read is one ``take`` per batch key."""

    chunk = 0

    def __init__(self, arrays: Mapping[str, Array], fingerprint: str = "") -> None:
        if not arrays:
            raise DataError("a source needs at least one column")
        self._arrays = {str(key): array for key, array in arrays.items()}
        sizes = {key: len(array) for key, array in self._arrays.items()}
        if len(set(sizes.values())) > 1:
            raise DataError("columns differ in length: " + ", ".join(f"{k} {n:,}" for k, n in sizes.items()))
        self._n = next(iter(sizes.values()))
        self.schema = schema_of(self._arrays)
        self._fingerprint = fingerprint or self._content()

    def __len__(self) -> int:
        return self._n

    def __repr__(self) -> str:
        return f"<ArraySource {self._n:,} rows of {', '.join(f'{k}: {v}' for k, v in self.schema.items())}>"

    def read(self, indices: Int64s) -> Batch:
        return {key: np.take(array, indices, axis=0) for key, array in self._arrays.items()}

    def fingerprint(self) -> str:
        return self._fingerprint

    def _content(self) -> str:
        """Shape, type and a spread of at most 4,096 rows: enough to tell two data sets apart."""
        digest = hashlib.blake2b(digest_size=8)
        rows = np.linspace(0, self._n - 1, min(self._n, 4096)).astype(np.int64) if self._n else np.empty(0, np.int64)
        for key, array in self._arrays.items():
            digest.update(f"{key}:{array.dtype}:{array.shape};".encode())
            digest.update(np.ascontiguousarray(array[rows]).tobytes())
        return digest.hexdigest()


class DatasetSource:
    """Any map-style dataset: ``len(dataset)`` and ``dataset[i]``, a dict, a tuple or one value per sample.

    Values may be tensors, arrays, numbers or text of equal shapes; a tuple's keys are ``"0"``, ``"1"``, ... A dataset
    with ``__getitems__`` is asked for a whole batch at once. One that augments its samples should define
    ``seeded(index, seed)``, so that a sample comes out the same whoever reads it and however often.
    """

    chunk = 0

    def __init__(self, dataset: Any, columns: ColumnsLike = None, dtypes: Dtypes = None) -> None:
        self._dataset = dataset
        self._where = f"dataset {type(dataset).__name__}"
        try:
            self._n = len(dataset)
        except TypeError:
            raise DataError(
                f"{self._where} has no length; a map-style dataset with __len__ and __getitem__ is needed"
            ) from None
        if self._n < 1:
            raise DataError(f"{self._where} is empty")
        self._keys = TextKeys()
        first = self._collate([dataset[0]])
        self._groups = parse_columns(columns, first, self._where, dtypes)
        self._text: frozenset[str] = frozenset()
        self.schema = schema_of(stack(self._groups, first, self._text, self._where))

    def __len__(self) -> int:
        return self._n

    def __repr__(self) -> str:
        return f"<DatasetSource {self._where}, {self._n:,} rows>"

    @property
    def seeded(self) -> bool:
        """The dataset takes a seed per sample."""
        return hasattr(self._dataset, "seeded")

    def read(self, indices: Int64s, seeds: Int64s | None = None) -> Batch:
        if self.seeded and seeds is not None:
            pairs = zip(indices.tolist(), seeds.tolist(), strict=True)
            samples = [self._dataset.seeded(i, s) for i, s in pairs]
        elif hasattr(self._dataset, "__getitems__"):
            samples = self._dataset.__getitems__(indices.tolist())
        else:
            samples = [self._dataset[i] for i in indices.tolist()]
        return stack(self._groups, self._collate(samples), self._text, self._where)

    def fingerprint(self) -> str:
        text = f"{type(self._dataset).__qualname__}:{self._n}:{sorted(self.schema.items())}"
        return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()

    def _collate(self, samples: Sequence[Any]) -> dict[str, Array]:
        first = samples[0]
        if isinstance(first, Mapping):
            fields = {str(k): [s[k] for s in samples] for k in first}
        elif isinstance(first, tuple | list):
            fields = {str(i): [s[i] for s in samples] for i in range(len(first))}
        else:
            fields = {"0": list(samples)}
        return {name: self._column(name, values) for name, values in fields.items()}

    def _column(self, name: str, values: list[Any]) -> Array:
        try:
            array = np.stack([np.asarray(v) for v in values])
        except (ValueError, TypeError, RuntimeError) as error:
            raise DataError(f"{self._where}: field {name!r} does not stack to a batch: {error}") from None
        return numpy_to_batch(name, array, self._where, self._keys)


def arrays_source(arrays: Mapping[str, Array], columns: ColumnsLike, dtypes: Dtypes, where: str) -> ArraySource:
    """A source over arrays of any type (first axis = rows); converted once, grouped as ``columns`` says."""
    groups = parse_columns(columns, arrays, where, dtypes)
    keys = TextKeys()
    sizes = {name: _rows(name, arrays[name], where) for name in wanted(groups)}
    if len(set(sizes.values())) > 1:
        raise DataError(f"{where}: columns differ in length: " + ", ".join(f"{k} {n:,}" for k, n in sizes.items()))
    if not all(sizes.values()):
        raise DataError(f"{where}: no rows")
    text = [name for name in sizes if np.asarray(arrays[name]).dtype.kind in "USO"]
    converted = {name: numpy_to_batch(name, np.asarray(arrays[name]), where, keys) for name in sizes}
    return ArraySource(stack(groups, converted, text, where))


def _rows(name: str, values: Any, where: str) -> int:
    shape = np.asarray(values).shape
    if not shape:
        raise DataError(f"{where}: column {name!r} is one value, not an array of rows")
    return int(shape[0])


def find_files(spec: str | Path) -> list[Path]:
    """The files of a path, glob or directory, sorted. DataError when there is none."""
    text = str(spec)
    path = Path(text).expanduser()
    if path.is_dir():
        inside = [p for p in path.rglob("*") if p.is_file() and not _hidden(p.relative_to(path))]
        found = sorted(p for p in inside if kind_of(p))
        if not found:
            raise DataError(f"directory {text!r} has no data files (looked for {', '.join(sorted(_KINDS))})")
        return found
    if path.exists():
        return [path]
    if any(c in text for c in "*?["):
        matches = glob.glob(str(path), recursive=True)  # noqa: PTH207 - Path.glob refuses absolute patterns
        found = sorted(Path(p) for p in matches if Path(p).is_file())
        if not found:
            raise DataError(f"no file matches {text!r}")
        return found
    raise DataError(f"data file {text!r} does not exist")


def _hidden(path: Path) -> bool:
    return any(part.startswith((".", "_")) for part in path.parts)


_KINDS: Final = {
    ".parquet": "parquet",
    ".pq": "parquet",
    ".arrow": "arrow",
    ".feather": "arrow",
    ".ipc": "arrow",
    ".csv": "csv",
    ".tsv": "csv",
    ".npy": "numpy",
    ".npz": "numpy",
}


def kind_of(path: Path) -> str:
    """``parquet``, ``arrow``, ``csv``, ``numpy``, or an empty string; ``.csv.gz`` is CSV too."""
    suffixes = [s.lower() for s in path.suffixes]
    if suffixes and suffixes[-1] in (".gz", ".bz2", ".zst") and len(suffixes) > 1:
        return "csv" if _KINDS.get(suffixes[-2]) == "csv" else ""
    return _KINDS.get(suffixes[-1], "") if suffixes else ""


def open_source(
    spec: Any,
    columns: ColumnsLike = None,
    *,
    dtypes: Dtypes = None,
    fill: Fill = None,
    memory_bytes: int = MEMORY_BYTES,
) -> Source:
    """A Source over whatever the user has; DataError, in one line, for everything that cannot be read.

    ``columns``: names, or ``{key: name | [names]}`` where a list becomes one stacked [rows, len] array.
    ``dtypes``: ``{key: "float32" | "int64"}``, for a dense group of integers, or to insist on ids.
    ``fill``: what stands for nulls of files (one value, or per column); without it nulls are an error.
    """
    if isinstance(spec, Source) and not hasattr(spec, "__getitem__"):
        if columns is not None or dtypes is not None:
            raise DataError(
                "columns= and dtypes= cannot change a source that is already open; give them to open_source"
            )
        return spec
    if isinstance(spec, str | Path):
        return _open_files(find_files(spec), columns, dtypes, fill, memory_bytes)
    if type(spec).__module__.startswith("pyarrow") and hasattr(spec, "column_names"):
        from everstep.data.arrow import table_source

        return table_source(spec, columns, dtypes, fill, "table")
    if isinstance(spec, np.ndarray):
        return arrays_source({"0": spec}, columns, dtypes, "array")
    if isinstance(spec, Mapping):
        return arrays_source(spec, columns, dtypes, "arrays")
    if isinstance(spec, list | tuple):
        if not spec:
            raise DataError("an empty list is no data source")
        if all(isinstance(item, str | Path) for item in spec):
            return _open_files(
                [file for item in spec for file in find_files(item)], columns, dtypes, fill, memory_bytes
            )
        if isinstance(spec, tuple) and all(hasattr(item, "shape") for item in spec):
            return arrays_source({str(i): item for i, item in enumerate(spec)}, columns, dtypes, "arrays")
    if hasattr(spec, "__getitem__") or hasattr(spec, "__getitems__"):
        return DatasetSource(spec, columns, dtypes)
    raise DataError(
        f"cannot read samples from {type(spec).__name__}: give a path, a table, arrays or a map-style dataset"
    )


def _open_files(files: list[Path], columns: ColumnsLike, dtypes: Dtypes, fill: Fill, memory_bytes: int) -> Source:
    kinds = {kind_of(file) for file in files}
    for file in files:
        if not kind_of(file):
            raise DataError(f"{str(file)!r}: unknown kind of file; known: {', '.join(sorted(_KINDS))}")
        if file.stat().st_size == 0:
            raise DataError(f"{str(file)!r} is empty")
    if len(kinds) > 1:
        raise DataError(f"one source, several kinds of files: {', '.join(sorted(kinds))}; give one kind")
    kind = kinds.pop()
    if kind == "numpy":
        return _open_numpy(files, columns, dtypes)
    from everstep.data import arrow

    try:
        if kind == "parquet":
            return arrow.open_parquet(files, columns, dtypes, fill, memory_bytes)
        return arrow.open_tables(files, kind, columns, dtypes, fill)
    except OSError as error:
        raise DataError(f"cannot read {str(files[0])!r}: {error}") from None


def _open_numpy(files: list[Path], columns: ColumnsLike, dtypes: Dtypes) -> Source:
    if len(files) > 1:
        raise DataError(f"{len(files)} NumPy files: give one .npz, or a dict of arrays")
    where = str(files[0])
    try:
        # Without pickle: a file is data, never code.
        loaded = np.load(where, allow_pickle=False, mmap_mode="r" if files[0].suffix.lower() == ".npy" else None)
        arrays = {"0": loaded} if isinstance(loaded, np.ndarray) else {name: loaded[name] for name in loaded.files}
    except (ValueError, OSError, EOFError) as error:
        text = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise DataError(f"{where!r} is no readable NumPy file: {text}") from None
    except Exception as error:  # a broken zip has its own class
        raise DataError(f"{where!r} is no readable NumPy file: {error}") from None
    return arrays_source(arrays, columns, dtypes, where)
