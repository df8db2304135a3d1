"""Describes sources of samples: anything that knows its length and reads rows by index.

``open_source`` takes whatever the user has: a path, a list of paths, a glob or a directory (Parquet, Arrow, CSV,
NumPy files), a ``pyarrow.Table``, a dict or tuple of arrays, a map-style dataset, or a Source.
"""

from __future__ import annotations

import glob
import hashlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final, Protocol, runtime_checkable

import numpy as np
from torch.utils.data import IterableDataset

from everstep.data.columns import (
    Array,
    Batch,
    ColumnsLike,
    Dtypes,
    Fill,
    TextKeys,
    hashed_unasked,
    holds_text,
    numpy_to_batch,
    parse_columns,
    schema_of,
    stack,
    text_mode,
    to_array,
    wanted,
)
from everstep.data.dataset import DatasetSource
from everstep.data.order import Int64s
from everstep.errors import DataError

MEMORY_BYTES: Final = 1 << 30
"""A Parquet source whose decoded columns are at most this big is held in memory; a bigger one is read as needed."""


@runtime_checkable
class DataSource(Protocol):
    """Is what a loader reads. Thread-safe: several threads may call ``read`` at once."""

    chunk: int
    """Rows that are cheap to read together; 0: any row is as near as any other."""

    @property
    def schema(self) -> dict[str, str]:
        """Return batch key -> ``"int64"``, ``"float32[13]"``: type and shape of one row."""
        ...

    def __len__(self) -> int: ...

    def read(self, indices: Int64s) -> Batch:
        """Read rows ``indices`` (int64 [n], each in [0, len), any order, repeats allowed): key -> array [n, ...]."""
        ...

    def fingerprint(self) -> str:
        """Return a short text that differs for different data; equal on every process that reads the same data."""
        ...


class ArraySource:
    """Columns held as arrays of equal length; a read is one ``take`` per batch key."""

    chunk = 0

    def __init__(self, arrays: Mapping[str, Array], fingerprint: str = "", hashed: tuple[str, ...] = ()) -> None:
        if not arrays:
            raise DataError("a source needs at least one column")
        self._arrays = {str(key): array for key, array in arrays.items()}
        sizes = {key: len(array) for key, array in self._arrays.items()}
        if len(set(sizes.values())) > 1:
            raise DataError("columns differ in length: " + ", ".join(f"{k} {n:,}" for k, n in sizes.items()))
        self._n = next(iter(sizes.values()))
        self.schema = schema_of(self._arrays)
        self.hashed = hashed  # columns of text whose keys a batch has, although nobody asked for keys
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
        """Return shape, type and a spread of at most 4,096 rows: enough to tell two data sets apart."""
        digest = hashlib.blake2b(digest_size=8)
        rows = np.linspace(0, self._n - 1, min(self._n, 4096)).astype(np.int64) if self._n else np.empty(0, np.int64)
        for key, array in self._arrays.items():
            digest.update(f"{key}:{array.dtype}:{array.shape};".encode())
            some = array[rows]
            digest.update(
                repr(some.tolist()).encode() if some.dtype == object else np.ascontiguousarray(some).tobytes()
            )
        return digest.hexdigest()


def arrays_source(arrays: Mapping[str, Array], columns: ColumnsLike, dtypes: Dtypes, where: str) -> ArraySource:
    """Return a source over arrays of any type (first axis = rows); converted once, grouped as ``columns`` says."""
    groups = parse_columns(columns, arrays, where, dtypes)
    keys = TextKeys()
    given = {name: to_array(name, arrays[name], where) for name in wanted(groups)}
    sizes = {name: _rows(name, array, where) for name, array in given.items()}
    if len(set(sizes.values())) > 1:
        raise DataError(f"{where}: columns differ in length: " + ", ".join(f"{k} {n:,}" for k, n in sizes.items()))
    if not all(sizes.values()):
        raise DataError(f"{where}: no rows")
    text = [name for name, array in given.items() if holds_text(array)]
    modes = {name: text_mode(groups, name, where) for name in given}
    converted = {name: numpy_to_batch(name, array, where, keys, modes[name]) for name, array in given.items()}
    return ArraySource(stack(groups, converted, text, where), hashed=hashed_unasked(groups, text))


def _rows(name: str, array: Array, where: str) -> int:
    if not array.shape:
        raise DataError(f"{where}: column {name!r} is one value, not an array of rows")
    return len(array)


def find_files(spec: str | Path) -> list[Path]:
    """Return the files of a path, glob or directory, sorted. DataError when there is none."""
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
    """Return ``parquet``, ``arrow``, ``csv``, ``numpy``, or an empty string; ``.csv.gz`` is CSV too."""
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
    collate_fn: Callable[[list[Any]], Any] | None = None,
) -> DataSource | DatasetSource:
    """Return a Source over whatever the user has; DataError, in one line, for everything that cannot be read.

    ``columns``: names, or ``{key: name | [names]}`` where a list becomes one stacked [rows, len] array.
    ``dtypes``: ``{key: "float32"}`` where another type is wanted than the data have, ``"hash"`` or ``"str"`` for text;
    ``"float32"`` alone is wanted of every column of floats.
    ``fill``: what stands for nulls of files (one value, or per column); without it nulls are an error.
    """
    if collate_fn is not None and not is_dataset(spec):
        raise DataError(
            f"collate_fn= is for map-style datasets, whose samples it makes a batch of; {type(spec).__name__} is "
            "read by "
            "columns: use transform=, which gets the batch"
        )
    if is_dataset(spec):
        return DatasetSource(spec, columns, dtypes, collate_fn)
    if isinstance(spec, DataSource) and not hasattr(spec, "__getitem__"):
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
    if type(spec).__module__.startswith("ray.data"):
        raise DataError(
            f"a Ray {type(spec).__name__} has no samples by number, in the same order in every process, so that none "
            "would be counted twice: write it once (dataset.write_parquet(PATH)) and give its files, 'PATH/*.parquet'"
        )
    raise DataError(
        f"cannot read samples from {type(spec).__name__}: give a path, a table, arrays or a map-style dataset"
    )


def is_dataset(spec: Any) -> bool:
    """Return whether ``spec`` is read sample by sample: anything with ``__getitem__`` that is no array, table or list
    of files. DataError for what looks like one and is none."""
    if isinstance(spec, np.ndarray | str | Path | Mapping) or type(spec).__module__.startswith("pyarrow"):
        return False
    if isinstance(spec, list | tuple):
        files = all(isinstance(item, str | Path) for item in spec)
        arrays = isinstance(spec, tuple) and all(hasattr(item, "shape") for item in spec)
        return bool(spec) and not files and not arrays
    if isinstance(spec, IterableDataset):
        raise DataError(
            f"{type(spec).__name__} is an IterableDataset: everstep deals out ranges of samples, so that none is "
            "lost or "
            "read twice, and needs a length and samples by number: give a map-style dataset (list(dataset), where it "
            "fits into memory), or files, such as 'data/*.parquet'"
        )
    if type(spec).__module__.startswith("pandas") and hasattr(spec, "columns"):
        raise DataError("a DataFrame: give its columns as arrays, {c: df[c].to_numpy() for c in df}")
    return hasattr(spec, "__getitem__") or hasattr(spec, "__getitems__")


def _open_files(files: list[Path], columns: ColumnsLike, dtypes: Dtypes, fill: Fill, memory_bytes: int) -> DataSource:
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


def _open_numpy(files: list[Path], columns: ColumnsLike, dtypes: Dtypes) -> DataSource:
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
