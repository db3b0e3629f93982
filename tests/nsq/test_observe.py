"""A reader that looks on: nsqd hears what it would hear from stock pynsq, and every copy is handled."""

from __future__ import annotations

from typing import Any

import nsq
import pytest
from consumers import KINDS, PATIENCE, Kind, Seen, at_rest, bodies, consuming, nothing_left, on_loop, publish, told
from servers import Pair, eventually_async
from test_backoff_wire import Stage, perform

from nsqdedupe import BODY, DedupeReader


@pytest.mark.parametrize("max_in_flight", [2, 10])
def test_nsqd_hears_the_same_as_from_stock_pynsq(
    nsqd_pair: Pair, topic: str, monkeypatch: pytest.MonkeyPatch, max_in_flight: int
) -> None:
    """Copies on both nsqds; failures, delays that grow with attempts, a backoff, giving up by attempts."""
    observed: list[int] = []

    async def scene(stage: Stage) -> None:
        for number, *messages in (
            (0, "new.k", "fails.fk"),
            (1, "new.k", "fails.fk", "twice.ffk"),
            (0, "twice.ffk", "stubborn.ffff"),
            (1, "stubborn.ffff", "last.k"),
            (0, "last.k"),
        ):
            stage.chance.tests = number
            await stage.turn(number)
            await stage.say(number, *messages)
        if isinstance(stage.reader, DedupeReader):
            observed.append(stage.reader.stats.observed)

    async def main() -> tuple[list[list[str]], list[list[str]]]:
        options: dict[str, Any] = {"max_in_flight": max_in_flight, "max_tries": 2, "requeue_delay": 1}
        stock = await perform(scene, nsqd_pair, f"{topic[-20:]}-stock", nsq.Reader, monkeypatch, **options)
        options |= {"key": BODY, "observe": True}
        ours = await perform(scene, nsqd_pair, f"{topic[-20:]}-ours", DedupeReader, monkeypatch, **options)
        return stock, ours

    stock, ours = on_loop(main())
    assert ours == stock
    assert "REQ stubborn.ffff 2000" in ours[0]
    # Deliveries of second copies: one each of new, fails, twice and last, three of the one that fails for ever.
    assert observed == [7]


@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
def test_every_copy_is_handled_and_those_are_counted_that_would_not_be(
    nsqd_pair: Pair, topic: str, channel: str, kind: Kind
) -> None:
    seen = Seen()
    messages = bodies(200)

    async def main() -> None:
        async with consuming(topic, channel, kind(seen.handle, 0.002), nsqd_pair, observe=True) as reader:
            publish(nsqd_pair, topic, messages)
            await eventually_async(lambda: reader.stats.handled == 400, PATIENCE)
            await nothing_left(nsqd_pair, topic, channel)
            at_rest(reader)
            stats = reader.stats
            assert stats.observed == 200
            assert (stats.duplicates, stats.deferred, stats.standbys, stats.unprotected) == (0, 0, 0, 0)
            assert reader.store.kept() == 0

    on_loop(main())
    assert set(seen.handled.values()) == {2}
    assert told(nsqd_pair, topic, channel, "requeue_count") == [0, 0]
