"""The message that tests a backoff is a copy that is not run: it neither ends the backoff nor begins a block."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from consumers import PATIENCE, Seen, consuming, on_loop
from servers import Servers, eventually_async
from test_backoff import let_test

from nsqdedupe import DedupeReader


class Blocks(DedupeReader):
    """Knows how many blocks began, and what had been handled when the backoff was over."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.began = 0
        self.seen = Seen()
        self.handled_at_end: list[set[bytes]] = []

    def _start_backoff_block(self) -> None:
        self.began += 1
        super()._start_backoff_block()

    def _complete_backoff_block(self) -> None:
        self.handled_at_end.append(set(self.seen.handled))
        super()._complete_backoff_block()


@pytest.mark.parametrize("copy", ["duplicate", "standby", "held"])
def test_a_copy_that_tests_a_backoff_lets_the_next_connection_test_it_too(
    servers: Servers, topic: str, channel: str, monkeypatch: pytest.MonkeyPatch, copy: str
) -> None:
    """A live message waits on the first nsqd; a copy comes to the second, which has the only RDY 1.

    The copy's message was handled from the third nsqd, or is still. The live message fails once more: only successes
    end the backoff, and then every connection has its share.
    """
    third, second, first = nsqds = [servers.nsqd() for _ in range(3)]
    for nsqd in nsqds:
        nsqd.create_channel(topic, channel)

    async def main() -> None:
        gate = asyncio.Event()
        spoilt = 0

        async def handle(message: Any) -> bool:
            nonlocal spoilt
            if message.body == b"standby":
                await gate.wait()
            elif message.body == b"held":
                message.requeue(delay=3600, backoff=False)
                return False
            elif message.body == b"spoilt" and spoilt < 2:
                spoilt += 1
                return False
            return reader.seen.handle(message)

        options = {"max_in_flight": 15, "max_backoff_duration": 2, "requeue_delay": 0}
        async with consuming(topic, channel, handle, [third], Blocks, **options) as reader:
            assert isinstance(reader, Blocks)
            for number, nsqd in enumerate(nsqds, start=1):
                # In this order: the first is the next one after the second.
                reader.connect_to_nsqd("127.0.0.1", nsqd.tcp_port)
                await eventually_async(lambda number=number: len(reader.conns) == number, PATIENCE)
            at_first, at_second = (reader.conns[nsqd.tcp_address] for nsqd in (first, second))
            second.publish(topic, b"before")
            third.publish(topic, copy.encode())
            settled = {"duplicate": "handled", "standby": "received", "held": "failed"}[copy]
            wanted = 1 if copy == "held" else 2
            await eventually_async(lambda: getattr(reader.stats, settled) == wanted, PATIENCE)

            let_test(monkeypatch, second)
            first.publish(topic, b"spoilt")
            await eventually_async(lambda: (at_first.rdy, at_second.rdy) == (0, 1), PATIENCE)
            assert spoilt == reader.began == 1
            # The copy comes, and so the live message is run again and fails. From then on the first connection tests.
            let_test(monkeypatch, first)
            second.publish(topic, copy.encode())
            await eventually_async(lambda: reader.seen.handled[b"spoilt"], PATIENCE)
            await eventually_async(lambda: reader.began == 3 and (at_first.rdy, at_second.rdy) == (1, 0), PATIENCE)
            # That success was one step of two.
            assert reader.handled_at_end == []
            first.publish(topic, b"good")
            await eventually_async(lambda: (at_first.rdy, at_second.rdy) == (5, 5), PATIENCE)
            (handled,) = reader.handled_at_end
            assert handled == {b"before", b"spoilt"} | {b"duplicate"} & {copy.encode()} | {b"good"}
            assert reader.began == 3
            gate.set()
            await eventually_async(lambda: not reader.stats.in_flight)
            counts = {"duplicate": "duplicates", "standby": "standbys", "held": "deferred"}[copy]
            assert getattr(reader.stats, counts) == 1

    on_loop(main())
