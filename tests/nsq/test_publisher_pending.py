"""`max_pending` bounds what is accepted; whoever comes too many waits for its turn, and gets it."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Coroutine
from typing import Any

import pytest
from consumers import bodies, on_loop
from imitation import Imitation
from servers import Pair, Servers, eventually_async
from writers import frozen, on_each, pipelines, turns, writing

from nsqdedupe import PublishError, ReplicatedWriter
from nsqdedupe.cli.local_nsq import Nsqd
from nsqdedupe.outbox import Outbox


def pending(writer: ReplicatedWriter) -> tuple[int, int]:
    """How many messages are accepted, and how many wait to be."""
    return writer._permits.used, writer._permits.wanted


def started(*calls: Coroutine[Any, Any, Any]) -> list[asyncio.Task[Any]]:
    return [asyncio.ensure_future(call) for call in calls]


def test_no_more_are_accepted_and_all_have_their_turn(nsqd_pair: Pair, topic: str, channel: str) -> None:
    messages = bodies(100)

    async def main() -> None:
        async with writing(nsqd_pair, max_pending=10, timeout=30) as writer:
            await writer.publish(topic, b"first")
            with frozen(nsqd_pair[0]):
                tasks = started(*(writer.publish(topic, body) for body in messages))
                await turns(3)
                assert pending(writer) == (10, 90)
            assert {len(answer) for answer in await asyncio.gather(*tasks)} == {2}
            assert pending(writer) == (0, 0)
        assert await on_each(nsqd_pair, topic, channel) == [Counter([b"first", *messages])] * 2

    on_loop(main())


def test_first_come_first_served(topic: str) -> None:
    async def main() -> None:
        imitation = Imitation()
        async with imitation.running() as address, writing([address], 1, max_pending=1) as writer:
            await asyncio.gather(*(writer.publish(topic, body) for body in bodies(20)))
            assert [body for _, body in imitation.commands] == bodies(20)

    on_loop(main())


def test_a_list_longer_than_max_pending(nsqd_pair: Pair, topic: str, channel: str) -> None:
    messages = bodies(1_000)

    async def main() -> None:
        async with writing(nsqd_pair, max_pending=7, timeout=30) as writer:
            await asyncio.gather(
                writer.publish_many(topic, messages[:400]),
                writer.publish_many(topic, messages[400:900]),
                *(writer.publish(topic, body) for body in messages[900:]),
            )
        assert await on_each(nsqd_pair, topic, channel) == [Counter(messages)] * 2

    on_loop(main())


def test_a_cancelled_publish_gives_its_place_back(nsqd: Nsqd, topic: str) -> None:
    nsqd.kill()

    async def main() -> None:
        async with writing([nsqd], 1, max_pending=3, timeout=30) as writer:
            accepted = started(
                *(writer.publish(topic, body) for body in bodies(2)), writer.publish(topic, b"d", defer=1)
            )
            waiting = started(*(writer.publish(topic, body) for body in bodies(3, start=2)))
            many = started(writer.publish_many(topic, [b"many"] * 5))
            await turns(3)
            assert pending(writer) == (3, 6)
            waiting[0].cancel()
            await turns(3)
            assert pending(writer) == (3, 5)
            for task in accepted:
                task.cancel()
            await turns(3)
            assert pending(writer) == (2, 3), "what was not sent is forgotten, and others are accepted"
            many[0].cancel()
            await turns(3)
            assert pending(writer) == (2, 0)
            nsqd.start()
            await asyncio.gather(*waiting[1:])

    on_loop(main())
    assert nsqd.depth(topic) == 2


def test_a_cancelled_list_gives_all_its_places_back(nsqd: Nsqd, topic: str) -> None:
    nsqd.kill()

    async def main() -> None:
        async with writing([nsqd], 1, max_pending=2, timeout=30) as writer:
            tasks = started(writer.publish_many(topic, bodies(3)))
            await turns(3)
            assert pending(writer) == (2, 1), "two were accepted, the third waits"
            tasks[0].cancel()
            await asyncio.wait(tasks)
            assert pending(writer) == (0, 0)

    on_loop(main())


def test_a_list_goes_no_further_than_its_first_failure(topic: str) -> None:
    async def main() -> None:
        imitation = Imitation(lambda _: [(1, b"E_PUB_FAILED no")])
        async with imitation.running() as address, writing([address], 1, max_pending=2, timeout=30) as writer:
            with pytest.raises(PublishError, match="E_PUB_FAILED no; 1 of 1 commands failed") as failed:
                await writer.publish_many(topic, bodies(10))
            assert failed.value.failed == {address: "E_PUB_FAILED no"}
            assert imitation.counts == [2]
            assert pending(writer) == (0, 0)

    on_loop(main())


def test_who_was_accepted_just_when_it_was_closed_is_told(nsqd: Nsqd, topic: str) -> None:
    nsqd.kill()

    async def main() -> None:
        async with writing([nsqd], 1, max_pending=1, timeout=30) as writer:
            first, second = started(*(writer.publish(topic, body) for body in bodies(2)))
            await turns(3)
            first.cancel()
            await turns(1)
            assert pending(writer) == (1, 0)
            writer.close()
            with pytest.raises(PublishError, match="the writer is closed"):
                await second
            assert pending(writer) == (0, 0)

    on_loop(main())


def test_a_dead_cluster_costs_ten_thousand_publishers_nothing(
    servers: Servers, topic: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    nsqds = [servers.nsqd() for _ in range(2)]
    for nsqd in nsqds:
        nsqd.kill()
    looks: list[object] = []
    place = Outbox._place

    def noted(self: Outbox, publication: Any) -> None:
        looks.append(publication)
        place(self, publication)

    monkeypatch.setattr(Outbox, "_place", noted)

    async def main() -> None:
        async with writing(nsqds, max_pending=5_000, timeout=60) as writer:
            tasks = started(*(writer.publish(topic, body) for body in bodies(10_000)))
            await eventually_async(lambda: pending(writer) == (5_000, 5_000))
            before = len(looks)
            assert before <= 10, "batches, not messages"
            # Each was tried in vain four times or more: the pauses double.
            await eventually_async(lambda: all(pipeline._pauses._pause >= 0.8 for pipeline in pipelines(writer)))
            assert len(looks) == before
            writer.close()
            answers = await asyncio.gather(*tasks, return_exceptions=True)
            assert {type(answer) for answer in answers} == {PublishError}

    on_loop(main())


def test_who_waits_as_long_as_others_have_waited_in_vain_is_told(nsqd: Nsqd, topic: str) -> None:
    nsqd.kill()

    async def main() -> None:
        async with writing([nsqd], 1, max_pending=2, timeout=0.5) as writer:
            tasks = started(*(writer.publish(topic, body) for body in bodies(3)))
            answers = await asyncio.gather(*tasks, return_exceptions=True)
            assert str(answers[2]) == (
                "published to 0 of 1 nsqds: "
                f"{nsqd.tcp_address}: not connected: Connection refused; "
                "not accepted within 0.25 s, max_pending=2 others are pending; publish again, consumers de-duplicate"
            )

    on_loop(main())


def test_stop_waits_for_those_that_wait_too(nsqd_pair: Pair, topic: str) -> None:
    async def main() -> None:
        async with writing(nsqd_pair, max_pending=5) as writer:
            tasks = started(
                *(writer.publish(topic, body) for body in bodies(50)), writer.publish_many(topic, bodies(50))
            )
            await asyncio.sleep(0)
            assert await writer.stop() == 0
            assert len(await asyncio.gather(*tasks)) == 51

    on_loop(main())
    assert [nsqd.depth(topic) for nsqd in nsqd_pair] == [100, 100]
