"""Runs ``everstep``, the command line. Every verb imports what it needs when it is called, so that all start fast.

A mistake ends in one line on stderr and an exit code (see ``everstep.errors``); EVERSTEP_DEBUG=1 shows tracebacks.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import click

import everstep
from everstep.cli.counts import CountOrAuto
from everstep.errors import EverstepError, UserError, escaped, escaped_lines

CHECKPOINT_VERBS = "take|ls|show|verify|compact|export"
RUN_DIR = click.argument("run_dir", type=click.Path(path_type=Path))


@click.group(context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110})
@click.version_option(everstep.__version__, prog_name="everstep", message="%(prog)s %(version)s")
def cli() -> None:
    """Run training that never loses a step."""


@cli.command(context_settings={"allow_interspersed_args": False})
@click.option(
    "--workers", "--nproc-per-node", "workers", type=CountOrAuto(), help="Worker processes (default 1), or auto."
)
@click.option("--ps", type=CountOrAuto(), help="Parameter servers (default 1), or auto.")
@click.option("--optimize", help="Policy auto: time (default), waste or cost is what sizes are chosen for.")
@click.option(
    "--mode",
    help="ps (default): parameters on the ps; allreduce: the model on every worker, synchronous; pipeline: cut into "
    "--stages.",
)
@click.option(
    "--strategy", help="allreduce, fewer workers: elastic (default): a smaller global batch; fixed: the same."
)
@click.option("--min-workers", type=int, help="With fewer workers training waits (default 1).")
@click.option("--max-workers", type=int, help="No more workers than these, whatever nodes bring along.")
@click.option("--min-ps", type=int, help="With fewer ps the job counts as waiting (default 1).")
@click.option("--max-ps", type=int, help="No more ps than these.")
@click.option("--max-memory", help="Of all workers and ps together, e.g. 16GB (policy auto, --ps-memory).")
@click.option("--ps-memory", help="Private memory that each ps may have, e.g. 2GB (default: what its node gives).")
@click.option("--worker-memory", help="The same of each worker, e.g. 4GB.")
@click.option("--ps-threads", type=int, help="Processors that each ps may use (default: all of its node).")
@click.option("--worker-threads", "threads_per_worker", type=int, help="Of each worker (default: its share of cores).")
@click.option("--max-wait", help="So long the job waits for enough workers and ps, e.g. 10m (default off: for ever).")
@click.option("--on-wait-timeout", help="What then: suspend (default), fail, or run with those who are there.")
@click.option("--recovery", help="After a loss: run_with_available (default) or wait_for_all.")
@click.option("--global-batch", help="allreduce, fewer workers: fixed, or scale (see --strategy).")
@click.option("--fail-tolerance", type=int, help="Lost workers and ps that the job takes, beside lost nodes.")
@click.option("--reliable", help="Roles on machines that stay, while there is one: master, ps, or master,ps.")
@click.option("--fallback", help="Ask for on-demand machines after so long a wait for spot, e.g. 10m (default off).")
@click.option(
    "--spot-policy", help="Sets the interval between checkpoints: none (default), hazard, or your own module:callable."
)
@click.option("--prices", help="File of what machines cost (CSV, JSON, Parquet): the cost is shown while it runs.")
@click.option("--budget", type=float, help="USD: suspend the job before it has spent more (needs --prices).")
@click.option("--stabilization", help="Capacity that is back counts after so long (default 10s).")
@click.option(
    "--logical-workers", type=int, help="allreduce: parts of every batch, on any number of workers: same bits."
)
@click.option(
    "--processes-per-worker",
    type=int,
    help="allreduce: processes of a worker, which share one replica of the model (FSDP2; default 1).",
)
@click.option("--stages", type=int, help="pipeline: processes of a worker, each with one stage (default 1).")
@click.option(
    "--copy-every",
    help="pipeline: copy the stages in one of so many iterations; auto (default): as often as costs 1 %; off.",
)
@click.option(
    "--graph-every",
    help="everstep graph: sample one step in so many; auto (default): as often as costs 0.2 %; off.",
)
@click.option("--shard", type=int, hidden=True)  # its old name
@click.option(
    "--heal-from",
    help="allreduce, workers whose models drifted apart without a majority: none (default): stop; lowest, highest: "
    "the worker whose model the others take.",
)
@click.option("--lr-rule", help="allreduce, elastic: none (default), linear or sqrt in the global batch.")
@click.option(
    "--consistency",
    help="ps: async (default); bounded:S: at most S batches ahead; sync; sync:B: a step waits for all but B.",
)
@click.option("--seed", type=int, help="Seed of data order, rows and model (default 0).")
@click.option("--run-dir", help="Where the run keeps everything (default runs/NAME-DATE-TIME).")
@click.option("-c", "config", type=click.Path(path_type=Path), help="job.yaml; flags win over it.")
@click.option("--bind", help="HOST:PORT for agents on other nodes (default: this machine only).")
@click.option("--tls", help="Between nodes: all (default), or control: data can be read on the way.")
@click.option("--notices", help="Who says that a node goes: aws, gcp, azure, alibaba, file:PATH, command:WORDS, ...")
@click.option(
    "--capacity", help="Where further machines come from: trace:FILE, command:WORDS (default: who joins by hand)."
)
@click.option("--on", help="Train on --nodes nodes of a cluster: ray, ray:HOST:PORT or slurm; the master stays here.")
@click.option("--node-cpus", type=int, help="--on: CPUs of each node (default: one for each worker and ps of it).")
@click.option("--node-gpus", type=int, help="--on: GPUs of each node (default 0).")
@click.option(
    "--partition",
    "--slurm-partition",
    "slurm_partition",
    help="--on slurm: where the nodes are (default: Slurm's default).",
)
@click.option(
    "--account", "--slurm-account", "slurm_account", help="--on slurm: who pays for them (default: the user's)."
)
@click.option(
    "--time",
    "--slurm-time",
    "slurm_time",
    help="--on slurm: limit of each node, as sbatch --time; it is replaced in time.",
)
@click.option(
    "--sbatch", "--slurm-options", "slurm_options", help="--on slurm: more words for sbatch, e.g. '--mem=8G'."
)
@click.option(
    "--srun/--no-srun",
    "slurm_steps",
    default=None,
    help="--on slurm, in a batch job: the agents are steps of srun on its nodes.",
)
@click.option("--speed", "capacity_speed", type=float, help="Of a trace: so many times as fast (default 1).")
@click.option("--quiet", "capacity_quiet", help="Of a trace: no pause between two events longer than this.")
@click.option("--lead", "capacity_lead", help="Of a trace: notice before a machine goes, e.g. 30s (default: none).")
@click.option("--capacity-nodes", type=int, help="Machines to hold at a time, at most (default: all of a trace).")
@click.option("--capacity-workers", type=int, help="Workers of each machine of a trace (default 1).")
@click.option("--capacity-ps", type=int, help="Ps of each machine of a trace (default 0: they stay here).")
@click.option("--nodes", type=int, help="Start when so many nodes are there, this one included (default 1).")
@click.option("--nodes-wait", "nodes_wait_s", help="... but after so long with what there is (default 300s).")
@click.option("--zone", help="Where this machine is, as prices name it.")
@click.option("--market", help="Of this machine: on_demand (default) or spot.")
@click.option("--metrics", help="HOST:PORT for Prometheus, e.g. 127.0.0.1:9400 (default: none).")
@click.option("--hardware", help="Class of this machine (default: from its GPUs or processor).")
@click.option("--name", help="Name of the job.")
@click.option(
    "--parity", help="K+M: K data partitions and M parity partitions a stripe, on K+M ps; 1+1: replicas; 0: off."
)
@click.option(
    "--protect",
    help="acked (default): a push waits until parity has it; eager: it does not; lag: parity follows.",
)
@click.option("--protect-lag", help="With --protect lag: parity may be so far behind (default 4s).")
@click.option("--ps-limit-bytes", help="Memory for rows of one ps, in bytes (default: no limit).")
@click.option("--cold-dir", help="Directory for rows that were not used for long and do not fit into --ps-limit-bytes.")
@click.option(
    "--rebuild-share",
    help="Of a ps' time that rebuilds and new mirrors take while workers ask for rows, 0.01 to 1 (default 0.1).",
)
@click.option(
    "--policy",
    help="none (default), shared, exclusive, backup, auto, memory, or module:callable; several with +.",
)
@click.option("--nonfinite", help="A batch with NaN/Inf gradients: raise (default) or skip.")
@click.option(
    "--progress-timeout", help="A worker whose script does nothing for so long is replaced (default 10m; off: never)."
)
@click.option(
    "--script-retries", type=int, help="Tries in a row where a script raised what may pass, e.g. OSError (default 3)."
)
@click.option("--checkpoint-every", help="30s, 10m or 10000batches between checkpoints (default: only when asked).")
@click.option("--checkpoint-to", help="Directory or URL for checkpoints (default RUN_DIR/checkpoints).")
@click.option("--checkpoint-keep", type=int, help="How many of the newest checkpoints are kept (default 3).")
@click.option("--model-to", help="Where the job leaves its model: a directory, a URL, none (default RUN_DIR/model).")
@click.option("--no-display", is_flag=True, help="Plain lines even on a terminal.")
@click.argument("command", nargs=-1, type=click.UNPROCESSED, metavar="[--] SCRIPT [ARGS]...")
def run(config: Path | None, no_display: bool, command: tuple[str, ...], **flags: Any) -> None:
    """Train SCRIPT here: one master, parameter servers and workers as processes of this machine."""
    from everstep.cli.run import run_job

    given = {name: value for name, value in flags.items() if value is not None}
    on = given.pop("on", None)
    if on is not None:
        if "capacity" in given:
            raise click.UsageError("--on and --capacity: give one of them")
        given["capacity"] = on
    if command:
        given["script"], given["args"] = command[0], tuple(command[1:])
    raise SystemExit(run_job(config, given, live=not no_display))


@cli.command(context_settings={"allow_interspersed_args": False})
@click.option("--mode", help="ps, allreduce (with --ps: hybrid) or pipeline (default: as the script says, or ps).")
@click.option("--workers", type=click.IntRange(0, 10_000), help="Exactly so many workers (default: chosen).")
@click.option("--ps", type=click.IntRange(0, 10_000), help="Exactly so many ps (default: chosen; allreduce: 0).")
@click.option("--stages", type=click.IntRange(1, 64), help="pipeline: processes of a worker (default 1).")
@click.option("--parity", default="0", help="K+M, as for everstep run.")
@click.option("--max-workers", type=click.IntRange(0, 10_000), default=0, help="Choose no more workers.")
@click.option("--max-ps", type=click.IntRange(0, 10_000), default=0, help="Choose no more ps.")
@click.option("--machines", type=click.IntRange(1, 1_000), default=1, help="Up to so many machines like this one.")
@click.option("--cores", type=click.IntRange(1, 4_096), help="Of a machine (default: of this one).")
@click.option("--memory", help="Of a machine for this job, e.g. 16GB (default: 90 % of this one's).")
@click.option("--price", type=click.FloatRange(0, 1e6), default=0.0, help="USD that a machine costs an hour.")
@click.option("--budget", type=click.FloatRange(0, 1e9), default=0.0, help="USD for the job (needs --price).")
@click.option("--deadline", help="The job shall be done within, e.g. 2h.")
@click.option("--epochs", type=click.IntRange(0, 1_000_000), default=0, help="Instead of the script's own.")
@click.option("--limit", default="120s", show_default=True, help="For the script to get to its loop and be measured.")
@click.option("--scan", default="30s", show_default=True, help="For counting keys in the data; 0: only the probe's.")
@click.option("--no-run", is_flag=True, help="Do not run the script: use the history of its jobs.")
@click.option("--json", "as_json", is_flag=True, help="For programs.")
@click.argument("command", nargs=-1, type=click.UNPROCESSED, metavar="[--] SCRIPT [ARGS]...")
def estimate(command: tuple[str, ...], no_run: bool, as_json: bool, **flags: Any) -> None:
    """Say what size a job of SCRIPT should have, how fast it will be and what it costs, from a probe of seconds."""
    from everstep.cli.estimate import EstimateFlags
    from everstep.cli.estimate import estimate as show_estimate

    show_estimate(command, EstimateFlags(**flags), as_json, no_run)


@cli.group(invoke_without_command=True)
@click.pass_context
def history(ctx: click.Context) -> None:
    """List the jobs of this user: how large, how fast, how they ended (EVERSTEP_HISTORY names the file; off: none)."""
    if ctx.invoked_subcommand is None:
        from everstep.cli.history import show

        show((), False)


@history.command("show")
@click.argument("numbers", nargs=-1, type=int)
@click.option(
    "--limit", type=click.IntRange(1, 1_000_000), default=30, show_default=True, help="So many of the newest."
)
@click.option("--json", "as_json", is_flag=True, help="For programs.")
def history_show(numbers: tuple[int, ...], limit: int, as_json: bool) -> None:
    """Show all that is remembered of jobs, by their numbers; without one: list the newest."""
    from everstep.cli.history import show

    show(numbers, as_json, limit)


@history.command("compare")
@click.argument("first", type=int)
@click.argument("second", type=int)
def history_compare(first: int, second: int) -> None:
    """Show two jobs side by side."""
    from everstep.cli.history import compare

    compare(first, second)


@history.command("forget")
@click.argument("numbers", nargs=-1, type=int)
@click.option("--all", "everything", is_flag=True, help="All jobs.")
def history_forget(numbers: tuple[int, ...], everything: bool) -> None:
    """Remove jobs from the history."""
    from everstep.cli.history import forget

    forget(numbers, everything)


@cli.command()
@RUN_DIR
@click.option("--json", "as_json", is_flag=True, help="For programs.")
def status(run_dir: Path, as_json: bool) -> None:
    """Show members, shards and throughput of a run."""
    from everstep.cli.status import show_status

    if str(run_dir).startswith("k8s:"):
        from everstep.cli import cluster_job

        cluster_job.status(run_dir, as_json)
        return
    from everstep.cli.kept import is_kept, show_kept

    if is_kept(run_dir):
        show_kept(run_dir, as_json)
        return
    show_status(run_dir, as_json)


@cli.command()
@RUN_DIR
def suspend(run_dir: Path) -> None:
    """Make a job's state safe and end all of its processes; everstep unsuspend goes on in the same run."""
    from everstep.cli.suspend import suspend as suspend_job

    if str(run_dir).startswith("k8s:"):
        from everstep.cli import cluster_job

        cluster_job.suspend(run_dir, True)
        return
    suspend_job(run_dir)


@cli.command()
@click.argument("run_dir", metavar="RUN_DIR|URL")
@click.option("--run-dir", "new_dir", type=click.Path(), help="Of URL: the run directory here [runs/NAME-DATE-TIME].")
@click.option("--script", type=click.Path(), help="Of URL: where the training script is here [where it was].")
@click.option("--bind", metavar="HOST:PORT", help="Of URL: the address for other nodes here [as before].")
@click.option("--budget", type=float, help="USD that the job may spend from now on in all; 0: any sum.")
@click.option("--no-display", is_flag=True, help="Plain lines even on a terminal.")
def unsuspend(
    run_dir: str, new_dir: str | None, script: str | None, bind: str | None, budget: float | None, no_display: bool
) -> None:
    """Have a suspended job go on, here: in its run directory, or, from the URL of its checkpoints, on another machine
    (everstep resume begins a new run)."""
    from everstep.cli.suspend import MovedTo
    from everstep.cli.suspend import unsuspend as unsuspend_job

    if run_dir.startswith("k8s:"):
        from everstep.cli import cluster_job

        cluster_job.suspend(Path(run_dir), False, budget)
        return
    moved = MovedTo(run_dir=new_dir or "", script=script or "", bind=bind or "")
    raise SystemExit(unsuspend_job(run_dir, not no_display, budget, moved))


@cli.command()
@RUN_DIR
@click.option("--json", "as_json", is_flag=True, help="For programs: everything that was measured.")
@click.option("--out", type=click.Path(path_type=Path), help="A picture (SVG) instead of text.")
def graph(run_dir: Path, as_json: bool, out: Path | None) -> None:
    """Show the model as a tree with time and memory, the tables with their rows and keys, and what binds the job."""
    from everstep.cli.graph import show_graph

    show_graph(run_dir, as_json, out)


@cli.command()
@RUN_DIR
@click.option("--once", is_flag=True, help="One picture, then end.")
@click.option("--json", "as_json", is_flag=True, help="For programs: everything that was seen, once.")
def top(run_dir: Path, once: bool, as_json: bool) -> None:
    """Show who is slow, how much and why: a live table of workers and ps, slowest first."""
    from everstep.cli.top import top as show_top

    if str(run_dir).startswith("k8s:"):
        from everstep.cli import cluster_job

        cluster_job.top(run_dir, once, as_json)
        return
    show_top(run_dir, once, as_json)


@cli.command()
@RUN_DIR
@click.option("--slow", metavar="MEMBER", help="Make it slower, e.g. worker:1 or ps:0 (see --factor).")
@click.option("--kill", metavar="MEMBER", help="kill -9 it.")
@click.option("--stop", metavar="MEMBER", help="SIGSTOP it, and let it go on afterwards.")
@click.option("--heal", is_flag=True, help="End all slowdowns and stops now.")
@click.option("--schedule", type=click.Path(path_type=Path), help="Play a file of lines SECONDS, WHAT.")
@click.option("--recording", type=click.Path(path_type=Path), help="Play recorded times of batches (CSV, may be .gz).")
@click.option("--factor", type=float, default=4.0, show_default=True, help="How many times slower.")
@click.option("--for", "span", default="", help="How long it lasts (default: slow 60s, stop 5s).")
@click.option("--every", default="1s", show_default=True, help="--recording: how long one recorded iteration lasts.")
@click.option("--seed", type=int, default=0, show_default=True, help="--schedule: which member worker:? is.")
@click.option("--burn", is_flag=True, help="Be slow by computing instead of sleeping.")
@click.pass_context
def chaos(
    ctx: click.Context, /, run_dir: Path, factor: float, span: str, every: str, seed: int, burn: bool, **what: Any
) -> None:
    """Make faults in a running job: slow, stop or kill its members, and see with everstep top what it does about it."""
    from everstep.cli.chaos import chosen, inject, one, play, read_recording, read_schedule, workers_of

    more = {"factor": "factor", "for": "span", "every": "every", "seed": "seed", "burn": "burn"}
    by_hand = click.core.ParameterSource.COMMANDLINE
    name, value = chosen(what, [flag for flag, key in more.items() if ctx.get_parameter_source(key) is by_hand])
    if name == "schedule":
        play(run_dir, read_schedule(value), seed, burn)
    elif name == "recording":
        play(run_dir, read_recording(value, every, workers_of(run_dir)), seed, burn)
    else:
        inject(run_dir, one(name, "" if name == "heal" else value, factor, span), burn)


@cli.command()
@RUN_DIR
@click.argument("member", required=False)
@click.option("-f", "follow", is_flag=True, help="Go on as lines are written.")
def logs(run_dir: Path, member: str | None, follow: bool) -> None:
    """Show the logs of a run, or of one MEMBER (worker:0, ps:1, master, agent)."""
    from everstep.cli.logs import show_logs

    if str(run_dir).startswith("k8s:"):
        from everstep.cli import cluster_job

        cluster_job.logs(run_dir, member or "")
        return
    show_logs(run_dir, member, follow)


@cli.command()
@RUN_DIR
@click.option("--workers", type=int, help="How many workers there shall be.")
@click.option("--ps", type=int, help="How many parameter servers there shall be.")
def scale(run_dir: Path, workers: int | None, ps: int | None) -> None:
    """Change the number of workers and parameter servers of a running job; nobody else is restarted."""
    from everstep.cli.scale import scale as scale_job

    if str(run_dir).startswith("k8s:"):
        from everstep.cli import cluster_job

        cluster_job.scale(run_dir, workers, ps)
        return
    scale_job(run_dir, workers, ps)


@cli.command()
@RUN_DIR
@click.option("--ps-memory", help="Private memory of each ps that starts from now on, e.g. 2GB.")
@click.option("--ps-threads", type=int, help="Processors that each ps may use that starts from now on.")
@click.option("--worker-memory", help="Private memory of each worker that starts from now on, e.g. 4GB.")
@click.option("--worker-threads", type=int, help="Threads of each worker that starts from now on.")
def resize(
    run_dir: Path, ps_memory: str | None, ps_threads: int | None, worker_memory: str | None, worker_threads: int | None
) -> None:
    """Change the threads and memory of processes that start from now on; nobody is restarted for it."""
    from everstep.cli.resize import ResizeFlags
    from everstep.cli.resize import resize as resize_job

    resize_job(run_dir, ResizeFlags(ps_memory, ps_threads, worker_memory, worker_threads))


@cli.command()
@RUN_DIR
@click.argument("target")
@click.option("--deadline", default="60s", show_default=True, help="How long it may take.")
def drain(run_dir: Path, target: str, deadline: str) -> None:
    """Empty a member (ps:1, worker:0) or a node of a running job, so that it can be taken away."""
    from everstep.cli.drain import drain as drain_target

    drain_target(run_dir, target, deadline)


@cli.command(add_help_option=False, context_settings={"ignore_unknown_options": True})
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED, metavar=f"{CHECKPOINT_VERBS} WHERE ...")
def checkpoint(arguments: tuple[str, ...]) -> None:
    """Take a checkpoint now; list, show, verify, compact or export checkpoints."""
    from everstep.cli.checkpoint import checkpoint as verbs
    from everstep.cli.checkpoint import with_verb

    verbs.main(with_verb(arguments), prog_name="everstep checkpoint", standalone_mode=False)


@cli.command(context_settings={"allow_interspersed_args": True})
@click.argument("source", metavar="RUN_DIR|URL")
@click.option("--workers", type=int, help="Worker processes (default: as before).")
@click.option("--ps", type=int, help="Parameter servers, any number (default: as before).")
@click.option("--processes-per-worker", type=int, help="Any number (default: as before).")
@click.option("--stages", type=int, help="pipeline: any number (default: as before).")
@click.option("--shard", type=int, hidden=True)  # its old name
@click.option("--run-dir", help="For the resumed run (default: RUN_DIR-resumed beside the old one).")
@click.option("--script", help="The training script (default: as before).")
@click.option("--checkpoint", type=int, help="This checkpoint (default: the newest that is complete and intact).")
@click.option("--checkpoint-every", help="As of everstep run (default: as before).")
@click.option("--checkpoint-to", help="As of everstep run (default: as before, else in the new run directory).")
@click.option("--checkpoint-keep", type=int, help="As of everstep run (default: as before).")
@click.option("--model-to", help="As of everstep run (default: in the new run directory).")
@click.option("--parity", help="As of everstep run (default: as before).")
@click.option("--protect", help="As of everstep run (default: as before).")
@click.option("--protect-lag", help="As of everstep run (default: as before).")
@click.option("--rebuild-share", help="As of everstep run (default: as before).")
@click.option(
    "--secret", default="", help="The secret file of the run that wrote the checkpoints, where SOURCE is a URL."
)
@click.option(
    "--trust-checkpoint",
    is_flag=True,
    envvar="EVERSTEP_TRUST_CHECKPOINT",
    help="Also a checkpoint that was not written with the job's key: whoever wrote it says what is run and trained.",
)
@click.option("--no-display", is_flag=True, help="Plain lines even on a terminal.")
@click.argument("args", nargs=-1, type=click.UNPROCESSED, metavar="[-- ARGS...]")
def resume(
    source: str,
    checkpoint: int | None,
    secret: str,
    trust_checkpoint: bool,
    no_display: bool,
    args: tuple[str, ...],
    **flags: Any,
) -> None:
    """Go on from the newest intact checkpoint of a run, or of a directory or URL of checkpoints; ARGS replace those
    of the script. What the checkpoint has is not trained again, what it lacks is: exactly once over both runs."""
    from everstep.cli.resume import resume_job

    given = {name: value for name, value in flags.items() if value is not None}
    if args:
        given["args"] = args
    raise SystemExit(
        resume_job(source, checkpoint, given, live=not no_display, secret=secret, trusted=trust_checkpoint)
    )


@cli.command()
@RUN_DIR
@click.option("--no-checkpoint", is_flag=True, help="end it at once, without a last checkpoint")
def stop(run_dir: Path, no_checkpoint: bool) -> None:
    """End a running job; where it has checkpoints, with a last one."""
    from everstep.cli.status import stop_job

    stop_job(run_dir, not no_checkpoint)


@cli.command()
@RUN_DIR
@click.argument("text")
def note(run_dir: Path, text: str) -> None:
    """Write TEXT into a running job's events: what happened around it, for whoever asks why."""
    from everstep.brain.events import Refused, RemarkMade
    from everstep.cli.link import ask_master
    from everstep.cli.status import need_running

    need_running(run_dir)
    answer = ask_master(run_dir, RemarkMade(text))
    if isinstance(answer, Refused):
        raise UserError(answer.error)
    click.echo("noted")


@cli.command()
@RUN_DIR
@click.argument("member", required=False)
@click.option("--event", type=int, help="Only what led to the event of this number, and what it led to.")
def explain(run_dir: Path, member: str | None, event: int | None) -> None:
    """Show the decisions of a run (about one MEMBER, such as worker:1) with their reasons."""
    from everstep.cli.explain import chain
    from everstep.cli.explain import explain as explain_run

    if str(run_dir).startswith("k8s:"):
        from everstep.cli import cluster_job

        cluster_job.explain(run_dir)
        return
    need_run_dir(run_dir)
    if member and event is not None:
        raise UserError(f"{member} and --event {event}: give one of them")
    for line in explain_run(run_dir, member or "") if event is None else chain(run_dir, event):
        click.echo(escaped_lines(line))


@cli.command()
@RUN_DIR
@click.option(
    "--out", type=click.Path(path_type=Path), help="Draw an iteration (.svg), or write a Chrome trace (.json)."
)
def bubbles(run_dir: Path, out: Path | None) -> None:
    """Show where the stages of a pipeline are idle, beside what the formula says."""
    from everstep.cli.bubbles import show_bubbles

    need_run_dir(run_dir)
    click.echo(show_bubbles(run_dir, out))


@cli.command()
@RUN_DIR
@click.option("--json", "as_json", is_flag=True, help="For programs: every machine, role and hour.")
@click.option("--prices", type=click.Path(path_type=Path), help="Prices by class, zone and time: CSV, JSON or Parquet.")
@click.option("--at", default="", help="The time in the prices at which the job began (default: when it began here).")
@click.option("--as", "kind", default="", help="CLASS or CLASS@ZONE: reckon every machine as one of this kind.")
@click.option("--out", type=click.Path(path_type=Path), help="Draw machines and money over time into this .svg file.")
def cost(run_dir: Path, as_json: bool, prices: Path | None, at: str, kind: str, out: Path | None) -> None:
    """Show what a run has cost, what on-demand machines would have cost, and what one sample cost."""
    from everstep.cli.cost import show_cost
    from everstep.cli.kept import is_kept, show_kept_cost

    if is_kept(run_dir):
        show_kept_cost(run_dir, as_json)
        return
    if str(run_dir).startswith("k8s:"):
        from everstep.cli import cluster_job

        cluster_job.cost(run_dir, as_json)
        return
    need_run_dir(run_dir)
    click.echo(show_cost(run_dir, as_json, prices, at, out, kind))


@cli.command()
@click.argument("files", nargs=-1, type=click.Path(path_type=Path), metavar="[JOB_YAML]...")
@click.option("--capacity", help="The recorded cloud: trace:FILE.")
@click.option("--nodes", type=int, default=0, help="Machines at a time, at most; more than the recording has: copies.")
@click.option("--lead", "capacity_lead", help="Notice before a machine goes, e.g. 30s (default: none).")
@click.option("--like", type=click.Path(path_type=Path), help="A run of this job: its times are used.")
@click.option("--assume", multiple=True, metavar="NAME=VALUE", help="A number of the job, e.g. samples_per_s=900.")
@click.option("--samples", type=click.IntRange(0), default=0, help="Of one pass over the data (default: as --like).")
@click.option("--epochs", type=click.IntRange(1), default=1, help="Passes over the data.")
@click.option("--workers", type=int, help="Workers on the first machine, which stays.")
@click.option("--ps", type=int, help="Parameter servers.")
@click.option("--mode", help="ps or allreduce.")
@click.option("--parity", help="K+M, as for everstep run.")
@click.option("--checkpoint-every", help="As for everstep run.")
@click.option("--compare", multiple=True, metavar="NAME=A,B", help="Try each of these values; again: all combinations.")
@click.option("--seeds", type=int, default=1, help="Stories: the same cloud from so many moments (default 1).")
@click.option(
    "--spot-policy", default="", help="Interval and parity: none, hazard, or your own module:callable (as in job.yaml)."
)
@click.option("--limit", default="60d", help="Give up after so long (default 60d).")
@click.option("--baselines", is_flag=True, help="Also what others would do with the same machines.")
@click.option("--restart", default="60s", help="Of others: from a loss until all train again (default 60s).")
@click.option("--as-played", is_flag=True, help="With capacity_speed and capacity_quiet of job.yaml.")
@click.option("--prices", type=click.Path(path_type=Path), help="Prices by class, zone and time, as for everstep cost.")
@click.option("--at", default="", help="The time in the prices at which the job begins.")
@click.option("--as", "kind", default="", help="CLASS or CLASS@ZONE: what every machine is.")
@click.option("--json", "as_json", is_flag=True, help="For programs: every story.")
@click.option("--out", type=click.Path(path_type=Path), help="Draw places, speed and money into this .svg file.")
def simulate(files: tuple[Path, ...], as_json: bool, out: Path | None, **asked: Any) -> None:
    """Show what a job would cost on machines that come and go, and when it would end."""
    from everstep.cli.simulate import Request, show_simulation

    names = ("capacity", "capacity_lead", "workers", "ps", "mode", "parity", "checkpoint_every")
    flags = {name: value for name in names if (value := asked.pop(name)) is not None}
    click.echo(show_simulation(Request(files, flags, **asked), as_json, out, lambda line: None))


@cli.command()
@RUN_DIR
def replay(run_dir: Path) -> None:
    """Run the journal through the brain again; stops at the first difference."""
    from everstep.cli.replay import replay as replay_run

    need_run_dir(run_dir)
    result = replay_run(run_dir)
    for line in result.lines():
        click.echo(escaped_lines(line))
    raise SystemExit(0 if result.ok else 3)


@cli.command()
@RUN_DIR
@click.option("--json", "as_json", is_flag=True, help="For programs.")
@click.option("--witness", is_flag=True, help="Compare with what es.testing.Witness counted in the model of the job.")
@click.option("--model", type=click.Path(path_type=Path), help="Where that model is, if not in RUN_DIR/model.")
def audit(run_dir: Path, as_json: bool, witness: bool, model: Path | None) -> None:
    """Prove that every batch was applied exactly once, and that the job ended well; exit code 0 only if so.

    Others: 1 offences, 5 the result is lost, 6 replicas differed, 7 the job failed, 8 the witness counted otherwise,
    9 nothing was committed, 10 the job is not over, or was stopped, 11 the script's loops trained what they had not
    asked for."""
    from everstep.cli.kept import read_here
    from everstep.monitor.audit import audit as audit_run

    with read_here(run_dir) as here:
        need_run_dir(here)
        report = audit_run(here)
        if witness or model is not None:
            from everstep.monitor.witness import witnessed

            report = witnessed(here, report, model)
    report.run_dir = str(run_dir)
    click.echo(report.json().decode() if as_json else report.text())
    raise SystemExit(report.exit_code)


@cli.command(add_help_option=False, hidden=True, context_settings={"ignore_unknown_options": True})
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED, metavar=f"{CHECKPOINT_VERBS} WHERE ...")
def ckpt(arguments: tuple[str, ...]) -> None:
    """Do what everstep checkpoint does, under its old name."""
    from everstep.cli.checkpoint import checkpoint as verbs

    _renamed("everstep ckpt", "everstep checkpoint")
    verbs.main(list(arguments), prog_name="everstep checkpoint", standalone_mode=False)


def _renamed(old: str, new: str) -> None:
    from everstep.config.renamed import renamed_line

    click.echo(f"everstep: {renamed_line(old, new)}", err=True)


@cli.command()
@click.option("--tables", required=True, help="Bytes of all tables with optimizer state: 220GB, 64GiB.")
@click.option("--bandwidth", help="Of the storage, bytes a second for the whole job: 1.4GB; --measure finds it.")
@click.option("--mtbf", required=True, help="Mean time between losses of any ps: 8h, 20m.")
@click.option("--ps", type=int, default=8, show_default=True, help="Parameter servers.")
@click.option("--step", default="0", help="Time of a step, to give the interval in batches too: 100ms.")
@click.option("--stall", type=float, help="Share of the writing time that is lost.  [default: 0.02]")
@click.option(
    "--changed", type=float, default=0.4, show_default=True, help="Share of bytes that an incremental snapshot has."
)
@click.option("--full-every", type=int, help="Incremental snapshots between two full ones.  [default: 8]")
@click.option("--base-every", type=int, hidden=True)  # its old name
@click.option("--restart", default="10s", show_default=True, help="From a loss to training on, reading not counted.")
@click.option("--network", default="1GB", show_default=True, help="Of one ps, bytes a second.")
@click.option("--parity", type=float, help="Share of throughput that K+1 costs.  [default: 0.09]")
@click.option("--replica", type=float, help="Share of throughput that 1+1 costs.  [default: 0.09]")
@click.option("--lag", default="4s", show_default=True, help="How far mirrors may be behind (--protect lag).")
@click.option(
    "--lag-costs", type=float, help="Share of throughput that K+1 costs with that lag.  [default: measured; 4s: 0.02]"
)
@click.option("--spare-core", is_flag=True, help="The ps have a core that workers leave free: parity costs less.")
@click.option("--hybrid", is_flag=True, help="Mode allreduce with tables on ps: no lag is trained again after a loss.")
@click.option("--measure", is_flag=True, help="Run the kernels here for half a minute; needs --step.")
@click.option("--rows-per-step", type=int, default=16_384, show_default=True, help="Rows that a step changes.")
@click.option("--dim", type=int, default=16, show_default=True, help="Values of a row.")
@click.option("--cores", type=int, help="Of all machines of the job together.  [default: this one's]")
@click.option(
    "--write-to", type=click.Path(path_type=Path), default=Path(), help="Where checkpoints would go.  [default: .]"
)
@click.option("--together", type=float, default=0.2, show_default=True, help="Share of losses that take several ps.")
@click.option("--rebuilding", type=float, default=0.92, show_default=True, help="Throughput while a ps is rebuilt.")
@click.option(
    "--rebuild-share",
    type=float,
    default=0.1,
    show_default=True,
    help="Of a ps' time for rebuilds, as of everstep run.",
)
@click.option("--may-lose", type=float, default=0.02, show_default=True, help="Updates a lossy rollback may lose.")
@click.option(
    "--picture",
    type=click.Path(path_type=Path, dir_okay=False),
    help="Write an SVG: where parity costs less, over table bytes / bandwidth and time between losses.",
)
@click.option("--json", "as_json", is_flag=True, help="For programs.")
def advise(
    tables: str,
    bandwidth: str | None,
    mtbf: str,
    step: str,
    restart: str,
    network: str,
    full_every: int | None,
    base_every: int | None,
    lag: str,
    lag_costs: float | None,
    spare_core: bool,
    measure: bool,
    rows_per_step: int,
    dim: int,
    cores: int | None,
    write_to: Path,
    picture: Path | None,
    as_json: bool,
    **numbers: Any,
) -> None:
    """Say which of parity, replica or checkpoints costs least for these numbers, and where that turns."""
    from everstep.cli.advise import MeasureFlags
    from everstep.cli.advise import advise as say
    from everstep.errors import ConfigError
    from everstep.policies import advise as costs
    from everstep.units import seconds, size_bytes

    if base_every is not None:
        _renamed("--base-every", "--full-every")
        full_every = base_every if full_every is None else full_every
    if bandwidth is None and not measure:
        raise ConfigError("no --bandwidth: give bytes a second of the storage, or --measure to find it here")
    given = {"bandwidth": bandwidth, "lag": lag_costs} | {n: numbers[n] for n in ("stall", "parity", "replica")}
    lag_s = seconds(lag)
    found = {"lag": costs.lag_costs(lag_s, spare_core)}
    if spare_core:
        found |= {"parity": costs.SPARE_PARITY, "replica": costs.SPARE_PARITY}
    named = found | {n: v for n, v in {**numbers, "lag": lag_costs, "full_every": full_every}.items() if v is not None}
    case = costs.Case(
        table_bytes=size_bytes(tables),
        bandwidth=size_bytes(bandwidth) if bandwidth is not None else 1.0,
        mtbf_s=seconds(mtbf),
        step_s=seconds(step),
        restart_s=seconds(restart),
        network=size_bytes(network),
        lag_s=lag_s,
        **named,
    )
    flags = None
    if measure:
        known = frozenset(name for name, value in given.items() if value is not None)
        known |= {"parity", "replica", "lag"} if spare_core else set()  # (kernels alone do not say what is left free)
        flags = MeasureFlags(case.step_s, rows_per_step, dim, cores or os.cpu_count() or 1, write_to, known)
    say(case, as_json, flags, picture)


@cli.command()
def doctor() -> None:
    """Check this machine for what everstep needs."""
    from everstep.cli.doctor import run_doctor

    raise SystemExit(run_doctor())


@cli.command()
@click.option("--join", "master", required=True, metavar="HOST:PORT", help="The master's --bind address.")
@click.option("--secret-file", type=click.Path(path_type=Path), required=True, help="Copy of RUN_DIR/secret.")
@click.option("--workers", type=int, default=1, show_default=True, help="Workers that this node takes.")
@click.option("--ps", type=int, help="Ps that it takes (default: any number with --parity or --nodes, none on spot).")
@click.option("--run-dir", type=click.Path(path_type=Path), help="For logs and sockets here.")
@click.option("--node", default="", help="Name of this node (default: its host name and a random end).")
@click.option("--hardware", default="", help="Class of this machine (default: from its GPUs or processor).")
@click.option("--machine", default="", help="Nodes of one machine are lost together (default: found out).")
@click.option("--notices", help="Who says that this node goes (default: as the job says).")
@click.option("--zone", default="", help="Where this machine is, as prices name it.")
@click.option("--market", type=click.Choice(["on_demand", "spot"]), help="Of this machine (default: not said).")
@click.option("--life", type=click.IntRange(0, 1 << 30), default=0, hidden=True)
@click.option("--reclaim", type=click.FloatRange(0.1, 86_400), hidden=True)
def agent(
    master: str,
    secret_file: Path,
    workers: int,
    ps: int | None,
    run_dir: Path | None,
    node: str,
    hardware: str,
    machine: str,
    notices: str | None,
    zone: str,
    market: str | None,
    life: int,
    reclaim: float | None,
) -> None:
    """Give this machine to a running job; the script must exist here under the same path."""
    from everstep.cli.join import join_job

    of = hardware, notices, zone, market or "", life, ps, machine
    raise SystemExit(join_job(master, secret_file, workers, run_dir, node, *of, reclaim_s=reclaim))


@cli.command()
@click.argument("file", type=click.Path(path_type=Path), metavar="JOB_YAML")
@click.option("--context", default="", help="Of the kubeconfig (default: the current one).")
@click.option("--namespace", default="", help="Where the job shall be (default: that of the context).")
@click.option("--image", default="", help="With everstep and the script, where JOB_YAML is that of everstep run.")
@click.option("--out", default="", metavar="URL", help="Where the model, checkpoints, logs, audit and cost shall be.")
def submit(file: Path, context: str, namespace: str, image: str, out: str) -> None:
    """Run a job in a Kubernetes cluster: JOB_YAML as for everstep run, or an ElasticJob."""
    from everstep.cli.cluster_job import submit as submit_job

    submit_job(file, context, namespace, image, out)


@cli.command()
@click.option("--context", default="", help="Of the kubeconfig (default: the current one, or this pod's cluster).")
@click.option("--namespace", default="", help="Whose jobs it keeps (default: that of the context).")
@click.option("--no-lease", is_flag=True, help="Act without being elected: there is no other operator.")
@click.option("--demo", is_flag=True, help="Play a cluster on this machine: pods are local processes.")
@click.option("--dir", "folder", type=click.Path(path_type=Path), default="everstep-demo", help="Of the demo.")
@click.option("--nodes", type=click.IntRange(1, 100), default=3, show_default=True, help="Of the demo.")
@click.option("--port", type=click.IntRange(0, 65535), default=0, help="Of the demo's API server (default: any).")
@click.option("--manifests", is_flag=True, help="Print what the operator needs in a cluster, for kubectl apply -f -.")
@click.option("--chart", type=click.Path(path_type=Path), help="Write the same as a Helm chart into this folder.")
@click.option("--image", default="everstep:latest", show_default=True, help="Of the operator, in the manifests.")
def operator(
    context: str,
    namespace: str,
    no_lease: bool,
    demo: bool,
    folder: Path,
    nodes: int,
    port: int,
    manifests: bool,
    chart: Path | None,
    image: str,
) -> None:
    """Keep the jobs of a Kubernetes namespace."""
    if manifests:
        from everstep.platforms.kubernetes.manifests import printed_manifests

        click.echo(printed_manifests(namespace or "everstep", image), nl=False)
        return
    from everstep.cli.cluster_operator import run_demo, run_operator, write_chart

    if chart is not None:
        write_chart(chart, image)
        return
    raise SystemExit(run_demo(folder, port, nodes) if demo else run_operator(context, namespace, not no_lease))


@cli.group()
def crd() -> None:
    """Work with the kinds ElasticJob, ScaleOut and ScaleIn of Kubernetes."""


@crd.command("print")
def crd_print() -> None:
    """Print their definitions, for kubectl apply -f -."""
    from everstep.platforms.kubernetes.crds import printed

    click.echo(printed(), nl=False)


@cli.group(hidden=True)
def pod() -> None:
    """Runs a part of a job in a pod. The operator of Kubernetes writes these words into pods."""


@pod.command("master")
@click.option("--run-dir", type=click.Path(path_type=Path), required=True, help="On the job's volume.")
@click.option("--host", required=True, help="Address of the pod.")
def pod_master(run_dir: Path, host: str) -> None:
    """Run the job's master, or let it go on."""
    from everstep.cli.pod import pod_master as run_master

    raise SystemExit(run_master(run_dir, host, os.environ))


@pod.command("agent")
@click.option("--join", "master", required=True, metavar="HOST:PORT", help="Of the job's master.")
@click.option("--role", type=click.Choice(["worker", "ps"]), required=True, help="What the pod takes: one of these.")
@click.option("--run-dir", type=click.Path(path_type=Path), required=True, help="A folder of the pod's own.")
@click.option("--node", required=True, help="Name of the pod.")
@click.option("--host", required=True, help="Address of the pod.")
@click.option("--machine", default="", help="Node of the cluster that the pod is on.")
@click.option("--market", type=click.Choice(["on_demand", "spot"]), help="Of that node (default: not said).")
def pod_agent(master: str, role: str, run_dir: Path, node: str, host: str, machine: str, market: str | None) -> None:
    """Run an agent with one worker or one ps."""
    from everstep.cli.pod import pod_agent as run_agent

    raise SystemExit(run_agent(master, role, run_dir, node, host, machine, market or "", os.environ))


@pod.command("out")
@click.option("--run-dir", type=click.Path(path_type=Path), required=True, help="On the job's volume.")
@click.option("--to", required=True, metavar="URL", help="Where what the job leaves is written.")
def pod_out(run_dir: Path, to: str) -> None:
    """Write what the job leaves, when none of its other pods runs."""
    from everstep.cli.pod import pod_out as write_out

    raise SystemExit(write_out(run_dir, to, os.environ))


def need_run_dir(run_dir: Path) -> None:
    """Raises ConfigError unless it is the run directory of a job, of this version."""
    from everstep.cli.rundirs import open_run_dir

    open_run_dir(run_dir)


def main() -> None:
    """Run a verb; every failure is one line and an exit code."""
    debug = os.environ.get("EVERSTEP_DEBUG", "") not in ("", "0")
    try:
        code = cli.main(standalone_mode=False)
        sys.exit(code if isinstance(code, int) else 0)
    except click.exceptions.Abort:
        _fail("interrupted", 130)
    except click.UsageError as error:
        verb = error.ctx.command_path if error.ctx is not None else "everstep"
        _fail(f"{error.format_message().replace(chr(10), ' ')} (see {verb} --help)", 2)
    except click.ClickException as error:
        _fail(error.format_message(), 2)
    except EverstepError as error:
        if debug:
            raise
        _fail(str(error), error.exit_code)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # the reader of our output is gone; no second error at exit
        sys.exit(141)
    except KeyboardInterrupt:
        _fail("interrupted", 130)
    except OSError as error:
        if debug:
            raise
        where = f"{error.filename}: " if error.filename else ""
        _fail(f"{where}{error.strerror or error}", 4)
    except Exception as error:
        if debug:
            raise
        _fail(f"bug in everstep: {type(error).__name__}: {error} (EVERSTEP_DEBUG=1 shows where)", 3)


def _fail(text: str, code: int) -> None:
    line = escaped(" ".join(text.split()), 1 << 16)
    sys.stderr.write(f"everstep: {line}\n")
    sys.exit(code)


if __name__ == "__main__":
    main()
