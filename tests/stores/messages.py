"""Messages and their deliveries, for tests of stores."""

from __future__ import annotations

import itertools
import os
import signal
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from servers import MOMENT, eventually

from nsqdedupe.cli.local_memcached import Memcached
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


class Patient(MemcachedStore):
    """A store that gives no server up because the machine has a lot else to do."""

    def __init__(self, servers: str | Sequence[str], **options: Any) -> None:
        super().__init__(servers, **{"connect_timeout": MOMENT, "timeout": MOMENT, **options})


def freeze(server: Memcached) -> int:
    """Stop a server's process, and return it; it holds all it has. SIGCONT lets it go on.

    The signal is no event: until each of its threads has stopped, one of them may answer.
    """
    process = server.pid
    assert process is not None
    os.kill(process, signal.SIGSTOP)
    threads = Path(f"/proc/{process}/task")
    eventually(
        lambda: [(thread / "stat").read_text().rpartition(")")[2].split()[0] for thread in threads.iterdir()],
        until=lambda states: set(states) == {"T"},
    )
    return process


def give_up_after(store: MemcachedStore, seconds: float) -> None:
    """Change a store's timeout while it lives: short only where it is to pass. Call it on the store's event loop."""
    for calls in store._on_loops:
        if calls._timer is not None:
            calls._timer.cancel()
            calls._timer = None
    for servers in store._servers, *(calls._servers for calls in store._on_loops):
        servers.timeout = seconds
        for link in servers.links:
            link._terms = link._terms._replace(timeout=seconds)


def ask(store: Store, claim: Claim) -> Answer:
    """The answer to one claim."""
    (answer,) = store.claim([claim])
    return answer


def verdicts(answers: Sequence[Answer | None]) -> list[Verdict | None]:
    """What was said of each."""
    return [None if answer is None else answer.verdict for answer in answers]
