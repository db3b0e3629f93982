"""Speaks just enough of nsqd's protocol for one consumer, so that a test decides on every byte."""

from __future__ import annotations

import asyncio
import contextlib
import json
import struct
from collections.abc import AsyncIterator
from typing import Any

from servers import eventually_async

from nsqdedupe import BODY, DedupeReader

RESPONSE, ERROR, MESSAGE = range(3)
IDENTITY = {"max_rdy_count": 2500, "version": "1.3.0", "msg_timeout": 60_000}


def frame(kind: int, data: bytes) -> bytes:
    return struct.pack(">ii", len(data) + 4, kind) + data


def message_id(number: int) -> bytes:
    return b"%016d" % number


def message(number: int, body: bytes, attempts: int = 1) -> bytes:
    """A message frame."""
    return frame(MESSAGE, struct.pack(">qH", 1_700_000_000 * 10**9, attempts) + message_id(number) + body)


class FakeNsqd:
    """Answers IDENTIFY, SUB and CLS, writes the other commands down, and sends what it is told to."""

    def __init__(self, identity: dict[str, Any] | None = None) -> None:
        self.identity = IDENTITY if identity is None else identity
        self.commands: list[bytes] = []
        self.deaf = False
        self.subscribed = 0
        self.address = ""
        self.writer: asyncio.StreamWriter | None = None
        self.open = 0

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.writer = writer
        self.open += 1
        try:
            assert await reader.readexactly(4) == b"  V2"
            while line := await reader.readline():
                await self._obey(line.rstrip(b"\n"), reader, writer)
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            self.open -= 1
            writer.close()

    async def _obey(self, command: bytes, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if command == b"IDENTIFY":
            (size,) = struct.unpack(">i", await reader.readexactly(4))
            await reader.readexactly(size)
            writer.write(frame(RESPONSE, json.dumps(self.identity).encode() if self.identity else b"OK"))
        elif command.startswith(b"SUB "):
            writer.write(frame(RESPONSE, b"OK"))
            self.subscribed += 1
        elif command == b"CLS" and not self.deaf:
            writer.write(frame(RESPONSE, b"CLOSE_WAIT"))
        else:
            self.commands.append(command)

    async def send(self, data: bytes) -> None:
        assert self.writer is not None
        self.writer.write(data)
        await self.writer.drain()

    async def send_apart(self, conn: Any, *parts: bytes) -> None:
        """Send each part when the one before has been read: no two of them arrive together."""
        for part in parts:
            conn.last_recv_timestamp = 0
            await self.send(part)
            await eventually_async(lambda: conn.last_recv_timestamp or conn.closed())

    def answers(self, word: bytes) -> list[bytes]:
        """The message ids of all FIN (or REQ, TOUCH) commands, in order."""
        return [command.split()[1] for command in self.commands if command.startswith(word + b" ")]


@contextlib.asynccontextmanager
async def fake_nsqd(identity: dict[str, Any] | None = None) -> AsyncIterator[FakeNsqd]:
    """A server on a port of its own."""
    fake = FakeNsqd(identity)
    server = await asyncio.start_server(fake.serve, "127.0.0.1", 0, limit=1 << 22)
    host, port = server.sockets[0].getsockname()
    fake.address = f"{host}:{port}"
    try:
        yield fake
    finally:
        server.close()
        if fake.writer is not None:
            fake.writer.close()
        await eventually_async(lambda: fake.open == 0)


@contextlib.asynccontextmanager
async def connected(handler: Any, identity: dict[str, Any] | None = None, **options: Any) -> AsyncIterator[Any]:
    """A reader on a fake nsqd that is ready for messages: the fake, the reader, its connection."""
    quick = {"key": BODY, "max_in_flight": 100}
    async with fake_nsqd(identity) as fake:
        reader = DedupeReader("topic", "channel", handler, nsqd_tcp_addresses=fake.address, **{**quick, **options})
        try:
            await eventually_async(lambda: b"RDY 1" in fake.commands)
            (conn,) = reader.conns.values()
            yield fake, reader, conn
        finally:
            reader.close()
            await eventually_async(lambda: not reader.conns)
