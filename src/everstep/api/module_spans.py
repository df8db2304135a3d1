"""Measures what the modules of a model do in one step, without touching them.

The hooks are torch's global ones, there only while a step is sampled: nothing is stored at the script's modules, so a
copy or a file that the script makes of them is as ever. Hooks return nothing, so what is computed stays as it is.

**Backward.** Autograd numbers its nodes as they are made, and runs the ready node with the highest number first, on
one thread of each device. All nodes that a node waits for have higher numbers. So nodes run in the order of falling
numbers, and those made within one call of a module run one after the other. The call's backward lasts from the begin
of its last node to the end of its first. Accumulating a parameter's gradient has no number of its own: where it comes
after the call's first node it is not counted.
"""

from __future__ import annotations

import threading
import time
import weakref
from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor, nn
from torch._C._autograd import _get_sequence_nr
from torch.nn.modules import module as torch_module
from torch.utils.hooks import RemovableHandle

from everstep.api.rows import TableParameter
from everstep.model.graph_readings import DEPTH_MAX, MODULES_MAX, NAME_MAX

_NODES_MAX: Final = 20_000  # of autograd, behind one call
_CALLS_MAX: Final = 20_000  # of modules in one step
_FIRST_NUMBERS: Final = 1 << 62  # an AccumulateGrad has a higher one

Moment = Any
"""A moment: nanoseconds, or an event of the device."""


class KnownModule(NamedTuple):
    """Is a module of the tree. ``module``: a weak reference to it."""

    path: str
    kind: str
    parameters: int
    parameter_bytes: int
    module: weakref.ref[nn.Module]


class ModuleTree:
    """Knows the modules of a script's models, parents first, down to ``DEPTH_MAX`` levels and ``MODULES_MAX`` modules.

    A module that stands at several places counts under its first name."""

    def __init__(self, models: Sequence[nn.Module]) -> None:
        self.known: list[KnownModule] = []
        self._index: dict[int, int] = {}
        found: list[tuple[str, nn.Module]] = []  # parents before their children
        names: dict[str, int] = {}
        for model in models:
            kind = type(model).__name__
            names[kind] = names.get(kind, 0) + 1
            root = kind if names[kind] == 1 else f"{kind}#{names[kind]}"
            found += [(f"{root}.{name}" if name else root, module) for name, module in model.named_modules()]
        upper = sorted(range(len(found)), key=lambda i: found[i][0].count("."))[:MODULES_MAX]
        for i in sorted(upper):
            path, module = found[i]
            if path.count(".") < DEPTH_MAX and len(path) <= NAME_MAX and id(module) not in self._index:
                self._index[id(module)] = len(self.known)
                self.known.append(_known(path, module))
        self.left_out = len({id(module) for _, module in found}) - len(self.known)
        self.device = _device(models)

    def __repr__(self) -> str:
        return f"<ModuleTree of {len(self.known)} modules, {self.left_out} left out>"

    def index(self, module: nn.Module) -> int:
        """Return the module's place in ``known``; -1: it is not there."""
        i = self._index.get(id(module), -1)
        return i if i >= 0 and self.known[i].module() is module else -1


def _known(path: str, module: nn.Module) -> KnownModule:
    own = [p for p in module.parameters(recurse=False) if not isinstance(p, TableParameter)]
    sizes = [(p.numel(), p.element_size()) for p in own if not torch.nn.parameter.is_lazy(p)]
    n_bytes = sum(n * size for n, size in sizes)
    return KnownModule(path, type(module).__name__[:NAME_MAX], sum(n for n, _ in sizes), n_bytes, weakref.ref(module))


def _device(models: Sequence[nn.Module]) -> torch.device | None:
    """Return where the models are; None: at several places, or somewhere that has no clock here."""
    found = {p.device for m in models for p in m.parameters() if not isinstance(p, TableParameter)}
    if len(found) > 1:
        return None
    device = found.pop() if found else torch.device("cpu")
    return device if device.type in ("cpu", "cuda") else None


class ModuleCall:
    """Is one call of a module in the sampled step. ``first``, ``last``: the numbers of autograd's nodes made in it
    are from ``first`` to below ``last``."""

    __slots__ = ("backward", "begin", "children", "end", "first", "hooks_ns", "index", "last", "output_bytes", "parent")

    def __init__(self, index: int, parent: ModuleCall | None, first: int) -> None:
        self.index, self.parent, self.first, self.last = index, parent, first, first
        self.begin: Moment = None
        self.end: Moment = None
        self.children: list[ModuleCall] = []
        self.hooks_ns = 0  # of our own hooks within
        self.output_bytes = 0
        self.backward: list[list[Moment]] = []  # [begin, end] of each pass


class StepRecorder:
    """Records one step: ``with recorder: ...`` around what the script does. ``aside``: whether what runs now is no
    training. Training thread only; of other threads nothing is recorded."""

    def __init__(self, tree: ModuleTree, aside: Callable[[], bool]) -> None:
        self.tree, self.calls, self.failed = tree, list[ModuleCall](), ""
        self.hooks_ns = 0
        self._aside = aside
        self._stack: list[ModuleCall] = []
        self._thread = 0
        self._handles: list[RemovableHandle] = []
        cuda = tree.device is not None and tree.device.type == "cuda"
        self._moment: Callable[[], Moment] = _cuda_moment if cuda else time.perf_counter_ns
        self._cuda = cuda

    def __repr__(self) -> str:
        return f"<StepRecorder of {len(self.calls)} calls>"

    def __enter__(self) -> StepRecorder:
        self._thread = threading.get_ident()
        self._handles = [
            torch_module.register_module_forward_pre_hook(self._enter),
            torch_module.register_module_forward_hook(self._leave, always_call=True),  # also of a call that raises
        ]
        return self

    def __exit__(self, *what: object) -> None:
        for handle in self._handles:
            handle.remove()
        self._stack.clear()

    # ------------------------------------------------------------ forward

    def _enter(self, module: nn.Module, args: Any) -> None:
        if threading.get_ident() != self._thread or self.failed:
            return
        began = time.perf_counter_ns()
        index = self.tree.index(module)
        if index < 0 or len(self.calls) >= _CALLS_MAX or self._aside() or _in_backward():
            return
        parent = self._stack[-1] if self._stack else None
        call = ModuleCall(index, parent, _get_sequence_nr())
        call.begin = self._moment()
        self._stack.append(call)
        self._spent(parent, time.perf_counter_ns() - began)

    def _leave(self, module: nn.Module, args: Any, output: Any) -> None:
        if threading.get_ident() != self._thread or self.failed or not self._stack:
            return
        end = self._moment()
        began = time.perf_counter_ns()
        index = self.tree.index(module)
        if self._stack[-1].index != index or self._aside() or _in_backward():
            return
        call = self._stack.pop()
        call.end, call.last = end, _get_sequence_nr()
        self.calls.append(call)
        tensors = list(_tensors(output))
        call.output_bytes = sum(t.nbytes for t in tensors)
        if call.parent is not None:
            call.parent.children.append(call)
        else:
            try:
                self._watch_backward(call, tensors)
            except Exception as error:  # ours or torch's: readings are never worth a training
                self.failed = f"backward could not be watched: {type(error).__name__}: {error}"
        self._spent(call.parent, time.perf_counter_ns() - began)

    def _spent(self, call: ModuleCall | None, ns: int) -> None:
        self.hooks_ns += ns
        while call is not None:
            call.hooks_ns += ns
            call = call.parent

    # ------------------------------------------------------------ backward

    def _watch_backward(self, outermost: ModuleCall, outputs: Sequence[Tensor]) -> None:
        """Put hooks at the first and the last node of each call that the outputs come from."""
        nodes = _nodes([t.grad_fn for t in outputs if t.grad_fn is not None], outermost.first, outermost.last)
        if nodes is None:
            self.failed = f"backward is not measured: the graph behind one call has over {_NODES_MAX:,} nodes"
            return
        numbers = sorted(nodes)
        begins: dict[int, list[ModuleCall]] = {}
        ends: dict[int, list[ModuleCall]] = {}
        for call in _within(outermost):
            low, high = bisect_left(numbers, call.first), bisect_left(numbers, call.last)
            if low < high:
                begins.setdefault(numbers[high - 1], []).append(call)
                ends.setdefault(numbers[low], []).append(call)
        for number, calls in begins.items():
            nodes[number].register_prehook(_Begins(calls, self))
        for number, calls in ends.items():
            nodes[number].register_hook(_Ends(calls, self))

    def moment(self) -> Moment:
        return self._moment()

    # ------------------------------------------------------------ the outcome

    @property
    def ready(self) -> bool:
        """Return whether all moments can be read: those of a device may not have happened yet."""
        if not self._cuda:
            return True
        moments = [m for call in self.calls for m in (call.end, *(pair[-1] for pair in call.backward))]
        return all(moment.query() for moment in moments)

    def seconds(self, begin: Moment, end: Moment) -> float:
        """Return the time between two moments."""
        return float(begin.elapsed_time(end)) * 1e-3 if self._cuda else (end - begin) * 1e-9

    def forward_s(self, call: ModuleCall) -> float:
        """Return how long a call took, without our own hooks within it."""
        own_s = 0.0 if self._cuda else call.hooks_ns * 1e-9
        return max(0.0, self.seconds(call.begin, call.end) - own_s)

    def backward_s(self, call: ModuleCall) -> float:
        """Return how long its backward took; 0.0: there was none."""
        return sum(self.seconds(*pair) for pair in call.backward if len(pair) == 2)


class _Begins:
    """Runs before the last node of calls: their backward begins."""

    def __init__(self, calls: list[ModuleCall], recorder: StepRecorder) -> None:
        self._calls, self._recorder = calls, recorder

    def __call__(self, grads: Any) -> None:
        began = time.perf_counter_ns()
        moment = self._recorder.moment()
        for call in self._calls:
            call.backward.append([moment])
        self._recorder.hooks_ns += time.perf_counter_ns() - began


class _Ends:
    """Runs after the first node of calls: their backward has ended."""

    def __init__(self, calls: list[ModuleCall], recorder: StepRecorder) -> None:
        self._calls, self._recorder = calls, recorder

    def __call__(self, grads_in: Any, grads_out: Any) -> None:
        began = time.perf_counter_ns()
        moment = self._recorder.moment()
        for call in self._calls:
            if call.backward and len(call.backward[-1]) == 1:
                call.backward[-1].append(moment)
        self._recorder.hooks_ns += time.perf_counter_ns() - began


def _in_backward() -> bool:
    """Return whether autograd runs: what a checkpoint computes again counts as backward."""
    return torch._C._current_graph_task_id() >= 0


def _cuda_moment() -> Moment:
    event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
    event.record()
    return event


def _within(call: ModuleCall) -> Iterator[ModuleCall]:
    yield call
    for child in call.children:
        yield from _within(child)


def _nodes(begin: Sequence[Any], first: int, last: int) -> dict[int, Any] | None:
    """Return autograd's nodes with numbers from ``first`` to below ``last`` that lie behind those of ``begin``, by
    number; None: they are too many."""
    found: dict[int, Any] = {}
    open_ = list(begin)
    while open_:
        node = open_.pop()
        number = node._sequence_nr()
        if number in found or not first <= number < min(last, _FIRST_NUMBERS):
            continue
        found[number] = node
        if len(found) > _NODES_MAX:
            return None
        open_ += [above for above, _ in node.next_functions if above is not None]
    return found


def _tensors(value: Any, depth: int = 3) -> Iterator[Tensor]:
    """Yield the tensors in what a module returned."""
    if isinstance(value, Tensor):
        yield value
    elif depth and isinstance(value, tuple | list):
        for one in value:
            yield from _tensors(one, depth - 1)
    elif depth and isinstance(value, dict):
        for one in value.values():
            yield from _tensors(one, depth - 1)


def compiled_words(models: Sequence[nn.Module]) -> str:
    """Return why modules must not be watched: torch.compile would compile them anew with the hooks. "": they may."""
    import sys

    for model in models:
        for name, module in model.named_modules():
            if type(module).__name__ == "OptimizedModule" or getattr(module, "_compiled_call_impl", None) is not None:
                return f"modules are not measured: {name or type(model).__name__} is compiled by torch.compile"
    utils = sys.modules.get("torch._dynamo.utils")
    if utils is not None and utils.counters["frames"]["total"] > 0:
        return "modules are not measured: this script compiles functions with torch.compile"
    return ""
