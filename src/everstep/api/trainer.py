"""Has what differs between the modes of a job: how its models are trained. ``Job`` has one of these and knows no
mode."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import TYPE_CHECKING, Any, Final, Protocol

import torch
from torch import nn

from everstep.api.listeners import Listener, WorkerRuntime
from everstep.api.tables import TableSet
from everstep.data.loader import Loader
from everstep.errors import EverstepError, ScriptError
from everstep.model.graph_readings import GraphReading
from everstep.monitor.stepclock import StepClock

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

TRAINERS: Final[Mapping[str, str]] = {
    "ps": "everstep.api.ps_trainer:PsTrainer",
    "allreduce": "everstep.api.group_trainer:GroupTrainer",
    "pipeline": "everstep.api.pipeline_trainer:PipelineTrainer",
}
"""By mode: module and class. A module is imported when a job of its mode begins."""


OTHER_MODE: Final = (
    "job.pipeline in a job of mode {}: everstep run --mode pipeline --stages P, or es.join(mode='pipeline')"
)


class TrainingLoop(Listener, Protocol):
    """Runs the loop, and is told what the master orders."""

    graph: Callable[[], GraphReading | None]
    """Gives the readings of the model that a beat shall have; None: nothing new."""

    @property
    def values(self) -> dict[str, float]:
        """Return what ``job.report`` was given, by name."""
        ...

    @property
    def failure(self) -> EverstepError | None: ...

    @property
    def samples(self) -> int:
        """Return the samples applied by this process."""
        ...

    @property
    def batches(self) -> int:
        """Return the batches given to the script."""
        ...

    @property
    def registered(self) -> int:
        """Return how many loops the script has begun."""
        ...

    @property
    def in_hand(self) -> int:
        """Return the samples of the batch that the script is at, or raised in."""
        ...

    @property
    def loader_batch(self) -> int:
        """Return the samples of a batch as the loader makes them."""
        ...

    @property
    def step_number(self) -> int: ...


class Trainer(Protocol):
    """Trains the models of a script in one mode."""

    engine: TrainingLoop
    tables: TableSet
    models: list[nn.Module]
    """In the order in which the script gave them to the job."""

    @property
    def device(self) -> torch.device:
        """Return where the models shall be."""
        ...

    @property
    def chief(self) -> bool:
        """Return whether this process evaluates and saves."""
        ...

    @property
    def speaks(self) -> bool:
        """Whether this process prints what the script logs: one process of each worker does."""
        ...

    @property
    def processes(self) -> int:
        """Return how many processes this worker has."""
        ...

    @property
    def process_index(self) -> int:
        """Return which of them this one is, from 0."""
        ...

    def mesh(self) -> DeviceMesh:
        """Return the processes of this worker."""
        ...

    def digest(self) -> int:
        """Return a number of 64 bits, of everything that is trained. Raises ScriptError where no process has it."""
        ...

    def check_sparse(self) -> None:
        """Raises ScriptError where embeddings cannot go to the ps (now)."""
        ...

    def check_model(self, model: nn.Module) -> None:
        """Raises ScriptError where the model cannot be trained in this mode."""
        ...

    def pipeline(
        self, model: Any, *, schedule: Any, microbatches: int, loss_fn: Any, split: Sequence[int] | None
    ) -> nn.Module:
        """Return the model in stages. Raises ScriptError: it cannot be cut so, or the job is of another mode."""
        ...

    def clip_grad_norm(self, max_norm: float, norm_type: float) -> torch.Tensor:
        """Clip the gradients of all models to a norm together. Returns the norm before."""
        ...

    def optimizer(self, optimizer: torch.optim.Optimizer) -> Any:
        """Return the optimizer that the script is to use. Raises ScriptError."""
        ...

    def track(self, objects: Mapping[str, Any]) -> None: ...

    def no_sync(self) -> AbstractContextManager[None]: ...

    def reduce_gradients(self) -> None: ...

    def steps(self, loader: Loader) -> Iterator[Any]:
        """Yield the batches that this process is to work on."""
        ...

    def evaluating(self, models: Sequence[nn.Module]) -> AbstractContextManager[None]:
        """Around an evaluation of ``models``: they show the newest values, and nothing is trained."""
        ...

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Put back the rest of what ``state_dict`` gave: ``Job`` has put back the models. Raises ScriptError."""
        ...

    def check_load(self, state: dict[str, Any]) -> None:
        """Raises ScriptError where it is too late to load a state."""
        ...

    def leave(self, error: str) -> None:
        """Give back what is unfinished. ``error``: what ended the script, or ""."""
        ...


def trainer_for(runtime: WorkerRuntime) -> Trainer:
    """Return the trainer of the job's mode."""
    module, _, name = TRAINERS[runtime.spec.mode].partition(":")
    make: Callable[[WorkerRuntime], Trainer] = getattr(importlib.import_module(module), name)
    return make(runtime)


@contextmanager
def without_training(models: Sequence[nn.Module], clock: StepClock) -> Iterator[None]:
    """Put modules into eval mode without gradients; each module goes back to the mode that it was in."""
    training = [m.training for m in models]
    for m in models:
        m.eval()
    clock.touch()
    clock.aside += 1
    try:
        with torch.no_grad():
            yield
    finally:
        clock.aside -= 1
        clock.touch()
        for m, was in zip(models, training, strict=True):
            m.train(was)


@contextmanager
def rows_only_read(tables: TableSet) -> Iterator[None]:
    """Show the newest dense values, and rows of tables as they are now; a lookup makes none."""
    tables.refresh_dense()
    current, tables.current = tables.current, None
    tables.asides.forget()
    try:
        yield
    finally:
        tables.asides.forget()
        tables.current = current


def not_started(tables: TableSet) -> None:
    """Raises ScriptError where a batch has been trained with, or evaluated."""
    if tables.declarations.started:
        raise ScriptError("job.load_state_dict: only before the first batch of job.steps, and before job.eval")


def with_model(state: dict[str, Any]) -> dict[str, Any]:
    """Return ``state``, with the only one of its models by its own name."""
    models = state["models"]
    return {"model": models[0], **state} if len(models) == 1 else state


def parameter_names(models: Sequence[nn.Module]) -> dict[int, str]:
    """Return the names of parameters by ``id()``; with several models, each name begins with the model's number."""
    several = len(models) > 1
    return {
        id(p): f"{i}.{name}" if several else name
        for i, model in enumerate(models)
        for name, p in model.named_parameters()
    }
