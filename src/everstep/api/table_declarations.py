"""Declares the tables of a script at the ps: once each, with their first values, and with one optimizer."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import msgspec
import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from everstep.api.batch_table import BatchTable
from everstep.api.dense import FlatGroup
from everstep.api.sparse import TableInfo
from everstep.api.whole_tables import WholeTables
from everstep.errors import InternalError, ScriptError
from everstep.model.table import OptimizerSpec
from everstep.net.messages import Declared
from everstep.tables.client import PsClient


class TableDeclarations:
    """Holds what the script says of its tables: ``infos`` and ``batches`` by name, ``dense`` groups of parameters."""

    def __init__(self, client: PsClient, whole: WholeTables, source: Any) -> None:
        """Take ``source``: who looks rows up (``api/nn.Source``)."""
        self._client, self._whole, self._source = client, whole, source
        self.infos: dict[str, TableInfo] = {}
        self.batches: dict[str, BatchTable] = {}
        self.dense: list[FlatGroup] = []
        self.optimizers: list[torch.optim.Optimizer] = []  # that were given to the job
        self._declared: set[str] = set()

    def __repr__(self) -> str:
        return f"<TableDeclarations {len(self.infos)} sparse, {len(self.dense)} dense>"

    def add(self, infos: Sequence[TableInfo]) -> None:
        """Add tables. Raises ScriptError where one differs from a table of its name, or an optimizer has its weight."""
        given = {id(p) for optimizer in self.optimizers for group in optimizer.param_groups for p in group["params"]}
        for info in infos:
            if id(info.weight) in given:
                raise ScriptError(
                    f"job.optimizer() was given the weight of {info.spec.name!r} before job.sparse() makes it a table: "
                    "call job.sparse first"
                )
        for info in infos:
            known = self.infos.get(info.spec.name)
            if known is not None and known.spec != info.spec:
                raise ScriptError(f"table {info.spec.name!r} exists already and differs: use other module names")
            if any(i.spec.id == info.spec.id and n != info.spec.name for n, i in self.infos.items()):
                raise ScriptError(f"table {info.spec.name!r} has the same id as another table: rename the module")
            self.infos.setdefault(info.spec.name, info)
            if info.spec.name not in self.batches:
                name, read = info.spec.name, partial(self._read_again, info.spec.name)
                self.batches[name] = table = BatchTable(name, info.spec.dim, info.padding, read)
                table.source = self._source
                table.zero_padding = info.padding is not None and info.zero_padding
                table.vocabulary = None if info.spec.has_life_cycle else info.spec.rows
                if info.weight is not None:
                    table.adopt(info.weight)
                for module, parameter in info.tied:
                    table.tie(module, parameter)

    def _read_again(self, name: str, keys: NDArray[np.int64]) -> NDArray[np.float32]:
        """Read rows beside those of the batch, as they are now."""
        self.declare()
        info = self.infos[name]
        values = self._whole.read(info.spec, keys)
        if info.padding is not None and info.zero_padding:
            values[keys == info.padding] = 0.0
        return values

    def set_optimizer(self, name: str, spec: OptimizerSpec) -> None:
        """Set the optimizer of a table, from whoever holds its parameter. Raises ScriptError once it is in use."""
        info = self.infos[name]
        if name in self._declared and info.spec.optimizer != spec:
            raise ScriptError(
                f"job.optimizer() holds the weight of table {name!r}, which is in use already: call it before job.eval "
                "and job.steps"
            )
        info.spec = msgspec.structs.replace(info.spec, optimizer=spec)

    def declare(self) -> None:
        """Make all tables exist at every ps, with their first values; harmless when repeated."""
        new = [i for i in self.infos.values() if i.spec.name not in self._declared]
        groups = [g for g in self.dense if g.spec.name not in self._declared]
        if not new and not groups:
            return
        specs = [i.spec for i in new] + [g.spec for g in groups]
        ticket = self._client.declare(specs)
        ticket.wait()
        while ticket.moved:
            ticket = self._client.declare(specs)
            ticket.wait()
        ready = np.ones(len(specs), dtype=bool)
        for _, answer, _ in ticket.answers:
            if not isinstance(answer, Declared):
                raise InternalError(f"Declare was answered with {answer!r}")
            ready &= np.array(answer.initialised, dtype=bool)
        for info, there in zip(new, ready[: len(new)], strict=True):
            if info.upload is not None:
                if not there:
                    keys = None if info.upload_keys is None else info.upload_keys.numpy()
                    self._whole.put(info.spec, keys, info.upload.contiguous().numpy())
                info.upload = info.upload_keys = None  # the rows live on the ps now
        for group, there in zip(groups, ready[len(new) :], strict=True):
            if not there:
                self._whole.put(group.spec, None, group.initial())
        self._declared |= {s.name for s in specs}

    @property
    def started(self) -> bool:
        """Whether tables exist at the ps: from then on values can not be loaded."""
        return bool(self._declared)

    def export(self, table: str) -> dict[str, Tensor]:
        """Return ``weight`` of a whole vocabulary, or ``keys`` and ``weight`` of the rows that exist."""
        if (freshen := self.batches[table].stale) is not None:
            freshen()
        self.declare()
        info = self.infos[table]
        spec = info.spec
        if spec.rows is not None:
            weight = self._whole.read(spec, np.arange(spec.rows, dtype=np.int64))
            if info.padding is not None and info.zero_padding:
                weight[info.padding] = 0.0
            return {"weight": torch.from_numpy(weight)}
        keys, values, _ = self._whole.scan(spec)
        return {"keys": torch.from_numpy(keys), "weight": torch.from_numpy(values)}

    def restore(self, table: str, state: dict[str, Tensor]) -> None:
        """Begin with these values. Raises ScriptError where the shape differs, or when training has begun."""
        info = self.infos[table]
        spec = info.spec
        weight = state["weight"].detach().to(torch.float32).contiguous()
        if weight.dim() != 2 or weight.shape[1] != spec.dim or (spec.rows is not None and len(weight) != spec.rows):
            raise ScriptError(
                f"table {table!r}: values of shape {tuple(weight.shape)} do not fit "
                f"({'any' if spec.rows is None else spec.rows}, {spec.dim})"
            )
        keys = state.get("keys")
        if keys is not None and (keys.dtype != torch.int64 or keys.shape != weight.shape[:1]):
            raise ScriptError(f"table {table!r}: keys must be int64 of shape ({len(weight)},)")
        if self.started:
            raise ScriptError(f"table {table!r} is in use: load values before the first batch or evaluation")
        info.upload, info.upload_keys = weight, keys
        info.zero_padding = self.batches[table].zero_padding = False
