"""What time and lost connections do to the messages in hand."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from nsqdedupe.clock import Clock
from nsqdedupe.delivery import Delivery, Source, State
from nsqdedupe.ledger import Ledger
from nsqdedupe.outcomes import AFTER_OTHERS, Outcomes, jitter
from nsqdedupe.registry import Registry, lease_left

MAX_LEASE = 3600.0
"""How long a running coroutine keeps its message."""

OLD_STANDBY = 0.8
"""Share of its message timeout after which a standby goes back, before nsqd gives it out again."""

OLD_WAITING = 0.5
"""The same for a copy whose owner is elsewhere: the store may need the rest."""

SWEEP_EVERY = 1.0
"""Seconds between looks at what is in hand; less where a message timeout is short."""


def _nothing(_: object) -> None: ...


class Keeper:
    """Keeps leases alive, sends back who waited too long, and clears up behind connections.

    Args:
        ledger: where leases are extended; None: nothing is de-duplicated.

        registry: who has which message.

        outcomes: carries out what becomes of them.

        clock: seconds that never go back.
    """

    def __init__(self, ledger: Ledger | None, registry: Registry, outcomes: Outcomes, clock: Clock) -> None:
        self._ledger = ledger
        self._registry = registry
        self._outcomes = outcomes
        self._clock = clock
        self.unclaimed: set[Delivery] = set()
        """Those that run outside the registry: they have no fingerprint, or nothing is de-duplicated."""
        self._sweep_every = SWEEP_EVERY
        self._swept_at = clock()

    def tick(self) -> None:
        """Look after leases, and after copies that waited too long; most calls find that it is not time yet."""
        now = self._clock()
        if now - self._swept_at < self._sweep_every:
            return
        self._swept_at = now
        if self._ledger is not None:
            self._ledger.catch_up()
        running: list[Delivery] = []
        for delivery in list(self._registry.owners.values()):
            if delivery.standbys or delivery.state is State.WAITING:
                self._send_back_old(delivery, now)
            if delivery.state is State.RUNNING and delivery.outcome is None:
                age = now - delivery.claimed_at
                if _is_running(delivery, now):
                    if age > delivery.source.lease / 2:
                        running.append(delivery)
                elif age >= delivery.source.lease:
                    self._outcomes.let_go(delivery)
        if running:
            # Who lost its claim runs on: its success will be recorded, its failure will touch nothing.
            self.extend(running, now)
        self._let_unclaimed_go(now)

    def extend(
        self, deliveries: Iterable[Delivery], now: float, then: Callable[[list[Delivery]], None] = _nothing
    ) -> None:
        """Let leases start anew; ``then`` gets those whose claim is another's now.

        Without an answer they are taken to be ours, and coroutines that run are seen to again at the next look.
        """
        asked = [delivery for delivery in deliveries if delivery.claim is not None]
        before = [delivery.claimed_at for delivery in asked]
        claims = [delivery.claim for delivery in asked if delivery.claim is not None]
        assert self._ledger is not None  # noqa: S101 - who has a claim has it from a store
        for delivery in asked:
            delivery.claimed_at = now

        def extended(ours: Sequence[bool | None]) -> None:
            for delivery, mine, claimed_at in zip(asked, ours, before, strict=True):
                if mine is None and delivery.runs_since is not None:
                    delivery.claimed_at = claimed_at
            then([delivery for delivery, mine in zip(asked, ours, strict=True) if mine is False])

        self._ledger.extend(claims, extended)

    def _let_unclaimed_go(self, now: float) -> None:
        """Count as unanswered what has no claim whose lease could end."""
        for delivery in list(self.unclaimed):
            over = now - delivery.claimed_at >= delivery.source.lease
            if over and delivery.outcome is None and not _is_running(delivery, now):
                self.unclaimed.remove(delivery)
                self._outcomes.abandon(delivery)

    def _send_back_old(self, owner: Delivery, now: float) -> None:
        """Requeue who has waited so long that nsqd would soon give it out again."""
        waiting = owner.state is State.WAITING
        share = OLD_WAITING if waiting else OLD_STANDBY
        delay = lease_left(owner, now) + AFTER_OTHERS + jitter()
        for old in self._registry.part(owner, lambda copy: now - copy.since > copy.source.msg_timeout * share):
            self._outcomes.defer(old, delay)
        if waiting and now - owner.since > owner.source.msg_timeout * share:
            self._outcomes.defer_group(owner, delay)

    def opened(self, source: Source) -> None:
        """A connection is there."""
        self._sweep_every = min(self._sweep_every, source.msg_timeout / 8)

    def lost(self, source: Source, ready: Iterable[Delivery]) -> None:
        """A connection is gone, and with it every answer that it still owed. Handlers that run go on.

        Args:
            source: the connection.

            ready: deliveries of all connections whose turn has not come.
        """
        source.open = False
        for delivery in list(ready):
            if delivery.source is source and delivery.state in (State.READY, State.ARRIVED):
                self._outcomes.let_go(delivery)
        for delivery in list(self._registry.owners.values()):
            if delivery.standbys:
                for standby in self._registry.part(delivery, lambda copy: copy.source is source):
                    self._outcomes.abandon(standby)
            if delivery.source is source and delivery.state is State.WAITING:
                self._outcomes.abandon_owner(delivery)

    def drain(self) -> None:
        """Send back who waits for an owner elsewhere: this reader is about to stop."""
        now = self._clock()
        for delivery in self._registry.waiting.all():
            self._outcomes.defer_group(delivery, lease_left(delivery, now) + AFTER_OTHERS + jitter())


def _is_running(delivery: Delivery, now: float) -> bool:
    """Whether its handler is known to run still; of others nobody knows whether they will ever be answered."""
    return delivery.runs_since is not None and now - delivery.runs_since < MAX_LEASE
