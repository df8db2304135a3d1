"""Runs ``everstep advise``: it says which protection costs least for given numbers, and where that turns."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import click

from everstep.cli.advise_picture import draw
from everstep.cli.kernel_probe import ProbeLoad, probe_kernels
from everstep.config.load import LAG_S, REBUILD_SHARE
from everstep.errors import ConfigError
from everstep.policies.advise import (
    BEYOND,
    Case,
    Option,
    coded,
    every,
    options,
    partial_rollback,
    paying_bytes,
    paying_mtbf_s,
    updates_lost,
    within,
)
from everstep.policies.measured_costs import MeasuredCosts, StepLoad, measured_case
from everstep.units import human_bytes

_SHARES = ("stall", "changed", "parity", "replica", "lag", "rebuilding", "together", "may_lose")
PAPERS_S = 1800.0
"""The interval of checkpoints that ECRM compares parity with."""
_FLAGS = {"lag": "--lag-costs"}
"""Where the flag is not the field's name."""


class MeasureFlags(NamedTuple):
    """Has what ``--measure`` needs to know. ``given``: fields of the case that the user gave: these stay."""

    step_s: float
    rows: int
    dim: int
    cores: int
    folder: Path
    given: frozenset[str] = frozenset()


def advise(case: Case, as_json: bool, flags: MeasureFlags | None = None, picture: Path | None = None) -> None:
    """Print the options, the cheapest first. ``flags``: measure this machine first. ``picture``: also draw where parity
    costs less than checkpoints, there. Raises ConfigError: numbers that cannot be, a file that cannot be written."""
    check(case)
    costs = None
    if flags is not None:
        case, costs = measure(case, flags, (lambda line: None) if as_json else click.echo)
    if picture is not None:
        try:
            picture.write_text(draw(case))
        except OSError as error:
            raise ConfigError(f"--picture {picture}: {error.strerror}") from error
    found = options(case)
    if as_json:
        click.echo(
            json.dumps(
                {
                    "case": case._asdict(),
                    "options": [o._asdict() | {"binds": o.binds} for o in found],
                    "same_redo": within(case, case.lag_s)._asdict(),
                    "lossy": [partial_rollback(case)._asdict()],
                    "measured": None if costs is None else _as_dict(costs),
                }
            )
        )
        return
    if costs is not None and flags is not None:
        for line in measured_lines(case, costs, flags):
            click.echo(line)
    for line in lines(case, found):
        click.echo(line)
    if picture is not None:
        click.echo(f"  {picture}: the cheapest way over table bytes / bandwidth and the time between losses")


def measure(case: Case, flags: MeasureFlags, say: Callable[[str], None]) -> tuple[Case, MeasuredCosts]:
    """Run the kernels here, and return the case with what they cost. Raises ConfigError: a flag that cannot be, or a
    folder that cannot be written."""
    if not flags.step_s > 0:
        raise ConfigError("--measure needs --step: how long a step takes without protection (--step 100ms)")
    for name, value, most in (("--rows-per-step", flags.rows, 1 << 24), ("--dim", flags.dim, 4096)):
        if not 1 <= value <= most:
            raise ConfigError(f"{name} {value}: must be from 1 to {most}")
    if not 1 <= flags.cores <= 1 << 16:
        raise ConfigError(f"--cores {flags.cores}: must be from 1 to {1 << 16}")
    pushes = max(1, round(case.lag_s / flags.step_s))
    costs = probe_kernels(ProbeLoad(flags.dim, flags.rows, pushes), flags.folder, say)
    fields = frozenset({"bandwidth", "parity", "replica", "lag", "stall"}) - flags.given
    return measured_case(case, costs, StepLoad(flags.rows, flags.step_s, flags.cores), fields), costs


def _as_dict(costs: MeasuredCosts) -> dict[str, Any]:
    return costs._asdict() | {"acked": costs.acked._asdict(), "lag": costs.lag._asdict()}


def measured_lines(case: Case, costs: MeasuredCosts, flags: MeasureFlags) -> list[str]:
    """Return what was measured, for a person."""
    out = [f"measured here in {costs.took_s:.0f} s, in nanoseconds of processor time for a row of dim {flags.dim}:"]
    for name, of in (("acked", costs.acked), (f"lag {case.lag_s:g}s", costs.lag)):
        pieces = {"difference": of.difference_s, "sending": of.send_s, "applying": of.apply_s}
        most = max(pieces, key=lambda piece: pieces[piece])
        words = ", ".join(f"{piece} {1e9 * seconds:,.0f}" for piece, seconds in pieces.items())
        of_push = of.protect_s / of.push_s if of.push_s else 0.0
        out.append(f"  {name:8} {words}: {of_push:.2f} of the push ({1e9 * of.push_s:,.0f}); {most} binds")
    out.append(f"  one lag was {costs.lag_pushes} pushes; {costs.distinct:.0%} of the rows pushed were distinct")
    out.append(
        f"  a snapshot goes to {flags.folder} at {human_bytes(costs.write_bytes_per_s)}/s, for "
        f"{1e9 * costs.write_cpu_s_per_byte:.2f} ns of processor time a byte"
    )
    out.append(
        f"  so, kernels alone, with {flags.rows:,} rows a step of {1e3 * flags.step_s:g} ms, and {flags.cores} cores "
        f"for workers and ps: parity {case.parity:.2%}, with lag {case.lag:.2%}, stall {case.stall:.2%}"
    )
    if flags.given:
        words = ", ".join(_FLAGS.get(name, f"--{name.replace('_', '-')}") for name in sorted(flags.given))
        out.append(f"  given, and so not taken from the measurement: {words}")
    return [*out, ""]


def check(case: Case) -> None:
    for name in ("table_bytes", "bandwidth", "mtbf_s", "network"):
        if not getattr(case, name) > 0:
            raise ConfigError(f"{name} = {getattr(case, name):g}: must be above 0")
    for name in _SHARES:
        if not 0 <= getattr(case, name) <= 1:
            flag = _FLAGS.get(name, f"--{name.replace('_', '-')}")
            raise ConfigError(f"{flag} {getattr(case, name):g}: a share, from 0 to 1")
    least, most = REBUILD_SHARE
    if not least <= case.rebuild_share <= most:
        raise ConfigError(f"--rebuild-share {case.rebuild_share:g}: must be from {least:g} to {most:g}")
    least_s, most_s = LAG_S
    if not least_s <= case.lag_s <= most_s:
        raise ConfigError(f"--lag {case.lag_s:g}s: must be from {least_s:g} s to {most_s:g} s, as --protect-lag")
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
        out.append(f"what binds: {best.binds}, {best.parts[best.binds]:.2%} of it")
    out.append("")
    out.append(f"  {'':24} {'lost':>7}  {'memory':>6}  {'interval':>9}  {'redo':>8}  made of")
    for option in found:
        parts = ", ".join(f"{name} {share:.2%}" for name, share in option.parts.items())
        every = span(option.interval_s) if option.interval_s else "-"
        redo = span(option.redo_s) if option.redo_s else "none"
        shown = f"{min(option.loss, 9.999):7.1%}  {option.memory:5.2f}x  {every:>9}  {redo:>8}"
        out.append(f"  {option.name:24} {shown}  {parts}")
    out.append("  no way loses a sample; redo: the most that is trained again after a loss")
    out.append(same_promise(case, found))
    out.append(
        f"  parity: {span(case.protected_s)} after a loss all is protected, at {case.rebuilding:.0%} of the speed "
        f"until then (--rebuild-share {case.rebuild_share:g})"
    )
    out.append(
        "  dense part: hybrid jobs need no parity for it, every worker has it; in mode ps each mirror has it whole, "
        "and repeats its updates, or with lag gets it once a lag"
    )
    if not case.hybrid:
        out.append("  --hybrid: nothing is trained again with a lag: workers keep what mirrors lack, and push it again")
    out.append("")
    for k, m, lag in ((1, 1, False), (4, 1, False), (4, 1, True), (4, 2, False), (4, 2, True)):
        if k + m <= case.ps:
            turns = turning(paying_mtbf_s(case, k, m, lag), paying_bytes(case, k, m, lag))
            out.append(f"  {coded(case, k, m, lag).name} {turns}")
    out.append(as_papers(case, found))
    lossy = partial_rollback(case)
    lost = updates_lost(case, lossy.interval_s)
    out.append(
        f"  not exact: rolling a lost ps back alone, a checkpoint every {span(lossy.interval_s)}: {lossy.loss:.1%}; "
        f"{lost:.2%} of all updates are lost for good"
    )
    out.append("  (first-order: Young's interval sqrt(2 C MTBF), C = stall share x bytes / bandwidth)")
    return out


def same_promise(case: Case, found: list[Option]) -> str:
    """Return what checkpoints cost that leave no more to be trained again than mirrors that lag."""
    same = within(case, case.lag_s)
    lagging = [o for o in found if "rebuilding" in o.parts and o.redo_s <= case.lag_s]
    text = f"  at most {span(case.lag_s)} of redo: incremental checkpoints alone "
    if same.parts["waiting for the storage"]:
        took_s = case.lag_s * (1.0 + same.parts["waiting for the storage"])
        text += f"cannot, for one takes {span(took_s)} to write"
    else:
        text += f"lose {same.loss:.1%} ({same.binds} binds)"
    return text + (f"; {lagging[0].name} loses {lagging[0].loss:.1%} ({lagging[0].binds} binds)" if lagging else "")


def as_papers(case: Case, found: list[Option]) -> str:
    """Return the comparison that papers on parity make: with full checkpoints at an interval that nobody chose. They
    count no checkpoints for what parity cannot repair; without ours another parity may cost least."""
    fixed = every(case, PAPERS_S)
    text = f"  full checkpoints every {span(fixed.interval_s)} lose {fixed.loss:.1%} ({fixed.binds} binds)"
    parity = [o for o in found if "parity" in o.parts]
    if not parity:
        return text
    text += f"; {parity[0].name} loses {parity[0].loss:.1%}, {_less(parity[0].loss, fixed.loss)}"
    loss, name = min((o.loss - o.parts.get(BEYOND, 0.0), o.name) for o in parity)
    return f"{text}; without {BEYOND}, {name} loses {loss:.1%}, {_less(loss, fixed.loss)}"


def _less(loss: float, than: float) -> str:
    return f"{1.0 - loss / than:.0%} less" if loss <= than else "more"


def turning(mtbf_s: tuple[float, float], table_bytes: tuple[float, float]) -> str:
    """Return where it pays: by the time between losses, and by the bytes of tables."""
    seldom_s, often_s = mtbf_s[1], mtbf_s[0]
    if seldom_s == 0:
        return "costs more than incremental checkpoints at any time between losses"
    if math.isinf(seldom_s) and not often_s:
        return "costs less than incremental checkpoints at any time between losses"
    least, most = table_bytes
    words = [f"more often than every {span(seldom_s)}"] if seldom_s < math.inf else []
    words += [f"less often than every {span(often_s)}"] if often_s else []
    text = f"costs less than incremental checkpoints where a ps is lost {' and '.join(words)}"
    if least > 0:
        text += f", or above {human_bytes(least)} of tables"
        text += f", up to {human_bytes(most)}" if most < math.inf else ""
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
