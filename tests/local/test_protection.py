"""Parameters that survive: ``kill -9`` of ps, alone, in pairs, with workers and the master, while training goes on.

The counting model is the witness apart from the audit: the row of each sample gains exactly 1.0 per epoch. So is a
dense layer whose gradient is always the same: whoever steps it, its end is that of so many steps of plain PyTorch.
"""

from __future__ import annotations

import os
import random
import signal
import time

import pytest
from local_jobs import Run, until

from everstep.model.member import Role
from everstep.monitor.audit import AuditReport, audit

pytestmark = [pytest.mark.processes, pytest.mark.timeout(300)]

COUNTING = """
import os, time
import numpy as np, torch
import everstep as es

EPOCHS, ROWS, DENSE = {epochs}, 3000, {dense}
job = es.join()
model = job.sparse(es.nn.Embedding("counts", 2, init=es.Constant(0.0)), optimizer=es.SGD(lr=1.0))
net = torch.nn.Linear(90, 70)
torch.nn.init.constant_(net.weight, 0.5), torch.nn.init.constant_(net.bias, 0.5)
def of_net(params, decay):
    opt = torch.optim.RMSprop(params, lr=0.01, momentum=0.5)
    opt.param_groups[0]["weight_decay"] = decay
    return opt
if DENSE:
    job.replicate(net)
    opt = job.optimizer(of_net([*model.parameters(), *net.parameters()], 0.0))
    opt.param_groups[0]["weight_decay"] = 0.1  # travels with each step
for batch in job.steps(job.loader({{"ids": np.arange(ROWS)}}, batch_size=200, epochs=EPOCHS)):
    if DENSE:
        opt.zero_grad()
        sum(p.sum() for p in net.parameters()).backward()
    (-model(batch["ids"])).sum().backward()
    if DENSE:
        opt.step()
    if not os.path.exists({hurry!r}):
        time.sleep(0.15)
if job.chief:
    with job.eval(model):
        got = model(torch.arange(ROWS)).detach()
    wrong = (got != float(EPOCHS)).any(1).nonzero().flatten().tolist()
    if DENSE:
        one = torch.nn.Parameter(torch.tensor([0.5]))
        plain = of_net([one], 0.1)
        for _ in range(EPOCHS * ROWS // 200):
            one.grad = torch.ones(1)
            plain.step()
        off = max(float((p - one).detach().abs().max()) for p in net.parameters())
        print("dense right" if off < 1e-4 else f"dense wrong: off by {{off}}", flush=True)
    print("counted right" if not wrong else f"counted wrong: {{wrong[:10]}} {{got[wrong[:10]].tolist()}}", flush=True)
"""


def begin(run: Run, flags: str, epochs: int = 7, dense: bool = False) -> Run:
    run.script.write_text(COUNTING.format(epochs=epochs, hurry=str(run.folder / "hurry"), dense=dense))
    return run.start("--workers", "2", *flags.split())


def kill(run: Run, *members: str, at_least: int = 1) -> None:
    """SIGKILL to all of them at once: "ps:1", "worker:0", "master"."""
    pids = []
    for member in members:
        role, _, slot = member.partition(":")
        pids.append(run.master_pid() if role == "master" else run.alive(Role(role), int(slot), at_least).pid)
    for pid in pids:
        os.kill(pid, signal.SIGKILL)


def is_protected(run: Run) -> bool:
    """Whether every partition survives as many losses as its code promises."""
    status = run.status()
    found = status.protection if status is not None else None
    return found is not None and found.full > 0 and not (found.less or found.none or found.rebuilding or found.building)


def check(run: Run) -> AuditReport:
    """All happened that should; now the job ends well and leaves nothing, every row counts right, and the audit says
    exactly once."""
    run.hurry()
    assert run.wait(280) == 0, run.story()
    assert "counted right" in run.text(), run.story()
    assert run.leftovers() == {}
    report = audit(run.run_dir)
    assert report.ok and report.finished, report.text()
    assert "batches retried: 0" in run.text(), run.text()[-500:]  # what was kept is sent again, not computed
    return report


def test_a_ps_is_lost_and_its_replacement_too(run: Run) -> None:
    begin(run, "--ps 6 --parity 4+1", dense=True)
    for life in (1, 2):
        run.trained(life * 3000)
        kill(run, "ps:1", at_least=life)
    run.alive(Role.PS, 1, at_least=3)
    report = check(run)
    assert "dense right" in run.text(), run.story()
    assert report.counts["rebuilt"] > 0 and report.counts["promoted"] > 0
    assert "2 ps" in run.text()


def test_two_ps_are_lost_at_once_twice(run: Run) -> None:
    begin(run, "--ps 7 --parity 4+2", epochs=8)
    for life, slots in ((1, (1, 2)), (2, (2, 5))):
        run.trained(life * 3500)
        kill(run, *(f"ps:{slot}" for slot in slots))
    report = check(run)
    assert report.counts["rebuilt"] > 0 and "4 ps" in run.text()


def test_a_ps_a_worker_and_the_master_are_lost_at_once(run: Run) -> None:
    begin(run, "--ps 3 --parity 1+1")
    run.trained(3000)
    kill(run, "ps:2", "worker:1", "master")
    run.alive(Role.PS, 2, at_least=2)
    run.alive(Role.WORKER, 1, at_least=2)
    run.trained(9000)
    kill(run, "ps:0", "worker:0")
    run.hurry()
    assert run.wait(280) == 0, run.story()
    assert "counted right" in run.text(), run.story()
    report = audit(run.run_dir)
    assert report.ok and report.finished, report.text()


def test_the_master_is_lost_while_partitions_are_rebuilt(run: Run) -> None:
    begin(run, "--ps 4 --parity 2+1")
    for life in (1, 2):
        run.trained(life * 3000)
        kill(run, "ps:3", at_least=life)
        kill(run, "master")
    check(run)


def test_eager_protection_may_undo_a_little_and_says_it(run: Run) -> None:
    begin(run, "--ps 4 --parity 2+1 --protect eager")
    for life in (1, 2):
        run.trained(life * 3000)
        kill(run, "ps:1", at_least=life)
    run.hurry()
    assert run.wait(280) == 0, run.story()
    assert "counted right" in run.text(), run.story()
    report = audit(run.run_dir)
    assert report.ok and report.finished, report.text()


@pytest.mark.slow
@pytest.mark.parametrize("consistency, lost", [("async", ("ps:1",)), ("bounded:2", ("ps:1", "worker:1"))])
def test_what_mirrors_that_lag_lack_is_trained_again_once(run: Run, consistency: str, lost: tuple[str, ...]) -> None:
    """``lost``: who is killed at once. Whoever computed what the mirrors lack may be among them."""
    begin(run, f"--ps 6 --parity 4+1 --protect lag --protect-lag 3s --consistency {consistency}", dense=True)
    for life in (1, 2):
        run.trained(life * 3000)
        kill(run, *lost, at_least=life)
    run.alive(Role.PS, 1, at_least=3)
    run.hurry()
    assert run.wait(280) == 0, run.story()
    assert "counted right" in run.text() and "dense right" in run.text(), run.story()
    assert run.leftovers() == {}
    report = audit(run.run_dir)
    assert report.ok and report.finished, report.text()
    assert report.counts["void"] > 0, report.text()  # the losses did cost something
    assert report.counts["rebuilt"] + report.counts["promoted"] > 0, report.text()
    assert "may not have reached every mirror" in (run.run_dir / "events.jsonl").read_text()


@pytest.mark.slow
@pytest.mark.parametrize("seed", [1, 2])
def test_losses_at_random_moments_within_the_lag_count_every_sample_once(run: Run, seed: int) -> None:
    """One ps of 4+2 is killed at a moment that ``seed`` draws, then two at once. What is computed
    again is told as that, and the counts are the witness."""
    rng = random.Random(seed)
    begin(run, "--ps 7 --parity 4+2 --protect lag --protect-lag 2s", epochs=8)
    for life in (1, 2):
        run.trained(int(3000 * (life + rng.random() - 0.5)))
        until(lambda: is_protected(run), why=run.story)
        time.sleep(rng.random())
        kill(run, *(f"ps:{slot}" for slot in rng.sample(range(7), life)))
    run.hurry()
    assert run.wait(280) == 0, run.story()
    assert "counted right" in run.text(), run.story()
    report = audit(run.run_dir)
    assert report.ok and report.finished, report.text()
    assert report.counts["void"] > 0 and "undone by crashes and applied again" in report.text()
    assert report.counts["rebuilt"] > 0 and report.counts.get("loaded", 0) == 0, report.text()


@pytest.mark.slow
def test_a_ps_whose_mirrors_lag_is_emptied_and_loses_nothing(run: Run) -> None:
    is_emptied_and_loses_nothing(run, "--ps 3 --parity 1+1 --protect lag --protect-lag 30s")


def test_ps_are_added_and_taken_away(run: Run) -> None:
    begin(run, "--ps 2 --parity 1+1", epochs=9)
    run.trained(3000)
    code, out = run.everstep("scale", str(run.run_dir), "--ps", "4")
    assert code == 0, out
    run.alive(Role.PS, 3)
    run.trained(10000)
    code, out = run.everstep("scale", str(run.run_dir), "--ps", "2")
    assert code == 0, out
    report = check(run)
    assert report.counts["promoted"] > 0 and report.counts["void"] == 0


def test_a_ps_is_emptied_on_request(run: Run) -> None:
    is_emptied_and_loses_nothing(run, "--ps 3 --parity 1+1")


def is_emptied_and_loses_nothing(run: Run, flags: str) -> None:
    begin(run, flags, epochs=8)
    run.trained(3000)
    code, out = run.everstep("drain", str(run.run_dir), "ps:1", "--deadline", "30s")
    assert code == 0, out
    until(lambda: "switch partitions" in (run.run_dir / "events.jsonl").read_text(), why=run.story)
    report = check(run)
    assert report.counts["promoted"] > 0 and report.counts["void"] == 0


FIRST_ROWS = """
import time
import numpy as np, torch
import everstep as es

EPOCHS, ROWS = 3, 600
job = es.join()
table = torch.nn.Embedding(ROWS, 2)
with torch.no_grad():
    table.weight.copy_(torch.arange(ROWS).float()[:, None].expand(ROWS, 2))
model = job.sparse(table, optimizer=es.SGD(lr=1.0))
for batch in job.steps(job.loader({"ids": np.arange(ROWS)}, batch_size=20, epochs=EPOCHS)):
    (-model(batch["ids"])).sum().backward()
    time.sleep(0.01)
if job.chief:
    with job.eval(model):
        got = model(torch.arange(ROWS)).detach()[:, 0] - torch.arange(ROWS)
    print("counted right" if (got == EPOCHS).all() else f"counted wrong: {got.tolist()[:50]}", flush=True)
"""


def test_a_ps_that_is_lost_before_its_mirrors_are_whole_begins_empty(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its partitions begin again, with the first rows of their tables, and all that was trained is trained again."""
    monkeypatch.setenv(
        "EVERSTEP_FAULT", "ps:1.1:before_append:1"
    )  # in its first life alone: each further one costs a move
    run.script.write_text(FIRST_ROWS)
    run.start("--workers", "2", "--ps", "3", "--parity", "2+1")
    assert run.wait(280) == 0, run.story()
    assert "counted right" in run.text(), run.story()
    report = audit(run.run_dir)
    assert report.ok and report.finished, report.text()
    assert report.counts["begun"] > 0, report.text()
    assert "begin empty again" in (run.run_dir / "events.jsonl").read_text()


def test_a_ps_that_is_told_to_end_is_emptied_first(run: Run) -> None:
    """SIGTERM from outside is a reclaim notice: nothing is lost by it, and another one takes the slot."""
    begin(run, "--ps 3 --parity 1+1", epochs=6)
    run.trained(3000)
    os.kill(run.alive(Role.PS, 1).pid, signal.SIGTERM)
    run.alive(Role.PS, 1, at_least=2)
    report = check(run)
    assert report.counts["promoted"] > 0 and report.counts["void"] == 0
    assert report.counts.get("rebuilt", 0) == report.counts.get("loaded", 0) == 0


HOT = """
import numpy as np, torch
import everstep as es
from everstep.native import unique_route
from everstep.model.table import table_id

BUCKETS = 64
job = es.join()
model = job.sparse(es.nn.EmbeddingBag("hot", 16), optimizer=es.Adagrad(lr=0.1))
keys = np.arange(400_000)
at, wanted = np.arange(BUCKETS, dtype=np.int32), []
for key in keys.reshape(-1, 4000):  # a few buckets, all of one ps, have all that is asked for
    routed, _, counts = unique_route(key, BUCKETS, table_id("hot"), at, BUCKETS)
    ends = np.cumsum(counts)
    wanted += [routed[ends[b] - counts[b] : ends[b]] for b in (0, 3, 6, 9)]
hot = np.concatenate(wanted)
ids = hot[np.random.default_rng(0).integers(0, len(hot), (60_000, 64))]
for batch in job.steps(job.loader({"ids": ids}, batch_size=256, epochs=40)):
    model(batch["ids"]).sum().backward()
"""


@pytest.mark.slow
def test_hot_partitions_move_away_from_the_ps_that_has_too_much_to_do(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("EVERSTEP_HOT_BUSY", "0.01")  # here it has to share two cores
    run.script.write_text(HOT)
    run.start("--workers", "1", "--ps", "3")
    events = run.run_dir / "events.jsonl"
    until(lambda: events.exists() and "move hot partitions" in events.read_text(), 120, run.story)
    until(lambda: "switch partitions" in events.read_text(), 60, run.story)
    code, out = run.everstep("stop", str(run.run_dir))
    assert code == 0 and run.wait() == 0, out
    code, out = run.everstep("explain", str(run.run_dir))
    assert "move hot partitions" in out, out
    report = audit(run.run_dir)
    assert report.ok and report.counts["promoted"] > 0, report.text()


@pytest.mark.slow
@pytest.mark.parametrize(
    "step",
    [
        "before_apply",
        "after_apply",
        "before_append",
        "after_append",
        "before_ack",
        "after_ack",
        "mid_move",
        "mid_rebuild",
    ],
)
def test_a_ps_dies_at_a_named_step_in_every_life(run: Run, monkeypatch: pytest.MonkeyPatch, step: str) -> None:
    """Its replacements die there too, until nobody starts another one: the others have its partitions then."""
    middle = step.startswith("mid_")  # a second loss while the first one is dealt with
    monkeypatch.setenv("EVERSTEP_FAULT", f"ps:1:{step}:{1 if middle else 9}")
    begin(run, "--ps 5 --parity 2+2" if middle else "--ps 4 --parity 2+1", epochs=6)
    if middle:
        run.trained(1000)
        kill(run, "ps:2")
    assert run.wait(280) == 0, run.story()
    assert "counted right" in run.text(), run.story()
    report = audit(run.run_dir)
    assert report.ok and report.finished, report.text()
    assert report.counts["taken"] > 0


@pytest.mark.slow
def test_reading_whole_tables_while_ps_are_lost(run: Run) -> None:
    run.script.write_text(READING)
    run.start("--workers", "2", "--ps", "4", "--parity", "2+1")
    for slot in (0, 3, 1):
        run.trained(100)
        until(lambda: protected(run), why=run.story)
        kill(run, f"ps:{slot}")
        until(lambda: not protected(run), why=run.story)
    check(run)


def protected(run: Run) -> bool:
    status = run.status()
    return status is not None and status.protection is not None and status.protection.full == 64


READING = """
import time
import numpy as np, torch
import everstep as es

EPOCHS, ROWS = 6, 3000
job = es.join()
table = job.sparse(es.nn.Embedding("counts", 2, init=es.Constant(0.0)), optimizer=es.SGD(lr=1.0))
loader = job.loader({"ids": np.arange(ROWS)}, batch_size=50, epochs=1)
for epoch in range(EPOCHS):
    for batch in job.steps(loader):
        (-table(batch["ids"])).sum().backward()
        time.sleep(0.01)
    for again in range(8 if job.chief else 0):
        state = table.state_dict()["weight"]
        with job.eval(table):
            seen = table(torch.arange(ROWS))
        assert state.shape == seen.shape and state.min() >= 0 and (seen >= state).all()
        time.sleep(0.1)
if job.chief:
    with job.eval(table):
        got = table(torch.arange(ROWS)).detach()
    print("counted right" if (got == float(EPOCHS)).all() else f"counted wrong: {got}", flush=True)
"""
