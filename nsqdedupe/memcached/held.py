"""What this process knows of the claims it has: enough to end each of them in one round trip.

A hint and no more. It says with which token a claim item and a bucket were last read; whether the claim is still ours
the server decides, by the token or by the nonce. So it may forget, and is bounded: who is not in it is looked up.
"""

from __future__ import annotations

from typing import NamedTuple

from nsqdedupe.store import Claim

HELD_AT_MOST = 100_000
"""Claims, some 500 bytes each: the oldest go first."""


class Held(NamedTuple):
    """A claim that was ours when it was last heard of."""

    nonce: bytes
    epoch: int
    """The connection that the tokens are good for; see `nsqdedupe.memcached.link.Link.epoch`."""

    token: bytes
    """Of the claim item, for compare-and-swap."""

    value: bytes
    """The claim item."""

    bucket: bytes | None
    """What the bucket held; None if it is not known."""

    bucket_token: bytes
    """Empty if there was no bucket."""


class Holdings:
    """The claims of this process, by fingerprint. The latest delivery of a message is the one that counts."""

    def __init__(self) -> None:
        self._held: dict[bytes, Held] = {}

    def __len__(self) -> int:
        return len(self._held)

    def keep(self, fingerprint: bytes, held: Held) -> None:
        """Note a claim that is ours now."""
        self._held[fingerprint] = held

    def of(self, claim: Claim) -> Held | None:
        """What is known of a claim, if it is the one that is noted."""
        held = self._held.get(claim.fingerprint)
        return held if held is not None and held.nonce == claim.nonce else None

    def drop(self, claim: Claim) -> None:
        """It is not ours any more. Leaves another delivery's."""
        if self.of(claim) is not None:
            del self._held[claim.fingerprint]

    def forget(self, fingerprint: bytes) -> None:
        """Whoever has it."""
        self._held.pop(fingerprint, None)

    def trim(self) -> None:
        """Drop the oldest of too many."""
        while len(self._held) > HELD_AT_MOST:
            del self._held[next(iter(self._held))]
