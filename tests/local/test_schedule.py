"""What outlives a worker of mode ps: the schedule of the job, its buffers, and steps that span shards."""

from __future__ import annotations

from local_jobs import Run

SCRIPT = """
import os, signal, time
import numpy as np, torch
import everstep as es
from torch import nn

N = 160
job = es.join()
torch.manual_seed(1)
model = job.replicate(nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Linear(6, 1)))
opt = job.optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
schedule = torch.optim.lr_scheduler.LinearLR(opt, 1.0, 0.0, total_iters=2 * N)
job.track(schedule=schedule)
x = np.random.default_rng(0).normal(size=(16 * N, 4)).astype(np.float32)
for batch in job.steps(job.loader({"x": x}, batch_size=16)):
    opt.zero_grad()
    model(batch["x"]).pow(2).mean().backward()
    opt.step()
    schedule.step()
    time.sleep(0.03)  # (a worker holds what it can do in a second)
    if job.slot == 1 and job.step == 20 and not os.path.exists("killed"):
        open("killed", "w").close()
        os.kill(os.getpid(), signal.SIGKILL)
    if job.slot == 1 and job.step == 3 and os.path.exists("killed"):
        open("back", "w").close()
    wait_until = time.monotonic() + 150
    while job.slot == 0 and job.step == 60 and not os.path.exists("back") and time.monotonic() < wait_until:
        time.sleep(0.02)  # the other one's replacement has some batches, too
seen = int(model.state_dict()["1.num_batches_tracked"])
with open(f"end-{job.slot}.txt", "w") as out:
    out.write(f"{schedule.last_epoch} {seen} {job.step}")
"""


def test_a_schedule_counts_the_steps_of_the_job_and_buffers_outlive_a_worker(run: Run) -> None:
    run.script.write_text(SCRIPT)
    run.start("--workers", "2", "--ps", "2")
    run.ended_well()
    assert (run.folder / "killed").exists()
    ends = [tuple(map(int, p.read_text().split())) for p in sorted(run.folder.glob("end-*.txt"))]
    assert len(ends) == 2 and sum(own for _, _, own in ends) < 160  # some were of the worker that was killed
    for counted, seen, own in ends:
        assert seen == 160, "each batch was in the running statistics once"
        assert own < counted <= 160, ends  # the other worker's steps count
    assert max(counted for counted, _, _ in ends) > 140, ends


ACCUMULATED = """
import numpy as np, torch
import everstep as es
from torch import nn

job = es.join()
model = job.sparse(es.nn.Embedding("count", 1, init=es.Constant(0.0)), optimizer=es.SGD(lr=1.0))
model = job.replicate(nn.ModuleDict({"rows": model, "dense": nn.Linear(1, 1, bias=False)}))
nn.init.zeros_(model["dense"].weight)
opt = job.optimizer(torch.optim.SGD(model.parameters(), lr=1.0))
i = 0
for batch in job.steps(job.loader({"id": np.arange(1000)}, batch_size=7, epochs=3)):
    (-model["rows"](batch["id"]).sum() - model["dense"].weight.sum() * len(batch["id"])).backward()
    i += 1
    if i % 4 == 0:
        opt.step()
        opt.zero_grad()
opt.step()
opt.zero_grad()
if job.chief:
    state = model.state_dict()
    counts = state["rows.weight"].flatten()
    job.log("counted", len(counts), counts.min().item(), counts.max().item(), state["dense.weight"].item())
"""


def test_accumulated_steps_span_shards_and_epochs_and_lose_nothing(run: Run) -> None:
    """One worker, so that what is left behind the loop is known: every row and the dense part gain one a sample."""
    run.script.write_text(ACCUMULATED)
    run.start("--workers", "1", "--ps", "2")
    run.ended_well()
    log = (run.run_dir / "logs" / "worker-0.log").read_text()
    assert "counted 1000 3.0 3.0 3000.0" in log, log
