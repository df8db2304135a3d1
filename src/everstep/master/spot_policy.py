"""Does the shell's part of spot policies: counts reclaims, asks the chosen policy, and has the brain note its choice.

The policy is asked on a thread of its own (``UserCall``) when a machine came or went, and once in ``LOOK_S`` besides.
Its choice holds for the next checkpoint. A choice that differs little from the last one is not noted. A policy that
raises, returns something else, or takes longer than ``LIMIT_S`` is asked no more: the last interval stays.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

from everstep.brain.brain import Brain
from everstep.brain.events import Event, FactType, SpotChosen
from everstep.brain.policy_control import error_words, line
from everstep.config.every import MIN_EVERY_S
from everstep.config.parity import parse_code
from everstep.config.spec import JobSpec
from everstep.errors import ConfigError
from everstep.ids import NodeId
from everstep.master.callables import load_callable
from everstep.master.user_call import CallState, UserCall
from everstep.model.capacity import Market
from everstep.model.member import Member
from everstep.model.spot_choice import ReclaimsSeen, SpotChoice
from everstep.monitor.reclaims import ReclaimCounter
from everstep.policies.node_selection import HOME_NODE
from everstep.policies.spot import INTERVAL_MAX_S, SpotPlan, SpotPolicy, SpotSeen, by_hazard, hazard_of

LOOK_S = 60.0
NEWS = 1.25
"""An interval is news that differs by so much from the one that holds."""


class SpotController:
    """Is there for a job with a spot policy. ``tell(fact)``: to the brain, by the journal. ``thread(call)`` runs a call
    aside."""

    def __init__(
        self,
        brain: Brain,
        spec: JobSpec,
        tell: Callable[[FactType], object],
        thread: Callable[[Callable[[], None]], None] | None = None,
    ) -> None:
        self._brain, self._spec, self._tell = brain, spec, tell
        self._call: UserCall[SpotPlan | str] = UserCall("everstep-spot-policy", thread=thread)
        self._counter = ReclaimCounter(brain.state.spot.seen)
        self._look_at = 0.0
        self._shown: ReclaimsSeen | None = None
        self._policy: SpotPolicy | None = None

    def __repr__(self) -> str:
        return f"<spot policy {self._spec.spot_policy}, {self._counter!r}>"

    def take(self, event: Event) -> None:
        """Look at an event that was handled."""
        before = self._counter.held
        self._counter.take(event)
        if self._counter.held != before:
            self._look_at = 0.0
        if self._brain.job.over:
            self._counter.over(event.at)

    def tick(self, at: float) -> None:
        """Call several times a second; ``at`` in seconds, of a clock that may jump."""
        call, choice = self._call.poll(at), self._brain.state.spot
        if self._brain.job.over or choice.failed:
            return
        self._look_at = min(self._look_at, at + LOOK_S)
        if call is CallState.ENDED:
            self._take(self._call.result)
        elif call is CallState.LATE:
            self._fails(self._call.late_words)
        elif call is CallState.NONE and at >= self._look_at and (seen := self._seen(at)) is not None:
            self._look_at = at + LOOK_S
            self._call.begin(partial(self._ask, seen))

    def _seen(self, at: float) -> SpotSeen | None:
        """Return what the policy is shown; None: no machine that may be taken back was there yet."""
        found = self._counter.seen(at)
        held = self._counter.held
        if not held and not found.reclaims:
            return None
        self._shown = found
        servers = [s.member for s in self._brain.members.servers.values() if s.running]
        spot = [member for member in servers if member.node in held]
        defaults = SpotSeen(hazard_of(found), max(1.0, float(len(held))))
        last = self._brain.checkpoints.shown
        written = last is not None and last.since == 0 and last.took_s > 0
        return defaults._replace(
            ps=len(servers) if spot else 0,
            state_bytes=float(last.bytes_written) if last is not None and written else defaults.state_bytes,
            write_s=last.took_s if last is not None and written else defaults.write_s,
            saves_itself=self._spec.grouped or not spot,
            stays=self._stays(servers, held),
        )

    def _stays(self, servers: Sequence[Member], held: frozenset[NodeId]) -> bool:
        """Return whether all state is on machines that are not taken back: the ps, and one worker of a group."""
        if self._spec.market == Market.SPOT.value:
            held |= {HOME_NODE}
        holders = servers
        if self._spec.grouped:
            holders = [w.member for w in self._brain.members.workers.values() if w.running]
        return any(h.node not in held for h in holders) and all(s.node not in held for s in servers)

    def _ask(self, seen: SpotSeen) -> SpotPlan | str:
        """On the policy's thread: any of it may be code of the user's. A text: what is wrong."""
        try:
            if self._policy is None:
                self._policy = load_spot_policy(self._spec.spot_policy, Path(self._spec.script).parent)
            plan = self._policy(seen)
            return plan if isinstance(plan, SpotPlan) else f"it returned {plan!r}: expected a SpotPlan"
        except BaseException as error:  # whatever it is, it must not stay on this thread: SystemExit, too
            return f"it raised {error_words(error)}"

    def _take(self, plan: SpotPlan | str) -> None:
        """Take in what a call came to."""
        error = plan if isinstance(plan, str) else refuse_plan(plan)
        if error or isinstance(plan, str):
            self._fails(error)
            return
        last, seen = self._brain.state.spot, self._shown or ReclaimsSeen()
        now_s = min(float(plan.interval_s), INTERVAL_MAX_S)
        news = not last.interval_s or not 1 / NEWS < now_s / last.interval_s < NEWS
        if news or (plan.parity, plan.safe_ps) != (last.parity, last.safe_ps) or seen.reclaims != last.seen.reclaims:
            kept_s = now_s if news else last.interval_s
            self._tell(SpotChosen(SpotChoice(kept_s, plan.parity, plan.safe_ps, line(plan.why), seen)))

    def _fails(self, error: str) -> None:
        last = self._brain.state.spot
        self._tell(
            SpotChosen(
                SpotChoice(last.interval_s, last.parity, last.safe_ps, last.why, self._shown or last.seen, line(error))
            )
        )


def refuse_plan(plan: SpotPlan) -> str:
    """Return why a running job cannot go by this plan, "": it can."""
    try:
        if not plan.interval_s >= MIN_EVERY_S:
            return f"its interval_s is {plan.interval_s!r}: a running job needs at least {MIN_EVERY_S:g}"
        if not 0 <= int(plan.safe_ps) <= 10_000:
            return f"its safe_ps is {plan.safe_ps!r}: expected a number of ps"
        parse_code(plan.parity)
    except (ConfigError, TypeError, ValueError, AttributeError) as error:
        return f"it returned {plan!r}: {error}"
    return ""


def load_spot_policy(name: str, folder: Path) -> SpotPolicy:
    """Return the spot policy of this name; ``module:callable`` is found beside the training script (``folder``), or
    where Python finds modules. Raises what importing raises, AttributeError, TypeError."""
    if name == "hazard":
        return by_hazard
    found: SpotPolicy = load_callable(name, folder)
    return found
