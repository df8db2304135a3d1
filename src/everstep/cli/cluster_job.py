"""Runs the verbs that are about a job in a cluster: ``everstep submit``, and others where RUN_DIR is ``k8s:JOB``."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any, Final, NamedTuple

import click
import yaml

from everstep.config.load import load_spec
from everstep.config.spec import JobSpec
from everstep.errors import ConfigError, UserError
from everstep.platforms.kubernetes.api_client import ApiReason, ApiServerError, ClusterClient
from everstep.platforms.kubernetes.crds import definitions
from everstep.platforms.kubernetes.job import out_of, settings_of
from everstep.platforms.kubernetes.kinds import (
    API_VERSION,
    CONTAINER,
    JOB_LABEL,
    OVER,
    ROLE_LABEL,
    Kind,
    Object,
    Place,
    dropped,
    name_of,
)

PREFIX: Final = "k8s:"
_MODES: Final = {"ps": "ParameterServer", "allreduce": "AllReduce", "pipeline": "Pipeline"}
_SIZES: Final = ("name", "mode", "stages", "workers", "ps", "min_workers", "max_workers", "min_ps", "max_ps", "parity")
_HERE: Final = ("script", "args", "run_dir", "bind", "files_port", "capacity", "nodes", "master_alone")


class ClusterJob(NamedTuple):
    """Is where a job is: ``k8s:JOB`` or ``k8s:NAMESPACE/JOB``."""

    client: ClusterClient
    namespace: str
    name: str

    def read(self) -> Object:
        """Return the ElasticJob. Raises ConfigError: there is none."""
        try:
            return self.client.get(Kind.JOB, self.namespace, self.name)
        except ApiServerError as error:
            if error.reason is not ApiReason.NOT_FOUND:
                raise
            raise ConfigError(f"{PREFIX}{self.namespace}/{self.name}: there is no such ElasticJob") from None


def in_cluster(run_dir: Path) -> bool:
    """Return whether a RUN_DIR is the name of a job in a cluster."""
    return str(run_dir).startswith(PREFIX)


def find(run_dir: Path, context: str = "") -> ClusterJob:
    """Return where a job is. Raises ConfigError, PlatformError."""
    from everstep.platforms.kubernetes.lightkube_client import LightkubeClient

    client = LightkubeClient.connect(context)
    namespace, _, name = str(run_dir).removeprefix(PREFIX).rpartition("/")
    if not name:
        raise ConfigError(f"{run_dir}: expected {PREFIX}JOB or {PREFIX}NAMESPACE/JOB")
    return ClusterJob(client, namespace or client.namespace, name)


# ------------------------------------------------------------ submit


def submit(file: Path, context: str, namespace: str, image: str, out: str = "") -> None:
    """Create or change the ElasticJob that a job.yaml describes: an ElasticJob, or the settings of ``everstep run``.
    ``out``: where what it leaves is written, in place of its ``spec.out``. Raises ConfigError: another job has its
    name, or the cluster does not know what an ElasticJob is."""
    from everstep.platforms.kubernetes.lightkube_client import LightkubeClient

    job = read_job(file, image)
    client = LightkubeClient.connect(context)
    where = namespace or job["metadata"].get("namespace") or client.namespace
    job["metadata"]["namespace"] = where
    if out:
        job["spec"]["out"] = out
    settings_of(job)
    refuse_other_job(ClusterJob(client, where, name_of(job)), job)
    try:
        if unknown := dropped(job["spec"], client.apply(Kind.JOB, where, job, force=False, dry=True)["spec"], "spec"):
            raise ConfigError(unknown_words(unknown))
        done = client.apply(Kind.JOB, where, job, force=False)
    except ApiServerError as error:
        if error.reason is ApiReason.NOT_FOUND and not knows_jobs(client, where):
            raise ConfigError(
                f"the cluster knows no ElasticJob: everstep crd print | kubectl apply -f - ({error})"
            ) from None
        raise
    made = "created" if int(done["metadata"].get("generation", 1)) == 1 else "changed"
    click.echo(f"elasticjob/{name_of(job)} {made} in {where}; everstep status k8s:{name_of(job)}")


def unknown_words(paths: list[str]) -> str:
    """Return what is said of fields that a cluster would drop: nobody knows them, or its CRDs are older."""
    schema = definitions()[0]["spec"]["versions"][0]["schema"]["openAPIV3Schema"]

    def is_ours(path: str) -> bool:
        here = schema
        for name in path.split("."):
            here = (here.get("properties") or {}).get(name) or {}
        return bool(here)

    ours = [path for path in paths if is_ours(path)]
    if strange := [path for path in paths if path not in ours]:
        return f"{strange[0]}: an ElasticJob has no such field; everstep crd print lists them"
    return (
        f"{ours[0]}: the cluster's CRDs are of another version, and do not know it: "
        "everstep crd print | kubectl apply -f -"
    )


def refuse_other_job(there: ClusterJob, job: Object) -> None:
    """Raise ConfigError if a job of this name trains another script: what is submitted is no change of it."""
    try:
        before = there.client.get(Kind.JOB, there.namespace, there.name)
    except ApiServerError as error:
        if error.reason in (ApiReason.NOT_FOUND, ApiReason.FORBIDDEN):  # (who may not read it may still change it)
            return
        raise
    old, new = (str((each.get("spec") or {}).get("script", "")) for each in (before, job))
    if old != new:
        raise ConfigError(
            f"elasticjob/{there.name} in {there.namespace} is another job: script {old!r}, not {new!r}; give yours "
            "another name, or delete that one"
        )


def knows_jobs(client: ClusterClient, namespace: str) -> bool:
    """Return whether a cluster has the resource ElasticJob. (Of a namespace that is not there it lists none.)"""
    try:
        client.list_all(Kind.JOB, namespace)
    except ApiServerError as error:
        return error.reason is not ApiReason.NOT_FOUND
    return True


def read_job(file: Path, image: str) -> Object:
    """Return the ElasticJob of a file. Raises ConfigError."""
    try:
        found = yaml.safe_load(file.read_text())
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot read {file}: {error}") from None
    except yaml.YAMLError as error:
        raise ConfigError(f"{file} is no YAML: {' '.join(str(error).split())}") from None
    if isinstance(found, dict) and found.get("kind") == Kind.JOB:
        if found.get("apiVersion") != API_VERSION:
            raise ConfigError(f"{file}: apiVersion {found.get('apiVersion')!r}: expected {API_VERSION}")
        if not isinstance(found.get("metadata"), dict) or not isinstance(found.get("spec"), dict):
            raise ConfigError(f"{file}: an ElasticJob needs metadata and spec")
        if not isinstance(found["spec"].get("worker"), dict) or not found["metadata"].get("name"):
            raise ConfigError(f"{file}: an ElasticJob needs metadata.name and spec.worker")
        return found
    spec, origins = load_spec(file, {}, {})
    if not image:
        raise ConfigError(f"{file}: has the settings of everstep run; give --image, in which the script is")
    return elastic_job(spec, origins, image)


def elastic_job(spec: JobSpec, origins: dict[str, str], image: str) -> Object:
    """Return the ElasticJob of a job.yaml: what has a field of its own there, and the rest as settings."""
    given = {name: getattr(spec, name) for name, origin in origins.items() if origin != "default"}
    settings = {n: list(v) if isinstance(v, tuple) else v for n, v in given.items() if n not in (*_SIZES, *_HERE)}
    template = {"spec": {"containers": [{"name": CONTAINER, "image": image}]}}
    worker: Object = {"replicas": spec.workers, "template": template}
    mode = "Hybrid" if spec.mode == "allreduce" and spec.ps else _MODES[spec.mode]
    body: Object = {"mode": mode, "script": spec.script, "args": list(spec.args), "worker": worker}
    if spec.stages > 1:
        body["stages"] = spec.stages
    if spec.ps:
        body["ps"] = {"replicas": spec.ps, "template": template}
    for role in ("workers", "ps"):
        for bound in ("min", "max"):
            if given.get(f"{bound}_{role}"):
                body["worker" if role == "workers" else role][f"{bound}Replicas"] = given[f"{bound}_{role}"]
    if spec.parity not in ("", "0"):
        data, _, parity = spec.parity.partition("+")
        body["psProtection"] = {"strategy": "Parity", "dataShards": int(data), "parityShards": int(parity)}
    if settings:
        body["settings"] = settings
    meta = {"name": spec.name.lower().replace("_", "-").replace(".", "-")}
    return {"apiVersion": API_VERSION, "kind": Kind.JOB.value, "metadata": meta, "spec": body}


# ------------------------------------------------------------ reading and scaling


def status(run_dir: Path, as_json: bool) -> None:
    """Show a job of a cluster."""
    at = find(run_dir)
    job = at.read()
    if as_json:
        click.echo(json.dumps({"metadata": {"name": at.name, "namespace": at.namespace}, **_shown(job)}))
        return
    for line in status_lines(job):
        click.echo(line)


def top(run_dir: Path, once: bool, as_json: bool) -> None:
    """Show who is slow and why, as the operator wrote it last, until Ctrl-C or the job's end; ``once``: one picture."""
    from everstep.cli.top import EVERY_S

    at, shown = find(run_dir), ""
    while True:
        job = at.read()
        speed = (job.get("status") or {}).get("speed") or {}
        if as_json:
            click.echo(json.dumps(speed))
            return
        if once or speed.get("time", "-") != shown:
            shown = str(speed.get("time", "-"))
            for line in top_lines(job):
                click.echo(line)
        if once:
            return
        if (job.get("status") or {}).get("phase") in tuple(OVER):
            click.echo("the job has ended")
            return
        time.sleep(EVERY_S)


def top_lines(job: Object) -> list[str]:
    """Return the table of members, slowest first, as plain text."""
    from everstep.cli.top import aligned

    speed = (job.get("status") or {}).get("speed") or {}
    if not speed.get("words"):
        return [f"{name_of(job)}: nothing is known yet of how fast its members are; everstep status k8s:{name_of(job)}"]
    members = speed.get("members") or []
    return [f"{speed.get('time')}  {speed['words']}", *aligned(members)]


def _shown(job: Object) -> Object:
    return {"spec": job["spec"], "status": job.get("status") or {}}


def status_lines(job: Object) -> list[str]:
    """Return what people read of a job."""
    status: dict[str, Any] = job.get("status") or {}
    progress = status.get("progress") or {}
    head = f"{name_of(job)}  {job['spec'].get('mode')}  {status.get('phase', 'not seen by an operator yet')}"
    if progress:
        head += f"  {progress.get('samples', 0):,} samples"
        head += f" ({progress['percent']} %)" if "percent" in progress else ""
    lines = [head]
    master = status.get("master") or {}
    if master:
        lines.append(f"master: {'ready' if master.get('ready') else 'not ready'}, {master.get('restarts', 0)} failures")
    for role in ("worker", "ps"):
        of = status.get(role)
        if of:
            lines.append(
                f"{role}: {of['ready']} of {of['desired']} ready, {of['pending']} pending, {of['draining']} leaving, "
                f"{of['restarts']} failures"
            )
    for condition in status.get("conditions") or []:
        if condition["status"] == "True" and condition["type"] != "Ready":
            lines.append(f"{condition['type']}: {condition.get('message') or condition.get('reason')}")
    if status.get("cost"):
        lines.append(cost_lines(job)[0])
    if (status.get("checkpoint") or {}).get("number"):
        lines.append(f"checkpoint {status['checkpoint']['number']} of {status['checkpoint']['time']}")
    for each in (status.get("disruptions") or [])[-5:]:
        lines.append(f"{each.get('noticeTime')}: {each['pod']} goes from {each.get('node')} ({each['source']})")
    return lines


def out_at(run_dir: Path) -> str:
    """Return where what a job of a cluster leaves is written. Raises ConfigError: nowhere."""
    out = out_of(find(run_dir).read())
    if not out:
        raise ConfigError(f"{run_dir}: has no spec.out, to which its run would be written (everstep submit --out URL)")
    return out


def pods_of(at: ClusterJob) -> list[Object]:
    """Return a job's pods."""
    found, _ = at.client.list_all(Kind.POD, at.namespace)
    return [pod for pod in found if (pod["metadata"].get("labels") or {}).get(JOB_LABEL) == at.name]


def logs(run_dir: Path, member: str) -> None:
    """Print the end of what the pods of a job have printed, or those of a role or a pod."""
    at = find(run_dir)
    at.read()
    chosen = [
        pod for pod in pods_of(at) if not member or member in (name_of(pod), pod["metadata"]["labels"].get(ROLE_LABEL))
    ]
    if not chosen:
        places = ", ".join(place.value for place in Place)
        raise UserError(f"{run_dir}: no pod of {member or 'the job'} is there; give {places}, or the name of a pod")
    for pod in chosen:
        for line in at.client.logs(at.namespace, name_of(pod), 100).splitlines():
            click.echo(f"{name_of(pod)}: {line}")


def scale(run_dir: Path, workers: int | None, ps: int | None) -> None:
    """Write how many pods a job wants. The server checks the bounds of the job."""
    wanted = {role: count for role, count in (("worker", workers), ("ps", ps)) if count is not None}
    if not wanted:
        raise ConfigError("nothing to scale: give --workers N, --ps N or both")
    at = find(run_dir)
    job = at.read()
    if "ps" in wanted and "ps" not in job["spec"]:
        raise ConfigError(f"{run_dir}: this job of mode {job['spec'].get('mode')} has no ps")
    body = {"spec": {role: {"replicas": count} for role, count in wanted.items()}}
    try:
        at.client.patch(Kind.JOB, at.namespace, at.name, body)
    except ApiServerError as error:
        if error.reason is not ApiReason.INVALID:
            raise
        raise UserError(f"{run_dir}: {error}") from None
    words = {"worker": "workers", "ps": "ps"}
    click.echo(" and ".join(f"{count} {words[role]}" for role, count in wanted.items()) + " wanted")


def suspend(run_dir: Path, on: bool, budget: float | None = None) -> None:
    """Suspend a job of a cluster, or let it go on. ``budget``: what it may spend from now on in all; 0: any sum."""
    at = find(run_dir)
    spec: Object = {"suspend": on}
    if budget is not None:
        if budget < 0:
            raise ConfigError(f"--budget {budget:g}: give a sum above 0, or 0 for any")
        spec["cost"] = {"budget": f"{budget:.6f}".rstrip("0").rstrip(".") if budget else None}
    at.client.patch(Kind.JOB, at.namespace, at.name, {"spec": spec})
    click.echo("the job is being suspended" if on else "the job goes on")


def cost(run_dir: Path, as_json: bool) -> None:
    """Show what a job of a cluster has cost, by what its operator has counted."""
    job = find(run_dir).read()
    costs = (job.get("status") or {}).get("cost") or {}
    if as_json:
        click.echo(json.dumps({"cost": costs, "budget": (job["spec"].get("cost") or {}).get("budget")}))
        return
    for line in cost_lines(job):
        click.echo(line)


def cost_lines(job: Object) -> list[str]:
    """Return what people read of a job's cost."""
    costs, asked = (job.get("status") or {}).get("cost") or {}, job["spec"].get("cost") or {}
    if not costs:
        return ["nothing is counted: the job names no prices (spec.worker.price.onDemandHourly), or no pod ran yet"]
    money = asked.get("currency", "USD")
    pods_s = int(costs.get("spotPodSeconds", 0)) + int(costs.get("onDemandPodSeconds", 0))
    lines = [
        f"spent {costs.get('spent')} {money} up to {costs.get('time')}: {pods_s / 3600:.2f} pod hours, "
        f"{int(costs.get('spotPodSeconds', 0)) / 3600:.2f} of them on spot machines",
        f"on demand it would have been {costs.get('onDemandEquivalent')} {money}: {costs.get('savedPercent')} % saved",
    ]
    if costs.get("unpricedPodSeconds"):
        lines.append(f"not in it: {int(costs['unpricedPodSeconds']) / 3600:.2f} pod hours on machines without a price")
    samples = (job["status"].get("progress") or {}).get("samples", 0)
    if samples:
        lines.append(f"a million samples cost {1e6 * float(costs.get('spent', 0)) / samples:.4f} {money}")
    if asked.get("budget"):
        lines.append(f"budget: {asked['budget']} {money}; the job is suspended before it has spent that")
    return lines


def explain(run_dir: Path) -> None:
    """Show the conditions of a job and why its master's decisions are elsewhere."""
    at = find(run_dir)
    job = at.read()
    for condition in (job.get("status") or {}).get("conditions") or []:
        words = f"{condition.get('reason')}: {condition.get('message') or ''}".rstrip(": ")
        click.echo(f"{condition.get('lastTransitionTime')}  {condition['type']}={condition['status']}  {words}")
    for line in status_lines(job):
        click.echo(line)
