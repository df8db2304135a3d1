"""Rows that are admitted late, and rows that expire, as a script asks for them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import everstep as es
from everstep.api import embedded
from everstep.api.job import Job
from everstep.errors import ScriptError
from everstep.monitor.audit import audit

Join = Callable[..., Job]
BATCHES = 20


def trained(job: Job, ids: np.ndarray, **options: Any) -> dict[int, float]:
    """Rows of a table whose row r gains 1.0 for every id r that is learnt from; the batches are columns of ``ids``."""
    model = job.sparse(es.nn.Embedding("t", 1, init=es.Constant(0.0)), optimizer=es.SGD(lr=1.0), **options)
    for batch in job.steps(job.loader({"id": ids}, batch_size=1)):
        (-model(batch["id"]).sum()).backward()
    state = model.state_dict()
    job.close()
    report = audit(Path(job.run_dir))
    assert report.ok, report
    return dict(zip(state["keys"].tolist(), state["weight"].flatten().tolist(), strict=True))


def test_a_rare_key_costs_no_row(join: Join) -> None:
    ids = np.array([[1, 100 + i] for i in range(BATCHES)])  # 1 always, the others once
    assert trained(join(), ids, admit_after=2) == {1: BATCHES - 2.0}


def test_a_row_that_no_batch_touches_is_freed(join: Join, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(embedded, "EXPIRE_EVERY_S", 0.0)
    ids = np.array([[1, 100 + i] for i in range(300)])
    rows = trained(join(), ids, expire_batches=5)
    assert rows[1] == 300
    assert len(rows) < 20


def test_a_module_may_say_it_for_its_own_table(join: Join) -> None:
    job = join()
    model = job.sparse(es.nn.Embedding("t", 4, admit_after=3, expire_s=60), expire_batches=9)
    assert isinstance(model, es.nn.Embedding)
    spec = job._tables.infos["t"].spec
    assert (spec.admit_after, spec.expire_batches, spec.expire_s) == (3, 0, 60)


def test_nonsense_is_refused_in_one_line(join: Join) -> None:
    job = join()
    with pytest.raises(ScriptError, match=r"^job.sparse: admit_after=-1 must be a whole number, 0 \(off\) or more$"):
        job.sparse(es.nn.Embedding("t", 4), admit_after=-1)
    with pytest.raises(ScriptError, match=r"^table 't': expire_s=0.5 must be"):
        job.sparse(es.nn.Embedding("t", 4, expire_s=0.5))  # type: ignore[arg-type]
