"""Three machines that share nothing: network namespaces on a switch; a process sees its own machine's directory only.

``Machines.vanish`` takes one away whole: its cable first, so that nobody hears a last word, then all that runs there.
``cut`` pulls a cable for a while; ``deafen`` lets nothing reach a machine that is still heard.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator

import pytest
from local_jobs import Run, until

from everstep.model.job_view import JobView

NAMES = ("a", "b", "c")
PORT = 7171

COUNTING = """
import os, time
import numpy as np, torch
import everstep as es
from torch import nn

job = es.join()
rows = {rows}
rng = np.random.default_rng(0)
ids = rng.integers(0, 500, (rows, 2))
data = {{"ids": ids, "row": np.arange(rows), "label": (ids.sum(1) % 2).astype(np.float32)}}

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.bag = nn.EmbeddingBag(500, 4, mode="sum")
        self.top = nn.Linear(4, 1)
        self.witness = es.testing.Witness(job, samples=rows, epochs={epochs})
    def forward(self, b):
        return self.top(self.bag(b["ids"])).squeeze(1)

net = Net()
model = job.replicate(job.sparse(net))
rest = [*net.bag.parameters(), *net.top.parameters()]
groups = [{{"params": rest}}, {{"params": net.witness.parameters(), "lr": 1.0}}]
opt = job.optimizer(torch.optim.SGD(groups, lr=0.05))
for batch in job.steps(job.loader(data, batch_size={batch}, epochs={epochs})):
    loss = nn.functional.binary_cross_entropy_with_logits(model(batch), batch["label"]) + net.witness(batch["row"])
    opt.zero_grad(); loss.backward(); opt.step()
    job.report(loss=loss)
    if not os.path.exists({hurry!r}):
        time.sleep({pause_s})
"""


def _ip(*commands: str) -> None:
    for command in commands:
        done = subprocess.run(command.split(), capture_output=True, text=True, check=False)
        if done.returncode:
            pytest.skip(f"network namespaces are not permitted: {command}: {done.stderr.strip()}")


class Machines:
    """``run`` on three machines, the first of which has the master."""

    def __init__(self, run: Run) -> None:
        self.run, self.tag = run, f"em{os.getpid() % 10000}"
        self.switch = f"{self.tag}s"
        if shutil.which("ip") is None or os.geteuid() != 0:
            pytest.skip("network namespaces need ip and root")
        _ip(f"ip netns add {self.switch}", f"ip -n {self.switch} link add br0 type bridge")
        _ip(f"ip -n {self.switch} link set br0 up")
        for number, name in enumerate(NAMES, 1):
            ns, port = self.ns(name), f"p{name}"
            mac = f"02:00:00:00:07:0{number}"
            _ip(f"ip netns add {ns}", f"ip -n {self.switch} link add {port} type veth peer name eth0 netns {ns}")
            _ip(f"ip -n {self.switch} link set {port} master br0", f"ip -n {self.switch} link set {port} up")
            _ip(f"ip -n {ns} link set eth0 address {mac}", f"ip -n {ns} addr add 10.231.9.{number}/24 dev eth0")
            _ip(f"ip -n {ns} link set eth0 up", f"ip -n {ns} link set lo up")
            (run.folder / name).mkdir()
        run.run_dir = run.folder / "a" / "run"

    def ns(self, name: str) -> str:
        return f"{self.tag}{name}"

    def alone(self, name: str) -> tuple[str, ...]:
        """What a command begins with to run on this machine: the other machines' directories are empty there."""
        hide = " && ".join(f"mount -t tmpfs -o size=4k none {self.run.folder / o}" for o in NAMES if o != name)
        return ("ip", "netns", "exec", self.ns(name), "unshare", "-m", "sh", "-c", f'{hide} && exec "$@"', "sh")

    def write(self, rows: int = 2000, epochs: int = 4, pause_s: float = 0.3, batch: int = 50) -> None:
        hurry = str(self.run.folder / "hurry")
        text = COUNTING.format(rows=rows, epochs=epochs, pause_s=pause_s, batch=batch, hurry=hurry)
        self.run.script.write_text(text)

    def start(self, *flags: str) -> None:
        """The job, and agents of the other two machines."""
        self.run.start("--bind", f"10.231.9.1:{PORT}", *flags, under=self.alone("a"))
        until(lambda: self.run.status() is not None, why=self.run.story)
        for name in NAMES[1:]:
            self.join(name, name)

    def join(self, name: str, node: str) -> None:
        """An agent on this machine: it has a copy of the secret, and no file of the others."""
        folder = self.run.folder / name
        secret = folder / f"secret-{node}"
        shutil.copyfile(self.run.run_dir / "secret", secret)
        secret.chmod(0o600)
        argv = [sys.executable, "-m", "everstep.cli", "agent", "--join", f"10.231.9.1:{PORT}", "--node", node]
        argv += ["--machine", name, "--secret-file", str(secret), "--run-dir", str(folder / node)]
        self.run.join(node, [*self.alone(name), *argv], folder / node)

    def pids(self, name: str) -> list[int]:
        found = subprocess.run(["ip", "netns", "pids", self.ns(name)], capture_output=True, text=True, check=False)
        return [int(pid) for pid in found.stdout.split()]

    def vanish(self, name: str) -> None:
        self.cable(name, False)
        for _ in range(3):  # (one that was just being forked)
            for pid in self.pids(name):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)

    def cable(self, name: str, plugged: bool) -> None:
        subprocess.run(["ip", "-n", self.switch, "link", "set", f"p{name}", "up" if plugged else "down"], check=True)

    def cut(self, name: str, seconds: float) -> None:
        self.cable(name, False)
        time.sleep(seconds)
        self.cable(name, True)

    def deafen(self, name: str, seconds: float) -> None:
        """What is sent to this machine goes elsewhere; what it says is heard."""
        mac = f"02:00:00:00:07:0{NAMES.index(name) + 1}"
        wrong = next(o for o in NAMES[1:] if o != name)
        entry = ["netns", "exec", self.switch, "bridge", "fdb"]
        subprocess.run(["ip", *entry, "replace", mac, "dev", f"p{wrong}", "master", "static", "sticky"], check=True)
        time.sleep(seconds)
        subprocess.run(["ip", *entry, "del", mac, "dev", f"p{wrong}", "master"], check=True)

    def training(self, samples: int = 1) -> JobView:
        self.run.trained(samples)
        view = self.run.status()
        assert view is not None
        return view

    def close(self) -> None:
        for name in NAMES:
            for pid in self.pids(name):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
        for ns in (*map(self.ns, NAMES), self.switch):
            subprocess.run(["ip", "netns", "del", ns], capture_output=True, check=False)


@contextlib.contextmanager
def three_machines(run: Run) -> Iterator[Machines]:
    made = Machines(run)
    try:
        yield made
    finally:
        made.close()
