"""Runs one node's agent: it starts what the master orders, keeps it apart, tells what ended, leaves nothing behind.

One loop in the main thread owns every process (the kernel ties a child's life to the thread that started it). It
waits on pidfds, the template's socketpair and a wake-up socket; the control client's thread, the reporter and signal
handlers only put work in its queue.
"""

from __future__ import annotations

import collections
import contextlib
import heapq
import itertools
import os
import queue
import selectors
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import msgspec

from everstep.agent.budget import RestartBudget
from everstep.agent.logfiles import DiskWatch
from everstep.agent.mastersilence import LOOK_S, CutOff, Hung, SilenceStep
from everstep.agent.memory_deaths import MemoryDeaths, died_of_own_limit
from everstep.agent.rundir import remove_sockets
from everstep.agent.scripterrors import ScriptErrors
from everstep.agent.spare_ps import SPARE_AFTER_S, SparePs, environment
from everstep.agent.stacks import ask_for_stack, main_stack, read_stacks, size_of, stack_path, words_of
from everstep.agent.template_client import Ended, Fork, Forked, Ready, WarmTemplate
from everstep.agent.worker_process import WorkerError
from everstep.allreduce.environment import LOCAL_VARIABLE, torchrun_environment
from everstep.bounds import MALFORMED
from everstep.brain.checkpoints import ends_with_checkpoint
from everstep.brain.events import (
    DrainAsked,
    FinishJob,
    NodeJoined,
    Note,
    Ok,
    ProcessExited,
    RaiseMemory,
    Refused,
    StartProcess,
    StopAsked,
    StopProcess,
    SuspendAsked,
)
from everstep.config.spec import JobSpec
from everstep.errors import DeadlineError, EverstepError, escaped_lines
from everstep.ids import Incarnation, NodeId, Slot
from everstep.model.capacity import Market
from everstep.model.member import Address, Role
from everstep.model.notice import Certainty, Notice
from everstep.model.process_size import ProcessSize
from everstep.monitor.cgroup_memory import MemoryGroup
from everstep.monitor.life_lock import DeathWatch, life_lock
from everstep.monitor.memory_room import is_unbound, limit_of_process, memory_of_node, raise_limit
from everstep.monitor.process_readings import clean_hardware, hardware_class, machine_name
from everstep.monitor.vitals import read_vitals
from everstep.net.messages import (
    Answered,
    Beat,
    OrderType,
    RequestType,
    SignalProcess,
    StackTaken,
    TakeStack,
)
from everstep.net.shown import shown
from everstep.platforms.local import LocalProcess, ended, python_argv, send_signal, spawn, sweep_group
from everstep.platforms.notices import DESIGN_LEAD_S, Change, NoticeSource, NoticeWatch
from everstep.ps.spare import PsRole
from everstep.storage.atomic import private
from everstep.storage.space import disk_is_full
from everstep.units import human_bytes

if TYPE_CHECKING:
    from everstep.pipeline.copy_store import CopyStore

WORKER_GRACE_S = 5.0  # SIGTERM -> SIGKILL of a worker when the job ends
PS_GRACE_S = 10.0  # for a ps to write its final cut by itself, before SIGTERM
KILL_AFTER_S = 3.0  # SIGTERM -> SIGKILL of ps and master
STOP_SAVE_S = 75.0  # so long a job that is stopped may write its last checkpoint and its model
STOP_ANSWER_S = 5.0  # how long a stop waits for the master's word before it goes on alone
_SPARE_S = 3.0  # before the moment at which a notice says that this node goes
_EARLIER_S = 1.0  # by which a second notice has to be earlier to count
ASK_AGAIN_S = 2.0  # until the master is asked again to empty a node that has notice
ENDS_S = 5.0  # of a notice for the master's node: its processes end, and what the job needs is kept elsewhere
_ENDS_SHARE = 0.4  # of a short notice, at most
_LEAST_S = 1.0  # for a process to end, however little time is left
RECLAIM_S = 25.0  # SIGTERM of a node that joined -> it leaves; clouds and Kubernetes give 30 s
RAISE_AGAIN_S = 0.25  # until a process that has just begun may have bound its memory
RAISE_LOOKS = 40
STACK_S = 2.0  # for a process to write its stacks
BEAT_S = 0.5  # members of a group that waits are given up after STALL_S (brain.watch) without our word
_STACK_LOOK_S = 0.05
_EMPTY_LOOK_S = 0.1
_FINAL_STATUS = (2, 4)  # exit codes of a master that says why it cannot go on
_worker_error_decoder = msgspec.json.Decoder(WorkerError)


class ControlPort(Protocol):
    """Is what the agent needs of ``net.control.ControlClient``."""

    def call(self, request: RequestType, timeout_s: float) -> Answered: ...

    def close(self) -> None: ...

    @property
    def connects(self) -> int: ...

    @property
    def unheard_s(self) -> float: ...

    @property
    def refused_s(self) -> float: ...


class JobOutcome(msgspec.Struct, frozen=True):
    """Says how the job ended. ``detail``: the failed script's traceback, and which log holds more."""

    exit_code: int
    error: str = ""
    detail: str = ""
    log: str = ""


class Running(msgspec.Struct):
    """Is one process that the master ordered, until its end is acknowledged."""

    role: Role
    slot: Slot
    incarnation: Incarnation
    pid: int = 0  # 0: asked of the template, not forked yet
    pidfd: int = -1
    process: LocalProcess | None = None  # a ps; workers are the template's children
    status: int | None = None  # ended, but the master has not taken note yet
    ending: bool = False
    not_before: float = 0.0  # a worker that is tried again, a little later
    killed: bool = False  # by this agent
    local: int = 0  # a worker's number on this node: which GPU it takes (``job.device``)
    size: ProcessSize = ProcessSize()
    watch: DeathWatch | None = None

    @property
    def name(self) -> str:
        return f"{self.role}:{self.slot}"


class Agent:
    """Runs the processes of one node: ``run`` returns when the job is over and every process that it started has ended.

    ``connect(agent)`` makes the control connection. ``say(text)`` shows a line to people. ``prepare`` fills the run
    directory (secret, job.json) while the template already starts."""

    def __init__(
        self,
        spec: JobSpec,
        run_dir: Path,
        node: NodeId,
        connect: Callable[[Agent], ControlPort],
        say: Callable[[str], None],
        *,
        keeps_master: bool,
        host: str = "",
        worker_places: int = 0,
        ps_places: int = 0,
        prepare: Callable[[], None] = lambda: None,
        hardware: str = "",
        notices: Sequence[NoticeSource] = (),
        returns: int = 0,
        zone: str = "",
        market: Market | None = None,
        machine: str = "",
        reclaim_s: float = RECLAIM_S,
        suspends: bool = False,
        known: Notice | None = None,
    ) -> None:
        """Take ``reclaim_s``: SIGTERM of a node that joined -> it leaves; ``suspends``: SIGTERM of the master's node
        suspends the job. ``notices``: who is asked whether this node goes away; ``returns``: how often it was emptied,
        and stayed; ``known``: the notice that was wrong."""
        self.spec = spec
        self.run_dir = run_dir.resolve()
        self.node = node
        self.host = host
        self.worker_places = worker_places
        self.ps_places = ps_places
        self.hardware = clean_hardware(hardware) or hardware_class()
        self.zone, self.market, self.machine = zone, market, machine or machine_name()
        self.client: ControlPort | None = None
        self.outcome: JobOutcome | None = None
        self._connect = connect
        self._prepare = prepare
        self._say = say
        self._keeps_master = keeps_master
        self._reclaim_s, self._suspends = reclaim_s, suspends
        self._script = Path(spec.script).resolve()
        self._lock = threading.Lock()  # guards _running against the hello of the client's thread
        self._running: dict[tuple[Role, Slot], Running] = {}
        self._newest: dict[tuple[Role, Slot], Incarnation] = {}
        self._master: LocalProcess | None = None
        self._master_budget = RestartBudget()
        self._template: WarmTemplate | None = None
        self._template_budget = RestartBudget(limit=5)
        self._template_started_at = 0.0
        self._spare: SparePs | None = None
        self._dying: dict[Slot, Running] = {}  # ps whose end is told, and whose memory is not free yet
        self._ps_started_at = 0.0
        self._cut_off = CutOff(spec.cut_off_s, spec.rejoin_s)
        self._hung = Hung(spec.master_silent_s, spec.master_lost_s)
        self._disk = DiskWatch(self.run_dir, spec.disk_full_s, self._tell)
        group = MemoryGroup()
        self._memory, self._node_memory = MemoryDeaths(group), memory_of_node(group)
        self._connects_before = 0  # connections to earlier masters
        self._errors = ScriptErrors(self._say, spec.script_retries)
        self._asked_to_stop = False
        self._leaving = False
        self._knows_the_end = False  # by the master: ps here end by themselves
        self._closed = False
        self._parent_fd = -1
        self._work: collections.deque[Callable[[], None]] = collections.deque()
        self._timers: list[tuple[float, int, Callable[[], None]]] = []
        self._timer_no = itertools.count()
        self._selector = selectors.DefaultSelector()
        self._wake_r, self._wake_w = socket.socketpair()
        self._wake_r.setblocking(False)
        self._wake_w.setblocking(False)
        self._reports: queue.Queue[Callable[[], None] | None] = queue.Queue()
        self._log_path = self.run_dir / "logs" / "agent.log"
        self.notices = NoticeWatch(notices, lambda change: self.post(partial(self._noticed, change)), self._tell, known)
        self._returns = returns
        self._goes_at: float | None = None  # by time.monotonic(): what notices leave, less a margin
        self._copies: CopyStore | None = None  # of stages, for workers of other nodes
        self._copies_at: Address | None = None
        self.emptied_for: Notice | None = None  # this node was left because of it
        self._not_accepted = False  # the master has not agreed yet to empty this node
        self._leaves_in_time = False  # the platform ends processes of a node that has notice
        self._warned_that_it_stays = False

    # ------------------------------------------------------------ the loop

    def run(self) -> JobOutcome:
        """Run until the job is over here. Call it in the main thread. Leaves no process behind, whatever happens."""
        self._selector.register(self._wake_r, selectors.EVENT_READ, self._woken)
        reporter = threading.Thread(target=self._report_loop, name="agent-reports", daemon=True)
        self._watch_parent()
        old_handlers = self._take_signals()
        try:
            self._start_template()  # first: its imports take longest
            self._prepare()
            self._keep_copies()
            if self._keeps_master:
                self._start_master()
            self.client = self._connect(self)
            reporter.start()
            self.notices.start()
            self._after(LOOK_S, self._look_for_hung_master if self._keeps_master else self._look_for_master)
            self._after(LOOK_S, self._look_at_disk)
            while not self._finished():
                self._turn()
            assert self.outcome is not None
            return self.outcome
        finally:
            self.notices.close()
            self._kill_all()
            self._reports.put(None)
            if self.client is not None:
                self.client.close()
            for signo, handler in old_handlers.items():
                signal.signal(signo, handler)
            self._closed = True
            if self._copies is not None:
                self._copies.close()
            self._selector.close()
            self._wake_r.close()
            self._wake_w.close()
            if self._parent_fd >= 0:
                os.close(self._parent_fd)
            remove_sockets(self.run_dir)

    def _keep_copies(self) -> None:
        """Keep copies of stages for workers of other nodes, where the job has such nodes."""
        spec = self.spec
        if not (spec.bind and self.host and spec.stages > 1 and spec.copy_every != "off"):
            return
        from everstep.net.auth import load_secret
        from everstep.net.rendezvous import SECRET_FILE
        from everstep.pipeline.copy_store import CopyStore
        from everstep.pipeline.idle_board import IdleBoard

        store = CopyStore(IdleBoard(self.run_dir))
        try:
            secret = load_secret(self.run_dir / SECRET_FILE)
            self._copies_at = store.serve(self.host, self.node, secret, spec.tls == "all")
        except EverstepError as error:
            self._tell(f"this node keeps no copies of stages: {error}")
        else:
            self._copies = store

    def _turn(self) -> None:
        timeout = None
        if self._timers:
            timeout = max(0.0, self._timers[0][0] - time.monotonic())
        for key, _ in self._selector.select(timeout):
            key.data()
        while self._timers and self._timers[0][0] <= time.monotonic():
            heapq.heappop(self._timers)[2]()
        while self._work:
            self._work.popleft()()

    def _finished(self) -> bool:
        if not self._leaving:
            return False
        with self._lock:
            alive = any(r.status is None for r in self._running.values())
        return not alive and self._master is None

    def post(self, job: Callable[[], None]) -> None:
        """From any thread or signal handler: the loop does it soon."""
        self._work.append(job)
        with contextlib.suppress(OSError):
            self._wake_w.send(b"x")

    def _woken(self) -> None:
        with contextlib.suppress(BlockingIOError):
            self._wake_r.recv(4096)

    def _after(self, delay_s: float, job: Callable[[], None]) -> None:
        heapq.heappush(self._timers, (time.monotonic() + delay_s, next(self._timer_no), job))

    def log(self, text: str) -> None:
        """Write a line into logs/agent.log."""
        stamp = time.strftime("%H:%M:%S") + f".{int(time.time() * 1000) % 1000:03d}"
        with contextlib.suppress(OSError), open(self._log_path, "a", opener=private) as out:
            out.write(f"{stamp} {escaped_lines(text)}\n")

    def _tell(self, text: str) -> None:
        self.log(text)
        self._say(text)

    # ------------------------------------------------------------ signals

    def _take_signals(self) -> Mapping[signal.Signals, Any]:
        old: dict[signal.Signals, Any] = {}
        if threading.current_thread() is not threading.main_thread():
            return old
        for signo in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            if signo == signal.SIGHUP and signal.getsignal(signo) == signal.SIG_IGN:
                continue  # nohup: stays after the terminal
            old[signo] = signal.signal(signo, lambda s, _: self.post(lambda: self._interrupted(s)))
        # suspended, this process would be taken for lost while everything that it started trains on
        no = "Ctrl-Z: a running job cannot be suspended (Ctrl-C stops it)"
        old[signal.SIGTSTP] = signal.signal(signal.SIGTSTP, lambda *_: self.post(lambda: self._tell(no)))
        return old

    def _watch_parent(self) -> None:
        """Stop if the process that started us is gone. Not under nohup, nor where the parent is init."""
        parent = os.getppid()
        if parent <= 1 or signal.getsignal(signal.SIGHUP) == signal.SIG_IGN:
            return
        with contextlib.suppress(OSError):
            self._parent_fd = os.pidfd_open(parent)
            self._selector.register(self._parent_fd, selectors.EVENT_READ, self._parent_ended)

    def _parent_ended(self) -> None:
        self._selector.unregister(self._parent_fd)
        self._tell("the process that started this one is gone: stopping (start it with nohup to have it stay)")
        self._outcome_unless_known(JobOutcome(130, "interrupted"))
        self.stop("parent gone")

    def _interrupted(self, signo: int) -> None:
        name = {signal.SIGINT: "Ctrl-C", signal.SIGTERM: "SIGTERM", signal.SIGHUP: "the terminal closed"}
        why = name.get(signal.Signals(signo), str(signo))
        outcome = JobOutcome(143, "interrupted: SIGTERM") if signo == signal.SIGTERM else JobOutcome(130, "interrupted")
        if signo == signal.SIGTERM and self.emptied_for is not None and not self._leaves_in_time and not self._leaving:
            self._leave_in_time(why)
            return
        if self._asked_to_stop or (self._leaving and signo == signal.SIGINT):
            self._tell("stopping at once")
            self._outcome_unless_known(outcome)
            self._leave()
            self._kill_all()
            return
        if signo == signal.SIGTERM and not self._keeps_master and not self._leaving:
            self._reclaimed("SIGTERM", self._reclaim_s)
            return
        if signo == signal.SIGTERM and self._suspends and not self._leaving:
            self._noticed(Change(Notice("Slurm", why, "SIGTERM", time.time() + self._reclaim_s)))
            return
        again = "; again to stop at once" if signo == signal.SIGINT else ""
        self._tell(f"{why}: stopping{again}")
        self._outcome_unless_known(outcome)
        self.stop(why)

    def _noticed(self, change: Change) -> None:
        """A source of notices says that this node goes, or that it stays."""
        notice = change.notice
        lead_s = DESIGN_LEAD_S if notice.at is None else max(1.0, notice.at - time.time() - _SPARE_S)
        when = f"in {notice.at - time.time():.0f} s" if notice.at is not None else "soon"
        if change.over and self._not_accepted and _is_same(self.emptied_for, notice):
            self._tell(f"notice from {notice.source} is over: {notice.what}; nothing was moved")
            if others := self.notices.certain():
                self.emptied_for = others[0]
            else:
                self.emptied_for = self._goes_at = self.outcome = None
                self._asked_to_stop = self._not_accepted = False
        elif self._leaving or (self._asked_to_stop and (change.over or not self._goes_earlier(notice, lead_s))):
            self.log(f"notice from {notice.source}: {notice.what}{' is over' if change.over else ''}")
        elif self._asked_to_stop:
            self._tell(
                f"notice from {notice.source}: {notice.what}, this node goes {when}, earlier than was said before"
            )
            self._hurry(notice, lead_s)
        elif change.over:
            self._tell(f"notice from {notice.source} is over: {notice.what}")
        elif notice.certainty is Certainty.LIKELY:
            self._tell(f"notice from {notice.source}: {notice.what}; nothing is moved until it is certain")
        elif self._keeps_master:
            self._tell(
                f"notice from {notice.source}: {notice.what}, this node goes {when}, and the job's master is on it: "
                "the job is suspended, and everstep unsuspend goes on"
            )
            self._outcome_unless_known(JobOutcome(143, f"this node goes away: {notice.what}"))
            self._goes_at = time.monotonic() + lead_s
            self.stop("notice", suspend_in_time(notice, lead_s))
        else:
            self._tell(f"notice from {notice.source}: {notice.what}, this node goes {when}")
            self.emptied_for = notice
            self._reclaimed(notice.what, lead_s)

    def _goes_earlier(self, notice: Notice, lead_s: float) -> bool:
        """Return whether a notice that comes while another one is acted on leaves less time."""
        known = self._goes_at
        return (
            known is not None
            and notice.certainty is Certainty.CERTAIN
            and time.monotonic() + lead_s < known - _EARLIER_S
        )

    def _hurry(self, notice: Notice, lead_s: float) -> None:
        """There is less time than the first notice said."""
        self._goes_at = time.monotonic() + lead_s
        if self._keeps_master:
            self._reports.put(lambda: self._ask_stop(suspend_in_time(notice, lead_s)))
        else:
            self._reports.put(partial(self._ask_drain, lead_s))
            self._after(lead_s, self._time_is_over)

    def _reclaimed(self, why: str, lead_s: float) -> None:
        """This node will be taken away in ``lead_s`` seconds: have it emptied while the job goes on elsewhere, then
        leave."""
        self._asked_to_stop = True
        self._goes_at = time.monotonic() + lead_s
        self._tell(f"{why}: this node is to be emptied, in at most {lead_s:.0f} s; again to leave at once")
        self._outcome_unless_known(JobOutcome(143, f"interrupted: {why}"))
        self._reports.put(partial(self._ask_drain, lead_s))
        self._after(lead_s, self._time_is_over)

    def _leave_in_time(self, why: str) -> None:
        """Leave within ``reclaim_s``: a platform that has said that this node goes ends its processes now."""
        self._leaves_in_time = True
        self._tell(f"{why}: this node leaves in at most {self._reclaim_s:.0f} s; again to leave at once")
        ends_at = time.monotonic() + self._reclaim_s
        self._goes_at = ends_at if self._goes_at is None else min(self._goes_at, ends_at)
        self._after(self._reclaim_s, self._time_is_over)

    def _time_is_over(self) -> None:
        """Leave. If a notice said that the machine goes, its ps stay until the machine is gone: they may have what
        nobody else has, and the notice may be wrong."""
        if self._leaving or self._goes_at is None or time.monotonic() < self._goes_at:
            return
        serving = [r.name for r in self._running.values() if r.status is None and r.role == Role.PS]
        if self.emptied_for is None or self._leaves_in_time or not serving:
            self._leave()
        elif not self._warned_that_it_stays:
            self._warned_that_it_stays = True
            self._tell(
                f"the time is over, and {', '.join(serving)} is not empty: it goes on until this machine is gone"
            )

    def _ask_drain(self, lead_s: float) -> None:
        assert self.client is not None
        answer: object = None
        with contextlib.suppress(EverstepError):
            answer = self.client.call(DrainAsked(self.node, lead_s), timeout_s=STOP_ANSWER_S)
        if isinstance(answer, Ok):
            self.post(self._emptying)
            return
        self.post(partial(self._not_emptied, answer))

    def _not_emptied(self, answer: object) -> None:
        """The master did not answer, or refused. A node that has notice asks again for as long as that may help; any
        other one leaves."""
        if self._leaving or self._goes_at is None:
            return
        why = answer.error if isinstance(answer, Refused) else "the master does not answer"
        serves = any(r.status is None and r.role == Role.PS for r in self._running.values())
        if self.emptied_for is None or not (serves or answer is None):
            self.log(f"not emptied: {answer!r}")
            self._leave()
            return
        if not self._not_accepted:
            self._tell(f"not emptied: {why}; it is asked again, and all goes on here until this machine is gone")
        self._not_accepted = True
        self._after(ASK_AGAIN_S, self._ask_drain_again)

    def _ask_drain_again(self) -> None:
        if not self._leaving and self._goes_at is not None:
            lead_s = max(_LEAST_S, self._goes_at - time.monotonic())
            self._reports.put(partial(self._ask_drain, lead_s))

    def _emptying(self) -> None:
        self._not_accepted = False
        self._leave_when_empty()

    def _leave_when_empty(self) -> None:
        with self._lock:
            alive = any(r.status is None for r in self._running.values())
        if not alive:
            self._leave()
        elif not self._leaving:
            self._after(_EMPTY_LOOK_S, self._leave_when_empty)

    def stop(self, reason: str, asks: StopAsked | SuspendAsked | None = None) -> None:
        """Ask the master to end the job (this node alone where the master is elsewhere); go on without its word
        after ``STOP_ANSWER_S``. ``asks``: to suspend it, instead. Loop thread only."""
        if self._asked_to_stop:
            return
        self._asked_to_stop = True
        if not self._keeps_master:
            self._leave()
            return
        request = asks if asks is not None else StopAsked(reason, checkpoint=True)
        self._reports.put(lambda: self._ask_stop(request))

    def _ask_stop(self, request: StopAsked | SuspendAsked) -> None:
        answer: object = None
        if self.client is not None:
            with contextlib.suppress(EverstepError):
                answer = self.client.call(request, timeout_s=STOP_ANSWER_S)
        saves = isinstance(answer, Ok) and (isinstance(request, SuspendAsked) or ends_with_checkpoint(self.spec))
        self.post(lambda: self._after(self.within(STOP_SAVE_S) if saves else 0.0, self._leave))

    def within(self, seconds: float) -> float:
        """Return ``seconds``, or what is left until this node goes if that is less."""
        if self._goes_at is None:
            return seconds
        return min(seconds, max(_LEAST_S, self._goes_at - time.monotonic()))

    # ------------------------------------------------------------ the master

    def _start_master(self) -> None:
        if self._leaving:
            return
        self._connects_before = self.client.connects if self.client is not None else 0
        log = self.run_dir / "logs" / "master.log"
        env = {**os.environ, "EVERSTEP_RUN_DIR": str(self.run_dir), "EVERSTEP_NODE": self.node}
        self._master = spawn("master", python_argv("everstep.master", str(self.run_dir)), log, env=env)
        self._selector.register(self._master, selectors.EVENT_READ, self._master_ended)
        self.log(f"master started, pid {self._master.pid}")

    def _master_ended(self) -> None:
        master = self._master
        if master is None:
            return
        status = master.reap()
        if status is None:
            return
        self._selector.unregister(master)
        master.close()
        self._master = None
        lived_s = time.monotonic() - master.started_at
        self.log(f"master ended: {describe_status(status)} after {lived_s:.1f} s")
        if self._leaving:
            return
        if status == 0:  # its Finish order may have died on the way to us
            code, error = _read_summary(self.run_dir)
            self._finish(code, error)
            return
        full = disk_is_full(self.run_dir)
        if status in _FINAL_STATUS:
            line = last_error_line(self.run_dir / "logs" / "master.log")
            if full and not line:  # no log can be written either
                status, line = 4, f"no space left on the disk of {self.run_dir}; the job cannot be recorded"
            self._finish(status, line or f"the master gave up; see {self.run_dir}/logs/master.log")
            return
        pause_s = self._master_budget.died(lived_s)
        if pause_s is None:
            line = last_error_line(self.run_dir / "logs" / "master.log", any_line=True)
            why = f" ({line})" if line else ""
            self._finish(
                4,
                f"the master died {self._master_budget.deaths} times in a row, last: {describe_status(status)}{why}; "
                f"see {self.run_dir}/logs/master.log",
            )
            return
        self._tell(f"master lost ({describe_status(status)}); restarting it, training goes on")
        self._after(pause_s, self._start_master)

    def _look_for_master(self) -> None:
        """On another node: a dead master is restarted within moments, so a long silence means that we are cut off."""
        if self._leaving:
            return
        assert self.client is not None
        self._after(LOOK_S, self._look_for_master)
        match self._cut_off.look(time.monotonic(), self.client.unheard_s, self.client.refused_s):
            case SilenceStep.END:
                silent_s, rejoin_s = self._cut_off.silent_s, self.spec.rejoin_s
                self._tell(
                    f"the master was not heard for {silent_s:.0f} s: this node counts as lost; ending what runs here, "
                    f"and trying to come back for {rejoin_s:.0f} s"
                )
                for entry in list(self._running.values()):
                    self._kill(entry)
            case SilenceStep.BACK:
                self._tell("the master is heard again: this node is back")
            case SilenceStep.LEAVE if self._cut_off.refused:
                self._finish(4, "nobody listens any more where the master was: the job has ended meanwhile, or failed")
            case SilenceStep.LEAVE:
                spent_s = self._cut_off.silent_s + self.spec.rejoin_s
                self._finish(4, f"the master could not be reached for {spent_s:.0f} s: this node leaves the job")
            case _:
                pass

    def _look_at_disk(self) -> None:
        self._disk.look()
        self._memory.look(time.monotonic())
        if not self._leaving:
            self._after(LOOK_S, self._look_at_disk)

    def _look_for_hung_master(self) -> None:
        """Look, on the master's node, for a master that hangs (stopped, or its disk does): it is not seen by its
        end."""
        if self._leaving:
            return
        assert self.client is not None
        self._after(LOOK_S, self._look_for_hung_master)
        master = self._master
        greeted = master is not None and self.client.connects > self._connects_before
        match self._hung.look(time.monotonic(), self.client.unheard_s, greeted):
            case SilenceStep.SAY:
                left_s = self.spec.master_lost_s - self._hung.silent_s
                self._tell(
                    f"the master has not answered for {self._hung.silent_s:.0f} s; training goes on; it is replaced in "
                    f"{max(0.0, left_s):.0f} s"
                )
            case SilenceStep.BACK:
                self._tell(f"the master answers again, after {self._hung.silent_s:.0f} s")
            case SilenceStep.REPLACE:
                self._tell(f"the master has not answered for {self._hung.silent_s:.0f} s: it is killed")
                self._end_master(signal.SIGKILL)  # (a stopped one, too; its end is noticed by the loop)
            case _:
                pass

    # ------------------------------------------------------------ the template

    def _preload(self) -> tuple[str, ...]:
        """Return modules that every worker of this job needs, and those that the job names."""
        mode = ("everstep.api.pipeline_trainer",) if self.spec.mode == "pipeline" else ()
        return (*mode, *self.spec.preload)

    def _start_template(self) -> None:
        if self._leaving or (self.spec.master_alone and not self.worker_places):
            return
        self._template_started_at = time.monotonic()
        self._template = template = WarmTemplate(self.run_dir, self._script, self._preload())
        self._selector.register(template.conn, selectors.EVENT_READ, self._template_spoke)
        self.log(f"template started, pid {template.process.pid}")
        for entry in list(self._running.values()):
            due = entry.not_before <= time.monotonic()  # (else its own time asks)
            if entry.role == Role.WORKER and entry.pid == 0 and entry.status is None and due:
                self._ask_fork(entry)

    def _template_spoke(self) -> None:
        template = self._template
        if template is None:
            return
        packet = template.receive()
        if packet is None:
            self._template_lost(template)
        elif isinstance(packet, Ready):
            self._template_budget.deaths = 0
            failed = f"; not preloaded: {', '.join(packet.failed)}" if packet.failed else ""
            self.log(f"template ready after {packet.seconds:.2f} s of imports{failed}")
        elif isinstance(packet, Forked):
            self._forked(packet)
        elif isinstance(packet, Ended):
            entry = self._running.get((Role.WORKER, Slot(packet.slot)))
            if entry is not None and entry.incarnation == packet.incarnation:
                self._ended(entry, packet.status)

    def _template_lost(self, template: WarmTemplate) -> None:
        self._template = None
        self._selector.unregister(template.conn)
        template.close()
        template.process.signal(signal.SIGKILL)
        template.process.wait(KILL_AFTER_S)
        status = template.process.reap()
        template.process.close()
        words = describe_status(status if status is not None else -signal.SIGKILL)
        if self._leaving:
            self.log(f"template ended: {words}")
        pause_s = self._template_budget.died(time.monotonic() - self._template_started_at if template.ready else 0.0)
        for entry in list(self._running.values()):
            if entry.role == Role.WORKER and entry.pid and entry.status is None:
                # the kernel kills them with their parent; see to it before telling anyone that they are gone
                send_signal(entry.pidfd, signal.SIGKILL)
                ended(entry.pidfd, KILL_AFTER_S)
                sweep_group(entry.pid)
                self._ended(entry, -signal.SIGKILL)
        if self._leaving:
            for entry in list(self._running.values()):
                if entry.role == Role.WORKER and entry.status is None:
                    self._ended(entry, -signal.SIGKILL)
            return
        if pause_s is None:
            self._finish(4, f"the template died again and again ({words}); see {self.run_dir}/logs/template.log")
            return
        self._tell(f"template lost ({words}) and its workers with it; restarting")
        self._after(pause_s, self._start_template)

    def _fork_late(self, entry: Running) -> None:
        if entry.status is None and self._running.get((entry.role, entry.slot)) is entry:
            self._ask_fork(entry)

    def _ask_fork(self, entry: Running) -> None:
        if self._template is None:
            return  # asked again when the next template is there
        logs = self.run_dir / "logs"
        threads = entry.size.threads or self._threads()
        pinned = "OMP_NUM_THREADS" in os.environ and not (entry.size.threads or self.spec.threads_per_worker)
        torchrun: dict[str, str | None] = {}
        if self.spec.torchrun_env:
            places = self.worker_places or self.spec.workers
            torchrun = torchrun_environment(entry.slot, entry.local, self.spec.workers, places)
        request = Fork(
            slot=entry.slot,
            incarnation=entry.incarnation,
            env={
                "EVERSTEP_RUN_DIR": str(self.run_dir),
                "EVERSTEP_SLOT": str(entry.slot),
                "EVERSTEP_INCARNATION": str(entry.incarnation),
                "EVERSTEP_NODE": self.node,
                LOCAL_VARIABLE: str(entry.local),
                "EVERSTEP_HOST": self.host or None,
                **torchrun,
                "OMP_NUM_THREADS": os.environ["OMP_NUM_THREADS"] if pinned else str(threads),
                "OPENBLAS_NUM_THREADS": os.environ.get("OPENBLAS_NUM_THREADS"),
                "MKL_NUM_THREADS": os.environ.get("MKL_NUM_THREADS"),
            },
            argv=(str(self._script), *self.spec.args),
            log=str(logs / f"worker-{entry.slot}.log"),
            error=str(error_path(self.run_dir, entry.slot)),
            cwd=str(Path.cwd()),
            threads=threads,
            processes=self.spec.worker_processes,
            copies=self.spec.stages > 1 and self.spec.copy_every != "off",
            memory_bytes=entry.size.memory_bytes,
        )
        try:
            self._template.fork(request)
        except OSError as error:
            self.log(f"{entry.name}: the template does not take orders: {error}")  # its end is noticed by the loop

    def _threads(self) -> int:
        """Return the threads of a worker for which the master names none."""
        if self.spec.threads_per_worker:
            return self.spec.threads_per_worker
        pinned = os.environ.get("OMP_NUM_THREADS", "")
        if pinned.isdigit() and int(pinned) > 0:
            return int(pinned)
        workers = max(1, self.worker_places or self.spec.workers)
        return max(1, len(os.sched_getaffinity(0)) // (workers * self.spec.worker_processes))

    def _forked(self, packet: Forked) -> None:
        entry = self._running.get((Role.WORKER, Slot(packet.slot)))
        pidfd = -1
        with contextlib.suppress(ProcessLookupError):
            pidfd = os.pidfd_open(packet.pid)
        if entry is None or entry.incarnation != packet.incarnation or entry.status is not None:
            if pidfd >= 0:  # replaced or cancelled while the template was busy
                send_signal(pidfd, signal.SIGKILL)
                os.close(pidfd)
            return
        with self._lock:
            entry.pid, entry.pidfd = packet.pid, pidfd
        self.log(f"{entry.name} #{entry.incarnation} forked, pid {entry.pid}")
        if entry.ending and pidfd >= 0:
            send_signal(pidfd, signal.SIGTERM)

    # ------------------------------------------------------------ orders

    def on_order(self, order: OrderType) -> None:
        """Take an order, from the control client's thread."""
        if isinstance(order, FinishJob | Note):
            order = shown(order)
        self.post(lambda: self._obey(order))

    def _obey(self, order: OrderType) -> None:
        match order:
            case StartProcess():
                self._start(order)
            case StopProcess():
                self._end(order)
            case RaiseMemory():
                self._raise_memory(order)
            case FinishJob():
                self._knows_the_end = True
                self._finish(order.exit_code, order.error)
            case SignalProcess():
                self._signal(order)
            case TakeStack():
                self._take_stack(order)
            case Note(member, decision) if not self._keeps_master:
                self._say(f"{member}: {decision}" if member else str(decision))
            case _:
                pass

    def _signal(self, order: SignalProcess) -> None:
        """Make a fault (``everstep chaos``). What was stopped goes on after ``stop_s``, whatever becomes of the
        master."""
        entry = self._running.get((order.role, order.slot))
        if entry is None or entry.incarnation != order.incarnation or entry.pidfd < 0 or entry.status is not None:
            return
        signo = {"kill": signal.SIGKILL, "stop": signal.SIGSTOP, "go": signal.SIGCONT}[order.what]
        self.log(f"chaos: {signo.name} to {entry.name} #{entry.incarnation}")
        send_signal(entry.pidfd, signo)
        if order.what == "stop":
            self._after(max(0.0, order.stop_s), lambda: self._signal(msgspec.structs.replace(order, what="go")))

    def _raise_memory(self, order: RaiseMemory, looks: int = RAISE_LOOKS) -> None:
        """Raise the limit of a process that runs, once it has bound itself to what it was started with."""
        entry = self._running.get((order.role, order.slot))
        if entry is None or entry.incarnation != order.incarnation or entry.status is not None or not entry.pid:
            return
        if looks and entry.size.memory_bytes and is_unbound(entry.pid):
            self._after(RAISE_AGAIN_S, lambda: self._raise_memory(order, looks - 1))
            return
        before, now = raise_limit(entry.pid, order.memory_bytes)
        if now > before:
            entry.size = ProcessSize(entry.size.threads, order.memory_bytes)
        words = f"from {human_bytes(before)} to {human_bytes(now)}" if now > before else f"stays {human_bytes(before)}"
        self.log(f"{entry.name} #{entry.incarnation}: its limit of memory {words if before else 'is none'}")

    def _start(self, order: StartProcess) -> None:
        """Unless it runs already, or ran: then its end is told once more."""
        if self._leaving:
            return
        key = (order.role, order.slot)
        newest = self._newest.get(key, 0)
        if order.incarnation <= newest:
            old = self._running.get(key)
            if old is None and order.incarnation == newest:
                self.log(f"{order.role}:{order.slot} #{order.incarnation} ordered again after its end")
            return
        old = self._running.get(key)
        if old is not None and old.status is None:
            self.log(f"{old.name} #{old.incarnation} is replaced by #{order.incarnation}: killing it")
            self._kill(old)
        entry = Running(order.role, order.slot, order.incarnation, size=order.size)
        others = [r for k, r in self._running.items() if k != key and r.role == Role.WORKER and r.status is None]
        entry.local = free_number(r.local for r in others)
        with self._lock:
            self._running[key] = entry
            self._newest[key] = order.incarnation
        if order.role == Role.WORKER:
            error_path(self.run_dir, order.slot).unlink(missing_ok=True)
            entry.not_before = time.monotonic() + order.after_s
            if order.after_s > 0:
                self._after(order.after_s, lambda: self._fork_late(entry))
            else:
                self._ask_fork(entry)
        elif order.role == Role.PS and order.slot not in self._dying:  # (else when that one is gone)
            self._spawn_ps(entry)

    def _spawn_ps(self, entry: Running) -> None:
        args = [str(self.run_dir), str(entry.slot), str(entry.incarnation), self.node]
        if self.host:
            args += ["--host", self.host]
        log = self.run_dir / "logs" / f"ps-{entry.slot}.log"
        env = environment(self.run_dir, self.node)
        if entry.size.threads:
            args += ["--threads", str(entry.size.threads)]
        process = None
        if entry.size.memory_bytes:
            args += ["--memory-bytes", str(entry.size.memory_bytes)]
            env.setdefault("MALLOC_ARENA_MAX", "2")  # (each arena takes address space, which the limit counts)
        else:
            process = self._spare_becomes(entry, PsRole(tuple(args), str(log)))
        if process is None:
            process = spawn(entry.name, python_argv("everstep.ps", *args), log, env=env, life=life_lock())
        with self._lock:
            entry.process, entry.pid, entry.pidfd = process, process.pid, process.fileno()
        if process.life is not None:
            entry.watch = DeathWatch(
                process.life, process.pid, lambda status: self.post(lambda: self._dies(entry, status))
            )
        self._selector.register(process, selectors.EVENT_READ, lambda: self._ps_ended(entry))
        self.log(f"{entry.name} #{entry.incarnation} started, pid {entry.pid}")
        self._ps_started_at = time.monotonic()
        if self.spec.parity not in ("", "0"):
            self._after(SPARE_AFTER_S, self._keep_spare)

    # ------------------------------------------------------------ the spare ps

    def _keep_spare(self) -> None:
        """Start a ps ahead, where there are ps here and none was started for a while."""
        if self._leaving or self._spare is not None or time.monotonic() < self._ps_started_at + SPARE_AFTER_S:
            return
        if not any(entry.role == Role.PS and entry.status is None for entry in self._running.values()):
            return
        try:
            self._spare = spare = SparePs(self.run_dir, environment(self.run_dir, self.node))
        except OSError as error:
            self.log(f"no ps can be started ahead: {error}")
            return
        self._selector.register(spare.process, selectors.EVENT_READ, self._end_spare)
        self.log(f"a spare ps started, pid {spare.process.pid}")

    def _spare_becomes(self, entry: Running, role: PsRole) -> LocalProcess | None:
        """Return the process of the spare ps, which is ``entry`` from now on; None: there is none."""
        spare = self._spare
        if spare is None:
            return None
        process = spare.become(entry.name, role)
        if process is None:
            self._end_spare()
            return None
        self._spare = None
        self._selector.unregister(process)
        return process

    def _end_spare(self) -> None:
        """End it, or take note that it has ended."""
        spare, self._spare = self._spare, None
        if spare is not None:
            with contextlib.suppress(KeyError, ValueError):
                self._selector.unregister(spare.process)
            spare.end()

    def _dies(self, entry: Running, status: int) -> None:
        """A ps does nothing any more: that is told at once, so that others serve what it had. Who takes its place is
        started when it is gone, and its memory free."""
        if entry.process is not None and entry.status is None:
            self._dying[entry.slot] = entry
            self._ended(entry, status)

    def _ps_ended(self, entry: Running) -> None:
        process = entry.process
        limit_bytes = limit_of_process(entry.pid) if process is not None and process.wait(0.0) else 0
        status = process.reap() if process is not None else None
        if process is None or status is None:
            return
        self._selector.unregister(process)
        process.close()
        entry.process, entry.pidfd = None, -1
        if entry.watch is not None:
            entry.watch.close()
        self._ended(entry, status, limit_bytes)
        if self._dying.get(entry.slot) is entry:
            del self._dying[entry.slot]
            late = self._running.get((entry.role, entry.slot))
            if late is not None and late.status is None and not self._leaving:
                self._spawn_ps(late)

    def _end(self, order: StopProcess) -> None:
        entry = self._running.get((order.role, order.slot))
        if entry is None or entry.incarnation != order.incarnation or entry.status is not None or entry.ending:
            return
        self._terminate(entry, order.grace_s)

    def _terminate(self, entry: Running, grace_s: float) -> None:
        """Send SIGTERM now, and SIGKILL after ``grace_s`` seconds."""
        entry.ending = True
        if entry.pid == 0:
            self._ended(entry, -signal.SIGTERM)  # never forked; should it come yet, it is killed at once
            return
        if entry.pidfd >= 0:
            send_signal(entry.pidfd, signal.SIGTERM)
        self._after(grace_s, lambda: self._kill(entry))

    def _kill(self, entry: Running) -> None:
        if entry.status is not None:
            return
        entry.killed = True
        if entry.pid == 0:
            self._ended(entry, -signal.SIGKILL)
        elif entry.pidfd >= 0:
            send_signal(entry.pidfd, signal.SIGKILL)

    def _ended(self, entry: Running, status: int, limit_bytes: int = 0) -> None:
        """A process is gone: remember it until the master has taken note. ``limit_bytes``: of its memory, as its end
        left it; 0: not known."""
        if entry.status is not None:
            return
        with self._lock:
            entry.status = status
        if entry.role == Role.WORKER and entry.pidfd >= 0:
            os.close(entry.pidfd)
            entry.pidfd = -1
        error, too_large, failure = "", 0, None
        if entry.role == Role.WORKER and status != 0:
            found = read_worker_error(self.run_dir, entry)
            if found is not None:
                error, too_large, failure = found.line, found.too_large, found.failure
                self._errors.learn(entry.name, found)
        elif entry.role == Role.PS and status > 0:
            error = last_error_line(self.run_dir / "logs" / f"ps-{entry.slot}.log")
            if not error and disk_is_full(self.run_dir):
                error = f"no space left on the disk of {self.run_dir}"
        limit_bytes = limit_bytes or entry.size.memory_bytes or limit_of_process()
        asked = entry.ending or entry.killed
        memory = self._memory.why(status, asked, limit_bytes) if not error or entry.role == Role.PS else None
        if failure is not None and not asked and not too_large:
            memory = died_of_own_limit(failure.cause, error, limit_bytes)
        why = " (out of memory)" if memory is not None else ""
        self.log(f"{entry.name} #{entry.incarnation} ended: {describe_status(status)}{why} {error}".rstrip())
        of = entry.role, entry.slot, entry.incarnation
        report = ProcessExited(*of, status, error, too_large=too_large, failure=failure, memory=memory)
        self._reports.put(lambda: self._report(entry, report))

    # ------------------------------------------------------------ reports

    def _report_loop(self) -> None:
        while (job := self._reports.get()) is not None:
            job()

    def _report(self, entry: Running, report: ProcessExited) -> None:
        """Report until the master has it (it may be restarting); a report said twice is harmless."""
        while not self._closed:
            assert self.client is not None
            try:
                self.client.call(report, timeout_s=10.0)
                break
            except DeadlineError:
                if self._leaving:
                    return
            except EverstepError as error:
                self.log(f"report of {entry.name} refused: {error}")
                return
        with self._lock:
            if self._running.get((entry.role, entry.slot)) is entry:
                del self._running[entry.role, entry.slot]
        self.post(lambda: None)

    def hello(self) -> NodeJoined:
        """Return what runs here, and what ended and was not taken note of yet. From the control client's thread."""
        with self._lock:
            running = tuple((r.role, r.slot, r.incarnation, r.pid) for r in self._running.values())
        places = self.worker_places, self.ps_places
        joined = NodeJoined(self.node, self.host, *places, running, self.hardware, self._returns)
        memory = dict(zip(("memory_bytes", "memory_limit"), self._node_memory, strict=True))
        placed = {**memory, "zone": self.zone, "market": self.market, "machine": self.machine}
        return msgspec.structs.replace(joined, **placed, copies=self._copies_at)

    def beat(self) -> Beat:
        readings = {"load1": os.getloadavg()[0], "cores": float(os.cpu_count() or 1)}
        return Beat(readings=readings, runs=self._that_run())

    def _that_run(self) -> tuple[tuple[Role, Slot, Incarnation, float], ...]:
        """Processes that are neither stopped nor gone, seen from outside: a script may hold its interpreter."""
        with self._lock:
            entries = [(r.role, r.slot, r.incarnation, r.pid) for r in self._running.values() if r.status is None]
        found = []
        for role, slot, incarnation, pid in entries:
            vitals = read_vitals(pid) if pid else None
            if vitals is not None and vitals.runs:
                found.append((role, slot, incarnation, vitals.cpu_s))
        return tuple(found)

    # ------------------------------------------------------------ stacks

    def _take_stack(self, order: TakeStack) -> None:
        entry = self._running.get((Role.WORKER, order.slot))
        if entry is None or entry.incarnation != order.incarnation or entry.pidfd < 0 or entry.status is not None:
            return
        path = stack_path(self.run_dir / "logs" / f"worker-{order.slot}.log")
        start = size_of(path)
        if not ask_for_stack(entry.pid, entry.pidfd):
            self._tell_stack(order, "")
            return
        self._look_for_stack(order, path, start, start, time.monotonic() + STACK_S)

    def _look_for_stack(self, order: TakeStack, path: Path, start: int, before: int, end: float) -> None:
        """Until the file has grown, and grows no more."""
        now = size_of(path)
        if time.monotonic() < end and (now == start or now != before):
            self._after(_STACK_LOOK_S, lambda: self._look_for_stack(order, path, start, now, end))
            return
        self._tell_stack(order, read_stacks(path, start))

    def _tell_stack(self, order: TakeStack, text: str) -> None:
        place, stack = words_of(main_stack(text), self._script)
        self.log(f"worker:{order.slot} #{order.incarnation} makes no progress: {place or 'no stack'}")
        taken = StackTaken(order.slot, order.incarnation, order.idle_s, place, stack)

        def tell() -> None:
            with contextlib.suppress(EverstepError):
                assert self.client is not None
                self.client.call(taken, timeout_s=STACK_S)

        self._reports.put(tell)

    def on_fenced(self, reason: str) -> None:
        """Another agent took this node's place."""
        self.post(lambda: self._finish(4, f"this agent was replaced: {reason}"))

    # ------------------------------------------------------------ the end

    def _outcome_unless_known(self, outcome: JobOutcome) -> None:
        if self.outcome is None:
            self.outcome = outcome

    def _finish(self, exit_code: int, error: str) -> None:
        """The job is over (said by the master, or because there can be no master)."""
        if self.outcome is None:
            detail = log = ""
            if exit_code and (seen := self._errors.of(error)) is not None:
                exit_code, detail = seen.error.exit_code, "" if seen.shown else seen.error.text
                error = f"{seen.name}: {error[error.index(seen.error.line) :]}"
                log = str(self.run_dir / "logs" / f"{seen.name.replace(':', '-')}.log")
            self.outcome = JobOutcome(exit_code, error, detail, log)
        self._leave()

    def _leave(self) -> None:
        """End every process: workers now, ps when they have written their final cut, the master last."""
        if self._leaving:
            return
        self._leaving = True
        self._outcome_unless_known(JobOutcome(130, "interrupted"))
        assert self.outcome is not None
        self.log(f"leaving: exit code {self.outcome.exit_code} {self.outcome.error}".rstrip())
        has_master = self._keeps_master and self._master is not None
        for entry in list(self._running.values()):
            if entry.status is None and entry.role == Role.WORKER:
                self._terminate(entry, self.within(WORKER_GRACE_S))
            elif entry.status is None:
                by_itself = has_master or self._knows_the_end
                self._after(
                    self.within(PS_GRACE_S) if by_itself else 0.0, partial(self._terminate, entry, KILL_AFTER_S)
                )
        if self._keeps_master:
            grace_s = self.within(PS_GRACE_S) + KILL_AFTER_S
            self._after(grace_s + 2.0, lambda: self._end_master(signal.SIGTERM))
            self._after(grace_s + KILL_AFTER_S + 2.0, lambda: self._end_master(signal.SIGKILL))
        self.post(lambda: None)

    def _end_master(self, signo: int) -> None:
        if self._master is not None:
            self._master.signal(signo)

    def _kill_all(self) -> None:
        """Send SIGKILL to all that this agent started, and see that it is gone."""
        self._end_spare()
        for entry in [*self._dying.values(), *self._running.values()]:
            if entry.watch is not None:
                entry.watch.close()
            if entry.status is None or entry.process is not None:
                self._kill(entry)
                if entry.process is not None:
                    entry.process.wait(KILL_AFTER_S)
                    entry.process.reap()
                elif entry.pidfd >= 0:
                    ended(entry.pidfd, KILL_AFTER_S)
        if self._template is not None:
            template, self._template = self._template, None
            with contextlib.suppress(KeyError, ValueError):
                self._selector.unregister(template.conn)
            template.close()
            if not (template.ready and template.process.wait(1.0)):
                template.process.signal(signal.SIGKILL)
                template.process.wait(KILL_AFTER_S)
            template.process.reap()
            template.process.close()
            for entry in list(self._running.values()):
                if entry.role == Role.WORKER:
                    self._ended(entry, -signal.SIGKILL)
        if self._master is not None:
            self._end_master(signal.SIGKILL)
            self._master.wait(KILL_AFTER_S)
            if not self._closed:
                self._master_ended()

    def __repr__(self) -> str:
        return f"<agent of {self.node}: {len(self._running)} processes{' leaving' if self._leaving else ''}>"


def suspend_in_time(notice: Notice, lead_s: float) -> SuspendAsked:
    """Return the wish to suspend the job of a master whose node goes in ``lead_s`` seconds: what its processes need to
    end, and its files to be kept elsewhere, is left of it."""
    ends_s = min(ENDS_S, _ENDS_SHARE * lead_s)
    return SuspendAsked(f"its master's node goes away: {notice.what}", round(lead_s - ends_s, 3))


def _is_same(known: Notice | None, notice: Notice) -> bool:
    return known is not None and (known.source, known.key) == (notice.source, notice.key)


def free_number(taken: Iterable[int]) -> int:
    """Return the lowest number from 0 that is not taken: a process in the place of a lost one gets its number."""
    held = set(taken)
    return next(n for n in range(len(held) + 1) if n not in held)


def describe_status(status: int) -> str:
    """Return ``signal 9 (SIGKILL)`` or ``exit code 1``."""
    if status < 0:
        with contextlib.suppress(ValueError):
            return f"signal {-status} ({signal.Signals(-status).name})"
        return f"signal {-status}"
    return f"exit code {status}"


def error_path(run_dir: Path, slot: int) -> Path:
    return run_dir / "logs" / f"worker-{slot}.error.json"


def read_worker_error(run_dir: Path, entry: Running) -> WorkerError | None:
    """Return what the script of this incarnation raised, if it did."""
    try:
        found = _worker_error_decoder.decode(error_path(run_dir, entry.slot).read_bytes())
    except (OSError, *MALFORMED):
        return None
    return found if found.incarnation == entry.incarnation else None


def last_error_line(log: Path, any_line: bool = False) -> str:
    """Return the last line that begins with ``everstep:`` among the last ones of a log; "" if there is none."""
    try:
        with log.open("rb") as stream:
            stream.seek(max(0, log.stat().st_size - 8192))
            lines = stream.read().decode(errors="replace").splitlines()
    except OSError:
        return ""
    for line in reversed(lines):
        if line.startswith("everstep: "):
            return line.removeprefix("everstep: ")
    if any_line:
        return next((line.strip() for line in reversed(lines) if line.strip()), "")
    return ""


class _Summary(msgspec.Struct):
    exit_code: int | None = None
    error: str = ""


_summary_decoder = msgspec.json.Decoder(_Summary)


def _read_summary(run_dir: Path) -> tuple[int, str]:
    try:
        summary = _summary_decoder.decode((run_dir / "summary.json").read_bytes())
    except (OSError, *MALFORMED):
        return 4, f"the master ended without a word; see {run_dir}/logs/master.log"
    return summary.exit_code or 0, summary.error
