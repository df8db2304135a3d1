"""The master, as commands and agents reach it."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import msgspec

from everstep.agent.agent import Agent
from everstep.brain.events import AnswerType
from everstep.errors import DeadlineError, PlatformError
from everstep.ids import Incarnation, NodeId
from everstep.model.member import Address
from everstep.net.auth import Identity, Secret, load_secret
from everstep.net.control import ControlClient
from everstep.net.messages import RequestType, SpecReport, StatusReport

ANSWER_S = 10.0


class MasterFile(msgspec.Struct):
    """What the reading side needs of ``master.json``."""

    address: Address
    pid: int = 0
    incarnation: Incarnation = Incarnation(0)


def master_address(run_dir: Path) -> Address:
    """Where the master listens now; raises PlatformError while it has not said so."""
    try:
        return msgspec.json.decode((run_dir / "master.json").read_bytes(), type=MasterFile).address
    except (OSError, msgspec.MsgspecError) as error:
        raise PlatformError(f"the master of {run_dir} has not started: {error}") from None


def connect_agent(agent: Agent, address: Callable[[], Address], secret: Secret) -> ControlClient:
    """The agent's lasting connection."""
    raise NotImplementedError


def ask_master(run_dir: Path, request: RequestType, timeout_s: float = ANSWER_S) -> object:
    raise NotImplementedError
