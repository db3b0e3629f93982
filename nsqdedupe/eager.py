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
from asyncio import _enter_task, _leave_task, get_running_loop
from collections.abc import Callable, Coroutine
from contextvars import Context, copy_context
from operator import is_
from sys import getrefcount
from typing import Any, Literal
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
    """Begins coroutines on any Python."""

    def __init__(self) -> None:
        self._task: asyncio.Task[Any] | None = None
        """What stands in; None: it is to be made."""
        self._rest: _Rest
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
            or self._rest.begun
            or self._loop is not loop
            or task.cancelling()
            or ((context or self._context) and not _same(context, self._context))
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
            rest.end(StopIteration(stop.value))
        except (SystemExit, KeyboardInterrupt):
            _leave_task(loop, task)
            self._task = None
            raise
        except BaseException as error:  # noqa: BLE001 - the task raises it
            _leave_task(loop, task)
            # Without this frame, which refers to the task, which will refer to the error.
            rest.end(error.with_traceback(error.__traceback__ and error.__traceback__.tb_next))
        else:
            _leave_task(loop, task)
            rest.go_on(coroutine, awaited)
        self._task = None
        return task

    def _make(self, loop: asyncio.AbstractEventLoop, context: Context) -> asyncio.Task[Any]:
        """A task that may stand in for one coroutine after the other, until the next turn of the loop."""
        self._loop = loop
        self._context = context
        self._rest = _Rest()
        self._task = task = asyncio.Task(self._rest, loop=loop, context=context)
        _keep_quiet(task)
        self._name = task.get_name()
        if self._known is None:
            self._known = getrefcount(task), getweakrefcount(task)
        return task


class _Rest(Coroutine[Any, Any, Any]):
    """What such a task runs: the rest of a coroutine, the end of one, or nothing."""

    begun = False
    """The task has ended, or begun something."""

    _coroutine: Coroutine[Any, Any, Any] | None = None
    _end: BaseException | None = None
    _awaited: Any = None
    _blocking = False

    def end(self, error: BaseException) -> None:
        """The coroutine has ended; with a result that is a StopIteration."""
        self._end = error

    def go_on(self, coroutine: Coroutine[Any, Any, Any], awaited: Any) -> None:  # noqa: ANN401 - what it yielded
        """The coroutine has taken its first step, and waits for something."""
        self._coroutine = coroutine
        if awaited is not None:
            self._awaited = awaited
            # By this mark a task knows what is awaited from what was yielded by mistake, and takes it off. Else the
            # next one to await the same future would take it off before our task could see it.
            if getattr(awaited, "_asyncio_future_blocking", False):
                self._blocking = True
                awaited._asyncio_future_blocking = False  # noqa: SLF001 - as a task does

    def send(self, _: None) -> Any:  # noqa: ANN401 - what it waits for
        """The task's first step: it waits for what the coroutine's first step has yielded."""
        self.begun = True
        coroutine, awaited = self._coroutine, self._awaited
        if coroutine is None:
            try:
                raise self._end or StopIteration
            finally:
                self._end = None
        # From the second step on there is nothing to add.
        self.send = coroutine.send  # type: ignore[method-assign, assignment]
        if awaited is None:
            return coroutine.send(None)  # it only let others go first, and they went
        self._awaited = None
        if self._blocking:
            awaited._asyncio_future_blocking = True  # noqa: SLF001 - as what is awaited does
        return awaited

    def throw(self, error: Any, *_: Any) -> Any:  # noqa: ANN401 - a task throws exceptions
        """The task was cancelled: before its first step that cancels what the coroutine waits for, if it can be."""
        self.begun = True
        coroutine, awaited = self._coroutine, self._awaited
        if coroutine is None:
            raise error
        self.send = coroutine.send  # type: ignore[method-assign, assignment]
        self._awaited = None
        if awaited is not None and self._blocking and awaited.cancel(*error.args):
            awaited._asyncio_future_blocking = True  # noqa: SLF001 - as what is awaited does
            return awaited
        return coroutine.throw(error)

    # Of the protocol: a task does not ask for them.
    def __await__(self) -> Any: ...  # noqa: ANN401
    def close(self) -> None: ...

    def __getattr__(self, name: str) -> Any:  # noqa: ANN401 - the name, code and frame, for who looks at tasks
        return getattr(self._coroutine, name)


def _same(one: Context, other: Context) -> bool:
    """Whether two contexts have the same variables with the same values; for == equal ones would do."""
    return len(one) == len(other) and all(map(is_, one, other)) and all(map(is_, one.values(), other.values()))


def _keep_quiet(task: asyncio.Task[Any]) -> None:
    """Nothing is lost with a handler that never ends: nsqd gives its message out again."""
    task._log_destroy_pending = False  # type: ignore[attr-defined] # noqa: SLF001 - as `asyncio.gather` does
