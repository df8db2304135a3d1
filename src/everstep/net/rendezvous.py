"""Finds where the master is: RUN_DIR/master.json, replaced in one step by each master that starts."""

from __future__ import annotations

import os
from pathlib import Path

import msgspec

from everstep.bounds import MALFORMED, Whole
from everstep.errors import PlatformError
from everstep.ids import Incarnation, NodeId
from everstep.model.member import Address

MASTER_FILE = "master.json"
MASTER_SOCKET = "sock/master.sock"
"""Relative to the run directory."""

SECRET_FILE = "secret"


def ps_socket(slot: int) -> str:
    """Return the path of a ps's socket, relative to the run directory."""
    return f"sock/ps-{slot}.sock"


def worker_socket(slot: int) -> str:
    """Return the path of a worker's socket, relative to the run directory."""
    return f"sock/worker-{slot}.sock"


class MasterInfo(msgspec.Struct, frozen=True, kw_only=True):
    pid: Whole
    incarnation: Incarnation
    node: NodeId = NodeId("node0")
    unix: str = MASTER_SOCKET
    host: str = ""  # "" unless the job was bound for other nodes
    port: Whole = 0

    @property
    def address(self) -> Address:
        return Address(self.node, self.unix, self.host, self.port)


_master_info_decoder = msgspec.json.Decoder(MasterInfo)


def write_master(run_dir: Path, info: MasterInfo) -> None:
    """Raises PlatformError."""
    path = run_dir / MASTER_FILE
    part = path.with_name(f"{MASTER_FILE}.{os.getpid()}.part")
    try:
        part.touch(mode=0o600)
        part.write_bytes(msgspec.json.encode(info))
        part.replace(path)
    except OSError as error:
        raise PlatformError(f"cannot write {path}: {error.strerror or error}") from error


def read_master(run_dir: Path) -> MasterInfo | None:
    """Return where the master is; None while no master has written its address."""
    try:
        return _master_info_decoder.decode((run_dir / MASTER_FILE).read_bytes())
    except (OSError, *MALFORMED):
        return None


def master_address(run_dir: Path) -> Address | None:
    """Return the master's address, for ``ControlClient(address=lambda: master_address(run_dir))``: read again on every
    attempt."""
    info = read_master(run_dir)
    return None if info is None else info.address
