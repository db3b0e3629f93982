"""How the state machine calls its store: what a call may come to, and the calling itself where nothing blocks."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from nsqdedupe.errors import StoreError, StoreUnavailable

logger = logging.getLogger(__name__)

LIMIT = 1000
"""Items of one call at most, unless one submission has more: what comes meanwhile waits for the next."""

Verb = Callable[[Sequence[Any]], Sequence[Any]]
"""A method of a store that takes many items and has a result for each."""

Then = Callable[[Sequence[Any], "Exception | None"], None]
"""What is done with the results: one for each item, None where there is none; and with what went wrong."""

Job = tuple[Sequence[Any], Then]
Results = tuple[Sequence[Any], "Exception | None"]


class Calls(Protocol):
    """Calls verbs of a store, and never raises."""

    waits: bool
    """Whether anything else may happen between a call and its results."""

    def submit(self, verb: Verb, items: Sequence[Any], then: Then, /) -> None:
        """Have a verb called, then ``then``, which runs on the caller's thread. Calls of one verb keep their order."""


class Inline:
    """Calls at once: for stores that do not block."""

    waits = False

    def submit(self, verb: Verb, items: Sequence[Any], then: Then, /) -> None:
        """Call the verb, and ``then`` before this returns."""
        then(*attempt(verb, items))


class Gathered:
    """What was submitted and waits to be called: all of one verb becomes one call, up to `LIMIT`."""

    def __init__(self) -> None:
        self._jobs: dict[Verb, list[Job]] = {}

    def __bool__(self) -> bool:
        return bool(self._jobs)

    def add(self, verb: Verb, items: Sequence[Any], then: Then) -> None:
        """One more."""
        self._jobs.setdefault(verb, []).append((items, then))

    def verbs(self) -> list[Verb]:
        """The one that has waited longest comes first."""
        return list(self._jobs)

    def take(self, verb: Verb) -> Call:
        """The next call of a verb that waits. What is left of it goes to the end of the queue."""
        gathered = self._jobs.pop(verb)
        count = size = 0
        for items, _ in gathered:
            if count and size + len(items) > LIMIT:
                break
            count += 1
            size += len(items)
        if len(gathered) > count:
            self._jobs[verb] = gathered[count:]
        return Call(verb, gathered[:count])


class Call:
    """One call of a verb, and who wants its results."""

    def __init__(self, verb: Verb, jobs: Sequence[Job]) -> None:
        self.verb = verb
        self.items = [item for items, _ in jobs for item in items]
        self._jobs = jobs

    def hand_out(self, results: Sequence[Any], error: Exception | None) -> None:
        """Give everybody the results of what he asked, in the order of asking."""
        begin = 0
        for items, then in self._jobs:
            end = begin + len(items)
            try:
                then(results[begin:end], error)
            except Exception:
                logger.exception("what was to follow a call of the store failed")
            begin = end


def attempt(verb: Verb, items: Sequence[Any]) -> Results:
    """Call a verb: a result for each item, None for those that got none, and what went wrong if something did.

    Not only a StoreError may: a store of somebody else's may raise anything, and nothing may be lost.
    """
    try:
        results = verb(items)
    except Exception as error:  # noqa: BLE001 - told by the ledger
        return failed(error, items)
    if len(results) == len(items):
        return results, None
    return failed(StoreError(f"the store gave {len(results)} answers for {len(items)}"), items)


def failed(error: Exception, items: Sequence[Any]) -> Results:
    """What a call came to that ended with this error."""
    if isinstance(error, StoreUnavailable) and error.results is not None and len(error.results) == len(items):
        return error.results, error
    return [None] * len(items), error
