"""Runs something in the processes of one worker, without a job around it."""

from __future__ import annotations

import gc
import os
import signal
import socket
import sys
import tempfile
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from everstep.allreduce.replica_group import Unit
from everstep.errors import EverstepError

LIMIT_S = 150


def in_processes(size: int, body: Callable[[Unit], Any]) -> list[Any]:
    """Return what ``body`` returned, by process; an EverstepError's words are returned as a text. The processes are
    forked, so that torch's process group and its threads stay out of this one."""
    pairs = [socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET) for _ in range(size - 1)]
    found: list[Any] = []
    with tempfile.TemporaryDirectory() as folder:
        gc.disable()
        pids = [_forked(index, size, pairs, Path(folder), body) for index in range(size)]
        gc.enable()
        for pair in pairs:
            for end in pair:
                end.close()
        statuses = [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids]
        for index in range(size):
            path = Path(folder) / f"result{index}"
            found.append(torch.load(path, weights_only=True) if path.exists() else None)
    assert set(statuses) <= {0, 3}, statuses
    return found


def _forked(index: int, size: int, pairs: list[Any], folder: Path, body: Callable[[Unit], Any]) -> int:
    pid = os.fork()
    if pid:
        return pid
    status = 1
    try:
        gc.freeze()
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.alarm(LIMIT_S)
        torch.set_num_threads(1)
        links = [pairs[index - 1][1]] if index else [pair[0] for pair in pairs]
        unit = Unit(index, size, links)
        unit.mesh(folder / "store")
        try:
            result, status = body(unit), 0
        except EverstepError as error:
            result, status = str(error), 3
        torch.save(result, folder / f"part{index}")
        (folder / f"part{index}").rename(folder / f"result{index}")
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(status)
