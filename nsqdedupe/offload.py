"""The bridge from an event loop to a store that blocks."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

from nsqdedupe.calls import Then, Verb, attempt

logger = logging.getLogger(__name__)

LIMIT = 1000
"""Items of one call at most, unless one submission has more: what comes meanwhile waits for the next."""


class Offload:
    """Calls a store's verbs on a thread of its own, one behind the other, while the event loop goes on.

    What is submitted while a call is on its way gathers: all of one verb becomes the next call of it, so that calls are
    as large as the store is slow. The verb that has waited longest comes next.

    It belongs to one event loop. Its thread ends when nobody has the object any more.

    Args:
        after: called on the loop after results were given out.
    """

    waits = True

    def __init__(self, after: Callable[[], None]) -> None:
        self._after = after
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="nsqdedupe-store")
        self._gathered: dict[Verb, list[tuple[Sequence[Any], Then]]] = {}
        self._calling = False

    def submit(self, verb: Verb, items: Sequence[Any], then: Then, /) -> None:
        """Have a verb called soon; ``then`` runs on the loop. Does not block."""
        self._gathered.setdefault(verb, []).append((items, then))
        if not self._calling:
            self._call()

    def _call(self) -> None:
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
        self._calling = True
        merged = [item for items, _ in jobs for item in items]
        loop = asyncio.get_running_loop()
        future = self._thread.submit(attempt, verb, merged)
        future.add_done_callback(lambda future: _on_loop(loop, self._done, jobs, future))

    def _done(
        self, jobs: Sequence[tuple[Sequence[Any], Then]], future: Future[tuple[Sequence[Any], Exception | None]]
    ) -> None:
        results, error = future.result()
        self._calling = False
        if self._gathered:
            self._call()
        begin = 0
        for items, then in jobs:
            end = begin + len(items)
            try:
                then(results[begin:end], error)
            except Exception:
                logger.exception("what was to follow a call of the store failed")
            begin = end
        self._after()


def _on_loop(loop: asyncio.AbstractEventLoop, call: Callable[..., None], *args: Any) -> None:  # noqa: ANN401
    with contextlib.suppress(RuntimeError):  # the loop is closed: nobody is left to be told
        loop.call_soon_threadsafe(call, *args)
