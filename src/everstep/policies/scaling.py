"""Decides how many members a job may have, and what speaks against taking some away."""

from __future__ import annotations

from everstep.config.parity import ParityCode, refuse_few

MAX_WORKERS = 100_000
MAX_PS = 10_000


def refuse_workers(count: int) -> str:
    """Return one line if there cannot be so many workers, else ""."""
    if 1 <= count <= MAX_WORKERS:
        return ""
    return f"{count} workers: must be from 1 to {MAX_WORKERS} (everstep stop ends the job)"


def refuse_ps(count: int, code: ParityCode, partitions: int) -> str:
    """Return one line if there cannot be so many ps, else ""."""
    if not 1 <= count <= MAX_PS:
        return f"{count} ps: must be from 1 to {MAX_PS}; they hold the parameters (everstep stop ends the job)"
    if count > partitions:
        return f"{count} ps: more than the job's {partitions} partitions, so some would own nothing"
    few = refuse_few(code, count)
    return f"{count} ps: {few}" if few else ""


def after_drain(code: ParityCode, left: int) -> str:
    """Return what a drain that leaves ``left`` ps does to the protection; "" if nothing."""
    if left >= code.width:
        return ""
    return f"{left} ps are left, parity {code} needs {code.width}: some partitions are protected less until more join"
