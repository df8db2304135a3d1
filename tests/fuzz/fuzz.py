"""Fuzz every parser of bytes: ``python tests/fuzz/fuzz.py [TARGET ...] [--native] [--seed N] [--seconds S]``.

A target makes sound bytes, as the code itself writes them, changes them, sets checksums right in most attempts, and has
them read. The reader may take or refuse them (by the errors that it promises); every other error, and every death of
the process, is a finding. Each target runs in a process of its own. Attempt ``n`` of a seed is always the same, so a
finding says the one command that repeats it. ``--native``: the parsers in C++ only (tests/native/sanitized.sh runs
these with the sanitizers). ``--attempts N``: so many instead of ``--seconds``. ``--list``: names them.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import logging
import mmap
import random
import socket
import sqlite3
import struct
import subprocess
import sys
import tempfile
import time
import traceback
import zlib
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from hashlib import blake2b
from pathlib import Path
from typing import Any

import msgspec

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent / "native"))

Attempt = Callable[[random.Random], str]
"""One attempt; a word for what became of it."""

TARGETS: dict[str, Callable[[Path], Attempt]] = {}
NATIVE: set[str] = set()
NUMBERS = (
    0,
    1,
    2,
    3,
    7,
    0x7F,
    0x80,
    0xFF,
    0x7FFF,
    0xFFFF,
    1 << 16,
    1 << 24,
    0x7FFFFFFF,
    1 << 31,
    0xFEFFFFFF,
    0xFFFFFFFF,
)
WIDE = (*NUMBERS, 1 << 32, 1 << 40, (1 << 63) - 1, 1 << 63, (1 << 64) - 1)
REPORT_S = 60.0  # a child that is silent for so long beyond its time hangs


def target(native: bool = False) -> Callable[[Callable[[Path], Attempt]], Callable[[Path], Attempt]]:
    """Register a maker of attempts by its name. It gets an empty folder."""

    def register(make: Callable[[Path], Attempt]) -> Callable[[Path], Attempt]:
        TARGETS[make.__name__] = make
        if native:
            NATIVE.add(make.__name__)
        return make

    return register


# ---------------------------------------------------------------- changes of bytes


def changed(data: bytes, rng: random.Random, times: int = 3) -> bytes:
    """``data`` with one to ``times`` changes; at times with none."""
    out = bytearray(data)
    for _ in range(rng.randrange(times + 1)):
        if out:
            rng.choice((_flip, _flip, _number, _number, _cut, _insert, _repeat, _text))(out, rng)
    return bytes(out)


def _flip(data: bytearray, rng: random.Random) -> None:
    at = rng.randrange(len(data))
    data[at] = rng.choice((0, 0xFF, 0x80, data[at] ^ 1 << rng.randrange(8), rng.randrange(256)))


def _number(data: bytearray, rng: random.Random) -> None:
    form = rng.choice(("<I", "<Q", ">I", ">H", "<H"))
    size = struct.calcsize(form)
    if len(data) >= size:
        value = rng.choice(WIDE) & ((1 << 8 * size) - 1)
        struct.pack_into(form, data, rng.randrange(len(data) - size + 1), value)


def _cut(data: bytearray, rng: random.Random) -> None:
    at = rng.randrange(len(data))
    del data[at : rng.choice((len(data), at + rng.randrange(1, 20)))]


def _insert(data: bytearray, rng: random.Random) -> None:
    at = rng.randrange(len(data) + 1)
    data[at:at] = rng.randbytes(rng.choice((1, 2, 8, 40)))


def _repeat(data: bytearray, rng: random.Random) -> None:
    at = rng.randrange(len(data))
    piece = bytes(data[at : at + rng.choice((1, 8, 60))])
    to = rng.randrange(len(data) + 1)
    data[to:to] = piece * rng.choice((1, 2, 50))


def _text(data: bytearray, rng: random.Random) -> None:
    """What text and msgpack trip over: no UTF-8, deep nesting, other kinds of values."""
    at = rng.randrange(len(data) + 1)
    data[at:at] = rng.choice(_PIECES)


_PIECES = (
    *(
        b"\xff",
        b"\xc0\x80",
        b"\xed\xa0\x80",
        b"\xa4ab\xff\xfe",
        b"[" * 2000,
        b"\x91" * 2000,
        b"\xc0",
        b"null",
        b"1e999",
    ),
    *(b"-1", b"\xcb\x7f\xf8" + bytes(6), b"\xcf" + b"\xff" * 8, b"\xd3\x80" + bytes(7), b"\x81\xa1a", b"{}", b'"'),
)


def refusing(errors: type[Exception] | tuple[type[Exception], ...], read: Callable[[], object]) -> str:
    """ "read" or "refused" by one of ``errors``."""
    try:
        read()
        return "read"
    except errors:
        return "refused"


# ---------------------------------------------------------------- the wire


def _messages() -> dict[str, tuple[Any, list[bytes]]]:
    """Decoders of all that comes over a wire or a socket, with sound messages."""
    from everstep.allreduce import group_store as store
    from everstep.allreduce import replica_group as units
    from everstep.brain.events import Ok, ShardAsked
    from everstep.ids import ShardKey, TableId
    from everstep.net import control_link, control_server, data
    from everstep.net import messages as wire

    encode = msgspec.msgpack.encode
    part = wire.RowsPart(TableId(1), 2, 3, 4)
    said = store._StoreValue("10.0.0.1", 4000, b"gloo's own", 4001, b"k" * 32)
    return {
        "call": (
            control_server._call_decoder,
            [encode(c) for c in (wire.Call(1, wire.GetStatus()), wire.Call(2, ShardAsked(0, 1, 1)))],
        ),
        "return": (control_link._return_decoder, [encode(wire.Return(1, Ok()))]),
        "order": (control_link._order_decoder, [encode(wire.SlowDown(4.0, 60.0))]),
        "request": (
            data._request_decoder,
            [
                encode(r)
                for r in (
                    wire.Attach(4096),
                    wire.Pull(1, (part,), True),
                    wire.Scan(TableId(1), 2, 3, 4),
                    wire.Peek(1, TableId(1), b"12345678", ShardKey(0), 2, ShardKey(0), 3),
                )
            ],
        ),
        "answer": (data._answer_decoder, [encode(wire.LogTaken()), encode(wire.Moved(7)), encode(wire.Bad("text"))]),
        "unit": (units._decoder, [encode(units.Summed(7)), encode(units.Sum())]),
        "address": (store._entry_decoder, [encode(said)]),
    }


@target()
def messages(_: Path) -> Attempt:
    """Headers of all frames, by the function that reads them."""
    from everstep.errors import WireError
    from everstep.net.frames import decode_header

    kinds = _messages()

    def attempt(rng: random.Random) -> str:
        decoder, sound = kinds[rng.choice(list(kinds))]
        data = changed(rng.choice(sound), rng)
        return refusing(WireError, lambda: decode_header(decoder, data, "message"))

    return attempt


@target()
def frames(_: Path) -> Attempt:
    """A stream of frames in pieces."""
    from everstep.errors import WireError
    from everstep.net.frames import AUTH_LIMITS, CONTROL_LIMITS, DATA_LIMITS, FrameDecoder, FrameKind, encode_frame

    sound = [
        encode_frame(kind, b"h" * n, b"b" * (3 * n))
        for kind, n in ((FrameKind.CALL, 0), (FrameKind.REQUEST, 5), (FrameKind.AUTH, 90))
    ]

    def attempt(rng: random.Random) -> str:
        stream = b"".join(rng.choice(sound) for _ in range(rng.randrange(1, 5)))
        stream = changed(stream, rng)
        decoder = FrameDecoder(rng.choice((AUTH_LIMITS, CONTROL_LIMITS, DATA_LIMITS)))
        taken = 0

        def read() -> None:
            nonlocal taken
            at = 0
            while at < len(stream):
                n = rng.choice((1, 7, 24, 1000))
                taken += len(decoder.feed(stream[at : at + n]))
                at += n
            decoder.feed(b"")

        word = refusing(WireError, read)
        assert decoder.buffered_bytes <= len(stream)
        return f"{word} after some" if taken else word

    return attempt


@target()
def handshake(_: Path) -> Attempt:
    """Both sides of the handshake: of clients, of ps among themselves, and of the tunnels between members."""
    from everstep.errors import WireError
    from everstep.ids import NodeId
    from everstep.net.auth import ClientAuth, Identity, Secret, SecretError, ServerAuth, VersionError
    from everstep.net.frames import AUTH_LIMITS, FrameDecoder, FrameKind, encode_frame

    secret = Secret(b"s" * 32)
    who = Identity(purpose="data", role="worker", node=NodeId("node0"))

    def attempt(rng: random.Random) -> str:
        client, server = ClientAuth(secret, who), ServerAuth(secret, Identity(purpose="data", role="ps"))
        bad_at = rng.randrange(3)

        def crossed(frame: bytes, number: int) -> Any:
            if number == bad_at:
                [sound] = FrameDecoder(AUTH_LIMITS).feed(frame)
                frame = encode_frame(FrameKind.AUTH, changed(sound.header, rng))
            [got] = FrameDecoder(AUTH_LIMITS).feed(frame)
            return got

        def read() -> None:
            challenge = server.take(crossed(client.begin(), 0))
            server.take(crossed(client.answer(crossed(challenge, 1)), 2))

        word = refusing((WireError, SecretError, VersionError), read)
        assert server.done == (word == "read")
        return word

    return attempt


@target()
def append_header(_: Path) -> Attempt:
    """The header of an append, read in Python; what is read is what is written again."""
    from everstep.errors import WireError
    from everstep.ids import Incarnation, PartitionId, Slot
    from everstep.net.append_frames import decode_append, encode_append
    from everstep.net.messages import Append, StreamEntry

    entries = (StreamEntry(PartitionId(3), 17, 1, 40, 0), StreamEntry(PartitionId(1), 2, 3, 7, 5))
    sound = encode_append(Append(9, Slot(2), Incarnation(3), (), entries, (0, 4), ((PartitionId(3), 16),), 12, 8))

    def attempt(rng: random.Random) -> str:
        data = changed(sound, rng)
        return refusing(WireError, lambda: _same(encode_append(decode_append(data)), data))

    return attempt


def _same(one: bytes, other: bytes) -> None:
    assert one == other, "what was read is written otherwise"


# ---------------------------------------------------------------- files


@target()
def journal(folder: Path) -> Attempt:
    """Files of a journal: bytes of the database changed, or a row with its checksum set right."""
    from everstep.brain.events import Event, MasterStarted, NodeJoined
    from everstep.config.spec import JobSpec
    from everstep.errors import EverstepError
    from everstep.ids import Incarnation, NodeId
    from everstep.storage.journal import Journal, read_journal, vouch

    where = folder / "sound.sqlite"
    one = Journal(where)
    one.append(Event(0.0, MasterStarted(Incarnation(1), JobSpec(workers=1, ps=1))))
    for number in range(20):
        one.append(Event(float(number), NodeJoined(NodeId(f"node{number}"), "", 0, 0)))
    one.close()
    with contextlib.closing(sqlite3.connect(where)) as db:
        db.execute("PRAGMA wal_checkpoint(TRUNCATE)")
        db.execute("PRAGMA journal_mode=DELETE")
        rows = db.execute("SELECT seq, event FROM events ORDER BY seq").fetchall()
    sound = where.read_bytes()
    path = folder / "journal.sqlite"

    def attempt(rng: random.Random) -> str:
        data = sound
        if rng.random() < 0.4:
            data = changed(sound, rng, 6)
        path.write_bytes(data)
        for more in ("-wal", "-shm", "-journal"):
            path.with_name(path.name + more).unlink(missing_ok=True)
        if data is sound:
            seq, event = rng.choice(rows)
            raw = changed(event, rng)
            digest = b"12345678" + vouch(seq, raw + b"12345678")
            with contextlib.closing(sqlite3.connect(path)) as db, db:
                db.execute("UPDATE events SET event = ?, digest = ? WHERE seq = ?", (raw, digest, seq))
        word = refusing(EverstepError, lambda: list(read_journal(path)))
        return (
            f"{word}; opened: {refusing(EverstepError, lambda: Journal(path).close())}" if rng.random() < 0.1 else word
        )

    return attempt


@target()
def wal(folder: Path) -> Attempt:
    """The log that lies beside a database."""
    from everstep.errors import EverstepError
    from everstep.storage.wal import WalFile

    live = folder / "live.sqlite"
    db = sqlite3.connect(live)
    db.execute("PRAGMA journal_mode=WAL")
    db.execute("CREATE TABLE t (x)")
    for number in range(5):
        with db:
            db.execute("INSERT INTO t VALUES (?)", (str(number) * 500,))
    base, log = live.read_bytes(), (folder / "live.sqlite-wal").read_bytes()
    db.close()
    path = folder / "found.sqlite"

    def attempt(rng: random.Random) -> str:
        for more in ("", "-wal", "-shm"):
            path.with_name(path.name + more).unlink(missing_ok=True)
        path.write_bytes(base)
        path.with_name(path.name + "-wal").write_bytes(changed(log, rng))

        def read() -> None:
            found = WalFile(path)
            with contextlib.closing(sqlite3.connect(path)) as there, contextlib.suppress(sqlite3.Error):
                found.check(there)

        return refusing(EverstepError, read)

    return attempt


@target()
def chain(folder: Path) -> Attempt:
    """Chained logs: of a ps's audit and of a worker's steps."""
    from everstep.ids import Incarnation, LeaseNo, ShardKey, Slot
    from everstep.monitor.pslog import PsLog
    from everstep.monitor.records import Applied
    from everstep.monitor.steps import read_step_log
    from everstep.storage.chain import ChainWriter, read_chain

    where = folder / "sound.log"
    writer = ChainWriter(where, {"kind": "ps", "slot": 0, "incarnation": 1})
    for seq in range(6):
        lease = LeaseNo(1), Slot(0), Incarnation(1)
        writer.append(msgspec.msgpack.encode(Applied(seq, ShardKey(1), seq, seq + 1, *lease, 4, at=1.0)))
    writer.close()
    sound = where.read_bytes()
    header, records, problem = read_chain(where)
    assert not problem and len(records) == 6
    path = folder / "found.log"

    def attempt(rng: random.Random) -> str:
        if rng.random() < 0.5:
            path.write_bytes(changed(sound, rng))
        else:
            path.unlink(missing_ok=True)
            again = ChainWriter(path, {**header, "kind": rng.choice(("ps", "worker", 7, None))})
            for record in records:
                again.append(changed(record, rng, 1))
            again.close()
        _, found, wrong = read_chain(path)
        log = PsLog(Slot(0), Incarnation(1), 4, [0, 1, 2, 3])
        log.fill(found)
        read_step_log(path)
        return "a problem" if wrong else "bad records" if log.bad else "read"

    return attempt


def _sum128(data: bytes) -> str:
    return blake2b(data, digest_size=16).hexdigest()


@target()
def manifest(_: Path) -> Attempt:
    """Manifests of checkpoints, with their checksum set right or not."""
    from everstep.errors import CheckpointError
    from everstep.protect.manifest import _SUM, decode_manifest, encode_manifest, is_coded

    sound = encode_manifest(_manifest(), b"key")
    body = sound[:-45]

    def attempt(rng: random.Random) -> str:
        if rng.random() < 0.3:
            data = changed(sound, rng)
        else:
            text = changed(body, rng)
            text = text if text.endswith(b"\n") else text + b"\n"
            data = text + _SUM + _sum128(text).encode() + b"\n"
        is_coded(data)
        return refusing(CheckpointError, lambda: decode_manifest(data, "manifest"))

    return attempt


def _manifest() -> Any:
    from everstep.config.spec import JobSpec
    from everstep.ids import PartitionId, ShardKey
    from everstep.model import snapshot

    file = snapshot.CheckpointFile("images/000001/bucket-3.img", 100, _sum128(b"x"))
    partition = snapshot.PartitionSnapshot(
        partition=PartitionId(3), seq=5, fingerprint=7, watermarks=((ShardKey(1), 2),), files=(file,), rows=3
    )
    return snapshot.Manifest(
        job="j",
        checkpoint=1,
        at=1.0,
        seed=1,
        partitions=4,
        snapshots=(partition,),
        spec=JobSpec(workers=1, ps=1),
        values={"a": 1.0},
    )


def _sections(data: bytes, at: int) -> list[tuple[int, bytes]]:
    """(kind, payload) of each section of a file."""
    from everstep.protect.snapshot_file import _SECTION

    out = []
    while at < len(data):
        kind, _, n, _, _ = _SECTION.unpack_from(data, at)
        out.append((kind, data[at + _SECTION.size : at + _SECTION.size + n]))
        at += _SECTION.size + n
    return out


def _joined(start: bytes, sections: Iterable[tuple[int, bytes]]) -> bytes:
    """A file of these sections, with all checksums right."""
    from everstep.protect.snapshot_file import _SECTION

    out = [start]
    for number, (kind, payload) in enumerate(sections):
        head = _SECTION.pack(kind, number, len(payload), zlib.crc32(payload), 0)[:20]
        out += [head, struct.pack("<I", zlib.crc32(head)), payload]
    return b"".join(out)


def _crafted_file(sound: bytes, rng: random.Random) -> bytes:
    """Bytes changed, or sections changed, left out, repeated, moved, with right checksums."""
    if rng.random() < 0.3:
        return changed(sound, rng)
    sections = _sections(sound, 16)
    for _ in range(rng.randrange(1, 3)):
        at = rng.randrange(len(sections))
        kind, payload = sections[at]
        match rng.randrange(5):
            case 0:
                sections[at] = rng.randrange(7), payload
            case 1:
                sections.insert(rng.randrange(len(sections)), (kind, payload))
            case 2 if len(sections) > 1:
                del sections[at]
            case _:
                sections[at] = kind, changed(payload, rng)
    return _joined(sound[:16], sections)


@target()
def snapshot(_: Path) -> Attempt:
    """Files of snapshots of partitions: the crafted store's own."""
    import crafted
    import numpy as np

    from everstep.errors import CheckpointError
    from everstep.ids import PartitionId
    from everstep.protect import snapshot_file

    store = crafted.filled()
    marks, pages = crafted.snapshot(store)
    out = io.BytesIO()
    writer = snapshot_file.SnapshotFileWriter(out.write)
    writer.head(
        snapshot_file.SnapshotHead(
            job="j", partition=PartitionId(2), checkpoint=1, full=True, seq=3, partitions=4, tables=crafted.SPECS
        )
    )
    writer.marks(marks)
    for table, of in pages.items():
        if of:
            layout = snapshot_file.PageLayout(*store.layout(table), store.page_bytes(table))
            writer.pages(table, layout, list(of), np.concatenate(list(of.values())))
    writer.end()
    sound = out.getvalue()

    def attempt(rng: random.Random) -> str:
        data = _crafted_file(sound, rng)
        return refusing(CheckpointError, lambda: list(snapshot_file.read_snapshot_file(io.BytesIO(data), "image")))

    return attempt


@target()
def replica(_: Path) -> Attempt:
    """Files of the state of a replica."""
    from everstep.errors import CheckpointError
    from everstep.model.group import Position
    from everstep.protect.replicafile import ReplicaHead, read_replica_file, write_replica_file

    out = io.BytesIO()
    head = ReplicaHead(job="j", checkpoint=1, position=Position(), header_bytes=50, body_bytes=70)
    write_replica_file(out.write, head, b"h" * 50, memoryview(b"b" * 70))
    sound = out.getvalue()

    def attempt(rng: random.Random) -> str:
        data = _crafted_file(sound, rng)
        return refusing(CheckpointError, lambda: list(read_replica_file(io.BytesIO(data), "replica")))

    return attempt


@target()
def packed(_: Path) -> Attempt:
    """The header of a packed state, and all values in it."""
    import torch

    from everstep.allreduce import serialize as of
    from everstep.errors import CheckpointError

    packer = of.Packer()
    tree = {"a": [1, 2.5, "x", None, 1 << 80, (True, b"y")], "t": torch.arange(6.0).reshape(2, 3), "c": 1 + 2j}
    value = msgspec.msgpack.encode(packer.tree("value", tree))
    entries = tuple(packer.entries)
    fields = {f.name: f for f in msgspec.structs.fields(of.SerializedHeader)}
    known: dict[str, Any] = {"version": of.STATE_VERSION, "tensors": entries, "size_bytes": packer._end}
    needed = {n: known.get(n, _some(f)) for n, f in fields.items() if f.required or n in known}
    sound = of.encode_header(of.SerializedHeader(**needed), "state")
    body = torch.zeros(packer._end, dtype=torch.uint8)

    def attempt(rng: random.Random) -> str:
        def read() -> None:
            reader = of.Unpacker(of.SerializedState(changed(sound, rng), body), "state")
            for number in range(len(reader.header.tensors)):
                reader.copy(number)
            with contextlib.suppress(msgspec.MsgspecError, ValueError, RecursionError):
                found = msgspec.msgpack.decode(changed(value, rng))
                try:
                    reader.value(found)
                except (ValueError, RecursionError) as error:  # (what reads the header refuses it before)
                    raise AssertionError(f"{found!r}") from error

        return refusing(CheckpointError, read)

    return attempt


def _some(field: Any) -> Any:
    for value in ((), {}, 0, "", b"", 0.0, None, []):
        with contextlib.suppress(msgspec.ValidationError):
            return msgspec.convert(value, field.type)
    raise TypeError(f"no value for {field.name}")


@target()
def brain(_: Path) -> Attempt:
    """Snapshots of the brain."""
    from everstep.brain.brain import Brain
    from everstep.brain.events import Event, MasterStarted, NodeJoined
    from everstep.config.spec import JobSpec
    from everstep.ids import Incarnation, NodeId

    one = Brain()
    one.handle(Event(0.0, MasterStarted(Incarnation(1), JobSpec(workers=2, ps=2))))
    one.handle(Event(0.0, NodeJoined(NodeId("node0"), "", 0, 0)))
    sound = one.snapshot()

    def attempt(rng: random.Random) -> str:
        data = changed(sound, rng)
        return refusing(msgspec.MsgspecError, lambda: Brain.restore(data))

    return attempt


@target()
def blob(_: Path) -> Attempt:
    """Differences between ps, by their reader in Python."""
    import crafted

    from everstep.native.blob import parse, parse_marks

    source = crafted.filled()
    source.take_outbox(1 << 30)
    blobs = crafted.stream(source)
    width = {t: source.layout(t)[2] for t in source.tables()}

    def record_bytes(table: int) -> int:
        if table not in width:
            raise ValueError(f"no table {table}")
        return width[table]

    def attempt(rng: random.Random) -> str:
        data = crafted.crafted(rng.choice(blobs), rng)
        refusing(ValueError, lambda: parse_marks(data))
        return refusing(ValueError, lambda: parse(data, record_bytes))

    return attempt


# ---------------------------------------------------------------- native


def _crafted(run: str, count: int) -> Callable[[Path], Attempt]:
    def make(_: Path) -> Attempt:
        import crafted

        crafted.say = lambda what: None
        return lambda rng: ", ".join(sorted(getattr(crafted, run)(rng.getrandbits(31), count)))

    make.__name__ = {"attempts": "snapshots", "mirror_attempts": "mirrors", "recovery_attempts": "recoveries"}[run]
    return make


for _run, _count in (("attempts", 7), ("mirror_attempts", 4), ("recovery_attempts", 2)):
    target(native=True)(_crafted(_run, _count))


class _Mirrored:
    """A store with a mirror of a crafted store's partition, behind a receiver; and the messages that come to it."""

    def __init__(self) -> None:
        import crafted

        from everstep.native import _native

        self.owner = crafted.filled()
        self.owner.take_outbox(1 << 30)
        blobs = crafted.stream(self.owner)
        self.home = crafted.empty(crafted.Store)
        self.home.mirror_make(1, [crafted.PARTITION], 0)
        self.seqs: list[tuple[bytes, int]] = []
        contents = [b for b in blobs if not self._applied(b)]
        assert not contents, "a mirror takes the contents of its partition"
        crafted.push(self.owner, 2)
        _, entries, data = self.owner.take_outbox(1 << 30)
        self.blobs = [(data[at : at + n].tobytes(), seq) for b, seq, _, at, n in entries if b == crafted.PARTITION]
        self.partition = crafted.PARTITION
        self.receiver = _native.ReplicationReceiver(self.home)
        self.receiver.enter_alone()
        self.receiver.publish(5, [(crafted.PARTITION, (0, 1), [1], True)])
        self.receiver.leave_alone()

    def _applied(self, data: bytes) -> bool:
        return self.home.mirror_apply(1, data) in (0, 1, 2, 3)


@target(native=True)
def follower(_: Path) -> Attempt:
    """A connection between ps: frames, messages and the differences in them (wire, receiver, mirror)."""
    import crafted

    from everstep.ids import Incarnation, PartitionId, Slot
    from everstep.native import _native
    from everstep.net.append_frames import encode_append
    from everstep.net.frames import FrameKind, _head, encode_frame
    from everstep.net.messages import Append, StreamEntry

    there_ = _Mirrored()

    def attempt(rng: random.Random) -> str:
        there_.receiver.set_received((0, 1), (5, 0))
        blobs = [(crafted.crafted(data, rng) if rng.random() < 0.4 else data, seq) for data, seq in there_.blobs]
        entries = tuple(
            StreamEntry(PartitionId(rng.choice((there_.partition,) * 9 + (7,))), seq, 1, len(data))
            for data, seq in blobs
        )
        version = rng.choice((5, 5, 5, 6))
        header = encode_append(Append(version, Slot(0), Incarnation(1), (), entries, (0,) * len(blobs), (), 0, 5))
        if rng.random() < 0.4:
            header = changed(header, rng)
        body = b"".join(data for data, _ in blobs)
        body_bytes = len(body) if rng.random() < 0.95 else rng.choice((0, len(body) - 1, len(body) + 1))
        stream = _head(FrameKind.APPEND, header, (), max(0, body_bytes), 0) + body
        if rng.random() < 0.3:
            stream += encode_frame(FrameKind.REQUEST, b"header", b"body")
        if rng.random() < 0.3:
            stream = changed(stream, rng)
        ahead = stream[: rng.choice((0, 0, 5, 24, 100))]
        words = set()
        here, there = socket.socketpair()
        with here, there:
            here.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 22)
            here.settimeout(10)
            with contextlib.suppress(TimeoutError):
                here.sendall(stream[len(ahead) :])
            here.shutdown(socket.SHUT_WR)
            reader = _native.ReceiverConnection(there_.receiver, there.fileno(), ahead)
            try:
                while (found := reader.next()) is not None:
                    bytes(found[3])
                    words.add("handed on")
                words.add("ended")
            except _native.Broken:
                words.add("broken")
        return ", ".join(sorted(words)) + (", applied" if there_.receiver.received((0, 1))[1] else "")

    return attempt


@target(native=True)
def replication_sender(_: Path) -> Attempt:
    """What a peer answers to what was sent there: frames of APPENDED with codes, other frames, anything."""
    import crafted

    from everstep.native import _native
    from everstep.net.frames import FrameKind, encode_frame

    def attempt(rng: random.Random) -> str:
        store = crafted.empty(crafted.Store)
        store.own(range(crafted.PARTITIONS))
        store.protect(range(crafted.PARTITIONS), True)
        one = _native.ReplicationSender(store, (0, 1))
        peer = (1, 1)
        one.live([peer], 5)
        one.set_route(crafted.PARTITION, [peer])
        one.set_version(5)
        here, there = socket.socketpair()
        with here, there:
            there.settimeout(0.2)
            there.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 20)
            here.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, struct.pack("qq", 0, 20_000))
            one.link(peer, here.fileno(), store.n_tables())
            before = store.outbox_ticket()
            store.open(3, 0, 1)
            crafted.push(store, 0)
            n = rng.choice((0, 1, 1, 2, 3, 8, 300))
            codes = bytes(rng.choice((0, 0, 0, 1, 2, 3, 4, 9, 255)) for _ in range(n))
            answer = encode_frame(FrameKind.APPENDED, codes)
            if rng.random() < 0.3:
                answer = encode_frame(FrameKind.ANSWER, msgspec.msgpack.encode(["Moved", 7]))
            if rng.random() < 0.4:
                answer = changed(answer, rng)
            there.sendall(answer * rng.choice((1, 1, 2)))
            if rng.random() < 0.7:
                there.shutdown(socket.SHUT_WR)
            outcome, events = one.carry(before, store.outbox_ticket(), 0.05)
            one.stop()
            one.unlink(peer)
        return f"outcome {outcome}" + "".join(f" event {kind}" for _, kind, _, _ in events)

    return attempt


@target(native=True)
def votes(_: Path) -> Attempt:
    """What members of a group tell each other of a step: of any length, late, or not at all."""
    from everstep.native import _native

    def attempt(rng: random.Random) -> str:
        pairs = [socket.socketpair() for _ in range(rng.randrange(4))]
        size = rng.choice((0, 1, 16, 100))
        try:
            for _, there in pairs:
                there.sendall(rng.randbytes(rng.choice((0, size // 2, size, size, 3 * size))))
                if rng.random() < 0.5:
                    there.shutdown(socket.SHUT_WR)
            fds = [here.fileno() for here, _ in pairs]
            _native.tell(fds, rng.randbytes(size))
            came = _native.hear(fds, size, 0, 1)
            assert all(len(one) <= size for one in came)
            return f"{sum(len(one) == size for one in came)} of {len(came)} whole"
        finally:
            for pair in pairs:
                for sock in pair:
                    sock.close()

    return attempt


# ---------------------------------------------------------------- running them


def rng_of(name: str, seed: int, number: int) -> random.Random:
    """The dice of one attempt: the same on every machine."""
    return random.Random(f"{name} {seed} {number}")


def run(
    name: str, seed: int, numbers: Iterable[int], begin: Callable[[int], object] = lambda number: None
) -> Counter[str]:
    """Make these attempts of a target here; what became of them. Raises what a parser must not raise, with a note that
    says the command."""
    logging.disable(logging.CRITICAL)
    outcomes: Counter[str] = Counter()
    try:
        with tempfile.TemporaryDirectory(prefix="everstep-fuzz-") as folder:
            attempt = TARGETS[name](Path(folder))
            for number in numbers:
                begin(number)
                try:
                    outcomes[attempt(rng_of(name, seed, number))] += 1
                except BaseException as error:
                    error.add_note(f"python tests/fuzz/fuzz.py {name} --seed {seed} --only {number}")
                    raise
    finally:
        logging.disable(logging.NOTSET)
    return outcomes


def child(name: str, seed: int, seconds: float, attempts: int, only: int, progress: Path) -> None:
    """One target, in this process. ``progress``: a file of eight bytes with the number of the attempt under way."""
    end = time.monotonic() + seconds

    def numbers() -> Iterable[int]:
        if only >= 0:
            yield only
            return
        number = 0
        while number < attempts if attempts else time.monotonic() < end:
            yield number
            number += 1

    with progress.open("r+b") as file, mmap.mmap(file.fileno(), 8) as at:

        def begin(number: int) -> None:
            at[:] = number.to_bytes(8, "little")

        outcomes = run(name, seed, numbers(), begin)
    said = ", ".join(f"{word} {n:,}" for word, n in outcomes.most_common(6))
    print(f"{name}: {outcomes.total():,} attempts: {said}", flush=True)


def fuzz(name: str, seed: int, seconds: float, attempts: int, only: int) -> bool:
    """One target in a process of its own; whether nothing was found."""
    with tempfile.TemporaryDirectory(prefix="everstep-fuzz-") as folder:
        progress = Path(folder) / "progress"
        progress.write_bytes(bytes(8))
        words = [
            name,
            "--seed",
            seed,
            "--seconds",
            seconds,
            "--attempts",
            attempts,
            "--only",
            only,
            "--child",
            progress,
        ]
        limit_s = None if attempts else seconds + REPORT_S * 5
        try:
            done = subprocess.run([sys.executable, __file__, *map(str, words)], timeout=limit_s, check=False).returncode
        except subprocess.TimeoutExpired:
            done = -999
        if done:
            number = int.from_bytes(progress.read_bytes(), "little")
            what = "hangs" if done == -999 else f"ended with {done}"
            print(f"{name}: FOUND: {what}: python tests/fuzz/fuzz.py {name} --seed {seed} --only {number}")
    return done == 0


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="python tests/fuzz/fuzz.py", description="Fuzz all parsers of bytes.")
    parser.add_argument("targets", nargs="*")
    parser.add_argument("--native", action="store_true")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--seconds", type=float, default=10.0, help="of each target")
    parser.add_argument("--attempts", type=int, default=0)
    parser.add_argument("--only", type=int, default=-1, metavar="N", help="attempt N alone")
    parser.add_argument("--list", action="store_true")
    parser.add_argument("--child", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args(arguments)
    names = args.targets or [n for n in TARGETS if n in NATIVE or not args.native]
    if unknown := [n for n in names if n not in TARGETS]:
        parser.error(f"no target '{unknown[0]}': there are {', '.join(TARGETS)}")
    if args.list:
        print(
            "\n".join(
                f"{n:12} {(TARGETS[n].__doc__ or 'native, see tests/native/crafted.py').splitlines()[0]}" for n in names
            )
        )
        return 0
    if args.child is not None:
        try:
            child(names[0], args.seed, args.seconds, args.attempts, args.only, args.child)
        except BaseException:
            traceback.print_exc()
            return 1
        return 0
    good = [fuzz(name, args.seed, args.seconds, args.attempts, args.only) for name in names]
    return 0 if all(good) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
