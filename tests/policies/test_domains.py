"""Machines and zones that are lost whole: what a layout keeps apart, what following them costs, what is not covered."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from everstep.config.parity import OFF, ParityCode
from everstep.ids import Slot
from everstep.policies.domains import PsSite, at_home, covered, layout_words, limits_of
from everstep.policies.stripes import StripeLayout, arrange

CODES = [ParityCode(k, m) for k in (1, 2, 3, 4, 5) for m in (1, 2)]


def sites(*counts: int, zones: tuple[str, ...] = ()) -> list[PsSite]:
    """So many ps on each machine; the first one is the master's."""
    of = [machine for machine, count in enumerate(counts) for _ in range(count)]
    zone_of = zones or ("",) * len(counts)
    return [PsSite(Slot(s), f"m{machine}", zone_of[machine], machine == 0) for s, machine in enumerate(of)]


def made(code: ParityCode, partitions: int, at: list[PsSite], old: StripeLayout | None = None) -> StripeLayout:
    return arrange(code, partitions, [site.slot for site in at], old, limits_of(code, at))


def most_together(code: ParityCode, layout: StripeLayout, at: list[PsSite], zone: bool = False) -> dict[str, int]:
    """The most units of one stripe in each machine or zone."""
    of = {site.slot: site.zone if zone else site.machine for site in at}
    found = dict.fromkeys(of.values(), 0)
    for stripe in range(len(layout.sites)):
        units = [of[slot] for slot in layout.stripe(code, stripe)]
        for domain in found:
            found[domain] = max(found[domain], units.count(domain))
    return found


@st.composite
def clusters(draw: st.DrawFn) -> tuple[ParityCode, int, list[PsSite]]:
    code = draw(st.sampled_from(CODES))
    counts = draw(st.lists(st.integers(1, 4), min_size=1, max_size=code.width + 3))
    counts[0] += max(0, code.width - sum(counts))
    partitions = draw(st.integers(code.width, 40))
    return code, partitions, sites(*counts)


@settings(max_examples=200, deadline=None)
@given(clusters())
def test_no_two_units_are_in_one_machine_while_there_are_enough(case: tuple[ParityCode, int, list[PsSite]]) -> None:
    code, partitions, at = case
    layout = made(code, partitions, at)
    together = most_together(code, layout, at)
    assert layout.shared(code) == 0 == layout.crowded(code, limits_of(code, at))
    if len(together) >= code.width:
        assert max(together.values()) == 1
    limits = limits_of(code, at)
    if limits and covered(code, limits[0].most, {"m0"}):
        assert all(count <= code.m for machine, count in together.items() if machine != "m0")


@settings(max_examples=200, deadline=None)
@given(clusters(), st.data())
def test_a_layout_follows_machines_that_come_and_go_and_moves_little(
    case: tuple[ParityCode, int, list[PsSite]], data: st.DataObject
) -> None:
    """What is well placed stays: a unit moves because its ps is gone, its machine has too many, or to even out."""
    code, partitions, at = case
    layout = made(code, partitions, at)
    assert made(code, partitions, at, layout) == layout, "a good layout is left alone"
    machines = sorted({site.machine for site in at} - {"m0"})
    if not machines:
        return
    lost = data.draw(st.sampled_from(machines))
    left = [site for site in at if site.machine != lost]
    if len(left) < code.width:
        return
    after = made(code, partitions, left, layout)
    assert after.crowded(code, limits_of(code, left)) == 0 == after.shared(code)
    gone = {site.slot for site in at if site.machine == lost}
    limits = limits_of(code, left)
    must = moved = 0
    for stripe in range(len(layout.sites)):
        before, now = layout.stripe(code, stripe), after.stripe(code, stripe)
        stay = [slot for slot in before if slot not in gone]
        must += len(before) - len(stay) + sum(limit.beyond(stay) for limit in limits)
        moved += sum(a != b for a, b in zip(before, now, strict=True))
    assert moved - must <= (partitions + len(layout.sites) * code.m) / 2, (moved, must)  # (as a rule nothing)


def test_enough_machines_cost_no_balance() -> None:
    for code, counts in ((ParityCode(2, 1), (2, 2, 2)), (ParityCode(4, 2), (2, 2, 2)), (ParityCode(1, 1), (3, 3))):
        at = sites(*counts)
        layout = made(code, 60, at)
        data = [layout.owner.count(site.slot) for site in at]
        mirrors = [sum(row.count(site.slot) for row in layout.sites) for site in at]
        assert max(data) - min(data) <= 1 and max(mirrors) - min(mirrors) <= 1, (data, mirrors)


def test_two_units_on_a_machine_are_borne_by_two_mirrors() -> None:
    code, at = ParityCode(4, 2), sites(2, 2, 2)
    assert most_together(code, made(code, 64, at), at) == {"m0": 2, "m1": 2, "m2": 2}
    assert "any one of them but the master's may be lost" in layout_words(code, at)


def test_with_too_few_machines_the_masters_takes_more() -> None:
    code, at = ParityCode(2, 1), sites(3, 3)
    assert most_together(code, made(code, 64, at), at) == {"m0": 2, "m1": 1}
    assert "any one of them but the master's may be lost" in layout_words(code, at)


def test_what_cannot_be_covered_is_said() -> None:
    assert "is not covered, only that of 2 ps" in layout_words(ParityCode(4, 2), sites(3, 3))
    assert "too few ps" in layout_words(ParityCode(4, 2), sites(2, 2))
    assert "nothing protects" in layout_words(OFF, sites(2, 2))
    assert layout_words(ParityCode(1, 1), sites(4)).startswith("4 ps on 1 machine, the master's")


def test_one_machine_limits_nothing() -> None:
    assert limits_of(ParityCode(2, 1), sites(6)) == ()
    assert limits_of(OFF, sites(2, 2, 2)) == ()
    assert limits_of(ParityCode(4, 2), sites(2, 2)) == ()


def test_zones_are_kept_apart_where_the_machines_leave_room() -> None:
    code = ParityCode(2, 1)
    at = sites(1, 1, 1, 1, 1, 1, zones=("a", "a", "b", "b", "c", "c"))
    layout = made(code, 60, at)
    assert set(most_together(code, layout, at).values()) == {1}
    assert set(most_together(code, layout, at, zone=True).values()) == {1}
    assert "any one of 3 zones" in layout_words(code, at)
    one_large = sites(5, 1, 1, 1, zones=("b", "a", "a", "a"))  # two of a stripe in b would be on one machine
    assert set(most_together(code, made(code, 60, one_large), one_large).values()) == {1}
    unconfirmed = sites(1, 1, 1, 1, zones=("a", "b", "", "c"))
    assert len(limits_of(code, unconfirmed)) == 1


def test_ps_stay_with_the_master_until_the_rest_can_be_lost() -> None:
    assert at_home(ParityCode(2, 1), 3) == 0
    assert at_home(ParityCode(2, 1), 2) == 2
    assert at_home(ParityCode(4, 2), 2) == 4
    assert at_home(OFF, 2) == 0
