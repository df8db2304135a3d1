"""Frames all bytes: the one framing of every connection.

A frame is a preamble of 24 bytes ``<4sBBHIQI`` (magic ``ESF2``, kind, flags, check of the preamble, header length,
body length, checksum of the frame), a header (msgpack of a struct of ``messages.py``) and a raw body (arrays; data
plane only). Every size is checked against ``Limits`` before a byte is reserved for it: a peer that announces 4 GiB gets
its connection closed.

Frames of the data plane (REQUEST, ANSWER) have a checksum, crc32c of all their bytes but its own: what TCP's sixteen
bits let through, or a bad cable, switch or memory did on the way, ends the connection and is asked for again. The check
is the low half of the lengths' own crc32c: with a wrong length nobody waits for bytes that never come. Of other kinds
both are 0. What requests point to in shared memory is not covered: docs/decisions/0021.
Where frames are sealed (``seal.py``) 16 bytes follow each, which stand in for the checksum: that is 0 then.

``FrameDecoder`` is sans-io (bytes in, frames out), for asyncio and tests. ``FrameSocket`` is for blocking sockets:
bodies are received straight into their place and sent by gather, without a copy in Python.
"""

from __future__ import annotations

import array
import contextlib
import functools
import os
import select
import socket
import struct
from collections.abc import Callable, Sequence
from enum import IntEnum
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias, TypeVar

import msgspec

from everstep.bounds import MALFORMED
from everstep.errors import WireError
from everstep.net.retry import Deadline

if TYPE_CHECKING:
    from everstep.net.seal import Seal
    from everstep.net.tls import TlsSocket

T = TypeVar("T")
Buffer: TypeAlias = Any
"""Anything C-contiguous with the buffer protocol: bytes, memoryview, ndarray (collections.abc.Buffer is 3.12's)."""

MAGIC = b"ESF2"
_PREAMBLE = struct.Struct("<4sBBHIQI")
_CRC = struct.Struct("<I")
PREAMBLE_BYTES = _PREAMBLE.size

TAG_BYTES = 16  # behind a sealed frame
_CHUNK_BYTES = 64 * 1024  # a read-ahead of this size fetches a small frame in one system call
_UNIX_SEND_BYTES = 1 << 20
_KEEP_BODY_BYTES = 64 * 1024 * 1024  # a receive buffer that grew beyond this is not kept for the next frame
_IOV_MAX = 512  # below the kernel's 1024
_FDS_MAX = 4


class FrameKind(IntEnum):
    AUTH = 1
    CALL = 2
    RETURN = 3
    ORDER = 4
    REQUEST = 5
    ANSWER = 6
    APPEND = 7  # between ps: read and written in C++ (native/wire.h); its checksum does not cover the body
    APPENDED = 8


_KINDS = frozenset(int(k) for k in FrameKind)
_CHECKED_KINDS = frozenset(
    (int(FrameKind.REQUEST), int(FrameKind.ANSWER), int(FrameKind.APPEND), int(FrameKind.APPENDED))
)


class Limits(NamedTuple):
    """Says the largest header and body that are accepted, in bytes."""

    header_bytes: int
    body_bytes: int


AUTH_LIMITS = Limits(header_bytes=4096, body_bytes=0)
CONTROL_LIMITS = Limits(header_bytes=8 << 20, body_bytes=0)
DATA_LIMITS = Limits(header_bytes=1 << 20, body_bytes=1 << 30)


class ClosedError(WireError):
    """Says that the peer closed the connection between two frames."""


class Frame(msgspec.Struct, frozen=True, gc=False):
    """Is a frame as it came: its kind, flags, header and body."""

    kind: int
    flags: int
    header: bytes
    body: memoryview | bytes


def preamble(kind: int, header_bytes: int, body_bytes: int = 0, flags: int = 0) -> bytes:
    """Return the preamble of a frame without a checksum; of one of the data plane that is still to be put in
    (``_head``)."""
    start = _PREAMBLE.pack(MAGIC, kind, flags, 0, header_bytes, body_bytes, 0)
    if kind in _CHECKED_KINDS:
        return _PREAMBLE.pack(MAGIC, kind, flags, _check(start), header_bytes, body_bytes, 0)
    return start


@functools.cache
def _crc32c() -> Callable[..., int]:
    from everstep.native import crc32c  # only who speaks on the data plane needs the compiled module

    return crc32c


def _check(preamble: bytes) -> int:
    crc32c = _crc32c()
    return crc32c(preamble[8:20], crc32c(preamble[:6])) & 0xFFFF


def _crc(preamble: bytes, header: Buffer, body: Sequence[Buffer]) -> int:
    crc32c = _crc32c()
    crc = crc32c(header, crc32c(preamble[: PREAMBLE_BYTES - _CRC.size]))
    for buffer in () if preamble[4] == FrameKind.APPEND else body:  # there each entry has its own
        crc = crc32c(buffer, crc)
    return crc


def _head(kind: int, header: bytes, body: Sequence[Buffer], body_bytes: int, flags: int, summed: bool = True) -> bytes:
    """Return preamble and header of a frame. ``summed``: with its checksum, if it is of a kind that has one."""
    start = preamble(kind, len(header), body_bytes, flags)
    if summed and kind in _CHECKED_KINDS:
        start = start[: -_CRC.size] + _CRC.pack(_crc(start, header, body))
    return start + header


def _verify(preamble: bytes, header: Buffer, body: Buffer) -> None:
    """Raises WireError: bytes changed on their way."""
    (crc,) = _CRC.unpack_from(preamble, PREAMBLE_BYTES - _CRC.size)
    if crc != (_crc(preamble, header, (body,)) if preamble[4] in _CHECKED_KINDS else 0):
        raise WireError("a frame is damaged: its checksum is wrong")


def encode_frame(kind: int, header: bytes, body: bytes = b"", flags: int = 0) -> bytes:
    """Return a whole frame as bytes, for frames without large bodies."""
    return _head(kind, header, (body,), len(body), flags) + body


def _checked(buffer: bytes | bytearray | memoryview, at: int, limits: Limits) -> tuple[int, int, int, int, int]:
    """Return (kind, flags, header length, body length, checksum) of the preamble at ``at``; raises WireError."""
    magic, kind, flags, check, header_bytes, body_bytes, crc = _PREAMBLE.unpack_from(buffer, at)
    if magic != MAGIC or kind not in _KINDS or (check and kind not in _CHECKED_KINDS):
        raise WireError(f"not an everstep frame: it begins with {bytes(buffer[at : at + 8])!r}")
    if header_bytes > limits.header_bytes:
        raise WireError(f"frame header of {header_bytes} bytes announced, at most {limits.header_bytes} allowed")
    if body_bytes > limits.body_bytes:
        raise WireError(f"frame body of {body_bytes} bytes announced, at most {limits.body_bytes} allowed")
    if kind in _CHECKED_KINDS and check != _check(bytes(buffer[at : at + PREAMBLE_BYTES])):
        raise WireError("a frame is damaged: the check of its lengths is wrong")
    return kind, flags, header_bytes, body_bytes, crc


def decode_header(decoder: msgspec.msgpack.Decoder[T], header: bytes, what: str) -> T:
    """Raises WireError for whatever a stranger may have put there, and nothing else."""
    try:
        return decoder.decode(header)
    except MALFORMED as error:
        raise WireError(f"malformed {what}: {error}") from None


class FrameDecoder:
    """Decodes frames: bytes in, frames out. After a WireError the connection is to be closed: the decoder stays broken.

    ``limits`` may be raised between frames (after authentication).
    """

    def __init__(self, limits: Limits) -> None:
        self.limits = limits
        self._buffer = bytearray()
        self._error: WireError | None = None

    def feed(self, data: bytes, most: int = 1 << 30) -> list[Frame]:
        """Return the frames that ``data`` completes, at most ``most`` (the rest come with ``feed(b"")``)."""
        if self._error is not None:
            raise self._error
        source: bytes | bytearray
        if self._buffer:
            self._buffer += data
            source = self._buffer
        else:
            source = data  # the common case: whole frames arrive, nothing is copied to a buffer
        frames: list[Frame] = []
        at, end = 0, len(source)
        try:
            while end - at >= PREAMBLE_BYTES and len(frames) < most:
                kind, flags, header_bytes, body_bytes, crc = _checked(source, at, self.limits)
                header_at = at + PREAMBLE_BYTES
                body_at = header_at + header_bytes
                if end < body_at + body_bytes:
                    break
                header = bytes(source[header_at:body_at])
                body = bytes(source[body_at : body_at + body_bytes]) if body_bytes else b""
                if crc or kind in _CHECKED_KINDS:
                    _verify(bytes(source[at:header_at]), header, body)
                frames.append(Frame(kind, flags, header, body))
                at = body_at + body_bytes
        except WireError as error:
            self._error = error
            if not frames:
                raise
            # Frames before the garbage are good; the error comes with the next feed.
            return frames
        if source is self._buffer:
            del self._buffer[:at]
        elif at < end:
            self._buffer += memoryview(data)[at:]
        return frames

    @property
    def error(self) -> WireError | None:
        """Why the stream is broken, once it is."""
        return self._error

    @property
    def buffered_bytes(self) -> int:
        return len(self._buffer)


def _flat(buffer: Buffer) -> memoryview:
    """Return a byte view of a C-contiguous buffer (bytes, memoryview, ndarray, mmap)."""
    view = memoryview(buffer)
    return view.cast("B") if view.nbytes else memoryview(b"")


class FrameSocket:
    """Sends and receives frames over a blocking socket (Unix, TCP, TLS). One thread may send while another receives.

    Waits are cut in ticks by SO_RCVTIMEO/SO_SNDTIMEO, which cost nothing where data is there (unlike
    ``settimeout``, which polls before every call); the deadline is looked at once a tick.
    """

    def __init__(
        self,
        sock: socket.socket | TlsSocket,
        limits: Limits,
        *,
        fds: bool = False,
        recv_tick_s: float = 0.1,
        send_tick_s: float = 0.1,
    ) -> None:
        self.sock = sock
        self.limits = limits
        self._tls: TlsSocket | None = None if isinstance(sock, socket.socket) else sock
        self._plain: socket.socket | None = sock if isinstance(sock, socket.socket) else None
        self._take_fds = fds
        self._fds: list[int] = []
        self._in = memoryview(bytearray(_CHUNK_BYTES))
        self._start = self._end = 0
        self._body = memoryview(b"")
        self.closed = False
        self._seals: tuple[Seal, Seal] | None = None  # of what is sent, and of what comes
        if self._plain is not None and self._plain.family == socket.AF_UNIX:
            # Else a body of any size is sent in many turns of sender and receiver.
            self._plain.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _UNIX_SEND_BYTES)
        self.set_ticks(recv_tick_s, send_tick_s)

    @property
    def exposed(self) -> bool:
        """Return whether others may be on the way: neither TLS nor within this machine's kernel."""
        return self._plain is not None and self._plain.family != socket.AF_UNIX

    def seal(self, sent: Seal, received: Seal) -> None:
        """From the next frame on, in both directions, each one is authenticated."""
        self._seals = sent, received

    def set_ticks(self, recv_s: float, send_s: float) -> None:
        """Set how long one system call may block, in seconds; 0: for ever (then only without a deadline)."""
        raw = self._tls.raw if self._tls is not None else self._plain
        assert raw is not None
        for option, seconds in ((socket.SO_RCVTIMEO, recv_s), (socket.SO_SNDTIMEO, send_s)):
            raw.setsockopt(socket.SOL_SOCKET, option, struct.pack("ll", int(seconds), int(seconds % 1 * 1e6)))

    # ------------------------------------------------------------ sending

    def send(
        self,
        kind: int,
        header: bytes,
        buffers: Sequence[Buffer] = (),
        *,
        deadline: Deadline | None = None,
        fds: Sequence[int] = (),
        flags: int = 0,
        on_wait: Callable[[], None] | None = None,
    ) -> None:
        """Send one frame whose body is the buffers one after the other. ``fds`` ride along (Unix sockets only);
        ``on_wait`` is called at every tick at which the peer has taken nothing.

        Raises WireError when the peer is gone, DeadlineError. After either the connection is useless: close it.
        """
        views = [view for view in map(_flat, buffers) if view.nbytes]
        body_bytes = sum(view.nbytes for view in views)
        views.insert(0, memoryview(_head(kind, header, views, body_bytes, flags, self._seals is None)))
        if self._seals is not None:
            views.append(memoryview(self._seals[0].tag(views)))
        try:
            if fds and self._plain is not None:
                rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))]
                sent = self._plain.sendmsg(views[:1], rights)
                _advance(views, sent)
            self._send_views(views, deadline, on_wait)
        except OSError as error:
            raise WireError(f"the peer is gone: {_reason(error)}") from error

    def send_raw(self, frames: bytes, *, deadline: Deadline | None = None) -> None:
        """Send frames that ``encode_frame`` made. Raises as ``send``."""
        try:
            self._send_views([memoryview(frames)], deadline)
        except OSError as error:
            raise WireError(f"the peer is gone: {_reason(error)}") from error

    def _send_views(
        self, views: list[memoryview], deadline: Deadline | None, on_wait: Callable[[], None] | None = None
    ) -> None:
        sender = self._tls if self._tls is not None else self._plain
        assert sender is not None
        while views or (self._tls is not None and self._tls.unsent):
            try:
                sent = sender.sendmsg(views[:_IOV_MAX])
            except BlockingIOError:
                self._tick(deadline)
                if on_wait is not None:
                    on_wait()
                continue
            _advance(views, sent)
            if views and deadline is not None:  # a peer that takes a byte a second must not hold us for ever
                deadline.check()

    def _tick(self, deadline: Deadline | None) -> None:
        if self.closed:
            raise ClosedError("the connection is closed")
        if deadline is not None:
            deadline.check()

    # ------------------------------------------------------------ receiving

    def recv(self, *, deadline: Deadline | None = None, into: memoryview | None = None) -> Frame:
        """Return the next frame. Its body lies in ``into`` when that is given and large enough, else in a buffer that
        is used again by the next ``recv``. Raises ClosedError, WireError, DeadlineError; after any of them: close."""
        try:
            self._fill(PREAMBLE_BYTES, deadline, boundary=True)
            kind, flags, header_bytes, body_bytes, _ = _checked(self._in, self._start, self.limits)
            start = bytes(self._in[self._start : self._start + PREAMBLE_BYTES])
            self._start += PREAMBLE_BYTES
            if header_bytes <= _CHUNK_BYTES:
                self._fill(header_bytes, deadline)
                header = bytes(self._in[self._start : self._start + header_bytes])
                self._start += header_bytes
            else:
                big = bytearray(header_bytes)
                self._read(memoryview(big), deadline)
                header = bytes(big)
            body: memoryview | bytes = b""
            if body_bytes:
                body = place = self._place(body_bytes, into)
                self._read(place, deadline)
            if self._seals is None:
                _verify(start, header, body)
            else:
                self._seals[1].check((start, header, body), self._take_tag(deadline))
            return Frame(kind, flags, header, body)
        except OSError as error:
            raise WireError(f"the peer is gone: {_reason(error)}") from error

    def _take_tag(self, deadline: Deadline | None) -> bytes:
        self._fill(TAG_BYTES, deadline)
        tag = bytes(self._in[self._start : self._start + TAG_BYTES])
        self._start += TAG_BYTES
        return tag

    def _place(self, body_bytes: int, into: memoryview | None) -> memoryview:
        if into is not None and into.nbytes >= body_bytes:
            return into.cast("B")[:body_bytes] if into.format != "B" or into.ndim != 1 else into[:body_bytes]
        if len(self._body) > _KEEP_BODY_BYTES >= body_bytes:
            self._body = memoryview(b"")
        if len(self._body) < body_bytes:
            grown = body_bytes if body_bytes > _KEEP_BODY_BYTES else 1 << (body_bytes - 1).bit_length()
            self._body = memoryview(bytearray(grown))
        return self._body[:body_bytes]

    def _fill(self, need: int, deadline: Deadline | None, boundary: bool = False) -> None:
        """Have ``need`` (<= one chunk) bytes in the read-ahead."""
        if self._end - self._start >= need:
            return
        if self._start:
            if self._start < self._end:
                left = bytes(self._in[self._start : self._end])
                self._in[: len(left)] = left
            self._end -= self._start
            self._start = 0
        while self._end < need:
            count = self._recv_some(self._in[self._end :], deadline)
            if count == 0:
                if boundary and self._end == 0:
                    raise ClosedError("the peer closed the connection")
                raise WireError("the peer closed the connection within a frame")
            self._end += count
            if deadline is not None and self._end < need:
                deadline.check()

    def _read(self, view: memoryview, deadline: Deadline | None) -> None:
        """Fill the whole view: first from the read-ahead, the rest straight from the socket."""
        at = min(len(view), self._end - self._start)
        view[:at] = self._in[self._start : self._start + at]
        self._start += at
        while at < len(view):
            count = self._recv_some(view[at:], deadline, socket.MSG_WAITALL)
            if count == 0:
                raise WireError("the peer closed the connection within a frame")
            at += count
            if deadline is not None and at < len(view):
                deadline.check()

    def _recv_some(self, view: memoryview, deadline: Deadline | None, flags: int = 0) -> int:
        """Receive at least a byte; 0: the end. MSG_WAITALL: all of ``view``, unless a tick passes before (a body comes
        in many small pieces, and every return to Python waits for the interpreter's lock)."""
        while True:
            try:
                if self._plain is None:
                    assert self._tls is not None
                    return self._tls.recv_into(view)
                if not self._take_fds:
                    return self._plain.recv_into(view, len(view), flags)
                return self._recv_with_fds(view, flags)
            except BlockingIOError:
                self._tick(deadline)

    def _recv_with_fds(self, view: memoryview, flags: int = 0) -> int:
        assert self._plain is not None
        room = socket.CMSG_SPACE(_FDS_MAX * array.array("i").itemsize)
        flags |= socket.MSG_CMSG_CLOEXEC
        count, ancillary, _flags, _address = self._plain.recvmsg_into([view], room, flags)
        for level, kind, data in ancillary:
            if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
                fds = array.array("i")
                fds.frombytes(data[: len(data) - len(data) % fds.itemsize])
                self._fds.extend(fds)
        if len(self._fds) > _FDS_MAX:
            raise WireError(f"{len(self._fds)} file descriptors arrived that no message asked for")
        return count

    def recv_bytes(self, most: int = _CHUNK_BYTES) -> bytes | None:
        """Return whatever has arrived, b"" at the end of the stream, None at a tick; for a FrameDecoder."""
        if self._end > self._start:
            return self.take_buffered()
        try:
            sock = self._tls if self._tls is not None else self._plain
            assert sock is not None
            count = sock.recv_into(self._in[:most])
        except BlockingIOError:
            return None
        except OSError as error:
            raise WireError(f"the peer is gone: {_reason(error)}") from error
        return bytes(self._in[:count])

    def readable(self) -> bool:
        """Return whether ``recv`` would find something at once."""
        if self._end > self._start:
            return True
        poller = select.poll()
        poller.register(self.sock.fileno(), select.POLLIN)
        return bool(poller.poll(0))

    def take_fd(self) -> int | None:
        """Return the oldest file descriptor that came along; the caller closes it."""
        return self._fds.pop(0) if self._fds else None

    @property
    def plain_fd(self) -> int:
        """Return the socket's descriptor, if what is sent there is sent as it is; else -1."""
        return self._plain.fileno() if self._plain is not None and self._seals is None else -1

    def take_buffered(self) -> bytes:
        """Return what was read ahead and not used; for handing the connection over to a decoder."""
        rest = bytes(self._in[self._start : self._end])
        self._start = self._end = 0
        return rest

    # ------------------------------------------------------------ end

    def shutdown(self) -> None:
        """Wake whoever waits in send or recv; they find the connection closed. From any thread."""
        self.closed = True
        raw = self._tls.raw if self._tls is not None else self._plain
        assert raw is not None
        with contextlib.suppress(OSError):  # not connected any more
            raw.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self.shutdown()
        self.sock.close()
        while self._fds:
            os.close(self._fds.pop())

    def __repr__(self) -> str:
        transport = "tls" if self._tls is not None else "plain" if self._seals is None else "sealed"
        return f"<FrameSocket {transport} {'closed' if self.closed else 'open'}>"


def _advance(views: list[memoryview], count: int) -> None:
    """Drop the first ``count`` bytes from the views, in place."""
    done = 0
    while done < len(views) and count >= views[done].nbytes:
        count -= views[done].nbytes
        done += 1
    del views[:done]
    if count:
        views[0] = views[0][count:]


def _reason(error: OSError) -> str:
    return error.strerror or str(error) or type(error).__name__
