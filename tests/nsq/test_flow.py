"""How many messages come: handlers that buffer, pauses, and places that copies take."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from consumers import PATIENCE, Seen, at_rest, bodies, consuming, coroutine, nothing_left, on_loop, publish, told
from servers import Pair, eventually_async

from nsqdedupe import DedupeReader
from nsqdedupe.cli.local_nsq import Nsqd, Nsqlookupd


class Buffering:
    """A handler as in pynsq's documentation: collects until the reader is starved, then answers all."""

    def __init__(self) -> None:
        self.seen = Seen()
        self.buffer: list[Any] = []
        self.batches: list[int] = []
        self.reader: DedupeReader | None = None

    def __call__(self, message: Any) -> None:
        message.enable_async()
        self.buffer.append(message)
        assert self.reader is not None
        if self.reader.is_starved():
            self.flush()

    def flush(self) -> None:
        batch, self.buffer = self.buffer, []
        self.batches.append(len(batch))
        for message in batch:
            self.seen.handle(message)
            message.finish()


def test_a_handler_that_buffers_until_it_starves_works_with_copies(
    nsqd_pair: Pair, lookupd: Nsqlookupd, topic: str, channel: str
) -> None:
    for nsqd in nsqd_pair:
        nsqd.create_channel(topic, channel)
    messages = bodies(1000)
    handler = Buffering()

    async def main() -> None:
        async with consuming(topic, channel, handler, lookupd, max_in_flight=40) as reader:
            handler.reader = reader
            await eventually_async(lambda: len(reader.conns) == 2)
            publish(nsqd_pair, topic, messages)
            # What is left at the end starves nobody: applications flush it by a timer.
            await eventually_async(lambda: len(handler.seen.handled) + len(handler.buffer) == 1000, PATIENCE)
            handler.flush()
            await nothing_left(nsqd_pair, topic, channel)
            at_rest(reader)
            assert reader.stats.unanswered == 0
            assert not reader.is_starved()

    on_loop(main())
    handler.seen.once_each(messages)
    assert sorted(handler.batches)[len(handler.batches) // 2] >= 5, "it hardly buffers"
    assert told(nsqd_pair, topic, channel, "timeout_count") == [0, 0]


def test_a_buffer_is_starved_when_copies_of_what_it_holds_can_take_all_places(
    nsqd_pair: Pair, lookupd: Nsqlookupd, topic: str, channel: str
) -> None:
    """Two messages of each nsqd are in the buffer; then their copies fill the four places of either nsqd.

    No handler is called for a copy that waits, so it must have been told before.
    """
    first, second = nsqd_pair
    for nsqd in nsqd_pair:
        nsqd.create_channel(topic, channel)
    handler = Buffering()
    arrived: list[Any] = []

    def handle(message: Any) -> None:
        arrived.append(message)
        handler(message)

    async def main() -> None:
        async with consuming(topic, channel, handle, lookupd, max_in_flight=8) as reader:
            handler.reader = reader
            await eventually_async(lambda: len(reader.conns) == 2)
            for nsqd, body in ((first, b"a"), (second, b"c"), (first, b"b"), (second, b"d")):
                before = len(arrived)
                publish([nsqd], topic, [body])
                await eventually_async(lambda before=before: len(arrived) == before + 1)
            publish([first], topic, [b"c", b"d"])
            publish([second], topic, [b"a", b"b"])
            publish(nsqd_pair, topic, [b"e"])
            await eventually_async(lambda: b"e" in {message.body for message in arrived})
            handler.flush()
            await nothing_left(nsqd_pair, topic, channel)
            at_rest(reader)

    on_loop(main())
    handler.seen.once_each([b"a", b"b", b"c", b"d", b"e"])


def test_without_a_store_a_buffer_is_as_large_as_in_pynsq(nsqd_pair: Pair, topic: str, channel: str) -> None:
    """No copy waits then, so the places of one nsqd say nothing about those of the other."""
    handler = Buffering()
    for nsqd in nsqd_pair:
        nsqd.create_channel(topic, channel)

    async def main() -> None:
        async with consuming(topic, channel, handler, nsqd_pair, store=False, max_in_flight=8) as reader:
            handler.reader = reader
            await eventually_async(lambda: len(reader.conns) == 2)
            for nsqd in nsqd_pair:
                publish([nsqd], topic, bodies(3))
            await eventually_async(lambda: len(handler.buffer) == 6)
            assert not reader.is_starved()
            publish(nsqd_pair[:1], topic, [b"last"])
            await eventually_async(lambda: handler.batches == [7])
            await nothing_left(nsqd_pair, topic, channel)

    on_loop(main())


def test_a_pause_lets_nothing_in_and_ends(nsqd_pair: Pair, lookupd: Nsqlookupd, topic: str, channel: str) -> None:
    for nsqd in nsqd_pair:
        nsqd.create_channel(topic, channel)
    messages = bodies(1000)
    seen = Seen()

    def rdy() -> list[int]:
        return [nsqd.channel_stats(topic, channel)["clients"][0]["ready_count"] for nsqd in nsqd_pair]

    async def main() -> None:
        async with consuming(topic, channel, coroutine(seen.handle), lookupd, max_in_flight=20) as reader:
            await eventually_async(lambda: len(reader.conns) == 2)
            seen.when(100, lambda: reader.set_max_in_flight(0))
            publish(nsqd_pair, topic, messages)
            await eventually_async(lambda: len(seen.handled) >= 100, PATIENCE)
            await eventually_async(lambda: rdy() == [0, 0])
            await eventually_async(lambda: not reader.stats.in_flight, PATIENCE)
            before = reader.stats
            assert before.handled < 1000
            publish(nsqd_pair, topic, [b"in the pause"])
            await asyncio.sleep(0.5)
            # An nsqd that was about to send a message when it was told may still do so.
            assert reader.stats.received - before.received <= 2
            assert not reader.stats.in_flight
            reader.set_max_in_flight(20)
            await eventually_async(lambda: len(seen.handled) == 1001, PATIENCE)
            await nothing_left(nsqd_pair, topic, channel)
            at_rest(reader)

    on_loop(main())
    seen.once_each([*messages, b"in the pause"])


@pytest.mark.nsqd_flags("--msg-timeout=2s")
def test_in_a_pause_no_copy_that_waits_takes_over(
    nsqd_pair: Pair, lookupd: Nsqlookupd, topic: str, channel: str
) -> None:
    """Its owner goes while the reader is paused: the other copy is handled after the pause."""
    for nsqd in nsqd_pair:
        nsqd.create_channel(topic, channel)
    by_address = {nsqd.tcp_address: nsqd for nsqd in nsqd_pair}
    running: list[Any] = []
    seen = Seen()

    async def main() -> None:
        async def handle(message: Any) -> bool:
            running.append(message)
            if len(running) == 1:
                await asyncio.Event().wait()
            return seen.handle(message)

        async with consuming(topic, channel, handle, lookupd, msg_timeout=60) as reader:
            await eventually_async(lambda: len(reader.conns) == 2)
            publish(nsqd_pair, topic, [b"message"])
            await eventually_async(lambda: running and reader.stats.standbys == 1)
            reader.set_max_in_flight(0)
            (owner,) = running
            assert by_address[owner.conn.id].alive
            # The handler is taken away without an outcome: what a lease that ends does, only sooner.
            reader._DedupeReader__runner._deduper._outcomes.let_go(owner)
            await asyncio.sleep(0.5)
            assert seen.handled == {}
            reader.set_max_in_flight(20)
            await eventually_async(lambda: seen.handled, PATIENCE)
            assert reader.stats.takeovers == 1

    on_loop(main())
    seen.once_each([b"message"])


@pytest.mark.parametrize("backoff", [False, True], ids=["calm", "in a backoff"])
def test_a_pause_may_end_while_messages_of_before_are_in_flight(
    nsqd: Nsqd, topic: str, channel: str, backoff: bool
) -> None:
    """With pynsq the connection stays without RDY then, for good."""
    nsqd.create_channel(topic, channel)
    kept: list[Any] = []

    def handle(message: Any) -> None:
        message.enable_async()
        kept.append(message)

    async def main() -> None:
        options = {"max_in_flight": 10, "max_backoff_duration": 1, "requeue_delay": 3600}
        async with consuming(topic, channel, handle, [nsqd], **options) as reader:
            await eventually_async(lambda: reader.conns)
            if backoff:
                publish([nsqd], topic, [b"spoilt"])
                await eventually_async(lambda: kept)
                kept.pop().requeue()
                await eventually_async(lambda: reader.backoff_timer.get_interval() and not reader.backoff_block)
            publish([nsqd], topic, [b"one"])
            await eventually_async(lambda: kept)
            reader.set_max_in_flight(0)
            await eventually_async(lambda: nsqd.channel_stats(topic, channel)["clients"][0]["ready_count"] == 0)
            reader.set_max_in_flight(10)
            if backoff:
                # RDY 1 is taken by what is in flight.
                kept.pop().finish()
            publish([nsqd], topic, [b"two"])
            await eventually_async(lambda: kept and kept[-1].body == b"two")
            for message in kept:
                message.finish()
            await eventually_async(lambda: reader.total_rdy == 10)

    on_loop(main())
