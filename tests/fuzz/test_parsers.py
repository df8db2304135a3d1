"""Every parser of bytes refuses what nobody made, by the errors that it promises. A few attempts of each target; the
thorough run is ``python tests/fuzz/fuzz.py``. Below: what it found, one test for each."""

from __future__ import annotations

import io
import struct
import subprocess
import sys
import zlib
from pathlib import Path

import msgspec
import pytest

import fuzz
from everstep.brain.brain import Brain
from everstep.brain.earlier import decode_event
from everstep.errors import CheckpointError, PlatformError
from everstep.ids import Incarnation, Slot
from everstep.monitor.pslog import PsLog
from everstep.protect.manifest import _SUM, decode_manifest
from everstep.protect.snapshot_file import _FILE, MAGIC, VERSION, read_snapshot_file
from everstep.storage.chain import ChainWriter, read_chain
from everstep.storage.journal import Journal, read_journal

NO_TEXT = b"\xa2\xff\xfe"  # a text of msgpack that is no UTF-8
DEEP = b"\x91" * 5000


@pytest.mark.parametrize("name", [name for name in fuzz.TARGETS if name not in fuzz.NATIVE])
def test_a_parser_in_python(name: str) -> None:
    assert fuzz.run(name, 1, range(25)).total() == 25


def test_the_parsers_in_cpp() -> None:
    """In a process of their own: a crash is a failure here."""
    program = "import fuzz; print([fuzz.run(n, 1, range(4)).total() for n in sorted(fuzz.NATIVE)])"
    where = Path(fuzz.__file__).parent
    done = subprocess.run([sys.executable, "-c", program], cwd=where, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout == f"{[4] * len(fuzz.NATIVE)}\n"


@pytest.mark.slow
@pytest.mark.parametrize("name", fuzz.TARGETS)
def test_many_more_of_them(name: str) -> None:
    assert fuzz.run(name, 2, range(2000)).total() == 2000


def test_an_attempt_is_the_same_each_time() -> None:
    assert fuzz.run("snapshot", 3, range(20)) == fuzz.run("snapshot", 3, range(20))
    assert fuzz.changed(b"x" * 99, fuzz.rng_of("a", 1, 2)) == fuzz.changed(b"x" * 99, fuzz.rng_of("a", 1, 2))


def test_a_finding_says_the_command(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    def broken(_: Path) -> fuzz.Attempt:
        def attempt(rng: object) -> str:
            raise KeyError("not promised")

        return attempt

    monkeypatch.setitem(fuzz.TARGETS, "broken", broken)
    with pytest.raises(KeyError) as found:
        fuzz.run("broken", 5, [7])
    assert found.value.__notes__ == ["python tests/fuzz/fuzz.py broken --seed 5 --only 7"]


# ---------------------------------------------------------------- found by it


@pytest.mark.parametrize("record", [NO_TEXT, DEEP])
def test_a_record_of_an_audit_that_is_no_text(tmp_path: Path, record: bytes) -> None:
    log = PsLog(Slot(0), Incarnation(1), 4, [0, 1, 2, 3])
    log.fill([record])
    assert len(log.bad) == 1 and log.bad[0].startswith("bad record: number 0 cannot be read")


def test_the_header_of_a_chain_that_is_no_text(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(msgspec.msgpack, "encode", lambda value: NO_TEXT)
    ChainWriter(tmp_path / "x.log", {}).close()
    _, records, problem = read_chain(tmp_path / "x.log")
    assert not records and problem is not None and "the header of x.log cannot be read" in problem


@pytest.mark.parametrize("head", [NO_TEXT, DEEP])
def test_the_head_of_an_snapshot_that_is_no_text(head: bytes) -> None:
    start = _FILE.pack(MAGIC, VERSION, 0, 0)[:12]
    data = fuzz._joined(start + struct.pack("<I", zlib.crc32(start)), [(1, head)])
    with pytest.raises(CheckpointError, match="its head cannot be read"):
        list(read_snapshot_file(io.BytesIO(data), "image"))


@pytest.mark.parametrize("text", [b'{"job":"\xff\xfe"}\n', b"[" * 100_000 + b"\n"])
def test_a_manifest_that_is_no_text(text: bytes) -> None:
    data = text + _SUM + fuzz._sum128(text).encode() + b"\n"
    with pytest.raises(CheckpointError, match="m cannot be read"):
        decode_manifest(data, "m")


@pytest.mark.parametrize(
    "raw", [b"", NO_TEXT, DEEP, msgspec.msgpack.encode(["lease_expired"]), msgspec.msgpack.encode(["node_lost", 1.0])]
)
def test_an_event_that_is_none(raw: bytes) -> None:
    with pytest.raises(msgspec.MsgspecError):
        decode_event(raw)


@pytest.mark.parametrize("raw", [b"", NO_TEXT, DEEP])
def test_a_snapshot_that_is_none(raw: bytes) -> None:
    with pytest.raises(msgspec.MsgspecError):
        Brain.restore(raw)


def test_a_journal_whose_schema_is_no_text(tmp_path: Path) -> None:
    """SQLite says the damaged bytes in its error, which Python cannot read."""
    path = tmp_path / "journal.sqlite"
    Journal(path).close()
    data = path.read_bytes()
    at = data.index(b"CREATE TABLE")
    path.write_bytes(data[: at + 7] + b"\x80\xff" + data[at + 9 :])
    for suffix in ("-wal", "-shm"):
        path.with_name(path.name + suffix).unlink(missing_ok=True)
    for read in (lambda: list(read_journal(path)), lambda: Journal(path).close()):
        with pytest.raises(PlatformError, match=r"journal\.sqlite"):
            read()
