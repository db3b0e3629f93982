"""Whatever is killed: a message that some nsqd still holds is handled."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from consumers import (
    KINDS,
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
    told,
    watched_pair,
)
from processes import Journal, consumer_process
from servers import Pair, eventually, eventually_async

from nsqdedupe.cli.local_nsq import DURABLE, Nsqlookupd


@pytest.mark.nsqd_flags(*DURABLE)
def test_an_nsqd_is_killed_and_what_it_brings_back_are_duplicates(
    nsqd_pair: Pair, lookupd: Nsqlookupd, topic: str, channel: str
) -> None:
    dies, lives = nsqd_pair
    messages = bodies(150)
    for nsqd in nsqd_pair:
        nsqd.create_channel(topic, channel)
    publish(nsqd_pair, topic, messages)
    seen = Seen()

    async def main() -> None:
        gate = Gate(free=50)
        async with consuming(topic, channel, gated(seen.handle, gate), lookupd, max_in_flight=20) as reader:
            await eventually_async(lambda: gate.waiting and len(reader.conns) == 2, PATIENCE)
            # What is still on its way to the channel would be backlog only later.
            await eventually_async(lambda: told([dies], topic, channel, "message_count") == [150])
            dies.kill()
            gate.open()
            await eventually_async(lambda: len(seen.handled) == 150, PATIENCE)
            await nothing_left([lives], topic, channel)
            await eventually_async(lambda: len(reader.conns) == 1)
            at_rest(reader)
            seen.once_each(messages)
            before = reader.stats
            # It was alive a moment ago, so the reader would let 10 s pass before it tries again.
            reader.connection_attempts.clear()
            dies.start()
            backlog = dies.depth(topic, channel)
            assert backlog > 0
            await eventually_async(lambda: len(reader.conns) == 2, PATIENCE)
            await nothing_left([dies], topic, channel)
            at_rest(reader)
            assert reader.stats.duplicates - before.duplicates == backlog
            assert reader.stats.handled == before.handled

    on_loop(main())
    seen.once_each(messages)


@pytest.mark.parametrize("kind", KINDS)
def test_nsqds_that_restart_one_after_the_other_lose_and_repeat_nothing(
    nsqd_pair: Pair, lookupd: Nsqlookupd, topic: str, channel: str, kind: str
) -> None:
    """What was in flight comes again, from an nsqd that has forgotten its attempts."""
    parts = bodies(1000), bodies(1000, start=1000)
    for nsqd in nsqd_pair:
        nsqd.create_channel(topic, channel)
    seen = Seen()

    async def main() -> None:
        handler = KINDS[kind](seen.handle, 0.0 if kind == "plain" else 0.005)
        async with consuming(topic, channel, handler, lookupd, max_in_flight=100) as reader:
            for nsqd, part, middle in zip(nsqd_pair, parts, (300, 1300), strict=True):
                await eventually_async(lambda: len(reader.conns) == 2, PATIENCE)
                conn = reader.conns[nsqd.tcp_address]
                seen.when(middle, nsqd.restart)
                publish(nsqd_pair, topic, part)
                await eventually_async(lambda conn=conn: reader.conns.get(conn.id) is not conn, PATIENCE)
                # It was alive a moment ago, so the reader would let 10 s pass before it tries again.
                reader.connection_attempts.clear()
            await eventually_async(lambda: len(seen.handled) == 2000, PATIENCE)
            await nothing_left(nsqd_pair, topic, channel)
            at_rest(reader)

    on_loop(main())
    seen.once_each([*parts[0], *parts[1]])


@pytest.mark.nsqd_flags("--msg-timeout=2s")
def test_a_consumer_is_killed_and_the_next_one_loses_nothing(
    nsqd_pair: Pair, lookupd: Nsqlookupd, topic: str, channel: str, journal: Journal
) -> None:
    watched_pair(nsqd_pair, lookupd, topic, channel)
    messages = bodies(2000)
    publish(nsqd_pair, topic, messages)
    with consumer_process(journal, topic, channel, lookupd, free=300) as first:
        # Some are done, and some are running.
        eventually(lambda: len(journal.facts("done")) == 300 < len(journal.facts("start")), PATIENCE)
        first.kill()
        first.wait()
    before = journal.bodies("done")
    assert len(set(before)) == 300
    with consumer_process(journal, topic, channel, lookupd):
        eventually(lambda: set(journal.bodies("done")) == set(messages), PATIENCE)
        for nsqd in nsqd_pair:
            eventually(lambda nsqd=nsqd: nsqd.unfinished(topic, channel) == 0, PATIENCE)
    after = journal.bodies("done")[len(before) :]
    assert len(after) == len(set(after)), "the second one handled something twice"
    assert sum(told(nsqd_pair, topic, channel, "timeout_count")) > 0


@pytest.mark.nsqd_flags("--msg-timeout=2s")
def test_a_consumer_is_killed_and_the_next_one_on_its_file_handles_nothing_again(
    nsqd_pair: Pair, lookupd: Nsqlookupd, topic: str, channel: str, journal: Journal, tmp_path: Path
) -> None:
    """What was confirmed is in the file, although nobody closed it; the other copies of all that are yet to come."""
    watched_pair(nsqd_pair, lookupd, topic, channel)
    messages = bodies(2000)
    publish(nsqd_pair[:1], topic, messages)
    path = str(tmp_path / "seen.table")
    with consumer_process(journal, topic, channel, lookupd, free=300, path=path) as first:
        # Some are confirmed, and some are running, but none is in between.
        eventually(lambda: journal.facts("confirmed"), PATIENCE)
        assert len(journal.facts("start")) > 300
        first.kill()
        first.wait()
    assert len(journal.bodies("done")) == 300
    publish(nsqd_pair[1:], topic, messages)
    with consumer_process(journal, topic, channel, lookupd, path=path):
        eventually(lambda: set(journal.bodies("done")) == set(messages), PATIENCE)
        for nsqd in nsqd_pair:
            eventually(lambda nsqd=nsqd: nsqd.unfinished(topic, channel) == 0, PATIENCE)
    assert sorted(journal.bodies("done")) == sorted(messages), "something was handled twice"


@pytest.mark.nsqd_flags("--msg-timeout=2s")
@pytest.mark.parametrize("mode", ["hang", "block"])
def test_the_consumer_and_the_owners_nsqd_are_killed_and_the_other_copy_is_handled(
    nsqd_pair: Pair, lookupd: Nsqlookupd, topic: str, channel: str, journal: Journal, mode: str
) -> None:
    watched_pair(nsqd_pair, lookupd, topic, channel)
    by_address = {nsqd.tcp_address: nsqd for nsqd in nsqd_pair}
    with consumer_process(journal, topic, channel, lookupd, mode=mode) as consumer:
        for nsqd in nsqd_pair:
            eventually(lambda nsqd=nsqd: nsqd.channel_stats(topic, channel)["clients"][0]["ready_count"], PATIENCE)
        publish(nsqd_pair, topic, [b"precious"])
        ((_, owner, *_),) = eventually(lambda: journal.facts("start"), PATIENCE)
        other = next(nsqd for address, nsqd in by_address.items() if address != owner)
        eventually(lambda: other.channel_stats(topic, channel)["in_flight_count"] == 1, PATIENCE)
        by_address[owner].kill()
        consumer.kill()
        consumer.wait()
    seen = Seen()

    async def main() -> None:
        async with consuming(topic, channel, seen.handle, lookupd) as reader:
            await eventually_async(lambda: reader.stats.handled == 1, PATIENCE)
            await nothing_left([other], topic, channel)

    on_loop(main())
    seen.once_each([b"precious"])
    assert [run.where for run in seen.runs] == [other.tcp_address]


def test_the_owners_nsqd_is_killed_while_its_handler_runs_and_the_other_copy_waits_for_it(
    nsqd_pair: Pair, lookupd: Nsqlookupd, topic: str, channel: str
) -> None:
    """The handler still runs in this process: the other copy is finished by its success, not handled again."""
    for nsqd in nsqd_pair:
        nsqd.create_channel(topic, channel)
    publish(nsqd_pair, topic, [b"message"])
    by_address = {nsqd.tcp_address: nsqd for nsqd in nsqd_pair}
    seen = Seen()

    async def main() -> None:
        async def handle(message: Any) -> bool:
            seen.run(message)
            await eventually_async(lambda: reader.stats.standbys == 1, PATIENCE)
            by_address[message.conn.id].kill()
            await eventually_async(lambda: len(reader.conns) == 1, PATIENCE)
            return seen.handle(message)

        async with consuming(topic, channel, handle, lookupd) as reader:
            await eventually_async(lambda: seen.handled, PATIENCE)
            alive = [nsqd for nsqd in nsqd_pair if nsqd.alive]
            assert len(alive) == 1
            await nothing_left(alive, topic, channel)
            at_rest(reader)
            stats = reader.stats
            assert (stats.unanswered, stats.duplicates, stats.handled) == (1, 1, 0)

    on_loop(main())
    seen.once_each([b"message"])
