"""Names identifiers: plain ints and strings, so that a type checker keeps them apart. Plain ints and strings with
names, so that a type checker keeps them apart."""

from typing import Annotated, NewType

from msgspec import Meta

from everstep.bounds import INT63, MEMBERS_MAX, NameOfNode

Slot = NewType("Slot", Annotated[int, Meta(ge=-1, le=MEMBERS_MAX)])
"""Which place of a role a process fills: worker slots 0..n-1, ps slots 0..m-1. -1: nowhere."""

Incarnation = NewType("Incarnation", Annotated[int, Meta(ge=0, le=1 << 22)])
"""Grows by one each time a slot is filled by a new process; starts at 1. Older ones are fenced."""

NodeId = NewType("NodeId", NameOfNode)
"""A machine with one agent; ``node0`` is the one that started the job."""

ShardKey = NewType("ShardKey", Annotated[int, Meta(ge=0, le=INT63)])
"""One shard of one epoch of one dataset, packed in 63 bits (see ``everstep.model.shard``)."""

LeaseNo = NewType("LeaseNo", Annotated[int, Meta(ge=0, le=INT63)])
"""``master incarnation << 40 | counter``: a later lease is a larger number."""

PartitionId = NewType("PartitionId", Annotated[int, Meta(ge=0, le=(1 << 40) - 1)])
TableId = NewType("TableId", Annotated[int, Meta(ge=0, le=(1 << 32) - 1)])
"""crc32 of the table's name: the same on every process without asking anyone."""
