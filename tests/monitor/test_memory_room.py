"""The tightest limit of a ps: its setting, the kernel's of its process, its container's."""

from __future__ import annotations

import resource
from pathlib import Path

import pytest

from everstep.model.memory_limit import LIMITS, MemoryLimit
from everstep.monitor.cgroup_memory import MemoryGroup
from everstep.monitor.memory_room import MemoryRoom, parse_process_bytes

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
