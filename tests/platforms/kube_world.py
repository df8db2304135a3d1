"""A cluster as one job's operator meets it, for tests of what it decides: objects with versions, a watch that lags,
pods that live and die. No time passes but what the test says."""

from __future__ import annotations

import copy
from typing import Any

from everstep.platforms.kubernetes.actions import (
    Action,
    Apply,
    AskSuspend,
    Create,
    CreateRefused,
    Delete,
    JobPlan,
    MakeSecret,
    MasterReport,
    OtherVersion,
    Seen,
    SetFinalizers,
    SetReplicas,
    SetRequest,
    SetSuspend,
    TellGone,
    TellSize,
)
from everstep.platforms.kubernetes.api_client import Cache, ChangeType, WatchChange
from everstep.platforms.kubernetes.kinds import API_VERSION, Kind, Object, name_of
from everstep.platforms.kubernetes.leavings import out_facts
from everstep.platforms.kubernetes.objects import secret_name
from everstep.platforms.kubernetes.pods import SUSPENDED_CODE, facts_of, stamp_of
from everstep.platforms.kubernetes.reconcile import reconcile

START_S = 1_700_000_000.0
GROUPS = (Kind.VOLCANO_GROUP, Kind.PLUGINS_GROUP, Kind.NATIVE_GROUP)


def job(**spec: Any) -> Object:
    """Return a job as the API server would store it."""
    template = {"spec": {"containers": [{"name": "main", "image": "train:1", "command": ["python", "train.py"]}]}}
    roles = {
        "mode": "ParameterServer",
        "worker": {"replicas": 3, "minReplicas": 1, "maxReplicas": 6, "restartLimit": 1000, "template": template},
        "ps": {"replicas": 2, "minReplicas": 1, "maxReplicas": 4, "restartLimit": 1000, "template": template},
        "master": {"restartLimit": 1000},
    }
    for place in ("worker", "ps", "master"):
        roles[place] = {**roles[place], **spec.pop(place, {})}  # type: ignore[dict-item]
    meta = {"name": "dlrm", "namespace": "team", "uid": "uid-job", "resourceVersion": "1", "generation": 1}
    return {"apiVersion": API_VERSION, "kind": "ElasticJob", "metadata": meta, "spec": {**roles, **spec}}


class Stale(Exception):
    """The object has changed since it was seen."""


class World:
    """The API server, the nodes, the job's master, and one operator at a time."""

    def __init__(self, made: Object) -> None:
        self.version, self.now_s = 1, START_S
        self.job = made
        self.pods: dict[str, Object] = {}
        self.others: set[tuple[Kind, str]] = set()
        self.requests: dict[str, Object] = {}
        self.nodes: dict[str, Object] = {}
        self.events: dict[str, Object] = {}
        self.ever: set[str] = set()  # names of all pods that ever were
        self.log: list[tuple[str, WatchChange]] = []  # what watches will tell
        self.wants = (3, 2)  # what the master was told last
        self.master_works = False
        self.members: dict[str, int] = {}  # by pod, as the master counts them
        self.suspensions = 0  # as the master counts them
        self.asked_to_suspend: list[int] = []  # what the requests said that the operator sent
        self.told_gone: list[tuple[str, ...]] = []  # pods that the master was told are gone
        self.refused: CreateRefused | None = None
        self.gang: Object | None = None  # the PodGroup
        self.other: OtherVersion | None = None  # of the master, where it is another than the operator's
        self.restart_operator()

    # ------------------------------------------------------------ the API server

    def _touch(self, thing: Object) -> Object:
        self.version += 1
        thing["metadata"]["resourceVersion"] = str(self.version)
        return thing

    def _tell(self, what: ChangeType, thing: Object) -> None:
        self.log.append((thing["kind"], WatchChange(what, copy.deepcopy(thing))))

    def _change(self, thing: Object) -> None:
        self._tell(ChangeType.MODIFIED, self._touch(thing))

    def remove(self, name: str) -> None:
        """A pod is no more."""
        self._tell(ChangeType.DELETED, self._touch(self.pods.pop(name)))

    def do(self, action: Action) -> None:
        """Do what the operator asks for. Raises Stale."""
        match action:
            case Create(Kind.POD, body):
                name = name_of(body)
                assert name not in self.ever, f"the name {name} came twice"
                role = body["metadata"]["labels"]["everstep.io/role"]
                holding = [pod for pod in self.pods.values() if pod["status"]["phase"] in ("Pending", "Running")]
                roles = {pod["metadata"]["labels"]["everstep.io/role"] for pod in holding}
                assert not (role == "master" and "out" in roles), "the master's volume is being read"
                assert not (role == "out" and roles), f"{roles} still run"
                self.ever.add(name)
                made = copy.deepcopy(body)
                made["metadata"] |= {"uid": f"uid-{name}", "creationTimestamp": stamp_of(self.now_s)}
                made["status"] = {"phase": "Pending"}
                self.pods[name] = self._touch(made)
                self._tell(ChangeType.ADDED, made)
                self.cache.made(copy.deepcopy(made))
            case Create(Kind.EVENT, body):
                self.events.setdefault(name_of(body), body)
            case Create(kind, body):
                self.others.add((kind, name_of(body)))
            case Apply(_, body):
                self.gang = {**copy.deepcopy(body), "metadata": {**body["metadata"], "uid": f"uid-{self.version}"}}
            case MakeSecret():
                self.others.add((Kind.SECRET, secret_name(self.job)))
            case Delete(Kind.POD, name, uid, grace_s):
                found = self.pods.get(name)
                if found is not None and found["metadata"]["uid"] == uid:
                    if grace_s == 0 or found["status"]["phase"] in ("Pending", "Succeeded", "Failed"):
                        self.remove(name)
                    elif not found["metadata"].get("deletionTimestamp"):
                        found["metadata"]["deletionTimestamp"] = stamp_of(self.now_s + 60)
                        self._change(found)
            case Delete(kind, name, uid, _) if kind in GROUPS:
                assert self.gang is not None and self.gang["metadata"]["uid"] == uid
                self.gang = None
            case Delete(_, name, _, _):
                self.requests.pop(name, None)
            case SetReplicas(place, count, version):
                self._expect(self.job, version)
                self.job["spec"][place.value]["replicas"] = count
                self._change(self.job)
            case SetSuspend(version):
                self._expect(self.job, version)
                self.job["spec"]["suspend"] = True
                self._change(self.job)
            case SetFinalizers(version, finalizers):
                self._expect(self.job, version)
                self.job["metadata"]["finalizers"] = list(finalizers)
                self._change(self.job)
            case SetRequest(_, name, version, status):
                self._expect(self.requests[name], version)
                self.requests[name]["status"] = status
                self._change(self.requests[name])
            case TellSize(workers, ps):
                self.wants = workers or self.wants[0], ps or self.wants[1]
            case TellGone(gone):
                self.told_gone.append(gone)
            case AskSuspend(suspensions):
                self.asked_to_suspend.append(suspensions)
                self.hear_suspend(suspensions)

    def hear_suspend(self, suspensions: int) -> None:
        """The master gets the request, which may have been on its way for long."""
        for found in self.of("master"):
            if found["status"]["phase"] == "Running" and suspensions == self.suspensions:
                self.end(name_of(found), SUSPENDED_CODE)

    def _expect(self, thing: Object, version: str) -> None:
        if thing["metadata"]["resourceVersion"] != version:
            raise Stale

    def write_status(self, seen: Object, status: Object) -> None:
        """Write the job's status onto the job as it was seen. Raises Stale."""
        self._expect(self.job, seen["metadata"]["resourceVersion"])
        self.job["status"] = copy.deepcopy(status)
        self._change(self.job)
        self.seen_job = copy.deepcopy(self.job)

    # ------------------------------------------------------------ the operator

    def restart_operator(self) -> None:
        """Another operator begins: it lists everything."""
        self.cache = Cache()
        self.cache.replace(copy.deepcopy(list(self.pods.values())), str(self.version))
        self.seen_job = copy.deepcopy(self.job)
        self.log.clear()

    def deliver(self, count: int) -> None:
        """The watches tell the next ``count`` changes."""
        for _ in range(min(count, len(self.log))):
            kind, change = self.log.pop(0)
            if kind == Kind.POD:
                self.cache.tell(change)
            elif kind == Kind.JOB and int(change.thing["metadata"]["resourceVersion"]) > int(
                self.seen_job["metadata"]["resourceVersion"]
            ):
                self.seen_job = change.thing

    def look(self) -> tuple[Object, JobPlan]:
        """Reconcile what the operator knows; nothing is done yet."""
        seen_job = copy.deepcopy(self.seen_job)
        report = None
        if self.master_works and any(p["status"]["phase"] == "Running" for p in self.of("master")):
            report = MasterReport(*self.wants, members=self.members, suspensions=self.suspensions)
        seen = Seen(
            seen_job,
            self.now_s,
            tuple(copy.deepcopy(self.cache.all())),
            frozenset(self.others),
            tuple(copy.deepcopy(list(self.requests.values()))),
            copy.deepcopy(self.nodes),
            report,
            self.refused,
            copy.deepcopy(self.gang),
            self.other,
        )
        return seen_job, reconcile(seen)

    def work(self, most: int = 1_000_000) -> JobPlan:
        """Look once, and do at most so many things of it: the operator may be killed in the middle."""
        seen_job, plan = self.look()
        done = 0
        try:
            if plan.status is not None:
                if most == 0:
                    return plan
                self.write_status(seen_job, plan.status)
                done += 1
            for action in plan.actions:
                if done >= most:
                    break
                done += 1
                self.do(action)
        except Stale:
            pass
        return plan

    # ------------------------------------------------------------ pods

    def of(self, place: str) -> list[Object]:
        """Return the pods of a kind."""
        return [pod for pod in self.pods.values() if pod["metadata"]["labels"]["everstep.io/role"] == place]

    def run(self, name: str, node: str = "n1") -> None:
        """A pod's container starts."""
        pod = self.pods[name]
        pod["spec"]["nodeName"] = node
        pod["status"] = {"phase": "Running", "podIP": "10.0.0.1", "conditions": [{"type": "Ready", "status": "True"}]}
        self._change(pod)

    def end(self, name: str, code: int, reason: str = "Error", message: str = "") -> None:
        """A pod's container ends. ``message``: the end of its log."""
        pod = self.pods[name]
        ended = {"exitCode": code, "finishedAt": stamp_of(self.now_s), "reason": reason, "message": message}
        statuses = [{"name": "main", "state": {"terminated": ended}}]
        pod["status"] = {"phase": "Failed" if code else "Succeeded", "containerStatuses": statuses}
        if pod["metadata"]["labels"]["everstep.io/role"] == "master" and code == SUSPENDED_CODE:
            self.suspensions += 1
        self._change(pod)
        if pod["metadata"].get("deletionTimestamp"):
            self.remove(name)

    def delete_job(self) -> None:
        """A user deletes the job: it stays while something holds it."""
        self.job["metadata"]["deletionTimestamp"] = stamp_of(self.now_s)
        self._change(self.job)

    @property
    def gone(self) -> bool:
        """Return whether the job is deleted and nothing holds it."""
        meta = self.job["metadata"]
        return bool(meta.get("deletionTimestamp")) and not meta.get("finalizers")

    def leave(self) -> None:
        """Every pod that is being deleted goes."""
        for name, pod in list(self.pods.items()):
            if pod["metadata"].get("deletionTimestamp"):
                self.remove(name)

    def settle(self, rounds: int = 40, room: int = 1_000) -> None:
        """Everything works for a while: the watch tells all, pods run, those that are deleted go. ``room``: for so many
        pods; a job with a PodGroup gets nodes for all of its least, or for none."""
        for _ in range(rounds):
            self.deliver(len(self.log))
            self.work()
            self.leave()
            waiting = [name for name, pod in self.pods.items() if pod["status"]["phase"] == "Pending"]
            running = sum(pod["status"]["phase"] == "Running" for pod in self.pods.values())
            fit = waiting[: max(0, room - running)]
            if self.gang is not None:
                spec = self.gang["spec"]
                least = spec["minMember"] if "minMember" in spec else spec["schedulingPolicy"]["gang"]["minCount"]
                fit = fit if running + len(fit) >= least else []
            for name in fit:
                self.run(name)
            self.now_s += 61.0  # (longer than any pause)

    def wanted(self) -> dict[str, int]:
        """Return how many pods there should be."""
        spec = self.job["spec"]
        return {"master": 1, "ps": spec["ps"]["replicas"], "worker": spec["worker"]["replicas"]}

    def there(self) -> dict[str, int]:
        """Return how many pods there are that work."""
        found = dict.fromkeys(("master", "ps", "worker"), 0)
        for pod in self.pods.values():
            facts = facts_of(pod)
            assert facts is not None or out_facts(pod) is not None
            if facts is not None:
                found[facts.place.value] += facts.active
        return found
