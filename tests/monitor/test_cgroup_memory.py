"""What cgroups of both versions say of memory, in the words of real kernels; what is damaged says nothing."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from everstep.monitor.cgroup_memory import LimitRead, MemoryGroup, parse_bytes, parse_oom_kills, parse_reclaimable

# memory.events of Linux 6.x, memory.oom_control of 5.x with version 1, /proc/vmstat.
V2 = "low 0\nhigh 0\nmax 1291\noom 3\noom_kill 2\noom_group_kill 0\n"
V1 = "oom_kill_disable 0\nunder_oom 0\noom_kill 2\n"
V1_BEFORE_4_13 = "oom_kill_disable 0\nunder_oom 1\n"
VMSTAT = "nr_free_pages 1234\npgpgin 77\noom_kill 2\nnuma_pte_updates 0\n"
STAT_V2 = "anon 1048576\nfile 8192000\ninactive_anon 0\ninactive_file 4096000\nactive_file 4096000\n"
STAT_V1 = "cache 100\nrss 200\ninactive_file 40\nhierarchical_memory_limit 9\ntotal_inactive_file 4096000\n"


@pytest.mark.parametrize("text", [V2, V1, VMSTAT])
def test_kills_of_each_kind_of_file(text: str) -> None:
    assert parse_oom_kills(text) == 2


@pytest.mark.parametrize(
    "text",
    ["", V1_BEFORE_4_13, V2.replace("kill 2", "kill -2"), "oom_kill two\n", "oom_kill", "oom_kill 2 3\n"],
)
def test_a_file_that_does_not_say_is_not_guessed_at(text: str) -> None:
    assert parse_oom_kills(text) is None


def test_limits_of_both_versions() -> None:
    assert parse_bytes("2147483648\n") == 1 << 31
    assert parse_bytes("max\n") is parse_bytes("9223372036854771712\n") is parse_bytes("") is None
    assert parse_bytes("-1\n") is parse_bytes("12kB") is parse_bytes("9" * 25) is parse_bytes("1\n2\n") is None
    assert parse_reclaimable(STAT_V2) == parse_reclaimable(STAT_V1) == 4096000
    assert parse_reclaimable("") == parse_reclaimable("inactive_file much\n") == 0


@given(st.text())
def test_any_text_is_a_number_or_nothing(text: str) -> None:
    for found in (parse_oom_kills(text), parse_bytes(text), parse_reclaimable(text)):
        assert found is None or 0 <= found < 10**19


def a_group(tmp_path: Path, cgroup: str, files: dict[str, str]) -> MemoryGroup:
    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "proc/self/cgroup").write_text(cgroup)
    (tmp_path / "proc/vmstat").write_text("oom_kill 9\n")
    for name, text in files.items():
        path = tmp_path / "cg" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return MemoryGroup(tmp_path / "proc/self", tmp_path / "cg")


def test_version_2_the_tightest_limit_on_the_way_up_counts(tmp_path: Path) -> None:
    files = {
        "pod/job/memory.max": "max\n", "pod/job/memory.current": "9000000\n", "pod/job/memory.events": V2,
        "pod/memory.max": "20000000\n", "pod/memory.current": "12000000\n", "pod/memory.stat": STAT_V2,
    }  # fmt: skip
    group = a_group(tmp_path, "0::/pod/job\n", files)
    assert group.kills() == 2
    assert group.limit() == LimitRead(20_000_000, 12_000_000 - 4_096_000)


def test_version_1_inside_of_a_container(tmp_path: Path) -> None:
    cgroup = "9:name=systemd:/\n4:memory:/docker/abc\n1:cpu:/docker/abc\n0::/\n"
    files = {
        "memory/memory.limit_in_bytes": "8192000\n", "memory/memory.usage_in_bytes": "8000000\n",
        "memory/memory.oom_control": V1, "unified/cgroup.procs": "1\n",
    }  # fmt: skip
    found = a_group(tmp_path, cgroup, files)  # it sees its own files at the root, not below docker/abc
    assert found.kills() == 2 and found.limit() == LimitRead(8_192_000, 8_000_000)


def test_without_cgroups_the_machine_is_asked(tmp_path: Path) -> None:
    group = a_group(tmp_path, "", {})
    assert group.kills() == 9 and group.limit() is None
    assert MemoryGroup(tmp_path / "nothing/self", tmp_path).kills() is None


def test_this_machine_can_be_read() -> None:
    group = MemoryGroup()
    limit = group.limit()
    assert (group.kills() or 0) >= 0 and (limit is None or limit.limit > 0)
