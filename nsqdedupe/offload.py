"""The bridge from an event loop to a store that blocks."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import Any

from nsqdedupe.calls import Then, Verb, attempt

logger = logging.getLogger(__name__)

LIMIT = 1000
"""Items of one call at most, unless one submission has more: what comes meanwhile waits for the next."""


Job = tuple[Sequence[Any], Then]
Results = tuple[Sequence[Any], "Exception | None"]


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
        self._gathered: dict[Verb, list[Job]] = {}
        self._jobs: Sequence[Job] = ()
        self._call_under_way: Future[Results] | None = None

    def submit(self, verb: Verb, items: Sequence[Any], then: Then, /) -> None:
        """Have a verb called soon; ``then`` runs on the loop. Does not block, unless no loop runs."""
        self._gathered.setdefault(verb, []).append((items, then))
        loop = _running_loop()
        if self._call_under_way is None:
            self._call(loop)
        while loop is None and self._call_under_way is not None:
            wait([self._call_under_way])
            self._done(self._call_under_way)

    def _call(self, loop: asyncio.AbstractEventLoop | None) -> None:
        verb, gathered = next(iter(self._gathered.items()))
        count = size = 0
        for items, _ in gathered:
            if count and size + len(items) > LIMIT:
                break
            count += 1
            size += len(items)
        jobs = gathered[:count]
        # What is left of this verb goes to the end of the queue.
        del self._gathered[verb]
        if len(gathered) > count:
            self._gathered[verb] = gathered[count:]
        merged = [item for items, _ in jobs for item in items]
        self._jobs = jobs
        try:
            future = self._thread.submit(attempt, verb, merged)
        except RuntimeError:  # no more threads can be had, or the interpreter is about to end
            future = Future()
            future.set_result(attempt(verb, merged))
        self._call_under_way = future
        if loop is not None:
            future.add_done_callback(lambda future: _on_loop(loop, self._done, future))

    def _done(self, future: Future[Results]) -> None:
        if future is not self._call_under_way:
            return  # it was waited for
        results, error = future.result()
        jobs, self._jobs = self._jobs, ()
        self._call_under_way = None
        if self._gathered:
            self._call(_running_loop())
        begin = 0
        for items, then in jobs:
            end = begin + len(items)
            try:
                then(results[begin:end], error)
            except Exception:
                logger.exception("what was to follow a call of the store failed")
            begin = end
        self._after()


def _running_loop() -> asyncio.AbstractEventLoop | None:
    try:
        return asyncio.get_running_loop()
    except RuntimeError:
        return None


def _on_loop(loop: asyncio.AbstractEventLoop, call: Callable[..., None], *args: Any) -> None:  # noqa: ANN401
    with contextlib.suppress(RuntimeError):  # the loop is closed: nobody is left to be told
        loop.call_soon_threadsafe(call, *args)
