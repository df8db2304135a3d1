"""Nodes that join a job: over loopback, and in networks of their own where the machine permits that."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest
from local_jobs import Run


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        return int(probe.getsockname()[1])


def join(
    run: Run,
    at: str,
    node: str,
    *flags: str,
    under: tuple[str, ...] = (),
    secret: Path | None = None,
) -> Path:
    """Start an agent with one worker; its run directory. It is ended with the run."""
    run_dir = run.folder / node
    argv = [sys.executable, "-m", "everstep.cli", "agent", "--join", at, "--node", node, "--workers", "1"]
    argv += ["--secret-file", str(secret or run.run_dir / "secret"), "--run-dir", str(run_dir), *flags]
    run.join(node, [*under, *argv], run_dir)
    return run_dir


class Networks(NamedTuple):
    """Two network namespaces joined by a cable. ``host``: address of the first, ``device``: its end of the cable."""

    one: str
    two: str
    host: str
    device: str


def joined_networks() -> Iterator[Networks]:
    """Made, and taken away in the end. Skips the test where the machine does not permit it."""
    tag = f"es{os.getpid() % 10000}"
    one, two, ends = f"{tag}a", f"{tag}b", (f"{tag}v0", f"{tag}v1")
    commands = [
        f"netns add {one}",
        f"netns add {two}",
        f"link add {ends[0]} netns {one} type veth peer name {ends[1]} netns {two}",
        f"-n {one} addr add 10.231.7.1/24 dev {ends[0]}",
        f"-n {two} addr add 10.231.7.2/24 dev {ends[1]}",
        *(f"-n {ns} link set {dev} up" for ns, dev in ((one, ends[0]), (two, ends[1]), (one, "lo"), (two, "lo"))),
    ]
    try:
        if shutil.which("ip") is None:
            pytest.skip("no ip command")
        for command in commands:
            done = subprocess.run(["ip", *command.split()], capture_output=True, text=True, check=False)
            if done.returncode:
                pytest.skip(f"network namespaces are not permitted: {done.stderr.strip()}")
        yield Networks(one, two, "10.231.7.1", ends[0])
    finally:
        for ns in (one, two):
            subprocess.run(["ip", "netns", "del", ns], capture_output=True, check=False)
