"""Works out which protection costs least, for given numbers.

Everything is a share of training time lost. With write time ``W = bytes / bandwidth``, share ``s`` of it that training
loses, mean time between losses of a ps ``M``, restart time ``R`` and read time ``L``:

* *Checkpoints*: a checkpoint costs ``C = s W``. At interval ``T`` the loss is ``C / T + (T / 2 + R + L) / M``: what is
  written, and what is trained again. It is least at ``T = sqrt(2 C M)`` (J. W. Young, "A first order approximation to
  the optimum checkpoint interval", CACM 17(9), 1974), but ``T`` cannot be below ``W``. After a loss only the lost
  ps's partitions are read, ``L = bytes / ps / bandwidth``; the batches since are computed again.
* *Incremental checkpoints* write the share ``f`` of the bytes that changed since the last one, and a full one after
  ``n`` of them: ``W' = W (1 + n f) / (n + 1)`` on average, and ``L`` grows by ``1 + n f / 2``. (Check-N-Run, NSDI 2022,
  reports 6 to 17 times less bandwidth, so ``f`` of 0.06 to 0.17 there, with quantisation.)
* *Parity K+M, replica*: a constant share ``o`` (``m o`` for m), whatever the bytes and the failures (ECRec measured 18
  to 22 %; 2.6 to 5.2 % without dense replication and two-phase commit), and a rebuild. For each lost partition ``k``
  others are read, and ``k`` for each mirror that the lost ps had: ``(k + m) bytes / ps`` in all, which ``ps - 1`` send
  and receive in turns of a share of their time, so it lasts ``B = (k + m) bytes / ps / (ps - 1) / network / share``,
  at ``r`` of the speed. Losses beyond M ps fall back to incremental checkpoints, which are taken for these alone: they
  are ``q**m`` of all. ``q`` is ``p``, the share of losses that take more than one ps (in traces of reclaimed machines
  0.22 to 0.5), and ``B / M``, a second loss before all is protected again. So parity costs ``m o + (1 - r) B / M``
  plus the checkpoints' cost at ``M / q**m``.

* *Parity that may lag*: mirrors are behind by at most ``l`` seconds, at a smaller share ``o`` (``lag_costs``). In mode
  ps a loss costs ``l`` besides: what mirrors lack is trained again, ``l / M``. In hybrid jobs workers push it again.
  The same promise from checkpoints alone, at most ``l`` to be trained again after a loss, takes an interval of ``l``
  (``within``); no sample is lost either way.

* *Partial rollback* (CPR, MLSys 2021) restores a lost ps's rows alone from the newest checkpoint and trains nothing
  again: it loses the updates since then. It is not exact, so it stands apart. With ``p`` the share of all updates that
  may be lost, ``p = T / 2 / M / ps`` gives its interval ``T = 2 p ps M``; everstep itself, where a ps is lost without
  parity, reads the same rows but trains what they lack again.

The defaults are measured where docs/benchmarks.md measures them: on 2 cores that workers and ps share, the worst case
for parity, or with a core that the ps have for themselves (``SPARE_PARITY``).

What a first-order formula leaves out: losses while a checkpoint is being read, and intervals not small against ``M``; a
loss above a half only says "does not work".
"""

from __future__ import annotations

import math
from collections.abc import Callable
from itertools import pairwise
from typing import NamedTuple

BEYOND = "checkpoints beyond it"
"""The part of an option's loss that is for losses of more ps than parity can repair."""


class Case(NamedTuple):
    """Holds what is known of a job. Seconds, bytes, bytes a second; shares from 0 to 1."""

    table_bytes: float
    bandwidth: float  # of the storage, for the whole job
    mtbf_s: float  # between two losses of any ps of the job
    ps: int = 4
    stall: float = 0.02  # share of the writing time that training loses (1: it stops while it writes)
    changed: float = 0.4  # share of the bytes that change between two checkpoints
    full_every: int = 8  # so many incremental ones, then a full one
    restart_s: float = 10.0  # from a loss until training goes on, reading not counted
    network: float = 1e9  # of one ps
    parity: float = 0.09  # share of the throughput that parity costs
    replica: float = 0.09
    rebuilding: float = 0.92  # throughput until all is protected again after a loss, at ``rebuild_share``
    rebuild_share: float = 0.1  # of a ps' time that a rebuild takes
    together: float = 0.2  # share of losses that take more than one ps at once
    step_s: float = 0.0  # 0: not known
    may_lose: float = 0.02  # share of all updates that a partial rollback may lose
    lag: float = 0.02  # share of the throughput that parity costs whose mirrors may be ``lag_s`` behind
    lag_s: float = 4.0
    hybrid: bool = False  # workers keep what mirrors lack, and push it again after a loss

    @property
    def protected_s(self) -> float:
        """Return how long all takes to be protected again after a loss, with parity 4+1."""
        return self.rebuild_s(4, 1)

    def rebuild_s(self, k: int, m: int) -> float:
        """Return how long a rebuild takes: the formula of the module's docstring."""
        return (k + m) * self.table_bytes / self.ps / max(1, self.ps - 1) / self.network / self.rebuild_share


LAG_COSTS = ((0.5, 0.06), (2.0, 0.035), (4.0, 0.02), (8.0, 0.016), (60.0, 0.007))
"""Share of the throughput that parity costs by lag (seconds), without a spare core (docs/benchmarks.md)."""
SPARE_LAG_COSTS = ((0.5, 0.04), (2.0, 0.03), (4.0, 0.005), (60.0, 0.005))
"""The same, with a core that the ps have for themselves."""
SPARE_PARITY = 0.05
"""Share of the throughput that parity costs there without a lag, and a replica too."""


def lag_costs(lag_s: float, spare_core: bool = False) -> float:
    """Return the share of the throughput that parity costs with this lag: on the line between the measured ones, over
    the logarithm of the lag; as the nearest one beyond them."""
    measured = SPARE_LAG_COSTS if spare_core else LAG_COSTS
    for (low_s, low), (high_s, high) in pairwise(measured):
        if lag_s < high_s:
            return low + (high - low) * math.log(max(lag_s, low_s) / low_s) / math.log(high_s / low_s)
    return measured[-1][1]


class Option(NamedTuple):
    """Is one way to protect a job. ``loss``: share of training time; ``interval_s`` 0: no checkpoints; ``memory``:
    bytes held for each byte of rows; ``parts``: what the loss is made of; ``redo_s``: the most that is trained again
    after a loss that it survives by itself."""

    name: str
    loss: float
    interval_s: float
    memory: float
    parts: dict[str, float]
    redo_s: float = 0.0

    @property
    def works(self) -> bool:
        return self.loss < 0.5

    @property
    def binds(self) -> str:
        """Return what costs most: the part to look at first."""
        return max(self.parts, key=lambda name: self.parts[name], default="")


def young_interval(cost_s: float, mtbf_s: float) -> float:
    """Return ``sqrt(2 C M)``, in seconds."""
    return math.sqrt(2.0 * cost_s * mtbf_s)


def checkpoint_loss(cost_s: float, write_s: float, restore_s: float, mtbf_s: float) -> tuple[float, dict[str, float]]:
    """Return the best interval in seconds, and what is lost by what, as shares of the time."""
    interval_s = max(young_interval(cost_s, mtbf_s), write_s, 1e-9)
    parts = {
        "writing": cost_s / interval_s,
        "trained again": interval_s / 2.0 / mtbf_s,
        "restoring": restore_s / mtbf_s,
    }
    return interval_s, parts


def checkpoints(case: Case, incremental: bool, mtbf_s: float | None = None) -> Option:
    """Return what checkpoints cost; ``mtbf_s``: between the losses that need them, if not all do."""
    write_s, read_s = _write_and_read_s(case, incremental)
    interval_s, parts = checkpoint_loss(
        case.stall * write_s, write_s, case.restart_s + read_s, case.mtbf_s if mtbf_s is None else mtbf_s
    )
    name = "incremental checkpoints" if incremental else "full checkpoints"
    return Option(name, sum(parts.values()), interval_s, 1.0, parts, interval_s)


def every(case: Case, interval_s: float) -> Option:
    """Return what full checkpoints cost at this interval, whatever is best: one that is on its way delays the next."""
    write_s, read_s = _write_and_read_s(case, incremental=False)
    interval_s = max(interval_s, write_s)
    parts = {
        "writing": case.stall * write_s / interval_s,
        "trained again": interval_s / 2.0 / case.mtbf_s,
        "restoring": (case.restart_s + read_s) / case.mtbf_s,
    }
    return Option("full checkpoints", sum(parts.values()), interval_s, 1.0, parts, interval_s)


def _write_and_read_s(case: Case, incremental: bool) -> tuple[float, float]:
    """Return how long a checkpoint takes to be written, on average, and what a lost ps needs of it to be read."""
    full_s = case.table_bytes / case.bandwidth
    n, f = (case.full_every, case.changed) if incremental else (0, 1.0)
    return full_s * (1.0 + n * f) / (n + 1.0), full_s / case.ps * (1.0 + n * f / 2.0)


def within(case: Case, redo_s: float) -> Option:
    """Return what incremental checkpoints cost that leave at most ``redo_s`` to be trained again after a loss. If they
    cannot be written that often, training waits for the storage: that is part of the loss."""
    write_s, read_s = _write_and_read_s(case, incremental=True)
    parts = {
        "writing": case.stall * write_s / redo_s,
        "waiting for the storage": max(0.0, write_s / redo_s - 1.0),
        "trained again": redo_s / 2.0 / case.mtbf_s,
        "restoring": (case.restart_s + read_s) / case.mtbf_s,
    }
    return Option("incremental checkpoints", sum(parts.values()), redo_s, 1.0, parts, redo_s)


def coded(case: Case, k: int, m: int, lag: bool = False) -> Option:
    """Return what parity k+m costs; ``1+1`` is a replica. Incremental checkpoints behind it for what goes beyond.
    ``lag``: mirrors may be ``case.lag_s`` behind."""
    constant = case.replica if k == 1 else (case.lag if lag else case.parity) * m
    rebuild_s = case.rebuild_s(k, m)
    parts = {
        "parity" if k > 1 else "replica": constant,
        "rebuilding": (1.0 - case.rebuilding) * rebuild_s / case.mtbf_s,
    }
    redo_s = case.lag_s if lag and not case.hybrid else 0.0
    if redo_s:
        parts["trained again"] = redo_s / case.mtbf_s
    interval_s = 0.0
    beyond = min(1.0, case.together + rebuild_s / case.mtbf_s) ** m
    if beyond > 0:
        second = checkpoints(case, incremental=True, mtbf_s=case.mtbf_s / beyond)
        interval_s = second.interval_s
        parts[BEYOND] = second.loss
    name = f"replica {k}+{m}" if k == 1 else f"parity {k}+{m}"
    if lag:
        name += f" lag {case.lag_s:g}s"
    return Option(name, sum(parts.values()), interval_s, (k + m) / k, parts, redo_s)


def partial_rollback(case: Case) -> Option:
    """Return what full checkpoints cost as often as ``may_lose`` asks for; the updates since the newest one are lost
    with a ps."""
    write_s = case.table_bytes / case.bandwidth
    interval_s = max(2.0 * case.may_lose * case.ps * case.mtbf_s, write_s, 1e-9)
    parts = {
        "writing": case.stall * write_s / interval_s,
        "restoring": (case.restart_s + write_s / case.ps) / case.mtbf_s,
    }
    return Option("partial rollback", sum(parts.values()), interval_s, 1.0, parts)


def updates_lost(case: Case, interval_s: float) -> float:
    """Share of all updates that partial rollbacks lose at this interval between checkpoints."""
    return min(1.0, interval_s / 2.0 / case.mtbf_s / case.ps)


def options(case: Case, codes: tuple[tuple[int, int], ...] = ((1, 1), (4, 1), (4, 2))) -> list[Option]:
    """Return all that the number of ps allows, the cheapest first."""
    found = [checkpoints(case, incremental=False), checkpoints(case, incremental=True)]
    found += [coded(case, k, m) for k, m in codes if k + m <= case.ps]
    found += [coded(case, k, m, lag=True) for k, m in codes if 1 < k <= case.ps - m]
    return sorted(found, key=lambda option: option.loss)


def paying_range(pays: Callable[[float], bool], low: float, high: float) -> tuple[float, float]:
    """Return the ends of the range between ``low`` and ``high`` in which ``pays`` is true (the first one, if there are
    several): 0 and inf for an end that is not within them; (0, 0): it is nowhere true."""
    n = 400
    grid = [low * (high / low) ** (i / n) for i in range(n + 1)]
    begin = next((i for i, at in enumerate(grid) if pays(at)), None)
    if begin is None:
        return 0.0, 0.0
    end = next((i for i in range(begin, n + 1) if not pays(grid[i])), None)
    return (
        0.0 if begin == 0 else _edge(pays, grid[begin], grid[begin - 1]),
        math.inf if end is None else _edge(pays, grid[end - 1], grid[end]),
    )


def _edge(pays: Callable[[float], bool], inside: float, outside: float) -> float:
    for _ in range(60):
        middle = math.sqrt(inside * outside)
        inside, outside = (middle, outside) if pays(middle) else (inside, middle)
    return inside


def paying_mtbf_s(case: Case, k: int, m: int, lag: bool = False) -> tuple[float, float]:
    """Return from which to which time between losses parity k+m costs less than incremental checkpoints
    (``paying_range``, up to 10**9 s): losses that are rarer are not worth it, and where they are more frequent, the
    next one comes before all is protected again."""

    def pays(mtbf_s: float) -> bool:
        at = case._replace(mtbf_s=mtbf_s)
        return coded(at, k, m, lag).loss < checkpoints(at, incremental=True).loss

    return paying_range(pays, 1.0, 1e9)


def paying_bytes(case: Case, k: int, m: int, lag: bool = False) -> tuple[float, float]:
    """Return from how many to how many bytes of tables parity costs less than incremental checkpoints, at this time
    between losses (``paying_range``)."""

    def pays(table_bytes: float) -> bool:
        at = case._replace(table_bytes=table_bytes)
        return coded(at, k, m, lag).loss < checkpoints(at, incremental=True).loss

    return paying_range(pays, 1.0, 1e18)
