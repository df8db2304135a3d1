"""An S3-compatible store (moto) in the process of a test, with the bucket ``models``."""

from __future__ import annotations

import contextlib
import importlib.util
import socket
from collections.abc import Iterator

import pytest

from everstep.storage import places

needs_s3 = pytest.mark.skipif(
    importlib.util.find_spec("s3fs") is None or importlib.util.find_spec("moto") is None,
    reason="s3fs and moto[server] are not installed",
)  # (imported when a test begins: half a second that every worker of pytest-xdist would spend)


class S3:
    """A server that can be stopped and started again at the same port."""

    def __init__(self) -> None:
        with socket.socket() as s:
            s.bind(("127.0.0.1", 0))
            self.port = s.getsockname()[1]
        self.start()

    def start(self) -> None:
        from moto.server import ThreadedMotoServer

        self._server = ThreadedMotoServer("127.0.0.1", self.port, verbose=False)
        self._server.start()

    def stop(self) -> None:
        self._server.stop()


@pytest.fixture
def s3(monkeypatch: pytest.MonkeyPatch) -> Iterator[S3]:
    import s3fs

    server = S3()
    monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{server.port}")
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "test")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "test")
    monkeypatch.setenv("AWS_DEFAULT_REGION", "us-east-1")
    monkeypatch.setitem(
        places._OPTIONS,
        "s3",
        {"config_kwargs": {"connect_timeout": 2, "read_timeout": 5, "retries": {"max_attempts": 0}}},
    )
    s3fs.S3FileSystem.clear_instance_cache()
    monkeypatch.setattr(s3fs.S3FileSystem, "retries", 1)
    with contextlib.suppress(FileExistsError):  # a server of an earlier test had made it
        s3fs.S3FileSystem().mkdir("models")
    yield server
    s3fs.S3FileSystem.clear_instance_cache()
    server.stop()
