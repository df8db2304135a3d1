"""Runs ``everstep explain``: the chain of decisions with their reasons, from the journal by replay."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from everstep.brain.brain import Brain
from everstep.brain.events import (
    Event,
    FinishJob,
    Granted,
    GroupSynced,
    InstructionType,
    MemberJoined,
    MemberSilent,
    MirrorsReady,
    NodeLost,
    Note,
    PartitionsReady,
    ProcessExited,
    PublishGroup,
    PublishPlacement,
    Refused,
    Reply,
    RevokeLease,
    StartProcess,
    StopProcess,
)
from everstep.cli.replay import JOURNAL_FILE
from everstep.cli.view_text import ending_text, fact_lines, head_text
from everstep.errors import ConfigError
from everstep.machines.causes import Causes
from everstep.model.decision import Decision
from everstep.model.words import exit_words
from everstep.monitor.viewer import make_job_view
from everstep.storage.journal import read_journal

NEAREST = 2  # causes that are shown besides the first one; all: --event


def explain(run_dir: Path, member: str = "") -> Iterator[str]:
    """Yield lines: when, who, what, why; below it the inputs and what was not done instead. Of the whole job: first
    what it has come to, last how it stands.

    ``member``: ``worker:1``, ``ps:0``, ``master``, or a node's name: what was decided about it, and what its numbers
    were part of; "" for the whole job. Raises ConfigError (no
    journal there, nobody of that name), PlatformError (unreadable)."""
    brain = Brain()
    chains = _Chains()
    decided: list[str] = []
    at = 0.0
    for seq, event, _ in read_journal(run_dir / JOURNAL_FILE):
        instructions = brain.handle(event)
        chains.note(seq, event, instructions)
        at = event.at
        for instruction in instructions:
            for who, decision in _decisions(instruction):
                if not member or who == member or member in decision.inputs:
                    decided += _lines(event.at, who, decision, chains.because(seq))
    if member and not decided:
        known = [str(record.member.key) for record in brain.members.all()] + list(brain.members.nodes)
        if member not in [*known, "master"]:
            raise ConfigError(f"{member} is not part of this job; known: {', '.join(known) or 'nobody yet'}")
    view = make_job_view(brain, at)
    if not member:
        yield f"{view.job}  {head_text(view)}"
        yield from (text for text, _ in fact_lines(view))
    yield from decided or [f"nothing was decided {f'about {member}' if member else 'yet'}"]
    if not member:
        yield ending_text(view)


def chain(run_dir: Path, number: int) -> Iterator[str]:
    """Yield lines: the events that led to event ``number``, first cause first, and below it all that it led to, each
    with what was decided. Raises ConfigError (no journal there, no such event), PlatformError (unreadable)."""
    brain, chains = Brain(), _Chains()
    decided: dict[int, list[str]] = {}
    for seq, event, _ in read_journal(run_dir / JOURNAL_FILE):
        instructions = brain.handle(event)
        chains.note(seq, event, instructions)
        decided[seq] = [f"{who or 'job'}: {decision}" for i in instructions for who, decision in _decisions(i)]
    if number not in decided:
        raise ConfigError(f"there is no event {number}: the journal has {len(decided)}")
    above = [number]
    while (cause := chains.causes[above[-1]]) != 0:
        above.append(cause)
    for depth, seq in enumerate(reversed(above[1:])):
        yield from chains.lines(seq, depth, decided[seq])
    todo = [(number, len(above) - 1)]
    while todo:
        seq, depth = todo.pop()
        yield from chains.lines(seq, depth, decided[seq])
        todo += [(effect, depth + 1) for effect in reversed(chains.effects.get(seq, []))]


class _Chains:
    """Events of a journal by what led to them: as the master stamped it, or, in journals of before, found once more."""

    def __init__(self) -> None:
        self._found = Causes()
        self._facts: dict[int, tuple[float, str]] = {}
        self.causes: dict[int, int] = {}
        self.effects: dict[int, list[int]] = {}

    def note(self, seq: int, event: Event, instructions: Sequence[InstructionType]) -> None:
        cause = self.causes[seq] = event.cause or self._found.of(event.fact)
        self._found.note(seq, event, instructions)
        self._facts[seq] = event.at, fact_words(event)
        if cause:
            self.effects.setdefault(cause, []).append(seq)

    def because(self, seq: int) -> list[str]:
        """Return the causes: ``event 91 (ps:1 #2 joined)``, the event behind that one, and so on."""
        out = []
        while seq:
            out.append(f"event {seq} ({self._facts[seq][1]})")
            seq = self.causes[seq]
        return out

    def lines(self, seq: int, depth: int, decided: list[str]) -> Iterator[str]:
        at, words = self._facts[seq]
        indent = "  " * depth
        yield f"{_clock(at)}  {indent}event {seq}: {words}"
        for line in decided:
            yield f"{'':<14}{indent}  {line}"


def fact_words(event: Event) -> str:
    """Return an event in a few words."""
    fact, by = event.fact, event.sender
    match fact:
        case MemberJoined(role, slot, incarnation):
            return f"{role}:{slot} #{incarnation} joined"
        case ProcessExited(role, slot, incarnation, status):
            return f"{role}:{slot} #{incarnation} ended: {exit_words(status)}"
        case MemberSilent(role, slot, incarnation, silent_s):
            return f"{role}:{slot} #{incarnation} was silent for {silent_s:.1f} s"
        case NodeLost(node):
            return f"node {node} was lost"
        case PartitionsReady(placement, partitions, how):
            return f"{by}: {len(partitions)} partitions of placement {placement} are {how}"
        case MirrorsReady(mirrors):
            return f"{by}: {len(mirrors)} mirrors have everything"
        case GroupSynced(generation):
            return f"{by} has the state of group {generation}"
    name = "".join(f" {c.lower()}" if c.isupper() else c for c in type(fact).__name__).strip()
    return name if by.role == "master" else f"{name} by {by}"


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


def _clock(at: float) -> str:
    return time.strftime("%H:%M:%S", time.localtime(at)) + f".{int(at * 1000) % 1000:03d}"


def _short(causes: list[str]) -> list[str]:
    """Return the nearest causes, and the first one of all."""
    lines = [f"which came of {cause}" for cause in causes]
    between = len(lines) - NEAREST - 1
    return (
        lines if between < 1 else [*lines[:NEAREST], f"which came of {between} more events, and these of", *causes[-1:]]
    )


def _lines(at: float, who: str, decision: Decision, because: list[str]) -> Iterator[str]:
    yield f"{_clock(at)}  {who or 'job':<10} {decision}"
    inputs = ", ".join(f"{name}={value}" for name, value in decision.inputs.items())
    yield f"{'':<25}because of {because[0]}" + (f" with {inputs}" if inputs else "")
    for cause in _short(because[1:]):
        yield f"{'':<25}{cause}"
    for rejected in decision.rejected:
        yield f"{'':<25}not: {rejected}"
