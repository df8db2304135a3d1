"""Has ``memory``: ps are added, partitions move, or ps get more memory, before a ps reaches its limit of memory.

At each look the bytes of all tables are one reading of a curve over samples (``sizing.heaps``). Its upper prediction
says how many bytes of rows each ps will have when another one could have taken over a part, with what a doubling of its
indexes takes beside. If that is more than the share ``fill`` of what its limit leaves for rows, the policy asks for as
many ps as hold the tables for three times as long, or moves partitions to ps that have room. Where there can be no
more ps, and the limit is one of the process, each ps gets more memory, within the bounds of the job and its nodes.
"""

from __future__ import annotations

import math
from typing import Final, NamedTuple

import msgspec

from everstep.config.memory_settings import LEAST_BYTES
from everstep.ids import PartitionId, Slot
from everstep.model.decision import Decision
from everstep.model.member import Role
from everstep.model.memory_limit import MemoryLimit
from everstep.model.observation import Observations, ServerSeen
from everstep.model.plan import MovePartitions, Plan, Resize, Scale
from everstep.policies.process_sizes import RAISED, WORTH
from everstep.policies.scaling import MAX_PS
from everstep.sizing.heaps import GrowthCurve, Reading
from everstep.units import human_bytes

KEPT: Final = 64
"""Readings of the curve; when there are more, every second one of the older half goes."""

DOUBLING: Final = 23
"""Bytes that a row's entries of an index take in addition when the index is doubled (16 bytes at 70 % load)."""

MARGIN: Final = 0.03
"""Share of a limit that is kept free where others than rows use it, too."""

MOVING: Final = 40_000_000
"""Bytes of address space that a ps takes for a moment while partitions move; little of them is ever resident. The
system's limit of a process counts them, other limits do not."""

PEER: Final = 3_000_000
"""Bytes that each ps more takes at each of the others, for stacks and buffers. (Of a process' limit, as above.)"""

MOST: Final = 4
"""Times as many ps as at first: without ``max_ps`` a policy may go so far alone."""

_MOVES: Final = 8  # partitions at once


class GrowthSettings(msgspec.Struct, frozen=True):
    """Says when ``memory`` acts. Seconds; shares of a limit."""

    lead_s: float = 10.0  # that a new ps takes to start, and partitions to begin to move
    windows: float = 3.0  # ... and not less than so many windows: the next look, and one more, and the move
    bytes_per_s: float = 100e6  # at which partitions move
    fill: float = 0.85  # of what a limit leaves for rows, beyond which a ps counts as full
    after: float = 0.7  # that rows shall take at most, ``ahead`` times as long from now
    ahead: float = 3.0
    step: float = 1.25  # times as much memory, at least, that a ps gets where there are no more ps
    reported_s: float = 5.0  # until the readings of a ps have a limit that was raised


class GrowthState(msgspec.Struct):
    """Holds the curve and what was asked for. ``least_ps``: fewer would not hold the tables; 0: unknown.
    ``first_bytes``: the limit of a ps when it was first raised; ``asked_bytes``, ``asked_at``: the last limit that was
    asked for; 0: none was."""

    readings: list[Reading] = []
    at: float = 0.0
    first_ps: int = 0
    least_ps: int = 0
    last_words: str = ""
    rate: float = 0.0  # the last samples/s above 0: pushes wait while a ps has no room
    partitions: tuple[int, ...] = ()  # of each ps, at the last look
    first_bytes: int = 0
    asked_bytes: int = 0
    asked_at: float = 0.0


class Forecast(NamedTuple):
    """Says how many bytes the rows of a ps will take soon, and how many its limit leaves for rows."""

    server: ServerSeen
    used: float
    room: float

    @property
    def share(self) -> float:
        if self.used <= 0:
            return 0.0  # whatever fills it, other ps cannot take it over
        return self.used / self.room if self.room > 0 else math.inf


class NoMorePs(NamedTuple):
    """Says why no ps can be added, and what helps."""

    why: str
    remedy: str

    def __str__(self) -> str:
        return f"{self.why}: {self.remedy}"


def memory_growth(
    seen: Observations, state: GrowthState | None, settings: GrowthSettings = GrowthSettings()
) -> tuple[Plan | None, GrowthState]:
    """Ask for more ps, or move partitions, if a ps will be full before the next looks could help it."""
    state = (
        msgspec.structs.replace(state, readings=list(state.readings))
        if state is not None
        else GrowthState(first_ps=seen.wanted_ps)
    )
    rate = _take(seen, state)
    before, state.partitions = state.partitions, tuple(s.partitions for s in seen.servers)
    if not state.readings or not any(s.limit_bytes > 0 for s in seen.servers):
        return None, state
    curve = GrowthCurve(state.readings) if len(state.readings) > 1 and rate > 0 else None
    lead_s = max(settings.lead_s, settings.windows * seen.window_s)
    lead_s += max(s.row_bytes for s in seen.servers) / settings.bytes_per_s
    if curve is not None:
        growth = curve.after(_samples(seen, rate * lead_s)).high
        ahead = curve.after(_samples(seen, settings.ahead * rate * lead_s)).high
    else:  # too early to tell: a ps that is full now gets help all the same
        growth, ahead = 0.0, float(sum(s.row_bytes for s in seen.servers))
    soon = forecasts(seen, growth)
    wanted = ps_needed(seen, ahead, settings.after)
    most = _most(seen, state.first_ps)
    state.least_ps = min(max(wanted, 1), seen.wanted_ps)
    full = max(soon, key=lambda f: f.share)
    if full.share <= settings.fill or seen.pending or len(seen.servers) != seen.wanted_ps:
        return None, state
    moves = _moves(soon, settings)
    count = min(max(wanted, seen.wanted_ps + 1), most)
    no_more_ps = _no_more_ps(seen, full.server, count)
    if moves and (wanted <= seen.wanted_ps or no_more_ps is not None):
        return _move(full, moves, lead_s), state
    if wanted <= seen.wanted_ps and state.partitions != before and not _even(seen):
        return None, state  # (partitions are on their way)
    words = f"{_full_words(full)} in {lead_s:.0f} s"
    if curve is not None:
        words += f", if the tables grow by {human_bytes(curve.slope * rate)} a second as they do now"
    inputs: dict[str, str | int | float | bool] = {
        "limit": full.server.limit_kind.value,
        "limit_bytes": full.server.limit_bytes,
        "used_bytes": full.server.limit_used_bytes,
        "expected_bytes": round(full.used),
        "lead_s": round(lead_s, 1),
    }
    if curve is not None:
        inputs |= {"bytes_per_sample": round(curve.slope, 3), "exponent": round(curve.exponent, 3)}
    if no_more_ps is None:
        reason = f"{words}: {count} ps instead of {seen.wanted_ps}, before it is full"
        scale = Scale(workers=seen.wanted_workers, ps=count)
        return Plan(actions=(scale,), decision=Decision("scale", reason, inputs)), state
    if full.server.limit_kind is not MemoryLimit.PROCESS:
        return _say(state, f"{words}; {no_more_ps}")
    return _more_memory(seen, state, settings, full, ahead, Decision("resize", words, inputs), no_more_ps)


def _more_memory(
    seen: Observations,
    state: GrowthState,
    settings: GrowthSettings,
    full: Forecast,
    growth: float,
    why: Decision,
    no_more_ps: NoMorePs,
) -> tuple[Plan | None, GrowthState]:
    """Give each ps as much memory as its rows need for a while, where there can be no more ps; or say why not."""
    now_bytes = full.server.limit_bytes
    if now_bytes < state.asked_bytes <= seen.ps_size.memory_bytes:
        if seen.at - state.asked_at <= settings.reported_s:
            return None, state
        kept = f"{full.server} still has {human_bytes(now_bytes)} although each ps was to get "
        return _say(state, f"{why.reason}; {no_more_ps}; {kept}{human_bytes(state.asked_bytes)}: see ulimit -Hd")
    first = state.first_bytes or now_bytes
    most, bound = _most_memory(seen, first)
    to = max(LEAST_BYTES[Role.PS], round(settings.step * now_bytes), *_memory_needed(seen, growth, settings.after))
    to = min(to, most)
    if to < WORTH * now_bytes:
        return _say(state, f"{why.reason}; {no_more_ps}; {bound}")
    state.first_bytes, state.asked_bytes, state.asked_at = first, to, seen.at
    instead = f"each ps gets {human_bytes(to)} instead of {human_bytes(now_bytes)}, those that run at once"
    rejected = (str(no_more_ps), "to wait: it would die, and others that are as full with it")
    decision = Decision(
        "resize", f"{why.reason}: {no_more_ps.why}, so {instead}", why.inputs | {"memory_bytes": to}, rejected
    )
    return Plan(actions=(Resize(role=Role.PS, memory_bytes=to, running=True),), decision=decision), state


def _memory_needed(seen: Observations, growth: float, share: float) -> list[int]:
    """Return the limit of its process that each ps needs, if its rows with its part of ``growth`` more bytes take at
    most ``share`` of what that leaves for rows."""
    needed = []
    for found in forecasts(seen, growth):
        server = found.server
        if server.limit_kind is MemoryLimit.PROCESS:
            own = max(0, server.limit_used_bytes - server.row_bytes)
            needed.append(math.ceil((found.used / share + own + MOVING) / (1 - MARGIN)))
    return needed


def _most_memory(seen: Observations, first_bytes: int) -> tuple[int, str]:
    """Return the bytes that each ps may have at most, and in words what bounds them. Without ``max_memory`` a policy
    goes as far alone as a death would, from ``first_bytes``."""
    bounds = []
    if seen.max_memory_bytes:
        each = max(seen.worker_size.memory_bytes, max((w.rss_bytes for w in seen.workers), default=0))
        left = max(0, seen.max_memory_bytes - seen.wanted_workers * each) // max(1, seen.wanted_ps)
        bounds.append((left, f"--max-memory leaves each ps {human_bytes(left)}: raise it"))
    else:
        most = round(RAISED * first_bytes)
        bounds.append((most, f"each ps has got {RAISED:g} times what it had: give --max-memory, or everstep resize"))
    if seen.ps_memory_most:
        has = human_bytes(seen.ps_memory_most)
        bounds.append((seen.ps_memory_most, f"no more than {has} may be had by one ps where they are: ulimit -Hd"))
    return min(bounds, key=lambda bound: bound[0])


def room_of(server: ServerSeen) -> float:
    """Return the bytes that the limit of a ps leaves for rows, beside all else that counts against it; 0: none."""
    if server.limit_kind is MemoryLimit.STORE:
        return float(server.limit_bytes)
    own = max(0, server.limit_used_bytes - server.row_bytes)
    moving = MOVING if server.limit_kind is MemoryLimit.PROCESS else 0
    return max(0.0, (1 - MARGIN) * server.limit_bytes - own - moving)


def forecasts(seen: Observations, growth: float) -> list[Forecast]:
    """Return what the rows of each ps with a limit will take, if all tables together grow by ``growth`` bytes: its
    share of them, and its indexes doubled."""
    total = sum(s.row_bytes for s in seen.servers)
    return [
        Forecast(s, s.row_bytes + growth * (s.row_bytes / total if total else 1.0) + DOUBLING * s.rows, room_of(s))
        for s in seen.servers
        if s.limit_bytes > 0
    ]


def ps_needed(seen: Observations, growth: float, share: float) -> int:
    """Return how many ps, as tight as the tightest one, hold the tables with ``growth`` more bytes, if rows take at
    most ``share`` of what a limit leaves for them. Where no number holds them: the one that holds most. 0: it leaves
    nothing."""
    total = sum(s.row_bytes for s in seen.servers) + growth
    doubling = DOUBLING * sum(s.rows for s in seen.servers)
    limited = [s for s in seen.servers if s.limit_bytes > 0]
    room = min(room_of(s) for s in limited)
    if room <= 0:
        return 0
    if not any(s.limit_kind is MemoryLimit.PROCESS for s in limited):
        return math.ceil((total + doubling) / (share * room))
    now, best = len(seen.servers), 1
    for count in range(1, MAX_PS + 1):  # each one more leaves all others less
        left = _together(room, now, count)
        if share * left >= total + doubling:
            return count
        if left > _together(room, now, best):
            best = count
    return best


def _together(room: float, now: int, count: int) -> float:
    """Return the bytes of rows that ``count`` ps have room for, if one of ``now`` has ``room``."""
    return count * max(0.0, room - PEER * max(0, count - now))


def _take(seen: Observations, state: GrowthState) -> float:
    """Add a reading; return the samples/s since the last look, 0.0: unknown. If samples or tables have gone back (a ps
    was lost, tables were freed), the curve begins anew."""
    now = Reading(seen.samples_done, float(sum(s.row_bytes for s in seen.servers)))
    last = state.readings[-1] if state.readings else None
    since_s, state.at = seen.at - state.at, seen.at
    if len(seen.servers) != seen.wanted_ps or now.bytes <= 0:
        return 0.0
    if last is not None and (now.samples < last.samples or now.bytes < 0.9 * last.bytes):
        state.readings = [now]
        return 0.0
    if last is not None and now.samples == last.samples:
        return state.rate  # (pushes may wait for room: what comes is what came before)
    state.readings.append(now)
    if len(state.readings) > KEPT:
        half = len(state.readings) // 2
        state.readings = [*state.readings[:half:2], *state.readings[half:]]
    if last is not None and since_s > 0:
        state.rate = (now.samples - last.samples) / since_s
    return state.rate


def _samples(seen: Observations, samples: float) -> int:
    """Return so many samples, or what is left of the job."""
    return math.ceil(min(samples, seen.remaining_samples) if seen.remaining_samples else samples)


def _most(seen: Observations, first: int) -> int:
    return max(seen.wanted_ps, seen.max_ps or MOST * max(1, first))


def _even(seen: Observations) -> bool:
    counts = [s.partitions for s in seen.servers]
    return max(counts) - min(counts) <= 1


def _moves(soon: list[Forecast], settings: GrowthSettings) -> dict[PartitionId, Slot]:
    """Return partitions of ps that will be full, with ps that have room for them and will not be full either."""
    used = {f.server.slot: f.used for f in soon}
    found: dict[PartitionId, Slot] = {}
    for full in sorted(soon, key=lambda f: -f.share):
        server = full.server
        if full.share <= settings.fill or server.partitions < 2 or not server.owned:
            continue
        each = server.row_bytes / server.partitions
        for partition in server.owned:
            if used[server.slot] <= settings.after * full.room or len(found) == _MOVES:
                break
            takers = [
                f
                for f in soon
                if f.server.slot != server.slot
                and partition not in f.server.closed
                and used[f.server.slot] + each <= settings.after * f.room
            ]
            if not takers:
                break
            taker = min(takers, key=lambda f: (used[f.server.slot] / f.room, f.server.slot)).server
            found[partition] = taker.slot
            used[server.slot] -= each
            used[taker.slot] += each
    return found


def _move(full: Forecast, moves: dict[PartitionId, Slot], lead_s: float) -> Plan:
    to = ", ".join(f"ps:{slot}" for slot in sorted(set(moves.values())))
    words = f"{_full_words(full)} in {lead_s:.0f} s: {len(moves)} partitions move to {to}, which has room"
    inputs: dict[str, str | int | float | bool] = {
        "limit": full.server.limit_kind.value,
        "limit_bytes": full.server.limit_bytes,
        "used_bytes": full.server.limit_used_bytes,
        "expected_bytes": round(full.used),
    }
    return Plan(actions=(MovePartitions(owners=moves),), decision=Decision("move", words, inputs))


_LIMIT_WORDS: Final = {
    MemoryLimit.NONE: "its limit",
    MemoryLimit.STORE: "ps_limit_bytes",
    MemoryLimit.PROCESS: "the limit of its process",
    MemoryLimit.CONTAINER: "the limit of its container",
    MemoryLimit.MACHINE: "the memory of its machine",
}


def _full_words(full: Forecast) -> str:
    limit = f"{_LIMIT_WORDS[full.server.limit_kind]} ({human_bytes(full.server.limit_bytes)})"
    return f"{full.server} would have {human_bytes(full.used)} of rows, and {limit} leaves {human_bytes(full.room)},"


def _no_more_ps(seen: Observations, server: ServerSeen, count: int) -> NoMorePs | None:
    """Return why no ps can be added, and what helps; None: one can."""
    if count <= seen.wanted_ps:
        return NoMorePs(f"there may be no more than {seen.wanted_ps} ps", "raise --max-ps")
    if not seen.ps_places:
        return NoMorePs("no node would take another ps", "add a node, or raise the limit")
    if server.limit_kind is MemoryLimit.CONTAINER and all(node == server.node for node in seen.ps_places):
        return NoMorePs(f"another ps on {server.node} would share that limit", "raise it, or add a node")
    if seen.max_memory_bytes and _resident(seen, count) > seen.max_memory_bytes:
        return NoMorePs(f"{count} ps would bring the job above --max-memory", "raise it")
    return None


def _resident(seen: Observations, ps: int) -> float:
    own = max((s.rss_bytes - s.row_bytes for s in seen.servers), default=0)
    rows = sum(s.row_bytes for s in seen.servers)
    return sum(w.rss_bytes for w in seen.workers) + rows + ps * max(0, own)


def _say(state: GrowthState, words: str) -> tuple[Plan | None, GrowthState]:
    """Return a plan without actions, which is only said, unless there was nothing else to say last."""
    what = words.partition(";")[2]
    if state.last_words == what:
        return None, state
    state.last_words = what
    return Plan(actions=(), decision=Decision("keep the size", words, {})), state
