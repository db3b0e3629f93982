"""A coroutine that was begun at once has a task like any other: it is the current one, and can be cancelled."""

from __future__ import annotations

import asyncio
import sys
from typing import Any

import pytest
from beginning import Begin, begun, in_a_callback, outcome, raises, returns, waits
from consumers import on_loop
from servers import eventually_async

from nsqdedupe.eager import Begun, starter


def test_the_current_task_is_the_same_one_all_along_and_the_one_that_is_returned(begin: Begin) -> None:
    seen: list[list[Any]] = []

    async def looks() -> bool:
        mine = [asyncio.current_task()]
        seen.append(mine)
        await asyncio.sleep(0)
        mine.append(asyncio.current_task())
        await asyncio.sleep(0.001)
        mine.append(asyncio.current_task())
        return True

    async def main() -> None:
        tasks = await begun(begin, looks(), looks(), looks())
        assert len(set(tasks)) == 3
        assert await in_a_callback(asyncio.current_task) is None
        assert await asyncio.gather(*tasks) == [True] * 3
        assert seen == [[task] * 3 for task in tasks]

    on_loop(main())


def test_who_lets_others_go_first_goes_on_in_the_next_turn() -> None:
    async def main() -> None:
        steps = []

        async def yields() -> bool:
            steps.append("first")
            await asyncio.sleep(0)
            steps.append("second")
            return True

        def turn() -> Begun:
            asyncio.get_running_loop().call_soon(steps.append, "other")
            task = starter()(yields())
            asyncio.get_running_loop().call_soon(steps.append, "later")
            return task

        task = await in_a_callback(turn)
        assert await task is True  # type: ignore[misc]
        assert steps == ["first", "other", "second", "later"]

    on_loop(main())


def test_a_timeout_that_was_set_in_the_first_step_ends_a_later_one(begin: Begin) -> None:
    async def times_out() -> bool:
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.001):
                await asyncio.get_running_loop().create_future()
        task = asyncio.current_task()
        assert task is not None
        return task.cancelling() == 0

    async def main() -> None:
        assert await outcome(begin, times_out()) is True

    on_loop(main())


def test_a_timeout_that_is_over_before_the_first_step_ends_the_wait_in_it(begin: Begin) -> None:
    async def times_out() -> bool:
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(-1):
                await asyncio.get_running_loop().create_future()
        return True

    async def main() -> None:
        assert await outcome(begin, times_out()) is True

    on_loop(main())


def test_a_timeout_that_is_not_needed_changes_nothing(begin: Begin) -> None:
    async def in_time() -> bool:
        async with asyncio.timeout(60):  # noqa: ASYNC100 - that is the point
            return True

    async def main() -> None:
        assert await begun(begin, in_time(), in_time()) == [True, True]

    on_loop(main())


def test_a_task_group_runs_its_children_and_is_ended_by_one_that_fails(begin: Begin) -> None:
    async def good() -> bool:
        async with asyncio.TaskGroup() as group:
            children = [group.create_task(returns(number)) for number in range(3)]
        return [child.result() for child in children] == [0, 1, 2]

    async def bad() -> bool:
        failed = False
        try:
            async with asyncio.TaskGroup() as group:
                group.create_task(raises(ValueError("broken")))
                await asyncio.get_running_loop().create_future()
        except* ValueError:
            failed = True
        return failed

    async def main() -> None:
        tasks = await begun(begin, good(), bad())
        assert await asyncio.gather(*tasks) == [True, True]

    on_loop(main())


# -- cancellation ----------------------------------------------------------------------------------


@pytest.mark.parametrize("turns", [0, 3])
def test_to_cancel_it_cancels_what_it_waits_for(begin: Begin, turns: int) -> None:
    """Before its own first step as well as later."""

    async def main() -> None:
        future = asyncio.get_running_loop().create_future()

        def begin_and_cancel() -> Any:
            task: Any = begin(waits(future))
            if not turns:
                assert task.cancel("enough")
            return task

        task = await in_a_callback(begin_and_cancel)
        for _ in range(turns):
            await asyncio.sleep(0)
        if turns:
            task.cancel("enough")
        with pytest.raises(asyncio.CancelledError, match="enough"):
            await task
        assert future.cancelled()

    on_loop(main())


def test_to_cancel_it_raises_in_it_where_there_is_nothing_else_to_cancel(begin: Begin) -> None:
    steps = []

    async def yields() -> bool:
        try:
            await asyncio.sleep(0)
        except asyncio.CancelledError as error:
            steps.append(str(error))
        await asyncio.sleep(0)
        return True

    async def main() -> None:
        done = asyncio.get_running_loop().create_future()

        def begin_and_cancel() -> list[Any]:
            tasks: list[Any] = [begin(yields()), begin(waits(done))]
            for task in tasks:
                task.cancel("enough")
            done.cancel()
            return tasks

        kept_on, cancelled = await in_a_callback(begin_and_cancel)
        assert await kept_on is True
        await asyncio.wait([cancelled])
        assert cancelled.cancelled()
        assert steps == ["enough"]

    on_loop(main())


def test_who_goes_on_after_an_error_may_meet_the_next_one(begin: Begin) -> None:
    """Whether the first one comes before the task's own first step or later."""
    caught = []

    async def goes_on(futures: list[asyncio.Future[Any]]) -> object:
        for future in futures:
            try:
                return await future
            except (ValueError, asyncio.CancelledError) as error:
                caught.append(str(error))
            assert sys.exc_info() == (None, None, None)
        raise ValueError("last")

    async def main() -> None:
        loop = asyncio.get_running_loop()
        futures = [[loop.create_future() for _ in range(3)] for _ in range(2)]

        def begin_and_cancel() -> list[Any]:
            tasks: list[Any] = [begin(goes_on(some)) for some in futures]
            tasks[0].cancel("first")
            futures[0][0].cancel()
            return tasks

        tasks = await in_a_callback(begin_and_cancel)
        futures[1][0].set_exception(ValueError("first"))
        await eventually_async(lambda: len(caught) == 2)
        for some in futures:
            some[1].set_exception(ValueError("second"))
        await eventually_async(lambda: len(caught) == 4)
        futures[0][2].set_result("third")
        futures[1][2].set_exception(ValueError("third"))
        assert await tasks[0] == "third"
        with pytest.raises(ValueError, match="last"):
            await tasks[1]

    on_loop(main())
    assert sorted(caught) == ["first", "first", "second", "second", "third"]


def test_it_may_cancel_itself(begin: Begin) -> None:
    async def gives_up() -> bool:
        task = asyncio.current_task()
        assert task is not None
        task.cancel()
        del task
        return True

    async def main() -> None:
        task, after = await begun(begin, gives_up(), returns(True))
        await asyncio.wait([task])
        assert task.cancelled()
        assert after is True

    on_loop(main())


def test_who_cancels_all_tasks_cancels_none_that_begins_later(begin: Begin) -> None:
    async def main() -> None:
        this = asyncio.current_task()

        def cancel_in_between() -> list[Any]:
            first = begin(returns(True))
            for task in asyncio.all_tasks():
                if task is not this:
                    task.cancel()
            return [first, begin(returns(True)), begin(asyncio.sleep(0, True))]

        first, second, third = await in_a_callback(cancel_in_between)
        assert (first, second, await third) == (True, True, True)

    on_loop(main())
