"""Backoff when the run that tests it ends after nsqd has given its message out again: it is an outcome all the same."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from consumers import at_rest, on_loop
from fake_nsqd import connected, message, message_id
from servers import eventually_async


@pytest.mark.parametrize("good", [True, False], ids=["succeeds", "fails"])
def test_a_run_that_outlasts_its_delivery_counts_for_the_backoff(good: bool) -> None:
    """Else a consumer whose handlers are slower than its message timeout would stay at RDY 1 for ever."""
    runs: list[asyncio.Future[bool]] = []

    async def handle(_: Any) -> bool:
        runs.append(asyncio.get_running_loop().create_future())
        return await runs[-1]

    async def main() -> None:
        async with connected(handle, max_backoff_duration=1, requeue_delay=0) as (fake, reader, conn):
            await fake.send_apart(conn, message(1, b"body"))
            await eventually_async(lambda: runs)
            runs[0].set_result(False)
            # The block is over when the connection may test the waters.
            await eventually_async(lambda: fake.commands[-1] == b"RDY 1")
            fake.commands.clear()
            await fake.send_apart(conn, message(1, b"body", attempts=2))
            await eventually_async(lambda: len(runs) == 2)
            await fake.send_apart(conn, message(1, b"body", attempts=3))
            assert reader.stats.standbys == 1
            runs[1].set_result(good)
            if good:
                await eventually_async(lambda: fake.commands[-1] == b"FIN " + message_id(1))
                assert fake.commands == [b"RDY 100", b"FIN " + message_id(1)]
                assert reader.backoff_timer.get_interval() == 0
            else:
                await eventually_async(lambda: fake.commands[-1] == b"RDY 1")
                assert fake.commands[0] == b"RDY 0"
                assert reader.backoff_timer.get_interval() == pytest.approx(0.056)
            at_rest(reader)

    on_loop(main())
