"""Chooses the size that a job with ``--workers auto --ps auto`` begins with, and the bounds of its policy."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from everstep.cli.estimate import EstimateFlags, earlier_jobs, from_history, wishes_of
from everstep.cli.probe_job import declared_mode
from everstep.config.load import check_script
from everstep.config.parity import parse_code
from everstep.config.sized import AUTO
from everstep.errors import ConfigError, EverstepError
from everstep.sizing.past_jobs import MemoryLesson
from everstep.units import size_bytes

MAX_PS: Final = 4
"""Ps that a job gets at most where nobody said ``--max-ps``; never fewer than its parity needs."""


def with_sizes(flags: Mapping[str, Any]) -> tuple[dict[str, Any], str]:
    """Return settings of ``everstep run`` (flags, environment and job.yaml) in which each ``auto`` is a number, with
    bounds and policy ``auto``. Return one line that says so, too; "": nothing was auto. Raises ConfigError."""
    asked = [role for role in ("workers", "ps") if flags.get(role) == AUTO]
    found = dict(flags)
    if not asked:
        return found, ""
    script = check_script(str(flags["script"])) if flags.get("script") else None  # (its absence is told later)
    mode = str(flags.get("mode") or (declared_mode(script) if script is not None else "") or "ps")
    if "ps" in asked and mode == "pipeline":
        raise ConfigError("--ps auto in mode pipeline: a model in stages has no ps; leave it out")
    width = parse_code(str(flags.get("parity") or "0")).width
    if not found.get("max_workers"):
        found["max_workers"] = max(os.cpu_count() or 1, _number(flags, "workers"))
    has_ps = mode == "ps" or "ps" in asked or _number(flags, "ps") > 0
    if has_ps and not found.get("max_ps"):
        found["max_ps"] = max(MAX_PS, width, _number(flags, "ps"))
    if has_ps and found["max_ps"] < width:
        raise ConfigError(f"--max-ps {found['max_ps']}: parity {flags['parity']} needs at least {width} ps")
    if has_ps and len(asked) == 1 and not flags.get("max_ps" if asked == ["workers"] else "max_workers"):
        found.setdefault("sizes", asked[0])  # (the number of the other role was asked for)
    begin = {"workers": max(1, _number(flags, "min_workers")), "ps": max(width, _number(flags, "min_ps"))}
    least, source = dict(begin), "no earlier job says more"
    if script is not None and (guessed := _from_history(script, found, mode, asked)):
        begin |= {role: max(begin[role], min(guessed[0][role], found[f"max_{role}"])) for role in asked}
        source = guessed[1]
    for role in asked:
        if begin[role] > found[f"max_{role}"]:
            raise ConfigError(f"--min-{role} {begin[role]} and --max-{role} {found[f'max_{role}']}: exclude each other")
        found[role] = begin[role]
    if all(least[role] == found[f"max_{role}"] for role in asked):
        raise ConfigError(_nothing_to_choose(asked[0], found[f"max_{asked[0]}"], bool(flags.get(f"max_{asked[0]}"))))
    policies = str(found.get("policy") or AUTO)
    if AUTO not in policies.split("+"):
        policies = AUTO if policies == "none" else f"{AUTO}+{policies}"
    found["policy"] = policies
    sizes = " and ".join(f"{found[role]} {role}" for role in asked)
    bounds = ", ".join(f"--max-{role} {found[f'max_{role}']}" for role in asked)
    return found, f"auto: begins with {sizes} ({source}); {bounds}"


def _nothing_to_choose(role: str, most: int, given: bool) -> str:
    if given:
        return f"--{role} auto: --max-{role} {most} leaves nothing to choose; give a larger one, or --{role} {most}"
    return f"--{role} auto: this machine leaves nothing to choose; give --max-{role}, or --{role} {most}"


def _number(flags: Mapping[str, Any], name: str) -> int:
    value = flags.get(name)
    return value if isinstance(value, int) else 0


def _from_history(
    script: Path, flags: Mapping[str, Any], mode: str, asked: list[str]
) -> tuple[dict[str, int], str] | None:
    """Return the size that earlier jobs of this script call for, and which they are; None: there are none. Fewer ps
    than hold what a ps died of are not enough."""
    estimate = EstimateFlags(
        mode=mode,
        workers=_number(flags, "workers") or None,
        ps=_number(flags, "ps") or None if mode == "ps" or "ps" not in asked else 1,
        stages=_number(flags, "stages") or None,
        parity=str(flags.get("parity") or "0"),
        max_workers=flags["max_workers"] if "workers" in asked else 0,
        max_ps=flags.get("max_ps", 0) if "ps" in asked else 0,
        memory=str(flags.get("max_memory") or "") or None,
    )
    try:
        wishes = wishes_of(estimate, mode)
        like = tuple(flags.get("args", ())), wishes, estimate.stages or 1
        similar, lessons, trouble = earlier_jobs(script, *like)
        found = {"workers": 1, "ps": 1}
        source = trouble or "no earlier job says more"
        by_history = ""
        with contextlib.suppress(EverstepError):  # (none is of this parity: what they taught of memory counts anyway)
            if similar:
                _, sizing = from_history(script, similar, estimate, wishes, trouble)
                found = {"workers": sizing.size.workers, "ps": max(1, sizing.size.ps)}
                by_history = source = f"by the history: {', '.join(f'job {one.kept.number}' for one in similar[:3])}"
        for lesson in lessons:
            if lesson.role == "ps" and "ps" in asked:
                found["ps"] = max(found["ps"], _ps_for(lesson, str(flags.get("ps_memory") or "")))
                source = f"{by_history}; {lesson.words}" if by_history else f"by the history: {lesson.words}"
    except EverstepError:
        return None  # (what is wrong with the flags themselves is said when the job's settings are checked)
    return found, source


def _ps_for(lesson: MemoryLesson, ps_memory: str) -> int:
    """Return how many ps hold what a ps died of, if each has ``ps_memory``, or as much as that one had."""
    each = size_bytes(ps_memory) if ps_memory else lesson.died_bytes
    return -(-lesson.needed_bytes(1) // max(1, each))
