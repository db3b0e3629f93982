"""What is published about the same time goes out as one command, and each publish has an outcome of its own."""

from __future__ import annotations

import asyncio
from collections import Counter
from typing import Any

import pytest
from consumers import bodies, on_loop
from imitation import Imitation
from servers import Servers, eventually_async
from writers import addresses, failure, on_each, pipelines, ready, turns, writing

from nsqdedupe import PublishError
from nsqdedupe.outbox import BATCH, BATCH_BYTES


def test_one_turn_of_the_loop_is_one_command_per_topic(topic: str) -> None:
    async def main() -> None:
        imitation = Imitation()
        async with imitation.running() as address, writing([address], 1) as writer:
            await asyncio.gather(*(writer.publish(f"{topic}-{number % 2}", b"x") for number in range(100)))
            assert [line.split()[0] for line, _ in imitation.commands] == [b"MPUB", b"MPUB"]
            assert imitation.counts == [50, 50]
            await writer.publish(topic, b"alone")
            assert imitation.commands[-1] == (b"PUB %s\n" % topic.encode(), b"alone")

    on_loop(main())


def test_a_command_has_a_largest_size(topic: str) -> None:
    async def main() -> None:
        imitation = Imitation()
        async with imitation.running() as address, writing([address], 1) as writer:
            await asyncio.gather(*(writer.publish(topic, b"x") for _ in range(2 * BATCH + 1)))
            assert imitation.counts == [BATCH, BATCH, 1]
            await asyncio.gather(*(writer.publish(topic, b"x" * (BATCH_BYTES // 4)) for _ in range(6)))
            assert imitation.counts[3:] == [3, 3]
            await asyncio.gather(*(writer.publish(topic, body) for body in [b"x", b"x" * 2 * BATCH_BYTES, b"x"]))
            assert imitation.counts[5:] == [1, 1, 1]
            await writer.publish_many(topic, [b"x"] * (BATCH + 1))
            assert imitation.counts[8:] == [BATCH, 1]

    on_loop(main())


def test_while_a_command_is_not_answered_others_gather_until_it_is(topic: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("nsqdedupe.outbox.LINGER", 3600)

    async def main() -> None:
        imitation = Imitation()
        async with imitation.running() as address, writing([address], 1, timeout=30) as writer:
            imitation.may_answer.clear()
            tasks = [asyncio.ensure_future(writer.publish(topic, b"first"))]
            await eventually_async(lambda: imitation.counts)
            for _ in range(5):
                tasks.append(asyncio.ensure_future(writer.publish(topic, b"later")))
                await turns(3)
            assert imitation.counts == [1]
            imitation.may_answer.set()
            await asyncio.gather(*tasks)
            assert imitation.counts == [1, 5]

    on_loop(main())


def test_they_do_not_wait_for_an_answer_that_does_not_come(topic: str) -> None:
    async def main() -> None:
        imitation = Imitation()
        async with imitation.running() as address, writing([address], 1, timeout=30) as writer:
            imitation.may_answer.clear()
            first = asyncio.ensure_future(writer.publish(topic, b"first"))
            await eventually_async(lambda: imitation.counts)
            second = asyncio.ensure_future(writer.publish(topic, b"second"))
            await eventually_async(lambda: writer._outbox._sent == 2)
            imitation.may_answer.set()
            await asyncio.gather(first, second)

    on_loop(main())


def test_only_the_culprit_of_a_refused_command_fails(servers: Servers, topic: str, channel: str) -> None:
    nsqds = [servers.nsqd("--max-msg-size=100"), servers.nsqd("--max-msg-size=200")]
    messages = bodies(30)

    async def main() -> None:
        async with writing(nsqds, timeout=30) as writer:
            tasks = [asyncio.ensure_future(writer.publish(topic, body)) for body in messages[:15]]
            culprit = asyncio.ensure_future(failure(writer, topic, b"x" * 150))
            tasks += [asyncio.ensure_future(writer.publish(topic, body)) for body in messages[15:]]
            assert {frozenset(answer) for answer in await asyncio.gather(*tasks)} == {frozenset(addresses(nsqds))}
            error = await culprit
            assert error.acknowledged == (nsqds[1].tcp_address,)
            assert error.failed == {nsqds[0].tcp_address: "E_BAD_MESSAGE PUB message too big 150 > 100"}
        found = await on_each(nsqds, topic, channel)
        assert found[0] == Counter(messages)
        assert found[1] == Counter([*messages, b"x" * 150])

    on_loop(main())


def test_a_culprit_goes_to_an_nsqd_to_spare_and_the_others_where_they_were_sent(servers: Servers, topic: str) -> None:
    strict, free = servers.nsqd("--max-msg-size=100"), servers.nsqd()

    async def main() -> None:
        async with writing([strict, free], copies=1, timeout=30) as writer:
            for _ in range(4):  # both have their turn
                answers = await asyncio.gather(*(writer.publish(topic, b"x" * size) for size in (1, 101, 2)))
                assert answers[1] == (free.tcp_address,)

    on_loop(main())


def test_an_nsqd_that_takes_small_commands_only_gets_small_ones(servers: Servers, topic: str) -> None:
    nsqd = servers.nsqd("--max-body-size=20000", "--max-msg-size=1000")

    async def main() -> None:
        async with writing([nsqd], 1, timeout=30) as writer:
            for start in range(0, 500, 100):
                await asyncio.gather(*(writer.publish(topic, body) for body in bodies(100, size=900, start=start)))
            assert writer._outbox.most_bytes < 20_000

    on_loop(main())
    assert nsqd.depth(topic) == 500


def test_a_command_that_was_divided_goes_on_from_the_answers_it_had(topic: str) -> None:
    """One nsqd took it and the other refuses it: the one is not asked again."""

    async def main() -> None:
        refusals = iter([True])
        takes = Imitation()
        refuses = Imitation(lambda n: [(1, b"E_MPUB_FAILED no")] if n and next(refusals, False) else [(0, b"OK")])
        async with takes.running() as one, refuses.running() as other, writing([one, other], timeout=30) as writer:
            await writer.publish(topic, b"first")
            takes.may_answer.clear()
            tasks = [asyncio.ensure_future(writer.publish(topic, body)) for body in bodies(3)]
            await eventually_async(lambda: refuses.counts == [1, 3, 1, 1, 1])
            takes.may_answer.set()
            answers = await asyncio.gather(*tasks)
            assert {frozenset(answer) for answer in answers} == {frozenset((one, other))}
            assert takes.counts == [1, 3]

    on_loop(main())


def test_a_publish_that_was_cancelled_takes_no_place_when_its_command_is_divided(topic: str) -> None:
    """It is cancelled when its batch is sent, and its task has not noticed yet."""

    async def main() -> None:
        refusals = iter([True])
        nsqd = Imitation(lambda n: [(1, b"E_BAD_MESSAGE no")] if n and next(refusals, False) else [(0, b"OK")])
        async with nsqd.running() as address, writing([address], 1, timeout=30) as writer:
            await writer.publish(topic, b"first")
            tasks = [asyncio.ensure_future(writer.publish(topic, body)) for body in bodies(3)]
            await asyncio.sleep(0)
            tasks[1].cancel()
            answers = await asyncio.gather(*tasks, return_exceptions=True)
            assert [type(answer) for answer in answers] == [tuple, asyncio.CancelledError, tuple]
            assert nsqd.counts == [1, 2, 1, 1]
            assert writer._permits.used == 0

    on_loop(main())


def test_a_write_that_fails_at_once_is_a_failure_like_any_other(topic: str) -> None:
    """A large command is written while it is sent: what becomes of it may be known before it is asked for."""

    async def main() -> None:
        one, other = Imitation(), Imitation()
        async with one.running() as a, other.running() as b, writing([a, b], 1, timeout=30) as writer:
            await eventually_async(lambda: writer.publish(topic, b"first"), until=lambda _: ready(writer) == 2)

            def encode(data: bytes) -> bytes:
                raise ValueError("cannot be compressed")

            conn: Any = pipelines(writer)[0]._conn
            conn.encoder.encode = encode
            for _ in range(2):  # both have their turn
                assert await writer.publish(topic, bytes(1 << 17)) == (b,)
            assert writer._permits.used == 0

    on_loop(main())


def test_publish_many_says_which_nsqds_have_all(topic: str) -> None:
    async def main() -> None:
        refusals = iter([True])
        takes = Imitation()
        half = Imitation(lambda n: [(1, b"E_PUB_FAILED no")] if n == 2 and next(refusals, False) else [(0, b"OK")])
        async with takes.running() as one, half.running() as other, writing([one, other], timeout=30) as writer:
            with pytest.raises(PublishError, match="E_PUB_FAILED no; 1 of 4 commands failed") as failed:
                await writer.publish_many(topic, [b"x" * BATCH_BYTES] * 4)
            assert failed.value.acknowledged == (one,)
            assert list(failed.value.failed) == [other]
            assert set(await writer.publish_many(topic, [b"x" * BATCH_BYTES] * 2)) == {one, other}

    on_loop(main())
