"""Coroutines that were begun at once know nothing of each other."""

from __future__ import annotations

import asyncio
import contextvars
import weakref
from collections.abc import Callable
from typing import Any

import pytest
from beginning import Begin, Coro, begun, by_hand, in_a_callback, returns
from consumers import on_loop

from nsqdedupe.eager import starter

var = contextvars.ContextVar[object]("var")


async def sets(value: object, seen: list[object]) -> bool:
    seen.append(var.get(None))
    var.set(value)
    return True


async def sets_and_waits(value: object, seen: list[object]) -> bool:
    await sets(value, seen)
    await asyncio.sleep(0)
    seen.append(var.get())
    return True


def test_what_one_sets_no_other_sees(begin: Begin) -> None:
    seen: list[object] = []

    async def main() -> None:
        assert await begun(begin, sets(1, seen), sets(2, seen)) == [True, True]
        (task,) = await begun(begin, sets_and_waits(3, seen))
        await task
        assert await in_a_callback(lambda: var.get(None)) is None
        assert await begun(begin, sets(4, seen)) == [True]

    on_loop(main())
    assert seen == [None, None, None, 3, None]


def test_each_sees_what_the_caller_has_set(begin: Begin) -> None:
    seen: list[object] = []

    async def main() -> None:
        def deed() -> None:
            assert begin(sets(0, seen)) is True
            var.set(1)
            assert begin(sets(0, seen)) is True
            var.set(2)
            assert begin(sets(0, seen)) is True

        await in_a_callback(deed)

    on_loop(main())
    assert seen == [None, 1, 2]


def test_a_value_that_equals_the_callers_is_not_the_callers(begin: Begin) -> None:
    """Values may not be comparable, or be equal and yet two things."""

    class Incomparable:
        def __eq__(self, other: object) -> bool:
            raise AssertionError

        __hash__ = object.__hash__

    seen: list[object] = []
    values: list[Any] = [[], [], Incomparable(), Incomparable()]

    async def main() -> None:
        def deed() -> None:
            for value in values:
                var.set(value)
                assert begin(sets([], seen)) is True
                assert begin(sets([], seen)) is True

        await in_a_callback(deed)

    on_loop(main())
    assert [id(value) for value in seen] == [id(value) for value in values for _ in range(2)]


# -- what shows that there is a task ---------------------------------------------------------------


@by_hand
def test_one_task_stands_in_for_all_that_leave_no_trace() -> None:
    names = set()

    async def looks() -> bool:
        names.add(asyncio.current_task().get_name())  # type: ignore[union-attr]
        return True

    async def main() -> None:
        var.set("the caller's")
        begin = starter()
        assert await begun(begin, *(looks() for _ in range(10))) == [True] * 10
        assert len(names) == 1
        assert await begun(begin, looks()) == [True]
        assert len(names) == 2, "the first one has ended"

    on_loop(main())


kept: list[Any] = []


async def keeps_it() -> bool:
    kept.append(asyncio.current_task())
    return True


async def keeps_it_weakly() -> bool:
    kept.append(weakref.ref(asyncio.current_task()))  # type: ignore[arg-type]
    return True


async def keeps_it_in_its_context() -> bool:
    var.set(asyncio.current_task())
    kept.append(contextvars.copy_context())
    return True


async def wants_to_hear_of_its_end() -> bool:
    asyncio.current_task().add_done_callback(kept.append)  # type: ignore[union-attr]
    return True


async def names_it() -> bool:
    asyncio.current_task().set_name("mine")  # type: ignore[union-attr]
    return True


@by_hand
@pytest.mark.parametrize(
    "trace", [keeps_it, keeps_it_weakly, keeps_it_in_its_context, wants_to_hear_of_its_end, names_it]
)
def test_who_leaves_a_trace_in_the_task_has_it_alone(trace: Callable[[], Coro]) -> None:
    """And the task ends as the coroutine did: somebody may wait for it."""
    kept.clear()

    async def main() -> None:
        task, name, other = await begun(starter(), trace(), named(), named())
        assert await task is True
        assert name is other is True
        assert len(set(names)) == 1
        assert task.get_name() not in names
        assert [found for found in map(task_in, kept) if found is not task] == []

    names: list[str] = []

    async def named() -> bool:
        names.append(asyncio.current_task().get_name())  # type: ignore[union-attr]
        return True

    def task_in(found: Any) -> object:
        if isinstance(found, contextvars.Context):
            return found[var]
        return found() if isinstance(found, weakref.ref) else found

    on_loop(main())
    kept.clear()


def test_who_looks_at_the_task_sees_the_coroutine(begin: Begin) -> None:
    async def main() -> None:
        gate = asyncio.Event()

        async def stands_at_the_gate() -> bool:
            return await gate.wait()

        (task,) = await begun(begin, stands_at_the_gate())
        assert "stands_at_the_gate() running at" in repr(task)
        gate.set()
        assert await task is True
        (task,) = await begun(begin, returns(False))
        assert "Task" in repr(task)
        assert await task is False

    on_loop(main())
