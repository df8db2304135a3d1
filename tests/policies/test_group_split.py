"""Steps of a group: they tile the epoch, everybody has a sample, and all members compute the same."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from everstep.config.spec import JobSpec
from everstep.errors import DataError
from everstep.model.group import Micro, Position
from everstep.model.shard import ShardSchedule
from everstep.policies.step_split import apportion, cut_step, divide, divide_parts, lr_factor, step_range, within


def plan(samples: int) -> ShardSchedule:
    return ShardSchedule(name="train", samples=samples, shard_samples=samples, seed=0)


def flat(micros: tuple[tuple[Micro, ...], ...]) -> list[Micro]:
    return [m for of_rank in micros for m in of_rank]


def check_tiles(micros: list[Micro], lo: int, hi: int) -> None:
    at = lo
    for micro in micros:
        assert micro.lo == at
        at = micro.hi
    assert at == hi


def test_steps_tile_an_epoch_and_the_last_one_has_what_is_left() -> None:
    for samples, total in itertools.product(range(1, 60), range(1, 20)):
        at, sizes = 0, []
        while at < samples:
            lo, hi = step_range(at, samples, total)
            assert lo == at < hi <= samples
            sizes.append(hi - lo)
            at = hi
        assert sizes == [total] * (samples // total) + [samples % total] * (samples % total > 0), "as plain PyTorch"


@pytest.mark.parametrize("n", [1, 2, 3, 5])
def test_a_last_step_of_few_samples_is_shared_by_those_that_have_two(n: int) -> None:
    limit = 4
    for count in range(1, limit * n):
        for micros in (divide(0, count, (1,) * n, limit, limit * n), divide_parts(0, count, n, (1,) * n, limit * n)):
            check_tiles(flat(micros), 0, count)
            sizes = [sum(m.hi - m.lo for m in of_rank) for of_rank in micros]
            assert all(size >= 2 for size in sizes if size) or count == 1
            assert len([size for size in sizes if size]) == min(n, max(1, count // 2))


def test_apportion_follows_the_shares_and_gives_everybody_one() -> None:
    for n in range(1, 5):
        for shares in itertools.product(range(5), repeat=n):
            for total in range(25):
                counts = apportion(total, shares)
                assert sum(counts) == total
                assert all(c >= 1 for c in counts) or total < n
                if min(shares) > 0 and total >= 10 * n:
                    assert all(abs(c - total * s / sum(shares)) < 1 + n for c, s in zip(counts, shares, strict=True))
    assert apportion(12, (1, 1, 2)) == [3, 3, 6]
    assert apportion(3, (100, 1, 1)) == [1, 1, 1]


@given(st.lists(st.integers(0, 40), min_size=1, max_size=4), st.integers(0, 45))
def test_a_member_computes_no_more_at_once_than_fits_into_it(sizes: list[int], largest: int) -> None:
    bounds = [7, *itertools.accumulate(sizes, initial=7)][1:]
    micros = tuple(Micro(lo, hi) for lo, hi in itertools.pairwise(bounds))
    cut = within(micros, largest)
    check_tiles(list(cut), 7, bounds[-1])
    assert {m.lo for m in micros} <= {m.lo for m in cut}, "passes that fit are left as they are"
    if largest:
        assert all(m.hi - m.lo <= largest for m in cut)
        assert len(cut) == sum(max(1, -(-n // largest)) for n in sizes), "no more passes than it takes"
    parts = tuple(Micro(m.lo, m.hi, i) for i, m in enumerate(micros))
    assert within(parts, largest) == parts, "a logical worker's part stays whole"


def test_micros_respect_the_limit_except_for_the_tail() -> None:
    for n, limit, wanted in itertools.product(range(1, 5), range(1, 6), range(1, 7)):
        total = max(limit * wanted, n)
        for count in range(min(2 * n, total), total + 2 * n):
            micros = divide(3, 3 + count, (1,) * n, limit, total)
            assert len(micros) == n
            check_tiles(flat(micros), 3, 3 + count)
            extra = max(0, count - total)
            assert all(0 < m.hi - m.lo <= limit + extra and m.part == -1 for m in flat(micros))
            if count <= total:
                sizes = [sum(m.hi - m.lo for m in of_rank) for of_rank in micros]
                assert max(sizes) - min(sizes) <= 1


def test_a_member_with_twice_the_share_takes_two_micro_batches() -> None:
    first, second = divide(0, 12, (2, 1), 4, 12)
    assert [(m.lo, m.hi) for m in first] == [(0, 4), (4, 8)]
    assert [(m.lo, m.hi) for m in second] == [(8, 12)]


def test_fewer_samples_than_members_leaves_empty_micros_behind_the_last() -> None:
    micros = divide(5, 7, (1, 1, 1, 1), 8, 32)
    assert micros == ((Micro(5, 7),), (Micro(7, 7),), (Micro(7, 7),), (Micro(7, 7),))


def test_parts_are_the_same_on_any_number_of_members() -> None:
    for parts, n, count in itertools.product((1, 2, 3, 4, 7, 8), range(1, 9), range(8, 40)):
        alone = divide_parts(2, 2 + count, parts, (1,))[0]
        assert [m.part for m in alone] == list(range(parts))
        check_tiles(list(alone), 2, 2 + count)
        shared = divide_parts(2, 2 + count, parts, (1,) * n)
        assert len(shared) == n
        assert all(of_rank for of_rank in shared)
        assert tuple(m for m in flat(shared) if m.part >= 0) == alone
        assert all(m.lo == m.hi for m in flat(shared) if m.part < 0)


@settings(max_examples=200, deadline=None)
@given(
    samples=st.integers(1, 300),
    batch=st.integers(1, 16),
    sizes=st.lists(st.integers(1, 6), min_size=1, max_size=30),
    parts=st.sampled_from([0, 0, 2, 5]),
    fixed=st.booleans(),
)
def test_any_history_of_sizes_trains_every_position_once(
    samples: int, batch: int, sizes: list[int], parts: int, fixed: bool
) -> None:
    spec = JobSpec(workers=3, logical_workers=parts, strategy="fixed" if fixed else "elastic")
    position, trained, size_at = Position(), [], itertools.cycle(sizes)
    try:
        while (cut := cut_step(position, plan(samples), 2, batch, spec, size := next(size_at))) is not None:
            assert len(cut.micros) == size
            assert all(cut.micros)
            check_tiles(flat(cut.micros), cut.lo, cut.hi)
            trained.append((cut.epoch, cut.lo, cut.hi))
            position = Position(position.step + 1, 0, cut.epoch, cut.hi)
    except DataError:
        assert samples < max(parts, *sizes)
        return
    for epoch in range(2):
        ranges = [(lo, hi) for e, lo, hi in trained if e == epoch]
        assert ranges[0][0] == 0
        assert ranges[-1][1] == samples
        assert all(a[1] == b[0] for a, b in itertools.pairwise(ranges))


def test_too_few_samples_is_one_clear_error() -> None:
    with pytest.raises(DataError, match="3 samples, fewer than the 4 logical workers"):
        cut_step(Position(), plan(3), 1, 2, JobSpec(logical_workers=4), 1)
    with pytest.raises(DataError, match="fewer than the 5 workers"):
        cut_step(Position(), plan(3), 1, 1, JobSpec(workers=5), 5)


def test_the_global_batch_by_strategy() -> None:
    def total(size: int, **spec: object) -> int:
        cut = cut_step(Position(), plan(10_000), 1, 8, JobSpec(workers=4, **spec), size)  # type: ignore[arg-type]
        assert cut is not None
        return cut.total

    assert total(3) == 24
    assert total(3, strategy="fixed") == 32
    assert total(3, logical_workers=6) == total(1, logical_workers=6) == 48


def test_learning_rate_rules() -> None:
    assert lr_factor(JobSpec(workers=4), 8, 32) == 1.0
    assert lr_factor(JobSpec(workers=4, lr_rule="linear"), 8, 32) == 0.25
    assert lr_factor(JobSpec(workers=4, lr_rule="sqrt"), 8, 32) == 0.5
    assert lr_factor(JobSpec(workers=4, lr_rule="sqrt", logical_workers=8), 8, 32) == 1.0
    cut = cut_step(Position(), plan(1000), 1, 8, JobSpec(workers=4, lr_rule="linear"), 2)
    assert cut is not None
    assert cut.lr_factor == 0.5
