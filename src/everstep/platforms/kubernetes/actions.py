"""Has what reconciling a job asks for, and what it is told: structs without logic."""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum

import msgspec

from everstep.platforms.kubernetes.kinds import Kind, Object, Place


class Create(msgspec.Struct, frozen=True):
    """Create an object. One of that name that is there already is as good."""

    kind: Kind
    body: Object


class Apply(msgspec.Struct, frozen=True):
    """Make an object be as it is said here, whether it is there or not."""

    kind: Kind
    body: Object


class MakeSecret(msgspec.Struct, frozen=True):
    """Create the job's Secret, with a fresh secret in it."""


class Delete(msgspec.Struct, frozen=True):
    """Delete the very object with this uid. ``grace_s`` None: as the object says."""

    kind: Kind
    name: str
    uid: str
    grace_s: int | None = None


class SetReplicas(msgspec.Struct, frozen=True):
    """Write the number of pods that a job wants, unless the job has changed meanwhile."""

    place: Place
    count: int
    version: str


class SetSuspend(msgspec.Struct, frozen=True):
    """Write that the job is to be suspended, unless it has changed meanwhile."""

    version: str


class SetFinalizers(msgspec.Struct, frozen=True):
    """Write what keeps the job from going before it may, unless it has changed meanwhile."""

    version: str
    finalizers: tuple[str, ...]


class SetRequest(msgspec.Struct, frozen=True):
    """Write the status of a request to scale, unless it has changed meanwhile."""

    kind: Kind
    name: str
    version: str
    status: Object


class TellSize(msgspec.Struct, frozen=True):
    """Tell the job's master how many workers and ps are wanted. 0: as before."""

    workers: int
    ps: int


class TellGone(msgspec.Struct, frozen=True):
    """Tell the job's master that pods are gone for good, before their silence does."""

    pods: tuple[str, ...]


class AskSuspend(msgspec.Struct, frozen=True):
    """Ask the job's master to make its state safe and end. ``suspensions``: how many the job has had."""

    suspensions: int


Action = (
    Create
    | Apply
    | MakeSecret
    | Delete
    | SetReplicas
    | SetSuspend
    | SetFinalizers
    | SetRequest
    | TellSize
    | TellGone
    | AskSuspend
)


class Refusal(StrEnum):
    """Says why the API server refused to create something."""

    QUOTA = "QuotaExceeded"
    FORBIDDEN = "Forbidden"
    TERMINATING = "NamespaceTerminating"
    INVALID = "TemplateInvalid"
    GANG = "GangRefused"


class CreateRefused(msgspec.Struct, frozen=True):
    """Is the last refusal to create a pod of this job, or its PodGroup."""

    why: Refusal
    message: str


class MasterReport(msgspec.Struct, frozen=True):
    """Is what a job's master says. ``workers``, ``ps``: wanted by it; ``members``: how many run in each pod."""

    workers: int
    ps: int
    members: Mapping[str, int] = {}
    step: int = 0
    samples: int = 0
    waiting: bool = False
    over: bool = False
    suspensions: int = 0  # so far
    percent: int = -1  # of all samples; -1: it cannot be told
    membership: int = 0  # how often the members have changed: the placement's version, or the group's generation
    checkpoint: int = 0  # the newest that is whole; 0: none
    checkpoint_at: float = 0.0  # seconds since 1970
    headline: str = ""  # how fast the job is, in words; "": not known yet
    slowest: tuple[Mapping[str, str], ...] = ()  # members, slowest first: what ``status.speed`` has of each


class OtherVersion(msgspec.Struct, frozen=True):
    """Says that a job's master is of another version of everstep than the operator. Each has its name and version."""

    master: str
    operator: str


class Seen(msgspec.Struct, frozen=True):
    """Is all that one look at a job takes into account. ``nodes`` None: the operator may not read nodes. ``gang`` None:
    there is no PodGroup of the job. ``other`` None: its master is not known to be of another version."""

    job: Object
    now_s: float
    pods: tuple[Object, ...] = ()
    others: frozenset[tuple[Kind, str]] = frozenset()
    requests: tuple[Object, ...] = ()
    nodes: Mapping[str, Object] | None = None
    report: MasterReport | None = None
    refused: CreateRefused | None = None
    gang: Object | None = None
    other: OtherVersion | None = None


class JobPlan(msgspec.Struct, frozen=True):
    """Says what to do. ``status``: to be written first, and if that is refused, nothing else is done; None: nothing has
    changed. ``again_s``: look again after so long, whatever happens."""

    status: Object | None = None
    actions: tuple[Action, ...] = ()
    again_s: float | None = None
