"""A real ``ControlServer`` on its own loop and thread, whose handler is the test's."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import uvloop

from everstep.ids import Incarnation, NodeId
from everstep.net.auth import Identity, Secret
from everstep.net.control_server import ControlServer
from everstep.net.sockets import listen_tcp, listen_unix

MASTER = Identity(purpose="control", role="master", incarnation=Incarnation(1), node=NodeId("node0"))


class Master:
    def __init__(
        self,
        run_dir: Path,
        secret: Secret,
        handle: Callable[..., Any],
        *,
        tcp: bool = False,
        host: str = "127.0.0.1",
        **more: Any,
    ):
        self.run_dir, self.secret, self.handle, self.tcp, self.more = run_dir, secret, handle, tcp, more
        self.host = host
        self.port = 0
        self.events: list[str] = []
        self._ready = threading.Event()
        self._thread = threading.Thread(target=lambda: uvloop.run(self._main()))
        self._thread.start()
        assert self._ready.wait(20)

    async def _main(self) -> None:
        self.loop = asyncio.get_running_loop()
        self._over = asyncio.Event()
        self.server = ControlServer(
            self.secret,
            MASTER,
            self.handle,
            on_connect=lambda peer: self.events.append(f"+{peer.identity}"),
            on_disconnect=lambda peer: self.events.append(f"-{peer.identity}"),
            **self.more,
        )
        await self.server.listen(listen_unix(self.run_dir / "sock" / "master.sock"))
        if self.tcp:
            sock = listen_tcp(self.host, 0)
            self.port = sock.getsockname()[1]
            await self.server.listen(sock)
        self._ready.set()
        await self._over.wait()
        await self.server.close(0.2)

    def do(self, action: Callable[[], object]) -> None:
        self.loop.call_soon_threadsafe(action)

    def cut(self) -> None:
        """Every connection breaks at once, as when the master is killed."""
        self.do(lambda: [connection.abort() for connection in list(self.server.connections)])

    def stop(self) -> None:
        if self._thread.is_alive():
            self.do(self._over.set)
            self._thread.join(20)
