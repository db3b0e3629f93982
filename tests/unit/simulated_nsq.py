"""What the simulation is made of: messages with their runs, nsqds, connections, and a store that keeps watch.

An nsqd keeps to what nsqd really does: it checks who answers, not which delivery; it gives a message out
again only after its timeout, also when its consumer has gone; an answer that comes late is still taken if
nobody else has got the message since.
"""

from __future__ import annotations

import enum
import hashlib
import math
from collections.abc import Callable, Sequence

from nsqdedupe.delivery import Delivery, Source
from nsqdedupe.metrics import Tally
from nsqdedupe.store import Claim, Release
from nsqdedupe.stores.embedded import MemoryStore
from nsqdedupe.testing import ManualClock

MSG_TIMEOUT = 10.0


class Run(enum.Enum):
    """What a handler does when it is called."""

    SUCCEED = enum.auto()
    SLOW = enum.auto()
    FAIL = enum.auto()
    FAIL_AT_ONCE = enum.auto()
    CANCEL = enum.auto()
    INVALID = enum.auto()
    LATER = enum.auto()
    COROUTINE = enum.auto()
    NEVER = enum.auto()


class Message:
    """What was published once; its copies share it."""

    def __init__(self, name: str, runs: Sequence[Run], hook_failures: int, protected: bool) -> None:
        self.name = name
        self.runs = list(runs)
        """What its handler will do, run by run; then it succeeds."""
        self.hook_failures = hook_failures
        """How often `giving_up` will fail for it."""
        self.fingerprint = hashlib.blake2b(name.encode(), digest_size=16).digest() if protected else None
        self.successes = 0
        self.failures = 0
        self.given_up = False
        self.invalid = False
        self.hold: tuple[float, Copy] | None = None
        """Until when it is held since its last failure, and for which copy."""
        self.disturbed = not protected
        """Something happened to it after which it may be handled twice."""

    @property
    def done(self) -> bool:
        return self.successes > 0 or self.given_up

    @property
    def over(self) -> bool:
        """Done, or one copy was not wanted; the others are looked at for themselves."""
        return self.done or self.invalid


class Copy:
    """A message on one nsqd."""

    def __init__(self, message: Message, nsqd: Nsqd) -> None:
        self.message = message
        self.id = f"{nsqd.name}/{message.name}".encode()
        self.attempts = 0
        self.client: Link | None = None
        """Whose it is, while in flight."""
        self.until = -math.inf
        """When it may be given out."""


class Nsqd:
    """One nsqd with one channel."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.alive = True
        self.copies: dict[bytes, Copy] = {}
        self.finished: list[Copy] = []
        self.links: list[Link] = []

    def answer(self, link: Link, copy: Copy, delay: float | None, now: float) -> None:
        """FIN (no delay) or REQ. Whoever does not have the message in flight is refused."""
        if not link.alive or copy.client is not link or copy.id not in self.copies:
            return
        copy.client = None
        if delay is None:
            self.finished.append(self.copies.pop(copy.id))
        else:
            copy.until = now + delay


class Link:
    """A connection of a consumer to an nsqd."""

    def __init__(self, nsqd: Nsqd) -> None:
        self.nsqd = nsqd
        self.source = Source(Tally(), MSG_TIMEOUT)
        self.alive = True
        """False: it is broken. The consumer may not have noticed."""
        self.buffer: list[Arrival] = []
        self.seen_empty = 0.0


class Arrival(Delivery):
    """A copy in the hands of a consumer."""

    never = False
    """Its handler will not answer."""

    failed_at = 0.0
    """When its handler failed."""

    taken = 0
    """The moment when its consumer learned of it."""

    def __init__(self, copy: Copy, link: Link) -> None:
        self.copy = copy
        self.link = link
        self.source = link.source
        self.owner = copy.id
        self.attempts = copy.attempts
        self.fingerprint = copy.message.fingerprint


class PlainStore(MemoryStore):
    """A store that may lose a claim."""

    def __init__(self, clock: ManualClock) -> None:
        super().__init__(slots=1 << 12, clock=clock)
        self.touched: list[str] = []
        """What should not have happened. Not raised: a store's exceptions are outages to its caller."""

    def lose(self, number: int) -> bytes:
        """Forget who has one of the messages, and how often it failed; returns which."""
        fingerprint = list(self._holders)[number % len(self._holders)]
        self._drop(fingerprint)
        return fingerprint


class GuardedStore(PlainStore):
    """A store that notes when somebody touches another's claim. So it has verbs of its own, and no shortcut."""

    def confirm(self, claims: Sequence[Claim]) -> list[bool]:
        return self._guard("confirm", claims, lambda: super(GuardedStore, self).confirm(claims))

    def release(self, releases: Sequence[Release]) -> list[bool]:
        claims = [release.claim for release in releases]
        return self._guard("release", claims, lambda: super(GuardedStore, self).release(releases))

    def extend(self, claims: Sequence[Claim]) -> list[bool]:
        return self._guard("extend", claims, lambda: super(GuardedStore, self).extend(claims))

    def _guard(self, verb: str, claims: Sequence[Claim], call: Callable[[], list[bool]]) -> list[bool]:
        nonces = {claim.nonce for claim in claims}
        others = {
            name: self._seen_from_outside(name)
            for name in {claim.fingerprint for claim in claims} & set(self._holders)
            if self._holders[name].nonce not in nonces and name not in self._released
        }
        ours = call()
        if any(self._seen_from_outside(name) != before for name, before in others.items()):
            self.touched.append(f"{verb} of another's claim")
        return ours

    def _seen_from_outside(self, name: bytes) -> tuple[object, ...]:
        return self._holders.get(name), self._ends.get(name), self._tries.get(name), name in self._released
