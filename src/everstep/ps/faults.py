"""Named steps at which a test can have this process killed: ``EVERSTEP_FAULT="ps:1:before_apply:3"`` is SIGKILL when
ps:1 comes to ``before_apply`` for the third time, in every life; ``ps:1.1:before_apply:3``: in its first life only.
Without the variable, a step is one comparison.

Steps: before_apply, after_apply, before_send and after_send (differences to another ps), before_feed, after_feed,
before_ack, after_ack, mid_rebuild, mid_move, before_hand_over, mid_image.
"""

from __future__ import annotations

import os
import signal
import threading

_wanted = os.environ.get("EVERSTEP_FAULT", "")
_lock = threading.Lock()
_left = 0
_member = _step = ""
if _wanted:
    _member, _step, _times = _wanted.rsplit(":", 2)
    _left = int(_times)


def begin(incarnation: int) -> None:
    """This process is that life of its slot."""
    global _member
    slot, dot, life = _member.partition(".")
    if dot:
        _member = slot if int(life) == incarnation else ""


def armed(slot: int) -> bool:
    """Whether this ps is to die at some step."""
    return _member == f"ps:{slot}"


def step(slot: int, name: str) -> None:
    """This ps came to the step ``name``."""
    global _left
    if name != _step or _member != f"ps:{slot}":
        return
    with _lock:
        _left -= 1
        if _left == 0:
            os.kill(os.getpid(), signal.SIGKILL)
