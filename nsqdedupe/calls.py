"""How the state machine calls its store: what a call may come to, and the calling itself where nothing blocks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

from nsqdedupe.errors import StoreError, StoreUnavailable

Verb = Callable[[Sequence[Any]], Sequence[Any]]
"""A method of a store that takes many items and has a result for each."""

Then = Callable[[Sequence[Any], "Exception | None"], None]
"""What is done with the results: one for each item, None where there is none; and with what went wrong."""


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


def attempt(verb: Verb, items: Sequence[Any]) -> tuple[Sequence[Any], Exception | None]:
    """Call a verb: a result for each item, None for those that got none, and what went wrong if something did.

    Not only a StoreError may: a store of somebody else's may raise anything, and nothing may be lost.
    """
    error: Exception
    try:
        results = verb(items)
        if len(results) == len(items):
            return results, None
        error = StoreError(f"the store gave {len(results)} answers for {len(items)}")
    except StoreUnavailable as partial:
        error = partial
        if partial.results is not None and len(partial.results) == len(items):
            return partial.results, error
    except Exception as other:  # noqa: BLE001 - told by the ledger
        error = other
    return [None] * len(items), error
