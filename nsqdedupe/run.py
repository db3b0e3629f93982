"""`run`: like `nsq.run`, but SIGTERM and SIGINT let readers and writers finish what they have in hand."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
from collections.abc import Callable, Iterator
from typing import Any

from tornado.ioloop import IOLoop

from nsqdedupe import checks
from nsqdedupe.errors import FatalError
from nsqdedupe.publisher import live_writers
from nsqdedupe.reader import DedupeReader, fatal_listeners, live_readers

logger = logging.getLogger(__name__)

_SIGNALS = (signal.SIGTERM, signal.SIGINT)


def run(*, timeout: float = 30, end_on_fatal_error: bool = False) -> None:
    """Run all readers and writers of this thread's event loop until SIGTERM or SIGINT.

    The first signal stops every `DedupeReader` there gracefully, and then every `ReplicatedWriter`, to which
    handlers may have published until then; a second signal ends the loop at once. Afterwards signals do what they
    did before. To be called from the main thread, outside of a running event loop. Blocks.

    Args:
        timeout: seconds to wait for messages in flight and then for what is being published, all together, 0
            or more.

        end_on_fatal_error: stop also when an nsqd refuses one of the readers (see `DedupeReader.fatal_error`),
            as on the first signal.

    Raises:
        FatalError: with ``end_on_fatal_error``, what the nsqd said; readers and writers are stopped by then.
    """
    checks.number("timeout", timeout, 0)
    checks.flag("end_on_fatal_error", end_on_fatal_error)
    loop = IOLoop.current()
    asyncio_loop: asyncio.AbstractEventLoop = loop.asyncio_loop  # type: ignore[attr-defined]
    stopping: list[asyncio.Task[None]] = []

    async def stop() -> None:
        end = asyncio_loop.time() + timeout
        ours = [reader for reader in live_readers() if reader.io_loop is loop]
        await asyncio.gather(*(reader.stop(timeout) for reader in ours))
        left = max(0.0, end - asyncio_loop.time())
        await asyncio.gather(*(writer.stop(left) for writer in live_writers(asyncio_loop)))

    fatal: list[FatalError] = []

    def on_fatal_error(reader: DedupeReader, error: FatalError) -> None:
        if end_on_fatal_error and reader.io_loop is loop and not stopping:
            fatal.append(error)
            on_signal()

    def on_signal() -> None:
        if stopping:
            stopping[0].cancel()
        else:
            logger.info("stopping: messages in flight have %g seconds", timeout)
            stopping.append(asyncio_loop.create_task(stop()))
            # Not in the task: one that is cancelled before its first step has no end of its own.
            stopping[0].add_done_callback(lambda _: loop.stop())

    with _on_signals(asyncio_loop, on_signal):
        fatal_listeners.append(on_fatal_error)
        try:
            loop.start()
        finally:
            fatal_listeners.remove(on_fatal_error)
    if fatal:
        raise fatal[0]


@contextlib.contextmanager
def _on_signals(loop: asyncio.AbstractEventLoop, act: Callable[[], None]) -> Iterator[None]:
    """Have the signals call something on the event loop, and afterwards do what they did before."""
    before: dict[signal.Signals, Any] = {}
    for number in _SIGNALS:
        # What the loop itself had for it cannot be asked for: without this it would be left deaf to that signal.
        loop.remove_signal_handler(number)
        before[number] = signal.getsignal(number)
        loop.add_signal_handler(number, act)
    try:
        yield
    finally:
        for number, handler in before.items():
            loop.remove_signal_handler(number)
            if handler is not None:  # None: not Python has set it, and nor can Python again
                signal.signal(number, handler)
