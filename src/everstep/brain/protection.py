"""Where buckets and mirrors are and shall be: the first map, losses of ps, moves, ps that come and leave.

Theory. The placement says what shall be; the ps do what is lacking and tell what they have (:class:`MirrorsReady`,
:class:`BucketsReady`, their hello). From these facts and the set of living ps each next placement follows, whatever
happened in between (policies/recovery.py, policies/moves.py); no step of a recovery or move is remembered as such.

Which acknowledgements of a shard count: a worker tells which ps acknowledged, in which lives. They count if they are
those of one map since the last loss that cost anything. A loss costs nothing if every bucket of the dead ps is
promoted or folded, and pushes were acknowledged only when their mirrors had them (``protect: acked``). Else the done
shards that may lack something are reopened: opening them shows the workers what each bucket really has.
"""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from everstep.brain.checkpoints import Checkpoints, has_checkpoints
from everstep.brain.events import BucketsReady, InstructionType, LoadFailed, MirrorsReady, Note, PublishPlacement
from everstep.brain.job import JobState
from everstep.brain.members import Members
from everstep.brain.placement import Acks, places_of
from everstep.brain.shards import Shards
from everstep.config.parity import ParityCode, parse_code
from everstep.ids import BucketId, Incarnation, ShardKey, Slot
from everstep.model.decision import Decision
from everstep.model.image import Holdings
from everstep.model.member import Member, MemberState
from everstep.model.placement import MirrorKind, Placement, PsPlace
from everstep.model.reasons import Arrival
from everstep.policies.draft import Draft, How, Pending, level_counts
from everstep.policies.hot import HotMove
from everstep.policies.moves import MoveSteps, advance, under_way
from everstep.policies.recovery import Recovered, begin_again, recover
from everstep.policies.stripes import StripeLayout, arrange, members_of

MAPS_REMEMBERED = 16

Inputs = dict[str, str | int | float | bool]


class Protection(msgspec.Struct, kw_only=True):
    """What the brain knows of buckets and mirrors.

    ``layout``: what the placement shall become, over the ps ``over``. ``mirrors``: the last mirror id used. ``ready``:
    mirrors that have everything. ``torn``: mirrors that lack something for good, until the map names them no more.
    ``missing``: buckets whose owner does not hold them yet. ``leaving``: slots that give
    everything away and are not filled again, but for ``refill``: where another ps is started then. ``wave``: slots of
    ps that were started together: they get something when all of them have joined, by one plan. ``maps``:
    acknowledgements that count, newest last, none by a map from before ``counts_from``. ``gone``: buckets of which
    nothing is left, and which begin empty again once the workers ``ending`` have ended: they have the tables' first
    rows no more, and must not see these buckets without them.
    """

    placement: Placement | None = None
    layout: StripeLayout | None = None
    over: tuple[Slot, ...] = ()
    mirrors: int = 0
    ready: list[int] = []
    missing: dict[BucketId, Pending] = {}
    leaving: list[Slot] = []
    maps: list[Acks] = []
    counts_from: int = 0
    refill: list[Slot] = []
    wave: list[Slot] = []
    gone: list[BucketId] = []
    ending: list[tuple[Slot, Incarnation]] = []
    torn: list[int] = []
    lost: list[BucketId] = []
    stuck: list[BucketId] = []
    went_back: bool = False

    def __repr__(self) -> str:
        version = self.placement.version if self.placement is not None else 0
        return f"<protection v{version} {len(self.missing)} buckets missing, {len(self.ready)} mirrors ready>"


class PlacementController:
    """Changes :class:`Protection`; a thin hand of the brain, without a state of its own."""

    __slots__ = ("_ahead", "books", "checkpoints", "job", "members", "shards")

    def __init__(
        self,
        job: JobState,
        members: Members,
        shards: Shards,
        checkpoints: Checkpoints,
        books: Protection,
        ahead: bool,
    ) -> None:
        """``ahead``: workers have a state of their own, which must not be newer than the buckets."""
        self._ahead = ahead
        self.job, self.members, self.shards = job, members, shards
        self.checkpoints, self.books = checkpoints, books

    @property
    def code(self) -> ParityCode:
        return parse_code(self.job.spec.parity)

    def servers(self) -> list[Member]:
        """The ps that live, have said where they listen, and are not on their way out."""
        seats = self.members.servers.values()
        return [s.member for s in seats if s.running and not s.stopping and s.member.address is not None]

    # ------------------------------------------------------------ the first map

    def first(self) -> list[InstructionType]:
        """All ps have joined: place buckets and mirrors."""
        books, code, buckets = self.books, self.code, self.job.spec.buckets
        places = places_of(self.servers())
        slots = [p.slot for p in places]
        layout = arrange(code, buckets, slots)
        images = self.checkpoints.first_images(buckets)
        draft = Draft(
            code=code,
            version=1,
            routing=1,
            living=set(slots),
            owner=list(layout.owner),
            mirrors=[],
            ready=set(),
            missing={b: Pending(1, How.LOAD) for b, _ in images},
            images=dict(images) or {BucketId(b): 0 for b in range(buckets)},
            next_id=1,
        )
        advance(draft, layout, first=True)
        if draft.missing:  # of a resumed job the mirrors follow when the buckets are loaded
            books.missing = draft.missing
        books.layout, books.over = layout, tuple(slots)
        books.mirrors = draft.next_id - 1
        placement = Placement(
            1, tuple(draft.owner), places, 1, tuple(draft.mirrors), tuple(sorted(draft.images.items()))
        )
        books.placement = placement
        self.checkpoints.covered = not code.m
        self._remember_map()
        words = f"all {len(slots)} ps have joined; bucket b goes to ps b mod {len(slots)}"
        if code.m:
            words = f"all {len(slots)} ps have joined; {buckets} buckets in {code.stripes(buckets)} stripes of {code}"
        return [PublishPlacement(placement, Decision("place buckets", words))]

    # ------------------------------------------------------------ what the ps tell

    def mirrors_ready(self, slot: Slot, mirrors: Iterable[int]) -> bool:
        """Whether this is news."""
        placement, books = self.books.placement, self.books
        if placement is None:
            return False
        here = {m.id for m in placement.mirrors_at(slot)}
        news = [m for m in mirrors if m in here and m not in books.ready]
        books.ready = sorted([*books.ready, *news])
        return bool(news)

    def covers(self) -> list[InstructionType]:
        """What may be released when every bucket has all its mirrors for the first time: until then its ps may take it
        with it, and it must be possible to train all of it again."""
        if self.checkpoints.covered or self.books.placement is None or self.books.missing:
            return []
        draft = self.draft()
        rows = draft.rows()
        wanted = [(j, r) for j in range(draft.stripes) for r in range(draft.code.m)]
        if not all(any(m.id in draft.ready for m in rows.get(w, ())) for w in wanted):
            return []
        return self.checkpoints.cover(self.job, self.shards)

    def buckets_ready(self, slot: Slot, version: int, buckets: Iterable[BucketId]) -> list[BucketId]:
        """Those that are news. ``version``: of the placement that gave them, or a later one."""
        placement, missing = self.books.placement, self.books.missing
        if placement is None:
            return []
        news = [b for b in buckets if b in missing and placement.owner[b] == slot and version >= missing[b].version]
        for bucket in news:
            del missing[bucket]
        return news

    def holds(self, slot: Slot, holds: Holdings) -> None:
        """What a ps said in its hello."""
        self.mirrors_ready(slot, holds.mirrors)
        self.buckets_ready(slot, holds.placement, holds.buckets)

    def told(self, slot: Slot, e: MirrorsReady | BucketsReady) -> list[InstructionType]:
        """A ps tells what is whole there."""
        if isinstance(e, MirrorsReady):
            self.mirrors_ready(slot, e.mirrors)
            return self._torn(slot, e)
        if e.how is Arrival.STUCK:
            return self._stuck(slot, e)
        news = self.buckets_ready(slot, e.placement, e.buckets)
        if not news:
            return []
        if self.books.missing:
            return []
        inputs: Inputs = {"buckets": len(news), "how": e.how}
        words = f"every bucket is whole where the map has it (the last ones at ps:{slot}: {e.how})"
        return [Note("", Decision("buckets ready", words, inputs))]

    def _torn(self, slot: Slot, e: MirrorsReady) -> list[InstructionType]:
        """Mirrors are not to be trusted: from now on none is there, and the next map has others in their place."""
        placement, books = self.books.placement, self.books
        named = {m.id for m in placement.mirrors} if placement is not None else set()
        news = sorted((set(e.torn) & named) - set(books.torn))
        if not news:
            return []
        books.torn = sorted([*books.torn, *news])
        words = f"{len(news)} mirrors lack differences of their members: others are made in their place"
        why = Decision("mirrors torn", words, {"mirrors": len(news)}, ("go on with them: they would give wrong rows",))
        return [Note(f"ps:{slot}", why)]

    def _stuck(self, slot: Slot, e: BucketsReady) -> list[InstructionType]:
        """A ps has no way to get buckets: they are taken for lost there, if that is about what was last ordered."""
        placement, missing = self.books.placement, self.books.missing
        if placement is None:
            return []
        stuck = self.books.stuck = sorted(
            b
            for b in set(e.buckets)
            if 0 <= b < placement.buckets
            and placement.owner[b] == slot
            and e.placement >= (missing[b].version if b in missing else placement.version)
        )
        if not stuck:
            return []
        words = f"it has no way to get {len(stuck)} buckets that placement {e.placement} gave it"
        why = Decision("buckets stuck", words, {"buckets": len(stuck)}, ("wait: nothing more would come",))
        return [Note(f"ps:{slot}", why)]

    def loading(self, slot: Slot, placement: int = 0) -> list[tuple[BucketId, int]]:
        """Buckets that this ps is to load, and their checkpoints; ``placement``: by that one or earlier (0: any)."""
        found = self.books.placement
        if found is None:
            return []
        images = dict(found.images)
        return [
            (bucket, images[bucket])
            for bucket, pending in self.books.missing.items()
            if pending.how is How.LOAD
            and found.owner[bucket] == slot
            and images.get(bucket)
            and (not placement or pending.version <= placement)
        ]

    def load_failed(self, slot: Slot, e: LoadFailed) -> list[InstructionType]:
        """A ps could not load a bucket: it is taken for lost there, if that is about what was last ordered."""
        if (e.bucket, e.checkpoint) not in self.loading(slot, e.placement):
            return []
        self.books.stuck = sorted({*self.books.stuck, e.bucket})
        return self.checkpoints.load_failed(e.checkpoint, f"ps:{slot}", e.error)

    # ------------------------------------------------------------ the next map

    def draft(self) -> Draft:
        """The present placement, to be changed."""
        placement, books = self.books.placement, self.books
        assert placement is not None
        joined = {(m.slot, m.incarnation) for m in self.servers()}
        # A ps of the map in a later life is not the one that was meant.
        stale = {p.slot for p in placement.servers if (p.slot, p.incarnation) not in joined}
        living = {m.slot for m in self.servers()}
        torn = [m for m in placement.mirrors if m.id in books.torn]
        mirrors = [m for m in placement.mirrors if m.at not in stale and m not in torn]
        # Who was to make its buckets of one has nothing now to make them of.
        made = [(b, books.missing[b].how, m) for m in torn for b in m.members if b in books.missing]
        of = (How.PROMOTE, How.FOLD, How.HAND_OVER)
        cut = {b for b, how, m in made if how in of and placement.owner[b] == m.at}
        return Draft(
            code=self.code,
            version=placement.version + 1,
            routing=placement.route,
            living=living,
            owner=list(placement.owner),
            mirrors=mirrors,
            ready=set(books.ready) & {m.id for m in mirrors},
            missing=dict(books.missing),
            images=dict(placement.images),
            next_id=books.mirrors + 1,
            stuck=frozenset(books.stuck) | cut,
        )

    def settle(self, why: str = "", trusted: bool = False) -> list[InstructionType]:
        """Make the next placement out of what is known now; nothing if it would be the same.

        ``why``: what happened, for people. ``trusted``: a ps in a new life says nothing of what it holds; what the map
        says it has, it has, but not necessarily all that its old life acknowledged. If something is lost for good,
        nothing is changed and ``lost`` says what.
        """
        books, placement = self.books, self.books.placement
        books.lost = []
        if placement is None or self.job.over:
            return []
        joined = {(m.slot, m.incarnation) for m in self.servers()}
        dead = {p.slot for p in placement.servers if (p.slot, p.incarnation) not in joined}
        if trusted and dead & {slot for slot, _ in joined}:
            self._cost()  # also where the map itself has to wait for somebody
        if any(self._on_its_way_back(p) for p in placement.servers):
            return []
        draft = self.draft()
        if trusted:
            dead -= draft.living
        reborn = dead & draft.living
        draft.living -= reborn  # what they had is gone; first everybody else is asked for it
        cut_off = any(p.how is How.HAND_OVER and p.source in dead for p in draft.missing.values())
        recovered = recover(draft, self._image_of)
        books.stuck = []
        books.went_back |= bool(recovered.lost or recovered.behind)
        if recovered.lost:
            if not self._may_begin_again():
                books.lost = recovered.lost
                return []
            if self._workers_end(recovered.lost):
                return []
            begin_again(draft, recovered)
        elif self._ahead and recovered.behind and self._workers_end(recovered.behind):
            return []  # nobody has the gradients of what they lack: all go back to the newest checkpoint
        books.gone, books.ending = [], []
        draft.living |= reborn
        out = self._losses(recovered) if recovered.buckets or cut_off else []
        steps = MoveSteps()
        if draft.living:
            books.layout = self._layout(draft, recovered)
            steps = advance(draft, books.layout)
        self._publish(draft, recovered, steps, why, out)
        return out

    def _may_begin_again(self) -> bool:
        """Whether everything that was ever trained could be trained again: nothing was released."""
        nothing = not self.shards.released and not self.checkpoints.resumed
        return nothing and (self.code.m > 0 or has_checkpoints(self.job.spec))

    def _workers_end(self, lost: list[BucketId]) -> bool:
        """Whether workers must end before the buckets ``lost`` begin empty: all that were there when they were lost."""
        books, workers = self.books, self.members.workers
        if not set(lost) <= set(books.gone):
            there = [s.member for s in workers.values() if s.running and s.member.state is not MemberState.STARTING]
            books.gone = sorted(lost)
            books.ending = sorted({*books.ending, *((m.slot, m.incarnation) for m in there)})
        books.ending = [
            (slot, incarnation)
            for slot, incarnation in books.ending
            if (seat := workers.get(slot)) is not None and seat.running and seat.member.incarnation == incarnation
        ]
        return bool(books.ending)

    def _cost(self) -> None:
        """A loss cost something: no acknowledgement by a map from before it counts, whoever gave it. (A bucket may have
        been where it is now, and back, and lack what it had then.)"""
        assert self.books.placement is not None
        self.books.maps.clear()
        self.books.counts_from = self.books.placement.version + 1

    def _on_its_way_back(self, place: PsPlace) -> bool:
        """A later life of a ps of the map is there, its loss was never told (its agent says it runs, or a journal's
        tail was lost): its hello says what it holds."""
        seat = self.members.servers.get(place.slot)
        return (
            seat is not None
            and seat.running
            and seat.member.incarnation > place.incarnation
            and seat.member.address is None
        )

    def _image_of(self, bucket: BucketId) -> int | None:
        found = self.checkpoints.newest_image(bucket)
        return found[0] if found is not None else None

    def _layout(self, draft: Draft, recovered: Recovered) -> StripeLayout:
        """The wanted layout: the one before, unless ps came, left or died, or buckets went elsewhere."""
        books = self.books
        assert books.layout is not None
        staying = draft.living - set(books.leaving) - self._early() or draft.living
        if tuple(sorted(staying)) == books.over and not recovered.buckets:
            return books.layout
        owner = list(books.layout.owner)
        for bucket in recovered.buckets:
            owner[bucket] = draft.owner[bucket]
        books.over = tuple(sorted(staying))
        return arrange(draft.code, len(owner), books.over, StripeLayout(tuple(owner), books.layout.sites))

    def _early(self) -> set[Slot]:
        """Ps that have joined and wait for others of their wave: each plan of its own would move buckets twice."""
        books, servers = self.books, self.members.servers
        seats = [s for slot in books.wave if (s := servers.get(slot)) is not None and s.running and not s.stopping]
        if all(s.member.address is not None for s in seats):
            return set()
        return {s.member.slot for s in seats if s.member.slot not in books.over}

    def _losses(self, recovered: Recovered) -> list[InstructionType]:
        """Reopen the done shards that some bucket may lack."""
        eager = self.job.spec.protect == "eager"
        keys: list[ShardKey] = []
        if recovered.taken_back or recovered.begun or eager:
            keys = list(self.shards.releasing)
        elif recovered.loaded and (newest := self.checkpoints.newest) is not None:
            images = [image for image in newest.images if image.bucket in set(recovered.loaded)]
            keys = list(self.shards.lacking(images))
        if not (recovered.behind or eager):
            return []
        self._cost()
        samples = self.shards.reopen_done(keys)
        out = self.checkpoints.disown(recovered.buckets if eager else recovered.behind)
        inputs: Inputs = {"buckets": len(recovered.behind), "shards": len(keys), "samples": samples}
        what = f"{len(keys)} done shards ({samples} samples) are opened again"
        if recovered.begun:
            words = (
                f"{len(recovered.begun)} buckets were lost before anything could bring them back, and begin empty "
                f"again: {what}, and trained again for these buckets alone; every worker begins anew"
            )
            return [*out, Note("", Decision("begin buckets again", words, inputs))]
        if recovered.loaded:
            newest = self.checkpoints.newest
            image = newest.checkpoint if newest is not None else 0
            inputs["checkpoint"] = image
            words = (
                f"{len(recovered.loaded)} buckets were lost beyond their protection and go back to checkpoint "
                f"{image}: {what}, and trained again for these buckets alone"
            )
            return [*out, Note("", Decision("fall back to images", words, inputs))]
        words = f"pushes that were acknowledged may not have reached every mirror: {what} and checked"
        return [*out, Note("", Decision("reopen shards", words, inputs))]

    def _publish(
        self, draft: Draft, recovered: Recovered, steps: MoveSteps, why: str, out: list[InstructionType]
    ) -> None:
        old, books = self.books.placement, self.books
        assert old is not None
        still = {*draft.owner, *(m.at for m in draft.mirrors), *(p.source for p in draft.missing.values())}
        away = {*books.leaving, *self._early()}
        places = places_of(m for m in self.servers() if m.slot not in away or m.slot in still)
        images = {b: c for b, c in draft.images.items() if c == 0 or draft.missing}  # all of them in one placement
        books.missing, books.ready, books.mirrors = draft.missing, sorted(draft.ready), draft.next_id - 1
        books.torn = []
        same_route = tuple(draft.owner) == old.owner and places == old.servers and not recovered.behind
        new = Placement(
            draft.version,
            tuple(draft.owner),
            places,
            old.route if same_route else draft.version,
            tuple(draft.mirrors),
            tuple(sorted(images.items())),
        )
        if msgspec.structs.replace(new, version=old.version) == msgspec.structs.replace(old, routing=old.route):
            return
        books.placement = new
        self._remember_map()
        action = "publish the map again"
        if recovered.buckets:
            action = "recover buckets"
        elif steps.switched:
            action = "switch buckets"
        elif steps.begun:
            action = "move buckets"
        elif steps.built:
            action = "make mirrors"
        left = [f"ps:{p.slot}" for p in old.servers if p.slot not in {s.slot for s in places}]
        gone = f"{', '.join(left)} is in the map no more" if left and not why else ""
        words = "; ".join(part for part in (why, recovered.words(), steps.words(), gone) if part)
        inputs: Inputs = {"buckets_missing": len(draft.missing), "moving": len(under_way(draft))}
        out.append(PublishPlacement(new, Decision(action, words or "what was needed for a step is there", inputs)))

    # ------------------------------------------------------------ hot buckets

    def at_rest(self) -> bool:
        """Whether everything is where it shall be."""
        books = self.books
        # (the slot of one that was emptied may stay empty for good)
        emptied = any(self.members.servers[slot].running for slot in books.leaving)
        if books.placement is None or books.layout is None or books.missing or emptied or self._early():
            return False
        return books.placement.owner == books.layout.owner and not self.building() and not under_way(self.draft())

    def may_move(self, bucket: BucketId, slot: Slot) -> bool:
        """Whether this ps may have the bucket: it serves, and has nothing else of its stripe."""
        layout, code = self.books.layout, self.code
        if layout is None or slot not in self.books.over or not 0 <= bucket < len(layout.owner):
            return False
        return slot not in (layout.stripe(code, bucket // code.k) if code.m else (layout.owner[bucket],))

    def closed_to(self, slot: Slot) -> tuple[BucketId, ...]:
        """Buckets of others of which this ps has another unit of the stripe, or a mirror."""
        layout, code = self.books.layout, self.code
        if layout is None or not code.m:
            return ()
        out: list[BucketId] = []
        for stripe in range(len(layout.sites)):
            if slot in layout.stripe(code, stripe):
                members = members_of(code, stripe, len(layout.owner))
                out += [b for b in members if layout.owner[b] != slot]
        return tuple(out)

    def spread(self, moves: Iterable[HotMove]) -> list[HotMove]:
        """Want these buckets elsewhere; those for which it is possible."""
        done: list[HotMove] = []
        for move in moves:
            layout = self.books.layout
            assert layout is not None
            if self.may_move(move.bucket, move.target) and layout.owner[move.bucket] == move.source:
                owner = list(layout.owner)
                owner[move.bucket] = move.target
                self.books.layout = StripeLayout(tuple(owner), layout.sites)
                done.append(move)
        return done

    # ------------------------------------------------------------ which acknowledgements count

    def _remember_map(self) -> None:
        placement, maps = self.books.placement, self.books.maps
        assert placement is not None
        life = {p.slot: p.incarnation for p in placement.servers}
        owners = tuple(sorted((s, life.get(s, Incarnation(0))) for s in set(placement.owner)))
        acks = Acks(owners, tuple((p.slot, p.incarnation) for p in placement.servers))
        if not maps or maps[-1] != acks:
            maps.append(acks)
            del maps[:-MAPS_REMEMBERED]

    def unacknowledged(self, acks: tuple[tuple[Slot, Incarnation], ...], route: int = 0) -> str:
        """ "" if these acknowledgements, by the map with this ``route`` (0: not told), count; else what is wrong with
        them, in words."""
        maps = self.books.maps
        if 0 < route < self.books.counts_from:
            return f"it was acknowledged by map v{route}, from before a loss that cost something"
        if not maps:
            return "no ps has joined"
        if any(known.by(acks) == "" for known in reversed(maps)):
            return ""
        return maps[-1].by(acks)

    # ------------------------------------------------------------ for displays

    def levels(self) -> dict[str, int]:
        """Buckets by level of protection: "full", "less", "none"; empty before the first map."""
        return level_counts(self.draft()) if self.books.placement is not None else {}

    def moving(self) -> int:
        """Buckets on their way to another ps, the one where they are being alive."""
        if self.books.placement is None:
            return 0
        handed = sum(p.how is How.HAND_OVER for p in self.books.missing.values())
        return len(under_way(self.draft())) + handed

    def rebuilding(self) -> int:
        """Buckets that their owner does not hold yet, the old one being dead."""
        return sum(p.how is not How.HAND_OVER for p in self.books.missing.values())

    def building(self) -> int:
        """Mirrors of stripes that do not have everything yet."""
        placement = self.books.placement
        mirrors = placement.mirrors if placement is not None else ()
        whole = set(self.books.ready) - set(self.books.torn)
        return sum(m.kind is MirrorKind.PARITY and m.id not in whole for m in mirrors)

    def empty(self, slot: Slot) -> bool:
        """Whether nothing is lost when this ps ends."""
        placement = self.books.placement
        if placement is None:
            return True
        return (
            slot not in placement.owner
            and not placement.mirrors_at(slot)
            and all(p.source != slot for p in self.books.missing.values())
        )

    def left_at(self, slot: Slot) -> int:
        """Buckets and mirrors that are still there."""
        placement = self.books.placement
        return 0 if placement is None else len(placement.owned_by(slot)) + len(placement.mirrors_at(slot))

    # ------------------------------------------------------------ invariants

    def validate(self) -> None:
        """Assert what must always hold while the job is not over."""
        books, placement = self.books, self.books.placement
        if placement is None:
            return
        spec, code = self.job.spec, self.code
        assert len(placement.owner) == spec.buckets
        serving = {p.slot for p in placement.servers}
        if not self.job.over:
            for bucket, slot in enumerate(placement.owner):
                assert slot in serving or BucketId(bucket) in books.missing, f"bucket {bucket}: ps:{slot} is not there"
        ids = [m.id for m in placement.mirrors]
        assert len(ids) == len(set(ids)) and all(0 < i <= books.mirrors for i in ids), "a mirror id is used twice"
        assert set(books.ready) <= set(ids), "a mirror that is gone is ready"
        assert set(books.torn) <= set(ids), "a mirror that is gone is torn"
        assert all(m.at in serving for m in placement.mirrors), "a mirror at a ps that is not there"
        images = dict(placement.images)
        for bucket, pending in books.missing.items():
            slot = placement.owner[bucket]
            here = [m for m in placement.mirrors_of(bucket) if m.at == slot and m.id in books.ready]
            if pending.how is How.FOLD:
                assert here, f"bucket {bucket} is to be folded at ps:{slot}, which has no complete mirror of it"
            elif pending.how in (How.PROMOTE, How.HAND_OVER):
                assert any(m.members == (bucket,) for m in here), f"bucket {bucket} has no mirror at ps:{slot}"
            elif pending.how is How.BEGIN:
                assert images.get(bucket) == 0, f"bucket {bucket} is to begin empty, and the map does not say so"
            elif pending.how is How.LOAD:
                assert images.get(bucket), f"bucket {bucket} is to be loaded, from nothing"
        layout = books.layout
        assert layout is not None
        if len(books.over) >= code.width and not books.leaving:
            assert layout.shared(code) == 0, "units of a stripe share a ps in the wanted layout"
