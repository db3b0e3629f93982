"""The short way through the state machine, for handlers that succeed in one go, over a store in this process.

    look up (all that came together) -> run -> record -> FIN, message by message

No claim is made: between look-up and record nothing else runs on this thread, so nobody could see it. Whoever does
not succeed in one go (a coroutine that waits, a failure, a handler that answers later) gets its claim when its handler
returns, before anybody can ask for the message. Whatever there is more to know of a message, that another copy is
being handled, that it failed before, leads to the long way, `nsqdedupe.deduper`.

What comes while nothing else waits runs in one loop, in the port, without a further look at each. What waits for its
turn was looked up when it came, and its message may be done by then: it is looked up again.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence

from nsqdedupe.clock import Clock
from nsqdedupe.delivery import Delivery, Outcome, State
from nsqdedupe.outcomes import Outcomes
from nsqdedupe.port import Port
from nsqdedupe.registry import Registry
from nsqdedupe.store import IS_DONE, Direct
from nsqdedupe.together import RunTogether

_ARRIVED, _RUNNING = State.ARRIVED, State.RUNNING

WORTH_IT = 8
"""Handlers that must succeed in one loop before it is begun again: to begin takes a look at all that waits."""

UNKNOWN = -1
"""In place of a number of changes: nothing that waits is known not to be done."""


class Shortcut:
    """Runs what it can, and leaves the rest to the long way.

    Args:
        direct: the store.

        ready: deliveries whose turn is to come, in order. Those that have just arrived are looked at here.

        registry: who has which message.

        outcomes: answers nsqd.

        port: calls handlers.

        clock: seconds that never go back.

        ask_for: the long way, for deliveries that nobody has asked the store about.

        run_together: runs all that is ready in one loop.

        start: the long way, for those that have a claim.

        settle: carries out what handlers have answered; whether there was anything.

        answer: takes an answer in a handler's place.
    """

    def __init__(
        self,
        direct: Direct,
        ready: deque[Delivery],
        registry: Registry,
        outcomes: Outcomes,
        port: Port,
        clock: Clock,
        *,
        ask_for: Callable[[Sequence[Delivery]], None],
        run_together: RunTogether,
        start: Callable[[Delivery, float], None],
        settle: Callable[[], bool],
        answer: Callable[[Delivery, Outcome], None],
    ) -> None:
        self._direct = direct
        self._ready = ready
        self._registry = registry
        self._outcomes = outcomes
        self._port = port
        self._clock = clock
        self._ask_for = ask_for
        self._run_together = run_together
        self._start = start
        self._settle = settle
        self._answer = answer
        self._looked_up_at = UNKNOWN
        """How many changes the store had seen when the first that waits, or one before it, was looked up."""
        self._together = False
        """All that waits arrived together, and is known not to be done if the store has seen no change since."""

    def sift(self, fingerprints: Sequence[bytes]) -> Sequence[int] | None:
        """The places of these messages, `IS_DONE` for those that are done; None if that cannot be told now."""
        self._settle()
        try:
            return self._direct.places(fingerprints)
        except Exception:  # noqa: BLE001 - whatever it is, the long way meets it too, and tells of it
            return None

    def take(self, deliveries: Sequence[Delivery], *, sifted: bool) -> None:
        """All is ready, but for copies of what is done; what it is shows when it is its turn.

        Args:
            deliveries: one or more, all of one source and read at one time.

            sifted: none of them was done a moment ago, and each knows its place.
        """
        known = sifted or self._look_up(deliveries)
        if not self._ready:
            self._together = known
            self._looked_up_at = self._direct.changes() if known else UNKNOWN
        else:
            self._together = False
            if not known:
                self._looked_up_at = UNKNOWN
        self._ready.extend(deliveries if sifted else [d for d in deliveries if d.state is _ARRIVED])

    def _look_up(self, deliveries: Sequence[Delivery]) -> bool:
        """Note the place of each, and finish what is done; False if that cannot be told."""
        fingerprints = [d.fingerprint for d in deliveries if d.fingerprint is not None]
        places = self.sift(fingerprints) if len(fingerprints) == len(deliveries) else None
        if places is None:
            return False
        for delivery, place in zip(deliveries, places, strict=True):
            delivery.place = place
        done = [delivery for delivery in deliveries if delivery.place == IS_DONE]
        if done:
            self._outcomes.duplicates(done)
        return True

    def look_again(self) -> None:
        """Nothing that waits for its turn is known not to be done."""
        self._looked_up_at = UNKNOWN
        self._together = False

    def run(self, until: float) -> None:
        """Start what is ready until the clock says ``until``; one at least."""
        self._settle()
        ready, clock = self._ready, self._clock
        while ready:
            now = clock()
            if not (self._together and self._all_free(now) and self._run_on(until)):
                self._together = False
                self._run_one(ready.popleft(), now)
                self._settle()
            if clock() >= until:
                break

    def _all_free(self, now: float) -> bool:
        """Whether nothing is known of any that waits but its place, and no two are copies of one message."""
        direct, owners, ready = self._direct, self._registry.owners, self._ready
        fingerprints = {delivery.fingerprint for delivery in ready}
        first = ready[0]
        return (
            first.source.open
            and self._looked_up_at == direct.changes()
            and len(fingerprints) == len(ready)
            and (not owners or owners.keys().isdisjoint(fingerprints))
            and (not direct.known or direct.known.isdisjoint(fingerprints))
            and now - first.since <= first.source.ours_for
        )

    def _run_on(self, until: float) -> bool:
        """Run what waits in one loop, as far as that goes; False if it does not."""
        waiting = len(self._ready)
        left = self._run_together(self._direct.record, until)
        taken = waiting - len(self._ready)
        # What was recorded is no other's message: no two here are copies of one.
        self._looked_up_at = self._direct.changes()
        if left is not None:
            self._own(left)
            self._together = taken > WORTH_IT
            self._settle()
        return taken > 0

    def _run_one(self, delivery: Delivery, now: float) -> None:
        """Start one, after a look at what has become of its message."""
        direct, fingerprint = self._direct, delivery.fingerprint
        if delivery.state is not _ARRIVED:
            self._start(delivery, now)
        elif fingerprint is None or self._is_known(delivery, fingerprint):
            self._ask_for([delivery])
        elif delivery.place == IS_DONE:
            pass  # it is finished
        elif now - delivery.since > delivery.source.ours_for:
            # nsqd is about to give it out again: that delivery will be handled.
            self._outcomes.let_go(delivery)
        else:
            delivery.state = _RUNNING
            if not self._port.run(delivery):
                self._own(delivery)
                return
            try:
                direct.record(fingerprint, delivery.place)
            except Exception:  # noqa: BLE001 - the long way meets it too, and makes up for it
                self._answer(delivery, Outcome.HANDLED)
                self._own(delivery)
            else:
                self._outcomes.succeeded(delivery)

    def _is_known(self, delivery: Delivery, fingerprint: bytes) -> bool:
        """Whether there is more to know of its message than its place, or that cannot be told."""
        direct = self._direct
        if fingerprint in self._registry.owners or fingerprint in direct.known:
            return True
        return self._looked_up_at != direct.changes() and not self._look_up([delivery])

    def _own(self, delivery: Delivery) -> None:
        """Its handler has not succeeded in one go: from now on its message has an owner, with a claim."""
        fingerprint = delivery.fingerprint
        assert fingerprint is not None  # noqa: S101 - else it is not here
        (delivery.claim,) = self._registry.claims_for([delivery], poll=False)
        delivery.claimed_at = self._clock()
        self._direct.claim(delivery.claim)
        self._registry.owners[fingerprint] = delivery
