"""The text format of Prometheus, version 0.0.4. Pure."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from everstep.config.renamed import renamed_line
from everstep.errors import InternalError
from everstep.monitor.names import BY_NAME, METRICS, Metric

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
LABEL_MAX = 200  # characters of a label's value: some come from scripts
SERIES_MAX = 50_000  # of one answer


Key = tuple[str, tuple[str, ...]]


class MetricsPage:
    """Values by metric. ``set`` them in any order; ``text`` has them in the order of the table of names.

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

    def text(self) -> str:
        lines: list[str] = []
        for metric in METRICS:
            values = self._values.get(metric.name)
            if not values:
                continue
            lines += _block(metric, metric.name, metric.help, values)
            if metric.formerly:
                lines += _block(metric, metric.formerly, renamed_line(metric.formerly, metric.name), values)
        return "".join(line + "\n" for line in lines)


def _block(metric: Metric, name: str, text: str, values: Mapping[tuple[str, ...], float]) -> list[str]:
    """Return the lines of one metric under ``name``."""
    series = [_line(name, metric.labels, labels, value) for labels, value in sorted(values.items())]
    return [f"# HELP {name} {_help(text)}", f"# TYPE {name} {metric.kind}", *series]


def _line(name: str, keys: Sequence[str], labels: Sequence[str], value: float) -> str:
    inside = ",".join(f'{key}="{_label(label)}"' for key, label in zip(keys, labels, strict=True))
    return f"{name}{{{inside}}} {number(value)}" if inside else f"{name} {number(value)}"


def number(value: float) -> str:
    """As Go reads it."""
    if math.isnan(value):
        return "NaN"
    if math.isinf(value):
        return "+Inf" if value > 0 else "-Inf"
    return str(int(value)) if value == int(value) and abs(value) < 2**53 else repr(float(value))


def _label(text: str) -> str:
    return text.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")


def _help(text: str) -> str:
    return text.replace("\\", r"\\").replace("\n", r"\n")


def set_all(page: MetricsPage, name: str, values: Mapping[str, float]) -> None:
    """Of a metric with one label: its values by that."""
    for label, value in values.items():
        page.set(name, value, label)
