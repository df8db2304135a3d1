"""Named steps at which a test can have this worker killed: ``EVERSTEP_FAULT="worker:1.1:serve_state:2"`` is SIGKILL
when the first life of worker:1 comes to ``serve_state`` for the second time. Without the variable, a step is one look.

Steps: serve_state (a part of a snapshot is asked for), load_state (a part of one has come), follow (what a step did has
come), agree (members of a new group meet), agreed (they have the same state), checkpoint (a file is written, and not
yet told of), voted (a step is committed; with tables on the ps), push (everybody knows that, and its gradients are to
go to the ps now).
"""

from __future__ import annotations

import os
import signal
import threading

from everstep.ids import Incarnation, Slot

FAULT = "EVERSTEP_FAULT"
_lock = threading.Lock()
_step = ""
_left = 0


def arm(slot: Slot, incarnation: Incarnation) -> None:
    """Who we are."""
    global _step, _left
    wanted = os.environ.get(FAULT, "")
    if wanted.startswith(f"worker:{slot}.{incarnation}:"):
        _, _, _step, times = wanted.split(":")
        _left = int(times)


def step(name: str) -> None:
    """This worker came to the step ``name``."""
    global _left
    if name != _step:
        return
    with _lock:
        _left -= 1
        if _left == 0:
            os.kill(os.getpid(), signal.SIGKILL)
