"""Decides what becomes of a request, whoever hosts the master: processes of a cluster, or one process alone.

A request is refused (``machines.rights``), answered by its host (a query), or a fact. A fact gets its stamp (time, who
said it, what led to it), goes to the brain and into the journal.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec

from everstep.brain.brain import Brain
from everstep.brain.events import (
    MASTER,
    AnswerType,
    Event,
    Fact,
    FactType,
    InstructionType,
    Refused,
    Reply,
    Sender,
)
from everstep.machines.causes import Causes
from everstep.machines.rights import refused
from everstep.net.messages import RequestType

Handler = Callable[[Any, Sender], Any]


class Handled(msgspec.Struct, frozen=True, gc=False):
    """Is a fact that the brain took in: the entry and its number, the answer to its sender, and what is to be done."""

    seq: int
    event: Event
    answer: AnswerType | None
    instructions: list[InstructionType]


class BrainError(Exception):
    """Says that the brain raised on ``event``, which is not in the journal: a bug."""

    def __init__(self, event: Event) -> None:
        super().__init__(f"the brain failed on {event!r}")
        self.event = event


class Dispatch:
    """Answers queries and takes in facts; every host of a master has one.

    ``now``: the host's clock. ``append``: puts an entry with its instructions into the journal, and returns its number.
    ``take``: what the host does with a fact that is asked (it calls ``tell``). ``handlers``: of queries, and of facts
    with which the host does more than that. ``refuse``: what it does with a request that is refused, and why.
    ``causes``: of what the journal has already.
    """

    def __init__(
        self,
        brain: Brain,
        now: Callable[[], float],
        append: Callable[[Event, Sequence[InstructionType]], int],
        take: Handler,
        handlers: Mapping[type, Handler],
        refuse: Callable[[RequestType, Sender, AnswerType], Any] = lambda request, sender, answer: answer,
        causes: Causes | None = None,
    ) -> None:
        self._brain, self._now, self._append = brain, now, append
        self._take, self._handlers, self._refuse = take, handlers, refuse
        self.causes = causes if causes is not None else Causes()

    def __repr__(self) -> str:
        return f"<dispatch to {self._brain!r}>"

    def dispatch(self, request: RequestType, sender: Sender) -> Any:
        """Return the answer, in the form that the host gives it."""
        answer = refused(self._brain, sender, request)
        if answer is not None:
            return self._refuse(request, sender, answer)
        handler = self._handlers.get(type(request)) or (self._take if isinstance(request, Fact) else None)
        if handler is not None:
            return handler(request, sender)
        return self._refuse(request, sender, Refused(f"{type(request).__name__}: this master does not take it"))

    def tell(self, fact: FactType, sender: Sender = MASTER) -> Handled:
        """Stamp a fact, tell the brain, and put it into the journal. Raises BrainError, and what the journal raises."""
        event = Event(self._now(), fact, sender, self.causes.of(fact))
        try:
            instructions = self._brain.handle(event)
        except Exception as error:
            raise BrainError(event) from error
        seq = self._append(event, instructions)
        first = instructions[0] if instructions else None
        answer = first.answer if type(first) is Reply else None
        if answer is None or len(instructions) > 1:  # (an answer is no instruction: nothing follows from it)
            self.causes.note(seq, event, instructions)
        return Handled(seq, event, answer, instructions)
