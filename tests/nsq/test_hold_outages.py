"""The hold rule when nsqds die or restart, and when the consumer does; see test_hold_walk.py."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from consumers import PATIENCE, Seen, at_rest, consuming, nothing_left, on_loop, publish, told, watched_pair
from failing import BODY, Failing, Pair, restarted, stands_by, walking
from processes import Journal, consumer_process
from servers import eventually, eventually_async

from nsqdedupe.cli.local_nsq import DURABLE, Nsqd, Nsqlookupd

AN_HOUR = 3600.0


@pytest.mark.parametrize("when", ["before it hears of it", "in the hold"])
def test_its_nsqd_dies_and_the_other_copy_runs_after_the_hold(
    nsqd_pair: Pair, lookupd: Nsqlookupd, topic: str, channel: str, when: str
) -> None:
    failing = Failing(delay=1.0)

    async def main() -> None:
        async with walking(nsqd_pair, lookupd, topic, channel, failing) as reader:

            async def meanwhile(message: Any) -> None:
                await stands_by(reader)(message)
                if when == "in the hold":
                    reader.set_max_in_flight(0)  # so that it does not give the copy out again before it is killed
                    return
                dies(message.conn.id).kill()

            def dies(address: str) -> Nsqd:
                return next(nsqd for nsqd in nsqd_pair if nsqd.tcp_address == address)

            failing.meanwhile = meanwhile
            publish(nsqd_pair, topic, [BODY])
            if when == "in the hold":
                await eventually_async(lambda: told(nsqd_pair, topic, channel, "requeue_count") == [1, 1], PATIENCE)
                dies(failing.seen.runs_of(BODY)[0].where).kill()
                reader.set_max_in_flight(200)
            await eventually_async(lambda: failing.seen.handled[BODY], PATIENCE)
            alive = [nsqd for nsqd in nsqd_pair if nsqd.alive]
            await nothing_left(alive, topic, channel)
            at_rest(reader)
            assert [run.where for run in failing.seen.runs_of(BODY)][1:] == [alive[0].tcp_address]

    on_loop(main())
    failing.check(1.0)


@pytest.mark.nsqd_flags(*DURABLE)
def test_when_both_nsqds_are_killed_in_a_hold_the_message_is_gone(
    nsqd_pair: Pair, lookupd: Nsqlookupd, topic: str, channel: str
) -> None:
    """An nsqd has what it deferred in memory alone: it is what NSQ loses of a message with one copy, too."""
    failing = Failing(delay=AN_HOUR)

    async def main() -> None:
        async with walking(nsqd_pair, lookupd, topic, channel, failing) as reader:
            failing.meanwhile = stands_by(reader)
            publish(nsqd_pair, topic, [BODY])
            await eventually_async(lambda: told(nsqd_pair, topic, channel, "deferred_count") == [1, 1])
            for nsqd in nsqd_pair:
                nsqd.kill()
            for nsqd in nsqd_pair:
                nsqd.start()
                assert nsqd.unfinished(topic, channel) == 0

    on_loop(main())
    assert len(failing.seen.runs_of(BODY)) == 1


def test_a_hold_ends_early_only_when_the_copy_that_failed_comes_again(
    nsqd_pair: Pair, lookupd: Nsqlookupd, topic: str, channel: str
) -> None:
    """An nsqd that is stopped keeps what it had deferred, and gives it out as soon as it is back."""
    failing = Failing(delay=2 * AN_HOUR)

    async def main() -> None:
        async with walking(nsqd_pair, lookupd, topic, channel, failing) as reader:
            failing.meanwhile = stands_by(reader)
            publish(nsqd_pair, topic, [BODY])
            await eventually_async(lambda: told(nsqd_pair, topic, channel, "deferred_count") == [1, 1])
            # It would say so if it had to correct a delay beyond its longest.
            for nsqd in nsqd_pair:
                assert "out of range" not in nsqd.log_path.read_text()
            (run,) = failing.seen.runs_of(BODY)
            failed, other = sorted(nsqd_pair, key=lambda nsqd: nsqd.tcp_address != run.where)
            await restarted(reader, other)
            await eventually_async(lambda: reader.stats.deferred == 2, PATIENCE)
            assert failing.seen.runs_of(BODY) == [run]
            await restarted(reader, failed)
            await nothing_left([failed], topic, channel)
            await restarted(reader, other)
            await nothing_left([other], topic, channel)
            at_rest(reader)
            assert (reader.stats.failed, reader.stats.deferred) == (1, 2)

    on_loop(main())
    failing.check(0.0)


@pytest.mark.parametrize("end", ["kill", "terminate"])
def test_a_process_that_restarts_in_a_hold_knows_neither_hold_nor_tries(
    nsqd_pair: Pair, lookupd: Nsqlookupd, topic: str, channel: str, tmp_path: Path, end: str
) -> None:
    """A third copy, which nsqd has not deferred, is handled at once, as if nothing had failed."""
    watched_pair(nsqd_pair, lookupd, topic, channel)
    journal = Journal(tmp_path / "journal")
    publish(nsqd_pair, topic, [BODY])
    with consumer_process(journal, topic, channel, lookupd, mode="fail", requeue_delay=3600) as process:
        eventually(lambda: told(nsqd_pair, topic, channel, "deferred_count") == [1, 1], PATIENCE)
        getattr(process, end)()
        process.wait()
    # An nsqd that has not seen it go yet would give it the third copy.
    eventually(lambda: told(nsqd_pair, topic, channel, "client_count") == [0, 0], PATIENCE)
    assert journal.bodies("start") == [BODY]
    publish(nsqd_pair[:1], topic, [BODY])
    seen = Seen()

    async def main() -> None:
        async with consuming(topic, channel, seen.handle, lookupd) as reader:
            await eventually_async(lambda: seen.handled, PATIENCE)
            for nsqd in nsqd_pair:
                await restarted(reader, nsqd)
            await nothing_left(nsqd_pair, topic, channel)
            at_rest(reader)
            assert (reader.stats.handled, reader.stats.duplicates) == (1, 2)

    on_loop(main())
    assert [run.tries for run in seen.runs] == [0]
