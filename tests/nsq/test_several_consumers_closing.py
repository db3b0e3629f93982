"""A consumer that shares a store ends: what it handled is known to the others."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import closing
from typing import Any

import pytest
from consumers import PATIENCE, bodies, publish
from servers import eventually, eventually_async
from several import store_url, verdicts

from nsqdedupe import BODY, DedupeReader, Store, Verdict, open_store
from nsqdedupe.cli.local_memcached import Memcached
from nsqdedupe.cli.local_nsq import Nsqd


@pytest.fixture
def store(memcached: Memcached, topic: str) -> Iterator[Store]:
    with closing(open_store(store_url(memcached, topic))) as store:
        yield store


def test_a_reader_that_is_closed_when_its_loop_has_stopped_records_what_was_handled(
    nsqd: Nsqd, memcached: Memcached, topic: str, channel: str, store: Store
) -> None:
    """And gives back what was not: nobody has to wait for its lease."""
    nsqd.create_channel(topic, channel)
    messages = bodies(20)
    publish([nsqd], topic, messages)
    kept: list[Any] = []

    def handle(message: Any) -> None:
        message.enable_async()
        kept.append(message)

    with asyncio.Runner() as runner:

        async def consume() -> DedupeReader:
            reader = DedupeReader(
                topic, channel, handle, nsqd_tcp_addresses=[nsqd.tcp_address], max_in_flight=50, key=BODY, store=store
            )
            await eventually_async(lambda: len(kept) == 20, PATIENCE)
            return reader

        reader = runner.run(consume())
        for message in kept[:10]:
            message.finish()
        for message in kept[10:]:
            message.requeue(delay=0)
        reader.close()
    with closing(open_store(store_url(memcached, topic))) as witness:
        done, others = ([message.body for message in part] for part in (kept[:10], kept[10:]))
        eventually(lambda: verdicts(witness, topic, channel, done) == {Verdict.DONE}, PATIENCE)
        eventually(lambda: verdicts(witness, topic, channel, others) == {Verdict.NEW}, PATIENCE)
