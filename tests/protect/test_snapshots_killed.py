"""A process that takes checkpoints is killed before and after every write, fsync, rename and mkdir that it makes: what
is left loads as the newest one whose manifest was there, or there is none yet."""

from __future__ import annotations

import os
import random
import re
import shutil
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
from snapshot_stores import digests, empty_store, new_store, train

from everstep.errors import CheckpointError
from everstep.protect.manifest import latest_intact
from everstep.protect.restore import load_partition
from everstep.storage.places import open_place

VICTIM = Path(__file__).with_name("image_victim.py")
CALLS = "write,fsync,fdatasync,rename,renameat,renameat2,mkdir,unlink"

pytestmark = pytest.mark.skipif(shutil.which("strace") is None, reason="needs strace")


def strace(where: Path, log: Path, *options: str) -> int:
    command = ["strace", "-f", "-qq", "-o", str(log), "-e", f"trace={CALLS}", *options, sys.executable, str(VICTIM)]
    environment = {**os.environ, "PYTHONDONTWRITEBYTECODE": "1", "OPENBLAS_NUM_THREADS": "1"}
    return subprocess.run([*command, str(where)], env=environment, timeout=120, stderr=subprocess.DEVNULL).returncode


def calls(log: Path) -> Counter[str]:
    return Counter(m[1] for line in log.read_text().splitlines() if (m := re.match(r"\d+ +(\w+)\(", line)))


@pytest.fixture(scope="module")
def expected() -> dict[int, list[bytes]]:
    store = new_store()
    train(store, 0, 2)
    first = digests(store)
    train(store, 2, 3, keys=100)
    return {1: first, 2: digests(store)}


@pytest.fixture(scope="module")
def moments(tmp_path_factory: pytest.TempPathFactory) -> list[tuple[str, int]]:
    """Each call that a whole run makes: (name, how many-th of that name)."""
    where = tmp_path_factory.mktemp("whole")
    if strace(where / "c", where / "log"):
        pytest.skip("strace may not trace here")
    return [(name, k) for name, n in sorted(calls(where / "log").items()) for k in range(1, n + 1)]


def outcome(where: Path, expected: dict[int, list[bytes]]) -> int:
    """The checkpoint that is found, 0: none; what it loads is what was taken."""
    try:
        manifest = latest_intact(open_place(where))
    except CheckpointError as error:
        assert "holds no checkpoint" in str(error), error
        return 0
    store = empty_store()
    for snapshot in manifest.snapshots:
        load_partition(store, str(where), snapshot)
    assert digests(store) == expected[manifest.checkpoint]
    return manifest.checkpoint


def kill_at(name: str, k: int, where: Path, expected: dict[int, list[bytes]]) -> int:
    code = strace(where / "c", where / "log", "-e", f"inject={name}:signal=KILL:when={k}")
    assert code in (-9, 137), f"{name} {k}: {code}"
    return outcome(where / "c", expected)


def test_killed_at_some_moments(
    moments: list[tuple[str, int]], expected: dict[int, list[bytes]], tmp_path: Path
) -> None:
    renames = [m for m in moments if m[0].startswith("rename")]
    some = {renames[4], renames[-1], *random.Random(5).sample(moments, 6)}  # 4: the first manifest
    for i, (name, k) in enumerate(sorted(some)):
        where = tmp_path / str(i)
        where.mkdir()
        kill_at(name, k, where, expected)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_killed_at_every_moment(
    moments: list[tuple[str, int]], expected: dict[int, list[bytes]], tmp_path: Path
) -> None:
    found: dict[str, list[int]] = {}
    for name, k in moments:
        where = tmp_path / f"{name}-{k}"
        where.mkdir()
        found.setdefault(name, []).append(kill_at(name, k, where, expected))
        shutil.rmtree(where)
    for name, outcomes in found.items():
        assert outcomes == sorted(outcomes), f"later kills by {name} leave no older checkpoint: {outcomes}"
    assert {o for outcomes in found.values() for o in outcomes} == {0, 1, 2}
    assert set(found) >= {"write", "fsync", "rename", "mkdir"}
