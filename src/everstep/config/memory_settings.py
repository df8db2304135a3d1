"""Checks the settings of memory: of each worker, of each ps, and of all together."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from everstep.config.spec import JobSpec
from everstep.errors import ConfigError
from everstep.units import size_bytes

LEAST_BYTES: Final = {"worker": 512 << 20, "ps": 128 << 20}
"""Private memory without which a process of a role does not come up: a worker has 340 MB with torch alone, a ps has
80 MB without a row, and 3 MB for each other ps."""

MOST_BYTES: Final = 1 << 56
_ALL_BYTES: Final = 1 << 20, MOST_BYTES


def check_memory(spec: JobSpec, at: Mapping[str, str]) -> None:
    """Check the memory that processes of a job may take, each and together. ``at``: where each setting was given.
    Raises ConfigError."""
    each = {"worker": spec.worker_memory, "ps": spec.ps_memory}
    for role, text in each.items():
        if text:
            name = f"{role}_memory"
            _size(text, f"{name} = {text!r}{at[name]}", "2GB", LEAST_BYTES[role], MOST_BYTES)
    if not spec.ps:
        for name in ("ps_memory", "ps_threads"):
            if getattr(spec, name):
                raise ConfigError(f"{name} = {getattr(spec, name)!r}{at[name]}: this job has no ps; leave it out")
    if not spec.max_memory:
        return
    where = f"max_memory = {spec.max_memory!r}{at['max_memory']}"
    most = _size(spec.max_memory, where, "16GB", *_ALL_BYTES)
    if not any(each.values()) and "auto" not in spec.policy.split("+"):
        raise ConfigError(f"{where}: needs policy: auto, which chooses sizes, or worker_memory or ps_memory")
    counts = {"worker": spec.workers, "ps": spec.ps}
    if sum(counts[role] * size_bytes(text) for role, text in each.items() if text) > most:
        words = " and ".join(f"{counts[role]} {role} of {text}" for role, text in each.items() if text)
        raise ConfigError(f"{where}: {words} are more; give fewer or smaller ones, or raise it")


def _size(text: str, where: str, example: str, least: int, most: int) -> int:
    """Return the bytes of a setting. Raises ConfigError."""
    try:
        found = size_bytes(text)
    except ConfigError as error:
        raise ConfigError(f"{where}: expected a size such as {example!r} ({error})") from None
    if not least <= found <= most:
        raise ConfigError(f"{where}: must be from {least >> 20}MiB to {most >> 20}MiB")
    return found
