"""What becomes of deliveries in the end: confirmed or given back, and only then answered.

Each way out of the state machine is one method here, which counts the delivery, takes it out of the
registry and tells the port. A copy is finished unprocessed in one place, `Outcomes.duplicates`.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

from nsqdedupe.clock import Clock
from nsqdedupe.delivery import CONFIRMS, Delivery, Outcome, State
from nsqdedupe.ledger import Ledger
from nsqdedupe.metrics import Events
from nsqdedupe.port import Port
from nsqdedupe.registry import Registry
from nsqdedupe.store import Release

MAX_DELAY = 3600.0
"""Nsqd refuses a longer requeue by default."""

AFTER_OTHERS = 1.0
"""Seconds that copies stay away longer than the one whose outcome they wait for."""

# The loops that every message passes look these up once per name, not once per name and member.
_RUNNING, _ANSWERED, _HANDLED = State.RUNNING, State.ANSWERED, Outcome.HANDLED


def jitter() -> float:
    """A little more than nothing, so that copies that go back together do not come back together."""
    return random.uniform(0.1, 0.5)


def _nothing() -> None: ...


class Outcomes:
    """Carries out what became of deliveries.

    Args:
        ledger: where messages are confirmed and given back; None: nothing is de-duplicated.

        registry: who has which message.

        port: answers nsqd.

        events: counters beside the outcomes.

        requeue_delay: seconds, times the message's tries: how long a failed message waits by default.

        clock: seconds that never go back.
    """

    def __init__(
        self,
        ledger: Ledger | None,
        registry: Registry,
        port: Port,
        *,
        events: Events,
        requeue_delay: float,
        clock: Clock,
    ) -> None:
        self._ledger = ledger
        self._registry = registry
        self._port = port
        self._events = events
        self.requeue_delay = requeue_delay
        self._clock = clock
        self.failed_at = float("-inf")
        """When a claim was last given back after a run: what came before may be no redelivery after it."""

    # -- of handler runs -------------------------------------------------------------------------

    def settle(self, answered: Sequence[Delivery]) -> None:
        """Confirm and release what was answered, in one call each; only then answer nsqd."""
        done = [d for d in answered if d.outcome in CONFIRMS and d.claim is not None]
        if not done:
            self._release(answered)
            return
        ledger = self._ledger
        assert ledger is not None  # noqa: S101 - who has a claim has it from a store

        def confirmed(ours: Sequence[bool]) -> None:
            if not all(ours):
                late = [d for d, mine in zip(done, ours, strict=True) if d.protected and not mine]
                self._events.late_confirms += len(late)
            if len(done) < len(answered):
                self._release(answered)
            else:
                self._answer(answered)

        ledger.confirm([delivery.claim for delivery in done if delivery.claim is not None], confirmed)

    def _release(self, answered: Sequence[Delivery]) -> None:
        """Settle on the delay of each run that did not succeed, and give its claim up for that long."""
        releases = []
        failures = False
        for delivery in answered:
            if delivery.outcome in CONFIRMS:
                continue
            failures = True
            failed = delivery.outcome is Outcome.FAILED
            delivery.delay = min(self._delay(delivery), MAX_DELAY)
            if delivery.claim is not None:
                releases.append(Release(delivery.claim, failed, delivery.delay if failed else 0.0))

        def released() -> None:
            if failures:
                self.failed_at = self._clock()
            self._answer(answered)

        self.give_back(releases, released)

    def _answer(self, answered: Sequence[Delivery]) -> None:
        """Answer nsqd for what is recorded now."""
        remove = self._registry.remove
        handled: list[Delivery] = []
        done: list[Delivery] = []
        for delivery in answered:
            if delivery.state is not _RUNNING:
                # Its lease ended and it was let go: a success is recorded, a failure has touched nothing.
                continue
            if delivery.outcome is _HANDLED and delivery.source.open and not delivery.superseded:
                delivery.source.tally.handled += 1
                done += remove(delivery)
                delivery.state = _ANSWERED
                handled.append(delivery)
            else:
                # In the order of the answers: a backoff begins and ends with them.
                if handled:
                    self._port.finish(handled, ran=True)
                    handled = []
                self._end(delivery)
        if handled:
            self._port.finish(handled, ran=True)
        if done:
            self.duplicates(done)

    def _delay(self, delivery: Delivery) -> float:
        if delivery.outcome is Outcome.INVALID:
            return 0.0
        if delivery.delay is not None:
            return delivery.delay
        return self.requeue_delay * (delivery.tries + 1) if delivery.outcome is Outcome.FAILED else 1.0 + jitter()

    def give_back(self, releases: Sequence[Release], then: Callable[[], None] = _nothing) -> None:
        """Give claims up; ``then`` comes when the store was told, or could not be."""
        if self._ledger is not None and releases:
            self._ledger.release(releases, then)
        else:
            then()

    def _end(self, delivery: Delivery) -> None:
        """Answer nsqd for a run, and for those that shared its outcome."""
        outcome = delivery.outcome
        back = outcome is Outcome.FAILED or outcome is Outcome.CANCELLED
        standbys = self._registry.remove(delivery)
        delivery.state = _ANSWERED
        delay = delivery.delay or 0.0
        _count(delivery)
        if delivery.superseded or not delivery.source.open:
            self._port.abandon(delivery)
        elif back:
            self._port.requeue(delivery, delay, ran=outcome is Outcome.FAILED)
        else:
            self._port.finish([delivery], ran=True)
        if outcome in CONFIRMS:
            if standbys:
                self.duplicates(standbys)
        elif back:
            for standby in standbys:
                self.defer(standby, delay + (AFTER_OTHERS if delay else 0.0) + jitter())
        else:
            self._promote(standbys)

    def succeeded(self, delivery: Delivery) -> None:
        """Answer nsqd for a run whose success is recorded, and which never had a claim."""
        delivery.outcome = _HANDLED
        self._end(delivery)

    # -- without a run ---------------------------------------------------------------------------

    def duplicates(self, deliveries: Sequence[Delivery]) -> None:
        """Finish copies of messages that are done."""
        for delivery in deliveries:
            delivery.state = _ANSWERED
            delivery.source.tally.duplicates += 1
        self._port.finish(deliveries, ran=False)

    def defer(self, delivery: Delivery, delay: float) -> None:
        """Send a copy back without a run."""
        delivery.state = _ANSWERED
        delivery.source.tally.deferred += 1
        self._port.requeue(delivery, min(delay, MAX_DELAY), ran=False)

    def defer_group(self, delivery: Delivery, delay: float) -> None:
        """Send a copy back without a run, and those that stood by it."""
        for standby in self._registry.remove(delivery):
            self.defer(standby, delay)
        self.defer(delivery, delay)

    def abandon(self, delivery: Delivery) -> None:
        """Answer nothing: nsqd gives it out again, or has done so already."""
        delivery.state = _ANSWERED
        delivery.source.tally.unanswered += 1
        self._port.abandon(delivery)

    def abandon_owner(self, delivery: Delivery) -> None:
        """The same for one that others stand by: the first of them asks for the message at the next poll."""
        standbys = self._registry.remove(delivery)
        self.abandon(delivery)
        self._promote(standbys)

    def let_go(self, delivery: Delivery) -> None:
        """It has the message but will not be handled: another copy may have it at once."""
        if delivery.claim is not None:
            self.give_back([Release(delivery.claim)])
        self.abandon_owner(delivery)

    def _promote(self, standbys: Sequence[Delivery]) -> None:
        if standbys:
            self._registry.inherit(standbys)
            self._port.wake()


def _count(delivery: Delivery) -> None:
    tally = delivery.source.tally
    outcome = delivery.outcome
    if not delivery.source.open and not delivery.superseded:
        tally.unanswered += 1
    elif outcome is Outcome.HANDLED:
        tally.handled += 1
    elif outcome is Outcome.GIVEN_UP:
        tally.given_up += 1
    elif outcome is Outcome.INVALID:
        tally.invalid += 1
    else:
        tally.failed += 1
