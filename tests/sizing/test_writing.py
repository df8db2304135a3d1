"""The worker that writes the model of a replicated job needs a copy of its state beside it."""

from __future__ import annotations

import msgspec
import pytest
from sizes import probe

from everstep.sizing.memory import worker_memory, writing_bytes
from everstep.sizing.probe_readings import ProbeRun
from everstep.sizing.size_choice import Estimator, Wishes

MODEL, OPTIMIZERS = 34 << 20, 67 << 20


def replicated() -> ProbeRun:
    return probe(2, 0, parameter_bytes=MODEL, optimizer_bytes=OPTIMIZERS)


def test_what_writing_takes_is_part_of_the_peak() -> None:
    one, more = replicated(), MODEL + 2 * OPTIMIZERS
    assert writing_bytes(one, "allreduce") == more
    assert worker_memory((one,), 1, "allreduce").likely == one.worker_peak_bytes + more
    figure = Estimator((one,), Wishes(mode="allreduce", workers=2, ps=0)).sizing().figures["worker_memory"]
    assert figure.value == one.worker_peak_bytes + more
    assert "more while it writes the model" in figure.reason


@pytest.mark.parametrize("mode", ["ps", "pipeline"])
def test_the_ps_write_theirs_and_each_stage_its_part(mode: str) -> None:
    assert writing_bytes(replicated(), mode) == 0


def test_the_peak_of_an_earlier_job_holds_it() -> None:
    assert writing_bytes(msgspec.structs.replace(replicated(), recorded=True), "allreduce") == 0
