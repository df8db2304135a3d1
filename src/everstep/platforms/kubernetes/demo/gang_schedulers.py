"""Plays the schedulers that place a group of pods together or not at all: their kinds, and when a group may start."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final, NamedTuple

from everstep.platforms.kubernetes.demo.api_server import CRDS, ApiServer, with_metadata
from everstep.platforms.kubernetes.demo.object_store import ApiResource
from everstep.platforms.kubernetes.kinds import Gang, Object, name_of

DEFAULT: Final = "default-scheduler"
_COUNT: Final[Object] = {"type": "integer", "format": "int32", "minimum": 1}
_TEXT: Final[Object] = {"type": "string"}
_GANG: Final[Object] = {"type": "object", "required": ["minCount"], "properties": {"minCount": _COUNT}}
_TASKS: Final[Object] = {"type": "object", "additionalProperties": {"type": "integer", "format": "int32"}}
_POLICY: Final[Object] = {
    "type": "object",
    "properties": {"gang": _GANG, "basic": {"type": "object"}},
    "x-kubernetes-validations": [
        {"rule": "has(self.gang) != has(self.basic)", "message": "exactly one policy"},
        {"rule": "self == oldSelf", "message": "field is immutable"},
    ],
}


class _Played(NamedTuple):
    """Is one scheduler: its kind, the fields of the spec, and by what a pod names it and its group."""

    group: str
    version: str
    scheduler: str
    fields: Mapping[str, Object]
    group_of: Callable[[Object], Any]


PLAYED: Final = {
    Gang.VOLCANO: _Played(
        "scheduling.volcano.sh",
        "v1beta1",
        "volcano",
        {"minMember": _COUNT, "minTaskMember": _TASKS, "queue": _TEXT, "priorityClassName": _TEXT},
        lambda pod: (pod["metadata"].get("annotations") or {}).get("scheduling.k8s.io/group-name"),
    ),
    Gang.SCHEDULER_PLUGINS: _Played(
        "scheduling.x-k8s.io",
        "v1alpha1",
        "scheduler-plugins-scheduler",
        {"minMember": _COUNT, "scheduleTimeoutSeconds": {"type": "integer", "format": "int32"}},
        lambda pod: (pod["metadata"].get("labels") or {}).get("scheduling.x-k8s.io/pod-group"),
    ),
    Gang.NATIVE: _Played(
        "scheduling.k8s.io",
        "v1alpha2",
        DEFAULT,
        {"schedulingPolicy": _POLICY},
        lambda pod: (pod["spec"].get("schedulingGroup") or {}).get("podGroupName"),
    ),
}


def install(server: ApiServer, gang: Gang) -> None:
    """Have a cluster know a scheduler's kind of PodGroup. A cluster here has one of them at most."""
    if gang is Gang.NONE:
        return
    played = PLAYED[gang]
    spec: Object = {"type": "object", "properties": dict(played.fields)}
    schema: Object = {"type": "object", "properties": {"apiVersion": _TEXT, "kind": _TEXT, "spec": spec}}
    if gang is Gang.NATIVE:  # (its kind is the server's own)
        of = ApiResource(played.group, played.version, "podgroups", "PodGroup", schema=with_metadata(schema))
        server.resources[of.group, of.version, of.plural] = of
        return
    names = {"kind": "PodGroup", "listKind": "PodGroupList", "plural": "podgroups", "singular": "podgroup"}
    version: Object = {"name": played.version, "served": True, "storage": True, "schema": {"openAPIV3Schema": schema}}
    about = {"group": played.group, "scope": "Namespaced", "names": names, "versions": [version]}
    server.create(server.of(CRDS), "", {"metadata": {"name": f"podgroups.{played.group}"}, "spec": about})


def schedulers(gang: Gang) -> frozenset[str]:
    """Return the names of the schedulers that a cluster has."""
    return frozenset({DEFAULT} if gang is Gang.NONE else {DEFAULT, PLAYED[gang].scheduler})


def may_start(pod: Object, pods: list[Object], groups: Mapping[str, Object], gang: Gang, fits: int) -> bool:
    """Return whether a pod's group has, or can have now, as many pods on nodes as it has to. ``fits``: so many of the
    pods of this group that wait find room. ``groups``: the namespace's PodGroups by name."""
    name = group_name(pod, gang)
    if name is None:
        return True
    group = groups.get(name)
    if group is None:
        return False
    spec = group["spec"]
    least = int(spec["schedulingPolicy"]["gang"]["minCount"] if gang is Gang.NATIVE else spec["minMember"])
    return sum(is_placed(each) for each in of_group(pods, name, gang)) + fits >= least


def group_name(pod: Object, gang: Gang) -> str | None:
    """Return the group that a pod says it belongs to; None: to none that this cluster's scheduler knows of."""
    if gang is Gang.NONE or pod["spec"].get("schedulerName", DEFAULT) != PLAYED[gang].scheduler:
        return None
    found = PLAYED[gang].group_of(pod)
    return str(found) if found else None


def of_group(pods: list[Object], name: str, gang: Gang) -> list[Object]:
    """Return the pods of a group that have not ended."""
    over = ("Succeeded", "Failed")
    return [p for p in pods if group_name(p, gang) == name and (p.get("status") or {}).get("phase") not in over]


def is_placed(pod: Object) -> bool:
    """Return whether a pod has a node and stays."""
    return bool(pod["spec"].get("nodeName")) and not pod["metadata"].get("deletionTimestamp")


def by_name(things: list[Object]) -> dict[str, Object]:
    """Return objects by their names."""
    return {name_of(thing): thing for thing in things}
