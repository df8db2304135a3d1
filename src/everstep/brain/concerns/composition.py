"""Says which concerns a job has: the one place in the brain that knows modes."""

from __future__ import annotations

from collections.abc import Callable

from everstep.brain.brain_state import State
from everstep.brain.concerns.chief import ChiefConcern
from everstep.brain.concerns.concern import Concern, Handlers, Out
from everstep.brain.concerns.datasets import DatasetConcern
from everstep.brain.concerns.ending import EndingConcern
from everstep.brain.concerns.group import GroupConcern
from everstep.brain.concerns.group_ending import GroupEndingConcern
from everstep.brain.concerns.group_reader import GroupReader
from everstep.brain.concerns.leases import LeaseConcern
from everstep.brain.concerns.lifetime import LifetimeConcern
from everstep.brain.concerns.losses import LossConcern
from everstep.brain.concerns.membership import MemberConcern
from everstep.brain.concerns.nodes import NodeConcern
from everstep.brain.concerns.placement import PlacementConcern
from everstep.brain.concerns.plans import PlanConcern
from everstep.brain.concerns.processes import ProcessConcern
from everstep.brain.concerns.ps_slots import PsSlotConcern
from everstep.brain.concerns.saving import SavingConcern
from everstep.brain.concerns.sizes import SizeConcern
from everstep.brain.concerns.supervisor import SupervisorConcern
from everstep.brain.concerns.training import GroupTraining, LeaseTraining, Training
from everstep.brain.events import Event


class Concerns:
    """Holds the concerns of one job. ``own``: those that only its way of training has. ``all``: in the order in which
    they settle."""

    __slots__ = (
        "all",
        "chief",
        "datasets",
        "ending",
        "group_ending",
        "groups",
        "handlers",
        "lifetime",
        "looking",
        "losses",
        "nodes",
        "placement",
        "plans",
        "processes",
        "ps_slots",
        "saving",
        "settling",
        "sizes",
        "state",
        "supervisor",
        "training",
    )

    all: tuple[Concern, ...]
    settling: tuple[Callable[[Event, Out], Out], ...]
    looking: tuple[Callable[[Event], None], ...]
    handlers: Handlers
    training: Training
    placement: PlacementConcern
    group_ending: GroupEndingConcern

    def __init__(self, state: State) -> None:
        self.state = state
        parts = (state.checkpoints, state.protection)
        self.groups = GroupReader(state.job, state.members, state.shards, state.groups, state.duty, *parts)
        self.lifetime = LifetimeConcern(state, self)
        self.nodes = NodeConcern(state, self)
        self.processes = ProcessConcern(state, self)
        self.losses = LossConcern(state, self)
        self.ps_slots = PsSlotConcern(state, self)
        self.datasets = DatasetConcern(state, self)
        self.chief = ChiefConcern(state, self)
        self.saving = SavingConcern(state, self)
        self.sizes = SizeConcern(state, self)
        self.plans = PlanConcern(state, self)
        self.ending = EndingConcern(state, self)
        self.supervisor = SupervisorConcern(state, self)
        self.compose()

    def compose(self) -> None:
        """Choose by the job's spec. Called once more by the first master, which brings that."""
        first: tuple[Concern, ...]
        last: tuple[Concern, ...] = ()
        if self.state.job.spec.grouped:
            group = GroupConcern(self.state, self)
            self.training = GroupTraining(self.state, self, group)
            self.group_ending = GroupEndingConcern(self.state, self)
            first, last = (group,), (self.group_ending,)
        else:
            leases = LeaseConcern(self.state, self)
            self.training = LeaseTraining(self.state, self, leases)
            first = (leases,)
        self.placement = PlacementConcern(self.state, self, self.training.ahead)
        members = (self.nodes, MemberConcern(self.state, self), self.processes, self.losses, self.ps_slots)
        data = (self.datasets, self.chief, self.saving, self.sizes, self.plans, self.ending, self.supervisor)
        self.all = (*first, self.training, self.placement, *last, self.lifetime, *members, *data)
        self.handlers = {kind: handler for concern in self.all for kind, handler in concern.handlers().items()}
        self.settling = tuple(c.settle for c in self.all if type(c).settle is not Concern.settle)
        self.looking = tuple(c.before for c in self.all if type(c).before is not Concern.before)
