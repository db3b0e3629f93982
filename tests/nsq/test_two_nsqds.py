"""The main promise: two nsqds hold a copy of each message, and each message is handled once."""

from __future__ import annotations

import nsq
import pytest
from consumers import KINDS, PATIENCE, Seen, at_rest, bodies, consuming, nothing_left, on_loop, publish, told
from servers import Pair, Servers, eventually_async

from nsqdedupe.cli.local_nsq import Nsqlookupd


@pytest.mark.parametrize("kind", KINDS)
def test_twenty_thousand_messages_on_two_nsqds_are_handled_once_each(
    nsqd_pair: Pair, lookupd: Nsqlookupd, topic: str, channel: str, kind: str
) -> None:
    messages = bodies(20_000, size=200)
    for nsqd in nsqd_pair:
        nsqd.create_channel(topic, channel)
    publish(nsqd_pair, topic, messages)
    seen = Seen()

    async def main() -> None:
        handler = KINDS[kind](seen.handle, 0.0 if kind == "plain" else 0.005)
        async with consuming(topic, channel, handler, lookupd, max_in_flight=1000) as reader:
            await eventually_async(lambda: reader.stats.handled + reader.stats.duplicates >= 40_000, PATIENCE)
            await nothing_left(nsqd_pair, topic, channel)
            assert len(reader.conns) == 2
            at_rest(reader)
            stats = reader.stats
            assert (stats.received, stats.handled, stats.duplicates) == (40_000, 20_000, 20_000)
            assert {nsqd["received"] for nsqd in stats.nsqds.values()} == {20_000}

    on_loop(main())
    seen.once_each(messages)
    for counter in ("depth", "in_flight_count", "deferred_count", "requeue_count", "timeout_count"):
        assert told(nsqd_pair, topic, channel, counter) == [0, 0], counter


@pytest.mark.parametrize("kind", KINDS)
def test_three_nsqds_and_three_copies_are_no_different(servers: Servers, topic: str, channel: str, kind: str) -> None:
    nsqds = [servers.nsqd() for _ in range(3)]
    messages = bodies(2000)
    for nsqd in nsqds:
        nsqd.create_channel(topic, channel)
    # Each in an order of its own, and the first one has every tenth message twice.
    publish(nsqds[:1], topic, [*messages, *messages[::10]])
    publish(nsqds[1:2], topic, messages[::-1])
    publish(nsqds[2:], topic, sorted(messages))
    seen = Seen()

    async def main() -> None:
        handler = KINDS[kind](seen.handle, 0.0 if kind == "plain" else 0.005)
        async with consuming(topic, channel, handler, nsqds, max_in_flight=300) as reader:
            await eventually_async(lambda: len(seen.handled) == 2000, PATIENCE)
            await nothing_left(nsqds, topic, channel)
            at_rest(reader)
            assert (reader.stats.handled, reader.stats.duplicates) == (2000, 4200)

    on_loop(main())
    seen.once_each(messages)
    assert told(nsqds, topic, channel, "requeue_count") == [0, 0, 0]
    assert told(nsqds, topic, channel, "timeout_count") == [0, 0, 0]


@pytest.mark.parametrize("kind", ["plain", "coroutine"])
def test_with_max_in_flight_1_two_nsqds_take_turns(
    nsqd_pair: Pair, lookupd: Nsqlookupd, topic: str, channel: str, kind: str
) -> None:
    messages = bodies(200)
    publish(nsqd_pair, topic, messages)
    seen = Seen()

    async def main() -> None:
        options = {"max_in_flight": 1, "low_rdy_idle_timeout": 1}
        async with consuming(topic, channel, KINDS[kind](seen.handle, 0.001), lookupd, **options) as reader:
            await eventually_async(lambda: reader.redist_periodic)
            # pynsq hands the one RDY on every 5 s, to a connection chosen at random.
            reader.redist_periodic.stop()
            reader.redist_periodic.callback_time = 500
            reader.redist_periodic.start()
            await eventually_async(lambda: reader.stats.handled + reader.stats.duplicates >= 400, 60)
            await nothing_left(nsqd_pair, topic, channel)
            at_rest(reader)

    on_loop(main())
    seen.once_each(messages)
    assert told(nsqd_pair, topic, channel, "timeout_count") == [0, 0]


@pytest.mark.parametrize("max_in_flight", [1, 2, 7, 100])
def test_at_rest_rdy_is_what_stock_pynsq_gives(
    nsqd_pair: Pair, lookupd: Nsqlookupd, topic: str, channel: str, max_in_flight: int
) -> None:
    """Each reader on a channel of its own, both after the same messages."""
    messages = bodies(300)
    both = f"{channel}-ours", f"{channel}-stock"
    for nsqd in nsqd_pair:
        for one in both:
            nsqd.create_channel(topic, one)
    publish(nsqd_pair[:1], topic, messages[:150])
    publish(nsqd_pair[1:], topic, messages[150:])

    def rdy(one: str) -> list[int]:
        return sorted(nsqd.channel_stats(topic, one)["clients"][0]["ready_count"] for nsqd in nsqd_pair)

    async def main() -> None:
        lookups = {"lookupd_http_addresses": [lookupd.http_address], "lookupd_poll_interval": 1}
        options = {"max_in_flight": max_in_flight, "low_rdy_idle_timeout": 60}
        stock = nsq.Reader(topic, both[1], lambda _: True, **lookups, **options)
        async with consuming(topic, both[0], lambda _: True, lookupd, **options) as reader:
            await eventually_async(lambda: len(reader.conns) == len(stock.conns) == 2)
            for one in both if max_in_flight > 1 else ():
                await nothing_left(nsqd_pair, topic, one)
            await eventually_async(lambda: rdy(both[0]) == rdy(both[1]) and sum(rdy(both[0])) <= max_in_flight)
            # The reader hands a RDY that is too little for all from one to the next now and then.
            await eventually_async(lambda: sorted(conn.rdy for conn in reader.conns.values()) == rdy(both[0]))
            await eventually_async(lambda: reader.total_rdy == sum(rdy(both[0])))
        stock.close()

    on_loop(main())
