"""Says what happened to a job as Events, which ``kubectl describe`` shows. Pure.

An Event has a name that follows from what it says, so it is made once, however often the same look is taken. One that
an operator did not get to make (it was killed between the status and this) is never made: the status has it all.
"""

from __future__ import annotations

import hashlib
from typing import Final

from everstep.platforms.kubernetes.kinds import API_VERSION, MANAGER, Condition, Kind, Object, name_of, uid_of

_BAD: Final = frozenset(
    {
        Condition.RECLAIM_NOTICE.value,
        Condition.QUOTA_EXCEEDED.value,
        Condition.FORBIDDEN.value,
        Condition.INVALID_SPEC.value,
        Condition.TEMPLATE_INVALID.value,
        Condition.BUDGET_SPENT.value,
        Condition.CANNOT_START.value,
        Condition.PODS_FAIL.value,
        Condition.OTHER_VERSION.value,
        Condition.FIELDS_IGNORED.value,
        Condition.OUT_NOT_WRITTEN.value,
        Condition.FAILED.value,
    }
)
"""Conditions that are bad news when they begin to hold."""


def events_between(job: Object, status: Object) -> list[Object]:
    """Return what to say of a job whose status becomes this one: conditions that changed, pods that were told to go."""
    old = job.get("status") or {}
    events = []
    before = {c["type"]: c for c in old.get("conditions") or []}
    for now in status.get("conditions") or []:
        kind, holds = now["type"], now["status"] == "True"
        if kind in before and before[kind]["status"] == now["status"]:
            continue
        reason = kind if holds else f"Not{kind}"
        words = now.get("message") or now.get("reason") or ""
        events.append(_event(job, reason, words, now["lastTransitionTime"], holds and kind in _BAD))
    known = {each["pod"] for each in old.get("disruptions") or []}
    for each in status.get("disruptions") or []:
        if each["pod"] not in known:
            words = f"{each['pod']} goes from {each.get('node') or 'its node'} ({each['source']})"
            events.append(_event(job, "PodGoes", words, each["noticeTime"], True))
    return events


def _event(job: Object, reason: str, message: str, at: str, bad: bool) -> Object:
    digest = hashlib.blake2b("\n".join((uid_of(job), reason, message, at)).encode(), digest_size=8).hexdigest()
    meta = job["metadata"]
    return {
        "apiVersion": "v1",
        "kind": Kind.EVENT.value,
        "metadata": {"name": f"{name_of(job)}.{digest}", "namespace": meta["namespace"]},
        "involvedObject": {
            "apiVersion": API_VERSION,
            "kind": Kind.JOB.value,
            "name": name_of(job),
            "namespace": meta["namespace"],
            "uid": uid_of(job),
        },
        "reason": reason,
        "message": message,
        "type": "Warning" if bad else "Normal",
        "firstTimestamp": at,
        "lastTimestamp": at,
        "count": 1,
        "source": {"component": MANAGER},
        "reportingComponent": MANAGER,
    }
