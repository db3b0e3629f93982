"""A writer that is stopped or closed says what became of each publish, and leaves nothing behind."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from pathlib import Path
from typing import Any

import nsq.event
import pytest
from consumers import bodies, on_loop
from servers import Pair, Servers, eventually_async
from writers import failure, frozen, pipelines, ready, tls, turns, writing

from nsqdedupe import ConfigError, PublishError, ReplicatedWriter
from nsqdedupe.cli.local_nsq import Nsqd

ONE = "127.0.0.1:4150"
TWO = "127.0.0.1:4152"


def test_stop_waits_for_what_is_pending(nsqd_pair: Pair, topic: str) -> None:
    async def main() -> None:
        async with writing(nsqd_pair) as writer:
            pending = [asyncio.ensure_future(writer.publish(topic, body)) for body in bodies(500)]
            await asyncio.sleep(0)
            stopping = asyncio.ensure_future(writer.stop(timeout=30))
            await asyncio.sleep(0)
            with pytest.raises(PublishError, match="published to 0 of 2 nsqds: the writer is stopping"):
                await writer.publish(topic, b"late")
            assert await stopping == 0
            assert len(await asyncio.gather(*pending)) == 500
            assert await writer.stop() == 0

    on_loop(main())
    assert [nsqd.depth(topic) for nsqd in nsqd_pair] == [500, 500]


def test_a_writer_that_was_never_used_is_stopped_too() -> None:
    async def main() -> None:
        async with writing([ONE, TWO]) as writer:
            assert await writer.stop() == 0
            with pytest.raises(ConfigError, match="timeout"):
                await writer.stop(timeout=-1)

    on_loop(main())


def test_a_cancelled_publish_leaves_the_others_alone(nsqd_pair: Pair, topic: str) -> None:
    async def main() -> None:
        async with writing(nsqd_pair) as writer:
            await writer.publish(topic, b"first")
            tasks = [asyncio.ensure_future(writer.publish(topic, body)) for body in bodies(10)]
            await asyncio.sleep(0)
            for task in tasks[::2]:
                task.cancel()
            answers = await asyncio.gather(*tasks, return_exceptions=True)
            assert [len(answer) for answer in answers[1::2] if isinstance(answer, tuple)] == [2] * 5
            assert {type(answer) for answer in answers[::2]} == {asyncio.CancelledError}
            assert await writer.stop() == 0

    on_loop(main())


def test_close_says_whose_outcome_is_unknown(nsqd_pair: Pair, topic: str) -> None:
    asleep, dead = nsqd_pair

    async def main() -> None:
        async with writing(nsqd_pair) as writer:
            await writer.publish(topic, b"first")
            dead.kill()
            await eventually_async(lambda: ready(writer) == 1)
            with frozen(asleep):
                pending = [asyncio.ensure_future(writer.publish(topic, body)) for body in bodies(10)]
                await asyncio.sleep(0)
                writer.close()
                for error in await asyncio.gather(*pending, return_exceptions=True):
                    assert isinstance(error, PublishError)
                    assert error.acknowledged == ()
                    assert error.failed == {
                        asleep.tcp_address: "the writer was closed before its answer (outcome unknown)",
                        dead.tcp_address: "the writer was closed before it was connected",
                    }
                assert "the writer is closed" in str(await failure(writer, topic))

    on_loop(main())


def test_stop_counts_what_it_had_to_leave(nsqd_pair: Pair, topic: str) -> None:
    async def main() -> None:
        async with writing(nsqd_pair) as writer:
            await writer.publish(topic, b"first")
            with frozen(nsqd_pair[0]):
                pending = [asyncio.ensure_future(writer.publish(topic, body)) for body in bodies(10)]
                await asyncio.sleep(0)
                assert await writer.stop(timeout=0.1) == 10
                errors = await asyncio.gather(*pending, return_exceptions=True)
                assert {error.acknowledged for error in errors if isinstance(error, PublishError)} == {
                    (nsqd_pair[1].tcp_address,)
                }

    on_loop(main())


def test_close_sends_what_was_accepted(nsqd_pair: Pair, topic: str) -> None:
    """Also what had not been written when it was called, and what the system does not take at once."""

    async def main() -> None:
        async with writing(nsqd_pair) as writer:
            await writer.publish(topic, b"first")
            with frozen(nsqd_pair[0]):
                tasks = [asyncio.ensure_future(writer.publish(topic, body)) for body in bodies(80, size=100_000)]
                await asyncio.sleep(0)
                writer.close()
                errors = await asyncio.gather(*tasks, return_exceptions=True)
                assert {type(error) for error in errors} == {PublishError}
            await eventually_async(lambda: [nsqd.depth(topic) for nsqd in nsqd_pair], until=[81, 81].__eq__)

    on_loop(main())


def test_a_connection_that_takes_nothing_more_is_closed_all_the_same(nsqd: Nsqd, topic: str) -> None:
    async def main() -> None:
        async with writing([nsqd], 1, timeout=0.3) as writer:
            await writer.publish(topic, b"first")
            conn: Any = pipelines(writer)[0]._conn
            with frozen(nsqd):
                task = asyncio.ensure_future(writer.publish_many(topic, bodies(80, size=200_000)))
                await asyncio.sleep(0)
                writer.close()
                with pytest.raises(PublishError, match="before its answer"):
                    await task
                assert not conn.closed()
                await eventually_async(conn.closed)

    on_loop(main())


def test_async_with_waits_for_what_is_pending(nsqd_pair: Pair, topic: str) -> None:
    async def main() -> None:
        async with ReplicatedWriter([nsqd.tcp_address for nsqd in nsqd_pair]) as writer:
            tasks = [asyncio.ensure_future(writer.publish(topic, body)) for body in bodies(100)]
            await asyncio.sleep(0)
        assert all(task.done() for task in tasks)
        assert {len(answer) for answer in await asyncio.gather(*tasks)} == {2}
        with pytest.raises(PublishError, match="the writer is closed"):
            await writer.publish(topic, b"late")

    on_loop(main())
    assert [nsqd.depth(topic) for nsqd in nsqd_pair] == [100, 100]


def test_async_with_waits_when_its_body_fails_too(nsqd: Nsqd, topic: str) -> None:
    tasks: list[asyncio.Future[tuple[str, ...]]] = []

    async def fails() -> None:
        async with ReplicatedWriter([nsqd.tcp_address], 1) as writer:
            tasks.append(asyncio.ensure_future(writer.publish(topic, b"body")))
            await asyncio.sleep(0)
            raise KeyError

    async def main() -> None:
        with pytest.raises(KeyError):
            await fails()
        assert await tasks[0] == (nsqd.tcp_address,)

    on_loop(main())


def test_a_stop_that_is_cancelled_closes(nsqd: Nsqd, topic: str) -> None:
    async def main() -> None:
        async with writing([nsqd], 1) as writer:
            await writer.publish(topic, b"first")
            with frozen(nsqd):
                task = asyncio.ensure_future(writer.publish(topic, b"body"))
                await asyncio.sleep(0)
                stopping = asyncio.ensure_future(writer.stop())
                await turns(3)
                stopping.cancel()
                with pytest.raises(PublishError, match="before its answer"):
                    await task
                await asyncio.wait([stopping])
                assert stopping.cancelled()

    on_loop(main())


def test_run_stops_writers_after_the_readers_whose_handlers_publish(nsqd_pair: Pair, topic: str, channel: str) -> None:
    """Handlers that still run at SIGTERM publish, and what they left to the writer is published too."""
    source, target = f"in-{topic[-8:]}", f"out-{topic[-8:]}"
    nsqd_pair[0].create_channel(source, channel)
    nsqd_pair[0].mpublish(source, bodies(50))
    program = f"""
import asyncio, os, signal
import nsqdedupe

writer = nsqdedupe.ReplicatedWriter({[nsqd.tcp_address for nsqd in nsqd_pair]!r})
running, signalled, tasks = [], asyncio.Event(), []

async def handle(message):
    running.append(message)
    if len(running) == 50:
        await writer.publish({target!r} + "-first", b"connected")
        os.kill(os.getpid(), signal.SIGTERM)
        asyncio.get_running_loop().call_soon(signalled.set)
    await signalled.wait()
    await asyncio.sleep(0.1)  # the signal has been seen by now, or is seen while this message is in flight
    tasks.append(asyncio.ensure_future(writer.publish({target!r}, message.body)))
    return True

reader = nsqdedupe.DedupeReader({source!r}, {channel!r}, handle, nsqd_tcp_addresses=[{nsqd_pair[0].tcp_address!r}],
                                key=nsqdedupe.BODY, max_in_flight=100, output_buffer_timeout=25)
nsqdedupe.run()
print(len(tasks), sum(len(task.result()) for task in tasks), writer._ended)
"""
    done = subprocess.run(
        [sys.executable, "-c", program], check=True, timeout=60, cwd=Path(__file__).parents[2], capture_output=True
    )
    assert done.stdout.decode().strip() == "50 100 the writer is closed"
    assert [nsqd.depth(target) for nsqd in nsqd_pair] == [50, 50]


def test_closing_while_it_connects_leaves_nothing(nsqd_pair: Pair, topic: str) -> None:
    async def main() -> None:
        async with writing(nsqd_pair) as writer:
            pending = asyncio.ensure_future(writer.publish(topic, b"body"))
            await asyncio.sleep(0)
            writer.close()
            with pytest.raises(PublishError, match="before it was connected"):
                await pending

    on_loop(main())
    assert not any(nsqd.stats()["producers"] for nsqd in nsqd_pair)


def test_closing_while_it_negotiates_tls_leaves_nothing(servers: Servers, topic: str, tmp_path: Path) -> None:
    """pynsq cannot be stopped there, so the connection is closed when it is ready."""
    nsqd, options = tls(servers, tmp_path)

    async def main() -> None:
        async with writing([nsqd], 1, **options) as writer:
            pending = asyncio.ensure_future(writer.publish(topic, b"body"))
            await asyncio.sleep(0)
            conn: Any = pipelines(writer)[0]._conn
            # The upgrade begins just after this event.
            conn.on(nsq.event.IDENTIFY_RESPONSE, lambda **_: asyncio.get_running_loop().call_soon(writer.close))
            with pytest.raises(PublishError, match="before it was connected"):
                await pending
            await eventually_async(conn.closed)

    on_loop(main())
    assert not nsqd.stats()["producers"]


def test_a_look_that_was_due_when_it_was_closed_does_nothing(nsqd: Nsqd, topic: str) -> None:
    async def main() -> None:
        async with writing([nsqd], 1) as writer:
            await writer.publish(topic, b"body")
            writer.close()
            pipelines(writer)[0]._watch()

    on_loop(main())


def test_a_publish_that_was_cancelled_is_not_sent_any_more(nsqd_pair: Pair, topic: str) -> None:
    for nsqd in nsqd_pair:
        nsqd.create_topic(topic)

    async def main() -> None:
        async with writing(nsqd_pair) as writer:
            publishing = asyncio.ensure_future(writer.publish(topic, b"body"))
            await asyncio.sleep(0)
            connected = writer._on_changed
            publishing.cancel()
            writer._cluster.ready = pipelines(writer)
            connected()  # before the task has noticed that it was cancelled
            with pytest.raises(asyncio.CancelledError):
                await publishing
            await writer.publish(topic, b"another")

    on_loop(main())
    assert [nsqd.depth(topic) for nsqd in nsqd_pair] == [1, 1]


def test_an_answer_that_comes_after_the_publish_was_given_up_is_taken_off_the_right_one(nsqd: Nsqd, topic: str) -> None:
    async def main() -> None:
        async with writing([nsqd], 1, timeout=30) as writer:
            await writer.publish(topic, b"first")
            with frozen(nsqd):
                given_up: Any = asyncio.ensure_future(writer.publish(f"{topic}-2", b"given up"))
                wanted = asyncio.ensure_future(writer.publish(topic, b"wanted"))
                await turns(2)
                given_up.cancel()
            assert await wanted == (nsqd.tcp_address,)
            assert await writer.stop() == 0

    on_loop(main())
    assert [nsqd.depth(topic), nsqd.depth(f"{topic}-2")] == [2, 1]


def test_a_connection_that_ends_just_now_is_not_written_to(nsqd: Nsqd, topic: str) -> None:
    async def main() -> None:
        async with writing([nsqd], 1, timeout=30) as writer:
            await writer.publish(topic, b"first")
            conn: Any = pipelines(writer)[0]._conn
            conn.stream.close()
            assert await writer.publish(topic, b"second") == (nsqd.tcp_address,)

    on_loop(main())
    assert nsqd.depth(topic) == 2
