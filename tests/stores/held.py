"""Stands between one client and a real memcached, and holds every command until it is told to let it through.

A pipeline is taken apart: each command goes to the server alone, and its reply goes back alone.
"""

from __future__ import annotations

import contextlib
import queue
import select
import socket
import threading
from collections import deque
from collections.abc import Callable, Iterator
from typing import NamedTuple

END = b"mn"
"""The command that ends a pipeline. It touches nothing, so it goes with the one before it."""

STUCK = 60.0
"""Seconds in which a client must come to its next command: only a client that hangs takes so long."""


class Command(NamedTuple):
    """A meta command, and the data of one that has any."""

    line: bytes
    data: bytes | None = None

    @property
    def name(self) -> bytes:
        """For example ``ms``."""
        return self.line[:2]

    @property
    def key(self) -> bytes:
        """The item that it is about."""
        return self.line.split()[1]

    @property
    def wire(self) -> bytes:
        """As it is sent."""
        return self.line + b"\r\n" + (b"" if self.data is None else self.data + b"\r\n")


def commands_in(buffer: bytearray) -> Iterator[Command]:
    """Take all whole commands out of what a client sent."""
    while (end := buffer.find(b"\r\n")) >= 0:
        line, after = bytes(buffer[:end]), end + 2
        data = None
        if line.startswith(b"ms "):
            size = int(line.split()[2])
            if len(buffer) < after + size + 2:
                return
            data = bytes(buffer[after : after + size])
            after += size + 2
        del buffer[:after]
        yield Command(line, data)


class Server:
    """A connection to memcached that sends one command at a time."""

    def __init__(self, address: tuple[str, int]) -> None:
        self._socket = socket.create_connection(address, timeout=STUCK)
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._replies = self._socket.makefile("rb")

    def ask(self, command: Command) -> bytes:
        """Have it executed; its reply, which is empty if it is a quiet one."""
        ends = command.line == END
        self._socket.sendall(command.wire + (b"" if ends else END + b"\r\n"))
        reply = b""
        while (line := self._replies.readline()) != b"MN\r\n":
            assert line, f"memcached hung up after {command}"
            reply += line
            if line.startswith(b"VA "):
                reply += self._replies.read(int(line.split()[1]) + 2)
        return reply + line if ends else reply

    def close(self) -> None:
        """Hang up."""
        self._replies.close()
        self._socket.close()


class HeldClient:
    """A client in a thread of its own, whose connections end here.

    Args:
        name: for the record.

        server: host and port of the memcached.
    """

    def __init__(self, name: str, server: tuple[str, int]) -> None:
        self.name = name
        self.verb = ""
        """What it is doing, as it says itself."""
        self.pending: deque[Command] = deque()
        self._server = server
        self._upstream = Server(server)
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._downstream: dict[int, socket.socket] = {}
        self._speaker: socket.socket | None = None
        self._buffer = bytearray()
        self._rung, self._bell = socket.socketpair()
        self._poll = select.epoll()
        self._poll.register(self._listener, select.EPOLLIN)
        self._poll.register(self._rung, select.EPOLLIN)
        self._jobs: queue.SimpleQueue[Callable[[], object] | None] = queue.SimpleQueue()
        self._busy = False
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._work, name=f"held client {name}")
        self._thread.start()

    @property
    def address(self) -> str:
        """What its store connects to."""
        host, port = self._listener.getsockname()
        return f"{host}:{port}"

    def begin(self, program: Callable[[], object]) -> None:
        """Have a program run, up to its first command."""
        self._busy = True
        self._jobs.put(program)
        self.settle()

    def settle(self) -> None:
        """Wait until a command is pending or the program has ended.

        Raises:
            BaseException: what the program ended with.
        """
        while self._busy and not self.pending:
            ready = self._poll.poll(STUCK)
            assert ready, f"{self.name} hangs in {self.verb}"
            for number, _ in ready:
                self._hear(number)
        if self._error is not None and not self._busy:
            error, self._error = self._error, None
            raise error

    def step(self) -> bytes:
        """Let its next command through, and wait until it is at the one after it or has ended; the reply."""
        command = self.pending.popleft()
        reply = answer = self._upstream.ask(command)
        if self.pending and self.pending[0].line == END:
            answer += self._upstream.ask(self.pending.popleft())
        if answer:
            assert self._speaker is not None
            self._speaker.sendall(answer)
        self.settle()
        return reply

    def run(self, program: Callable[[], object]) -> None:
        """Have a program run to its end, without holding it."""
        self.begin(program)
        while self.pending:
            self.step()

    def close(self) -> None:
        """Cut it off, and wait until its thread has ended."""
        self._listener.close()
        for connection in self._downstream.values():
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)
            connection.close()
        self._jobs.put(None)
        self._thread.join()
        self._upstream.close()
        self._poll.close()
        self._rung.close()
        self._bell.close()

    def _hear(self, number: int) -> None:
        if number == self._listener.fileno():
            connection, _ = self._listener.accept()
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            self._downstream[connection.fileno()] = connection
            self._poll.register(connection, select.EPOLLIN)
        elif number == self._rung.fileno():
            self._rung.recv(1)
            self._busy = False
        else:
            self._speaker = self._downstream[number]
            said = self._speaker.recv(1 << 16)
            if not said:
                self._poll.unregister(number)
                self._downstream.pop(number).close()
            self._buffer += said
            self.pending.extend(commands_in(self._buffer))

    def _work(self) -> None:
        while (job := self._jobs.get()) is not None:
            try:
                job()
            except BaseException as error:  # noqa: BLE001 - it is raised where the program was begun
                self._error = error
            with contextlib.suppress(OSError):
                self._bell.send(b"!")
