"""Says which fields the structs within instructions have: what a digest of the journal stands for.

The digest of an entry is one of all fields of its instructions. A struct that gets a field would make every digest of
before wrong, so a journal keeps the shapes by which its master wrote: an instruction is compared without what came
later. The fields of journals of version 2, which keep no shapes, are below.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import Any, Final

import msgspec
from msgspec import inspect

from everstep.brain.events import InstructionType
from everstep.config.spec import JobSpec

Shapes = Mapping[str, tuple[str, ...]]
"""Fields by the name of the struct."""

_NAMES_BEFORE: Final = {
    "CheckpointFile": "ImageFile",
    "OrderSnapshots": "OrderImages",
    "PartitionSnapshot": "BucketImage",
    "Position": "Mark",
    "ReplicaCopy": "ReplicaImage",
    "ShardSchedule": "Plan",
    "StepSplit": "Split",
}
"""Structs that had another name in journals of before."""


@cache
def shapes_now() -> Shapes:
    """Return the fields of every struct that an instruction may hold, in this release."""
    found: dict[str, tuple[str, ...]] = {}
    todo: list[Any] = [inspect.type_info(InstructionType)]
    while todo:
        match todo.pop():
            case inspect.Metadata(type=one):
                todo.append(one)
            case inspect.StructType(cls=cls, fields=fields) if cls.__name__ not in found:
                found[cls.__name__] = tuple(field.encode_name for field in fields)
                todo += [field.type for field in fields]
            case inspect.UnionType(types=several) | inspect.TupleType(item_types=several):
                todo += several
            case inspect.VarTupleType(item_type=one) | inspect.ListType(item_type=one):
                todo.append(one)
            case inspect.DictType(key_type=key, value_type=value):
                todo += [key, value]
    return found


def in_shape(value: Any, shapes: Shapes, words: bool = False) -> Any:
    """Return ``value`` as plain values, its structs with the fields of then. ``words``: its sentences, too, have the
    word of then for a partition (until version 0.1 they said bucket); settings are never reworded."""
    match value:
        case JobSpec():
            return _in_shape(value, shapes, False)
        case msgspec.Struct():
            return _in_shape(value, shapes, words)
        case tuple() | list():
            return [in_shape(one, shapes, words) for one in value]
        case dict():
            return {in_shape(key, shapes, words): in_shape(one, shapes, words) for key, one in value.items()}
        case str() if words:
            return value.replace("partition", "bucket")
    return value


def _in_shape(value: msgspec.Struct, shapes: Shapes, words: bool) -> Any:
    """Return a struct as ``in_shape`` does."""
    config = value.__struct_config__
    called = type(value).__name__
    kept = shapes.get(called, shapes.get(_NAMES_BEFORE.get(called, ""), value.__struct_encode_fields__))
    names = zip(value.__struct_fields__, value.__struct_encode_fields__, strict=True)
    found = {f: in_shape(getattr(value, name), shapes, words) for name, f in names if f in kept}
    if config.array_like:
        return [*([] if config.tag is None else [config.tag]), *found.values()]
    return found if config.tag is None else {config.tag_field or "type": config.tag, **found}


_VERSION_2 = {
    "Address": "node unix host port",
    "BucketImage": "bucket seq fingerprint watermarks files rows bytes_written",
    "CheckpointBegun": "checkpoint",
    "CommitManifest": "manifest decision",
    "DatasetPosition": "plan epochs finished_epochs",
    "Decision": "action reason inputs rejected",
    "DropCheckpoints": "checkpoints",
    "EndOfData": "",
    "EpochPosition": "epoch done quarantined samples_done",
    "Fenced": "reason",
    "FinishJob": "exit_code error",
    "Granted": "lease",
    "Group": "generation members split lost joining hold begin restore origin lease broken",
    "GroupMember": "slot incarnation node address",
    "Grouped": "group cursor",
    "ImageFile": "path size_bytes checksum",
    "InitSpec": "kind a b",
    "JobSpec": (
        "name script args workers ps consistency mode strategy min_workers logical_workers shard lr_rule "
        "heal_from seed run_dir buckets bind metrics hardware tls nonfinite max_restarts script_retries "
        "quarantine_after skip_quarantined progress_timeout lease_s suspect_after_s lost_after_s "
        "disk_full_s cut_off_s rejoin_s master_silent_s master_lost_s start_s threads_per_worker preload "
        "parity protect checkpoint_every model_to checkpoint_to checkpoint_keep checkpoint_keep_every "
        "checkpoint_base_every ps_limit_bytes on_full policy resume_from trust_checkpoint trusted"
    ),
    "Lease": "no shard start stop",
    "Manifest": (
        "version everstep job checkpoint at base seed buckets tables images datasets values samples_done "
        "spec replica skipped master_incarnation"
    ),
    "Mark": "step dataset epoch position",
    "MemberKey": "role slot",
    "Mirror": "id members at row kind",
    "Note": "member decision",
    "Ok": "",
    "OptimizerSpec": (
        "kind lr eps beta1 beta2 momentum dampening nesterov weight_decay initial_accumulator l1 l2 beta"
    ),
    "OrderImages": "checkpoint since",
    "Placement": "version owner servers routing mirrors images",
    "Plan": "name samples shard_samples seed fingerprint",
    "PsPlace": "slot incarnation address",
    "PublishGroup": "group decision",
    "PublishPlacement": "placement decision",
    "Refused": "error",
    "Registered": "dataset",
    "ReleaseShards": "shards",
    "ReplicaImage": "mark file origin parameters",
    "Reply": "answer",
    "RevokeLease": "member lease decision",
    "Split": "version shares passes rate",
    "StartProcess": "node role slot incarnation decision after_s",
    "StopProcess": "node role slot incarnation grace_s decision",
    "TableSpec": ("name dim optimizer init rows dense parameters admit_after expire_batches expire_s aligned"),
    "Wait": "retry_after_s",
    "Welcome": "master_incarnation placement revoked",
    "Yes": "yes",
}
SHAPES_2: Shapes = {name: tuple(fields.split()) for name, fields in _VERSION_2.items()}
"""Of journals of version 2."""
