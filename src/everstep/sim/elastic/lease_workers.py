"""The workers of a virtual job in mode ps: each works on a shard at its own pace, and has some more in hand.

As in a real job, a worker asks for the next one while it has ``AHEAD_S`` of work left. Where shards are small, these
are several, and at the end of an epoch those without any wait for those that have them.

Work is measured on one clock that stands for all workers: seconds of undisturbed training. It runs slower while a ps
rebuilds partitions or writes a checkpoint, so that the end of every shard in hand moves with one change.
"""

from __future__ import annotations

import heapq
import itertools
from collections import deque
from typing import TYPE_CHECKING

from everstep.brain.events import (
    EndOfData,
    Fenced,
    Granted,
    MemberJoined,
    PlanRegistered,
    PublishGroup,
    Refused,
    ShardAsked,
    ShardDone,
    ShardReturned,
    Wait,
    by_worker,
)
from everstep.config.parity import parse_code
from everstep.ids import ShardKey
from everstep.model.member import Role
from everstep.model.shard import Lease
from everstep.sim.elastic.job_model import speed_left

if TYPE_CHECKING:
    from everstep.sim.elastic.virtual_job import VirtualJob, VirtualProcess

AHEAD_S, AHEAD_BATCHES = 1.0, 2  # what ``api.ps_loop`` asks for, at least
AGAIN_S = 0.2
LATE_S = 60.0  # after so long whoever waits for a shard asks again, whatever happens


class InHand:
    """Is a shard that a worker has. ``begun``, ``due``: on the clock of work."""

    __slots__ = ("begun", "due", "lease", "samples")

    def __init__(self, lease: Lease, begun: float, due: float, samples: int) -> None:
        self.lease, self.begun, self.due, self.samples = lease, begun, due, samples


class LeaseWorkers:
    """Has all workers of one job. ``_applied``: samples of shards that came back, which the ps have already."""

    def __init__(self, job: VirtualJob) -> None:
        self._job = job
        self._order = itertools.count()
        self._asks = itertools.count(1)
        self._queue: list[tuple[float, int, VirtualProcess, InHand]] = []  # by the end on the clock of work
        self._applied: dict[ShardKey, int] = {}
        self._waiting: list[VirtualProcess] = []
        self._next: dict[VirtualProcess, deque[Lease]] = {}  # what workers have besides, which they have not begun
        self._working = 0
        self._costs = speed_left(job.model.protecting, parse_code(job.spec.parity).m)
        self._slow = 1.0
        self._share = self._costs
        self._worked = 0.0  # on the clock of work, at ``_since``
        self._since = 0.0
        self._armed = 0
        self._seen: tuple[int, int, int] = (0, 0, 0)
        self._late = False
        self._batch = job.model.batch_samples
        self._rate = job.model.rate(1)
        self._ahead = max(AHEAD_BATCHES * self._batch, round(AHEAD_S * self._rate))  # samples

    def before(self) -> None:
        pass

    def published(self, instruction: PublishGroup) -> None:
        pass

    def placed(self) -> None:
        """Let those begin that waited for the first map."""
        waiting = [w for w in self._waiting if w.held is None]
        if waiting:
            self._wake()

    def through(self) -> bool:
        return bool(self._job.brain.shards.datasets) and self._job.brain.concerns.training.all_trained()

    def order(self, checkpoint: int, since: int) -> bool:
        return False

    def in_hand(self) -> int:
        hands = {id(hand): hand for _, _, worker, hand in self._queue if worker.held is hand}
        now = self._work()
        open_ = sum(min(hand.samples, int((now - hand.begun) * self._rate)) for hand in hands.values())
        return open_ + sum(self._applied.values())

    # ------------------------------------------------------------ the clock of work

    def _work(self) -> float:
        return self._worked + (self._job.kernel.now - self._since) * self._share

    def speed(self, share: float) -> None:
        self._slow = share
        self._count(0)
        self._arm()

    def _count(self, more: int) -> None:
        """So many more workers have a shard. Together they may be slower than each alone."""
        self._worked, self._since = self._work(), self._job.kernel.now
        self._working += more
        together = self._job.model.rate(self._working)
        alone = self._working * self._rate
        self._share = self._costs * self._slow * (together / alone if alone > 0 else 1.0)
        self._job.meter.trains(self._job.kernel.now, together * self._costs * self._slow)

    def _arm(self) -> None:
        """Have the end of the shard that ends first come up."""
        while self._queue and self._queue[0][2].held is not self._queue[0][3]:
            heapq.heappop(self._queue)
        self._armed += 1
        if self._queue:
            left = max(0.0, self._queue[0][0] - self._work()) / self._share
            self._job.kernel.after(left, self._first_ends, self._armed)

    def _first_ends(self, armed: int) -> None:
        if armed != self._armed:
            return
        ended = []
        while self._queue and self._queue[0][0] <= self._work() + 1e-9:
            _, _, worker, hand = heapq.heappop(self._queue)
            if worker.held is hand:
                ended.append((worker, hand))
        for worker, hand in ended:
            self._done(worker, hand)
        self._arm()

    # ------------------------------------------------------------ one worker

    def hello(self, worker: VirtualProcess) -> None:
        job, me = self._job, by_worker(worker.slot, worker.incarnation)
        answer = job.tell(MemberJoined(Role.WORKER, worker.slot, worker.incarnation, worker.node.name, 1), me)
        if isinstance(answer, Fenced):
            return
        if job.placement is None and job.spec.ps:
            self._wait(worker)
            return
        job.tell(PlanRegistered(job.work.schedule, 1, 0, job.work.epochs), me)
        self._ask(worker)

    def _ask(self, worker: VirtualProcess) -> None:
        job = self._job
        if not worker.alive or worker.leaving or worker.held is not None or job.kernel.stopped:
            return
        if job.placement is None and job.spec.ps:
            self._wait(worker)
            return
        me = by_worker(worker.slot, worker.incarnation)
        if not job.brain.shards.datasets:
            job.tell(PlanRegistered(job.work.schedule, 1, 0, job.work.epochs), me)
        answer = job.tell(ShardAsked(0, job.work.epochs, next(self._asks)), me)
        match answer:
            case Granted(lease):
                self._begin(worker, lease)
            case Wait():
                self._wait(worker)
            case EndOfData() | Fenced() | Refused() | None:
                pass
            case _:
                pass

    def _begin(self, worker: VirtualProcess, lease: Lease) -> None:
        samples = max(0, lease.stop - lease.start - self._applied.pop(lease.shard, 0))
        begun = self._work()
        hand = InHand(lease, begun, begun + samples / self._rate, samples)
        worker.held = hand
        heapq.heappush(self._queue, (hand.due, next(self._order), worker, hand))
        self._count(1)
        if self._queue[0][3] is hand:
            self._arm()
        self._look_ahead(worker, samples)

    def _look_ahead(self, worker: VirtualProcess, samples: int) -> None:
        """Get a worker more while it has little; ``samples``: of the shard that it begins."""
        job, leases = self._job, self._next.setdefault(worker, deque())
        left = samples + sum(lease.stop - lease.start for lease in leases)
        while left <= self._ahead and not job.kernel.stopped:
            me = by_worker(worker.slot, worker.incarnation)
            answer = job.tell(ShardAsked(0, job.work.epochs, next(self._asks)), me)
            if not isinstance(answer, Granted):
                return
            leases.append(answer.lease)
            left += answer.lease.stop - answer.lease.start

    def _done(self, worker: VirtualProcess, hand: InHand) -> None:
        worker.held = None
        self._count(-1)
        placement = self._job.placement
        acks = tuple((p.slot, p.incarnation) for p in placement.servers) if placement is not None else ()
        route = placement.route if placement is not None else 0
        me = by_worker(worker.slot, worker.incarnation)
        self._job.tell(ShardDone(hand.lease.shard, hand.lease.no, acks, (), route), me)
        leases = self._next.get(worker)
        if leases and worker.alive and not worker.leaving and worker.held is None:
            self._begin(worker, leases.popleft())
        else:
            self._ask(worker)

    def _wait(self, worker: VirtualProcess) -> None:
        """Keep a worker waiting. Real ones ask again and again; here they do when something has changed."""
        self._waiting.append(worker)
        if not self._late:
            self._late = True
            self._job.kernel.after(LATE_S, self._look_again)

    def _look_again(self) -> None:
        self._late = False
        self._wake()

    def _wake(self) -> None:
        waiting, self._waiting = self._waiting, []
        for worker in waiting:
            self._job.kernel.after(AGAIN_S * self._job.kernel.random(), self._ask, worker)

    def after(self) -> None:
        shards = self._job.brain.shards
        epochs = shards.datasets[0].epochs if shards.datasets else []
        seen = (shards.returns, len(epochs), int(bool(epochs) and epochs[-1].finished))
        if seen != self._seen:
            self._seen = seen
            if self._waiting:
                self._wake()

    def gone(self, worker: VirtualProcess) -> None:
        hand = worker.held
        worker.held = None
        self._next.pop(worker, None)
        if isinstance(hand, InHand):
            self._keep(hand)
            self._count(-1)
            self._arm()

    def _keep(self, hand: InHand) -> int:
        """Note what the ps have of a shard whose worker stops here: whole batches."""
        had = hand.lease.stop - hand.lease.start - hand.samples
        whole = int(max(0.0, self._work() - hand.begun) * self._rate / self._batch) * self._batch
        self._applied[hand.lease.shard] = had + min(hand.samples, whole)
        return whole

    def asked_to_stop(self, worker: VirtualProcess, grace_s: float) -> None:
        """It finishes its batch, gives its shard back, and ends."""
        if not worker.leaving:
            worker.leaving = True
            batch_s = self._batch / self._rate * self._job.kernel.random()
            self._job.kernel.after(min(batch_s, grace_s), self._leaves, worker)

    def _leaves(self, worker: VirtualProcess) -> None:
        if not worker.alive:
            return
        hand, returned = worker.held, list(self._next.pop(worker, ()))
        if isinstance(hand, InHand):
            worker.held = None
            self._keep(hand)
            self._count(-1)
            returned.insert(0, hand.lease)
            self._arm()
        me = by_worker(worker.slot, worker.incarnation)
        for lease in returned:
            self._job.tell(ShardReturned(lease.shard, lease.no, "its node is to be emptied"), me)
        self._job.exit(worker, 0)
