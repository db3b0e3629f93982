"""Handlers of a stock `nsq.Reader` that are decorated with `dedupe`, on two nsqds."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import threading
from collections.abc import AsyncIterator, Callable
from typing import Any

import nsq
import pytest
from consumers import (
    KINDS,
    PATIENCE,
    Kind,
    Seen,
    bodies,
    consuming,
    coroutine,
    nothing_left,
    on_loop,
    plain,
    publish,
    told,
    watched_channel,
)
from servers import Pair, eventually_async

from nsqdedupe import BODY, DedupedHandler, MemoryStore, dedupe
from nsqdedupe.cli.local_nsq import Nsqd


def decorated(handler: Callable[..., Any], topic: str, channel: str, **options: Any) -> DedupedHandler:
    store = MemoryStore(window=10_000)
    return dedupe(store, **{"key": BODY, "scope": f"{topic}/{channel}", **options})(handler)


@contextlib.asynccontextmanager
async def stock_reader(
    topic: str, channel: str, handler: Callable[..., Any], nsqds: Pair, **options: Any
) -> AsyncIterator[nsq.Reader]:
    """A reader of pynsq's own that does not wait where it need not."""
    quick: dict[str, Any] = {"max_in_flight": 100, "output_buffer_timeout": 25, "requeue_delay": 1, "max_tries": 0}
    addresses = [nsqd.tcp_address for nsqd in nsqds]
    quick |= {"nsqd_tcp_addresses": addresses, "max_backoff_duration": 0.5}
    reader = nsq.Reader(topic, channel, handler, **{**quick, **options})
    try:
        await eventually_async(lambda: len(reader.conns) == len(addresses), PATIENCE)
        yield reader
    finally:
        reader.close()
        await eventually_async(lambda: not reader.conns, PATIENCE)


def at_rest(handler: DedupedHandler, reader: nsq.Reader) -> None:
    """Nothing is open any more, and nothing is kept."""
    assert handler.stats.in_flight == 0
    assert [conn.in_flight for conn in reader.conns.values()] == [0] * len(reader.conns)


@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
def test_every_message_is_handled_once_and_every_copy_finished(
    nsqd_pair: Pair, topic: str, channel: str, kind: Kind
) -> None:
    seen = Seen()
    messages = bodies(300)
    handler = decorated(kind(seen.handle, 0.002), topic, channel)

    async def main() -> None:
        async with stock_reader(topic, channel, handler, nsqd_pair) as reader:
            publish(nsqd_pair, topic, messages)
            await eventually_async(lambda: len(seen.handled) == 300, PATIENCE)
            await nothing_left(nsqd_pair, topic, channel)
            at_rest(handler, reader)

    on_loop(main())
    seen.once_each(messages)
    assert (handler.stats.handled, handler.stats.duplicates) == (300, 300)
    assert told(nsqd_pair, topic, channel, "requeue_count") == [0, 0]


@pytest.mark.parametrize("max_tries", [0, 2])
def test_tries_are_counted_and_spaced_and_no_copy_is_sent_back_to_its_last_attempt(
    nsqd_pair: Pair, topic: str, channel: str, max_tries: int
) -> None:
    """With max_tries=2 the other copy is kept for the hold; with 0 it goes back, as with a DedupeReader."""
    for nsqd in nsqd_pair:
        watched_channel(nsqd, topic, channel)
    seen = Seen()

    async def fail_twice(message: Any) -> bool:
        if message.tries == 2:
            return seen.handle(message)
        seen.run(message)
        # A backoff would wait for the connection that pynsq happens to choose.
        message.requeue(backoff=False)
        return False

    handler = decorated(fail_twice, topic, channel)

    async def main() -> None:
        async with stock_reader(topic, channel, handler, nsqd_pair, max_tries=max_tries) as reader:
            publish(nsqd_pair, topic, [b"message"])
            await eventually_async(lambda: seen.handled, PATIENCE)
            await nothing_left(nsqd_pair, topic, channel)
            at_rest(handler, reader)

    on_loop(main())
    seen.once_each([b"message"])
    assert [run.tries for run in seen.runs] == [0, 1, 2]
    # 1 s after the first failure, 2 s after the second one: nobody ends the hold but the copy that failed.
    assert seen.runs[1].at - seen.runs[0].at >= 1
    assert seen.runs[2].at - seen.runs[1].at >= 2
    assert handler.stats.failed == 2
    requeued = sum(told(nsqd_pair, topic, channel, "requeue_count"))
    assert requeued == 2 if max_tries else requeued > 2


def test_a_failure_begins_a_backoff_that_a_waiting_copy_does_not_prolong(
    nsqd_pair: Pair, topic: str, channel: str
) -> None:
    """The message fails, its other copy is held: what tests the backoff meanwhile comes from either connection."""
    for nsqd in nsqd_pair:
        watched_channel(nsqd, topic, channel)
    seen = Seen()

    def handle(message: Any) -> bool:
        if message.body == b"fails" and not message.tries:
            seen.run(message)
            return False
        return seen.handle(message)

    handler = decorated(handle, topic, channel)

    async def main() -> None:
        async with stock_reader(topic, channel, handler, nsqd_pair) as reader:
            publish(nsqd_pair, topic, [b"fails"])
            await eventually_async(lambda: handler.stats.deferred, PATIENCE)
            publish(nsqd_pair, topic, bodies(20))
            await eventually_async(lambda: len(seen.handled) == 21, PATIENCE)
            await nothing_left(nsqd_pair, topic, channel)
            assert reader.backoff_timer.get_interval() == 0

    on_loop(main())
    seen.once_each([b"fails", *bodies(20)])


@pytest.mark.nsqd_flags("--msg-timeout=3s")
def test_a_copy_that_waits_is_kept_beyond_nsqds_timeout(nsqd_pair: Pair, topic: str, channel: str) -> None:
    seen = Seen()
    gate = asyncio.Event()

    async def handle(message: Any) -> bool:
        while not gate.is_set():
            message.touch()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(gate.wait(), 0.5)
        return seen.handle(message)

    handler = decorated(handle, topic, channel)

    async def main() -> None:
        async with stock_reader(topic, channel, handler, nsqd_pair, msg_timeout=3) as reader:
            publish(nsqd_pair, topic, [b"message"])
            await eventually_async(lambda: handler.stats.standbys == 1, PATIENCE)
            asyncio.get_running_loop().call_later(7, gate.set)
            await eventually_async(lambda: seen.handled, PATIENCE)
            await nothing_left(nsqd_pair, topic, channel)
            at_rest(handler, reader)

    on_loop(main())
    seen.once_each([b"message"])
    assert told(nsqd_pair, topic, channel, "timeout_count") == [0, 0]
    assert (handler.stats.handled, handler.stats.duplicates) == (1, 1)


def test_the_other_copy_takes_over_when_the_connection_of_a_lost_owner_closes(
    nsqd_pair: Pair, topic: str, channel: str
) -> None:
    """The handler never answers, and its nsqd is gone: its lease ends, and the other copy is handled."""
    seen = Seen()
    by_address = {nsqd.tcp_address: nsqd for nsqd in nsqd_pair}

    def handle(message: Any) -> bool | None:
        seen.run(message)
        if len(seen.runs) == 1:
            message.enable_async()
            return None
        seen.handled[message.body] += 1
        return True

    handler = decorated(handle, topic, channel)

    async def main() -> None:
        async with stock_reader(topic, channel, handler, nsqd_pair, msg_timeout=1):
            publish(nsqd_pair, topic, [b"message"])
            await eventually_async(lambda: handler.stats.standbys == 1, PATIENCE)
            dies = by_address[seen.runs[0].where]
            lives = next(nsqd for nsqd in nsqd_pair if nsqd is not dies)
            dies.kill()
            await eventually_async(lambda: seen.handled, PATIENCE)
            await nothing_left([lives], topic, channel)

    on_loop(main())
    seen.once_each([b"message"])
    assert len(seen.runs) == 2
    assert handler.stats.takeovers == 1


def test_answers_may_come_from_any_thread(nsqd_pair: Pair, topic: str, channel: str) -> None:
    seen = Seen()
    messages = bodies(100)

    def handle(message: Any) -> None:
        message.enable_async()

        def work() -> None:
            seen.handle(message)
            message.finish()

        threading.Thread(target=work).start()

    handler = decorated(handle, topic, channel)

    async def main() -> None:
        async with stock_reader(topic, channel, handler, nsqd_pair) as reader:
            publish(nsqd_pair, topic, messages)
            await eventually_async(lambda: len(seen.handled) == 100, PATIENCE)
            await nothing_left(nsqd_pair, topic, channel)
            at_rest(handler, reader)

    on_loop(main())
    seen.once_each(messages)


# -- what can be decorated -----------------------------------------------------------------------


class Application:
    def __init__(self) -> None:
        self.seen = Seen()

    def method(self, message: Any) -> bool:
        return self.seen.handle(message)

    async def coroutine_method(self, message: Any) -> bool:
        return self.seen.handle(message)

    def with_more(self, _: str, message: Any) -> bool:
        return self.seen.handle(message)

    def __call__(self, message: Any) -> bool:
        return self.seen.handle(message)


SHAPES: dict[str, Callable[[Application], Callable[..., Any]]] = {
    "bound method": lambda application: application.method,
    "bound coroutine method": lambda application: application.coroutine_method,
    "callable object": lambda application: application,
    "partial": lambda application: functools.partial(application.with_more, "more"),
    "partial of a coroutine": lambda application: functools.partial(application.coroutine_method),
}


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_all_that_can_be_called_can_be_decorated(
    nsqd_pair: Pair, topic: str, channel: str, shape: Callable[[Application], Callable[..., Any]]
) -> None:
    application = Application()
    handler = decorated(shape(application), topic, channel)

    async def main() -> None:
        async with stock_reader(topic, channel, handler, nsqd_pair) as reader:
            publish(nsqd_pair, topic, bodies(20))
            await nothing_left(nsqd_pair, topic, channel)
            at_rest(handler, reader)

    on_loop(main())
    application.seen.once_each(bodies(20))


def test_a_method_is_decorated_where_it_is_defined(nsqd_pair: Pair, topic: str, channel: str) -> None:
    class Decorated(Application):
        @dedupe(MemoryStore(window=1000), key=BODY, scope=f"{topic}/{channel}")
        def handle(self, message: Any) -> bool:
            """What it does."""
            return self.seen.handle(message)

    application = Decorated()
    assert application.handle.__doc__ == "What it does."

    async def main() -> None:
        async with stock_reader(topic, channel, application.handle, nsqd_pair):
            publish(nsqd_pair, topic, bodies(20))
            await nothing_left(nsqd_pair, topic, channel)

    on_loop(main())
    application.seen.once_each(bodies(20))
    assert Decorated.handle.stats.duplicates == 20


@pytest.mark.parametrize("kind", ["plain", "coroutine"])
def test_what_was_read_before_a_connection_closed_is_left_to_nsqd(
    nsqd: Nsqd, topic: str, channel: str, kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    """pynsq hands it out all the same; but nothing could be answered any more."""
    watched_channel(nsqd, topic, channel)
    seen = Seen()

    async def main() -> None:
        ended = asyncio.Event()

        def handle(message: Any) -> bool:
            seen.run(message)
            if message.conn.stream._read_buffer_size > 500 and not ends:  # a dozen messages
                ends.append(message)
                # What comes last of a connection: there is nothing left to read.
                message.conn.on("error", lambda **_: ended.set())
                reader.close()
            return True

        ends: list[Any] = []
        handler = decorated(KINDS[kind](handle, 0.0), topic, channel)
        async with stock_reader(topic, channel, handler, [nsqd]) as reader:
            offered = []
            reader.validate_message = lambda message: offered.append(message) or True
            publish([nsqd], topic, bodies(300))
            await asyncio.wait_for(ended.wait(), PATIENCE)
            await eventually_async(lambda: handler.stats.in_flight == 0)
            assert len(offered) > handler.stats.received, "some came after the end"
            assert handler._desk._lines == {}
            assert handler._desk._open == 0
        assert "uncaught exception" not in caplog.text

    on_loop(main())
    # What was handled after its connection had closed could not be answered either.
    assert nsqd.unfinished(topic, channel) >= 300 - len(seen.runs)


def test_readers_of_one_channel_share_a_handler(nsqd_pair: Pair, topic: str, channel: str) -> None:
    """One reader for each nsqd: what the one handles the other knows."""
    seen = Seen()
    handler = decorated(coroutine(seen.handle), topic, channel)
    one, other = nsqd_pair

    async def main() -> None:
        alone = {"nsqd_tcp_addresses": None}
        async with (
            stock_reader(topic, channel, handler, (one,), **{**alone, "nsqd_tcp_addresses": [one.tcp_address]}),
            stock_reader(topic, channel, handler, (other,), **{**alone, "nsqd_tcp_addresses": [other.tcp_address]}),
        ):
            publish(nsqd_pair, topic, bodies(100))
            await eventually_async(lambda: len(seen.handled) == 100, PATIENCE)
            await nothing_left(nsqd_pair, topic, channel)

    on_loop(main())
    seen.once_each(bodies(100))


def test_a_reader_of_another_topic_is_told_and_loses_nothing(
    nsqd_pair: Pair, topic: str, channel: str, caplog: pytest.LogCaptureFixture
) -> None:
    seen = Seen()
    handler = decorated(plain(seen.handle), "another", channel)

    async def main() -> None:
        async with stock_reader(topic, channel, handler, nsqd_pair):
            publish(nsqd_pair, topic, bodies(10))
            await nothing_left(nsqd_pair, topic, channel)

    on_loop(main())
    assert all(seen.handled[body] == 2 for body in bodies(10))
    assert handler.stats.unprotected == 20
    told_of = [record for record in caplog.records if record.levelno == logging.ERROR and "scope" in record.msg]
    assert len(told_of) == 1
    assert f"{topic}/{channel}" in told_of[0].getMessage()


def test_max_tries_of_the_reader_is_warned_of_once(
    nsqd_pair: Pair, topic: str, channel: str, caplog: pytest.LogCaptureFixture
) -> None:
    handler = decorated(plain(Seen().handle), topic, channel)

    async def main() -> None:
        async with stock_reader(topic, channel, handler, nsqd_pair, max_tries=5):
            publish(nsqd_pair, topic, bodies(10))
            await nothing_left(nsqd_pair, topic, channel)

    on_loop(main())
    assert [record.levelno for record in caplog.records if "max_tries=5" in record.getMessage()] == [logging.WARNING]


def test_a_dedupe_reader_needs_no_decorated_handler(
    nsqd_pair: Pair, topic: str, channel: str, caplog: pytest.LogCaptureFixture
) -> None:
    seen = Seen()
    handler = decorated(plain(seen.handle), topic, channel)

    async def main() -> None:
        async with consuming(topic, channel, handler, nsqd_pair):
            publish(nsqd_pair, topic, bodies(10))
            await nothing_left(nsqd_pair, topic, channel)

    on_loop(main())
    seen.once_each(bodies(10))
    assert handler.stats.received == 0
    assert sum("de-duplicates already" in record.getMessage() for record in caplog.records) == 1
