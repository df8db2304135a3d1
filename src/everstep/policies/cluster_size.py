"""Says how many nodes of a cluster a job needs, and which of them it gives back. Pure.

In a cluster (``--on ray``, ``--on slurm``) each node has the same number of places for workers and ps.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Final, NamedTuple

from everstep.config.spec import JobSpec
from everstep.ids import NodeId
from everstep.model.job_view import JobView, NodeView, ShownState
from everstep.policies.node_selection import HOME_NODE

EMPTY_S: Final = 300.0
"""So long a node that the job does not need any more may take to be emptied."""
SOON_S: Final = 15.0
"""So long a node that goes may take where nobody says when it goes."""
NONE_GOES: Final[Mapping[NodeId, float | None]] = {}


class NodesWanted(NamedTuple):
    """Says how many ``machines`` are wanted, which nodes are to be emptied, each within so many seconds, and which are
    ``emptied`` and go back."""

    machines: int
    empty: tuple[tuple[NodeId, float], ...]
    emptied: tuple[NodeId, ...]


def places(count: int, nodes: int) -> int:
    """Return how many places each of ``nodes`` nodes needs for ``count`` processes."""
    return math.ceil(count / max(1, nodes))


def nodes_for(spec: JobSpec, workers: int, ps: int) -> int:
    """Return how many nodes have places for so many workers and ps; one at least."""
    needed = [math.ceil(n / each) for n, each in ((workers, spec.capacity_workers), (ps, spec.capacity_ps)) if each]
    return max(1, *needed) if needed else 1


def nodes_wanted(spec: JobSpec, view: JobView, going: Mapping[NodeId, float | None] = NONE_GOES) -> NodesWanted:
    """Return what a job wants by its view. ``going``: nodes that the cluster takes back, with the seconds that each has
    left. These are emptied; the master may have refused it before there was another ps.

    A node too many is emptied before it is given back, one at a time, and only while all members that the job wants are
    there. One that is empty goes back also if its agent has left already: it would wait, and count as a node, until its
    machine has stayed for so long that it joins again."""
    wanted = view.members_wanted
    needed = nodes_for(spec, wanted.get("worker", spec.workers), wanted.get("ps", spec.ps))
    held = [n for n in view.nodes if n.node != HOME_NODE and n.alive]
    emptied = tuple(n.node for n in view.nodes if n.node != HOME_NODE and n.draining and not _members(n))
    leaving = [n for n in held if n.draining and _members(n)]
    staying = [n for n in held if not n.draining and n.node not in going]
    urged = [(n.node, _left_s(going[n.node])) for n in held if n.node in going and not n.draining]
    excess = len(staying) - needed
    members = [m for m in view.members if m.role.value in wanted]
    complete = all(m.up and m.state is not ShownState.LEAVING for m in members if m.running)
    here = sum(m.running for m in members)  # (one that still leaves has a place that another will need)
    if excess <= 0 or leaving or not complete or here != sum(wanted.values()):
        return NodesWanted(needed, tuple(urged), emptied)
    newest_first = staying[::-1]
    first, *rest = sorted(newest_first, key=_members)[:excess]
    more = [n for n in rest if not _members(n)]
    return NodesWanted(needed, (*urged, *((n.node, EMPTY_S) for n in (first, *more))), emptied)


def _left_s(left_s: float | None) -> float:
    return SOON_S if left_s is None else max(1.0, left_s)


def _members(node: NodeView) -> int:
    return node.workers + node.ps
