"""The state machine's access to its store: what happens when the store does not answer.

An outage is told once when it begins and once when it ends; in between it is counted. What was handled
but could not be confirmed is remembered here, for a while, and answers as done in this process.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import TypeVar

from nsqdedupe.clock import Clock
from nsqdedupe.errors import StoreError
from nsqdedupe.metrics import Events
from nsqdedupe.store import Answer, Claim, Release, Store

logger = logging.getLogger(__name__)

UNCONFIRMED_LIMIT = 100_000
"""How many successes are kept for a store that is away; the oldest go first."""

UNCONFIRMED_SECONDS = 600.0
"""How long each is kept."""

Item = TypeVar("Item")
Result = TypeVar("Result")


class Ledger:
    """A store whose failures are answers, not exceptions.

    Args:
        store: what is asked.

        events: counts errors, outages and late confirms.

        clock: for how long a success is kept.
    """

    def __init__(self, store: Store, *, events: Events, clock: Clock) -> None:
        self._store = store
        self._events = events
        self._clock = clock
        self._outage = False
        self._unconfirmed: dict[bytes, tuple[Claim, float]] = {}

    @property
    def behind(self) -> bool:
        """Whether the store has not been told of all successes yet."""
        return bool(self._unconfirmed)

    def knows(self, fingerprint: bytes) -> bool:
        """Whether this message was handled here, and the store has not been told yet."""
        return fingerprint in self._unconfirmed

    def claim(self, claims: Sequence[Claim]) -> Sequence[Answer] | None:
        """An answer for each claim, or None if the store did not answer."""
        return self._call(self._store.claim, claims)

    def confirm(self, claims: Sequence[Claim]) -> Sequence[bool]:
        """Record successes, now or when the store is back. Whether each claim was still ours."""
        ours = self._call(self._store.confirm, claims)
        if ours is not None:
            return ours
        deadline = self._clock() + UNCONFIRMED_SECONDS
        for claim in claims:
            self._unconfirmed[claim.fingerprint] = (claim, deadline)
        while len(self._unconfirmed) > UNCONFIRMED_LIMIT:
            del self._unconfirmed[next(iter(self._unconfirmed))]
        return [True] * len(claims)

    def release(self, releases: Sequence[Release]) -> None:
        """Give claims back; those that the store does not take end by their lease."""
        self._call(self._store.release, releases)

    def extend(self, claims: Sequence[Claim]) -> Sequence[bool]:
        """Whether each claim is still ours. Without an answer they are taken to be."""
        ours = self._call(self._store.extend, claims)
        return [True] * len(claims) if ours is None else ours

    def catch_up(self) -> None:
        """Try again to confirm what could not be confirmed; forget what is too old."""
        if not self._unconfirmed:
            return
        claims = [claim for claim, _ in self._unconfirmed.values()]
        errors = self._events.store_errors
        if self._call(self._store.confirm, claims) is not None:
            self._unconfirmed.clear()
            return
        self._events.store_errors = errors  # each was counted when it failed first
        now = self._clock()
        for fingerprint in [f for f, (_, deadline) in self._unconfirmed.items() if deadline <= now]:
            del self._unconfirmed[fingerprint]

    def _call(
        self, verb: Callable[[Sequence[Item]], Sequence[Result]], items: Sequence[Item]
    ) -> Sequence[Result] | None:
        try:
            results = _one_each(verb(items), items)
        except Exception as error:
            # Not only a StoreError: a store of somebody else's may raise anything, and nothing may be lost.
            self._events.store_errors += len(items)
            if not self._outage:
                self._outage = True
                self._events.outages += 1
                unexpected = not isinstance(error, StoreError)
                logger.warning("store out of reach: %s: %s", type(error).__name__, error, exc_info=unexpected)
            return None
        if self._outage:
            self._outage = False
            logger.info("store is back")
        return results


def _one_each(results: Sequence[Result], items: Sequence[Item]) -> Sequence[Result]:
    if len(results) != len(items):
        raise StoreError(f"the store gave {len(results)} answers for {len(items)}")
    return results
