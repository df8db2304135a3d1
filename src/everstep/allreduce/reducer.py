"""Collects the gradients of a step while backward runs, and reduces them over the group.

Every parameter has two hooks. The first runs before autograd adds a gradient to ``p.grad`` and sets aside what is
there (gradients that the script accumulates over steps). The second takes the gradient, times the micro-batch's
weight, into flat memory. In a member's last micro-batch a bucket is reduced as soon as it is full; buckets go in the
same order on every member, whatever backward's order was. At the end of backward (autograd calls back) the rest
follows, and ``on_end`` is called.

Afterwards ``p.grad`` is a view of the reduced flat memory: no copy back. A parameter without a gradient on some member
counts as zero there; one that had none on any member keeps None, as in plain PyTorch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from everstep.allreduce.buffers import Buffers
from everstep.allreduce.collective import CollectiveError
from everstep.allreduce.flats import Flats, Layout, Measured, join_digests, measure, told
from everstep.allreduce.logical import PartSums
from everstep.allreduce.step import Step, Work
from everstep.errors import EverstepError, ScriptError
from everstep.model.group import Micro
from everstep.monitor.stepclock import StepClock

_SOME_BACKWARD, _NO_BACKWARD, _STEPPED, _NOT_STEPPED = range(4)  # elements of the tail, behind one per parameter
_FLAGS = 4


@dataclass(frozen=True)
class Reduced:
    """What the group agreed on, before the vote."""

    digest: int
    finite: bool


class Reducer:
    """See the top of this file. ``names``: of ``params``, for errors. Used by one thread."""

    def __init__(
        self,
        params: Sequence[nn.Parameter],
        names: Sequence[str],
        models: Sequence[nn.Module],
        parts: int,
        on_end: Callable[[], None],
    ) -> None:
        self.params, self.names = list(params), list(names)
        self.buffers = Buffers(models)
        self.stepped: bool | None = None  # whether opt.step() ran since the step before; None: not known (joined)
        self.stale = [False] * len(self.params)  # its optimizer has used p.grad
        self.carried: dict[int, Tensor] = {}
        self.wait_s = 0.0
        self.clock: StepClock | None = None  # hears when backward begins
        self._on_end = on_end
        n = len(self.params)
        self._layout = Layout(self._shapes(), n + _FLAGS + self.buffers.tail)
        self._flats = self._new_flats()
        self._parts = PartSums(self._layout, parts) if parts else None
        self._step: Step | None = None
        self._micro: Micro | None = None
        self._weight = 0.0  # of this micro-batch in the step
        self._scale = 0.0  # of the gradient that arrives here
        self._direct = False  # the sums of logical workers are reduced as they are in a job without
        self._last = self._open = self._ended = self._local = self._queued = False
        self._fresh = True  # nothing of this step is in the tail
        self._touched = [False] * n  # a gradient of this step (of this part) is in the flat memory
        self._seen = [False] * n  # in this micro-batch
        self._used = [False] * n  # in this step, by this member
        self._pending: list[int] = []
        self._works: list[Work] = []
        self._broken: Exception | None = None
        self._backward = self._placed = False
        self._handles: list[Any] = []
        for i, p in enumerate(self.params):
            self._handles.append(p.register_hook(partial(self._before, i)))  # type: ignore[no-untyped-call]
            after = p.register_post_accumulate_grad_hook(partial(self._after, i))  # type: ignore[no-untyped-call]
            self._handles.append(after)

    def __repr__(self) -> str:
        return f"<Reducer {self._layout} open={self._open} touched={sum(self._touched)}>"

    def close(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    @property
    def weight(self) -> float:
        """Of the micro-batch in hand: its share of the step's samples."""
        return self._weight

    # ------------------------------------------------------------ what a sharded model does otherwise

    def _shapes(self) -> Sequence[Tensor]:
        """What lies in the flat memory, as long as it is here."""
        return self.params

    def _new_flats(self) -> Flats:
        return Flats(self._layout)

    def _mine(self, tensor: Tensor) -> Tensor:
        """What there is of a parameter or gradient in this process."""
        return tensor

    def _gradient(self, p: nn.Parameter, view: Tensor) -> Tensor:
        """What ``p.grad`` is when ``view`` is what there is of it in this process."""
        return view

    # ------------------------------------------------------------ a step and its micro-batches

    def begin_step(self, step: Step) -> None:
        self._step = step
        self._works.clear()
        if self._broken is not None:  # a collective that was given up may still write into that memory
            self._flats = self._new_flats()
            self._broken = None
            if self._parts is not None:
                self._parts = PartSums(self._layout, self._parts.parts)
        self._backward = self._placed = False
        self._fresh = True
        n = len(self.params)
        self._touched, self._used = [False] * n, [False] * n
        self.carried.clear()
        if self._parts is not None:
            self._parts.begin()
            self._direct = self._parts.direct(step)
        self.buffers.save()

    def begin_micro(self, micro: Micro, last: bool) -> None:
        assert self._step is not None
        self._micro, self._last = micro, last
        self._weight = self._scale = (micro.hi - micro.lo) / self._step.total
        self._open, self._ended, self._queued, self._local = True, False, False, False
        self._seen = [False] * len(self.params)
        self._pending = [len(b) for b in self._layout.buckets]
        if self._parts is not None and micro.part >= 0:
            self._flats = self._parts.take()
            self._flats.tail[: len(self.params) + _FLAGS].zero_()  # of parts only the last one says something
            self._touched = [False] * len(self.params)
            self._fresh = True

    def end_micro(self) -> None:
        """Of a micro-batch that is not the last: its gradients are kept, everything else is as before it."""
        self._open = False
        self._collect_buffers()
        self.buffers.restore()
        if self._parts is not None and self._micro is not None and self._micro.part >= 0:
            self._zero_untouched()
            self._parts.push(self._micro.part, self._flats)
        self.put_back()

    def put_back(self) -> None:
        """``p.grad`` as it was when the step began."""
        for i, p in enumerate(self.params):
            p.grad = self.carried.get(i)

    def close_micro(self) -> None:
        """The iteration is over: hooks do nothing until the next one."""
        self._open = False

    def used_by(self, ids: set[int]) -> None:
        """The optimizer of these parameters (by ``id()``) has stepped."""
        for i, p in enumerate(self.params):
            if id(p) in ids:
                self.stale[i] = True

    def no_sync(self, on: bool) -> None:
        """While on, backward only collects."""
        self._local = on

    # ------------------------------------------------------------ hooks

    def _before(self, i: int, grad: Tensor) -> None:
        held = self.params[i].grad
        if held is not None and self._open:
            self._set_aside(i, held)

    def _set_aside(self, i: int, held: Tensor) -> None:
        p = self.params[i]
        if self._seen[i] or i in self.carried:  # of an earlier pass over this micro-batch: the flat memory has it
            p.grad = None
            return
        if self.stale[i]:
            if bool(self._mine(held).any()):
                raise ScriptError(
                    f"the gradient of {self.names[i]!r} was used by opt.step() and not cleared: call opt.zero_grad() "
                    "in every iteration"
                )
        else:
            mine = self._mine(held).untyped_storage().data_ptr() in self._storages()
            self.carried[i] = held.detach().clone() if mine else held
        p.grad = None

    def _storages(self) -> set[int]:
        sets = [self._flats] if self._parts is None else [self._flats, *self._parts.all()]
        return {f.untyped_storage().data_ptr() for s in sets for f in s.flats}

    def _after(self, i: int, p: nn.Parameter) -> None:
        if not self._open:
            return
        if self._ended:
            raise ScriptError(
                "backward() a second time in one iteration of job.steps(): add the losses and call backward() once, or "
                "run all but the last one under job.no_sync() (checkpointing: use_reentrant=False)"
            )
        if not self._queued:
            self._queued = True
            if self.clock is not None:
                self.clock.first_gradient()
            torch.autograd.Variable._execution_engine.queue_callback(self._backward_over)
        if p.grad is None:
            return
        grad, view, weight = self._mine(p.grad), self._flats.views[i], self._scale
        if grad.layout != torch.strided:
            raise ScriptError(f"the gradient of {self.names[i]!r} is sparse: build its nn.Embedding with sparse=False")
        if self._touched[i]:
            if weight:
                view.add_(grad, alpha=weight)
        elif not weight:
            view.zero_()
        elif weight == 1.0:
            view.copy_(grad)
        else:
            torch.mul(grad, weight, out=view)
        self._touched[i] = self._used[i] = True
        if self._last:
            p.grad = None
        if not self._seen[i]:
            self._seen[i] = True
            if not self._local:
                b = self._layout.bucket_of[i]
                self._pending[b] -= 1
                if self._last and not self._pending[b]:
                    self._launch()

    def _backward_over(self) -> None:
        self._queued = False
        if not self._open:
            return
        self._backward = True
        if self._local:
            return
        self._ended = True
        self._on_end()

    # ------------------------------------------------------------ reducing

    @property
    def ended(self) -> bool:
        """Whether this iteration's backward pass is over."""
        return self._ended

    @contextmanager
    def _tried(self) -> Iterator[None]:
        """A collective: where it fails, the group is broken and not the job, and the step is done again."""
        try:
            yield
        except CollectiveError as error:
            self._broken = error
        except EverstepError:
            raise
        except Exception as error:
            self._broken = error

    def _launch(self) -> None:
        """Reduce the buckets that are full, in order."""
        step = self._step
        assert step is not None
        if step.size == 1 or self._broken is not None or (self._parts is not None and not self._direct):
            return
        while len(self._works) < len(self._pending) and not self._pending[len(self._works)]:
            number = len(self._works)
            if number == len(self._pending) - 1:
                self._fill_tail()
            flat = self._flats.flats[number] if self._parts is None else self._parts.fold(self._flats, number)
            with self._tried():
                self._works.append(step.collective.allreduce(flat))
            if self._broken is not None:
                return

    def finish(self, meanwhile: Callable[[], None] | None = None) -> Reduced | None:
        """Reduce what is left and wait; ``meanwhile`` is called while others work. None: a collective failed; the step
        has to be done again."""
        step, micro = self._step, self._micro
        assert step is not None
        assert micro is not None
        self._ended = True
        self._zero_untouched()
        self._pending = [0] * len(self._pending)
        if self._parts is not None and self._direct:
            self._launch()
            self._flats = self._parts.folded(self._flats)
        elif self._parts is not None:
            self._fill_tail()
            if micro.part >= 0:
                self._parts.push(micro.part, self._flats)
            self._flats = self._parts.result()
            with self._tried():
                self._parts.exchange(step, self._flats)
        else:
            self._launch()
            if step.size == 1:
                self._fill_tail()
        if self._works and self._broken is None:
            self._place_early()
        if meanwhile is not None:
            meanwhile()
        measured: list[Measured] = []
        for number, flat in enumerate(self._flats.flats):
            if self._broken is None and number < len(self._works):
                with self._tried():
                    self._works[number].wait()
            if self._broken is not None:
                return None
            measured.append(measure(flat))
        found = told(measured)
        self._check_flags()
        return Reduced(join_digests([sums for sums, _ in found]), all(fine for _, fine in found))

    def _place_early(self) -> None:
        """What ``place`` will do in nearly every step, while others reduce."""
        self._placed = not self.carried
        if self._placed:
            for p, view in zip(self.params, self._flats.views, strict=True):
                p.grad = self._gradient(p, view)

    @property
    def error(self) -> Exception | None:
        """Why the last ``finish`` returned None."""
        return self._broken

    def place(self, committed: bool) -> None:
        """After the vote: ``p.grad`` of every parameter is the reduced gradient (plus what the script accumulates).

        Not committed: zeros, for the script's code up to the end of the iteration; nothing of it will stay."""
        placed, self._placed = self._placed, False
        self.stale = [False] * len(self.params)
        used = self._flats.said(0, len(self.params))
        all_used = min(used) > 0
        if placed and committed and all_used:
            return
        for i, p in enumerate(self.params):
            view = self._flats.views[i]
            before = self.carried.get(i)
            if not committed:
                view.zero_()
                p.grad = self._gradient(p, view)
            elif not all_used and not used[i]:
                p.grad = before
            elif before is not None:
                self._mine(before).add_(view)
                p.grad = before
            else:
                p.grad = self._gradient(p, view)

    def commit_buffers(self) -> None:
        assert self._step is not None
        if self._parts is None and self._step.size == 1 and len(self._step.micros) == 1:
            self.buffers.keep()  # bit for bit what plain PyTorch has
        else:
            self.buffers.commit(self._buffer_tail())

    def first_nonfinite(self) -> str:
        """The name of the first parameter whose reduced gradient is not finite; "" if none."""
        views = zip(self.names, self._flats.views, strict=True)
        return next((name for name, view in views if not bool(torch.isfinite(view).all())), "")

    # ------------------------------------------------------------ the tail

    def _flags(self) -> list[float]:
        n = len(self.params)
        return self._flats.said(n, n + _FLAGS)

    def _buffer_tail(self) -> Tensor:
        if not self.buffers.tail:
            return self._flats.tail  # nobody reads it
        return self._flats.tail[len(self.params) + _FLAGS :]

    def _collect_buffers(self) -> None:
        assert self._step is not None
        assert self._micro is not None
        if self._fresh and self.buffers.tail:
            self._buffer_tail().zero_()
        first = self._micro.lo == self._step.lo and self._micro.hi > self._micro.lo
        self.buffers.collect(self._buffer_tail(), self._weight, first)
        self._fresh = False

    def _fill_tail(self) -> None:
        """What this member says along with its gradients."""
        self._collect_buffers()
        n = len(self.params)
        said = [float(u) for u in self._used] + [0.0] * _FLAGS
        ran = self._backward or self._queued or any(self._used)
        said[n + (_SOME_BACKWARD if ran else _NO_BACKWARD)] = 1.0
        if self.stepped is not None:
            said[n + (_STEPPED if self.stepped else _NOT_STEPPED)] = 1.0
        self._flats.say(said)

    def _check_flags(self) -> None:
        assert self._step is not None
        backward, none, stepped, not_stepped = self._flags()
        if backward and none:
            raise ScriptError(
                f"step {self._step.number}: {none:.0f} of {self._step.size} workers left the iteration without "
                "backward() and the others did not: what a script skips must be the same on all workers"
            )
        if stepped and not_stepped:
            raise ScriptError(
                f"before step {self._step.number} some workers called opt.step() and others did not: count with "
                "job.step, the same on all workers, and not with a counter of your own"
            )

    def _zero_untouched(self) -> None:
        for i, touched in enumerate(self._touched):
            if not touched:
                held = self.params[i].grad
                if held is not None and not self._seen[i]:
                    self._set_aside(i, held)
                self._flats.views[i].zero_()
