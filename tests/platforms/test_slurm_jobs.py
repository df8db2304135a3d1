"""Real jobs on a real Slurm of three nodes: nodes are killed and taken back, ``everstep run`` is killed, and every
sample counts once."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from cluster_jobs import ClusterRun, until
from slurm_here import SlurmHere, missing

pytestmark = [
    pytest.mark.processes,
    pytest.mark.platforms,
    pytest.mark.slow,
    pytest.mark.timeout(1500),
    pytest.mark.skipif(bool(missing()), reason=missing() or "Slurm is here"),
]
TEMPLATE = Path(__file__).resolve().parents[2] / "examples" / "slurm_srun.sbatch"
PS = ("--workers", "3", "--ps", "3", "--parity", "1+1")
MODES = {"ps": PS, "allreduce": ("--mode", "allreduce", "--workers", "3")}


@pytest.fixture(scope="module")
def slurm() -> Iterator[SlurmHere]:
    here = SlurmHere(3)
    yield here
    here.close()


@pytest.fixture
def run(slurm: SlurmHere, tmp_path: Path) -> Iterator[ClusterRun]:
    made = ClusterRun(tmp_path, slurm.env, slurm.state)
    yield made
    made.close()


def begin(run: ClusterRun, mode: str, epochs: int = 16) -> None:
    run.write(epochs, sparse=mode == "ps")
    run.start("--on", "slurm", "--partition", "spot", "--nodes", "3", *MODES[mode])
    run.whole(3)
    run.trained(200)


def nothing_left(slurm: SlurmHere) -> None:
    until(lambda: not slurm.jobs() and not slurm.processes(), lambda: f"{slurm.jobs()} {slurm.processes()}", 60)


@pytest.mark.parametrize("mode", MODES)
def test_a_job_survives_a_node_and_its_everstep_run(run: ClusterRun, slurm: SlurmHere, mode: str) -> None:
    begin(run, mode)

    before = set(run.nodes())
    slurm.kill_node("n2")
    until(lambda: len(before & set(run.nodes())) == 2, run.story)  # (another one may be there before it counts as lost)
    run.trained(200)
    slurm.start_node("n2")
    slurm.said("scontrol", "update", "nodename=n2", "state=RESUME")
    run.whole(3)
    run.trained(200)

    stay = run.nodes()
    run.kill()
    run.start()
    run.whole(3)
    run.trained(200)
    assert run.nodes() == stay, "the nodes stayed"

    run.ends_well()
    nothing_left(slurm)


@pytest.mark.long
def test_a_node_that_is_preempted_is_emptied_and_comes_back(run: ClusterRun, slurm: SlurmHere) -> None:
    begin(run, "ps")
    before = run.nodes()
    words = ("sbatch", "--parsable", "-p", "high", "-c2", "-n1", "-t", "10", "-o", "/dev/null")
    high = slurm.said(*words, text="#!/bin/sh\nsleep 600\n").strip()
    until(lambda: len(run.nodes()) == 2 and f"{high} sbatch RUNNING" in "\n".join(slurm.jobs()), run.story)
    run.trained(200)
    slurm.said("scancel", high)
    run.whole(3)
    assert run.nodes() != before, "a node came back under another name"
    assert "is to be emptied" in "".join(p.read_text() for p in run.run_dir.glob("nodes/*.log")), run.story()

    run.everstep("scale", str(run.run_dir), "--workers", "2", "--ps", "2")
    run.whole(2)
    until(lambda: len(slurm.jobs()) == 2, lambda: str(slurm.jobs()))
    run.everstep("scale", str(run.run_dir), "--workers", "3")
    run.whole(3)
    run.trained(200)
    run.ends_well()
    nothing_left(slurm)


@pytest.mark.long
def test_a_queued_again_job_goes_on_exactly(run: ClusterRun, slurm: SlurmHere) -> None:
    """``everstep run`` is itself a job of Slurm, which takes it back and queues it again."""
    run.write(8, sparse=True)
    batch = (
        f"#!/bin/sh\nexec {sys.executable} -m everstep.cli run --no-display --run-dir {run.run_dir} --on slurm "
        f"--partition spot --nodes 1 --workers 1 --ps 1 --checkpoint-every 5s {run.script}\n"
    )
    words = ("sbatch", "--parsable", "-p", "spot", "-c1", "-n1", "--requeue", "--open-mode=append")
    job = slurm.said(*words, f"--output={run.folder}/everstep.log", text=batch).strip()
    run.whole(1)
    run.trained(200)
    slurm.said("scontrol", "requeue", job)
    until(lambda: "goes on from the journal" in (run.folder / "everstep.log").read_text(), run.story)
    run.whole(1)
    run.trained(200)
    run.hurry_file.touch()
    until(lambda: not any(line.startswith(f"{job} ") for line in slurm.jobs()), run.story, 300)
    from everstep.cli.display import read_summary
    from everstep.monitor.audit import audit

    summary = read_summary(run.run_dir)
    assert summary is not None and summary.exit_code == 0, run.story()
    assert audit(run.run_dir).ok, audit(run.run_dir).text()
    nothing_left(slurm)


@pytest.mark.long
def test_agents_that_srun_starts_in_one_job(run: ClusterRun, slurm: SlurmHere) -> None:
    """The sbatch template, as a user submits it: the job is queued again, later one of its nodes is lost."""
    run.write(16, sparse=True)
    command = run.folder / "everstep"
    command.write_text(f'#!/bin/sh\nexec {sys.executable} -m everstep.cli "$@"\n')
    command.chmod(0o755)
    given = {"RUN_DIR": run.run_dir, "EVERSTEP": command, "CHECKPOINT_EVERY": "5s"}
    words = ("sbatch", "--parsable", "--partition=spot", "--nodes=3", f"--output={run.folder}/everstep.log")
    export = "ALL," + ",".join(f"{name}={value}" for name, value in given.items())
    job = slurm.said(*words, f"--export={export}", str(TEMPLATE), str(run.script)).strip()
    run.whole(3)
    run.trained(200)
    assert len({line for line in slurm.said("squeue", "-h", "-s", "-o", "%N %j").splitlines() if "slurm-" in line}) == 3
    assert [line.split()[0] for line in slurm.jobs()] == [job], "one job has all nodes"
    slurm.said("scontrol", "requeue", job)
    until(lambda: "goes on from the journal" in (run.folder / "everstep.log").read_text(), run.story, 300)
    run.whole(3)
    run.trained(200)
    home = slurm.said("squeue", "-h", "-j", job, "-o", "%B").strip()
    slurm.kill_node("n3" if home != "n3" else "n2")
    run.trained(400)
    assert [line.split()[0] for line in slurm.jobs()] == [job], "the others go on"
    run.hurry_file.touch()
    until(lambda: not slurm.jobs(), run.story, 300)
    slurm.start_node("n3" if home != "n3" else "n2")
    from everstep.cli.display import read_summary
    from everstep.monitor.audit import audit

    summary = read_summary(run.run_dir)
    assert summary is not None and summary.exit_code == 0, run.story()
    assert audit(run.run_dir).ok, audit(run.run_dir).text()
    nothing_left(slurm)


@pytest.mark.long
def test_a_node_with_a_time_limit_is_replaced_before_its_end(run: ClusterRun, slurm: SlurmHere) -> None:
    run.write(10, sparse=True)
    run.start("--on", "slurm", "--time", "30", "--nodes", "2", "--workers", "2", "--ps", "2", "--parity", "1+1")
    run.whole(2)
    (job,) = [line.split()[0] for line in slurm.jobs() if line.endswith(" slurm-1")]
    slurm.said("scontrol", "update", f"jobid={job}", "timelimit=2")
    until(lambda: run.nodes() == ["slurm-2", "slurm-3"], run.story)
    run.whole(2)
    assert "ps:0 lost" not in (run.folder / "everstep.log").read_text(), "it was empty when it ended"
    run.ends_well()
    nothing_left(slurm)


def test_scripts_find_the_variables_of_torchrun(run: ClusterRun, slurm: SlurmHere) -> None:
    run.write(2, sparse=True)
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "SLURM_JOB_ID")
    said = f"repr({{n: os.environ[n] for n in {names}}})"
    note = f"open({str(run.folder)!r} + '/env-' + os.environ['RANK'], 'w').write({said})"
    run.script.write_text(run.script.read_text().replace("job = es.join()\n", f"job = es.join()\n{note}\n", 1))
    settings = run.folder / "job.yaml"
    settings.write_text("torchrun_env: true\n")
    run.start("-c", str(settings), "--on", "slurm", "--partition", "spot", "--nodes", "2", *PS[:1], "2", "--ps", "2")
    run.whole(2)
    until(lambda: len(run.nodes_told()) == 2, run.story)  # (the job is so short that nobody might tell its journal)
    run.ends_well()
    found = [ast.literal_eval(p.read_text()) for p in sorted(run.folder.glob("env-*"))]
    assert [f["RANK"] for f in found] == ["0", "1"] and {f["WORLD_SIZE"] for f in found} == {"2"}, found
    assert {(f["LOCAL_RANK"], f["LOCAL_WORLD_SIZE"]) for f in found} == {("0", "1")}, found
    assert len({f["SLURM_JOB_ID"] for f in found}) == 2, "each node is a job of its own"
    nothing_left(slurm)


def refused(run: ClusterRun, *words: str) -> str:
    run.write(1, sparse=False)
    argv = [sys.executable, "-m", "everstep.cli", "run", *words, str(run.script)]
    done = subprocess.run(argv, env=run.env, cwd=run.folder, capture_output=True, text=True, timeout=120, check=False)
    lines = done.stderr.splitlines()
    assert done.returncode == 2 and len(lines) == 1, done.stderr
    assert not (run.folder / "runs").exists()
    return lines[0]


def test_no_such_partition_account_or_size(run: ClusterRun) -> None:
    assert re.search(
        "no such partition; there are closed, high, spot", refused(run, "--on", "slurm", "--partition", "gpu")
    )
    wrong = refused(run, "--on", "slurm", "--partition", "closed", "--account", "nobody")
    assert "--account nobody: partition closed takes no jobs of it (AllowAccounts=team)" in wrong
    wrong = refused(run, "--on", "slurm", "--partition", "closed", "--account", "team")  # (no such association here)
    assert re.search("--account team: Slurm takes no such jobs in partition closed: .*Invalid account", wrong)
    assert "sbatch refuses the nodes" in refused(run, "--on", "slurm", "--node-cpus", "64")
    assert "sbatch refuses the nodes" in refused(run, "--on", "slurm", "--sbatch", "--no-such-flag")
    assert "slurm takes no address" in refused(run, "--on", "slurm:here")
    assert "more than there are workers and ps" in refused(run, "--on", "slurm", "--nodes", "5")
