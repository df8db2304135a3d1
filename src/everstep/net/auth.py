"""Says who may speak: it has the job's secret, and the mutual challenge that begins every connection.

::

    client                                            server
      | -- Hello(client nonce, identity) ---------------> |
      | <- Challenge(server nonce, identity, HMAC) ------ |   HMAC(secret, "server" | both nonces | both identities)
      | -- Proof(HMAC) ---------------------------------> |   HMAC(secret, "client" | ...)

Either side may say ``Refusal(reason)`` instead and close. Nothing secret is sent, nothing can be replayed (both sides
choose a nonce) or reflected (the two HMACs begin with different words), and the identities (role, slot,
incarnation, purpose) are bound to the proof. Before the proof a server reserves at most ``AUTH_LIMITS`` bytes.

What follows on the data plane is bound to the handshake, too, where it is neither encrypted nor within one machine:
keys out of the same secret, nonces and identities seal each frame (``seal.py``).

``ClientAuth`` and ``ServerAuth`` are sans-io (frames in, frames out); ``authenticate_client`` and
``authenticate_server`` drive them over a blocking socket.
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import os
import secrets
import stat
from enum import StrEnum
from pathlib import Path
from typing import Literal

import msgspec

from everstep import __version__
from everstep.bounds import MALFORMED, Whole
from everstep.errors import ConfigError, DeadlineError, PlatformError, WireError, escaped
from everstep.ids import Incarnation, NodeId, Slot
from everstep.net.frames import ClosedError, Frame, FrameKind, FrameSocket, decode_header, encode_frame
from everstep.net.retry import Deadline
from everstep.net.seal import Seal

PROTOCOL = 3
"""Version of framing, handshake and messages; both sides must speak the same one."""

AUTH_S = 5.0
"""Seconds that a handshake may take, TLS included."""

_NONCE_BYTES = 32
_SECRET_BYTES = 32
_PACKAGE_MAX = 40
"""Longest name of a version that is shown, in characters."""


class SecretError(WireError):
    """The two sides do not have the same job secret. Trying again does not help."""


class VersionError(WireError):
    """The two sides are different versions of everstep. Trying again does not help. ``theirs``, ``ours``: the version
    of the other side and of this one, in words."""

    def __init__(self, who: str, protocol: int, package: str) -> None:
        self.theirs = f"everstep {escaped(package, _PACKAGE_MAX)} (wire {protocol})"
        self.ours = f"everstep {__version__} (wire {PROTOCOL})"
        super().__init__(f"{who} is {self.theirs}, this is {self.ours}: install the same version everywhere")


# ---------------------------------------------------------------- the secret file


class Secret(msgspec.Struct, frozen=True):
    """Is what every process of a job shares and nobody else has."""

    key: bytes  # 32 random bytes
    cert_pem: str = ""  # TLS between nodes; empty: this job never leaves its machine
    key_pem: str = ""
    lineage: bytes = b""  # of the job that this one goes on from: whose checkpoints these are; empty: its own

    def __repr__(self) -> str:
        return "<Secret>"  # never in a log

    @property
    def checkpoint_key(self) -> bytes:
        """Return the key that authenticates the checkpoints of this job, and of all that go on from each other."""
        return self.lineage or hmac.digest(self.key, b"everstep: manifests of checkpoints", hashlib.sha256)


class _SecretFile(msgspec.Struct, frozen=True):
    secret: str
    cert_pem: str = ""
    key_pem: str = ""
    lineage: str = ""


_secret_file_decoder = msgspec.json.Decoder(_SecretFile)


def _certificate() -> tuple[str, str]:
    """Return a fresh self-signed certificate and its key, as PEM."""
    # Costs 0.1 s and some MB: only the process that creates a job loads it.
    import datetime

    from cryptography import x509
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec
    from cryptography.x509.oid import NameOID

    from everstep.net.tls import SERVER_NAME

    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, SERVER_NAME)])
    # Wide limits: clocks of the nodes may differ, and a job may run for months.
    day = datetime.timedelta(days=1)
    now = datetime.datetime.now(datetime.UTC)
    certificate = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - 2 * day)
        .not_valid_after(now + 3650 * day)
        .add_extension(x509.SubjectAlternativeName([x509.DNSName(SERVER_NAME)]), critical=False)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .sign(key, hashes.SHA256())
    )
    key_pem = key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    return certificate.public_bytes(serialization.Encoding.PEM).decode(), key_pem.decode()


def create_secret(path: Path, lineage: bytes = b"") -> Secret:
    """Make a job's secret and write it to ``path``, readable by the user only; a file there is replaced, never half.
    ``lineage``: the ``checkpoint_key`` of the job that this one goes on from.

    Raises PlatformError when it cannot be written."""
    cert_pem, key_pem = _certificate()
    made = Secret(secrets.token_bytes(_SECRET_BYTES), cert_pem, key_pem, lineage)
    text = msgspec.json.encode(_SecretFile(made.key.hex(), cert_pem, key_pem, lineage.hex()))
    part = path.with_name(f"{path.name}.{os.getpid()}.part")
    try:
        part.unlink(missing_ok=True)
        fd = os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        with os.fdopen(fd, "wb") as file:
            file.write(text)
            file.flush()
            os.fsync(fd)
        part.replace(path)
    except OSError as error:
        part.unlink(missing_ok=True)
        raise PlatformError(f"cannot write the job's secret to {path}: {error.strerror or error}") from error
    return made


def load_secret(path: Path) -> Secret:
    """Raises ConfigError in one line: no such file, readable by others, malformed."""
    try:
        with path.open("rb") as file:
            mode = stat.S_IMODE(os.fstat(file.fileno()).st_mode)
            text = file.read(64 * 1024)
    except FileNotFoundError:
        raise ConfigError(f"no secret file at {path}: copy RUN_DIR/secret of the job's first node to it") from None
    except OSError as error:
        raise ConfigError(f"cannot read the secret file {path}: {error.strerror or error}") from error
    if mode & 0o077:
        raise ConfigError(f"the secret file {path} is open to others (mode {mode:04o}): chmod 600 {path}")
    try:
        raw = _secret_file_decoder.decode(text)
        key, lineage = bytes.fromhex(raw.secret), bytes.fromhex(raw.lineage)
    except MALFORMED:
        raise ConfigError(
            f"{path} is not a secret file of a job: copy RUN_DIR/secret of its first node again"
        ) from None
    if len(key) != _SECRET_BYTES or len(lineage) not in (0, _SECRET_BYTES):
        raise ConfigError(f"the secret in {path} has {len(key)} bytes instead of {_SECRET_BYTES}: copy it again")
    return Secret(key, raw.cert_pem, raw.key_pem, lineage)


# ---------------------------------------------------------------- the handshake


class Identity(msgspec.Struct, frozen=True, kw_only=True):
    """Says who speaks, for what. ``role``: worker, ps, master, agent, or command (``everstep status`` and the like)."""

    purpose: Literal["control", "data"]
    role: Literal["worker", "ps", "master", "agent", "command"]
    slot: Slot = Slot(0)
    incarnation: Incarnation = Incarnation(0)
    node: NodeId = NodeId("")
    pid: Whole = 0
    protocol: Whole = PROTOCOL
    package: str = __version__

    def __str__(self) -> str:
        match self.role:
            case "worker" | "ps":
                return f"{self.role}:{self.slot} #{self.incarnation}"
            case "agent":
                return f"agent of {self.node}"
        return str(self.role)


def worker_identity(
    slot: Slot, incarnation: Incarnation, node: NodeId, purpose: Literal["control", "data"] = "data"
) -> Identity:
    """Return who this process is, a worker's."""
    return Identity(purpose=purpose, role="worker", slot=slot, incarnation=incarnation, node=node, pid=os.getpid())


class _Hello(msgspec.Struct, frozen=True, tag="hello"):
    nonce: bytes
    identity: Identity


class _Challenge(msgspec.Struct, frozen=True, tag="challenge"):
    nonce: bytes
    identity: Identity
    mac: bytes


class _Proof(msgspec.Struct, frozen=True, tag="proof"):
    mac: bytes


class RefusalReason(StrEnum):
    """Says why one side of a handshake refuses the other."""

    VERSION = "version"
    SECRET = "secret"
    PURPOSE = "purpose"


class _Refusal(msgspec.Struct, frozen=True, tag="refusal"):
    reason: RefusalReason
    protocol: Whole = PROTOCOL
    package: str = __version__


class _Versions(msgspec.Struct, frozen=True):
    """Is the part of an identity that every version of the wire can read."""

    protocol: int
    package: str


class _OldHello(msgspec.Struct, frozen=True):
    identity: _Versions


_encoder = msgspec.msgpack.Encoder()
_Message = _Hello | _Challenge | _Proof | _Refusal
_message: msgspec.msgpack.Decoder[_Message] = msgspec.msgpack.Decoder(_Message)
_old_hello = msgspec.msgpack.Decoder(_OldHello)


def _mac(secret: Secret, side: bytes, hello: _Hello, nonce: bytes, server: Identity) -> bytes:
    parts = (side, hello.nonce, nonce, _encoder.encode(hello.identity), _encoder.encode(server))
    text = b"".join(len(part).to_bytes(4, "little") + part for part in parts)
    return hmac.digest(secret.key, text, hashlib.sha256)


def _seal(secret: Secret, side: bytes, hello: _Hello, nonce: bytes, server: Identity) -> Seal:
    """Return the seal of the frames that this side sends after the handshake."""
    return Seal(_mac(secret, b"frames of the " + side, hello, nonce, server))


def _frame(message: _Message) -> bytes:
    return encode_frame(FrameKind.AUTH, _encoder.encode(message))


def _decode(frame: Frame) -> _Message:
    if frame.kind != FrameKind.AUTH:
        raise WireError("the peer did not begin with a handshake")
    return decode_header(_message, frame.header, "handshake")


class ClientAuth:
    """Is the client's side: send ``begin()``, give it the server's frame, send what ``answer`` returns; done."""

    def __init__(self, secret: Secret, identity: Identity) -> None:
        self._secret = secret
        self._hello = _Hello(secrets.token_bytes(_NONCE_BYTES), identity)
        self.server: Identity | None = None
        self._nonce = b""
        self.refusal = b""  # to send before closing after a SecretError: the server then knows why

    def begin(self) -> bytes:
        return _frame(self._hello)

    def answer(self, frame: Frame) -> bytes:
        """Raises SecretError, VersionError, WireError."""
        message = _decode(frame)
        if isinstance(message, _Refusal):
            if message.reason is RefusalReason.VERSION:
                who = "the master" if self._hello.identity.purpose == "control" else "the server"
                raise VersionError(who, message.protocol, message.package)
            if message.reason is RefusalReason.PURPOSE:
                raise WireError(f"the server takes no {self._hello.identity.purpose} connections")
            raise SecretError("the server refused this secret: is it another job's?")
        if not isinstance(message, _Challenge) or len(message.nonce) != _NONCE_BYTES:
            raise WireError("malformed handshake: no challenge")
        expected = _mac(self._secret, b"server", self._hello, message.nonce, message.identity)
        if not hmac.compare_digest(expected, message.mac):
            self.refusal = _frame(_Refusal(RefusalReason.SECRET))
            raise SecretError("the server does not have this job's secret: the secret file belongs to another job")
        self.server = message.identity
        self._nonce = message.nonce
        return _frame(_Proof(_mac(self._secret, b"client", self._hello, message.nonce, message.identity)))

    def seals(self) -> tuple[Seal, Seal]:
        """Of what is sent and received from here on, once ``server`` is known."""
        assert self.server is not None
        of = (self._hello, self._nonce, self.server)
        return _seal(self._secret, b"client", *of), _seal(self._secret, b"server", *of)


class ServerAuth:
    """Is the server's side: ``take(frame)`` for the client's two frames, send what it returns.

    ``client`` is set, and ``done`` true, once the client has proved itself. On a WireError send ``refusal`` and
    close."""

    def __init__(self, secret: Secret, identity: Identity) -> None:
        self._secret = secret
        self._identity = identity
        self._nonce = secrets.token_bytes(_NONCE_BYTES)
        self._hello: _Hello | None = None
        self.client: Identity | None = None
        self.refusal = b""

    @property
    def done(self) -> bool:
        return self.client is not None

    def take(self, frame: Frame) -> bytes:
        """Raises SecretError, VersionError, WireError."""
        if self._hello is None:
            self._check_version(frame)
        message = _decode(frame)
        if isinstance(message, _Refusal):
            raise SecretError("the peer has another secret than this job's")
        if self._hello is None:
            if not isinstance(message, _Hello) or len(message.nonce) != _NONCE_BYTES:
                raise WireError("malformed handshake: no hello")
            if message.identity.purpose != self._identity.purpose:
                self.refusal = _frame(_Refusal(RefusalReason.PURPOSE))
                raise WireError(f"{message.identity} asked for a {message.identity.purpose} connection here")
            self._hello = message
            mac = _mac(self._secret, b"server", message, self._nonce, self._identity)
            return _frame(_Challenge(self._nonce, self._identity, mac))
        if not isinstance(message, _Proof):
            raise WireError("malformed handshake: no proof")
        expected = _mac(self._secret, b"client", self._hello, self._nonce, self._identity)
        if not hmac.compare_digest(expected, message.mac):
            self.refusal = _frame(_Refusal(RefusalReason.SECRET))
            raise SecretError(f"the peer that calls itself {self._hello.identity} has another secret than this job's")
        self.client = self._hello.identity
        return b""

    def seals(self) -> tuple[Seal, Seal]:
        """Of what is sent and received from here on, once it is ``done``."""
        assert self._hello is not None
        of = (self._hello, self._nonce, self._identity)
        return _seal(self._secret, b"server", *of), _seal(self._secret, b"client", *of)

    def _check_version(self, frame: Frame) -> None:
        # Before anything else is decoded: another version may have other fields.
        versions = decode_header(_old_hello, frame.header, "handshake").identity
        if (versions.protocol, versions.package) != (PROTOCOL, __version__):
            self.refusal = _frame(_Refusal(RefusalReason.VERSION))
            raise VersionError("the peer", versions.protocol, versions.package)


def _send_refusal(stream: FrameSocket, frame: bytes) -> None:
    if frame:
        with contextlib.suppress(WireError, DeadlineError):  # a courtesy
            stream.send_raw(frame, deadline=Deadline(0.2))


def authenticate_client(
    stream: FrameSocket, secret: Secret, identity: Identity, deadline: Deadline, seal: bool = False
) -> Identity:
    """Prove ourselves on a fresh connection, and have the server do so; returns who it says it is. ``seal``: where
    others may be on the way, each frame from here on is authenticated.

    Raises SecretError, VersionError (do not try again), WireError, DeadlineError. The caller closes then."""
    auth = ClientAuth(secret, identity)
    try:
        stream.send_raw(auth.begin(), deadline=deadline)
        proof = auth.answer(stream.recv(deadline=deadline))
        stream.send_raw(proof, deadline=deadline)
    except ClosedError:
        raise WireError("the server closed the connection during the handshake") from None
    except WireError:
        _send_refusal(stream, auth.refusal)
        raise
    assert auth.server is not None
    if seal and stream.exposed:
        stream.seal(*auth.seals())
    return auth.server


def authenticate_server(
    stream: FrameSocket, secret: Secret, identity: Identity, deadline: Deadline, seal: bool = False
) -> Identity:
    """Do the server's side of a fresh connection; return who the client proved to be. Raises as the client's side."""
    auth = ServerAuth(secret, identity)
    try:
        while not auth.done:
            reply = auth.take(stream.recv(deadline=deadline))
            if reply:
                stream.send_raw(reply, deadline=deadline)
    except ClosedError:
        raise WireError("the peer closed the connection during the handshake") from None
    except WireError:
        _send_refusal(stream, auth.refusal)
        raise
    assert auth.client is not None
    if seal and stream.exposed:
        stream.seal(*auth.seals())
    return auth.client
