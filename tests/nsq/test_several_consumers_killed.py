"""One of several consumers on one channel is killed, or stopped for a while: another takes its messages over.

Some seconds each: a lease is 3 s at least, and some more for memcached's clock and the pauses between two looks.
"""

from __future__ import annotations

import asyncio
import signal
from collections import Counter
from collections.abc import Iterator
from contextlib import closing

import pytest
from consumers import (
    PATIENCE,
    Gate,
    Seen,
    at_rest,
    bodies,
    consuming,
    gated,
    nothing_left,
    on_loop,
    publish,
    watched_channel,
)
from processes import Journal, consumer_process, told_to_stop
from servers import Pair, eventually, eventually_async
from several import verdicts

from nsqdedupe import Store, Verdict, open_store
from nsqdedupe.cli.local_nsq import Nsqd

SHORT = "--msg-timeout=1s"
"""So the lease is 3 s."""


@pytest.fixture
def store(url: str) -> Iterator[Store]:
    """The one of the consumer that goes on."""
    with closing(open_store(url)) as store:
        yield store


def watched(pair: Pair, topic: str, channel: str) -> None:
    for nsqd in pair:
        watched_channel(nsqd, topic, channel)


@pytest.mark.nsqd_flags(SHORT)
@pytest.mark.parametrize("dies_too", [False, True], ids=["alone", "with its nsqd"])
def test_what_a_killed_consumer_had_in_hand_is_taken_over_by_another(
    nsqd_pair: Pair, topic: str, channel: str, journal: Journal, url: str, store: Store, *, dies_too: bool
) -> None:
    """By the other copies, which stood by elsewhere; by their redelivery, too, if their nsqd lives."""
    watched(nsqd_pair, topic, channel)
    messages = bodies(150)
    its_own, other = nsqd_pair
    seen = Seen()
    with consumer_process(journal, topic, channel, [its_own], url=url, free=50) as victim:
        publish([its_own], topic, messages)
        # Some are confirmed, the others run.
        eventually(lambda: journal.facts("confirmed") and len(journal.facts("start")) == 150, PATIENCE)

        async def main() -> None:
            async with consuming(topic, channel, seen.handle, [other], store=store) as reader:
                await eventually_async(lambda: reader.conns)
                publish([other], topic, messages)
                # What is done is finished, and of the rest at least some stands by.
                await eventually_async(lambda: reader.stats.duplicates == 50 and reader.stats.standbys, PATIENCE)
                victim.kill()
                victim.wait()
                if dies_too:
                    its_own.kill()
                await eventually_async(lambda: len(seen.handled) == 100, PATIENCE)
                await nothing_left([other], topic, channel)
                at_rest(reader)
                assert reader.stats.late_confirms == 0

        on_loop(main())
    done = journal.bodies("done")
    assert Counter(done) + seen.handled == Counter(messages), "lost or handled twice"


@pytest.mark.nsqd_flags(SHORT)
def test_what_a_killed_consumer_had_in_hand_is_taken_over_by_its_redelivery(
    nsqd: Nsqd, topic: str, channel: str, journal: Journal, url: str, store: Store
) -> None:
    watched_channel(nsqd, topic, channel)
    messages = bodies(150)
    seen = Seen()
    with consumer_process(journal, topic, channel, [nsqd], url=url, free=50) as victim:
        publish([nsqd], topic, messages)
        eventually(lambda: journal.facts("confirmed") and len(journal.facts("start")) == 150, PATIENCE)
        victim.kill()
        victim.wait()

    async def main() -> None:
        async with consuming(topic, channel, seen.handle, [nsqd], store=store) as reader:
            await eventually_async(lambda: len(seen.handled) == 100, PATIENCE)
            await nothing_left([nsqd], topic, channel)
            at_rest(reader)

    on_loop(main())
    assert Counter(journal.bodies("done")) + seen.handled == Counter(messages), "lost or handled twice"


@pytest.mark.nsqd_flags(SHORT)
@pytest.mark.parametrize(
    ("mode", "word", "late", "verdict"),
    [("handle", "done", 1, Verdict.DONE), ("fail", "failed", 0, Verdict.IN_PROGRESS)],
)
def test_a_consumer_that_was_stopped_for_longer_than_its_lease_cannot_end_its_successors_claim(
    nsqd_pair: Pair,
    topic: str,
    channel: str,
    journal: Journal,
    url: str,
    store: Store,
    *,
    mode: str,
    word: str,
    late: int,
    verdict: Verdict,
) -> None:
    """Its success is recorded and counted all the same; its failure counts for nothing."""
    watched(nsqd_pair, topic, channel)
    seen = Seen()
    options = {"url": url, "free": 0, "mode": mode, "requeue_delay": 1}
    with consumer_process(journal, topic, channel, nsqd_pair[:1], **options) as stopped:
        publish(nsqd_pair[:1], topic, [b"message"])
        eventually(lambda: journal.facts("start"), PATIENCE)
        stopped.send_signal(signal.SIGSTOP)

        async def main(witness: Store) -> None:
            gate = Gate()
            # Its own lease shall not end, however long this takes.
            options = {"store": store, "msg_timeout": 60}
            async with consuming(topic, channel, gated(seen.handle, gate), nsqd_pair, **options) as reader:
                publish(nsqd_pair[1:], topic, [b"message"])
                await eventually_async(lambda: gate.waiting, PATIENCE)
                # Both have a handler running, and the message is this one's.
                stopped.send_signal(signal.SIGUSR1)
                stopped.send_signal(signal.SIGCONT)
                await eventually_async(lambda: journal.facts(word), PATIENCE)
                # By its end it has told the store.
                await asyncio.to_thread(told_to_stop, stopped)
                assert verdicts(witness, topic, channel, [b"message"]) == {verdict}
                gate.open()
                await eventually_async(lambda: reader.stats.handled == 1, PATIENCE)
                # The first nsqd's copy may be deferred until the end of that lease.
                await nothing_left(nsqd_pair[1:], topic, channel)
                assert reader.stats.late_confirms == 0, "its claim was ended by another"

        with closing(open_store(url)) as witness:
            on_loop(main(witness))
    assert [run.tries for run in seen.runs] == [0]
    (stats,) = journal.stats()
    assert (stats["late_confirms"], stats["in_flight"]) == (late, 0)
    assert len(journal.facts("start")) == 1
