"""Makes the objects of a job: pods, service, volume claim, budgets against disruption. Pure."""

from __future__ import annotations

import base64
import copy
import json
from collections.abc import Mapping
from typing import Any, Final

from everstep.platforms.kubernetes.gangs import enroll
from everstep.platforms.kubernetes.job import RUN_DIR, has_ps, main_container, out_of, role_spec
from everstep.platforms.kubernetes.kinds import (
    API_VERSION,
    CONTAINER,
    FALLBACK_LABEL,
    FILES_PORT,
    JOB_LABEL,
    MASTER_PORT,
    OUT_ROLE,
    ROLE_LABEL,
    SLOT_LABEL,
    Kind,
    Object,
    Place,
    name_of,
    uid_of,
)

LEAVE_S: Final = 60
"""Grace period of pods with members: an agent that is told to go empties its node first."""
MASTER_LEAVE_S: Final = 10
UNREACHABLE_S: Final = 30
"""So long a pod stays on a node that is not heard of (300 by the cluster's default)."""
OUT_LIMIT_S: Final = 3600
"""So long the pod may take that writes what a job leaves."""
SECRET_KEY: Final = "secret"
LAST_WORDS: Final = "FallbackToLogsOnError"
"""Has the node put the end of the log of a container that failed into the pod's status."""
_VOLUME: Final = "everstep-run"


def owner_of(job: Object) -> Object:
    """Return the reference by which the cluster deletes an object with its job."""
    return {
        "apiVersion": API_VERSION,
        "kind": Kind.JOB.value,
        "name": name_of(job),
        "uid": uid_of(job),
        "controller": True,
        "blockOwnerDeletion": True,
    }


def _meta(job: Object, name: str, labels: Mapping[str, str] = {}) -> Object:
    return {
        "name": name,
        "namespace": job["metadata"]["namespace"],
        "labels": {JOB_LABEL: name_of(job), **labels},
        "ownerReferences": [owner_of(job)],
    }


def selector_of(job: Object, place: Place) -> str:
    """Return the selector of a job's pods of one kind, as text."""
    return f"{JOB_LABEL}={name_of(job)},{ROLE_LABEL}={place.value}"


def secret_name(job: Object) -> str:
    """Return the name of a job's Secret."""
    return f"{name_of(job)}-secret"


def claim_name(job: Object) -> str:
    """Return the name of the claim of the master's volume."""
    return f"{name_of(job)}-master"


def master_address(job: Object) -> str:
    """Return HOST:PORT at which members find the master, wherever its pod is."""
    name = name_of(job)
    return f"{name}-master.{name}.{job['metadata']['namespace']}.svc:{MASTER_PORT}"


def service(job: Object) -> Object:
    """Return the headless service: it gives pods their names, also before they are ready."""
    return {
        "apiVersion": "v1",
        "kind": Kind.SERVICE.value,
        "metadata": _meta(job, name_of(job)),
        "spec": {
            "clusterIP": "None",
            "publishNotReadyAddresses": True,
            "selector": {JOB_LABEL: name_of(job)},
            "ports": [
                {"name": "master", "port": MASTER_PORT, "protocol": "TCP"},
                {"name": "files", "port": FILES_PORT, "protocol": "TCP"},
            ],
        },
    }


def secret(job: Object, text: str) -> Object:
    """Return the Secret that all processes of the job share."""
    return {
        "apiVersion": "v1",
        "kind": Kind.SECRET.value,
        "metadata": _meta(job, secret_name(job)),
        "type": "Opaque",
        "stringData": {SECRET_KEY: text},
    }


def secret_text(thing: Object) -> str:
    """Return what the Secret of a job holds; "": nothing that could be read."""
    try:
        return base64.b64decode((thing.get("data") or {}).get(SECRET_KEY, ""), validate=True).decode()
    except ValueError:
        return ""


def claim(job: Object) -> Object:
    """Return the claim of the volume that has the master's journal."""
    volume = role_spec(job, Place.MASTER).get("volume") or {}
    spec: Object = {
        "accessModes": ["ReadWriteOnce"],
        "resources": {"requests": {"storage": volume.get("size", "1Gi")}},
    }
    if volume.get("storageClassName"):
        spec["storageClassName"] = volume["storageClassName"]
    return {
        "apiVersion": "v1",
        "kind": Kind.VOLUME_CLAIM.value,
        "metadata": _meta(job, claim_name(job)),
        "spec": spec,
    }


def budgets(job: Object) -> list[Object]:
    """Return the budgets: one master or ps at a time may be evicted."""
    places = [Place.MASTER, *([Place.PS] if has_ps(job["spec"]) else [])]
    return [
        {
            "apiVersion": "policy/v1",
            "kind": Kind.BUDGET.value,
            "metadata": _meta(job, f"{name_of(job)}-{place.value}"),
            "spec": {
                "maxUnavailable": 1,
                "selector": {"matchLabels": {JOB_LABEL: name_of(job), ROLE_LABEL: place.value}},
            },
        }
        for place in places
    ]


def pod_name(job: Object, place: Place, slot: int, serial: int) -> str:
    """Return the name of a pod. ``serial`` counts all pods of the job, so no name comes twice."""
    return f"{name_of(job)}-{place.value}-{slot}-{serial}"


def pod(
    job: Object, place: Place, slot: int, serial: int, settings: Mapping[str, Any], on_demand: bool = False
) -> Object:
    """Return the pod that fills a slot. ``on_demand``: it need not be on a spot machine, whatever the job prefers."""
    made = _pod(job, place, slot, serial, settings, on_demand)
    enroll(job, place, made["metadata"], made["spec"])
    return made


def _pod(
    job: Object, place: Place, slot: int, serial: int, settings: Mapping[str, Any], on_demand: bool = False
) -> Object:
    name = pod_name(job, place, slot, serial)
    template = copy.deepcopy(_template(job, place))
    given = template.get("metadata") or {}
    spec: Object = template.get("spec") or {}
    meta = _meta(job, name)
    meta["labels"] = {
        **(given.get("labels") or {}),
        JOB_LABEL: name_of(job),
        ROLE_LABEL: place.value,
        SLOT_LABEL: str(slot),
        **({FALLBACK_LABEL: "true"} if on_demand else {}),
    }
    if given.get("annotations"):
        meta["annotations"] = given["annotations"]
    container = main_container(template)
    container["name"] = container.get("name") or CONTAINER
    container["command"] = _command(job, place)
    container.pop("args", None)
    container.setdefault("terminationMessagePolicy", LAST_WORDS)
    container["env"] = [*(container.get("env") or []), *_env(job, place, settings)]
    container["volumeMounts"] = [*(container.get("volumeMounts") or []), {"name": _VOLUME, "mountPath": RUN_DIR}]
    spec["volumes"] = [*(spec.get("volumes") or []), {"name": _VOLUME, **_volume(job, place)}]
    spec["restartPolicy"] = "Never"
    spec["hostname"] = f"{name_of(job)}-master" if place is Place.MASTER else name
    spec["subdomain"] = name_of(job)
    spec.setdefault("terminationGracePeriodSeconds", MASTER_LEAVE_S if place is Place.MASTER else LEAVE_S)
    spec.setdefault("automountServiceAccountToken", False)
    spec["tolerations"] = [*(spec.get("tolerations") or []), *_tolerations()]
    _secure(spec)
    _schedule(job, place, spec, on_demand)
    return {"apiVersion": "v1", "kind": Kind.POD.value, "metadata": meta, "spec": spec}


def out_pod(job: Object, serial: int) -> Object:
    """Return the pod that writes what a job leaves to ``spec.out``. It has the image, the rights and the mounts of the
    master, and the master's volume."""
    made = _pod(job, Place.MASTER, 0, serial, {})
    spec, kept = made["spec"], ("name", "namespace", "uid")
    made["metadata"]["name"] = f"{name_of(job)}-{OUT_ROLE}-{serial}"
    made["metadata"]["labels"][ROLE_LABEL] = OUT_ROLE
    for field in ("hostname", "subdomain"):
        del spec[field]
    spec["activeDeadlineSeconds"] = OUT_LIMIT_S
    about = {
        "metadata": {field: job["metadata"][field] for field in kept if field in job["metadata"]},
        "spec": {
            name: {k: v for k, v in part.items() if k != "template"} if isinstance(part, dict) else part
            for name, part in job["spec"].items()
        },
        "status": job.get("status") or {},
    }
    text = _plain_json(about)
    container = main_container({"spec": spec})
    container["command"] = ["everstep", "pod", "out", "--run-dir", f"{RUN_DIR}/job", "--to", out_of(job)]
    ours = ("EVERSTEP_POD_SETTINGS", "EVERSTEP_POD_UNSUSPEND", "EVERSTEP_POD_SECRET")
    container["env"] = [each for each in container["env"] if each["name"] not in ours]
    container["env"].append({"name": "EVERSTEP_POD_JOB", "value": text})
    return made


def _template(job: Object, place: Place) -> Object:
    own: Object = role_spec(job, place).get("template") or {}
    if main_container(own).get("image"):
        return own
    worker: Object = role_spec(job, Place.WORKER).get("template") or {}
    kept = ("image", "imagePullPolicy", "env", "envFrom", "volumeMounts", "workingDir", "securityContext", "name")
    container = {k: v for k, v in main_container(worker).items() if k in kept}
    given = worker.get("spec") or {}
    shared = ("volumes", "imagePullSecrets", "securityContext", "serviceAccountName")
    return {"spec": {**{k: given[k] for k in shared if k in given}, "containers": [container]}}


def _command(job: Object, place: Place) -> list[str]:
    words = ["everstep", "pod"]
    if place is Place.MASTER:
        return [*words, "master", "--run-dir", f"{RUN_DIR}/job", "--host", "$(POD_IP)"]
    words += ["agent", "--join", master_address(job), "--role", place.value, "--run-dir", RUN_DIR]
    return [*words, "--node", "$(POD_NAME)", "--host", "$(POD_IP)", "--machine", "$(NODE_NAME)"]


def _env(job: Object, place: Place, settings: Mapping[str, Any]) -> list[Object]:
    fields = {"POD_NAME": "metadata.name", "POD_IP": "status.podIP", "NODE_NAME": "spec.nodeName"}
    env: list[Object] = [{"name": k, "valueFrom": {"fieldRef": {"fieldPath": v}}} for k, v in fields.items()]
    key = {"name": secret_name(job), "key": SECRET_KEY}
    env.append({"name": "EVERSTEP_POD_SECRET", "valueFrom": {"secretKeyRef": key}})
    if place is Place.MASTER:
        env.append({"name": "EVERSTEP_POD_SETTINGS", "value": _plain_json(settings)})
        env.append({"name": "EVERSTEP_POD_UNSUSPEND", "value": "" if job["spec"].get("suspend") else "1"})
        if out := out_of(job):
            env.append({"name": "EVERSTEP_POD_OUT", "value": out})
            env.append({"name": "EVERSTEP_POD_UID", "value": uid_of(job)})
    return env


def _plain_json(value: Any) -> str:
    """Return JSON in which the cluster finds no $(NAME) that it would expand."""
    return json.dumps(value, sort_keys=True).replace("$", "\\u0024")


def _volume(job: Object, place: Place) -> Object:
    if place is Place.MASTER:
        return {"persistentVolumeClaim": {"claimName": claim_name(job)}}
    return {"emptyDir": {}}


def _tolerations() -> list[Object]:
    return [
        {
            "key": f"node.kubernetes.io/{state}",
            "operator": "Exists",
            "effect": "NoExecute",
            "tolerationSeconds": UNREACHABLE_S,
        }
        for state in ("not-ready", "unreachable")
    ]


def _secure(spec: Object) -> None:
    """Return what the restricted level of pod security demands, where the template does not say otherwise."""
    context = spec.setdefault("securityContext", {})
    context.setdefault("runAsNonRoot", True)
    context.setdefault("runAsUser", 1000)
    context.setdefault("fsGroup", 1000)
    context.setdefault("seccompProfile", {"type": "RuntimeDefault"})
    for container in [*(spec.get("containers") or []), *(spec.get("initContainers") or [])]:
        own = container.setdefault("securityContext", {})
        own.setdefault("allowPrivilegeEscalation", False)
        own.setdefault("capabilities", {"drop": ["ALL"]})


def only_spot(job: Object, place: Place) -> bool:
    """Return whether pods of a kind are put on spot machines and nowhere else."""
    return _spot_policy(job, place) == "SpotOnly" and bool((job["spec"].get("cost") or {}).get("spotNodeSelector"))


def _spot_policy(job: Object, place: Place) -> str:
    """Return how a kind of pods stands to spot machines; "Never": it belongs on machines that stay."""
    spot = job["spec"].get("spot") or {}
    if place.value in (spot.get("reliableRoles") or []):
        return "Never"
    return str(spot.get("policy", "OnDemandOnly")) if place.value in (spot.get("roles") or ["worker"]) else ""


def _schedule(job: Object, place: Place, spec: Object, on_demand: bool) -> None:
    scheduling = job["spec"].get("scheduling") or {}
    for field in ("priorityClassName", "schedulerName"):
        if scheduling.get(field):
            spec.setdefault(field, scheduling[field])
    if place is not Place.MASTER:
        spec.setdefault(
            "topologySpreadConstraints",
            [
                {
                    "maxSkew": 1,
                    "topologyKey": "kubernetes.io/hostname",
                    "whenUnsatisfiable": "ScheduleAnyway",
                    "labelSelector": {"matchLabels": {JOB_LABEL: name_of(job), ROLE_LABEL: place.value}},
                }
            ],
        )
    labels = (job["spec"].get("cost") or {}).get("spotNodeSelector") or {}
    policy = _spot_policy(job, place)
    if not labels or on_demand:
        return
    if policy == "SpotOnly":
        spec["nodeSelector"] = {**(spec.get("nodeSelector") or {}), **labels}
        return
    if policy not in ("Never", "PreferSpot"):
        return
    terms = [{"key": k, "operator": "NotIn" if policy == "Never" else "In", "values": [v]} for k, v in labels.items()]
    affinity = spec.setdefault("affinity", {}).setdefault("nodeAffinity", {})
    if policy == "PreferSpot":
        prefer = {"weight": 100, "preference": {"matchExpressions": terms}}
        affinity.setdefault("preferredDuringSchedulingIgnoredDuringExecution", []).append(prefer)
    else:  # a spot machine has all the labels: one that lacks any will do
        given = affinity.get("requiredDuringSchedulingIgnoredDuringExecution") or {"nodeSelectorTerms": [{}]}
        both = [
            {**other, "matchExpressions": [*(other.get("matchExpressions") or []), term]}
            for other in given["nodeSelectorTerms"]
            for term in terms
        ]
        affinity["requiredDuringSchedulingIgnoredDuringExecution"] = {"nodeSelectorTerms": both}
