"""Writes and reads the words of Slurm: what ``sbatch`` is told, what ``squeue`` and ``scontrol`` show. Pure."""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping, Sequence
from typing import Final, NamedTuple

import msgspec

from everstep.errors import PlatformError, escaped
from everstep.ids import NodeId
from everstep.model.capacity import Market, Offer
from everstep.platforms.cluster_nodes import NodeState, SeenNode

SHOWN: Final = ("JobID", "State", "RestartCnt", "TimeLeft", "NodeList", "Reason", "Comment")
FORMAT: Final = ",".join(f"{field}:255|" for field in SHOWN)
"""For ``squeue -O``."""
STEP_FORMAT: Final = "%i|%j"
_STATES: Final = {
    "PENDING": NodeState.ASKED,
    "CONFIGURING": NodeState.ASKED,
    "REQUEUED": NodeState.ASKED,
    "REQUEUE_FED": NodeState.ASKED,
    "REQUEUE_HOLD": NodeState.ASKED,
    "SPECIAL_EXIT": NodeState.ASKED,
    "RESV_DEL_HOLD": NodeState.ASKED,
    "RESIZING": NodeState.RUNNING,
    "RUNNING": NodeState.RUNNING,
    "STOPPED": NodeState.RUNNING,
    "SUSPENDED": NodeState.RUNNING,
    # A job that is taken back, and may be queued again: it is not over before Slurm says so.
    "COMPLETING": NodeState.LEAVING,
    "SIGNALING": NodeState.LEAVING,
    "STAGE_OUT": NodeState.LEAVING,
}
_ENDED: Final = (
    *("COMPLETED", "CANCELLED", "FAILED", "TIMEOUT", "NODE_FAIL"),
    *("PREEMPTED", "BOOT_FAIL", "DEADLINE", "OUT_OF_MEMORY", "REVOKED"),
)
_OWN_FAILURES: Final = ("FAILED", "OUT_OF_MEMORY", "BOOT_FAIL")
_NO_TIME: Final = ("UNLIMITED", "NOT_SET", "INVALID", "N/A", "")
_TIME: Final = re.compile(r"(?:(\d+)-)?(?:(\d+):)?(\d+):(\d+)")
KEPT: Final = ("SLURM_CONF", "SLURM_JWT")
"""The variables of Slurm that a job's own ``sbatch`` may see: the others are of the job that it stands in."""


class SlurmSettings(msgspec.Struct, frozen=True):
    """Says what each node asks for. ``options``: more words for ``sbatch``."""

    partition: str = ""
    account: str = ""
    time: str = ""
    options: str = ""
    cpus: int = 1
    gpus: int = 0


class AgentSettings(msgspec.Struct, frozen=True):
    """Says what each agent is told. ``at``: HOST:PORT of the master. ``reclaim_s``: how long it may take to empty its
    node."""

    python: str
    at: str
    run_dir: str
    workers: int
    ps: int
    market: Market = Market.ON_DEMAND
    reclaim_s: float = 25.0


class SlurmJob(NamedTuple):
    """Is a job of Slurm in which a node is, or was."""

    job: str
    seen: SeenNode


def wanted_words(settings: SlurmSettings) -> list[str]:
    """Return the words of ``sbatch`` that say what a node asks for."""
    words = ["--nodes=1", "--ntasks=1", f"--cpus-per-task={settings.cpus}"]
    words += [f"--gpus={settings.gpus}"] if settings.gpus else []
    for flag in ("partition", "account", "time"):
        if value := getattr(settings, flag):
            words.append(f"--{flag}={value}")
    return words + shlex.split(settings.options)


def job_words(settings: SlurmSettings, group: str, node: NodeId, run_dir: str) -> list[str]:
    """Return the words of ``sbatch`` for the job of a node. The script comes by its standard input."""
    words = ["--parsable", f"--job-name={group}", f"--comment={node}", "--no-requeue", "--open-mode=append"]
    words += [f"--output={run_dir}/nodes/{node}.log", f"--chdir={run_dir}"]
    return words + wanted_words(settings)


def _agent_words(agent: AgentSettings) -> list[str]:
    argv = [agent.python, "-P", "-m", "everstep.cli", "agent", "--join", agent.at, "--secret-file"]
    argv += [f"{agent.run_dir}/secret", "--workers", str(agent.workers), "--ps", str(agent.ps)]
    return [*argv, "--market", agent.market.value, "--reclaim", f"{agent.reclaim_s:g}"]


def job_script(agent: AgentSettings, node: NodeId) -> str:
    """Return the script of a node's job. A job that Slurm queues again has a node of another name."""
    folder = shlex.quote(f"{agent.run_dir}/nodes")
    argv = _agent_words(agent)
    return (
        "#!/bin/sh\n"
        f'node={node}; [ "${{SLURM_RESTART_COUNT:-0}}" = 0 ] || node="$node-r$SLURM_RESTART_COUNT"\n'
        f'exec {shlex.join(argv)} --node "$node" --machine "$SLURMD_NODENAME" --run-dir {folder}/"$node"\n'
    )


def step_words(settings: SlurmSettings, job: str, node: NodeId, run_dir: str) -> list[str]:
    """Return the words of ``srun`` for the step of a node: one task on a node of allocation ``job`` of its own."""
    words = [f"--jobid={job}", f"--job-name={node}", "--nodes=1", "--ntasks=1", "--exact"]
    words += [f"--cpus-per-task={settings.cpus}", "--kill-on-bad-exit=0", "--open-mode=append"]
    words += [f"--gpus={settings.gpus}"] if settings.gpus else []
    return [*words, f"--output={run_dir}/nodes/{node}.log", f"--chdir={run_dir}", *shlex.split(settings.options)]


def step_script(agent: AgentSettings, node: NodeId) -> str:
    """Return the command of a node's step."""
    argv = [*_agent_words(agent), "--node", node, "--run-dir", f"{agent.run_dir}/nodes/{node}"]
    return f'exec {shlex.join(argv)} --machine "$SLURMD_NODENAME"'


def read_steps(text: str) -> dict[NodeId, str]:
    """Return the steps that ``squeue --steps -o STEP_FORMAT`` shows, by name: their numbers."""
    found = (line.strip().partition("|") for line in text.splitlines() if "|" in line)
    return {NodeId(name.strip()): step.strip() for step, _, name in found}


def environment(env: Mapping[str, str]) -> dict[str, str]:
    """Return the environment of ``sbatch``: without what the job around it is."""
    return {name: value for name, value in env.items() if not name.startswith("SLURM_") or name in KEPT}


def read_jobs(text: str, offer: Offer) -> list[SlurmJob]:
    """Return the nodes that ``squeue -O FORMAT`` shows. Raise PlatformError: a line is not what was expected."""
    out = []
    for line in text.splitlines():
        if not line.strip():
            continue
        fields = [field.strip() for field in line.split("|")]
        if len(fields) < len(SHOWN) or not fields[2].isdigit():
            raise PlatformError(f"squeue: its line {escaped(line, 80)!r} is not what was expected")
        job, state, restarts, left, machine, reason, comment = (_NOTHING.get(f, f) for f in fields[: len(SHOWN)])
        out.append(SlurmJob(job, _seen(state, int(restarts), left, machine, reason, comment, offer)))
    return out


_NOTHING: Final = {"None": ""}
"""How squeue shows a field that is empty."""


def _seen(state: str, restarts: int, left: str, machine: str, reason: str, comment: str, offer: Offer) -> SeenNode:
    node = NodeId(comment if not restarts else f"{comment}-r{restarts}")
    ended = state in _ENDED
    stands = NodeState.ENDED if ended else _STATES.get(state, NodeState.ASKED)
    why = f"its job is {state}" + (f" ({reason})" if reason else "")
    left_s = seconds_of(left) if stands in (NodeState.RUNNING, NodeState.LEAVING) else None
    return SeenNode(node, stands, offer, left_s, state in _OWN_FAILURES, state == "COMPLETED", why)


def seconds_of(text: str) -> float | None:
    """Return the seconds of a span such as ``1-02:03:04``; None: it has no end. Raise PlatformError."""
    if text in _NO_TIME:
        return None
    found = _TIME.fullmatch(text)
    if found is None:
        raise PlatformError(f"squeue: {escaped(text, 40)!r} is no span of time")
    days, hours, minutes, seconds = (int(part or 0) for part in found.groups())
    return float(((days * 24 + hours) * 60 + minutes) * 60 + seconds)


def read_partition(text: str) -> dict[str, str]:
    """Return the fields of ``scontrol show partition``."""
    return dict(re.findall(r"(\w+)=(\S*)", text))


def is_preempted(partition: Mapping[str, str]) -> bool:
    """Return whether jobs of a partition may be taken back."""
    return partition.get("PreemptMode", "OFF").upper() not in ("OFF", "DISABLED", "")


def reclaim_s(partition: Mapping[str, str], spare_s: float = 3.0, default_s: float = 25.0) -> float:
    """Return how long a node that is taken back may take to be emptied: its ``GraceTime``, less a little."""
    grace = partition.get("GraceTime", "0")
    return max(1.0, float(grace) - spare_s) if grace.isdigit() and int(grace) else default_s


def refusal(code: int, errors: Sequence[str]) -> str:
    """Return why ``sbatch`` refused, in one line."""
    lines = [line.removeprefix("sbatch: error: ").removeprefix("sbatch: ").strip() for line in errors if line.strip()]
    known = [
        line for line in lines if line.startswith(("invalid", "Batch job submission failed", "allocation failure"))
    ]
    return escaped("; ".join(dict.fromkeys((lines and known) or lines)) or f"exit code {code}", 400)


def refused_nodes(settings: SlurmSettings, code: int, errors: Sequence[str]) -> str:
    """Return in one line what ``sbatch`` refused of the nodes of a job, and why: the flag, where its words tell."""
    why = refusal(code, errors)
    if "invalid account" in why.lower():
        flag = f"--account {settings.account}" if settings.account else "no --account is given"
        where = f" in partition {settings.partition}" if settings.partition else ""
        return (
            f"{flag}: Slurm takes no such jobs{where}: {why}; sacctmgr show associations user=$USER lists your accounts"
        )
    return f"--on slurm: sbatch refuses the nodes: {why}"


def is_account_taken(account: str, partition: Mapping[str, str]) -> bool:
    """Return whether a partition takes jobs of an account, as far as its fields tell. Slurm itself may let such a job
    wait for ever (``EnforcePartLimits=NO``)."""
    of = account.lower()  # (Slurm's accounts are in small letters)
    allowed = partition.get("AllowAccounts", "ALL").lower().split(",")
    denied = partition.get("DenyAccounts", "").lower().split(",")
    return ("all" in allowed or of in allowed) and of not in denied
