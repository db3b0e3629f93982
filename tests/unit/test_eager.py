"""What ends in its first step is known at once; what does not is a task, which ends as it does."""

from __future__ import annotations

import asyncio
import gc
import weakref
from collections.abc import Iterator
from typing import Any

import pytest
from beginning import Begin, begun, by_hand, in_a_callback, other_tasks, outcome, raises, returns, waits
from consumers import on_loop

from nsqdedupe.eager import starter


def test_what_returns_true_in_one_go_is_known_at_once_and_leaves_no_task(begin: Begin) -> None:
    async def main() -> None:
        assert await begun(begin, *(returns(True) for _ in range(100))) == [True] * 100
        assert len(other_tasks()) <= 1
        await asyncio.sleep(0)
        assert other_tasks() == set()

    on_loop(main())


@pytest.mark.parametrize("value", [False, None, 1, "text", [True]], ids=repr)
def test_any_other_result_is_the_tasks(begin: Begin, value: object) -> None:
    async def main() -> None:
        (task,) = await begun(begin, returns(value))
        assert task is not True
        assert (await task) is value

    on_loop(main())


class FinalError(BaseException):
    """What `except Exception` does not catch."""


@pytest.mark.parametrize("kind", [ValueError, FinalError, GeneratorExit])
def test_an_exception_is_the_tasks(begin: Begin, kind: type[BaseException]) -> None:
    async def main() -> None:
        error = kind("broken")
        (task,) = await begun(begin, raises(error))
        with pytest.raises(kind, match="broken") as caught:
            await task
        assert caught.value is error
        assert await begun(begin, returns(True)) == [True]

    on_loop(main())


@by_hand
def test_a_failure_is_no_work_for_the_garbage_collector() -> None:
    async def fails() -> bool:
        raise FinalError

    async def main() -> None:
        begin = starter()
        (task,) = await begun(begin, fails())
        await asyncio.wait([task])
        error = weakref.ref(task.exception())
        del task
        assert error() is None

    gc.collect()
    gc.disable()
    try:
        on_loop(main())
    finally:
        gc.enable()


def test_who_raises_cancelled_error_is_cancelled(begin: Begin) -> None:
    async def main() -> None:
        (task,) = await begun(begin, raises(asyncio.CancelledError()))
        await asyncio.wait([task])
        assert task.cancelled()

    on_loop(main())


@pytest.mark.parametrize("kind", [SystemExit, KeyboardInterrupt])
def test_what_ends_the_program_is_raised_at_once(kind: type[BaseException]) -> None:
    async def main() -> None:
        begin = starter()
        with pytest.raises(kind):
            await begun(begin, raises(kind()))
        assert other_tasks() == set()
        assert await begun(begin, returns(True)) == [True]

    asyncio.run(main())  # Python itself may tell of it as well


# -- what is awaited -------------------------------------------------------------------------------


def test_several_may_await_the_same_future_in_their_first_steps(begin: Begin) -> None:
    async def main() -> None:
        future = asyncio.get_running_loop().create_future()
        tasks = await begun(begin, *(waits(future) for _ in range(3)))
        also = asyncio.create_task(waits(future))
        await asyncio.sleep(0)
        future.set_result(True)
        assert await asyncio.gather(*tasks, also) == [True] * 4

    on_loop(main())


def test_a_future_that_is_done_meanwhile_is_not_waited_for(begin: Begin) -> None:
    async def main() -> None:
        futures = [asyncio.get_running_loop().create_future() for _ in range(2)]

        def deed() -> list[Any]:
            tasks = [begin(waits(future)) for future in futures]
            futures[0].set_result("done")
            futures[1].set_exception(ValueError("broken"))
            return tasks

        good, bad = await in_a_callback(deed)
        assert await good == "done"
        with pytest.raises(ValueError, match="broken"):
            await bad

    on_loop(main())


class Yielding:
    """Awaited, it yields what no task can wait for."""

    def __init__(self, what: object) -> None:
        self._what = what

    def __await__(self) -> Iterator[Any]:
        yield self._what


def test_what_cannot_be_waited_for_is_an_error_there(begin: Begin) -> None:
    async def awaits(what: Any) -> bool:
        with pytest.raises(RuntimeError):
            await what
        return True

    async def main() -> None:
        elsewhere = asyncio.new_event_loop()
        of_another_loop = elsewhere.create_future()
        not_awaited = asyncio.get_running_loop().create_future()
        for what in (Yielding("text"), Yielding(not_awaited), of_another_loop):
            assert await outcome(begin, awaits(what)) is True
        of_another_loop.cancel()
        elsewhere.close()

    on_loop(main())
