"""Every verb is there, and says what it is for."""

from __future__ import annotations

import pytest
from click.testing import CliRunner

from everstep.cli.main import cli

VERBS = [
    *"run status top logs scale drain checkpoint resume stop note explain replay audit ckpt advise".split(),  # noqa: SIM905
    *("doctor", "agent", "chaos", "cost", "simulate", "suspend", "unsuspend"),
    *("bubbles", "crd", "pod", "operator", "submit", "estimate", "history", "graph", "resize"),
]


@pytest.mark.parametrize("verb", VERBS)
def test_help(verb: str) -> None:
    done = CliRunner().invoke(cli, [verb, "--help"])
    assert done.exit_code == 0 and "Usage" in done.output, done.output
    assert cli.commands[verb].help


def test_no_verb_without_a_test() -> None:
    assert sorted(cli.commands) == sorted(VERBS)
