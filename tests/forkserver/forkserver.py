"""One process does the imports for all jobs of a test run: 3 s of CPU that each of them would spend.

    agent -- template (a shadow) ........... fork server -- the real template -- workers

An agent starts its processes as ever, with the real commands; ``sitecustomize`` makes some of them *shadows*: they hand
their arguments, environment and files to the server, which forks, and end as the fork ends. They pass on SIGTERM; when
a shadow is killed the kernel kills its fork. What the fork does is the product's own code. Tests marked ``cold`` go
without.
"""

from __future__ import annotations

import atexit
import contextlib
import fcntl
import marshal
import os
import select
import signal
import socket
import sys
import threading
from pathlib import Path
from types import ModuleType
from typing import Any

from shadow import TEMPLATE

MAX_BYTES = 192 * 1024
MORE = ("everstep.master.server", "everstep.ps.ps_process", "uvloop", "runpy", "safetensors.torch")
ROOM_FOR_RUN_DIR = 1000  # bytes; see `_tell_run_dir`


# ---------------------------------------------------------------- the server


class Server:
    """Imports at the first request; then forks, one request after the other, and reports every end."""

    def __init__(self, listener: socket.socket) -> None:
        self._listener = listener
        self._run_dir_at = _address_of_run_dir()
        self._warm = False
        self._forks: dict[int, tuple[int, socket.socket]] = {}  # pidfd -> (pid, connection of its shadow)
        self._poll = select.poll()
        for fd in (0, listener.fileno()):
            self._poll.register(fd, select.POLLIN)

    def serve(self) -> tuple[Any, ...] | None:
        """In the server: until its standard input ends, None. In a fork: at once, what it shall become."""
        while True:
            for fd, _ in self._poll.poll():
                if fd == 0:
                    return None
                if fd != self._listener.fileno():
                    self._ended(fd)
                    continue
                conn, _ = self._listener.accept()
                with contextlib.suppress(OSError, EOFError, ValueError):
                    request = self._fork(conn)
                    if request is not None:
                        return request

    def _fork(self, conn: socket.socket) -> tuple[Any, ...] | None:
        conn.settimeout(20.0)
        data, files, _, _ = socket.recv_fds(conn, MAX_BYTES, 8)
        request = marshal.loads(data)
        self._import()
        pid = os.fork()
        if pid == 0:
            os.setpgid(0, 0)
            conn.close()
            self._listener.close()
            for pidfd, (_, other) in self._forks.items():
                os.close(pidfd)
                other.close()
            module, argv, folder, environment = request
            _become(folder, environment, files, self._run_dir_at)
            return module, argv, files[5:]
        for fd in files:
            os.close(fd)
        with contextlib.suppress(OSError):
            conn.send(marshal.dumps(pid))
        pidfd = os.pidfd_open(pid)
        self._forks[pidfd] = pid, conn
        self._poll.register(pidfd, select.POLLIN)
        return None

    def _import(self) -> None:
        if self._warm:
            return
        import gc

        from everstep.agent.template import _ALWAYS, preload, warm_up

        preload([*_ALWAYS, *MORE])
        warm_up()
        gc.collect()
        gc.freeze()
        self._warm = True

    def _ended(self, pidfd: int) -> None:
        pid, conn = self._forks.pop(pidfd)
        self._poll.unregister(pidfd)
        os.close(pidfd)
        _, status = os.waitpid(pid, 0)
        with contextlib.suppress(OSError):
            conn.send(marshal.dumps(os.waitstatus_to_exitcode(status)))
        conn.close()


# ---------------------------------------------------------------- the fork


def _become(folder: str, environment: dict[str, str], files: list[int], run_dir_at: int) -> None:
    alive, network = files[3:5]
    fcntl.fcntl(alive, fcntl.F_SETOWN, os.getpid())
    fcntl.fcntl(alive, fcntl.F_SETSIG, signal.SIGKILL)
    fcntl.fcntl(alive, fcntl.F_SETFL, fcntl.fcntl(alive, fcntl.F_GETFL) | os.O_ASYNC)
    if select.select([alive], [], [], 0)[0]:  # the shadow went before that
        os._exit(1)
    _enter(network)
    for target in range(3):
        os.dup2(files[target], target)
        os.close(files[target])
    _tell_run_dir(run_dir_at, environment.get("EVERSTEP_RUN_DIR", ""))
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(folder)


def _enter(network: int) -> None:
    """Move to the network of the shadow: tests of several nodes give each of them one of its own."""
    import ctypes

    if not os.path.samestat(os.fstat(network), os.stat("/proc/self/ns/net")):  # noqa: PTH116
        libc = ctypes.CDLL(None, use_errno=True)
        if libc.setns(network, 0x4000_0000):  # CLONE_NEWNET
            raise OSError(ctypes.get_errno(), "setns to the shadow's network")
    os.close(network)


def _address_of_run_dir() -> int:
    """Where the kernel keeps the value of EVERSTEP_RUN_DIR that this process was started with."""
    import ctypes

    getenv = ctypes.CDLL(None).getenv
    getenv.restype = ctypes.c_void_p
    found = getenv(b"EVERSTEP_RUN_DIR")
    del os.environ["EVERSTEP_RUN_DIR"]
    return int(found)


def _tell_run_dir(where: int, run_dir: str) -> None:
    """/proc/PID/environ shows it, by which tests find the processes of a job."""
    import ctypes

    ctypes.memmove(where, os.fsencode(run_dir).ljust(ROOM_FOR_RUN_DIR, b"\0")[:ROOM_FOR_RUN_DIR], ROOM_FOR_RUN_DIR)


def _run(module: str, argv: list[str]) -> None:
    """As ``python -m MODULE`` or ``python SCRIPT``; may end the process, and may return."""
    import runpy

    sys.argv = argv
    if module:
        runpy.run_module(module, run_name="__main__", alter_sys=True)
        return
    import torch  # for its number of threads, which the server's environment had fixed

    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", os.cpu_count() or 1)))
    sys.path.insert(0, str(Path(argv[0]).resolve().parent))
    main = sys.modules["__main__"] = ModuleType("__main__")
    main.__file__ = argv[0]
    exec(compile(Path(argv[0]).read_bytes(), argv[0], "exec", dont_inherit=True), main.__dict__)


def _status_of(module: str, argv: list[str]) -> int:
    """Run it; the exit status, as Python's own end of a program would give it."""
    try:
        _run(module, argv)
    except SystemExit as end:
        if isinstance(end.code, int | None):
            return end.code or 0
        print(end.code, file=sys.stderr)
        return 1
    except BaseException as error:
        tb = error.__traceback__
        while tb is not None and tb.tb_frame.f_code.co_filename in (__file__, "<frozen runpy>"):
            tb = tb.tb_next
        sys.last_value = error
        sys.excepthook(type(error), error.with_traceback(tb), tb)
        return 1
    return 0


def main() -> None:
    request = Server(socket.socket(fileno=int(sys.argv[1]))).serve()
    if request is None:
        return
    module, argv, more = request
    if module == TEMPLATE:
        from everstep.agent.template import main as template

        template([str(more[0]), *argv[2:]])
        os._exit(0)
    status = _status_of(module, argv)
    threading._shutdown()  # type: ignore[attr-defined]  # waits for the script's threads
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
    os._exit(status)  # the rest of Python's end takes apart all that was imported


if __name__ == "__main__":
    main()
