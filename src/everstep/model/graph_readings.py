"""Has what is measured of a script's model and of its tables: modules as a tree, and tables with their rows and keys.

A worker measures one step in some (``api.graph_sampler``), a ps one push in some (``ps.row_sampler``). Both tell it
with their beats. The master makes one :class:`GraphView` of all (``monitor.graph_fold``).
"""

from __future__ import annotations

from typing import Annotated, Final

import msgspec

from everstep.bounds import INT63, Finite, Seconds, Whole

MODULES_MAX: Final = 200
"""Modules that a worker tells of; deeper ones count for the module that they are in."""
DEPTH_MAX: Final = 8
"""Levels of the tree of modules, the model itself included."""
TABLES_MAX: Final = 100
HOTTEST: Final = 10
"""Keys that are named of one table."""
NAME_MAX: Final = 200
NOTE_MAX: Final = 400

Key = Annotated[int, msgspec.Meta(ge=-INT63 - 1, le=INT63)]
Name = Annotated[str, msgspec.Meta(max_length=NAME_MAX)]


class ModuleReading(msgspec.Struct, frozen=True, array_like=True):
    """Is one module in the mean sampled step of one worker.

    - ``path``: of the module, as the model names it, behind the model's class [text]
    - ``kind``: its class [text]
    - ``calls``: of it in a step [calls]
    - ``forward_s``: from the begin of its calls to their end, with the modules that it calls [seconds]
    - ``own_s``: of this, outside of modules that it calls [seconds]
    - ``backward_s``: that autograd spent on what these calls did; 0: not known [seconds]
    - ``parameters``: of its own, without those of modules in it [numbers]
    - ``parameter_bytes``: of these [bytes]
    - ``output_bytes``: of the tensors that its calls returned [bytes]
    """

    path: Name
    kind: Name
    calls: Finite = 0.0
    forward_s: Seconds = 0.0
    own_s: Seconds = 0.0
    backward_s: Seconds = 0.0
    parameters: Whole = 0
    parameter_bytes: Whole = 0
    output_bytes: Finite = 0.0


class LookupReading(msgspec.Struct, frozen=True, array_like=True):
    """Is how a worker's batches look one table up, in the mean sampled step.

    - ``table``: its name [text]
    - ``ids``: looked up in a step [ids]
    - ``unique``: different keys among them [keys]
    - ``hottest``: keys that are looked up most, each with its share of all ids [keys and shares]
    """

    table: Name
    ids: Finite
    unique: Finite
    hottest: Annotated[tuple[tuple[Key, Finite], ...], msgspec.Meta(max_length=HOTTEST)] = ()


class GraphReading(msgspec.Struct, frozen=True, array_like=True):
    """Is what one worker tells of its sampled steps.

    - ``every``: one step in so many is sampled now [steps]
    - ``steps``: sampled so far [steps]
    - ``step_s``: that the script's part of a sampled step lasts, mean [seconds]
    - ``cost_share``: of all steps' time that the sampling takes, as the sampler measured [share, 0 to 1]
    - ``left_out``: modules that are too many or too deep, counted for the module that they are in [modules]
    - ``note``: why modules or backward are not measured; "": they are [text]
    - ``modules``: parents before their children [modules]
    - ``lookups``: by table [tables]
    """

    every: Whole = 0
    steps: Whole = 0
    step_s: Seconds = 0.0
    cost_share: Finite = 0.0
    left_out: Whole = 0
    note: Annotated[str, msgspec.Meta(max_length=NOTE_MAX)] = ""
    modules: Annotated[tuple[ModuleReading, ...], msgspec.Meta(max_length=MODULES_MAX)] = ()
    lookups: Annotated[tuple[LookupReading, ...], msgspec.Meta(max_length=TABLES_MAX)] = ()


class RowReading(msgspec.Struct, frozen=True, array_like=True):
    """Is what one ps tells of its part of one table. Counts of keys are of sampled pushes, since the ps began.

    - ``table``: its name [text]
    - ``rows``: that it has now [rows]
    - ``row_bytes``: of one row with its optimizer's state [bytes]
    - ``keys``: in sampled pushes [keys]
    - ``hits``: of these, that had a row before the push [keys]
    - ``admitted``: of these, that had none before and have one after it [keys]
    - ``update_norm``: mean length of the change of a row by a push, of newer pushes [as the values]
    - ``row_norm``: mean length of these rows before [as the values]
    - ``dense``: it holds parameters of the dense part [flag]
    """

    table: Name
    rows: Whole = 0
    row_bytes: Whole = 0
    keys: Whole = 0
    hits: Whole = 0
    admitted: Whole = 0
    update_norm: Finite = 0.0
    row_norm: Finite = 0.0
    dense: bool = False


class ModuleView(msgspec.Struct, frozen=True):
    """Shows one module, mean over the workers' sampled steps.

    - ``module``: its path [text]
    - ``kind``: its class [text]
    - ``depth``: in the tree, from 0 [levels]
    - ``calls``: of it in a step [calls]
    - ``forward_s``: of its calls, with modules in it [seconds]
    - ``own_s``: of this, outside of modules that it calls [seconds]
    - ``backward_s``: of what its calls did; 0: not known [seconds]
    - ``parameters``: with those of modules in it [numbers]
    - ``parameter_bytes``: of these [bytes]
    - ``output_bytes``: of the tensors that its calls return in a step [bytes]
    """

    module: str
    kind: str
    depth: int
    calls: float
    forward_s: float
    own_s: float
    backward_s: float
    parameters: int
    parameter_bytes: int
    output_bytes: float


class TableView(msgspec.Struct, frozen=True):
    """Shows one table, over all ps and workers.

    - ``table``: its name [text]
    - ``rows``: that all ps have [rows]
    - ``bytes``: of these rows, with their optimizer's state [bytes]
    - ``rows_per_s``: that it grows by, lately [rows/second]
    - ``hit_share``: of pushed keys, that had a row before; -1: no push was sampled [share, 0 to 1]
    - ``admitted_share``: of pushed keys without a row, that got one; -1: there were none [share, 0 to 1]
    - ``unique_share``: different keys among the ids of a worker's batch; -1: no reading [share, 0 to 1]
    - ``ids``: that a worker's step looks up [ids]
    - ``update_norm``: mean length of the change of a row by a push [as the values]
    - ``row_norm``: mean length of such a row [as the values]
    - ``hottest``: keys that are looked up most, each with its share of all ids [keys and shares]
    - ``dense``: it holds parameters of the dense part [flag]
    """

    table: str
    rows: int = 0
    bytes: int = 0
    rows_per_s: float = 0.0
    hit_share: float = -1.0
    admitted_share: float = -1.0
    unique_share: float = -1.0
    ids: float = 0.0
    update_norm: float = 0.0
    row_norm: float = 0.0
    hottest: tuple[tuple[int, float], ...] = ()
    dense: bool = False


class GraphView(msgspec.Struct, frozen=True, kw_only=True):
    """Shows the model and the tables of a job.

    - ``workers``: whose readings are in it [processes]
    - ``every``: one step in so many is sampled now, at the worker that samples most [steps]
    - ``steps``: sampled so far, by all workers [steps]
    - ``step_s``: that the script's part of a sampled step lasts, mean [seconds]
    - ``cost_share``: of the steps' time that the sampling takes, at the worker where it is most [share, 0 to 1]
    - ``left_out``: modules that are too many or too deep [modules]
    - ``notes``: why modules or backward are not measured [texts]
    - ``modules``: parents before their children [modules]
    - ``tables``: the largest first [tables]
    """

    workers: int = 0
    every: int = 0
    steps: int = 0
    step_s: float = 0.0
    cost_share: float = 0.0
    left_out: int = 0
    notes: tuple[str, ...] = ()
    modules: tuple[ModuleView, ...] = ()
    tables: tuple[TableView, ...] = ()
