"""Names that changed: each old name works for one more version, and says so in one line."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

GONE_IN: Final = "0.2"
"""The version of everstep that no longer knows the old names."""

SETTINGS: Final[Mapping[str, str]] = {
    "shard": "processes_per_worker",
    "buckets": "partitions",
    "checkpoint_base_every": "checkpoint_full_every",
}
"""Settings of a job (job.yaml, flags, environment): old name -> new name."""

POLICIES: Final[Mapping[str, str]] = {"nondedicated": "shared", "dedicated": "exclusive"}
"""Shipped policies: the name in the literature -> ours. Both names stay, and neither is worth a line."""


def renamed_line(old: str, new: str) -> str:
    """Return the line that a user of an old name reads, such as ``--shard is now --processes-per-worker; ...``."""
    return f"{old} is now {new}; the old name works until everstep {GONE_IN}"
