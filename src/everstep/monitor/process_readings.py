"""Reads what the operating system says of this process: processor time, memory, throttling by its cgroup, kind of
machine."""

from __future__ import annotations

import contextlib
import os
import resource
from pathlib import Path

from everstep.monitor.vitals import peak_bytes

HARDWARE_MAX = 80  # characters of a class's name


class ProcessReadings:
    """Reads the same few files of /proc and /sys again and again. Where one is missing its readings are, too."""

    def __init__(self, proc: Path = Path("/proc/self"), cgroups: Path = Path("/sys/fs/cgroup")) -> None:
        self._proc = proc
        self._cpu_stat = _cpu_stat(proc, cgroups)

    def __repr__(self) -> str:
        return f"<readings of {self._proc}, throttling in {self._cpu_stat}>"

    def readings(self) -> dict[str, float]:
        """Return ``cpu_s``, ``rss_bytes``, ``peak_bytes`` (the most that was resident so far), ``cores`` (that this
        process may run on); ``throttled`` (periods) and ``throttled_s`` where a cgroup counts them.
        Counters are since the process (for a cgroup: since that) began."""
        out = {"cpu_s": sum(resource.getrusage(resource.RUSAGE_SELF)[:2]), "rss_bytes": 0.0}
        with contextlib.suppress(OSError, ValueError, IndexError):
            pages = int((self._proc / "statm").read_text().split()[1])
            out["rss_bytes"] = float(pages * resource.getpagesize())
        if peak := peak_bytes(self._proc.name, self._proc.parent):
            out["peak_bytes"] = float(peak)
        with contextlib.suppress(OSError, AttributeError):  # (Linux has it)
            out["cores"] = float(len(os.sched_getaffinity(0)))
        if self._cpu_stat is not None:
            with contextlib.suppress(OSError, ValueError):
                out.update(parse_cpu_stat(self._cpu_stat.read_text()))
        return out


def parse_cpu_stat(text: str) -> dict[str, float]:
    """Parse a ``cpu.stat``: version 2 counts microseconds (``throttled_usec``), version 1 nanoseconds
    (``throttled_time``)."""
    found: dict[str, float] = {}
    for line in text.splitlines():
        name, _, value = line.partition(" ")
        with contextlib.suppress(ValueError):
            if name == "nr_throttled":
                found["throttled"] = float(value)
            elif name == "throttled_usec":
                found["throttled_s"] = float(value) * 1e-6
            elif name == "throttled_time":
                found["throttled_s"] = float(value) * 1e-9
    return found


def _cpu_stat(proc: Path, cgroups: Path) -> Path | None:
    """Return the ``cpu.stat`` of this process: of its cgroup, or (in a container that sees only itself) the root's."""
    paths: list[Path] = []
    with contextlib.suppress(OSError, ValueError):
        for line in (proc / "cgroup").read_text().splitlines():
            number, controllers, path = line.split(":", 2)
            inside = path.lstrip("/")
            if number == "0":
                paths += [cgroups / inside / "cpu.stat", cgroups / "cpu.stat"]
            elif "cpu" in controllers.split(","):
                for folder in (controllers, "cpu"):
                    paths += [cgroups / folder / inside / "cpu.stat", cgroups / folder / "cpu.stat"]
    for candidate in paths:
        with contextlib.suppress(OSError):
            if "throttled" in candidate.read_text():
                return candidate
    return None


def hardware_class(proc: Path = Path("/proc")) -> str:
    """Return what this machine is, in words that are the same on every machine of its kind: its GPUs, else its
    processor, and how many. "": unknown."""
    with contextlib.suppress(OSError):
        models = [_field(info, "Model") for info in sorted((proc / "driver/nvidia/gpus").glob("*/information"))]
        if models:
            return clean_hardware(f"{models[0]} x{len(models)}")
    model = _field(proc / "cpuinfo", "model name")
    return clean_hardware(f"{model} x{os.cpu_count() or 1}") if model else ""


def machine_name(proc: Path = Path("/proc")) -> str:
    """Return a name that is the same in all pods and network namespaces of one machine, as long as it is up, and no
    other machine has. "": unknown."""
    with contextlib.suppress(OSError):
        boot = (proc / "sys/kernel/random/boot_id").read_text().strip()
        return f"m-{boot.replace('-', '')[:8]}" if boot else ""
    return ""


def clean_hardware(text: str) -> str:
    """Return one short printable line, whatever it was."""
    return " ".join("".join(c if c.isprintable() else " " for c in text).split())[:HARDWARE_MAX]


def _field(path: Path, name: str) -> str:
    with contextlib.suppress(OSError):
        for line in path.read_text(errors="replace").splitlines():
            key, _, value = line.partition(":")
            if key.strip() == name:
                return value.strip()
    return ""
