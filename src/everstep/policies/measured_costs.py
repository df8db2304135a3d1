"""Turns what the kernels of protection cost on a machine into shares of a job's throughput.

The processor time ``x`` that protecting one step takes, of its ps and their mirrors together, comes on top of the
``step x cores`` that the step has without it. So its share is ``x / (x + step x cores)``: the worst case, in which
workers and ps share the cores and no core is idle. Writing a snapshot takes processor time from training too: at ``b``
bytes a second and ``c`` seconds a byte that is ``b c / cores`` of the throughput while it is written.
"""

from __future__ import annotations

from typing import NamedTuple

from everstep.policies.advise import Case


class KernelCosts(NamedTuple):
    """Holds seconds of processor time for each row that a step pushes (its distinct keys), of one row of parity."""

    push_s: float  # of the push itself, unprotected
    difference_s: float  # old XOR new, into the outbox
    send_s: float  # the message and the socket, both ends
    apply_s: float  # into the mirror

    @property
    def protect_s(self) -> float:
        return self.difference_s + self.send_s + self.apply_s


class MeasuredCosts(NamedTuple):
    """Holds what a machine was measured to take. Seconds, bytes a second."""

    acked: KernelCosts
    lag: KernelCosts
    lag_pushes: int  # so many pushes went into one difference of each row
    distinct: float  # rows in the differences of that many pushes, as a share of the rows pushed
    write_bytes_per_s: float  # snapshots to the folder, durable
    write_cpu_s_per_byte: float
    took_s: float


class StepLoad(NamedTuple):
    """Holds what a job does in one step. ``rows``: distinct keys pushed by all workers; ``step_s``: how long it takes
    without protection; ``cores``: that workers and ps have together."""

    rows: int
    step_s: float
    cores: int


def share_of(cpu_s: float, load: StepLoad) -> float:
    """Return the share of the throughput that so much more processor time in each step costs."""
    return cpu_s / (cpu_s + load.step_s * load.cores)


def measured_case(case: Case, costs: MeasuredCosts, load: StepLoad, measured: frozenset[str]) -> Case:
    """Return ``case`` with the fields named in ``measured`` from what was measured."""
    acked = share_of(costs.acked.protect_s * load.rows, load)
    made = case._replace(
        bandwidth=costs.write_bytes_per_s if "bandwidth" in measured else case.bandwidth,
        parity=acked if "parity" in measured else case.parity,
        # A replica is one mirror of each row, as one row of parity is: what differs is the memory.
        replica=acked if "replica" in measured else case.replica,
        lag=share_of(costs.lag.protect_s * load.rows, load) if "lag" in measured else case.lag,
    )
    if "stall" in measured:
        made = made._replace(stall=min(1.0, made.bandwidth * costs.write_cpu_s_per_byte / load.cores))
    return made
