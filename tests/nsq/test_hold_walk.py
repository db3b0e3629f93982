"""A walk through the hold rule: when one copy has failed, no other copy runs before its delay is over.

All on real nsqds; the rule itself, on a clock turned by hand, is in tests/unit/test_deduper_holds.py.

test_failing_handlers.py:

| every way to fail | test_what_fails_once_is_handled_in_the_end |
| tries spaced as with one copy | test_a_message_that_always_fails_runs_max_tries_times_in_all_and_is_given_up_once |

test_hold_outages.py:

| `requeue(delay=7200)`; an nsqd restarts | test_a_hold_ends_early_only_when_the_copy_that_failed_comes_again |
| the nsqd of the copy that failed dies | test_its_nsqd_dies_and_the_other_copy_runs_after_the_hold |
| both nsqds die | test_when_both_nsqds_are_killed_in_a_hold_the_message_is_gone |
| the process restarts | test_a_process_that_restarts_in_a_hold_knows_neither_hold_nor_tries |

Here:

| plain, coroutine, enable_async(); copies in one batch, in two | test_no_copy_runs_before_the_delay_is_over |
| `requeue(delay=0)` | test_a_delay_of_nothing_is_no_default |
| a failure after msg_timeout | test_a_redelivery_that_waits_for_a_failure_does_not_run_before_the_delay_is_over |
| max_in_flight=1 | test_with_max_in_flight_1_tries_are_spaced_as_well |
| `set_max_in_flight(0)` | test_a_hold_that_ends_in_a_pause_lets_nothing_run_in_it |
"""

from __future__ import annotations

from typing import Any

import pytest
from consumers import PATIENCE, at_rest, consuming, nothing_left, on_loop, publish, told, watched_channel, watched_pair
from failing import BODY, DELAY, Failing, Pair, stands_by, unread, walking
from servers import eventually, eventually_async

from nsqdedupe.cli.local_nsq import Nsqd, Nsqlookupd


@pytest.mark.parametrize("batches", [1, 2])
@pytest.mark.parametrize("kind", ["plain", "coroutine", "enable_async"])
def test_no_copy_runs_before_the_delay_is_over(
    nsqd_pair: Pair, lookupd: Nsqlookupd, topic: str, channel: str, kind: str, batches: int
) -> None:
    failing = Failing(kind)
    one, other = nsqd_pair

    async def main() -> None:
        async with walking(nsqd_pair, lookupd, topic, channel, failing) as reader:
            before = reader.stats
            failing.meanwhile = stands_by(reader)
            if batches == 1:
                if kind == "plain":
                    failing.meanwhile = lambda _: None
                publish([one], topic, [BODY, BODY])
                eventually(lambda: unread(reader, one) == 2)
            else:
                if kind == "plain":
                    # It cannot be read while the handler runs: it comes right after the failure.
                    failing.meanwhile = lambda _: (
                        publish([other], topic, [BODY]),
                        eventually(lambda: unread(reader, other) == 1),
                    )
                else:
                    publish([other], topic, [BODY])
                publish([one], topic, [BODY])
            await eventually_async(lambda: failing.seen.handled[BODY], PATIENCE)
            await nothing_left(nsqd_pair, topic, channel)
            at_rest(reader)
            after = reader.stats
            assert (after.failed, after.deferred, after.handled - before.handled) == (1, 1, 1)
            assert after.duplicates - before.duplicates == 1

    on_loop(main())
    failing.check(DELAY)
    assert told(nsqd_pair, topic, channel, "requeue_count") == ([2, 0] if batches == 1 else [1, 1])


def test_a_delay_of_nothing_is_no_default(nsqd_pair: Pair, lookupd: Nsqlookupd, topic: str, channel: str) -> None:
    failing = Failing(delay=0)

    async def main() -> None:
        async with walking(nsqd_pair, lookupd, topic, channel, failing, requeue_delay=3600) as reader:
            failing.meanwhile = stands_by(reader)
            publish(nsqd_pair, topic, [BODY])
            await nothing_left(nsqd_pair, topic, channel)
            at_rest(reader)
            assert (reader.stats.failed, reader.stats.deferred) == (1, 1)

    on_loop(main())
    failing.check(0.0)
    assert told(nsqd_pair, topic, channel, "requeue_count") == [1, 1]


@pytest.mark.nsqd_flags("--msg-timeout=1s")
@pytest.mark.parametrize("kind", ["plain", "coroutine"])
def test_a_redelivery_that_waits_for_a_failure_does_not_run_before_the_delay_is_over(
    nsqd: Nsqd, topic: str, channel: str, kind: str
) -> None:
    """The handler takes longer than nsqd waits, and then fails: its own copy is here again already.

    Takes a second more than others: that is the shortest timeout there is.
    """
    watched_channel(nsqd, topic, channel)
    failing = Failing(kind)

    async def main() -> None:
        async with consuming(topic, channel, failing, [nsqd]) as reader:
            await eventually_async(lambda: reader.conns)
            if kind == "plain":
                failing.meanwhile = lambda _: eventually(lambda: unread(reader, nsqd) == 1, PATIENCE)
            else:
                failing.meanwhile = stands_by(reader)
            publish([nsqd], topic, [BODY])
            await eventually_async(lambda: failing.seen.handled[BODY], PATIENCE)
            await nothing_left([nsqd], topic, channel)
            at_rest(reader)
            assert reader.stats.failed + reader.stats.unanswered == 1
            assert reader.stats.deferred >= 1

    on_loop(main())
    failing.check(DELAY)
    assert told([nsqd], topic, channel, "timeout_count")[0] >= 1


def test_with_max_in_flight_1_tries_are_spaced_as_well(
    nsqd_pair: Pair, lookupd: Nsqlookupd, topic: str, channel: str
) -> None:
    watched_pair(nsqd_pair, lookupd, topic, channel)
    failing = Failing("plain", failures=2)
    publish(nsqd_pair, topic, [BODY, b"another"])

    async def main() -> None:
        options = {"max_in_flight": 1, "low_rdy_idle_timeout": 0.1}
        async with consuming(topic, channel, failing, lookupd, **options) as reader:
            await eventually_async(lambda: reader.redist_periodic)
            # pynsq hands the one RDY on every 5 s, to a connection chosen at random.
            reader.redist_periodic.stop()
            reader.redist_periodic.callback_time = 100
            reader.redist_periodic.start()
            await nothing_left(nsqd_pair, topic, channel)
            at_rest(reader)
            stats = reader.stats
            assert (stats.handled, stats.failed, stats.duplicates) == (2, 2, 2)

    on_loop(main())
    failing.check(DELAY)
    failing.seen.once_each([BODY, b"another"])


def test_a_hold_that_ends_in_a_pause_lets_nothing_run_in_it(
    nsqd_pair: Pair, lookupd: Nsqlookupd, topic: str, channel: str
) -> None:
    failing = Failing()

    async def main() -> None:
        async with walking(nsqd_pair, lookupd, topic, channel, failing) as reader:

            async def meanwhile(message: Any) -> None:
                await stands_by(reader)(message)
                reader.set_max_in_flight(0)

            failing.meanwhile = meanwhile
            publish(nsqd_pair, topic, [BODY])
            await eventually_async(lambda: told(nsqd_pair, topic, channel, "requeue_count") == [1, 1], PATIENCE)
            # Both are queued again: the hold is over, and so are the deferrals.
            await eventually_async(lambda: told(nsqd_pair, topic, channel, "depth") == [1, 1], PATIENCE)
            assert len(failing.seen.runs_of(BODY)) == 1
            assert reader.stats.in_flight == 0
            reader.set_max_in_flight(200)
            await nothing_left(nsqd_pair, topic, channel)
            at_rest(reader)
            assert (reader.stats.failed, reader.stats.deferred) == (1, 1)

    on_loop(main())
    failing.check(DELAY)
