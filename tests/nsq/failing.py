"""Handlers that fail while something is happening, and readers to see what comes of it."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import time
from collections.abc import AsyncIterator, Callable, Iterable
from typing import Any

from consumers import PATIENCE, Seen, consuming, publish, watched_pair
from servers import Pair, eventually_async

from nsqdedupe import DedupeReader
from nsqdedupe.cli.local_nsq import Nsqd, Nsqlookupd

BODY = b"message"
DELAY = 0.3


class Failing:
    """A handler that fails the first runs of `BODY`, each after ``meanwhile`` has happened."""

    def __init__(self, kind: str = "coroutine", *, delay: float = DELAY, failures: int = 1) -> None:
        self.kind = kind
        self.delay = delay
        self.failures = failures
        self.meanwhile: Callable[[Any], Any] = lambda _: None
        self.seen = Seen()
        self.failed_at: list[float] = []

    def __call__(self, message: Any) -> Any:
        if message.body != BODY or len(self.failed_at) == self.failures:
            return self.seen.handle(message)
        self.seen.run(message)
        if self.kind == "coroutine":
            return self._later(message)
        if self.kind == "enable_async":
            message.enable_async()
            message.later = asyncio.ensure_future(self._later(message))
        else:
            self.meanwhile(message)
            self._fail(message)
        return None

    async def _later(self, message: Any) -> bool:
        await self.meanwhile(message)
        self._fail(message)
        return False

    def _fail(self, message: Any) -> None:
        self.failed_at.append(time.monotonic())
        message.requeue(delay=self.delay, backoff=False)

    def check(self, delay: float) -> None:
        """Each failure was followed by one run, not before the delay was over; the last run succeeded."""
        runs = self.seen.runs_of(BODY)
        assert [run.tries for run in runs] == [*range(self.failures + 1)]
        for failed_at, after in zip(self.failed_at, runs[1:], strict=True):
            assert after.at - failed_at >= delay
        assert self.seen.handled[BODY] == 1


@contextlib.asynccontextmanager
async def walking(
    pair: Pair, lookupd: Nsqlookupd, topic: str, channel: str, failing: Failing, **options: Any
) -> AsyncIterator[DedupeReader]:
    """A reader with a connection to both, each of which may have several messages in flight."""
    watched_pair(pair, lookupd, topic, channel)
    async with consuming(topic, channel, failing, lookupd, **options) as reader:
        await both(reader)
        publish(pair, topic, [b"first"])  # until it has had one, a connection is allowed one
        await eventually_async(lambda: reader.total_rdy == reader.max_in_flight)
        await eventually_async(lambda: ready(pair, topic, channel) == reader.max_in_flight)
        yield reader


async def both(reader: DedupeReader) -> None:
    """Wait for the second connection, be it again."""

    def seen() -> bool:
        # An nsqd was alive a moment ago, so the reader would let 10 s pass before it tries again.
        reader.connection_attempts.clear()
        return len(reader.conns) == 2

    await eventually_async(seen, PATIENCE)


async def restarted(reader: DedupeReader, nsqd: Nsqd) -> None:
    await both(reader)
    conn = reader.conns[nsqd.tcp_address]
    nsqd.restart()
    await eventually_async(lambda: reader.conns.get(conn.id) is not conn, PATIENCE)
    await both(reader)


def ready(nsqds: Iterable[Nsqd], topic: str, channel: str) -> int:
    return sum(nsqd.channel_stats(topic, channel)["clients"][0]["ready_count"] for nsqd in nsqds)


def unread(reader: DedupeReader, nsqd: Nsqd) -> int:
    """How many copies lie in a socket; to be asked while the loop stands still."""
    try:
        waiting = reader.conns[nsqd.tcp_address].stream.socket.recv(1 << 16, socket.MSG_PEEK)
    except BlockingIOError:
        return 0
    return int(waiting.count(BODY))


def stands_by(reader: DedupeReader) -> Any:
    """Something for `Failing.meanwhile`: the other copy is here."""
    return lambda _: eventually_async(lambda: reader.stats.standbys == 1, PATIENCE)
