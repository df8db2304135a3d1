"""Says where parity begins to cost less than checkpoints, over two numbers: how long the storage takes to write all
tables once (their bytes over its bandwidth), and the mean time between losses of a ps.

The ways are those of ``policies/advise.py``. They are compared twice. *Each at its best*: checkpoints at the interval
that costs least, with all that is trained again after a loss counted. *At equal redo*: checkpoints as often as mirrors
that lag are brought up to date, so that no more is trained again after a loss than there.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from enum import StrEnum
from typing import NamedTuple

from everstep.policies.advise import Case, Option, checkpoints, coded, paying_range, within

WRITE_S = (1.0, 1e5)
"""Seconds to write all tables once: the ends of the sweep."""
MTBF_S = (60.0, 30 * 86400.0)
"""Seconds between losses of a ps: the ends of the sweep."""
STEPS = 40


class ProtectionWay(StrEnum):
    """Is a way to protect a job, as far as a sweep tells them apart."""

    CHECKPOINTS = "checkpoints"
    PARITY = "parity"
    LAG = "parity that may lag"


class CrossoverCell(NamedTuple):
    """Is one point of a sweep: the cheapest way there, and the share of training time that it loses."""

    write_s: float
    mtbf_s: float
    way: ProtectionWay
    loss: float


def steps(ends: tuple[float, float], n: int = STEPS) -> list[float]:
    """Return ``n`` numbers from one end to the other, at equal ratios."""
    low, high = ends
    return [low * (high / low) ** (i / (n - 1)) for i in range(n)]


def code_of(case: Case) -> tuple[int, int]:
    """Return the code that is compared: 4+1, or a replica where there are too few ps for it."""
    return (4, 1) if case.ps >= 5 else (1, 1)


def ways(case: Case, same_redo: bool) -> dict[ProtectionWay, Option]:
    """Return what each way costs. A replica has no lag of its own here: it counts as parity."""
    k, m = code_of(case)
    found = {
        ProtectionWay.CHECKPOINTS: within(case, case.lag_s) if same_redo else checkpoints(case, incremental=True),
        ProtectionWay.PARITY: coded(case, k, m),
    }
    if k > 1:
        found[ProtectionWay.LAG] = coded(case, k, m, lag=True)
    return found


def sweep(
    case: Case, same_redo: bool, write_s: Sequence[float] = (), mtbf_s: Sequence[float] = ()
) -> list[list[CrossoverCell]]:
    """Return, for each time between losses, a row over the writing times. All else is as in ``case``."""
    return [
        [_cell(case, same_redo, write, mtbf) for write in write_s or steps(WRITE_S)] for mtbf in mtbf_s or steps(MTBF_S)
    ]


def _cell(case: Case, same_redo: bool, write_s: float, mtbf_s: float) -> CrossoverCell:
    found = ways(case._replace(table_bytes=write_s * case.bandwidth, mtbf_s=mtbf_s), same_redo)
    way = min(found, key=lambda way: found[way].loss)
    return CrossoverCell(write_s, mtbf_s, way, found[way].loss)


def turn_s(case: Case, same_redo: bool, mtbf_s: float) -> float:
    """Return the writing time from which on some parity costs less than checkpoints at this time between losses; inf:
    none within the sweep."""

    def pays(write_s: float) -> bool:
        return _cell(case, same_redo, write_s, mtbf_s).way is not ProtectionWay.CHECKPOINTS

    low, high = paying_range(pays, *WRITE_S)
    return math.inf if high == 0.0 else max(low, WRITE_S[0])
