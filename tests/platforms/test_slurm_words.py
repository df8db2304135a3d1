"""What Slurm is told, and what is read of it: without Slurm."""

from __future__ import annotations

import subprocess

import pytest

from everstep.errors import ConfigError, PlatformError
from everstep.ids import NodeId
from everstep.model.capacity import Market, Offer
from everstep.platforms.cluster_nodes import NodeState
from everstep.platforms.slurm_jobs import (
    AgentSettings,
    SlurmSettings,
    environment,
    is_account_taken,
    is_preempted,
    job_script,
    job_words,
    read_jobs,
    read_partition,
    read_steps,
    reclaim_s,
    refusal,
    refused_nodes,
    seconds_of,
    step_script,
    step_words,
)
from everstep.platforms.slurm_steps import allocation_of

OFFER = Offer("", "spot", Market.SPOT)
STATES = {
    "PENDING": NodeState.ASKED,
    "CONFIGURING": NodeState.ASKED,
    "REQUEUED": NodeState.ASKED,
    "REQUEUE_HOLD": NodeState.ASKED,
    "RUNNING": NodeState.RUNNING,
    "SUSPENDED": NodeState.RUNNING,
    "COMPLETING": NodeState.LEAVING,
    "COMPLETED": NodeState.ENDED,
    "CANCELLED": NodeState.ENDED,
    "FAILED": NodeState.ENDED,
    "TIMEOUT": NodeState.ENDED,
    "NODE_FAIL": NodeState.ENDED,
    "PREEMPTED": NodeState.ENDED,
    "A_STATE_OF_LATER_VERSIONS": NodeState.ASKED,
}


def line(state: str, restarts: int = 0, left: str = "UNLIMITED") -> str:
    return f"12 |{state} |{restarts} |{left} |n1 |None |slurm-3 |\n"


@pytest.mark.parametrize("state", STATES)
def test_each_state_of_a_job(state: str) -> None:
    (job,) = read_jobs(line(state), OFFER)
    assert (job.job, job.seen.node, job.seen.state) == ("12", "slurm-3", STATES[state])
    assert job.seen.failed == (state == "FAILED") and job.seen.done == (state == "COMPLETED")


def test_a_job_that_was_queued_again_is_a_node_of_another_name() -> None:
    first, second = read_jobs(line("RUNNING") + line("PENDING", 1), OFFER)
    assert (first.seen.node, second.seen.node) == ("slurm-3", "slurm-3-r1")


def test_the_end_of_a_job_that_runs_is_known() -> None:
    (job,) = read_jobs(line("RUNNING", left="1-00:01:30"), OFFER)
    assert job.seen.left_s == 86_490.0
    (job,) = read_jobs(line("PENDING", left="10:00"), OFFER)
    assert job.seen.left_s is None, "its time has not begun"


@pytest.mark.parametrize("text", ["1|RUNNING", "slurm_load_jobs error: down|x|y|z|a|b|c|", "1|RUNNING|0|soon|n1|x|s|"])
def test_what_is_no_answer_is_refused(text: str) -> None:
    with pytest.raises(PlatformError, match="squeue"):
        read_jobs(text, OFFER)


@pytest.mark.parametrize(("text", "want"), [("0:05", 5.0), ("02:00:00", 7200.0), ("NOT_SET", None), ("INVALID", None)])
def test_spans(text: str, want: float | None) -> None:
    assert seconds_of(text) == want


def test_a_partition_says_whether_its_nodes_are_taken_back() -> None:
    spot = read_partition("PartitionName=spot Default=YES GraceTime=20 PreemptMode=REQUEUE MaxTime=UNLIMITED")
    assert is_preempted(spot) and reclaim_s(spot) == 17.0
    high = read_partition("PartitionName=high GraceTime=0 PreemptMode=OFF")
    assert not is_preempted(high) and reclaim_s(high) == 25.0


def test_the_words_of_a_node() -> None:
    settings = SlurmSettings("spot", "team", "2:00:00", "--mem=8G --exclusive", 4, 1)
    words = job_words(settings, "everstep-x", NodeId("slurm-1"), "/run")
    for each in ("--partition=spot", "--account=team", "--time=2:00:00", "--mem=8G", "--gpus=1", "--cpus-per-task=4"):
        assert each in words
    assert "--no-requeue" in words and "--comment=slurm-1" in words and "--job-name=everstep-x" in words


@pytest.mark.parametrize(("restarts", "node"), [(None, "slurm-1"), ("0", "slurm-1"), ("2", "slurm-1-r2")])
def test_the_script_of_a_node_names_it_by_its_restarts(restarts: str | None, node: str) -> None:
    script = job_script(AgentSettings("/bin/echo", "h:1", "/a b", 1, 2, Market.SPOT, 17.0), NodeId("slurm-1"))
    env = {"SLURMD_NODENAME": "n7"} | ({} if restarts is None else {"SLURM_RESTART_COUNT": restarts})
    said = subprocess.run(["sh"], input=script, env=env, capture_output=True, text=True, check=True).stdout
    assert f"--node {node} --machine n7 --run-dir /a b/nodes/{node}" in said
    assert "--workers 1 --ps 2 --market spot --reclaim 17" in said


def test_a_node_as_a_step_of_srun() -> None:
    words = step_words(SlurmSettings(cpus=2, gpus=1, options="--mem=1G"), "7", NodeId("slurm-2"), "/run")
    assert words[:5] == ["--jobid=7", "--job-name=slurm-2", "--nodes=1", "--ntasks=1", "--exact"]
    assert {"--cpus-per-task=2", "--gpus=1", "--mem=1G", "--kill-on-bad-exit=0"} <= set(words)
    script = step_script(AgentSettings("python", "h:1", "/a b", 1, 2), NodeId("slurm-2"))
    assert script.startswith("exec python -P -m everstep.cli agent --join h:1 --secret-file '/a b/secret'")
    assert "--workers 1 --ps 2" in script and script.endswith('--machine "$SLURMD_NODENAME"')
    assert read_steps("7.batch|batch\n7.0|slurm-1\n 7.3 | slurm-4 \n\n") == {
        "batch": "7.batch",
        "slurm-1": "7.0",
        "slurm-4": "7.3",
    }


@pytest.mark.parametrize(
    ("env", "said"),
    [
        ({}, "this is no job of Slurm; submit it with sbatch"),
        ({"SLURM_JOB_ID": "7", "SLURM_JOB_NUM_NODES": "2"}, "job 7 has 2 nodes; give sbatch --nodes=3"),
    ],
)
def test_steps_need_a_job_with_enough_nodes(env: dict[str, str], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        allocation_of(env, 3)
    assert allocation_of({"SLURM_JOB_ID": "7", "SLURM_JOB_NUM_NODES": "3"}, 3) == "7"


def test_a_job_inside_slurm_does_not_give_its_own_words_away() -> None:
    env = {"SLURM_CONF": "c", "SLURM_JOB_ID": "1", "SLURM_CPUS_PER_TASK": "9", "PATH": "p", "SBATCH_QOS": "q"}
    assert environment(env) == {"SLURM_CONF": "c", "PATH": "p", "SBATCH_QOS": "q"}


def test_a_refusal_is_one_line() -> None:
    said = ["sbatch: error: invalid account x", "sbatch: error: Batch job submission failed: Invalid account"]
    assert refusal(1, said) == "invalid account x; Batch job submission failed: Invalid account"
    assert refusal(3, []) == "exit code 3"


WRONG_ACCOUNT = "Invalid account or account/partition combination specified"


@pytest.mark.parametrize(
    "said", [f"allocation failure: {WRONG_ACCOUNT}", f"sbatch: error: Batch job submission failed: {WRONG_ACCOUNT}"]
)
def test_a_wrong_account_is_named(said: str) -> None:
    line = refused_nodes(SlurmSettings("spot", "nobody"), 1, [said])
    assert line.startswith("--account nobody: Slurm takes no such jobs in partition spot: ") and "\n" not in line
    assert WRONG_ACCOUNT in line and "sacctmgr" in line
    assert refused_nodes(SlurmSettings(), 1, [said]).startswith("no --account is given: Slurm takes no such jobs: ")


def test_other_refusals_are_told_as_sbatch_says_them() -> None:
    said = ["sbatch: error: invalid partition specified: gpu", "allocation failure: Invalid partition name specified"]
    line = refused_nodes(SlurmSettings("gpu", "team"), 1, said)
    assert line.startswith("--on slurm: sbatch refuses the nodes: invalid partition specified: gpu; allocation failure")


@pytest.mark.parametrize(
    ("fields", "taken"),
    [
        ("AllowGroups=ALL AllowAccounts=ALL", True),
        ("AllowAccounts=team,Other", True),
        ("AllowAccounts=other", False),
        ("AllowAccounts=ALL DenyAccounts=team", False),
        ("PartitionName=spot", True),
    ],
)
def test_a_partition_says_which_accounts_it_takes(fields: str, taken: bool) -> None:
    assert is_account_taken("Team", read_partition(fields)) is taken
