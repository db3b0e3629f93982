"""Consumers for tests on real servers: a reader, what its handler saw, and what the nsqds say of it."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable, Sequence
from typing import Any, NamedTuple, TypeVar

from servers import eventually, eventually_async

from nsqdedupe import BODY, DedupeReader
from nsqdedupe.cli.local_nsq import Nsqd, Nsqlookupd

T = TypeVar("T")

PATIENCE = 40.0
"""Seconds to wait for what takes a moment, on a machine that has a lot to do."""

OUTCOMES = ("handled", "duplicates", "failed", "deferred", "given_up", "invalid", "unanswered", "in_flight")


class Stray(logging.Handler):
    """Hears of exceptions that left a callback: the loop and tornado only log them."""

    LOGGERS = ("asyncio", "tornado.application")

    def __init__(self) -> None:
        super().__init__(logging.ERROR)
        self.heard: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.heard.append(self.format(record))

    def __enter__(self) -> None:
        for name in self.LOGGERS:
            logging.getLogger(name).addHandler(self)

    def __exit__(self, *_: object) -> None:
        for name in self.LOGGERS:
            logging.getLogger(name).removeHandler(self)
        assert not self.heard, "\n".join(["nobody caught:", *self.heard])


def on_loop(main: Coroutine[Any, Any, T]) -> T:
    """Run a test on an event loop; an exception that nobody caught there fails it."""
    with Stray():
        return asyncio.run(main)


@contextlib.asynccontextmanager
async def consuming(
    topic: str,
    channel: str,
    handler: Callable[[Any], Any] | None,
    servers: Nsqlookupd | Iterable[Nsqd],
    reader_class: type[DedupeReader] = DedupeReader,
    **options: Any,
) -> AsyncIterator[DedupeReader]:
    """A reader on what a lookupd knows, or on given nsqds, that does not wait where it need not."""
    quick: dict[str, Any] = {"key": BODY, "max_in_flight": 200, "output_buffer_timeout": 25}
    if isinstance(servers, Nsqlookupd):
        quick |= {"lookupd_http_addresses": [servers.http_address], "lookupd_poll_interval": 1}
    else:
        quick["nsqd_tcp_addresses"] = [nsqd.tcp_address for nsqd in servers]
    reader = reader_class(topic, channel, handler, **{**quick, **options})
    try:
        yield reader
    finally:
        reader.close()
        await eventually_async(lambda: not reader.conns)


class Run(NamedTuple):
    """One call of a handler."""

    at: float
    body: bytes
    attempts: int
    tries: int
    where: str


class Seen:
    """What handlers were given, and which messages they handled."""

    def __init__(self) -> None:
        self.runs: list[Run] = []
        self.handled: Counter[bytes] = Counter()
        self._actions: dict[int, Callable[[], object]] = {}

    def when(self, handled: int, action: Callable[[], object]) -> None:
        """Have the handler that makes it so many messages do something: then it is in the middle of it for sure."""
        self._actions[handled] = action

    def run(self, message: Any) -> None:
        """A handler was called."""
        where = str(message.conn.id)
        self.runs.append(Run(time.monotonic(), message.body, message.attempts, message.tries, where))

    def handle(self, message: Any) -> bool:
        """A handler was called, and succeeds."""
        self.run(message)
        self.handled[message.body] += 1
        self._actions.pop(len(self.handled), lambda: None)()
        return True

    def runs_of(self, body: bytes) -> list[Run]:
        return [run for run in self.runs if run.body == body]

    def once_each(self, bodies: Iterable[bytes]) -> None:
        """Assert that just these messages were handled, each once."""
        assert self.handled == Counter(set(bodies))


class Gate:
    """Lets some handler runs through and holds all others, until it opens.

    Args:
        free: how many need not wait.
    """

    def __init__(self, free: int = 0) -> None:
        self._free = free
        self._open = asyncio.Event()
        self.waiting = 0
        """How many handlers stand before it."""

    async def passed(self) -> None:
        if self._free:
            self._free -= 1
            return
        self.waiting += 1
        await self._open.wait()
        self.waiting -= 1

    def open(self) -> None:
        self._open.set()


def gated(work: Callable[[Any], bool], gate: Gate) -> Callable[[Any], Any]:
    """A handler that is a coroutine function and goes through a gate first."""

    async def handle(message: Any) -> bool:
        await gate.passed()
        return work(message)

    return handle


Kind = Callable[[Callable[[Any], bool], float], Callable[[Any], Any]]


def plain(work: Callable[[Any], bool], pause: float = 0.0) -> Callable[[Any], bool]:
    """A handler that returns its outcome."""

    def handle(message: Any) -> bool:
        if pause:
            time.sleep(pause)
        return work(message)

    return handle


def coroutine(work: Callable[[Any], bool], pause: float = 0.005) -> Callable[[Any], Any]:
    """A handler that is a coroutine function."""

    async def handle(message: Any) -> bool:
        await asyncio.sleep(pause)
        return work(message)

    return handle


def coroutine_at_once(work: Callable[[Any], bool], _: float = 0.0) -> Callable[[Any], Any]:
    """A handler that is a coroutine function and never waits."""

    async def handle(message: Any) -> bool:
        return work(message)

    return handle


def answering_later(work: Callable[[Any], bool], pause: float = 0.005) -> Callable[[Any], None]:
    """A handler that calls enable_async() and responds from a callback."""

    def handle(message: Any) -> None:
        message.enable_async()
        asyncio.get_running_loop().call_later(pause, answer, message)

    def answer(message: Any) -> None:
        if work(message):
            message.finish()
        else:
            message.requeue()

    return handle


KINDS: dict[str, Kind] = {
    "plain": plain,
    "coroutine": coroutine,
    "coroutine at once": coroutine_at_once,
    "enable_async": answering_later,
}


def bodies(count: int, size: int = 0, start: int = 0) -> list[bytes]:
    """Bodies that differ, of a size if one is given."""
    return [(b"%d-" % number).ljust(size, b"x") for number in range(start, start + count)]


def publish(nsqds: Sequence[Nsqd], topic: str, messages: Sequence[bytes]) -> None:
    """Publish a copy of each message to each nsqd."""
    for start in range(0, len(messages), 1000):
        for nsqd in nsqds:
            nsqd.mpublish(topic, messages[start : start + 1000])


def watched_channel(nsqd: Nsqd, topic: str, channel: str) -> None:
    """Make a channel whose timeouts and deferred messages nsqd looks after from now on.

    It finds a new channel only on its next round, which may be 5 s away; one that it starts with, at once.
    """
    nsqd.create_channel(topic, channel)
    nsqd.restart()


def watched_pair(nsqds: Sequence[Nsqd], lookupd: Nsqlookupd, topic: str, channel: str) -> None:
    """The same for nsqds that are found through a lookupd."""
    for nsqd in nsqds:
        watched_channel(nsqd, topic, channel)
    eventually(lambda: lookupd.lookup(topic), until=lambda found: len(found) == len(nsqds), timeout=PATIENCE)


async def nothing_left(nsqds: Iterable[Nsqd], topic: str, channel: str, timeout: float = PATIENCE) -> None:  # noqa: ASYNC109
    """Wait until each nsqd has nothing queued, in flight or deferred for a channel."""
    for nsqd in nsqds:
        # Again: a message that goes from one place to the next is for a moment in neither.
        for _ in range(3):
            await eventually_async(lambda nsqd=nsqd: owed(nsqd, topic, channel), timeout, until=lambda left: left == 0)


def owed(nsqd: Nsqd, topic: str, channel: str) -> int:
    """How many messages an nsqd still owes a channel, those included that have not reached it yet."""
    stats = nsqd.topic_stats(topic)
    on_the_way = max(0, stats["message_count"] - nsqd.channel_stats(topic, channel)["message_count"])
    return int(stats["depth"] + on_the_way + nsqd.unfinished(topic, channel))


def told(nsqds: Iterable[Nsqd], topic: str, channel: str, counter: str) -> list[int]:
    """What each nsqd says: ``requeue_count``, ``timeout_count`` and so on."""
    return [int(nsqd.channel_stats(topic, channel)[counter]) for nsqd in nsqds]


def at_rest(reader: DedupeReader) -> None:
    """Assert that a reader has answered all that it got, and that its books balance."""
    stats = reader.stats
    assert stats.in_flight == 0
    assert stats.received == sum(getattr(stats, outcome) for outcome in OUTCOMES)
    assert {address: conn.in_flight for address, conn in reader.conns.items()} == dict.fromkeys(reader.conns, 0)
