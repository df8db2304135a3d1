"""Has names that everything about Kubernetes shares: the API group, kinds, labels, roles, states."""

from __future__ import annotations

from collections.abc import Collection
from enum import StrEnum
from typing import Any, Final

GROUP: Final = "everstep.io"
VERSION: Final = "v1alpha1"
API_VERSION: Final = f"{GROUP}/{VERSION}"
MANAGER: Final = "everstep-operator"
"""Field manager of all that the operator applies."""

JOB_LABEL: Final = f"{GROUP}/job"
ROLE_LABEL: Final = f"{GROUP}/role"
SLOT_LABEL: Final = f"{GROUP}/slot"
FALLBACK_LABEL: Final = f"{GROUP}/on-demand"
"""Of a pod that may stand on any machine, since no spot machine was to be had in time."""
OUT_ROLE: Final = "out"
"""Role of the pod that writes what a job leaves to ``spec.out``."""
FINALIZER: Final = f"{GROUP}/out"
"""Of a job with ``spec.out``: it goes once that is written."""
CONTAINER: Final = "main"
"""The container of a pod that runs everstep."""
MASTER_PORT: Final = 7071
FILES_PORT: Final = 7072

Object = dict[str, Any]
"""An object as the API server gives it."""


class Kind(StrEnum):
    """Is a kind of object that the operator reads or writes."""

    JOB = "ElasticJob"
    SCALE_OUT = "ScaleOut"
    SCALE_IN = "ScaleIn"
    POD = "Pod"
    NODE = "Node"
    SERVICE = "Service"
    SECRET = "Secret"
    VOLUME_CLAIM = "PersistentVolumeClaim"
    BUDGET = "PodDisruptionBudget"
    LEASE = "Lease"
    EVENT = "Event"
    QUOTA = "ResourceQuota"
    VOLCANO_GROUP = "PodGroup.scheduling.volcano.sh"
    PLUGINS_GROUP = "PodGroup.scheduling.x-k8s.io"
    NATIVE_GROUP = "PodGroup.scheduling.k8s.io"  # (three kinds of one name: a cluster may have all)


class Place(StrEnum):
    """Says what a pod is for."""

    MASTER = "master"
    PS = "ps"
    WORKER = "worker"


class Gang(StrEnum):
    """Says which scheduler starts a job's pods together: ``spec.scheduling.gang``."""

    NONE = "None"
    VOLCANO = "Volcano"
    SCHEDULER_PLUGINS = "SchedulerPlugins"
    NATIVE = "Native"


class JobPhase(StrEnum):
    """Says where a job stands."""

    PENDING = "Pending"
    WAITING = "Waiting"
    RUNNING = "Running"
    SCALING = "Scaling"
    RECOVERING = "Recovering"
    SUSPENDING = "Suspending"
    SUSPENDED = "Suspended"
    SUCCEEDED = "Succeeded"
    FAILED = "Failed"


OVER: Final = (JobPhase.SUCCEEDED, JobPhase.FAILED)


class RequestPhase(StrEnum):
    """Says where a ScaleOut or ScaleIn stands."""

    PENDING = "Pending"
    SCALING = "Scaling"
    SUCCEEDED = "Succeeded"
    FAILED = "Failed"


class Condition(StrEnum):
    """Is a condition of a job."""

    READY = "Ready"
    RECLAIM_NOTICE = "ReclaimNotice"
    SUSPENDING = "Suspending"
    SUSPENDED = "Suspended"
    QUOTA_EXCEEDED = "QuotaExceeded"
    FORBIDDEN = "Forbidden"
    INVALID_SPEC = "InvalidSpec"
    TEMPLATE_INVALID = "TemplateInvalid"
    BUDGET_SPENT = "BudgetSpent"
    WAITING = "Waiting"
    GANG_REFUSED = "GangRefused"
    CANNOT_START = "CannotStart"
    PODS_FAIL = "PodsFail"
    OTHER_VERSION = "OtherVersion"
    FIELDS_IGNORED = "FieldsIgnored"
    OUT_WRITTEN = "OutWritten"
    OUT_NOT_WRITTEN = "OutNotWritten"
    COMPLETE = "Complete"
    FAILED = "Failed"


def name_of(thing: Object) -> str:
    """Return an object's name."""
    return str(thing["metadata"]["name"])


def dropped(sent: Object, kept: Object, at: str = "") -> list[str]:
    """Return the paths of fields that were sent to a server and are not in what it keeps: it does not know them."""
    out = []
    for name, value in sent.items():
        path = f"{at}.{name}" if at else name
        if name not in kept:
            out += [path] if value not in ({}, [], None) else []
        elif isinstance(value, dict) and isinstance(kept[name], dict):
            out += dropped(value, kept[name], path)
    return out


def without(thing: Object, paths: Collection[str], at: str = "") -> Object:
    """Return an object without the fields at some paths."""
    out = {}
    for name, value in thing.items():
        path = f"{at}.{name}" if at else name
        if path not in paths:
            out[name] = without(value, paths, path) if isinstance(value, dict) else value
    return out


def uid_of(thing: Object) -> str:
    """Return an object's uid; "" if it has none yet."""
    return str(thing["metadata"].get("uid", ""))


def owner_uid(thing: Object) -> str:
    """Return the uid of the object that controls this one; "": none does."""
    owners = thing["metadata"].get("ownerReferences") or ()
    return next((str(o.get("uid", "")) for o in owners if o.get("controller")), "")


def is_leaving(thing: Object) -> bool:
    """Return whether an object is being deleted."""
    return bool(thing["metadata"].get("deletionTimestamp"))
