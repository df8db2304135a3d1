"""Makes the status of a job: conditions that remember since when, counts that are made anew each time. Pure."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Sequence

from everstep.platforms.kubernetes.actions import Seen
from everstep.platforms.kubernetes.job import wanted_by
from everstep.platforms.kubernetes.kinds import OVER, Condition, JobPhase, Object, Place
from everstep.platforms.kubernetes.objects import selector_of
from everstep.platforms.kubernetes.pods import PodFacts, PodState, stamp_of


class JobStatus:
    """Holds the status that is being made for a job. It starts as the one that was written last."""

    def __init__(self, seen: Seen) -> None:
        self._seen = seen
        self._old: Object = seen.job.get("status") or {}
        self.now: Object = copy.deepcopy(self._old)

    def __repr__(self) -> str:
        return f"<status {self.phase}{'' if self.now == self._old else ', changed'}>"

    @property
    def phase(self) -> JobPhase:
        """Return where the job stands."""
        return JobPhase(self.now.get("phase") or JobPhase.PENDING)

    @phase.setter
    def phase(self, phase: JobPhase) -> None:
        self.now["phase"] = phase.value

    @property
    def over(self) -> bool:
        """Return whether the job has ended."""
        return self.phase in OVER

    def is_true(self, condition: Condition) -> bool:
        """Return whether a condition holds."""
        return any(c["type"] == condition and c["status"] == "True" for c in self.now.get("conditions") or [])

    def reason(self, condition: Condition) -> str:
        """Return the reason of a condition."""
        found = [c for c in self.now.get("conditions") or [] if c["type"] == condition]
        return str(found[0].get("reason", "")) if found else ""

    def since(self, condition: Condition) -> str:
        """Return since when a condition is as it is; "": it is not listed."""
        found = [c for c in self.now.get("conditions") or [] if c["type"] == condition]
        return str(found[0].get("lastTransitionTime", "")) if found else ""

    @property
    def stamp(self) -> str:
        """Return the time of this look, as the API has it."""
        return stamp_of(self._seen.now_s)

    def say(self, condition: Condition, holds: bool, reason: str = "", message: str = "") -> None:
        """Set a condition. One that never held is not listed before it does."""
        known = list(self.now.get("conditions") or [])
        old = next((c for c in known if c["type"] == condition), None)
        if old is None and not holds:
            return
        word = "True" if holds else "False"
        new: Object = {"type": condition.value, "status": word, "reason": reason or ("Yes" if holds else "No")}
        new["message"] = message
        new["observedGeneration"] = self._generation
        same = old is not None and old["status"] == word
        new["lastTransitionTime"] = old["lastTransitionTime"] if old and same else stamp_of(self._seen.now_s)
        self.now["conditions"] = (
            [c for c in known if c is not old] + [new] if old is None else [new if c is old else c for c in known]
        )

    def once(self, field: str) -> None:
        """Write the time into a field that has none."""
        self.now.setdefault(field, stamp_of(self._seen.now_s))

    def end(self, phase: JobPhase, reason: str, message: str) -> None:
        """Note that the job has ended. It stays so."""
        self.phase = phase
        self.once("completionTime")
        condition = Condition.COMPLETE if phase is JobPhase.SUCCEEDED else Condition.FAILED
        self.say(condition, True, reason, message)
        self.say(Condition.READY, False, reason)
        self.now.pop("waitingSince", None)

    @property
    def _generation(self) -> int:
        return int(self._seen.job["metadata"].get("generation", 0))

    def restarts(self, place: Place) -> int:
        """Return how many pods of a kind were replaced because they failed."""
        return int((self.now.get(place.value) or {}).get("restarts", 0))

    def count_failures(self, failed: Iterable[PodFacts], listed: Iterable[PodFacts]) -> None:
        """Count pods that failed, each once: those that are counted are remembered while they are listed."""
        here = {pod.uid for pod in listed}
        counted = [uid for uid in self.now.get("counted") or [] if uid in here]
        for pod in failed:
            if pod.uid not in counted:
                counted.append(pod.uid)
                role = self.now.setdefault(pod.place.value, {})
                role["restarts"] = int(role.get("restarts", 0)) + 1
        if counted or "counted" in self.now:
            self.now["counted"] = sorted(counted)

    def count_pods(self, pods: Sequence[PodFacts]) -> None:
        """Count the pods that are there, anew."""
        wanted = wanted_by(self._seen.job)
        for place in (Place.WORKER, Place.PS):
            if place is Place.PS and not wanted.ps:
                continue
            own = [pod for pod in pods if pod.place is place]
            states = [pod.state for pod in own]
            self.now[place.value] = {
                "desired": wanted.of(place),
                "active": sum(pod.active for pod in own),
                "ready": sum(pod.active and pod.ready for pod in own),
                "pending": states.count(PodState.PENDING),
                "draining": states.count(PodState.LEAVING),
                "succeeded": states.count(PodState.SUCCEEDED),
                "failed": states.count(PodState.FAILED),
                "restarts": self.restarts(place),
                "selector": selector_of(self._seen.job, place),
            }
        self.now["observedGeneration"] = self._generation

    def changed(self) -> Object | None:
        """Return the status if it is to be written; None: it is as it was."""
        return None if self.now == self._old else self.now
