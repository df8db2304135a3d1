"""What each way of protecting parameters costs in normal running: samples/s of each, of those without protection.

The model of ``throughput_model.py`` on 2 workers and 5 ps of one node, the sides in turn in every round, ratios by
round: nothing; parity 4+1, ``acked``, ``eager`` and ``lag`` (the curve: ``LAGS``, in seconds); replicas (1+1); a full
checkpoint and an incremental one (as Check-N-Run does, without its quantisation) every few seconds, to a local disk.
Workers, ps, agent and master share the machine's cores: on two cores there is no spare one. ``spare``: the same with
one worker of one thread, so that the ps have a core; nothing, and parity ``acked`` and ``lag``.

Equal loss bounds: parity loses nothing, so at every storage bandwidth N (MB/s, ``BANDWIDTHS``) checkpoints that are
exact are judged by all they cost: what is written and what is trained again (``policies/advise.py``, with the bytes,
the stall and parity's cost as measured here). ``*.interval_s_at_N``: the shortest interval at which N MB/s can write
them; ``turn.mtbf_s_at_N``: parity costs less than the better of full and incremental checkpoints where a ps is lost
more often than this; ``turn.GB_at_N_mtbf_1h``: or, at one loss an hour, above so many bytes of tables. The lossy
baseline, CPR, rolls back the lost ps alone and trains nothing again: ``cpr.auc_drop_L`` and ``cpr.updates_lost_L`` are
what L losses an epoch do to the flights' AUC (``twins/cpr_flights.py``).

EVERSTEP_OVERHEAD_ROUNDS (3), EVERSTEP_OVERHEAD_DIM (16), EVERSTEP_OVERHEAD_SIDES (all; else these, the first one of
each group, ``none`` or ``spare_none``, always; what needs another side is left out then).
"""

from __future__ import annotations

import json
import os
import tempfile
import time
from functools import partial
from pathlib import Path

import psutil

from benchmarks._measure import (
    ROOT,
    Child,
    Result,
    beside,
    everstep,
    interleaved,
    last_json,
    median,
    python,
    say,
    spread,
)
from benchmarks.throughput import Config, CpuLog, _make_data
from everstep.policies.advise import Case, break_even_bytes, break_even_mtbf_s

MODEL = ROOT / "benchmarks" / "throughput_model.py"
TIMEOUT_S = 300.0
POLL_S = 0.25
EVERY_S = 5
BANDWIDTHS = (10, 50, 200, 1000)  # MB/s
HOUR_S = 3600.0
AIMS = {
    "parity_acked_of_none": 0.9,
    "spare_parity_acked_of_none": 0.95,
    "parity_lag_2s_of_none": 0.98,
    "spare_parity_lag_2s_of_none": 0.99,
}
PS = 5
LAGS = (0.5, 2.0, 8.0)  # a run lasts 20 to 40 s: with longer ones, the last differences would not be in it

CPR = ROOT / "benchmarks" / "twins" / "cpr_flights.py"

SIDES: dict[str, tuple[list[str], str]] = {
    "none": ([], ""),
    "parity_acked": (["--parity", "4+1"], ""),
    "parity_eager": (["--parity", "4+1", "--protect", "eager"], ""),
    **{
        f"parity_lag_{lag:g}s": (["--parity", "4+1", "--protect", "lag", "--protect-lag", f"{lag:g}s"], "")
        for lag in LAGS
    },
    "replica": (["--parity", "1+1"], ""),
    "checkpoint_full": (["--checkpoint-every", f"{EVERY_S}s"], "checkpoint_full_every: 0\n"),
    "checkpoint_incremental": (["--checkpoint-every", f"{EVERY_S}s"], "checkpoint_full_every: 1000\n"),
    "spare_none": (["--workers", "1"], "threads_per_worker: 1\n"),
    "spare_parity_acked": (["--workers", "1", "--parity", "4+1"], "threads_per_worker: 1\n"),
    "spare_parity_lag_2s": (
        ["--workers", "1", "--parity", "4+1", "--protect", "lag", "--protect-lag", "2s"],
        "threads_per_worker: 1\n",
    ),
}


def chosen() -> dict[str, tuple[list[str], str]]:
    """The sides that this run measures."""
    names = os.environ.get("EVERSTEP_OVERHEAD_SIDES", "")
    wanted = set(names.split(",")) if names else set(SIDES)
    if unknown := wanted - SIDES.keys():
        raise SystemExit(f"EVERSTEP_OVERHEAD_SIDES: no side is called {sorted(unknown)}; there are {list(SIDES)}")
    bases = {"spare_none" if name.startswith("spare_") else "none" for name in wanted}
    return {name: what for name, what in SIDES.items() if name in wanted | bases}


def side(config: Config, flags: list[str], settings: str) -> dict[str, float]:
    """One run: samples/s of its steady state, CPU a million samples, of all ps a batch, bytes a checkpoint (median)."""
    with tempfile.TemporaryDirectory(prefix="everstep-bench-") as folder:
        home = Path(folder)
        out, run_dir, log = home / "out.jsonl", home / "run", home / "log"
        (home / "job.yaml").write_text(settings or "name: overhead\n")
        arguments = [*config.arguments, "--epochs", "1000", "--out", str(out)]
        workers = 1 if "--workers" in flags else 2
        plain = [] if "--workers" in flags else ["--workers", "2"]
        run: list[str | Path] = ["run", "-c", home / "job.yaml", *plain, "--ps", str(PS), "--run-dir", run_dir, *flags]
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


def run(quick: bool) -> Result:
    dim = int(os.environ.get("EVERSTEP_OVERHEAD_DIM", "16"))
    rounds = 1 if quick else int(os.environ.get("EVERSTEP_OVERHEAD_ROUNDS", "3"))
    figures: dict[str, float] = {"load_before": psutil.getloadavg()[0]}
    spreads: dict[str, tuple[float, float]] = {}
    aims: dict[str, str] = {}
    holds: dict[str, bool] = {}
    with tempfile.TemporaryDirectory(prefix="everstep-bench-data-") as folder:
        config = Config(dim, 2048, 20_000 if quick else 160_000, Path(folder))
        say(f"{config.name}: making the data")
        _make_data(config)
        picked = chosen()
        sides = {name: partial(side, config, flags, settings) for name, (flags, settings) in picked.items()}
        measured = interleaved(sides, rounds, say)
    for prefix in ("", "spare_"):
        if f"{prefix}none" not in picked:
            continue
        none = measured[f"{prefix}none"]
        base = [m["samples_per_s"] for m in none]
        figures[f"{prefix}none.ps_cpu_ms_per_batch"] = median([m["ps_cpu_ms_per_batch"] for m in none])
        figures[f"{prefix}none.samples_per_s"], spreads[f"{prefix}none.samples_per_s"] = median(base), spread(base)
        for name in picked:
            if name.startswith("spare_") != bool(prefix) or name == f"{prefix}none":
                continue
            ratios = [m["samples_per_s"] / b for m, b in zip(measured[name], base, strict=True)]
            figures[f"{name}_of_none"], spreads[f"{name}_of_none"] = median(ratios), spread(ratios)
            cpu = [m["cpu_s_per_million"] / b["cpu_s_per_million"] for m, b in zip(measured[name], none, strict=True)]
            figures[f"{name}.cpu_of_none"], spreads[f"{name}.cpu_of_none"] = median(cpu), spread(cpu)
            beside(figures, spreads, measured.noise("samples_per_s"), f"{name}_of_none")
            beside(figures, spreads, measured.noise("cpu_s_per_million"), f"{name}.cpu_of_none")
            ps = [m["ps_cpu_ms_per_batch"] for m in measured[name]]
            figures[f"{name}.ps_cpu_ms_per_batch"], spreads[f"{name}.ps_cpu_ms_per_batch"] = median(ps), spread(ps)
            written = [m["bytes"] for m in measured[name] if "bytes" in m]
            if written:
                figures[f"{name}.bytes"], spreads[f"{name}.bytes"] = median(written), spread(written)
                for mb_per_s in BANDWIDTHS:
                    figures[f"{name}.interval_s_at_{mb_per_s}"] = median(written) / (mb_per_s * 1e6)
    if picked.keys() == SIDES.keys():
        figures |= crossover(figures)
        figures |= lossy(quick)
    for name, least in AIMS.items():
        if name not in figures:
            continue
        aims[name], holds[name] = f">= {least}", figures[name] >= least
    return {"figures": figures, "aims": aims, "holds": holds, "spread": spreads}


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
        out[f"turn.mtbf_s_at_{mb_per_s}"] = break_even_mtbf_s(case, 4, 1)
        out[f"turn.GB_at_{mb_per_s}_mtbf_1h"] = break_even_bytes(case, 4, 1) / 1e9
    return out


def lossy(quick: bool) -> dict[str, float]:
    """CPR's cost in quality."""
    size = ["--seeds", "1", "--losses", "4"] if quick else ["--seeds", "3", "--losses", "1,4"]
    with Child(python(CPR, *size)) as child:
        found = last_json(child.finish(TIMEOUT_S))
    say(f"cpr: {found}")
    return {f"cpr.{name}": float(value) for name, value in found.items()}
