"""Names the fault points: steps of the code at which a test or a trial can have a process killed. The only such
mechanism.

``EVERSTEP_FAULT`` says who dies where: ``ROLE:SLOT[.LIFE]:POINT:TIMES``, several with commas between them.
``EVERSTEP_FAULT=ps:1:before_apply:3`` is SIGKILL for each life of ps:1 when it comes to ``before_apply`` for the third
time; ``worker:1.2:serve_state:1`` is meant for the second life of worker:1 only; the master is ``master:0``. Without
the variable, a fault point is one comparison.

A process says once who it is (``begin``) and calls ``reach(POINT)`` at each point. ``POINTS`` lists them all.
"""

from __future__ import annotations

import os
import signal
import threading

from everstep.errors import ConfigError

VARIABLE = "EVERSTEP_FAULT"
POINTS = {
    "ps": {
        "before_apply": "a push has come and nothing of it is applied",
        "after_apply": "a push is applied and logged",
        "before_ack": "a push is applied, and mirrors have not confirmed it (--protect acked)",
        "after_ack": "a push is confirmed by the mirrors, and not answered",
        "before_send": "differences are to go to another ps",
        "after_send": "differences went to another ps, and it has not answered",
        "before_append": "another ps's differences have come and are not applied",
        "after_append": "another ps's differences are applied and not answered",
        "mid_rebuild": "the same while partitions are rebuilt here",
        "before_hand_over": "another ps asks for a partition that moves there",
        "mid_move": "another ps has handed a partition over, and it is not served here yet",
        "after_flush": "what changed during a lag is one difference, and nobody is told to send it (--protect lag)",
        "mid_image": "snapshots of partitions are written and not reported",
    },
    "worker": {
        "serve_state": "a part of a snapshot is asked for by a newcomer",
        "load_state": "a part of a snapshot has come",
        "follow": "what a step did has come to a newcomer",
        "agree": "members of a new group meet",
        "agreed": "members of a new group have the same state",
        "checkpoint": "a checkpoint file is written and not reported",
        "part": "the file of one stage of a checkpoint is written, and not those of the others (mode pipeline)",
        "voted": "a step is committed (with tables on the ps)",
        "push": "all members know that a step is committed, and its gradients are to go to the ps",
    },
    "master": {
        "before_manifest": "all files of a checkpoint are there, and its manifest is not",
        "after_manifest": "a manifest is written and not journaled",
    },
}
"""By role: the points, and what has happened when a process comes there."""

_lock = threading.Lock()
_me = ("", -1)  # role and slot of this process
_left: dict[str, int] = {}  # by point: how many times until this process dies there


def planted(words: str | None = None) -> list[tuple[str, int, int, str, int]]:
    """Return all faults of ``words`` (default: of the environment) as (role, slot, life, point, times); life 0: each
    life. Raises ConfigError that names the one that cannot be read."""
    found = []
    for one in filter(None, (os.environ.get(VARIABLE, "") if words is None else words).split(",")):
        try:
            role, member, point, times = one.split(":")
            slot, dot, life = member.partition(".")
            fault = role, int(slot), int(life) if dot else 0, point, int(times)
        except ValueError:
            raise ConfigError(f"{VARIABLE}={one}: give ROLE:SLOT[.LIFE]:POINT:TIMES") from None
        points = POINTS.get(role, {})
        if point not in points:
            there = f"{role} has {', '.join(points)}" if points else f"there are {', '.join(POINTS)}"
            raise ConfigError(f"{VARIABLE}={one}: {there}")
        if fault[-1] < 1:
            raise ConfigError(f"{VARIABLE}={one}: TIMES must be at least 1")
        found.append(fault)
    return found


def begin(role: str, slot: int, life: int) -> None:
    """This process is that life of that member. Raises ConfigError (``planted``)."""
    global _me
    with _lock:
        _me = role, slot
        _left.clear()
        for name, number, of, point, times in planted():
            if (name, number) == (role, slot) and of in (0, life):
                _left[point] = times


def armed(role: str, slot: int) -> bool:
    """Whether that member is this process, and is to die at some point: what else happens apart from Python must
    happen in it then."""
    return bool(_left) and _me == (role, slot)


def reach(point: str) -> None:
    """This process came to ``point``."""
    if not _left or point not in _left:
        return
    with _lock:
        _left[point] -= 1
        if _left[point] == 0:
            os.kill(os.getpid(), signal.SIGKILL)
