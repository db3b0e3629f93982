"""The counters, held against what handlers, hooks and nsqds know."""

from __future__ import annotations

import asyncio
import dataclasses
import json
from collections import Counter
from typing import Any

import pytest
from consumers import (
    OUTCOMES,
    PATIENCE,
    Seen,
    at_rest,
    bodies,
    consuming,
    nothing_left,
    on_loop,
    publish,
    told,
    watched_channel,
    watched_pair,
)
from servers import Pair, eventually_async

from nsqdedupe import DedupeReader, KeyExtractionError, Stats
from nsqdedupe.cli.local_nsq import Nsqd, Nsqlookupd

EVER_MORE = [field.name for field in dataclasses.fields(Stats) if field.name not in ("in_flight", "nsqds")]


class Mixed(DedupeReader):
    """Every outcome there is, by the number in the body."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, message_handler=self.work, **kwargs)
        self.counted: Counter[str] = Counter()
        self.moments: list[Stats] = []

    def validate_message(self, message: Any) -> bool:
        valid = int(message.body[:-1]) % 10 != 9
        self.counted["invalid"] += not valid
        return valid

    def giving_up(self, message: Any) -> None:
        self.counted["given_up"] += 1

    def work(self, message: Any) -> Any:
        self.moments.append(self.stats)
        kind = int(message.body[:-1]) % 10
        poison = kind == 8
        if poison or (kind >= 5 and message.tries == 0):
            self.counted["failed"] += 1
            return self.fail(message, kind)
        self.counted["handled"] += 1
        if kind == 0:
            return self.later(message)
        if kind == 1:
            message.enable_async()
            asyncio.get_running_loop().call_later(0.01, message.finish)
            return None
        return True

    async def later(self, message: Any) -> bool:
        await asyncio.sleep(0.01)
        self.moments.append(self.stats)
        return True

    def fail(self, message: Any, kind: int) -> bool:
        if kind == 6:
            raise ValueError(message.id)
        if kind == 7:
            message.requeue(delay=0.2, backoff=False)
        return False


def key(message: Any) -> bytes:
    if message.body in (b"2-", b"12-"):
        raise KeyExtractionError("two have none")
    return bytes(message.body)


def test_every_delivery_is_counted_once(nsqd_pair: Pair, lookupd: Nsqlookupd, topic: str, channel: str) -> None:
    watched_pair(nsqd_pair, lookupd, topic, channel)
    publish(nsqd_pair, topic, bodies(400))

    async def main() -> None:
        options = {"requeue_delay": 0, "max_backoff_duration": 1, "max_tries": 2, "low_rdy_idle_timeout": 1}
        lookups = {"lookupd_http_addresses": [lookupd.http_address], "lookupd_poll_interval": 1}
        reader = Mixed(topic, channel, key=key, max_in_flight=100, output_buffer_timeout=25, **lookups, **options)
        try:
            await eventually_async(lambda: reader.stats.handled >= 282, PATIENCE)
            await nothing_left(nsqd_pair, topic, channel)
            at_rest(reader)
            look_at_sums(reader)
            look_at_totals(reader)
        finally:
            reader.close()
            await eventually_async(lambda: not reader.conns)

    def look_at_sums(reader: Mixed) -> None:
        """At every moment a handler saw them."""
        assert len(reader.moments) > 400
        for before, after in zip(reader.moments, reader.moments[1:], strict=False):
            assert after.in_flight > 0, "the one that looks is in flight itself"
            assert after.received == sum(getattr(after, outcome) for outcome in OUTCOMES)
            for name in EVER_MORE:
                assert getattr(after, name) >= getattr(before, name), name
            for name in ("received", *OUTCOMES):
                assert getattr(after, name) == sum(nsqd[name] for nsqd in after.nsqds.values())

    def look_at_totals(reader: Mixed) -> None:
        stats = reader.stats
        for name in ("handled", "failed", "given_up", "invalid"):
            assert getattr(stats, name) == reader.counted[name], name
        # 40 of each kind: 8 is given up; 9 invalid, both copies; two messages have no key, so both copies of them.
        assert (stats.handled, stats.given_up, stats.invalid) == (322, 40, 80)
        assert stats.failed == 3 * 40 + 2 * 40
        assert stats.key_errors == stats.unprotected == 4
        for nsqd in nsqd_pair:
            mine = stats.nsqds[nsqd.tcp_address]
            their = nsqd.channel_stats(topic, channel)
            again = their["requeue_count"] + their["timeout_count"]
            assert mine["received"] == their["message_count"] + again
            assert mine["failed"] + mine["deferred"] == their["requeue_count"]
            finished = mine["handled"] + mine["duplicates"] + mine["given_up"] + mine["invalid"]
            assert finished == their["message_count"] == 400
            assert their["timeout_count"] == mine["unanswered"] == 0

    on_loop(main())


def test_in_flight_is_what_the_nsqds_say(nsqd_pair: Pair, lookupd: Nsqlookupd, topic: str, channel: str) -> None:
    """While all handlers wait: those that run, and the copies that wait for them."""
    for nsqd in nsqd_pair:
        nsqd.create_channel(topic, channel)

    async def main() -> None:
        gate = asyncio.Event()
        running: list[Any] = []

        async def handle(message: Any) -> bool:
            running.append(message)
            await gate.wait()
            return True

        async with consuming(topic, channel, handle, lookupd, max_in_flight=60) as reader:
            # Connected to both before the first message: else the first nsqd would give all 60.
            await eventually_async(lambda: len(reader.conns) == 2, PATIENCE)
            await asyncio.to_thread(publish, nsqd_pair, topic, bodies(200))
            await eventually_async(lambda: reader.stats.in_flight == 60, PATIENCE)
            assert told(nsqd_pair, topic, channel, "in_flight_count") == [30, 30]
            assert {conn.in_flight for conn in reader.conns.values()} == {30}
            assert {nsqd["in_flight"] for nsqd in reader.stats.nsqds.values()} == {30}
            # The handlers of what has arrived begin in later turns of the loop.
            await eventually_async(lambda: len(running) + reader.stats.standbys == 60)
            gate.set()
            await eventually_async(lambda: reader.stats.handled == 200, PATIENCE)
            await nothing_left(nsqd_pair, topic, channel)
            at_rest(reader)

    on_loop(main())


@pytest.mark.nsqd_flags("--msg-timeout=2s")
def test_a_finish_that_nsqd_refuses_is_counted_and_its_message_is_not_handled_again(
    nsqd: Nsqd, topic: str, channel: str
) -> None:
    watched_channel(nsqd, topic, channel)
    publish([nsqd], topic, [b"message"])
    kept: list[Any] = []
    seen = Seen()

    async def main() -> None:
        def handle(message: Any) -> None:
            message.enable_async()
            kept.append(message)
            # So that it does not come back before its late answer.
            reader.set_max_in_flight(0)

        async with consuming(topic, channel, handle, [nsqd]) as reader:
            await eventually_async(lambda: told([nsqd], topic, channel, "timeout_count") == [1])
            seen.handle(kept[0])
            kept[0].finish()
            await eventually_async(lambda: reader.stats.fin_failed == 1)
            reader.set_max_in_flight(10)
            await nothing_left([nsqd], topic, channel)
            at_rest(reader)
            stats = reader.stats
            assert (stats.handled, stats.duplicates, stats.fin_failed) == (1, 1, 1)

    on_loop(main())
    seen.once_each([b"message"])
    assert len(kept) == 1


def test_stats_are_a_snapshot_that_goes_into_json(nsqd: Nsqd, topic: str, channel: str) -> None:
    publish([nsqd], topic, bodies(3))

    async def main() -> None:
        async with consuming(topic, channel, lambda _: True, [nsqd]) as reader:
            before = reader.stats
            await eventually_async(lambda: reader.stats.handled == 3)
            await nothing_left([nsqd], topic, channel)
            after = reader.stats
            assert (before.handled, after.handled) == (0, 3)
            with pytest.raises(dataclasses.FrozenInstanceError):
                after.handled = 4  # type: ignore[misc]
            read = json.loads(json.dumps(after.as_dict()))
            assert read["handled"] == read["nsqds"][nsqd.tcp_address]["handled"] == 3

    on_loop(main())
    with pytest.raises(AttributeError, match="stats"):
        _ = DedupeReader.stats
