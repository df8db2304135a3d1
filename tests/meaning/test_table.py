"""The table of meaning: its cells are what scripts do, its page is what is recorded."""

from __future__ import annotations

import re

import pytest
import torch

from meaning.cells import OPEN, REFUSED, SAME, compute, judge, plain
from meaning.command import recorded
from meaning.page import PAGE, page
from meaning.plain import Plain, PlainJob
from meaning.table import ALONE, MODES, REAL, Mode, Row, load

ROWS = load()
CELLS = recorded()
NAMES = list(ROWS)


def _holds(row: Row, mode: Mode) -> None:
    """What is recorded of a cell is what it shows; a cell that is open may only become better."""
    before, now = CELLS[row.name][mode.name], compute(row, mode)
    if before.verdict == OPEN:
        return
    where = f"{row.name} in {mode.name}: {now.verdict}: {now.detail}; recorded: {before.verdict}: {before.detail}"
    if before.verdict == REFUSED and now.verdict == SAME:
        return  # to be recorded: python tests/meaning --rows ... --modes ...
    assert now == before, where


@pytest.mark.parametrize("name", NAMES)
def test_each_row_means_what_is_recorded_in_a_mode_or_two(name: str) -> None:
    at = NAMES.index(name)
    modes = [at % len(ALONE)] if at % 2 else [at % len(ALONE), (at + 2 + at // len(ALONE)) % len(ALONE)]
    for mode in sorted(set(modes)):
        _holds(ROWS[name], ALONE[mode])


def test_no_cell_is_empty_and_the_page_is_what_is_recorded() -> None:
    for name in ROWS:
        assert name in CELLS, f"nothing recorded: python tests/meaning --rows {name}"
        missing = {m.name for m in ALONE} - CELLS[name].keys()
        assert not missing, f"{name}: python tests/meaning --rows {name} --modes {','.join(sorted(missing))}"
    assert CELLS.keys() == ROWS.keys()
    assert PAGE.read_text() == page(ROWS, CELLS), "python tests/meaning --page"


def test_every_refusal_is_one_line_that_says_what_to_do() -> None:
    for name, found in CELLS.items():
        for mode, cell in found.items():
            if cell.verdict == REFUSED:
                assert "\n" not in cell.detail and re.search(r"[:;,] ", cell.detail), (name, mode, cell.detail)


def _scaled(model: torch.nn.Module) -> None:
    for p in model.parameters():
        if p.grad is not None:
            p.grad.mul_(1.01)


@pytest.mark.parametrize("name", ["usual_loop", "accumulate", "clip_value", "continue_before_backward"])
def test_a_gradient_that_is_wrong_by_one_percent_is_seen(name: str) -> None:
    row, mode = ROWS[name], MODES["alone"]

    def wrong(job: PlainJob) -> None:
        make = job.optimizer

        def optimizer(opt: torch.optim.Optimizer) -> torch.optim.Optimizer:
            opt.register_step_pre_hook(lambda *_: _scaled(job._models[0]))
            return make(opt)

        job.optimizer = optimizer  # type: ignore[method-assign]

    right = plain(row, mode)
    assert judge(row, mode, right, plain(row, mode)).verdict == SAME
    assert judge(row, mode, row.script(Plain(ps=True, wrong=wrong)), right).verdict == OPEN


_ONCE = [name for name in NAMES if not ROWS[name].interrupt]  # (the others take two jobs each)
_SAMPLE = [(_ONCE[i * len(_ONCE) // len(REAL)], mode) for i, mode in enumerate(REAL)]


@pytest.mark.processes
@pytest.mark.parametrize(("name", "mode"), _SAMPLE, ids=[f"{n}-{m.name}" for n, m in _SAMPLE])
def test_a_sample_of_the_cells_of_real_processes(name: str, mode: Mode) -> None:
    if mode.name in CELLS[name]:
        _holds(ROWS[name], mode)


@pytest.mark.slow
@pytest.mark.processes
@pytest.mark.parametrize("mode", list(MODES.values()), ids=list(MODES))
@pytest.mark.parametrize("name", NAMES)
def test_the_whole_table(name: str, mode: Mode) -> None:
    if mode.name in CELLS[name]:
        _holds(ROWS[name], mode)
