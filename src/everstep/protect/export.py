"""Exports tables and dense parameters out of a checkpoint, into files that are read without everstep.

A table becomes Parquet (``key`` int64, ``values`` and ``state`` lists of float32 of fixed length) or safetensors
(``keys`` int64 [n], ``values`` float32 [n, dim], ``state`` float32 [n, floats]). The order of rows says nothing. The
dense part becomes a ``state_dict`` in safetensors, for
``model.load_state_dict(safetensors.torch.load_file(path), strict=False)``.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from everstep.errors import CheckpointError, PlatformError
from everstep.model.snapshot import Manifest
from everstep.model.table import OWN, TableSpec, flat_places
from everstep.protect.manifest import assemble
from everstep.protect.snapshot_file import Pages
from everstep.storage.places import StoragePlace


class ExportedRows(NamedTuple):
    """Holds keys int64 [n], values float32 [n, dim], state float32 [n, floats of the optimizer]."""

    keys: NDArray[np.int64]
    values: NDArray[np.float32]
    state: NDArray[np.float32]


def find_table(manifest: Manifest, name: str) -> TableSpec:
    """CheckpointError, with the names there are, if it is not in the checkpoint."""
    for spec in manifest.tables:
        if spec.name == name:
            return spec
    names = ", ".join(repr(t.name) for t in manifest.tables) or "none"
    raise CheckpointError(f"checkpoint {manifest.checkpoint} has no table {name!r}: there are {names}")


def table_rows(place: StoragePlace, manifest: Manifest, spec: TableSpec) -> Iterator[ExportedRows]:
    """Yield the rows of a table, some megabytes at a time, each once; one partition is in memory. Raises
    CheckpointError (damage), StorageError."""
    for snapshot in manifest.snapshots:
        whole = assemble(place, snapshot)
        if spec.id in whole.pages:
            for pages in whole.some(spec.id):
                yield rows_of_pages(pages, spec, f"{place.url}, partition {snapshot.partition}")


def rows_of_pages(pages: Pages, spec: TableSpec, where: str) -> ExportedRows:
    """Return the used rows of some pages. CheckpointError: the pages are not of such a table."""
    layout, dim, floats = pages.layout, spec.dim, spec.optimizer.state_floats(spec.dim)
    if layout.record_bytes < 4 * (dim + floats):
        raise CheckpointError(f"{where}: pages of table {spec.name!r} are {tuple(layout)}, not of dim {dim}")
    used = layout.used(pages.data)
    keys = layout.keys(pages.data)[used]
    records = layout.records(pages.data)[used]
    numbers = np.ascontiguousarray(records[:, : 4 * (dim + floats)]).view("<f4").reshape(len(keys), dim + floats)
    return ExportedRows(keys, numbers[:, :dim], numbers[:, dim:])


def dense_state(place: StoragePlace, manifest: Manifest) -> dict[str, NDArray[np.float32]]:
    """Return the dense part by parameter name, as in the ``state_dict`` of the script's model. A group whose parameters
    have no names here is one flat array under its table's name. Of a parameter that another optimizer has taken over
    (fine-tuning), that one's values count. Raises CheckpointError, StorageError."""
    out: dict[str, NDArray[np.float32]] = {}
    for spec in sorted((s for s in manifest.tables if s.dense), key=_age):
        n_rows = spec.rows or 0
        flat = np.zeros((n_rows, spec.dim), np.float32)
        there = np.zeros(n_rows, bool)
        for rows in table_rows(place, manifest, spec):
            inside = (rows.keys >= 0) & (rows.keys < n_rows)
            flat[rows.keys[inside]] = rows.values[inside]
            there[rows.keys[inside]] = True
        if not there.all():
            raise CheckpointError(
                f"checkpoint {manifest.checkpoint}: {int((~there).sum())} of {n_rows} rows of the dense table "
                f"{spec.name!r} are not in it: it was taken before the script had put them there"
            )
        numbers = flat.reshape(-1)
        if not spec.parameters:
            out[spec.name] = numbers
        for name, shape, at in flat_places(spec):
            n = int(np.prod(shape, dtype=np.int64))
            if name.startswith(OWN):
                continue
            if at + n > numbers.size:
                raise CheckpointError(f"checkpoint {manifest.checkpoint}: {spec.name!r} does not hold {name!r}")
            out[name] = numbers[at : at + n].reshape(shape)
    return out


def _age(spec: TableSpec) -> tuple[int, ...]:
    """Orders dense tables: ``dense/OPTIMIZER/GROUP``, and ``dense/OPTIMIZER/GROUP/FIRST`` of what was thawed later."""
    return tuple(int(part) for part in spec.name.split("/")[1:] if part.isdecimal())


def state_words(spec: TableSpec) -> str:
    """Return what the floats of ``state`` are, in order."""
    return " ".join(f"{field.name}[{'dim' if field.each else 1}]" for field in spec.optimizer.state_fields())


def file_name(table: str) -> str:
    """Return a table's name as a file's."""
    return table.replace("/", ".").lstrip(".") or "table"


# ---------------------------------------------------------------- files


def write_parquet(place: StoragePlace, manifest: Manifest, spec: TableSpec, path: Path) -> int:
    """Write a table's rows; return how many were written. Rows pass through, the table need not fit into memory."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    floats = spec.optimizer.state_floats(spec.dim)
    lists = [("values", spec.dim)] + [("state", floats)] * (floats > 0)
    schema = pa.schema(
        [("key", pa.int64()), *((name, pa.list_(pa.float32(), n)) for name, n in lists)],
        metadata=_about(manifest, spec),
    )
    n = 0
    with _whole(path) as temporary, pq.ParquetWriter(temporary, schema) as writer:
        for rows in table_rows(place, manifest, spec):
            columns: list[Any] = [pa.array(rows.keys)]
            for name, width in lists:
                flat = pa.array(np.ascontiguousarray(getattr(rows, name)).reshape(-1))
                columns.append(pa.FixedSizeListArray.from_arrays(flat, width))
            writer.write_table(pa.Table.from_arrays(columns, schema=schema))
            n += len(rows.keys)
    return n


def write_safetensors(place: StoragePlace, manifest: Manifest, spec: TableSpec, path: Path) -> int:
    """Write a table's rows; return how many were written. The whole table is in memory meanwhile."""
    pieces = list(table_rows(place, manifest, spec))
    empty = ExportedRows(
        np.empty(0, np.int64),
        np.empty((0, spec.dim), np.float32),
        np.empty((0, spec.optimizer.state_floats(spec.dim)), np.float32),
    )
    columns = [np.concatenate(column) for column in zip(empty, *pieces, strict=True)]
    _save(dict(zip(("keys", "values", "state"), columns, strict=True)), path, _about(manifest, spec))
    return len(columns[0])


def write_dense(place: StoragePlace, manifest: Manifest, path: Path) -> int:
    """Write the dense part; return how many parameters were written."""
    state = dense_state(place, manifest)
    _save(state, path, {"everstep_checkpoint": str(manifest.checkpoint), "job": manifest.job})
    return len(state)


def _about(manifest: Manifest, spec: TableSpec) -> dict[Any, Any]:
    return {
        "everstep_checkpoint": str(manifest.checkpoint),
        "job": manifest.job,
        "table": spec.name,
        "dim": str(spec.dim),
        "optimizer": str(spec.optimizer.kind),
        "state": state_words(spec),
    }


def _save(arrays: dict[str, NDArray[np.float32]], path: Path, about: dict[str, str]) -> None:
    from safetensors.numpy import save_file

    with _whole(path) as temporary:
        save_file({name: np.asarray(a, order="C") for name, a in arrays.items()}, temporary, about)


@contextlib.contextmanager
def _whole(path: Path) -> Iterator[Path]:
    """Yield a name to write under; it becomes ``path`` if all went well."""
    temporary = path.with_name(f".{path.name}.tmp")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        yield temporary
        temporary.replace(path)
    except OSError as error:
        raise PlatformError(f"cannot write {path}: {error.strerror or error}") from error
    finally:
        temporary.unlink(missing_ok=True)


def wanted_tables(manifest: Manifest, names: Iterable[str]) -> list[TableSpec]:
    """Return the named tables; none named: all that are not dense. Raises CheckpointError."""
    chosen = [find_table(manifest, name) for name in names]
    return chosen or [spec for spec in manifest.tables if not spec.dense]
