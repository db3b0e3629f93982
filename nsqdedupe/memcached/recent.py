"""What this process has confirmed a moment ago: its copies need not be asked for again.

"Done" is final, but for `forget`: an operator may have a message treated as never met, and publish it again. So what is
known here is known for a short time only, and `forget` returns no sooner than everybody's is over. What was evicted is
no concern: that it was handled stays true.

The time counts from before memcached was told. So it is over when a second has passed since whatever was told then
could have been forgotten.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Iterable, Sequence

from nsqdedupe.store import Claim

SECONDS = 1.0
"""For how long a message is known at most; for half as long at least, unless there are very many."""

AT_MOST = 50_000
"""Messages of one half of that time, some 100 bytes each."""

now = functools.partial(time.clock_gettime, time.CLOCK_BOOTTIME)
"""Seconds that never go back, those included in which the machine was suspended: others may forget meanwhile."""


class Recent:
    """Fingerprints of messages that memcached has recorded as done, the older and the younger half of them.

    Args:
        clock: seconds that never go back and never stand still.
    """

    def __init__(self, clock: Callable[[], float] = now) -> None:
        self.clock = clock
        self._young: set[bytes] = set()
        self._old: set[bytes] = set()
        self._young_since = self._old_since = clock()

    def note(self, fingerprints: Iterable[bytes], since: float) -> None:
        """These are recorded.

        Args:
            fingerprints: of the messages.

            since: when the clock was read, before memcached was told.
        """
        self._turn()
        if since >= self._young_since:
            self._young.update(fingerprints)
        elif since >= self._old_since:
            self._old.update(fingerprints)

    def strangers(self, claims: Sequence[Claim]) -> Sequence[Claim]:
        """Those of these claims whose message is not known; all of them as they are given, if none is."""
        if not self._young and not self._old:
            return claims
        self._turn()
        young, old = self._young, self._old
        return [claim for claim in claims if claim[0] not in young and claim[0] not in old]

    def forget(self, fingerprints: Iterable[bytes]) -> None:
        """These are known no more."""
        gone = set(fingerprints)
        for known in self._young, self._old:
            known.difference_update(gone)

    def _turn(self) -> None:
        clock = self.clock()
        if clock - self._young_since >= SECONDS / 2 or len(self._young) > AT_MOST:
            self._old, self._old_since = self._young, self._young_since
            self._young, self._young_since = set(), clock
        if clock - self._old_since >= SECONDS:
            self._old, self._old_since = set(), clock
