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
COUNTER = r"count with job.step, which counts steps"
NO_SYNC = r"with --logical-workers. Where neither .* run all but the last one under job.no_sync\(\). Else"
ONE_PASS = (
    r"of one iteration, whose batch is computed in \d passes here: .* Let each worker compute its batch in one pass"
)
ROUNDS = {"logical": ONE_PASS, "passes": ONE_PASS}

AVERAGE = r"ema\['0.weight'\] in the script is an average or a copy of a parameter"

REFUSED: dict[str, dict[str, str]] = {
    "step_by_an_own_counter": {"redo": COUNTER, "logical": COUNTER, "passes": COUNTER},
    "an_average_by_hand_outside": {"redo": AVERAGE, "logical": AVERAGE, "passes": AVERAGE},
    "backward_twice": {"logical": NO_SYNC},
    "retained_graph_twice": {"logical": NO_SYNC},
    "checkpointed_reentrant": {"logical": NO_SYNC},
    "a_gan_as_dcgan_does_it": ROUNDS,
    "a_gan_with_set_requires_grad": ROUNDS,
    "a_gan_whose_generator_learns_every_second_time": ROUNDS,
    "batch_norm_in_a_gan": ROUNDS,
    "two_losses_two_models_in_turn": ROUNDS,
    "sam_by_its_class": ROUNDS,
    "sam_by_hand": ROUNDS,
    "r1_now_and_then": ROUNDS,
    "a_step_at_the_begin_of_the_iteration": ROUNDS,
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
