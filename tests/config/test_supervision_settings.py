"""Settings of the supervisor: what is taken, and what is refused in one line."""

from __future__ import annotations

from typing import Any

import pytest

from everstep.config.load import load_spec
from everstep.errors import ConfigError


@pytest.mark.parametrize(
    ("flags", "error"),
    [
        ({"min_workers": 3, "workers": 2}, "min_workers = 3 (--min-workers): more than workers = 2 (--workers)"),
        ({"min_workers": 3, "max_workers": 2, "workers": 2}, "min_workers = 3 (--min-workers): more than max_workers"),
        ({"max_workers": 2, "workers": 4}, "workers = 4 (--workers): more than max_workers = 2 (--max-workers)"),
        ({"min_ps": 3, "ps": 2}, "min_ps = 3 (--min-ps): more than ps = 2 (--ps)"),
        ({"max_ps": 1, "ps": 2}, "ps = 2 (--ps): more than max_ps = 1 (--max-ps)"),
        ({"min_workers": 0}, "min_workers = 0 (--min-workers): must be from 1 to"),
        ({"max_wait": "soon"}, "max_wait (--max-wait) = 'soon': expected a span such as '30s' or '10m', or off"),
        ({"max_wait": "0s"}, "max_wait (--max-wait) = '0s': must be from 1 s to 30d, or off"),
        ({"on_wait_timeout": "fail"}, "on_wait_timeout = 'fail' (--on-wait-timeout): the job waits for ever; give max"),
        ({"reliable": ("master", "worker")}, "'worker' is no role that can be: expected some of master, ps"),
        ({"reliable": ("master",), "market": "spot"}, "market = 'spot' (--market) says that it may be taken back"),
        ({"reliable": ("ps",), "mode": "allreduce"}, "this job has no ps; leave ps out"),
        ({"fallback": "10m"}, "fallback = '10m' (--fallback): there is nobody to ask for on-demand machines; give"),
        ({"fallback": "never"}, "fallback (--fallback) = 'never': expected a span such as '30s' or '10m', or off"),
        (
            {"fallback": "10m", "capacity": "trace:x", "max_wait": "5m"},
            "it never comes to that: the job waits for max_wait = '5m' (--max-wait) at most",
        ),
        ({"stabilization": "x"}, "stabilization = 'x' (--stabilization): expected a span such as '10s'"),
        ({"stabilization": "2d"}, "stabilization = '2d' (--stabilization): at most a day"),
        ({"fail_tolerance": -2}, "fail_tolerance = -2 (--fail-tolerance): must be from -1 to"),
        ({"global_batch": "fixed"}, "global_batch = 'fixed' (--global-batch): needs mode: allreduce; in mode ps each"),
        (
            {"global_batch": "big", "mode": "allreduce"},
            "global_batch = 'big' (--global-batch): expected fixed or scale",
        ),
        (
            {"global_batch": "scale", "mode": "allreduce", "strategy": "fixed"},
            "global_batch = 'scale' (--global-batch) and strategy = 'fixed' (--strategy): they contradict",
        ),
        ({"recovery": "pray"}, "recovery = 'pray': expected 'run_with_available'"),
    ],
)
def test_refused(flags: dict[str, Any], error: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_spec(None, flags, {})
    assert error in str(caught.value)
    assert "\n" not in str(caught.value)


def test_the_global_batch_is_the_strategy() -> None:
    spec, origins = load_spec(None, {"global_batch": "fixed", "mode": "allreduce"}, {})
    assert spec.strategy == "fixed" and origins["strategy"] == "--global-batch: global_batch"
    spec, _ = load_spec(None, {"global_batch": "scale", "mode": "allreduce", "strategy": "elastic"}, {})
    assert spec.strategy == "elastic"


def test_nodes_that_join_may_bring_what_is_needed() -> None:
    spec, _ = load_spec(None, {"min_workers": 4, "workers": 1, "bind": "127.0.0.1:7000"}, {})
    assert spec.min_workers == 4
