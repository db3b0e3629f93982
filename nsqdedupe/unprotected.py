"""The way of a message to its handler where nothing is de-duplicated: every copy is handled."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence

from nsqdedupe.clock import Clock
from nsqdedupe.delivery import Care, Delivery, State
from nsqdedupe.metrics import Events
from nsqdedupe.together import RunTogether

_ARRIVED, _READY, _TRIES = State.ARRIVED, State.READY, Care.TRIES


class Unprotected:
    """Runs all that is ready.

    Args:
        ready: deliveries whose turn is to come, in order.

        events: counts what is handled unprotected.

        clock: seconds that never go back.

        max_tries: failed handler runs after which a message is given up; 0: never.

        run_together: runs all that is ready in one loop.

        start: starts one.

        adopt: sees to one whose handler was called and has not succeeded in one go.

        settle: carries out what handlers have answered; whether there was anything.
    """

    def __init__(
        self,
        ready: deque[Delivery],
        events: Events,
        clock: Clock,
        *,
        max_tries: int,
        run_together: RunTogether,
        start: Callable[[Delivery, float], None],
        adopt: Callable[[Delivery, float], None],
        settle: Callable[[], bool],
    ) -> None:
        self._ready = ready
        self._events = events
        self._clock = clock
        self._max_tries = max_tries
        self._run_together = run_together
        self._start = start
        self._adopt = adopt
        self._settle = settle
        self._together = False
        """All that waits arrived together, and none of it was given out too often."""

    def take(self, deliveries: Sequence[Delivery]) -> None:
        """All of them are ready."""
        self._events.unprotected += len(deliveries)
        most = max(delivery.attempts for delivery in deliveries)
        if most > 1:
            # Where nothing counts the message's tries, nsqd's count of the copy's attempts has to do.
            for delivery in deliveries:
                delivery.tries = delivery.attempts - 1
        self._together = not self._ready and (not self._max_tries or most <= self._max_tries)
        self._ready.extend(deliveries)

    def run(self, until: float) -> None:
        """Start what is ready until the clock says ``until``; one at least."""
        ready, clock = self._ready, self._clock
        while ready:
            now = clock()
            waiting = len(ready)
            if self._together and self._may_all_be_run(now):
                left = self._run_together(_record_nothing, until)
                if left is not None:
                    _mark(left)
                    self._adopt(left, now)
            self._together = False
            if len(ready) == waiting:
                delivery = ready.popleft()
                if delivery.state is _ARRIVED:
                    _mark(delivery)
                    delivery.state = _READY
                self._start(delivery, now)
            self._settle()
            if clock() >= until:
                break

    def _may_all_be_run(self, now: float) -> bool:
        """Whether their connection is there, and nsqd does not give them out again soon."""
        first = self._ready[0]
        return first.source.open and now - first.since <= first.source.ours_for


def _mark(delivery: Delivery) -> None:
    delivery.care = _TRIES
    delivery.protected = False


def _record_nothing(*_: object) -> None: ...
