"""``everstep doctor``: does this machine have what everstep needs?"""

from __future__ import annotations

import os
import resource
import shutil
import socket
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from importlib import metadata
from pathlib import Path
from typing import Literal, NamedTuple

import click

from everstep.units import human_bytes

Level = Literal["ok", "warn", "fail"]


class Finding(NamedTuple):
    level: Level
    what: str
    text: str


def check_cores() -> Finding:
    cores = len(os.sched_getaffinity(0))
    return Finding("ok" if cores > 1 else "warn", "cores", f"{cores} usable of {os.cpu_count()}")


def check_memory() -> Finding:
    import psutil

    memory = psutil.virtual_memory()
    text = f"{human_bytes(memory.available)} free of {human_bytes(memory.total)}"
    if memory.available < 512 << 20:
        return Finding("fail", "memory", f"{text}; a worker with torch takes about 300 MiB")
    return Finding("ok" if memory.available > 2 << 30 else "warn", "memory", text)


def check_disk(where: Path | None = None) -> Finding:
    path = where or Path.cwd()
    free = shutil.disk_usage(path).free
    level: Level = "ok" if free > 1 << 30 else "warn" if free > 64 << 20 else "fail"
    return Finding(level, "disk", f"{human_bytes(free)} free in {path}")


def check_fsync(where: Path | None = None) -> Finding:
    """Return what a durable event costs here."""
    times = []
    try:
        with tempfile.NamedTemporaryFile(dir=where or Path.cwd(), prefix=".everstep-doctor-") as file:
            for _ in range(5):
                file.write(b"x" * 4096)
                file.flush()
                began = time.perf_counter()
                os.fsync(file.fileno())
                times.append(time.perf_counter() - began)
    except OSError as error:
        return Finding("fail", "journal disk", f"{where or Path.cwd()} cannot be written: {error.strerror}")
    median_ms = sorted(times)[2] * 1000
    return Finding("ok" if median_ms < 50 else "warn", "journal disk", f"fsync takes {median_ms:.1f} ms")


def check_huge_pages(path: Path = Path("/sys/kernel/mm/transparent_hugepage/enabled")) -> Finding:
    try:
        chosen = path.read_text().partition("[")[2].partition("]")[0]
    except OSError:
        return Finding("warn", "huge pages", "this kernel has none; reads of big tables will be slower")
    if chosen in ("madvise", "always"):
        return Finding("ok", "huge pages", chosen)
    return Finding("warn", "huge pages", f"{chosen}: reads of big tables will be slower (echo madvise > {path})")


def check_memfd() -> Finding:
    try:
        fd = os.memfd_create("everstep-doctor", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    except (OSError, AttributeError) as error:
        return Finding("fail", "shared memory", f"memfd_create does not work: {error}")
    os.close(fd)
    return Finding("ok", "shared memory", "memfd (/dev/shm is not needed)")


def check_unix_sockets() -> Finding:
    try:
        left, right = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    except OSError as error:
        return Finding("fail", "Unix sockets", str(error))
    left.close()
    right.close()
    with tempfile.TemporaryDirectory() as folder, socket.socket(socket.AF_UNIX) as listener:
        try:
            listener.bind(f"{folder}/s")
        except OSError as error:
            return Finding("fail", "Unix sockets", f"cannot bind in {folder}: {error.strerror}")
    return Finding("ok", "Unix sockets", "stream and seqpacket")


def check_pidfd() -> Finding:
    try:
        os.close(os.pidfd_open(os.getpid()))
    except OSError as error:
        return Finding("fail", "kernel", f"pidfd_open does not work ({error.strerror}); Linux 5.3 or newer is needed")
    return Finding("ok", "kernel", f"{os.uname().sysname} {os.uname().release}")


def check_open_files() -> Finding:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    text = f"{soft} (hard limit {hard})"
    return Finding("ok" if soft >= 1024 else "warn", "open files", text if soft >= 1024 else f"{text}; ulimit -n 4096")


def check_clock() -> Finding:
    """Compare the wall clock with the monotonic one over a moment, and look for a sane year."""
    wall, steady = time.time(), time.monotonic()
    time.sleep(0.02)
    drift_s = abs((time.time() - wall) - (time.monotonic() - steady))
    if time.gmtime().tm_year < 2024:
        return Finding("warn", "clock", f"says {time.strftime('%Y-%m-%d')}; is it set?")
    return Finding("ok" if drift_s < 0.01 else "warn", "clock", f"{time.strftime('%Y-%m-%d %H:%M:%S %Z')}")


def check_python() -> Finding:
    version = ".".join(str(n) for n in sys.version_info[:3])
    return Finding("ok" if sys.version_info >= (3, 11) else "fail", "python", f"{version} {sys.executable}")


def check_torch() -> Finding:
    try:
        version = metadata.version("torch")
    except metadata.PackageNotFoundError:
        return Finding("fail", "torch", "not installed; pip install 'torch>=2.13'")
    major, minor = (int(part) for part in version.split("+")[0].split(".")[:2])
    if (major, minor) < (2, 13):
        return Finding("fail", "torch", f"{version}; 2.13 or newer is needed")
    return Finding("ok", "torch", version)


def check_native() -> Finding:
    try:
        from everstep import native
    except ImportError as error:
        return Finding("fail", "native module", f"{error}; install everstep again")
    isa = getattr(native, "isa", None)
    return Finding("ok", "native module", str(isa()) if callable(isa) else "loads")


CHECKS: tuple[Callable[[], Finding], ...] = (
    check_python,
    check_torch,
    check_native,
    check_cores,
    check_memory,
    check_disk,
    check_fsync,
    check_huge_pages,
    check_memfd,
    check_unix_sockets,
    check_pidfd,
    check_open_files,
    check_clock,
)


def findings() -> Iterator[Finding]:
    for check in CHECKS:
        yield check()


def run_doctor() -> int:
    """Print one line a check; exit code 0 unless something fails (then 4)."""
    worst = 0
    for level, what, text in findings():
        colour = {"ok": "green", "warn": "yellow", "fail": "red"}[level]
        click.echo(f"{click.style(f'{level:4}', fg=colour)}  {what:14} {text}")
        worst |= level == "fail"
    return 4 if worst else 0
