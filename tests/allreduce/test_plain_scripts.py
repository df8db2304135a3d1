"""Scripts as others write them: a group computes what plain PyTorch computes on the whole batch, or says what to do."""

from __future__ import annotations

import warnings

import pytest
from groups import alone, run_group
from plain_scripts import GLOBAL, SCRIPTS, in_group, run_plain
from scripts import close, same

from everstep.config.spec import JobSpec

warnings.filterwarnings("ignore", module="torch")

SAME = ""
AVERAGE = r"ema\['0.weight'\] in the script is an average or a copy of a parameter"

REFUSED: dict[str, dict[str, str]] = {
    "an_average_by_hand_outside": {"redo": AVERAGE, "logical": AVERAGE, "passes": AVERAGE},
}
"""By script and column; all else is the same."""


@pytest.mark.parametrize("name", SCRIPTS)
def test_alone_it_is_bit_for_bit_plain_pytorch(name: str) -> None:
    same(run_plain(name), alone(JobSpec(), in_group(name, GLOBAL)))


@pytest.mark.parametrize("name", SCRIPTS)
def test_two_workers_of_which_steps_are_done_again(name: str) -> None:
    redo = frozenset({0, 2, 5})
    _compare(name, "redo", 2, JobSpec(workers=2), GLOBAL // 2, redo)


@pytest.mark.parametrize("name", SCRIPTS)
def test_logical_workers(name: str) -> None:
    _compare(name, "logical", 2, JobSpec(workers=2, logical_workers=4), GLOBAL // 4)


@pytest.mark.parametrize("name", SCRIPTS)
def test_steps_of_several_passes(name: str) -> None:
    _compare(name, "passes", 2, JobSpec(workers=4, strategy="fixed", min_workers=4), GLOBAL // 4, frozenset({1}))


def _compare(name: str, column: str, n: int, spec: JobSpec, batch: int, redo: frozenset[int] = frozenset()) -> None:
    refused = REFUSED.get(name, {}).get(column, SAME)
    if refused:
        with pytest.raises(AssertionError, match=refused):
            run_group(n, spec, in_group(name, batch), redo)
        return
    expected = run_plain(name)
    one, two = run_group(n, spec, in_group(name, batch), redo)
    same(one, two)
    close(one, expected)
