"""Coroutines begin at once: one that its first step brings to an end needs no task of its own, and no turn of the loop.

Python 3.12 and newer begin tasks so themselves. Here is the same for 3.11, by what asyncio documents for tasks of
others (`_enter_task`, `_leave_task`): a task that was made ahead stands for the current one while a coroutine takes its
first step. If that ends the coroutine, and nobody could tell, the same task stands in for the next one. Else it is
the coroutine's, and takes it through the rest, so who asked for the current task in the first step got the right one.
A task that nobody needed ends in the next turn of the loop.
"""

from __future__ import annotations

import asyncio
import sys
import types
from asyncio import _enter_task, _leave_task, get_running_loop
from collections.abc import Callable, Coroutine, Generator
from contextvars import Context, copy_context
from sys import getrefcount
from typing import Any, Literal, cast
from weakref import getweakrefcount

Begun = Literal[True] | asyncio.Future[Any]
"""True: the coroutine has ended, and returned True. Else the task that ends as it does, or has ended so."""


def starter() -> Callable[[Coroutine[Any, Any, Any]], Begun]:
    """What begins coroutines, for callbacks on the thread of a running event loop.

    It takes the first step of a coroutine as a task would, in a copy of the context, and raises nothing but
    `SystemExit` and `KeyboardInterrupt`. The caller keeps the task that it returns until that has ended. If the loop
    ends before, nothing is said of it.
    """
    return _natively if sys.version_info >= (3, 12) else ByHand().begin


def _natively(coroutine: Coroutine[Any, Any, Any]) -> Begun:
    loop = get_running_loop()
    if loop.get_task_factory() is not None:
        return loop.create_task(coroutine)
    task: asyncio.Task[Any] = asyncio.Task(coroutine, loop=loop, eager_start=True)  # type: ignore[call-arg] # 3.12
    if not task.done():
        _keep_quiet(task)
        return task
    try:
        return True if task.result() is True else task
    except BaseException:  # noqa: BLE001 - the caller asks the task for it
        return task


class ByHand:
    """Begins coroutines on Python 3.11."""

    def __init__(self) -> None:
        self._task: asyncio.Task[Any] | None = None
        """What stands in; None: it is to be made."""
        self._rest: Generator[Any, Any, Any]
        self._loop: asyncio.AbstractEventLoop
        self._context: Context
        self._name = ""
        self._known: tuple[int, int] | None = None
        """How many references and weak references there are to a task that nobody knows."""

    def begin(self, coroutine: Coroutine[Any, Any, Any]) -> Begun:
        """See `starter`."""
        loop = get_running_loop()
        context = copy_context()
        task = self._task
        if (
            task is None
            or task.done()
            or self._loop is not loop
            or task.cancelling()
            or not _same(context, self._context)
        ):
            if loop.get_debug() or loop.get_task_factory() is not None:
                return loop.create_task(coroutine)
            task = self._make(loop, context)
        rest = self._rest
        try:
            _enter_task(loop, task)
        except RuntimeError:
            return loop.create_task(coroutine)  # this is the step of another task
        try:
            awaited = self._context.run(coroutine.send, None)
        except StopIteration as stop:
            _leave_task(loop, task)
            if (
                stop.value is True
                # Nobody knows the task or has changed it. Who does shall find that it ends as the coroutine did.
                and (getrefcount(task), getweakrefcount(task)) == self._known
                and not task.cancelling()
                and not task._callbacks  # noqa: SLF001 - there is no other way to ask
                and task.get_name() is self._name
            ):
                return True
            rest.send((None, _end(None, stop.value)))
        except (SystemExit, KeyboardInterrupt):
            _leave_task(loop, task)
            self._task = None
            raise
        except BaseException as error:  # noqa: BLE001 - the task raises it
            _leave_task(loop, task)
            # Without this frame, which refers to the task, which will refer to the error.
            error = error.with_traceback(error.__traceback__ and error.__traceback__.tb_next)
            rest.send((None, _end(error, None)))
        else:
            _leave_task(loop, task)
            rest.__qualname__ = coroutine.__qualname__  # type: ignore[attr-defined] # for who looks at tasks
            rest.send((coroutine, awaited))
        self._task = None
        return task

    def _make(self, loop: asyncio.AbstractEventLoop, context: Context) -> asyncio.Task[Any]:
        """A task that may stand in for one coroutine after the other, until the next turn of the loop."""
        self._loop = loop
        self._context = context
        self._rest = rest = _rest()
        rest.send(None)
        self._task = task = asyncio.Task(cast("Coroutine[Any, Any, Any]", rest), loop=loop, context=context)
        _keep_quiet(task)
        self._name = task.get_name()
        if self._known is None:
            self._known = getrefcount(task), getweakrefcount(task)
        return task


@types.coroutine
def _rest() -> Generator[Any, Any, Any]:
    """What such a task runs: the rest of a coroutine, the end of one, or nothing.

    It is sent a coroutine and what its first step has yielded, or None and an `_end`, unless the task takes its own
    first step before. A generator, because for a task to go through it costs next to nothing.
    """
    given = yield
    if given is None:
        return None
    coroutine, awaited = given
    if coroutine is None:
        return (yield from awaited)
    # By this mark a task knows what is awaited from what was yielded by mistake, and takes it off. Else the next one to
    # await the same future would take it off before our task could see it.
    marked = getattr(awaited, "_asyncio_future_blocking", False)
    if marked:
        awaited._asyncio_future_blocking = False  # noqa: SLF001 - as a task does
    error: BaseException | None = None
    try:
        yield
    except asyncio.CancelledError as cancelled:
        # The task was cancelled before its first step: so is what the coroutine waits for, if it can be.
        if not marked or not awaited.cancel(*cancelled.args):
            error = cancelled
    # What has only let others go first goes on: they went.
    if error is None and awaited is not None:
        if marked:
            awaited._asyncio_future_blocking = True  # noqa: SLF001 - as what is awaited does
        try:
            yield awaited
        except GeneratorExit:
            raise  # nobody goes on with it: whoever is left of the two ends by itself
        except BaseException as thrown:  # noqa: BLE001 - it is the coroutine's
            error = thrown
    return (yield from coroutine if error is None else _throw(coroutine, error))


@types.coroutine
def _throw(coroutine: Coroutine[Any, Any, Any], error: BaseException) -> Generator[Any, Any, Any]:
    """The rest of a coroutine where it waits for something that has failed."""
    while True:
        try:
            awaited = coroutine.throw(error)
        except StopIteration as stop:
            return stop.value
        try:
            yield awaited
        except GeneratorExit:
            raise
        except BaseException as thrown:  # noqa: BLE001 - it is the coroutine's
            error = thrown
        else:
            return (yield from cast("Any", coroutine))


def _end(error: BaseException | None, result: object) -> Generator[Any, Any, Any]:
    """The end of a coroutine, for the task to end so."""
    yield
    if error is None:
        return result
    try:
        raise error
    finally:
        del error


def _same(one: Context, other: Context) -> bool:
    """Whether two contexts have the same variables with the same values; for == equal ones would do."""
    if len(one) != len(other):
        return False
    # There are few: pynsq has one, by its use of decimal numbers.
    for variable, value in one.items():  # noqa: SIM110 - all() takes twice as long
        if other.get(variable, other) is not value:
            return False
    return True


def _keep_quiet(task: asyncio.Task[Any]) -> None:
    """Nothing is lost with a handler that never ends: nsqd gives its message out again."""
    task._log_destroy_pending = False  # type: ignore[attr-defined] # noqa: SLF001 - as `asyncio.gather` does
