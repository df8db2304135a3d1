"""Transcripts: commands to a brain and, below ``----``, what it answers and wants done.

::

    ask worker:0#1 1
    ----
    reply granted d e0 #0 [0, 30) lease 1.1

Each command is one event (a second after the last); after each one the invariants are checked and the brain is
replaced by its own snapshot restored; a second brain never is, and wants the same. ``rules="today"`` of ``master``:
as today's masters do, else as those of before ``empties``. ``EVERSTEP_REWRITE=1 pytest
tests/brain`` writes the answers anew: read the diff.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterator

import msgspec

from everstep.brain.brain import Brain
from everstep.brain.events import (
    RULES,
    Answer,
    CheckpointAsked,
    CheckpointBegun,
    CheckpointCommitted,
    ChiefAsked,
    CommitManifest,
    DrainAsked,
    DropCheckpoints,
    EndOfData,
    Event,
    Fenced,
    FinishJob,
    Granted,
    GroupAsked,
    GroupDue,
    Grouped,
    GroupLeft,
    GroupStalled,
    GroupSynced,
    HotPartitions,
    InstructionType,
    JobResumed,
    JobUnsuspended,
    LeaseExpired,
    MasterStarted,
    MemberHeard,
    MemberJoined,
    MemberSilent,
    MirrorsReady,
    NodeHeard,
    NodeJoined,
    NodeLost,
    Note,
    OnceAsked,
    OrderSnapshots,
    PartitionsReady,
    PlanMade,
    PlanRegistered,
    PolicyDisabled,
    ProcessExited,
    PublishGroup,
    PublishPlacement,
    RaiseMemory,
    Refused,
    Registered,
    ReleaseShards,
    Reply,
    RevokeLease,
    ScaleAsked,
    ShardAsked,
    ShardDone,
    ShardReturned,
    ShardsConfirmed,
    SnapshotsWritten,
    StartProcess,
    StepsCommitted,
    StopAsked,
    StopProcess,
    SupervisionDue,
    SuspendAsked,
    Wait,
    Welcome,
    Yes,
    by_ps,
    by_worker,
)
from everstep.brain.shards import lease_words
from everstep.brain.states import StateCheck
from everstep.config.spec import JobSpec
from everstep.ids import Incarnation, LeaseNo, NodeId, PartitionId, ShardKey, Slot
from everstep.model.decision import Decision
from everstep.model.group import Committed, Group, Position
from everstep.model.member import Address, Role
from everstep.model.memory_limit import MemoryLimit, OutOfMemory
from everstep.model.placement import MirrorKind, Placement
from everstep.model.plan import Action, AdjustAccum, AdjustBatch, AdjustRate, KillRestart, MovePartitions, Scale
from everstep.model.plan import Plan as PolicyPlan
from everstep.model.reasons import Arrival, CheckpointReason, LeaveReason
from everstep.model.shard import Lease, ShardSchedule, lease_no, shard_key, split_key
from everstep.model.snapshot import Holdings, Manifest, PartitionSnapshot
from everstep.policies.hot import AlonePartition, HotMove


def parse_member(text: str) -> tuple[Role, Slot, Incarnation]:
    """``worker:0#2``."""
    role, _, rest = text.partition(":")
    slot, _, incarnation = rest.partition("#")
    return Role(role), Slot(int(slot)), Incarnation(int(incarnation or 1))


def parse_shard(text: str) -> ShardKey:
    """``e0#3`` (of dataset 0) or ``d1e0#3``."""
    dataset, rest = 0, text
    if rest.startswith("d"):
        number, _, rest = rest[1:].partition("e")
        dataset, rest = int(number), "e" + rest
    epoch, _, index = rest[1:].partition("#")
    return shard_key(dataset, int(epoch), int(index))


def parse_lease(text: str) -> LeaseNo:
    """``2.7``: the 7th of master 2."""
    master, _, counter = text.partition(".")
    return lease_no(int(master), int(counter))


class Story:
    """A brain, its clock, and the words for both."""

    def __init__(self) -> None:
        self.brain = Brain()
        self.steady = Brain()  # the same events, never restored
        self.states = StateCheck()
        self.at = 0.0
        self.manifests: dict[int, Manifest] = {}  # ordered, by number, also of the story before a "resume"

    def say(self, line: str) -> list[str]:
        """Run one command; the lines that it gave."""
        words = shlex.split(line)
        named = dict(word.split("=", 1) for word in words[1:] if "=" in word and not word.startswith("="))
        plain = [word for word in words[1:] if "=" not in word]
        if words[0] == "state":
            return list(self._state())
        if words[0] == "new-job":
            self.brain, self.steady, self.states = Brain(), Brain(), StateCheck()
            return ["nothing"]
        self.at += 1.0
        event = self._event(words[0], plain, named)
        before = self.brain.snapshot()
        instructions = self.brain.handle(event)
        self.manifests.update(
            (i.manifest.checkpoint, i.manifest) for i in instructions if isinstance(i, CommitManifest)
        )
        assert instructions == Brain.restore(before).handle(event), "the restored brain wants something else"
        assert instructions == self.steady.handle(event), "the brain that was never restored wants something else"
        assert self.steady.snapshot() == self.brain.snapshot(), "a decision reads what is not in the state"
        self.brain.validate()
        self.states.look(self.brain, line)
        self.brain = Brain.restore(self.brain.snapshot())
        return [self._words(i) for i in instructions] or ["nothing"]

    # ------------------------------------------------------------ commands

    def _event(self, verb: str, plain: list[str], named: dict[str, str]) -> Event:
        at = self.at
        match verb:
            case "master":
                fields = {name: msgspec.json.decode(value) for name, value in named.items()}
                rules = RULES if fields.pop("rules", "") == "today" else {"settles": True}
                return Event(at, MasterStarted(Incarnation(int(plain[0])), msgspec.convert(fields, JobSpec), **rules))
            case "node":
                running = [(*parse_member(text), 0) for text in named.get("running", "").split(",") if text]
                node = NodeId(plain[0])
                return Event(
                    at, NodeJoined(node, "", int(named.get("workers", 0)), int(named.get("ps", 0)), tuple(running))
                )
            case "node-lost":
                return Event(at, NodeLost(NodeId(plain[0]), " ".join(plain[1:])))
            case "node-heard":
                return Event(at, NodeHeard(NodeId(plain[0])))
            case "join":
                role, slot, incarnation = parse_member(plain[0])
                node = NodeId(named.get("node", "node0"))
                address = Address(node, f"sock/ps-{slot}.sock") if role is Role.PS else None
                leases = []
                for text in filter(None, named.get("leases", "").split(",")):
                    shard, _, no = text.partition("@")
                    leases.append(self._lease(parse_shard(shard), parse_lease(no)))
                holds = Holdings(slot=slot, incarnation=incarnation) if "nothing" in plain else None
                return Event(at, MemberJoined(role, slot, incarnation, node, 100 + slot, address, tuple(leases), holds))
            case "silent":
                return Event(at, MemberSilent(*parse_member(plain[0]), float(plain[1]), "lost" in plain))
            case "heard":
                return Event(at, MemberHeard(*parse_member(plain[0])))
            case "exit":
                told = tuple(
                    (parse_lease(no), int(position))
                    for no, position in (text.split("@") for text in named.get("at", "").split(",") if text)
                )
                limit, _, size = named.get("memory", "").partition(",")
                memory = OutOfMemory(MemoryLimit(limit), int(size or 0)) if limit else None
                ended = (*parse_member(plain[0]), int(plain[1]), " ".join(plain[2:]), told)
                return Event(at, ProcessExited(*ended, memory=memory))
            case "plan":
                _, slot, incarnation = parse_member(plain[0])
                plan = ShardSchedule(
                    name=plain[1],
                    samples=int(plain[2]),
                    shard_samples=int(plain[3]),
                    seed=int(named.get("seed", 0)),
                    fingerprint=named.get("fingerprint", ""),
                )
                loop, begin, until = (int(n) for n in named.get("loop", "0,0,0").split(","))
                return Event(at, PlanRegistered(plan, loop, begin, until), by_worker(slot, incarnation))
            case "ask":
                _, slot, incarnation = parse_member(plain[0])
                until, dataset = int(named.get("until", 1)), int(named.get("dataset", 0))
                return Event(at, ShardAsked(dataset, until, int(plain[1])), by_worker(slot, incarnation))
            case "done":
                _, slot, incarnation = parse_member(plain[0])
                text = named.get("ps", "0#1")
                servers = tuple((Slot(int(a)), Incarnation(int(b))) for a, b in (p.split("#") for p in text.split(",")))
                skipped = tuple(
                    (int(lo), int(hi)) for lo, hi in (r.split("-") for r in named.get("skipped", "").split(",") if r)
                )
                shard, no, route = parse_shard(plain[1]), parse_lease(plain[2]), int(named.get("route", 0))
                return Event(at, ShardDone(shard, no, servers, skipped, route), by_worker(slot, incarnation))
            case "return":
                _, slot, incarnation = parse_member(plain[0])
                reason = " ".join(plain[3:])
                return Event(
                    at,
                    ShardReturned(parse_shard(plain[1]), parse_lease(plain[2]), reason),
                    by_worker(slot, incarnation),
                )
            case "expire":
                return Event(at, LeaseExpired(parse_shard(plain[0]), parse_lease(plain[1]), float(plain[2])))
            case "scale":
                also = tuple((Role(plain[i]), int(plain[i + 1])) for i in range(2, len(plain), 2))
                return Event(at, ScaleAsked(Role(plain[0]), int(plain[1]), also))
            case "drain":
                return Event(at, DrainAsked(plain[0], float(plain[1]), "again" in plain))
            case "hot":
                found = [text.replace(">", ":").split(":") for text in plain]
                moves = tuple(HotMove(PartitionId(int(b)), Slot(int(s)), Slot(int(t))) for b, s, t in found)
                return Event(at, HotPartitions(moves, ((Slot(0), 900), (Slot(1), 100))))
            case "giant":
                partition, slot, table, key = plain
                one = AlonePartition(
                    PartitionId(int(partition)), Slot(int(slot)), 900.0, 1.8, ((table, int(key), 0.99),)
                )
                return Event(at, HotPartitions((), (), (one,)))
            case "policy":
                action = _action(plain[0], plain[1:])
                return Event(at, PlanMade("mine", PolicyPlan(actions=(action,), decision=Decision("plan", "why not"))))
            case "policy_fails":
                return Event(at, PolicyDisabled("mine", " ".join(plain)))
            case "mirrors":
                _, slot, incarnation = parse_member(plain[0])
                return Event(at, MirrorsReady(tuple(int(m) for m in plain[1].split(","))), by_ps(slot, incarnation))
            case "ready":
                _, slot, incarnation = parse_member(plain[0])
                partitions = tuple(PartitionId(int(b)) for b in plain[2].split(","))
                return Event(
                    at, PartitionsReady(int(plain[1]), partitions, Arrival(plain[3])), by_ps(slot, incarnation)
                )
            case "stop":
                return Event(at, StopAsked(" ".join(plain), "checkpoint" in plain))
            case "suspend":
                within_s, had = float(named.get("within", 0)), int(named.get("suspensions", -1))
                return Event(at, SuspendAsked(" ".join(plain), within_s, had))
            case "supervise":  # so many seconds later
                self.at += float(plain[0])
                return Event(self.at, SupervisionDue())
            case "unsuspend":
                return Event(at, JobUnsuspended(int(plain[0]), " ".join(plain[1:])))
            case "checkpoint":
                return Event(at, CheckpointAsked(CheckpointReason(plain[0]), "base" in plain))
            case "images":
                _, slot, incarnation = parse_member(plain[0])
                error = named.get("error", "")
                partitions = [int(b) for b in plain[2].split(",")] if not error else []
                snapshots = tuple(self._snapshot(b, named, int(named.get("bytes", 100))) for b in partitions)
                return Event(at, SnapshotsWritten(int(plain[1]), snapshots, (), error), by_ps(slot, incarnation))
            case "committed":
                return Event(at, CheckpointCommitted(int(plain[0]), named.get("error", "")))
            case "confirmed":
                return Event(at, ShardsConfirmed(float(plain[0])))
            case "enter" | "synced" | "leave" | "commit" | "stalled":
                return self._group_event(verb, plain, named)
            case "chief":
                return Event(at, ChiefAsked(int(named.get("ask", 0))), by_worker(*parse_member(plain[0])[1:]))
            case "once":
                return Event(at, OnceAsked(plain[1], "done" in plain), by_worker(*parse_member(plain[0])[1:]))
            case "due":
                return Event(at, GroupDue())
            case "resume":
                manifest = self.manifests[int(plain[0])]
                return Event(at, JobResumed(manifest, "runs/old/checkpoints", int(named.get("numbers", plain[0]))))
        raise ValueError(f"no such command: {verb}")

    def _group_event(self, verb: str, plain: list[str], named: dict[str, str]) -> Event:
        at, (_, slot, incarnation) = self.at, parse_member(plain[0])
        match verb:
            case "enter":
                position = Position(*map(int, named["mark"].split(","))) if "mark" in named else None
                batch, dataset = int(named.get("batch", 8)), int(named.get("dataset", 0))
                return Event(
                    at, GroupAsked(dataset, int(plain[1]), batch, None, position), by_worker(slot, incarnation)
                )
            case "synced":
                return Event(at, GroupSynced(int(plain[1])), by_worker(slot, incarnation))
            case "leave":
                of = int(named.get("origin", 0)), int(named.get("copied", 0))
                left = GroupLeft(LeaveReason(named.get("reason", "asked")), *of)
                return Event(at, left, by_worker(slot, incarnation))
            case "commit":
                skipped, agreed = _spans(named.get("skipped", "")), int(named.get("agreed", 0))
                return Event(
                    at,
                    StepsCommitted(tuple(_committed(text, skipped, agreed) for text in plain[1:])),
                    by_worker(slot, incarnation),
                )
        silent = tuple(Slot(int(s)) for s in named.get("silent", "").split(",") if s)
        return Event(
            at,
            GroupStalled(int(plain[1]), int(plain[2]), float(named.get("waited", 1.5)), silent),
            by_worker(slot, incarnation),
        )

    def _lease(self, shard: ShardKey, no: LeaseNo) -> Lease:
        datasets = self.brain.shards.datasets
        number, _, index = split_key(shard)
        start, stop = datasets[number].plan.bounds(index) if number < len(datasets) else (0, 0)
        return Lease(no, shard, start, stop)

    def _snapshot(self, partition: int, named: dict[str, str], size: int) -> PartitionSnapshot:
        """``marks=e0#1@20,e0#2@15``: the watermarks in every snapshot of this command."""
        texts = [text.split("@") for text in named.get("marks", "").split(",") if text]
        marks = tuple((parse_shard(shard), int(position)) for shard, position in texts)
        return PartitionSnapshot(
            partition=PartitionId(partition),
            seq=int(self.at),
            fingerprint=0,
            watermarks=marks,
            files=(),
            bytes_written=size,
        )

    # ------------------------------------------------------------ words

    def _words(self, instruction: InstructionType) -> str:
        match instruction:
            case Reply(answer):
                return f"reply {self._answer(answer)}"
            case StartProcess(node, role, slot, incarnation, decision):
                return f"start {role}:{slot}#{incarnation} on {node}: {_why(decision)}"
            case StopProcess(node, role, slot, incarnation, grace_s, decision):
                return f"stop {role}:{slot}#{incarnation} on {node} grace {grace_s:g} s: {_why(decision)}"
            case RaiseMemory(node, role, slot, incarnation, memory_bytes):
                return f"raise memory of {role}:{slot}#{incarnation} on {node} to {memory_bytes}"
            case PublishPlacement(placement, decision):
                return f"publish placement v{placement.version} {_map(placement)}: {_why(decision)}"
            case PublishGroup(group, decision):
                return f"publish {_group(group)}: {_why(decision)}"
            case ReleaseShards(shards):
                return "release " + ", ".join(self.brain.shards.name(key) for key in shards)
            case RevokeLease(member, lease, decision):
                return f"revoke {lease_words(lease)} of {member}: {_why(decision)}"
            case Note(member, decision):
                return f"note {member or 'job'} | {_why(decision)}"
            case FinishJob(exit_code, error):
                return f"finish {exit_code} {error}".rstrip()
            case OrderSnapshots(checkpoint, since):
                return f"order images of checkpoint {checkpoint} since {since}"
            case CommitManifest(manifest, decision):
                return f"commit manifest {_manifest_words(manifest)}: {_why(decision)}"
            case DropCheckpoints(checkpoints):
                return f"drop checkpoints {list(checkpoints)}"

    def _answer(self, answer: Answer) -> str:
        match answer:
            case Granted(lease):
                name = self.brain.shards.name(lease.shard)
                return f"granted {name} [{lease.start}, {lease.stop}) lease {lease_words(lease.no)}"
            case Welcome(master, placement, revoked):
                version = f"placement v{placement.version}" if placement is not None else "no placement yet"
                gone = f", revoked {', '.join(map(lease_words, revoked))}" if revoked else ""
                return f"welcome to master #{master}, {version}{gone}"
            case Grouped(group, position):
                now = _group(group) if group is not None else "no group"
                return f"{now}, e{position.epoch} {position.sample} is next, step {position.step}"
            case Fenced(reason):
                return f"fenced: {reason}"
            case Refused(error):
                return f"refused: {error}"
            case Registered(dataset):
                return f"registered as dataset {dataset}"
            case Wait(retry_after_s):
                return f"wait {retry_after_s:g} s"
            case EndOfData():
                return "end of data"
            case Yes(yes):
                return "yes" if yes else "no"
            case CheckpointBegun(checkpoint):
                return f"checkpoint {checkpoint}"
        return "ok"

    def _state(self) -> Iterator[str]:
        brain = self.brain
        error = f" {brain.job.error}" if brain.job.error else ""
        job, samples = brain.job, brain.shards.samples_done
        yield f"{job.phase}, wants {job.workers_wanted} workers, {samples} samples done{error}"
        for record in brain.members.all():
            flags = "".join(f" {name}" for name in ("stopping", "finished", "waiting") if getattr(record, name))
            holds = ", ".join(f"{brain.shards.name(key)} by {lease_words(brain.leases[key].no)}" for key in record.held)
            m = record.member
            yield f"{m.role}:{m.slot}#{m.incarnation} {m.state} on {m.node}{flags}" + (
                f" holds {holds}" if holds else ""
            )
        for dataset in brain.shards.datasets:
            for epoch in dataset.epochs:
                head = f" head {epoch.returned}" if epoch.returned else ""
                aside = f" aside {list(epoch.quarantined)}" if epoch.quarantined else ""
                counts = f"{epoch.todo} todo {epoch.doing} doing {epoch.done} done"
                yield f"{dataset.plan.name} e{epoch.number}: {counts}{head}{aside}"
        if brain.takes(StepsCommitted):
            yield repr(brain.state.groups)
        if brain.checkpoints.numbers:
            waiting = ", ".join(brain.shards.name(key) for key in brain.shards.releasing)
            yield f"{brain.checkpoints!r}, not released: {waiting or 'none'}"


def _map(placement: Placement) -> str:
    """Owners; mirrors as ``number=members@ps`` (``'``: the second row, ``>``: of a move); snapshots to be loaded."""
    words = [str(list(placement.owner))]
    if placement.route != placement.version:
        words.append(f"(owners of v{placement.route})")
    for mirror in placement.mirrors:
        row = "'" * mirror.row
        at = ">" if mirror.kind is MirrorKind.MOVE else "@"
        words.append(f"{mirror.id}={'+'.join(map(str, mirror.members))}{row}{at}{mirror.at}")
    words += [f"image {partition}:{checkpoint}" for partition, checkpoint in placement.snapshots if checkpoint]
    return " ".join(words)


def _spans(text: str) -> tuple[tuple[int, int], ...]:
    """``8-16,24-32``."""
    spans = [part.split("-") for part in text.split(",") if part]
    return tuple((int(lo), int(hi)) for lo, hi in spans)


def _committed(text: str, skipped: tuple[tuple[int, int], ...], agreed: int) -> Committed:
    """``g2:5..7:e0:40-64``: steps 5 to 7 of generation 2. ``agreed=4``: all were known to have them in generation 4."""
    generation, steps, epoch, span = text.split(":")
    first, _, last = steps.partition("..")
    lo, _, hi = span.partition("-")
    dataset, _, number = epoch.rpartition("e")
    place = int(dataset[1:] or 0), int(number), int(lo), int(hi)
    return Committed(int(generation[1:]), int(first), int(last or first), *place, skipped, agreed=agreed)


def _action(verb: str, words: list[str]) -> Action:
    """``bs 0:40 1:30``, ``accum 0:2``, ``lr 0.5``, ``kill worker:1#1``, ``move 3:1``, ``scale 2``."""
    match verb:
        case "bs":
            return AdjustBatch(batch=_by_slot(words))
        case "accum":
            return AdjustAccum(accum=_by_slot(words))
        case "lr":
            return AdjustRate(factor=float(words[0]))
        case "kill":
            role, slot, incarnation = parse_member(words[0])
            return KillRestart(role=role, slot=slot, incarnation=incarnation)
        case "move":
            found = [word.split(":") for word in words]
            return MovePartitions(owners={PartitionId(int(b)): Slot(int(s)) for b, s in found})
        case _:
            return Scale(workers=int(words[0]))


def _by_slot(words: list[str]) -> dict[Slot, int]:
    return {Slot(int(k)): int(n) for k, _, n in (word.partition(":") for word in words)}


def _group(group: Group) -> str:
    """``g3 [0#1 2#1 1#2] without 1#1, joining 3#1, on hold: ..., from checkpoint 2 at step 40``."""
    words = f"g{group.generation} [{' '.join(f'{m.slot}#{m.incarnation}' for m in group.members)}]"
    words += f" without {' '.join(f'{slot}#{life}' for slot, life in group.lost)}" if group.lost else ""
    words += f", shares {' '.join(map(str, group.split.shares))}" if group.split.shares else ""
    words += f", passes {' '.join(map(str, group.split.passes))}" if any(group.split.passes) else ""
    words += f", rate {group.split.rate:g}" if group.split.rate != 1 else ""
    words += f", joining {' '.join(f'{m.slot}#{m.incarnation}' for m in group.joining)}" if group.joining else ""
    words += f", on hold: {group.hold}" if group.hold else ""
    begin = f"checkpoint {group.restore} at step {group.begin.step}" if group.restore else "nothing"
    return words + (f", from {begin}" if group.lineage == group.generation else "")


def _why(decision: Decision) -> str:
    return str(decision)


def _manifest_words(manifest: Manifest) -> str:
    """``2 on 1, d: 2 epochs, e2 [0, 3)``: number, what it builds on, and what all snapshots have."""
    places = []
    for d in manifest.datasets:
        epochs = [f"e{e.epoch} " + " ".join(f"[{lo}, {hi})" for lo, hi in e.done) for e in d.epochs]
        places.append(f"{d.plan.name}: " + ", ".join([f"{d.finished_epochs} epochs", *epochs]))
    on = f" on {manifest.since}" if manifest.since else ""
    return "; ".join([f"{manifest.checkpoint}{on}, {manifest.samples_done} samples", *places])


def run_transcript(text: str) -> str:
    """The text with every answer replaced by what the brain really says."""
    story = Story()
    out: list[str] = []
    lines = iter(text.splitlines())
    for line in lines:
        if not line.strip() or line.startswith("#"):
            out.append(line)
            continue
        out += [line, "----", *story.say(line)]
        for old in lines:  # the recorded answer ends with an empty line
            if not old.strip():
                out.append(old)
                break
    return "\n".join(out).rstrip() + "\n"
