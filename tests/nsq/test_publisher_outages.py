"""Nsqds that are down or silent: a publish goes on while there are enough of them, and says which are not there."""

from __future__ import annotations

import asyncio
import logging
import re
from collections import Counter
from typing import Any

import pytest
from consumers import bodies, on_loop
from imitation import Imitation, accept
from servers import Pair, Servers, eventually_async
from writers import addresses, failure, frozen, pipelines, ready, works_again, writing

from nsqdedupe import PublishError
from nsqdedupe.cli.local_nsq import Nsqd


def test_with_one_of_two_down_the_error_says_which_and_why(nsqd_pair: Pair, topic: str) -> None:
    alive, dead = nsqd_pair
    dead.kill()

    async def main() -> None:
        async with writing(nsqd_pair, timeout=0.4) as writer:
            error = await failure(writer, topic)
            assert error.acknowledged == (alive.tcp_address,)
            assert error.failed == {dead.tcp_address: "not connected: Connection refused"}
            assert str(error) == (
                f"published to 1 of 2 nsqds: {alive.tcp_address} acknowledged; {dead.tcp_address}: not connected: "
                "Connection refused; publish again, consumers de-duplicate"
            )
            dead.start()
            assert set(await works_again(writer, topic)) == set(addresses(nsqd_pair))

    on_loop(main())


def test_with_one_of_three_down_nobody_notices(servers: Servers, topic: str) -> None:
    nsqds = [servers.nsqd() for _ in range(3)]
    nsqds[1].kill()

    async def main() -> None:
        async with writing(nsqds) as writer:
            for body in bodies(50):
                assert set(await writer.publish(topic, body)) == {nsqds[0].tcp_address, nsqds[2].tcp_address}

    on_loop(main())


def test_a_publish_waits_for_an_nsqd_that_comes_late(nsqd_pair: Pair, topic: str) -> None:
    early, late = nsqd_pair
    early.create_topic(topic)
    late.kill()

    async def main() -> None:
        async with writing(nsqd_pair, timeout=30) as writer:
            publishing = asyncio.ensure_future(writer.publish(topic, b"body"))
            await eventually_async(lambda: early.depth(topic) == 1)
            late.start()
            assert set(await publishing) == set(addresses(nsqd_pair))

    on_loop(main())
    assert [nsqd.depth(topic) for nsqd in nsqd_pair] == [1, 1]


def test_one_of_two_is_killed_in_the_middle(nsqd_pair: Pair, topic: str) -> None:
    """Each PublishError tells who acknowledged, within the timeout; after a restart all is well."""
    alive, dead = nsqd_pair

    async def main() -> None:
        async with writing(nsqd_pair, timeout=0.5) as writer:
            await writer.publish(topic, b"first")
            tasks = [asyncio.ensure_future(writer.publish(topic, body)) for body in bodies(500)]
            await asyncio.sleep(0)
            dead.kill()
            started = asyncio.get_running_loop().time()
            answers = await asyncio.gather(*tasks, return_exceptions=True)
            answers.append(await failure(writer, topic))
            assert asyncio.get_running_loop().time() - started < 5
            errors = [answer for answer in answers if isinstance(answer, PublishError)]
            assert len([answer for answer in answers if isinstance(answer, tuple)]) + len(errors) == 501
            reasons = Counter(error.failed[dead.tcp_address] for error in errors)
            assert set(reasons) <= {
                "connection closed before its answer (outcome unknown)",
                "not connected: Connection refused",
                "not connected: Connection reset by peer",
                "not connected: connection closed by nsqd",
            }
            assert {error.acknowledged for error in errors} == {(alive.tcp_address,)}
            dead.start()
            assert len(await works_again(writer, topic)) == 2

    on_loop(main())


def test_an_outage_is_logged_when_it_begins_and_when_it_ends(
    nsqd: Nsqd, topic: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "nsqdedupe")

    async def main() -> None:
        async with writing([nsqd], 1, timeout=0.5) as writer:
            await writer.publish(topic, b"body")
            assert caplog.records == []
            nsqd.kill()
            await failure(writer, topic)
            await failure(writer, topic)
            nsqd.start()
            await works_again(writer, topic)

    on_loop(main())
    assert [record.levelname for record in caplog.records] == ["WARNING", "INFO"]
    assert f"[{nsqd.tcp_address}] cannot publish to this nsqd" in caplog.messages[0]
    assert f"[{nsqd.tcp_address}] connected again" in caplog.messages[1]


def test_an_nsqd_that_hangs_up_at_each_publish_is_not_hammered(
    topic: str, pauses: list[float], caplog: pytest.LogCaptureFixture
) -> None:
    """To be connected is no success: the pauses grow, and nothing is told, until it has taken a message."""
    caplog.set_level(logging.INFO, "nsqdedupe.pipeline")
    works = False

    async def main() -> None:
        nonlocal works
        nsqd = Imitation(lambda _: accept(_) if works else None)
        async with nsqd.running() as address, writing([address], 1, timeout=30) as writer:
            for _ in range(11):
                await failure(writer, topic)
            assert pauses == [min(60, 0.1 * 2**number) for number in range(11)]
            assert [record.levelname for record in caplog.records] == ["WARNING"]
            works = True
            await writer.publish(topic, b"body")
            assert [record.levelname for record in caplog.records] == ["WARNING", "INFO"]
            works = False
            await failure(writer, topic)
            assert pauses[11:] == [0.1]

    on_loop(main())


def test_a_connection_that_stood_begins_with_short_pauses_again(
    nsqd: Nsqd, topic: str, pauses: list[float], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Also when nothing was published by it."""
    caplog.set_level(logging.INFO, "nsqdedupe.pipeline")
    monkeypatch.setattr("nsqdedupe.pipeline.STEADY", 0.0)

    async def main() -> None:
        async with writing([nsqd], 1, timeout=0.2) as writer:
            await writer.publish(topic, b"body")
            for outages in range(1, 4):
                conn: Any = pipelines(writer)[0]._conn
                conn.stream.close()
                await eventually_async(lambda outages=outages: caplog.text.count("connected again") == outages)

    on_loop(main())
    assert pauses == [0.1] * 3


@pytest.mark.parametrize("host", ["no-such-host.invalid", "\N{SNOWMAN}" * 64])
def test_a_host_that_does_not_exist_is_named(topic: str, host: str) -> None:
    async def main() -> None:
        async with writing([f"{host}:4150"], 1, timeout=0.3) as writer:
            error = await failure(writer, topic)
            assert re.match("not connected: .*(name|Name)", error.failed[f"{host}:4150"])

    on_loop(main())


def test_one_of_three_freezes_and_publishes_go_on(servers: Servers, topic: str) -> None:
    nsqds = [servers.nsqd() for _ in range(3)]

    async def main() -> None:
        async with writing(nsqds, timeout=2) as writer:
            await eventually_async(lambda: writer.publish(topic, b"hello"), until=lambda _: ready(writer) == 3)
            with frozen(nsqds[0]):
                answers = await asyncio.gather(*(writer.publish(topic, body) for body in bodies(300)))
                awake = set(addresses(nsqds[1:]))
                assert [set(answer) for answer in answers] == [awake] * 300
            await eventually_async(lambda: writer.publish(topic, b"hello"), until=lambda to: nsqds[0].tcp_address in to)

    on_loop(main())


def test_one_of_two_freezes_and_the_error_names_it_in_time(nsqd_pair: Pair, topic: str) -> None:
    asleep, awake = nsqd_pair

    async def main() -> None:
        async with writing(nsqd_pair, timeout=0.5) as writer:
            await writer.publish(topic, b"first")
            with frozen(asleep):
                error = await failure(writer, topic)
                assert error.acknowledged == (awake.tcp_address,)
                assert re.fullmatch(
                    r"no answer (within|for) 0\.5\d* s \(outcome unknown\)", error.failed[asleep.tcp_address]
                )
                await eventually_async(lambda: ready(writer) == 1)
                error = await failure(writer, topic)
                assert "not connected: no answer for" in error.failed[asleep.tcp_address]
            assert len(await works_again(writer, topic)) == 2

    on_loop(main())


def test_a_silent_nsqd_is_noticed_without_any_publish(nsqd: Nsqd, topic: str) -> None:
    """It owes a heartbeat a second."""

    async def main() -> None:
        async with writing([nsqd], 1, timeout=0.4, heartbeat_interval=1) as writer:
            await writer.publish(topic, b"first")
            with frozen(nsqd):
                await eventually_async(lambda: not ready(writer))

    on_loop(main())


def test_a_socket_that_never_answers(nsqd: Nsqd, topic: str) -> None:
    async def main() -> None:
        clients: list[asyncio.StreamWriter] = []
        silent = await asyncio.start_server(lambda _, client: clients.append(client), "127.0.0.1", 0)
        address = f"127.0.0.1:{silent.sockets[0].getsockname()[1]}"
        async with writing([nsqd, address], timeout=0.3) as writer:
            started = asyncio.get_running_loop().time()
            error = await failure(writer, topic)
            assert 0.3 <= asyncio.get_running_loop().time() - started < 5
            assert error.acknowledged == (nsqd.tcp_address,)
            assert "not connected: no answer" in error.failed[address]
            await eventually_async(lambda: len(clients) >= 3)  # it is tried again and again
        for client in clients:
            client.close()
        silent.close()
        await silent.wait_closed()

    on_loop(main())
