"""A deferred message is delivered later, by every nsqd that has a copy."""

from __future__ import annotations

import asyncio

import pytest
from consumers import bodies, on_loop, told
from servers import Pair, Servers, eventually
from writers import addresses, writing

from nsqdedupe import ConfigError, PublishError
from nsqdedupe.cli.local_nsq import Nsqd


def test_copies_are_deferred_on_each_nsqd(nsqd_pair: Pair, topic: str, channel: str) -> None:
    for nsqd in nsqd_pair:
        nsqd.create_channel(topic, channel)

    async def main() -> None:
        async with writing(nsqd_pair) as writer:
            answers = await asyncio.gather(*(writer.publish(topic, body, defer=60) for body in bodies(5)))
            assert {frozenset(answer) for answer in answers} == {frozenset(addresses(nsqd_pair))}
            await writer.publish(topic, b"now", defer=0)

    on_loop(main())
    eventually(lambda: told(nsqd_pair, topic, channel, "deferred_count") == [5, 5])
    eventually(lambda: told(nsqd_pair, topic, channel, "depth") == [1, 1])


def test_what_nsqd_refuses_to_defer_is_told_and_harms_nobody(servers: Servers, topic: str) -> None:
    nsqds = [servers.nsqd(), servers.nsqd("--max-req-timeout=2s")]

    async def main() -> None:
        async with writing(nsqds, timeout=30) as writer:
            others = [asyncio.ensure_future(writer.publish(topic, body)) for body in bodies(10)]
            with pytest.raises(PublishError) as refused:
                await writer.publish(topic, b"too late", defer=3600.001)
            assert refused.value.failed == {
                nsqds[0].tcp_address: "E_INVALID DPUB timeout 3600001 out of range 0-3600000",
                nsqds[1].tcp_address: "E_INVALID DPUB timeout 3600001 out of range 0-2000",
            }
            assert "defer it for less, or raise nsqd's --max-req-timeout" in str(refused.value)
            with pytest.raises(PublishError) as refused:
                await writer.publish(topic, b"too late for one", defer=3)
            assert refused.value.acknowledged == (nsqds[0].tcp_address,)
            assert {len(answer) for answer in await asyncio.gather(*others)} == {2}

    on_loop(main())
    assert [nsqd.depth(topic) for nsqd in nsqds] == [11, 10]


@pytest.mark.parametrize("defer", [-1, "1", None, True, float("nan"), 1e10])
def test_a_delay_that_is_none_is_refused_before_anything_is_sent(nsqd: Nsqd, topic: str, defer: float) -> None:
    async def main() -> None:
        async with writing([nsqd], 1) as writer:
            with pytest.raises(ConfigError, match=r"^defer="):
                await writer.publish(topic, b"body", defer=defer)
            assert not nsqd.stats()["producers"]

    on_loop(main())
