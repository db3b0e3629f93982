"""The state machine's access to its store: what happens when the store does not answer.

An outage is told once when it begins and once when it ends; in between it is counted. What was handled
but could not be confirmed is remembered here, for a while, and answers as done in this process.
"""

from __future__ import annotations

import itertools
import logging
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from nsqdedupe.calls import Calls, Verb
from nsqdedupe.clock import Clock
from nsqdedupe.errors import StoreError
from nsqdedupe.metrics import Events
from nsqdedupe.store import Answer, Claim, Release, Store

logger = logging.getLogger(__name__)

UNCONFIRMED_LIMIT = 100_000
"""How many successes are kept for a store that is away; the oldest go first."""

UNCONFIRMED_SECONDS = 600.0
"""How long each is kept."""

CATCH_UP = 1000
"""How many of them are confirmed in one call, so that a store that is back is not drowned."""


class Ledger:
    """A store whose failures are answers, not exceptions.

    Every verb takes a function that gets the results: at once where the store does not block, else later, in the
    order of the calls of that verb.

    Args:
        store: what is asked.

        calls: how it is called.

        events: counts errors, outages and late confirms.

        clock: for how long a success is kept.
    """

    def __init__(self, store: Store, *, calls: Calls, events: Events, clock: Clock) -> None:
        self._store = store
        self._calls = calls
        self._events = events
        self._clock = clock
        self._outage = False
        self._unconfirmed: OrderedDict[bytes, tuple[Any, ...]] = OrderedDict()
        """The rest of the claim of each success that is still to be confirmed, and until when it is kept; the oldest
        first. Plain tuples, because Python's garbage collector walks through 100,000 claims each time, but not these.
        """
        self._catching_up = False
        self.waits = calls.waits
        """Whether anything else may happen between a call and its results."""

    @property
    def behind(self) -> bool:
        """Whether the store has not been told of all successes yet."""
        return bool(self._unconfirmed)

    def knows(self, fingerprint: bytes) -> bool:
        """Whether this message was handled here, and the store has not been told yet."""
        return fingerprint in self._unconfirmed

    def claim(self, claims: Sequence[Claim], then: Callable[[Sequence[Answer | None]], None]) -> None:
        """An answer for each claim; None where the store gave none."""
        self._call(self._store.claim, claims, then)

    def confirm(self, claims: Sequence[Claim], then: Callable[[Sequence[bool]], None]) -> None:
        """Record successes, now or when the store is back. Whether each claim was still ours."""

        def recorded(ours: Sequence[bool | None]) -> None:
            if None in ours:
                self._keep(claim for claim, mine in zip(claims, ours, strict=True) if mine is None)
            then([mine is not False for mine in ours])

        self._call(self._store.confirm, claims, recorded)

    def release(self, releases: Sequence[Release], then: Callable[[], None]) -> None:
        """Give claims back; those that the store does not take end by their lease."""
        self._call(self._store.release, releases, lambda _: then())

    def extend(self, claims: Sequence[Claim], then: Callable[[Sequence[bool | None]], None]) -> None:
        """Whether each claim is still ours; None where the store gave no answer."""
        self._call(self._store.extend, claims, then)

    def start(self, claims: Sequence[Claim], then: Callable[[Sequence[bool]], None]) -> None:
        """Leave a trace of runs that are about to begin, and extend. Without an answer claims are taken to be ours."""
        self._call(self._store.start, claims, lambda ours: then([mine is not False for mine in ours]))

    def catch_up(self) -> None:
        """Try again to confirm what could not be confirmed; forget what is too old."""
        if not self._unconfirmed or self._catching_up:
            return
        now = self._clock()
        while self._unconfirmed and next(iter(self._unconfirmed.values()))[-1] <= now:
            self._unconfirmed.popitem(last=False)
        claims = [Claim(name, *kept[:-1]) for name, kept in itertools.islice(self._unconfirmed.items(), CATCH_UP)]
        if not claims:
            return

        def recorded(ours: Sequence[bool | None]) -> None:
            self._catching_up = False
            for claim, mine in zip(claims, ours, strict=True):
                if mine is not None:
                    self._unconfirmed.pop(claim.fingerprint, None)
            if None not in ours:
                self.catch_up()

        self._catching_up = True
        # Each was counted when it failed first.
        self._call(self._store.confirm, claims, recorded, count=False)

    def _keep(self, claims: Iterable[Claim]) -> None:
        deadline = self._clock() + UNCONFIRMED_SECONDS
        for claim in claims:
            self._unconfirmed[claim.fingerprint] = (*claim[1:], deadline)
            self._unconfirmed.move_to_end(claim.fingerprint)
        while len(self._unconfirmed) > UNCONFIRMED_LIMIT:
            self._unconfirmed.popitem(last=False)

    def _call(
        self, verb: Verb, items: Sequence[Any], then: Callable[[Sequence[Any]], None], *, count: bool = True
    ) -> None:
        def take_note(results: Sequence[Any], error: Exception | None) -> None:
            if error is not None:
                if count:
                    self._events.store_errors += sum(result is None for result in results)
                self._note_outage(error)
            elif self._outage and not self._store.unreachable():
                self._outage = False
                logger.info("store is back")
            then(results)

        self._calls.submit(verb, items, take_note)

    def _note_outage(self, error: Exception) -> None:
        if not self._outage:
            self._outage = True
            self._events.outages += 1
            unexpected = not isinstance(error, StoreError)
            logger.warning(
                "store out of reach: %s: %s", type(error).__name__, error, exc_info=error if unexpected else None
            )
