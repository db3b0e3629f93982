"""A TCP server for a test that says itself what is answered."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from typing import Any

from servers import eventually_async


@contextlib.asynccontextmanager
async def listening(
    serve: Callable[[asyncio.StreamReader, asyncio.StreamWriter], Any], host: str = "127.0.0.1"
) -> AsyncIterator[int]:
    """A TCP server on a port of its own, which it yields. Ends when all who came are served."""
    came: set[object] = set()
    busy = 0

    async def count(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal busy
        came.add(writer.get_extra_info("peername"))
        busy += 1
        try:
            await serve(reader, writer)
        finally:
            writer.close()
            busy -= 1

    server = await asyncio.start_server(count, host, 0)
    port = server.sockets[0].getsockname()[1]
    try:
        yield port
    finally:
        # Whoever came before this one has been accepted when this one is.
        _, last = await asyncio.open_connection(host, port)
        await eventually_async(lambda: last.get_extra_info("sockname") in came)
        last.close()
        await eventually_async(lambda: not busy)
        server.close()
