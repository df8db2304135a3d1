"""Many workers (1,000; --quick: 200) and one failure a minute, under virtual time: what a loss costs.

The same brain, watch and machine of a group as in production; collectives, processes and the network are models
(``everstep.sim.group``). A lost worker is replaced, copies the state and comes back meanwhile. Hold-up: from a loss to
the next committed step, at most. Goodput: committed steps by those of as much calm time. Steps redone: begun once more
by the group without the one that was lost. The CPU is the brain's and its journal's events, without sockets.
"""

from __future__ import annotations

from typing import Any

from everstep.sim.large import measure

STEP_S = 0.5  # that a step computes
EVERY_S = 60.0  # between two failures


def run(quick: bool) -> dict[str, Any]:
    """Figures, aims, whether they hold; one round: a seeded simulation has no spread, but for the CPU."""
    figures: dict[str, Any] = dict(measure(200 if quick else 1000, 120.0 if quick else 300.0, EVERY_S, STEP_S))
    figures["hold_up_steps"] = round(figures["hold_up_s"] * figures["steps_per_s"], 2)
    figures["generations_per_loss"] = round((figures.pop("generations") - 1) / max(1, figures["losses"]), 1)
    return {
        "figures": figures,
        "aims": {"void": "= 0", "steps_redone": "<= 1 a loss", "goodput": ">= 0.95", "hold_up_s": "<= 2"},
        "holds": {
            "void": figures["void"] == 0,
            "steps_redone": figures["steps_redone"] <= figures["losses"],
            "goodput": figures["goodput"] >= 0.95,
            "hold_up_s": figures["hold_up_s"] <= 2.0,
        },
        "spread": {},
    }


if __name__ == "__main__":
    import json
    import sys

    print(json.dumps(run("--quick" in sys.argv), indent=2))
