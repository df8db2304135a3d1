"""Runs the operator: watches objects, and for each job that something happened to, reconciles and does what that asks.

Objects are listed and then watched, one thread for each kind; what was created is known at once (``Cache.made``). A
job is looked at by one thread, so never twice at a time; after a failure it is looked at later and later.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from typing import Final, NamedTuple, Protocol

from everstep.errors import EverstepError
from everstep.net.auth import VersionError
from everstep.net.retry import backoff
from everstep.platforms.kubernetes import gangs, objects
from everstep.platforms.kubernetes.actions import (
    Action,
    Apply,
    AskSuspend,
    Create,
    CreateRefused,
    Delete,
    MakeSecret,
    MasterReport,
    OtherVersion,
    Refusal,
    Seen,
    SetFinalizers,
    SetReplicas,
    SetRequest,
    SetSuspend,
    TellGone,
    TellSize,
)
from everstep.platforms.kubernetes.api_client import (
    ApiReason,
    ApiServerError,
    Cache,
    ClusterClient,
)
from everstep.platforms.kubernetes.kinds import (
    API_VERSION,
    JOB_LABEL,
    Kind,
    Object,
    Place,
    dropped,
    name_of,
    owner_uid,
    uid_of,
    without,
)
from everstep.platforms.kubernetes.pods import PodState, facts_of
from everstep.platforms.kubernetes.reconcile import reconcile
from everstep.platforms.kubernetes.scale_requests import carry_out

WATCH_S: Final = 240
ASK_S: Final = 4.0
"""So often a master is asked, at most."""
REPORT_S: Final = 12.0
"""So long what a master said counts."""
SECRET_S: Final = 60.0
GANG_S: Final = 60.0
"""So long a PodGroup that was read counts."""
_REFUSED_S: Final = 20.0
_AGAIN_MAX_S: Final = 60.0
_NEW_CRDS: Final = "everstep crd print | kubectl apply -f -"
_WATCHED: Final = (
    Kind.JOB,
    Kind.SCALE_OUT,
    Kind.SCALE_IN,
    Kind.POD,
    Kind.SERVICE,
    Kind.VOLUME_CLAIM,
    Kind.BUDGET,
    Kind.NODE,
)
_OWNED: Final = (Kind.SERVICE, Kind.VOLUME_CLAIM, Kind.BUDGET)
JobKey = tuple[str, str]


class MasterLink(Protocol):
    """Is how the operator talks to the masters of jobs. Calls raise EverstepError."""

    def report(self, host: str, secret: str) -> MasterReport:
        """Return what a master says."""
        ...

    def tell_size(self, host: str, secret: str, workers: int, ps: int) -> None:
        """Tell it how many workers and ps are wanted; 0: as before."""
        ...

    def tell_gone(self, host: str, secret: str, pods: Sequence[str]) -> None:
        """Tell it that pods are gone for good."""
        ...

    def suspend(self, host: str, secret: str, suspensions: int) -> None:
        """Ask it to make the job's state safe and end, unless the job was suspended more than ``suspensions`` times: a
        call may come so late that the job's next master gets it."""
        ...

    def fresh_secret(self) -> str:
        """Return the text of a new job's secret."""
        ...


class _Known(NamedTuple):
    at: float
    value: MasterReport | None


class WorkQueue:
    """Knows which jobs are to be looked at, and when. A job is in it once."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._due: dict[JobKey, float] = {}
        self._waits: dict[JobKey, list[float]] = {}
        self._clock = clock
        self._changed = threading.Condition()

    def __repr__(self) -> str:
        return f"<{len(self._due)} jobs to look at>"

    def put(self, key: JobKey, in_s: float = 0.0) -> None:
        """Have a job looked at in ``in_s`` seconds, or earlier if that was asked for."""
        with self._changed:
            at = self._clock() + in_s
            self._due[key] = min(at, self._due.get(key, at))
            self._changed.notify()

    def failed(self, key: JobKey) -> None:
        """Have a job looked at again, later after each failure in a row."""
        waits = self._waits.setdefault(key, [1.0])
        self.put(key, waits[-1])
        waits.append(min(_AGAIN_MAX_S, 2 * waits[-1]))

    def succeeded(self, key: JobKey) -> None:
        """A look went well."""
        self._waits.pop(key, None)

    def take(self, wait_s: float) -> JobKey | None:
        """Return a job that is due; None: none is within ``wait_s`` seconds."""
        end = self._clock() + wait_s
        with self._changed:
            while True:
                now = self._clock()
                due = min(self._due.items(), key=lambda item: item[1], default=None)
                if due is not None and due[1] <= now:
                    del self._due[due[0]]
                    return due[0]
                left_s = min(end, due[1] if due is not None else end) - now
                if now >= end:
                    return None
                self._changed.wait(max(0.0, left_s))


class Operator:
    """Keeps the jobs of one namespace. ``say``: told a line for people. ``leads``: whether it may act now. ``run``:
    runs what waits for a master, which may be dead: at once, or on threads of its own."""

    def __init__(
        self,
        client: ClusterClient,
        namespace: str,
        link: MasterLink,
        say: Callable[[str], None],
        leads: Callable[[], bool] = lambda: True,
        run: Callable[[Callable[[], None]], object] = lambda call: call(),
    ) -> None:
        self._client, self._namespace, self._link, self._say, self._leads = client, namespace, link, say, leads
        self._run = run
        self.queue = WorkQueue()
        self.looks_s: list[float] = []
        self._caches = {kind: Cache() for kind in _WATCHED}
        self._lock = threading.Lock()  # guards the caches
        self._listed: set[Kind] = set()
        self._refused_kinds: set[Kind] = set()
        self._reports: dict[str, _Known] = {}
        self._secrets: dict[str, tuple[float, str]] = {}
        self._gangs: dict[str, tuple[float, Object | None]] = {}  # PodGroups, by the uid of their job
        self._refusals: dict[str, tuple[float, CreateRefused]] = {}
        self._others: dict[str, OtherVersion] = {}  # jobs, by uid, whose master is of another version
        self._asking: set[tuple[str, bool]] = set()  # jobs, by uid, whose master is being asked (True: for a report)
        self._without_events = False
        self._unkept: set[str] = set()  # fields of a status that the cluster does not know
        self._over = threading.Event()

    def __repr__(self) -> str:
        return f"<operator of {self._namespace}: {self.queue!r}>"

    # ------------------------------------------------------------ watching

    def start(self) -> None:
        """Begin to watch."""
        for kind in _WATCHED:
            threading.Thread(target=self._watch, args=(kind,), name=f"watch-{kind.value}", daemon=True).start()

    def run(self) -> None:
        """Look at jobs until ``close``."""
        self.start()
        while not self._over.is_set():
            if not self._ready():
                self._over.wait(0.05)
            elif not self._leads():
                self._over.wait(0.2)
            elif (key := self.queue.take(0.5)) is not None:
                self.look(key)

    def close(self) -> None:
        """Stop; what was begun is done."""
        self._over.set()

    def _ready(self) -> bool:
        with self._lock:
            return set(_WATCHED) <= self._listed | self._refused_kinds

    def _watch(self, kind: Kind) -> None:
        """List, then watch, for ever. What may not be read is done without, if it is not ours."""
        waits, listed = backoff(0.5, 30.0, spread=0.1, at_once=False), False
        namespace = "" if kind is Kind.NODE else self._namespace
        while not self._over.is_set():
            try:
                if not listed:
                    things, version = self._client.list_all(kind, namespace)
                    with self._lock:
                        self._caches[kind].replace(things, version)
                        self._listed.add(kind)
                        self._refused_kinds.discard(kind)
                    listed = True
                    self._all_again()
                for change in self._client.watch(kind, namespace, self._caches[kind].version, WATCH_S):
                    with self._lock:
                        self._caches[kind].tell(change)
                    self._happened(kind, change.thing)
                    if self._over.is_set():
                        return
                waits = backoff(0.5, 30.0, spread=0.1, at_once=False)
            except ApiServerError as error:
                if error.reason in (ApiReason.GONE, ApiReason.EXPIRED):
                    listed = False
                    continue
                if error.reason is ApiReason.FORBIDDEN:
                    self._without(kind, error)
                elif not self._over.is_set() and not error.passing:
                    self._say(f"{error}; it is asked again")
                self._over.wait(next(waits))

    def _without(self, kind: Kind, error: ApiServerError) -> None:
        with self._lock:
            first = kind not in self._refused_kinds and kind not in self._listed
            if kind is Kind.NODE:
                self._refused_kinds.add(kind)
        if first:
            less = "; notices are taken from pods alone" if kind is Kind.NODE else "; the operator waits for this right"
            self._say(f"{error}{less}")

    def _happened(self, kind: Kind, thing: Object) -> None:
        meta = thing["metadata"]
        if not meta.get("name"):
            return  # (a bookmark)
        namespace = str(meta.get("namespace", self._namespace))
        if kind is Kind.JOB:
            self.queue.put((namespace, meta["name"]))
        elif kind in (Kind.SCALE_OUT, Kind.SCALE_IN):
            self.queue.put((namespace, str(thing["spec"]["jobName"])))
        elif kind is Kind.NODE:
            self._all_again()
        elif job := (meta.get("labels") or {}).get(JOB_LABEL):
            self.queue.put((namespace, str(job)))

    def _all_again(self) -> None:
        with self._lock:
            jobs = [(t["metadata"]["namespace"], name_of(t)) for t in self._caches[Kind.JOB].all()]
            asked = [*self._caches[Kind.SCALE_OUT].all(), *self._caches[Kind.SCALE_IN].all()]
        for key in {*jobs, *((t["metadata"]["namespace"], str(t["spec"]["jobName"])) for t in asked)}:
            self.queue.put(key)

    # ------------------------------------------------------------ one look

    def look(self, key: JobKey) -> None:
        """Look at a job, and do what is to be done. A refusal makes the next look come later."""
        began = time.monotonic()
        try:
            self._look(key)
            self.queue.succeeded(key)
        except ApiServerError as error:
            if error.reason is ApiReason.CONFLICT:
                self.queue.put(key, 0.05)  # the job has changed meanwhile: the watch brings it
            else:
                self._say(f"{key[1]}: {error}; it is tried again")
                self.queue.failed(key)
        except EverstepError as error:
            self._say(f"{key[1]}: {error}; it is tried again")
            self.queue.failed(key)
        finally:
            self.looks_s.append(time.monotonic() - began)
            del self.looks_s[:-100_000]

    def _look(self, key: JobKey) -> None:
        namespace, name = key
        with self._lock:
            job = self._caches[Kind.JOB].get(namespace, name)
            asked = [*self._caches[Kind.SCALE_OUT].all(), *self._caches[Kind.SCALE_IN].all()]
            asked = [t for t in asked if (t["metadata"]["namespace"], t["spec"]["jobName"]) == key]
            pods = [p for p in self._caches[Kind.POD].all() if job is not None and owner_uid(p) == uid_of(job)]
            others = {(kind, name_of(t)) for kind in _OWNED for t in self._caches[kind].all() if _is_of(t, job)}
            nodes = None
            if Kind.NODE not in self._refused_kinds:
                nodes = {name_of(node): node for node in self._caches[Kind.NODE].all()}
        if job is None:
            for action in carry_out(None, asked, (), time.time()).actions:
                self._do(namespace, None, action)
            return
        if self._secret_of(job):
            others.add((Kind.SECRET, objects.secret_name(job)))
        seen = Seen(
            job,
            time.time(),
            tuple(pods),
            frozenset(others),
            tuple(asked),
            nodes,
            self._report_of(job, pods),
            self._refusal_of(job),
            self._gang_of(job),
            self._others.get(uid_of(job)),
        )
        plan = reconcile(seen)
        if plan.status is not None and self._is_news(job, plan.status):
            self._write_status(job, plan.status)
        for action in plan.actions:
            self._do(namespace, job, action, tuple(pods))
        if plan.again_s is not None:
            self.queue.put(key, max(0.1, plan.again_s))

    def _write_status(self, job: Object, status: Object) -> None:
        meta = {k: job["metadata"][k] for k in ("name", "namespace", "resourceVersion")}
        body = {"apiVersion": API_VERSION, "kind": Kind.JOB.value, "metadata": meta, "status": status}
        written = self._client.apply_status(Kind.JOB, meta["namespace"], body)
        self._made(Kind.JOB, written)
        unknown = set(dropped(status, written.get("status") or {})) - self._unkept
        if unknown:
            self._unkept |= unknown
            names = ", ".join(f"status.{name}" for name in sorted(unknown))
            self._say(f"the cluster's CRDs are of another version, and do not keep {names}: {_NEW_CRDS}")

    def _is_news(self, job: Object, status: Object) -> bool:
        """Return whether a status says anything new that this cluster's CRDs keep."""
        return not self._unkept or without(status, self._unkept) != (job.get("status") or {})

    def _made(self, kind: Kind, thing: Object) -> None:
        with self._lock:
            self._caches[kind].made({"kind": kind.value, **thing})

    # ------------------------------------------------------------ what a plan asks for

    def _do(self, namespace: str, job: Object | None, action: Action, pods: tuple[Object, ...] = ()) -> None:
        match action:
            case Create(kind, body):
                self._create(job, namespace, kind, body)
            case Apply(kind, body) if job is not None:
                self._apply_gang(job, kind, body)
            case MakeSecret() if job is not None:
                body = objects.secret(job, self._link.fresh_secret())
                self._create(job, namespace, Kind.SECRET, body)
            case Delete(kind, name, uid, grace_s):
                self._delete(kind, namespace, name, uid, grace_s)
            case SetReplicas(place, count, version) if job is not None:
                meta = {"resourceVersion": version}
                body = {"metadata": meta, "spec": {place.value: {"replicas": count}}}
                self._made(Kind.JOB, self._client.patch(Kind.JOB, namespace, name_of(job), body))
            case SetSuspend(version) if job is not None:
                body = {"metadata": {"resourceVersion": version}, "spec": {"suspend": True}}
                self._made(Kind.JOB, self._client.patch(Kind.JOB, namespace, name_of(job), body))
            case SetFinalizers(version, finalizers) if job is not None:
                body = {"metadata": {"resourceVersion": version, "finalizers": list(finalizers)}}
                self._made(Kind.JOB, self._client.patch(Kind.JOB, namespace, name_of(job), body))
            case SetRequest(kind, name, version, status):
                meta = {"name": name, "namespace": namespace, "resourceVersion": version}
                body = {"apiVersion": API_VERSION, "kind": kind.value, "metadata": meta, "status": status}
                self._made(kind, self._client.apply_status(kind, namespace, body))
            case TellSize(workers, ps) if job is not None:
                self._ask(job, pods, lambda host, secret: self._link.tell_size(host, secret, workers, ps))
            case TellGone(gone) if job is not None:
                self._ask(job, pods, lambda host, secret: self._link.tell_gone(host, secret, gone))
            case AskSuspend(suspensions) if job is not None:
                self._ask(job, pods, lambda host, secret: self._link.suspend(host, secret, suspensions))

    def _create(self, job: Object | None, namespace: str, kind: Kind, body: Object) -> None:
        try:
            made = self._client.create(kind, namespace, body)
        except ApiServerError as error:
            if error.reason is ApiReason.ALREADY_EXISTS:
                return
            if kind is Kind.EVENT:  # (nothing depends on them)
                if not self._without_events:
                    self._say(f"{error}; jobs go on without Events")
                self._without_events = True
                return
            if kind is Kind.POD and job is not None and (why := self._why(namespace, error)) is not None:
                self._refuse(job, CreateRefused(why, str(error)))
                return
            raise
        if kind in self._caches:
            self._made(kind, made)

    def _apply_gang(self, job: Object, kind: Kind, body: Object) -> None:
        """Make a job's PodGroup. A cluster that has none of them is a refusal that the job's conditions tell."""
        namespace = str(job["metadata"]["namespace"])
        try:
            made = self._client.apply(kind, namespace, body, force=True)
        except ApiServerError as error:
            if error.passing or error.reason is ApiReason.CONFLICT:
                raise
            words, why = str(error), Refusal.GANG
            if error.reason is ApiReason.FORBIDDEN:
                why = Refusal.FORBIDDEN
            elif error.reason is ApiReason.NOT_FOUND:
                words = gangs.missing_words(kind)
            self._refuse(job, CreateRefused(why, words))
            return
        self._gangs[uid_of(job)] = time.monotonic(), made
        self.queue.put((namespace, name_of(job)))

    def _gang_of(self, job: Object) -> Object | None:
        """Return a job's PodGroup; None: there is none. It is read anew now and then."""
        kind, uid = gangs.kind_of(job), uid_of(job)
        if kind is None:
            return None
        at, found = self._gangs.get(uid, (-GANG_S, None))
        if time.monotonic() - at >= GANG_S:
            try:
                found = self._client.get(kind, job["metadata"]["namespace"], name_of(job))
            except ApiServerError as error:
                if error.reason not in (ApiReason.NOT_FOUND, ApiReason.FORBIDDEN):
                    raise
                found = None
            self._gangs[uid] = time.monotonic(), found
        return found

    def _refuse(self, job: Object, refused: CreateRefused) -> None:
        """Remember for a while that something was refused."""
        self._refusals[uid_of(job)] = time.monotonic() + _REFUSED_S, refused
        self._say(f"{refused.message}; again in {_REFUSED_S:g} s")
        self.queue.put((str(job["metadata"]["namespace"]), name_of(job)))

    def _delete(self, kind: Kind, namespace: str, name: str, uid: str, grace_s: int | None) -> None:
        try:
            self._client.delete(kind, namespace, name, uid, grace_s)
        except ApiServerError as error:
            if error.reason not in (ApiReason.NOT_FOUND, ApiReason.CONFLICT):
                raise
        self._gangs = {of: held for of, held in self._gangs.items() if held[1] is None or uid_of(held[1]) != uid}

    def _why(self, namespace: str, error: ApiServerError) -> Refusal | None:
        """Return for what kind of reason a pod was refused; None: another try may do. Of 403 the server says its kind
        in words only, so it is asked: for the right itself, and for quotas that are used up."""
        if error.reason in (ApiReason.INVALID, ApiReason.BAD_REQUEST):
            return Refusal.INVALID
        if error.reason is not ApiReason.FORBIDDEN:
            return None
        if not self._client.may("create", Kind.POD, namespace):
            return Refusal.FORBIDDEN
        try:
            quotas, _ = self._client.list_all(Kind.QUOTA, namespace)
        except ApiServerError:
            return Refusal.QUOTA
        return Refusal.QUOTA if quotas else Refusal.INVALID

    def _refusal_of(self, job: Object) -> CreateRefused | None:
        until, refused = self._refusals.get(uid_of(job), (0.0, None))
        if refused is None or time.monotonic() > until:
            self._refusals.pop(uid_of(job), None)
            return None
        return refused

    # ------------------------------------------------------------ masters

    def _secret_of(self, job: Object) -> str:
        """Return the job's secret; "": it has none yet. It is read anew now and then."""
        at, text = self._secrets.get(uid_of(job), (0.0, ""))
        if text and time.monotonic() - at < SECRET_S:
            return text
        try:
            found = self._client.get(Kind.SECRET, job["metadata"]["namespace"], objects.secret_name(job))
        except ApiServerError as error:
            if error.reason is not ApiReason.NOT_FOUND:
                raise
            return ""
        text = objects.secret_text(found)
        self._secrets[uid_of(job)] = time.monotonic(), text
        return text

    def _report_of(self, job: Object, pods: list[Object]) -> MasterReport | None:
        """Return what the master said last, if that is not old; have it asked again where it is due."""
        known = self._reports.get(uid_of(job), _Known(0.0, None))
        age_s = time.monotonic() - known.at
        if age_s >= ASK_S:
            unheard = age_s >= REPORT_S  # (what is seen now has no report: it is looked at again)

            def report(host: str, secret: str) -> None:
                report = self._link.report(host, secret)
                self._others.pop(uid_of(job), None)
                before = self._reports.get(uid_of(job), _Known(0.0, None)).value
                self._reports[uid_of(job)] = _Known(time.monotonic(), report)
                if report != before or unheard:
                    self.queue.put((job["metadata"]["namespace"], name_of(job)))

            self._ask(job, pods, report, reports=True)
            known = self._reports.get(uid_of(job), known)
        return known.value if time.monotonic() - known.at < REPORT_S else None

    def _ask(
        self, job: Object, pods: Sequence[Object], ask: Callable[[str, str], None], *, reports: bool = False
    ) -> None:
        """Ask the master, if there is one, and nobody asks it already. Its silence is no failure: the next look asks
        again."""
        found = [facts for pod in pods if (facts := facts_of(pod)) is not None and facts.place is Place.MASTER]
        host = next((f.ip for f in found if f.state is PodState.RUNNING and f.ip), "")
        secret = self._secret_of(job) if host else ""
        uid, asked = uid_of(job), (uid_of(job), reports)
        if not secret:
            self._reports.pop(uid, None)
            return
        if asked in self._asking:
            return

        def call() -> None:
            try:
                ask(host, secret)
            except VersionError as error:
                self._note_other(job, error)
                self._reports.pop(uid, None)
            except EverstepError:
                self._reports.pop(uid, None)
                self.queue.put((job["metadata"]["namespace"], name_of(job)), 2.0)
            finally:
                self._asking.discard(asked)

        self._asking.add(asked)
        self._run(call)

    def _note_other(self, job: Object, error: VersionError) -> None:
        """Remember that a job's master is of another version; say so once."""
        uid, other = uid_of(job), OtherVersion(error.theirs, error.ours)
        if self._others.get(uid) != other:
            self._others[uid] = other
            self._say(f"{name_of(job)}: {error}")
            self.queue.put((job["metadata"]["namespace"], name_of(job)))


def _is_of(thing: Object, job: Object | None) -> bool:
    return job is not None and owner_uid(thing) == uid_of(job)
