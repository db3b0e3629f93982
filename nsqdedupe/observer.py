"""Looking on: what de-duplication would have done, while nothing is de-duplicated.

Every delivery is handled. The observer asks the store as if they were to be de-duplicated, counts, and decides
nothing: that another copy has the message, or failed, keeps no delivery waiting.
"""

from __future__ import annotations

from collections.abc import Sequence

from nsqdedupe.clock import Clock
from nsqdedupe.delivery import CONFIRMS, Delivery
from nsqdedupe.ledger import Ledger
from nsqdedupe.metrics import Events
from nsqdedupe.registry import Registry
from nsqdedupe.store import Release, Verdict


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

    def arrived(self, deliveries: Sequence[Delivery]) -> None:
        """Look up which of these are copies of messages that are done. They are of one source."""
        asked = [delivery for delivery in deliveries if delivery.fingerprint is not None]
        for delivery, claim in zip(asked, self._registry.claims_for(asked, poll=True), strict=True):
            delivery.observed = claim
        self._count_done(asked)

    def answered(self, deliveries: Sequence[Delivery]) -> None:
        """Confirm what was handled. Who succeeded after another copy would have stood by, and been finished."""
        watched = [delivery for delivery in deliveries if delivery.observed is not None]
        claims = [delivery.observed for delivery in watched if delivery.observed is not None]
        handled = self._count_done([delivery for delivery in watched if delivery.outcome in CONFIRMS])
        # Of copies that were handled in the same moment, all but one.
        new = {delivery.fingerprint for delivery in handled}
        self._events.observed += len(handled) - len(new)
        done = [claim for claim in claims if claim.fingerprint in new]
        if done:
            self._ledger.confirm(done)
        if len(done) < len(claims):
            self._ledger.release([Release(claim) for claim in claims if claim.fingerprint not in new])

    def _count_done(self, deliveries: Sequence[Delivery]) -> list[Delivery]:
        """Count those whose message is done, and look at them no more; returns the others."""
        if not deliveries:
            return []
        ledger = self._ledger
        answers = ledger.claim([delivery.observed for delivery in deliveries if delivery.observed is not None])
        others = []
        for number, delivery in enumerate(deliveries):
            fingerprint = delivery.fingerprint
            known = answers is not None and answers[number].verdict is Verdict.DONE
            if known or (fingerprint is not None and ledger.knows(fingerprint)):
                self._events.observed += 1
                delivery.observed = None
            else:
                others.append(delivery)
        return others
