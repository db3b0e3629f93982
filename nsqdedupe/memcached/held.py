"""What this process knows of the claims it has, and of their buckets: enough to end each in one round trip.

A hint and no more. It says with which token a claim item and a bucket were last read or written; whether the claim is
still ours, and the bucket still the same, the server decides. So it may forget, and is bounded: what is not in it is
looked up.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from typing import Any, NamedTuple

from nsqdedupe.store import Claim

HELD_AT_MOST = 100_000
"""Claims, some 900 bytes each: the oldest go first."""


class Held(NamedTuple):
    """A claim that was ours when it was last heard of."""

    nonce: bytes
    epoch: int
    """The connection that the token is good for; see `nsqdedupe.memcached.link.Link.epoch`."""

    token: bytes
    """Of the claim item, for compare-and-swap."""

    value: bytes
    """The claim item."""

    spot: tuple[Any, bytes, bytes, bytes]
    """Where it is: see `nsqdedupe.memcached.servers.Spot`."""


class Bucket(NamedTuple):
    """A bucket as it was last read or written."""

    epoch: int
    value: bytes
    token: bytes
    """Empty if there was none."""


class Holdings:
    """The claims of this process, by fingerprint, and their buckets.

    The latest delivery of a message is the one that counts. A bucket is known as long as one of its messages is held:
    so what is confirmed here does not make a stranger of it for those that are confirmed later.
    """

    def __init__(self) -> None:
        self._held: dict[bytes, Held] = {}
        self._buckets: dict[bytes, Bucket] = {}
        self.sharers: dict[bytes, int] = {}
        """How many of the claims have each bucket."""
        self.coming: Collection[bytes] = ()
        """Keys of buckets that are being read for claims."""

    def __len__(self) -> int:
        return len(self._held)

    def keep(self, fingerprint: bytes, held: Held, bucket: Bucket) -> None:
        """Note a claim that is ours now, and its bucket as it was read with it."""
        key, all_held = held[4][2], self._held
        if fingerprint not in all_held:
            sharers = self.sharers
            sharers[key] = sharers[key] + 1 if key in sharers else 1
        all_held[fingerprint] = held
        self._buckets[key] = bucket

    def renew(self, fingerprint: bytes, held: Held) -> None:
        """Note that a claim is noted with another token now."""
        self._held[fingerprint] = held

    def of(self, claim: Claim) -> Held | None:
        """What is known of a claim, if it is the one that is noted."""
        held = self._held.get(claim[0])
        return held if held is not None and held[0] == claim[2] else None

    def all_of(self, claims: Sequence[Claim]) -> list[Held | None]:
        """The same for each of these."""
        found = map(self._held.get, [claim[0] for claim in claims])
        return [
            held if held is not None and held[0] == claim[2] else None
            for held, claim in zip(found, claims, strict=True)
        ]

    def bucket(self, key: bytes, epoch: int) -> Bucket | None:
        """What is known of a bucket on this connection."""
        bucket = self._buckets.get(key)
        return bucket if bucket is not None and bucket[0] == epoch else None

    def wrote(self, key: bytes, bucket: Bucket) -> None:
        """A bucket was written; kept if a message of it is held."""
        if key in self.sharers:
            self._buckets[key] = bucket

    def drop(self, claims: Iterable[Claim]) -> None:
        """They are not ours any more. Leaves other deliveries' claims."""
        all_held, buckets, sharers = self._held, self._buckets, self.sharers
        for claim in claims:
            held = all_held.get(claim[0])
            if held is not None and held[0] == claim[2]:
                del all_held[claim[0]]
                key = held[4][2]
                if sharers[key] > 1:
                    sharers[key] -= 1
                else:
                    del sharers[key], buckets[key]

    def forget(self, fingerprint: bytes) -> None:
        """Whoever has it."""
        held = self._held.pop(fingerprint, None)
        if held is not None:
            key, sharers = held.spot[2], self.sharers
            if sharers[key] > 1:
                sharers[key] -= 1
            else:
                del sharers[key], self._buckets[key]

    def trim(self) -> None:
        """Drop the oldest of too many."""
        while len(self._held) > HELD_AT_MOST:
            self.forget(next(iter(self._held)))
