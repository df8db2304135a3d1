"""A ps of so many MB gets a notice: how long until all that it alone had is safe elsewhere.

Two nodes on this machine: the first has the master, a worker and a ps, the second one ps. Nothing is mirrored. The
script writes each row of a table once, so that every row has its optimizer's state, and then trains slowly on.
"""

from __future__ import annotations

import contextlib
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import psutil

from benchmarks._jobs import Job
from benchmarks._measure import Child, everstep
from everstep.ids import PartitionId
from everstep.model.member import Role
from everstep.monitor.pslog import PsLog
from everstep.net.auth import load_secret
from everstep.net.rendezvous import SECRET_FILE
from everstep.net.retry import Deadline
from everstep.net.sockets import listen_tcp
from everstep.net.tls import TlsSocket, server_context

WIDTH = 64
ROW_BYTES = 3 * 4 * WIDTH  # values, and two numbers of Adam for each
IDS = 32  # of a sample
BATCH = 512
LIMIT_S = 240.0
PIECE = 1 << 20
LOOKS = 10  # at the CPU of the ps, for one at their logs
CALM_BATCHES = 40  # before the notice: what pushes cost
TAKER = """
import sys
from pathlib import Path
import numpy as np
from everstep.net.auth import load_secret
from everstep.net.retry import Deadline
from everstep.net.sockets import connect_tcp
from everstep.net.tls import TlsSocket, client_context

deadline = Deadline(30.0, "the connection")
raw = connect_tcp("127.0.0.1", int(sys.argv[1]), deadline)
wrapped = TlsSocket(raw, client_context(load_secret(Path(sys.argv[3]))), server_side=False)
wrapped.handshake(deadline)
left = memoryview(np.empty(int(sys.argv[2]), np.uint8))
while left:
    left = left[wrapped.recv_into(left) :]
raw.sendall(b"x")
"""
SCRIPT = """
import time
import numpy as np, torch
import everstep as es
from torch import nn

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.bag = nn.EmbeddingBag({rows}, {width}, mode="sum")
        self.top = nn.Linear({width}, 1)
    def forward(self, b):
        return self.top(self.bag(b["ids"])).squeeze(1)

job = es.join()
ids = np.arange({rows}).reshape(-1, {ids})
data = {{"ids": ids, "label": (ids[:, 0] // {ids} % 2).astype(np.float32)}}
model = job.replicate(job.sparse(Net()))
opt = job.optimizer(torch.optim.Adam(model.parameters(), lr=0.01))
for step, batch in enumerate(job.steps(job.loader(data, batch_size={batch}, epochs=1000))):
    loss = nn.functional.binary_cross_entropy_with_logits(model(batch), batch["label"])
    opt.zero_grad(); loss.backward(); opt.step()
    if step * {batch} > len(ids):
        time.sleep(0.1)
"""


class NoticeToSafe(NamedTuple):
    """What one notice took. ``safe_s``: until all partitions were owned elsewhere. ``wire_s``, ``tls_s``: what their
    bytes take through one connection of the loopback, plain from a thread to another, and with TLS from a process to
    another. ``cpu_s``: of both ps, more than so many pushes took before."""

    moved_bytes: int
    safe_s: float
    wire_s: float
    tls_s: float
    cpu_s: float

    @property
    def over_wire(self) -> float:
        return self.safe_s / self.wire_s

    @property
    def over_tls(self) -> float:
        return self.safe_s / self.tls_s


def wire_s(n_bytes: int) -> float:
    """Seconds that so many bytes take from one thread to another through a connection of the loopback."""
    with socket.create_server(("127.0.0.1", 0)) as server, socket.create_connection(server.getsockname()) as out:
        inside, _ = server.accept()
        with inside:
            piece, room = bytes(PIECE), bytearray(PIECE)

            def send() -> None:
                for _ in range(-(-n_bytes // PIECE)):
                    out.sendall(piece)
                out.shutdown(socket.SHUT_WR)

            sender = threading.Thread(target=send)
            began = time.monotonic()
            sender.start()
            while inside.recv_into(room):
                pass
            sender.join()
            return time.monotonic() - began


def tls_s(n_bytes: int, secret_file: Path) -> float:
    """Seconds that so many bytes take from the memory of this process to new memory of another one, through one
    connection of the loopback with TLS as ps of two nodes have it."""
    secret = load_secret(secret_file)
    with listen_tcp("127.0.0.1", 0) as server:
        port = server.getsockname()[1]
        child = subprocess.Popen([sys.executable, "-c", TAKER, str(port), str(n_bytes), str(secret_file)])
        raw, _ = server.accept()
        try:
            wrapped = TlsSocket(raw, server_context(secret), server_side=True)
            wrapped.handshake(Deadline(30.0, "the handshake"))
            bytes_left = memoryview(np.ones(n_bytes, np.uint8))
            began = time.monotonic()
            while bytes_left or wrapped.unsent:
                bytes_left = bytes_left[wrapped.sendmsg([bytes_left] if bytes_left else []) :]
            if raw.recv(1) == b"":
                raise RuntimeError("the other process ended early")
            return time.monotonic() - began
        finally:
            raw.close()
            child.kill()
            child.wait()


def cpu_s(pids: Sequence[int]) -> float:
    """CPU seconds that these processes took so far."""
    return sum(t.user + t.system for t in (psutil.Process(pid).cpu_times() for pid in pids))


def _acquired(logs: list[PsLog], partitions: set[PartitionId], since: float) -> dict[PartitionId, float]:
    """When each of these partitions came to another ps after ``since``."""
    return {
        partition: stint.at
        for log in logs
        for partition in partitions
        for stint in log.stints.get(partition, [])
        if stint.acquired is not None and stint.at > since
    }


def notice_to_safe(home: Path, state_mb: int, lead_s: float) -> NoticeToSafe:
    """Give a ps with ``state_mb`` MB a notice of ``lead_s``. RuntimeError if it is not safe within ``LIMIT_S``."""
    home.mkdir()
    rows = 2 * state_mb * 10**6 // ROW_BYTES // (IDS * BATCH) * IDS * BATCH
    script, going = home / "train.py", home / "going"
    script.write_text(SCRIPT.format(rows=rows, width=WIDTH, ids=IDS, batch=BATCH))
    flags = ["run", "--workers", "1", "--ps", "2", "--nodes", "2", "--bind", "127.0.0.1:0", "--no-display"]
    job = Job(home, flags, [str(script)], LIMIT_S)
    joined: Child | None = None
    try:
        job.wait_for(lambda: "--join " in job.words())
        at = job.log.read_text().partition("--join ")[2].split()[0]
        verb = ["agent", "--join", at, "--node", "b", "--ps", "1", "--machine", "mb", "--run-dir", str(home / "b")]
        secret = ["--secret-file", str(job.run_dir / "secret"), "--notices", f"file:{going}"]
        joined = Child(everstep(*verb, *secret), log=home / "b.log")
        job.wait_for(lambda: job.samples_done() >= rows // IDS)
        status = job.status()
        assert status is not None
        (slot,) = (m.slot for m in status.members if m.role is Role.PS and m.node == "b")
        held = {p for log in job.logs() if log.slot == slot for p in log.stints}
        pids = [m.pid for m in status.members if m.role is Role.PS]
        before_s, samples = cpu_s(pids), job.samples_done()
        job.wait_for(lambda: job.samples_done() > samples + CALM_BATCHES * BATCH)
        sample_s = (cpu_s(pids) - before_s) / (job.samples_done() - samples)
        before_s, samples, began = cpu_s(pids), job.samples_done(), time.time()
        going.write_text(f"{lead_s:g}")
        spent = [before_s]

        def safe() -> bool:
            for _ in range(LOOKS):  # (reading the logs takes CPU that the job could use; they say themselves when)
                time.sleep(0.1)
                with contextlib.suppress(psutil.NoSuchProcess):  # (the one that is empty may end at once)
                    spent.append(cpu_s(pids))
            return held <= set(_acquired(job.logs(), held, began))

        job.wait_for(safe)
        safe_at = max(_acquired(job.logs(), held, began).values())
        job.check()
        moved = rows * ROW_BYTES * len(held) // status.placement.partitions
        more_s = max(0.0, spent[-1] - before_s - sample_s * (job.samples_done() - samples))
        return NoticeToSafe(moved, safe_at - began, wire_s(moved), tls_s(moved, job.run_dir / SECRET_FILE), more_s)
    finally:
        job.close()
        if joined is not None:
            joined.kill()
