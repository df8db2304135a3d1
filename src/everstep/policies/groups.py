"""Decides who is in the next group, and when a first one begins."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from everstep.model.group import GroupMember

FORM_GRACE_S = 5.0  # so long the first workers, once they are enough, wait for the rest
SAME_AGAIN_S = 60.0  # between two notes that say for whom too few workers wait
NAMED = 8  # absent workers that a note names
SMALL = 64  # members up to which every change is published at once
QUIET_S = 0.0005  # by member of a larger group, between two of them
BLAME_APART_S = 2.0  # losses closer together count as one


def ready_to_form(asked: int, expected: int, least: int, at: float, due_at: float) -> tuple[bool, float]:
    """Return whether ``asked`` workers begin now, and else the time (seconds) at which this is to be looked at again.

    ``expected``: running workers that may still come, those that asked included; ``due_at``: what this said last, 0
    where the workers have only just become enough, or too few. Too few (below ``least``) never begin: their time is
    the one at which it is said for whom they wait."""
    due_at = due_at or at + FORM_GRACE_S
    if asked < max(1, least):
        return False, due_at if at < due_at else at + SAME_AGAIN_S
    if asked >= max(1, expected) or at >= due_at:
        return True, 0.0
    return False, due_at


def absent_words(absent: Collection[int]) -> str:
    """Return the absent in words: ``worker:1 and worker:3``; of many, the first ones and how many more."""
    names = [f"worker:{slot}" for slot in sorted(absent)[:NAMED]]
    if len(absent) > NAMED:
        names.append(f"{len(absent) - NAMED} more")
    return " and ".join(filter(None, [", ".join(names[:-1]), *names[-1:]]))


def hold_words(members: int, least: int) -> str:
    """Return why no step may begin; "" if one may."""
    return f"{members} of at least {least} workers" if members < least else ""


def admitted(staying: Sequence[GroupMember], synced: Sequence[GroupMember], most: int) -> list[GroupMember]:
    """Return those who stay, in their order, then who may enter. ``most``: members that a group can have, 0: any
    number."""
    room = len(synced) if most <= 0 else max(0, most - len(staying))
    return [*staying, *synced[:room]]


def quiet_s(members: int) -> float:
    """Seconds for which further changes are collected: everybody is told of everybody, which is quadratic."""
    return QUIET_S * members if members > SMALL else 0.0
