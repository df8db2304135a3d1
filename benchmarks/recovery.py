"""A ps is killed in the middle: how long until its rows are served, and what training time it costs, against going
back to a checkpoint.

``examples/01_flights_dlrm.py``, 2 workers, 6 ps. Time lost is counted alike on all sides: training time from the death
to the window's end that is not there as samples trained *for the first time*, at the speed of the SPEED_S seconds
before the death; what is trained again is lost. So the redo counts, as ECRM counts it. Sides, in turns:

- *parity*: 4+1, one ps killed (SIGKILL). The window ends AFTER_S after every partition is fully protected again, its
  replacement included;
- *unpaced*: the same with ``--rebuild-share 1``; its figures begin with ``unpaced_``;
- *device*: as *parity*, with workers on emulated accelerators (a step is ``STEP_S`` of sleep), so that the ps have
  time of their own, and with ``KEYS`` rows of ``DIM`` numbers; its figures begin with ``device_``;
- *large*: as *device*, with ``LARGE_KEYS`` rows, so that the rebuild takes seconds; its figures begin with ``large_``;
- *restore*: no parity, a checkpoint every ``interval_s``; the whole job is killed half an interval after its newest
  checkpoint began (on average that much is trained again), and taken up from there with ``everstep resume``. The window
  ends AFTER_S after as many samples as before the death are trained;
- *partial*: no parity, the same checkpoints, one ps killed at the same point: everstep reads that ps's partitions alone
  from the checkpoint and the workers train for them again what they lack; the others keep everything.

Figures: ``first_row_s``: the death to the first of its partitions being whole elsewhere: its rows are served from then
on; ``served_s``: the death to the first batch applied to a partition that the dead ps had, at another ps;
``all_served_s``: to the last of its partitions being whole elsewhere; ``protected_s``: to full protection; ``gap_s``:
longest time without any batch; ``speed_until_protected``, ``speed_10s``: samples/s from the death to that moment, and
in the ten seconds after it, of those before; ``speed_same``: of two halves of the seconds before, the A/A of these;
``contents_mb``: what ps sent for rebuilds, mirrors and moves; ``protected_over_bound``: ``protected_s`` over these
bytes / (share x their measured bandwidth x ps); below 1 where ps need no pauses, above it where waits are longer than
the work; ``*_lost_s``; ``restore_over_parity``, ``partial_over_parity``: ratios of
medians, a parity loss of less than 0.1 s counting as 0.1 s. ``expected_over_parity_T``: what the ratio becomes at a
checkpoint interval of T seconds: half of T is trained again, the rest of the restore takes as long as measured.
What protection costs while nothing is lost is not in here: see ``parity_overhead``.
EVERSTEP_RECOVERY_INTERVAL_S (30), EVERSTEP_RECOVERY_ROUNDS (3), EVERSTEP_RECOVERY_SIDES (all; what needs another side
is left out then), EVERSTEP_RECOVERY_SHARE (``rebuild_share``, but of *unpaced*).
"""

from __future__ import annotations

import json
import os
import signal
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from benchmarks._jobs import Job, longest_gap, pushes, rate
from benchmarks._measure import ROOT, Result, beside, interleaved, median, say, spread
from everstep.config.spec import JobSpec

BATCH = 512
EPOCHS = 200  # more than any side trains: they are stopped
LIMIT_S = 400.0
SPEED_S = 8.0
AFTER_S = 3.0
LONG_S = 10.0
N_PS = 6
PS = ["--workers", "2", "--ps", str(N_PS)]
VICTIM = 1
DEVICE = ROOT / "benchmarks" / "twins" / "slow_device.py"
STEP_S, DEVICE_BATCH, FIELDS, KEYS, DIM = 0.08, 64, 200, 500_000, 32
DEVICE_WARM_S = 12.0  # until every row is there
LARGE_KEYS, LARGE_WARM_S = 2_500_000, 60.0
INTERVALS_S = (30, 600, 1800)


def lost_s(at: NDArray[np.float64], samples: NDArray[np.float64], died_at: float, end: float) -> float:
    """Seconds of training that are not there as new samples between ``died_at`` and ``end``."""
    before = rate(at, samples, died_at - SPEED_S, died_at)
    return (end - died_at) - float(samples[(at >= died_at) & (at < end)].sum()) / before


def checkpoints(job: Job) -> int:
    status = job.status()
    return status.checkpoint.newest if status is not None and status.checkpoint is not None else 0


def until_half_way(job: Job, interval_s: float) -> None:
    """Half an interval after the second checkpoint (the first one may come while training begins)."""
    job.wait_for(lambda: checkpoints(job) >= 2)
    end = time.monotonic() + interval_s / 2
    job.wait_for(lambda: time.monotonic() > end)


def new_since(job: Job, died_at: float) -> float:
    at, samples = pushes(job.logs())
    return float(samples[at >= died_at].sum())


def contents(job: Job) -> tuple[int, float]:
    """Return bytes of contents that the ps sent, and seconds that they spent on it, as of their last beats."""
    status = job.status()
    if status is None or status.protection is None:
        raise RuntimeError("the master does not say how partitions are protected")
    return status.protection.contents_bytes, status.protection.contents_busy_s


def share_of_time() -> float:
    """Return the share of its time that a ps may rebuild."""
    return float(os.environ.get("EVERSTEP_RECOVERY_SHARE", JobSpec().rebuild_share))


def parity(home: Path, interval_s: float) -> dict[str, float]:
    return killed(home, share_of_time())


def unpaced(home: Path, interval_s: float) -> dict[str, float]:
    found = killed(home, 1.0)
    return {f"unpaced_{name.removeprefix('parity_')}": value for name, value in found.items()}


def device(home: Path, interval_s: float) -> dict[str, float]:
    return emulated(home, "device", KEYS, DEVICE_WARM_S)


def large(home: Path, interval_s: float) -> dict[str, float]:
    return emulated(home, "large", LARGE_KEYS, LARGE_WARM_S)


def emulated(home: Path, name: str, keys: int, warm_s: float) -> dict[str, float]:
    """A table of so many rows; the job's data lasts longer than the window."""
    samples = round(DEVICE_BATCH / STEP_S * 2 * (warm_s + 108.0))
    script = [str(DEVICE), "--mode", "ps", "--home", str(home), "--members", "2", "--rows", str(samples)]
    script += ["--batch", str(DEVICE_BATCH), "--sample-s", str(STEP_S / DEVICE_BATCH), "--fields", str(FIELDS)]
    script += ["--keys", str(keys), "--dim", str(DIM), "--pattern", json.dumps({"kind": "constant", "s": 1.0})]
    found = killed(home, share_of_time(), script, warm_s)
    return {f"{name}_{figure.removeprefix('parity_')}": value for figure, value in found.items()}


def killed(home: Path, share: float, script: Sequence[str] = (), warm_s: float = 0.0) -> dict[str, float]:
    """``script``: in place of the flights; it needs ``warm_s`` until every row is there."""
    flags = [*PS, "--parity", "4+1", "--rebuild-share", f"{share:g}"]
    if script:
        job = Job(home, ["run", *flags], ["--", *script], LIMIT_S)
    else:
        job = Job.start(home, flags, EPOCHS, BATCH, LIMIT_S)
    try:
        job.wait_for(lambda: job.samples_done() > 0 and job.safe())
        begin = time.monotonic() + SPEED_S + warm_s
        job.wait_for(lambda: time.monotonic() > begin)
        bytes_before, busy_before_s = contents(job)  # from the beginning, when tables were small
        died_at = job.kill_ps(VICTIM)
        job.wait_for(lambda: not job.safe())
        job.wait_for(job.safe)
        safe_at = time.time()
        end = max(safe_at + AFTER_S, died_at + LONG_S)
        job.wait_for(lambda: time.time() > end + 0.5)
        bytes_after, busy_after_s = contents(job)
        busy_s = max(busy_after_s - busy_before_s, 1e-3) / N_PS
        logs = job.logs()
        at, samples = pushes(logs)
        dead = next(log for log in logs if (log.slot, log.life) == (VICTIM, 1))
        took, served = [], []
        for partition in dead.stints:
            later = [
                s for log in logs for s in log.stints.get(partition, []) if s.acquired is not None and s.at > died_at
            ]
            if later:
                stint = min(later, key=lambda s: s.at)
                rows = stint.log.rows_of(partition, stint.first, stint.last)
                took.append(stint.at - died_at)
                served += [float(stint.log.at[rows[0]]) - died_at] if len(rows) else []
        before = rate(at, samples, died_at - SPEED_S, died_at)
        return {
            "first_row_s": min(took),
            "served_s": min(served),
            "all_served_s": max(took),
            "protected_s": safe_at - died_at,
            "speed_until_protected": rate(at, samples, died_at, safe_at) / before,
            "speed_same": rate(at, samples, died_at - SPEED_S, died_at - SPEED_S / 2)
            / rate(at, samples, died_at - SPEED_S / 2, died_at),
            "contents_mb": max(0, bytes_after - bytes_before) / 1e6,
            "protected_over_bound": (safe_at - died_at) * share / busy_s,
            "speed_10s": rate(at, samples, died_at, died_at + LONG_S) / before,
            "gap_s": longest_gap(at, died_at, safe_at),
            "parity_lost_s": lost_s(at, samples, died_at, safe_at + AFTER_S),
        }
    finally:
        job.close()


def restore(home: Path, interval_s: float) -> dict[str, float]:
    job = Job.start(home, [*PS, "--checkpoint-every", f"{interval_s:g}s"], EPOCHS, BATCH, LIMIT_S)
    again: Job | None = None
    try:
        until_half_way(job, interval_s)
        died_at = time.time()
        os.killpg(job.main.pid, signal.SIGKILL)
        job.main.process.wait(30)
        again = Job(home, ["resume", str(job.run_dir)], [], LIMIT_S, "again")
        trained = again
        old, old_samples = pushes(job.logs())
        speed = rate(old, old_samples, died_at - SPEED_S, died_at)
        trained.wait_for(lambda: len(trained.logs()) > 0 and sum(log.n for log in trained.logs()) > 0)
        first_at = float(pushes(trained.logs())[0][0])

        def fresh() -> tuple[NDArray[np.float64], NDArray[np.float64]]:
            return pushes([*job.logs(), *trained.logs()])

        def beyond() -> bool:
            at, samples = fresh()
            return float(samples[at > died_at].sum()) > speed * AFTER_S

        while not beyond():
            trained.wait_for(lambda: True)
            time.sleep(0.5)
        at, samples = fresh()
        return {"restore_lost_s": lost_s(at, samples, died_at, float(at[-1])), "restart_s": first_at - died_at}
    finally:
        job.close()
        if again is not None:
            again.close()


def partial(home: Path, interval_s: float) -> dict[str, float]:
    job = Job.start(home, [*PS, "--checkpoint-every", f"{interval_s:g}s"], EPOCHS, BATCH, LIMIT_S)
    try:
        until_half_way(job, interval_s)
        at, samples = pushes(job.logs())
        speed = rate(at, samples, at[-1] - SPEED_S, at[-1])
        died_at = job.kill_ps(VICTIM)
        while new_since(job, died_at) < speed * AFTER_S:
            job.wait_for(lambda: True)
            time.sleep(0.5)
        at, samples = pushes(job.logs())
        return {"partial_lost_s": lost_s(at, samples, died_at, float(at[-1]))}
    finally:
        job.close()


def over_parity(figures: dict[str, float], interval_s: float) -> dict[str, float]:
    """What going back to a checkpoint costs, of what a loss costs with parity."""
    floor = max(figures["parity_lost_s"], 0.1)
    out = {"restore_over_parity": figures["restore_lost_s"] / floor}
    if "partial_lost_s" in figures:
        out["partial_over_parity"] = figures["partial_lost_s"] / floor
    for other_s in INTERVALS_S:
        rest_s = max(0.0, figures["restore_lost_s"] - interval_s / 2)
        out[f"expected_over_parity_{other_s}"] = (other_s / 2 + rest_s) / floor
    return out


def run(quick: bool) -> Result:
    interval_s = float(os.environ.get("EVERSTEP_RECOVERY_INTERVAL_S", "8" if quick else "30"))
    rounds = 1 if quick else int(os.environ.get("EVERSTEP_RECOVERY_ROUNDS", "3"))
    known = {"parity": parity, "unpaced": unpaced, "device": device, "large": large}
    known |= {"restore": restore, "partial": partial}
    names = os.environ.get("EVERSTEP_RECOVERY_SIDES", ",".join(known)).split(",")
    if unknown := set(names) - known.keys():
        raise SystemExit(f"EVERSTEP_RECOVERY_SIDES: no side is called {sorted(unknown)}; there are {list(known)}")
    ways = {name: way for name, way in known.items() if name in names}

    def one(way: str) -> dict[str, float]:
        with tempfile.TemporaryDirectory(prefix="everstep-recovery-") as folder:
            return ways[way](Path(folder), interval_s)

    sides = {name: (lambda name=name: one(name)) for name in ways}
    found = interleaved(sides, rounds, say, "restore" if "restore" in ways else names[0])
    values = {name: [r[name] for r in results] for results in found.values() for name in results[0]}
    figures = {"interval_s": interval_s} | {name: median(v) for name, v in values.items()}
    if {"parity", "restore"} <= ways.keys():
        figures |= over_parity(figures, interval_s)
    aims = {
        f"{side}{figure}": aim
        for side in ("", "device_", "large_")
        for figure, aim in (
            ("first_row_s", "<= 0.05"),
            ("served_s", "<= 0.05"),
            ("speed_until_protected", ">= 0.9"),
            ("protected_over_bound", "<= 1.3"),
        )
    } | {
        "restore_over_parity": ">= 10.3",
        "speed_10s": ">= 0.9",
    }
    limits = {name: (aim[:2] == "<=", float(aim[3:])) for name, aim in aims.items() if name in figures}
    aims = {name: aims[name] for name in limits}
    holds = {
        name: figures[name] <= bound if below else figures[name] >= bound for name, (below, bound) in limits.items()
    }
    spreads = {n: spread(v) for n, v in values.items()}
    if "restore_over_parity" in figures:
        beside(figures, spreads, found.noise("restore_lost_s"), "restore_over_parity")
    return {"figures": figures, "aims": aims, "holds": holds, "spread": spreads}
