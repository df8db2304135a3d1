"""Which way gradients go where models are on GPUs: over NCCL, or by way of the host's memory and gloo.

NCCL reaches only devices that are each one member's alone, and only where every torch has it, of one version. Members
say along with their addresses what they have, and the same pure rule (``choose``) then gives the same answer at all.
"""

from __future__ import annotations

import hashlib
import os
import re
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from enum import Enum
from pathlib import Path
from typing import Any, Final, NamedTuple

import torch

from everstep.allreduce.environment import LOCAL_VARIABLE, NCCL_VARIABLE
from everstep.errors import ScriptError

SEVERAL: Final = "several devices"


class Way(Enum):
    """Says how the tensors of one member's model get to the others."""

    HOST = "gloo"  # all models are on the CPU
    STAGED = "staged"  # tensors of devices are copied to the host's memory, and go over gloo
    NCCL = "nccl"


class DevicePlace(NamedTuple):
    """Says where one member's model is. ``kind``: "cpu", "cuda", ..., or ``SEVERAL``; ``identity``: of the device, 64
    bits, the same for all who use it; ``nccl``: version that this process can use, as an integer; 0: none."""

    kind: str = "cpu"
    identity: int = 0
    nccl: int = 0


class Choice(NamedTuple):
    way: Way
    why: str = ""  # not NCCL, in words; "" where nothing is to be said


def choose(places: Sequence[DevicePlace]) -> Choice:
    """Return one way for all members of a group, whose models are at ``places``, by rank. Raises ScriptError, at all
    alike: some models are cut over devices and others not."""
    kinds = {p.kind for p in places}
    if SEVERAL in kinds and len(kinds) > 1:
        others = ", ".join(str(rank) for rank, p in enumerate(places) if p.kind != SEVERAL)
        raise ScriptError(
            f"the model is on one device at rank {others} and on several at others, whose gradients lie in another "
            "order: put it on one everywhere, model.to(job.device)"
        )
    if kinds == {"cpu"}:
        return Choice(Way.HOST)
    if kinds != {"cuda"}:
        return Choice(Way.STAGED, f"models are on {', '.join(sorted(kinds))}")
    users: dict[int, list[int]] = defaultdict(list)
    for rank, place in enumerate(places):
        users[place.identity].append(rank)
    shared = next((ranks for ranks in users.values() if len(ranks) > 1), None)
    if shared is not None:
        return Choice(Way.STAGED, f"ranks {', '.join(map(str, shared))} share one GPU, which NCCL refuses")
    without = [str(rank) for rank, p in enumerate(places) if not p.nccl]
    if without:
        who = ", ".join(without[:8])
        return Choice(Way.STAGED, f"no NCCL at rank {who} (not in its torch, did not connect, or {NCCL_VARIABLE}=0)")
    versions = sorted({p.nccl for p in places})
    if len(versions) > 1:
        return Choice(Way.STAGED, f"versions of NCCL differ: {', '.join(map(str, versions))}")
    return Choice(Way.NCCL)


def place_of(devices: Iterable[torch.device]) -> DevicePlace:
    """Return the place of a model whose parameters are on these."""
    known = sorted(set(devices), key=str)
    if len(known) > 1:
        return DevicePlace(SEVERAL)
    if not known or known[0].type == "cpu":
        return DevicePlace()
    device = known[0]
    return DevicePlace(device.type, _identity(device), _nccl_version() if device.type == "cuda" else 0)


def _identity(device: torch.device) -> int:
    """Return a number that is the same in all processes of all containers that use this device, another one for every
    other device."""
    identity = str(device)
    if device.type == "cuda":
        identity = str(torch.cuda.get_device_properties(device).uuid)
    else:
        identity += _machine()
    return int.from_bytes(hashlib.blake2b(identity.encode(), digest_size=8).digest(), "little")


def _machine() -> str:
    path = Path("/proc/sys/kernel/random/boot_id")
    return path.read_text() if path.exists() else ""


def nccl_backend() -> Any | None:
    """Return torch's process group over NCCL; None: this torch has none."""
    return getattr(torch._C._distributed_c10d, "ProcessGroupNCCL", None)


def give_up_nccl() -> None:
    """It did not connect here: this process does not say any more that it has it, and nobody waits for it again."""
    _given_up.append(True)


_given_up: list[bool] = []


def _nccl_version() -> int:
    if _given_up or os.environ.get(NCCL_VARIABLE) == "0" or nccl_backend() is None:
        return 0
    return version_number(torch.cuda.nccl.version())  # type: ignore[no-untyped-call]


def version_number(version: Sequence[Any]) -> int:
    """(2, 28, 9) is 22809."""
    major, minor, patch = [int(re.sub(r"\D.*", "", str(v)) or 0) for v in (*version, 0, 0)[:3]]
    return major * 10_000 + minor * 100 + patch


def wait_for(devices: Iterable[torch.device]) -> None:
    """Wait until what this thread has asked of them is done; of the CPU it always is."""
    for device in devices:
        if device.type == "cuda":
            torch.cuda.current_stream(device).synchronize()


# ---------------------------------------------------------------- this worker's device


def device_for(environment: Mapping[str, str], count: int) -> torch.device:
    """Return the device of a worker that has ``count`` GPUs in view: they go round by its number on its node; the CPU
    where there is none."""
    if count <= 0:
        return torch.device("cpu")
    local = environment.get(LOCAL_VARIABLE, "")
    return torch.device("cuda", int(local) % count if local.isdigit() else 0)
