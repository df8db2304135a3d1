"""Measures a script at its loop, for ``everstep estimate``: in a worker of a short job with real processes.

The worker trains some batches to warm up, then as many as fit into the window. Then it writes what it saw for the
command, and worker 0 of the first probe reads on without training and counts keys. The command ends the job: nothing of
the script behind its loop runs.
"""

from __future__ import annotations

import os
import resource
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import msgspec
import numpy as np
import torch
from torch import Tensor

from everstep.api.rows import TableParameter
from everstep.api.trainer import Trainer
from everstep.config.spec import JobSpec
from everstep.data.loader import Loader
from everstep.ids import Slot
from everstep.sizing.distinct import DistinctCounter, expected_keys
from everstep.sizing.probe_readings import DistinctKeys, ScriptReading, TableReading
from everstep.storage.atomic import write_atomic

if TYPE_CHECKING:
    from everstep.api.sparse import TableInfo

VARIABLE: Final = "EVERSTEP_PROBE"
"""Its value is a JSON ``ProbeOrder``."""

_WARM_STEPS: Final = 5
_STEPS_MIN: Final = 8  # of a window
_WARM_S: Final = 1.0
_EPOCHS: Final = 100_000  # small data do not end the probe
_SCAN_BATCH: Final = 4096


class ProbeOrder(msgspec.Struct, frozen=True):
    """Says what a worker of a probe shall do. ``folder``: where it writes; ``window_s``: how long it measures;
    ``scan_s``: how long worker 0 reads keys afterwards, 0: not at all; ``first``: train with the first so many samples
    only, again and again, and measure from the second time on, 0: with all."""

    folder: str
    window_s: float = 3.0
    scan_s: float = 0.0
    first: int = 0


_orders = msgspec.json.Decoder(ProbeOrder)


def probe_order() -> ProbeOrder | None:
    """Return what this process shall measure; None: it is no worker of a probe."""
    text = os.environ.get(VARIABLE, "")
    return _orders.decode(text) if text else None


def reading_file(folder: Path, slot: int, scanned: bool) -> Path:
    """Return where worker ``slot`` leaves its reading: at the end of the window, or of the scan."""
    return folder / f"worker-{slot}.{'scanned' if scanned else 'window'}.json"


class _Activations:
    """Counts what autograd keeps for the backward pass of one batch: each piece of memory once, parameters not."""

    def __init__(self, known: set[int]) -> None:
        self.n_bytes = 0
        self._known = known

    def saved(self, tensor: Tensor) -> Tensor:
        with suppress(RuntimeError, NotImplementedError):  # sparse and other tensors without a storage
            storage = tensor.untyped_storage()
            if storage.data_ptr() not in self._known:
                self._known.add(storage.data_ptr())
                self.n_bytes += storage.nbytes()
        return tensor


class Probe:
    """Measures the loop of one worker. See the top of this file."""

    def __init__(self, order: ProbeOrder, spec: JobSpec, slot: Slot, trainer: Trainer, loader: Loader) -> None:
        self._order, self._spec, self._slot, self._trainer, self._loader = order, spec, slot, trainer, loader
        self._epochs = loader.epochs
        loader.epochs = _EPOCHS
        if order.first:
            loader.repeat_first(order.first)
        self._uploaded = {name for name, info in trainer.tables.infos.items() if info.upload is not None}
        self._activation_bytes = 0

    def __repr__(self) -> str:
        return f"<Probe of worker:{self._slot} for {self._order.window_s:g} s>"

    def steps(self, batches: Iterator[Any]) -> Iterator[Any]:
        """Yield batches to train with; end the window in time, and go on."""
        loader, began, begin_at, cpu_s, samples = self._loader, time.monotonic(), 0.0, 0.0, 0
        ends: list[float] = []
        before: dict[str, float] = {}
        for step, batch in enumerate(batches):
            now = time.monotonic()
            if begin_at:
                ends.append(now)
                if now - begin_at >= self._order.window_s and len(ends) > _STEPS_MIN:
                    cpu_s, after = _cpu_s() - cpu_s, self._counters()
                    with self._watched():  # (behind the window: it makes the peak of a process higher at times)
                        yield batch
                    reading = self._reading(begin_at, ends, samples, cpu_s, before, after)
                    self._write(reading, scanned=False)
                    if self._order.scan_s and self._slot == 0:
                        self._write(self._scanned(reading), scanned=True)
                        time.sleep(3600.0)  # the command ends this job
                    yield from batches
                    return
                samples += self._trainer.engine.in_hand
            elif step >= _WARM_STEPS and now - began >= _WARM_S and (not self._order.first or loader.comes_again):
                begin_at, cpu_s, before = now, _cpu_s(), self._counters()
                samples = self._trainer.engine.in_hand
            yield batch

    # ------------------------------------------------------------ what is measured

    def _watched(self) -> Any:
        """Count activations in this batch."""
        known = {p.untyped_storage().data_ptr() for m in self._trainer.models for p in m.parameters()}
        watched = _Activations(known)

        class Counting(torch.autograd.graph.saved_tensors_hooks):
            def __exit__(hooks, *what: Any) -> None:
                super().__exit__(*what)
                self._activation_bytes = watched.n_bytes

        return Counting(watched.saved, lambda tensor: tensor)

    def _counters(self) -> dict[str, float]:
        return {k: v for k, v in self._trainer.engine.beat().readings.items() if k.startswith(("phase.", "bytes_"))}

    def _reading(
        self,
        begin_at: float,
        ends: list[float],
        samples: int,
        cpu_s: float,
        before: dict[str, float],
        after: dict[str, float],
    ) -> ScriptReading:
        parameters = [p for m in self._trainer.models for p in m.parameters() if not isinstance(p, TableParameter)]
        grown = {name: value - before.get(name, 0.0) for name, value in after.items()}
        return ScriptReading(
            samples=self._loader.samples,
            epochs=self._epochs,
            batch=self._loader.batch_size,
            threads=torch.get_num_threads(),
            begin_at=begin_at,
            end_at=ends[-1],
            window_samples=samples,
            window_steps=len(ends),
            step_s=tuple(float(s) for s in np.diff([begin_at, *ends])[-4096:]),
            cpu_s=cpu_s,
            parameters=sum(p.numel() for p in parameters),
            parameter_bytes=sum(p.numel() * p.element_size() for p in parameters),
            optimizer_bytes=_state_bytes(getattr(self._trainer.engine, "inner", ())),
            activation_bytes=self._activation_bytes,
            bytes_out=grown.get("bytes_out", 0.0),
            bytes_in=grown.get("bytes_in", 0.0),
            phases={name.removeprefix("phase."): v for name, v in grown.items() if name.startswith("phase.")},
            partitions=self._spec.partitions,
        )

    def _write(self, reading: ScriptReading, scanned: bool) -> None:
        path = reading_file(Path(self._order.folder), self._slot, scanned)
        write_atomic(path, msgspec.json.encode(reading))

    # ------------------------------------------------------------ tables

    def _scanned(self, reading: ScriptReading) -> ScriptReading:
        """Read the keys of an epoch for as long as the order says, without training."""
        began = time.monotonic()
        counters, rate = self._scan()
        scan_s = time.monotonic() - began
        tables = [self._table(name, info, counters) for name, info in self._trainer.tables.infos.items()]
        for group in self._trainer.tables.dense:
            spec = group.spec
            state = spec.optimizer.state_floats(spec.dim)
            tables.append(TableReading(spec.name, spec.dim, state, dense=True, fixed=group.n_rows))
        return msgspec.structs.replace(reading, tables=tuple(tables), read_samples_per_s=rate, scan_s=scan_s)

    def _scan(self) -> tuple[dict[str, DistinctCounter], float]:
        """Return what was counted by table, and how many samples/s can be read."""
        loader, predictor = self._loader, self._trainer.tables.predictor
        counters: dict[str, DistinctCounter] = {}
        size = max(loader.batch_size, _SCAN_BATCH)
        began = time.monotonic()
        reading_s, at, longest_s = 0.0, 0, 0.0
        while at < loader.samples:
            now = time.monotonic()
            if now - began + longest_s >= self._order.scan_s:
                break
            hi = min(at + size, loader.samples)
            batch = loader.read(0, at, hi)
            reading_s += time.monotonic() - now
            for table, views in predictor.predict(batch):
                keys = torch.cat([view.reshape(-1) for view in views]).to(torch.int64).numpy()
                counters.setdefault(table, DistinctCounter()).add(keys, hi - at)
            at = hi
            longest_s = max(longest_s, time.monotonic() - now)
        return counters, at / reading_s if reading_s > 0 else 0.0

    def _table(self, name: str, info: TableInfo, counters: dict[str, DistinctCounter]) -> TableReading:
        spec = info.spec
        fixed = spec.rows or 0 if name in self._uploaded else 0
        probed = fixed or len(self._trainer.tables.whole.scan(spec)[0])
        counter = counters.get(name)
        if counter is not None:
            keys = expected_keys(counter, self._loader.samples, spec.rows)
        else:  # computed inside of the model: only those of the probe were seen
            seen = min(self._trainer.engine.samples, self._loader.samples)
            top = probed * self._loader.samples / max(1, seen)
            if spec.rows is not None:
                top = min(top, float(spec.rows))
            keys = DistinctKeys(
                probed, (probed * max(probed, top)) ** 0.5, max(probed, top), seen, self._loader.samples
            )
        return TableReading(
            name,
            spec.dim,
            spec.optimizer.state_floats(spec.dim),
            meta=2 if spec.has_life_cycle else 0,
            fixed=fixed,
            vocabulary=spec.rows,
            admit_after=spec.admit_after,
            expires=spec.expire_batches > 0 or spec.expire_s > 0,
            keys=keys,
            probed=probed,
        )


def _cpu_s() -> float:
    return sum(resource.getrusage(resource.RUSAGE_SELF)[:2])


def _state_bytes(optimizers: Any) -> int:
    return sum(
        value.numel() * value.element_size()
        for optimizer in optimizers
        for state in optimizer.state.values()
        for value in state.values()
        if isinstance(value, Tensor)
    )
