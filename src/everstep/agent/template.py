"""The warm template: imports once what every worker needs, then forks workers in milliseconds.

Single-threaded; talks to its agent in packets over an inherited SOCK_SEQPACKET socketpair. Its workers die with it,
and it dies with its agent: by the kernel's word while it still imports, and afterwards by the end of the socketpair,
so that it can remove the sockets that the killed processes left in the run directory.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import os
import select
import signal
import socket
import sys
import time
from pathlib import Path

import msgspec

from everstep.agent.imports import script_imports
from everstep.model.stage_spans import COPIES_VARIABLE, COPY_SLOTS
from everstep.platforms.local import die_with_parent, sweep_group

MAX_PACKET_BYTES = 128 * 1024


class Fork(msgspec.Struct, frozen=True, tag="fork"):
    """Start a worker. ``env``: value None removes the variable. ``argv``: the script and its arguments."""

    slot: int
    incarnation: int
    env: dict[str, str | None]
    argv: tuple[str, ...]
    log: str
    error: str  # file for what the script raised
    cwd: str
    threads: int
    processes: int = 1  # of this worker
    copies: bool = False  # the worker's processes are stages, and copy their state into memory of the template
    memory_bytes: int = 0  # private writable memory that each of its processes may have; 0: no limit of ours


class Ready(msgspec.Struct, frozen=True, tag="ready"):
    seconds: float
    failed: tuple[str, ...]  # modules that could not be imported; the script will show why


class Forked(msgspec.Struct, frozen=True, tag="forked"):
    slot: int
    incarnation: int
    pid: int


class Ended(msgspec.Struct, frozen=True, tag="ended"):
    slot: int
    incarnation: int
    pid: int
    status: int  # exit code, or minus the signal's number


Packet = Fork | Ready | Forked | Ended
_encoder = msgspec.msgpack.Encoder()
_decoder: msgspec.msgpack.Decoder[Packet] = msgspec.msgpack.Decoder(Packet)


def send(conn: socket.socket, packet: Packet) -> None:
    conn.send(_encoder.encode(packet))


def receive(conn: socket.socket) -> Packet | None:
    """Return the next packet; None when the other side is gone."""
    try:
        data = conn.recv(MAX_PACKET_BYTES)
    except ConnectionError:
        return None
    return _decoder.decode(data) if data else None


# What every training script needs; `everstep.api.job` brings the library with it. torch imports its compiler in part
# when the first optimizer is made: seconds, that every worker would pay for itself.
_ALWAYS = (
    "torch",
    "torch._dynamo",
    "numpy",
    "pyarrow",
    "pyarrow.parquet",
    "everstep.api.job",
    "everstep.api.group_trainer",
    "everstep.api.ps_trainer",
    "everstep.api.nn",
    "everstep.api.worker_runtime",
)


def preload(names: list[str]) -> list[str]:
    """Import each; the names of those that failed. A module's failure, of any kind, must not end the template."""
    failed = []
    for name in names:
        try:
            importlib.import_module(name)
        except BaseException:
            # `from package import name` may have given us an attribute's parent only; nothing to do but go on
            failed.append(name)
    return failed


def warm_up() -> None:
    """Torch imports half of itself (dynamo, sympy: 1.5 s) when the first optimizer is made: do it once, here. No
    gradient is computed: autograd's threads would not survive the fork."""
    torch = sys.modules.get("torch")
    if torch is not None:
        with contextlib.suppress(Exception):
            torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.1).zero_grad()


class Template:
    """Runs the template's loop: it forks on demand and reports every exit at once."""

    def __init__(self, conn: socket.socket, run_dir: Path) -> None:
        self._conn = conn
        self._run_dir = run_dir
        self._children: dict[int, tuple[Fork, int]] = {}  # pidfd -> (request, pid)
        self._copies: dict[int, list[int]] = {}  # by worker: memory that outlives it (``pipeline.copy_slots``)
        self._poll = select.poll()
        self._poll.register(conn, select.POLLIN)

    def serve(self) -> None:
        """Serve until the agent is gone; then everything that it started here ends, and its sockets are removed."""
        while True:
            for fd, _ in self._poll.poll():
                if fd != self._conn.fileno():
                    self._report(fd)
                    continue
                packet = receive(self._conn)
                if packet is None:
                    self._end()
                    return
                if isinstance(packet, Fork):
                    self._fork(packet)

    def _fork(self, request: Fork) -> None:
        parent = os.getpid()
        if request.copies and request.slot not in self._copies:
            files = 1 + COPY_SLOTS * request.processes
            self._copies[request.slot] = [os.memfd_create("everstep-copy", os.MFD_CLOEXEC) for _ in range(files)]
        pid = os.fork()
        if pid == 0:
            self._become_worker(request, parent)  # never returns
        with contextlib.suppress(OSError):
            os.setpgid(pid, pid)
        pidfd = os.pidfd_open(pid)
        self._children[pidfd] = (request, pid)
        self._poll.register(pidfd, select.POLLIN)
        send(self._conn, Forked(request.slot, request.incarnation, pid))

    def _become_worker(self, request: Fork, parent: int) -> None:
        try:
            os.setpgid(0, 0)
            die_with_parent(parent)
            self._conn.close()
            for fd in self._children:
                os.close(fd)
            for slot, fds in self._copies.items():
                if slot != request.slot:
                    for fd in fds:
                        os.close(fd)
            if request.copies:
                os.environ[COPIES_VARIABLE] = ",".join(map(str, self._copies[request.slot]))
            from everstep.agent.worker_process import run_worker

            run_worker(request)
        finally:
            os._exit(70)

    def _report(self, pidfd: int) -> None:
        request, pid = self._children.pop(pidfd)
        self._poll.unregister(pidfd)
        sweep_group(pid)
        _, status = os.waitpid(pid, 0)
        os.close(pidfd)
        code = os.waitstatus_to_exitcode(status)
        if code == 0:  # it left, and its state with it
            for fd in self._copies.pop(request.slot, ()):
                os.close(fd)
        send(self._conn, Ended(request.slot, request.incarnation, pid, code))

    def _end(self) -> None:
        for _, pid in self._children.values():
            sweep_group(pid)
        sockets = self._run_dir / "sock"
        if sockets.is_dir():
            for path in sockets.iterdir():
                if path.is_socket():
                    path.unlink(missing_ok=True)


def main(argv: list[str]) -> None:
    """Run ``template FD RUN_DIR SCRIPT [MODULE...]``."""
    fd, run_dir, script, *modules = argv
    conn = socket.socket(fileno=int(fd))
    conn.set_inheritable(False)
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    began = time.monotonic()
    failed = preload([*_ALWAYS, *modules, *script_imports(Path(script))])
    warm_up()
    gc.collect()
    gc.freeze()  # workers share these pages; a collection in a worker must not copy them
    die_with_parent(os.getppid(), 0)  # from here on the socketpair's end tells
    try:
        send(conn, Ready(round(time.monotonic() - began, 3), tuple(failed)))
        Template(conn, Path(run_dir)).serve()
    except (BrokenPipeError, ConnectionError):
        Template(conn, Path(run_dir))._end()


if __name__ == "__main__":
    # `python -m` makes this module "__main__"; workers replace that, so run the importable twin instead
    from everstep.agent.template import main as _main

    _main(sys.argv[1:])
