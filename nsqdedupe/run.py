"""`run`: like `nsq.run`, but SIGTERM and SIGINT let readers and writers finish what they have in hand."""

from __future__ import annotations

import asyncio
import logging
import signal

from tornado.ioloop import IOLoop

from nsqdedupe import checks
from nsqdedupe.publisher import live_writers
from nsqdedupe.reader import live_readers

logger = logging.getLogger(__name__)

_SIGNALS = (signal.SIGTERM, signal.SIGINT)


def run(*, timeout: float = 30) -> None:
    """Run all readers and writers of this thread's event loop until SIGTERM or SIGINT.

    The first signal stops every `DedupeReader` there gracefully, and then every `ReplicatedWriter`, to which
    handlers may have published until then; a second signal ends the loop at once. To be called from the main
    thread, outside of a running event loop. Blocks.

    Args:
        timeout: seconds to wait for messages in flight and then for what is being published, all together, 0
            or more.
    """
    checks.number("timeout", timeout, 0)
    loop = IOLoop.current()
    asyncio_loop: asyncio.AbstractEventLoop = loop.asyncio_loop  # type: ignore[attr-defined]
    stopping: list[asyncio.Task[None]] = []

    async def stop() -> None:
        end = asyncio_loop.time() + timeout
        try:
            ours = [reader for reader in live_readers() if reader.io_loop is loop]
            await asyncio.gather(*(reader.stop(timeout) for reader in ours))
            left = max(0.0, end - asyncio_loop.time())
            await asyncio.gather(*(writer.stop(left) for writer in live_writers(asyncio_loop)))
        finally:
            loop.stop()

    def on_signal() -> None:
        if stopping:
            stopping[0].cancel()
        else:
            logger.info("stopping: messages in flight have %g seconds", timeout)
            stopping.append(asyncio_loop.create_task(stop()))

    for number in _SIGNALS:
        asyncio_loop.add_signal_handler(number, on_signal)
    try:
        loop.start()
    finally:
        for number in _SIGNALS:
            asyncio_loop.remove_signal_handler(number)
