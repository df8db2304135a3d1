"""Writes the text format of Prometheus, version 0.0.4, filled from the read model. Pure."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from everstep.config.renamed import renamed_line
from everstep.errors import InternalError
from everstep.model.job_view import JobView
from everstep.monitor.names import BY_NAME, METRICS, Metric

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
LABEL_MAX = 200  # characters of a label's value: some come from scripts
SERIES_MAX = 50_000  # of one answer


Key = tuple[str, tuple[str, ...]]


class MetricsPage:
    """Holds values by metric. ``set`` them in any order; ``text`` has them in the order of the table of names.

    ``counted``: counters of the whole job as the pages before had them. They never go back: where samples are taken
    back (every state was lost, a checkpoint was gone back to) Prometheus would take that for a new process, and count
    all samples once more."""

    def __init__(self, counted: dict[Key, float] | None = None) -> None:
        self._counted = counted if counted is not None else {}
        self._values: dict[str, dict[tuple[str, ...], float]] = {}
        self._series = 0

    def set(self, name: str, value: float, *labels: object) -> None:
        """Raises InternalError: no such name, or not its labels. Beyond ``SERIES_MAX`` values are left out."""
        metric = BY_NAME.get(name)
        if metric is None or len(labels) != len(metric.labels):
            raise InternalError(f"metric {name!r} with {len(labels)} labels is not in monitor/names.py")
        if self._series < SERIES_MAX:
            self._series += 1
            key = tuple(str(v)[:LABEL_MAX] for v in labels)
            if metric.kind == "counter" and "slot" not in metric.labels:
                value = self._counted[name, key] = max(value, self._counted.get((name, key), value))
            self._values.setdefault(name, {})[key] = value

    def fill(self, view: JobView) -> None:
        """Fill in every metric, from its field of the view."""
        for metric in METRICS:
            for labels, value in read_metric(view, metric):
                self.set(metric.name, value, *labels)

    def text(self) -> str:
        """Return the whole page. What has an old name stands there once more by that."""
        lines: list[str] = []
        for metric in METRICS:
            values = self._values.get(metric.name)
            if not values:
                continue
            lines += _block(metric, metric.name, metric.help, values)
            if metric.formerly:
                lines += _block(metric, metric.formerly, renamed_line(metric.formerly, metric.name), values)
        return "".join(line + "\n" for line in lines)


# ---------------------------------------------------------------- out of the read model

_PART = re.compile(r"(?P<field>\w*)(\[(?P<roles>[a-z|]*)\]|\{(?P<label>\w+)(:(?P<names>[a-z|]+))?\})?")


def read_metric(view: JobView, metric: Metric) -> Iterator[tuple[tuple[str, ...], float]]:
    """Yield labels (in the metric's order) and value, for each value that its field has. See ``Metric.field``."""
    counts = metric.field.endswith("]")
    counted: Counter[tuple[str, ...]] = Counter()
    if counts and not metric.labels and _exists(view, metric.field):
        counted[()] = 0
    for labels, value in _read(view, metric.field.split("."), {}, metric.labels):
        if value is None or (metric.omit_zero and not value):
            continue
        key = tuple(labels[name] for name in metric.labels)
        if counts:
            counted[key] += 1
        else:
            yield key, value
    yield from counted.items()


def _exists(view: JobView, path: str) -> bool:
    """Return whether the last field of a path is there (with elements or without)."""
    value: Any = view
    for part in path.split("."):
        if value is None:
            return False
        value = getattr(value, part.partition("[")[0])
    return value is not None


def _read(value: Any, path: Sequence[str], labels: dict[str, str], wanted: Sequence[str]) -> Iterator[Any]:
    """Yield (labels, value) of all that lies at ``path`` below ``value``."""
    if value is None or not path:
        yield labels, value
        return
    part = _PART.fullmatch(path[0])
    if part is None:
        raise InternalError(f"{path[0]!r} is no field of the read model, in monitor/names.py")
    field, roles, label, names = part.group("field", "roles", "label", "names")
    if names is not None:
        for name in names.split("|"):
            yield from _read(getattr(value, field + name), path[1:], {**labels, label: name}, wanted)
        return
    inside = getattr(value, field)
    if label is not None:
        for key, item in inside.items():
            yield from _read(item, path[1:], {**labels, label: key}, wanted)
    elif roles is not None:
        for element in inside:
            if roles and (element.role not in roles.split("|") or not getattr(element, "up", True)):
                continue
            own = {name: str(getattr(element, name)) for name in wanted if hasattr(element, name)}
            yield from _read(element, path[1:], {**labels, **own}, wanted)
    else:
        yield from _read(inside, path[1:], labels, wanted)


# ---------------------------------------------------------------- into text


def _block(metric: Metric, name: str, text: str, values: Mapping[tuple[str, ...], float]) -> list[str]:
    """Return the lines of one metric under ``name``."""
    series = [_line(name, metric.labels, labels, value) for labels, value in sorted(values.items())]
    return [f"# HELP {name} {_help(text)}", f"# TYPE {name} {metric.kind}", *series]


def _line(name: str, keys: Sequence[str], labels: Sequence[str], value: float) -> str:
    inside = ",".join(f'{key}="{_label(label)}"' for key, label in zip(keys, labels, strict=True))
    return f"{name}{{{inside}}} {number(value)}" if inside else f"{name} {number(value)}"


def number(value: float) -> str:
    """Write a number as Go reads it."""
    if math.isnan(value):
        return "NaN"
    if math.isinf(value):
        return "+Inf" if value > 0 else "-Inf"
    return str(int(value)) if value == int(value) and abs(value) < 2**53 else repr(float(value))


def _label(text: str) -> str:
    return text.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")


def _help(text: str) -> str:
    return text.replace("\\", r"\\").replace("\n", r"\n")
