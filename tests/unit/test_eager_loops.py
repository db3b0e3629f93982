"""Coroutines are begun at once on loops of all kinds, and wherever a loop is; and a loop may end in the middle."""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import gc
from typing import Any

import pytest
import uvloop
from beginning import Begin, Coro, begun, outcome, raises, returns, waits
from consumers import on_loop

var = contextvars.ContextVar[object]("var")


def test_in_another_task_it_gets_a_task_as_well(begin: Begin) -> None:
    seen = []

    async def looks() -> bool:
        seen.append(asyncio.current_task())
        return True

    async def main() -> None:
        this = asyncio.current_task()
        result = begin(looks())
        assert asyncio.current_task() is this
        assert result is True or await result is True

    on_loop(main())
    assert len(seen) == 1


def test_one_may_begin_another_one(begin: Begin) -> None:
    results = []

    async def inner(wait: float | None) -> bool:
        var.set("inner's")
        if wait is not None:
            await asyncio.sleep(wait)
        return True

    async def outer(wait: float | None) -> bool:
        task = asyncio.current_task()
        var.set("outer's")
        results.append(begin(inner(wait)))
        assert asyncio.current_task() is task
        assert var.get() == "outer's"
        await asyncio.sleep(0)
        assert asyncio.current_task() is task
        return True

    async def main() -> None:
        for task in await begun(begin, outer(None), outer(0), outer(0.001)):
            assert await task is True
        assert [result is True or await result for result in results] == [True] * 3

    on_loop(main())


def test_a_task_factory_is_asked(begin: Begin) -> None:
    made = []

    def factory(loop: asyncio.AbstractEventLoop, coroutine: Coro, **options: Any) -> asyncio.Future[Any]:
        made.append(coroutine)
        return asyncio.Task(coroutine, loop=loop, **options)

    async def main() -> None:
        asyncio.get_running_loop().set_task_factory(factory)
        coroutine = returns(True)
        assert await outcome(begin, coroutine) is True
        assert made == [coroutine]

    on_loop(main())


def test_a_loop_in_debug_mode_runs_them_as_well(begin: Begin) -> None:
    async def main() -> None:
        assert await outcome(begin, returns(True)) is True
        assert await outcome(begin, asyncio.sleep(0, True)) is True
        with pytest.raises(ValueError, match="broken"):
            await outcome(begin, raises(ValueError("broken")))

    asyncio.run(main(), debug=True)


def test_uvloop_runs_them_as_well(begin: Begin) -> None:
    async def main() -> None:
        future = asyncio.get_running_loop().create_future()
        assert await begun(begin, returns(True), returns(True)) == [True, True]
        tasks = await begun(begin, returns(False), asyncio.sleep(0, 1), asyncio.sleep(0.001, 2), waits(future))
        future.set_result(3)
        assert await asyncio.gather(*tasks) == [False, 1, 2, 3]

    uvloop.run(main())


def test_one_loop_may_follow_another(begin: Begin) -> None:
    """The first one stops in the turn in which a coroutine begins, and is closed: its task is of no use any more."""
    results: list[Any] = []

    async def main() -> None:
        results.append(await begun(begin, returns(True), asyncio.sleep(0, True)))
        assert await results[-1][1] is True

    def last_deed(loop: asyncio.AbstractEventLoop) -> None:
        assert begin(returns(True)) is True
        loop.stop()

    first = asyncio.new_event_loop()
    first.call_soon(last_deed, first)
    first.run_forever()
    first.close()
    for _ in range(2):
        on_loop(main())
    assert [result[0] for result in results] == [True, True]


def test_a_loop_that_ends_cancels_those_in_the_middle(begin: Begin) -> None:
    ends = []

    async def waits_for_ever() -> bool:
        try:
            await asyncio.get_running_loop().create_future()
        finally:
            ends.append(asyncio.current_task())
        return True

    tasks: list[Any] = []

    def last_deed() -> None:
        tasks.append(begin(waits_for_ever()))
        assert begin(returns(True)) is True

    async def main() -> None:
        tasks.extend(await begun(begin, waits_for_ever()))
        await asyncio.sleep(0)
        asyncio.get_running_loop().call_soon(last_deed)
        # Done before the deed is: the loop ends in the turn after it at the latest.

    on_loop(main())
    gc.collect()
    assert [task.cancelled() for task in tasks] == [True] * len(tasks)
    assert set(ends) == set(tasks)


def test_a_loop_that_ends_and_cancels_nobody_says_nothing(
    begin: Begin, caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]
) -> None:
    """So `nsq.run` and many programs end: pending tasks are destroyed, and coroutines that nobody goes on with."""

    async def waits_for_ever() -> bool:
        await asyncio.get_running_loop().create_future()
        return True

    async def waits_in_vain() -> bool:
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.sleep(0)
        return await waits_for_ever()

    def deed(loop: asyncio.AbstractEventLoop, *, last: bool) -> None:
        begin(returns(True))
        begin(asyncio.sleep(0, True))
        begin(waits_for_ever())
        task: Any = begin(waits_in_vain())
        task.cancel()
        begin(returns(True))
        if last:
            loop.stop()
        else:
            loop.call_soon(once_more, loop)

    def once_more(loop: asyncio.AbstractEventLoop) -> None:
        deed(loop, last=True)

    loop = asyncio.new_event_loop()
    with contextlib.closing(loop):
        loop.call_soon(lambda: deed(loop, last=False))
        loop.run_forever()
    gc.collect()
    assert caplog.records == []
    assert capfd.readouterr() == ("", "")
