"""The bridge from an event loop to a store that blocks."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import Any

from nsqdedupe.calls import Call, Calls, Gathered, Inline, Results, Then, Verb, attempt
from nsqdedupe.store import Store


class Offload:
    """Calls a store's verbs on a thread of its own, one behind the other, while the event loop goes on.

    What is submitted while a call is on its way gathers: all of one verb becomes the next call of it, so that calls are
    as large as the store is slow. The verb that has waited longest comes next.

    It belongs to one event loop. When that has stopped, as when a reader is closed after it, calls are waited for: what
    was handled shall be known to others, and nobody else is left to be told. Its thread ends when nobody has the object
    any more.

    Args:
        after: called on the loop after results were given out.
    """

    waits = True

    def __init__(self, after: Callable[[], None]) -> None:
        self._after = after
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="nsqdedupe-store")
        self._gathered = Gathered()
        self._call: Call | None = None
        self._call_under_way: Future[Results] | None = None

    def submit(self, verb: Verb, items: Sequence[Any], then: Then, /) -> None:
        """Have a verb called soon; ``then`` runs on the loop. Does not block, unless no loop runs."""
        self._gathered.add(verb, items, then)
        loop = running_loop()
        if self._call_under_way is None:
            self._begin(loop)
        while loop is None and self._call_under_way is not None:
            wait([self._call_under_way])
            self._done(self._call_under_way)

    def _begin(self, loop: asyncio.AbstractEventLoop | None) -> None:
        self._call = call = self._gathered.take(self._gathered.verbs()[0])
        try:
            future = self._thread.submit(attempt, call.verb, call.items)
        except RuntimeError:  # no more threads can be had, or the interpreter is about to end
            future = Future()
            future.set_result(attempt(call.verb, call.items))
        self._call_under_way = future
        if loop is not None:
            future.add_done_callback(lambda future: on_loop(loop, self._done, future))

    def _done(self, future: Future[Results]) -> None:
        call = self._call
        if future is not self._call_under_way or call is None:
            return  # it was waited for
        self._call = self._call_under_way = None
        if self._gathered:
            self._begin(running_loop())
        call.hand_out(*future.result())
        self._after()


def calls_for(store: Store, after: Callable[[], None]) -> Calls:
    """How an event loop calls a store: on the loop if the store can be, or never blocks; else on a thread.

    Args:
        store: whose verbs are called.

        after: called on the loop after results were given out, where they come later.
    """
    if not store.traits.blocking:
        return Inline()
    return store.calls(after) or Offload(after)


def running_loop() -> asyncio.AbstractEventLoop | None:
    """The event loop that runs on this thread, if one does."""
    try:
        return asyncio.get_running_loop()
    except RuntimeError:
        return None


def on_loop(loop: asyncio.AbstractEventLoop, call: Callable[..., None], *args: Any) -> None:  # noqa: ANN401
    """Have something called on a loop, from any thread; nothing happens if it is closed."""
    with contextlib.suppress(RuntimeError):  # the loop is closed: nobody is left to be told
        loop.call_soon_threadsafe(call, *args)
