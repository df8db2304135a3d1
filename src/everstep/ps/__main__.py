"""Runs ``python -m everstep.ps RUN_DIR SLOT INCARNATION NODE [--host HOST]``: one parameter server, started by an
agent. ``--spare``: it hears these arguments on its standard input once a ps is needed."""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import sys
import threading
from collections.abc import Set
from pathlib import Path
from typing import Final

from everstep import faultpoints
from everstep.errors import EverstepError
from everstep.ids import Incarnation, NodeId, Slot
from everstep.model.memory_limit import MEMORY_STATUS
from everstep.monitor.life_lock import hold_life_lock
from everstep.monitor.memory_room import bound_memory
from everstep.net.log import log_plainly
from everstep.net.strangers import allow_many_descriptors
from everstep.ps.ps_process import NO_THREAD, PsProcess, die_with_parent, end_threads_for_memory
from everstep.ps.spare import FLAG, wait_for_role

STACK_BYTES: Final = 1 << 20
"""Of each thread. A ps has some for each worker and each other ps, and a limit of a process counts stacks whole."""


def processors_of(slot: int, threads: int, free: Set[int]) -> set[int]:
    """Return the processors that a ps may use: ``threads`` of those that are ``free``, others than the next slot's
    while there are enough."""
    order = sorted(free)
    first = slot * threads % len(order)
    return set((order + order)[first : first + min(threads, len(order))])


def main() -> int:
    """Run the ps; return the process's exit code."""
    hold_life_lock()
    words = sys.argv[1:]
    if words[:1] == [FLAG]:
        role = wait_for_role()
        if role is None:
            return 0
        words = list(role.arguments)
    parser = argparse.ArgumentParser(prog="everstep.ps")
    parser.add_argument("run_dir", type=Path)
    parser.add_argument("slot", type=int)
    parser.add_argument("incarnation", type=int)
    parser.add_argument("node")
    parser.add_argument("--host", default="", help="address by which other nodes reach this one")
    parser.add_argument("--threads", type=int, default=0, help="processors that it may use; 0: all of its node")
    parser.add_argument("--memory-bytes", type=int, default=0, help="private memory that it may have; 0: no limit")
    args = parser.parse_args(words)
    log_plainly("%(asctime)s %(levelname)s %(name)s: %(message)s")
    if os.environ.get("EVERSTEP_RUN_DIR"):  # started by an agent, not by hand
        die_with_parent()
    allow_many_descriptors()
    if args.threads:
        os.sched_setaffinity(0, processors_of(args.slot, args.threads, os.sched_getaffinity(0)))
    if args.memory_bytes:
        bound_memory(args.memory_bytes)
    sys.setswitchinterval(0.0005)  # who waits for a mirror's answer must not wait 5 ms more for its turn
    threading.stack_size(STACK_BYTES)
    end_threads_for_memory()
    early: list[int] = []  # SIGTERM while the ps is being made; it may be known to others before it is whole here
    signal.signal(signal.SIGTERM, lambda signo, _: early.append(signo))
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the agent, which ends us in order
    try:
        faultpoints.begin("ps", args.slot, args.incarnation)
        ps = PsProcess(args.run_dir, Slot(args.slot), Incarnation(args.incarnation), NodeId(args.node), args.host)
        signal.signal(signal.SIGTERM, lambda *_: ps.leave())
        if early:
            ps.leave()
        ps.run()
    except EverstepError as error:
        with contextlib.suppress(OSError):  # the log may lie on the very disk that is full
            print(f"everstep: {error}", file=sys.stderr, flush=True)
        return error.exit_code
    except MemoryError:
        return MEMORY_STATUS
    except RuntimeError as error:
        if NO_THREAD not in str(error):
            raise
        return MEMORY_STATUS
    return 0


if __name__ == "__main__":
    code = main()
    with contextlib.suppress(OSError):
        sys.stderr.flush()
    # Freeing gigabytes of rows one by one, and waiting for client threads, serves nobody.
    os._exit(code)
