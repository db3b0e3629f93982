"""Looking on: what de-duplication would have done, while nothing is de-duplicated.

Every delivery is handled. The observer asks the store as if they were to be de-duplicated, counts, and decides
nothing: that another copy has the message, or failed, keeps no delivery waiting.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from nsqdedupe.clock import Clock
from nsqdedupe.delivery import CONFIRMS, Delivery
from nsqdedupe.ledger import Ledger
from nsqdedupe.metrics import Events
from nsqdedupe.registry import Registry
from nsqdedupe.store import Answer, Release, Verdict


class Observer:
    """Counts the deliveries that would have been finished unprocessed, each once.

    Args:
        ledger: where messages are looked up, and confirmed when a handler succeeds.

        events: has the counter.

        clock: seconds that never go back.
    """

    def __init__(self, ledger: Ledger, *, events: Events, clock: Clock) -> None:
        self._ledger = ledger
        self._events = events
        self._registry = Registry(clock)
        self._answered: list[Delivery] = []
        self._recording = False

    def arrived(self, deliveries: Sequence[Delivery]) -> None:
        """Look up which of these are copies of messages that are done. They are of one source."""
        asked = [delivery for delivery in deliveries if delivery.fingerprint is not None]
        for delivery, claim in zip(asked, self._registry.claims_for(asked, poll=True), strict=True):
            delivery.observed = claim
        self._count_done(asked, lambda _: None)

    def answered(self, deliveries: Sequence[Delivery]) -> None:
        """Confirm what was handled. Who succeeded after another copy would have stood by, and been finished."""
        watched = [delivery for delivery in deliveries if delivery.observed is not None]
        if watched:
            self._answered += watched
            if not self._recording:
                self._record()

    def _record(self) -> None:
        """Look up what was answered, then confirm it; not before what was answered earlier is confirmed."""
        watched, self._answered = self._answered, []
        claims = [delivery.observed for delivery in watched if delivery.observed is not None]
        self._recording = True

        def confirm(handled: Sequence[Delivery]) -> None:
            # Of copies that were handled in the same moment, all but one.
            new = {delivery.fingerprint for delivery in handled}
            self._events.observed += len(handled) - len(new)
            failed = [Release(claim) for claim in claims if claim.fingerprint not in new]
            if failed:
                self._ledger.release(failed, lambda: None)
            done = [claim for claim in claims if claim.fingerprint in new]
            if done:
                self._ledger.confirm(done, lambda _: recorded())
            else:
                recorded()

        def recorded() -> None:
            self._recording = False
            if self._answered:
                self._record()

        self._count_done([delivery for delivery in watched if delivery.outcome in CONFIRMS], confirm)

    def _count_done(self, deliveries: Sequence[Delivery], then: Callable[[list[Delivery]], None]) -> None:
        """Count those whose message is done, and look at them no more; ``then`` gets the others."""
        if not deliveries:
            then([])
            return
        ledger = self._ledger

        def count(answers: Sequence[Answer | None]) -> None:
            others = []
            for delivery, answer in zip(deliveries, answers, strict=True):
                fingerprint = delivery.fingerprint
                known = answer is not None and answer.verdict is Verdict.DONE
                if delivery.observed is None:
                    continue  # counted while the store was asked
                if known or (fingerprint is not None and ledger.knows(fingerprint)):
                    self._events.observed += 1
                    delivery.observed = None
                else:
                    others.append(delivery)
            then(others)

        ledger.claim([delivery.observed for delivery in deliveries if delivery.observed is not None], count)
