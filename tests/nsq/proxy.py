"""Stands between a reader and a real nsqd, and writes down what either side says, in order and with the time."""

from __future__ import annotations

import asyncio
import contextlib
import struct
import time
from collections.abc import AsyncIterator, Callable
from typing import NamedTuple

from servers import eventually_async

from nsqdedupe.cli.local_nsq import Nsqd

MAGIC = b"  V2"
MESSAGE = 2
WITH_DATA = (b"IDENTIFY", b"AUTH")
"""Commands that are followed by the size of their data, and the data."""


class Command(NamedTuple):
    """What a reader sent, for example ``Command(at, b"RDY", (b"1",))``; the data of IDENTIFY is an argument."""

    at: float
    name: bytes
    args: tuple[bytes, ...]


class Frame(NamedTuple):
    """What an nsqd sent: 0 is a response (heartbeats too), 1 an error, 2 a message."""

    at: float
    kind: int
    data: bytes

    @property
    def id(self) -> bytes:
        """Of a message."""
        return self.data[10:26]

    @property
    def attempts(self) -> int:
        """Of a message."""
        return int.from_bytes(self.data[8:10], "big")

    @property
    def body(self) -> bytes:
        """Of a message."""
        return self.data[26:]


class Line:
    """One connection of a reader to one nsqd, as heard on the wire: neither TLS nor compressed."""

    def __init__(self, *ends: asyncio.StreamWriter) -> None:
        self.commands: list[Command] = []
        self.frames: list[Frame] = []
        self._ends = ends
        self._said, self._heard = b"", b""

    def said(self, *names: bytes) -> list[Command]:
        """The commands of these names, in order."""
        return [command for command in self.commands if command.name in names]

    def rdy(self) -> list[int]:
        """The counts of the RDY commands, in order."""
        return [int(command.args[0]) for command in self.said(b"RDY")]

    def messages(self) -> list[Frame]:
        """What nsqd delivered, in order."""
        return [frame for frame in self.frames if frame.kind == MESSAGE]

    def answers(self) -> list[str]:
        """RDY commands and answers, in order and readable: ``RDY 1``, ``FIN body``, ``REQ body 0``."""
        bodies = {message.id: message.body for message in self.messages()}
        return [
            b" ".join((name, *(bodies.get(word, word) for word in args))).decode()
            for _, name, args in self.said(b"RDY", b"FIN", b"REQ")
        ]

    def cut(self) -> None:
        """Break the connection: both sides find it closed."""
        for end in self._ends:
            end.close()

    def from_reader(self, data: bytes) -> None:
        """Write down what the reader says."""
        said, start = (self._said + data).removeprefix(MAGIC), 0
        while (end := said.find(b"\n", start)) >= 0:
            name, *args = said[start:end].split(b" ")
            end += 1
            if name in WITH_DATA:
                after = end + 4 + int.from_bytes(said[end : end + 4], "big")
                if len(said) < max(after, end + 4):
                    break
                args.append(said[end + 4 : after])
                end = after
            self.commands.append(Command(time.monotonic(), name, tuple(args)))
            start = end
        self._said = said[start:]

    def from_nsqd(self, data: bytes) -> None:
        """Write down what nsqd says."""
        heard, start = self._heard + data, 0
        while len(heard) - start >= 8:
            size, kind = struct.unpack_from(">ii", heard, start)
            if len(heard) - start < 4 + size:
                break
            self.frames.append(Frame(time.monotonic(), kind, heard[start + 8 : start + 4 + size]))
            start += 4 + size
        self._heard = heard[start:]


class Proxy:
    """Every connection to its address goes on to one nsqd.

    Args:
        nsqd: where it goes.
    """

    def __init__(self, nsqd: Nsqd) -> None:
        self.nsqd = nsqd
        self.port = 0
        self.lines: list[Line] = []
        self.open = 0

    @property
    def address(self) -> str:
        """What a reader connects to."""
        return f"127.0.0.1:{self.port}"

    @property
    def line(self) -> Line:
        """Its newest connection."""
        return self.lines[-1]

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Pass everything on, both ways, until one side closes."""
        self.open += 1
        host, _, port = self.nsqd.tcp_address.partition(":")
        from_nsqd, to_nsqd = await asyncio.open_connection(host, int(port))
        line = Line(writer, to_nsqd)
        self.lines.append(line)
        try:
            await asyncio.gather(
                _pass_on(reader, to_nsqd, line.from_reader), _pass_on(from_nsqd, writer, line.from_nsqd)
            )
        finally:
            line.cut()
            self.open -= 1


async def _pass_on(
    source: asyncio.StreamReader, target: asyncio.StreamWriter, write_down: Callable[[bytes], None]
) -> None:
    with contextlib.suppress(ConnectionError):
        while data := await source.read(1 << 16):
            write_down(data)
            target.write(data)
            await target.drain()
    target.close()


@contextlib.asynccontextmanager
async def recording(*nsqds: Nsqd) -> AsyncIterator[list[Proxy]]:
    """A proxy for each of these nsqds, on ports of their own."""
    proxies = [Proxy(nsqd) for nsqd in nsqds]
    servers = [await asyncio.start_server(proxy.serve, "127.0.0.1", 0) for proxy in proxies]
    for proxy, server in zip(proxies, servers, strict=True):
        proxy.port = server.sockets[0].getsockname()[1]
    try:
        yield proxies
    finally:
        for server in servers:
            server.close()
        for proxy in proxies:
            for line in proxy.lines:
                line.cut()
        await eventually_async(lambda: not any(proxy.open for proxy in proxies))
