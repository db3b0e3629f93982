"""Runs handlers for a reader: messages in, answers out, in slices that let the event loop breathe.

The state machine decides; this file carries out. It calls the reader's hooks as pynsq does, makes sense of
whatever a handler returns, and writes the answers with one flush per connection and slice.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, Protocol, cast

import nsq
import nsq.event

from nsqdedupe.answering import Answering, let_another_test
from nsqdedupe.clock import monotonic
from nsqdedupe.connection import Connection, Head
from nsqdedupe.deduper import Deduper
from nsqdedupe.delivery import Delivery, Source
from nsqdedupe.errors import KeyExtractionError
from nsqdedupe.handling import Handling, Hooks
from nsqdedupe.message import Message, messages_of
from nsqdedupe.metrics import Events, Stats, Tally, snapshot
from nsqdedupe.store import IS_DONE

logger = logging.getLogger(__name__)

SLICE = 0.008
"""Seconds of one turn of the event loop that may go to handlers; one that runs longer ends its turn."""

UNCOUNTED = SLICE / 8
"""Seconds that may go to handlers before the next turn of the loop is asked for, to tell one turn from another."""

TICK = 0.25
"""Seconds between looks at leases and sockets; less where the message timeout is short."""

BACKLOG = 8 << 20
"""Bytes read and not yet handled at which reading pauses. Until then heartbeats are never kept waiting."""


class ReaderLike(Hooks, Protocol):
    """What is needed of the reader: pynsq's own names."""

    max_in_flight: int
    total_rdy: int
    conns: dict[str, Any]
    backoff_timer: nsq.BackoffTimer
    backoff_block: bool
    backoff_block_completed: bool

    def _maybe_update_rdy(self, conn: Any) -> None: ...  # noqa: ANN401
    def _send_rdy(self, conn: Any, value: int) -> None: ...  # noqa: ANN401


class Runner(Answering):
    """Runs the handlers of one reader. Everything but the answers happens on the loop's thread.

    Args:
        reader: whose hooks are called, and whose RDY and backoff are kept.

        fingerprint: makes a message's fingerprint; None: nothing is de-duplicated.

        fingerprints: makes those of many bodies in one go; None: the key is not in the body alone.

        make_deduper: makes the state machine; gets this runner as its port, and the counters.
    """

    def __init__(
        self,
        reader: ReaderLike,
        fingerprint: Callable[[Message], bytes] | None,
        fingerprints: Callable[[Sequence[bytes]], list[bytes]] | None,
        make_deduper: Callable[[Runner, Events], Deduper],
    ) -> None:
        super().__init__(reader.name)
        self._reader = reader
        self._fingerprint = fingerprint
        self._fingerprints = fingerprints
        self._events = Events()
        self._tallies: dict[str, Tally] = {}
        self._deduper = make_deduper(self, self._events)
        self._worked = 0.0
        """Seconds of this turn of the loop that went to handlers, and of others before it that were not counted."""
        self._turn_counts = False
        self._more = False
        self._busy = False
        """Handlers are called just now."""
        self._meanwhile: deque[tuple[Connection, list[Head], list[bytes], int]] = deque()
        """Batches that came then."""
        self._ticker: asyncio.TimerHandle | None = None
        self._ticked_at = monotonic()
        self._tick_every = TICK
        self._backlog = 0
        self._stalled: list[Connection] = []
        self.handling = Handling(
            reader, self._places, answer=self._answer, touch=self._touch, retry_delay=self._deduper.requeue_delay
        )
        """Whom messages answer to."""
        self.run = self.handling.run
        self.give_up = self.handling.give_up
        self._idle: asyncio.Future[None] | None = None

    # -- what the reader tells -------------------------------------------------------------------

    def opened(self, conn: Connection) -> None:
        """A connection is ready."""
        tally = self._tallies.setdefault(conn.id, Tally())
        # An nsqd that does not negotiate has its default.
        conn.source = Source(tally, conn.identity.get("msg_timeout", 60_000) / 1000)
        self._tick_every = min(self._tick_every, conn.source.msg_timeout / 8)
        self._deduper.opened(conn.source)
        if self._ticker is None and self._loop is not None:
            self._ticker = self._loop.call_later(self._tick_every, self._tick)

    def lost(self, conn: Connection) -> None:
        """A connection that was ready is closed."""
        if conn in self._stalled:
            self._stalled.remove(conn)
        self._deduper.lost(conn.source)
        self.wake()

    def drain(self) -> None:
        """The reader is about to stop: nobody may wait for an owner elsewhere any more."""
        self._deduper.drain()
        self._flush()

    async def idle(self) -> None:
        """Return when every delivery has been answered, or nothing more can be."""
        while self.in_flight() and not self._closed:
            if self._idle is None:
                self._idle = asyncio.get_running_loop().create_future()
            await asyncio.shield(self._idle)

    def close(self) -> None:
        """Answer what handlers have answered, and look after nothing any more."""
        self._closed = True
        self._deduper.settle()
        self._flush()
        for timer in (self._timer, self._ticker):
            if timer is not None:
                timer.cancel()
        self._timer = self._ticker = None

    def in_flight(self) -> int:
        """Deliveries that are still open."""
        self._deduper.count()
        return sum(tally.in_flight for tally in self._tallies.values())

    def stats(self) -> Stats:
        """A snapshot of the counters."""
        self._deduper.count()
        return snapshot(self._events, self._tallies)

    def fin_failed(self) -> None:
        """Nsqd refused a FIN."""
        self._events.fin_failed += 1

    def refused(self) -> None:
        """An nsqd refused a connection."""
        self._events.fatal_errors += 1

    # -- messages in -----------------------------------------------------------------------------

    def receive(self, conn: Connection, heads: list[Head], bodies: list[bytes], size: int) -> bool:
        """Take a batch; False: read no more from this connection until `Connection.read_on`."""
        if self._busy:
            # A handler has the event loop run meanwhile. Its message has no claim yet that a copy could meet.
            self._meanwhile.append((conn, heads, bodies, size))
            return True
        self._take(conn, heads, bodies, size)
        if self._more and self._backlog > BACKLOG:
            self._stalled.append(conn)
            return False
        return True

    def _take(self, conn: Connection, heads: list[Head], bodies: list[bytes], size: int) -> None:
        if conn.said_goodbye:
            self._send_back(conn, heads)
            return
        self._reader._maybe_update_rdy(conn)  # noqa: SLF001 - pynsq's, checked at start
        messages, sifted = self._messages(conn, heads, bodies)
        if messages:
            self._deduper.take(messages, sifted=sifted)
        tests = self._tests
        self._backlog += size
        self._work()
        if tests and not any(message.may_run() for message in messages):
            let_another_test(self._reader, conn)

    def _messages(self, conn: Connection, heads: list[Head], bodies: list[bytes]) -> tuple[list[Message], bool]:
        """Messages as handlers get them; True: without copies of what is done, which are answered and counted."""
        if self._fingerprints is not None:
            try:
                fingerprints = self._fingerprints(bodies)
            except KeyExtractionError:
                pass  # which of them have none shows one by one
            else:
                return self._sifted(conn, heads, bodies, fingerprints)
        messages = messages_of(conn, heads, bodies, itertools.repeat(None), itertools.repeat(0))
        if self._fingerprint is not None:
            for message in messages:
                try:
                    message.fingerprint = self._fingerprint(message)
                except KeyExtractionError as error:
                    self._events.key_errors += 1
                    logger.debug("[%s] message %r is handled unprotected: %s", conn.id, message.id, error)
        return messages, False

    def _sifted(
        self, conn: Connection, heads: list[Head], bodies: list[bytes], fingerprints: list[bytes]
    ) -> tuple[list[Message], bool]:
        places = self._deduper.sift(conn.source, fingerprints)
        if places is None:
            return messages_of(conn, heads, bodies, fingerprints, itertools.repeat(0)), False
        if IS_DONE not in places:
            return messages_of(conn, heads, bodies, fingerprints, places), True
        # A copy of what is done never becomes a message.
        new = [place != IS_DONE for place in places]
        conn.fins += [head[4] for head, is_new in zip(heads, new, strict=True) if not is_new]
        if True not in new:
            return [], True
        of_new = itertools.compress
        return messages_of(
            conn, of_new(heads, new), of_new(bodies, new), of_new(fingerprints, new), of_new(places, new)
        ), True

    def _send_back(self, conn: Connection, heads: list[Head]) -> None:
        """Nsqd may send one more message after it agreed to send none: it goes to somebody else at once."""
        for head in heads:
            conn.source.tally.received += 1
            conn.source.tally.deferred += 1
            conn.send(nsq.protocol.requeue(head[4], 0))

    @property
    def _hears_of_successes(self) -> bool:
        """Whether a success may change anything: while nothing has failed, it does not."""
        return bool(self._reader.backoff_timer.interval) or not self._reader.backoff_block_completed

    @property
    def _tests(self) -> bool:
        """Whether a backoff waits for the outcome of a message."""
        return self._reader.backoff_timer.interval > 0 and not self._reader.backoff_block

    def looked_up(self, deliveries: Sequence[Delivery], /) -> None:
        """What was to end a backoff may have been a copy; see `let_another_test`."""
        if self._tests and not any(message.may_run() for message in deliveries):
            for conn in {cast("Message", delivery).conn for delivery in deliveries}:
                let_another_test(self._reader, conn)

    # -- turns of the loop -----------------------------------------------------------------------

    def _work(self) -> None:
        """Run handlers for what is left of this turn's slice; the next turn goes on."""
        loop = self._loop
        if self._more or self._busy or loop is None:
            return
        if self._worked >= SLICE:
            self._more = True
            return
        began = monotonic()
        self.handling.look_at_hooks()
        self._busy = True
        try:
            self._more = self._deduper.work(began + SLICE - self._worked)
        finally:
            self._busy = False
            self._flush()
            self._worked += monotonic() - began
            if not self._turn_counts and (self._more or self._worked > UNCOUNTED):
                self._turn_counts = True
                loop.call_soon(self._next_turn)
        if not self._more:
            self._backlog = 0
            if self._stalled:
                stalled, self._stalled = self._stalled, []
                for conn in stalled:
                    loop.call_soon(conn.read_on)
        self._set_timer()
        if self._meanwhile:
            loop.call_soon(self._take_meanwhile)

    def _take_meanwhile(self) -> None:
        while self._meanwhile and not self._busy:
            conn, heads, bodies, size = self._meanwhile.popleft()
            if not conn.closed():
                self._take(conn, heads, bodies, size)

    def _next_turn(self) -> None:
        self._turn_counts = False
        self._worked = 0.0
        if self._more:
            self._more = False
            self._work()

    def _flush(self) -> None:
        for conn in self._reader.conns.values():
            conn.flush()
        if self._idle is not None and (self._closed or not self.in_flight()):
            self._idle.set_result(None)
            self._idle = None

    def _tick(self) -> None:
        if self._loop is None:
            return
        self._ticker = self._loop.call_later(self._tick_every, self._tick)
        for conn in self._reader.conns.values():
            conn.look(self._ticked_at)
        self._ticked_at = monotonic()
        self._deduper.tick()
        self._work()

    # -- what the state machine wants (its Port) -------------------------------------------------

    def run_on(
        self, ready: deque[Delivery], count: int, record: Callable[[bytes, int], None], until: float, /
    ) -> Delivery | None:
        """Run, record and answer; none if a success has to be told to the backoff, which sends RDY first."""
        return None if self._hears_of_successes else self.handling.run_on(ready, count, record, until)

    def finish(self, deliveries: Sequence[Delivery], /, *, ran: bool) -> None:
        """Queue FINs, each after the RDY commands that a success brings about."""
        for message in cast("Sequence[Message]", deliveries):
            if ran and self._hears_of_successes:
                self._tell(message, nsq.event.RESUME)
            if message.counted:
                self._places.leave(message)
            message.conn.fins.append(message.id)

    def requeue(self, delivery: Delivery, delay: float, /, *, ran: bool) -> None:
        """Queue a REQ, after the RDY commands that a failure brings about."""
        self._requeue(cast("Message", delivery), delay, ran=ran)

    def starved(self) -> bool:
        """Whether handlers must answer before anything else can come; see `Places.all_held`."""
        return self._deduper.copies_wait and self._places.all_held(self._reader.conns.values())

    def waiting_limit(self) -> int:
        """Half of the RDY now given, so that copies that wait never starve new work."""
        return self._reader.total_rdy // 2

    def paused(self) -> bool:
        """Whether the application paused the reader."""
        return self._reader.max_in_flight == 0
