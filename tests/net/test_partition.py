"""A silent partition between two network namespaces: noticed by TCP_USER_TIMEOUT, over when the network is back."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from everstep.brain.events import Ok
from everstep.errors import WireError
from everstep.ids import Incarnation, NodeId, Slot
from everstep.model.member import Address
from everstep.net import messages as wire
from everstep.net.auth import Identity, Secret, create_secret
from everstep.net.control import ControlClient
from everstep.net.data import DataClient

pytestmark = pytest.mark.processes

Until = Callable[[Callable[[], object]], None]

SERVER = """
import sys, threading
from pathlib import Path
from everstep.brain.events import Ok
from everstep.ids import Incarnation, Slot
from everstep.net import messages as wire
from everstep.net.auth import Identity, load_secret
from everstep.net.data import DataServer
from everstep.net.sockets import listen_tcp
sys.path.insert(0, sys.argv[1])
from masters import Master

class Service:
    def handle(self, request, body, arena):
        return wire.LogTaken(), ()

run_dir = Path(sys.argv[2])
secret = load_secret(run_dir / "secret")
master = Master(run_dir, secret, lambda peer, request: Ok(), tcp=True, host=sys.argv[3])
sock = listen_tcp(sys.argv[3], 0)
ps = Identity(purpose="data", role="ps", slot=Slot(0), incarnation=Incarnation(1))
DataServer(Service(), [sock], secret, ps)
print(master.port, sock.getsockname()[1], flush=True)
sys.stdin.read()
"""


def ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True)


class Far:
    """Another node: a network namespace behind a virtual cable, with a master and a ps in it."""

    def __init__(self, run_dir: Path) -> None:
        tag = f"{os.getpid() % 60000:x}"
        self.space, self.near, far = f"everstep-{tag}", f"esn{tag}", f"esf{tag}"
        net = f"10.{200 + os.getpid() % 50}.{os.getpid() // 50 % 250}"
        self.here, self.there = f"{net}.1", f"{net}.2"
        ip("netns", "add", self.space)
        try:
            ip("link", "add", self.near, "type", "veth", "peer", "name", far, "netns", self.space)
            ip("addr", "add", f"{self.here}/24", "dev", self.near)
            ip("link", "set", self.near, "up")
            ip("-n", self.space, "addr", "add", f"{self.there}/24", "dev", far)
            ip("-n", self.space, "link", "set", far, "up")
        except BaseException:
            ip("netns", "del", self.space)
            raise
        self.secret: Secret = create_secret(run_dir / "secret")
        argv = [sys.executable, "-c", SERVER, str(Path(__file__).parent), str(run_dir), self.there]
        self.process = subprocess.Popen(
            ["ip", "netns", "exec", self.space, *argv], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        assert self.process.stdout is not None
        self.control_port, self.data_port = map(int, self.process.stdout.readline().split())

    def cut(self) -> None:
        """Nothing comes back any more, and nobody says so."""
        ip("-n", self.space, "route", "add", "blackhole", f"{self.here}/32")

    def heal(self) -> None:
        ip("-n", self.space, "route", "del", "blackhole", f"{self.here}/32")

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        for pipe in (self.process.stdin, self.process.stdout):
            assert pipe is not None
            pipe.close()
        ip("netns", "del", self.space)  # and the cable with it


@pytest.fixture
def far(tmp_path: Path) -> Iterator[Far]:
    if shutil.which("ip") is None or os.geteuid() != 0:
        pytest.skip("needs root and iproute2 for a network namespace")
    try:
        made = Far(tmp_path)
    except subprocess.CalledProcessError as error:
        pytest.skip(f"no network namespaces here: {error.stderr.decode().strip()}")
    yield made
    made.close()


def test_a_silent_partition(far: Far, until: Until) -> None:
    me = Identity(purpose="control", role="worker", slot=Slot(0), incarnation=Incarnation(1), node=NodeId("near"))
    control = ControlClient(
        address=lambda: Address(NodeId("far"), "", far.there, far.control_port),
        run_dir=None,
        secret=far.secret,
        identity=me,
        beat=wire.Beat,
        beat_s=0.1,
    )
    data = DataClient(
        Address(NodeId("far"), "", far.there, far.data_port),
        secret=far.secret,
        identity=Identity(purpose="data", role="worker", node=NodeId("near")),
    )
    with control, data:
        assert control.call(wire.ValuesReported({}), 20) == Ok()
        assert data.request(wire.Stat(), timeout_s=20)[0] == wire.LogTaken()
        far.cut()
        with pytest.raises(WireError, match="timed out"):  # the kernel's word, long before our own deadline
            data.request(wire.Stat(), timeout_s=60)
        until(lambda: not control.connected)
        until(lambda: "timed out" in repr(control) or "did not happen" in repr(control))
        waiting = control.submit(wire.ValuesReported({}), 60)
        far.heal()
        assert waiting.result(60) == Ok()
        assert control.connects == 2
