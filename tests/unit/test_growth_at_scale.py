"""Memory does not grow with what was handled, and what waits leaves nothing behind. About 20 s."""

from __future__ import annotations

import gc
import hashlib
import tracemalloc
from collections.abc import Sequence

from harness import MSG_TIMEOUT
from resident import resident
from test_growth import Crowd, end

from nsqdedupe.clock import monotonic
from nsqdedupe.deduper import Deduper
from nsqdedupe.delivery import Delivery, Outcome, Source
from nsqdedupe.metrics import Events, Tally
from nsqdedupe.stores.embedded import MemoryStore

BATCH = 500


class Silent:
    """A port whose handlers succeed at once."""

    def run(self, delivery: Delivery, /) -> bool:
        return True

    def give_up(self, delivery: Delivery, /) -> None: ...

    def finish(self, deliveries: Sequence[Delivery], /, *, ran: bool) -> None: ...

    def requeue(self, delivery: Delivery, delay: float, /, *, ran: bool) -> None: ...

    def abandon(self, delivery: Delivery, /) -> None: ...

    def hold(self, delivery: Delivery, /) -> None: ...

    def wake(self) -> None: ...

    def waiting_limit(self) -> int:
        return 1000

    def paused(self) -> bool:
        return False


def test_memory_is_flat_over_a_million_messages() -> None:
    """After the first 100,000 memory grows by less than 5 bytes per message, if at all: no object is kept of any.

    A tenth of them has a second copy.
    """
    store = MemoryStore(window=50_000)
    port, tally = Silent(), Tally()
    deduper = Deduper(store, port, events=Events(), max_tries=5, requeue_delay=90.0)
    source = Source(tally, MSG_TIMEOUT)
    deduper.opened(source)

    def batch(nsqd: bytes, numbers: range) -> list[Delivery]:
        deliveries = []
        for number in numbers:
            delivery = Delivery()
            delivery.source = source
            delivery.since = monotonic()
            delivery.fingerprint = hashlib.blake2b(b"%d" % number, digest_size=16).digest()
            delivery.owner = nsqd + b"%d" % number
            deliveries.append(delivery)
        return deliveries

    def feed(start: int, stop: int) -> None:
        for first in range(start, stop, BATCH):
            deduper.take(batch(b"a/", range(first, first + BATCH)))
            deduper.take(batch(b"b/", range(first, first + BATCH, 10)))
            assert not deduper.work(float("inf"))

    feed(0, 100_000)
    before = resident()
    feed(100_000, 950_000)
    grown = resident() - before
    tracemalloc.start()
    feed(950_000, 1_000_000)
    gc.collect()
    kept = tracemalloc.get_traced_memory()[0]
    tracemalloc.stop()
    assert grown < 4 << 20
    assert kept < 5 * 50_000
    assert (tally.handled, tally.duplicates, tally.in_flight) == (1_000_000, 100_000, 0)
    assert store.kept() == 0


def test_a_hundred_thousand_standbys_and_claims_leave_nothing() -> None:
    """All handlers run, and every message's other copy stands by; then half succeed and half lose their connection."""
    crowd = Crowd(100_000)
    crowd.deliver(*crowd.names("a"), *crowd.names("b"))
    assert crowd.kept() == crowd.events.standbys == 100_000
    end(crowd, crowd.names("a")[::2], Outcome.HANDLED)
    assert crowd.kept() == 50_000
    crowd.lose("b")
    end(crowd, crowd.names("a")[1::2], Outcome.HANDLED)
    assert crowd.is_idle()
    assert crowd.kept() == 0
    assert crowd.counts() == {"received": 200_000, "handled": 100_000, "duplicates": 50_000, "unanswered": 50_000}
