"""Is everstep: training that never loses a step. The public names, loaded lazily, and nothing else."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

_HOMES = {
    "join": "everstep.api.job",
    "Job": "everstep.api.job",
    "nn": "everstep.api.nn",
    "testing": "everstep.testing",
    "SGD": "everstep.api.optim",
    "Adagrad": "everstep.api.optim",
    "RowWiseAdagrad": "everstep.api.optim",
    "Adam": "everstep.api.optim",
    "AdamW": "everstep.api.optim",
    "FTRL": "everstep.api.optim",
    "Uniform": "everstep.api.optim",
    "Normal": "everstep.api.optim",
    "Constant": "everstep.api.optim",
    "run_on": "everstep.cli.cluster_platform",
}

_MODULES = ("nn", "testing")

__all__ = ["__version__", *_HOMES]

if TYPE_CHECKING:
    from everstep import testing as testing
    from everstep.api import nn as nn
    from everstep.api.job import Job as Job
    from everstep.api.job import join as join
    from everstep.api.optim import FTRL as FTRL
    from everstep.api.optim import SGD as SGD
    from everstep.api.optim import Adagrad as Adagrad
    from everstep.api.optim import Adam as Adam
    from everstep.api.optim import AdamW as AdamW
    from everstep.api.optim import Constant as Constant
    from everstep.api.optim import Normal as Normal
    from everstep.api.optim import RowWiseAdagrad as RowWiseAdagrad
    from everstep.api.optim import Uniform as Uniform
    from everstep.cli.cluster_platform import run_on as run_on


def __getattr__(name: str) -> Any:
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module 'everstep' has no attribute {name!r}")
    module = import_module(home)
    return module if name in _MODULES else getattr(module, name)


def __dir__() -> list[str]:
    return sorted({*__all__, *(name for name in globals() if name.startswith("__"))})
