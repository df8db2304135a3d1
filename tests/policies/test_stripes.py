"""Stripes: every legal combination is balanced, and a change costs about what it has to."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from everstep.config.parity import OFF, ParityCode, parse_code, refuse_few
from everstep.errors import ConfigError
from everstep.ids import Slot
from everstep.policies.stripes import StripeLayout, arrange, members_of

CODES = [OFF, *(ParityCode(k, m) for k in (1, 2, 3, 4, 5, 8, 16) for m in (1, 2))]


def slots(n: int) -> list[Slot]:
    return [Slot(s) for s in range(n)]


def check(code: ParityCode, partitions: int, at: list[Slot], layout: StripeLayout) -> None:
    """The two rules of a good layout, given enough ps."""
    data = [layout.owner.count(s) for s in at]
    mirrors = [sum(row.count(s) for row in layout.sites) for s in at]
    stripes = code.stripes(partitions)
    assert sum(data) == partitions and sum(mirrors) == stripes * code.m
    assert layout.shared(code) == 0
    assert max(data) <= -(-partitions // len(at)), data
    assert max(mirrors) <= -(-stripes * code.m // len(at)), mirrors


@pytest.mark.parametrize("code", CODES, ids=str)
def test_every_small_layout_is_balanced(code: ParityCode) -> None:
    for n in range(code.width, code.width + 6):
        for partitions in (*range(n, n + 12), 48, 64):
            check(code, partitions, slots(n), arrange(code, partitions, slots(n)))


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_a_layout_follows_any_change_of_the_ps(data: st.DataObject) -> None:
    code = data.draw(st.sampled_from(CODES[:11]))
    partitions = data.draw(st.integers(code.width + 6, 70))
    layout = None
    for _ in range(3):
        n = data.draw(st.integers(code.width, code.width + 5))
        at = sorted(data.draw(st.permutations(slots(code.width + 8)))[:n])
        layout = arrange(code, partitions, at, layout)
        check(code, partitions, at, layout)
        assert arrange(code, partitions, at, layout) == layout, "a good layout is left alone"


@pytest.mark.parametrize("code", [OFF, ParityCode(1, 1), ParityCode(4, 1), ParityCode(4, 2)], ids=str)
def test_growing_moves_little_more_than_it_must(code: ParityCode) -> None:
    for before, after in ((6, 7), (6, 8), (8, 6), (7, 6)):
        old = arrange(code, 64, slots(before))
        new = arrange(code, 64, slots(after), old)
        moved = sum(a != b for a, b in zip(old.owner, new.owner, strict=True))
        must = 64 - 64 * min(before, after) // max(before, after)
        assert moved <= must * 1.5 + 1, (moved, must)


def test_without_parity_the_first_map_deals_partitions_out_in_turn() -> None:
    assert arrange(OFF, 7, slots(3)).owner == (0, 1, 2, 0, 1, 2, 0)


def test_a_ps_comes_back_to_what_it_had() -> None:
    """Its units went to others meanwhile; afterwards all is in order again with no more moves than it had units."""
    code = ParityCode(4, 1)
    old = arrange(code, 64, slots(6))
    without = arrange(code, 64, slots(5), old)
    again = arrange(code, 64, slots(6), without)
    check(code, 64, slots(6), again)
    moved = sum(a != b for a, b in zip(without.owner, again.owner, strict=True))
    assert moved <= old.owner.count(Slot(5)) + 1


def test_with_too_few_ps_as_few_units_as_possible_share_one() -> None:
    code = ParityCode(4, 1)
    layout = arrange(code, 40, slots(4))
    assert all(len(set(layout.stripe(code, j))) == 4 for j in range(10))
    assert arrange(code, 40, slots(1)).owner == (0,) * 40


def test_a_promoted_mirror_is_made_anew_elsewhere() -> None:
    code = ParityCode(1, 1)
    old = arrange(code, 6, slots(3))
    lost = old.owner[0]
    interim = StripeLayout((old.sites[0][0], *old.owner[1:]), old.sites)
    left = [s for s in slots(3) if s != lost]
    new = arrange(code, 6, left, interim)
    assert new.owner[0] == old.sites[0][0], "the bucket is not moved once more"
    assert new.sites[0][0] != new.owner[0]


def test_the_last_stripe_may_be_shorter() -> None:
    code = ParityCode(4, 2)
    assert members_of(code, 2, 10) == (8, 9)
    assert code.stripes(10) == 3


@pytest.mark.parametrize(
    ("text", "code"),
    [("0", OFF), ("", OFF), ("4+1", ParityCode(4, 1)), (" 16+2 ", ParityCode(16, 2)), ("1+1", ParityCode(1, 1))],
)
def test_parse(text: str, code: ParityCode) -> None:
    assert parse_code(text) == code


@pytest.mark.parametrize("text", ["4", "4+", "+1", "17+1", "4+3", "0+1", "4+0", "-4+1", "4+1+1", "four+one", "4 + 1"])
def test_what_is_no_code(text: str) -> None:
    with pytest.raises(ConfigError):
        parse_code(text)


def test_too_few_ps_is_one_line() -> None:
    assert refuse_few(ParityCode(4, 1), 5) == "" == refuse_few(OFF, 1)
    assert "at least 5 ps" in refuse_few(ParityCode(4, 1), 3)
