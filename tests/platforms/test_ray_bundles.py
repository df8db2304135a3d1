"""Which bundle a node gets, and which versions of Ray will do: without Ray."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from everstep.errors import ConfigError
from everstep.ids import NodeId
from everstep.platforms.ray_bundles import BundlePlace, Bundles
from everstep.platforms.ray_cluster import check_ray, mismatch_words, version_of


def names(*numbers: int) -> list[NodeId]:
    return [NodeId(f"ray-{n}") for n in numbers]


def test_nodes_that_are_asked_for_together_are_one_group() -> None:
    bundles = Bundles()
    placed, made = bundles.assign(names(1, 2, 3))
    assert made == (1, 3) and [place for _, place in placed] == [
        BundlePlace(1, 0),
        BundlePlace(1, 1),
        BundlePlace(1, 2),
    ]
    assert bundles.free(names(2)) == []
    assert bundles.assign(names(4, 5)) == ([(names(4)[0], BundlePlace(1, 1)), (names(5)[0], BundlePlace(2, 0))], (2, 1))
    assert bundles.free(names(5)) == [2], "a group goes with its last node"
    assert bundles.free(names(1, 3, 4)) == [1] and bundles.nodes() == []


def test_a_free_bundle_that_is_on_a_machine_is_taken_before_one_that_is_on_none() -> None:
    """The machine of ray-1 is lost, and Ray finds no other one for its bundle; ray-3 was given back."""
    bundles = Bundles()
    bundles.assign(names(1, 2, 3))
    bundles.free(names(1, 3))
    placed, made = bundles.assign(names(4), {BundlePlace(1, 1), BundlePlace(1, 2)})
    assert made is None and placed == [(names(4)[0], BundlePlace(1, 2))]
    assert bundles.assign(names(5))[0] == [(names(5)[0], BundlePlace(1, 0))], "it waits there for a machine"


def test_a_node_that_waits_in_a_bundle_on_no_machine_is_moved_to_a_free_one() -> None:
    """Ray-4 was given the bundle of ray-1 before Ray knew that its machine is lost."""
    bundles = Bundles()
    bundles.assign(names(1, 2, 3))
    bundles.free(names(1))
    bundles.assign(names(4), {BundlePlace(1, i) for i in range(3)})
    placed = {BundlePlace(1, 1), BundlePlace(1, 2)}
    assert bundles.misplaced(names(4), placed) == [], "there is no other one"
    bundles.free(names(3))
    assert bundles.misplaced([], placed) == [] and bundles.misplaced(names(4, 2), placed) == names(4)
    bundles.free(names(4))
    assert bundles.assign(names(5), placed)[0] == [(names(5)[0], BundlePlace(1, 2))]


def test_what_an_earlier_run_left_is_taken_over() -> None:
    bundles = Bundles()
    bundles.adopt(4, 2)
    bundles.take(BundlePlace(4, 1), names(9)[0])
    assert bundles.assign(names(10)) == ([(names(10)[0], BundlePlace(4, 0))], None)
    assert bundles.assign(names(11))[1] == (5, 1)


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 9)), max_size=30))
def test_no_bundle_has_two_nodes_and_no_empty_group_stays(steps: list[tuple[int, int]]) -> None:
    bundles, number, removed = Bundles(), 0, set[int]()
    where: dict[NodeId, BundlePlace] = {}
    for add, drop in steps:
        new = names(*range(number + 1, number + add + 1))
        number += add
        placed, made = bundles.assign(new)
        where |= dict(placed)
        assert made is None or made[0] not in removed
        assert len(set(where.values())) == len(where) and sorted(where) == sorted(bundles.nodes())
        gone = sorted(where)[:drop]
        for node in gone:
            del where[node]
        removed |= set(bundles.free(gone))
        assert {place.group for place in where.values()} & removed == set()


@pytest.mark.parametrize(("version", "fine"), [("2.50.0", True), ("2.60.0", True), ("3.0", True), ("2.9.3", False)])
def test_versions(version: str, fine: bool) -> None:
    if fine:
        return check_ray(version)
    with pytest.raises(ConfigError, match=r"Ray 2\.9\.3 is too old: 2\.50 or newer"):
        check_ray(version)


OWN = "This process on node 10.0.0.2, connecting to cluster 10.0.0.1:6379 was started with: Ray: 2.55.1 Python: 3.11.2"


@pytest.mark.parametrize(
    ("ray", "python", "advice"),
    [
        ("2.60.0", "3.11.2", "pip install 'ray==2.60.0'"),
        ("2.55.1", "3.12.7", "run everstep with Python 3.12.7, as the cluster does"),
        ("2.54.0", "3.12.7", "run everstep with Python 3.12.7 and Ray 2.54.0, as the cluster does"),
        ("2.9.3", "3.11.2", "give the cluster Ray 2.50 or newer"),
    ],
)
def test_a_cluster_of_other_versions_is_told_with_both_and_what_to_do(ray: str, python: str, advice: str) -> None:
    words = f"Version mismatch: The cluster was started with: Ray: {ray} Python: {python} {OWN}"
    told = mismatch_words(words)
    assert told == f"the cluster has Ray {ray} on Python {python}, here is Ray 2.55.1 on Python 3.11.2: {advice}"


def test_words_of_ray_that_are_not_known_are_passed_on() -> None:
    assert mismatch_words("Version mismatch: x\x1b y") == (
        "the cluster is of another Ray or Python: Version mismatch: x\\x1b y"
    )


def test_ray_that_is_missing() -> None:
    assert version_of("2.52.0rc1") == (2, 52, 0)
    with pytest.raises(ConfigError, match=r"pip install 'everstep\[ray\]'"):
        check_ray("")
