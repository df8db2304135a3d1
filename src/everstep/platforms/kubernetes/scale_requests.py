"""Carries ScaleOut and ScaleIn out: one at a time changes the number of pods of its job, and is followed to its end.
Pure."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from typing import NamedTuple

from everstep.platforms.kubernetes.actions import Action, Delete, SetReplicas, SetRequest
from everstep.platforms.kubernetes.job import has_ps, role_spec, wanted_by
from everstep.platforms.kubernetes.kinds import Kind, Object, Place, RequestPhase, is_leaving, name_of, uid_of
from everstep.platforms.kubernetes.pods import PodFacts, seconds_of, stamp_of

_ENDED = (RequestPhase.SUCCEEDED, RequestPhase.FAILED)


class Requested(NamedTuple):
    """Is what requests of one job come to. ``victims``: names of pods that shall go first."""

    current: str
    victims: tuple[str, ...]
    actions: tuple[Action, ...]
    again_s: float | None


def phase_of(request: Object) -> RequestPhase:
    """Return where a request stands."""
    return RequestPhase((request.get("status") or {}).get("phase") or RequestPhase.PENDING)


def in_order(requests: Iterable[Object]) -> list[Object]:
    """Return requests, the oldest first."""
    return sorted(requests, key=lambda r: (str(r["metadata"].get("creationTimestamp", "")), name_of(r)))


def carry_out(
    job: Object | None, requests: Sequence[Object], pods: Collection[PodFacts], now_s: float, over: bool = False
) -> Requested:
    """Return what to do about the requests of a job. ``job`` None: there is no such job."""
    actions: list[Action] = []
    again: list[float] = []
    open_ = []
    for request in in_order(requests):
        if is_leaving(request):
            continue
        if phase_of(request) in _ENDED:
            left_s = _left_s(request, now_s)
            if left_s > 0:
                again.append(left_s)
            else:
                actions.append(Delete(Kind(request["kind"]), name_of(request), uid_of(request)))
        elif job is None or is_leaving(job):
            actions.append(_end(request, now_s, RequestPhase.FAILED, "JobNotFound", "there is no such job"))
        elif over:
            actions.append(_end(request, now_s, RequestPhase.FAILED, "JobFinished", "the job is over"))
        else:
            open_.append(request)
    open_.sort(key=lambda r: phase_of(r) is not RequestPhase.SCALING)  # (stable: one that has begun goes on)
    if not open_ or job is None:
        return Requested("", (), tuple(actions), min(again, default=None))
    current = open_[0]
    begun = phase_of(current) is RequestPhase.SCALING
    actions += _follow(job, current, pods, now_s) if begun else _begin(job, current, pods, now_s)
    victims = tuple(current["spec"].get("podNames") or ()) if begun else ()
    return Requested(f"{current['kind']}/{name_of(current)}", victims, tuple(actions), min([*again, 2.0]))


def _left_s(request: Object, now_s: float) -> float:
    ended = seconds_of((request.get("status") or {}).get("completionTime"))
    return ended + float(request["spec"].get("ttlSecondsAfterFinished", 86400)) - now_s


def _begin(job: Object, request: Object, pods: Collection[PodFacts], now_s: float) -> list[Action]:
    spec, place = request["spec"], Place(request["spec"].get("role", "worker"))
    if place is Place.PS and not has_ps(job["spec"]):
        return [_end(request, now_s, RequestPhase.FAILED, "NoSuchRole", "the job's mode has no ps")]
    now = wanted_by(job).of(place)
    named = list(spec.get("podNames") or ())
    there = {pod.name for pod in pods if pod.place is place and pod.active}
    if unknown := sorted(set(named) - there):
        message = f"podNames: {unknown[0]} is no running {place.value} pod of {name_of(job)}"
        return [_end(request, now_s, RequestPhase.FAILED, "NoSuchPod", message)]
    count = len(set(named)) or int(spec["count"])
    to = now + count if request["kind"] == Kind.SCALE_OUT else now - count
    role = role_spec(job, place)
    least, most = max(1, int(role.get("minReplicas", 1))), int(role.get("maxReplicas", 10_000))
    if not least <= to <= most:
        message = f"{place.value} would be {to}; the job allows {least} to {most}"
        return [_end(request, now_s, RequestPhase.FAILED, "OutOfBounds", message)]
    status = {
        "phase": RequestPhase.SCALING.value,
        "fromReplicas": now,
        "toReplicas": to,
        "startTime": stamp_of(now_s),
        **({"pods": sorted(named)} if named else {}),
    }
    return [_set(request, status)]


def _follow(job: Object, request: Object, pods: Collection[PodFacts], now_s: float) -> list[Action]:
    status, place = request["status"], Place(request["spec"].get("role", "worker"))
    now, was, to = wanted_by(job).of(place), int(status["fromReplicas"]), int(status["toReplicas"])
    own = [pod for pod in pods if pod.place is place]
    if now == was != to:
        return [SetReplicas(place, to, str(job["metadata"]["resourceVersion"]))]
    if now != to:
        message = f"somebody else asked for {now} {place.value} pods meanwhile"
        return [_end(request, now_s, RequestPhase.FAILED, "Superseded", message)]
    leaving = any(not pod.active and pod.left_at for pod in own)
    if sum(pod.active and pod.ready for pod in own) == to == sum(pod.active for pod in own) and not leaving:
        return [_end(request, now_s, RequestPhase.SUCCEEDED, "Scaled", f"{to} {place.value} pods are ready")]
    if now_s > seconds_of(status.get("startTime")) + float(request["spec"].get("timeoutSeconds", 600)):
        message = f"{sum(pod.active and pod.ready for pod in own)} of {to} {place.value} pods are ready"
        return [_end(request, now_s, RequestPhase.FAILED, "Timeout", message)]
    return []


def _set(request: Object, status: Object) -> SetRequest:
    meta = request["metadata"]
    return SetRequest(Kind(request["kind"]), name_of(request), str(meta["resourceVersion"]), status)


def _end(request: Object, now_s: float, phase: RequestPhase, reason: str, message: str) -> SetRequest:
    condition = {
        "type": "Complete" if phase is RequestPhase.SUCCEEDED else "Failed",
        "status": "True",
        "reason": reason,
        "message": message,
        "lastTransitionTime": stamp_of(now_s),
    }
    old = request.get("status") or {}
    now = {"phase": phase.value, "conditions": [condition], "completionTime": stamp_of(now_s)}
    return _set(request, {**old, **now})
