"""Random numbers in the script of a real job of several workers: they belong to the samples, not to the process."""

from __future__ import annotations

import pytest
from local_jobs import Run

SCRIPT = """
import os, random, signal
import numpy as np, torch
import everstep as es
from torch import nn

job = es.join()
data = {"id": np.arange(1600), "x": np.ones((1600, 4), np.float32)}
model = job.replicate(nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.5), nn.Linear(8, 1)))
opt = job.optimizer(torch.optim.SGD(model.parameters(), lr=0.01))
for batch in job.steps(job.loader(data, batch_size=100, epochs=2, shuffle=False)):
    mask = nn.functional.dropout(torch.ones(16)).tolist()
    drawn = [random.random(), float(np.random.rand()), *mask]
    with open("drawn.txt", "a") as out:
        out.write(f"{os.getpid()} {int(batch['id'][0])} {drawn}\\n")
    if int(batch["id"][0]) == 700 and not os.path.exists("killed"):
        open("killed", "w").close()
        os.kill(os.getpid(), signal.SIGKILL)
    opt.zero_grad(); model(batch["x"]).sum().backward(); opt.step()
"""


@pytest.mark.parametrize("flags", [(), ("--consistency", "sync")], ids=["async", "sync"])
def test_a_range_computed_again_draws_the_same_and_no_two_ranges_do(run: Run, flags: tuple[str, ...]) -> None:
    run.script.write_text(SCRIPT)
    run.start("--workers", "2", *flags)
    run.ended_well()
    drawn: dict[int, list[tuple[str, str]]] = {}
    for line in (run.folder / "drawn.txt").read_text().splitlines():
        pid, lo, values = line.split(" ", 2)
        drawn.setdefault(int(lo), []).append((pid, values))
    assert len(drawn) == 16
    killed_at = drawn[700]
    assert len(killed_at) >= 3  # two epochs, and the one that was killed (a change of members may repeat a sync batch)
    assert len({pid for pid, _ in killed_at}) >= 2
    by_values: dict[str, set[int]] = {}
    for lo, found in drawn.items():
        assert len({values for _, values in found}) == 2, (lo, found)  # one for each epoch, whoever computes it
        for _, values in found:
            by_values.setdefault(values, set()).add(lo)
    assert all(len(places) == 1 for places in by_values.values()), by_values


BUILT = """
import random
import numpy as np, torch
import everstep as es
from torch import nn
from torch.distributed.fsdp import fully_shard

drawn = [random.random(), random.randrange(1 << 30), np.random.rand()]  # (before es.join() as after it)
job = es.join()
net = nn.Linear(4, 3)
with torch.no_grad():
    net.bias.copy_(torch.tensor([*drawn[::2], random.random()]))
if job.processes_per_worker > 1:
    fully_shard(net, mesh=job.device_mesh)
model = job.replicate(net)
opt = job.optimizer(torch.optim.SGD(model.parameters(), lr=0.01))
for batch in job.steps(job.loader({"x": np.ones((64, 4), np.float32)}, batch_size=8)):
    opt.zero_grad(); model(batch["x"]).sum().backward(); opt.step()
"""


AUGMENTED = """
import os, random, signal
import numpy as np, torch
import everstep as es
from torch import nn

class Augmented(torch.utils.data.Dataset):
    def __len__(self):
        return 800
    def __getitem__(self, i):
        return i, torch.ones(4), [random.random(), np.random.rand(), torch.rand(1).item()]

job = es.join()
model = job.replicate(nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.5), nn.Linear(8, 1)))
opt = job.optimizer(torch.optim.SGD(model.parameters(), lr=0.01))
for number, (index, x, drawn) in enumerate(job.steps(job.loader(Augmented(), 40))):
    with open("drawn.txt", "a") as out:
        for i, *values in zip(index.tolist(), *(d.tolist() for d in drawn)):
            out.write(f"{os.getpid()} {i} {values}\\n")
    opt.zero_grad(); model(x).sum().backward()
    if number == 2:  # one of the two comes that far
        try:
            open("killed", "x").close()
            os.kill(os.getpid(), signal.SIGKILL)
        except FileExistsError:
            pass
    opt.step()
"""


@pytest.mark.parametrize(
    "flags",
    [("--workers", "2"), ("--mode", "allreduce", "--workers", "2", "--logical-workers", "4")],
    ids=["ps", "logical workers"],
)
def test_augmentation_keeps_its_bits_whoever_reads_the_sample(run: Run, flags: tuple[str, ...]) -> None:
    run.script.write_text(AUGMENTED)
    run.start(*flags)
    run.ended_well()
    drawn: dict[int, set[str]] = {}
    lines = (run.folder / "drawn.txt").read_text().splitlines()
    for line in lines:
        _, i, values = line.split(" ", 2)
        drawn.setdefault(int(i), set()).add(values)
    assert sorted(drawn) == list(range(800)) and len(lines) > 800  # some were read twice: a worker was killed
    assert all(len(found) == 1 for found in drawn.values())
    assert len(set().union(*drawn.values())) == 800


@pytest.mark.parametrize("flags", [("--workers", "2"), ("--workers", "1", "--processes-per-worker", "2")])
def test_a_model_that_is_built_with_random_and_numpy_is_the_same_in_all_workers(
    run: Run, flags: tuple[str, ...]
) -> None:
    run.script.write_text(BUILT)
    run.start("--mode", "allreduce", *flags)
    run.ended_well()
