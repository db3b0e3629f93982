"""What the tests of the state machine share: consumers that note what they do, on a clock turned by hand.

A delivery is named ``a`` (first delivery of the copy on the nsqd called a), ``b`` (the copy on another one),
``A`` (a second copy on the first nsqd), ``a2`` (second delivery of the first copy); ``n/a`` is the copy of
another message, called n.
"""

from __future__ import annotations

import functools
import hashlib
import itertools
import math
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from nsqdedupe.calls import Then, Verb, attempt
from nsqdedupe.deduper import Deduper
from nsqdedupe.delivery import Delivery, Outcome, Source, State
from nsqdedupe.errors import StoreError, StoreUnavailable
from nsqdedupe.metrics import Events, Tally
from nsqdedupe.port import Port
from nsqdedupe.store import Answer, Claim, Release, Store, Traits
from nsqdedupe.stores.embedded import EmbeddedStore, MemoryStore
from nsqdedupe.testing import ManualClock

MSG_TIMEOUT = 60.0
LEASE = 62.0

Item = TypeVar("Item")
Result = TypeVar("Result")
Note = tuple[str, str] | tuple[str, str, object]


class Between:
    """Equals every number of a range: a delay with its jitter."""

    def __init__(self, low: float, high: float) -> None:
        self.low, self.high = low, high

    def __eq__(self, other: object) -> bool:
        return isinstance(other, float) and self.low <= other <= self.high

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return f"{self.low}..{self.high}"


def jittered(seconds: float) -> Between:
    """So many seconds and the jitter, give or take a rounding error."""
    return Between(seconds + 0.1 - 1e-6, seconds + 0.5 + 1e-6)


def fingerprint_of(message: str) -> bytes:
    """The fingerprint of a message with this name."""
    return hashlib.blake2b(message.encode(), digest_size=16).digest()


def nsqd_of(name: str) -> str:
    """The nsqd that gives out a delivery of this name."""
    return name.rpartition("/")[2][0].lower()


class Copy(Delivery):
    """A delivery with a name."""

    def __init__(self, name: str, source: Source, since: float) -> None:
        message, _, copy = name.rpartition("/")
        self.name = name
        self.source = source
        self.since = since
        self.fingerprint = fingerprint_of(message or "m")
        self.owner = name.rstrip("0123456789").encode()
        self.attempts = int(copy[1:] or 1)


class Gate(Store):
    """A store that can be cut off, and notes what it was asked.

    ``cut`` may be "before" (nothing takes effect) or "after" (it does, but nobody learns of it).
    """

    def __init__(self, store: Store) -> None:
        self.store = store
        self.cut: str | None = None
        self.calls: list[tuple[str, int]] = []
        self.listener: Callable[[str], None] | None = None

    @property
    def traits(self) -> Traits:
        return self.store.traits

    def claim(self, claims: Sequence[Claim]) -> Sequence[Answer]:
        return self._pass("claim", self.store.claim, claims)

    def confirm(self, claims: Sequence[Claim]) -> Sequence[bool]:
        return self._pass("confirm", self.store.confirm, claims)

    def release(self, releases: Sequence[Release]) -> Sequence[bool]:
        return self._pass("release", self.store.release, releases)

    def extend(self, claims: Sequence[Claim]) -> Sequence[bool]:
        return self._pass("extend", self.store.extend, claims)

    def forget(self, fingerprints: Sequence[bytes]) -> None:
        self._pass("forget", self.store.forget, fingerprints)

    def close(self) -> None:
        self.store.close()

    def asked(self) -> list[tuple[str, int]]:
        """Verb and size of every call since this was last asked."""
        calls, self.calls = self.calls, []
        return calls

    def _pass(self, name: str, verb: Callable[[Sequence[Item]], Result], items: Sequence[Item]) -> Result:
        self.calls.append((name, len(items)))
        if self.listener is not None:
            self.listener(name)
        if self.cut == "before":
            raise StoreUnavailable("cut off")
        result = verb(items)
        if self.cut == "after":
            raise StoreUnavailable("no reply")
        return result


class SlowCalls:
    """Calls whose way to the store, and whose results' way back, take until the test says so."""

    waits = True

    def __init__(self) -> None:
        self.sent: list[tuple[Verb, Sequence[Any], Then]] = []
        self.answered: list[Callable[[], None]] = []

    def submit(self, verb: Verb, items: Sequence[Any], then: Then, /) -> None:
        self.sent.append((verb, items, then))

    def execute(self, count: int) -> None:
        """So many calls reach the store."""
        calls, self.sent = self.sent[:count], self.sent[count:]
        for verb, items, then in calls:
            self.answered.append(functools.partial(then, *attempt(verb, items)))

    def tell(self, count: int) -> None:
        """The results of so many calls come back."""
        answered, self.answered = self.answered[:count], self.answered[count:]
        for then in answered:
            then()

    def finish(self) -> None:
        """All that is under way, and what comes of it."""
        while self.sent or self.answered:
            self.execute(len(self.sent))
            self.tell(len(self.answered))


def run_in_one_loop(
    port: Port,
    deduper: Deduper,
    ready: deque[Delivery],
    count: int,
    record: Callable[[bytes, int], None],
    is_over: Callable[[], bool],
) -> Delivery | None:
    """What `Port.run_on` promises, made of the port's other methods."""
    for _ in range(count):
        delivery = ready.popleft()
        delivery.state = State.RUNNING
        if not port.run(delivery):
            return delivery
        try:
            record(delivery.fingerprint, delivery.place)  # type: ignore[arg-type] # none: nothing is recorded
        except StoreError:
            deduper.answer(delivery, Outcome.HANDLED)
            return delivery
        if not delivery.source.open:
            deduper.answer(delivery, Outcome.HANDLED)
            return delivery
        delivery.state = State.ANSWERED
        port.finish([delivery], ran=True)
        if is_over():
            break
    return None


class Consumer:
    """A Deduper and the Port that notes what it wants. Its handlers answer when the test says so."""

    def __init__(
        self,
        clock: ManualClock | None = None,
        store: Store | None = None,
        *,
        msg_timeout: float = MSG_TIMEOUT,
        unprotected: bool = False,
        direct: bool = False,
        **options: Any,
    ) -> None:
        self.clock = clock or ManualClock()
        self.gate = Gate(MemoryStore(slots=1 << 12, clock=self.clock) if store is None else store)
        self.notes: list[Note] = []
        self.deliveries: dict[str, Copy] = {}
        self.limit = 10
        self.stopped = False
        self.wakes = 0
        self.runs_on = True
        self.held: list[str] = []
        self.msg_timeout = msg_timeout
        self.on_run: Callable[[Delivery], object] = lambda delivery: None
        self.on_give_up: Callable[[Delivery], None] = self.accept
        self.events = Events()
        self.deduper = Deduper(
            None if unprotected else store if direct else self.gate,
            self,
            events=self.events,
            clock=self.clock,
            **{"max_tries": 5, "requeue_delay": 90.0, **options},
        )
        self.sources: dict[str, Source] = {}
        self.tallies: list[Tally] = []

    def beside(self, **options: Any) -> Consumer:
        """Another process on the same store and the same clock."""
        return Consumer(self.clock, self.gate.store, **options)

    def accept(self, delivery: Delivery) -> None:
        """What most applications do about a message that is given up: nothing."""
        self.deduper.answer(delivery, Outcome.GIVEN_UP)

    # -- what nsqd does --------------------------------------------------------------------------

    def source(self, nsqd: str) -> Source:
        """The open connection to an nsqd."""
        if nsqd not in self.sources or not self.sources[nsqd].open:
            self.tallies.append(Tally())
            self.sources[nsqd] = Source(self.tallies[-1], self.msg_timeout)
            self.deduper.opened(self.sources[nsqd])
        return self.sources[nsqd]

    def copies(self, *names: str, waited: float = 0.0) -> list[Copy]:
        """Deliveries that come now, or came some seconds ago."""
        copies = []
        for name in names:
            copy = Copy(name, self.source(nsqd_of(name)), self.clock() - waited)
            self.deliveries[name] = copy
            copies.append(copy)
        return copies

    def take(self, *names: str, waited: float = 0.0) -> None:
        """Deliveries arrive, in one batch as long as they are of the same nsqd."""
        for _, batch in itertools.groupby(names, nsqd_of):
            self.deduper.take(self.copies(*batch, waited=waited))

    def deliver(self, *names: str, waited: float = 0.0) -> None:
        """Deliveries arrive, and their handlers are called."""
        self.take(*names, waited=waited)
        self.work()

    def lose(self, nsqd: str) -> None:
        """The connection to an nsqd is lost."""
        self.deduper.lost(self.sources[nsqd])

    # -- what handlers and time do ---------------------------------------------------------------

    def work(self, until: float = math.inf) -> bool:
        return self.deduper.work(until)

    def answer(self, name: str, outcome: Outcome, delay: float | None = None) -> None:
        """A handler ends, and what comes of it is carried out."""
        self.deduper.answer(self.deliveries[name], outcome, delay)
        self.work()

    def succeed(self, *names: str) -> None:
        for name in names:
            self.answer(name, Outcome.HANDLED)

    def fail(self, name: str, delay: float | None = None) -> None:
        self.answer(name, Outcome.FAILED, delay)

    def wait(self, seconds: float, step: float = 1.0) -> None:
        """Time passes, and the reader looks after things as it goes."""
        end = self.clock() + seconds
        while self.clock() < end:
            self.clock.advance(min(step, end - self.clock()))
            self.deduper.tick()
            self.work()

    def poll(self) -> float:
        """Wait until somebody wants to ask the store again, let it ask, and return how long that took."""
        due = self.deduper.next_poll()
        assert due is not None
        pause = due - self.clock()
        self.clock.advance(pause)
        self.work()
        return pause

    # -- what tests look at ----------------------------------------------------------------------

    def did(self) -> list[Note]:
        """What was done since this was last asked."""
        notes, self.notes = self.notes, []
        return notes

    def counts(self) -> dict[str, int]:
        """The counters of all deliveries that are not 0."""
        self.deduper.count()
        sums: dict[str, int] = {}
        for tally in self.tallies:
            for name, count in tally.as_dict().items():
                sums[name] = sums.get(name, 0) + count
        return {name: count for name, count in sums.items() if count}

    def is_idle(self) -> bool:
        """Whether the state machine holds nothing."""
        return not list(self.deduper.in_hand()) and not self.work() and self.deduper.next_poll() is None

    def kept(self) -> int:
        """How many claims, holds and tries the store keeps."""
        assert isinstance(self.gate.store, EmbeddedStore)
        return self.gate.store.kept()

    def note(self, what: str, copy: Delivery, *more: object) -> None:
        assert isinstance(copy, Copy)
        self.notes.append((what, copy.name, *more))

    # -- the Port --------------------------------------------------------------------------------

    def run(self, delivery: Delivery, /) -> bool:
        self.note("run", delivery)
        return self.on_run(delivery) is True

    def run_on(
        self, ready: deque[Delivery], count: int, record: Callable[[bytes, int], None], until: float, /
    ) -> Delivery | None:
        if not self.runs_on:
            return None
        return run_in_one_loop(self, self.deduper, ready, count, record, lambda: self.clock() >= until)

    def give_up(self, delivery: Delivery, /) -> None:
        self.note("give up", delivery)
        self.on_give_up(delivery)

    def finish(self, deliveries: Sequence[Delivery], /, *, ran: bool) -> None:
        for delivery in deliveries:
            self.note("FIN" if ran else "FIN unrun", delivery)

    def requeue(self, delivery: Delivery, delay: float, /, *, ran: bool) -> None:
        self.note("REQ" if ran else "REQ unrun", delivery, float(delay))

    def abandon(self, delivery: Delivery, /) -> None:
        self.note("abandon", delivery)

    def hold(self, delivery: Delivery, /) -> None:
        assert isinstance(delivery, Copy)
        self.held.append(delivery.name)

    def looked_up(self, deliveries: Sequence[Delivery], /) -> None:
        for delivery in deliveries:
            self.note("looked up", delivery)

    def wake(self) -> None:
        self.wakes += 1

    def waiting_limit(self) -> int:
        return self.limit

    def paused(self) -> bool:
        return self.stopped
