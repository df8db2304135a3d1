"""Plants bugs of ps on several machines, to see that the simulator finds them where machines are lost."""

from __future__ import annotations

from collections.abc import Sequence

from everstep.brain.concerns import partition_reader
from everstep.brain.members import Members
from everstep.config.parity import ParityCode
from everstep.ids import NodeId
from everstep.policies.domains import Limit, PsSite
from everstep.sim.mutations import Mutation
from everstep.sim.scenario import machines_scenario
from everstep.sim.simulation import Parts, SimOutcome, simulate


def lost_machines(seed: int, parts: Parts = Parts()) -> SimOutcome:
    """Return the run of ``seed`` in the mix with machines that are lost."""
    return simulate(seed, machines_scenario(seed), parts)


def _no_limits(code: ParityCode, sites: Sequence[PsSite]) -> tuple[Limit, ...]:
    return ()


def _each_node_a_machine(self: Members, node: NodeId) -> str:
    return node


MACHINE_MUTATIONS: tuple[Mutation, ...] = (
    Mutation(
        "two-units-on-a-machine",
        "a layout looks at ps only, not at the machines that they stand on",
        Parts(),
        ((partition_reader, "limits_of", _no_limits),),
    ),
    Mutation(
        "each-node-a-machine",
        "two nodes of one machine count as two machines",
        Parts(),
        ((Members, "machine_of", _each_node_a_machine),),
    ),
)
