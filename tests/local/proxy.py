"""A TCP proxy of a test's own, between a node and the master: it can be cut, with every connection left open."""

from __future__ import annotations

import contextlib
import socket
import threading


class Proxy:
    """Listens on ``port`` and passes on to ``target``. ``cut``: bytes go nowhere, nobody is told, nobody is let in."""

    def __init__(self, target: int) -> None:
        self.target = target
        self._flow = threading.Event()
        self._flow.set()
        self._closed = False
        self._sockets: list[socket.socket] = []
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = int(self._listener.getsockname()[1])
        threading.Thread(target=self._accept, daemon=True).start()

    def cut(self) -> None:
        self._flow.clear()

    def mend(self) -> None:
        self._flow.set()

    def close(self) -> None:
        self._closed = True
        self._flow.set()
        for one in (self._listener, *self._sockets):
            with contextlib.suppress(OSError):
                one.close()

    def _accept(self) -> None:
        while not self._closed:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            self._flow.wait()
            try:
                server = socket.create_connection(("127.0.0.1", self.target), 5.0)
            except OSError:
                client.close()
                continue
            server.settimeout(None)
            self._sockets += [client, server]
            for source, sink in ((client, server), (server, client)):
                threading.Thread(target=self._pump, args=(source, sink), daemon=True).start()

    def _pump(self, source: socket.socket, sink: socket.socket) -> None:
        try:
            while data := source.recv(65536):
                self._flow.wait()
                sink.sendall(data)
        except OSError:
            pass
        for one in (source, sink):
            with contextlib.suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)
