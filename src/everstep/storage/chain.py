"""Keeps an append-only log whose every record vouches for all records before it.

File = ``MAGIC``, then the header as the first record, then records. A record on disk is

    length   u32, little-endian: bytes of the payload
    chain    8 bytes: blake2b(chain of the record before it || payload), 8 bytes long
    payload

so a record that was changed, dropped, repeated or moved breaks the chain at that place, while a file that merely
ends inside a record (its writer was killed, or is writing right now) is told apart as a torn tail. The chain shows
accidents and careless edits, not forgers: whoever recomputes the whole chain can write what he likes.

A log has one writer for its whole life: a new incarnation writes a new file.
"""

from __future__ import annotations

import errno
import os
import threading
from hashlib import blake2b
from pathlib import Path

import msgspec

from everstep.bounds import MALFORMED
from everstep.errors import InternalError, PlatformError
from everstep.storage.space import with_space

MAGIC = b"everstep-chain-1\n"
RECORD_MAX_BYTES = 1 << 20
"""No record is larger, so a reader never allocates more because of four wrong bytes."""

_FRAME_BYTES = 12
TORN_TAIL = "torn tail"
BROKEN_CHAIN = "broken chain"

Header = dict[str, str | int]
_header_decoder = msgspec.msgpack.Decoder(Header)


def _link(previous: bytes, payload: bytes) -> bytes:
    digest = blake2b(previous, digest_size=8)
    digest.update(payload)
    return digest.digest()


class ChainWriter:
    """Appends records to a new file at ``path``; thread-safe.

    Each append is one ``write()`` and no fsync: a record survives the death of the process as soon as ``append``
    returns, the death of the machine only after the kernel has written it back. Raises ``PlatformError`` when the
    file cannot be made or a record not written (disk full, no permission); after that every append fails.
    """

    def __init__(self, path: Path, header: Header) -> None:
        self.path = path
        self._lock = threading.Lock()
        self._seq = self._size = 0
        self._failed = ""
        payload = msgspec.msgpack.encode(header)
        self._chain = _link(MAGIC, payload)
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND | os.O_CLOEXEC | os.O_NOFOLLOW
            self._fd = with_space(lambda: os.open(path, flags, 0o600))
        except FileExistsError:
            raise InternalError(f"{path} exists already: an audit log has one writer for its whole life") from None
        except OSError as error:
            raise PlatformError(f"cannot create {path}: {error.strerror}") from error
        self._write(MAGIC + len(payload).to_bytes(4, "little") + self._chain + payload)

    def __repr__(self) -> str:
        return f"<ChainWriter {self.path.name} seq={self._seq}{' failed' if self._failed else ''}>"

    @property
    def next_seq(self) -> int:
        """Return the number that the next ``append`` will return (only stable for a single appending thread)."""
        return self._seq

    def append(self, record: bytes) -> int:
        """Write one record (at most ``RECORD_MAX_BYTES``); its number, counted from 0."""
        if len(record) > RECORD_MAX_BYTES:
            raise InternalError(f"an audit record of {len(record)} bytes is over the limit of {RECORD_MAX_BYTES}")
        with self._lock:
            if self._failed:
                raise PlatformError(self._failed)
            chain = _link(self._chain, record)
            self._write(len(record).to_bytes(4, "little") + chain + record)
            self._chain = chain
            seq = self._seq
            self._seq += 1
            return seq

    def _write(self, data: bytes) -> None:
        try:
            with_space(lambda: self._try_to_write(data))
        except OSError as error:
            self._failed = f"cannot write {self.path}: {error.strerror}; free some space and start the job anew"
            raise PlatformError(self._failed) from error

    def _try_to_write(self, data: bytes) -> None:
        written = os.write(self._fd, data)
        if written != len(data):  # a short write to a file: the disk is full, or a limit is reached
            os.ftruncate(self._fd, self._size)
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        self._size += written

    def close(self) -> None:
        """Make all records durable (fsync) and give the file up. May be called twice."""
        with self._lock:
            if self._fd < 0:
                return
            self._failed = self._failed or f"{self.path} is closed"
            try:
                os.fsync(self._fd)
            except OSError as error:
                raise PlatformError(f"cannot write {self.path}: {error.strerror}") from error
            finally:
                os.close(self._fd)
                self._fd = -1


def read_chain(path: Path) -> tuple[Header, list[bytes], str | None]:
    """Return the header, the records up to the first problem, and the problem (or None).

    The problem starts with ``TORN_TAIL`` when the file ends inside a record, and with ``BROKEN_CHAIN`` when a record
    is not the one that was written there. May be read while it is written. Raises ``PlatformError`` when the file
    cannot be read.
    """
    try:
        data = path.read_bytes()
    except OSError as error:
        raise PlatformError(f"cannot read {path}: {error.strerror}") from error
    if not data.startswith(MAGIC):
        torn = MAGIC.startswith(data)
        return {}, [], f"{TORN_TAIL if torn else BROKEN_CHAIN}: no header in {path.name}"
    chain, at, total = MAGIC, len(MAGIC), len(data)
    records: list[bytes] = []
    problem: str | None = None
    while at < total:
        where = f"record {len(records) - 1} at byte {at}" if records else "the header"
        if at + _FRAME_BYTES > total:
            problem = f"{TORN_TAIL}: {path.name} ends inside {where}"
            break
        length = int.from_bytes(data[at : at + 4], "little")
        end = at + _FRAME_BYTES + length
        if length > RECORD_MAX_BYTES:
            problem = f"{BROKEN_CHAIN}: {where} of {path.name} claims {length} bytes"
            break
        if end > total:
            problem = f"{TORN_TAIL}: {path.name} ends inside {where}"
            break
        payload = data[at + _FRAME_BYTES : end]
        chain = _link(chain, payload)
        if chain != data[at + 4 : at + _FRAME_BYTES]:
            # A machine that lost power leaves zeros where blocks were allocated and not written.
            zeros = not data[at:].strip(b"\0")
            problem = f"{TORN_TAIL if zeros else BROKEN_CHAIN}: {where} of {path.name} is not what was written there"
            break
        records.append(payload)
        at = end
    if not records:
        return {}, [], problem or f"{TORN_TAIL}: no header in {path.name}"
    try:
        header = _header_decoder.decode(records[0])
    except MALFORMED as error:
        return {}, [], f"{BROKEN_CHAIN}: the header of {path.name} cannot be read: {error}"
    return header, records[1:], problem
