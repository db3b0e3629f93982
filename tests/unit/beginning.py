"""Coroutines that are begun at once, as a reader begins them; what its tests share."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

import pytest

from nsqdedupe.eager import Begun

T = TypeVar("T")
Coro = Coroutine[Any, Any, Any]
Begin = Callable[[Coro], Begun]

by_hand = pytest.mark.skipif(sys.version_info >= (3, 12), reason="Python begins tasks so itself")


async def in_a_callback(deed: Callable[[], T]) -> T:
    """Do something as a reader does: called by the loop, in no task."""
    loop = asyncio.get_running_loop()
    future = loop.create_future()

    def call() -> None:
        try:
            future.set_result(deed())
        except BaseException as error:  # noqa: BLE001 - the test sees it
            future.set_exception(error)

    loop.call_soon(call)
    result: T = await future
    return result


async def begun(begin: Begin, *coroutines: Coro) -> list[Any]:
    """Begin coroutines in one turn of the loop."""
    return await in_a_callback(lambda: [begin(coroutine) for coroutine in coroutines])


async def outcome(begin: Begin, coroutine: Coro) -> Any:
    """Begin a coroutine and wait for its end."""
    (it,) = await begun(begin, coroutine)
    return it if it is True else await it


async def returns(value: object) -> object:
    return value


async def raises(error: BaseException) -> bool:
    raise error


async def waits(future: asyncio.Future[Any]) -> Any:
    return await future


def other_tasks() -> set[asyncio.Task[Any]]:
    return asyncio.all_tasks() - {asyncio.current_task()}  # type: ignore[arg-type]
