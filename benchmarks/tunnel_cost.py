"""What it costs that gradients between nodes travel in tunnels: sums of a group in the clear and through TLS.

Two processes over loopback (``tls: all`` between two nodes: bytes go through TLS).
Sizes of 16 KB, 1 MB and 26 MB, and a vote. ``SIZE.time``: seconds of one sum through tunnels / in the clear, median of
the pairs; ``SIZE.cpu``: the same of the CPU time of a member; ``.aa``: in the clear / in the clear.
"""

from __future__ import annotations

import multiprocessing
import tempfile
import time
from collections.abc import Callable
from multiprocessing.managers import BaseManager
from pathlib import Path
from threading import Condition, Thread
from typing import Any

import torch

from benchmarks._measure import Result, each_round, median, say, spread

SIZES = {"16kb": 16 * 1024, "1mb": 1 << 20, "26mb": 26 << 20, "vote": 0}
SIDES = ("clear", "tunnel", "clear again")
LIMIT_S = 60.0

Took = tuple[float, float]
"""Seconds of one sum, and CPU seconds of this process for it."""


class Values:
    """Keys and values of groups that connect, for processes that are here."""

    def __init__(self) -> None:
        self._values: dict[tuple[int, str], dict[str, bytes]] = {}
        self._changed = Condition()

    def put(self, at: tuple[int, str], values: dict[str, bytes]) -> None:
        with self._changed:
            self._values.setdefault(at, {}).update(values)
            self._changed.notify_all()

    def get(self, at: tuple[int, str], keys: tuple[str, ...], wait_s: float) -> dict[str, bytes]:
        def there() -> dict[str, bytes]:
            known = self._values.get(at, {})
            return {key: known[key] for key in keys if key in known}

        with self._changed:
            self._changed.wait_for(lambda: len(there()) == len(keys), wait_s)
            return there()


class Manager(BaseManager):
    """Serves ``Values``."""


Manager.register("Values", Values)


class Hub:
    """What a member of a group asks instead of a master."""

    def __init__(self, values: Any) -> None:
        self._values = values

    def ask(self, request: Any, then: Callable[[Any], None]) -> None:
        from everstep.brain.events import Ok
        from everstep.net.messages import StoreGet, StoreSet, StoreValues

        at = (request.generation, request.attempt)
        if isinstance(request, StoreSet):
            self._values.put(at, dict(request.values))
            then(Ok())
        elif isinstance(request, StoreGet):

            def wait() -> None:
                then(StoreValues(self._values.get(at, tuple(request.keys), request.wait_s)))

            Thread(target=wait, daemon=True).start()
        else:
            then(Ok())


def member(rank: int, values: Any, secret_path: Path, rounds: int, results: Any) -> None:
    """One of two processes; rank 0 tells what each sum took."""
    from everstep.allreduce.collective import GlooCollective
    from everstep.allreduce.group_store import GroupStore
    from everstep.allreduce.tunnel import INSIDE, Tunnels
    from everstep.net.auth import load_secret

    torch.set_num_threads(1)
    secret = load_secret(secret_path)
    groups = {}
    for number, side in enumerate(("clear", "tunnel")):
        group = groups[side] = GlooCollective(rank, 2, INSIDE if side == "tunnel" else "127.0.0.1", f"{number + 1}.0")
        if side == "tunnel":
            group.tunnels = Tunnels(rank, secret, f"node{rank}", "127.0.0.1")
        group.connect(GroupStore(Hub(values), number + 1, 0, group.host, 2, LIMIT_S), LIMIT_S)
    groups["clear again"] = groups["clear"]
    found: dict[str, dict[str, list[Took]]] = {size: {side: [] for side in SIDES} for size in SIZES}
    for size, n_bytes in SIZES.items():
        tensor = torch.ones(max(1, n_bytes // 4))
        times = 20 if n_bytes < 1 << 20 else 3
        for turn in range(rounds + 1):
            for side in SIDES:
                group = groups[side]
                group.vote([0])  # both begin together
                begin, cpu = time.perf_counter(), time.process_time()
                for _ in range(times):
                    if n_bytes:
                        group.allreduce(tensor).wait(LIMIT_S)
                    else:
                        group.vote([rank])
                if turn:  # (the first one warms up)
                    took = (time.perf_counter() - begin) / times, (time.process_time() - cpu) / times
                    found[size][side].append(took)
            tensor.fill_(1.0)
    groups["clear"].vote([0])
    if rank == 0:
        results.put(found)
    for group in (groups["clear"], groups["tunnel"]):
        group.close()


def run(quick: bool) -> Result:
    from everstep.net.auth import create_secret

    result: Result = {"figures": {}, "aims": {}, "holds": {}, "spread": {}}
    context = multiprocessing.get_context("spawn")
    rounds = 5 if quick else 15
    for _ in each_round(1):
        with tempfile.TemporaryDirectory(prefix="everstep-tunnel-") as folder, Manager(ctx=context) as manager:
            path = Path(folder) / "secret"
            create_secret(path)
            values, results = manager.Values(), context.Queue()  # type: ignore[attr-defined]
            members = [
                context.Process(target=member, args=(rank, values, path, rounds, results), daemon=True)
                for rank in (0, 1)
            ]
            for process in members:
                process.start()
            found = results.get(timeout=10 * LIMIT_S)
            for process in members:
                process.join(LIMIT_S)
    for size, sides in found.items():
        for which, kind in enumerate(("time", "cpu")):
            for side, suffix in (("tunnel", ""), ("clear again", ".aa")):
                pairs = zip(sides[side], sides["clear"], strict=True)
                ratios = [mine[which] / max(clear[which], 1e-9) for mine, clear in pairs]
                name = f"{size}.{kind}{suffix}"
                result["figures"][name], result["spread"][name] = median(ratios), spread(ratios)
        clear_ms = 1e3 * median([took[0] for took in sides["clear"]])
        result["figures"][f"{size}.clear_ms"] = clear_ms
        say(f"{size}: {result['figures'][f'{size}.time']:.2f} times as long as {clear_ms:.3g} ms in the clear")
    return result
