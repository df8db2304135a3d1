"""Encrypts between nodes with TLS: one self-signed certificate a job, pinned by everyone who has the job's secret file.

``TlsSocket`` drives an ``ssl.SSLObject`` over memory BIOs: the lock covers only the cipher work, so that one thread
may send while another waits for data (``ssl.SSLSocket`` allows no such thing), and system calls move 256 KiB instead
of one 16 KiB record.
"""

from __future__ import annotations

import contextlib
import os
import socket
import ssl
import threading
from collections.abc import Sequence
from typing import cast

from everstep.errors import WireError
from everstep.net.auth import Secret, SecretError
from everstep.net.retry import Deadline

SERVER_NAME = "everstep-job"
_CHUNK_BYTES = 256 * 1024


def _load_chain(context: ssl.SSLContext, secret: Secret) -> None:
    # ssl reads certificates from files only; a memfd is one that never touches a disk.
    fd = os.memfd_create("everstep-cert", os.MFD_CLOEXEC)
    try:
        os.write(fd, (secret.cert_pem + secret.key_pem).encode())
        context.load_cert_chain(f"/proc/self/fd/{fd}")
    finally:
        os.close(fd)


def server_context(secret: Secret) -> ssl.SSLContext:
    """Return a context of TLS 1.3 with the job's certificate. Raises WireError when the secret's certificate is
    unusable."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.num_tickets = 0  # every connection proves itself; no resumption
    try:
        _load_chain(context, secret)
    except ssl.SSLError as error:
        raise WireError(f"the certificate in the job's secret file is unusable: {error.reason or error}") from error
    return context


def client_context(secret: Secret) -> ssl.SSLContext:
    """Return a context of TLS 1.3 that trusts the job's certificate and no other."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    try:
        context.load_verify_locations(cadata=secret.cert_pem)
    except ssl.SSLError as error:
        raise WireError(f"the certificate in the job's secret file is unusable: {error.reason or error}") from error
    return context


class TlsSocket:
    """Is a connected blocking socket with TLS on it; ``recv_into``, ``sendmsg`` as of a socket."""

    def __init__(self, raw: socket.socket, context: ssl.SSLContext, *, server_side: bool) -> None:
        self.raw = raw
        self._in, self._out = ssl.MemoryBIO(), ssl.MemoryBIO()
        self._ssl = context.wrap_bio(
            self._in, self._out, server_side=server_side, server_hostname=None if server_side else SERVER_NAME
        )
        self._lock = threading.Lock()
        self._cipher = memoryview(b"")  # encrypted and not sent yet

    def handshake(self, deadline: Deadline) -> None:
        """Raises SecretError (not this job's certificate), WireError, DeadlineError. The socket's ticks must be set."""
        try:
            while True:
                try:
                    self._ssl.do_handshake()
                    self._flush(deadline)
                    return
                except ssl.SSLWantReadError:
                    self._flush(deadline)
                    self._take(deadline)
        except ssl.SSLCertVerificationError as error:
            self._say_why()
            raise SecretError("the peer's certificate is not this job's: the secret file is another job's") from error
        except ssl.SSLError as error:
            self._say_why()
            raise WireError(f"TLS handshake failed: {error.reason or error}") from error
        except OSError as error:
            raise WireError(f"the peer is gone: {error.strerror or error}") from error

    def _say_why(self) -> None:
        """Send the alert that OpenSSL has made, so that the other side's log says what was wrong."""
        with contextlib.suppress(OSError):
            self.sendmsg([])

    def _flush(self, deadline: Deadline) -> None:
        while self._out.pending or self._cipher:
            try:
                self.sendmsg([])
            except BlockingIOError:
                deadline.check()

    def _take(self, deadline: Deadline) -> None:
        while True:
            try:
                data = self.raw.recv(_CHUNK_BYTES)
                break
            except BlockingIOError:
                deadline.check()
        if not data:
            raise WireError("the peer closed the connection during the TLS handshake")
        self._in.write(data)

    @property
    def unsent(self) -> bool:
        """Return whether ``sendmsg([])`` still has something to send."""
        return bool(self._cipher)

    def sendmsg(self, buffers: Sequence[memoryview]) -> int:
        """Take up to 256 KiB of the buffers; returns how much was taken. BlockingIOError at a tick.

        What was taken is sent before anything else by the next call (see ``unsent``)."""
        taken = 0
        if not self._cipher:
            with self._lock:
                for view in buffers:
                    piece = view[: _CHUNK_BYTES - taken]
                    taken += self._ssl.write(piece)
                    if taken >= _CHUNK_BYTES:
                        break
                self._cipher = memoryview(self._out.read())
        try:
            while self._cipher:
                self._cipher = self._cipher[self.raw.send(self._cipher) :]
        except BlockingIOError:
            if not taken:
                raise
        return taken

    def recv_into(self, view: memoryview) -> int:
        """Receive at least one byte, 0 at the end of the stream. BlockingIOError at a tick."""
        while True:
            with self._lock:
                got = self._decrypt(view)
            if got is not None:
                return got
            data = self.raw.recv(_CHUNK_BYTES)
            with self._lock:
                if data:
                    self._in.write(data)
                else:
                    self._in.write_eof()

    def _decrypt(self, view: memoryview) -> int | None:
        got = 0
        try:
            while got < len(view):
                # typeshed says bytes; with a buffer given it is the number of bytes
                count = cast(int, self._ssl.read(len(view) - got, view[got:]))
                if not count:
                    return got
                got += count
        except ssl.SSLWantReadError:
            return got or None
        except (ssl.SSLZeroReturnError, ssl.SSLEOFError):
            return got
        return got

    def fileno(self) -> int:
        return self.raw.fileno()

    def close(self) -> None:
        self.raw.close()

    def __repr__(self) -> str:
        return f"<TlsSocket {self._ssl.version()}>"
