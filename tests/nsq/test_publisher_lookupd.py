"""Nsqds that nsqlookupd knows are published to, and counted when "quorum" or "all" of them are asked for."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
from collections.abc import AsyncIterator, Iterable
from typing import Any

import pytest
from consumers import bodies, on_loop
from servers import Pair, Servers, eventually_async
from writers import addresses, failure, pipelines, ready, works_again, writing

from nsqdedupe import ReplicatedWriter
from nsqdedupe.cli.local_nsq import Nsqd, Nsqlookupd
from nsqdedupe.lookupd import nodes_url, read_nodes

NODE = {"broadcast_address": "10.0.0.1", "tcp_port": 4150, "topics": ["a", "b"], "tombstones": [True, False]}


def finding(*lookupds: Nsqlookupd | str, given: Iterable[Nsqd | str] = (), **options: Any) -> Any:
    where = [one if isinstance(one, str) else one.http_address for one in lookupds]
    quick = {"lookupd_poll_interval": 1, "timeout": 30, **options}
    return writing(given, lookupd_http_addresses=where, **quick)


@contextlib.asynccontextmanager
async def answering(body: bytes) -> AsyncIterator[str]:
    """An HTTP server that says the same to everybody."""

    async def serve(reader: asyncio.StreamReader, client: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        client.write(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\nConnection: close\r\n\r\n%s" % (len(body), body))
        client.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/"
    server.close()
    await server.wait_closed()


def test_all_that_are_found_are_used(nsqd_pair: Pair, lookupd: Nsqlookupd, topic: str) -> None:
    async def main() -> None:
        async with finding(lookupd) as writer:
            answers = await asyncio.gather(*(writer.publish(topic, body) for body in bodies(100)))
            assert {frozenset(answer) for answer in answers} == {frozenset(addresses(nsqd_pair))}

    on_loop(main())


def test_one_that_is_given_and_found_is_one(nsqd_pair: Pair, lookupd: Nsqlookupd, topic: str) -> None:
    async def main() -> None:
        async with finding(lookupd, given=nsqd_pair[:1]) as writer:
            assert set(await writer.publish(topic, b"body")) == set(addresses(nsqd_pair))
            assert len(pipelines(writer)) == 2

    on_loop(main())


def test_too_few_are_told_and_one_that_comes_later_is_used(servers: Servers, lookupd: Nsqlookupd, topic: str) -> None:
    first = servers.nsqd(lookupds=[lookupd])

    async def main() -> None:
        async with finding(lookupd, timeout=1) as writer:
            error = await failure(writer, topic)
            assert error.acknowledged == (first.tcp_address,)
            assert "published to 1 of 2 nsqds" in str(error)
            assert "; 1 nsqds known; " in str(error)
            second = await asyncio.to_thread(servers.nsqd, lookupds=[lookupd])
            assert set(await works_again(writer, topic)) == {first.tcp_address, second.tcp_address}

    on_loop(main())


def test_lookupds_that_are_dead_or_talk_nonsense_are_borne(
    nsqd_pair: Pair, lookupd: Nsqlookupd, topic: str, caplog: pytest.LogCaptureFixture
) -> None:
    async def main() -> None:
        async with contextlib.AsyncExitStack() as stack:
            nonsense = [b"", b"[]", b"{}", b'{"producers": 7}', b"\xff"]
            odd = [await stack.enter_async_context(answering(body)) for body in nonsense]
            good = {"broadcast_address": "127.0.0.1", "tcp_port": nsqd_pair[0].tcp_port}
            records = [None, 7, {}, {"broadcast_address": "", "tcp_port": 1}, good, {**good, "tcp_port": "x"}]
            records.append({"broadcast_address": "\ud800", "tcp_port": 1})  # half a character
            mixed = await stack.enter_async_context(answering(json.dumps({"producers": records}).encode()))
            async with finding("127.0.0.1:1", *odd, mixed, given=nsqd_pair[1:]) as writer:
                assert set(await writer.publish(topic, b"body")) == set(addresses(nsqd_pair))
                polls = []
                found = writer._cluster._poll._found
                writer._cluster._poll._found = lambda nodes: polls.append(found(nodes))
                await eventually_async(lambda: len(polls) >= 2)
            warned = [record.args for record in caplog.records if record.levelno == logging.WARNING]
            assert sorted(args[0] for args in warned) == sorted(["127.0.0.1:1", *odd, mixed])  # type: ignore[index]
            assert "Connection refused" in str(warned)
            assert "6 of its records name no nsqd" in str(warned)

    on_loop(main())


def test_a_lookupd_that_comes_back_is_told_of(servers: Servers, topic: str, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "nsqdedupe")
    lookupd = servers.lookupd()
    nsqd = servers.nsqd(lookupds=[lookupd])
    lookupd.kill()

    async def main() -> None:
        async with finding(lookupd, copies="all", timeout=1, given=[nsqd]) as writer:
            error = await failure(writer, topic)
            assert error.acknowledged == ()
            assert "published to 0 nsqds" in str(error), "how many are all is not known"
            assert f"nsqlookupd {lookupd.http_address}: " in str(error)
            await asyncio.to_thread(lookupd.start)
            assert await works_again(writer, topic) == (nsqd.tcp_address,)
            assert f"[{lookupd.http_address}] this nsqlookupd answers again" in caplog.text

    on_loop(main())


@pytest.mark.parametrize(("copies", "needed"), [("quorum", 2), ("all", 3)])
def test_quorum_and_all_of_those_given(servers: Servers, topic: str, copies: Any, needed: int) -> None:
    nsqds = [servers.nsqd() for _ in range(3)]

    async def main() -> None:
        async with writing(nsqds, copies, timeout=1) as writer:
            assert len(set(await writer.publish(topic, b"body"))) == needed
            nsqds[0].kill()
            if needed == 2:
                assert set(await writer.publish(topic, b"body")) == set(addresses(nsqds[1:]))
                nsqds[1].kill()
            error = await failure(writer, topic)
            assert f"published to {needed - 1} of {needed} nsqds" in str(error)
            assert nsqds[0].tcp_address in error.failed

    on_loop(main())


def test_all_are_those_that_are_left_when_one_is_gone_for_good(
    nsqd_pair: Pair, lookupd: Nsqlookupd, topic: str
) -> None:
    async def main() -> None:
        async with finding(lookupd, copies="all") as writer:
            assert len(await writer.publish(topic, b"body")) == 2
            nsqd_pair[0].kill()
            await eventually_async(lambda: ready(writer) == 1)
            # It waits for the dead one, until nsqlookupd lists it no longer.
            assert await writer.publish(topic, b"body") == (nsqd_pair[1].tcp_address,)
            nsqd_pair[0].start()
            await eventually_async(lambda: ready(writer) == 2, timeout=30)
            assert len(await writer.publish(topic, b"body")) == 2

    on_loop(main())


def test_one_that_is_gone_is_forgotten_in_the_end(nsqd_pair: Pair, lookupd: Nsqlookupd, topic: str) -> None:
    gone, stays = nsqd_pair

    async def main() -> None:
        async with finding(lookupd, given=[stays], lookupd_poll_interval=3600) as writer:
            await writer.publish(topic, b"body")
            gone.kill()
            await eventually_async(lambda: ready(writer) == 1)
            for polls in range(1, 12):
                assert len(pipelines(writer)) == 2, polls
                writer._cluster._on_found({})
            assert [pipeline.address for pipeline in pipelines(writer)] == [stays.tcp_address]

    on_loop(main())


def test_a_tombstoned_nsqd_gets_no_message_of_that_topic(nsqd_pair: Pair, lookupd: Nsqlookupd, topic: str) -> None:
    hidden, free = nsqd_pair
    for nsqd in nsqd_pair:
        nsqd.create_topic(topic)

    async def main() -> None:
        await eventually_async(lambda: len(lookupd.lookup(topic)) == 2)
        node = f"127.0.0.1:{hidden.http_port}"
        lookupd.request("POST", "/topic/tombstone", topic=topic, node=node)
        async with finding(lookupd, copies="all") as writer:
            await eventually_async(lambda: writer.publish(f"{topic}-2", b"x"), until=lambda answer: len(answer) == 2)
            for body in bodies(10):
                assert await writer.publish(topic, body) == (free.tcp_address,)

    on_loop(main())


def test_one_nsqd_under_two_names_is_one(nsqd: Nsqd, topic: str, caplog: pytest.LogCaptureFixture) -> None:
    names = [nsqd.tcp_address, f"localhost:{nsqd.tcp_port}"]

    async def main() -> None:
        async with writing(names, timeout=1) as writer:
            await eventually_async(lambda: failure(writer, topic), until=lambda error: "1 nsqds known" in str(error))
        assert caplog.text.count("is the same nsqd as") == 1

    on_loop(main())


def test_two_whose_connections_have_just_ended_are_not_taken_for_one(
    nsqd_pair: Pair, topic: str, caplog: pytest.LogCaptureFixture
) -> None:
    async def main() -> None:
        async with writing(nsqd_pair) as writer:
            await writer.publish(topic, b"body")
            for pipeline in pipelines(writer):
                pipeline.peer = None  # as it is when they have ended in the turn in which they were ready
            writer._cluster.look()
            assert ready(writer) == 2
        assert "is the same nsqd as" not in caplog.text

    on_loop(main())


def test_nothing_is_asked_before_the_first_publish(lookupd: Nsqlookupd) -> None:
    writer = ReplicatedWriter(lookupd_http_addresses=lookupd.http_address, copies=3)  # outside of any loop
    writer.close()


@pytest.mark.parametrize(
    ("address", "url"),
    [
        ("10.0.0.1:4161", "http://10.0.0.1:4161/nodes"),
        ("https://lookup/", "https://lookup/nodes"),
        ("http://10.0.0.1:4161/lookup", "http://10.0.0.1:4161/nodes"),
        ("http://proxy/nsq/lookup/?token=a%26b", "http://proxy/nsq/nodes?token=a%26b"),
    ],
)
def test_an_address_that_does_for_a_reader_does_for_a_writer(address: str, url: str) -> None:
    """A reader's may name a path and a query."""
    assert nodes_url(address) == url


def test_what_a_record_says() -> None:
    ipv6 = {"broadcast_address": "::1", "tcp_port": 4150}
    nodes, odd = read_nodes({"producers": [NODE, ipv6, {**NODE, "tcp_port": 0}]})
    assert nodes == {("10.0.0.1", 4150): frozenset({"a"}), ("::1", 4150): frozenset()}
    assert odd == 1
