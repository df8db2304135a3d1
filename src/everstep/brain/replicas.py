"""Handles checkpoints of mode allreduce: the training state of one member, which is that of all, at one position.

The leader (rank 0) writes it while training goes on; it says so once everybody has committed the steps before the
position. Here it gets its place in the data, and a job that goes on from it begins there: what was trained after it is
trained again. One state is the whole checkpoint, so none is incremental, and nothing to fetch from several places.
"""

from __future__ import annotations

from collections.abc import Sequence

from everstep.brain.checkpoints import Checkpoints, ResumedFrom, by_word, has_checkpoints, replica_start, turned
from everstep.brain.concerns.generations import Generations
from everstep.brain.events import CommitManifest, DrainAsked, InstructionType, Note, OrderSnapshots, PublishGroup
from everstep.brain.group import Groups, Skip, Stint
from everstep.brain.job import JobState
from everstep.brain.shards import Shards
from everstep.config.spec import JobSpec
from everstep.model.decision import Decision
from everstep.model.group import Position
from everstep.model.reasons import CheckpointReason
from everstep.model.snapshot import (
    PARTS_VERSION,
    REPLICA_VERSION,
    DatasetPosition,
    EpochPosition,
    Manifest,
    ReplicaCopy,
)

Inputs = dict[str, str | int | float | bool]


def positions_at(groups: Groups, position: Position) -> dict[int, tuple[int, int]]:
    """Return (epoch, position) of each dataset at ``position``, which is not beyond what is committed."""
    out = {stint.dataset: stint.end for stint in groups.history.stints if stint.first < position.step}
    if position.step:
        out[position.dataset] = (position.epoch, position.sample)
    return out


def take_replica(
    checkpoints: Checkpoints,
    job: JobState,
    shards: Shards,
    groups: Groups,
    checkpoint: int,
    slot: int,
    replica: ReplicaCopy | None,
    error: str,
    at: float,
) -> tuple[list[InstructionType], str]:
    """The leader wrote its state, or could not. Returns what follows, and why it must say it again, a little later."""
    writing = checkpoints.writing
    if writing is None or writing.number != checkpoint or (writing.manifest or writing.partial) is not None:
        return [], ""
    if replica is None or error:
        if writing.ends_job:  # (the worker has tried again for long)
            return checkpoints.give_up(f"worker:{slot}: {error or 'no state'}"), ""
        return checkpoints.failed(f"worker:{slot}", slot, error or "no state"), ""
    if replica.lineage != groups.lineage:
        return checkpoints.give_up("every state was lost meanwhile; this one is of steps that are void"), ""
    position = replica.position
    if position.step > groups.step:
        return [], f"step {position.step - 1} is not in the journal yet"
    skips = [(s.dataset, s.epoch, s.lo, s.hi) for s in groups.history.skips]
    positions = positions_at(groups, position)
    before = tuple(s for s in skips if s[1:3] < positions.get(s[0], (0, 0)))
    datasets = tuple(
        _position(shards, number, *positions.get(number, (0, 0)), before) for number in range(len(shards.datasets))
    )
    manifest = Manifest(
        version=PARTS_VERSION if replica.parts else REPLICA_VERSION,
        job=job.spec.name,
        checkpoint=writing.number,
        at=at,
        seed=job.spec.seed,
        partitions=job.spec.partitions,
        snapshots=(),
        datasets=datasets,
        samples_done=sum(
            p.finished_epochs * p.plan.samples + sum(e.samples_done for e in p.epochs if e.epoch == p.finished_epochs)
            for p in datasets
        )
        - sum(hi - lo for d, epoch, lo, hi in before if epoch < datasets[d].finished_epochs),
        spec=job.spec,
        replica=replica,
        skipped=before,
        master_incarnation=job.master_incarnation,
    )
    inputs: Inputs = {
        "checkpoint": writing.number,
        "bytes": replica.written_bytes(writing.number),
        "step": position.step,
    }
    if job.spec.ps:  # snapshots from now on have all that it has: what is before a told position is at all ps
        writing.partial = manifest
        return [OrderSnapshots(writing.number, 0)], ""
    writing.manifest = manifest
    return [CommitManifest(manifest, Decision("commit the checkpoint", f"step {position.step}", inputs))], ""


def _position(
    shards: Shards, number: int, epoch: int, position: int, skips: Sequence[tuple[int, int, int, int]]
) -> DatasetPosition:
    plan = shards.datasets[number].plan
    if position >= plan.samples:
        epoch, position = epoch + 1, 0
    if not position:
        return DatasetPosition(plan, (), epoch)
    skipped = sum(hi - lo for d, e, lo, hi in skips if (d, e) == (number, epoch))
    done = position // plan.shard_samples
    return DatasetPosition(plan, (EpochPosition(epoch, ((0, done),), (), position - skipped),), epoch)


def resume_replica(
    checkpoints: Checkpoints,
    job: JobState,
    shards: Shards,
    generations: Generations,
    manifest: Manifest,
    url: str,
    numbers: int,
) -> list[InstructionType]:
    """Begin with what ``manifest`` has; nothing if this job has begun in any way."""
    replica = manifest.replica
    if replica is None or checkpoints.resumed or shards.datasets or checkpoints.newest is not None:
        return []
    checkpoints.start = ResumedFrom(manifest.checkpoint, url)
    checkpoints.numbers = max(numbers, manifest.checkpoint)
    checkpoints.newest, checkpoints.usable = manifest, True
    checkpoints.datasets = len(manifest.datasets)
    groups, position = generations.group_state, replica.position
    for number, saved in enumerate(manifest.datasets):
        shards.register(saved.plan)
        if number != position.dataset and saved.finished_epochs:
            groups.history.stints.append(Stint(0, number, (0, 0), (saved.finished_epochs, 0)))
    groups.history.skips = [Skip(*skip) for skip in manifest.skipped]
    begin = turned(position, manifest)
    generations.fall_back(begin)
    inputs: Inputs = {"checkpoint": manifest.checkpoint, "samples": shards.samples_done, "step": position.step}
    words = f"checkpoint {manifest.checkpoint} of {url}: {position.step} steps, {shards.samples_done} samples are in it"
    return [Note("", Decision("resume", words + by_word(job), inputs))]


def replica_words(spec: JobSpec) -> str:
    """Return what a checkpoint of a group has, for people."""
    return "the state of rank 0" + (", then every page" if spec.ps else "")


def why_save(event: object, out: Sequence[InstructionType], job: JobState) -> CheckpointReason | None:
    """Why to save the state while there is still somebody who can: one member is left, or a node is taken away; None:
    no reason."""
    for one in out:
        if isinstance(one, PublishGroup) and one.group.size == 1 and one.group.lost and job.workers_wanted > 1:
            return CheckpointReason.LAST_REPLICA
    return CheckpointReason.RECLAIM if isinstance(event, DrainAsked) and len(out) > 1 else None


def save_in_time(
    checkpoints: Checkpoints, job: JobState, groups: Groups, reason: CheckpointReason, at: float, more: bool = False
) -> list[InstructionType]:
    """Order a checkpoint, if there is anything that is in none yet. ``more``: there are steps that were not told
    yet."""
    if job.over or not has_checkpoints(job.spec) or groups.group is None:
        return []
    begun = replica_start(checkpoints)[0].step
    if (groups.step <= begun and not more) or checkpoints.writing is not None:
        return []
    return checkpoints.begin(job, at, reason, True, replica_words(job.spec))
