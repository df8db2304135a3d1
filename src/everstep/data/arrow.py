"""Reads Parquet, Arrow and CSV files. Small sources are decoded once and held; big Parquet is read by row group."""

from __future__ import annotations

import hashlib
import threading
from collections import OrderedDict
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np
import pyarrow as pa
import pyarrow.csv as pacsv
import pyarrow.parquet as pq

from everstep.data.columns import (
    Array,
    Batch,
    ColumnGroup,
    ColumnsLike,
    Dtypes,
    Fill,
    TextKeys,
    arrow_to_numpy,
    batch_dtype,
    fill_of,
    hashed_unasked,
    is_text,
    no_rule,
    one_line,
    parse_columns,
    schema_of,
    stack,
    text_mode,
    wanted,
)
from everstep.data.order import WINDOW_CHUNKS, Int64s
from everstep.data.source import ArraySource, DataSource
from everstep.errors import DataError

_CACHE_GROUPS: Final = 2 * WINDOW_CHUNKS + 2
"""Row groups kept decoded: two windows of the shuffle (a worker crosses from one to the next) and a spare."""


def decode(
    table: pa.Table, groups: Sequence[ColumnGroup], fill: Fill, where: str, keys: TextKeys, text: set[str]
) -> dict[str, Array]:
    """Return all columns that ``groups`` need, by name; names of text columns are added to ``text``."""
    out: dict[str, Array] = {}
    for name in wanted(groups):
        column = table.column(name)
        kind = column.type.value_type if pa.types.is_dictionary(column.type) else column.type
        if is_text(kind):
            text.add(name)
        mode = text_mode(groups, name, where)
        out[name] = arrow_to_numpy(name, column, fill_of(fill, name), where, keys, mode)
    return out


def table_source(
    table: pa.Table, columns: ColumnsLike, dtypes: Dtypes, fill: Fill, where: str, fingerprint: str = ""
) -> ArraySource:
    """Return a source over a table in memory."""
    if table.num_rows == 0:
        raise DataError(f"{where}: no rows")
    groups = parse_columns(columns, table.column_names, where, dtypes)
    text: set[str] = set()
    columns_read = decode(table, groups, fill, where, TextKeys(), text)
    return ArraySource(stack(groups, columns_read, text, where), fingerprint, hashed_unasked(groups, text))


def open_tables(files: list[Path], kind: str, columns: ColumnsLike, dtypes: Dtypes, fill: Fill) -> DataSource:
    """Arrow or CSV files, held in memory. Columns that are not asked for are not kept."""
    parts: list[dict[str, Array]] = []
    groups: list[ColumnGroup] = []
    keys, text = TextKeys(), set[str]()
    for file in files:
        table = _read_csv(file) if kind == "csv" else _read_arrow(file)
        if len(set(table.column_names)) < table.num_columns:
            raise DataError(f"{str(file)!r} has two columns of the same name")
        groups = parse_columns(columns, table.column_names, str(file), dtypes)
        if table.num_rows:
            parts.append(decode(table, groups, fill, str(file), keys, text))
    if not parts:
        raise DataError(f"{str(files[0])!r}: no rows")
    joined = stack(groups, _join(parts, files), text, str(files[0]))
    return ArraySource(joined, _fingerprint(files, groups), hashed_unasked(groups, text))


def _read_csv(file: Path) -> pa.Table:
    delimiter = "\t" if ".tsv" in file.suffixes else ","
    try:
        table = pacsv.read_csv(file, parse_options=pacsv.ParseOptions(delimiter=delimiter))
    except pa.ArrowInvalid as error:
        raise DataError(f"{str(file)!r} is no readable CSV file: {one_line(error)}") from None
    for name, column in zip(table.column_names, table.columns, strict=True):
        # The reader takes whole numbers beyond int64 for floats: ids would be rounded without a word.
        if pa.types.is_float64(column.type):
            values = column.to_numpy()
            values = values[np.isfinite(values)]
            far = values[np.abs(values) >= 2.0**63]
            if far.size and (values % 1 == 0).all():
                raise DataError(
                    f"{str(file)!r}: column {name!r} holds whole numbers outside of int64 (about {far[0]:.0f})"
                )
    return table


def _read_arrow(file: Path) -> pa.Table:
    with pa.memory_map(str(file)) as mapped:
        try:
            return pa.ipc.open_file(mapped).read_all()
        except pa.ArrowInvalid as first:
            mapped.seek(0)
            try:
                return pa.ipc.open_stream(mapped).read_all()
            except pa.ArrowInvalid:
                raise DataError(f"{str(file)!r} is no readable Arrow file: {one_line(first)}") from None


def _join(parts: list[dict[str, Array]], files: Sequence[Path]) -> dict[str, Array]:
    out: dict[str, Array] = {}
    for name in parts[0]:
        pieces = [part[name] for part in parts]
        common = common_dtype(name, [piece.dtype for piece in pieces], str(files[0]))
        out[name] = pieces[0] if len(pieces) == 1 else np.concatenate(pieces).astype(common, copy=False)
    return out


def common_dtype(name: str, types: Sequence[np.dtype[Any]], where: str) -> np.dtype[Any]:
    """Return the type of a column that several files have: the widest, of one kind."""
    kinds = {"i" if t.kind == "u" else t.kind for t in types}
    common = np.result_type(*types)
    if len(kinds) > 1 or (common.kind == "f" and "i" in kinds):
        listed = ", ".join(dict.fromkeys(str(t) for t in types))
        raise DataError(
            f"column {name!r} has different types ({listed}) in the files of {where!r}, ...: integers or text in one "
            "file "
            "and floats in another; write them with one type"
        )
    return common


def _fingerprint(files: Sequence[Path], groups: Sequence[ColumnGroup], rows: int = 0) -> str:
    """Names and sizes, not full paths: another node may keep the same files elsewhere."""
    shown = [(g.key, g.names, g.stacked, g.dtype) for g in groups]
    text = ";".join(f"{file.name}:{file.stat().st_size}" for file in files) + f"|{rows}|{shown!r}"
    return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()


# ---- Parquet ------------------------------------------------------------------------------------------------


def open_parquet(files: list[Path], columns: ColumnsLike, dtypes: Dtypes, fill: Fill, memory_bytes: int) -> DataSource:
    """Held in memory when the decoded columns take at most ``memory_bytes``, else read by row group."""
    metas = [_metadata(file) for file in files]
    schemas = [meta.schema.to_arrow_schema() for meta in metas]
    rows = sum(meta.num_rows for meta in metas)
    if rows == 0:
        raise DataError(f"{str(files[0])!r}: no rows")
    groups: list[ColumnGroup] = []
    row_bytes = 0
    for file, schema in zip(files, schemas, strict=True):
        groups = parse_columns(columns, schema.names, str(file), dtypes)
        row_bytes = max(row_bytes, _row_bytes(schema, groups, str(file)))
    if columns is None and any(schema.names != schemas[0].names for schema in schemas):
        groups = parse_columns(None, schemas[0].names, str(files[0]), dtypes)
        for file, schema in zip(files, schemas, strict=True):
            parse_columns(schemas[0].names, schema.names, str(file))
    source = ParquetSource(files, metas, groups, fill, _fingerprint(files, groups, rows))
    return source.in_memory() if rows * row_bytes <= memory_bytes else source


def _metadata(file: Path) -> Any:
    try:
        return pq.read_metadata(file)
    except (pa.ArrowInvalid, OSError) as error:
        raise DataError(f"{str(file)!r} is no readable Parquet file: {one_line(error)}") from None


def _row_bytes(schema: pa.Schema, groups: Sequence[ColumnGroup], where: str) -> int:
    total = 0
    for name in wanted(groups):
        kind = schema.field(name).type
        rule = batch_dtype(kind)
        if rule is None:
            raise no_rule(name, kind, where)
        total += rule[0].itemsize * rule[1]
    return total


def _common_dtypes(schemas: Sequence[pa.Schema], groups: Sequence[ColumnGroup], where: str) -> dict[str, np.dtype[Any]]:
    """Return, by column that is not of one type in all files, the type that all files' rows get."""
    out: dict[str, np.dtype[Any]] = {}
    for name in wanted(groups):
        rules = [batch_dtype(schema.field(name).type) for schema in schemas]
        types = [rule[0] for rule in rules if rule is not None]
        if len(set(types)) > 1:
            out[name] = common_dtype(name, types, where)
    return out


def _coded(t: pa.DataType) -> bool:
    return bool(pa.types.is_dictionary(t))


class ParquetSource:
    """Reads Parquet files by row group; the last ``_CACHE_GROUPS`` decoded row groups are kept."""

    def __init__(
        self, files: Sequence[Path], metas: Sequence[Any], groups: Sequence[ColumnGroup], fill: Fill, fingerprint: str
    ) -> None:
        self._files, self._groups, self._fill, self._fingerprint = list(files), list(groups), fill, fingerprint
        self._places: list[tuple[int, int]] = []  # row group -> (file, row group of the file)
        sizes: list[int] = []
        for number, meta in enumerate(metas):
            for group in range(meta.num_row_groups):
                if meta.row_group(group).num_rows:
                    self._places.append((number, group))
                    sizes.append(meta.row_group(group).num_rows)
        self._starts = np.concatenate([[0], np.cumsum(sizes)]).astype(np.int64)
        self.chunk = max(sizes)
        self._names = wanted(groups)
        schemas = [m.schema.to_arrow_schema() for m in metas]
        self._common = _common_dtypes(schemas, groups, str(files[0]))
        self._text_columns = [[n for n in self._names if is_text(s.field(n).type)] for s in schemas]
        kinds = [s.field(n).type for s in schemas[:1] for n in self._names]
        text = [n for n, t in zip(self._names, kinds, strict=True) if is_text(t.value_type if _coded(t) else t)]
        self.hashed = hashed_unasked(groups, text)
        self._keys, self._text = TextKeys(), set[str]()
        self._cache: OrderedDict[int, Batch] = OrderedDict()
        self._lock = threading.Lock()

    @property
    def schema(self) -> dict[str, str]:
        return schema_of(self._load(0))

    def __len__(self) -> int:
        return int(self._starts[-1])

    def __repr__(self) -> str:
        return f"<ParquetSource {len(self):,} rows in {len(self._places)} row groups of {len(self._files)} files>"

    def fingerprint(self) -> str:
        return self._fingerprint

    def read(self, indices: Int64s) -> Batch:
        if not len(indices):
            return {key: array[:0] for key, array in self._load(0).items()}
        place = np.searchsorted(self._starts, indices, side="right") - 1
        order = np.argsort(place, kind="stable")
        groups, first = np.unique(place[order], return_index=True)
        out: Batch = {}
        for group, rows in zip(groups.tolist(), np.split(order, first[1:]), strict=True):
            part = self._load(group)
            within = indices[rows] - self._starts[group]
            for key, array in part.items():
                if key not in out:
                    out[key] = np.empty((len(indices), *array.shape[1:]), array.dtype)
                out[key][rows] = array[within]
        return out

    def in_memory(self) -> ArraySource:
        """Return all rows decoded, as an ArraySource."""
        parts = []
        for number, file in enumerate(self._files):
            try:
                table = pq.ParquetFile(file, read_dictionary=self._text_columns[number]).read(self._names)
            except (pa.ArrowInvalid, OSError) as error:
                raise DataError(f"{str(file)!r} is no readable Parquet file: {one_line(error)}") from None
            if table.num_rows:
                parts.append(decode(table, self._groups, self._fill, str(file), self._keys, self._text))
        columns = _join(parts, self._files)
        joined = stack(self._groups, columns, self._text, str(self._files[0]))
        return ArraySource(joined, self._fingerprint, self.hashed)

    def _load(self, group: int) -> Batch:
        with self._lock:
            part = self._cache.get(group)
            if part is not None:
                self._cache.move_to_end(group)
                return part
            number, inner = self._places[group]
            where = str(self._files[number])
            try:
                # Opened anew: a kept handle per file would bind thousands of them for a big directory.
                with pq.ParquetFile(where, read_dictionary=self._text_columns[number]) as file:
                    table = file.read_row_group(inner, self._names)
            except (pa.ArrowInvalid, OSError) as error:
                raise DataError(f"{where!r}: row group {inner} is not readable: {one_line(error)}") from None
            columns = decode(table, self._groups, self._fill, where, self._keys, self._text)
            columns |= {name: columns[name].astype(common) for name, common in self._common.items()}
            part = self._cache[group] = stack(self._groups, columns, self._text, where)
            while len(self._cache) > _CACHE_GROUPS:
                self._cache.popitem(last=False)
            return part
