"""Identifiers. Plain ints and strings with names, so that a type checker keeps them apart."""

from typing import NewType

Slot = NewType("Slot", int)
"""Which place of a role a process fills: worker slots 0..n-1, ps slots 0..m-1."""

Incarnation = NewType("Incarnation", int)
"""Grows by one each time a slot is filled by a new process; starts at 1. Older ones are fenced."""

NodeId = NewType("NodeId", str)
"""A machine with one agent; ``node0`` is the one that started the job."""

ShardKey = NewType("ShardKey", int)
"""One shard of one epoch of one dataset, packed in 63 bits (see ``everstep.model.shard``)."""

LeaseNo = NewType("LeaseNo", int)
"""``master incarnation << 40 | counter``: a later lease is a larger number."""

BucketId = NewType("BucketId", int)
TableId = NewType("TableId", int)
"""crc32 of the table's name: the same on every process without asking anyone."""
