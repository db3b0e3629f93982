"""What several consumers know in common of a message that fails, or that ends whoever handles it."""

from __future__ import annotations

import contextlib
from itertools import pairwise
from typing import Any

import pytest
from consumers import PATIENCE, owed, publish, watched_channel
from processes import Journal, consumer_process, told_to_stop
from servers import Pair, eventually
from several import end_lease, ready

from nsqdedupe.cli.local_memcached import Memcached
from nsqdedupe.cli.local_nsq import Nsqd

MAX_TRIES = 3


def test_a_message_that_always_fails_is_tried_so_often_in_all_and_given_up_once(
    nsqd_pair: Pair, topic: str, channel: str, journal: Journal, url: str
) -> None:
    """About 7 s: the delays after the first failure and the second, and one more before it is given up."""
    for nsqd in nsqd_pair:
        watched_channel(nsqd, topic, channel)
    options = {"url": url, "mode": "fail", "requeue_delay": 1, "max_tries": MAX_TRIES}
    with contextlib.ExitStack() as stack:
        processes = [
            stack.enter_context(consumer_process(journal, topic, channel, nsqd_pair, **options)) for _ in range(3)
        ]
        for nsqd in nsqd_pair:
            eventually(lambda nsqd=nsqd: ready(nsqd, topic, channel), PATIENCE, until=lambda ready: ready == 3)
        publish(nsqd_pair, topic, [b"message"])
        eventually(lambda: sum(owed(nsqd, topic, channel) for nsqd in nsqd_pair) == 0, PATIENCE)
        told_to_stop(*processes)
    runs = journal.facts("start")
    assert [int(tries) for *_, tries, _ in runs] == list(range(MAX_TRIES))
    assert journal.facts("gave-up") == [["message"]]
    gaps = [later - sooner for sooner, later in pairwise(float(time) for *_, time in runs)]
    # requeue_delay x tries; the copy that did not fail comes a second later at least.
    assert all(gap >= tries for tries, gap in enumerate(gaps, 1)), gaps
    stats = journal.stats()
    assert sum(one["failed"] for one in stats) == MAX_TRIES
    assert sum(one["given_up"] for one in stats) == 1
    assert sum(one["duplicates"] for one in stats) == 1


@pytest.mark.nsqd_flags("--msg-timeout=1s")
def test_a_message_that_kills_who_handles_it_is_given_up_if_the_user_chose_so(
    nsqd_pair: Pair, topic: str, channel: str, memcached: Memcached, journal: Journal, url: str
) -> None:
    """Some 5 s: nsqd has to give the message out again three times."""
    for nsqd in nsqd_pair:
        watched_channel(nsqd, topic, channel)
    publish(nsqd_pair, topic, [b"poison"])
    with consumer_process(journal, topic, channel, nsqd_pair, url=url, mode="hang") as first:
        eventually(lambda: journal.facts("start") and all(in_flight(nsqd, topic, channel) for nsqd in nsqd_pair))
        first.kill()
        first.wait()

    def died(**options: Any) -> bool:
        """Whether a consumer ran it, and was killed by it."""
        before = len(journal.facts("start"))
        end_lease(memcached, topic, channel, b"poison")
        with consumer_process(journal, topic, channel, nsqd_pair, url=url, mode="die", **options) as process:
            eventually(lambda: process.poll() is not None or journal.facts("gave-up"), PATIENCE)
            if process.poll() is None:
                eventually(lambda: sum(owed(nsqd, topic, channel) for nsqd in nsqd_pair) == 0, PATIENCE)
                told_to_stop(process)
        return len(journal.facts("start")) > before

    # By default nothing is noted down: else this redelivery would be one run too many.
    assert died()
    assert died(max_crashes=1)
    assert not died(max_crashes=1)
    assert journal.facts("gave-up") == [["poison"]]
    (stats,) = journal.stats()
    assert (stats["given_up"], stats["duplicates"], stats["failed"]) == (1, 1, 0)


def in_flight(nsqd: Nsqd, topic: str, channel: str) -> int:
    return int(nsqd.channel_stats(topic, channel)["in_flight_count"])
