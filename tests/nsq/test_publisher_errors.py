"""What nsqd refuses, and what it answers other than OK, is said as it is, and harms no other publish."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable

import pytest
from consumers import bodies, on_loop
from imitation import OK, Imitation
from servers import Pair, Servers
from writers import addresses, failure, on_each, writing

from nsqdedupe import PublishError
from nsqdedupe.cli.local_nsq import Nsqd

TOO_BIG = b"x" * ((1 << 20) + 1)


def test_a_body_that_is_too_large_is_told_so(nsqd_pair: Pair, topic: str) -> None:
    async def main() -> None:
        async with writing(nsqd_pair) as writer:
            error = await failure(writer, topic, TOO_BIG)
            refused = "E_BAD_MESSAGE PUB message too big 1048577 > 1048576"
            assert error.failed == dict.fromkeys(addresses(nsqd_pair), refused)
            assert error.acknowledged == ()
            assert "publish less at once, or raise nsqd's --max-msg-size" in str(error)
            with pytest.raises(PublishError, match="E_BAD_MESSAGE PUB message too big") as refused_too:
                await writer.publish_many(topic, [b"fine", TOO_BIG])
            assert refused_too.value.acknowledged == (), "nobody has both of them"
            assert len(await writer.publish(topic, b"body")) == 2

    on_loop(main())
    assert [nsqd.depth(topic) for nsqd in nsqd_pair] == [2, 2]


def test_what_is_published_beside_a_body_that_is_too_large_succeeds(nsqd_pair: Pair, topic: str, channel: str) -> None:
    messages = bodies(1_000)

    async def main() -> None:
        async with writing(nsqd_pair) as writer:
            await writer.publish(topic, messages[0])
            tasks = [asyncio.ensure_future(writer.publish(topic, body)) for body in messages[1:500]]
            refused = [asyncio.ensure_future(failure(writer, topic, TOO_BIG)) for _ in range(2)]
            tasks += [asyncio.ensure_future(writer.publish(topic, body)) for body in messages[500:]]
            assert {len(answer) for answer in await asyncio.gather(*tasks)} == {2}
            for error in await asyncio.gather(*refused):
                assert {reason.split()[0] for reason in error.failed.values()} == {"E_BAD_MESSAGE"}
        assert await on_each(nsqd_pair, topic, channel) == [Counter(messages)] * 2

    on_loop(main())


def test_an_nsqd_that_refuses_is_replaced_by_one_that_does_not(servers: Servers, topic: str) -> None:
    strict = servers.nsqd("--max-msg-size=100")
    nsqds = [strict, servers.nsqd(), servers.nsqd()]

    async def main() -> None:
        async with writing(nsqds) as writer:
            for body in bodies(10, size=101):
                assert set(await writer.publish(topic, body)) == set(addresses(nsqds[1:]))

    on_loop(main())


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        (lambda _: None, "connection closed before its answer (outcome unknown)"),
        (lambda _: [(1, b"E_PUB_FAILED PUB failed exiting")], "E_PUB_FAILED PUB failed exiting"),
        (lambda _: [(0, b"_heartbeat_"), (1, b"E_UNAUTHORIZED AUTH no")], "E_UNAUTHORIZED AUTH no"),
        (lambda _: [(0, b"MAYBE")], "unexpected answer b'MAYBE' (outcome unknown)"),
        (lambda _: [(7, b"what?")], "no answer within 1 s (outcome unknown)"),
    ],
)
def test_an_answer_other_than_ok_is_a_failure(
    nsqd: Nsqd, topic: str, answer: Callable[[int], list[tuple[int, bytes]] | None], reason: str
) -> None:
    async def main() -> None:
        async with Imitation(answer).running() as address, writing([address, nsqd], timeout=1) as writer:
            error = await failure(writer, topic)
            assert (error.acknowledged, error.failed) == ((nsqd.tcp_address,), {address: reason})

    on_loop(main())


@pytest.mark.parametrize("unasked", [(0, OK), (1, b"E_INVALID unasked"), (0, b"_heartbeat_")])
def test_what_comes_unasked_harms_no_publish(topic: str, unasked: tuple[int, bytes]) -> None:
    async def main() -> None:
        imitation = Imitation(lambda _: [(0, OK), unasked])
        async with imitation.running() as address, writing([address], 1, timeout=10) as writer:
            for body in bodies(5):
                assert await writer.publish(topic, body) == (address,)

    on_loop(main())


def test_what_came_behind_an_error_is_published_again_without_a_word(topic: str) -> None:
    """An error ends a connection: nothing behind it was carried out."""

    async def main() -> None:
        refusals = iter([True])
        imitation = Imitation(lambda n: [(1, b"E_BAD_MESSAGE no")] if n == 2 and next(refusals, False) else [(0, OK)])
        async with imitation.running() as address, writing([address], 1, timeout=10) as writer:
            # Of different topics: else they would be one command.
            publishing = (writer.publish(f"{topic}-{number}", b"x") for number in range(6))
            answers = await asyncio.gather(*publishing, return_exceptions=True)
            assert [answer == (address,) for answer in answers] == [True, True, False, True, True, True]
            assert "E_BAD_MESSAGE no" in str(answers[2])

    on_loop(main())
