"""Keeps the sizes of processes that start next: asked for by hand or by a plan, or raised after a death."""

from __future__ import annotations

from collections.abc import Mapping

from everstep.brain.concerns.concern import OK, Concern, Handlers, Inputs, Out
from everstep.brain.events import Event, Fenced, MemoryShort, Note, RaiseMemory, Refused, Reply, ResizeAsked
from everstep.brain.members import SlotRecord
from everstep.model.decision import Decision
from everstep.model.member import MemberState, Role
from everstep.model.memory_limit import MemoryLimit, OutOfMemory
from everstep.model.process_size import ProcessSize
from everstep.model.words import limit_remedy, limit_words
from everstep.policies.process_sizes import NodeMemory, raised_memory, refuse_sizes, refuse_wish, size_words
from everstep.units import human_bytes


class SizeConcern(Concern):
    """Decides how many threads and how much memory processes get that start from now on."""

    __slots__ = ()

    def handlers(self) -> Handlers:
        return {ResizeAsked: self._resize_asked, MemoryShort: self._memory_short}

    def of(self, role: Role) -> ProcessSize:
        """Return what a process of this role gets that starts now."""
        return self.job.sizes.get(role, ProcessSize())

    def _resize_asked(self, e: ResizeAsked, event: Event) -> Out:
        """Take all of it, or nothing, as of a plan."""
        if self.job.over:
            return [Reply(Refused("the job is over"))]
        wanted = dict(e.sizes)
        if error := self.refuse(wanted):
            return [Reply(Refused(error))]
        return [OK, *self.resize(wanted, "as asked")]

    def refuse(self, wanted: Mapping[Role, ProcessSize]) -> str:
        """Return one line if processes cannot have these sizes, else ""."""
        spec = self.job.spec
        if not wanted:
            return "nothing named: threads or memory of workers or ps"
        for role, size in wanted.items():
            if error := refuse_wish(role, size.threads, size.memory_bytes):
                return error
            if role is Role.PS and not spec.ps:
                return "this job of mode allreduce has no ps: every worker has the whole model"
            if role is Role.WORKER and size.threads and spec.logical_workers:
                return "worker threads: the number of threads changes the order of sums, and so the bits of this job"
        sizes = self.job.sizes | {role: self.of(role).with_wish(size) for role, size in wanted.items()}
        return refuse_sizes(spec, sizes, self._counts(), self._nodes())

    def resize(self, wanted: Mapping[Role, ProcessSize], why: str) -> Out:
        """Give the next processes these sizes, of which nothing is refused."""
        out: Out = []
        for role, wish in wanted.items():
            before, size = self.of(role), self.of(role).with_wish(wish)
            if size == before:
                continue
            self.job.sizes[role] = size
            inputs: Inputs = {"role": role.value, "threads": size.threads, "memory_bytes": size.memory_bytes}
            words = f"{why}: each {role} that starts from now on gets {size_words(size)}"
            words += f" instead of {size_words(before)}" if before != ProcessSize() else ""
            out.append(Note("", Decision("resize", words, inputs)))
        return out

    def most_of_ps(self) -> int:
        """Return the bytes that each ps may have where it is; 0: no node has told."""
        nodes = {r.member.node for r in self.members.servers.values() if r.running}
        return min((n.bytes for n in self._nodes() if n.node in nodes and n.bytes), default=0)

    def raise_running(self, dead: SlotRecord | None = None) -> Out:
        """Have each ps that runs get what the next one gets. ``dead``: has just ended."""
        memory_bytes = self.of(Role.PS).memory_bytes
        up = (MemberState.ALIVE, MemberState.SUSPECT)
        records = [r for _, r in sorted(self.members.servers.items()) if r is not dead and r.member.state in up]
        members = [record.member for record in records]
        return [RaiseMemory(m.node, m.role, m.slot, m.incarnation, memory_bytes) for m in members if memory_bytes]

    def after_death(self, record: SlotRecord, died: OutOfMemory) -> Out:
        """Give the next processes of a role more memory, once, after one died of a limit of its own."""
        job, role = self.job, record.member.role
        if not job.rules.resizes:
            return []
        known = job.too_small.get(role)
        if known is None or died.limit_bytes > known.limit_bytes:
            job.too_small[role] = died
        size, key = self.of(role), str(record.member.key)
        inputs: Inputs = {"limit": died.limit.value, "limit_bytes": died.limit_bytes, "memory_bytes": size.memory_bytes}
        if died.limit is not MemoryLimit.PROCESS:
            words = f"{limit_words(died)} is not the job's to raise: {limit_remedy(died.limit)}"
            return [Note(key, Decision("same memory", words, inputs))]
        if size.memory_bytes > died.limit_bytes > 0:
            words = f"it had {human_bytes(died.limit_bytes)}; the next one gets {human_bytes(size.memory_bytes)}"
            others = self.raise_running(record) if role is Role.PS and job.rules.raises else []
            return [Note(key, Decision("more memory", words, inputs)), *others]
        if role in job.raised:
            words = f"each {role} has got more once ({human_bytes(size.memory_bytes)}): everstep resize gives more"
            return [Note(key, Decision("same memory", words, inputs))]
        if not died.limit_bytes:
            words = f"nobody knows how high {limit_words(died)} is: {limit_remedy(died.limit)}"
            return [Note(key, Decision("same memory", words, inputs))]
        return self._raise_role(record, died.limit_bytes, f"it died of {human_bytes(died.limit_bytes)}", inputs, record)

    def _memory_short(self, e: MemoryShort, event: Event) -> Out:
        """Give all ps more memory, once, before one dies of its limit: others may be as full."""
        job, record = self.job, self.members.current(Role.PS, event.slot, event.incarnation)
        if record is None:
            return [Reply(Fenced(f"ps:{event.slot} #{event.incarnation} was replaced"))]
        if job.over or not job.rules.raises or not e.limit_bytes:
            return [OK]
        size, key = self.of(Role.PS), str(record.member.key)
        has = f"it has almost reached the limit of its process ({human_bytes(e.limit_bytes)})"
        inputs: Inputs = {"limit_bytes": e.limit_bytes, "used_bytes": e.used_bytes, "memory_bytes": size.memory_bytes}
        if size.memory_bytes > e.limit_bytes:
            words = f"{has}: it gets {human_bytes(size.memory_bytes)}, as each ps that starts does"
            return [OK, Note(key, Decision("more memory", words, inputs)), *self.raise_running()]
        if Role.PS in job.raised:
            words = f"{has}: each ps has got more once: have more ps (everstep scale), or restart it with more"
            return [OK, Note(key, Decision("same memory", words, inputs))]
        return [OK, *self._raise_role(record, e.limit_bytes, has, inputs)]

    def _raise_role(
        self, record: SlotRecord, limit_bytes: int, why: str, inputs: Inputs, dead: SlotRecord | None = None
    ) -> Out:
        """Give the processes of a role more memory, once; ``limit_bytes``: was too little for this one."""
        job, role, key = self.job, record.member.role, str(record.member.key)
        counts = self._counts()
        others = sum(counts[r] * s.memory_bytes for r, s in job.sizes.items() if r is not role)
        found = raised_memory(job.spec, role, limit_bytes, others, counts[role], self._node_of(record))
        if not found.memory_bytes:
            return [Note(key, Decision("same memory", f"{human_bytes(limit_bytes)}: {found.why}", inputs))]
        job.raised.append(role)
        job.sizes[role] = self.of(role).with_wish(ProcessSize(0, found.memory_bytes))
        others_too = self.raise_running(dead) if role is Role.PS and job.rules.raises else []
        words = f"{why}: each {role} that starts from now on gets {human_bytes(found.memory_bytes)} ({found.why})"
        words += ", and those that run get it at once" if others_too else ""
        words += "; this is done once"
        inputs = inputs | {"role": role.value, "memory_bytes": found.memory_bytes}
        rejected = ("the same memory again: it would die of it again",)
        return [Note(key, Decision("more memory", words, inputs, rejected)), *others_too]

    def _counts(self) -> dict[Role, int]:
        return {Role.WORKER: self.job.workers_wanted, Role.PS: self.job.ps_wanted}

    def _nodes(self) -> list[NodeMemory]:
        nodes = self.members.nodes.values()
        return [NodeMemory(n.node, n.memory_bytes, n.memory_limit) for n in nodes if n.alive]

    def _node_of(self, record: SlotRecord) -> NodeMemory:
        node = self.members.nodes.get(record.member.node)
        if node is None:
            return NodeMemory(record.member.node)
        return NodeMemory(node.node, node.memory_bytes, node.memory_limit)
