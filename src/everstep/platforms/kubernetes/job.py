"""Reads an ElasticJob: what it asks for, and the settings of job.yaml that this means. Pure."""

from __future__ import annotations

import posixpath
from decimal import Decimal
from typing import Any, Final, NamedTuple

from everstep.config.load import load_spec
from everstep.errors import ConfigError
from everstep.platforms.kubernetes.kinds import CONTAINER, FILES_PORT, MASTER_PORT, Gang, Object, Place, name_of
from everstep.storage.places import open_place

NAME_MAX: Final = 40
"""Longest name of a job: names of its pods are host names, of at most 63 characters."""
RUN_DIR: Final = "/everstep/run"
CHECKPOINTS: Final = "checkpoints"
MODEL: Final = "model"
"""Folders of ``spec.out``."""
_MODES: Final = {
    "AllReduce": "allreduce",
    "Hybrid": "allreduce",
    "ParameterServer": "ps",
    "Pipeline": "pipeline",
}
_TIMEOUTS: Final = {"Suspend": "suspend", "Fail": "fail", "Run": "run"}
_RECOVERIES: Final = {"WaitForAll": "wait_for_all", "RunWithAvailable": "run_with_available"}
_BATCHES: Final = {"Fixed": "fixed", "ScaleWithWorkers": "scale"}
_OURS: Final = ("run_dir", "bind", "files_port", "master_alone", "capacity", "nodes", "workers", "ps", "script", "args")
"""Settings that the operator makes of other fields, or that have no meaning in a cluster."""


class Wanted(NamedTuple):
    """Says how many pods a job wants of each kind."""

    workers: int
    ps: int

    def of(self, place: Place) -> int:
        """Return the number of pods of a kind."""
        return 1 if place is Place.MASTER else self.ps if place is Place.PS else self.workers


def wanted_by(job: Object) -> Wanted:
    """Return how many pods a job wants."""
    spec = job["spec"]
    servers = int((spec.get("ps") or {}).get("replicas", 1)) if has_ps(spec) else 0
    return Wanted(int(spec["worker"].get("replicas", 1)), servers)


def has_ps(spec: Object) -> bool:
    """Return whether a job's mode has parameter servers."""
    return spec.get("mode") in ("ParameterServer", "Hybrid") and bool(spec.get("ps"))


def ignored_fields(job: Object) -> str:
    """Return which fields mean nothing in the job's mode, and what to do; "": none. They are allowed: a manifest may
    change its mode alone."""
    spec = job["spec"]
    if spec.get("mode", "AllReduce") != "AllReduce":
        return ""
    found = [f"spec.{field}" for field in ("ps", "psProtection") if spec.get(field)]
    words = " and ".join(found)
    return f"{words}: ignored, mode AllReduce has no ps; set spec.mode to Hybrid or ParameterServer" if found else ""


def role_spec(job: Object, place: Place) -> Object:
    """Return the part of the spec that is about one kind of pods."""
    return dict(job["spec"].get(place.value) or {})


def main_container(template: Object) -> Object:
    """Return the container that runs everstep: ``main``, or the first. {}: the template has none."""
    containers = (template.get("spec") or {}).get("containers") or []
    named = (c for c in containers if isinstance(c, dict) and c.get("name") == CONTAINER)
    return next(named, containers[0] if containers and isinstance(containers[0], dict) else {})


def script_of(job: Object) -> tuple[str, tuple[str, ...]]:
    """Return the training script and its arguments: ``spec.script``, or the command ``[python, train.py, ...]`` of the
    worker's container. Raises ConfigError."""
    spec = job["spec"]
    container = main_container(spec["worker"].get("template") or {})
    words = [*(container.get("command") or ()), *(container.get("args") or ())]
    script, args = str(spec.get("script") or ""), [str(a) for a in spec.get("args") or ()]
    if not script:
        at = next((i for i, word in enumerate(words) if isinstance(word, str) and word.endswith(".py")), -1)
        if at < 0:
            raise ConfigError(
                "spec.script: is empty, and the worker's container has no command such as [python, train.py]; set one"
            )
        script, args = words[at], [str(word) for word in words[at + 1 :]]
    folder = container.get("workingDir") or ""
    return posixpath.join(folder, script) if folder else script, tuple(args)


def budget_of(job: Object) -> Decimal | None:
    """Return what a job may spend; None: any sum."""
    text = (job["spec"].get("cost") or {}).get("budget")
    return Decimal(text) if text is not None else None


def check_prices(job: Object) -> None:
    """Raise ConfigError: a budget without prices, or one that no machine could run an hour for."""
    budget = budget_of(job)
    if budget is None:
        return
    given = [Decimal(price) for place in Place for price in (role_spec(job, place).get("price") or {}).values()]
    if not given:
        raise ConfigError("spec.cost.budget: needs prices; set spec.worker.price.onDemandHourly (and ps, master)")
    if 0 < budget < min(given):
        raise ConfigError(f"spec.cost.budget = {budget}: does not pay for an hour of one pod ({min(given)}); give more")


def gang_of(job: Object) -> Gang:
    """Return which scheduler starts a job's pods together. Raises ConfigError."""
    asked = str((job["spec"].get("scheduling") or {}).get("gang", Gang.NONE))
    if asked not in tuple(Gang):
        raise ConfigError(f"spec.scheduling.gang = {asked!r}: expected one of {', '.join(Gang)}")
    return Gang(asked)


def check_scheduling(job: Object) -> None:
    """Raise ConfigError: a scheduler that there is none of, or a queue that nobody reads."""
    queue = (job["spec"].get("scheduling") or {}).get("queue")
    if gang_of(job) is not Gang.VOLCANO and queue:
        raise ConfigError(f"spec.scheduling.queue = {queue!r}: only Volcano has queues; leave it out")


def out_of(job: Object) -> str:
    """Return where what a job leaves is written; "": nowhere."""
    return str(job["spec"].get("out") or "").rstrip("/")


def check_out(job: Object) -> None:
    """Raise ConfigError: ``spec.out`` is no place."""
    out = out_of(job)
    if out and "://" not in out and not posixpath.isabs(out):
        raise ConfigError(f"spec.out = {out!r}: give a URL, or the absolute path of a directory that pods mount")
    if out:
        open_place(out)


def settings_of(job: Object) -> dict[str, Any]:
    """Return the job as job.yaml has it. Raises ConfigError, one line that names the field, the value and what to do:
    the same line that ``everstep run`` gives."""
    spec, name = job["spec"], name_of(job)
    if len(name) > NAME_MAX or "." in name:
        raise ConfigError(
            f"metadata.name = {name!r}: at most {NAME_MAX} characters, without dots: pods are called after it"
        )
    if spec.get("mode", "AllReduce") not in _MODES:
        raise ConfigError(f"spec.mode = {spec.get('mode')!r}: expected one of {', '.join(_MODES)}")
    if spec.get("ps") and spec.get("mode") == "Pipeline":
        raise ConfigError("spec.ps: not in mode Pipeline: a model in stages has no tables on the ps; leave it out")
    if "stages" in spec and spec.get("mode") != "Pipeline":
        raise ConfigError(f"spec.stages = {spec['stages']}: needs mode: Pipeline; other modes cut no model into stages")
    check_scheduling(job)
    given = dict(spec.get("settings") or {})
    for field in _OURS:
        if field in given:
            raise ConfigError(f"spec.settings.{field}: the operator sets it; leave it out")
    worker, servers, elastic = spec["worker"], spec.get("ps") or {}, spec.get("elasticity") or {}
    wanted = wanted_by(job)
    settings: dict[str, Any] = {
        "name": name,
        "mode": _MODES[spec.get("mode", "AllReduce")],
        "workers": max(1, wanted.workers),
        "ps": wanted.ps,
        "max_workers": int(worker.get("maxReplicas", 0)),
        "min_workers": max(1, int(worker.get("minReplicas", 1))),
        "master_alone": True,
        "bind": f"0.0.0.0:{MASTER_PORT}",
        "files_port": FILES_PORT,
    }
    if "stages" in spec:
        settings["stages"] = int(spec["stages"])
    if wanted.ps:
        settings["max_ps"] = int(servers.get("maxReplicas", 0))
        settings["min_ps"] = int(servers.get("minReplicas", 1))
    protection = spec.get("psProtection") or {}
    if protection.get("strategy") == "Parity":
        settings["parity"] = f"{protection['dataShards']}+{protection['parityShards']}"
    elif protection.get("strategy") == "Backup":
        settings["parity"] = "1+1"
    if "maxWaitSeconds" in elastic:
        settings["max_wait"] = f"{elastic['maxWaitSeconds']}s" if elastic["maxWaitSeconds"] else "off"
        if elastic["maxWaitSeconds"]:
            settings["on_wait_timeout"] = _TIMEOUTS[elastic.get("onWaitTimeout", "Suspend")]
    if "recovery" in elastic:
        settings["recovery"] = _RECOVERIES[elastic["recovery"]]
    if "globalBatch" in elastic:
        settings["global_batch"] = _BATCHES[elastic["globalBatch"]]
    if "failTolerance" in elastic:
        settings["fail_tolerance"] = int(elastic["failTolerance"])
    if "stabilizationSeconds" in elastic:
        settings["stabilization"] = f"{elastic['stabilizationSeconds']}s"
    check_prices(job)
    check_out(job)
    if out := out_of(job):
        settings["checkpoint_to"] = f"{out}/{CHECKPOINTS}"
        settings["model_to"] = f"{out}/{MODEL}"
    script, args = script_of(job)
    settings = {**settings, **given, "script": script, "args": list(args)}
    load_spec(None, settings, {}, lambda line: None)
    return settings
