"""Permits are given in order of arrival, and none is lost."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nsqdedupe.permits import Permits

Test = Callable[[], Coroutine[Any, Any, None]]


class RefusedError(Exception):
    """What a test refuses with."""


async def turn() -> None:
    for _ in range(3):
        await asyncio.sleep(0)


def waiting(permits: Permits, count: int) -> asyncio.Task[None]:
    return asyncio.ensure_future(permits.wait(count))


def test_as_many_as_there_are_can_be_taken_at_once() -> None:
    permits = Permits(3)
    assert permits.take(2)
    assert permits.take(1)
    assert not permits.take(1)
    permits.give(1)
    assert permits.take(1)
    assert (permits.used, permits.wanted) == (3, 0)


def test_who_waits_comes_before_who_takes() -> None:
    async def main() -> None:
        permits = Permits(3)
        assert permits.take(2)
        first, second = waiting(permits, 3), waiting(permits, 1)
        await turn()
        assert permits.wanted == 4
        assert not permits.take(1), "there is one, but others were first"
        permits.give(2)
        await turn()
        assert (first.done(), second.done()) == (True, False)
        permits.give(3)
        await second
        assert (permits.used, permits.wanted) == (1, 0)

    asyncio.run(main())


def test_a_wait_that_is_cancelled_lets_those_behind_it_pass() -> None:
    async def main() -> None:
        permits = Permits(3)
        assert permits.take(2)
        large, small, last = waiting(permits, 3), waiting(permits, 1), waiting(permits, 1)
        await turn()
        last.cancel()
        large.cancel()
        await small
        await turn()
        assert (permits.used, permits.wanted) == (3, 0)
        permits.give(3)
        assert permits.used == 0

    asyncio.run(main())


def test_what_was_granted_to_a_task_that_is_cancelled_is_given_back() -> None:
    async def main() -> None:
        permits = Permits(1)
        assert permits.take(1)
        first, second = waiting(permits, 1), waiting(permits, 1)
        await turn()
        permits.give(1)
        first.cancel()  # granted, but it does not know yet
        await second
        assert first.cancelled()
        assert (permits.used, permits.wanted) == (1, 0)

    asyncio.run(main())


def test_a_refusal_reaches_those_who_wait_since_then() -> None:
    async def main() -> None:
        loop = asyncio.get_running_loop()
        permits = Permits(1)
        assert permits.take(1)
        gone, old = waiting(permits, 1), waiting(permits, 1)
        await turn()
        moment = loop.time()
        await asyncio.sleep(0.001)
        new = waiting(permits, 1)
        await turn()
        gone.cancel()  # it does not know yet
        permits.refuse(RefusedError, before=moment)
        with pytest.raises(RefusedError):
            await old
        assert not new.done()
        assert (permits.used, permits.wanted) == (1, 1)
        permits.refuse(RefusedError)
        with pytest.raises(RefusedError):
            await new
        assert (permits.used, permits.wanted) == (1, 0)

    asyncio.run(main())


def test_a_refusal_of_a_task_that_is_cancelled_gives_nothing_back() -> None:
    async def main() -> None:
        permits = Permits(1)
        assert permits.take(1)
        task = waiting(permits, 1)
        await turn()
        permits.refuse(RefusedError)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert (permits.used, permits.wanted) == (1, 0)

    asyncio.run(main())


def test_idle_is_when_none_is_taken_and_nobody_waits() -> None:
    async def main() -> None:
        permits = Permits(1)
        await permits.idle()
        assert permits.take(1)
        waiter = waiting(permits, 1)
        watchers = [asyncio.ensure_future(permits.idle()) for _ in range(2)]
        await turn()
        permits.give(1)
        await waiter
        await turn()
        assert not any(watcher.done() for watcher in watchers)
        watchers[0].cancel()
        await turn()
        permits.give(1)
        assert permits.take(1), "taken again before the other has noticed"
        await turn()
        assert not watchers[1].done()
        permits.give(1)
        await watchers[1]

    asyncio.run(main())


@given(st.lists(st.tuples(st.integers(1, 4), st.sampled_from(["give", "cancel", "keep"])), max_size=30))
def test_none_is_lost_and_none_is_made(steps: list[tuple[int, str]]) -> None:
    """Whoever waits and is cancelled, in whatever order: at the end all are free, and never were more taken."""

    async def main() -> None:
        permits = Permits(4)
        tasks: list[tuple[int, asyncio.Task[None]]] = []
        for count, then in steps:
            tasks.append((count, waiting(permits, count)))
            if then == "cancel":
                if not tasks[0][1].done():
                    tasks.pop(0)[1].cancel()
            elif then == "give":
                await turn()
                done = [task for task in tasks if task[1].done()]
                for task in done[:1]:
                    tasks.remove(task)
                    permits.give(task[0])
            assert 0 <= permits.used <= permits.limit
        while tasks:
            await turn()
            count, task = tasks.pop(0)
            assert task.done(), "the first of those that are left has its permits"
            permits.give(count)
            assert 0 <= permits.used <= permits.limit
        await turn()
        assert (permits.used, permits.wanted) == (0, 0)

    asyncio.run(main())
