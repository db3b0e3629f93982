"""The programs of the demo cluster, each alone."""

from __future__ import annotations

import asyncio
import contextlib
import io
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from servers import Pair, Servers, eventually

from nsqdedupe.cli.cluster import consumer, publisher, summary
from nsqdedupe.cli.cluster.account import HANDLED, PUBLISHED, Account, Journal
from nsqdedupe.cli.cluster.summary import Summary
from nsqdedupe.cli.local_memcached import Memcached
from nsqdedupe.cli.local_nsq import Nsqd, Nsqlookupd


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    directory = tmp_path / "account"
    directory.mkdir()
    return directory


def run(program: Callable[[Sequence[str]], None], argv: Sequence[str], until: Callable[[], object]) -> None:
    """Run it here, and send it SIGTERM as soon as something is so."""
    over = threading.Event()

    def wait() -> None:
        try:
            eventually(lambda: over.is_set() or until())
        finally:
            if not over.is_set():
                os.kill(os.getpid(), signal.SIGTERM)

    with ThreadPoolExecutor(max_workers=1) as pool:
        waiting = pool.submit(wait)
        try:
            program(argv)
        finally:
            over.set()
        waiting.result()


@pytest.fixture
def looking(directory: Path, topic: str, channel: str) -> Iterator[Callable[..., Summary]]:
    """Make a summary of what these addresses of nsqds have."""
    with contextlib.ExitStack() as made:

        def make(*addresses: str) -> Summary:
            return made.enter_context(contextlib.closing(Summary(Account(directory), addresses, topic, channel)))

        yield make


def read(directory: Path) -> Account:
    account = Account(directory)
    account.read()
    return account


def at_nsqds(nsqds: Pair, topic: str, directory: Path) -> list[str]:
    return [f"--nsqd-tcp-address={nsqd.tcp_address}" for nsqd in nsqds] + [f"--topic={topic}", f"--account={directory}"]


def test_the_publisher_ends_when_both_nsqds_have_every_event(nsqd_pair: Pair, topic: str, directory: Path) -> None:
    publisher.main([*at_nsqds(nsqd_pair, topic, directory), "--messages=25", "--rate=40"])
    assert read(directory).published == 25
    assert [nsqd.depth(topic) for nsqd in nsqd_pair] == [25, 25]


def test_the_publisher_goes_on_until_it_is_stopped(nsqd_pair: Pair, topic: str, directory: Path) -> None:
    argv = [*at_nsqds(nsqd_pair, topic, directory), "--rate=20"]
    run(publisher.main, argv, until=lambda: read(directory).published >= 30)
    assert len(read(directory).waiting) == read(directory).published


def test_the_publisher_publishes_again_what_one_nsqd_did_not_acknowledge(
    nsqd_pair: Pair, topic: str, directory: Path
) -> None:
    alive, dead = nsqd_pair
    dead.kill()

    with ThreadPoolExecutor(max_workers=1) as pool:
        addresses = [nsqd.tcp_address for nsqd in nsqd_pair]
        program = publisher.Publisher(addresses, topic, Journal(directory, "publisher"))
        publishing = pool.submit(asyncio.run, program.run(rate=20, messages=10))
        eventually(lambda: alive.depth(topic) > 10)  # published again, and again
        assert read(directory).published == 0
        dead.start()
        publishing.result()
    assert dead.depth(topic) == 10


def test_a_consumer_writes_down_what_it_handled(
    nsqd_pair: Pair,
    lookupd: Nsqlookupd,
    memcached: Memcached,
    topic: str,
    channel: str,
    directory: Path,
) -> None:
    publisher.main([*at_nsqds(nsqd_pair, topic, directory), "--messages=60", "--rate=1000"])

    def done() -> bool:
        return not read(directory).waiting and not any(nsqd.unfinished(topic, channel) for nsqd in nsqd_pair)

    argv = [
        f"--lookupd-http-address={lookupd.http_address}",
        f"--store=memcached://{memcached.tcp_address}?window=1000&timeout=30&namespace={topic[-8:]}",
        *(f"--topic={topic}", f"--channel={channel}", f"--account={directory}"),
    ]
    run(consumer.main, argv, until=done)
    account = read(directory)
    assert (account.handled, account.twice, account.duplicates) == (60, 0, 60)


def test_an_event_is_lost_when_nobody_has_handled_it_and_no_nsqd_has_it(
    nsqd_pair: Pair, topic: str, directory: Path, looking: Callable[..., Summary]
) -> None:
    looked = looking(*(nsqd.http_address for nsqd in nsqd_pair))
    Journal(directory, "publisher").write(PUBLISHED, ["a-1", "a-2"])
    journal = Journal(directory, "consumer")
    journal.write(HANDLED, ["a-1"])

    nsqd_pair[1].publish(topic, b"a-2")
    assert not looked.look()
    assert str(looked) == "published 2, handled 1, waiting 1, duplicates finished 0, handled twice 0, lost 0"

    for topic_is_gone in nsqd_pair:
        topic_is_gone.create_topic(topic)
        topic_is_gone.request("POST", "/topic/empty", topic=topic)
    assert looked.look()
    assert looked.lost == {"a-2"}
    assert str(looked) == "published 2, handled 1, waiting 0, duplicates finished 0, handled twice 0, lost 1"

    # Nobody can tell any more, so what was known stays; and whoever is handled after all was not lost.
    nsqd_pair[0].publish(topic, b"a-3")
    assert not looked.look()
    assert looked.lost == {"a-2"}
    journal.write(HANDLED, ["a-2"])
    looked.look()
    assert looked.lost == set()


def test_what_waits_in_a_channel_is_not_lost_and_other_channels_do_not_matter(
    nsqd: Nsqd, topic: str, channel: str, looking: Callable[..., Summary]
) -> None:
    looked = looking(nsqd.http_address)
    for each in (channel, "other"):
        nsqd.create_channel(topic, each)
    nsqd.publish(topic, b"a-1")
    eventually(lambda: nsqd.depth(topic, channel) == nsqd.depth(topic, "other") == 1)
    assert not looked.look()
    nsqd.request("POST", "/channel/empty", topic=topic, channel=channel)
    assert looked.look()


def test_the_nsqds_that_answer_decide_and_without_any_nobody_knows(
    nsqd_pair: Pair, topic: str, directory: Path, looking: Callable[..., Summary]
) -> None:
    addresses = [nsqd.http_address for nsqd in nsqd_pair]
    looked = looking(*addresses)
    Journal(directory, "publisher").write(PUBLISHED, ["a-1"])
    nsqd_pair[0].publish(topic, b"a-1")
    nsqd_pair[1].kill()
    assert not looked.look()
    assert not looked.lost
    assert str(looked).endswith(f"lost 0; {addresses[1]} is down")
    nsqd_pair[0].kill()
    assert not looked.look()
    assert not looked.lost
    nsqd_pair[1].start()
    assert not looked.look(), "one of them is down"
    assert looked.lost == {"a-1"}


def test_something_else_that_answers_is_no_nsqd(servers: Servers, looking: Callable[..., Summary]) -> None:
    memcached = servers.memcached()
    looked = looking(memcached.tcp_address)
    assert not looked.look()
    assert looked.away == [memcached.tcp_address]


def test_an_nsqd_that_is_slow_to_answer_holds_up_no_other_look(
    nsqd: Nsqd, looking: Callable[..., Summary], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else the name of one that is down, which may take long to resolve, would keep the summary silent."""
    answer = threading.Event()
    asked = []
    ask = summary.Nsqd._ask

    def slowly(nsqd: summary.Nsqd) -> int | None:
        asked.append(nsqd)
        answer.wait()
        return ask(nsqd)

    monkeypatch.setattr(summary, "NSQD_TIMEOUT", 0.01)
    monkeypatch.setattr(summary.Nsqd, "_ask", slowly)
    looked = looking(nsqd.http_address)
    for _ in range(3):
        assert not looked.look()
        assert looked.away == [nsqd.http_address]
    assert len(asked) == 1
    monkeypatch.setattr(summary, "NSQD_TIMEOUT", 30)
    answer.set()
    eventually(looked.look)  # what it answered late is not taken for what it says now
    assert looked.away == []


def test_the_summary_says_it_until_it_is_stopped(
    nsqd: Nsqd, topic: str, directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    Journal(directory, "publisher").write(PUBLISHED, ["a-1"])
    monkeypatch.setattr(summary, "SAY_EVERY", 0.01)
    monkeypatch.setattr(sys, "stdout", said := io.StringIO())
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    argv = [f"--nsqd-http-address={nsqd.http_address}", f"--topic={topic}", f"--account={directory}"]
    try:
        run(summary.main, argv, until=lambda: said.getvalue().count("published 1") > 1)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    assert said.getvalue().splitlines()[-1].endswith("lost 1")
