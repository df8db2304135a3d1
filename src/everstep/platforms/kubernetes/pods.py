"""Reads pods and nodes: what a pod is for, whether it works, how it ended, whether its node goes away. Pure."""

from __future__ import annotations

import datetime
from collections.abc import Iterable, Mapping
from enum import StrEnum
from typing import Final, NamedTuple

from everstep.errors import escaped
from everstep.platforms.kubernetes.kinds import CONTAINER, ROLE_LABEL, SLOT_LABEL, Object, Place, is_leaving, name_of

OUT_OF_SERVICE: Final = "node.kubernetes.io/out-of-service"
"""Key of the taint by which people say that a machine is off."""
TAINTS: Final = frozenset(
    {
        "aws-node-termination-handler/spot-itn",
        "aws-node-termination-handler/asg-lifecycle-termination",
        "aws-node-termination-handler/scheduled-maintenance",
        "karpenter.sh/disruption",
        "karpenter.sh/disrupted",
        "cloud.google.com/impending-node-termination",
        "remediator.kubernetes.azure.com/unschedulable",
        "ToBeDeletedByClusterAutoscaler",
        OUT_OF_SERVICE,
    }
)
"""Keys of taints by which a node is said to go away."""
NODE_CONDITIONS: Final = frozenset({"InstanceExpired", "TerminationScheduled"})
NODE_KNOWN_S: Final = 60.0
"""So long a pod is on a node before the node's absence from the list counts: a watch may lag."""
OVERDUE_S: Final = 60.0
"""So long after its time a pod that is being deleted counts as stuck on a node that is dead."""
SUSPENDED_CODE: Final = 7
OUR_LINES: Final = "everstep: "
"""Begins each line in which everstep says why it ends."""
_WORDS_MAX: Final = 400
FINAL_CODES: Final = frozenset({1, 2, 3, 4, 5, 6, 130})
"""Exit codes by which a master says that its job is over; others are losses of the pod."""


class Source(StrEnum):
    """Says who said that a pod goes away."""

    NODE_TAINT = "NodeTaint"
    NODE_CONDITION = "NodeCondition"
    POD_CONDITION = "PodCondition"
    DELETION = "Deletion"


class EndReason(StrEnum):
    """Is a reason by which a container's end is told apart from others with its exit code."""

    OUT_OF_MEMORY = "OOMKilled"


class CannotStart(StrEnum):
    """Is a reason for which a container waits that may never start."""

    NO_IMAGE = "ErrImagePull"
    NO_IMAGE_STILL = "ImagePullBackOff"
    NEVER_PULLED = "ErrImageNeverPull"
    WRONG_NAME = "InvalidImageName"
    WRONG_CONFIG = "CreateContainerConfigError"
    NOT_MADE = "CreateContainerError"
    NOT_RUN = "RunContainerError"


class NeverRan(StrEnum):
    """Is a reason for which a container ended before its program ran."""

    NO_PROGRAM = "ContainerCannotRun"
    NO_START = "StartError"


class PodState(StrEnum):
    """Says what a pod is doing."""

    PENDING = "pending"
    RUNNING = "running"
    LEAVING = "leaving"
    SUCCEEDED = "succeeded"
    FAILED = "failed"


class PodFacts(NamedTuple):
    """Says what counts about one pod. ``exit_code`` None: nobody said. ``disrupted``: the cluster took it, it is not
    its own failure. ``serial``: pods are counted in the order in which they were made. ``left_at``: when its time to
    leave is over, in seconds since 1970; 0.0: it is not leaving. ``ended_at``: when its container ended; 0.0: no
    word. ``began_at``: when its node took it, or else when it was made."""

    name: str
    uid: str
    place: Place
    slot: int
    serial: int
    state: PodState
    ready: bool
    node: str
    ip: str
    exit_code: int | None
    disrupted: bool
    left_at: float
    ended_at: float
    began_at: float = 0.0

    @property
    def active(self) -> bool:
        """The pod fills its slot, or soon will."""
        return self.state in (PodState.PENDING, PodState.RUNNING)


def facts_of(pod: Object) -> PodFacts | None:
    """Return what counts about a pod; None: its labels or its name are not those of a job's pod."""
    meta, spec, status = pod["metadata"], pod.get("spec") or {}, pod.get("status") or {}
    labels = meta.get("labels") or {}
    serial = name_of(pod).rpartition("-")[2]
    slot = str(labels.get(SLOT_LABEL, ""))
    if labels.get(ROLE_LABEL) not in tuple(Place) or not slot.isdecimal() or not serial.isdecimal():
        return None
    phase, (code, ended_at, of_memory) = status.get("phase", "Pending"), _ending(status)
    conditions = _true(status)
    state = {"Running": PodState.RUNNING, "Succeeded": PodState.SUCCEEDED, "Failed": PodState.FAILED}.get(phase)
    if state in (None, PodState.RUNNING) and is_leaving(pod):
        state = PodState.LEAVING
    return PodFacts(
        name_of(pod),
        str(meta.get("uid", "")),
        Place(labels[ROLE_LABEL]),
        int(slot),
        int(serial),
        state or PodState.PENDING,
        "Ready" in conditions,
        str(spec.get("nodeName") or ""),
        str(status.get("podIP") or ""),
        code,
        "DisruptionTarget" in conditions or is_leaving(pod) or (code in (None, 137, 143) and not of_memory),
        seconds_of(meta.get("deletionTimestamp")) if is_leaving(pod) else 0.0,
        ended_at,
        seconds_of(status.get("startTime")) or seconds_of(meta.get("creationTimestamp")),
    )


def _ending(status: Object) -> tuple[int | None, float, bool]:
    """Return exit code and time of the container that runs everstep, or else of the first that has ended; and whether
    it wanted too much memory."""
    ended = []
    for container in status.get("containerStatuses") or []:
        state = (container.get("state") or {}).get("terminated")
        if state:
            ended.append((container.get("name") != CONTAINER, state))
    for _, state in sorted(ended, key=lambda each: each[0]):
        code, at = int(state.get("exitCode", 0)), seconds_of(state.get("finishedAt"))
        return code, at, state.get("reason") == EndReason.OUT_OF_MEMORY
    return None, 0.0, False


def cannot_start(pod: Object) -> str:
    """Return why the container of a pod cannot start, in the node's words; "": nothing is said. Such as an image that
    is not there, or one without everstep."""
    for container in (pod.get("status") or {}).get("containerStatuses") or []:
        state = container.get("state") or {}
        waiting, ended = state.get("waiting") or {}, state.get("terminated") or {}
        for found, kinds in ((waiting, CannotStart), (ended, NeverRan)):
            code, words = found.get("reason"), " ".join(str(found.get("message") or "").split())
            if code in tuple(kinds):
                return f"{code}: {words}"[:_WORDS_MAX].rstrip(": ")
    return ""


def last_words(pod: Object) -> str:
    """Return what the container of a pod that failed said last, as its node passes it on; "": nothing. A line of
    everstep goes before one of others."""
    for container in (pod.get("status") or {}).get("containerStatuses") or []:
        ended = (container.get("state") or {}).get("terminated") or {}
        lines = [" ".join(line.split()) for line in str(ended.get("message") or "").splitlines()]
        ours = [line.removeprefix(OUR_LINES) for line in lines if line.startswith(OUR_LINES)]
        if found := [line for line in (*lines, *ours) if line]:
            return escaped(found[-1], _WORDS_MAX)
    return ""


def _true(status: Object) -> set[str]:
    return {c["type"] for c in status.get("conditions") or [] if c.get("status") == "True"}


def node_ready(node: Object | None) -> bool:
    """Return whether a node is there and heard of. A node of which nothing may be read counts as ready."""
    return node is not None and "Ready" in _true(node.get("status") or {})


class PodNotice(NamedTuple):
    """Brings word that a pod goes away."""

    source: Source
    what: str


def notice_of(pod: Object, node: Object | None, taints: Iterable[str], conditions: Iterable[str]) -> PodNotice | None:
    """Return by what a pod, or its node, is said to go away; None: by nothing. ``taints``, ``conditions``: more keys
    that count."""
    if node is not None:
        known = TAINTS | set(taints)
        tolerated = {t.get("key") for t in (pod.get("spec") or {}).get("tolerations") or []}
        for taint in (node.get("spec") or {}).get("taints") or []:
            if taint.get("key") in known and taint["key"] not in tolerated:
                return PodNotice(Source.NODE_TAINT, str(taint["key"]))
        known, since = NODE_CONDITIONS | set(conditions), seconds_of(pod["metadata"].get("creationTimestamp"))
        for condition in (node.get("status") or {}).get("conditions") or []:
            # (a pod that came later was put there all the same: it would be put there again)
            says = condition.get("status") == "True" and condition.get("type") in known
            if says and since <= (seconds_of(condition.get("lastTransitionTime")) or since):
                return PodNotice(Source.NODE_CONDITION, str(condition["type"]))
    for condition in (pod.get("status") or {}).get("conditions") or []:
        if condition.get("type") == "DisruptionTarget" and condition.get("status") == "True":
            return PodNotice(Source.POD_CONDITION, str(condition.get("reason") or "DisruptionTarget"))
    if is_leaving(pod):
        return PodNotice(Source.DELETION, "it is being deleted")
    return None


def seconds_of(stamp: object) -> float:
    """Return seconds since 1970 of a time as the API has it; 0.0: it is none."""
    if not isinstance(stamp, str) or not stamp:
        return 0.0
    try:
        return datetime.datetime.fromisoformat(stamp).timestamp()
    except ValueError:
        return 0.0


def stamp_of(at: float) -> str:
    """Return a time as the API has it."""
    return datetime.datetime.fromtimestamp(int(at), datetime.UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def machine_gone(facts: PodFacts, nodes: Mapping[str, Object] | None, now_s: float) -> bool:
    """Return whether the machine of a pod is no more: its Node was deleted, or is said to be out of service. The pod is
    listed as running for a while. (A node that is only not heard of may live: its members speak to the master.)
    ``nodes`` None: they may not be read."""
    if not nodes or not facts.node or now_s - facts.began_at < NODE_KNOWN_S:
        return False
    node = nodes.get(facts.node)
    taints = (node.get("spec") or {}).get("taints") or [] if node is not None else []
    return node is None or any(taint.get("key") == OUT_OF_SERVICE for taint in taints)


def stuck(facts: PodFacts, nodes: Mapping[str, Object], now_s: float) -> bool:
    """Return whether a pod that is being deleted will stay: its time is over, and its node is not heard of."""
    late = facts.state is PodState.LEAVING and now_s > facts.left_at + OVERDUE_S
    return late and bool(nodes) and not node_ready(nodes.get(facts.node))
