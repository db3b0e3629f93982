"""Stands between a store and a memcached: counts round trips, cuts replies short, and tells lies."""

from __future__ import annotations

import contextlib
import select
import socket
import struct
import threading
from collections.abc import Callable, Iterator

HOST = "127.0.0.1"
END = b"MN\r\n"
AT_ONCE = struct.pack("ii", 1, 0)


class Relay:
    """Passes whole replies on, one connection after the other or several at once.

    Args:
        target: the port of the memcached; None: it answers by itself, see ``answer``.
    """

    def __init__(self, target: int | None) -> None:
        self.target = target
        self.requests: list[bytes] = []
        self.connections = 0
        self.cut_after: int | None = None
        """How many bytes of the next reply pass; then the connection is reset, and this is None again."""
        self.lie: Callable[[bytes], bytes] = lambda reply: reply
        self.answer: Callable[[bytes], bytes] = lambda request: b""
        self._listener = socket.create_server((HOST, 0))
        self._open: set[socket.socket] = set()
        self._threads: list[threading.Thread] = []
        self._start(self._accept)

    @property
    def address(self) -> str:
        return f"{HOST}:{self._listener.getsockname()[1]}"

    @property
    def trips(self) -> int:
        """How many pipelines were sent."""
        return b"".join(self.requests).count(b"mn\r\n")

    def close(self) -> None:
        # Each thread closes its own: one that another closes may be a stranger's by the time it is looked at.
        accepting = self._threads[0]
        self._listener.shutdown(socket.SHUT_RDWR)
        accepting.join()
        self._listener.close()
        for line in self._open:
            with contextlib.suppress(OSError):
                line.shutdown(socket.SHUT_RDWR)
        for thread in self._threads[1:]:
            thread.join()

    def _start(self, run: Callable[..., None], *args: object) -> None:
        thread = threading.Thread(target=run, args=args)
        self._threads.append(thread)
        thread.start()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                client = self._listener.accept()[0]
                self.connections += 1
                self._open.add(client)
                self._start(self._serve, client)

    def _serve(self, client: socket.socket) -> None:
        with contextlib.suppress(OSError), client:
            if self.target is None:
                while request := client.recv(1 << 16):
                    self.requests.append(request)
                    client.sendall(self.answer(request))
                return
            with socket.create_connection((HOST, self.target)) as server:
                self._open.add(server)
                self._pass_on(client, server)

    def _pass_on(self, client: socket.socket, server: socket.socket) -> None:
        reply = b""
        while True:
            for line in select.select([client, server], [], [])[0]:
                data = line.recv(1 << 18)
                if not data:
                    return
                if line is client:
                    self.requests.append(data)
                    server.sendall(data)
                    continue
                reply += data
                if reply.endswith(END):
                    told, reply = self.lie(reply), b""
                    if self.cut_after is not None:
                        part, self.cut_after = told[: self.cut_after], None
                        client.sendall(part)
                        client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, AT_ONCE)
                        return
                    client.sendall(told)


@contextlib.contextmanager
def relay(target: int | None) -> Iterator[Relay]:
    """One that is gone in the end, with all its threads."""
    with contextlib.closing(Relay(target)) as made:
        yield made
