"""Many connections, many copies that wait, bodies of one byte and of nsqd's maximum, and memory over many messages."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from consumers import PATIENCE, Gate, Seen, at_rest, bodies, consuming, gated, nothing_left, on_loop, publish, told
from proxy import recording
from resident import resident
from servers import Pair, eventually_async

from nsqdedupe import MemoryStore

MAX_BODY = 1 << 20
"""Nsqd's own --max-msg-size."""


def test_sixty_four_connections_share_rdy(nsqd_pair: Pair, topic: str, channel: str) -> None:
    """32 connections to each nsqd, each through an address of its own: as many nsqds would take a larger machine."""
    messages = bodies(4000)
    seen = Seen()
    for nsqd in nsqd_pair:
        nsqd.create_channel(topic, channel)

    async def main() -> None:
        async with recording(*nsqd_pair * 32) as proxies:
            first, *others = [proxy.address for proxy in proxies]
            options = {"nsqd_tcp_addresses": [first, *others], "max_in_flight": 640}
            async with consuming(topic, channel, seen.handle, (), **options) as reader:
                await eventually_async(lambda: len(reader.conns) == 64, PATIENCE)
                await asyncio.to_thread(publish, nsqd_pair, topic, messages)
                await eventually_async(lambda: reader.stats.received == 8000, PATIENCE)
                await nothing_left(nsqd_pair, topic, channel)
                assert reader.total_rdy == sum(conn.rdy for conn in reader.conns.values()) <= 640
                # A connection has its share from its first message on, and there were enough for each.
                assert {conn.rdy for conn in reader.conns.values()} == {10}
                at_rest(reader)
                assert reader.stats.duplicates == 4000
                assert told(nsqd_pair, topic, channel, "timeout_count") == [0, 0]

    on_loop(main())
    seen.once_each(messages)


@pytest.mark.nsqd_flags("--max-rdy-count=50000")
def test_twenty_thousand_handlers_run_and_as_many_copies_stand_by(nsqd_pair: Pair, topic: str, channel: str) -> None:
    count = 20_000
    messages = bodies(count)
    seen = Seen()

    async def main() -> None:
        gate = Gate()
        store = MemoryStore(window=count)
        async with consuming(
            topic, channel, gated(seen.handle, gate), nsqd_pair, max_in_flight=100_000, store=store
        ) as reader:
            await asyncio.to_thread(publish, nsqd_pair, topic, messages)
            await eventually_async(lambda: reader.stats.standbys == count, PATIENCE)
            assert store.kept() == count
            assert reader.stats.in_flight == 2 * count
            gate.open()
            await eventually_async(lambda: not reader.stats.in_flight, PATIENCE)
            await nothing_left(nsqd_pair, topic, channel)
            at_rest(reader)
            assert store.kept() == 0
            assert (reader.stats.handled, reader.stats.duplicates) == (count, count)

    on_loop(main())
    seen.once_each(messages)


@pytest.mark.parametrize("transport", [{}, {"snappy": True}], ids=["plain", "snappy"])
def test_bodies_of_one_byte_and_of_the_maximum_in_flight_at_once(
    nsqd_pair: Pair, topic: str, channel: str, transport: dict[str, Any]
) -> None:
    """10 MiB in flight from each nsqd, with small messages amid."""
    large = [bytes([number]) * MAX_BODY for number in range(10)]
    small = [bytes([number]) for number in range(256)]
    for nsqd in nsqd_pair:
        nsqd.create_channel(topic, channel)
        nsqd.mpublish(topic, small[:128])
        for body in large:
            nsqd.publish(topic, body)
        nsqd.mpublish(topic, small[128:])
    seen = Seen()

    async def main() -> None:
        gate = Gate()
        async with consuming(
            topic, channel, gated(seen.handle, gate), nsqd_pair, max_in_flight=1000, **transport
        ) as reader:
            await eventually_async(lambda: reader.stats.in_flight == 2 * 266, PATIENCE)
            gate.open()
            await nothing_left(nsqd_pair, topic, channel)
            at_rest(reader)
            assert (reader.stats.handled, reader.stats.duplicates) == (266, 266)

    on_loop(main())
    seen.once_each([*small, *large])


def test_memory_is_flat_over_a_hundred_thousand_deliveries(nsqd_pair: Pair, topic: str, channel: str) -> None:
    """Less than 40 bytes more per message after the first fifth: not even an object is kept of each."""
    handled = 0

    def handle(_: Any) -> bool:
        nonlocal handled
        handled += 1
        return True

    async def main() -> None:
        store = MemoryStore(window=2000)
        async with consuming(topic, channel, handle, nsqd_pair, store=store, max_in_flight=1000) as reader:
            sizes = []
            for start in range(0, 50_000, 10_000):
                await asyncio.to_thread(publish, nsqd_pair, topic, bodies(10_000, size=200, start=start))
                await eventually_async(lambda end=start + 10_000: reader.stats.received == 2 * end, PATIENCE)
                await eventually_async(lambda: not reader.stats.in_flight)
                sizes.append(resident())
            assert sizes[-1] - sizes[0] < 40 * 40_000
            at_rest(reader)
            assert store.kept() == 0
            assert handled == reader.stats.handled

    on_loop(main())
