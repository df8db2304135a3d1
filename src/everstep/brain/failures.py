"""Says whether a worker whose script raised is tried again: by what the error may come from, within
``script_retries``."""

from __future__ import annotations

from everstep.brain.members import Members, SlotRecord
from everstep.model.failure import Failure
from everstep.model.member import Role


def judge(failure: Failure | None, record: SlotRecord, members: Members, retries: int, progress: int) -> str:
    """Count it. ``progress``: what the job has trained so far, a number that grows. Returns why
    there is no other try, "" where there is one."""
    if failure is None or failure.cause == "script":
        return "it would raise again"
    progress = max(progress, failure.reached)  # the last steps before it raised may not have been reported
    if failure.steps and progress > record.failed_at:  # it got on, and the job too: beyond where it failed last
        record.failures, record.failed = 0, ""
    before, record.failed, record.failed_at = record.failed, failure.where, max(progress, record.failed_at)
    record.failures += 1
    here = record.member.node
    if failure.cause == "node":
        if not any(room.node != here and room.free for room in members.rooms(Role.WORKER)):
            return "no other node has a place, and here it would raise again"
        record.avoid = here
    if failure.cause in ("memory", "device"):
        if before == failure.where:
            return "it raised the same at the same place again"
        for other in members.workers.values():
            if other is not record and (other.failed, other.failed_at) == (failure.where, progress):
                return f"{other.member.key} raised the same at the same place"
        record.avoid = here if failure.cause == "device" else record.avoid  # (if there is another)
    if record.failures > retries:
        return f"it failed {record.failures} times in a row without a step between; script_retries={retries}"
    return ""
