"""The chained log: what was written is read, what was touched is found."""

from __future__ import annotations

import resource
import signal
import threading
from pathlib import Path

import pytest

from everstep.errors import InternalError, PlatformError
from everstep.storage.atomic import write_atomic
from everstep.storage.chain import BROKEN_CHAIN, RECORD_MAX_BYTES, TORN_TAIL, ChainWriter, read_chain


def write(path: Path, records: list[bytes]) -> list[int]:
    writer = ChainWriter(path, {"slot": 1, "name": "ps"})
    ends = [path.stat().st_size]
    for i, record in enumerate(records):
        assert writer.append(record) == i
        ends.append(path.stat().st_size)
    writer.close()
    return ends


def test_reads_what_was_written(tmp_path: Path) -> None:
    records = [b"", b"a", b"x" * 5000, b"a"]
    write(tmp_path / "log", records)
    assert read_chain(tmp_path / "log") == ({"slot": 1, "name": "ps"}, records, None)


def test_every_cut_is_a_torn_tail_or_a_shorter_log(tmp_path: Path) -> None:
    records = [b"first", b"second", b"third"]
    ends = write(tmp_path / "log", records)
    data = (tmp_path / "log").read_bytes()
    for size in range(len(data)):
        (tmp_path / "cut").write_bytes(data[:size])
        header, read, problem = read_chain(tmp_path / "cut")
        whole = sum(end <= size for end in ends) - 1
        assert read == records[: max(whole, 0)]
        if size in ends:
            assert problem is None
        else:
            assert problem is not None and problem.startswith(TORN_TAIL)
        assert bool(header) == (whole >= 0)


def test_every_flipped_bit_is_found(tmp_path: Path) -> None:
    ends = write(tmp_path / "log", [b"first", b"second", b"third"])
    data = (tmp_path / "log").read_bytes()
    for at in range(len(data)):
        bad = bytearray(data)
        bad[at] ^= 0x10
        (tmp_path / "bad").write_bytes(bad)
        _, read, problem = read_chain(tmp_path / "bad")
        assert problem is not None
        assert len(read) <= max(sum(end <= at for end in ends) - 1, 0)


def test_dropped_repeated_and_swapped_records_break_the_chain(tmp_path: Path) -> None:
    ends = write(tmp_path / "log", [b"first", b"other", b"third"])
    data = (tmp_path / "log").read_bytes()
    head = data[: ends[0]]
    a, b, c = (data[ends[i] : ends[i + 1]] for i in range(3))
    for parts, intact in [((b, c), 0), ((a, c), 1), ((a, a, b, c), 1), ((a, c, b), 1)]:
        (tmp_path / "bad").write_bytes(head + b"".join(parts))
        _, read, problem = read_chain(tmp_path / "bad")
        assert problem is not None and problem.startswith(BROKEN_CHAIN)
        assert len(read) == intact


def test_zeros_after_a_power_loss_are_a_torn_tail(tmp_path: Path) -> None:
    write(tmp_path / "log", [b"first"])
    with (tmp_path / "log").open("ab") as file:
        file.write(bytes(4096))
    _, read, problem = read_chain(tmp_path / "log")
    assert read == [b"first"]
    assert problem is not None and problem.startswith(TORN_TAIL)


def test_a_log_has_one_writer(tmp_path: Path) -> None:
    write(tmp_path / "log", [])
    with pytest.raises(InternalError, match="one writer"):
        ChainWriter(tmp_path / "log", {})


def test_records_are_bounded(tmp_path: Path) -> None:
    writer = ChainWriter(tmp_path / "log", {})
    with pytest.raises(InternalError, match="over the limit"):
        writer.append(bytes(RECORD_MAX_BYTES + 1))
    assert writer.append(b"fits") == 0
    writer.close()


def test_threads_append_without_a_gap(tmp_path: Path) -> None:
    writer = ChainWriter(tmp_path / "log", {})
    threads = [threading.Thread(target=lambda: [writer.append(b"r" * 40) for _ in range(200)]) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    writer.close()
    assert len(read_chain(tmp_path / "log")[1]) == 800


def test_a_full_disk_is_one_clear_line_and_stays_failed(tmp_path: Path) -> None:
    """The file size limit of this process stands in for the end of the disk: the kernel shortens the write."""
    writer = ChainWriter(tmp_path / "log", {})
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    ignored = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, ((tmp_path / "log").stat().st_size + 40, hard))
        assert writer.append(b"fits") == 0
        with pytest.raises(PlatformError, match=r"cannot write .*log"):
            writer.append(bytes(1000))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        signal.signal(signal.SIGXFSZ, ignored)
    with pytest.raises(PlatformError):  # never on without the record that failed
        writer.append(b"later")
    writer.close()
    _, read, problem = read_chain(tmp_path / "log")
    assert read == [b"fits"]
    assert problem is None  # what did not fit was taken back


def test_append_after_close_is_refused(tmp_path: Path) -> None:
    writer = ChainWriter(tmp_path / "log", {})
    writer.close()
    writer.close()
    with pytest.raises(PlatformError, match="closed"):
        writer.append(b"late")


def test_a_file_that_is_no_log(tmp_path: Path) -> None:
    (tmp_path / "log").write_bytes(b"something else entirely")
    assert read_chain(tmp_path / "log")[2] == f"{BROKEN_CHAIN}: no header in log"
    with pytest.raises(PlatformError, match="cannot read"):
        read_chain(tmp_path / "missing")


def test_atomic_replaces_whole_and_leaves_nothing_behind(tmp_path: Path) -> None:
    target = tmp_path / "file"
    write_atomic(target, b"old")
    write_atomic(target, b"new", mode=0o600)
    assert target.read_bytes() == b"new"
    assert target.stat().st_mode & 0o777 == 0o600
    with pytest.raises(PlatformError, match="cannot write"):
        write_atomic(tmp_path / "no" / "file", b"x")
    blocked = tmp_path / "dir"
    blocked.mkdir()
    with pytest.raises(PlatformError):
        write_atomic(blocked, b"x")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["dir", "file"]
