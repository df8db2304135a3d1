"""Loads a job's settings: flag > environment > job.yaml > default; each value keeps its origin.

Keys of job.yaml are the fields of ``JobSpec``; the environment has them as ``EVERSTEP_WORKERS`` and so on.
"""

from __future__ import annotations

import ast
import contextlib
import datetime
import difflib
import importlib.machinery
import importlib.util
import json
import os
import re
import shlex
import sys
import tempfile
import types
import typing
import warnings
from collections.abc import Callable, Collection, Iterator, Mapping
from pathlib import Path
from typing import Any, Final

import msgspec

from everstep.bounds import MEMBERS_MAX, PLACES_MAX
from everstep.config.capacity import CLUSTERS, check_zone, parse_capacity
from everstep.config.consistency import parse_consistency
from everstep.config.every import parse_every
from everstep.config.limit import parse_limit
from everstep.config.memory_settings import check_memory
from everstep.config.notices import parse_notices
from everstep.config.parity import parse_code, refuse_few
from everstep.config.renamed import POLICIES as POLICY_ALIASES
from everstep.config.renamed import SETTINGS as OLD_SETTINGS
from everstep.config.renamed import renamed_line
from everstep.config.sized import AUTO, SIZED
from everstep.config.spec import JobSpec
from everstep.errors import ConfigError, PlatformError
from everstep.units import seconds

FORMAT: Final = 1
"""Version of a run directory. It grows when an older everstep could misread what a newer one wrote."""

_PREFIX: Final = "EVERSTEP_"
_NOT_SETTINGS: Final = frozenset({"EVERSTEP_RUN_DIR"})
"""Set for a job's own processes, where it does not mean "put the run here"."""

GLOBAL_BATCH: Final = "global_batch"
STRATEGIES: Final = {"fixed": "fixed", "scale": "elastic"}
"""What ``global_batch`` says -> the strategy."""

_TYPES: Final[dict[str, Any]] = typing.get_type_hints(JobSpec)

REBUILD_SHARE: Final = (0.01, 1.0)
"""From, to."""

# field -> (least, most); what lies outside is a typing error, or would only fail later and less clearly.
_RANGES: Final[dict[str, tuple[float, float]]] = {
    "workers": (1, MEMBERS_MAX),
    "capacity_speed": (0.001, 1e6),
    "capacity_nodes": (0, MEMBERS_MAX),
    "capacity_workers": (1, PLACES_MAX),
    "capacity_ps": (0, PLACES_MAX),
    "node_cpus": (0, 65536),
    "node_gpus": (0, 1024),
    "nodes": (1, MEMBERS_MAX),
    "files_port": (0, 65535),
    "nodes_wait_s": (0.0, 86_400.0),
    "ps": (0, MEMBERS_MAX),
    "min_workers": (1, MEMBERS_MAX),
    "max_workers": (0, MEMBERS_MAX),
    "min_ps": (1, MEMBERS_MAX),
    "max_ps": (0, MEMBERS_MAX),
    "fail_tolerance": (-1, 1_000_000),
    "budget": (0.0, 1e9),
    "logical_workers": (0, 100_000),
    "processes_per_worker": (1, 1024),
    "stages": (1, 1024),
    "seed": (0, 2**63 - 1),
    "partitions": (1, 4096),
    "max_restarts": (0, 1_000_000),
    "script_retries": (0, 1_000_000),
    "quarantine_after": (1, 1_000_000),
    "lease_s": (5.0, 86_400.0),
    "suspect_after_s": (0.1, 86_400.0),
    "lost_after_s": (0.1, 86_400.0),
    "start_s": (1.0, 86_400.0),
    "disk_full_s": (0.0, 86_400.0),
    "cut_off_s": (1.0, 86_400.0),
    "rejoin_s": (0.0, 2_592_000.0),
    "still_here_s": (0.0, 2_592_000.0),
    "master_silent_s": (2.0, 86_400.0),
    "master_lost_s": (3.0, 86_400.0),
    "threads_per_worker": (0, 1024),
    "ps_threads": (0, 1024),
    "rebuild_share": REBUILD_SHARE,
    "checkpoint_keep": (1, 1_000_000),
    "checkpoint_full_every": (0, 1_000_000),
    "ps_limit_bytes": (0, 1 << 56),
}


LAG_S = (0.05, 3600.0)
"""Seconds by which mirrors may be behind (``protect_lag``): from, to."""


def load_spec(
    job_yaml: Path | None,
    flags: Mapping[str, Any],
    env: Mapping[str, str],
    tell: Callable[[str], object] = lambda line: print(f"everstep: {line}", file=sys.stderr),
    sizes: Callable[[dict[str, Any]], dict[str, Any]] | None = None,
) -> tuple[JobSpec, dict[str, str]]:
    """Return the job spec and, for every field, where its value came from.

    ``flags``: field -> value of the command line; None means not given. ``tell`` gets one line for each setting that
    was given by its old name. ``sizes`` gets all values that were given, and returns them with a number for each
    ``auto``; None: ``auto`` is refused. Raises ConfigError, one line with the field, the value, what was expected and
    the place.
    """
    values: dict[str, Any] = {}
    origins: dict[str, str] = dict.fromkeys(_TYPES, "default")
    batch, batch_at = "", ""  # ``global_batch``: the strategy by the word of supervisors
    if job_yaml is not None:
        for name, value, line in _read_yaml(job_yaml):
            origin = f"{job_yaml} line {line}"
            if name == GLOBAL_BATCH:
                batch, batch_at = str(value), origin
                continue
            field = OLD_SETTINGS.get(name, name)
            if field != name:
                tell(renamed_line(f"{origin}: {name}", field))
            values[field] = _convert(field, value, origin, text=False)
            origins[field] = origin
    for name, raw in env.items():
        env_field = _env_field(name)
        if env_field:
            if name != _PREFIX + env_field.upper():
                if _PREFIX + env_field.upper() in env:
                    raise ConfigError(f"{name} and {_PREFIX + env_field.upper()} are one setting: set the second only")
                tell(renamed_line(name, _PREFIX + env_field.upper()))
            values[env_field] = _convert(env_field, raw, name, text=True)
            origins[env_field] = name
    for name, value in flags.items():
        if value is None:
            continue
        if name == GLOBAL_BATCH:
            batch, batch_at = str(value), _flag(name)
            continue
        origin, field = _flag(name), OLD_SETTINGS.get(name, name)
        if field != name:
            if flags.get(field) is not None:
                raise ConfigError(f"{origin} and {_flag(field)} are one setting: give the second only")
            tell(renamed_line(origin, _flag(field)))
        _known(field, origin)
        values[field] = _convert(field, value, origin, text=isinstance(value, str))
        origins[field] = origin
    if asked := [role for role in SIZED if values.get(role) == AUTO]:
        if sizes is None:
            raise ConfigError(
                f"{asked[0]} = 'auto' ({origins[asked[0]]}): only everstep run finds a size; give a number"
            )
        found = sizes(values)
        origins |= {field: AUTO for field, value in found.items() if values.get(field) != value}
        values = found
    if "policy" in values:
        values["policy"] = "+".join(POLICY_ALIASES.get(part, part) for part in values["policy"].split("+"))
    if values.get("mode", "ps") != "ps" and "ps" not in values:
        values["ps"] = 0
    if batch:
        values["strategy"] = strategy_of(batch, batch_at, values, origins)
        origins["strategy"] = f"{batch_at}: {GLOBAL_BATCH}"
    spec = JobSpec(**values)
    if falls_back(spec):
        where = f"protect = 'lag' ({origins['protect']})"
        tell(
            f"{where}: with consistency {spec.consistency} the batches of a lost ps cannot be computed again, for all "
            "steps since were made from them; protect: acked is taken"
        )
        spec = msgspec.structs.replace(spec, protect="acked", protect_lag=JobSpec().protect_lag)
    check_spec(spec, origins)
    return spec, origins


def falls_back(spec: JobSpec) -> bool:
    """Return whether a job that asks for mirrors that may lag gets ``acked``: in mode ps, what mirrors lack is computed
    again after a loss, from later parameters, and with consistency sync every step since depends on it."""
    try:
        sync = parse_consistency(spec.consistency).kind == "sync"
    except ValueError:
        return False  # (refused)
    return spec.mode == "ps" and spec.protect == "lag" and sync


def strategy_of(batch: str, batch_at: str, values: Mapping[str, Any], origins: Mapping[str, str]) -> str:
    """Return the strategy that ``global_batch`` stands for. Raises ConfigError: no such word, the mode has no global
    batch, or the strategy that was given says otherwise."""
    where = f"{GLOBAL_BATCH} = {batch!r} ({batch_at})"
    if batch not in STRATEGIES:
        raise ConfigError(f"{where}: expected fixed or scale")
    if values.get("mode", "ps") == "ps":
        raise ConfigError(
            f"{where}: needs mode: allreduce; in mode ps each worker has batches of its own, and there is no global one"
        )
    given: str = values.get("strategy", STRATEGIES[batch])
    if given != STRATEGIES[batch]:
        raise ConfigError(
            f"{where} and strategy = {given!r} ({origins['strategy']}): they contradict; give one of them"
        )
    return given


def _flag(field: str) -> str:
    return "--" + field.replace("_", "-")


def check_spec(spec: JobSpec, origins: Mapping[str, str] | None = None) -> None:
    """Check ranges, and what must hold between fields. Raises ConfigError."""
    at = {field: f" ({origins[field]})" if origins and field in origins else "" for field in _TYPES}
    for field, (least, most) in _RANGES.items():
        value = getattr(spec, field)
        if not least <= value <= most:  # false for NaN too
            raise ConfigError(f"{field} = {value!r}{at[field]}: must be from {least} to {most}")
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}", spec.name):
        raise ConfigError(f"name = {spec.name!r}{at['name']}: letters, digits, '.', '_' and '-' only, at most 100")
    _check_mode(spec, at)
    if spec.ps > spec.partitions:
        raise ConfigError(
            f"ps = {spec.ps}{at['ps']}: more than partitions = {spec.partitions}, so some would own nothing"
        )
    try:
        code = parse_code(spec.parity)
    except ConfigError as error:
        raise ConfigError(f"parity = {spec.parity!r}{at['parity']}: {error}") from None
    if spec.ps and (few := refuse_few(code, spec.ps)):
        raise ConfigError(f"parity = {spec.parity!r}{at['parity']}: {few}; set ps to {code.width} or more")
    _check_lag(spec, at)
    if spec.cold_dir and not spec.ps_limit_bytes:
        raise ConfigError(
            f"cold_dir = {spec.cold_dir!r}{at['cold_dir']}: needs ps_limit_bytes, the memory for rows of one ps"
        )
    if spec.lost_after_s <= spec.suspect_after_s:
        raise ConfigError(
            f"lost_after_s = {spec.lost_after_s}{at['lost_after_s']}: must be above"
            f" suspect_after_s = {spec.suspect_after_s}"
        )
    if spec.master_lost_s < spec.master_silent_s:
        raise ConfigError(
            f"master_lost_s = {spec.master_lost_s}{at['master_lost_s']}: below master_silent_s = {spec.master_silent_s}"
        )
    _check_policy(spec, at)
    check_memory(spec, at)
    _check_spot_policy(spec, at)
    parse_limit(spec.progress_timeout, f"progress_timeout{at['progress_timeout']}")
    parse_every(spec.checkpoint_every, f"checkpoint_every{at['checkpoint_every']}")
    if spec.checkpoint_keep_every:
        try:
            seconds(spec.checkpoint_keep_every)
        except ConfigError as error:
            where = f"checkpoint_keep_every = {spec.checkpoint_keep_every!r}{at['checkpoint_keep_every']}"
            raise ConfigError(f"{where}: expected a span such as '6h' ({error})") from None
    if spec.notices:
        parse_notices(spec.notices, f"notices = {spec.notices!r}{at['notices']}")
    _check_capacity(spec, at)
    _check_supervision(spec, at)
    if spec.metrics:
        parse_host_port(spec.metrics, f"metrics = {spec.metrics!r}{at['metrics']}")
    if spec.master_alone and not spec.bind:
        raise ConfigError(f"master_alone{at['master_alone']}: nobody else could take a worker; give bind HOST:PORT")
    if spec.bind:
        parse_host_port(spec.bind, f"bind = {spec.bind!r}{at['bind']}")


def _check_lag(spec: JobSpec, at: Mapping[str, str]) -> None:
    """Refuse a lag that nothing would make good."""
    where = f"protect_lag = {spec.protect_lag!r}{at['protect_lag']}"
    least_s, most_s = LAG_S
    try:
        lag_s = seconds(spec.protect_lag)
    except ConfigError as error:
        raise ConfigError(f"{where}: expected a span such as '2s' ({error})") from None
    if not least_s <= lag_s <= most_s:
        raise ConfigError(f"{where}: must be from {least_s:g} s to {most_s:g} s")
    if spec.protect != "lag":
        if spec.protect_lag != JobSpec().protect_lag:
            raise ConfigError(f"{where}: needs protect: lag; with {spec.protect} mirrors are not told later")
        return
    what = f"protect = 'lag'{at['protect']}"
    if spec.parity in ("", "0"):
        raise ConfigError(f"{what}: there are no mirrors that could lag; give parity K+M, or leave it out")
    if falls_back(spec):
        raise ConfigError(
            f"{what}: not with consistency {spec.consistency}: after a loss, batches of steps that all have made would "
            "be computed again, from later parameters; use acked"
        )
    every = parse_every(spec.checkpoint_every, f"checkpoint_every{at['checkpoint_every']}")
    if every.seconds and lag_s > every.seconds:
        raise ConfigError(
            f"{where}: longer than checkpoint_every = {spec.checkpoint_every!r}{at['checkpoint_every']}: checkpoints "
            f"would have more than mirrors; at most {every.seconds:g} s"
        )


def _check_capacity(spec: JobSpec, at: Mapping[str, str]) -> None:
    kind = parse_capacity(spec.capacity, f"capacity = {spec.capacity!r}{at['capacity']}").kind
    for field in ("capacity_quiet", "capacity_lead"):
        where = f"{field} = {getattr(spec, field)!r}{at[field]}"
        try:
            seconds(getattr(spec, field))
        except ConfigError as error:
            raise ConfigError(f"{where}: expected a span such as '30s' ({error})") from None
    defaults = JobSpec()
    for field in ("capacity_speed", "capacity_quiet", "capacity_lead", "capacity_workers", "capacity_ps"):
        derived = kind in CLUSTERS and spec.master_alone and field in ("capacity_workers", "capacity_ps")
        if kind != "trace" and not derived and getattr(spec, field) != getattr(defaults, field):
            raise ConfigError(f"{field} = {getattr(spec, field)!r}{at[field]}: needs capacity: trace:FILE")
    for field in ("slurm_partition", "slurm_account", "slurm_time", "slurm_options"):
        if kind != "slurm" and getattr(spec, field):
            raise ConfigError(f"{field} = {getattr(spec, field)!r}{at[field]}: needs --on slurm")
    if spec.slurm_steps and kind != "slurm":
        raise ConfigError(f"slurm_steps = {spec.slurm_steps}{at['slurm_steps']}: needs --on slurm")
    for field in ("slurm_partition", "slurm_account", "slurm_time"):
        if spec.slurm_steps and getattr(spec, field):
            raise ConfigError(
                f"{field} = {getattr(spec, field)!r}{at[field]}: with --srun the nodes are those of the job that it "
                "stands in; give it to sbatch"
            )
    for field in ("node_cpus", "node_gpus"):
        if kind not in CLUSTERS and getattr(spec, field):
            raise ConfigError(f"{field} = {getattr(spec, field)}{at[field]}: needs --on ray or --on slurm")
    try:
        shlex.split(spec.slurm_options)
    except ValueError as error:
        raise ConfigError(f"slurm_options = {spec.slurm_options!r}{at['slurm_options']}: {error}") from None
    check_zone(spec.zone, f"zone = {spec.zone!r}{at['zone']}")
    if spec.capacity_nodes and not kind:
        raise ConfigError(f"capacity_nodes = {spec.capacity_nodes}{at['capacity_nodes']}: needs capacity")
    if kind == "command" and not spec.bind:
        raise ConfigError(
            f"capacity = {spec.capacity!r}{at['capacity']}: its machines join over the network: give bind HOST:PORT"
        )
    if kind == "command" and not spec.capacity_nodes:
        raise ConfigError(
            f"capacity = {spec.capacity!r}{at['capacity']}: give capacity_nodes, how many machines it is asked for"
        )


def _check_supervision(spec: JobSpec, at: Mapping[str, str]) -> None:
    """Check who is waited for, and for how long."""
    for role, wanted in (("workers", spec.workers), ("ps", spec.ps)):
        least, most = getattr(spec, f"min_{role}"), getattr(spec, f"max_{role}")
        low, high = f"min_{role} = {least}{at[f'min_{role}']}", f"max_{role} = {most}{at[f'max_{role}']}"
        if most and least > most:
            raise ConfigError(f"{low}: more than {high}")
        if most and wanted > most:
            raise ConfigError(f"{role} = {wanted}{at[role]}: more than {high}")
        if role == "workers" and (spec.capacity or spec.bind):
            continue  # (nodes that join bring more along)
        if least > max(1, wanted):
            raise ConfigError(f"{low}: more than {role} = {wanted}{at[role]}")
    parse_limit(spec.max_wait, f"max_wait{at['max_wait']}")
    where = f"stabilization = {spec.stabilization!r}{at['stabilization']}"
    try:
        stable_s = seconds(spec.stabilization)
    except ConfigError as error:
        raise ConfigError(f"{where}: expected a span such as '10s' ({error})") from None
    if stable_s > 86_400:
        raise ConfigError(f"{where}: at most a day")
    _check_reliable(spec, at)
    if spec.budget and not spec.prices:
        raise ConfigError(f"budget = {spec.budget:g}{at['budget']}: nobody knows what machines cost; give prices")
    if spec.on_wait_timeout != "suspend" and spec.max_wait == "off":
        raise ConfigError(
            f"on_wait_timeout = {spec.on_wait_timeout!r}{at['on_wait_timeout']}: the job waits for ever; give max_wait"
        )


def _check_reliable(spec: JobSpec, at: Mapping[str, str]) -> None:
    """Check which roles stand on machines that stay, and when such machines are asked for."""
    where = f"reliable = {','.join(spec.reliable)!r}{at['reliable']}"
    if unknown := [role for role in spec.reliable if role not in RELIABLE]:
        raise ConfigError(f"{where}: {unknown[0]!r} is no role that can be: expected some of {', '.join(RELIABLE)}")
    if "master" in spec.reliable and spec.market == "spot":
        raise ConfigError(
            f"{where}: this machine has the master, and market = 'spot'{at['market']} says that it may be taken back: "
            "begin on an on-demand machine, or leave master out"
        )
    if "ps" in spec.reliable and not spec.ps:
        raise ConfigError(f"{where}: this job has no ps; leave ps out")
    fallback_s = parse_limit(spec.fallback, f"fallback{at['fallback']}")
    where = f"fallback = {spec.fallback!r}{at['fallback']}"
    if fallback_s and not spec.capacity:
        raise ConfigError(f"{where}: there is nobody to ask for on-demand machines; give capacity")
    wait_s = parse_limit(spec.max_wait, "max_wait")
    if fallback_s and 0 < wait_s <= fallback_s:
        raise ConfigError(
            f"{where}: it never comes to that: the job waits for max_wait = {spec.max_wait!r}{at['max_wait']} at most"
        )


def _check_spot_policy(spec: JobSpec, at: Mapping[str, str]) -> None:
    """Check who sets the interval between checkpoints, and that there is one that can be set."""
    name, where = spec.spot_policy, f"spot_policy = {spec.spot_policy!r}{at['spot_policy']}"
    module, colon, attribute = name.partition(":")
    if not colon and name not in SPOT_POLICIES:
        raise ConfigError(f"{where}: no such spot policy; there are {', '.join(SPOT_POLICIES)}, and module:callable")
    if colon and not (attribute.isidentifier() and all(part.isidentifier() for part in module.split("."))):
        raise ConfigError(f"{where}: expected module:callable, such as mine:choose for choose in mine.py")
    if name == "none":
        return
    if not spec.capacity and not spec.bind:
        raise ConfigError(f"{where}: no machine of this job can be taken back; give capacity, on or bind")
    every = f"checkpoint_every = {spec.checkpoint_every!r}{at['checkpoint_every']}"
    if not parse_every(spec.checkpoint_every, every).seconds:
        raise ConfigError(f"{where}: it sets the interval between checkpoints; give a first one: checkpoint_every 10m")


SPOT_POLICIES: Final = ("none", "hazard")
RELIABLE: Final = ("master", "ps")
_LISTS: Final = ("reliable",)
"""Settings that may be written as one text: ``master,ps``."""
POLICIES: Final = ("none", "shared", "exclusive", "backup", "auto", "memory")


def _check_policy(spec: JobSpec, at: Mapping[str, str]) -> None:
    parts = spec.policy.split("+")
    where = f"policy = {spec.policy!r}{at['policy']}"
    for part in parts:
        _check_one_policy(spec, POLICY_ALIASES.get(part, part), where)
    if len(parts) > 1 and "none" in parts:
        raise ConfigError(f"{where}: none does nothing; leave it out")
    if twice := [part for part in parts if parts.count(part) > 1]:
        raise ConfigError(f"{where}: {twice[0]} twice; name it once")
    if "auto" not in parts:
        if spec.optimize != "time":
            raise ConfigError(f"optimize = {spec.optimize!r}{at['optimize']}: needs policy: auto, which chooses sizes")
        return
    missing = [role for role in ("workers", *(["ps"] if spec.ps else [])) if not getattr(spec, f"max_{role}")]
    if missing:
        raise ConfigError(f"{where}: needs a bound; give max_{missing[0]}")


def _check_one_policy(spec: JobSpec, name: str, where: str) -> None:
    steps = spec.mode == "ps" and parse_consistency(spec.consistency).kind == "sync"
    module, colon, attribute = name.partition(":")
    if not colon and name not in POLICIES:
        near = difflib.get_close_matches(name, (*POLICIES, *POLICY_ALIASES), 1)
        what = (
            f"did you mean {POLICY_ALIASES.get(near[0], near[0])!r}?"
            if near
            else f"there are {', '.join(POLICIES)}, and module:callable"
        )
        raise ConfigError(f"{where}: no such policy; {what}")
    if colon and not (attribute.isidentifier() and all(part.isidentifier() for part in module.split("."))):
        raise ConfigError(f"{where}: expected module:callable, such as mine:choose for choose in mine.py")
    if name == "memory" and not spec.ps:
        raise ConfigError(f"{where}: adds ps before one is full, and this job has none; leave it out")
    if name == "backup" and not steps:
        raise ConfigError(
            f"{where}: needs steps with a quorum (mode ps, consistency sync); {_words(spec)} has none: see shared"
        )
    if name == "exclusive" and spec.mode == "ps" and not steps:
        raise ConfigError(
            f"{where}: divides common steps, and mode ps ({spec.consistency}) has none; set consistency to sync"
        )


def _words(spec: JobSpec) -> str:
    return f"mode ps with consistency {spec.consistency}" if spec.mode == "ps" else f"mode {spec.mode}"


def _check_consistency(spec: JobSpec, at: Mapping[str, str]) -> None:
    where = f"consistency = {spec.consistency!r}{at['consistency']}"
    try:
        found = parse_consistency(spec.consistency)
    except ValueError as error:
        raise ConfigError(f"{where}: {error}") from None
    if spec.grouped and found.kind != "async":
        raise ConfigError(f"{where}: for mode ps; mode {spec.mode} is synchronous by itself: leave consistency out")
    if found.backup and found.backup >= spec.workers:
        raise ConfigError(
            f"{where}: with workers = {spec.workers}{at['workers']} a step would wait for nobody; at most "
            f"sync:{spec.workers - 1}" + ("" if spec.workers > 1 else ", which is sync")
        )


def _check_mode(spec: JobSpec, at: Mapping[str, str]) -> None:
    """Check what belongs to one mode only. ``at``: field -> where its value came from, for the message."""
    _check_consistency(spec, at)
    if spec.mode == "ps":
        if spec.ps < 1:
            raise ConfigError(f"ps = {spec.ps}{at['ps']}: must be at least 1 in mode ps (see mode: allreduce)")
        defaults = JobSpec()
        for field in ("strategy", "logical_workers", "processes_per_worker", "lr_rule", "heal_from"):
            if getattr(spec, field) != getattr(defaults, field):
                raise ConfigError(f"{field} = {getattr(spec, field)!r}{at[field]}: needs mode: allreduce")
    stages = f"stages = {spec.stages}{at['stages']}"
    if spec.stages > 1 and spec.mode != "pipeline":
        raise ConfigError(f"{stages}: needs mode: pipeline; mode {spec.mode} does not cut a model into stages")
    if spec.torchrun_env and spec.worker_processes > 1:
        raise ConfigError(
            f"torchrun_env = true{at['torchrun_env']}: a worker of {spec.worker_processes} processes has no RANK for "
            "each of them; use job.device_mesh"
        )
    copies = f"copy_every = {spec.copy_every!r}{at['copy_every']}"
    if spec.copy_every != "auto" and spec.mode != "pipeline":
        raise ConfigError(f"{copies}: needs mode: pipeline; in mode {spec.mode} peers and mirrors have the state")
    if spec.copy_every not in ("auto", "off") and not (spec.copy_every.isdecimal() and int(spec.copy_every)):
        raise ConfigError(f"{copies}: expected auto, off, or a whole number of iterations from 1")
    if spec.graph_every not in ("auto", "off") and not (spec.graph_every.isdecimal() and int(spec.graph_every)):
        raise ConfigError(
            f"graph_every = {spec.graph_every!r}{at['graph_every']}: expected auto, off, or a whole number of steps "
            "from 1"
        )
    if spec.mode == "ps":
        return
    if spec.mode == "pipeline":
        _check_pipeline(spec, at)
    if spec.parity not in ("", "0") and not spec.ps:
        raise ConfigError(
            f"parity = {spec.parity!r}{at['parity']}: it protects tables on the ps, and mode allreduce has none unless "
            "ps is given; every worker is a replica"
        )
    if spec.ps and spec.protect == "eager":
        raise ConfigError(
            f"protect = {spec.protect!r}{at['protect']}: not in mode allreduce: use acked, or lag, with which workers "
            "keep what mirrors may lack"
        )
    if 0 < spec.logical_workers < spec.workers:
        raise ConfigError(
            f"logical_workers = {spec.logical_workers}{at['logical_workers']}: less than workers = {spec.workers}"
            f"{at['workers']}, so some would have nothing to do"
        )
    per_worker = f"processes_per_worker = {spec.processes_per_worker}{at['processes_per_worker']}"
    if spec.processes_per_worker > 1 and spec.ps:
        raise ConfigError(f"{per_worker}: a sharded model cannot have tables on the ps yet: leave one out")
    if spec.processes_per_worker > 1 and spec.logical_workers:
        raise ConfigError(
            f"{per_worker}: a logical worker has the whole model (the order of sums is not fixed "
            "inside of a sharded one); leave processes_per_worker or logical_workers out"
        )
    if spec.lr_rule != "none" and (spec.strategy == "fixed" or spec.logical_workers):
        raise ConfigError(
            f"lr_rule = {spec.lr_rule!r}{at['lr_rule']}: the global batch never changes here; leave it out"
        )


def _check_pipeline(spec: JobSpec, at: Mapping[str, str]) -> None:
    """Refuse what does not combine with a model in stages."""
    if spec.ps:
        raise ConfigError(f"ps = {spec.ps}{at['ps']}: not in mode pipeline: a model in stages has no tables on the ps")
    if spec.processes_per_worker > 1:
        raise ConfigError(
            f"processes_per_worker = {spec.processes_per_worker}{at['processes_per_worker']}: not in mode pipeline: a "
            "stage is one process, and is not sharded (stages say how many processes a worker has)"
        )
    if spec.logical_workers:
        raise ConfigError(
            f"logical_workers = {spec.logical_workers}{at['logical_workers']}: not in mode pipeline: a logical worker "
            "has the whole model; leave it out"
        )


def parse_host_port(text: str, what: str) -> tuple[str, int]:
    """Parse ``"10.0.0.1:7000"`` or ``"[::1]:7000"`` -> host and port (0: any free one). ConfigError names ``what``."""
    match = re.fullmatch(r"(?:\[([0-9A-Fa-f:.%\w]+)\]|([^:\s\[\]]+)):(\d{1,5})", text)
    if match is None or int(match[3]) > 65535:
        raise ConfigError(f"{what}: expected HOST:PORT with a port from 0 to 65535")
    return match[1] or match[2], int(match[3])


def check_script(script: str | Path) -> Path:
    """Return the absolute path of a training script. ConfigError: none given, not there, not a readable file."""
    if not str(script):
        raise ConfigError("no training script: everstep run [OPTIONS] train.py [ARGS], or script: in job.yaml")
    path = Path(script).expanduser()
    if path.is_dir():
        raise ConfigError(f"training script {str(script)!r} is a directory; give the .py file")
    if not path.exists():
        near = _nearest(path.name, _python_files(path.parent))
        raise ConfigError(f"training script {str(script)!r} does not exist{near}")
    try:
        text = path.read_bytes()
    except OSError as error:
        raise ConfigError(f"training script {str(script)!r} cannot be read: {error.strerror}") from None
    if b"\0" in text[:4096]:
        raise ConfigError(f"training script {str(script)!r} is no Python text file")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # (they are shown when the script runs)
            compile(text, str(path), "exec", dont_inherit=True)
    except SyntaxError as error:
        raise ConfigError(f"training script {str(script)!r}, line {error.lineno}: {error.msg}") from None
    except (ValueError, RecursionError, MemoryError) as error:
        raise ConfigError(f"training script {str(script)!r} cannot be compiled: {error}") from None
    return path.absolute()


def check_policy_module(policy: str, folder: Path, field: str = "policy") -> None:
    """Check each policy that is joined by + (see ``_check_module``)."""
    for part in policy.split("+"):
        _check_module(part, folder, field)


def _check_module(policy: str, folder: Path, field: str) -> None:
    """Check the ``module:callable`` of a ``field``. Raises ConfigError: the module is neither in ``folder`` (the
    script's) nor where Python finds modules, or a file there in which nothing has this name. It is not imported: that
    is for the policy's own thread."""
    if ":" not in policy:
        return
    module, _, name = policy.partition(":")
    top = module.partition(".")[0]
    beside = importlib.machinery.PathFinder.find_spec(top, [str(folder), ""])
    if beside is None and top not in sys.modules and importlib.util.find_spec(top) is None:
        raise ConfigError(
            f"{field} = {policy!r}: there is no module {top!r} beside the script ({folder}), or where Python finds them"
        )
    path = folder / f"{module}.py"
    if not path.is_file():
        return
    try:
        names = _names_of(ast.parse(path.read_bytes(), str(path)))
    except SyntaxError as error:
        raise ConfigError(f"{field} = {policy!r}: {path.name}, line {error.lineno}: {error.msg}") from None
    except (OSError, ValueError) as error:
        raise ConfigError(f"{field} = {policy!r}: {path.name} cannot be read: {error}") from None
    if names is not None and name not in names:
        raise ConfigError(f"{field} = {policy!r}: {path} has no {name!r}{_nearest(name, names)}")


def _nearest(name: str, names: Collection[str]) -> str:
    """Return the end of an error: which of these may have been meant; "" if none is like it."""
    near = difflib.get_close_matches(name, names, 1)
    return f"; did you mean {near[0]!r}?" if near else ""


def _names_of(module: ast.Module) -> set[str] | None:
    """Return what it defines or imports, wherever; None: nobody knows without importing it."""
    names: set[str] = set()
    for node in ast.walk(module):
        match node:
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) | ast.ClassDef(name=name):
                names.add(name)
            case ast.Name(id=name, ctx=ast.Store()):
                names.add(name)
            case ast.alias(name=name, asname=alias):
                names.add(alias or name)
    return None if names & {"*", "__getattr__"} else names


def _python_files(folder: Path) -> list[str]:
    try:
        return [p.name for p in folder.iterdir() if p.suffix == ".py"]
    except OSError:
        return []


# ---- the run directory --------------------------------------------------------------------------------------


def new_run_dir(name: str, parent: Path | None = None) -> Path:
    """Create ``runs/NAME-DATE-TIME`` under the current directory (or ``parent``) and return its absolute path."""
    base = (parent if parent is not None else Path.cwd() / "runs").absolute()
    stamp = f"{name}-{datetime.datetime.now():%Y%m%d-%H%M%S}"
    try:
        base.mkdir(parents=True, exist_ok=True)
        for number in range(1, 1000):
            path = base / (stamp if number == 1 else f"{stamp}-{number}")
            with contextlib.suppress(FileExistsError):
                path.mkdir(mode=0o700)
                return path
    except OSError as error:
        raise PlatformError(f"cannot create a run directory in {str(base)!r}: {error.strerror}") from None
    raise PlatformError(f"cannot create a run directory in {str(base)!r}: {stamp} and its 999 followers exist")


def save_spec(run_dir: Path, spec: JobSpec, origins: Mapping[str, str]) -> None:
    """Write ``RUN_DIR/job.json``, at once or not at all. PlatformError when the disk refuses."""
    record = {
        "version": FORMAT,
        "package": package_version(),
        "spec": msgspec.to_builtins(spec),
        "origins": dict(origins),
    }
    temporary = ""
    try:
        fd, temporary = tempfile.mkstemp(dir=run_dir, prefix=".job.json.")
        with os.fdopen(fd, "w") as file:
            json.dump(record, file, indent=1)
            file.flush()
            os.fsync(file.fileno())
        Path(temporary).chmod(0o600)
        Path(temporary).replace(run_dir / "job.json")
        temporary = ""
    except OSError as error:
        raise PlatformError(f"cannot write {str(run_dir / 'job.json')!r}: {error.strerror}") from None
    finally:
        if temporary:
            Path(temporary).unlink(missing_ok=True)


def read_spec(run_dir: Path) -> JobSpec:
    """Return the spec of a run directory. ConfigError: not there, not one, damaged, or of another version."""
    return _read_job(run_dir)[0]


def read_origins(run_dir: Path) -> dict[str, str]:
    """Return field -> where its value came from, as ``save_spec`` was told."""
    return _read_job(run_dir)[1]


def _read_job(run_dir: Path) -> tuple[JobSpec, dict[str, str]]:
    run_dir = Path(run_dir)
    path = run_dir / "job.json"
    if not run_dir.is_dir():
        raise ConfigError(f"run directory {str(run_dir)!r} does not exist")
    try:
        record = json.loads(path.read_bytes())
    except FileNotFoundError:
        raise ConfigError(f"{str(run_dir)!r} is no run directory: it has no job.json") from None
    except OSError as error:
        raise ConfigError(f"cannot read {str(path)!r}: {error.strerror}") from None
    except ValueError:
        raise ConfigError(f"{str(path)!r} is damaged: not JSON") from None
    if not isinstance(record, dict) or "version" not in record:
        raise ConfigError(f"{str(path)!r} is damaged: it has no version")
    if record["version"] != FORMAT:
        raise ConfigError(
            f"run directory {str(run_dir)!r} has format {record['version']!r} (written by everstep"
            f" {record.get('package', '?')}); this is everstep {package_version()}, which reads format {FORMAT}"
        )
    try:
        spec = msgspec.convert(record.get("spec"), JobSpec)
        origins = msgspec.convert(record.get("origins", {}), dict[str, str])
    except msgspec.ValidationError as error:
        raise ConfigError(f"{str(path)!r} is damaged: {error}") from None
    return spec, origins


def package_version() -> str:
    from everstep import __version__

    return __version__


# ---- values -------------------------------------------------------------------------------------------------


def _read_yaml(path: Path) -> Iterator[tuple[str, Any, int]]:
    """Yield (field, value, line) of each entry; the first problem is a ConfigError with its line."""
    import yaml  # here, not above: 15 ms that a restarting master would pay for nothing

    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise ConfigError(f"job file {str(path)!r} does not exist") from None
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"job file {str(path)!r} cannot be read: {error}") from None
    try:
        yield from _entries(path, text)
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        place = f"{path} line {mark.line + 1}" if mark is not None else str(path)
        problem = getattr(error, "problem", None) or getattr(error, "reason", None) or str(error).splitlines()[0]
        raise ConfigError(f"{place}: no valid YAML: {problem}") from None


def _entries(path: Path, text: str) -> Iterator[tuple[str, Any, int]]:
    import yaml

    loader = yaml.SafeLoader(text)
    try:
        node = loader.get_single_node()
        if node is None or node.tag == "tag:yaml.org,2002:null":
            return
        if not isinstance(node, yaml.MappingNode):
            raise ConfigError(f"{path} line {node.start_mark.line + 1}: expected lines such as 'workers: 2'")
        seen: dict[str, int] = {}
        for key_node, value_node in node.value:
            line = key_node.start_mark.line + 1
            field = str(loader.construct_object(key_node, deep=True))
            new = OLD_SETTINGS.get(field, field)
            _known(new, f"{path} line {line}")
            if new in seen:
                raise ConfigError(f"{path} line {line}: {new} was given in line {seen[new]} already")
            seen[new] = line
            yield field, loader.construct_object(value_node, deep=True), line
    finally:
        loader.dispose()


def _known(field: str, origin: str) -> None:
    if field in _TYPES:
        return
    near = difflib.get_close_matches(field.replace("-", "_"), _TYPES, 1)
    hint = f"did you mean {near[0]!r}?" if near else f"known: {', '.join(_TYPES)}"
    raise ConfigError(f"{origin}: unknown setting {field!r}; {hint}")


def _env_field(name: str) -> str:
    if not name.startswith(_PREFIX) or name in _NOT_SETTINGS:
        return ""
    field = name[len(_PREFIX) :].lower()
    if name != _PREFIX + field.upper():
        return ""
    field = OLD_SETTINGS.get(field, field)
    return field if field in _TYPES else ""


def _convert(field: str, value: Any, origin: str, text: bool) -> Any:
    """Return ``value`` as the field's type; from text (environment, flags) or as YAML gave it. Never guesses."""
    wanted = _TYPES[field]
    shown = f"{origin}: {field} = {value!r}"
    if typing.get_origin(wanted) is typing.Literal:
        choices = typing.get_args(wanted)
        if value not in choices:
            raise ConfigError(f"{shown}: expected {' or '.join(map(repr, choices))}")
        return value
    if typing.get_origin(wanted) is tuple:
        if field in _LISTS and isinstance(value, str):
            return tuple(part.strip() for part in value.split(",") if part.strip())
        if text:
            try:
                return tuple(shlex.split(value))
            except ValueError as error:
                raise ConfigError(f"{shown}: {error}") from None
        if isinstance(value, list | tuple) and not any(isinstance(v, list | dict | types.NoneType) for v in value):
            return tuple(str(v) for v in value)
        raise ConfigError(f"{shown}: expected a list of texts")
    if wanted is bool:
        words = {
            "1": True,
            "true": True,
            "yes": True,
            "on": True,
            "0": False,
            "false": False,
            "no": False,
            "off": False,
        }
        if text and value.strip().lower() in words:
            return words[value.strip().lower()]
        if isinstance(value, bool):
            return value
        raise ConfigError(f"{shown}: expected true or false")
    if field in SIZED and value == AUTO:
        return AUTO
    if wanted is int:
        if isinstance(value, int) and not isinstance(value, bool):
            return value
        if text and re.fullmatch(r"[+-]?\d{1,20}", value.strip()):
            return int(value)
        raise ConfigError(f"{shown}: expected a whole number")
    if wanted is float:
        return _number(field, value, shown)
    if isinstance(value, str):
        return value
    raise ConfigError(f"{shown}: expected a text")


def _number(field: str, value: Any, shown: str) -> float:
    if isinstance(value, int | float) and not isinstance(value, bool):
        return float(value)
    if isinstance(value, str) and field.endswith("_s"):
        try:
            return seconds(value)
        except ConfigError as error:
            raise ConfigError(f"{shown}: expected seconds, or a span such as '30s' ({error})") from None
    with contextlib.suppress(TypeError, ValueError):
        if isinstance(value, str):
            return float(value)
    raise ConfigError(f"{shown}: expected a number")
