"""Messages and their deliveries, for tests of stores."""

from __future__ import annotations

import itertools
import os
from collections.abc import Sequence

from nsqdedupe.store import Answer, Claim, Store, Verdict
from nsqdedupe.stores.memcached import MemcachedStore

NEW, IN_PROGRESS, DONE = Verdict.NEW, Verdict.IN_PROGRESS, Verdict.DONE

_serials = itertools.count(1)


def message() -> bytes:
    """A fingerprint never met before."""
    return os.urandom(16)


def delivery(
    fingerprint: bytes, copy: bytes = b"nsqd1/a", process: bytes = b"process1", *, lease: float = 60.0
) -> Claim:
    """A new delivery of a copy, to a process."""
    return Claim(fingerprint, copy, process + next(_serials).to_bytes(8, "big"), lease)


def sibling(fingerprint: bytes) -> Claim:
    """Another copy, in another process."""
    return delivery(fingerprint, b"nsqd2/b", b"process2")


def deliveries(count: int) -> list[Claim]:
    """One of each of so many messages."""
    return [delivery(message()) for _ in range(count)]


def own(store: Store, fingerprint: bytes) -> Claim:
    """A delivery that has the message."""
    claim = delivery(fingerprint)
    assert ask(store, claim).verdict is NEW
    return claim


def give_up_after(store: MemcachedStore, seconds: float) -> None:
    """Change a store's timeout while it lives: short only where it is to pass."""
    store._servers._timeout = seconds
    for link in store._servers.links:
        link._terms = link._terms._replace(timeout=seconds)


def ask(store: Store, claim: Claim) -> Answer:
    """The answer to one claim."""
    (answer,) = store.claim([claim])
    return answer


def verdicts(answers: Sequence[Answer | None]) -> list[Verdict | None]:
    """What was said of each."""
    return [None if answer is None else answer.verdict for answer in answers]
