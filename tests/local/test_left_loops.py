"""Scripts that leave their loop by ``break`` or by an error, as real jobs: the result is what they trained."""

from __future__ import annotations

import os
import re
import signal

import pytest
import torch
from local_jobs import Run, until
from torch import nn

pytestmark = [pytest.mark.processes, pytest.mark.timeout(300)]

SCRIPT = """
import os, time
import torch
from torch import nn
import everstep as es

torch.manual_seed(0)
torch.set_num_threads(1)
x = torch.randn(400, 8)
y = x @ torch.randn(8, 1)
job = es.join()
life = os.environ.get("EVERSTEP_INCARNATION", "1")
model = job.replicate(nn.Linear(8, 1))
opt = job.optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
loader = job.loader({{"x": x.numpy(), "y": y.numpy()}}, batch_size={batch}, epochs=1, shuffle=False)
for batch in job.steps(loader):
    opt.zero_grad()
    loss = nn.functional.mse_loss(model(batch["x"]), batch["y"])
    loss.backward()
    {before}
    opt.step()
    time.sleep(0.01)
    {behind}
print("weights", model.weight.detach().flatten().tolist(), "of", job.slot, "in life", life, flush=True)
{end}
"""


class LeftRun(Run):
    def write(self, batch: int = 10, before: str = "", behind: str = "", end: str = "") -> None:  # type: ignore[override]
        self.script.write_text(SCRIPT.format(batch=batch, before=before, behind=behind, end=end))

    def log(self, slot: int) -> str:
        return (self.run_dir / "logs" / f"worker-{slot}.log").read_text()

    def weights(self, slot: int) -> list[list[float]]:
        """What the lives of this worker have trained."""
        return [[float(w) for w in found.split(",")] for found in re.findall(r"weights \[([^\]]*)\]", self.log(slot))]

    def model(self) -> torch.Tensor:
        import safetensors.torch

        return safetensors.torch.load_file(self.run_dir / "model" / "model.safetensors")["weight"].flatten()

    def ended(self) -> None:
        assert self.wait() == 0, self.story()
        assert self.leftovers() == {}

    def audited(self, steps: str) -> None:
        code, out = self.everstep("audit", str(self.run_dir))
        assert code == 0 and f"steps committed {steps}," in out, out


RUN = LeftRun


def plain(steps: int, batch: int) -> torch.Tensor:
    """The weights, trained by plain PyTorch. ``batch``: of all workers together."""
    torch.manual_seed(0)
    x = torch.randn(400, 8)
    y = x @ torch.randn(8, 1)
    torch.manual_seed(0)  # (so does es.join)
    model = nn.Linear(8, 1)
    opt = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(steps):
        part = slice(step * batch, (step + 1) * batch)
        opt.zero_grad()
        nn.functional.mse_loss(model(x[part]), y[part]).backward()
        opt.step()
    return model.weight.detach().flatten()


def close(found: object, expected: torch.Tensor) -> None:
    torch.testing.assert_close(torch.as_tensor(found), expected, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("late", [None, 0, 1])
def test_all_leave_at_the_same_step_and_the_job_ends_with_its_model(run: LeftRun, late: int | None) -> None:
    """Also where one of them evaluates for a while yet. It once ended without a model, after a minute."""
    run.write(behind="if job.step == 9: break", end=f"time.sleep(2.0 * (job.slot == {late}))")
    run.start("--mode", "allreduce", "--workers", "2")
    run.ended()
    for slot in (0, 1):
        close(run.weights(slot), plain(10, 20)[None])
    close(run.model(), plain(10, 20))
    run.audited("10")


@pytest.mark.parametrize("slot", [0, 1])
def test_who_leaves_alone_leaves_the_others_to_finish(run: LeftRun, slot: int) -> None:
    run.write(behind=f"if job.step == 9 and job.slot == {slot}: break")
    run.start("--mode", "allreduce", "--workers", "2")
    run.ended()
    close(run.weights(slot), plain(10, 20)[None])
    close(run.model(), torch.tensor(run.weights(1 - slot)[0]))
    run.audited("30")  # (then the other one alone)


def test_a_chief_that_is_lost_behind_the_loop_evaluates_again_what_was_trained(run: LeftRun) -> None:
    """The one in its place does nothing with a model that is not yet the group's: not in a warm-up step either."""
    run.write(
        behind="if job.step >= 9: break",
        end="if (job.slot, life) == (0, '1'):\n    open('evaluating', 'w').write(str(os.getpid()))\n    time.sleep(99)",
    )
    run.start("--mode", "allreduce", "--workers", "2")
    until((run.folder / "evaluating").exists, why=run.story)
    until(lambda: run.weights(1), why=run.story)
    until(lambda: (run.folder / "evaluating").read_text(), why=run.story)
    os.kill(int((run.folder / "evaluating").read_text()), signal.SIGKILL)
    run.ended()
    assert len(run.weights(0)) == 2, run.log(0)
    close(run.weights(0), plain(10, 20).expand(2, -1))
    close(run.model(), plain(10, 20))
    run.audited("10")


def test_a_step_whose_iteration_raises_is_not_committed(run: LeftRun) -> None:
    """What it voted for is done again. ``finally`` gives the last steps time to be told, and checkpoints to be
    written."""
    raising = "if job.step == 25 and not os.path.exists('again'):\n        raise RuntimeError('passing')"
    run.write(before=f"time.sleep(0.03)\n    {raising}")
    text = run.script.read_text()
    loop = text[text.index("for batch") : text.index("print(")]
    run.script.write_text(
        text.replace(loop, "try:\n    " + loop.replace("\n", "\n    ") + "pass\nfinally:\n    time.sleep(1.0)\n")
    )
    run.start("--mode", "allreduce", "--workers", "1", "--checkpoint-every", "1batches")
    assert run.wait() == 1, run.story()
    _, out = run.everstep("audit", str(run.run_dir))
    assert "steps committed 25," in out, out
    (run.folder / "again").touch()
    code, out = run.everstep("resume", str(run.run_dir))
    assert code == 0, out
    found = re.findall(r"weights \[([^\]]*)\]", out)
    close([float(w) for w in found[0].split(",")], plain(40, 10))
