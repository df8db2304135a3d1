"""docs/allreduce.md names commands, options and files that there are."""

from __future__ import annotations

import re
from pathlib import Path

import click

from everstep.cli.main import cli

ROOT = Path(__file__).resolve().parents[2]
TEXT = (ROOT / "docs" / "allreduce.md").read_text()


def flags_of(verb: str) -> set[str]:
    return {flag for p in cli.commands[verb].params if isinstance(p, click.Option) for flag in p.opts}


def test_every_command_option_and_link_is_there() -> None:
    commands = re.findall(r"`everstep (\w+)([^`]*)`", TEXT)
    assert {verb for verb, _ in commands} >= {"run", "scale", "status", "top", "audit", "resume", "agent", "stop"}
    for verb, rest in commands:
        assert set(re.findall(r"--[a-z-]+", rest)) <= flags_of(verb), (verb, rest)
    alone = {flag for code in re.findall(r"`(--[^`]*)`", TEXT) for flag in re.findall(r"--[a-z-]+", code)}
    assert alone and alone <= flags_of("run")
    for path, _, anchor in re.findall(r"\]\(([\w.]+)(#([\w-]+))?\)", TEXT):
        titles = re.findall(r"^#+ (.*)$", (ROOT / "docs" / path).read_text(), re.M)
        assert not anchor or anchor in {t.lower().replace(" ", "-") for t in titles}, (path, anchor)
    for script in re.findall(r"examples/\w+\.py", TEXT):
        assert (ROOT / script).exists()
