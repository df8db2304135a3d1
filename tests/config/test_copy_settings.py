"""Settings of copies of stages: what is taken, and what is refused in one line."""

from __future__ import annotations

import pytest

from everstep.config.load import load_spec
from everstep.errors import ConfigError


@pytest.mark.parametrize("every", ["auto", "off", "1", "20"])
def test_how_often_stages_are_copied(every: str) -> None:
    flags = {"mode": "pipeline", "stages": 2, "copy_every": every}
    assert load_spec(None, flags, {})[0].copy_every == every


@pytest.mark.parametrize(
    ("mode", "every", "error"),
    [
        (
            "pipeline",
            "0",
            "copy_every = '0' (--copy-every): expected auto, off, or a whole number of iterations from 1",
        ),
        ("pipeline", "5s", "copy_every = '5s' (--copy-every): expected auto, off, or a whole number"),
        ("pipeline", "-1", "copy_every = '-1' (--copy-every): expected auto, off, or a whole number"),
        ("allreduce", "5", "copy_every = '5' (--copy-every): needs mode: pipeline; in mode allreduce peers"),
        ("ps", "off", "copy_every = 'off' (--copy-every): needs mode: pipeline; in mode ps"),
    ],
)
def test_other_values_are_refused(mode: str, every: str, error: str) -> None:
    with pytest.raises(ConfigError) as refused:
        load_spec(None, {"mode": mode, "copy_every": every}, {})
    assert error in str(refused.value)


@pytest.mark.parametrize(
    ("flags", "error"),
    [
        ({"processes_per_worker": 2}, "processes_per_worker = 2 (--processes-per-worker): not in mode pipeline"),
        ({"logical_workers": 4}, "logical_workers = 4 (--logical-workers): not in mode pipeline"),
        ({"ps": 2}, "ps = 2 (--ps): not in mode pipeline"),
        ({"mode": "allreduce"}, "stages = 2 (--stages): needs mode: pipeline"),
    ],
)
def test_what_does_not_go_with_stages_is_refused(flags: dict[str, object], error: str) -> None:
    with pytest.raises(ConfigError) as refused:
        load_spec(None, {"mode": "pipeline", "stages": 2, **flags}, {})
    assert error in str(refused.value) and "\n" not in str(refused.value)
