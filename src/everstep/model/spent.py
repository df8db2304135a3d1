"""Describes what a job has spent up to a moment."""

from __future__ import annotations

import msgspec

from everstep.ids import NodeId
from everstep.model.capacity import Market


class PaidMachine(msgspec.Struct, frozen=True, array_like=True):
    """Is a machine that is paid now. ``usd``: for an hour, as its source said; None: it did not. ``granted``: its
    source says when it goes; else its agent's silence does."""

    node: NodeId
    hardware: str
    zone: str
    market: Market
    usd: float | None = None
    granted: bool = False


class Spent(msgspec.Struct, frozen=True):
    """Is what a job has spent up to ``at`` (seconds since 1970), and the machines that it paid then. ``unknown_s``:
    node-seconds without a price, which are not in ``usd``."""

    at: float = 0.0
    usd: float = 0.0
    node_s: float = 0.0
    unknown_s: float = 0.0
    machines: tuple[PaidMachine, ...] = ()
