"""One of three nsqds is killed while a hundred thousand messages are published to two of them each."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any

from consumers import PATIENCE, bodies, consuming, on_loop
from servers import Servers, eventually_async
from writers import writing

from nsqdedupe import PublishError
from nsqdedupe.cli.local_nsq import Nsqd

MESSAGES = 100_000
AT_ONCE = 2_000

KEEPS = "--mem-queue-size=0"
"""What nsqd acknowledged is in a file then, and outlives its process, once nsqd has written down where the file begins:
after 2,500 messages. Only its count of them is out of date. DURABLE would do that after each, and take minutes."""


async def read_back(nsqd: Nsqd, topic: str, channel: str, expected: set[bytes]) -> Counter[bytes]:
    """What an nsqd holds; returns when all that was expected has come and nsqd says that no more is left."""
    found: Counter[bytes] = Counter()

    def handle(message: Any) -> bool:
        found[message.body] += 1
        return True

    nsqd.create_channel(topic, channel)
    async with consuming(topic, channel, handle, [nsqd], store=False, max_in_flight=2500):
        await eventually_async(lambda: len(expected - found.keys()), PATIENCE, until=lambda missing: missing == 0)
        await eventually_async(lambda: nsqd.unfinished(topic, channel), PATIENCE, until=lambda left: left == 0)
    return found


async def read_all(
    nsqds: Iterable[Nsqd], topic: str, channel: str, holders: Mapping[bytes, Iterable[str]]
) -> dict[str, Counter[bytes]]:
    """What each nsqd holds. It fails if one has not all that it acknowledged."""
    expected: dict[str, set[bytes]] = {nsqd.tcp_address: set() for nsqd in nsqds}
    for body, where in holders.items():
        for address in where:
            expected[address].add(body)
    return {nsqd.tcp_address: await read_back(nsqd, topic, channel, expected[nsqd.tcp_address]) for nsqd in nsqds}


def test_each_acknowledged_message_is_on_two_nsqds_and_each_error_is_true(
    servers: Servers, topic: str, channel: str
) -> None:
    """The longest test of the writer, some seconds: the nsqds keep each message on disk."""
    nsqds = [servers.nsqd(KEEPS) for _ in range(3)]
    victim = nsqds[1]
    holders: dict[bytes, tuple[str, ...]] = {}
    errors: dict[bytes, PublishError] = {}
    killed: list[int] = []

    async def main() -> None:
        async with writing(nsqds, copies=2, timeout=30) as writer:

            async def work(rest: Iterable[bytes]) -> None:
                for body in rest:
                    try:
                        holders[body] = await writer.publish(topic, body)
                    except PublishError as error:
                        errors[body] = error
                    if len(holders) >= MESSAGES // 2 and not killed:
                        victim.kill()
                        killed.append(len(holders))

            rest = iter(bodies(MESSAGES))
            await asyncio.gather(*(work(rest) for _ in range(AT_ONCE)))
        assert killed
        assert killed[0] < MESSAGES
        victim.start()
        found = await read_all(nsqds, topic, channel, holders)
        assert len(holders) + len(errors) == MESSAGES
        assert not errors, "two were up all the time"
        assert {len(set(answer)) for answer in holders.values()} == {2}
        assert sum(all(found[nsqd][body] for nsqd in answer) for body, answer in holders.items()) == MESSAGES
        spread = {nsqd: sum(nsqd in answer for answer in holders.values()) for nsqd in found}
        assert min(spread.values()) > MESSAGES // 5, spread
        # No more is sent than must be: extra copies are of commands whose outcome was not known.
        extra = sum(sum(counter.values()) for counter in found.values()) - 2 * MESSAGES
        assert extra <= 2 * AT_ONCE

    on_loop(main())


def test_each_error_is_true_when_there_is_none_to_spare(servers: Servers, topic: str, channel: str) -> None:
    nsqds: list[Nsqd] = [servers.nsqd(KEEPS, "--sync-every=200") for _ in range(2)]
    victim = nsqds[1]
    messages = bodies(4_000)
    outcomes: dict[bytes, tuple[str, ...] | PublishError] = {}

    async def main() -> None:
        async with writing(nsqds, timeout=1) as writer:

            async def work(rest: Iterable[bytes]) -> None:
                for body in rest:
                    try:
                        outcomes[body] = await writer.publish(topic, body)
                    except PublishError as error:
                        outcomes[body] = error
                    if len(outcomes) == len(messages) // 2:
                        victim.kill()

            rest = iter(messages)
            await asyncio.gather(*(work(rest) for _ in range(len(messages) // 4)))
        victim.start()
        holders = {
            body: outcome.acknowledged if isinstance(outcome, PublishError) else outcome
            for body, outcome in outcomes.items()
        }
        await read_all(nsqds, topic, channel, holders)
        errors = [outcome for outcome in outcomes.values() if isinstance(outcome, PublishError)]
        assert any(error.acknowledged == (nsqds[0].tcp_address,) for error in errors)
        assert all(victim.tcp_address in error.failed for error in errors)
        for body, outcome in outcomes.items():
            assert isinstance(outcome, PublishError) or len(holders[body]) == 2

    on_loop(main())
