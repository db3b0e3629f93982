"""The short way through the state machine, for handlers that succeed in one go, over a store in this process.

    look up (all that came together) -> run -> record, message by message -> FIN

No claim is made: between look-up and record nothing else runs on this thread, so nobody could see it. Whoever does
not succeed in one go (a coroutine, a failure, a handler that answers later) gets its claim when its handler returns,
before anybody can ask for the message. Whatever there is more to know of a message, that another copy is being
handled, that it failed before, leads to the long way, `nsqdedupe.deduper`.

What waits for its turn was looked up when it came, and its message may be done by then. So what is recorded meanwhile
is remembered here; and if anything else was recorded, by a claim or by somebody else, what waits is looked up again.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable, Sequence

from nsqdedupe.clock import Clock
from nsqdedupe.delivery import Delivery, Outcome, State
from nsqdedupe.outcomes import Outcomes
from nsqdedupe.port import Port
from nsqdedupe.registry import Registry
from nsqdedupe.store import Direct

RECORDED_AT_MOST = 10_000
"""Messages that are remembered as recorded; then those that wait are looked up again instead."""

_ARRIVED, _RUNNING = State.ARRIVED, State.RUNNING


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
        self._start = start
        self._settle = settle
        self._answer = answer
        self._succeeded: list[Delivery] = []
        """Recorded, and not answered yet."""
        self._recorded: set[bytes] = set()
        """What was recorded here since the others in the queue were looked up."""
        self._changes = direct.changes()
        self._stale = 0
        """How many at the head of the queue must be looked up again."""

    def sift(self, fingerprints: Sequence[bytes]) -> Sequence[bool] | None:
        """Which of these messages are done; None if that cannot be told now."""
        self._settle()
        self._notice_changes()
        try:
            return self._direct.seen(fingerprints)
        except Exception:  # noqa: BLE001 - whatever it is, the long way meets it too, and tells of it
            return None

    def take(self, deliveries: Sequence[Delivery], *, sifted: bool) -> None:
        """All is ready, but for copies of what is done; what it is shows when it is its turn.

        Args:
            deliveries: one or more, all of one source and read at one time.

            sifted: none of them was done a moment ago.
        """
        if not sifted:
            fingerprints = [d.fingerprint for d in deliveries if d.fingerprint is not None]
            seen = self.sift(fingerprints) if len(fingerprints) == len(deliveries) else None
            if seen is None:
                self._ready.extend(deliveries)
                self.look_again()
                return
            done = list(itertools.compress(deliveries, seen))
            if done:
                self._outcomes.duplicates(done)
                deliveries = [delivery for delivery in deliveries if delivery.state is _ARRIVED]
        self._ready.extend(deliveries)

    def answer_succeeded(self) -> None:
        """Answer nsqd for what is recorded."""
        if self._succeeded:
            succeeded = self._succeeded.copy()
            self._succeeded.clear()
            self._outcomes.succeeded(succeeded)

    def look_again(self) -> None:
        """Nothing that waits for its turn is known not to be done."""
        self._stale = len(self._ready)

    def run(self, until: float) -> None:
        """Start what is ready until the clock says ``until``; one at least."""
        self._settle()
        self._notice_changes()
        ready, clock, run, record = self._ready, self._clock, self._port.run, self._direct.record
        recorded, owners, known = self._recorded, self._registry.owners, self._direct.known
        succeeded = self._succeeded
        now = clock()
        try:
            while ready:
                delivery = ready.popleft()
                fingerprint = delivery.fingerprint
                if (
                    delivery.state is _ARRIVED
                    and not self._stale
                    and fingerprint is not None
                    and fingerprint not in owners
                    and fingerprint not in known
                    and fingerprint not in recorded
                    and now - delivery.since <= delivery.source.ours_for
                ) or self._is_free(delivery, fingerprint, now):
                    delivery.state = _RUNNING
                    assert fingerprint is not None  # noqa: S101 - else it is not free
                    if run(delivery):
                        try:
                            record(fingerprint)
                        except Exception:  # noqa: BLE001 - the long way meets it too, and makes up for it
                            self._own(delivery, fingerprint)
                            self._answer(delivery, Outcome.HANDLED)
                        else:
                            recorded.add(fingerprint)
                            succeeded.append(delivery)
                            now = clock()
                            if now < until:
                                continue
                            break
                    else:
                        self._own(delivery, fingerprint)
                if self._settle():
                    self.look_again()
                now = clock()
                if now >= until:
                    break
        finally:
            self.answer_succeeded()
            self._changes = self._direct.changes()
            if not ready or len(recorded) > RECORDED_AT_MOST:
                recorded.clear()
                self.look_again()

    def _is_free(self, delivery: Delivery, fingerprint: bytes | None, now: float) -> bool:
        """Whether it may be run at once. If not, what is to become of it is seen to here."""
        if self._stale:
            self._stale -= 1
            self._look_up(delivery)
        if delivery.state is not _ARRIVED:
            self._start(delivery, now)
        elif fingerprint is None or fingerprint in self._registry.owners or fingerprint in self._direct.known:
            self._ask_for([delivery])
        elif fingerprint in self._recorded:
            self._outcomes.duplicates([delivery])
        elif now - delivery.since > delivery.source.ours_for:
            # nsqd is about to give it out again: that delivery will be handled.
            self._outcomes.let_go(delivery)
        else:
            return True
        return False

    def _look_up(self, delivery: Delivery) -> None:
        if delivery.state is _ARRIVED and delivery.fingerprint is not None:
            try:
                if self._direct.seen([delivery.fingerprint])[0]:
                    self._outcomes.duplicates([delivery])
            except Exception:  # noqa: BLE001 - see take
                self._ask_for([delivery])

    def _own(self, delivery: Delivery, fingerprint: bytes) -> None:
        """Its handler has not succeeded in one go: from now on its message has an owner, with a claim."""
        (delivery.claim,) = self._registry.claims_for([delivery], poll=False)
        delivery.claimed_at = self._clock()
        self._direct.claim(delivery.claim)
        self._registry.owners[fingerprint] = delivery

    def _notice_changes(self) -> None:
        """What was recorded since, by a claim or by somebody else, may be what waits for its turn."""
        changes = self._direct.changes()
        if changes != self._changes:
            self._changes = changes
            self.look_again()
