from __future__ import annotations

import pytest

from everstep.config.every import Every, parse_every
from everstep.errors import ConfigError
from everstep.policies.checkpoints import is_due, since_of


@pytest.mark.parametrize(
    ("text", "every"),
    [
        ("", Every()),
        ("30s", Every(seconds=30.0)),
        ("10m", Every(seconds=600.0)),
        ("45", Every(seconds=45.0)),
        ("10000batches", Every(batches=10000)),
        ("1 batch", Every(batches=1)),
    ],
)
def test_intervals(text: str, every: Every) -> None:
    assert parse_every(text) == every


@pytest.mark.parametrize("text", ["0batches", "0.5s", "30 parsecs", "-3s", "often", "batches"])
def test_no_intervals(text: str) -> None:
    with pytest.raises(ConfigError, match="checkpoint_every = "):
        parse_every(text)


def test_due() -> None:
    assert not is_due(30.0, 0, 29.9, 10**9)
    assert is_due(30.0, 0, 30.0, 0)
    assert not is_due(0.0, 100, 1e9, 99)
    assert is_due(0.0, 100, 0.0, 100)
    assert not is_due(0.0, 0, 1e9, 10**9), "never, unless asked"


def test_bases() -> None:
    assert since_of(0, 0, 8, False) == 0, "the first is a base"
    assert since_of(5, 7, 8, False) == 5
    assert since_of(5, 8, 8, False) == 0, "the chain stays short"
    assert since_of(5, 0, 8, True) == 0, "asked for"
    assert since_of(5, 0, 0, False) == 0, "no increments at all"
