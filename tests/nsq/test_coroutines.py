"""Coroutine handlers begin when their message comes, and have all that a task has."""

from __future__ import annotations

import asyncio
import contextvars
import logging
from collections.abc import Callable, Coroutine
from typing import Any

import nsq
import pytest
from consumers import PATIENCE, Seen, bodies, consuming, nothing_left, on_loop, publish, watched_channel
from servers import Pair, eventually_async

from nsqdedupe import BODY, DedupeReader, MemoryStore, dedupe
from nsqdedupe.cli.local_nsq import Nsqd

var = contextvars.ContextVar[object]("var", default=None)


class StrangerError(Exception):
    """A handler found what another one had left."""


class Handlers:
    """Ways of handling a message, in turn; all of them succeed."""

    def __init__(self) -> None:
        self.seen = Seen()
        self._ways = [self.at_once, self.waits, self.in_time, self.too_late, self.in_a_group, self.is_kept]
        self._kept: list[Any] = []
        self._gate = asyncio.Event()

    async def handle(self, message: Any) -> bool:
        task = asyncio.current_task()
        if task is None or var.get() is not None:
            raise StrangerError
        var.set(message.id)
        result = await self._ways[int(message.body) % len(self._ways)]()
        if asyncio.current_task() is not task or var.get() != message.id:
            raise StrangerError
        return self.seen.handle(message) and result

    async def at_once(self) -> bool:
        return True

    async def waits(self) -> bool:
        await asyncio.sleep(0)
        await asyncio.sleep(0.001)
        return True

    async def in_time(self) -> bool:
        async with asyncio.timeout(60):
            return await self.at_once()

    async def too_late(self) -> bool:
        try:
            async with asyncio.timeout(0.001):
                await self._gate.wait()
        except TimeoutError:
            return True
        return False

    async def in_a_group(self) -> bool:
        async with asyncio.TaskGroup() as group:
            children = [group.create_task(self.waits()) for _ in range(2)]
        return all(child.result() for child in children)

    async def is_kept(self) -> bool:
        self._kept.append(asyncio.current_task())
        return True


Consume = Callable[[Pair, str, str, Callable[..., Any], Callable[[], Coroutine[Any, Any, None]]], Any]


async def by_our_reader(
    nsqds: Pair, topic: str, channel: str, handle: Callable[..., Any], until: Callable[[], Coroutine[Any, Any, None]]
) -> Any:
    async with consuming(topic, channel, handle, nsqds) as reader:
        await until()
        return reader.stats


async def by_a_stock_reader(
    nsqds: Pair, topic: str, channel: str, handle: Callable[..., Any], until: Callable[[], Coroutine[Any, Any, None]]
) -> Any:
    decorated = dedupe(MemoryStore(window=10_000), key=BODY, scope=f"{topic}/{channel}")(handle)
    addresses = [nsqd.tcp_address for nsqd in nsqds]
    options = {"max_in_flight": 200, "max_tries": 0, "output_buffer_timeout": 25}
    reader = nsq.Reader(topic, channel, decorated, nsqd_tcp_addresses=addresses, **options)
    try:
        await until()
        return decorated.stats
    finally:
        reader.close()
        await eventually_async(lambda: not reader.conns, PATIENCE)


@pytest.mark.parametrize("consume", [by_our_reader, by_a_stock_reader])
def test_what_handlers_ask_of_their_tasks_works_from_the_first_step_on(
    nsqd_pair: Pair, topic: str, channel: str, consume: Consume
) -> None:
    messages = [b"%d" % number for number in range(600)]
    publish(nsqd_pair, topic, messages)

    async def main() -> Any:
        handlers = Handlers()

        async def done() -> None:
            await eventually_async(lambda: len(handlers.seen.handled) == 600, PATIENCE)
            await nothing_left(nsqd_pair, topic, channel)

        stats = await consume(nsqd_pair, topic, channel, handlers.handle, done)
        handlers.seen.once_each(messages)
        return stats

    stats = on_loop(main())
    assert (stats.handled, stats.duplicates, stats.failed) == (600, 600, 0)


def test_a_handler_that_is_cancelled_when_it_has_just_begun_is_told_and_its_message_comes_again(
    nsqd: Nsqd, topic: str, channel: str
) -> None:
    watched_channel(nsqd, topic, channel)
    publish([nsqd], topic, [b"message"])
    seen = Seen()
    told: list[str] = []

    async def main() -> None:
        async def handle(message: Any) -> bool:
            if seen.runs:
                return seen.handle(message)
            seen.run(message)
            asyncio.current_task().cancel("at once")  # type: ignore[union-attr]
            try:
                await asyncio.get_running_loop().create_future()
            except asyncio.CancelledError as error:
                told.append(str(error))
                raise
            return False

        async with consuming(topic, channel, handle, [nsqd]) as reader:
            await eventually_async(lambda: seen.handled, PATIENCE)
            await nothing_left([nsqd], topic, channel)
            assert (reader.stats.failed, reader.stats.handled) == (1, 1)

    on_loop(main())
    assert told == ["at once"]
    assert [run.tries for run in seen.runs] == [0, 0], "to be cancelled costs no try"


@pytest.mark.nsqd_flags("--msg-timeout=1s")
def test_a_loop_that_ends_in_the_middle_of_handlers_loses_and_says_nothing(
    nsqd: Nsqd, topic: str, channel: str, caplog: pytest.LogCaptureFixture
) -> None:
    watched_channel(nsqd, topic, channel)
    messages = bodies(5)
    publish([nsqd], topic, messages)
    seen = Seen()
    kept: list[DedupeReader] = []

    async def ends_in_the_middle() -> None:
        async def handle(message: Any) -> bool:
            seen.run(message)
            await asyncio.get_running_loop().create_future()
            return True

        async with asyncio.timeout(PATIENCE):
            options: dict[str, Any] = {"nsqd_tcp_addresses": [nsqd.tcp_address], "max_in_flight": 10}
            kept.append(DedupeReader(topic, channel, handle, key=BODY, output_buffer_timeout=25, **options))
            while len(seen.runs) < 5:  # noqa: ASYNC110 - it is to end at once
                await asyncio.sleep(0)

    async def goes_on() -> None:
        async def handle(message: Any) -> bool:
            return seen.handle(message)

        async with consuming(topic, channel, handle, [nsqd]):
            await eventually_async(lambda: len(seen.handled) == 5, PATIENCE)
            await nothing_left([nsqd], topic, channel)

    on_loop(ends_in_the_middle())
    kept[0].close()
    on_loop(goes_on())
    seen.once_each(messages)
    assert [record.getMessage() for record in caplog.records if record.levelno >= logging.ERROR] == []
