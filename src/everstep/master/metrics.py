"""The master's Prometheus endpoint: ``GET /metrics``, numbers only, nothing can be changed by it.

It listens only where ``--metrics`` says so. On this machine's own address (loopback) anyone may read; elsewhere a
bearer token is asked for, which lies in the run directory (``metrics.token``, readable by its owner only).
"""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import ipaddress
import logging
import os
import secrets
from collections.abc import Callable
from pathlib import Path

from everstep.errors import PlatformError
from everstep.monitor.prometheus import CONTENT_TYPE
from everstep.net.sockets import parse_host_port
from everstep.net.strangers import SPEAK_S, Strangers, address_of

logger = logging.getLogger("everstep.master")

TOKEN_FILE = "metrics.token"
REQUEST_MAX_BYTES = 8192
CONNECTIONS_MAX = 16
_BACKLOG = 128
_AGAIN_S = 10.0  # a port that is taken is tried again


class MetricsServer:
    """``page()`` gives the text. ``start`` returns at once; a port in use costs the metrics, never the job."""

    def __init__(self, where: str, run_dir: Path, page: Callable[[], str]) -> None:
        self._host, self._port = parse_host_port(where)
        self._page = page
        self._open = Strangers(CONNECTIONS_MAX)
        self._token = "" if is_loopback(self._host) else _token(run_dir / TOKEN_FILE)
        self._server: asyncio.Server | None = None
        self._task: asyncio.Task[None] | None = None

    def __repr__(self) -> str:
        return f"<metrics on {self._host}:{self.port}{', with a token' if self._token else ''}>"

    @property
    def port(self) -> int:
        """Return where it listens; 0: it does not (yet)."""
        sockets = self._server.sockets if self._server is not None else ()
        return int(sockets[0].getsockname()[1]) if sockets else 0

    def start(self) -> None:
        self._task = asyncio.create_task(self._listen())

    async def _listen(self) -> None:
        reported = False
        while True:
            try:
                self._server = await asyncio.start_server(
                    self._serve, self._host, self._port, limit=REQUEST_MAX_BYTES, backlog=_BACKLOG
                )
                return
            except OSError as error:
                if not reported:
                    logger.warning("no metrics on %s:%s yet: %s", self._host, self._port, error.strerror or error)
                reported = True
            await asyncio.sleep(_AGAIN_S)

    async def close(self) -> None:
        if self._task is not None:
            self._task.cancel()
        if self._server is not None:
            self._server.close()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        place = self._open.enter(address_of(writer.get_extra_info("peername")), writer.transport.abort)
        try:
            async with asyncio.timeout(SPEAK_S):
                try:
                    head = await reader.readuntil(b"\r\n\r\n")
                except (asyncio.LimitOverrunError, asyncio.IncompleteReadError):
                    answer = _answer("400 Bad Request", "the head of the request is not whole, or too large")
                else:
                    answer = self.answer(head)
                writer.write(answer)
                await writer.drain()
        except (TimeoutError, OSError):
            pass
        except Exception:
            logger.exception("the metrics could not be told")
        finally:
            self._open.leave(place)
            with contextlib.suppress(OSError):
                writer.close()

    def answer(self, head: bytes) -> bytes:
        """Return the whole answer to a request (its head, to the empty line)."""
        first, *headers = head.decode("latin-1").split("\r\n")
        parts = first.split(" ")
        if len(parts) != 3 or not parts[2].startswith("HTTP/1."):
            return _answer("400 Bad Request", "this is not HTTP/1")
        if parts[0] not in ("GET", "HEAD"):
            return _answer("405 Method Not Allowed", "metrics can only be read", "Allow: GET, HEAD\r\n")
        if self._token and not self._may(headers):
            return _answer(
                "401 Unauthorized", f"send the token in {TOKEN_FILE} as a bearer", "WWW-Authenticate: Bearer\r\n"
            )
        if parts[1].partition("?")[0] != "/metrics":
            return _answer("404 Not Found", "there is only /metrics")
        whole = _answer("200 OK", self._page(), kind=CONTENT_TYPE)
        return whole if parts[0] == "GET" else whole.partition(b"\r\n\r\n")[0] + b"\r\n\r\n"

    def _may(self, headers: list[str]) -> bool:
        for header in headers:
            name, _, value = header.partition(":")
            if name.strip().lower() == "authorization":
                scheme, _, token = value.strip().partition(" ")
                return scheme.lower() == "bearer" and hmac.compare_digest(token.strip().encode(), self._token.encode())
        return False


def is_loopback(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def _token(path: Path) -> str:
    """Return the one of an earlier master, or a new one. Raises PlatformError."""
    try:
        with contextlib.suppress(FileNotFoundError):
            if (known := path.read_text().strip()) != "":
                return known
        token = secrets.token_urlsafe(24)
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        with os.fdopen(fd, "w") as file:
            file.write(token + "\n")
        return token
    except OSError as error:
        raise PlatformError(f"cannot write {path}: {error.strerror}") from None


def _answer(status: str, text: str, more: str = "", kind: str = "text/plain; charset=utf-8") -> bytes:
    body = (text if text.endswith("\n") else text + "\n").encode("utf-8", "replace")
    head = (
        f"HTTP/1.1 {status}\r\nContent-Type: {kind}\r\nContent-Length: {len(body)}\r\n{more}Connection: close\r\n\r\n"
    )
    return head.encode() + body
