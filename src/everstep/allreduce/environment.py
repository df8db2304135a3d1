"""Has the variables of the environment of workers that may have GPUs. Without torch: the agent sets them."""

from __future__ import annotations

from typing import Final

NCCL_VARIABLE: Final = "EVERSTEP_NCCL"
"""Of the environment: "0" keeps a worker, and with it its group, from using NCCL."""

LOCAL_VARIABLE: Final = "EVERSTEP_LOCAL_RANK"
"""A worker's number on its node. Not torchrun's LOCAL_RANK: libraries that find that one expect all of torchrun's."""

NCCL_ENVIRONMENT: Final = {
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0",  # its watchdog is not to end the process: the group goes on without NCCL's
    "TORCH_NCCL_DESYNC_DEBUG": "0",  # (which would switch that on again)
    "TORCH_NCCL_DUMP_ON_TIMEOUT": "0",  # for which it would wait, and end the process
    "TORCH_NCCL_ENABLE_MONITORING": "0",  # nor is whoever watches the watchdog to end it
    "TORCH_NCCL_BLOCKING_WAIT": "0",
    "TORCH_NCCL_RANKS_PER_ROOT": "1000000",  # one unique id, however many members
}
"""There from a worker's begin: a variable set while other threads read theirs may end the process."""

FORKABLE: Final = {"PYTORCH_NVML_BASED_CUDA_CHECK": "1"}
"""A module that asks for GPUs while it is imported must not begin CUDA in the template: no fork could use it then."""


def torchrun_environment(slot: int, local: int, workers: int, places: int) -> dict[str, str | None]:
    """Return torchrun's variables for a worker, as of its start. None: the worker has no such variable.

    ``local``: its number on its node; ``workers``: of the job, as it began; ``places``: for workers on this node. A
    script cannot make a process group of them: no store listens for one, so there is no address."""
    return {
        "RANK": str(slot),
        "WORLD_SIZE": str(max(workers, slot + 1)),
        "LOCAL_RANK": str(local),
        "LOCAL_WORLD_SIZE": str(max(places, local + 1)),
        "MASTER_ADDR": None,
        "MASTER_PORT": None,
    }
