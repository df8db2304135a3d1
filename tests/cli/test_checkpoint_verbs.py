"""``everstep checkpoint`` on checkpoints of a small store."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from contextlib import redirect_stderr, redirect_stdout
from io import StringIO
from pathlib import Path

import msgspec
import numpy as np
import pyarrow.parquet as pq
import pytest

sys.path.insert(0, str(Path(__file__).parent.parent / "protect"))

from crafted_snapshots import craft, of_bodies
from snapshot_stores import ITEMS, PARTITIONS, checkpoint, new_store, train, writer_of

from everstep.cli.main import main
from everstep.model.table import OptimizerKind, OptimizerSpec, TableSpec
from everstep.native import Store, unique_route
from everstep.protect.manifest import read_manifest, write_manifest
from everstep.storage.places import open_place

DENSE = TableSpec(
    "dense/0/0",
    8,
    OptimizerSpec(OptimizerKind.SGD, 0.1),
    rows=3,
    dense=True,
    parameters=(("net.weight", (4, 3)), ("net.bias", (4,)), ("scale", ())),
)
NUMBERS = np.arange(24, dtype=np.float32)

Ckpt = Callable[..., tuple[int, str, str]]


def run(*arguments: str | Path) -> tuple[int, str, str]:
    """The command in this process: exit code, stdout, stderr."""
    with pytest.MonkeyPatch.context() as patch, StringIO() as out, StringIO() as err:
        patch.setattr(sys, "argv", ["everstep", "checkpoint", *map(str, arguments)])
        with redirect_stdout(out), redirect_stderr(err), pytest.raises(SystemExit) as ended:
            main()
        return int(ended.value.code or 0), out.getvalue(), err.getvalue()


@pytest.fixture(scope="module")
def store() -> Store:
    store = new_store()
    store.declare(DENSE)
    keys, _, _ = unique_route(np.arange(3), PARTITIONS, DENSE.id, np.zeros(PARTITIONS, np.int32))
    store.put_absent(DENSE.id, keys, NUMBERS.reshape(3, 8)[keys])
    return store


@pytest.fixture(scope="module")
def where(store: Store, tmp_path_factory: pytest.TempPathFactory) -> Path:
    where = tmp_path_factory.mktemp("checkpoints")
    writer = writer_of(store)
    for n in (1, 2):
        train(store, n - 1, n, keys=300)
        checkpoint(writer, where, n, since=n - 1, at=1000.0 * n)
    return where


def test_ls(where: Path) -> None:
    code, out, _ = run("ls", where)
    assert code == 0
    lines = out.splitlines()
    assert lines[0].split()[:3] == ["checkpoint", "taken", "kind"]
    assert [line.split()[0] for line in lines[1:]] == ["1", "2"]
    assert " full " in lines[1] and " incremental " in lines[2] and lines[2].endswith("whole")
    code, out, _ = run("ls", where, "--json")
    assert [one["checkpoint"] for one in json.loads(out)] == [1, 2]


def test_show(where: Path) -> None:
    code, out, _ = run("show", where)
    assert code == 0 and out.startswith("checkpoint 2 of job 'toy'")
    assert "table 'items': dim 4, adagrad lr 0.1" in out and "table 'dense/0/0': dense, dim 8" in out
    code, out, _ = run("show", where, "--checkpoint", 1, "--json")
    assert json.loads(out)["checkpoint"] == 1
    code, _, err = run("show", where, "--checkpoint", 9)
    assert code == 2 and "has no checkpoint 9: manifest-000009.json is not there" in err


def test_verify_names_each_offender(where: Path, tmp_path: Path) -> None:
    import shutil

    copy = tmp_path / "copy"
    shutil.copytree(where, copy)
    code, out, _ = run("verify", copy)
    assert code == 0 and "checkpoint 1: intact, 4 files" in out and "checkpoint 2: intact, 8 files" in out
    manifest = read_manifest(open_place(copy), 2)
    first, second = manifest.snapshots[0].files[1], manifest.snapshots[3].files[1]
    (copy / first.path).unlink()
    data = bytearray((copy / second.path).read_bytes())
    data[len(data) // 2] ^= 4
    (copy / second.path).write_bytes(data)
    code, out, err = run("verify", copy)
    assert code == 2 and err.count("\n") == 1
    assert "checkpoint 1: intact" in out and "checkpoint 2: NOT intact" in out
    assert first.path in out and second.path in out and out.count("\n") == 4
    code, out, _ = run("ls", copy)
    assert "1 files missing or cut" in out


def test_export_is_read_without_everstep(where: Path, store: Store, tmp_path: Path) -> None:
    code, _out, err = run("export", where, tmp_path / "out", "--format", "both")
    assert code == 0, err
    assert sorted(p.name for p in (tmp_path / "out").iterdir()) == [
        "dense.safetensors",
        "items.parquet",
        "items.safetensors",
        "users.parquet",
        "users.safetensors",
    ]
    expected = {}
    for partition in range(PARTITIONS):
        slot = 0
        while slot >= 0:
            keys, values, state, slot = store.scan(ITEMS.id, partition, slot, 1000, True)
            expected.update({int(k): (v.tolist(), s.tolist()) for k, v, s in zip(keys, values, state, strict=True)})
    table = pq.read_table(tmp_path / "out" / "items.parquet").to_pydict()
    got = {k: (v, s) for k, v, s in zip(table["key"], table["values"], table["state"], strict=True)}
    assert got == expected and len(got) > 100
    from safetensors.numpy import load_file

    arrays = load_file(tmp_path / "out" / "items.safetensors")
    again = {
        int(k): (v.tolist(), s.tolist())
        for k, v, s in zip(*(arrays[n] for n in ("keys", "values", "state")), strict=False)
    }
    assert again == expected
    state = load_file(tmp_path / "out" / "dense.safetensors")
    assert {n: a.shape for n, a in state.items()} == {"net.weight": (4, 3), "net.bias": (4,), "scale": ()}
    assert np.concatenate([state[n].reshape(-1) for n, _ in DENSE.parameters]).tolist() == NUMBERS[:17].tolist()


def test_export_of_one_table_and_of_none(where: Path, tmp_path: Path) -> None:
    code, _out, _ = run("export", where, tmp_path, "--table", "users", "--checkpoint", 1)
    assert code == 0 and [p.name for p in tmp_path.iterdir()] == ["users.parquet"]
    code, _, err = run("export", where, tmp_path, "--table", "nosuch")
    assert code == 2 and "has no table 'nosuch': there are 'items', 'users', 'dense/0/0'" in err


def test_export_falls_back_to_the_newest_intact_one(where: Path, tmp_path: Path) -> None:
    place = open_place(where)
    broken = msgspec.structs.replace(read_manifest(place, 2), checkpoint=3, snapshots=())
    write_manifest(place, broken)
    try:
        code, _out, err = run("export", where, tmp_path, "--table", "items")
        assert code == 0 and "checkpoint 3 is left out: manifest-000003.json has no snapshot" in err
    finally:
        place.delete("manifest-000003.json")


def test_what_is_no_checkpoint_is_one_line(tmp_path: Path) -> None:
    for verb in (["ls"], ["show"], ["verify"], ["export"]):
        more = [tmp_path / "out"] if verb == ["export"] else []
        code, _, err = run(*verb, tmp_path, *more)
        assert code == 2 and err.count("\n") == 1 and "holds no checkpoint" in err
    code, _, err = run("ls", "nosuch://x")
    assert code == 2 and err.count("\n") == 1
    code, _, err = run("nosuch")
    assert code == 2 and "No such command 'nosuch'" in err
    code, out, _ = run("--help")
    assert code == 0 and "export" in out


def test_compact(where: Path, tmp_path: Path) -> None:
    import shutil

    copy = tmp_path / "copy"
    shutil.copytree(where, copy)
    code, out, err = run("compact", copy)
    assert code == 0 and "checkpoint 2: 8 files are now 4" in out, err
    code, out, _ = run("verify", copy)
    assert code == 0 and "checkpoint 1: intact, 4 files" in out and "checkpoint 2: intact, 4 files" in out
    assert len(list((copy / "images").rglob("*.img"))) == 8, "increments are gone, the base is checkpoint 1's"
    code, out, _ = run("compact", copy)
    assert code == 0 and "4 files are now 4" in out


def test_verify_takes_what_it_reads_as_a_ps_would(where: Path, tmp_path: Path) -> None:
    """Every byte is as the checksums say, and no ps could load it."""
    import shutil

    copy = tmp_path / "copy"
    shutil.copytree(where, copy)
    manifest = read_manifest(open_place(copy), 2)
    craft(copy, manifest, 1, of_bodies)
    code, out, err = run("verify", copy)
    assert code == 2
    assert "1 of" in err
    assert "partition 1: these are not the marks of a partition: a blob of kind 3" in out


def test_old_commands_work_and_say_their_new_names(where: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    code, out, err = run("ls", where)
    with StringIO() as old_out, StringIO() as old_err:
        monkeypatch.setattr(sys, "argv", ["everstep", "ckpt", "ls", str(where)])
        with redirect_stdout(old_out), redirect_stderr(old_err), pytest.raises(SystemExit) as ended:
            main()
        assert (int(ended.value.code or 0), old_out.getvalue()) == (code, out) and err == ""
        assert (
            old_err.getvalue()
            == "everstep: everstep ckpt is now everstep checkpoint; the old name works until everstep 0.2\n"
        )
    code, _, err = run("--base", where)  # as `everstep checkpoint --base RUN_DIR` was, of what is no run directory
    lines = err.splitlines()
    assert code == 2 and "no job.json" in lines[2]
    assert (
        "everstep checkpoint RUN_DIR is now everstep checkpoint take RUN_DIR" in lines[0]
        and "--base is now" in lines[1]
    )
    code, _, err = run("verfy", where)
    assert code == 2 and "verfy" in err and len(err.splitlines()) == 1
