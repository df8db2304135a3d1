"""Columns as models want them: integers as int64, everything else with a fraction as float32.

| in the file | in the batch |
| --- | --- |
| integers of any width | int64 (an unsigned value above 2**63 - 1 is an error) |
| floats, decimals | float32 |
| booleans | float32 (0.0, 1.0), as losses want labels |
| dates, times, timestamps, durations | int64, in the unit of the file |
| text, binary, categories of text | int64 keys: ``text_key``, a hash that never changes |
| fixed-size lists | [rows, length] of the above |

Nulls are an error unless ``fill`` says what stands for them (one value, or one per column); NaN is not null.
"""

from __future__ import annotations

import difflib
import hashlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final

import msgspec
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from everstep.errors import DataError

Array = NDArray[Any]
Batch = dict[str, Array]
ArrowColumn = Any  # pyarrow.ChunkedArray, whose stubs are partial
FillValue = float | int | str
Fill = FillValue | Mapping[str, FillValue] | None
ColumnsLike = Sequence[str] | Mapping[str, str | Sequence[str]] | None
Dtypes = Mapping[str, str] | None
"""Batch key -> ``"float32"`` or ``"int64"``, where the rules' own choice is not what the model wants."""

_INT64_MAX: Final = (1 << 63) - 1


def text_key(value: str | bytes) -> int:
    """The key in ``[0, 2**63)`` of a text: blake2b of its UTF-8 bytes, the same in every process and version."""
    data = value.encode("utf-8", "surrogatepass") if isinstance(value, str) else value
    return int.from_bytes(hashlib.blake2b(data, digest_size=8).digest(), "little") >> 1


class Group(msgspec.Struct, frozen=True):
    """One entry of a batch: ``names`` stacked as [rows, len(names)], or one column alone as [rows].

    ``dtype``: the type demanded, or an empty string.
    """

    key: str
    names: tuple[str, ...]
    stacked: bool
    dtype: str = ""


def parse_columns(columns: ColumnsLike, available: Iterable[str], where: str, dtypes: Dtypes = None) -> list[Group]:
    """What a batch holds: all columns, those named, or ``{"dense": ["a", "b"], "label": "y"}``.

    DataError for a column that is not there, with the nearest name.
    """
    names = list(available)
    groups: list[Group] = []
    if columns is None:
        groups = [Group(n, (n,), False) for n in names]
    elif isinstance(columns, Mapping):
        for key, value in columns.items():
            if isinstance(value, str):
                groups.append(Group(key, (value,), False))
            else:
                groups.append(Group(key, tuple(value), True))
    elif isinstance(columns, str):
        groups = [Group(columns, (columns,), False)]
    else:
        groups = [Group(n, (n,), False) for n in columns]
    if not groups or any(not g.names for g in groups):
        raise DataError(f"{where}: no columns asked for")
    known = set(names)
    for group in groups:
        for name in group.names:
            if name not in known:
                raise missing_column(name, names, where)
    keys = [group.key for group in groups]
    for key, dtype in (dtypes or {}).items():
        if key not in keys:
            raise DataError(f"{where}: dtypes names {key!r}, but a batch has {', '.join(keys)}")
        if dtype not in ("int64", "float32"):
            raise DataError(f"{where}: dtypes[{key!r}]={dtype!r}: expected 'int64' or 'float32'")
    return [msgspec.structs.replace(g, dtype=dtypes.get(g.key, "")) for g in groups] if dtypes else groups


def missing_column(name: str, names: Sequence[str], where: str) -> DataError:
    near = difflib.get_close_matches(str(name), names, 1)
    listed = ", ".join(map(str, names[:12])) + (", ..." if len(names) > 12 else "")
    hint = f"did you mean {near[0]!r}?" if near else f"it has {listed}"
    return DataError(f"{where}: no column {name!r}; {hint}")


def wanted(groups: Iterable[Group]) -> list[str]:
    """The names that the groups need, each once, in order."""
    return list(dict.fromkeys(name for group in groups for name in group.names))


def fill_of(fill: Fill, name: str) -> FillValue | None:
    return fill.get(name) if isinstance(fill, Mapping) else fill


# ---- one Arrow column -> NumPy ------------------------------------------------------------------------------


class TextKeys:
    """``text_key`` remembered per distinct value: only values are hashed, never rows."""

    def __init__(self) -> None:
        self._keys: dict[str | bytes, int] = {}

    def of(self, values: Iterable[str | bytes | None]) -> NDArray[np.int64]:
        keys = self._keys
        out = []
        for value in values:
            if value is None:
                out.append(0)
                continue
            key = keys.get(value)
            if key is None:
                key = keys[value] = text_key(value)
            out.append(key)
        return np.array(out, np.int64)


def is_text(t: pa.DataType) -> bool:
    return bool(
        pa.types.is_string(t)
        or pa.types.is_large_string(t)
        or pa.types.is_string_view(t)
        or pa.types.is_binary(t)
        or pa.types.is_large_binary(t)
        or pa.types.is_fixed_size_binary(t)
    )


def batch_dtype(t: pa.DataType) -> tuple[np.dtype[Any], int] | None:
    """The (dtype, values a row) that a column of Arrow type ``t`` becomes; None if there is no rule for it."""
    if pa.types.is_dictionary(t):
        return batch_dtype(t.value_type)
    if pa.types.is_fixed_size_list(t):
        inner = batch_dtype(t.value_type)
        return None if inner is None or is_text(t.value_type) else (inner[0], inner[1] * t.list_size)
    if pa.types.is_integer(t) or pa.types.is_temporal(t) or is_text(t):
        return np.dtype(np.int64), 1
    if pa.types.is_floating(t) or pa.types.is_decimal(t) or pa.types.is_boolean(t) or pa.types.is_null(t):
        return np.dtype(np.float32), 1
    return None


def arrow_to_numpy(name: str, column: ArrowColumn, fill: FillValue | None, where: str, keys: TextKeys) -> Array:
    """One column as int64 or float32, [rows] or [rows, length]; contiguous, owned by nobody else."""
    t = column.type
    if pa.types.is_dictionary(t) and not is_text(t.value_type):
        column = column.cast(t.value_type)
        t = column.type
    rule = batch_dtype(t)
    if rule is None:
        raise DataError(f"{where}: column {name!r} has type {t}, which has no rule; leave it out with columns=")
    nulls = column.null_count
    if nulls and fill is None:
        raise DataError(
            f"{where}: column {name!r} has {nulls:,} null values; say what stands for them, such as fill=0"
            f" or fill={{{name!r}: 0}}"
        )
    if is_text(t) or pa.types.is_dictionary(t):
        return _text_to_numpy(name, column, fill, where, keys)
    if pa.types.is_fixed_size_list(t):
        return _lists_to_numpy(name, column, fill, where, keys)
    if pa.types.is_null(t):
        return np.full(len(column), _number(name, fill, where), np.float32)
    try:
        if pa.types.is_temporal(t):
            column = column.cast(pa.int32() if t.bit_width == 32 else pa.int64()).cast(pa.int64())
        elif pa.types.is_decimal(t):
            column = column.cast(pa.float64())
        elif pa.types.is_boolean(t):
            column = column.cast(pa.uint8())
        elif pa.types.is_uint64(t):
            _check_uint64(name, pc.max(column).as_py(), where)
        if nulls:
            value = _number(name, fill, where)
            if pa.types.is_integer(column.type) and value != int(value):
                raise DataError(f"{where}: fill={value!r} for integer column {name!r}: expected a whole number")
            column = pc.fill_null(column, pa.scalar(value).cast(column.type))
    except pa.ArrowInvalid as error:
        raise DataError(f"{where}: column {name!r}: {one_line(error)}") from None
    return np.ascontiguousarray(column.to_numpy()).astype(rule[0], copy=False)


def _number(name: str, fill: FillValue | None, where: str) -> float | int:
    if isinstance(fill, str) or fill is None:
        raise DataError(f"{where}: fill={fill!r} for column {name!r}, which holds numbers: expected a number")
    return fill


def _check_uint64(name: str, largest: int | None, where: str) -> None:
    if largest is not None and largest > _INT64_MAX:
        raise DataError(
            f"{where}: column {name!r} holds {largest}, outside of int64 (the largest id is {_INT64_MAX});"
            " store it as a signed number or as text"
        )


def _text_to_numpy(
    name: str, column: ArrowColumn, fill: FillValue | None, where: str, keys: TextKeys
) -> NDArray[np.int64]:
    parts = [np.empty(0, np.int64)]
    for chunk in column.chunks:
        encoded: Any = chunk if pa.types.is_dictionary(chunk.type) else _encode(chunk)
        codes = encoded.indices
        # The last entry stands for null: of the row, or of the dictionary's own value.
        table = np.append(keys.of(encoded.dictionary.to_pylist()), 0)
        if column.null_count or encoded.dictionary.null_count:
            if fill is None:
                raise DataError(f"{where}: column {name!r} has null values; say what stands for them, such as fill=''")
            stand_in = text_key(fill) if isinstance(fill, str) else int(fill)
            table[-1] = stand_in
            if encoded.dictionary.null_count:
                table[:-1][np.asarray(encoded.dictionary.is_null())] = stand_in
            codes = pc.fill_null(codes.cast(pa.int64()), pa.scalar(len(table) - 1, pa.int64()))
        parts.append(table[codes.to_numpy(zero_copy_only=False).astype(np.int64, copy=False)])
    return np.concatenate(parts)


def _encode(chunk: Any) -> Any:
    if pa.types.is_string_view(chunk.type):
        chunk = chunk.cast(pa.large_string())
    return chunk.dictionary_encode()


def _lists_to_numpy(name: str, column: ArrowColumn, fill: FillValue | None, where: str, keys: TextKeys) -> Array:
    if column.null_count:
        raise DataError(f"{where}: column {name!r} has {column.null_count:,} null lists, which fill cannot replace")
    flat = pa.chunked_array([c.flatten() for c in column.chunks], type=column.type.value_type)
    if flat.null_count and fill is None:
        raise DataError(f"{where}: column {name!r} has {flat.null_count:,} null values; give fill=")
    values = arrow_to_numpy(name, flat, fill, where, keys)
    return values.reshape(len(column), column.type.list_size, *values.shape[1:])


# ---- one NumPy array -> NumPy -------------------------------------------------------------------------------


def numpy_to_batch(name: str, values: Array, where: str, keys: TextKeys | None = None) -> Array:
    """An array of any type, first axis = rows, by the same rules; not copied where it already fits."""
    kind = values.dtype.kind
    if kind in "biuf":
        if kind == "u" and values.dtype.itemsize == 8 and values.size:
            _check_uint64(name, int(values.max()), where)
        return values.astype(np.int64 if kind in "iu" else np.float32, copy=False)
    if kind in "mM":
        return values.astype(np.int64)
    if kind in "US" or (kind == "O" and values.size and all(isinstance(v, str | bytes) for v in values.flat)):
        distinct, codes = np.unique(values, return_inverse=True)
        return (keys or TextKeys()).of(distinct.tolist())[codes].reshape(values.shape)
    raise DataError(f"{where}: column {name!r} has NumPy type {values.dtype}, which has no rule")


def stack(groups: Iterable[Group], columns: Mapping[str, Array], text: Iterable[str], where: str) -> Batch:
    """Build a batch (or a whole source held in memory) from single columns.

    A stacked group is int64 if all of its columns are, else float32; text in a float group is an error, for its
    keys would be rounded.
    """
    texts = set(text)
    out: Batch = {}
    for group in groups:
        parts = [columns[name] for name in group.names]
        for name, part in zip(group.names, parts, strict=True):
            _check_dtype(group, name, part, name in texts, where)
        if not group.stacked:
            out[group.key] = parts[0].astype(group.dtype or parts[0].dtype, copy=False)
            continue
        floats = [name for name, part in zip(group.names, parts, strict=True) if part.dtype == np.float32]
        words = [name for name in group.names if name in texts]
        if floats and words:
            raise DataError(
                f"{where}: group {group.key!r} mixes text column {words[0]!r} with float column {floats[0]!r};"
                " put them in two groups"
            )
        for name, part in zip(group.names, parts, strict=True):
            if part.ndim > 2:
                raise DataError(f"{where}: column {name!r} of group {group.key!r} has {part.ndim} axes, at most 2 fit")
        width = sum(1 if part.ndim == 1 else part.shape[1] for part in parts)
        block = np.empty((len(parts[0]), width), group.dtype or (np.float32 if floats else np.int64))
        at = 0
        for part in parts:
            step = 1 if part.ndim == 1 else part.shape[1]
            block[:, at : at + step] = part[:, None] if part.ndim == 1 else part
            at += step
        out[group.key] = block
    return out


def _check_dtype(group: Group, name: str, part: Array, text: bool, where: str) -> None:
    if group.dtype == "int64" and part.dtype != np.int64:
        raise DataError(f"{where}: column {name!r} of {group.key!r} holds floats, where int64 was asked for")
    if group.dtype == "float32" and text:
        raise DataError(f"{where}: column {name!r} of {group.key!r} holds text, where float32 was asked for")


def schema_of(batch: Mapping[str, Array]) -> dict[str, str]:
    """``{"cat": "int64[26]", "label": "float32"}``: what a row is, by key of the batch."""
    return {
        key: str(array.dtype) + (f"[{','.join(map(str, array.shape[1:]))}]" if array.ndim > 1 else "")
        for key, array in batch.items()
    }


def one_line(error: BaseException) -> str:
    """The first line of a library's message."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
