"""Says which ps fail together, and how many units of one stripe may stand there.

A *domain* is a machine, or a zone: what is lost at once, with all ps in it. A stripe of k+m units survives the loss of
a domain that has at most m of them. The first node's machine is apart: it has the master, so the job ends with it, and
parity need not cover it.

A limit says how many units of one stripe may be in each domain:

1. one, where there are enough domains with ps;
2. else the least number with which each stripe has a place, if it is m or less: any domain may still be lost;
3. else m in every domain but the first node's, which takes the rest;
4. else the least number with which each stripe has a place: the loss of a domain is not covered.

Machines come first. Zones are kept apart where every machine's zone was told, as far as the machines leave room for
that.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence

import msgspec

from everstep.config.parity import ParityCode
from everstep.ids import Slot


class PsSite(msgspec.Struct, frozen=True, array_like=True):
    """Says where a ps stands. ``home``: on the master's machine. ``zone`` "": nobody said."""

    slot: Slot
    machine: str
    zone: str = ""
    home: bool = False


class Limit(msgspec.Struct, frozen=True):
    """Has the domains of one kind: ``of`` which each ps is, and the most units of one stripe in each of them."""

    of: Mapping[Slot, str]
    most: Mapping[str, int]

    def full(self, taken: Iterable[Slot]) -> set[Slot]:
        """Return the ps of domains that take no further unit of a stripe with units at ``taken``."""
        counts: dict[str, int] = {}
        for slot in taken:
            if slot in self.of:
                counts[self.of[slot]] = counts.get(self.of[slot], 0) + 1
        full = {domain for domain, count in counts.items() if count >= self.most[domain]}
        return {slot for slot, domain in self.of.items() if domain in full} if full else set()

    def beyond(self, taken: Iterable[Slot]) -> int:
        """Return how many of the units at ``taken`` are more than their domains may have."""
        counts: dict[str, int] = {}
        for slot in taken:
            if slot in self.of:
                counts[self.of[slot]] = counts.get(self.of[slot], 0) + 1
        return sum(max(0, count - self.most[domain]) for domain, count in counts.items())


def limits_of(code: ParityCode, sites: Sequence[PsSite]) -> tuple[Limit, ...]:
    """Return the limits that hold for layouts over these ps: of machines, then of zones. Empty where nothing can be
    kept apart: without parity, with one machine, or with fewer ps than a stripe has units."""
    machines = {site.slot: site.machine for site in sites}
    if not code.m or len(sites) < code.width or len(set(machines.values())) < 2:
        return ()
    home = {site.machine for site in sites if site.home}
    at: dict[str, int] = {}
    for machine in machines.values():
        at[machine] = at.get(machine, 0) + 1

    def by_machine(most: Mapping[str, int]) -> int:
        return sum(min(at[machine], most[machine]) for machine in at)

    most = _most(code, sorted(at), home, by_machine)
    limits = [Limit(machines, most)]
    zone_of = {}
    for site in sorted(sites, key=lambda s: s.zone, reverse=True):
        zone_of[site.machine] = site.zone
    zones = sorted(set(zone_of.values()))
    if len(zones) < 2 or "" in zones:
        return tuple(limits)

    def by_zone(of_zones: Mapping[str, int]) -> int:
        room = dict.fromkeys(zones, 0)
        for machine in at:
            room[zone_of[machine]] += min(at[machine], most[machine])
        return sum(min(room[zone], of_zones[zone]) for zone in zones)

    home_zones = {zone_of[machine] for machine in home}
    of_zones = _most(code, zones, home_zones, by_zone)
    if covered(code, of_zones, home_zones):
        limits.append(Limit({slot: zone_of[machine] for slot, machine in machines.items()}, of_zones))
    return tuple(limits)


def _most(
    code: ParityCode, domains: Sequence[str], home: set[str], room: Callable[[Mapping[str, int]], int]
) -> dict[str, int]:
    """Return the most units of a stripe in each domain. ``room``: how many units find a place so."""
    least = next(n for n in range(1, code.width + 1) if room(dict.fromkeys(domains, n)) >= code.width)
    even = dict.fromkeys(domains, least)
    if least <= code.m:
        return even
    leaning = {domain: code.width if domain in home else code.m for domain in domains}
    return leaning if room(leaning) >= code.width else even


def covered(code: ParityCode, most: Mapping[str, int], home: set[str]) -> bool:
    """Return whether any one of these domains but the master's may be lost."""
    return all(count <= code.m for domain, count in most.items() if domain not in home)


def at_home(code: ParityCode, machines: int) -> int:
    """Return how many ps have to be on the master's machine before others get any, so that the loss of another one of
    ``machines`` is covered."""
    return max(0, code.width - (machines - 1) * code.m) if code.m and machines * code.m < code.width else 0


def layout_words(code: ParityCode, sites: Sequence[PsSite]) -> str:
    """Return what a layout over these ps covers, in words."""
    machines = sorted({site.machine for site in sites})
    head = f"{len(sites)} ps on {len(machines)} machine{'s' if len(machines) > 1 else ''}"
    others = [site for site in sites if not site.home]
    if not others:
        return f"{head}, the master's: no other machine has anything that could be lost"
    if not code.m:
        return f"{head}: nothing protects what a machine takes with it (--parity)"
    limits = limits_of(code, sites)
    if not limits:
        return f"{head}: too few ps for {code}, so the loss of a machine is not covered"
    home = {site.machine for site in sites if site.home}
    most = limits[0].most
    if not covered(code, most, home):
        units = max(count for machine, count in most.items() if machine not in home)
        return (
            f"{head}: too few machines for {code}. Up to {units} units of a stripe share one, so the loss of a machine "
            f"is not covered, only that of {code.m} ps"
        )
    words = f"{head}: any one of them but the master's may be lost"
    if len(limits) > 1:
        words += f", and any one of {len(set(limits[1].of.values()))} zones but the master's"
    return words
