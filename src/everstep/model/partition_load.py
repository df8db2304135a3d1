"""Has what a ps measures of the load of its hottest partitions, and how it is shown."""

from __future__ import annotations

from typing import Annotated, Final

import msgspec

from everstep.bounds import Finite, Whole
from everstep.ids import PartitionId, Slot
from everstep.model.graph_readings import Key, Name

ANNOUNCED: Final = 16
"""Partitions of one ps that the master is told of: the hottest."""
KEYS: Final = 3
"""Keys that are named of the hottest one."""
SHOWN: Final = 10
"""Partitions of all ps that are shown."""


class HotKey(msgspec.Struct, frozen=True, array_like=True):
    """Is a key that many requests of one partition ask for.

    - ``table``: name of its table [text]
    - ``key``: of the row [key]
    - ``share``: of the partition's requests that ask for it [share, 0 to 1]
    """

    table: Name
    key: Key
    share: Finite


class PartitionReading(msgspec.Struct, frozen=True, array_like=True):
    """Is what a ps tells of one partition: means of about the last ten seconds, from one request in some.

    - ``partition``: its number [number]
    - ``requests_per_s``: pulls and pushes that touch it [requests/second]
    - ``rows_per_s``: that they pull and push [rows/second]
    - ``bytes_per_s``: of these rows and their keys [bytes/second]
    - ``service_share``: time of the ps that they take, a request's time being divided by rows [seconds/second]
    - ``held_bytes``: of its rows and their index: what a move has to send [bytes]
    - ``keys``: that most of its requests ask for, of the hottest partition only [keys]
    """

    partition: Whole
    requests_per_s: Finite = 0.0
    rows_per_s: Finite = 0.0
    bytes_per_s: Finite = 0.0
    service_share: Finite = 0.0
    held_bytes: Whole = 0
    keys: Annotated[tuple[HotKey, ...], msgspec.Meta(max_length=KEYS)] = ()


Readings = Annotated[tuple[PartitionReading, ...], msgspec.Meta(max_length=ANNOUNCED)]


class PartitionView(msgspec.Struct, frozen=True):
    """Shows one of the hottest partitions of a job.

    - ``partition``: its number [number]
    - ``ps``: that owns it [number]
    - ``requests_per_s``: pulls and pushes that touch it [requests/second]
    - ``rows_per_s``: that they pull and push [rows/second]
    - ``bytes_per_s``: of these rows and their keys [bytes/second]
    - ``service_share``: time of the ps that they take [seconds/second]
    - ``held_bytes``: of its rows and their index [bytes]
    - ``ps_share``: of the rows that its ps is asked for [share, 0 to 1]
    - ``alone``: it has more to do than a ps should have, so that no placement is even [flag]
    - ``keys``: that most of its requests ask for [keys]
    """

    partition: PartitionId
    ps: Slot
    requests_per_s: float = 0.0
    rows_per_s: float = 0.0
    bytes_per_s: float = 0.0
    service_share: float = 0.0
    held_bytes: int = 0
    ps_share: float = 0.0
    alone: bool = False
    keys: tuple[HotKey, ...] = ()
