"""What each way of protecting parameters costs in normal running: samples/s of each, of those without protection.

The model of ``throughput_model.py`` on 2 workers and 5 ps of one node, the sides in turn in every round, ratios by
round: nothing; parity 4+1, ``acked``, ``eager`` and ``lag`` (the curve: ``LAGS``, in seconds); replicas (1+1); a full
checkpoint and an incremental one (as Check-N-Run does, without its quantisation) every few seconds, to a local disk.
Workers, ps, agent and master share the machine's cores: on two cores there is no spare one. ``spare``: the same with
one worker of one thread, so that the ps have a core; nothing, and parity ``acked`` and ``lag``. ``two``: six ps, of
which any two may be lost; nothing, and parity 4+2 ``acked`` and ``lag``. ``hybrid``: mode allreduce with tables on
the ps; nothing, and parity ``acked`` and ``lag``.

Equal loss bounds: parity loses nothing, so at every storage bandwidth N (MB/s, ``BANDWIDTHS``) checkpoints that are
exact are judged by all they cost: what is written and what is trained again (``policies/advise.py``, with the bytes,
the stall and parity's cost as measured here). ``*.interval_s_at_N``: the shortest interval at which N MB/s can write
them; ``turn.mtbf_s_at_N``: parity costs less than the better of full and incremental checkpoints where a ps is lost
more often than this; ``turn.GB_at_N_mtbf_1h``: or, at one loss an hour, above so many bytes of tables. The lossy
baseline, CPR, rolls back the lost ps alone and trains nothing again: ``cpr.auc_drop_L`` and ``cpr.updates_lost_L`` are
what L losses an epoch do to the flights' AUC (``twins/cpr_flights.py``).

``--curve``: the cost over the lag for rows of 16 and 64 numbers and batches of 2048 and 8192: nothing and ``LAGS``, for
all four sizes in turn in every round; figures of a size begin with its name (``dim64_b8192.``).

``--steady``: the window begins when every worker has trained ``STEADY_EPOCHS`` of its share of the data and all mirrors
are complete and two lags are over, and is ``STEADY_S`` seconds long, or two lags. Before that, each batch makes rows,
mirrors are being made, and memory is used for the first time: that is what the other figures have in them.
Figures begin with ``steady_``; sides: ``none`` and ``STEADY_LAGS``;
those of six ps, with a core for the ps, and of ``LONG_LAGS``, by name
(EVERSTEP_OVERHEAD_SIDES=two_parity_lag_2s,two_parity_lag_4s).

``--turns``: steady windows again, but all jobs are there at once and train in turns (``_overhead_turns.py``): windows
of ``TURN_S`` seconds, or two of the longest lag (one, if it is long), follow each other closely, so that a slow minute
of the machine hits all sides.
Figures begin with ``turns_``.

EVERSTEP_OVERHEAD_ROUNDS (3), EVERSTEP_OVERHEAD_SIZES ("16x2048": dim x batch, one or more; figures of others than this
one begin with their names), EVERSTEP_OVERHEAD_SIDES (all; else these, the first one of each group, ``none``,
``spare_none``, ``two_none`` or ``hybrid_none``, always; what needs another side is left out then).
"""

from __future__ import annotations

import argparse
import json
import math
import os
import tempfile
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path

import psutil

from benchmarks._jobs import Job, pushes
from benchmarks._measure import (
    ROOT,
    Child,
    Result,
    Rounds,
    beside,
    everstep,
    interleaved,
    last_json,
    median,
    python,
    rounds_of_one_job,
    say,
    spread,
)
from benchmarks._overhead_turns import TurnsJob, watched, windows
from benchmarks.throughput import SAMPLES, Config, CpuLog, _make_data
from everstep.policies.advise import Case, paying_bytes, paying_mtbf_s

MODEL = ROOT / "benchmarks" / "throughput_model.py"
TIMEOUT_S = 300.0
POLL_S = 0.25
EVERY_S = 5
BANDWIDTHS = (10, 50, 200, 1000)  # MB/s
HOUR_S = 3600.0
PS = 5
GROUPS = ("", "spare_", "two_", "hybrid_")
"""Sides whose names begin so are compared with ``GROUPnone``; all others with ``none``."""
SIZE = "16x2048"
CURVE = ("16x2048", "16x8192", "64x2048", "64x8192")
STEADY_LAGS = (2.0, 4.0, 8.0)
GROUP_LAGS = (2.0, 4.0, 8.0)  # of six ps, and with a core for the ps
LONG_LAGS = (16.0, 30.0, 60.0)  # by name, with --steady
STEADY_EPOCHS = 1.3  # of the data, by all workers together: then few keys are left that have no row
STEADY_S = 14.0
STEADY = "steady_"
TURN_S = 8.0
TURN_MOST_S = 30.0  # but for one lag
TURNS = "turns_"
LAGS = (0.5, 2.0, 8.0)  # a run lasts 20 to 40 s: with longer ones, the last differences would not be in it

AIMS = {
    "parity_acked_of_none": 0.9,
    "spare_parity_acked_of_none": 0.95,
    "parity_lag_2s_of_none": 0.98,
    "spare_parity_lag_2s_of_none": 0.99,
    "two_parity_lag_2s_of_none": 0.97,
    **{f"{way}parity_acked_of_none": 0.9 for way in (STEADY, TURNS)},
    **{
        f"{way}{size}parity_lag_{lag:g}s_of_none": 0.98
        for way in (STEADY, TURNS)
        for size in ("", *(f"dim{word.replace('x', '_b')}." for word in CURVE))
        for lag in (*STEADY_LAGS, *LONG_LAGS)
    },
    **{f"{way}two_parity_lag_{lag:g}s_of_none": 0.97 for way in (STEADY, TURNS) for lag in GROUP_LAGS},
    **{f"{way}spare_parity_lag_{lag:g}s_of_none": 0.99 for way in (STEADY, TURNS) for lag in GROUP_LAGS},
    **{f"{way}hybrid_parity_lag_{lag:g}s_of_none": 0.98 for way in (STEADY, TURNS) for lag in GROUP_LAGS},
}

CPR = ROOT / "benchmarks" / "twins" / "cpr_flights.py"

Side = tuple[list[str], str]
"""Flags of ``everstep run``, and what job.yaml has."""


def lagging(prefix: str, flags: list[str], code: str, lags: Iterable[float], settings: str = "") -> dict[str, Side]:
    """Return the sides of a group whose mirrors may lag."""
    parity = [*flags, "--parity", code, "--protect", "lag", "--protect-lag"]
    return {f"{prefix}parity_lag_{lag:g}s": ([*parity, f"{lag:g}s"], settings) for lag in lags}


def sides_of(prefix: str, flags: list[str], code: str = "4+1", settings: str = "") -> dict[str, Side]:
    """Return the sides of a group: nothing, and parity ``acked`` and ``lag``."""
    return {
        f"{prefix}none": (flags, settings),
        f"{prefix}parity_acked": ([*flags, "--parity", code], settings),
        **lagging(prefix, flags, code, GROUP_LAGS, settings),
    }


SIDES: dict[str, Side] = {
    "none": ([], ""),
    "parity_acked": (["--parity", "4+1"], ""),
    "parity_eager": (["--parity", "4+1", "--protect", "eager"], ""),
    **lagging("", [], "4+1", sorted({*LAGS, *STEADY_LAGS, *LONG_LAGS})),
    "replica": (["--parity", "1+1"], ""),
    "checkpoint_full": (["--checkpoint-every", f"{EVERY_S}s"], "checkpoint_full_every: 0\n"),
    "checkpoint_incremental": (["--checkpoint-every", f"{EVERY_S}s"], "checkpoint_full_every: 1000\n"),
    **sides_of("spare_", ["--workers", "1"], settings="threads_per_worker: 1\n"),
    **sides_of("two_", ["--ps", "6"], "4+2"),
    **sides_of("hybrid_", ["--mode", "allreduce"]),
}


def group(name: str) -> str:
    """Return the group that a side belongs to."""
    return next(g for g in reversed(GROUPS) if name.startswith(g))


def chosen(names: str) -> dict[str, Side]:
    """Return the sides that this run measures: ``names`` ("": all), and those that they are compared with."""
    wanted = set(names.split(",")) if names else set(SIDES)
    if unknown := wanted - SIDES.keys():
        raise SystemExit(f"EVERSTEP_OVERHEAD_SIDES: no side is called {sorted(unknown)}; there are {list(SIDES)}")
    bases = {f"{group(name)}none" for name in wanted}
    return {name: what for name, what in SIDES.items() if name in wanted | bases}


def lag_s(flags: Sequence[str]) -> float:
    """Return how far mirrors may be behind with these flags, in seconds."""
    return float(flags[flags.index("--protect-lag") + 1].removesuffix("s")) if "--protect-lag" in flags else 0.0


def sizes(words: str) -> list[tuple[int, int]]:
    """Return (dim, batch) of each size in ``words``."""
    found = []
    for word in words.split(","):
        dim, _, batch = word.partition("x")
        if not (dim.isascii() and dim.isdigit() and batch.isascii() and batch.isdigit() and int(dim) and int(batch)):
            raise SystemExit(f"EVERSTEP_OVERHEAD_SIZES: {word!r} is no size; give dim x batch, such as {SIZE}")
        found.append((int(dim), int(batch)))
    return found


def side(config: Config, flags: list[str], settings: str) -> dict[str, float]:
    """One run: samples/s of its steady state, CPU a million samples, of all ps a batch, bytes a checkpoint (median)."""
    with tempfile.TemporaryDirectory(prefix="everstep-bench-") as folder:
        home = Path(folder)
        out, run_dir, log = home / "out.jsonl", home / "run", home / "log"
        (home / "job.yaml").write_text(settings or "name: overhead\n")
        arguments = [*config.arguments, "--epochs", "1000", "--out", str(out)]
        workers = 1 if "--workers" in flags else 2
        plain = [] if "--workers" in flags else ["--workers", "2"]
        plain += [] if "--ps" in flags else ["--ps", str(PS)]
        run: list[str | Path] = ["run", "-c", home / "job.yaml", *plain, "--run-dir", run_dir, *flags]
        with Child(everstep(*run, "--", MODEL, *arguments), log=log) as child:
            cpu, until, first_at = CpuLog([child]), time.monotonic() + TIMEOUT_S, 0.0
            lines: list[dict[str, float]] = []
            while len(lines) < workers:
                cpu.poll()
                if out.exists():
                    lines = [json.loads(line) for line in out.read_text().splitlines() if line.endswith("}")]
                first_at = first_at or (time.monotonic() if lines else 0.0)
                if time.monotonic() > until or child.process.poll() not in (None, 0):
                    raise RuntimeError(f"everstep run did not finish:\n{log.read_text()[-3000:]}")
                time.sleep(POLL_S)
            child.process.wait(120)
        steady_s = min(line["wall_s"] for line in lines)
        seconds, cpu_all, cpu_ps = cpu.between(first_at - steady_s, first_at - POLL_S)
        rate = sum(line["samples_per_s"] for line in lines)
        measured = {
            "samples_per_s": rate,
            "cpu_s_per_million": 1e6 * cpu_all / (rate * seconds),
            "ps_cpu_ms_per_batch": 1e3 * cpu_ps * config.batch / (rate * seconds),
        }
        written = checkpoint_bytes(run_dir)
        if written:
            # The first one writes all rows, also where increments follow.
            measured["bytes"] = median(written[1:] or written)
            measured["checkpoints"] = float(len(written))
        return measured


def steady(config: Config, flags: list[str], settings: str, window_s: float) -> dict[str, float]:
    """One run: the same figures over ``window_s`` seconds of it, once tables and mirrors have come to rest."""
    with tempfile.TemporaryDirectory(prefix="everstep-bench-") as folder:
        home = Path(folder)
        (home / "job.yaml").write_text(settings or "name: overhead\n")
        verb, script = command(config, home, flags)
        job = Job(home, verb, ["--", *script], TIMEOUT_S)
        try:
            seen = STEADY_EPOCHS * SAMPLES
            job.wait_for(lambda: job.samples_done() > seen and ("--parity" not in flags or job.safe()))
            begin = time.monotonic() + 2.0 * lag_s(flags)
            job.wait_for(lambda: time.monotonic() > begin)
            end = time.monotonic() + window_s
            window = watched(CpuLog([job.main]), lambda: job.wait_for(lambda: time.monotonic() > end))
            return window.figures(*pushes(job.logs()), config.batch)
        finally:
            job.close()


def command(config: Config, home: Path, flags: list[str]) -> tuple[list[str], list[str]]:
    """Return how a job is started that trains until it is stopped, and its script."""
    verb = ["run", "-c", str(home / "job.yaml"), "--workers", "2", "--ps", str(PS), *flags]
    return verb, [str(MODEL), *config.arguments, "--epochs", "1000", "--batches", "0"]


def in_turns(
    picked: Mapping[str, Side], configs: Mapping[str, Config], folder: Path, rounds: int, quick: bool
) -> Rounds:
    """Measure steady windows of jobs that train in turns. ``configs``: of each size, by the prefix of its figures."""
    numbers = rounds_of_one_job(rounds)
    longest_s = max(lag_s(flags) for flags, _ in picked.values())
    window_s = max(2.0 if quick else TURN_S, min(2.0 * longest_s, TURN_MOST_S), longest_s)
    with ExitStack() as stack:
        jobs: dict[str, TurnsJob] = {}
        for prefix, config in configs.items():
            for name, (flags, settings) in picked.items():
                home = folder / f"{prefix}{name}"
                home.mkdir()
                (home / "job.yaml").write_text(settings or "name: overhead\n")
                verb, script = command(config, home, flags)
                job = TurnsJob(home, verb, script, longest_s, config.batch)
                stack.callback(job.close)
                job.come_to_rest(round((0.1 if quick else STEADY_EPOCHS) * SAMPLES), TIMEOUT_S)
                jobs[prefix + name] = job
                say(f"{prefix}{name}: there")
        measured = interleaved(windows(jobs, window_s), rounds, say, numbers=numbers)
        for job in jobs.values():
            job.measure()
    return measured


def checkpoint_bytes(run_dir: Path) -> list[float]:
    """Bytes written for each checkpoint that was committed, oldest first."""
    events = run_dir / "events.jsonl"
    found: list[float] = []
    if events.exists():
        for line in events.read_text().splitlines():
            event = json.loads(line)
            decision = event.get("decision", event)
            if decision.get("action") == "checkpoint committed":
                found.append(float(decision["inputs"]["bytes"]))
    return found


def run(quick: bool, arguments: Sequence[str] = ()) -> Result:
    parser = argparse.ArgumentParser(prog="python -m benchmarks parity_overhead")
    parser.add_argument("--curve", action="store_true", help="the cost over the lag, for four sizes")
    parser.add_argument("--steady", action="store_true", help="behind the making of rows and mirrors, for some lags")
    parser.add_argument("--turns", action="store_true", help="as --steady, with jobs that train in turns")
    chosen_ways = parser.parse_args(arguments)
    curve, at_rest, turns = chosen_ways.curve, chosen_ways.steady, chosen_ways.turns
    rounds = 1 if quick else int(os.environ.get("EVERSTEP_OVERHEAD_ROUNDS", "3"))
    lags = ",".join(f"parity_lag_{lag:g}s" for lag in (STEADY_LAGS if at_rest or turns else LAGS))
    lags = lags.partition(",")[0] if turns and quick else lags  # each job takes half a minute before it is at rest
    asked = os.environ.get("EVERSTEP_OVERHEAD_SIDES", lags if at_rest or turns else "")
    picked = chosen(lags if curve else asked)
    measures = sizes(",".join(CURVE) if curve else os.environ.get("EVERSTEP_OVERHEAD_SIZES", SIZE))
    figures: dict[str, float] = {"load_before": psutil.getloadavg()[0]}
    spreads: dict[str, tuple[float, float]] = {}
    with tempfile.TemporaryDirectory(prefix="everstep-bench-data-") as folder:
        sides, prefixes, configs = {}, {}, {}
        for dim, batch in measures:
            config = Config(dim, batch, 20_000 if quick else 160_000, Path(folder))
            prefix = "" if f"{dim}x{batch}" == SIZE else f"{config.name}."
            prefix = (TURNS if turns else STEADY if at_rest else "") + prefix
            prefixes[f"{dim}x{batch}"], configs[prefix] = prefix, config
            say(f"{config.name}: making the data")
            _make_data(config)
            for name, (flags, settings) in picked.items():
                if at_rest:
                    window_s = 3.0 if quick else max(STEADY_S, 2.0 * lag_s(flags))
                    sides[prefix + name] = partial(steady, config, flags, settings, window_s)
                else:
                    sides[prefix + name] = partial(side, config, flags, settings)
        if turns:
            measured = in_turns(picked, configs, Path(folder), rounds, quick)
        else:
            measured = interleaved(sides, rounds, say)
    for prefix in prefixes.values():
        compare(measured, prefix, list(picked), figures, spreads)
    if picked.keys() == SIDES.keys() and SIZE in prefixes and not at_rest and not turns:
        figures |= crossover(figures)
        figures |= lossy(quick)
    aims = {name: f">= {least}" for name, least in AIMS.items() if name in figures}
    holds = {name: figures[name] >= AIMS[name] for name in aims}
    return {"figures": figures, "aims": aims, "holds": holds, "spread": spreads}


def compare(
    measured: Rounds,
    prefix: str,
    names: Sequence[str],
    figures: dict[str, float],
    spreads: dict[str, tuple[float, float]],
) -> None:
    """Add what each side of the size ``prefix`` costs, by round, beside the one without protection of its group."""

    def add(name: str, values: Sequence[float]) -> None:
        figures[prefix + name], spreads[prefix + name] = median(values), spread(values)

    for name in names:
        none, found = measured[f"{prefix}{group(name)}none"], measured[prefix + name]
        add(f"{name}.ps_cpu_ms_per_batch", [m["ps_cpu_ms_per_batch"] for m in found])
        if name == f"{group(name)}none":
            add(f"{name}.samples_per_s", [m["samples_per_s"] for m in none])
            continue
        pairs = list(zip(found, none, strict=True))
        add(f"{name}_of_none", [m["samples_per_s"] / b["samples_per_s"] for m, b in pairs])
        add(f"{name}.cpu_of_none", [m["cpu_s_per_million"] / b["cpu_s_per_million"] for m, b in pairs])
        beside(figures, spreads, measured.noise("samples_per_s"), f"{prefix}{name}_of_none")
        beside(figures, spreads, measured.noise("cpu_s_per_million"), f"{prefix}{name}.cpu_of_none")
        written = [m["bytes"] for m in found if "bytes" in m]
        if written:
            add(f"{name}.bytes", written)
            for mb_per_s in BANDWIDTHS:
                figures[f"{prefix}{name}.interval_s_at_{mb_per_s}"] = median(written) / (mb_per_s * 1e6)


def crossover(figures: dict[str, float]) -> dict[str, float]:
    """By storage bandwidth: where parity begins to cost less than exact checkpoints, with what was measured."""
    full = figures["checkpoint_full.bytes"]
    out = {"turn.table_bytes": full}
    for mb_per_s in BANDWIDTHS:
        case = Case(
            table_bytes=full,
            bandwidth=mb_per_s * 1e6,
            mtbf_s=HOUR_S,
            ps=PS,
            changed=min(1.0, figures["checkpoint_incremental.bytes"] / full),
            parity=max(0.0, 1.0 - figures["parity_acked_of_none"]),
            together=0.0,
        )
        out[f"turn.mtbf_s_at_{mb_per_s}"] = paying_mtbf_s(case, 4, 1)[1]
        least, most = paying_bytes(case, 4, 1)
        out[f"turn.GB_at_{mb_per_s}_mtbf_1h"] = least / 1e9 if most else math.inf
    return out


def lossy(quick: bool) -> dict[str, float]:
    """CPR's cost in quality."""
    size = ["--seeds", "1", "--losses", "4"] if quick else ["--seeds", "3", "--losses", "1,4"]
    with Child(python(CPR, *size)) as child:
        found = last_json(child.finish(TIMEOUT_S))
    say(f"cpr: {found}")
    return {f"cpr.{name}": float(value) for name, value in found.items()}
