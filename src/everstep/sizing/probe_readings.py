"""Holds what a probe measures of a script: facts of the script, of its tables and of its processes."""

from __future__ import annotations

import msgspec


class DistinctKeys(msgspec.Struct, frozen=True):
    """Says how many distinct keys a table gets: ``low`` <= ``likely`` <= ``high``, from ``seen`` of ``total`` samples.

    ``whole``: all samples of an epoch were read. ``sketched``: keys were counted by a sketch, not one by one.
    """

    low: float = 0.0
    likely: float = 0.0
    high: float = 0.0
    seen: int = 0
    total: int = 0
    whole: bool = False
    sketched: bool = False


class TableReading(msgspec.Struct, frozen=True):
    """Describes one table of the ps. ``uploaded``: its rows exist from the beginning. ``fixed``: rows that exist
    whatever the data are, of a dense part or an uploaded embedding; 0: rows come with their keys.

    Units: ``dim``, ``state`` float32s and ``meta`` 4-byte words of one row."""

    name: str
    dim: int
    state: int
    meta: int = 0
    dense: bool = False
    fixed: int = 0
    vocabulary: int | None = None
    admit_after: int = 0
    expires: bool = False
    keys: DistinctKeys = DistinctKeys()
    probed: int = 0  # rows at the end of the probe


class ScriptReading(msgspec.Struct, frozen=True):
    """Describes a script at its loop, as one worker of the probe saw it. Bytes and seconds."""

    samples: int  # of an epoch
    epochs: int
    batch: int
    threads: int
    begin_at: float  # of the window that was measured, on the machine's monotonic clock
    end_at: float
    window_samples: int  # trained in the window, by this worker
    window_steps: int
    step_s: tuple[float, ...] = ()  # duration of each step of the window
    cpu_s: float = 0.0  # of this process in the window
    parameters: int = 0
    parameter_bytes: int = 0
    optimizer_bytes: int = 0  # of optimizers in the worker (mode allreduce)
    activation_bytes: int = 0  # kept for backward by one batch
    bytes_out: float = 0.0  # to the ps, in the window
    bytes_in: float = 0.0
    phases: dict[str, float] = {}  # seconds of the window by phase of the step
    tables: tuple[TableReading, ...] = ()
    read_samples_per_s: float = 0.0  # 0: not measured
    scan_s: float = 0.0  # that it took to read and to count the keys of the tables
    partitions: int = 64

    @property
    def samples_per_s(self) -> float:
        span = self.end_at - self.begin_at
        return self.window_samples / span if span > 0 else 0.0


class ProbeRun(msgspec.Struct, frozen=True):
    """Is one short run of a script with ``workers`` and ``ps``, and what its processes took. CPU seconds are those of
    the measured window, of all processes of the role together; peaks are resident bytes of the largest process."""

    workers: int
    ps: int
    cores: int
    samples_per_s: float
    spread: float  # relative standard error of ``samples_per_s``
    worker_cpu_s: float  # per sample
    ps_cpu_s: float  # per sample
    worker_peak_bytes: int
    ps_peak_bytes: int
    master_peak_bytes: int
    start_s: float  # from the command to the first batch
    script: ScriptReading
    stages: int = 1
    others_cores: float = 0.0  # that other processes of the machine kept busy meanwhile
    rows: float = 0.0  # of all tables at the end of the window; 0: not known
    rows_per_sample: float = 0.0  # of all tables, that were made in the window
    growing_samples_per_s: float = 0.0  # while tables grew, where the other figures are those of the whole job
    recorded: bool = False  # by the history: of the script only samples and epochs are known
