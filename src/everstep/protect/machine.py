"""Decides what one ps does about partitions and mirrors, as a pure machine: no sockets, threads, clock or arrays.

Theory
------
The placement says what shall be: who owns each partition, and which mirrors are where. The machine compares it with
what this ps holds and does what is lacking, so every step may be repeated, and nothing depends on which placements were
missed. Five rules:

1. **One source.** A ps takes differences of a partition for its mirrors from one life of one ps only, the partition's
   *source*: the owner by the placement under which the first mirror of it was made here, then whoever sent ``FetchLog``
   under a newer placement. Anything else is refused, and who is refused serves that partition no longer. So an owner
   that was replaced without knowing it can not confirm anything once the new owner has asked *one* of its mirrors.
2. **Level before promoting.** A new owner asks every other mirror of the partition (``FetchLog``: from now on me) for
   what it has beyond its own, applies that, and sends what they lack. A mirror that is not complete takes no part; its
   ps throws it away and builds it anew whenever the owner of one of its members has changed. For that, ps that keep one
   of several mirrors of a partition keep its newest differences (the retained log) until the owner says that all
   mirrors have them.
3. **The living owner hands over.** When the old owner lives, the new one first asks it to (``TransferOwnership``): it
stopped
   serving when it heard of the placement, and answers once all its mirrors have confirmed everything. It keeps the
   partition until the new owner has it (``TransferOwnership.done``).
4. **Contents in order.** A mirror that is not complete wishes for the contents of each member (``FetchContents``). They
go
   through the owner's outbox, in order with the differences; a wish has a number, and contents that belong to
   another one are ignored. MARKS ends a full sync; a mirror is complete when all members have ended theirs.
5. **Reconstructing.** A partition whose only mirror here has other members too is recovered from it: the living
members'
   owners send their contents once more (``FetchContents`` "fold"), which takes them out of a copy of the mirror; two
   lost members of one stripe need the rest of the other row as well (``FetchContents`` "other" to its ps).
6. **Serving while rebuilding.** Which rows a reconstructed partition has is known long before the rows are. From then
on it answers row
   by row, pushes too: its differences go to its mirrors like any other's, also to the one it is being folded from,
   where they do not concern what is left of the members. Rows that somebody waits for are folded out of turn
   (``demand``). A fold that has to begin anew drops the partition, and waits until all mirrors have what it made: it
   comes back with it.
7. **Inconsistent.** A mirror that lacks a difference, whatever the reason, is worth nothing and harms nobody: it is
thrown away
   for good, the master hears of it (``inconsistent``) and makes another one, which begins with contents like any other.

Driving it
----------
Inputs are ``place``, ``fetch_contents``, ``fetch_log``, ``hand_over`` (messages of other ps; they return the answer),
``answered`` (of what ``asks`` said), ``loaded`` and ``settle``; afterwards carry out ``take_actions`` in order.
``append`` may run while ``append`` of another sender runs, never at the same time as anything else; afterwards call
``settle`` if ``dirty``. What ``asks`` returns is to be sent, and sent again until it is no longer there; the peer may
be this ps itself. Call ``sync`` (one piece of contents) while it returns true and the streams are not too full. Between
the store's outbox and the peers are the ``Streams``, of which the machine sets the routes.
"""

from __future__ import annotations

import struct
from collections import Counter, deque
from collections.abc import MutableMapping, Sequence
from enum import StrEnum
from typing import Protocol

import msgspec

from everstep.ids import Incarnation, PartitionId, Slot
from everstep.model.placement import Mirror, Placement
from everstep.model.reasons import Arrival
from everstep.model.snapshot import Holdings
from everstep.net.messages import (
    Append,
    Appended,
    DataAnswer,
    FetchContents,
    FetchLog,
    LogFetched,
    LogTaken,
    Moved,
    OwnershipTransferred,
    StreamEntry,
    TransferOwnership,
)
from everstep.protect.replication import AppendCode, Batch, Blob, Flow, PeerKey, StreamItem, StreamKind, SyncTarget
from everstep.protect.retained_log import PythonRetainedLog, RetainedLog

REST = PartitionId(0xFFFFFFFF)
"""In place of a partition: what is left of a row of a stripe when its living members are folded out of it."""

DEMAND_SLOTS = 1 << 14
"""Slots of one demand, at most: a FetchContents is a header, and headers are small."""


def _slots(encoded: bytes) -> tuple[int, ...]:
    """Read slots; ValueError: not whole numbers of 32 bits, or too many."""
    if len(encoded) % 4 or len(encoded) > 4 * DEMAND_SLOTS:
        raise ValueError(f"{len(encoded)} bytes of slots: at most {DEMAND_SLOTS} of 4 bytes")
    return struct.unpack(f"<{len(encoded) // 4}I", encoded)


# ---------------------------------------------------------------- what it works on


class Port(Protocol):
    """Is the store, as far as the machine needs it (see everstep.native). A blob is opaque."""

    def tables(self) -> Sequence[int]:
        """Return the ids of all declared tables; nobody declares one while a step of the machine runs."""

    def own(self, partition: PartitionId) -> None:
        """It begins here, empty."""

    def protect(self, partition: PartitionId, on: bool) -> None: ...
    def seq(self, partition: PartitionId) -> int: ...
    def hand_over(self, partition: PartitionId) -> int:
        """Serve it no longer; contents stay. Its last seq. Harmless when repeated."""

    def resume(self, partition: PartitionId) -> None:
        """Serve it again after ``hand_over``."""

    def drop(self, partition: PartitionId) -> None: ...
    def flush(self, partition: PartitionId) -> None:
        """Append what its mirrors were not told yet to the outbox, as one difference (protect: lag). The others of
        these methods that read a partition for its mirrors, or end its service, do so by themselves; ``drop`` not."""

    def ticket(self) -> int:
        """Return how many entries were appended to the outbox so far."""

    def emit(self, partition: PartitionId, kind: StreamKind, table: int, lo: int) -> int:
        """Put a piece of contents, from slot ``lo`` on, into the outbox. Where the next begins; -1: it was the last."""

    def emit_slots(self, partition: PartitionId, table: int, slots: Sequence[int]) -> None:
        """Emit the contents of these slots alone, as one entry SOME."""

    def emit_marks(self, partition: PartitionId) -> None: ...
    def keep(self, blob: Blob) -> Blob:
        """Return a copy that outlives the message it came with."""

    def size(self, blob: Blob) -> int:
        """Return the size in bytes."""

    def mirror_make(self, mirror: int, members: Sequence[PartitionId], row: int) -> None: ...
    def mirror_drop(self, mirror: int) -> None: ...
    def mirror_apply(self, mirror: int, blob: Blob) -> int:
        """Apply a blob to a mirror; return an ``AppendCode``."""

    def mirror_seq(self, mirror: int, partition: PartitionId) -> int:
        """Return the member's newest seq there."""

    def mirror_complete(self, mirror: int) -> bool: ...
    def promote(self, mirror: int, partition: PartitionId) -> None:
        """Make the mirror, of this partition alone, the partition; the mirror is gone."""

    def recover_begin(self, mirror: int, lost: Sequence[PartitionId], here: Sequence[PartitionId]) -> None: ...
    def recover_fold(self, mirror: int, blob: Blob) -> int | None:
        """``AppendCode.GAP``: something before it is lacking, nothing was folded."""

    def recover_other(self, mirror: int, blob: Blob) -> int | None:
        """Do as ``recover_fold`` does."""

    def recover_heads(self, mirror: int) -> bool:
        """Return whether the partitions that are rebuilt here are in the store already, and answer for every row that
        is back."""

    def recover_emit_slots(self, mirror: int, table: int, slots: Sequence[int]) -> tuple[Blob, Sequence[int]]:
        """Return what is left of those of these slots that are folded, and which these are; none: nothing to send."""

    def recover_emit(self, mirror: int, kind: StreamKind, table: int, lo: int) -> tuple[Blob, int]:
        """Return a piece of what is left of the row; where the next begins, -1: that was the last of this table,
        ``lo``: it is not folded yet."""

    def recover_end(self, mirror: int, abort: bool) -> None:
        """End the recovery: if it is not aborted, the partitions that were to be rebuilt here are owned. The mirror
        stays."""


# ---------------------------------------------------------------- what it wants done


class MirrorAction(msgspec.Struct, frozen=True, gc=False):
    """Is the base of what the machine wants done, in order."""


class Acquired(MirrorAction, frozen=True, gc=False):
    """``partition`` is served here from now on. ``how`` REBUILT, early: rows are still to come."""

    partition: PartitionId
    how: Arrival


class PartitionRebuilt(MirrorAction, frozen=True, gc=False):
    """``partition``, which was taken early, has all its rows."""

    partition: PartitionId


class Released(MirrorAction, frozen=True, gc=False):
    """``partition`` is not served here any more; ``seq``: its last."""

    partition: PartitionId
    seq: int


class LoadSnapshot(MirrorAction, frozen=True, gc=False):
    """Load ``partition`` from checkpoint ``checkpoint``, then call ``loaded``, also when it came to nothing. One at a
    time for each partition: until ``loaded``, nothing else is done about it."""

    partition: PartitionId
    checkpoint: int


class ReportProgress(MirrorAction, frozen=True, gc=False):
    """``ready`` or ``complete`` have more than before: tell the master."""


class Stuck(MirrorAction, frozen=True, gc=False):
    """The placement gives this ps a partition that it has no way to get (see ``stuck``)."""

    partition: PartitionId
    why: str


class MirrorDiscarded(MirrorAction, frozen=True, gc=False):
    """``mirror`` is thrown away, or begins anew with what it was about, for people: ``why``."""

    mirror: int
    why: str


class Ask(msgspec.Struct, frozen=True, gc=False):
    """Is what to send to ``peer`` (may be this ps), until ``asks`` says it no longer."""

    peer: PeerKey
    request: FetchContents | FetchLog | TransferOwnership


# ---------------------------------------------------------------- state


class MirrorState(StrEnum):
    SERVING = "serving"
    FENCED = "fenced"  # another ps owns it, or will: kept until that one has it


class _Source(msgspec.Struct):
    """Says whose differences of a partition are taken, and by which placement."""

    version: int
    key: PeerKey


class _Fenced(msgspec.Struct):
    """Says when a partition was fenced: the outbox then, the routing of the placement, and who got it (0, None: we were
    refused by a mirror, under a placement that did not reach us)."""

    ticket: int
    routing: int
    to: PeerKey | None


class _Demand(msgspec.Struct):
    """Is rows to be reconstructed out of turn. ``owed``: who was not asked for them yet; REST: the ps of the other
    row."""

    table: int
    slots: bytes
    owed: set[PartitionId]


class _Recovery(msgspec.Struct):
    """Holds the living members of a mirror being reconstructed out of a copy of it."""

    lost: tuple[PartitionId, ...]
    here: bool  # the lost ones are rebuilt here; else the rest is for ``asker``
    owners: dict[PartitionId, PeerKey]  # of the living members
    sync: int
    other: tuple[int, PeerKey] | None = None  # (sweep, ps of the other row), where two are lost
    folded: set[PartitionId] = msgspec.field(default_factory=set)
    taken: set[PartitionId] = msgspec.field(default_factory=set)
    other_level: bool = False  # its ps has confirmed all differences of the lost ones that were owed to it
    other_taken: bool = False
    other_done: bool = False
    asker: SyncTarget | None = None
    emit: list[tuple[StreamKind, int]] = msgspec.field(default_factory=list)  # what is still to be sent of the rest
    emit_at: int = 0
    all_folded: bool = False  # of the rest for ``asker``: its bodies are in ``emit``
    serves_rows: bool = False  # the lost ones answer row by row
    demands: list[_Demand] = msgspec.field(default_factory=list)
    demanded: dict[int, set[int]] = msgspec.field(default_factory=dict)  # table -> slots, ever
    promised: dict[int, set[int]] = msgspec.field(default_factory=dict)  # of these ``asker`` gets the rest out of turn
    inconsistent: bool = False  # contents came that do not go on from those before: everything is to be swept again


class _HeldMirror(msgspec.Struct):
    """Is a mirror that is here."""

    mirror: Mirror
    sync: int
    owners: dict[PartitionId, PeerKey]  # of the members, when it was begun
    complete: bool = False
    synced: set[PartitionId] = msgspec.field(default_factory=set)
    taken: set[PartitionId] = msgspec.field(default_factory=set)
    recovery: _Recovery | None = None
    inconsistent: str = ""  # why it is to be thrown away


class _Gain(msgspec.Struct):
    """Is a partition on its way here, under one placement."""

    version: int
    handed: bool = False
    levelling: bool = False
    retained: dict[int, int] = msgspec.field(default_factory=dict)  # other mirror -> its seq, -1: none to be had
    level: bool = False
    loading: bool = False
    stuck: bool = False


class _FullSync(msgspec.Struct):
    """Is the contents of one partition on their way into the outbox."""

    targets: list[SyncTarget]
    begun: bool = False
    ticket: int = 0  # the outbox's when it began
    todo: list[tuple[StreamKind, int]] = msgspec.field(default_factory=list)
    tables: set[int] = msgspec.field(default_factory=set)
    lo: int = 0
    bodies: bool = False  # some are on their way
    folds: bool = False  # a lost partition is rebuilt with them

    @property
    def heads(self) -> bool:
        """Return whether it is still to say which rows there are."""
        return not self.begun or bool(self.todo and self.todo[0][0] is StreamKind.HEADS)


class Machine:
    """See the module's docstring."""

    def __init__(
        self,
        slot: Slot,
        incarnation: Incarnation,
        port: Port,
        streams: Flow,
        received: MutableMapping[PeerKey, tuple[int, int]] | None = None,
        retained: RetainedLog | None = None,
    ) -> None:
        """Take ``received`` and ``retained``: where to keep how far each sender's stream has come, and the newest
        differences of partitions with several mirrors, for whoever takes entries without us."""
        self.me: PeerKey = (slot, incarnation)
        self.port, self.streams = port, streams
        # ``mirror_apply_many(mirrors, blobs, which)`` of the port, if any: blobs[which[i]] to mirrors[i], in order.
        self._apply_many = getattr(port, "mirror_apply_many", self._one_by_one)
        self._several: set[PartitionId] = set()  # more than one mirror of it may have to be brought to the same point
        self.placement: Placement | None = None
        self._lives: dict[Slot, PeerKey] = {}  # of the ps that the placement has
        self.partitions: dict[PartitionId, MirrorState] = {}
        self.gained: dict[PartitionId, tuple[int, Arrival]] = {}  # partition -> version and how it came
        self.dirty = False
        self.arrived = False  # rows that were demanded; whoever waits for them resets it
        self._served_while_rebuilt: set[PartitionId] = set()
        self._ended: dict[PartitionId, int] = {}  # were early, dropped: the outbox's ticket then
        self._mirrors: dict[int, _HeldMirror] = {}
        self._by_partition: dict[PartitionId, list[int]] = {}  # mirrors here
        self._sources: dict[PartitionId, _Source] = {}
        self._retained: RetainedLog = PythonRetainedLog() if retained is None else retained
        # By sender: the stream, and the next number in it.
        self._received: MutableMapping[PeerKey, tuple[int, int]] = {} if received is None else received
        self._gains: dict[PartitionId, _Gain] = {}
        self._loads: set[PartitionId] = set()  # snapshots on their way into the store, wanted or not
        self._since: dict[PartitionId, int] = {}  # the outbox's ticket when it began to be served
        self._used: set[int] = set()  # mirrors that became partitions
        self.inconsistent: set[int] = set()
        """Mirrors that the placement still names and that must be made again: thrown away here, or at another ps and
        beyond being brought to the same point as ours."""
        self._fenced: dict[PartitionId, _Fenced] = {}
        # What the master was told to be asked for: complete mirrors, partitions that came, mirrors that are torn.
        self._reported: tuple[frozenset[int], frozenset[tuple[PartitionId, tuple[int, str]]], frozenset[int]]
        self._reported = (frozenset(), frozenset(), frozenset())
        self._goodbyes: dict[PartitionId, PeerKey] = {}
        self._syncs: dict[PartitionId, deque[_FullSync]] = {}
        self._wishes: set[tuple[PeerKey, int, int, PartitionId]] = set()
        self._next_sync = 1
        self._restart = False
        self._actions: list[MirrorAction] = []

    def __repr__(self) -> str:
        owned = len(self.partitions)
        return f"<Machine ps:{self.me[0]} #{self.me[1]} v{self.version} {owned} partitions, {self._mirrors}>"

    # ------------------------------------------------------------ looking

    @property
    def version(self) -> int:
        return self.placement.version if self.placement is not None else 0

    def serves(self, partition: PartitionId) -> bool:
        return self.partitions.get(partition) is MirrorState.SERVING

    def answers(self, partition: PartitionId) -> bool:
        """Return whether pulls and pushes of it are answered, if not for every row at once."""
        return self.serves(partition) or partition in self._served_while_rebuilt

    def keeps_for_next_owner(self, partition: PartitionId) -> bool:
        """Return whether it is fenced here, and all its contents are kept until the next owner has them."""
        return self.partitions.get(partition) is MirrorState.FENCED

    @property
    def answering(self) -> bool:
        """Return whether all partitions that the placement gives to this ps answer."""
        return self.placement is not None and self._gains.keys() <= self._served_while_rebuilt

    @property
    def serving(self) -> list[PartitionId]:
        return sorted(b for b, s in self.partitions.items() if s is MirrorState.SERVING)

    @property
    def lacking(self) -> list[PartitionId]:
        """Return the partitions that the placement gives to this ps and that it does not serve yet."""
        return sorted(self._gains)

    @property
    def stuck(self) -> tuple[PartitionId, ...]:
        """Return those of these partitions that there is no way to get; the master has to find another one."""
        return tuple(sorted(b for b, gain in self._gains.items() if gain.stuck))

    def awaits_snapshot(self, partition: PartitionId, checkpoint: int) -> bool:
        """Return whether a load that is under way is still of any use."""
        return partition in self._gains and self._snapshot(partition) == checkpoint

    @property
    def complete(self) -> list[int]:
        """Return the mirrors that have everything."""
        return sorted(m for m, held in self._mirrors.items() if held.complete)

    @property
    def rebuilding(self) -> bool:
        """Return whether a partition is being recovered here."""
        return any(h.recovery is not None and h.recovery.here for h in self._mirrors.values())

    @property
    def unheard(self) -> bool:
        """Return whether the store may own partitions whose changes no mirror hears of yet: what it does to all must
        wait."""
        return any(
            h.recovery is not None and h.recovery.here and not h.recovery.serves_rows for h in self._mirrors.values()
        )

    @property
    def syncing(self) -> int:
        """Return how many partitions' contents are on their way out, and recoveries under way here."""
        return len(self._syncs) + len(self._ended) + sum(h.recovery is not None for h in self._mirrors.values())

    def ready(self) -> list[tuple[int, Arrival, tuple[PartitionId, ...]]]:
        """Return (placement version, how, partitions) of all partitions that came here by a placement and are whole."""
        found: dict[tuple[int, Arrival], list[PartitionId]] = {}
        for partition, key in sorted(self.gained.items()):
            found.setdefault(key, []).append(partition)
        return [(version, how, tuple(partitions)) for (version, how), partitions in found.items()]

    def holdings(self) -> Holdings:
        return Holdings(
            partitions=tuple(self.serving),
            mirrors=tuple(self.complete),
            placement=self.version,
            incarnation=self.me[1],
            slot=self.me[0],
        )

    def take_actions(self) -> list[MirrorAction]:
        actions, self._actions = self._actions, []
        return actions

    # ------------------------------------------------------------ the placement

    def place(self, placement: Placement) -> None:
        """A placement came. An older one, or the same again, changes nothing."""
        if placement.version <= self.version:
            return
        self._discard_inconsistent()
        before, self.placement = self.placement, placement
        self._lives = {s.slot: (s.slot, s.incarnation) for s in placement.servers}
        members = [b for m in placement.mirrors for b in m.members]
        self._several = {b for b, n in Counter(members).items() if n > 1}
        mine = set(placement.owned_by(self.me[0])) if self._alive(self.me) else set()
        for partition in [b for b, s in self.partitions.items() if s is MirrorState.SERVING and b not in mine]:
            self._fence(partition)
        for partition in [b for b in self._gains if b not in mine]:
            del self._gains[partition]
        for partition, fenced in self._fenced.items():
            if not fenced.routing and partition not in mine:
                fenced.routing, fenced.to = placement.route, self._owner(partition)
        same = before is not None and before.route == placement.route
        for partition in mine:
            if not self.serves(partition):
                # What was done for it goes on where owners are the same; its snapshot may be another one.
                gain = self._gains.get(partition) if same or partition in self._served_while_rebuilt else None
                self._gains[partition] = gain if gain is not None else _Gain(placement.version)
                self._gains[partition].loading = False
            elif before is not None and (
                placement.version > before.version + 1 or (not same and self._snapshot(partition))
            ):
                # It may have been given away and back meanwhile, or was whole before the master heard of it and ordered
                # it anew: the master waits to hear that it is here.
                how = self.gained[partition][1] if partition in self.gained else Arrival.KEPT
                self.gained[partition] = (placement.version, how)
        self._keep_mirrors(placement)
        self.streams.live({(s.slot, s.incarnation) for s in placement.servers}, placement.version)
        for partition in list(self._goodbyes):
            if not self._alive(self._goodbyes[partition]):
                del self._goodbyes[partition]
        for peer in [p for p in self._received if not self._alive(p)]:
            del self._received[peer]
        self._wishes = {w for w in self._wishes if self._alive(w[0])}
        self._route()
        self.settle()

    def _alive(self, peer: PeerKey) -> bool:
        return self._lives.get(peer[0]) == peer

    def _key(self, slot: Slot) -> PeerKey | None:
        """Return the present life of a slot, by the placement."""
        return self._lives.get(slot)

    def _owner(self, partition: PartitionId) -> PeerKey:
        assert self.placement is not None
        slot = self.placement.owner[partition]
        return self._key(slot) or (slot, Incarnation(-1))

    def _fence(self, partition: PartitionId) -> None:
        """Serve it no longer; its mirrors still get what is on its way."""
        seq = self.port.hand_over(partition)
        self.partitions[partition] = MirrorState.FENCED
        self.gained.pop(partition, None)
        owner = self._owner(partition)
        routing = self.placement.route if self.placement is not None and owner != self.me else 0
        self._fenced[partition] = _Fenced(self.port.ticket(), routing, owner if owner != self.me else None)
        self._syncs.pop(partition, None)
        self.streams.end_syncs(partition)
        self._wishes = {w for w in self._wishes if w[3] != partition}
        self._actions.append(Released(partition, seq))

    def _drop(self, partition: PartitionId) -> None:
        self.port.drop(partition)
        del self.partitions[partition]
        self._fenced.pop(partition, None)
        self._since.pop(partition, None)
        self.streams.routes.pop(partition, None)

    def _flushed(self, partition: PartitionId) -> bool:
        """Return whether all that a fenced partition ever sent is confirmed, or refused."""
        return self.streams.next_ticket >= self._fenced[partition].ticket and not self.streams.owes(partition)

    def may_hand_over(self, partition: PartitionId) -> bool:
        """Return whether a fenced partition's mirrors have all of it. Of others: True."""
        return partition not in self._fenced or self._flushed(partition)

    def _route(self) -> None:
        """Route differences: of what is served to all mirrors of the placement; of what is fenced, where they went."""
        assert self.placement is not None
        routes = self.streams.routes
        peers: dict[PartitionId, dict[PeerKey, None]] = {
            b: {} for b in sorted({*self.serving, *self._served_while_rebuilt})
        }
        for mirror in self.placement.mirrors:
            at = self._key(mirror.at)
            for partition in mirror.members:
                if at is not None and partition in peers and mirror.id not in self._used:
                    peers[partition][at] = None
        for partition, to in peers.items():
            if bool(to) != bool(routes.get(partition)):
                self.port.protect(partition, bool(to))
            if to:
                routes[partition] = tuple(to)
            else:
                routes.pop(partition, None)
        for partition, state in self.partitions.items():
            if state is MirrorState.FENCED:
                routes[partition] = tuple(p for p in routes.get(partition, ()) if self._alive(p))

    def _clear_away(self) -> None:
        """Drop fenced partitions that went on to yet another owner: that one does not come back for them."""
        assert self.placement is not None
        for partition in [b for b, s in self.partitions.items() if s is MirrorState.FENCED and b not in self._gains]:
            if self.placement.route > self._fenced[partition].routing > 0 and self._flushed(partition):
                self._drop(partition)
        for partition in [b for b in self._ended if self._confirmed(b)]:
            del self._ended[partition]
            if partition not in self.partitions and partition not in self._served_while_rebuilt:
                self.streams.routes.pop(partition, None)

    # ------------------------------------------------------------ mirrors that are here

    def _keep_mirrors(self, placement: Placement) -> None:
        wanted = {m.id: m for m in placement.mirrors_at(self.me[0])} if self._alive(self.me) else {}
        self.inconsistent &= {m.id for m in placement.mirrors}  # ids are never used again
        for id_ in [i for i in self._mirrors if i not in wanted]:
            # Also one from which a partition could be got: its owner may have confirmed pushes without it since.
            self._forget(id_)
        self._index()
        # With no complete mirror of a partition here, nobody can have levelled it: the owner is its source.
        for id_, mirror in wanted.items():
            if id_ not in self._mirrors and id_ not in self._used and id_ not in self.inconsistent:
                self._make(mirror)
        self._index()
        for partition, ids in self._by_partition.items():
            source, owner = self._sources.get(partition), self._owner(partition)
            if source is None or (source.key != owner and not any(self._mirrors[i].complete for i in ids)):
                self._sources[partition] = _Source(placement.version, owner)
                self._retained.drop(partition)
        for held in list(self._mirrors.values()):
            if not held.complete and held.owners != self._owners(held.mirror):
                self._forget(held.mirror.id)
                self._make(held.mirror)
        self._index()

    def _owners(self, mirror: Mirror) -> dict[PartitionId, PeerKey]:
        return {b: self._owner(b) for b in mirror.members}

    def _make(self, mirror: Mirror) -> None:
        self.port.mirror_make(mirror.id, mirror.members, mirror.row)
        self._mirrors[mirror.id] = _HeldMirror(mirror, self._wish(), self._owners(mirror))

    def _wish(self) -> int:
        self._next_sync += 1
        return self._next_sync - 1

    def _forget(self, mirror: int) -> None:
        if self._mirrors[mirror].recovery is not None:
            self._abort(self._mirrors[mirror])
        del self._mirrors[mirror]
        self.port.mirror_drop(mirror)

    def mark_inconsistent(self, mirror: int, why: str) -> None:
        """A complete mirror here is not to be trusted any more. Afterwards: ``dirty``."""
        held = self._mirrors.get(mirror)
        if held is not None and held.complete:
            self._mark_inconsistent(held, why)

    def _mark_inconsistent(self, held: _HeldMirror, why: str) -> None:
        """It lacks something: from now on it takes no part, and is thrown away as soon as nobody appends."""
        held.complete, held.inconsistent = False, held.inconsistent or why
        self.dirty = True

    def _discard_inconsistent(self) -> None:
        inconsistent = [(id_, held.inconsistent) for id_, held in self._mirrors.items() if held.inconsistent]
        for id_, why in inconsistent:
            self._actions.append(MirrorDiscarded(id_, f"mirror {id_} is thrown away, and made again: {why}"))
            self._forget(id_)
            self.inconsistent.add(id_)
        if inconsistent:
            self._index()

    def _index(self) -> None:
        self._by_partition = {}
        for id_, held in sorted(self._mirrors.items()):
            for partition in held.mirror.members:
                self._by_partition.setdefault(partition, []).append(id_)
        for partition in [b for b in self._sources if b not in self._by_partition]:
            del self._sources[partition]
            self._retained.drop(partition)

    # ------------------------------------------------------------ differences and contents come in

    def followed(self) -> list[tuple[PartitionId, PeerKey, list[int], bool]]:
        """Return (partition, source, mirrors here, whether differences are kept) of which ``append`` does nothing with
        differences, the next in order, but apply them, and keep them. Good until the machine changes."""
        placement = self.placement
        if placement is None:
            return []
        return [
            (partition, self._sources[partition].key, ids, partition in self._several)
            for partition, ids in self._by_partition.items()
            if partition in self._sources and self._alive(self._sources[partition].key)
        ]

    def append(self, request: Append, blobs: Sequence[Blob]) -> Appended | Moved:
        """Take in entries of a peer's stream. Two of one sender never at once."""
        placement = self.placement
        if placement is None or request.version > placement.version:
            return Moved(self.version)
        sender = (request.sender, request.incarnation)
        stream, next_number = self._received.get(sender, (0, 0))
        if request.stream < stream or not self._alive(sender):
            return Appended(bytes([AppendCode.REFUSED] * len(request.entries)))
        if request.stream > stream:
            next_number = 0
            self._received[sender] = (request.stream, 0)
        if request.first > next_number:
            raise ValueError(f"ps:{sender[0]} sends entry {request.first} of its stream, {next_number} was to come")
        codes = bytearray(len(request.entries))
        run: list[tuple[int, int]] = []  # differences to be applied together: (entry, mirror)
        for i, entry in enumerate(request.entries):
            mirror, again = request.mirrors[i], request.first + i < next_number
            source = self._sources.get(entry.partition)
            if entry.kind == StreamKind.CHANGE and not again and source is not None and source.key == sender:
                codes[i] = AppendCode.NO_MIRROR
                run += [(i, id_) for id_ in self._by_partition.get(entry.partition, ()) if not mirror or id_ == mirror]
                continue
            self._apply(run, request, blobs, codes)
            run.clear()
            codes[i] = self._take(sender, entry, mirror, blobs[i], again)
            if not again:
                self._received[sender] = (request.stream, request.first + i + 1)
        self._apply(run, request, blobs, codes)
        self._received[sender] = (request.stream, max(next_number, request.first + len(codes)))
        for partition, seq in request.confirmed:
            source = self._sources.get(partition)
            if source is not None and source.key == sender:
                self._retained.confirm(partition, seq)
        return Appended(bytes(codes))

    def _take(self, sender: PeerKey, entry: StreamEntry, mirror: int, blob: Blob, again: bool) -> AppendCode:
        if entry.partition == REST:
            return self._take_rest(entry, mirror, blob, again)
        source = self._sources.get(entry.partition)
        if source is None or source.key != sender:
            if source is None and self._owner(entry.partition) == sender:
                return AppendCode.NO_MIRROR
            return AppendCode.REFUSED
        if again:
            return AppendCode.REPEAT
        return self._take_contents(entry, mirror, blob)

    def _apply(self, run: Sequence[tuple[int, int]], request: Append, blobs: Sequence[Blob], codes: bytearray) -> None:
        """Apply differences to mirrors; set the entries' codes."""
        if not run:
            return
        for (i, id_), done in zip(
            run, self._apply_many([id_ for _, id_ in run], blobs, [i for i, _ in run]), strict=True
        ):
            entry, held = request.entries[i], self._mirrors[id_]
            if held.inconsistent:
                continue  # nobody counts on it any more: as where no mirror is
            if done == AppendCode.GAP:
                if held.complete:
                    at = self.port.mirror_seq(id_, entry.partition)
                    self._mark_inconsistent(
                        held, f"differences of partition {entry.partition} between {at} and {entry.seq} never came"
                    )
                    continue
                done = AppendCode.APPLIED  # what is still to be swept has it
            if codes[i] != AppendCode.APPLIED:
                codes[i] = done
                if done == AppendCode.APPLIED and entry.partition in self._several:
                    self._retained.keep(entry.partition, entry.seq, self.port.keep(blobs[i]))

    def _one_by_one(self, mirrors: Sequence[int], blobs: Sequence[Blob], which: Sequence[int]) -> Sequence[int]:
        return [self.port.mirror_apply(mirror, blobs[i]) for mirror, i in zip(mirrors, which, strict=True)]

    def _take_contents(self, entry: StreamEntry, mirror: int, blob: Blob) -> AppendCode:
        held = self._mirrors.get(mirror)
        if held is None or held.inconsistent or entry.partition not in held.mirror.members:
            return AppendCode.NO_MIRROR
        recovery = held.recovery
        if recovery is not None and entry.sync == recovery.sync:
            self.arrived = self.arrived or entry.kind == StreamKind.SOME
            if entry.partition in recovery.folded or entry.partition in recovery.lost:
                return AppendCode.REPEAT
            if self.port.recover_fold(mirror, blob) == AppendCode.GAP:
                recovery.inconsistent = self.dirty = True
            elif entry.kind == StreamKind.MARKS:
                recovery.folded.add(entry.partition)
                self.dirty = True
            self._look_at_heads(mirror, recovery)
            return AppendCode.APPLIED
        if entry.kind == StreamKind.SOME:
            return AppendCode.REPEAT
        if held.complete or entry.sync != held.sync or entry.partition in held.synced:
            return AppendCode.REPEAT
        code = AppendCode(self.port.mirror_apply(mirror, blob))
        if entry.kind == StreamKind.MARKS:
            held.synced.add(entry.partition)
            if len(held.synced) == len(held.mirror.members):
                if self.port.mirror_complete(mirror):
                    held.complete = True
                else:
                    self._mark_inconsistent(held, "its members' contents had a gap")
                self.dirty = True
        return code

    def _look_at_heads(self, mirror: int, recovery: _Recovery) -> None:
        if recovery.here and not recovery.serves_rows and self.port.recover_heads(mirror):
            self.dirty = True

    def _take_rest(self, entry: StreamEntry, mirror: int, blob: Blob, again: bool) -> AppendCode:
        held = self._mirrors.get(mirror)
        recovery = held.recovery if held is not None else None
        if recovery is None or recovery.other is None or entry.sync != recovery.other[0]:
            return AppendCode.NO_MIRROR
        if again or recovery.other_done:
            return AppendCode.REPEAT
        if entry.kind == StreamKind.MARKS:
            recovery.other_done = True
            self.dirty = True
        elif self.port.recover_other(mirror, blob) == AppendCode.GAP:
            recovery.inconsistent = self.dirty = True
        self.arrived = self.arrived or entry.kind == StreamKind.SOME
        self._look_at_heads(mirror, recovery)
        return AppendCode.APPLIED

    # ------------------------------------------------------------ what other ps ask

    def fetch_contents(self, request: FetchContents) -> LogTaken | Moved:
        """Take in that another ps wishes for contents of a partition that is served here, or for the rest of a row."""
        if request.version > self.version:
            return Moved(self.version)
        peer = (request.sender, request.incarnation)
        if not self._alive(peer):
            return Moved(self.version)
        if request.purpose == "other":
            return self._fetch_rest(request, peer)
        if request.purpose == "rest":
            return self._fetch_rows_of_rest(request, peer)
        if not self.serves(request.partition):
            return Moved(self.version)
        if request.purpose == "rows":
            return self._fetch_rows(request, peer)
        wish = (peer, request.mirror, request.sync, request.partition)
        if wish in self._wishes:
            return LogTaken()
        # Differences must go there from now on, or what follows the contents is lost.
        if peer not in self.streams.routes.get(request.partition, ()):
            return Moved(self.version)
        self._wishes.add(wish)
        target = SyncTarget(peer, request.mirror, request.sync)
        folds = request.purpose == "fold"
        syncs = self._syncs.setdefault(request.partition, deque())
        if syncs and (not syncs[-1].begun or not syncs[-1].bodies):
            syncs[-1].folds |= folds
        if syncs and not syncs[-1].begun:
            syncs[-1].targets.append(target)
        elif syncs and not syncs[-1].bodies:
            # Two rows of a stripe that are folded at once: the few heads go out again, to both, rather than all twice.
            syncs[-1].targets.append(target)
            syncs[-1].tables.clear()
            syncs[-1].todo.clear()
            syncs[-1].lo = 0
            # (its ps got no differences from before: its marks wait until all others have those)
            syncs[-1].ticket = self.port.ticket()
            self.streams.widen(request.partition, syncs[-1].ticket, target)
        else:
            syncs.append(_FullSync([target], folds=folds))
        return LogTaken()

    def _fetch_rows(self, request: FetchContents, peer: PeerKey) -> LogTaken | Moved:
        if peer not in self.streams.routes.get(request.partition, ()):
            return Moved(self.version)
        slots = _slots(request.slots)
        self.streams.some(request.partition, SyncTarget(peer, request.mirror, request.sync))
        self.port.emit_slots(request.partition, request.table, slots)
        return LogTaken()

    def _fetch_rows_of_rest(self, request: FetchContents, peer: PeerKey) -> LogTaken | Moved:
        held = self._sibling(request)
        recovery = held.recovery if held is not None else None
        if recovery is None or recovery.asker != SyncTarget(peer, request.mirror, request.sync):
            return Moved(self.version)
        slots = _slots(request.slots)
        recovery.promised.setdefault(request.table, set()).update(slots)
        self._demand(recovery, request.table, slots)
        return LogTaken()

    def _fetch_rest(self, request: FetchContents, peer: PeerKey) -> LogTaken | Moved:
        target = SyncTarget(peer, request.mirror, request.sync)
        held = self._sibling(request)
        if held is None or not held.complete:
            return Moved(self.version)
        if held.recovery is not None:
            if held.recovery.asker == target:
                return LogTaken()
            self.port.recover_end(held.mirror.id, True)
        self._recover(held, request.lost, asker=target)
        self.settle()
        return LogTaken()

    def _sibling(self, request: FetchContents) -> _HeldMirror | None:
        """Return the mirror here that is another row of the stripe which the request is about."""
        for held in self._mirrors.values():
            m = held.mirror
            if m.id != request.mirror and set(request.lost) <= set(m.members) and request.partition in m.members:
                return held
        return None

    def fetch_log(self, request: FetchLog) -> tuple[LogFetched | Moved, list[Blob]]:
        """The new owner of a partition levels its mirrors: from now on its differences alone are taken."""
        sender = (request.sender, request.incarnation)
        if request.version != self.version or self._owner(request.partition) != sender:
            return Moved(self.version), []
        source = self._sources.get(request.partition)
        if source is not None and source.version < request.version:
            self._sources[request.partition] = _Source(request.version, sender)
        held = self._mirrors.get(request.mirror)
        if held is None or not held.complete or request.partition not in held.mirror.members:
            return LogFetched(-1), []
        kept = self._retained.after(request.partition, request.seq)
        entries = tuple(
            StreamEntry(request.partition, seq, StreamKind.CHANGE, self.port.size(blob)) for seq, blob in kept
        )
        return LogFetched(self.port.mirror_seq(request.mirror, request.partition), entries), [blob for _, blob in kept]

    def hand_over(self, request: TransferOwnership) -> OwnershipTransferred | Moved:
        """The new owner asks for what is still on its way; ``done``: it has all."""
        if request.version > self.version:
            return Moved(self.version)
        partition = request.partition
        state = self.partitions.get(partition)
        if state is None:
            return OwnershipTransferred(-1)
        if state is MirrorState.SERVING or (partition in self._gains and not request.done):
            return OwnershipTransferred(-1) if request.done else Moved(self.version)
        if not request.done and not self._flushed(partition):
            return Moved(self.version)
        seq = self.port.seq(partition)
        if request.done:
            self._drop(partition)
        return OwnershipTransferred(seq)

    def refused(self, partition: PartitionId, ticket: int) -> None:
        """A mirror's ps refuses our differences of it, up to ``ticket`` of the outbox: another ps owns it, by a
        placement that did not reach us yet. By ours it is still our own, so it is lacking from now on: should ours be
        the newest placement after all, every mirror will say so under it, and it is served again."""
        if ticket < self._since.get(partition, 0):
            return  # (made when we had it before)
        if partition in self._served_while_rebuilt:
            for held in self._mirrors.values():
                if held.recovery is not None and held.recovery.here and partition in held.recovery.lost:
                    held.recovery.inconsistent = self.dirty = True
        if not self.serves(partition):
            return
        self._fence(partition)
        assert self.placement is not None
        if self.placement.owner[partition] == self.me[0] and self._alive(self.me):
            self._gains[partition] = _Gain(self.version)
            self.dirty = True

    # ------------------------------------------------------------ rows on demand

    def demand(self, partition: PartitionId, table: int, slots: Sequence[int]) -> bool:
        """Take in that somebody waits for these rows of a partition that is early. Whether there is something new to
        ask for."""
        for held in self._mirrors.values():
            recovery = held.recovery
            if recovery is not None and recovery.here and partition in recovery.lost:
                return self._demand(recovery, table, slots)
        return False

    def _demand(self, recovery: _Recovery, table: int, slots: Sequence[int]) -> bool:
        known = recovery.demanded.setdefault(table, set())
        new = [s for s in slots if s not in known]
        known.update(new)
        for at in range(0, len(new), DEMAND_SLOTS):
            owed = {b for b in recovery.owners if b not in recovery.folded}
            if recovery.other is not None and not recovery.other_done:
                owed.add(REST)
            some = struct.pack(f"<{len(new[at : at + DEMAND_SLOTS])}I", *new[at : at + DEMAND_SLOTS])
            if owed:
                recovery.demands.append(_Demand(table, some, owed))
        return bool(new)

    # ------------------------------------------------------------ what we ask

    def asks(self) -> list[Ask]:
        """Return all that waits for another ps's answer."""
        placement = self.placement
        if placement is None:
            return []
        out: list[Ask] = []
        v, (slot, life) = placement.version, self.me
        for id_, held in self._mirrors.items():
            if not held.complete:
                for partition in held.mirror.members:
                    if partition not in held.taken:
                        fetch = FetchContents(v, slot, life, id_, partition, "build", sync=held.sync)
                        out.append(Ask(self._owner(partition), fetch))
            recovery = held.recovery
            if recovery is not None:
                for partition in recovery.owners:
                    if partition not in recovery.taken:
                        fetch = FetchContents(v, slot, life, id_, partition, "fold", sync=recovery.sync)
                        out.append(Ask(self._owner(partition), fetch))
                for d in recovery.demands:
                    for b in sorted(d.owed - {REST}):
                        fetch = FetchContents(v, slot, life, id_, b, "rows", recovery.sync, (), d.table, d.slots)
                        out.append(Ask(self._owner(b), fetch))
                    if REST in d.owed and recovery.other is not None and recovery.other_taken:
                        sync, peer = recovery.other
                        lost = recovery.lost
                        fetch = FetchContents(v, slot, life, id_, lost[0], "rest", sync, lost, d.table, d.slots)
                        out.append(Ask(peer, fetch))
                if recovery.other is not None and recovery.other_level and not recovery.other_taken:
                    sync, peer = recovery.other
                    lost = recovery.lost
                    out.append(Ask(peer, FetchContents(v, slot, life, id_, lost[0], "other", sync=sync, lost=lost)))
        for partition, gain in self._gains.items():
            old = self._old_owner(partition)
            if not gain.handed and old is not None:
                out.append(Ask(old, TransferOwnership(v, partition)))
            if gain.levelling and not gain.level:
                seq = self._caught_up_to(partition)
                for other, peer in self._others(partition):
                    if other not in gain.retained:
                        out.append(Ask(peer, FetchLog(v, slot, life, other, partition, seq)))
        out += [Ask(peer, TransferOwnership(v, partition, done=True)) for partition, peer in self._goodbyes.items()]
        return [a for a in out if self._alive(a.peer)]

    def answered(self, ask: Ask, answer: DataAnswer, blobs: Sequence[Blob] = ()) -> None:
        """Take in that a peer answered. Moved: ask again later."""
        request = ask.request
        if request.version != self.version and not isinstance(request, FetchContents):
            return  # about a placement that is over
        if isinstance(request, FetchContents) and isinstance(answer, LogTaken):
            held = self._mirrors.get(request.mirror)
            if held is None or (
                ask.peer != self._owner(request.partition) and request.purpose not in ("other", "rest")
            ):
                return
            recovery = held.recovery
            if request.purpose in ("rows", "rest"):
                if recovery is not None and request.sync in (recovery.sync, (recovery.other or (0,))[0]):
                    asked = request.partition if request.purpose == "rows" else REST
                    for d in recovery.demands:
                        if (d.table, d.slots) == (request.table, request.slots):
                            d.owed.discard(asked)
                    recovery.demands = [d for d in recovery.demands if d.owed]
                return
            if request.purpose == "build" and request.sync == held.sync:
                held.taken.add(request.partition)
            elif recovery is not None and request.purpose == "fold" and request.sync == recovery.sync:
                recovery.taken.add(request.partition)
            elif recovery is not None and recovery.other == (request.sync, ask.peer):
                recovery.other_taken = True
        elif isinstance(request, TransferOwnership) and isinstance(answer, OwnershipTransferred):
            if request.done:
                self._goodbyes.pop(request.partition, None)
            elif request.partition in self._gains:
                self._gains[request.partition].handed = True
                if request.partition in self._fenced and answer.seq >= 0:
                    self._drop(request.partition)  # it went on elsewhere: ours is old
                self.settle()
        elif isinstance(request, FetchLog) and isinstance(answer, LogFetched):
            gain = self._gains.get(request.partition)
            if gain is not None and gain.levelling and not gain.level and request.mirror not in gain.retained:
                self._catch_up_with(request.partition, gain, request.mirror, answer, blobs)
                self.settle()

    def loaded(self, partition: PartitionId, checkpoint: int, there: bool = True, failed: bool = False) -> None:
        """A ``LoadSnapshot`` has ended. ``there``: the snapshot is in the store, and the store owns the partition; else
        nothing. ``failed``: nor will it be, if it is tried again under this map."""
        self._loads.discard(partition)
        gain = self._gains.get(partition)
        wanted = gain is not None and self._snapshot(partition) == checkpoint and self._way(partition) is None
        if there and not wanted:
            self.port.hand_over(partition)
            self.port.drop(partition)
        elif there:
            self._got(partition, Arrival.LOADED)
        if gain is not None:
            gain.loading = False
            gain.stuck = gain.stuck or (failed and wanted)
        self.settle()

    # ------------------------------------------------------------ partitions on their way here

    def settle(self) -> None:
        """Go on wherever that is possible now."""
        self.dirty = False
        self._discard_inconsistent()
        before = -1
        while before != len(self._gains) or self._restart:  # one may have waited for another
            before, self._restart = len(self._gains), False
            for partition in list(self._gains):
                if partition in self._gains:
                    self._go_on(partition, self._gains[partition])
            for held in list(self._mirrors.values()):
                if held.recovery is not None:
                    self._recovering(held)
        self._clear_away()
        news = (frozenset(self.complete), frozenset(self.gained.items()), frozenset(self.inconsistent))
        if not (news[0] <= self._reported[0] and news[1] <= self._reported[1] and news[2] <= self._reported[2]):
            self._actions.append(ReportProgress())
        self._reported = news

    def _way(self, partition: PartitionId) -> int | None:
        """Return the complete mirror from which it can be had: better one of it alone."""
        found = [i for i in self._by_partition.get(partition, ()) if self._mirrors[i].complete]
        return min(found, key=lambda i: (len(self._mirrors[i].mirror.members), i), default=None)

    def _is_newer(self, mirror: int, partition: PartitionId) -> bool:
        """Return whether a mirror here is to be preferred to the fenced partition: it is of this partition alone, or
        the owner after us has sent it differences. That owner may have been lost before it said that it has all."""
        if len(self._mirrors[mirror].mirror.members) == 1:
            return True
        return self.port.mirror_seq(mirror, partition) > self.port.seq(partition)

    def _snapshot(self, partition: PartitionId) -> int | None:
        assert self.placement is not None
        return next((c for b, c in self.placement.snapshots if b == partition), None)

    def _old_owner(self, partition: PartitionId) -> PeerKey | None:
        """Return who sent our mirror its differences, or got the partition after us; None if it lives no more."""
        fenced = self._fenced.get(partition)
        if fenced is not None:
            return fenced.to if fenced.to is not None and fenced.to != self.me and self._alive(fenced.to) else None
        if self._way(partition) is None:
            return None
        source = self._sources.get(partition)
        if source is None or source.key == self.me or not self._alive(source.key):
            return None
        return source.key

    def _go_on(self, partition: PartitionId, gain: _Gain) -> None:
        assert self.placement is not None
        if partition in self._loads or partition in self._served_while_rebuilt or not self._confirmed(partition):
            return
        mirror = self._way(partition)
        fenced = partition in self._fenced
        if (
            fenced
            and mirror is None
            and self._fenced[partition].to is not None
            and self._snapshot(partition) is not None
        ):
            self._drop(partition)  # others had it meanwhile, and it goes on from their snapshot
            fenced = False
        if fenced and mirror is not None and self._is_newer(mirror, partition):
            self._drop(partition)
            fenced = False
        if not fenced and mirror is None:
            self._without_mirror(partition, gain)
            return
        if not gain.handed and self._old_owner(partition) is not None:
            return
        if not gain.levelling:
            gain.levelling = True
            if partition in self._by_partition:
                self._sources[partition] = _Source(self.placement.version, self.me)
        if not gain.level:
            others = self._others(partition)
            if any(other not in gain.retained for other, _ in others):
                return
            self._catch_up(partition, gain, others)
            gain.level = True
        if fenced:
            self._resume(partition, gain)
        else:
            assert mirror is not None
            held = self._mirrors[mirror]
            if len(held.mirror.members) == 1:
                self._promote(partition, mirror)
            elif held.recovery is None or held.recovery.asker is not None:
                lost = tuple(b for b in held.mirror.members if b in self._gains and b not in self.partitions)
                if all(self._gains[b].level and self._way(b) == mirror for b in lost):
                    if held.recovery is not None:
                        self.port.recover_end(mirror, True)
                    self._recover(held, lost)

    def _without_mirror(self, partition: PartitionId, gain: _Gain) -> None:
        assert self.placement is not None
        snapshot = self._snapshot(partition)
        if snapshot:
            if not gain.loading and not gain.stuck:
                gain.loading = True
                self._loads.add(partition)
                self._actions.append(LoadSnapshot(partition, snapshot))
        elif snapshot == 0 or self.placement.route == 1:
            self.port.own(partition)
            self._got(partition, Arrival.NEW if self.placement.route == 1 else Arrival.BEGUN)
        elif not gain.stuck and not any(partition in h.mirror.members for h in self._mirrors.values()):
            gain.stuck = True
            here = f"placement {self.version} gives ps:{self.me[0]} partition {partition}"
            why = f"{here}: no mirror is here and no snapshot is named"
            self._actions.append(Stuck(partition, why))

    def _got(self, partition: PartitionId, how: Arrival) -> None:
        self.partitions[partition] = MirrorState.SERVING
        self._gains.pop(partition)
        if how is not Arrival.NEW:
            self.gained[partition] = (self.version, how)
        if partition in self._served_while_rebuilt:
            self._served_while_rebuilt.remove(partition)
            self._actions.append(PartitionRebuilt(partition))
            return
        self._since[partition] = self.port.ticket()
        self._actions.append(Acquired(partition, how))
        self.streams.routes.pop(partition, None)
        self._route()

    def _serve_while_rebuilding(self, partition: PartitionId) -> None:
        self._served_while_rebuilt.add(partition)
        self._since[partition] = self.port.ticket()
        self._actions.append(Acquired(partition, Arrival.REBUILT))
        self.streams.routes.pop(partition, None)
        self._route()

    def _end_serving_while_rebuilding(self, partition: PartitionId) -> None:
        """It is dropped; what it made goes on to its mirrors, and it does not come back before they have it."""
        self._served_while_rebuilt.remove(partition)
        self.port.flush(partition)  # (what it made is acknowledged)
        self._actions.append(Released(partition, self.port.seq(partition)))
        self._ended[partition] = self.port.ticket()
        if partition in self._gains:
            self._gains[partition] = _Gain(self.version)

    def _confirmed(self, partition: PartitionId) -> bool:
        """Whether all that it made while it was early, the last time, is confirmed or refused."""
        ticket = self._ended.get(partition)
        return ticket is None or (self.streams.next_ticket >= ticket and not self.streams.owes(partition))

    def _promote(self, partition: PartitionId, mirror: int) -> None:
        self.port.promote(mirror, partition)
        held = self._mirrors.pop(mirror)
        self._used.add(mirror)
        self._index()
        self._confirm_handover(partition, held.owners[partition])
        self._got(partition, Arrival.PROMOTED)

    def _confirm_handover(self, partition: PartitionId, old: PeerKey) -> None:
        if old != self.me and self._alive(old):
            self._goodbyes[partition] = old

    def _resume(self, partition: PartitionId, gain: _Gain) -> None:
        """It is ours again before anybody else had it: the other mirrors have nothing beyond it."""
        if not self._flushed(partition):
            return
        if max(gain.retained.values(), default=-1) > self.port.seq(partition):
            if not gain.stuck:
                gain.stuck = True
                why = f"partition {partition} is at {self.port.seq(partition)} here, a mirror of it is ahead"
                self._actions.append(Stuck(partition, why))
            return
        self.port.resume(partition)
        self._fenced.pop(partition, None)
        self._got(partition, Arrival.RESUMED)

    # ------------------------------------------------------------ levelling

    def _others(self, partition: PartitionId) -> list[tuple[int, PeerKey]]:
        """Return the mirrors of it at other living ps."""
        assert self.placement is not None
        found = [(m.id, self._key(m.at)) for m in self.placement.mirrors_of(partition)]
        return [(m, at) for m, at in found if at is not None and at != self.me]

    def _caught_up_to(self, partition: PartitionId) -> int:
        """Return how far our best copy of it is."""
        mirror = self._way(partition)
        if mirror is not None:
            return self.port.mirror_seq(mirror, partition)
        return self.port.seq(partition) if partition in self.partitions else -1

    def _catch_up_with(
        self, partition: PartitionId, gain: _Gain, mirror: int, answer: LogFetched, blobs: Sequence[Blob]
    ) -> None:
        gain.retained[mirror] = answer.seq
        if partition in self.partitions:
            return
        for entry, blob in zip(answer.entries, blobs, strict=True):
            if entry.seq <= self._caught_up_to(partition):
                continue
            kept = self.port.keep(blob)
            for id_ in self._by_partition[partition]:
                held = self._mirrors[id_]
                if held.complete and self.port.mirror_apply(id_, kept) == AppendCode.GAP:
                    self._mark_inconsistent(
                        held, f"the log of mirror {mirror} leaves a gap before {entry.seq} of partition {partition}"
                    )
            self._retained.keep(partition, entry.seq, kept)
        if self._caught_up_to(partition) < answer.seq:
            # It cannot be brought to the same point: the other one is the newer, and the partition is to be had there.
            for id_ in self._by_partition.get(partition, ()):
                if self._mirrors[id_].complete:
                    why = f"the log of mirror {mirror} does not reach {answer.seq} of partition {partition}"
                    self._mark_inconsistent(self._mirrors[id_], why)

    def _catch_up(self, partition: PartitionId, gain: _Gain, others: list[tuple[int, PeerKey]]) -> None:
        """Everybody else gets what it lacks."""
        top = self._caught_up_to(partition)
        for mirror, peer in others:
            seq = gain.retained[mirror]
            if seq < 0 or seq >= top:
                continue
            lacking = self._retained.after(partition, seq)
            if not lacking or lacking[0][0] != seq + 1:  # it lacks more than anybody kept for it
                self.inconsistent.add(mirror)
                why = f"it has partition {partition} up to {seq}, ours is at {top}, what is between is kept nowhere"
                self._actions.append(MirrorDiscarded(mirror, f"mirror {mirror} at ps:{peer[0]} is made again: {why}"))
                continue
            for s, blob in lacking:
                self.streams.send(
                    peer, StreamItem(-1, partition, s, StreamKind.CHANGE, mirror, 0, blob, self.port.size(blob))
                )

    # ------------------------------------------------------------ recovery out of a stripe

    def _recover(self, held: _HeldMirror, lost: tuple[PartitionId, ...], asker: SyncTarget | None = None) -> None:
        """Begin to fold the living members out of a copy of the mirror."""
        mirror = held.mirror
        living = {b: self._owner(b) for b in mirror.members if b not in lost}
        recovery = _Recovery(lost, asker is None, living, self._wish(), asker=asker)
        if asker is None and len(lost) > 1:
            rows = [(m, peer) for m, peer in self._others(lost[0]) if self._is_row_of(m, mirror)]
            if not rows:
                gain = self._gains[lost[0]]
                if not gain.stuck:
                    gain.stuck = True
                    why = f"{len(lost)} members of mirror {mirror.id} are lost, and one row is left of them"
                    self._actions.append(Stuck(lost[0], why))
                return
            recovery.other = (self._wish(), rows[0][1])
        if asker is not None:
            recovery.emit = [(StreamKind.HEADS, t) for t in self.port.tables()]
        self.port.recover_begin(mirror.id, lost, lost if asker is None else ())
        held.recovery = recovery

    def _is_row_of(self, other: int, mirror: Mirror) -> bool:
        assert self.placement is not None
        return any(
            m.id == other and m.members == mirror.members and m.row != mirror.row for m in self.placement.mirrors
        )

    def _recovering(self, held: _HeldMirror) -> None:
        recovery = held.recovery
        assert recovery is not None
        id_ = held.mirror.id
        changed = any(self._owner(b) != owner and b not in recovery.folded for b, owner in recovery.owners.items())
        gone = recovery.other is not None and not recovery.other_done and not self._alive(recovery.other[1])
        if recovery.here:
            lost = tuple(b for b in held.mirror.members if b in self._gains and b not in self.partitions)
            self._report_inconsistent(held, recovery)
            if changed or gone or lost != recovery.lost or recovery.inconsistent:
                self._abort(held)
                self._restart = True
                return
            recovery.other_level = recovery.other_level or self._is_level(recovery)
            if not recovery.serves_rows and self.port.recover_heads(id_):
                recovery.serves_rows = True
                for partition in lost:
                    self._serve_while_rebuilding(partition)
            if len(recovery.folded) < len(recovery.owners) or (recovery.other is not None and not recovery.other_done):
                return
            self.port.recover_end(id_, False)
            held.recovery = None
            for partition in lost:
                self._got(partition, Arrival.REBUILT)
            return
        assert recovery.asker is not None
        self._report_inconsistent(held, recovery)
        if changed or recovery.inconsistent or not self._alive(recovery.asker.peer):
            self._abort(held)
            if self._alive(recovery.asker.peer):
                self._recover(held, recovery.lost, recovery.asker)
                again = held.recovery
                assert again is not None
                for table, slots in recovery.promised.items():
                    again.promised[table] = slots
                    self._demand(again, table, sorted(slots))
            return
        if len(recovery.folded) == len(recovery.owners) and not recovery.all_folded:
            recovery.all_folded = True
            recovery.emit += [(StreamKind.BODIES, t) for t in self.port.tables()]

    def _is_level(self, recovery: _Recovery) -> bool:
        """Return whether the other row has all differences of the lost members that this ps owed to it. What is left
        of that row, once begun, takes no differences of lost members any more."""
        return recovery.other is not None and not any(self.streams.owes(b) for b in recovery.lost)

    def _report_inconsistent(self, held: _HeldMirror, recovery: _Recovery) -> None:
        if recovery.inconsistent:
            lost = ", ".join(str(b) for b in recovery.lost)
            why = f"contents for the rebuild of partition {lost} out of mirror {held.mirror.id} had a gap: swept again"
            self._actions.append(MirrorDiscarded(held.mirror.id, why))

    def _abort(self, held: _HeldMirror) -> None:
        assert held.recovery is not None
        for partition in held.recovery.lost:
            if partition in self._served_while_rebuilt and held.recovery.here:
                self._end_serving_while_rebuilding(partition)
        self.port.recover_end(held.mirror.id, True)
        held.recovery = None

    # ------------------------------------------------------------ contents go out

    def sync(self, urgent: bool = False) -> bool:
        """Put one piece of contents into the outbox or a stream. False: there is none. Afterwards: ``dirty``.

        First comes what requests wait for: rows out of turn, and which rows there are in what is rebuilt. Then come
        the rows for rebuilds, then new mirrors and moves; equals take turns. ``urgent``: only what requests wait for.
        """
        if any(self._confirmed(b) for b in self._ended):
            self.dirty = True
        for held in self._mirrors.values():
            recovery = held.recovery
            if recovery is not None and not recovery.other_level and self._is_level(recovery):
                self.dirty = True
            asker = recovery.asker if recovery is not None else None
            if recovery is not None and asker is not None and self._send_promised(held, recovery, asker):
                return True
        rebuilt = {b for b, syncs in self._syncs.items() if any(sync.folds for sync in syncs)}
        awaited = [b for b in self._syncs if b in rebuilt and self._syncs[b][0].heads]
        if urgent:
            return any(self._sync_partition(b) for b in awaited)
        if any(self._sync_partition(b) for b in [*awaited, *(b for b in self._syncs if b in rebuilt)]):
            return True
        for held in self._mirrors.values():
            recovery = held.recovery
            asker = recovery.asker if recovery is not None else None
            if recovery is not None and asker is not None and self._sync_rest(held, recovery, asker):
                return True
        return any(self._sync_partition(b) for b in list(self._syncs) if b not in rebuilt)

    def _sync_partition(self, partition: PartitionId) -> bool:
        """False: it has to wait."""
        syncs = self._syncs.pop(partition)
        sync = syncs[0]
        if not sync.begun:
            sync.begun = True
            sync.ticket = self.port.ticket()
            self.streams.sync(partition, sync.ticket, sync.targets)
        if not sync.todo:
            # Also tables that were declared since: a difference of a table that was not swept is dropped there.
            new = [t for t in self.port.tables() if t not in sync.tables]
            sync.tables.update(new)
            sync.todo = [(kind, t) for kind in (StreamKind.HEADS, StreamKind.BODIES) for t in new]
        if sync.todo:
            kind, table = sync.todo[0]
            sync.bodies |= kind is StreamKind.BODIES
            sync.lo = self.port.emit(partition, kind, table, sync.lo)
            if sync.lo < 0:
                sync.todo.pop(0)
                sync.lo = 0
        elif self.streams.done_ticket < sync.ticket:
            # A new mirror keeps no differences from before its contents: with one that lacks some of them it could
            # never be levelled. So it is not complete before all others have those.
            self._syncs[partition] = syncs
            return False
        else:
            self.port.emit_marks(partition)
            syncs.popleft()
        if syncs:
            self._syncs[partition] = syncs  # behind the others: they take turns
        return True

    def _send_rest(self, asker: SyncTarget, kind: StreamKind, blob: Blob) -> None:
        size = self.port.size(blob)
        self.streams.send(asker.peer, StreamItem(-1, REST, 0, kind, asker.mirror, asker.sync, blob, size))

    def _send_promised(self, held: _HeldMirror, recovery: _Recovery, asker: SyncTarget) -> bool:
        """Send, of the slots that are wanted out of turn, those that are reconstructed. False: none."""
        any_sent = False
        for table, slots in list(recovery.promised.items()):
            blob, sent = self.port.recover_emit_slots(held.mirror.id, table, sorted(slots))
            if not sent:
                continue
            self._send_rest(asker, StreamKind.SOME, blob)
            any_sent = True
            slots.difference_update(sent)
            if not slots:
                del recovery.promised[table]
        return any_sent

    def _sync_rest(self, held: _HeldMirror, recovery: _Recovery, asker: SyncTarget) -> bool:
        """False: it has to wait for what is still to be folded."""
        if not recovery.emit:
            if recovery.all_folded:
                self._send_rest(asker, StreamKind.MARKS, b"")
                self._abort(held)
            return recovery.all_folded
        kind, table = recovery.emit[0]
        at = recovery.emit_at
        blob, recovery.emit_at = self.port.recover_emit(held.mirror.id, kind, table, at)
        if recovery.emit_at == at:
            return False
        self._send_rest(asker, kind, blob)
        if recovery.emit_at < 0:
            recovery.emit.pop(0)
            recovery.emit_at = 0
        return True

    def append_of(self, batch: Batch) -> Append:
        """Return the message for a batch of the streams; its blobs are the body."""
        return Append(
            self.version,
            self.me[0],
            self.me[1],
            (),
            tuple(StreamEntry(i.partition, i.seq, i.kind, i.size_bytes, i.sync) for i in batch.items),
            tuple(i.mirror for i in batch.items),
            batch.confirmed,
            batch.first,
            batch.stream,
        )
