"""What the full form of the benchmark of reclaims plays, and how it sums it up."""

from __future__ import annotations

from itertools import product
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file


@pytest.fixture(autouse=True)
def _importable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(Path(__file__).resolve().parents[2]))


def test_each_recording_is_played_in_each_mode_and_each_mode_with_each_notice() -> None:
    from benchmarks.reclaim import NOTICES_S, PLANS, RECORDINGS

    modes = ("ps", "allreduce", "hybrid")
    assert {(plan.recording, plan.mode) for plan in PLANS} == set(product(RECORDINGS, modes))
    assert {(plan.mode, plan.lead_s) for plan in PLANS} == set(product(modes, NOTICES_S))
    assert len({plan.name for plan in PLANS}) == len(PLANS)
    assert sorted(RECORDINGS.values()) == [4, 4, 16, 16]


def test_a_machine_outlives_its_notice_and_parity_is_as_wide_as_the_machines_allow() -> None:
    from benchmarks.reclaim import PLANS

    for plan in PLANS:
        assert plan.quiet_s > plan.lead_s
        flags = plan.flags(1.0)
        if plan.mode != "allreduce":
            parity, ps = flags[flags.index("--parity") + 1], int(flags[flags.index("--ps") + 1])
            assert ps == sum(map(int, parity.split("+"))) <= plan.nodes + 1  # a unit of a stripe on each machine


def test_one_job_that_is_not_exact_or_whose_node_was_not_empty_in_time_is_seen() -> None:
    from benchmarks.reclaim import Reclaimed, _summed

    good = Reclaimed("", 50, 30.0, 0.9, [1.0, 2.0], 1)
    late = Reclaimed("a sample was applied more than once", 51, 30.0, 0.8, [31.0], 0)
    assert all(_summed([good])["holds"].values())
    found = _summed([good, late])
    assert found["holds"] == {"exact": False, "empty_of_notice": False}
    assert found["figures"]["reclaims"] == 101.0 and found["figures"]["reclaims_least"] == 50.0


@pytest.mark.parametrize("form", ["one", "parts"])
def test_a_left_model_that_is_worse_than_seeds_explain_is_seen(tmp_path: Path, form: str) -> None:
    from benchmarks.reclaim import Reclaimed, _summed

    from benchmarks import _quality

    ids, label = _quality.samples_of(320)
    means = torch.zeros(_quality.KEYS, _quality.DIM)
    for key in range(_quality.KEYS):
        means[key, 0] = label[ids == key].mean()
    top = {"top.weight": torch.tensor([[1.0, 0.0, 0.0, 0.0]]), "top.bias": torch.zeros(1)}

    def left(fields: torch.Tensor) -> _quality.Quality:
        model = tmp_path / "model"
        (model / "tables").mkdir(parents=True, exist_ok=True)
        if form == "one":
            save_file({**top, "fields.weight": fields}, model / "model.safetensors")
        else:
            save_file(top, model / "dense.safetensors")
            keys = torch.randperm(_quality.KEYS)
            save_file({"keys": keys, "values": fields[keys].contiguous()}, model / "tables" / "fields.safetensors")
        return _quality.quality(tmp_path, 320, 16, 80, seeds=4)

    best, wrong = left(means), left(means.roll(1, 0))
    assert best.of_seeds <= best.most_of_seeds < wrong.of_seeds
    done = [Reclaimed("", 50, 0.0, 0.9, [], 1, found) for found in (best, wrong)]
    assert _summed(done[:1])["holds"]["as_seeds"] and not _summed(done)["holds"]["as_seeds"]
    assert _summed(done)["figures"]["as_seeds"] == 0.5
