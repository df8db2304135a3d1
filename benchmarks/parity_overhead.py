"""What each way of protecting parameters costs in normal running: samples/s of each, of those without protection.

The model of ``throughput_model.py`` on 2 workers and 5 ps of one node, the sides in turn in every round, ratios by
round: nothing; parity 4+1, ``acked`` and ``eager``; replicas (1+1); a full checkpoint and an incremental one every few
seconds, to a local disk. How long a checkpoint takes on slower storage follows from its bytes: ``*.interval_s_at_N`` is
the shortest interval at which N MB/s can write them at all (the loss bound of a checkpoint is its interval; that of
parity is nothing).

Workers, ps, agent and master share the machine's cores: on two cores there is no spare one, and the ps are a smaller
part of the work the larger the model's dense part is. EVERSTEP_OVERHEAD_ROUNDS (3), EVERSTEP_OVERHEAD_DIM (16).
"""

from __future__ import annotations

import json
import os
import tempfile
import time
from functools import partial
from pathlib import Path

import psutil

from benchmarks._measure import ROOT, Child, Result, everstep, interleaved, median, say, spread
from benchmarks.throughput import Config, CpuLog, _make_data

MODEL = ROOT / "benchmarks" / "throughput_model.py"
TIMEOUT_S = 300.0
POLL_S = 0.25
EVERY_S = 5
BANDWIDTHS = (50, 200, 1000)  # MB/s
PS = 5

SIDES: dict[str, tuple[list[str], str]] = {
    "none": ([], ""),
    "parity_acked": (["--parity", "4+1"], ""),
    "parity_eager": (["--parity", "4+1", "--protect", "eager"], ""),
    "replica": (["--parity", "1+1"], ""),
    "checkpoint_full": (["--checkpoint-every", f"{EVERY_S}s"], "checkpoint_base_every: 0\n"),
    "checkpoint_incremental": (["--checkpoint-every", f"{EVERY_S}s"], "checkpoint_base_every: 1000\n"),
}


def side(config: Config, flags: list[str], settings: str) -> dict[str, float]:
    """One run: samples/s of its steady state, CPU a million samples, and bytes a checkpoint (median)."""
    with tempfile.TemporaryDirectory(prefix="everstep-bench-") as folder:
        home = Path(folder)
        out, run_dir, log = home / "out.jsonl", home / "run", home / "log"
        (home / "job.yaml").write_text(settings or "name: overhead\n")
        arguments = [*config.arguments, "--epochs", "1000", "--out", str(out)]
        run = ["run", "-c", home / "job.yaml", "--workers", "2", "--ps", str(PS), "--run-dir", run_dir, *flags]
        with Child(everstep(*run, "--", MODEL, *arguments), log=log) as child:
            cpu, until, first_at = CpuLog([child]), time.monotonic() + TIMEOUT_S, 0.0
            lines: list[dict[str, float]] = []
            while len(lines) < 2:
                cpu.poll()
                if out.exists():
                    lines = [json.loads(line) for line in out.read_text().splitlines() if line.endswith("}")]
                first_at = first_at or (time.monotonic() if lines else 0.0)
                if time.monotonic() > until or child.process.poll() not in (None, 0):
                    raise RuntimeError(f"everstep run did not finish:\n{log.read_text()[-3000:]}")
                time.sleep(POLL_S)
            child.process.wait(120)
        steady_s = min(line["wall_s"] for line in lines)
        seconds, cpu_all, _ = cpu.between(first_at - steady_s, first_at - POLL_S)
        rate = sum(line["samples_per_s"] for line in lines)
        measured = {"samples_per_s": rate, "cpu_s_per_million": 1e6 * cpu_all / (rate * seconds)}
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
        sides = {name: partial(side, config, flags, settings) for name, (flags, settings) in SIDES.items()}
        measured = interleaved(sides, rounds, say)
    base = [m["samples_per_s"] for m in measured["none"]]
    figures["none.samples_per_s"], spreads["none.samples_per_s"] = median(base), spread(base)
    for name in list(SIDES)[1:]:
        ratios = [m["samples_per_s"] / b for m, b in zip(measured[name], base, strict=True)]
        figures[f"{name}_of_none"], spreads[f"{name}_of_none"] = median(ratios), spread(ratios)
        cpu = [
            m["cpu_s_per_million"] / b["cpu_s_per_million"]
            for m, b in zip(measured[name], measured["none"], strict=True)
        ]
        figures[f"{name}.cpu_of_none"], spreads[f"{name}.cpu_of_none"] = median(cpu), spread(cpu)
        written = [m["bytes"] for m in measured[name] if "bytes" in m]
        if written:
            figures[f"{name}.bytes"], spreads[f"{name}.bytes"] = median(written), spread(written)
            for mb_per_s in BANDWIDTHS:
                figures[f"{name}.interval_s_at_{mb_per_s}"] = median(written) / (mb_per_s * 1e6)
    name = "parity_acked_of_none"
    aims[name], holds[name] = ">= 0.9", figures[name] >= 0.9
    return {"figures": figures, "aims": aims, "holds": holds, "spread": spreads}
