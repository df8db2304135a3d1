"""The tightest limit of a ps: its setting, the kernel's of its process, its container's."""

from __future__ import annotations

import os
import resource
import select
import subprocess
import sys
from pathlib import Path

import pytest

from everstep.model.memory_limit import LIMITS, MemoryLimit
from everstep.monitor.cgroup_memory import MemoryGroup
from everstep.monitor.memory_room import (
    MemoryRoom,
    is_unbound,
    limit_of_process,
    memory_of_node,
    parse_process_bytes,
    raise_limit,
)

STATUS = "Name:\tpython3\nVmPeak:\t  600000 kB\nVmSize:\t  599660 kB\nVmRSS:\t   42208 kB\nVmData:\t  149772 kB\n"


def test_lines_of_status_and_damaged_ones() -> None:
    assert parse_process_bytes(STATUS, "VmData") == 149772 * 1024
    for text in ("", "VmData:\n", "VmData: many kB\n", "VmData:\t1 MB\n", "xVmData:\t1 kB\n"):
        assert parse_process_bytes(text, "VmData") is None


def test_the_limit_that_leaves_least_room_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mib = 1 << 20
    (tmp_path / "status").write_text(STATUS)
    (tmp_path / "self").mkdir()
    (tmp_path / "self/cgroup").write_text("0::/\n")
    (tmp_path / "memory.max").write_text(f"{512 * mib}\n")
    (tmp_path / "memory.current").write_text(f"{400 * mib}\n")
    room = MemoryRoom(MemoryGroup(tmp_path / "self", tmp_path), tmp_path / "status")
    limits = {resource.RLIMIT_DATA: resource.RLIM_INFINITY, resource.RLIMIT_AS: resource.RLIM_INFINITY}
    monkeypatch.setattr(resource, "getrlimit", lambda kind: (limits[kind], limits[kind]))

    def tightest(ceiling: int = 0) -> tuple[MemoryLimit, float, float]:
        found = room.readings(30 * mib, 40 * mib, ceiling)
        return LIMITS[int(found["limit_kind"])], found["limit_bytes"], found["limit_used_bytes"]

    assert tightest() == (MemoryLimit.CONTAINER, 512 * mib, 400 * mib)
    assert tightest(100 * mib) == (MemoryLimit.STORE, 100 * mib, 30 * mib)
    limits[resource.RLIMIT_DATA] = 160 * mib
    assert tightest() == (MemoryLimit.PROCESS, 160 * mib, 149772 * 1024 - 10 * mib), "what the pool has spare is room"
    (tmp_path / "status").unlink()
    assert tightest() == (MemoryLimit.CONTAINER, 512 * mib, 400 * mib)
    (tmp_path / "memory.max").write_text("max\n")
    assert room.readings(1, 1, 0) == {}


def test_the_limit_of_a_process_that_has_ended_is_still_known() -> None:
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE, stderr=subprocess.DEVNULL)
    assert child.stdin is not None
    resource.prlimit(child.pid, resource.RLIMIT_DATA, (300 << 20, resource.RLIM_INFINITY))
    fd = os.pidfd_open(child.pid)
    child.stdin.close()
    try:
        assert select.select([fd], [], [], 60)[0]
        assert limit_of_process(child.pid) == 300 << 20
    finally:
        os.close(fd)
        child.wait()
    assert limit_of_process(child.pid) == 0, "it is gone"


def test_a_limit_of_a_process_that_runs_is_raised_up_to_its_hard_one_and_never_made_lower() -> None:
    mb = 1 << 20
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE, stderr=subprocess.DEVNULL)
    assert child.stdin is not None
    try:
        assert is_unbound(child.pid)
        assert raise_limit(child.pid, 300 * mb) == (0, 0), "it has none"
        resource.prlimit(child.pid, resource.RLIMIT_DATA, (300 * mb, 900 * mb))
        resource.prlimit(child.pid, resource.RLIMIT_AS, (400 * mb, resource.RLIM_INFINITY))
        assert not is_unbound(child.pid)
        assert raise_limit(child.pid, 350 * mb) == (300 * mb, 350 * mb)
        assert resource.prlimit(child.pid, resource.RLIMIT_AS)[0] == 400 * mb
        assert raise_limit(child.pid, 200 * mb) == (350 * mb, 350 * mb)
        assert raise_limit(child.pid, 2000 * mb) == (350 * mb, 900 * mb)
        assert resource.prlimit(child.pid, resource.RLIMIT_DATA) == (900 * mb, 900 * mb)
        assert resource.prlimit(child.pid, resource.RLIMIT_AS)[0] == 2000 * mb, "it would come first"
    finally:
        child.stdin.close()
        child.wait()
    assert raise_limit(child.pid, 300 * mb) == (0, 0), "it is gone"


def test_what_one_process_may_have_on_this_node(tmp_path: Path) -> None:
    group = MemoryGroup(tmp_path / "proc", tmp_path / "cgroup")  # there is none
    (tmp_path / "meminfo").write_text("MemTotal:       2048 kB\nMemFree:        1024 kB\n")
    assert memory_of_node(group, tmp_path / "meminfo") == (2 << 20, MemoryLimit.MACHINE)
    (tmp_path / "proc").mkdir()
    (tmp_path / "proc" / "cgroup").write_text("0::/job\n")
    (tmp_path / "cgroup" / "job").mkdir(parents=True)
    (tmp_path / "cgroup" / "job" / "memory.max").write_text("1048576\n")
    (tmp_path / "cgroup" / "job" / "memory.current").write_text("4096\n")
    group = MemoryGroup(tmp_path / "proc", tmp_path / "cgroup")
    assert memory_of_node(group, tmp_path / "meminfo") == (1 << 20, MemoryLimit.CONTAINER)


BOUND = """
import resource
from everstep.monitor.memory_room import bound_memory
resource.setrlimit(resource.RLIMIT_DATA, (400 << 20, 500 << 20))
resource.setrlimit(resource.RLIMIT_AS, (1000 << 20, 2000 << 20))
print(bound_memory(450 << 20) >> 20, bound_memory(900 << 20) >> 20, resource.getrlimit(resource.RLIMIT_AS)[0] >> 20)
try:
    bytearray(600 << 20)
except MemoryError:
    print("bounded")
"""


def test_a_process_is_bounded_up_to_its_users_limit() -> None:
    done = subprocess.run([sys.executable, "-c", BOUND], capture_output=True, text=True, timeout=60)
    assert done.stdout.splitlines() == ["450 500 1000", "bounded"], done.stderr
