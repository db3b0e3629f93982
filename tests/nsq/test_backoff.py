"""Backoff with copies: duplicates and standbys say nothing about the handler, and hold nobody up."""

from __future__ import annotations

import random
import time
from typing import Any

import pytest
from consumers import PATIENCE, Seen, at_rest, bodies, consuming, nothing_left, on_loop, publish, told, watched_pair
from servers import Pair, eventually_async

from nsqdedupe import DedupeReader
from nsqdedupe.cli.local_nsq import Nsqd, Nsqlookupd

BLOCK_OF_TWO_SECONDS = {"max_backoff_duration": 72, "requeue_delay": 0}
"""pynsq's first block takes 0.028 of the longest."""


def let_test(monkeypatch: pytest.MonkeyPatch, nsqd: Nsqd) -> None:
    """Let the connection to this nsqd be the one that pynsq chooses to end a block."""

    def choose(conns: list[Any]) -> Any:
        return next((conn for conn in conns if getattr(conn, "id", None) == nsqd.tcp_address), conns[0])

    monkeypatch.setattr(random, "choice", choose)


class Watch(DedupeReader):
    """Knows when a backoff block ended."""

    ended = 0.0

    def _finish_backoff_block(self) -> None:
        super()._finish_backoff_block()
        self.ended = time.monotonic()


@pytest.mark.parametrize("tested", ["backlog", "live"])
def test_live_messages_flow_soon_after_a_block_whatever_a_backlog_of_duplicates_does(
    nsqd_pair: Pair, lookupd: Nsqlookupd, topic: str, channel: str, monkeypatch: pytest.MonkeyPatch, tested: str
) -> None:
    """One nsqd has 10,000 duplicates when the block ends, the other one live messages.

    pynsq lets one connection, chosen at random, test the waters with RDY 1. A duplicate is no test.
    """
    live, backlog = nsqd_pair
    watched_pair(nsqd_pair, lookupd, topic, channel)
    old = bodies(10_000)
    publish([live], topic, old)
    fresh = bodies(100, start=20_000)
    seen = Seen()
    spoilt: list[bytes] = []

    def handle(message: Any) -> bool:
        if message.body == b"spoilt" and not spoilt:
            spoilt.append(message.body)
            return False
        return seen.handle(message)

    async def main() -> None:
        options = {**BLOCK_OF_TWO_SECONDS, "max_in_flight": 1000}
        async with consuming(topic, channel, handle, lookupd, Watch, **options) as reader:
            await eventually_async(lambda: reader.stats.handled == 10_000 and len(reader.conns) == 2, PATIENCE)
            let_test(monkeypatch, backlog if tested == "backlog" else live)
            publish([live], topic, [b"spoilt"])
            await eventually_async(lambda: reader.backoff_block)
            publish([backlog], topic, old)
            publish([live], topic, fresh)
            assert reader.backoff_block, "this machine is too slow for this test's block"
            await eventually_async(lambda: len(seen.handled) == 10_101, PATIENCE)
            first = next(run for run in seen.runs if run.body in {*fresh, b"spoilt"})
            assert first.at - reader.ended < 2.0
            last = max(run.at for run in seen.runs)
            assert last - reader.ended < 4.0
            await nothing_left(nsqd_pair, topic, channel)
            await eventually_async(lambda: sum(conn.rdy for conn in reader.conns.values()) == 1000)
            at_rest(reader)
            assert reader.stats.duplicates == 10_000

    on_loop(main())
    seen.once_each([*old, *fresh, b"spoilt"])


def test_duplicates_end_no_block(
    nsqd_pair: Pair, lookupd: Nsqlookupd, topic: str, channel: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As many successes as failures end a backoff; a duplicate is no success."""
    first, second = nsqd_pair
    watched_pair(nsqd_pair, lookupd, topic, channel)
    old = bodies(500)
    publish([first], topic, old)
    seen = Seen()

    def handle(message: Any) -> bool:
        if message.body == b"spoilt":
            message.requeue(delay=3600)
            return False
        return seen.handle(message)

    async def main() -> None:
        async with consuming(topic, channel, handle, lookupd, max_backoff_duration=10) as reader:
            await eventually_async(lambda: len(seen.handled) == 500 and len(reader.conns) == 2, PATIENCE)
            let_test(monkeypatch, second)
            publish([first], topic, [b"spoilt"])
            await eventually_async(lambda: reader.stats.failed == 1)
            publish([second], topic, old)
            await eventually_async(lambda: reader.stats.duplicates == 500, PATIENCE)
            await eventually_async(lambda: not reader.backoff_block)
            assert reader.backoff_timer.get_interval() > 0
            assert {conn.rdy for conn in reader.conns.values()} <= {0, 1}
            publish([second], topic, [b"good"])
            await eventually_async(lambda: not reader.backoff_timer.get_interval())
            await eventually_async(lambda: {conn.rdy for conn in reader.conns.values()} == {100})

    on_loop(main())
    seen.once_each([*old, b"good"])
    assert sum(told(nsqd_pair, topic, channel, "requeue_count")) == 1


def test_a_deferred_copy_starts_no_block(nsqd_pair: Pair, lookupd: Nsqlookupd, topic: str, channel: str) -> None:
    """Ten messages fail once without a backoff; their other copies are sent back meanwhile."""
    watched_pair(nsqd_pair, lookupd, topic, channel)
    messages = bodies(10)
    seen = Seen()
    blocks: list[bool] = []

    def handle(message: Any) -> bool:
        if message.tries == 0:
            message.requeue(delay=1, backoff=False)
            return False
        return seen.handle(message)

    class NoBlock(DedupeReader):
        def _start_backoff_block(self) -> None:
            blocks.append(True)
            super()._start_backoff_block()

    async def main() -> None:
        async with consuming(topic, channel, handle, lookupd, NoBlock) as reader:
            await eventually_async(lambda: len(reader.conns) == 2)
            publish(nsqd_pair, topic, messages)
            await eventually_async(lambda: len(seen.handled) == 10 or blocks, PATIENCE)
            assert blocks == []
            await nothing_left(nsqd_pair, topic, channel)
            at_rest(reader)
            assert reader.stats.deferred >= 10
            assert reader.stats.failed == 10

    on_loop(main())
    seen.once_each(messages)
    assert blocks == []
