"""Collects the gradients of a step while backward runs, and reduces them over the group.

Every parameter has two hooks. The first runs before autograd adds a gradient to ``p.grad`` and sets aside what is
there (gradients that the script accumulates over steps). The second takes the gradient, times the micro-batch's
weight, into flat memory. In a member's last micro-batch a bucket is reduced as soon as it is full; buckets go in the
same order on every member, whatever backward's order was. At the end of backward (autograd calls back) the rest
follows, and ``on_end`` is called.

Afterwards ``p.grad`` is a view of the reduced flat memory: no copy back. A parameter without a gradient on some member
counts as zero there; one that had none on any member keeps None, as in plain PyTorch.

An iteration may have several backward passes, with optimizer steps between them (a GAN, SAM). Each is a *round*: its
gradients are reduced at its end and added to what ``p.grad`` holds. From the second round on the members first tell
each other which buckets have gradients, so that a script that does not run the same rounds everywhere is found.

Where a member computes such a step in several micro-batches, it *sweeps* over them once for each round: in the first
sweep it collects the first round of each; in the second sweep it replays the first round with the reduced gradient,
which is known then, and collects the second round; and so on.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from everstep.allreduce.collective import CollectiveError
from everstep.allreduce.gradient_buckets import (
    BucketLayout,
    GradientBuckets,
    Measured,
    join_digests,
    measure,
    read_digests,
)
from everstep.allreduce.group_buffers import Buffers
from everstep.allreduce.logical import PartSums
from everstep.allreduce.step import GroupWork, StepAttempt
from everstep.errors import EverstepError, ScriptError
from everstep.model.group import Micro
from everstep.monitor.stepclock import StepClock

_SOME_BACKWARD, _NO_BACKWARD, _STEPPED, _NOT_STEPPED, _SEVERAL = range(5)  # of the tail, behind one per parameter
_FLAGS = 5
_ROUND, _END, _LEFT = range(
    -101, -98
)  # first words of a round: a further one, no further one, the script left the loop
_MASK_BITS = 60  # buckets that one word tells about


BETWEEN = (
    "{what} of one iteration, whose batch is computed in {passes} passes here: the whole batch's "
    "gradient is not known yet at that line. Let each worker compute its batch in one pass: --strategy elastic, no "
    "--logical-workers, and a batch_size that fits (no smaller largest_batch)"
)


@dataclass(frozen=True)
class ReducedStep:
    """Is what the group agreed on, before the vote."""

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
        self._zeros: set[int] = set()  # parameters that the script has set to zero, and not to None
        self.wait_s = 0.0
        self.clock: StepClock | None = None  # hears when backward begins
        self._on_end = on_end
        n = len(self.params)
        self._layout = BucketLayout(self._shapes(), n + _FLAGS + self.buffers.tail)
        self._buckets = self._new_buckets()
        self._parts = PartSums(self._layout, parts) if parts else None
        self._step: StepAttempt | None = None
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
        self._works: list[GroupWork] = []
        self._broken: Exception | None = None
        self._backward = self._placed = False
        self.several = False  # this member has seen iterations of several rounds: the vote is at their end
        self.rounds = 0  # further ones of this iteration, behind the first
        self.backwards = 0  # passes of this micro-batch that have ended
        self.dead = False  # nothing of this iteration will stay: further backward passes are the script's own
        self.ordered = False  # the script uses the gradient of a round before the next one: several passes are swept
        self.anew = False  # another sweep over the step's micro-batches has to follow
        self._known: list[
            tuple[GradientBuckets, list[bool]]
        ] = []  # where a step is swept: its rounds' gradients, and _active
        self._collected = False  # this iteration has reduced the round that its sweep is for
        self._stale_begun: list[bool] = []
        self.sweeps = True  # several micro-batches may be swept once for each round
        self.sums = False  # what the script does to gradients between two rounds is watched
        self._watched: list[tuple[int, nn.Parameter]] = []  # whose gradients' versions are in ``_hidden``, by number
        self.assigns = False  # the script puts gradients there itself
        self.keeps = False  # the script does not clear gradients that its optimizer has used
        self._begun: dict[int, Tensor] = {}  # ``carried`` of the first round
        self._active = [True] * len(self._layout.buckets)  # which buckets this round reduces
        self._held: dict[int, Tensor] = {}  # gradients that a step of several micro-batches began with
        self._left: dict[int, tuple[Tensor, int]] = {}  # that the script has carried into this step, and their versions
        self._hidden: dict[int, int] = {}  # by id of a gradient that the script sees as zeros: its version
        self._passes = 1  # micro-batches of this step
        self._handles: list[Any] = []
        self._nodes: list[Any] = []  # that add gradients to ``p.grad``: torch forgets those that nobody holds
        for i, p in enumerate(self.params):
            trainable = p.requires_grad
            p.requires_grad_(True)  # torch takes hooks of such only; they stay while it is frozen
            node: Any = p.expand_as(p).grad_fn
            node = node.next_functions[0][0]  # (a hook of the parameter itself would run in torch.autograd.grad, too)
            self._nodes.append(node)
            self._handles.append(node.register_prehook(partial(self._before, i)))
            after = p.register_post_accumulate_grad_hook(partial(self._after, i))  # type: ignore[no-untyped-call]
            self._handles.append(after)
            p.requires_grad_(trainable)

    def __repr__(self) -> str:
        return f"<Reducer {self._layout} open={self._open} touched={sum(self._touched)}>"

    def close(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self._nodes.clear()

    @property
    def weight(self) -> float:
        """Of the micro-batch in hand: its share of the step's samples."""
        return self._weight

    @property
    def carries(self) -> bool:
        """Whether ``p.grad`` of some parameter goes along into the next step: no optimizer has used it."""
        pairs = zip(self.params, self.stale, strict=True)
        return any((self.keeps or not stale) and p.grad is not None for p, stale in pairs)

    @property
    def passes(self) -> int:
        """Return the micro-batches of this member in the step in hand."""
        return self._passes

    def follow(self, before: Reducer) -> None:
        """This one takes the place of ``before``, whose parameters were others (frozen, thawed)."""
        self.stepped, self.keeps, self.assigns = before.stepped, before.keeps, before.assigns
        stale = {id(p) for p, used in zip(before.params, before.stale, strict=True) if used}
        self.stale = [id(p) in stale for p in self.params]
        self.buffers = before.buffers

    # ------------------------------------------------------------ what a sharded model does otherwise

    def _shapes(self) -> Sequence[Tensor]:
        """Return what lies in the flat memory, as long as it is here."""
        return self.params

    def _new_buckets(self) -> GradientBuckets:
        return GradientBuckets(self._layout)

    def _mine(self, tensor: Tensor) -> Tensor:
        """Return what there is of a parameter or gradient in this process."""
        return tensor

    def _gradient(self, p: nn.Parameter, view: Tensor) -> Tensor:
        """Return what ``p.grad`` is when ``view`` is what there is of it in this process."""
        return view

    # ------------------------------------------------------------ a step and its micro-batches

    def begin_step(self, step: StepAttempt) -> None:
        self._step = step
        self._works.clear()
        if self._broken is not None:  # a collective that was given up may still write into that memory
            self._buckets = self._new_buckets()
            self._broken = None
            if self._parts is not None:
                self._parts = PartSums(self._layout, self._parts.parts)
        self._backward = self._placed = False
        self._fresh = True
        self._passes = len(step.micros)
        n = len(self.params)
        self._touched, self._used = [False] * n, [False] * n
        self.carried = {}
        self._begun = {}
        self._zeros.clear()
        self._known.clear()
        self.anew = False
        self._stale_begun = list(self.stale)
        self._hold()
        if self._parts is not None:
            self._parts.begin()
            self._direct = self._parts.direct(step)
        self.buffers.save()

    def repeat_passes(self) -> None:
        """Behind an iteration, with ``anew``: the step's micro-batches begin once more."""
        self._open = self.anew = False
        self.buffers.roll_back()
        self._works.clear()
        n = len(self.params)
        self._touched, self._used = [False] * n, [False] * n
        self._fresh = True
        self._backward = self._placed = False
        if self._parts is not None:
            self._parts.begin()
        self._begin_again()

    def _hold(self) -> None:
        """Remember what the script has accumulated, where the step may change it before it is known."""
        self._held, self._left = {}, {}
        storages = self._storages()
        for i, p in enumerate(self.params):
            grad = p.grad
            if grad is None:
                continue
            self._left[i] = (grad, grad._version)
            if (self._passes > 1 or self.assigns) and (self.keeps or not self.stale[i]):
                mine = self.assigns or self._mine(grad).untyped_storage().data_ptr() in storages
                self._held[i] = grad.detach().clone() if mine else grad

    def begin_micro(self, micro: Micro, last: bool) -> None:
        assert self._step is not None
        self._micro, self._last = micro, last
        self._weight = self._scale = (micro.hi - micro.lo) / self._step.total
        self._open, self._ended, self._queued, self._local = True, False, False, False
        self.rounds, self.dead, self.backwards = 0, False, 0
        self._collected = False
        self._active = [True] * len(self._active)
        self._hidden.clear()
        self.buffers.begin_pass()
        self._seen = [False] * len(self.params)
        self._pending = [len(b) for b in self._layout.buckets]
        if self._parts is not None and micro.part >= 0:
            self._buckets = self._parts.take()
            self._buckets.tail[: len(self.params) + _FLAGS].zero_()  # of parts only the last one says something
            self._touched = [False] * len(self.params)
            self._fresh = True

    def end_micro(self) -> None:
        """Of a micro-batch that is not the last: its gradients are kept, everything else is as before it."""
        self._open = False
        self.buffers.back_to_middle()
        self._collect_buffers()
        self.buffers.roll_back()
        if self._parts is not None and self._micro is not None and self._micro.part >= 0:
            self._zero_untouched()
            self._parts.push(self._micro.part, self._buckets)
        self._begin_again()

    def put_back(self) -> None:
        """Put ``p.grad`` back as it was when the step began."""
        carried = self._begun if self.rounds else self.carried
        kept = self._held if self.assigns else {}
        for i, p in enumerate(self.params):
            held = carried.get(i, kept.get(i))
            if held is None and i in self._zeros:
                held = self._gradient(p, self._buckets.views[i].zero_())
            p.grad = held

    def _begin_again(self) -> None:
        """Put ``p.grad`` back as it was when the step began, for the next micro-batch; the script may change it in
        place."""
        carried = self.carried = self._begun if self.rounds else self.carried
        self.stale = list(self._stale_begun)
        for i, p in enumerate(self.params):
            held = carried.get(i, self._held.get(i))
            if held is None and i in self._zeros:
                held = torch.zeros_like(p)
            p.grad = None if held is None else held.detach().clone()
            if p.grad is not None:
                self._left[i] = (p.grad, p.grad._version)

    def hide(self) -> None:
        """The script sees zeros after backward in a micro-batch that is not the last: what it decides by gradients,
        it decides in the last one."""
        for i, p in enumerate(self.params):
            if not self._seen[i] and p.grad is not None:
                self._set_aside(i, p.grad)
        hidden = [p.grad for seen, p in zip(self._seen, self.params, strict=True) if seen and p.grad is not None]
        if hidden:
            with torch.no_grad():
                torch._foreach_zero_(hidden)
        self._hidden = {id(g): g._version for g in hidden}
        self.buffers.middle()

    @property
    def replays(self) -> bool:
        """Return whether the round in hand is one whose reduced gradient is known."""
        return self.rounds < len(self._known) and not self._collected

    def end_early(self) -> None:
        """End the round in hand without another backward()."""
        self._ended = True

    def order(self, what: str) -> None:
        """In a micro-batch that is not the last: the script uses the gradient of this round, which is not known."""
        if not self.sweeps:
            raise ScriptError(BETWEEN.format(what=what, passes=self._passes))
        self.ordered = self.dead = self.anew = True

    def replay(self) -> None:
        """Put the gradient of a round, whose reduced one is known, where the script expects it."""
        self._ended = True
        known, active = self._known[self.rounds]
        buckets = GradientBuckets(
            self._layout, [flat.clone() for flat in known.tensors]
        )  # the script may change it in place
        self.buffers.begin_unsure()
        self.buffers.commit(buckets.tail[len(self.params) + _FLAGS :] if self.buffers.tail else buckets.tail)
        self._active, mine = active, self._active
        self._set_unseen_aside()
        self._place(buckets, False, True, False)
        self._active = mine

    def remember(self) -> None:
        """Remember the round that was reduced, for the sweeps behind this one."""
        if self.rounds != len(self._known):
            raise ScriptError(
                f"an iteration that was run again had {self.rounds} backward() before the one in hand, and "
                f"{len(self._known)} the time before: what decides it must be the same, e.g. job.step"
            )
        self._collected = True
        kept = GradientBuckets(self._layout, [flat.clone() for flat in self._buckets.tensors])
        self._known.append((kept, list(self._active)))

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

    def _before(self, i: int, grads: Any) -> None:
        if not self._open or self.dead:
            return
        if self._ended:
            self._again()
        held = self.params[i].grad
        if (
            self._seen[i]
            and not self._last
            and not self.dead
            and not self.replays
            and (held is None or self._hidden.get(id(held), -1) not in (-1, held._version))
        ):
            self.order("a changed or cleared gradient between two backward()")
        if self.dead:
            return
        if held is not None:
            self._set_aside(i, held)

    def _changed(self) -> bool:
        """Return whether the script has used or changed the gradients of the round before."""
        if any(self.stale):
            return True
        return any(p.grad is None or self._hidden[i] != p.grad._version for i, p in self._watched)

    def _again(self) -> None:
        """Backward begins once more in this iteration."""
        self._ended = False
        if not self._last and not self.ordered:
            if self._parts is not None:  # of which each round is a sum over all parts
                self.order("another backward()")
            return  # its gradients go along with the others of this micro-batch
        if self._parts is not None and not self.sweeps:
            raise ScriptError(BETWEEN.format(what="another backward()", passes=self._passes))
        if self._passes > 1 and not self.ordered and self._changed():
            raise ScriptError(BETWEEN.format(what="a changed gradient between two backward()", passes=self._passes))
        if self._collected:
            self.dead = self.anew = True  # the round in hand was the last one that this sweep is for
            return
        n = len(self.params)
        self.rounds += 1
        if self.rounds == 1:
            self._begun = self.carried
        self.carried = {}
        self._seen = [False] * n
        self._works.clear()
        self._placed = False
        if self._passes == 1 or not self.ordered:  # (else it goes on from the micro-batch before)
            self._used, self._touched = [False] * n, [False] * n
            self._fresh = True
            if self._parts is not None:
                self._parts.begin()
                self._buckets = self._parts.take()

    def _set_aside(self, i: int, held: Tensor) -> None:
        p = self.params[i]
        if self._seen[i] or i in self.carried:  # of an earlier pass over this micro-batch: the flat memory has it
            p.grad = None
            return
        if self.stale[i] and not self.rounds:
            if not bool(self._mine(held).any()):
                p.grad = None
                self._zeros.add(i)
                return
            self.keeps = True
        mine = self._mine(held).untyped_storage().data_ptr() in self._storages()
        self.carried[i] = held.detach().clone() if mine else held
        p.grad = None

    def _storages(self) -> set[int]:
        sets = [self._buckets] if self._parts is None else [self._buckets, *self._parts.all()]
        return {f.untyped_storage().data_ptr() for s in sets for f in s.tensors}

    def _after(self, i: int, p: nn.Parameter) -> None:
        if not self._open or self.dead:
            return
        if self._ended:
            self._again()
        if self.dead:
            return
        if not self._queued:
            self._queued = True
            if self.clock is not None:
                self.clock.first_gradient()
            torch.autograd.Variable._execution_engine.queue_callback(self._backward_over)
        if p.grad is None:
            return
        grad = self._mine(p.grad)
        if grad.layout != torch.strided:
            raise ScriptError(f"the gradient of {self.names[i]!r} is sparse: build its nn.Embedding with sparse=False")
        if self.replays:
            p.grad = None
            self._seen[i] = True
            return
        self._add(i, grad)
        if self._last:
            p.grad = None
        if not self._seen[i]:
            self._seen[i] = True
            if not self._local:
                b = self._layout.bucket_of[i]
                self._pending[b] -= 1
                if self._last and not self._pending[b] and not self.rounds:
                    self._launch()

    def _add(self, i: int, grad: Tensor) -> None:
        """Add what a pass has left for parameter ``i`` to its bucket, by the weight of the micro-batch in hand."""
        view, weight = self._buckets.views[i], self._scale
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

    def _backward_over(self) -> None:
        self._queued = False
        if not self._open or self.dead:
            return
        self._backward = True
        self.backwards += 1
        if self._local:
            return
        self._ended = True
        self._on_end()

    # ------------------------------------------------------------ reducing

    @property
    def ended(self) -> bool:
        """Return whether this iteration's backward pass is over."""
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
            flat = self._buckets.tensors[number] if self._parts is None else self._parts.fold(self._buckets, number)
            with self._tried():
                self._works.append(step.collective.allreduce(flat))
            if self._broken is not None:
                return

    def finish(self, meanwhile: Callable[[], None] | None = None) -> ReducedStep | None:
        """Reduce what is left and wait; ``meanwhile`` is called while others work. None: a collective failed; the step
        has to be done again."""
        step, micro = self._step, self._micro
        assert step is not None
        assert micro is not None
        self._ended = True
        if self.rounds:
            return self._finish_round(step)
        self._zero_untouched()
        self._pending = [0] * len(self._pending)
        if self._parts is not None and self._direct:
            self._launch()
            self._buckets = self._parts.folded(self._buckets)
        elif self._parts is not None:
            self._fill_tail()
            if micro.part >= 0:
                self._parts.push(micro.part, self._buckets)
            self._buckets = self._parts.result()
            with self._tried():
                self._parts.exchange(step, self._buckets)
        else:
            self._launch()
            if step.size == 1:
                self._fill_tail()
        if self._works and self._broken is None:
            self._place_early()
        if meanwhile is not None:
            meanwhile()
        measured: list[Measured] = []
        for number, flat in enumerate(self._buckets.tensors):
            if self._broken is None and number < len(self._works):
                with self._tried():
                    self._works[number].wait()
            if self._broken is not None:
                return None
            measured.append(measure(flat))
        found = read_digests(measured)
        self._check_flags()
        return ReducedStep(join_digests([sums for sums, _ in found]), all(fine for _, fine in found))

    def _finish_round(self, step: StepAttempt) -> ReducedStep | None:
        """Finish, as ``finish`` does, a further round: the gradient buckets in which somebody has gradients, and the
        last one."""
        touched = [any(self._touched[i] for i in b) for b in self._layout.buckets]
        rows = self._tell_round(step, _ROUND, touched)
        if rows is None:
            return None
        self._active = [self._parts is not None or any(column) for column in zip(*rows, strict=True)]
        self._active[-1] = True
        self._zero_untouched()
        self._fill_tail()
        measured: list[Measured] = []
        if self._parts is not None:
            micro = self._micro
            if micro is not None and micro.part >= 0:
                self._parts.push(micro.part, self._buckets)
            self._buckets = self._parts.result()
            with self._tried():
                self._parts.exchange(step, self._buckets)
        tensors = [flat for flat, active in zip(self._buckets.tensors, self._active, strict=True) if active]
        with self._tried():
            if step.size > 1 and self._parts is None:
                for work in [step.collective.allreduce(flat) for flat in tensors]:
                    work.wait()
        if self._broken is not None:
            return None
        measured = [measure(flat) for flat in tensors]
        found = read_digests(measured)
        return ReducedStep(join_digests([sums for sums, _ in found]), all(fine for _, fine in found))

    def end_rounds(self, step: StepAttempt, left: bool = False) -> bool:
        """The iteration is over: everybody has had the same rounds. ``left``: the script left the loop in it. False:
        the group broke. Raises ScriptError where somebody has another round."""
        return self._tell_round(step, _LEFT if left else _END, [False] * len(self._layout.buckets)) is not None

    def _tell_round(self, step: StepAttempt, word: int, touched: list[bool]) -> list[list[bool]] | None:
        """Exchange everybody's ``touched``, by rank. None: the group broke."""
        if step.size == 1 or self._broken is not None:
            return [touched] if self._broken is None else None
        marks = [sum(t << n for n, t in enumerate(touched[at : at + _MASK_BITS])) for at in range(0, len(touched), 60)]
        rows: list[Any] = []
        with self._tried():
            rows = step.collective.gather([word, step.number, self.rounds, *marks])
        if self._broken is not None:
            return None
        words = {row[0] for row in rows}
        if any(list(row[1:3]) != [step.number, self.rounds] for row in rows) or (_ROUND in words and len(words) > 1):
            if _LEFT in words:
                self._broken = CollectiveError("a worker left the loop inside of an iteration")
                return None
            raise ScriptError(
                f"step {step.number}: the workers did not call backward() equally often in one iteration (here "
                f"{self.rounds + 1} times): what decides it must be the same on all workers, e.g. job.step"
            )
        return [[bool(row[3 + n // 60] >> n % 60 & 1) for n in range(len(touched))] for row in rows]

    def assigned(self) -> str:
        """Return the name of a parameter whose gradient the script put there without backward(); "": none."""
        if self.backwards or not self._open or self._ended:
            return ""
        storages = self._storages()
        for i, p in enumerate(self.params):
            held = p.grad
            left, version = self._left.get(i, (None, 0))
            if held is None or (held is left and held._version == version) or not bool(self._mine(held).any()):
                continue
            if held is left or self._mine(held).untyped_storage().data_ptr() not in storages:
                return self.names[i]
        return ""

    def take_assigned(self) -> None:
        """Take what ``p.grad`` holds as gradients of this micro-batch, as if backward had left them there. What the
        script has accumulated in them before is the same everywhere, and so is its mean over the members."""
        self.assigns = True
        if self.dead:
            return
        if self._ended:
            self._again()
        for i, p in enumerate(self.params):
            grad = p.grad
            if grad is None:
                continue
            self.carried.pop(i, None)
            p.grad = None
            if self.replays:
                continue
            self._add(i, self._mine(grad).detach())
            self._seen[i] = True
            if not self._last:
                p.grad = torch.zeros_like(grad)  # (``grad`` may lie in the flat memory)
        self._backward_over()

    def _place_early(self) -> None:
        """Do what ``place`` will do in nearly every step, while others reduce."""
        self._placed = not self.carried
        if self._placed:
            for p, view in zip(self.params, self._buckets.views, strict=True):
                p.grad = self._gradient(p, view)

    @property
    def error(self) -> Exception | None:
        """Return why the last ``finish`` returned None."""
        return self._broken

    def place(self, committed: bool, final: bool = True) -> None:
        """After the vote: ``p.grad`` of every parameter is the reduced gradient (plus what the script accumulates).

        Not committed: zeros, for the script's code up to the end of the iteration; nothing of it will stay. Not
        ``final``: it may be put back yet, so what the script accumulates is not changed."""
        placed, self._placed = self._placed, False
        self.dead = not committed
        self._place(self._buckets, placed, committed, final)

    def _place(self, buckets: GradientBuckets, placed: bool, committed: bool, final: bool) -> None:
        used = buckets.read_flags(0, len(self.params))
        self.stale = [stale and not one for stale, one in zip(self.stale, used, strict=True)]
        all_used = min(used) > 0
        if placed and committed and all_used:
            self._watch()
            return
        for i, p in enumerate(self.params):
            if not self._active[self._layout.bucket_of[i]]:
                continue
            view = buckets.views[i]
            before = self.carried.get(i)
            if not committed:
                view.zero_()
                p.grad = self._gradient(p, view)
            elif not all_used and not used[i]:
                if before is None and i in self._zeros:
                    view.zero_()
                    before = self._gradient(p, view)
                p.grad = before
            elif before is not None:
                if not final:
                    before = before.clone()
                self._mine(before).add_(view)
                p.grad = before
            else:
                p.grad = self._gradient(p, view)

        self._watch()

    def _watch(self) -> None:
        if self.sums:
            self._watched = [(i, p) for i, p in enumerate(self.params) if p.grad is not None]
            self._hidden = {i: p.grad._version for i, p in self._watched if p.grad is not None}

    def commit_buffers(self) -> None:
        assert self._step is not None
        if self.plain:
            self.buffers.keep()  # bit for bit what plain PyTorch has
        else:
            self.buffers.commit(self._buffer_tail())

    @property
    def plain(self) -> bool:
        """Whether this step is one pass of one member: nothing is added up."""
        return self._parts is None and self._step is not None and self._step.size == 1 and self._passes == 1

    @property
    def at_end(self) -> bool:
        """Return whether anybody wants the vote at the iteration's end, after the first round."""
        return self._flags()[_SEVERAL] > 0

    def first_nonfinite(self) -> str:
        """Return the name of the first parameter whose reduced gradient is not finite; "" if none."""
        views = zip(self.names, self._buckets.views, strict=True)
        return next((name for name, view in views if not bool(torch.isfinite(view).all())), "")

    # ------------------------------------------------------------ the tail

    def _flags(self) -> list[float]:
        n = len(self.params)
        return self._buckets.read_flags(n, n + _FLAGS)

    def _buffer_tail(self) -> Tensor:
        if not self.buffers.tail:
            return self._buckets.tail  # nobody reads it
        return self._buckets.tail[len(self.params) + _FLAGS :]

    def _collect_buffers(self) -> None:
        assert self._step is not None
        assert self._micro is not None
        if self._fresh and self.buffers.tail:
            self._buffer_tail().zero_()
        first = self._micro.lo == self._step.lo and self._micro.hi > self._micro.lo
        if self.rounds and self._passes > 1 and not self.ordered:
            first = self._step.rank == 0
        self.buffers.collect(self._buffer_tail(), self._weight, first)
        self._fresh = False

    def _fill_tail(self) -> None:
        """Fill in what this member says along with its gradients."""
        self._collect_buffers()
        n = len(self.params)
        flags = [float(u) for u in self._used] + [0.0] * _FLAGS
        ran = self._backward or self._queued or any(self._used)
        flags[n + (_SOME_BACKWARD if ran else _NO_BACKWARD)] = 1.0
        if self.stepped is not None:
            flags[n + (_STEPPED if self.stepped else _NOT_STEPPED)] = 1.0
        flags[n + _SEVERAL] = float(self.several)
        self._buckets.say(flags)

    def _check_flags(self) -> None:
        assert self._step is not None
        backward, none, stepped, not_stepped, _ = self._flags()
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
        self._set_unseen_aside()
        for i, touched in enumerate(self._touched):
            if not touched and self._active[self._layout.bucket_of[i]]:
                self._buckets.views[i].zero_()

    def _set_unseen_aside(self) -> None:
        if self.dead:
            return  # ``hide`` did, and what backward made since is the script's own
        for i, p in enumerate(self.params):
            if p.grad is not None and not self._seen[i] and self._active[self._layout.bucket_of[i]]:
                self._set_aside(i, p.grad)
