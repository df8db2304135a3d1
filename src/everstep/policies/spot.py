"""Chooses how to live on machines that are taken back: from what was seen of them, by pure functions.

*Hazard* is how often one machine is taken back, per second that it was held. From it follow the interval between
checkpoints and the level of parity, by the formulas of ``advise``; what a machine is worth, and so which kind to ask
for; and when machines that stay are due, because those that go would not finish in time.

A *spot policy* is a function from ``SpotSeen`` to ``SpotPlan``. ``by_hazard`` is the shipped one. A user's own one is
named ``module:callable``, as for stragglers (``everstep simulate --spot-policy``, ``everstep run --spot-policy``).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Final, NamedTuple

from everstep.model.capacity import Market, Offer
from everstep.model.spot_choice import ReclaimsSeen
from everstep.policies.advise import Case, options, young_interval

PRIOR_S: Final = 6 * 3600.0
"""A machine of which nothing was seen yet is taken to go after so long on average."""
INTERVAL_MAX_S: Final = 6 * 3600.0
STAYS_S: Final = 30 * 86_400.0
"""A machine that stays is taken to fail after so long on average."""
SPARE: Final = 1.1
"""Work is taken to need so much more time than the formula says."""


class Hazard(NamedTuple):
    """Is what was seen of machines of one kind. ``held_s``: machine-seconds; ``together``: the share of reclaims that
    took more than one machine at a moment; ``most``: machines that went at one moment, at most."""

    held_s: float = 0.0
    reclaims: int = 0
    together: float = 0.0
    most: int = 0

    @property
    def between_s(self) -> float:
        """Return the seconds after which one machine goes, on average. One reclaim in ``PRIOR_S`` counts as seen, too:
        a short look without any says little."""
        return (self.held_s + PRIOR_S) / (self.reclaims + 1)


def seen_hazard(spans: Iterable[tuple[float, float | None]], until_s: float) -> Hazard:
    """Return the hazard of machines that were held from ``begin`` to ``end`` (None: they were not taken back), as it
    was seen at ``until_s``."""
    held_s, ends = 0.0, []
    for begin, end in spans:
        if begin < until_s:
            held_s += min(until_s, until_s if end is None else end) - begin
            if end is not None and end <= until_s:
                ends.append(end)
    groups: dict[float, int] = {}
    for end in ends:
        groups[end] = groups.get(end, 0) + 1
    more = sum(count > 1 for count in groups.values())
    return Hazard(held_s, len(ends), more / len(groups) if groups else 0.0, max(groups.values(), default=0))


def hazard_of(seen: ReclaimsSeen) -> Hazard:
    """Return the hazard of what a running job has seen."""
    return Hazard(seen.held_s, seen.reclaims, seen.shared / seen.moments if seen.moments else 0.0, seen.most)


class SpotSeen(NamedTuple):
    """Is what a spot policy goes by. ``machines``: that the job has, on average. ``write_s``: for which a full
    checkpoint is written; ``stall``: the share of it that training loses. ``restart_s``: from a loss until training
    goes on. ``protecting``: the share of the speed that one parity partition of a stripe costs. ``ps``: that may stand
    on these machines. ``saves_itself``: no state is lost with one of them, so that a loss costs no more than a step;
    ``stays``: nor with all of them, because a machine that stays has it."""

    hazard: Hazard
    machines: float
    ps: int = 0
    state_bytes: float = 1e9
    write_s: float = 10.0
    stall: float = 0.02
    restart_s: float = 10.0
    protecting: float = 0.07
    saves_itself: bool = False
    stays: bool = False


class SpotPlan(NamedTuple):
    """Is what a spot policy wants. ``interval_s``: between checkpoints, 0: none; ``parity``: "" leaves it as it is;
    ``safe_ps``: ps that belong on machines that stay. ``why``: one line."""

    interval_s: float
    parity: str = ""
    safe_ps: int = 0
    why: str = ""


SHIPPED: Final = ("none", "hazard")

SpotPolicy = Callable[[SpotSeen], SpotPlan]


def by_hazard(seen: SpotSeen) -> SpotPlan:
    """Return what the seen hazard calls for."""
    losses_s = seen.hazard.between_s / max(1.0, seen.machines)
    parity = parity_level(seen) if seen.ps > 1 else ""
    beyond = 1.0
    if seen.saves_itself:
        beyond = max(1e-3, seen.hazard.together ** max(1.0, seen.machines))  # all of them at one moment
    elif parity not in ("", "0"):
        beyond = max(1e-3, seen.hazard.together ** int(parity.partition("+")[2]))
    interval_s = checkpoint_interval_s(seen.write_s, seen.stall, STAYS_S if seen.stays else losses_s / beyond)
    groups = f"{100 * seen.hazard.together:.0f} % in groups"
    words = f"one of {seen.machines:.1f} machines goes every {losses_s:.0f} s, {groups}"
    words += "; a machine that stays has all state" if seen.stays else ""
    return SpotPlan(interval_s, parity, safe_ps(seen.ps, parity, seen.hazard.most), words)


def checkpoint_interval_s(write_s: float, stall: float, between_s: float) -> float:
    """Return the best interval between checkpoints by Young's rule, where one is needed every ``between_s``; no shorter
    than a checkpoint takes, no longer than ``INTERVAL_MAX_S``."""
    return min(max(write_s, young_interval(max(1e-3, write_s * stall), between_s), 5.0), INTERVAL_MAX_S)


def parity_level(seen: SpotSeen) -> str:
    """Return the parity that costs least at this hazard, of those that the number of ps allows: "0" is none."""
    case = Case(
        table_bytes=max(1.0, seen.state_bytes),
        bandwidth=max(1.0, seen.state_bytes / max(1e-3, seen.write_s)),
        mtbf_s=seen.hazard.between_s / max(1, seen.ps),
        ps=seen.ps,
        stall=seen.stall,
        restart_s=seen.restart_s,
        parity=seen.protecting,
        replica=seen.protecting,
        together=seen.hazard.together,
    )
    best = options(case)[0].name
    return best.split()[1] if best.startswith(("parity", "replica")) else "0"


def safe_ps(ps: int, parity: str, together: int) -> int:
    """Return how many ps belong on machines that stay. ``together``: machines that go at one moment. What parity can
    rebuild may stand on machines that go; if more of them go at once, the others may not."""
    level = int(parity.partition("+")[2] or 0) if parity not in ("", "0") else 0
    return 0 if together <= level else max(0, ps - level)


class KnownOffer(NamedTuple):
    """Is a kind of machine that can be had, and what was seen of it. ``samples_per_s``: that one trains. ``away``: the
    share of the time in which none could be had."""

    offer: Offer
    hazard: Hazard
    samples_per_s: float = 1.0
    away: float = 0.0


def usd_per_sample(known: KnownOffer, lost_s: float) -> float:
    """Return what one useful sample costs there. ``lost_s``: seconds of a machine's time that its reclaim costs. A kind
    without a price is the last to be chosen."""
    if known.offer.price is None:
        return math.inf
    goodput = 1.0
    if known.offer.market is Market.SPOT:
        goodput = known.hazard.between_s / (known.hazard.between_s + lost_s)
    return known.offer.price / 3600.0 / max(1e-12, known.samples_per_s * goodput)


def ask_for(offers: Sequence[KnownOffer], machines: int, lost_s: float, share: float = 1.0) -> list[tuple[Offer, int]]:
    """Return which kinds to ask for, and how many of each: the cheapest useful samples first. ``share``: of the
    machines that one zone may have, at most, so that not all go at one moment."""
    limit = max(1, math.ceil(share * machines))
    zones: dict[str, int] = {}
    out: list[tuple[Offer, int]] = []
    left = machines
    for known in sorted(offers, key=lambda k: (usd_per_sample(k, lost_s), k.away)):
        take = min(left, known.offer.count, limit - zones.get(known.offer.zone, 0))
        if take > 0:
            out.append((known.offer, take))
            zones[known.offer.zone] = zones.get(known.offer.zone, 0) + take
            left -= take
    return out


def on_demand_now(
    work_s: float, left_s: float, start_s: float, waited_s: float = 0.0, wait_s: float = math.inf
) -> bool:
    """Return whether machines that stay are due. ``work_s``: that they would need for the rest; ``left_s``: until the
    job has to be over; ``start_s``: until they train. Or no machine could be had for ``waited_s``, of ``wait_s`` at
    most."""
    return left_s <= SPARE * work_s + start_s or waited_s >= wait_s
