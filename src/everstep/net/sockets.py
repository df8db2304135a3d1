"""Makes sockets: Unix ones that survive long run directories, TCP ones that notice a dead peer in seconds.

A Unix socket's path must fit 107 bytes; a run directory's need not. So the directory is opened and the socket named
``/proc/self/fd/N/NAME``, which always fits.
"""

from __future__ import annotations

import contextlib
import errno
import os
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from everstep.errors import ConfigError, PlatformError, WireError
from everstep.ids import NodeId
from everstep.model.member import Address
from everstep.net.frames import Limits
from everstep.net.retry import Deadline

if TYPE_CHECKING:
    from everstep.net.auth import Secret
    from everstep.net.frames import FrameSocket

TCP_USER_TIMEOUT_MS = 2000
"""Unacknowledged data (or a reader that stands still) for so long ends a TCP connection; without it a silent
partition is noticed after 15 minutes of retransmission."""

BACKLOG = 1024


@contextlib.contextmanager
def _short(path: Path) -> Iterator[str]:
    """Yield a name of at most 107 bytes for the socket ``path``, good inside the block."""
    fd = os.open(path.parent, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        yield f"/proc/self/fd/{fd}/{path.name}"
    finally:
        os.close(fd)


def listen_unix(path: Path) -> socket.socket:
    """Listen at ``path``, for the user only. A socket file that is there (of a process that died) is replaced in one
    step; its directory is made if need be. Raises PlatformError."""
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    fresh = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        fresh.unlink(missing_ok=True)
        with _short(fresh) as name:
            sock.bind(name)
        fresh.chmod(0o600)  # before listen: until then nobody can connect
        sock.listen(BACKLOG)
        fresh.replace(path)
    except OSError as error:
        sock.close()
        with contextlib.suppress(OSError):
            fresh.unlink(missing_ok=True)
        raise PlatformError(f"cannot listen at {path}: {error.strerror or error}") from error
    return sock


def connect_unix(path: Path, deadline: Deadline) -> socket.socket:
    """Raises WireError when nobody listens there, DeadlineError."""
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        sock.settimeout(max(0.001, deadline.left_s))
        with _short(path) as name:
            sock.connect(name)
        sock.settimeout(None)
    except TimeoutError:
        sock.close()
        raise deadline.error(f"{path} does not answer") from None
    except BlockingIOError:  # the listener's backlog is full
        sock.close()
        raise WireError(f"{path} has too many connections waiting") from None
    except OSError as error:
        sock.close()
        raise WireError(f"nobody listens at {path}: {error.strerror or error}") from error
    return sock


def tune_tcp(sock: socket.socket) -> None:
    """Send small frames at once; notice a peer that is gone within seconds."""
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 3)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 1)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 3)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, TCP_USER_TIMEOUT_MS)


def listen_tcp(host: str, port: int) -> socket.socket:
    """Listen at ``host:port`` (0: any free port). Raises PlatformError in one line: in use, not this machine's."""
    if not 0 <= port <= 65535:  # getaddrinfo would take it modulo 65536
        raise PlatformError(f"cannot listen on {host}:{port}: a port is a number from 0 to 65535")
    try:
        found = socket.getaddrinfo(host or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except (socket.gaierror, UnicodeError) as error:
        raise PlatformError(f"cannot listen on {host}:{port}: no such host ({error})") from None
    family, kind, proto, _name, address = found[0]
    sock = socket.socket(family, kind, proto)
    try:
        # Without it a restarted server waits a minute for the ports of its predecessor's connections.
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind(address)
        sock.listen(BACKLOG)
        tune_tcp(sock)  # accepted connections inherit it
    except OSError as error:
        sock.close()
        if error.errno == errno.EADDRINUSE:
            text = f"port {port} of {host or 'this machine'} is in use: choose another one, or end its owner"
            raise PlatformError(f"{text} (ss -ltnp 'sport = :{port}')") from None
        raise PlatformError(f"cannot listen on {host}:{port}: {error.strerror or error}") from error
    return sock


def connect_tcp(host: str, port: int, deadline: Deadline) -> socket.socket:
    """Raises WireError (refused, no route, no such host), DeadlineError."""
    try:
        sock = socket.create_connection((host, port), timeout=max(0.001, deadline.left_s))
    except TimeoutError:
        raise deadline.error(f"{host}:{port} does not answer") from None
    except (OSError, UnicodeError, OverflowError) as error:
        raise WireError(f"cannot connect to {host}:{port}: {getattr(error, 'strerror', None) or error}") from error
    tune_tcp(sock)
    sock.settimeout(None)
    return sock


def parse_host_port(text: str) -> tuple[str, int]:
    """Parse ``"10.0.0.1:7000"``, ``"[::1]:7000"`` -> (host, port). Raises ConfigError."""
    host, colon, port = text.rpartition(":")
    if not colon or not port.isdecimal() or int(port) > 65535 or not host:
        raise ConfigError(f"{text!r} is not HOST:PORT, such as 10.0.0.1:7000")
    return host.removeprefix("[").removesuffix("]"), int(port)


def is_local(address: Address, node: NodeId, run_dir: Path | None) -> bool:
    """Return whether to reach ``address`` from ``node`` over its Unix socket."""
    return bool(address.unix) and run_dir is not None and address.node == node


def connect(
    address: Address,
    *,
    node: NodeId,
    run_dir: Path | None,
    secret: Secret,
    limits: Limits,
    tls: bool,
    deadline: Deadline,
) -> FrameSocket:
    """Connect from ``node``: over the Unix socket on the same node, else TCP (with TLS when ``tls``).

    Not authenticated yet. Raises WireError, DeadlineError."""
    from everstep.net.frames import FrameSocket

    if is_local(address, node, run_dir):
        assert run_dir is not None
        return FrameSocket(connect_unix(run_dir / address.unix, deadline), limits)
    if not address.host:
        raise WireError(f"{address.unix} is on {address.node}, and has no address for other nodes (run it with --bind)")
    raw = connect_tcp(address.host, address.port, deadline)
    if not tls:
        return FrameSocket(raw, limits)
    from everstep.net.tls import TlsSocket, client_context

    try:
        wrapped = TlsSocket(raw, client_context(secret), server_side=False)
        stream = FrameSocket(wrapped, limits)
        wrapped.handshake(deadline)
    except BaseException:
        raw.close()
        raise
    return stream
