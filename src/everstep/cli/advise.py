"""Runs ``everstep advise``: it says which protection costs least for given numbers, and where that turns."""

from __future__ import annotations

import json
import math

import click

from everstep.errors import ConfigError
from everstep.policies.advise import (
    Case,
    Option,
    break_even_bytes,
    break_even_mtbf_s,
    options,
    partial_rollback,
    updates_lost,
)
from everstep.units import human_bytes

_SHARES = ("stall", "changed", "parity", "replica", "rebuilding", "together", "may_lose")


def advise(case: Case, as_json: bool) -> None:
    """Print the options, the cheapest first. Raises ConfigError: numbers that cannot be."""
    check(case)
    found = options(case)
    if as_json:
        click.echo(
            json.dumps(
                {
                    "case": case._asdict(),
                    "options": [o._asdict() for o in found],
                    "lossy": [partial_rollback(case)._asdict()],
                }
            )
        )
        return
    for line in lines(case, found):
        click.echo(line)


def check(case: Case) -> None:
    for name in ("table_bytes", "bandwidth", "mtbf_s", "network"):
        if not getattr(case, name) > 0:
            raise ConfigError(f"{name} = {getattr(case, name):g}: must be above 0")
    for name in _SHARES:
        if not 0 <= getattr(case, name) <= 1:
            raise ConfigError(f"--{name.replace('_', '-')} {getattr(case, name):g}: a share, from 0 to 1")
    if case.ps < 1 or case.full_every < 0 or case.restart_s < 0 or case.step_s < 0:
        raise ConfigError("--ps must be at least 1; --full-every, --restart and --step must not be negative")


def lines(case: Case, found: list[Option]) -> list[str]:
    """Return the lines for a person."""
    best = found[0]
    out = [
        f"{human_bytes(case.table_bytes)} of tables on {case.ps} ps, storage {human_bytes(case.bandwidth)}/s, "
        f"a ps lost every {span(case.mtbf_s)}:"
    ]
    if not best.works:
        out.append("nothing works here: every way loses more than half of the time; more bandwidth or ps are needed")
    else:
        out.append(f"use {best.name}: {best.loss:.1%} of the training time is lost{interval(case, best)}")
    out.append("")
    out.append(f"  {'':24} {'lost':>7}  {'memory':>6}  {'interval':>9}  made of")
    for option in found:
        parts = ", ".join(f"{name} {share:.2%}" for name, share in option.parts.items())
        every = span(option.interval_s) if option.interval_s else "-"
        out.append(f"  {option.name:24} {min(option.loss, 9.999):7.1%}  {option.memory:5.2f}x  {every:>9}  {parts}")
    out.append("")
    for k, m in ((1, 1), (4, 1), (4, 2)):
        if k + m <= case.ps:
            name = f"{'replica' if k == 1 else 'parity'} {k}+{m}"
            out.append(f"  {name} {turning(break_even_mtbf_s(case, k, m), break_even_bytes(case, k, m))}")
    lossy = partial_rollback(case)
    lost = updates_lost(case, lossy.interval_s)
    out.append(
        f"  not exact: rolling a lost ps back alone, a checkpoint every {span(lossy.interval_s)}: {lossy.loss:.1%}; "
        f"{lost:.2%} of all updates are lost for good"
    )
    out.append("  (first-order: Young's interval sqrt(2 C MTBF), C = stall share x bytes / bandwidth)")
    return out


def turning(mtbf_s: float, table_bytes: float) -> str:
    if mtbf_s == 0:
        return "costs more than incremental checkpoints at any time between losses"
    if math.isinf(mtbf_s):
        return "costs less than incremental checkpoints at any time between losses"
    text = f"costs less than incremental checkpoints where a ps is lost more often than every {span(mtbf_s)}"
    if 0 < table_bytes < math.inf:
        text += f", or above {human_bytes(table_bytes)} of tables"
    return text


def interval(case: Case, option: Option) -> str:
    if not option.interval_s:
        return ""
    text = f", a checkpoint every {span(option.interval_s)}"
    if case.step_s:
        text += f" ({option.interval_s / case.step_s:,.0f} batches)"
    return text


def span(seconds: float) -> str:
    """Return a span in words: ``90 s``, ``18 min``, ``2.7 h``, ``33 d``."""
    for limit, unit, size in ((120, "s", 1.0), (7200, "min", 60.0), (172800, "h", 3600.0)):
        if seconds < limit:
            return f"{seconds / size:.3g} {unit}"
    return f"{seconds / 86400:.3g} d"
