"""Which delivery has each message in this process, who stands by it, and who waits for an owner elsewhere."""

from __future__ import annotations

import os
import struct
from collections.abc import Callable, Sequence

from nsqdedupe.clock import Clock
from nsqdedupe.delivery import Delivery, State
from nsqdedupe.store import Claim
from nsqdedupe.waiting import Waiting

_WAITING = State.WAITING
_nonce = struct.Struct(">8sQ").pack
_new_claim = tuple.__new__  # half the time of a named tuple's own constructor


class Registry:
    """The messages in hand here. Nothing in it asks the store or answers nsqd.

    Args:
        clock: seconds that never go back.
    """

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self.owners: dict[bytes, Delivery] = {}
        """By fingerprint: the delivery that has the message or asks for it. Others stand by it."""
        self.waiting = Waiting(clock)
        """Those owners whose message is being handled elsewhere."""
        self._incarnation = os.urandom(8)
        self._serial = 0

    def claims_for(self, deliveries: Sequence[Delivery], *, poll: bool) -> list[Claim]:
        """A claim for each, in order; ``poll`` as in `Claim`."""
        incarnation, serial = self._incarnation, self._serial
        claims = []
        for delivery in deliveries:
            serial += 1
            nonce = _nonce(incarnation, serial)
            claim = (delivery.fingerprint, delivery.owner, nonce, delivery.source.lease, poll)
            claims.append(_new_claim(Claim, claim))
        self._serial = serial
        return claims

    def join(self, owner: Delivery, delivery: Delivery) -> Delivery | None:
        """Let a delivery stand by the one that has its message; returns the older one of its copy that it replaces."""
        if owner.standbys is None:
            owner.standbys = {}
        copy = delivery.owner  # which is put together each time
        older = owner.standbys.pop(copy, None)
        owner.standbys[copy] = delivery
        if older is None and owner.state is _WAITING:
            self.waiting.copies += 1
        return older

    def part(self, owner: Delivery, which: Callable[[Delivery], bool]) -> list[Delivery]:
        """Take some of those out that stand by a delivery, and return them."""
        standbys = owner.standbys
        gone = [standby for standby in (standbys or {}).values() if which(standby)]
        for standby in gone:
            assert standbys is not None  # noqa: S101 - they were in it
            del standbys[standby.owner]
        if owner.state is _WAITING:
            self.waiting.copies -= len(gone)
        return gone

    def inherit(self, standbys: Sequence[Delivery]) -> None:
        """Their owner left without an outcome: the first asks for the message from now on, the others stand by it."""
        heir, *others = standbys
        fingerprint = heir.fingerprint
        assert fingerprint is not None  # noqa: S101 - what has no fingerprint never stands by
        heir.standbys = {other.owner: other for other in others} or None
        heir.claimed_at = self._clock() - heir.source.lease  # nobody is known to have it
        (heir.claim,) = self.claims_for([heir], poll=True)
        self.owners[fingerprint] = heir
        self.waiting.add(heir)

    def remove(self, delivery: Delivery) -> list[Delivery]:
        """Take a delivery out; returns those that stood by it, which are the caller's business now."""
        fingerprint = delivery.fingerprint
        if fingerprint is not None and self.owners.get(fingerprint) is delivery:
            del self.owners[fingerprint]
        if delivery.state is _WAITING:
            self.waiting.remove(delivery)
        standbys = delivery.standbys
        if standbys is None:
            return []
        delivery.standbys = None
        return list(standbys.values())


def lease_left(delivery: Delivery, now: float) -> float:
    """Seconds until the lease of its message ends, whoever has it."""
    return max(0.0, delivery.claimed_at + delivery.source.lease - now)


def poll_from_now_on(delivery: Delivery) -> None:
    """It asks again, maybe for a message that failed meanwhile: it shall not end the hold."""
    assert delivery.claim is not None  # noqa: S101 - it has asked before
    delivery.claim = delivery.claim._replace(poll=True)
