"""Columns as the file or array has them: a batch has the type that ``torch.from_numpy`` gives the column.

| in the file | in the batch |
| --- | --- |
| integers, floats, booleans, complex numbers | the same type: int8 is int8, float64 is float64 |
| dates, times, timestamps, durations | int64, in the unit of the file |
| decimals of at most 15 digits | float64 |
| text, binary, categories of text | int64 keys: ``text_key``, a hash that never changes; or a list of str |
| fixed-size lists | [rows, length] of the above |

``dtypes`` says where another type is wanted, ``"str"`` for text as it is. Nulls are an error unless ``fill`` says what
stands for them (one value, or one per column); NaN is not null.
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
Dtypes = Mapping[str, Any] | str | None
"""Batch key -> the type wanted: a number's, such as ``"float32"``; ``"hash"`` or ``"str"`` for text. A type alone is
wanted of every column of floats."""

NUMBERS: Final = (
    *("bool", "uint8", "uint16", "uint32", "uint64", "int8", "int16", "int32", "int64"),
    *("float16", "float32", "float64", "complex64", "complex128"),
)
"""The types that NumPy and torch both have."""
HASH, STR = "hash", "str"
_DIGITS_MAX: Final = 15  # decimal digits that a float64 holds exactly


def text_key(value: str | bytes) -> int:
    """Return the key in ``[0, 2**63)`` of a text: blake2b of its UTF-8 bytes, the same in every process and version."""
    data = value.encode("utf-8", "surrogatepass") if isinstance(value, str) else value
    return int.from_bytes(hashlib.blake2b(data, digest_size=8).digest(), "little") >> 1


class ColumnGroup(msgspec.Struct, frozen=True):
    """Is one entry of a batch: ``names`` stacked as [rows, len(names)], or one column alone as [rows].

    ``dtype``: the type demanded, or an empty string. ``floats``: the type demanded should it be one of floats.
    """

    key: str
    names: tuple[str, ...]
    stacked: bool
    dtype: str = ""
    floats: str = ""


def parse_columns(
    columns: ColumnsLike, available: Iterable[str], where: str, dtypes: Dtypes = None
) -> list[ColumnGroup]:
    """Return what a batch holds: all columns, those named, or ``{"dense": ["a", "b"], "label": "y"}``.

    DataError for a column that is not there, with the nearest name.
    """
    names = list(available)
    groups: list[ColumnGroup] = []
    if columns is None:
        groups = [ColumnGroup(n, (n,), False) for n in names]
    elif isinstance(columns, Mapping):
        for key, value in columns.items():
            if isinstance(value, str):
                groups.append(ColumnGroup(key, (value,), False))
            else:
                groups.append(ColumnGroup(key, tuple(value), True))
    elif isinstance(columns, str):
        groups = [ColumnGroup(columns, (columns,), False)]
    else:
        groups = [ColumnGroup(n, (n,), False) for n in columns]
    if not groups or any(not g.names for g in groups):
        raise DataError(f"{where}: no columns asked for")
    known = set(names)
    for group in groups:
        for name in group.names:
            if name not in known:
                raise missing_column(name, names, where)
    if isinstance(dtypes, Mapping):
        keys = [group.key for group in groups]
        wish = {key: dtype_name(key, dtype, where) for key, dtype in dtypes.items()}
        for key in wish:
            if key not in keys:
                raise DataError(f"{where}: dtypes names {key!r}, but a batch has {', '.join(keys)}")
        return [msgspec.structs.replace(g, dtype=wish.get(g.key, "")) for g in groups]
    if dtypes is not None:
        floats = dtype_name("", dtypes, where)
        if np.dtype(floats if floats in NUMBERS else "str").kind != "f":
            raise DataError(f"{where}: dtypes={dtypes!r}: one type alone is of floats, such as 'float32'; else a dict")
        return [msgspec.structs.replace(g, floats=floats) for g in groups]
    return groups


def dtype_name(key: str, dtype: Any, where: str) -> str:
    """Return ``dtype`` (a name, or a type of NumPy or torch) as one of ``NUMBERS``, "hash" or "str"."""
    name = str(dtype).removeprefix("torch.")
    if name not in (*NUMBERS, HASH, STR):
        try:
            name = np.dtype(dtype).name
        except TypeError:
            name = ""
    if name not in (*NUMBERS, HASH, STR):
        raise DataError(f"{where}: dtypes[{key!r}]={dtype!r}: expected one of {', '.join(NUMBERS)}, 'hash' or 'str'")
    return name


def missing_column(name: str, names: Sequence[str], where: str) -> DataError:
    near = difflib.get_close_matches(str(name), names, 1)
    listed = ", ".join(map(str, names[:12])) + (", ..." if len(names) > 12 else "")
    hint = f"did you mean {near[0]!r}?" if near else f"it has {listed}"
    return DataError(f"{where}: no column {name!r}; {hint}")


def wanted(groups: Iterable[ColumnGroup]) -> list[str]:
    """Return the names that the groups need, each once, in order."""
    return list(dict.fromkeys(name for group in groups for name in group.names))


def text_mode(groups: Iterable[ColumnGroup], name: str, where: str) -> str:
    """Return what becomes of column ``name`` if it is text: "hash" or "str"."""
    asked = {group.dtype == STR for group in groups if name in group.names}
    if len(asked) > 1:
        raise DataError(f"{where}: column {name!r} is asked for as 'str' and as keys; ask for one of them")
    return STR if True in asked else HASH


def hashed_unasked(groups: Iterable[ColumnGroup], text: Iterable[str]) -> tuple[str, ...]:
    """Return the text columns whose keys a batch has although nobody asked for keys."""
    texts = set(text)
    return tuple(dict.fromkeys(n for g in groups if not g.dtype for n in g.names if n in texts))


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
    """Return the (dtype, values a row) that a column of Arrow type ``t`` becomes; None if there is no rule for it."""
    if pa.types.is_dictionary(t):
        return batch_dtype(t.value_type)
    if pa.types.is_fixed_size_list(t):
        inner = batch_dtype(t.value_type)
        return None if inner is None or is_text(t.value_type) else (inner[0], inner[1] * t.list_size)
    if pa.types.is_temporal(t) or is_text(t):
        return np.dtype(np.int64), 1
    if pa.types.is_decimal(t) or pa.types.is_null(t):
        return np.dtype(np.float64), 1
    if pa.types.is_integer(t) or pa.types.is_floating(t) or pa.types.is_boolean(t):
        return np.dtype(t.to_pandas_dtype()), 1
    return None


def no_rule(name: str, t: pa.DataType, where: str) -> DataError:
    """Return the error for a column of a type that no batch has."""
    way = "leave it out with columns="
    if pa.types.is_list(t) or pa.types.is_large_list(t):
        way = (
            "its rows may differ in length: read the file in a map-style dataset and give job.loader a collate_fn= "
            "that pads or packs, or store lists of one fixed size, or leave it out with columns="
        )
    return DataError(f"{where}: column {name!r} has type {t}, which has no rule; {way}")


def arrow_to_numpy(
    name: str, column: ArrowColumn, fill: FillValue | None, where: str, keys: TextKeys, text: str = HASH
) -> Array:
    """Return one column, [rows] or [rows, length]; contiguous, owned by nobody else. ``text``: "hash" or "str"."""
    t = column.type
    if pa.types.is_dictionary(t) and not is_text(t.value_type):
        column = column.cast(t.value_type)
        t = column.type
    rule = batch_dtype(t)
    if rule is None:
        raise no_rule(name, t, where)
    nulls = column.null_count
    if nulls and fill is None:
        raise DataError(
            f"{where}: column {name!r} has {nulls:,} null values; say what stands for them, such as fill=0"
            f" or fill={{{name!r}: 0}}"
        )
    if is_text(t) or pa.types.is_dictionary(t):
        if text == STR:
            return _text_as_it_is(name, column, fill, where)
        return _text_to_numpy(name, column, fill, where, keys)
    if pa.types.is_fixed_size_list(t):
        return _lists_to_numpy(name, column, fill, where, keys)
    if pa.types.is_null(t):
        number = _number(name, fill, where)
        return np.full(len(column), number, np.int64 if isinstance(number, int) else np.float64)
    try:
        if pa.types.is_temporal(t):
            column = column.cast(pa.int32() if t.bit_width == 32 else pa.int64()).cast(pa.int64())
        elif pa.types.is_decimal(t):
            if t.precision > _DIGITS_MAX:
                _check_digits(name, column, where)
            column = column.cast(pa.float64())
        if nulls:
            value = _number(name, fill, where)
            if pa.types.is_integer(column.type) and value != int(value):
                raise DataError(f"{where}: fill={value!r} for integer column {name!r}: expected a whole number")
            if pa.types.is_boolean(column.type) and value not in (0, 1):
                raise DataError(f"{where}: fill={value!r} for column {name!r} of booleans: expected 0 or 1")
            number_type = pa.float64() if pa.types.is_float16(column.type) else column.type
            column = pc.fill_null(column, pa.scalar(value).cast(number_type).cast(column.type))
    except pa.ArrowInvalid as error:
        raise DataError(f"{where}: column {name!r}: {one_line(error)}") from None
    return np.ascontiguousarray(column.to_numpy()).astype(rule[0], copy=False)


def _check_digits(name: str, column: ArrowColumn, where: str) -> None:
    longest = max((len(v.as_tuple().digits) for v in pc.unique(column).to_pylist() if v is not None), default=0)
    if longest > _DIGITS_MAX:
        raise DataError(
            f"{where}: column {name!r} has decimals of {longest} digits, and a float64 holds {_DIGITS_MAX}: store it "
            "as "
            "text, as integers, or as float64 if rounding is meant"
        )


def _number(name: str, fill: FillValue | None, where: str) -> float | int:
    if isinstance(fill, str) or fill is None:
        raise DataError(f"{where}: fill={fill!r} for column {name!r}, which holds numbers: expected a number")
    return fill


def _text_as_it_is(name: str, column: ArrowColumn, fill: FillValue | None, where: str) -> Array:
    if column.null_count and not isinstance(fill, str):
        raise DataError(f"{where}: fill={fill!r} for column {name!r}, which holds text: expected text")
    out = np.empty(len(column), object)
    out[:] = [fill if value is None else value for value in column.to_pylist()]
    return out


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


def to_array(name: str, values: Any, where: str) -> Array:
    """Return ``values`` (an array, a tensor on the CPU, a list) as an array."""
    try:
        array = np.asarray(values)
    except (ValueError, TypeError, RuntimeError) as error:
        ragged = "inhomogeneous" in str(error)
        way = "give a map-style dataset and a collate_fn= that pads or packs" if ragged else "give a NumPy array"
        raise DataError(f"{where}: column {name!r} is no array of rows ({one_line(error)}); {way}") from None
    return array


def holds_text(values: Array) -> bool:
    kind = values.dtype.kind
    return kind in "US" or (kind == "O" and values.size > 0 and all(isinstance(v, str | bytes) for v in values.flat))


def numpy_to_batch(name: str, values: Array, where: str, keys: TextKeys | None = None, text: str = HASH) -> Array:
    """Return an array of any type, first axis = rows, by the same rules; not copied where it already fits."""
    kind = values.dtype.kind
    if kind in "biufc" and values.dtype.name in NUMBERS:
        return values.astype(values.dtype.newbyteorder("="), copy=False)
    if kind in "mM":
        if np.isnat(values).any():
            raise DataError(f"{where}: column {name!r} has {np.isnat(values).sum():,} times that are none (NaT)")
        return values.astype(np.int64)
    if holds_text(values):
        if text == STR:
            return values.astype(object)
        distinct, codes = np.unique(values, return_inverse=True)
        return (keys or TextKeys()).of(distinct.tolist())[codes].reshape(values.shape)
    way = ""
    if kind == "O":
        way = "; rows of different lengths need a map-style dataset and a collate_fn= that pads or packs"
    raise DataError(f"{where}: column {name!r} has NumPy type {values.dtype}, which has no rule{way}")


def stack(groups: Iterable[ColumnGroup], columns: Mapping[str, Array], text: Iterable[str], where: str) -> Batch:
    """Build a batch (or a whole source held in memory) from single columns.

    A stacked group has the type that ``torch.cat`` gives its columns; text in a group of floats is an error, for its
    keys would be rounded.
    """
    texts = set(text)
    out: Batch = {}
    for group in groups:
        parts = [columns[name] for name in group.names]
        common = parts[0].dtype if len(parts) == 1 else _common(group, parts, texts, where)
        wanted_type = group.dtype if group.dtype in NUMBERS else ""
        if not wanted_type and group.floats and common.kind == "f":
            wanted_type = group.floats
        target = np.dtype(wanted_type) if wanted_type else common
        for name, part in zip(group.names, parts, strict=True):
            _check_dtype(group, name, part, name in texts, target, where)
        if not group.stacked:
            out[group.key] = parts[0].astype(target, copy=False)
            continue
        for name, part in zip(group.names, parts, strict=True):
            if part.ndim > 2:
                raise DataError(f"{where}: column {name!r} of group {group.key!r} has {part.ndim} axes, at most 2 fit")
        width = sum(1 if part.ndim == 1 else part.shape[1] for part in parts)
        block = np.empty((len(parts[0]), width), target)
        at = 0
        for part in parts:
            step = 1 if part.ndim == 1 else part.shape[1]
            block[:, at : at + step] = part[:, None] if part.ndim == 1 else part
            at += step
        out[group.key] = block
    return out


def _common(group: ColumnGroup, parts: Sequence[Array], texts: set[str], where: str) -> np.dtype[Any]:
    """Return the type that holds all columns of a group, as ``torch.cat`` chooses it: the widest of the highest
    kind."""
    if any(part.dtype == object for part in parts):
        raise DataError(
            f"{where}: group {group.key!r} has text as it is, which does not stack: give it a key of its own"
        )
    words = [name for name in group.names if name in texts]
    for name, part in zip(group.names, parts, strict=True):
        if words and part.dtype.kind in "fc":
            raise DataError(
                f"{where}: group {group.key!r} mixes text column {words[0]!r} with float column {name!r};"
                " put them in two groups"
            )
    kinds = ["c"] if any(p.dtype.kind == "c" for p in parts) else []
    kinds += ["f"] if any(p.dtype.kind == "f" for p in parts) else []
    found = [p.dtype for p in parts if not kinds or p.dtype.kind in kinds]
    common = np.result_type(*found)
    if not kinds and common.kind == "f":  # int64 and uint64: NumPy would round both
        raise DataError(f"{where}: group {group.key!r} mixes uint64 with signed integers; say its type with dtypes=")
    return common


def _check_dtype(group: ColumnGroup, name: str, part: Array, text: bool, target: np.dtype[Any], where: str) -> None:
    what = f"{where}: column {name!r} of {group.key!r}"
    if text and group.dtype not in ("", HASH, STR, "int64"):
        raise DataError(f"{what} holds text, where {target} was asked for; 'hash' gives its keys, 'str' the text")
    if group.dtype in (HASH, STR) and not text and not (group.dtype == HASH and part.dtype.kind in "iu"):
        raise DataError(f"{what} holds {part.dtype}, where {group.dtype!r} was asked for, which is for text")
    check_cast(part, target, what)


def check_cast(part: Array, target: np.dtype[Any], what: str) -> None:
    """Raise DataError where values of ``part`` would become others in type ``target``, rounding apart."""
    have, want = part.dtype.kind, target.kind
    if part.dtype == target or have == "O":
        return
    if (have == "c" and want != "c") or (have == "f" and want in "biu"):
        raise DataError(f"{what} holds {'floats' if have == 'f' else 'complex numbers'}, where {target} was asked for")
    if want in "biu" and part.size:
        least, largest = (0, 1) if want == "b" else (np.iinfo(target).min, np.iinfo(target).max)
        low, high = int(part.min()), int(part.max())
        if low < least or high > largest:
            raise DataError(f"{what} holds {low if low < least else high}, outside of {target}")


def schema_of(batch: Mapping[str, Array]) -> dict[str, str]:
    """Return what a row is, by key of the batch: ``{"cat": "int64[26]", "label": "float32"}``."""
    return {
        key: ("str" if array.dtype == object else str(array.dtype))
        + (f"[{','.join(map(str, array.shape[1:]))}]" if array.ndim > 1 else "")
        for key, array in batch.items()
    }


def one_line(error: BaseException) -> str:
    """Return the first line of a library's message."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
