"""``everstep explain``: the chain of decisions with their reasons, from the journal by replay."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

from everstep.brain.brain import Brain
from everstep.brain.events import (
    FinishJob,
    Granted,
    InstructionType,
    Note,
    PublishGroup,
    PublishPlacement,
    Refused,
    Reply,
    RevokeLease,
    StartProcess,
    StopProcess,
)
from everstep.cli.replay import JOURNAL_FILE
from everstep.errors import ConfigError
from everstep.model.decision import Decision
from everstep.storage.journal import read_journal


def explain(run_dir: Path, member: str = "") -> Iterator[str]:
    """Lines: when, who, what, why; below it the inputs and what was not done instead.

    ``member``: ``worker:1``, ``ps:0``, ``master``, or a node's name: what was decided about it, and what its numbers
    were part of; "" for the whole job. Raises ConfigError (no
    journal there, nobody of that name), PlatformError (unreadable)."""
    brain = Brain()
    shown = 0
    for seq, event, _ in read_journal(run_dir / JOURNAL_FILE):
        for instruction in brain.handle(event):
            for who, decision in _decisions(instruction):
                if member and who != member and member not in decision.inputs:
                    continue
                shown += 1
                yield from _lines(seq, event.at, who, decision)
    if member and not shown:
        known = [str(seat.member.key) for seat in brain.members.all()] + list(brain.members.nodes)
        if member not in [*known, "master"]:
            raise ConfigError(f"{member} is not part of this job; known: {', '.join(known) or 'nobody yet'}")
        yield f"nothing was decided about {member}"
    elif not shown:
        yield "nothing was decided yet"
    if not member:
        yield _end(brain)


def _decisions(instruction: InstructionType) -> Iterator[tuple[str, Decision]]:
    match instruction:
        case StartProcess(node, role, slot, incarnation, decision) | StopProcess(
            node, role, slot, incarnation, _, decision
        ):
            inputs = {**decision.inputs, "node": node, "incarnation": incarnation}
            yield f"{role}:{slot}", Decision(decision.action, decision.reason, inputs, decision.rejected)
        case PublishPlacement(placement, decision):
            yield "", Decision(decision.action, decision.reason, {"version": placement.version}, decision.rejected)
        case PublishGroup(_, decision):
            yield "", decision
        case RevokeLease(who, _, decision):
            yield str(who), decision
        case Note(who, decision):
            yield who, decision
        case FinishJob(exit_code, error):
            yield "", Decision("end", error or "the job is over", {"exit_code": exit_code})
        case Reply(Refused(error)):
            yield "", Decision("refuse", error)
        case Reply(Granted()):
            pass  # routine: the audit has them all


def _lines(seq: int, at: float, who: str, decision: Decision) -> Iterator[str]:
    clock = time.strftime("%H:%M:%S", time.localtime(at)) + f".{int(at * 1000) % 1000:03d}"
    yield f"{clock}  {who or 'job':<10} {decision}"
    inputs = ", ".join(f"{name}={value}" for name, value in decision.inputs.items())
    yield f"{'':<25}because of event {seq}" + (f" with {inputs}" if inputs else "")
    for rejected in decision.rejected:
        yield f"{'':<25}not: {rejected}"


def _end(brain: Brain) -> str:
    job = brain.job
    if job.exit_code is None:
        return f"the job is {job.phase}"
    return f"the job is {job.phase}, exit code {job.exit_code}" + (f": {job.error}" if job.error else "")
