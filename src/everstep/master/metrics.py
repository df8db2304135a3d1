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
from everstep.model.observation import ServerSeen, WorkerSeen
from everstep.monitor.names import BY_NAME
from everstep.monitor.prometheus import CONTENT_TYPE, MetricsPage, set_all
from everstep.monitor.slowness import judge
from everstep.monitor.windows import MemberWindows
from everstep.net.messages import SeenReport, StatusReport
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
        """Where it listens; 0: it does not (yet)."""
        sockets = self._server.sockets if self._server is not None else ()
        return int(sockets[0].getsockname()[1]) if sockets else 0

    def start(self) -> None:
        self._task = asyncio.create_task(self._listen())

    async def _listen(self) -> None:
        told = False
        while True:
            try:
                self._server = await asyncio.start_server(
                    self._serve, self._host, self._port, limit=REQUEST_MAX_BYTES, backlog=_BACKLOG
                )
                return
            except OSError as error:
                if not told:
                    logger.warning("no metrics on %s:%s yet: %s", self._host, self._port, error.strerror or error)
                told = True
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
        """The whole answer to a request (its head, to the empty line)."""
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
    """The one of an earlier master, or a new one. Raises PlatformError."""
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


# ---------------------------------------------------------------- what it tells


def fill(
    page: MetricsPage,
    status: StatusReport,
    seen: SeenReport,
    windows: Callable[[str, int], MemberWindows | None],
    wanted: dict[str, int],
) -> None:
    """All metrics of a job. ``windows(member, incarnation)``: of a process, None where it told nothing."""
    page.set("everstep_samples_total", status.samples_done)
    page.set("everstep_throughput_samples_per_second", status.samples_per_s)
    if status.group is not None:
        page.set("everstep_group_steps_total", status.group.step)
    states: dict[tuple[str, str], int] = {}
    for m in status.members:
        states[m.role, m.state] = states.get((m.role, m.state), 0) + 1
    for (role, state), count in states.items():
        page.set("everstep_members", count, role, state)
    set_all(page, "everstep_members_wanted", wanted)
    set_all(page, "everstep_failures_total", {k: float(v) for k, v in status.failures.items()})
    page.set("everstep_batches_retried_total", status.batches_retried)
    newest = {e.dataset: e for e in status.epochs}.values()
    page.set("everstep_shards", sum(e.todo for e in newest), "todo")
    page.set("everstep_shards", sum(e.doing for e in newest), "doing")
    page.set("everstep_master_incarnation", status.master_incarnation)
    set_all(page, "everstep_reported", status.values)
    if status.protection is not None:
        for level in ("full", "less", "none"):
            page.set("everstep_protection_partitions", getattr(status.protection, level), level)
        page.set("everstep_unconfirmed_bytes", status.protection.unconfirmed_bytes)
    if status.checkpoint is not None:
        page.set("everstep_checkpoint_newest", status.checkpoint.newest)
        page.set("everstep_checkpoint_timestamp_seconds", status.checkpoint.at)
    page.set("everstep_drills", len(seen.drills))
    set_all(page, "everstep_readings_dropped_total", {k: float(v) for k, v in seen.dropped.items()})
    _fill_members(page, seen, windows)


_COUNTED = {  # reading -> metric
    "worker": {"computed": "everstep_worker_samples_total", "compute_s": "everstep_worker_compute_seconds_total"},
    "ps": {
        "requests": "everstep_ps_requests_total",
        "service_total_s": "everstep_ps_service_seconds_total",
        "rows": "everstep_ps_rows",
    },
}
_PROCESS = {
    "cpu_s": "everstep_process_cpu_seconds_total",
    "rss_bytes": "everstep_process_resident_memory_bytes",
    "throttled_s": "everstep_process_throttled_seconds_total",
    "throttled": "everstep_process_throttled_periods_total",
}


def _fill_members(page: MetricsPage, seen: SeenReport, windows: Callable[[str, int], MemberWindows | None]) -> None:
    for j in judge(seen.seen):
        if j.slowness:
            page.set("everstep_slowness_ratio", j.slowness, *j.member.split(":"))
    members: list[WorkerSeen | ServerSeen] = [*seen.seen.workers, *seen.seen.servers]
    for m in members:
        role, _, slot = str(m).partition(":")
        page.set("everstep_member_info", 1, role, slot, m.incarnation, m.node, m.hardware)
        found = windows(str(m), m.incarnation)
        last = found.last if found is not None else {}
        for reading, name in {**_COUNTED[role], **_PROCESS}.items():
            if reading in last:
                page.set(name, last[reading], *((role, slot) if BY_NAME[name].labels == ("role", "slot") else (slot,)))
        for reading, value in last.items():
            if reading.startswith("phase."):
                page.set("everstep_worker_phase_seconds_total", value, slot, reading.removeprefix("phase."))
        for way in ("in", "out"):
            if f"bytes_{way}" in last:
                page.set(f"everstep_{role}_bytes_total", last[f"bytes_{way}"], slot, way)
    for w in seen.seen.workers:
        if w.short.per_sample_s:
            page.set("everstep_worker_sample_compute_seconds", w.short.per_sample_s, w.slot)
    for s in seen.seen.servers:
        page.set("everstep_ps_queue_requests", s.queue, s.slot)
        page.set("everstep_ps_partitions", s.buckets, s.slot)
        if s.service_s:
            page.set("everstep_ps_service_seconds", s.service_s, s.slot)
