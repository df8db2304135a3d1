"""Reading samples: every kind of source gives the same rows, and every mistake is one clear line."""

from __future__ import annotations

import csv
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from torch.utils.data import TensorDataset

from everstep.data.arrow import ParquetSource
from everstep.data.columns import text_key
from everstep.data.loader import Loader
from everstep.data.source import ArraySource, DataSource, open_source
from everstep.errors import DataError

N = 1000
COLUMNS = {"dense": ["x", "z"], "cat": ["user", "city"], "label": "y"}


def table(n: int = N) -> pa.Table:
    rng = np.random.default_rng(0)
    return pa.table(
        {
            "user": rng.integers(-5, 2**60, n),
            "city": pa.array([f"città {i % 17}" for i in range(n)]),
            "x": rng.random(n),
            "z": rng.random(n).astype(np.float32),
            "y": pa.array((np.arange(n) % 3 == 0).tolist()),
        }
    )


def write(kind: str, folder: Path) -> Any:
    t = table()
    match kind:
        case "parquet":
            pq.write_table(t, folder / "t.parquet", row_group_size=137)
            return folder / "t.parquet"
        case "parquet directory":
            for i in range(3):
                pq.write_table(t.slice(i * 400, 400), folder / f"part-{i}.parquet", row_group_size=137)
            (folder / "_SUCCESS").touch()
            return str(folder)
        case "glob":
            write("parquet directory", folder)
            return str(folder / "part-*.parquet")
        case "list":
            write("parquet directory", folder)
            return [folder / f"part-{i}.parquet" for i in range(3)]
        case "arrow":
            with pa.OSFile(str(folder / "t.arrow"), "wb") as file, pa.ipc.new_file(file, t.schema) as writer:
                writer.write_table(t, 300)
            return folder / "t.arrow"
        case "stream":
            with pa.OSFile(str(folder / "t.arrow"), "wb") as file, pa.ipc.new_stream(file, t.schema) as writer:
                writer.write_table(t, 300)
            return folder / "t.arrow"
        case "csv":
            with (folder / "t.csv").open("w", newline="") as out:
                writer_ = csv.writer(out)
                writer_.writerow(t.column_names)
                writer_.writerows(zip(*t.to_pydict().values(), strict=True))
            return folder / "t.csv"
        case "npz":
            arrays = {c: t[c].to_numpy() for c in t.column_names if c != "city"}
            np.savez(folder / "t.npz", **arrays, city=np.array(t["city"].to_pylist()))
            return folder / "t.npz"
        case "arrays":
            return {c: t[c].to_numpy() for c in t.column_names}
        case "dictionary":
            return t.set_column(1, "city", t["city"].dictionary_encode())
        case "table":
            return t
    raise AssertionError(kind)


KINDS = [
    "parquet",
    "parquet directory",
    "glob",
    "list",
    "arrow",
    "stream",
    "csv",
    "npz",
    "arrays",
    "dictionary",
    "table",
]


def expected(rows: np.ndarray[Any, Any]) -> dict[str, np.ndarray[Any, Any]]:
    t = table()
    cat = np.stack([t["user"].to_numpy(), np.array([text_key(c) for c in t["city"].to_pylist()])], 1)
    dense = np.stack([t["x"].to_numpy(), t["z"].to_numpy()], 1)  # float64 and float32: torch.cat gives float64
    label = np.array(t["y"].to_pylist())
    return {"dense": dense[rows], "cat": cat[rows], "label": label[rows]}


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_reads_the_same_rows(kind: str, tmp_path: Path) -> None:
    source = open_source(write(kind, tmp_path), COLUMNS)
    assert isinstance(source, DataSource) and len(source) == N
    assert source.schema == {"dense": "float64[2]", "cat": "int64[2]", "label": "bool"}
    assert source.hashed == ("city",)
    rows = np.random.default_rng(1).integers(0, N, 300)
    got, want = source.read(rows), expected(rows)
    for key, array in want.items():
        assert got[key].dtype == array.dtype and got[key].flags.c_contiguous
        np.testing.assert_array_equal(got[key], array)


def test_big_parquet_is_read_by_row_group(tmp_path: Path) -> None:
    source = open_source(write("parquet directory", tmp_path), COLUMNS, memory_bytes=100)
    assert isinstance(source, ParquetSource) and source.chunk == 137 and len(source) == N
    assert source.fingerprint() == open_source(str(tmp_path), COLUMNS).fingerprint()
    for rows in (np.arange(N), np.random.default_rng(2).permutation(N), np.array([999, 0, 999]), np.empty(0, np.int64)):
        got = source.read(rows)
        for key, array in expected(rows).items():
            np.testing.assert_array_equal(got[key], array)


def test_big_parquet_keeps_few_row_groups(tmp_path: Path) -> None:
    pq.write_table(table(), tmp_path / "t.parquet", row_group_size=10)
    source = open_source(tmp_path / "t.parquet", COLUMNS, memory_bytes=0)
    assert isinstance(source, ParquetSource)
    source.read(np.arange(N))
    assert 1 <= len(source._cache) < 30 < len(source._places)


def test_fingerprints_tell_data_apart(tmp_path: Path) -> None:
    a = open_source({"x": np.arange(10)}).fingerprint()
    assert a == open_source({"x": np.arange(10)}).fingerprint()
    assert a != open_source({"x": np.arange(11)}).fingerprint()
    assert a != open_source({"x": np.arange(10) + 1}).fingerprint()
    path = write("parquet", tmp_path)
    assert open_source(path, ["x"]).fingerprint() != open_source(path, ["z"]).fingerprint()


def test_tuple_of_arrays() -> None:
    source = open_source((np.ones((4, 2)), np.arange(4)), {"x": "0", "y": "1"})
    assert source.schema == {"x": "float64[2]", "y": "int64"}


def test_npy_is_not_read_whole(tmp_path: Path) -> None:
    np.save(tmp_path / "x.npy", np.arange(12.0, dtype=np.float32).reshape(6, 2))
    source = open_source(tmp_path / "x.npy")
    assert isinstance(source, ArraySource) and isinstance(source._arrays["0"].base, np.memmap)
    assert source.read(np.array([5]))["0"].tolist() == [[10, 11]]


# ---- types and nulls -----------------------------------------------------------------------------------------


def one(column: pa.Array, **options: Any) -> np.ndarray[Any, Any]:
    return open_source(pa.table({"c": column}), **options).read(np.arange(len(column)))["c"]


def test_types() -> None:
    import datetime
    import decimal

    assert one(pa.array([1, 2**64 - 1], pa.uint64())).tolist() == [1, 2**64 - 1]
    assert one(pa.array([datetime.date(1970, 1, 3)])).tolist() == [2]
    assert one(pa.array([datetime.datetime(1970, 1, 1, 0, 0, 1)], pa.timestamp("ms"))).tolist() == [1000]
    assert one(pa.array([decimal.Decimal("1.5")])).tolist() == [1.5]
    with pytest.raises(DataError, match="decimals of 17 digits"):
        one(pa.array([decimal.Decimal("12345678901234567")]))
    assert one(pa.array([decimal.Decimal("2")], pa.decimal128(30, 2))).tolist() == [2.0]
    assert one(pa.array([[1, 2], [3, 4]], pa.list_(pa.int32(), 2))).tolist() == [[1, 2], [3, 4]]
    assert one(pa.array([b"ab"])).tolist() == [text_key("ab")]
    assert one(pa.array([1, 2, 1]).dictionary_encode()).tolist() == [1, 2, 1]
    assert np.isnan(one(pa.array([float("nan")]))).all()  # not null


def test_text_keys_never_change() -> None:
    assert text_key("JFK") == 97611693156400734
    assert 0 <= text_key("") < 2**63


@pytest.mark.parametrize(
    ("column", "fill", "want"),
    [
        (pa.array([1, None, 3]), 0, [1, 0, 3]),
        (pa.array([1.5, None]), {"c": -1}, [1.5, -1]),
        (pa.array(["a", None]), "b", [text_key("a"), text_key("b")]),
        (pa.array(["a", None]).dictionary_encode(), 7, [text_key("a"), 7]),
        (pa.array([None, None], pa.null()), 2, [2, 2]),
        (pa.array([True, None]), 0, [1, 0]),
        (pa.array([[1, None]], pa.list_(pa.int32(), 2)), 9, [[1, 9]]),
    ],
)
def test_nulls_are_filled(column: pa.Array, fill: Any, want: list[Any]) -> None:
    assert one(column, fill=fill).tolist() == want
    with pytest.raises(DataError, match="null") as error:
        one(column)
    assert "'c'" in str(error.value) and "fill=" in str(error.value)


def test_dtypes() -> None:
    t = pa.table({"a": [1, 2], "b": [3, 4], "f": [0.5, 1.5], "s": ["x", "y"], "big": [300, -1]})
    got = open_source(t, {"d": ["a", "b"], "c": "a"}, dtypes={"d": "float32"})
    assert got.schema == {"d": "float32[2]", "c": "int64"}
    for columns, dtypes, words in [
        ({"c": ["a", "f"]}, {"c": "int64"}, "'f' of 'c' holds floats"),
        ({"c": "s"}, {"c": "float32"}, "'s' of 'c' holds text"),
        ({"c": "a"}, {"d": "int64"}, "dtypes names 'd'"),
        ({"c": "a"}, {"c": "int31"}, "dtypes\\['c'\\]='int31': expected one of bool, uint8"),
        ({"c": "f"}, {"c": "str"}, "'f' of 'c' holds float64, where 'str'"),
        ({"c": "big"}, {"c": "int8"}, "'big' of 'c' holds 300, outside of int8"),
        ({"c": "big"}, {"c": "bool"}, "outside of bool"),
        ({"c": "s", "d": "s"}, {"c": "str", "d": "hash"}, "'s' is asked for as 'str' and as keys"),
        ({"c": ["s", "a"]}, {"c": "str"}, "does not stack"),
        (["a"], "int64", "one type alone is of floats"),
        ({"c": ["s", "f"]}, None, "mixes text column 's' with float column 'f'"),
    ]:
        with pytest.raises(DataError, match=words):
            open_source(t, columns, dtypes=dtypes)


# ---- mistakes ------------------------------------------------------------------------------------------------


def bad(spec: Any, *words: str, **options: Any) -> None:
    with pytest.raises(DataError) as error:
        open_source(spec, **options)
    text = str(error.value)
    assert "\n" not in text and len(text) < 400, text
    for word in words:
        assert word in text, text


def test_missing_things(tmp_path: Path) -> None:
    bad(tmp_path / "no.parquet", "no.parquet", "does not exist")
    bad(str(tmp_path / "*.parquet"), "no file matches")
    bad(tmp_path, "has no data files")
    bad([], "empty list")
    bad(42, "int")
    bad(iter([1]), "list_iterator")
    (tmp_path / "x.bin").write_bytes(b"1")
    bad(tmp_path / "x.bin", "unknown kind of file")


@pytest.mark.parametrize("suffix", ["parquet", "arrow", "csv", "npy", "npz"])
def test_empty_and_broken_files(suffix: str, tmp_path: Path) -> None:
    path = tmp_path / f"x.{suffix}"
    path.touch()
    bad(path, f"x.{suffix}", "is empty")
    path.write_bytes(b"\x00garbage, not a file of this kind\xff" * 20)
    if suffix != "csv":
        bad(path, f"x.{suffix}", "no readable")


def test_no_rows(tmp_path: Path) -> None:
    pq.write_table(table(0), tmp_path / "t.parquet")
    bad(tmp_path / "t.parquet", "no rows")
    (tmp_path / "t.csv").write_text("a,b\n")
    bad(tmp_path / "t.csv", "no rows")
    bad({"x": np.empty(0)}, "no rows")
    bad(TensorDataset(torch.empty(0)), "is empty")


def test_ragged_csv(tmp_path: Path) -> None:
    (tmp_path / "t.csv").write_text("a,b\n1,2\n3\n")
    bad(tmp_path / "t.csv", "t.csv", "Expected 2 columns, got 1")


@pytest.mark.parametrize("kind", ["parquet", "csv", "npz", "arrays", "table"])
def test_a_column_that_is_not_there(kind: str, tmp_path: Path) -> None:
    bad(write(kind, tmp_path), "no column 'usr'", "did you mean 'user'", columns={"cat": ["usr"]})
    bad(write(kind, tmp_path), "no column 'qqqq'", "it has user, ", columns=["qqqq"])


def test_ids_out_of_int64(tmp_path: Path) -> None:
    huge = [1, 2**63]
    pq.write_table(pa.table({"id": pa.array(huge, pa.uint64())}), tmp_path / "t.parquet")
    assert open_source(tmp_path / "t.parquet").schema == {"id": "uint64"}
    bad(tmp_path / "t.parquet", "'id'", str(2**63), "int64", dtypes={"id": "int64"})
    bad({"id": np.array(huge, np.uint64)}, "'id'", str(2**63), dtypes={"id": "int64"})
    bad({"id": np.array(huge, np.uint64), "x": np.arange(2)}, "mixes uint64", columns={"g": ["id", "x"]})
    (tmp_path / "t.csv").write_text(f"id\n{2**63}\n1\n")
    bad(tmp_path / "t.csv", "'id'", "outside of int64")
    (tmp_path / "t.csv").write_text("v\n1e30\n0.5\n")
    assert open_source(tmp_path / "t.csv").schema == {"v": "float64"}


def test_pickles_stay_closed(tmp_path: Path) -> None:
    np.save(tmp_path / "x.npy", np.array([{"a": 1}], dtype=object), allow_pickle=True)
    bad(tmp_path / "x.npy", "x.npy")


def test_unusable_types(tmp_path: Path) -> None:
    bad(pa.table({"c": pa.array([[1], [2, 3]])}), "'c'", "list<item: int64>", "collate_fn=")
    pq.write_table(pa.table({"c": pa.array([[1], [2, 3]])}), tmp_path / "t.parquet")
    bad(tmp_path / "t.parquet", "'c'", "leave it out")
    bad({"c": np.array([object()])}, "'c'", "object")
    bad({"c": np.array([1], np.longdouble)}, "'c'", "no rule")
    bad({"c": [[1], [2, 3]]}, "'c'", "collate_fn=")
    bad({"c": np.array([[1], [2, 3]], dtype=object)}, "'c'", "collate_fn=")
    bad({"c": torch.ones(3, dtype=torch.bfloat16)}, "'c'")
    bad({"c": np.array(["2020-01-01", "NaT"], "datetime64[D]")}, "'c'", "NaT")
    bad({"a": np.arange(3), "b": np.arange(4)}, "differ in length", "a 3, b 4")
    bad({"a": np.array(3)}, "one value")


def test_files_that_do_not_fit_together(tmp_path: Path) -> None:
    pq.write_table(pa.table({"a": [1], "b": [2]}), tmp_path / "1.parquet")
    pq.write_table(pa.table({"a": [1.5], "b": [2]}), tmp_path / "2.parquet")
    bad(tmp_path, "'a'", "floats in another")
    pq.write_table(pa.table({"a": [1]}), tmp_path / "2.parquet")
    bad(tmp_path, "no column 'b'", "2.parquet")
    (tmp_path / "3.csv").write_text("a\n1\n")
    bad(tmp_path, "several kinds")


# ---- nothing is changed on the way ---------------------------------------------------------------------------

NUMBERS = [
    *("bool", "uint8", "uint16", "uint32", "uint64", "int8", "int16", "int32", "int64"),
    *("float16", "float32", "float64", "complex64", "complex128"),
]


def values(dtype: str) -> np.ndarray[Any, Any]:
    """Values at both ends of a type, and some that another type would round."""
    t = np.dtype(dtype)
    if t.kind == "b":
        return np.array([True, False, True, True])
    if t.kind in "iu":
        info = np.iinfo(t)
        return np.array([info.min, info.max, 0, 1], t)
    return np.array([1 / 3, np.finfo(t).max, np.finfo(t).tiny, -0.0], t)


@pytest.mark.parametrize("dtype", NUMBERS)
def test_arrays_come_as_torch_has_them(dtype: str) -> None:
    plain = values(dtype)
    for given in (plain, np.stack([plain, plain], 1), plain.astype(plain.dtype.newbyteorder(">"))):
        got = Loader({"x": given}, 2, shuffle=False).read(0, 0, 4)["x"]
        want = torch.from_numpy(given.astype(plain.dtype))
        assert got.dtype == want.dtype and got.numpy().tobytes() == want.numpy().tobytes()


@pytest.mark.parametrize("dtype", [d for d in NUMBERS if not d.startswith("complex")])
@pytest.mark.parametrize("how", ["table", "parquet", "row groups", "two files", "arrow"])
def test_columns_of_files_come_as_torch_has_them(dtype: str, how: str, tmp_path: Path) -> None:
    plain = values(dtype)
    t = pa.table({"x": plain, "y": pa.FixedSizeListArray.from_arrays(pa.array(np.repeat(plain, 2)), 2)})
    options: dict[str, Any] = {}
    given: Any = t
    if how == "arrow":
        with pa.OSFile(str(tmp_path / "t.arrow"), "wb") as file, pa.ipc.new_file(file, t.schema) as writer:
            writer.write_table(t)
        given = tmp_path / "t.arrow"
    elif how != "table":
        parts = 2 if how == "two files" else 1
        for i in range(parts):
            size = 4 // parts
            pq.write_table(t.slice(i * size, size), tmp_path / f"{i}.parquet", row_group_size=2)
        given = str(tmp_path)
        options = {"memory_bytes": 0} if how == "row groups" else {}
    batch = Loader(given, 2, shuffle=False, **options).read(0, 0, 4)
    for key, want in (("x", plain), ("y", np.repeat(plain, 2).reshape(4, 2))):
        tensor = torch.from_numpy(want)
        assert batch[key].dtype == tensor.dtype and batch[key].numpy().tobytes() == want.tobytes()


def test_numbers_of_csv_files_are_exact(tmp_path: Path) -> None:
    (tmp_path / "t.csv").write_text("a,b,c,d\n1,0.1,true,x\n9223372036854775807,1e-300,false,y\n")
    batch = Loader(tmp_path / "t.csv", 2, shuffle=False, dtypes={"d": "str"}).read(0, 0, 2)
    assert batch["a"].dtype == torch.int64 and batch["a"].tolist() == [1, 2**63 - 1]
    assert batch["b"].dtype == torch.float64 and batch["b"].tolist() == [0.1, 1e-300]
    assert batch["c"].dtype == torch.bool and batch["c"].tolist() == [True, False]
    assert batch["d"] == ["x", "y"]


def test_files_of_different_widths_get_the_wider_one(tmp_path: Path) -> None:
    pq.write_table(pa.table({"a": pa.array([1, 2], pa.int8())}), tmp_path / "1.parquet")
    pq.write_table(pa.table({"a": pa.array([300, 2**40])}), tmp_path / "2.parquet")
    for memory in (0, 1 << 20):
        source = open_source(tmp_path, memory_bytes=memory)
        got = source.read(np.arange(4))["a"]
        assert got.dtype == np.int64 and got.tolist() == [1, 2, 300, 2**40], memory


def test_one_type_for_all_floats() -> None:
    t = pa.table({"a": [1, 2], "f": [0.5, 1.5], "g": pa.array([0.5, 1.5], pa.float32()), "s": ["x", "y"]})
    got = open_source(t, {"a": "a", "m": ["a", "f"], "g": "g", "s": "s"}, dtypes="float32").schema
    assert got == {"a": "int64", "m": "float32[2]", "g": "float32", "s": "int64"}


def test_text_as_it_is_and_text_hashed() -> None:
    for given in ({"s": np.array(["b", "a", "b"])}, pa.table({"s": ["b", "a", "b"]})):
        assert open_source(given).hashed == ("s",)
        for asked in ("hash", "int64"):
            source = open_source(given, dtypes={"s": asked})
            assert source.hashed == ()
            assert source.read(np.arange(3))["s"].tolist() == [text_key("b"), text_key("a"), text_key("b")]
        batch = Loader(given, 3, shuffle=False, dtypes={"s": "str"}).read(0, 0, 3)
        assert batch == {"s": ["b", "a", "b"]}
