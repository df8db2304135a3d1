"""Several ps are told to leave at once: what would be lost with all of them moves first, and nothing beside it."""

from __future__ import annotations

import copy
import itertools

import msgspec
import pytest

from everstep.config.parity import ParityCode
from everstep.ids import PartitionId, Slot
from everstep.model.placement import Mirror, MirrorKind
from everstep.policies.moves import MOVES_AT_ONCE, MoveSteps, advance, exposed_at
from everstep.policies.placement_builder import How, PlacementBuilder, lost_with
from everstep.policies.stripes import StripeLayout, arrange

PARTITIONS = 64


def begun(code: ParityCode, ps: int) -> tuple[PlacementBuilder, StripeLayout]:
    """A job on so many ps, all of whose mirrors are complete."""
    slots = [Slot(s) for s in range(ps)]
    layout = arrange(code, PARTITIONS, slots)
    builder = PlacementBuilder(
        code=code,
        version=1,
        routing=1,
        living=set(slots),
        owner=list(layout.owner),
        mirrors=[],
        ready=set(),
        missing={},
        snapshots={},
        next_id=1,
    )
    advance(builder, layout, first=True)
    return all_arrived(builder), layout


def like(builder: PlacementBuilder, leaving: frozenset[Slot] = frozenset()) -> PlacementBuilder:
    return msgspec.structs.replace(copy.deepcopy(builder), leaving=leaving, awaits=bool(leaving))


def all_arrived(builder: PlacementBuilder) -> PlacementBuilder:
    """All that was begun is complete, and whoever was given a partition has it."""
    fresh = msgspec.structs.replace(builder, version=builder.version + 1, ready={m.id for m in builder.mirrors})
    fresh.missing = {b: p for b, p in builder.missing.items() if p.how is not How.HAND_OVER}
    return fresh


def emptied(builder: PlacementBuilder, layout: StripeLayout, leaving: frozenset[Slot]) -> tuple[int, int, int]:
    """Rounds until nothing that only leaving ps have is left, partitions that were begun to move by then, and mirrors
    that were; then goes on until they are empty."""
    rounds = moved = built = 0
    safe = None
    for turn in range(200):
        lost = lost_with(builder, leaving)
        copied = {b for b in lost if any(m.at not in leaving for m in builder.copies(b))}
        if lost == copied and safe is None:
            safe = turn, moved, built
        if not any(slot in leaving for slot in builder.owner) and not any(m.at in leaving for m in builder.mirrors):
            assert safe is not None
            return safe
        steps = advance(builder, layout)
        rounds, moved, built = rounds + 1, moved + len(steps.begun), built + steps.built
        builder = all_arrived(builder)
    raise AssertionError(f"they are never empty: {builder.owner}")


@pytest.mark.parametrize(
    ("code", "ps", "count"),
    [(ParityCode(1, 1), 4, 2), (ParityCode(1, 1), 6, 2), (ParityCode(2, 1), 5, 2), (ParityCode(4, 2), 10, 3)],
)
def test_what_only_they_have_goes_first_and_nothing_beside_it(code: ParityCode, ps: int, count: int) -> None:
    builder, before = begun(code, ps)
    choices = [frozenset(map(Slot, gone)) for gone in itertools.combinations(range(ps), count)]
    leaving = max(choices, key=lambda gone: len(lost_with(builder, gone)))
    exposed = len(lost_with(builder, leaving))
    assert exposed > 0, "the case shows nothing"
    layout = arrange(code, PARTITIONS, [Slot(s) for s in range(ps) if s not in leaving], before)
    plain = emptied(like(builder), layout, leaving)
    ranked = like(builder, leaving)
    assert len(exposed_at(ranked, layout)) == exposed
    _, moved, built = emptied(ranked, layout, leaving)
    assert moved <= exposed, "nothing else moved until they were safe"
    assert moved + built <= plain[1] + plain[2], "less was copied until then than without ranks"
    assert moved + built < plain[1] + plain[2] or moved + built == exposed


def test_a_ps_that_leaves_alone_moves_as_ever() -> None:
    """Where mirrors are complete, one ps that leaves has nothing that the others could not bring back."""
    builder, before = begun(ParityCode(1, 1), 3)
    layout = arrange(ParityCode(1, 1), PARTITIONS, [Slot(0), Slot(1)], before)
    ranked = like(builder, frozenset({Slot(2)}))
    assert exposed_at(ranked, layout) == set()
    assert advance(ranked, layout) == advance(like(builder), layout)


def test_without_parity_nothing_else_is_to_be_done_anyway() -> None:
    builder, before = begun(ParityCode(1, 0), 3)
    layout = arrange(ParityCode(1, 0), PARTITIONS, [Slot(0), Slot(1)], before)
    ranked = like(builder, frozenset({Slot(2)}))
    exposed = exposed_at(ranked, layout)
    assert exposed == {PartitionId(b) for b, slot in enumerate(builder.owner) if slot == 2}
    assert set(advance(ranked, layout).begun) <= exposed


def test_a_partition_whose_mirror_is_being_made_is_exposed() -> None:
    builder, before = begun(ParityCode(1, 1), 3)
    mirror = next(m for m in builder.mirrors if m.kind is MirrorKind.PARITY and builder.owner[m.members[0]] == 2)
    builder.ready.discard(mirror.id)
    layout = arrange(ParityCode(1, 1), PARTITIONS, [Slot(0), Slot(1)], before)
    builder.leaving = frozenset({Slot(2)})
    steps = advance(builder, layout)
    assert steps.begun == [mirror.members[0]], "it alone, though a dozen others are to move"
    assert isinstance(mirror, Mirror)


def leaves_alone(flows: bool) -> tuple[PlacementBuilder, StripeLayout]:
    """Ps 2 of three leaves; nothing is mirrored."""
    builder, before = begun(ParityCode(1, 0), 3)
    layout = arrange(ParityCode(1, 0), PARTITIONS, [Slot(0), Slot(1)], before)
    return msgspec.structs.replace(like(builder, frozenset({Slot(2)})), flows=flows), layout


def one_arrives(builder: PlacementBuilder) -> PlacementBuilder:
    """The oldest mirror that is being made is complete, and partitions that were given are where they were to go."""
    fresh = msgspec.structs.replace(builder, version=builder.version + 1, missing={})
    left = sorted(m.id for m in fresh.mirrors if m.id not in fresh.ready)
    fresh.ready |= set(left[:1])
    return fresh


def test_the_next_partition_of_a_ps_that_leaves_begins_when_one_is_complete() -> None:
    builder, layout = leaves_alone(flows=True)
    had = builder.owner.count(Slot(2))
    assert len(advance(builder, layout).begun) == MOVES_AT_ONCE
    begun_so_far, switched = MOVES_AT_ONCE, 0
    for arrived in range(1, had + 1):
        builder = one_arrives(builder)
        steps = advance(builder, layout)
        begun_so_far, switched = begun_so_far + len(steps.begun), switched + len(steps.switched)
        assert begun_so_far == min(had, MOVES_AT_ONCE + arrived), "so many are being copied all the time"
        assert len(steps.switched) in (0, MOVES_AT_ONCE) or arrived == had
    assert switched == had and builder.owner == list(layout.owner)


def test_those_that_are_complete_wait_while_others_are_handed_over() -> None:
    builder, layout = leaves_alone(flows=True)
    advance(builder, layout)
    for _ in range(MOVES_AT_ONCE):
        builder = one_arrives(builder)
        steps = advance(builder, layout)
    assert len(steps.switched) == MOVES_AT_ONCE and len(builder.missing) == MOVES_AT_ONCE
    held = dict(builder.missing)
    for _ in range(MOVES_AT_ONCE + 1):
        builder = one_arrives(builder)
        builder.missing = dict(held)
        assert not advance(builder, layout).switched
    builder.missing = {}
    assert len(advance(builder, layout).switched) == MOVES_AT_ONCE + 1


def test_masters_of_before_began_the_next_moves_when_none_was_under_way() -> None:
    builder, layout = leaves_alone(flows=False)
    assert len(advance(builder, layout).begun) == MOVES_AT_ONCE
    for _ in range(MOVES_AT_ONCE - 1):
        builder = one_arrives(builder)
        assert advance(builder, layout) == MoveSteps()
    steps = advance(one_arrives(builder), layout)
    assert len(steps.switched) == MOVES_AT_ONCE and len(steps.begun) == MOVES_AT_ONCE


def test_a_move_for_balance_begins_nothing_beside_those_under_way() -> None:
    builder, before = begun(ParityCode(1, 0), 2)
    slots = [Slot(0), Slot(1), Slot(2)]
    builder.living = set(slots)
    layout = arrange(ParityCode(1, 0), PARTITIONS, slots, before)
    assert advance(builder, layout).begun
    assert advance(one_arrives(builder), layout) == MoveSteps()


@pytest.mark.parametrize(("code", "ps"), [(ParityCode(1, 1), 2), (ParityCode(1, 2), 3)])
def test_a_ps_that_leaves_protects_who_stays_until_it_has_given_everything_away(code: ParityCode, ps: int) -> None:
    """The simulator found it (machines 5682): who was to stay was dead already, and its mirrors had been dropped."""
    builder, before = begun(code, ps)
    stays = Slot(0)
    leaving = frozenset(Slot(s) for s in range(1, ps))
    layout = arrange(code, PARTITIONS, [stays], before)
    builder = like(builder, leaving)
    own = {PartitionId(b) for b, slot in enumerate(builder.owner) if slot == stays}
    owners: list[Slot] = []
    for _ in range(200):
        if not any(slot in leaving for slot in builder.owner):
            break
        assert not lost_with(builder, {stays}) & own, "they come back as long as others have anything to give"
        advance(builder, layout)
        owners, builder = builder.owner, all_arrived(builder)
    assert set(owners) == {stays}
    advance(builder, layout)
    assert not any(m.at in leaving for m in builder.mirrors), "they are empty in the end"
