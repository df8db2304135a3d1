"""The dense part of a checkpoint: of a parameter that another optimizer took over, that one's values count."""

from __future__ import annotations

from everstep.api.optim import SGD
from everstep.model.table import InitSpec, TableSpec
from everstep.protect.export import _age


def test_groups_of_later_optimizers_and_what_was_thawed_later_come_last() -> None:
    names = ["dense/10/0", "dense/0/0/3", "buffers/0", "dense/1/0", "dense/0/1", "dense/0/0"]
    specs = [TableSpec(name, 4, SGD(0.1), InitSpec(), rows=1, dense=True) for name in names]
    found = [spec.name for spec in sorted(specs, key=_age)]
    assert [n for n in found if n != "buffers/0"] == [
        "dense/0/0",
        "dense/0/0/3",
        "dense/0/1",
        "dense/1/0",
        "dense/10/0",
    ]
