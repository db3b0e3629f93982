"""Several consumers on one channel that share a memcached: each message is handled once over all of them."""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
from collections import Counter
from collections.abc import Sequence
from contextlib import closing
from typing import Any

import pytest
from consumers import PATIENCE, Seen, bodies, consuming, nothing_left, on_loop, owed, publish
from processes import Journal, consumer_process, told_to_stop
from servers import Pair, eventually, eventually_async
from several import ready, store_url, verdicts

from nsqdedupe import BODY, ConfigError, DedupeReader, Store, Verdict, dedupe, open_store
from nsqdedupe.cli.local_memcached import Memcached
from nsqdedupe.cli.local_nsq import Nsqlookupd
from nsqdedupe.fingerprint import hashing_of

MESSAGES = int(os.environ.get("SEVERAL_MESSAGES", "50000"))
"""They take some 10 s: what can happen between consumers shall have happened often."""

MESSAGES_DECORATED = MESSAGES // 10


@pytest.fixture
def url(memcached: Memcached, topic: str) -> str:
    return store_url(memcached, topic, window=2 * MESSAGES)


def handled_once_each(
    messages: Sequence[bytes],
    consumers: int,
    pair: Pair,
    topic: str,
    channel: str,
    lookupd: Nsqlookupd,
    journal: Journal,
    **options: Any,
) -> None:
    """So many processes handle each message once, all of them some."""
    for nsqd in pair:
        nsqd.create_channel(topic, channel)
    with contextlib.ExitStack() as stack:
        processes = [
            stack.enter_context(consumer_process(journal, topic, channel, lookupd, pause=0.005, **options))
            for _ in range(consumers)
        ]
        for nsqd in pair:
            eventually(lambda nsqd=nsqd: ready(nsqd, topic, channel), PATIENCE, until=lambda ready: ready == consumers)
        publish(pair, topic, messages)
        eventually(lambda: all(owed(nsqd, topic, channel) == 0 for nsqd in pair), PATIENCE + len(messages) / 100)
        told_to_stop(*processes)
    assert Counter(journal.bodies("done")) == Counter(messages), "lost or handled twice"
    assert len({process for _, _, process in journal.facts("done")}) == consumers
    stats = journal.stats()
    assert sum(one["handled"] for one in stats) == len(messages)
    assert sum(one["duplicates"] for one in stats) == len(messages)
    assert [(one["outages"], one["late_confirms"], one["in_flight"]) for one in stats] == [(0, 0, 0)] * consumers


def test_three_consumers_handle_each_message_once(
    nsqd_pair: Pair, lookupd: Nsqlookupd, topic: str, channel: str, journal: Journal, url: str
) -> None:
    handled_once_each(bodies(MESSAGES), 3, nsqd_pair, topic, channel, lookupd, journal, url=url)


def test_decorated_handlers_in_two_processes_handle_each_message_once(
    nsqd_pair: Pair, lookupd: Nsqlookupd, topic: str, channel: str, journal: Journal, url: str
) -> None:
    messages = bodies(MESSAGES_DECORATED)
    handled_once_each(messages, 2, nsqd_pair, topic, channel, lookupd, journal, url=url, decorated=True)


def test_who_looks_on_counts_what_another_process_has_handled(
    nsqd_pair: Pair, topic: str, channel: str, url: str
) -> None:
    messages = bodies(200)
    first, second = Seen(), Seen()

    async def main(store: Store, next_store: Store, witness: Store) -> None:
        one = consuming(topic, channel, first.handle, nsqd_pair[:1], store=store, observe=True)
        other = consuming(topic, channel, second.handle, nsqd_pair[1:], store=next_store, observe=True)
        async with one as reader, other as next_reader:
            await eventually_async(lambda: reader.conns and next_reader.conns)
            publish(nsqd_pair[:1], topic, messages)
            # Who looks on does not wait for its store before it answers nsqd.
            await asyncio.to_thread(
                eventually, lambda: verdicts(witness, topic, channel, messages) == {Verdict.DONE}, PATIENCE
            )
            publish(nsqd_pair[1:], topic, messages)
            await nothing_left(nsqd_pair, topic, channel)
            await eventually_async(lambda: next_reader.stats.observed == 200, PATIENCE)
            for stats in (reader.stats, next_reader.stats):
                assert (stats.handled, stats.duplicates, stats.deferred, stats.standbys) == (200, 0, 0, 0)
            assert reader.stats.observed == 0

    with closing(open_store(url)) as store, closing(open_store(url)) as another, closing(open_store(url)) as witness:
        on_loop(main(store, another, witness))
    first.once_each(messages)
    second.once_each(messages)


def test_a_consumer_that_makes_other_fingerprints_is_refused(url: str) -> None:
    """Else it would find nothing that the others know, silently."""
    reader = {"topic": "topic", "channel": "channel", "nsqd_tcp_addresses": ["127.0.0.1:1"], "key": BODY}
    names = f"with {hashing_of(b'one')}, not with {hashing_of(b'two')}"

    async def main(store: Store, another: Store, third: Store) -> None:
        DedupeReader(message_handler=print, store=store, secret=b"one", **reader).close()
        for _ in range(2):
            with pytest.raises(ConfigError, match=names):
                DedupeReader(message_handler=print, store=another, secret=b"two", **reader)
        DedupeReader(message_handler=print, store=another, secret=b"one", **reader).close()
        with pytest.raises(ConfigError, match=names):
            dedupe(third, key=BODY, scope="topic/channel", secret=b"two")

    with closing(open_store(url)) as store, closing(open_store(url)) as another, closing(open_store(url)) as third:
        on_loop(main(store, another, third))


@pytest.mark.parametrize("other", ["window=123", "recall=0.5"])
def test_a_consumer_that_sizes_what_they_share_otherwise_is_refused(url: str, other: str) -> None:
    name, _, value = other.partition("=")
    differing = re.sub(rf"{name}=[^&]+", other, url)
    with closing(open_store(url)), pytest.raises(ConfigError) as refused:
        open_store(differing)
    theirs, ours = re.findall(rf"{name}=(\S+)", str(refused.value))
    assert ours == value != theirs
