"""Measures one step in some: what the modules of the model do in it, and which keys its batch looks up.

Between sampled steps this costs one addition a step. ``auto`` chooses how often a step is sampled, from what sampling
costs in this very job: ``COST_SHARE`` of the time at most.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Generator, Iterator
from contextlib import closing, contextmanager, nullcontext
from typing import Any, Final

import numpy as np

from everstep.api.module_spans import ModuleCall, ModuleTree, StepRecorder, compiled_words
from everstep.api.trainer import Trainer
from everstep.model.graph_readings import (
    HOTTEST,
    NAME_MAX,
    NOTE_MAX,
    TABLES_MAX,
    GraphReading,
    LookupReading,
    ModuleReading,
)

COST_SHARE: Final = 0.002
"""Of the steps' time that sampling may take with ``auto``; the promise is 0.005."""
_FIRST: Final = 10  # the step that is sampled first: what comes before prepares much
_LEAST: Final = 100  # steps between two samples
_MOST: Final = 100_000
_HOT_OF_STEP: Final = 64  # keys of a step that count towards the hottest
_HOT_KEPT: Final = 512  # ... and of all steps, of one table
_REPORT_S: Final = 5.0  # between two beats that have the readings
_WITH_TORCH: Final = 3.0  # so many times its own time a hook costs, with what torch does to call it
_TREE_STEPS: Final = 16  # sampled steps after which the modules are listed anew: the script may change its model


class _Lookups:
    """Adds up how batches look up one table."""

    def __init__(self) -> None:
        self.steps, self.ids, self.unique = 0, 0, 0
        self._hot: dict[int, int] = {}

    def add(self, keys: Any, counts: Any) -> None:
        """Take one batch: ``keys`` int64 [u], ``counts`` int64 [u]."""
        self.steps += 1
        self.ids += int(counts.sum())
        self.unique += int(np.count_nonzero(counts))
        most = min(_HOT_OF_STEP, len(keys))
        if most:
            top = np.argpartition(counts, len(counts) - most)[len(counts) - most :]
            for key, count in zip(keys[top].tolist(), counts[top].tolist(), strict=True):
                self._hot[key] = self._hot.get(key, 0) + count
        if len(self._hot) > _HOT_KEPT:
            kept = sorted(self._hot.items(), key=lambda item: -item[1])[: _HOT_KEPT // 2]
            self._hot = dict(kept)

    def reading(self, table: str) -> LookupReading:
        hottest = sorted(self._hot.items(), key=lambda item: (-item[1], item[0]))[:HOTTEST]
        shares = tuple((key, min(1.0, n / self.ids)) for key, n in hottest) if self.ids else ()
        return LookupReading(table[:NAME_MAX], self.ids / self.steps, self.unique / self.steps, shares)


class _ModuleSums:
    """Adds up one module's sampled steps, in the order of ``ModuleReading``."""

    def __init__(self) -> None:
        self.calls = self.output_bytes = 0
        self.forward_s = self.own_s = self.backward_s = 0.0


class GraphSampler:
    """See the top of this file. ``steps`` on the training thread, ``take`` on any."""

    def __init__(self, trainer: Trainer, setting: str, modules: str = "") -> None:
        """Take ``setting``: auto, off, or one step in so many; ``modules``: why these are not measured."""
        self._trainer, self._setting, self._modules = trainer, setting, modules
        self.every = 0 if setting in ("auto", "off") else int(setting)
        self._lock = threading.Lock()  # of what follows
        self._tree: ModuleTree | None = None
        self._sums: dict[str, _ModuleSums] = {}
        self._lookups: dict[str, _Lookups] = {}
        self._steps, self._step_s, self._cost_s = 0, 0.0, 0.0
        self._note = ""
        self._pending: StepRecorder | None = None  # moments of a device that may not have happened
        self._total_s = 0.0  # of all steps since the first sample
        self._reported = 0  # steps that were told
        self._reported_at = 0.0
        self._plans = 0
        self._in_loop = False

    def __repr__(self) -> str:
        return f"<GraphSampler of one step in {self.every or self._setting}, {self._steps} sampled>"

    # ------------------------------------------------------------ the loop

    def steps(self, batches: Iterator[Any]) -> Iterator[Any]:
        """Yield ``batches``; watch what is done with some of them."""
        if self._setting == "off":
            return batches
        return self._watched(batches)

    @contextmanager
    def _loop(self, batches: Iterator[Any]) -> Iterator[None]:
        """Note whether the loop runs: behind it the last readings are reported at once. Close ``batches`` in the
        end."""
        self._in_loop = True
        try:
            with closing(batches) if isinstance(batches, Generator) else nullcontext():
                yield
        finally:
            self._in_loop = False

    def _watched(self, batches: Iterator[Any]) -> Generator[Any]:
        left = min(_FIRST, self.every) if self.every else _FIRST
        since, counted = time.perf_counter(), 0
        with self._loop(batches):
            for batch in batches:
                left -= 1
                counted += 1
                if left > 0:
                    yield batch
                    continue
                began = time.perf_counter()
                recorder = self._begin()
                ready = time.perf_counter()
                with recorder if recorder is not None else nullcontext():
                    yield batch
                ended = time.perf_counter()
                self._end(recorder, ended - ready)
                now = time.perf_counter()
                hooks_s = recorder.hooks_ns * 1e-9 * _WITH_TORCH if recorder is not None else 0.0
                cost_s = (ready - began) + (now - ended) + hooks_s
                left = self._plan(cost_s, now - since, counted)
                since, counted = now, 0

    def _plan(self, cost_s: float, passed_s: float, steps: int) -> int:
        """Return after how many steps the next one is sampled. ``passed_s``: that the last ``steps`` took."""
        with self._lock:
            self._cost_s += cost_s
            self._plans += 1
            self._total_s += passed_s
            if self._setting == "auto":
                step_s = max(1e-9, (passed_s - cost_s) / max(1, steps))
                typical_s = max(cost_s, self._cost_s / self._plans)  # (one cheap sample says little)
                self.every = int(min(_MOST, max(_LEAST, typical_s / (COST_SHARE * step_s))))
            return self.every

    # ------------------------------------------------------------ one sampled step

    def _begin(self) -> StepRecorder | None:
        """Return the recorder of a step that begins; None: its modules cannot be watched."""
        self._settle()
        self._look_at_keys()
        note = self._modules or compiled_words(self._trainer.models)
        tree = self._tree
        if not note and (tree is None or self._steps % _TREE_STEPS == 0):
            tree = ModuleTree(self._trainer.models)
        if not note and (tree is None or tree.device is None):
            note = "modules are not measured: the model is on several devices, or on one that has no clock here"
        with self._lock:
            if note or tree is None:
                self._note = note[:NOTE_MAX]
                return None
            self._tree = tree
        clock = self._trainer.engine.clock
        return StepRecorder(tree, lambda: clock.aside > 0)

    def _end(self, recorder: StepRecorder | None, step_s: float) -> None:
        with self._lock:
            self._steps += 1
            self._step_s += step_s
            if recorder is not None and recorder.failed:
                self._note = recorder.failed[:NOTE_MAX]
            self._pending = recorder
        self._settle()

    def _settle(self) -> None:
        """Add the last sampled step up, once all of its moments can be read."""
        recorder = self._pending
        if recorder is None or not recorder.ready:
            return
        with self._lock:
            self._pending = None
            for call in recorder.calls:
                self._add(recorder, call)

    def _add(self, recorder: StepRecorder, call: ModuleCall) -> None:
        sums = self._sums.setdefault(recorder.tree.known[call.index].path, _ModuleSums())
        forward_s = recorder.forward_s(call)
        sums.calls += 1
        sums.output_bytes += call.output_bytes
        sums.own_s += max(0.0, forward_s - sum(recorder.forward_s(child) for child in call.children))
        above = call.parent
        while above is not None and above.index != call.index:
            above = above.parent
        if above is None:  # (of a module that calls itself the outer call has the time)
            sums.forward_s += forward_s
            sums.backward_s += recorder.backward_s(call)

    def _look_at_keys(self) -> None:
        item = self._trainer.tables.current
        if item is None:
            return
        counts: dict[str, Any] = {}
        for (table, _), known in item.lookups.items():
            found = np.bincount(known.inverse, minlength=len(known.rows.keys))
            counts[table] = counts[table] + found if table in counts else found
        with self._lock:
            for table, found in counts.items():
                if table in self._lookups or len(self._lookups) < TABLES_MAX:
                    self._lookups.setdefault(table, _Lookups()).add(item.found[table].keys, found)

    # ------------------------------------------------------------ what is told

    def take(self) -> GraphReading | None:
        """Return the readings for a beat; None: there is nothing new, or they were told just now."""
        now = time.monotonic()
        soon = self._in_loop and now < self._reported_at + _REPORT_S
        with self._lock:
            if self._steps == self._reported or soon:
                return None
            self._reported, self._reported_at = self._steps, now
            return self._reading()

    def last(self) -> GraphReading | None:
        """Return the readings at the end; None: no step was sampled."""
        self._settle()
        with self._lock:
            return self._reading() if self._steps else None

    def _reading(self) -> GraphReading:
        tree, steps = self._tree, self._steps
        return GraphReading(
            every=self.every,
            steps=steps,
            step_s=self._step_s / steps,
            cost_share=min(1.0, self._cost_s / self._total_s) if self._total_s else 0.0,
            left_out=tree.left_out if tree is not None else 0,
            note=self._note,
            modules=tuple(self._module(i, steps) for i in range(len(tree.known))) if tree is not None else (),
            lookups=tuple(lookups.reading(table) for table, lookups in self._lookups.items()),
        )

    def _module(self, index: int, steps: int) -> ModuleReading:
        assert self._tree is not None
        known = self._tree.known[index]
        sums = self._sums.get(known.path, _ModuleSums())
        return ModuleReading(
            known.path,
            known.kind,
            calls=sums.calls / steps,
            forward_s=sums.forward_s / steps,
            own_s=sums.own_s / steps,
            backward_s=sums.backward_s / steps,
            parameters=known.parameters,
            parameter_bytes=known.parameter_bytes,
            output_bytes=sums.output_bytes / steps,
        )
