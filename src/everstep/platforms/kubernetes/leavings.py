"""Decides when what a job leaves is written to ``spec.out``, and when a deleted job may go. Pure.

A pod of its own writes it, once no other pod of the job is on the volume: after the end, after each suspension, and
before a deleted job goes. The status names the occasion for which it was written last, so an operator that was killed
in between begins where the other one was.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from everstep.platforms.kubernetes.actions import Action, AskSuspend, Create, Delete, Seen
from everstep.platforms.kubernetes.job import out_of
from everstep.platforms.kubernetes.job_status import JobStatus
from everstep.platforms.kubernetes.kinds import (
    FINALIZER,
    OUT_ROLE,
    ROLE_LABEL,
    Condition,
    Kind,
    Object,
    Place,
    is_leaving,
)
from everstep.platforms.kubernetes.objects import out_pod
from everstep.platforms.kubernetes.pods import PodFacts, PodState, facts_of, seconds_of, stuck

TRIES: Final = 5
SUSPEND_S: Final = 300.0
"""So long a deleted job's master may take to make the state safe."""
GO_S: Final = 1800.0
"""A deleted job goes after so long, whatever was written."""
LOOK_S: Final = 5.0
DELETED: Final = "Deleted"
_SETTINGS_CODE: Final = 2
_HERE: Final = (PodState.PENDING, PodState.RUNNING, PodState.LEAVING)


def out_facts(pod: Object) -> PodFacts | None:
    """Return what counts about a pod that writes; None: it is another one."""
    meta = pod["metadata"]
    labels = meta.get("labels") or {}
    if labels.get(ROLE_LABEL) != OUT_ROLE:
        return None
    return facts_of({**pod, "metadata": {**meta, "labels": {**labels, ROLE_LABEL: Place.MASTER.value}}})


def finalizers_of(job: Object) -> tuple[str, ...]:
    """Return what keeps a job from going."""
    return tuple(job["metadata"].get("finalizers") or ())


class Leavings:
    """Has the pods that write what one job leaves, and what one look decides about them."""

    def __init__(self, seen: Seen, status: JobStatus) -> None:
        self._seen, self._job, self._status = seen, seen.job, status
        self.pods = [facts for pod in seen.pods if (facts := out_facts(pod)) is not None]
        self.actions: list[Action] = []
        self.again_s: list[float] = []

    def __repr__(self) -> str:
        return f"<leavings to {out_of(self._job) or 'nowhere'}: {len(self.pods)} pods>"

    @property
    def wanted(self) -> bool:
        """Return whether anything is to be written at all."""
        return bool(out_of(self._job))

    @property
    def holds(self) -> bool:
        """Return whether the job must not go before this says so."""
        return FINALIZER in finalizers_of(self._job)

    def occasion(self) -> str:
        """Return for what it would be written now; "": the job goes on."""
        if self._status.over:
            return self._status.phase.value
        if self._status.is_true(Condition.SUSPENDED):
            return f"Suspended {self._status.since(Condition.SUSPENDED)}"
        return DELETED if is_leaving(self._job) else ""

    def give_way(self) -> bool:
        """Have pods that write end, as the job goes on; return whether the volume is free."""
        for pod in self.pods:
            self._delete(pod)
        if self.pods:
            self.again_s.append(LOOK_S)
        return not self.pods

    def write(self, others: list[PodFacts], serial: int) -> tuple[bool, int]:
        """Take the next step to have it written; return whether that is over, and the newest number of a pod."""
        occasion, out = self.occasion(), dict(self._status.now.get("out") or {})
        if not self.wanted or not occasion:
            return True, serial
        if out.get("of") == occasion:
            for pod in self.pods:
                self._delete(pod)
            return not self.pods, serial
        if any(pod.state in _HERE for pod in others):
            self.again_s.append(LOOK_S)
            return False, serial
        nodes: Mapping[str, Object] = self._seen.nodes or {}
        for pod in self.pods:
            if pod.state is PodState.SUCCEEDED:
                self._conclude(occasion, True, f"{out_of(self._job)} has what the job left")
            elif pod.state is PodState.FAILED:
                self._failed(pod, occasion)
            elif stuck(pod, nodes, self._seen.now_s):
                self._delete(pod, 0)
            else:
                self.again_s.append(LOOK_S)
        if self.pods or self._seen.refused is not None:
            self.again_s.append(LOOK_S)
            return False, serial
        self.actions.append(Create(Kind.POD, out_pod(self._job, serial + 1)))
        self.again_s.append(LOOK_S)
        return False, serial + 1

    def _failed(self, pod: PodFacts, occasion: str) -> None:
        """Count a try that failed, once, and try again later. Wrong settings are not tried again."""
        out = dict(self._status.now.get("out") or {})
        if out.get("failedPod") != pod.name:
            out |= {"failedPod": pod.name, "failures": int(out.get("failures", 0)) + (not pod.disrupted)}
            self._status.now["out"] = out
        failures = int(out.get("failures", 0))
        if pod.exit_code == _SETTINGS_CODE or failures >= TRIES:
            words = f"{out_of(self._job)}: {failures} tries failed, last {pod.name}; its log says why"
            self._conclude(occasion, False, words)
            return
        left_s = pod.ended_at + 2.0**failures - self._seen.now_s
        if pod.ended_at and left_s > 0:
            self.again_s.append(left_s)
        else:
            self._delete(pod)

    def _conclude(self, occasion: str, written: bool, words: str) -> None:
        self._status.now["out"] = {"of": occasion, "time": self._status.stamp}
        self._status.say(Condition.OUT_WRITTEN, written, "Written" if written else "Failed", words)
        self._status.say(Condition.OUT_NOT_WRITTEN, not written, "Failed" if not written else "Written", words)
        self.again_s.append(0.1)

    def _delete(self, pod: PodFacts, grace_s: int | None = None) -> None:
        if pod.state is not PodState.LEAVING or grace_s == 0:
            self.actions.append(Delete(Kind.POD, pod.name, pod.uid, grace_s))
        self.again_s.append(LOOK_S)

    # ------------------------------------------------------------ a deleted job

    @property
    def is_late(self) -> bool:
        """Return whether a deleted job has been held for too long."""
        return self._since_deleted_s() >= GO_S

    def asks_for_safety(self, pods: list[PodFacts]) -> bool:
        """Return whether a deleted job's master is still to make the state safe; it is asked to."""
        master = any(pod.place is Place.MASTER and pod.state is PodState.RUNNING for pod in pods)
        if not master or self._since_deleted_s() >= SUSPEND_S:
            return False
        if self._seen.report is not None:
            self.actions.append(AskSuspend(self._seen.report.suspensions))
        self.again_s.append(LOOK_S)
        return True

    def _since_deleted_s(self) -> float:
        return self._seen.now_s - seconds_of(self._job["metadata"].get("deletionTimestamp"))
