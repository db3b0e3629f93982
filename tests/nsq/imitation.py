"""An nsqd to publish to that answers what a test wants, when it wants."""

from __future__ import annotations

import asyncio
import contextlib
import json
import struct
from collections.abc import AsyncIterator, Callable

OK = b"OK"
IDENTITY = json.dumps({"max_rdy_count": 2500}).encode()


def accept(_: int) -> list[tuple[int, bytes]]:
    """The answer of an nsqd that takes everything."""
    return [(0, OK)]


class Imitation:
    """Talks like nsqd, and answers publishes as it is told.

    Args:
        answer: gets how many publishes came before on the connection, and returns frames as (type, data);
            None: it closes the connection.
    """

    def __init__(self, answer: Callable[[int], list[tuple[int, bytes]] | None] = accept) -> None:
        self._answer = answer
        self.address = ""
        self.commands: list[tuple[bytes, bytes]] = []
        """The publishes that came: the line, and what followed it."""
        self.may_answer = asyncio.Event()
        """Answers wait for it."""
        self.may_answer.set()

    @property
    def counts(self) -> list[int]:
        """How many messages each publish had."""
        return [struct.unpack_from(">I", body)[0] if line.startswith(b"MPUB") else 1 for line, body in self.commands]

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[str]:
        server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        self.address = f"127.0.0.1:{server.sockets[0].getsockname()[1]}"
        yield self.address
        server.close()
        await server.wait_closed()

    async def _serve(self, reader: asyncio.StreamReader, client: asyncio.StreamWriter) -> None:
        with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
            await reader.readexactly(4)
            count = 0
            while line := await reader.readline():
                if line == b"NOP\n":
                    continue
                body = await reader.readexactly(*struct.unpack(">I", await reader.readexactly(4)))
                if line.startswith(b"IDENTIFY"):
                    frames: list[tuple[int, bytes]] | None = [(0, IDENTITY)]
                else:
                    self.commands.append((line, body))
                    await self.may_answer.wait()
                    frames = self._answer(count)
                    count += 1
                if frames is None:
                    break
                for kind, data in frames:
                    client.write(struct.pack(">II", len(data) + 4, kind) + data)
                await client.drain()
        client.close()
