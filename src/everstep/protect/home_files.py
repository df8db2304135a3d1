"""Keeps on the first node what processes of other nodes write: nodes need not share a directory.

The first node serves a few *places* (its directory of checkpoints, that of the job it goes on from) and takes the audit
logs of other nodes as they grow: what a node had told before it was lost is there. A place at a URL is reached by
everybody directly, and not served here.
"""

from __future__ import annotations

import contextlib
import errno
import io
import os
import re
import secrets
import socket
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO, cast

from everstep.config.spec import JobSpec
from everstep.errors import EverstepError, InternalError, StorageError, WireError
from everstep.ids import NodeId
from everstep.model.member import Address
from everstep.net.auth import Identity, Secret
from everstep.net.data import DataClient, DataServer
from everstep.net.frames import Buffer
from everstep.net.messages import (
    Bad,
    DataAnswer,
    DataRequest,
    FileDrop,
    FileList,
    FileNames,
    FilePiece,
    FilePut,
    FileRead,
    FileTaken,
    LogGrown,
    LogsReported,
)
from everstep.policies.node_selection import HOME_NODE
from everstep.protect.model import model_url
from everstep.protect.sources import own_url
from everstep.storage.atomic import private
from everstep.storage.places import LocalPlace, NewFile, StoragePlace, bare, open_place

CHECKPOINTS = "checkpoints"
RESUMED = "resumed"
"""Places of a job: its own checkpoints, and those that it goes on from."""

MODEL = "model"
"""Place of the model that the job leaves."""

NODE_LOGS = "nodes"
"""Place of the logs of other nodes' processes: a folder for each node."""

PIECE_BYTES = 1 << 20
KEPT_LOG_BYTES = 4 << 20  # of a process's log, its end
ASK_S = 60.0
ALIVE_S = 5.0
"""A node that has not been heard for so long is not waited for."""
_AT_ONCE = 256  # files that are being written
_LOG = re.compile(r"(ps|worker)-\d{1,9}\.\d{1,9}(\.copy-\d{1,9})?\.log")


def served_places(spec: JobSpec, run_dir: Path) -> dict[str, Path]:
    """Return the directories that the first node serves; URLs are everybody's own to reach."""
    of = {CHECKPOINTS: own_url(spec, run_dir), RESUMED: spec.resume_from, MODEL: model_url(spec, run_dir)}
    return {name: Path(url) for name, url in of.items() if url and "://" not in url}


class HomeFiles:
    """Serves places and takes logs. Thread-safe; ``close`` ends it. ``logs``: the folder of audit logs."""

    def __init__(
        self,
        places: Mapping[str, Path],
        logs: Path,
        listener: socket.socket | None = None,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self._listener = listener
        self._places = {name: LocalPlace(root) for name, root in places.items()}
        self._logs, self._now = logs, now
        self._lock = threading.Lock()
        self._parts: dict[tuple[str, str, str], tuple[NewFile, int]] = {}  # (place, path, part): file, size
        self._nodes: dict[str, tuple[float, bool]] = {}  # node: last heard, has told all
        self._server: DataServer | None = None

    def __repr__(self) -> str:
        return f"<HomeFiles of {', '.join(self._places)}, {len(self._nodes)} nodes>"

    def serve(self, secret: Secret, tls: bool) -> None:
        """Answer at the listener from now on."""
        assert self._listener is not None
        identity = Identity(purpose="data", role="agent", node=HOME_NODE, pid=os.getpid())
        self._server = DataServer(self, [self._listener], secret, identity, tls=tls)

    def wait(self, most_s: float) -> tuple[str, ...]:
        """Wait until every node that is there has told all; return those that have not, after ``most_s``."""
        end = self._now() + most_s
        while True:
            at = self._now()
            with self._lock:
                owing = [node for node, (heard, over) in self._nodes.items() if not over and at - heard < ALIVE_S]
            if not owing or at >= end:
                return tuple(sorted(owing))
            time.sleep(0.05)

    def close(self) -> None:
        if self._server is not None:
            self._server.close()
        elif self._listener is not None:
            self._listener.close()
        with self._lock:
            parts, self._parts = self._parts, {}
        for file, _ in parts.values():
            file.abort()

    # ------------------------------------------------------------ requests

    def handle(
        self, request: DataRequest, body: memoryview, arena: memoryview | None
    ) -> tuple[DataAnswer, Sequence[Buffer]]:
        try:
            return self._answer(request, body)
        except FileNotFoundError:
            return FilePiece(-1), ()
        except EverstepError as error:
            return Bad(str(error)), ()
        except OSError as error:
            return Bad(f"the first node's disk: {error.strerror or error}"), ()

    def _answer(self, request: DataRequest, body: memoryview) -> tuple[DataAnswer, Sequence[Buffer]]:
        match request:
            case FilePut():
                return FileTaken(self._put(request, body)), ()
            case FileRead(place, path, at, size_bytes):
                with self._place(place).open(path) as file:
                    total = file.seek(0, os.SEEK_END)
                    file.seek(at)
                    return FilePiece(total), (file.read(min(size_bytes, PIECE_BYTES)),)
            case FileList(place, below):
                here = self._place(place)
                return FileNames(here.sizes() if below else dict.fromkeys(here.names(), 0)), ()
            case FileDrop(place, path):
                self._place(place).delete(path)
                return FileTaken(), ()
            case LogGrown():
                return FileTaken(self._grow(request, body)), ()
            case LogsReported(node, over):
                with self._lock:
                    self._nodes[node] = (self._now(), over)
                return FileTaken(), ()
            case _:
                return Bad(f"{type(request).__name__} is nothing for the first node's files"), ()

    def _place(self, name: str) -> StoragePlace:
        if name not in self._places:
            raise StorageError(f"the first node has no place {name!r}", passing=False)
        return self._places[name]

    def _put(self, request: FilePut, body: memoryview) -> int:
        """Take the next bytes of a file. A writer that asks again begins a new part."""
        key = request.place, bare(request.path), request.part
        given_up: list[NewFile] = []
        with self._lock:
            file, size = self._parts.pop(key, (None, 0))
            while len(self._parts) >= _AT_ONCE:  # the one that was silent for longest
                given_up.append(self._parts.pop(next(iter(self._parts)))[0])
        for old in given_up:
            old.abort()
        if file is None:
            if request.at:
                raise StorageError(f"{request.path}: its beginning is not here; write it again")
            file = self._place(request.place).create(request.path)
        try:
            if request.at != size:
                raise StorageError(f"{request.path}: {size} bytes are here, not {request.at}; write it again")
            file.write(body)
            if request.last:
                file.commit()
        except BaseException:
            file.abort()
            raise
        size += len(body)
        if not request.last:
            with self._lock:
                self._parts[key] = file, size
        return size

    def _grow(self, request: LogGrown, body: memoryview) -> int:
        """Append to a log, unless something is missing in between, or it is known; return the size that it has."""
        if not _LOG.fullmatch(request.name):
            raise StorageError(f"{request.name!r} is no audit log", passing=False)
        path = self._logs / request.name
        with self._lock:
            fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
            try:
                size = os.fstat(fd).st_size
                if request.at <= size < request.at + len(body):
                    size += os.write(fd, body[size - request.at :])
                return size
            finally:
                os.close(fd)


# ---------------------------------------------------------------- from another node


class HomeLink:
    """Asks the first node, on one connection, made when it is needed. Thread-safe."""

    def __init__(self, address: Address, secret: Secret, identity: Identity, tls: bool) -> None:
        self._address, self._secret, self._identity, self._tls = address, secret, identity, tls
        self._lock = threading.Lock()
        self._client: DataClient | None = None

    def __repr__(self) -> str:
        return f"<HomeLink to {self._address.host}:{self._address.port}>"

    def ask(self, request: DataRequest, body: bytes | memoryview = b"") -> tuple[DataAnswer, bytes]:
        """Raise StorageError: the first node does not answer, or refuses."""
        with self._lock:
            try:
                client = self._client
                if client is None or client.closed:
                    client = self._client = DataClient(
                        self._address,
                        secret=self._secret,
                        identity=self._identity,
                        tls="all" if self._tls else "control",
                    )
                answer, data = client.request(request, (body,) if body else (), timeout_s=ASK_S)
            except (WireError, EverstepError) as error:
                raise StorageError(f"the first node's files cannot be reached: {error}") from error
            found = bytes(data)
        if isinstance(answer, Bad):
            raise StorageError(answer.error)
        return answer, found

    def close(self) -> None:
        client = self._client
        if client is not None:
            client.close()


class HomePlace(StoragePlace):
    """Is a place of the first node, as processes of other nodes reach it."""

    def __init__(self, link: HomeLink, name: str) -> None:
        self._link, self._name = link, name
        self.url = f"the first node's {name}"

    def create(self, path: str) -> NewFile:
        return _HomeFile(self._link, self._name, bare(path))

    def open(self, path: str) -> BinaryIO:
        raw = _HomeReader(self._link, self._name, bare(path))
        return cast(BinaryIO, io.BufferedReader(raw, PIECE_BYTES))

    def sizes(self) -> dict[str, int]:
        return self._names(True)

    def names(self) -> list[str]:
        return sorted(self._names(False))

    def _names(self, below: bool) -> dict[str, int]:
        answer, _ = self._link.ask(FileList(self._name, below))
        assert isinstance(answer, FileNames), answer
        return dict(answer.sizes)

    def delete(self, path: str) -> None:
        self._link.ask(FileDrop(self._name, bare(path)))


class _HomeFile(NewFile):
    """Sends a file as it is written, a piece at a time; it appears with the last one."""

    def __init__(self, link: HomeLink, place: str, path: str) -> None:
        self._link, self._of = link, (place, path, secrets.token_hex(8))
        self._at = 0
        self._open = True
        self._kept = bytearray()

    def write(self, data: bytes | memoryview) -> None:
        if not self._open:
            raise InternalError(f"{self._of[1]} was written after its end")
        self._kept += data
        while len(self._kept) >= PIECE_BYTES:
            self._send(False)

    def _send(self, last: bool) -> None:
        piece = bytes(self._kept[:PIECE_BYTES])
        del self._kept[:PIECE_BYTES]
        self._link.ask(FilePut(*self._of, self._at, last), piece)
        self._at += len(piece)

    def commit(self) -> None:
        self._send(True)
        self._open = False

    def abort(self) -> None:
        """The first node forgets what has no last piece when it ends."""
        self._open = False
        self._kept.clear()


class _HomeReader(io.RawIOBase):
    def __init__(self, link: HomeLink, place: str, path: str) -> None:
        """Raise FileNotFoundError, StorageError."""
        self._link, self._of, self._at = link, (place, path), 0
        self._size = self._ask(0)[0]

    def _ask(self, size_bytes: int) -> tuple[int, bytes]:
        answer, data = self._link.ask(FileRead(*self._of, self._at, size_bytes))
        assert isinstance(answer, FilePiece), answer
        if answer.size_bytes < 0:
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), self._of[1])
        return answer.size_bytes, data

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        base = {os.SEEK_SET: 0, os.SEEK_CUR: self._at, os.SEEK_END: self._size}[whence]
        self._at = max(0, base + offset)
        return self._at

    def tell(self) -> int:
        return self._at

    def readinto(self, buffer: Any) -> int:
        try:
            data = self._ask(len(buffer))[1]
        except EverstepError as error:
            raise OSError(errno.EIO, str(error)) from error
        buffer[: len(data)] = data
        self._at += len(data)
        return len(data)


# ---------------------------------------------------------------- audit logs


def link_home(spec: JobSpec, master: Address | None, secret: Secret, identity: Identity) -> HomeLink | None:
    """Return what a process of another node reaches the first node's files by; None: it is on the first node, or nobody
    serves files there."""
    if identity.node == HOME_NODE or not spec.files_port or master is None or not master.host:
        return None
    return HomeLink(Address(HOME_NODE, "", master.host, spec.files_port), secret, identity, spec.tls == "all")


def place_opener(link: HomeLink | None, spec: JobSpec) -> Callable[[str], StoragePlace]:
    """Return how a process opens places: a URL is the same everywhere, a directory is the first node's."""
    if link is None:
        return open_place
    return lambda url: (
        open_place(url)
        if "://" in url
        else HomePlace(link, RESUMED if spec.resume_from and url == spec.resume_from else CHECKPOINTS)
    )


class LogSender:
    """Sends the audit logs of this node as they grow, in a thread of its own; ``close`` sends the rest of them."""

    def __init__(
        self, folder: Path, node: NodeId, link: HomeLink, every_s: float = 1.0, keeps: Path | None = None
    ) -> None:
        """Make a sender. ``keeps``: the folder of processes' logs, whose ends are sent at the end; None: they stay."""
        self._keeps = keeps
        self._folder, self._node, self._link, self._every_s = folder, node, link, every_s
        self._sent: dict[str, int] = {}
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="audit-logs", daemon=True)

    def __repr__(self) -> str:
        return f"<LogSender of {self._node}: {len(self._sent)} logs>"

    def start(self) -> None:
        self._thread.start()

    def _run(self) -> None:
        while not self._over.wait(self._every_s):
            with contextlib.suppress(EverstepError, OSError):
                self._link.ask(LogsReported(self._node, False))
                self.send()

    def send(self) -> None:
        """Send what is new. Raise StorageError, OSError."""
        for path in sorted(self._folder.glob("*.log")):
            if not _LOG.fullmatch(path.name):
                continue
            at = self._sent.get(path.name, 0)
            with open(path, "rb", opener=private) as file:
                while True:
                    file.seek(at)
                    piece = file.read(PIECE_BYTES)
                    if not piece:
                        break
                    answer, _ = self._link.ask(LogGrown(self._node, path.name, at), piece)
                    assert isinstance(answer, FileTaken), answer
                    if answer.size_bytes == at:
                        break  # (another file is there under this name)
                    at = answer.size_bytes
            self._sent[path.name] = at

    def _send_ends(self) -> None:
        """Send the end of each process's log. Raise StorageError, OSError."""
        place = HomePlace(self._link, NODE_LOGS)
        for path in sorted(self._keeps.glob("*.log")) if self._keeps is not None else ():
            with open(path, "rb", opener=private) as file:
                file.seek(max(0, file.seek(0, os.SEEK_END) - KEPT_LOG_BYTES))
                place.put(f"{self._node}/{path.name}", file.read(KEPT_LOG_BYTES))

    def close(self, most_s: float = 10.0) -> None:
        """All processes of this node have ended: send the rest, and say so; after ``most_s`` not."""
        self._over.set()
        self._thread.join(most_s)
        end = time.monotonic() + most_s
        while True:
            try:
                self.send()
                self._send_ends()
                self._link.ask(LogsReported(self._node, True))
                break
            except (EverstepError, OSError):
                if time.monotonic() >= end:
                    break
                time.sleep(0.2)
        self._link.close()


__all__ = ["MODEL", "HomeFiles", "HomeLink", "HomePlace", "LogSender", "link_home", "place_opener", "served_places"]
