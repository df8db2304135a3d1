"""Decides what becomes of a job: listed objects in, actions out. No I/O, no clock, no memory between two looks.

Each look judges anew from what is listed. What has to outlive pods is in the status of the job: how many pods were
made (each name has such a number, so none comes twice), and failures that were counted. The status is written first,
and only onto the job as it was seen. So an operator that looks at old objects, or has been replaced, makes nothing.
"""

from __future__ import annotations

from typing import Any, Final

from everstep.errors import ConfigError
from everstep.platforms.kubernetes import gangs, job_cost, objects
from everstep.platforms.kubernetes.actions import (
    Action,
    Apply,
    AskSuspend,
    Create,
    Delete,
    JobPlan,
    MakeSecret,
    Refusal,
    Seen,
    SetFinalizers,
    SetSuspend,
    TellGone,
    TellSize,
)
from everstep.platforms.kubernetes.job import budget_of, ignored_fields, role_spec, settings_of, wanted_by
from everstep.platforms.kubernetes.job_cost import has_prices
from everstep.platforms.kubernetes.job_events import events_between
from everstep.platforms.kubernetes.job_status import JobStatus
from everstep.platforms.kubernetes.kinds import (
    FALLBACK_LABEL,
    FINALIZER,
    Condition,
    JobPhase,
    Kind,
    Object,
    Place,
    is_leaving,
    name_of,
    uid_of,
)
from everstep.platforms.kubernetes.leavings import Leavings, finalizers_of
from everstep.platforms.kubernetes.pods import (
    FINAL_CODES,
    SUSPENDED_CODE,
    PodFacts,
    PodNotice,
    PodState,
    Source,
    cannot_start,
    facts_of,
    last_words,
    machine_gone,
    notice_of,
    seconds_of,
    stamp_of,
    stuck,
)
from everstep.platforms.kubernetes.scale_requests import carry_out

MANAGED_BY: Final = "everstep.io/operator"
LOOK_S: Final = 5.0
"""So often a job that runs is looked at, whatever happens."""
GONE_S: Final = 0.5
"""So soon it is looked whether a PodGroup is gone."""
REFUSED_S: Final = 30.0
PROGRESS_S: Final = 30.0
"""So often progress is written, if nothing else is to be."""
MEMBERS_SHOWN: Final = 50
"""So many members, the slowest, the status of a job tells about."""
WAIT_TIMEOUT: Final = "WaitTimeout"
PODS_LEAVE: Final = "PodsLeave"
_PAUSE_MAX_S: Final = 60.0
_SHOWN_DISRUPTIONS: Final = 50
_WORDS: Final = {1: "the script failed", 2: "the job's settings are wrong", 4: "the job gave up", 130: "interrupted"}
_CONDITIONS: Final = {
    Refusal.QUOTA: Condition.QUOTA_EXCEEDED,
    Refusal.FORBIDDEN: Condition.FORBIDDEN,
    Refusal.INVALID: Condition.TEMPLATE_INVALID,
    Refusal.GANG: Condition.GANG_REFUSED,
}


def reconcile(seen: Seen) -> JobPlan:
    """Return what to do about one job now."""
    job = seen.job
    held = is_leaving(job) and FINALIZER in finalizers_of(job)
    if (is_leaving(job) and not held) or job["spec"].get("managedBy") not in (None, "", MANAGED_BY):
        return JobPlan()
    return _Look(seen).plan()


class _Look:
    """Takes one look at a job: what is there, and what is to be done."""

    def __init__(self, seen: Seen) -> None:
        self._seen, self._job = seen, seen.job
        self._wanted = wanted_by(seen.job)
        self._raw = {name_of(pod): pod for pod in seen.pods}
        self._pods = [facts for pod in seen.pods if (facts := facts_of(pod)) is not None]
        self._status = JobStatus(seen)
        self._leavings = Leavings(seen, self._status)
        made = [pod.serial for pod in (*self._pods, *self._leavings.pods)]
        self._serial = max([int(self._status.now.get("podsMade", 0)), *made])
        self._finalizers: tuple[str, ...] | None = None
        self._doomed: set[str] = set()  # pods that this look deletes
        self._on_demand: set[tuple[Place, int]] = set()  # slots that no spot machine has filled
        self._actions: list[Action] = []
        self._again: list[float] = []
        self._costs = job_cost.count(seen.job, self._pods, seen.nodes, seen.now_s) if has_prices(seen.job) else None

    def __repr__(self) -> str:
        return f"<look at {name_of(self._job)}: {len(self._pods)} pods, {self._status!r}>"

    def plan(self) -> JobPlan:
        """Return what to do."""
        status = self._status
        status.once("startTime")
        self._free_stuck()
        if not status.over:
            self._judge_endings()
        if is_leaving(self._job):
            self._go()
        elif status.over:
            self._clean_up()
        else:
            self._go_on()
        requested = carry_out(self._job, self._seen.requests, self._pods, self._seen.now_s, status.over)
        if requested.current:
            status.now["currentScaleRequest"] = requested.current
        else:
            status.now.pop("currentScaleRequest", None)
        status.count_pods([pod for pod in self._pods if pod.name not in self._doomed])
        if not status.over:
            self._name_phase(bool(requested.current))
        if self._costs is not None and (status.changed() is not None or job_cost.is_due(self._job, self._costs)):
            status.now["cost"] = job_cost.written(self._costs)
        again = [*self._again, *self._leavings.again_s]
        again += [requested.again_s] if requested.again_s is not None else []
        self._actions += self._leavings.actions
        changed = status.changed()
        if self._finalizers is not None:
            if changed is None:
                self._actions.append(SetFinalizers(self._version, self._finalizers))
            again.append(1.0)
        events = (
            [Create(Kind.EVENT, body) for body in events_between(self._job, changed)] if changed is not None else []
        )
        return JobPlan(changed, (*events, *self._actions, *requested.actions), min(again, default=None))

    # ------------------------------------------------------------ the end

    def _judge_endings(self) -> None:
        """Return what the master's pods that have ended say about the job."""
        status, seen = self._status, self._seen
        masters = [pod for pod in self._pods if pod.place is Place.MASTER]
        if any(pod.state is PodState.SUCCEEDED for pod in masters):
            status.end(JobPhase.SUCCEEDED, "Done", "every worker's script ran to its end")
            return
        for pod in masters:
            if pod.state is PodState.FAILED and pod.exit_code in FINAL_CODES:
                words = _WORDS.get(pod.exit_code or 0, "the job failed")
                if why := last_words(self._raw[pod.name]):
                    words += f" ({why})"
                status.end(JobPhase.FAILED, f"ExitCode{pod.exit_code}", f"{words}; see kubectl logs {pod.name}")
                return
        limit_s = self._job["spec"].get("activeDeadlineSeconds")
        if limit_s is not None:
            left_s = seconds_of(status.now["startTime"]) + float(limit_s) - seen.now_s
            if left_s <= 0:
                message = f"activeDeadlineSeconds: {limit_s} s are over"
                status.end(JobPhase.FAILED, "DeadlineExceeded", message)
            else:
                self._again.append(left_s)

    def _clean_up(self) -> None:
        policy = self._job["spec"].get("cleanPodPolicy", "Running")
        for pod in self._pods:
            ended = pod.state in (PodState.SUCCEEDED, PodState.FAILED)
            if policy == "All" or (policy == "Running" and not ended):
                self._delete(pod)
        self._disband()
        self._write_leavings()
        ttl_s = self._job["spec"].get("ttlSecondsAfterFinished")
        if ttl_s is None:
            return
        left_s = seconds_of(self._status.now.get("completionTime")) + float(ttl_s) - self._seen.now_s
        if left_s > 0:
            self._again.append(left_s)
        else:
            self._actions.append(Delete(Kind.JOB, name_of(self._job), uid_of(self._job)))

    def _go(self) -> None:
        """Have a deleted job's state made safe, and what it leaves written; then it may go."""
        status, leavings = self._status, self._leavings
        status.say(Condition.SUSPENDING, not status.over and bool(self._pods), "Deleted", "the job was deleted")
        if not status.over and leavings.asks_for_safety(self._pods):
            return
        for pod in self._pods:
            self._delete(pod)
        if not self._serial or leavings.is_late or self._write_leavings():
            self._finalizers = tuple(each for each in finalizers_of(self._job) if each != FINALIZER)

    def _write_leavings(self) -> bool:
        over, self._serial = self._leavings.write(self._pods, self._serial)
        if self._serial != self._status.now.get("podsMade", 0):
            self._status.now["podsMade"] = self._serial
        return over

    # ------------------------------------------------------------ a job that is not over

    def _go_on(self) -> None:
        status = self._status
        try:
            settings = settings_of(self._job)
        except ConfigError as error:
            status.say(Condition.INVALID_SPEC, True, "InvalidSpec", str(error))
            return
        status.say(Condition.INVALID_SPEC, False)
        ignored = ignored_fields(self._job)
        status.say(Condition.FIELDS_IGNORED, bool(ignored), "Mode" if ignored else "", ignored)
        if self._leavings.wanted and not self._leavings.holds:
            self._finalizers = (*finalizers_of(self._job), FINALIZER)
            return
        if self._suspended() or self._has_spent_its_budget() or not self._leavings.give_way():
            return
        self._own()
        self._heed_notices()
        self._say_what_cannot_start()
        self._say_why_pods_fail()
        self._say_other_version()
        for place in Place:
            self._replace_failed(place)
            if status.over:
                return
        self._gather()
        if self._gives_up_waiting():
            return
        for place in Place:
            self._wait_no_longer_for_spot(place)
            self._scale_in(place)
            self._fill(place, settings)
        self._tell_master()
        self._again.append(LOOK_S)

    def _own(self) -> None:
        """Create what the job has beside its pods. It goes with the job."""
        made = [objects.service(self._job), objects.claim(self._job), *objects.budgets(self._job)]
        for body in made:
            if (Kind(body["kind"]), name_of(body)) not in self._seen.others:
                self._actions.append(Create(Kind(body["kind"]), body))
        if (Kind.SECRET, objects.secret_name(self._job)) not in self._seen.others:
            self._actions.append(MakeSecret())

    def _gather(self) -> None:
        """Have the pods that the job needs placed together, where it asks for that."""
        group, status = gangs.pod_group(self._job), self._status
        if group is None:
            status.say(Condition.WAITING, False)
            return
        kind = gangs.kind_of(self._job)
        assert kind is not None
        if self._seen.refused is None and not gangs.is_as_wanted(self._seen.gang, group):
            self._actions.append(Apply(kind, group))
        there, needed = gangs.placed(self._job, self._pods)
        words = f"{there} of the {needed} pods that the job needs have a node"
        status.say(Condition.WAITING, there < needed, "Gang" if there < needed else "Placed", words)

    def _disband(self) -> bool:
        """Delete the job's PodGroup: it may keep room in a queue. Return whether there is none."""
        self._status.say(Condition.WAITING, False)
        kind = gangs.kind_of(self._job)
        if kind is None or self._seen.gang is None:
            return True
        self._actions.append(Delete(kind, name_of(self._seen.gang), uid_of(self._seen.gang)))
        self._again.append(GONE_S)
        return False

    @property
    def _gang_waits(self) -> bool:
        """Return whether pods that the job needs lack a node, and are to be placed together."""
        return self._status.is_true(Condition.WAITING)

    def _suspended(self) -> bool:
        """Return whether the job is, or is about to be, suspended and has no pods to be filled."""
        status, asked = self._status, bool(self._job["spec"].get("suspend"))
        parked = [p for p in self._pods if p.place is Place.MASTER and p.exit_code == SUSPENDED_CODE]
        suspending = status.is_true(Condition.SUSPENDING)
        waited = suspending and status.reason(Condition.SUSPENDING) == WAIT_TIMEOUT
        if parked and not asked and not suspending:
            waited = True  # (its master gave up waiting: the job suspended itself)
        leaving = asked and suspending and status.reason(Condition.SUSPENDING) == PODS_LEAVE
        if waited or parked or leaving or (asked and (not self._pods or status.is_true(Condition.SUSPENDED))):
            if waited and not asked:
                self._actions.append(SetSuspend(self._version))
                self._again.append(LOOK_S)
            for pod in self._pods:
                self._delete(pod)
            leave = bool(self._pods) or (waited and not asked) or not self._disband()
            status.say(Condition.SUSPENDING, leave, WAIT_TIMEOUT if waited and leave else PODS_LEAVE)
            status.say(Condition.SUSPENDED, not leave, "Suspended", "spec.suspend: false lets it go on")
            status.now.pop("waitingSince", None)
            if not leave:
                self._write_leavings()
            return True
        status.say(Condition.SUSPENDED, False)
        status.say(Condition.SUSPENDING, asked, "MasterAsked", "the master makes the job's state safe")
        if asked and self._seen.report is not None:  # (a report that comes has the job looked at again)
            self._actions.append(AskSuspend(self._seen.report.suspensions))
        return False

    def _has_spent_its_budget(self) -> bool:
        """Return whether the job has to stop for what it has cost. It is suspended in time to stay below."""
        budget, costs = budget_of(self._job), self._costs
        if costs is None or not budget:
            self._status.say(Condition.BUDGET_SPENT, False)
            return False
        left_s = job_cost.left_s(self._job, budget, costs)
        words = f"cost.budget = {budget}: {costs.spent:.2f} are spent; give more and set suspend: false"
        if left_s > 0:
            self._status.say(Condition.BUDGET_SPENT, False)
            self._again.append(max(1.0, min(LOOK_S, left_s)))
            return False
        if not self._status.is_true(Condition.BUDGET_SPENT):
            self._status.say(Condition.BUDGET_SPENT, True, "Budget", words)
        self._actions.append(SetSuspend(self._version))
        self._again.append(LOOK_S)
        return True

    def _gives_up_waiting(self) -> bool:
        """Return whether the job has waited for its master for too long: it frees all that it holds."""
        status, seen = self._status, self._seen
        if any(pod.place is Place.MASTER and pod.active and pod.ready for pod in self._pods):
            status.now.pop("waitingSince", None)
            return False
        status.once("waitingSince")
        elastic = self._job["spec"].get("elasticity") or {}
        limit_s = float(elastic.get("maxWaitSeconds", 0))
        left_s = seconds_of(status.now["waitingSince"]) + limit_s - seen.now_s
        if not limit_s or left_s > 0 or elastic.get("onWaitTimeout") == "Run":
            if limit_s and left_s > 0:
                self._again.append(left_s)
            return False
        words = f"maxWaitSeconds: no master for {limit_s:g} s"
        if self._gang_waits:
            there, needed = gangs.placed(self._job, self._pods)
            words += f"; {there} of the {needed} pods that the job needs have a node"
        if elastic.get("onWaitTimeout", "Suspend") == "Fail":
            status.end(JobPhase.FAILED, WAIT_TIMEOUT, words)
            return True
        status.say(Condition.SUSPENDING, True, WAIT_TIMEOUT, words)
        for pod in self._pods:
            self._delete(pod)
        return True

    # ------------------------------------------------------------ pods

    @property
    def _version(self) -> str:
        return str(self._job["metadata"]["resourceVersion"])

    def _of(self, place: Place) -> list[PodFacts]:
        return [pod for pod in self._pods if pod.place is place and pod.name not in self._doomed]

    def _delete(self, pod: PodFacts, grace_s: int | None = None) -> None:
        if pod.name not in self._doomed and (pod.state is not PodState.LEAVING or grace_s == 0):
            self._actions.append(Delete(Kind.POD, pod.name, pod.uid, grace_s))
        self._doomed.add(pod.name)

    def _free_stuck(self) -> None:
        """Delete pods on a dead node by force: else they stay for ever. They are fenced."""
        for pod in self._pods:
            gone = pod.active and machine_gone(pod, self._seen.nodes, self._seen.now_s)
            if gone or stuck(pod, self._seen.nodes or {}, self._seen.now_s):
                self._delete(pod, 0)
            elif pod.state is PodState.LEAVING:
                self._again.append(LOOK_S)

    def _heed_notices(self) -> None:
        """Have pods that are about to go emptied while there is time: the first word counts."""
        spot = self._job["spec"].get("spot") or {}
        if spot.get("onReclaimNotice") == "Ignore":
            return
        shown: list[Object] = list(self._status.now.get("disruptions") or [])
        named = {each["pod"] for each in shown}
        any_now = False
        for pod in self._pods:
            node = (self._seen.nodes or {}).get(pod.node)
            keys = spot.get("extraTaintKeys") or (), spot.get("extraNodeConditions") or ()
            notice = notice_of(self._raw[pod.name], node, *keys)
            if notice is None or not (pod.active or pod.state is PodState.LEAVING):
                continue
            any_now = True
            if pod.name not in named and notice.source is not Source.DELETION:
                shown.append(self._disruption(pod, notice))
            if pod.active and notice.source in (Source.NODE_TAINT, Source.NODE_CONDITION) and pod.node:
                self._delete(pod)
        if shown:
            self._status.now["disruptions"] = shown[-_SHOWN_DISRUPTIONS:]
        self._status.say(Condition.RECLAIM_NOTICE, any_now, PODS_LEAVE if any_now else "None")

    def _disruption(self, pod: PodFacts, notice: PodNotice) -> Object:
        at = stamp_of(self._seen.now_s)
        return {"pod": pod.name, "node": pod.node, "source": notice.source.value, "noticeTime": at}

    def _say_what_cannot_start(self) -> None:
        """Tell why containers do not start: nobody can read the log of a pod that never ran."""
        found = sorted((name, why) for name, pod in self._raw.items() if (why := cannot_start(pod)))
        message = f"{found[0][0]}: {found[0][1]}" if found else ""
        self._status.say(Condition.CANNOT_START, bool(found), "ContainerCannotStart" if found else "", message)

    def _say_why_pods_fail(self) -> None:
        """Tell the last words of a pod that failed by itself, until the master has a member of each pod again. (A pod
        counts as ready as soon as its container runs.)"""
        failed = [pod for pod in self._pods if pod.state is PodState.FAILED and not pod.disrupted]
        if failed:
            last = max(failed, key=lambda pod: (pod.ended_at, pod.serial))
            words = last_words(self._raw[last.name]) or f"see kubectl logs {last.name}"
            self._status.say(Condition.PODS_FAIL, True, f"ExitCode{last.exit_code}", f"{last.name}: {words}")
            return
        report = self._seen.report
        if report is not None and all(
            sum(pod.active and report.members.get(pod.name, 0) > 0 for pod in self._of(place)) >= self._wanted.of(place)
            for place in (Place.PS, Place.WORKER)
        ):
            self._status.say(Condition.PODS_FAIL, False)

    def _say_other_version(self) -> None:
        """Tell that the operator and the job's master do not understand each other. The job trains on."""
        other = self._seen.other
        words = ""
        if other is not None:
            words = (
                f"the job's image has {other.master}, the operator is {other.operator}: the job trains, but the "
                "operator cannot scale, suspend or show it; use the same version for both"
            )
        self._status.say(Condition.OTHER_VERSION, other is not None, "Master" if other is not None else "", words)

    def _replace_failed(self, place: Place) -> None:
        """Count pods that failed by themselves. Such a pod keeps its slot for a while, longer after each failure."""
        pods, status = self._of(place), self._status
        failed = [pod for pod in pods if pod.state is PodState.FAILED]
        own = [pod for pod in failed if not pod.disrupted]
        status.count_failures(own, self._pods)
        limit = int(role_spec(self._job, place).get("restartLimit", 10))
        if own and status.restarts(place) > limit:
            words = f"{place.value} pods failed {status.restarts(place)} times, last {own[-1].name}"
            if why := cannot_start(self._raw[own[-1].name]) or last_words(self._raw[own[-1].name]):
                words += f" ({why})"
            status.end(JobPhase.FAILED, "RestartLimit", f"{words}; restartLimit is {limit}")
            return
        pause_s = min(_PAUSE_MAX_S, 2.0 ** min(10, status.restarts(place)))
        for pod in failed:
            left_s = pod.ended_at + pause_s - self._seen.now_s
            if pod in own and pod.ended_at and left_s > 0:
                self._again.append(left_s)
            else:
                self._delete(pod)

    def _wait_no_longer_for_spot(self, place: Place) -> None:
        """Give up pods that no spot machine has taken for too long: others fill their slots, on any machine."""
        limit_s = (self._job["spec"].get("spot") or {}).get("fallbackAfterSeconds")
        if limit_s is None or not objects.only_spot(self._job, place):
            return
        for pod in self._of(place):
            if (
                pod.state is not PodState.PENDING
                or pod.node
                or FALLBACK_LABEL in self._raw[pod.name]["metadata"]["labels"]
            ):
                continue
            left_s = pod.began_at + float(limit_s) - self._seen.now_s
            if left_s > 0:
                self._again.append(left_s)
            else:
                self._delete(pod)
                self._on_demand.add((place, pod.slot))

    def _scale_in(self, place: Place) -> None:
        """Delete pods that are too many: named ones, those that never ran, those that the master has emptied."""
        active = [pod for pod in self._of(place) if pod.active]
        excess = len(active) - self._wanted.of(place)
        if excess <= 0:
            return
        report, victims = self._seen.report, self._victims()
        may_go = report is not None and self._wants_no_more(place)
        if place is Place.MASTER:
            may_go = True
        ranked = sorted(active, key=lambda p: (p.name not in victims, p.state is PodState.RUNNING, -p.slot, -p.serial))
        for pod in ranked:
            empty = pod.state is PodState.PENDING or not (report.members.get(pod.name, 0) if report else 1)
            if excess and (place is Place.MASTER or (may_go and (empty or pod.name in victims))):
                self._delete(pod)
                excess -= 1
        if excess:
            self._again.append(2.0)

    def _victims(self) -> tuple[str, ...]:
        return carry_out(self._job, self._seen.requests, self._pods, self._seen.now_s).victims

    def _wants_no_more(self, place: Place) -> bool:
        """Return whether the master wants no more members of a kind than the job does."""
        report = self._seen.report
        if report is None:
            return False
        return (report.ps if place is Place.PS else report.workers) <= max(1, self._wanted.of(place))

    def _fill(self, place: Place, settings: dict[str, Any]) -> None:
        """Create pods in slots that have none. Slots of pods that have ended well, or wait, are filled."""
        holding = [pod for pod in self._of(place) if pod.state is not PodState.LEAVING]
        wanted = self._wanted.of(place)
        if self._gang_waits:
            wanted = min(wanted, gangs.least(self._job).of(place))
        missing = wanted - len(holding)
        if missing <= 0:
            return
        refused = self._seen.refused
        if refused is not None:
            condition = _CONDITIONS.get(refused.why)
            if condition is not None:
                self._status.say(condition, True, refused.why.value, refused.message)
            self._again.append(REFUSED_S)
            return
        if gangs.kind_of(self._job) is not None and self._seen.gang is None:
            return  # (its PodGroup comes first: some schedulers make one themselves for a pod without)
        taken = {pod.slot for pod in holding}
        slots = [slot for slot in range(len(taken) + missing) if slot not in taken][:missing]
        for slot in slots:
            self._serial += 1
            on_demand = (place, slot) in self._on_demand
            body = objects.pod(self._job, place, slot, self._serial, settings, on_demand)
            self._actions.append(Create(Kind.POD, body))
        self._status.now["podsMade"] = self._serial
        for condition in _CONDITIONS.values():
            self._status.say(condition, False)

    # ------------------------------------------------------------ what is told

    def _tell_master(self) -> None:
        report = self._seen.report
        if report is None or report.over:
            return
        workers, ps = max(1, self._wanted.workers), self._wanted.ps
        tell = TellSize(workers if report.workers != workers else 0, ps if report.ps != ps else 0)
        if tell.workers or tell.ps:
            self._actions.append(tell)
        if gone := self._gone_with_members():
            self._actions.append(TellGone(gone))

    def _gone_with_members(self) -> tuple[str, ...]:
        """Return pods that are gone, and that the master still counts on: it hears it now and not by their silence."""
        report, now_s, name = self._seen.report, self._seen.now_s, name_of(self._job)
        assert report is not None
        alive = {
            pod.name
            for pod in self._pods
            if pod.state in (PodState.PENDING, PodState.RUNNING, PodState.LEAVING)
            and not machine_gone(pod, self._seen.nodes, now_s)
        }
        ours = tuple(f"{name}-{place.value}-" for place in (Place.PS, Place.WORKER))
        return tuple(
            sorted(pod for pod, n in report.members.items() if n and pod.startswith(ours) and pod not in alive)
        )

    def _name_phase(self, scaling: bool) -> None:
        status, report = self._status, self._seen.report
        pods = [pod for pod in self._pods if pod.name not in self._doomed]
        ready = all(
            sum(p.place is place and p.active and p.ready for p in pods) >= self._wanted.of(place) for place in Place
        )
        master = next((p for p in pods if p.place is Place.MASTER and p.active), None)
        status.now["master"] = {
            "address": objects.master_address(self._job),
            "ready": master is not None and master.ready,
            "restarts": status.restarts(Place.MASTER),
        }
        status.say(Condition.READY, ready, "AllPodsReady" if ready else "PodsMissing")
        if report is not None and not report.over:
            old = status.now.get("progress") or {}
            late = self._seen.now_s - seconds_of(old.get("time")) >= PROGRESS_S
            if report.samples != old.get("samples", 0) and (late or status.changed() is not None):
                at = stamp_of(self._seen.now_s)
                status.now["progress"] = {"step": report.step, "samples": report.samples, "time": at}
                if report.percent >= 0:
                    status.now["progress"]["percent"] = report.percent
                if report.headline:
                    members = [dict(each) for each in report.slowest[:MEMBERS_SHOWN]]
                    status.now["speed"] = {"time": at, "words": report.headline, "members": members}
            if report.membership:
                status.now["membershipEpoch"] = report.membership
            if report.checkpoint:
                at = stamp_of(report.checkpoint_at)
                status.now["checkpoint"] = {"number": report.checkpoint, "time": at}
        status.phase = self._phase(ready, scaling)

    def _phase(self, ready: bool, scaling: bool) -> JobPhase:
        status, report = self._status, self._seen.report
        if status.is_true(Condition.SUSPENDED):
            return JobPhase.SUSPENDED
        if status.is_true(Condition.SUSPENDING):
            return JobPhase.SUSPENDING
        if scaling:
            return JobPhase.SCALING
        if (report is not None and report.waiting) or (self._gang_waits and report is None):
            return JobPhase.WAITING
        if ready:
            return JobPhase.RUNNING
        ran = status.phase not in (JobPhase.PENDING, JobPhase.SUSPENDED, JobPhase.SUSPENDING)
        return JobPhase.RECOVERING if ran else JobPhase.PENDING
