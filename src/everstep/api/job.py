"""Has ``join`` and ``Job``: the few lines that a training script has more than a script of plain PyTorch."""

from __future__ import annotations

import atexit
import ctypes
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any

import torch
from torch import nn

from everstep.api.graph_sampler import GraphSampler
from everstep.api.listeners import WorkerRuntime
from everstep.api.renamed_job_names import RenamedJobNames
from everstep.api.sparse import InitChoice, LifeCycle, Only, swap
from everstep.api.trainer import Trainer, trainer_for
from everstep.brain.events import Fenced, OnceAsked, Refused, Yes
from everstep.data.loader import Loader
from everstep.errors import DeadlineError, EverstepError, FencedError, ScriptError
from everstep.model.table import OptimizerSpec
from everstep.net import messages

_job: Job | None = None
_MASTER_S = 300.0  # a master may be away so long
_MEMORY_WORDS = ("can't allocate memory", "out of memory", "alloc_failed")  # of torch's allocators, of cublas
_M_TRIM_THRESHOLD, _M_TOP_PAD, _M_MMAP_MAX = -1, -2, -4  # of glibc's malloc.h


def join(
    *,
    name: str | None = None,
    seed: int | None = None,
    run_dir: str | None = None,
    nonfinite: str | None = None,
    prefetch: int | None = None,
    mode: str | None = None,
    logical_workers: int | None = None,
    ps: int | None = None,
) -> Job:
    """Return the job that this script belongs to; the same one when called again.

    Started by ``everstep run`` the arguments are ignored (the job's spec rules). Alone, everything runs in this
    process: ``seed``, ``name``, ``run_dir`` and ``nonfinite`` ("raise" or "skip") are those of ``JobSpec``, and
    ``prefetch=1`` pulls rows one batch ahead as workers of a job do (0 is exactly what plain PyTorch computes).
    ``mode="allreduce"``: the model is here, not on a ps; with ``logical_workers=V`` the bits are those of a job of V
    parts on any number of workers, and ``ps=1`` it has a ps in this process, for the tables of ``job.sparse``."""
    global _job
    if _job is not None and not _job.closed:
        return _job
    if "EVERSTEP_RUN_DIR" in os.environ and "EVERSTEP_SLOT" in os.environ:
        from everstep.api.local_follower import LocalFollower, is_follower
        from everstep.api.worker_runtime import ProcessRuntime

        runtime: WorkerRuntime = (LocalFollower if is_follower(os.environ) else ProcessRuntime).from_environment(
            os.environ
        )
        if mode is not None and mode != runtime.spec.mode:
            raise ScriptError(
                f"es.join(mode={mode!r}) in a job of mode {runtime.spec.mode}: everstep run --mode {mode} ..."
            )
    else:
        from everstep.api.embedded import EmbeddedRuntime

        given: dict[str, Any] = {
            "name": name,
            "seed": seed,
            "run_dir": run_dir,
            "nonfinite": nonfinite,
            "mode": mode,
            "logical_workers": logical_workers,
            "ps": ps,
        }
        runtime = EmbeddedRuntime.alone({k: v for k, v in given.items() if v is not None}, prefetch)
    _job = Job(runtime)
    return _job


class Job(RenamedJobNames):
    """Is what a script touches. Made by ``join``."""

    def __init__(self, runtime: WorkerRuntime, trainer: Callable[[WorkerRuntime], Trainer] = trainer_for) -> None:
        """``trainer``: makes what trains the models."""
        spec = runtime.spec
        _keep_memory()
        torch.manual_seed(spec.seed)  # before the model is built: every worker builds the same one
        if spec.threads_per_worker and runtime.embedded:  # (else its agent says how many, see everstep resize)
            torch.set_num_threads(spec.threads_per_worker)
        self.closed = False
        super().__init__(runtime, trainer(runtime))
        self._engine, self._tables, self._models = self._trainer.engine, self._trainer.tables, self._trainer.models
        unseen = "modules are not measured in mode pipeline: see everstep bubbles" if spec.mode == "pipeline" else ""
        self._graph = GraphSampler(self._trainer, spec.graph_every, unseen)
        self._engine.graph = self._graph.take
        runtime.start(self._engine)
        atexit.register(self._at_exit)

    def __repr__(self) -> str:
        how = "embedded" if self._runtime.embedded else f"worker:{self.slot} #{self._runtime.incarnation}"
        return f"<Job {self._runtime.spec.name!r} {how} {self._engine.samples} samples applied>"

    # ------------------------------------------------------------ facts

    @property
    def chief(self) -> bool:
        """Return whether this is the worker that evaluates and saves: one at a time, which has the final state behind
        the loop (another one where it is lost, late or sent away). The job is done when the script of the chief has
        ended well; if it is lost before, what stands behind the loop is run again (see ``once``). With
        ``--processes-per-worker`` it is true in all processes of that worker, so that they evaluate a sharded model
        together; for what only one of them shall do, see ``process_index``."""
        self._engine.clock.touch()
        return self._trainer.chief

    @contextmanager
    def once(self, key: str) -> Iterator[bool]:
        """Do once what the job does once, though its script may run again: ``with job.once("upload") as first: if
        first: ...``. ``first`` is false where it was done (the block was left without an exception), or another worker
        that lives is at it. The master remembers it before this returns; a worker that is lost inside of the block did
        not do it."""
        if not isinstance(key, str) or not key:
            raise ScriptError(f"job.once({key!r}): a key is a text, e.g. 'upload'")
        self._engine.clock.touch()
        first = _ask_once(self._runtime, key, done=False)
        yield first
        if first:
            self._engine.clock.touch()
            _ask_once(self._runtime, key, done=True)

    def digest(self) -> str:
        """Return a digest of everything that is trained (parameters, buffers, optimizers, tracked objects), exactly:
        the same on all workers after the same step. With ``--processes-per-worker`` all processes of a worker have to
        ask. Raises ScriptError in mode ps."""
        return f"{self._trainer.digest():016x}"

    @property
    def step(self) -> int:
        """Return, in mode allreduce, the number of the step in hand, the same on all workers; count with it, not with a
        counter of your own. Mode ps with consistency sync: of the iteration in hand, the same on all workers. Else of
        the batch in hand, from 0; behind the loop, how many this process has taken. A late worker sees no iteration of
        some numbers: ask ``job.step >= 6``, not ``== 6``. A resumed job of mode ps counts anew; schedulers go on."""
        return self._engine.step_number

    @property
    def readings(self) -> dict[str, float]:
        """Return this process's numbers: samples, batches, samples_per_s, wait_fraction, ..."""
        return self._engine.beat().readings

    # ------------------------------------------------------------ the model

    def sparse(
        self,
        model: nn.Module,
        *,
        optimizer: OptimizerSpec | None = None,
        init: InitChoice = "auto",
        min_rows: int = 0,
        only: Only = None,
        admit_after: int = 0,
        expire_batches: int = 0,
        expire_s: int = 0,
    ) -> Any:
        """Put the embeddings of ``model`` on the ps; returns the model, changed in place.

        Takes every nn.Embedding and nn.EmbeddingBag with at least ``min_rows`` rows, or those named
        in ``only`` (or for which ``only(name, module)`` is true), and all es.nn modules. ``init="auto"``: a real
        embedding's own values are uploaded; one on "meta" begins as torch's, normal with deviation 1; es.nn modules
        begin normal with deviation ``dim ** -0.5``. ``optimizer`` is es.SGD, Adagrad (default, lr=0.05), ...

        Keys that come and go: ``admit_after=n``: the first n batches with a key only count it (it looks as it would
        begin, and learns nothing), so that rare ones cost no row; ``expire_batches``, ``expire_s``: rows that no batch
        touched for so many batches, or seconds, are freed, and begin anew should their key come back. An es.nn module
        may say it for its own table. Rows of an uploaded embedding are there from the beginning.
        """
        self._trainer.check_sparse()
        life = LifeCycle(admit_after, expire_batches, expire_s)
        life.check("job.sparse")
        if optimizer is not None and not isinstance(optimizer, OptimizerSpec):
            raise ScriptError(
                f"job.sparse(optimizer={type(optimizer).__name__}): use es.SGD, es.Adagrad, es.RowWiseAdagrad, "
                "es.Adam, es.AdamW or es.FTRL (they run on the ps)"
            )
        model, infos, modules = swap(
            model,
            optimizer=optimizer,
            init=init,
            min_rows=min_rows,
            only=only,
            taken=self._tables.infos.keys(),
            life=life,
        )
        self._tables.add(infos)
        for module in modules:
            module.attach(self._tables)
        self._remember(model)
        return model

    def replicate(self, model: nn.Module) -> Any:
        """The dense part of ``model`` is trained together. Mode ps: it lives on the ps (``job.optimizer`` cuts it into
        rows), every worker has a copy that is renewed for each batch; so do buffers (batch norm), to which workers add
        what their batches change.
        Mode allreduce: every worker has it, gradients and buffers are reduced with every step."""
        if not isinstance(model, nn.Module):
            raise ScriptError(f"job.replicate needs a torch.nn.Module, not {type(model).__name__}")
        self._trainer.check_model(model)
        self._remember(model)
        return model

    def pipeline(
        self,
        model: Any,
        *,
        schedule: Any,
        microbatches: int,
        loss_fn: Callable[[Any, Any], torch.Tensor],
        split: Sequence[int] | None = None,
    ) -> Any:
        """Return ``model`` in stages (mode pipeline), one process each: ``loss = model.step(x, target=y)`` runs a batch
        forward and backward. An nn.Sequential is cut at its modules ``split``, or evenly by parameters; or give a list
        of parts (modules, or functions that build them). ``schedule``: a class of torch.distributed.pipelining.
        ``loss_fn(output, target)``: the mean over the samples. See docs/pipeline.md."""
        made = self._trainer.pipeline(model, schedule=schedule, microbatches=microbatches, loss_fn=loss_fn, split=split)
        self._remember(made)
        return made

    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0) -> torch.Tensor:
        """Clip the gradients of all models of the job to ``max_norm``, as torch.nn.utils.clip_grad_norm_ does; returns
        the norm before. Needed in mode pipeline, where no process has all gradients; all processes of a worker have to
        call it."""
        return self._trainer.clip_grad_norm(float(max_norm), float(norm_type))

    def optimizer(self, optimizer: torch.optim.Optimizer) -> Any:
        """Return, in mode ps, the ps-side twin of a torch optimizer (SGD, Adagrad, Adadelta, Adam, AdamW, Adamax,
        NAdam, RAdam, RMSprop) for the dense part; what schedulers and scripts change in its ``param_groups`` reaches
        the ps with each step. Mode allreduce: the optimizer itself (any of torch.optim), which steps only where the
        group has committed."""
        if not isinstance(optimizer, torch.optim.Optimizer):
            raise ScriptError(
                f"job.optimizer needs a torch.optim optimizer, not {type(optimizer).__name__}; optimizers of the "
                "tables go to job.sparse(model, optimizer=...)"
            )
        return self._trainer.optimizer(optimizer)

    def track(self, **objects: Any) -> None:
        """More that is part of the training: learning rate schedulers, GradScaler, moving averages; whatever has
        ``state_dict`` and ``load_state_dict``. Mode allreduce: new workers get it, checkpoints have it, and a step that
        is done again finds it as it was. Mode ps: a scheduler that is stepped in the loop counts the job's steps,
        whichever worker does them; of others nothing."""
        if self._engine.in_loop:
            raise ScriptError("job.track inside of job.steps(): call it before the loop")
        self._trainer.track(objects)

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Do several backward passes in one iteration: all but the last one in here (mode allreduce)."""
        with self._trainer.no_sync():
            yield

    def reduce_gradients(self) -> None:
        """Make gradients that the script has put into ``p.grad`` itself (``torch.autograd.grad``, ``torch.func``),
        which are of this worker's batch, those of all workers' batches, before clipping and ``opt.step()``. Not needed
        behind ``backward()``. In other modes than allreduce nothing is to be done."""
        self._trainer.reduce_gradients()

    def _remember(self, model: nn.Module) -> None:
        if not any(m is model for m in self._models):
            self._models.append(model)

    # ------------------------------------------------------------ the data and the loop

    def loader(self, source: Any, batch_size: int | None = None, *, epochs: int = 1, **options: Any) -> Loader:
        """See ``everstep.data.loader.Loader``; its seed is the job's unless given."""
        loader = Loader(source, batch_size, epochs=epochs, **{"seed": self.seed, **options})
        # Alone, what a dataset draws comes from the script's own streams, as it does in plain PyTorch.
        loader.apart = not self._runtime.embedded or self._runtime.prefetch > 0 or self.spec.logical_workers > 0
        if self.slot == 0:
            _tell_hashed(loader)
        return loader

    def steps(self, loader: Loader) -> Iterator[Any]:
        """Yield the batches that this process is to work on. Leaving an iteration ends its step: see
        ``Engine.steps``."""
        if not isinstance(loader, Loader):
            raise ScriptError(
                f"job.steps needs what job.loader returned, not {type(loader).__name__}: job.steps(job.loader(...)), "
                "which takes a dataset, or torch's DataLoader, with epochs="
            )
        if "EVERSTEP_PROBE" in os.environ:
            return probed_steps(self._runtime, self._trainer, loader)
        return self._graph.steps(self._trainer.steps(loader))

    def report(self, **values: Any) -> None:
        """Report numbers for the display and the summary: ``job.report(loss=loss)``. Cheap; the newest of each
        counts."""
        self._engine.clock.touch()
        for name, value in values.items():
            try:
                self._engine.values[name] = float(value.detach() if isinstance(value, torch.Tensor) else value)
            except (TypeError, ValueError, RuntimeError):
                raise ScriptError(f"job.report({name}=...): not one number but {type(value).__name__}") from None
        if not self._engine.in_loop and not self._engine.failure:  # outside of the loop no beat may follow
            try:
                self._runtime.call(messages.ValuesReported(dict(self._engine.values)), 30.0)
            except DeadlineError as error:  # not worth failing a finished training for
                print(f"everstep: {', '.join(values)} could not be reported: {error}", file=sys.stderr, flush=True)

    def log(self, *words: Any) -> None:
        """Print a line, with the worker's name where there are several."""
        if not self._trainer.speaks:
            return
        alone = self._runtime.embedded or self._runtime.spec.workers == 1
        print(*(() if alone else (f"worker:{self.slot}",)), *words, flush=True)

    @contextmanager
    def eval(self, model: nn.Module | None = None) -> Iterator[None]:
        """Evaluate in here: newest dense values, rows read only (none are created), modules in eval mode, no
        gradients."""
        with self._trainer.evaluating([model] if model is not None else list(self._models)):
            yield

    # ------------------------------------------------------------ state

    def state_dict(self) -> dict[str, Any]:
        """Return everything that training changes: ``models``, a list of the state of each model that the job was given
        (tables pulled from the ps), ``model``, the same of the only one where there is one, and ``optimizers``, a
        list. Mode allreduce: ``tracked`` too, the objects of ``job.track`` by name."""
        return self._trainer.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Put back what ``state_dict`` returned, before the first batch. Raises ScriptError, in mode ps if optimizers
        have state."""
        self._trainer.check_load(state)
        for model, values in zip(self._models, _models_of(state, len(self._models)), strict=True):
            model.load_state_dict(values)
        self._trainer.load_state_dict(state)

    # ------------------------------------------------------------ the end

    def close(self) -> None:
        """Leave the job: give back what is unfinished, write the summary. Called when the script ends."""
        if self.closed:
            return
        self.closed = True
        error = str(self._engine.failure or "")
        try:
            # A script of a worker that failed has not ended: it is a loss to the others.
            self._trainer.leave(error if self._runtime.embedded else error or last_error())
        finally:
            self._runtime.close(error or last_error())
            self._runtime.client.close()
            atexit.unregister(self._at_exit)

    def never_took_a_batch(self) -> ScriptError | None:
        """Return the mistake of a script that ends without training, where there is one."""
        if self._engine.batches or self._engine.registered:
            return None
        return ScriptError(
            "the script ended without taking a batch from job.steps(...): loop over job.steps(job.loader(...))"
        )

    def _at_exit(self) -> None:
        mistake = _leave(self)
        if mistake is not None and self._runtime.embedded:
            print(f"everstep: {mistake}", file=sys.stderr, flush=True)
            sys.stdout.flush()
            os._exit(mistake.exit_code)


def probed_steps(runtime: WorkerRuntime, trainer: Trainer, loader: Loader) -> Iterator[Any]:
    """Yield the batches of a worker that ``everstep estimate`` measures."""
    from everstep.api.probe import Probe, probe_order

    order = probe_order()
    if order is None:
        return trainer.steps(loader)
    return Probe(order, runtime.spec, runtime.slot, trainer, loader).steps(trainer.steps(loader))


def _leave(job: Job) -> EverstepError | None:
    """Close ``job`` when its interpreter ends. Return what went wrong in that, or the script's mistake."""
    mistake: EverstepError | None = None if last_error() else job.never_took_a_batch()
    try:
        job.close()
    except EverstepError as error:
        return mistake or error
    return mistake


def _ask_once(runtime: WorkerRuntime, key: str, done: bool) -> bool:
    """Ask the master whether this worker is the one that does ``key``, or tell it that this is done."""
    answer = runtime.call(OnceAsked(key, done), _MASTER_S)
    if isinstance(answer, Refused):
        raise ScriptError(answer.error)
    if isinstance(answer, Fenced):
        raise FencedError(answer.reason)
    return isinstance(answer, Yes) and answer.yes


def _tell_hashed(loader: Loader) -> None:
    """Print which columns of text come as keys."""
    hashed = getattr(loader.source, "hashed", ())  # (a source of the script's own need not have it)
    if hashed:
        names = ", ".join(map(repr, hashed))
        print(
            f"everstep: text of column {names} comes as int64 keys, a hash of each value: say dtypes={{...: "
            "'hash'}} if "
            "that is meant, or 'str' for a list of the text itself",
            flush=True,
        )


def _models_of(state: dict[str, Any], count: int) -> list[Any]:
    """Return the states of ``count`` models in ``state``. Raises ScriptError where it has others."""
    models = state["models"] if "models" in state else [state["model"]] if "model" in state else None
    if models is None:
        raise ScriptError(
            f"job.load_state_dict: no key 'models' or 'model', as job.state_dict() has them, but {', '.join(state)}"
        )
    if len(models) != count:
        raise ScriptError(f"the state is of {len(models)} models, this script has {count}")
    found: list[Any] = list(models)
    return found


def _keep_memory() -> None:
    """Let the allocator keep what tensors free. Its default gives large blocks back to the kernel at once, and each
    batch pays for clearing the same pages again: 5 to 15 % of a step on the CPU. EVERSTEP_MALLOC=0 leaves it alone."""
    if os.environ.get("EVERSTEP_MALLOC", "1") == "0":
        return
    with suppress(OSError, AttributeError):  # not glibc
        mallopt = ctypes.CDLL(None).mallopt
        mallopt(_M_TRIM_THRESHOLD, 2**31 - 1)
        mallopt(_M_TOP_PAD, 32 << 20)
        mallopt(_M_MMAP_MAX, 0)


def last_error() -> str:
    """Return the exception that is ending this interpreter, as one line; "" if none."""
    error = getattr(sys, "last_value", None)
    return "" if error is None else f"{type(error).__name__}: {error}"


def pass_too_large(error: BaseException) -> tuple[int, bool]:
    """Return, where the memory was too small for the pass that the script raised ``error`` in, its samples, and whether
    they were more than a batch of the loader, as plans make them. (0, False): it is something else."""
    words = str(error).lower()
    if not isinstance(error, MemoryError | torch.OutOfMemoryError) and not (
        isinstance(error, RuntimeError) and any(w in words for w in _MEMORY_WORDS)
    ):
        return 0, False
    engine = None if _job is None else _job._engine
    return (engine.in_hand, engine.in_hand > engine.loader_batch > 0) if engine is not None else (0, False)


def steps_done() -> int:
    """Return how many steps this process has done."""
    return 0 if _job is None else _job._engine.clock.steps


def step_reached() -> int:
    """Return the job's step that this process is at; 0 where the job has none (mode ps)."""
    return 0 if _job is None or _job._runtime.spec.mode == "ps" else _job._engine.step_number


def script_ended() -> None:
    """Leave the job, for the process that ran the script (the agent's template).

    Raises ScriptError if the script joined a job and never took a batch."""
    if _job is None:
        return
    mistake = _job.never_took_a_batch()
    _job.close()
    if mistake is not None:
        raise mistake
