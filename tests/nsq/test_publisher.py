"""A message is acknowledged when as many nsqds as were asked for hold it."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import nsq.event
import pytest
import trustme
from consumers import bodies, on_loop
from servers import Pair, Servers, eventually_async
from writers import addresses, on_each, pipelines, ready, tls, turns, writing

from nsqdedupe import ConfigError, PublishError, ReplicatedWriter
from nsqdedupe.cli.local_nsq import Nsqd


def test_both_nsqds_hold_each_message_exactly_once(nsqd_pair: Pair, topic: str, channel: str) -> None:
    messages = bodies(2_000)

    async def main() -> None:
        async with writing(nsqd_pair) as writer:
            answers = [await writer.publish(topic, body) for body in messages[:100]]
            answers += await asyncio.gather(*(writer.publish(topic, body) for body in messages[100:1_000]))
            chunks = [messages[start : start + 100] for start in range(1_000, 2_000, 100)]
            answers += await asyncio.gather(*(writer.publish_many(topic, chunk) for chunk in chunks))
            assert {frozenset(answer) for answer in answers} == {frozenset(addresses(nsqd_pair))}
        assert await on_each(nsqd_pair, topic, channel) == [Counter(messages)] * 2

    on_loop(main())


@pytest.mark.parametrize("copies", [1, 2, 3])
def test_copies_go_to_different_nsqds_and_are_spread_over_all(
    servers: Servers, topic: str, channel: str, copies: int
) -> None:
    nsqds = [servers.nsqd() for _ in range(3)]
    messages = bodies(300)

    async def main() -> None:
        async with writing(nsqds, copies) as writer:
            # Not before all are connected: until then those that are get what they can.
            await eventually_async(lambda: writer.publish(topic, b"hello"), until=lambda _: ready(writer) == 3)
            answers = {body: await writer.publish(topic, body) for body in messages}
        assert {len(set(answer)) for answer in answers.values()} == {copies}
        found = await on_each(nsqds, topic, channel)
        for nsqd, on_this in zip(nsqds, found, strict=True):
            del on_this[b"hello"]
            assert on_this == Counter(body for body, answer in answers.items() if nsqd.tcp_address in answer)
            assert sum(on_this.values()) == 100 * copies

    on_loop(main())


def test_two_thousand_at_once(nsqd_pair: Pair, topic: str, channel: str) -> None:
    messages = bodies(2_000, size=200)

    async def main() -> None:
        async with writing(nsqd_pair) as writer:
            await asyncio.gather(*(writer.publish(topic, body) for body in messages))
        assert await on_each(nsqd_pair, topic, channel) == [Counter(messages)] * 2

    on_loop(main())


def test_bodies_of_a_mebibyte_are_published(nsqd_pair: Pair, topic: str, channel: str) -> None:
    messages = bodies(5, size=1 << 20) + bodies(20, start=5)

    async def main() -> None:
        async with writing(nsqd_pair) as writer:
            await asyncio.gather(*(writer.publish(topic, body) for body in messages))
            await writer.publish_many(topic, messages[:4])
        assert await on_each(nsqd_pair, topic, channel) == [Counter(messages + messages[:4])] * 2

    on_loop(main())


def test_nothing_is_connected_before_the_first_publish(nsqd: Nsqd, topic: str) -> None:
    writer = ReplicatedWriter(nsqd.tcp_address, 1)  # outside of any loop
    assert not nsqd.stats()["producers"]

    async def main() -> None:
        assert await writer.publish(topic, b"body") == (nsqd.tcp_address,)
        (client,) = nsqd.stats()["producers"]
        assert client["user_agent"].startswith("nsqdedupe/")
        assert await writer.stop() == 0

    on_loop(main())
    assert nsqd.depth(topic) == 1


def test_a_writer_belongs_to_one_event_loop(nsqd: Nsqd, topic: str) -> None:
    writer = ReplicatedWriter([nsqd.tcp_address], copies=1)
    on_loop(writer.publish(topic, b"body"))
    with pytest.raises(ConfigError, match="one writer per event loop"):
        on_loop(writer.publish(topic, b"body"))
    writer.close()
    with pytest.raises(PublishError, match="closed"):
        on_loop(writer.publish(topic, b"body"))


def test_from_a_handler_under_run(nsqd_pair: Pair, topic: str, channel: str) -> None:
    """A reader's handler publishes to another topic before its message is finished; SIGTERM ends it all."""
    source, target = f"{topic}-in", f"{topic}-out"
    nsqd_pair[0].create_channel(source, channel)
    nsqd_pair[0].mpublish(source, bodies(50))
    program = f"""
import os, signal
import nsqdedupe
from tornado.ioloop import IOLoop

writer = nsqdedupe.ReplicatedWriter({addresses(nsqd_pair)!r})
done = set()

async def handle(message):
    await writer.publish({target!r}, message.body)
    done.add(message.body)
    if len(done) == 50:
        IOLoop.current().call_later(0, os.kill, os.getpid(), signal.SIGTERM)
    return True

reader = nsqdedupe.DedupeReader({source!r}, {channel!r}, handle, nsqd_tcp_addresses=[{addresses(nsqd_pair)[0]!r}],
                                key=nsqdedupe.BODY, max_in_flight=10, output_buffer_timeout=25)
nsqdedupe.run()
writer.close()
"""
    subprocess.run([sys.executable, "-c", program], check=True, timeout=60, cwd=Path(__file__).parents[2])
    assert [nsqd.depth(target) for nsqd in nsqd_pair] == [50, 50]
    assert nsqd_pair[0].unfinished(source, channel) == 0


def test_tls(servers: Servers, topic: str, tmp_path: Path) -> None:
    nsqd, options = tls(servers, tmp_path)

    async def main() -> None:
        async with writing([nsqd], 1, **options) as writer:
            await asyncio.gather(*(writer.publish(topic, body) for body in bodies(200)))
            with pytest.raises(PublishError, match="too big"):
                await writer.publish(topic, b"x" * ((1 << 20) + 1))
        async with writing([nsqd], 1, **options, snappy=True) as writer:
            await asyncio.gather(*(writer.publish(topic, body) for body in bodies(200)))

    on_loop(main())
    assert nsqd.depth(topic) == 400


def test_tls_that_fails_says_why(servers: Servers, topic: str, tmp_path: Path) -> None:
    nsqd, options = tls(servers, tmp_path)

    async def main() -> None:
        trustme.CA().cert_pem.write_to_path(tmp_path / "ca.pem")
        async with writing([nsqd], 1, **options, timeout=0.5) as writer:
            with pytest.raises(PublishError, match="CERTIFICATE_VERIFY_FAILED"):
                await writer.publish(topic, b"body")
        async with writing([nsqd], 1, **options, timeout=0.5) as writer:
            (tmp_path / "ca.pem").unlink()
            with pytest.raises(PublishError, match=r"ca\.pem.*No such file"):
                await writer.publish(topic, b"body")

    on_loop(main())


@pytest.mark.parametrize("compression", ["snappy", "deflate"])
def test_compression(nsqd: Nsqd, topic: str, compression: str) -> None:
    """Many short connections: what went wrong here went wrong with one in twelve."""

    async def main() -> None:
        for _ in range(30):
            async with writing([nsqd], 1, **{compression: True}) as writer:
                await asyncio.gather(*(writer.publish(topic, body) for body in bodies(10)))

    on_loop(main())
    assert nsqd.depth(topic) == 300


def test_what_nsqd_does_not_offer_is_reported(nsqd: Nsqd, topic: str, caplog: pytest.LogCaptureFixture) -> None:
    async def main() -> None:
        async with writing([nsqd], 1, tls_v1=True) as writer:
            await writer.publish(topic, b"body")

    on_loop(main())
    assert f"[{nsqd.tcp_address}] nsqd does not offer tls_v1" in caplog.text


def test_heartbeats_are_answered(nsqd: Nsqd, topic: str) -> None:
    """nsqd closes a connection that leaves two of them unanswered."""

    async def main() -> None:
        async with writing([nsqd], 1, heartbeat_interval=1) as writer:
            await writer.publish(topic, b"body")
            conn: Any = pipelines(writer)[0]._conn
            beats: list[object] = []
            conn.on(nsq.event.HEARTBEAT, lambda **heard: beats.append(heard))
            await eventually_async(lambda: len(beats) >= 4)
            await writer.publish(topic, b"body")
            assert pipelines(writer)[0]._conn is conn

    on_loop(main())


def test_a_blocked_loop_reads_what_has_come_before_it_gives_up(
    nsqd: Nsqd, topic: str, caplog: pytest.LogCaptureFixture
) -> None:
    async def main() -> None:
        async with writing([nsqd], 1, timeout=0.5) as writer:
            await writer.publish(topic, b"first")
            publishing = asyncio.ensure_future(writer.publish(topic, b"second"))
            conn: Any = pipelines(writer)[0]._conn
            await turns(2)
            conn.flush()
            # Blocks this loop, on purpose, for longer than the timeout of the publish.
            subprocess.run(["sleep", "1"], check=True)  # noqa: ASYNC221
            assert await publishing == (nsqd.tcp_address,)

    on_loop(main())
    assert "cannot publish" not in caplog.text
