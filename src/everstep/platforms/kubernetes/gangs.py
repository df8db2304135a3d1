"""Makes a job's PodGroup, by which a scheduler starts the pods a job needs all together or none of them. Pure.

The gang is the least a job runs with: its master, all of its ps, and the fewest workers it may have. Workers beyond
are made once the gang has its nodes, so any so many pods of the group are the gang.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final, NamedTuple

from everstep.platforms.kubernetes.job import Wanted, gang_of, wanted_by
from everstep.platforms.kubernetes.kinds import API_VERSION, JOB_LABEL, Gang, Kind, Object, Place, name_of, uid_of
from everstep.platforms.kubernetes.pods import PodFacts


class _Scheduler(NamedTuple):
    kind: Kind
    api_version: str
    name: str  # what pods have as schedulerName; "": the cluster's own
    label: str = ""
    annotation: str = ""


_SCHEDULERS: Final = {
    Gang.VOLCANO: _Scheduler(
        Kind.VOLCANO_GROUP,
        "scheduling.volcano.sh/v1beta1",
        "volcano",
        annotation="scheduling.k8s.io/group-name",
    ),
    Gang.SCHEDULER_PLUGINS: _Scheduler(
        Kind.PLUGINS_GROUP,
        "scheduling.x-k8s.io/v1alpha1",
        "scheduler-plugins-scheduler",
        label="scheduling.x-k8s.io/pod-group",
    ),
    Gang.NATIVE: _Scheduler(Kind.NATIVE_GROUP, "scheduling.k8s.io/v1alpha2", ""),
}
_TASK: Final = "volcano.sh/task-spec"


def kind_of(job: Object) -> Kind | None:
    """Return the kind of a job's PodGroup; None: it has none."""
    of = _SCHEDULERS.get(gang_of(job))
    return of.kind if of is not None else None


def least(job: Object) -> Wanted:
    """Return with how many workers and ps a job can run: it begins with these, or not at all."""
    wanted, spec = wanted_by(job), job["spec"]
    all_of_them = (spec.get("elasticity") or {}).get("recovery") == "WaitForAll"
    workers = wanted.workers if all_of_them else max(1, int(spec["worker"].get("minReplicas", 1)))
    return Wanted(min(workers, wanted.workers), wanted.ps)


def placed(job: Object, pods: Iterable[PodFacts]) -> tuple[int, int]:
    """Return how many pods of the gang have a node, and how many there have to be."""
    need, there = least(job), dict.fromkeys(Place, 0)
    for pod in pods:
        there[pod.place] += pod.active and bool(pod.node)
    return sum(min(there[place], need.of(place)) for place in Place), sum(need.of(place) for place in Place)


def pod_group(job: Object) -> Object | None:
    """Return the PodGroup of a job; None: it has none."""
    of, need = _SCHEDULERS.get(gang_of(job)), least(job)
    if of is None:
        return None
    count = sum(need.of(place) for place in Place)
    asked = job["spec"].get("scheduling") or {}
    spec: Object = {"minMember": count}
    if of.kind is Kind.VOLCANO_GROUP:
        spec["minTaskMember"] = {place.value: need.of(place) for place in Place if need.of(place)}
        spec |= {field: asked[field] for field in ("queue", "priorityClassName") if asked.get(field)}
    elif of.kind is Kind.NATIVE_GROUP:
        spec = {"schedulingPolicy": {"gang": {"minCount": count}}}
    owner = {"apiVersion": API_VERSION, "kind": Kind.JOB.value, "name": name_of(job), "uid": uid_of(job)}
    return {
        "apiVersion": of.api_version,
        "kind": "PodGroup",
        "metadata": {
            "name": name_of(job),
            "namespace": job["metadata"]["namespace"],
            "labels": {JOB_LABEL: name_of(job)},
            "ownerReferences": [{**owner, "controller": True, "blockOwnerDeletion": True}],
        },
        "spec": spec,
    }


def is_as_wanted(there: Object | None, wanted: Object) -> bool:
    """Return whether a PodGroup that was read says what is wanted. What others wrote beside that does not count. The
    policy of the cluster's own kind is fixed: a job that is suspended and goes on gets a new one."""
    if there is None:
        return False
    return "schedulingPolicy" in wanted["spec"] or _holds(there.get("spec"), wanted["spec"])


def _holds(there: object, wanted: object) -> bool:
    if isinstance(wanted, dict):
        return isinstance(there, dict) and all(_holds(there.get(k), v) for k, v in wanted.items())
    return there == wanted


def enroll(job: Object, place: Place, meta: Object, spec: Object) -> None:
    """Write into a pod which group it belongs to, and who is to place it."""
    of = _SCHEDULERS.get(gang_of(job))
    if of is None:
        return
    if of.name:
        spec.setdefault("schedulerName", of.name)
    if of.label:
        meta["labels"] = {**(meta.get("labels") or {}), of.label: name_of(job)}
    if of.annotation:
        more = {of.annotation: name_of(job), _TASK: place.value}
        meta["annotations"] = {**(meta.get("annotations") or {}), **more}
    if of.kind is Kind.NATIVE_GROUP:
        spec["schedulingGroup"] = {"podGroupName": name_of(job)}


def missing_words(kind: Kind) -> str:
    """Return what is said where a cluster does not know a kind of PodGroup."""
    gang = next(gang for gang, of in _SCHEDULERS.items() if of.kind is kind)
    return (
        f"spec.scheduling.gang: {gang.value}: this cluster knows no PodGroup of {_SCHEDULERS[gang].api_version}; "
        "install that scheduler, or leave gang out"
    )
