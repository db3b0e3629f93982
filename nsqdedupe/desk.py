"""Where decorated handlers get their messages: the state machine behind a stock `nsq.Reader`.

A stock reader goes by `attempts`, which every REQ raises, and finishes a message unprocessed when there were more
than ``max_tries``. So no copy is sent back to its last attempt unless its handler failed: it is kept, and nsqd is told
by TOUCH that it is, which takes one of the reader's places in flight.
"""

from __future__ import annotations

import asyncio
import logging
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, cast

import nsq
import nsq.event
import nsq.protocol

from nsqdedupe.adopted import AdoptedMessage, hear_first, reader_of
from nsqdedupe.answering import Answering, let_another_test
from nsqdedupe.clock import monotonic
from nsqdedupe.deduper import Deduper
from nsqdedupe.delivery import Delivery, Outcome, Source, State
from nsqdedupe.errors import KeyExtractionError
from nsqdedupe.handling import Handling
from nsqdedupe.line import LATEST, Line
from nsqdedupe.message import Message
from nsqdedupe.metrics import Events, Tally
from nsqdedupe.offload import calls_for
from nsqdedupe.store import IS_DONE, Store

logger = logging.getLogger(__name__)

SLICE = 0.008
"""Seconds of one turn of the event loop that may go to handlers of messages that waited."""

TICK = 0.25
"""Seconds between looks at what waits, as long as something does."""

MSG_TIMEOUT = 60.0
"""Seconds, nsqd's default: what a reader negotiated is not known here, only what it asked for."""

TOUCH_EVERY = 5.0
"""Seconds between two TOUCHes of a copy that waits, or a third of the message timeout if that is less."""

ALL = 1 << 30

# Looked up once per name, not once per name and member: every message passes them.
_RUNNING, _ANSWERED = State.RUNNING, State.ANSWERED


class Desk(Answering):
    """Serves one decorated handler on one event loop.

    Args:
        name: for log lines.

        store: remembers messages.

        fingerprint: makes a message's fingerprint.

        events: counters beside the outcomes.

        tallies: counters of deliveries, by nsqd.
    """

    def __init__(
        self,
        name: str,
        store: Store,
        fingerprint: Callable[[Message], bytes],
        events: Events,
        tallies: dict[str, Tally],
    ) -> None:
        super().__init__(name)
        self._fingerprint = fingerprint
        self._events = events
        self._tallies = tallies
        calls = calls_for(store, self.wake)
        self._deduper = Deduper(store, self, events=events, calls=calls, max_tries=0, requeue_delay=0)
        self.handling = Handling(_Hooks(name), self._places, answer=self._answer, touch=self._touch, retry_delay=0)
        """Whom messages answer to."""
        self.give_up = self.handling.give_up
        self._readers: weakref.WeakSet[Any] = weakref.WeakSet()
        self._lines: dict[nsq.AsyncConn, Line] = {}
        self._open = 0
        """Messages that were not answered yet, and will be."""
        self._waiting: dict[AdoptedMessage, None] = {}
        """Copies that are kept by TOUCH, in the order in which they began to wait."""
        self._parked: dict[bytes, tuple[float, AdoptedMessage]] = {}
        """By owner: those of them that ask for their message again at a certain time."""
        self._ticker: asyncio.TimerHandle | None = None
        self._flusher: asyncio.TimerHandle | None = None
        self.start()

    @property
    def loop(self) -> asyncio.AbstractEventLoop | None:
        """The event loop that it serves."""
        return self._loop

    # -- messages in -----------------------------------------------------------------------------

    def take(self, message: AdoptedMessage) -> None:
        """A message is to be handled: now, or later, or not at all."""
        conn = cast("nsq.AsyncConn", message.conn)
        self._open += 1
        began = monotonic()
        line = self._lines.get(conn) or self._opened(conn)
        message.source = line.source
        message.since = began
        message.owner = line.owner_prefix + message.id
        if line.in_scope:
            try:
                message.fingerprint = self._fingerprint(message)
            except KeyExtractionError as error:
                self._events.key_errors += 1
                logger.debug("[%s:%s] message %r is handled unprotected: %s", conn.id, self._name, message.id, error)
        if message.owner in self._parked:
            # nsqd has given it out again all the same: this delivery is the one to answer.
            self._forget(self._parked[message.owner][1])
        done = self._sift(message)
        tests = line.tests
        if not done:
            self._go_on()
        if tests and not message.may_run():
            let_another_test(line.reader, conn)
        self._flush_in_time(began)

    def _sift(self, message: AdoptedMessage) -> bool:
        """Finish it, if its message is done; else the state machine gets it."""
        fingerprint = message.fingerprint
        places = self._deduper.sift(message.source, (fingerprint,)) if fingerprint is not None else None
        if places is None:
            self._deduper.take([message])
            return False
        (message.place,) = places
        if message.place != IS_DONE:
            self._deduper.take([message], sifted=True)
            return False
        message.state = _ANSWERED
        self.finish([message], ran=False)
        return True

    def looked_up(self, deliveries: Sequence[Delivery], /) -> None:
        """What was to end a backoff may have been a copy; see `let_another_test`."""
        for message in cast("Sequence[AdoptedMessage]", deliveries):
            line = self._lines.get(message.conn)
            if line is not None and line.tests and not message.may_run():
                let_another_test(line.reader, message.conn)

    def _opened(self, conn: nsq.AsyncConn) -> Line:
        reader = reader_of(conn)
        scope = f"{reader.topic}/{reader.channel}" if reader is not None else self._name
        timeout = conn.msg_timeout / 1000 if conn.msg_timeout else MSG_TIMEOUT
        source = Source(self._tallies.setdefault(conn.id, Tally()), timeout)
        line = self._lines[conn] = Line(conn, source, reader, in_scope=scope == self._name)
        hear_first(conn, nsq.event.CLOSE, self._lost)
        self._deduper.opened(source)
        if reader is not None and reader not in self._readers:
            self._readers.add(reader)
            if not line.in_scope:
                # Equal keys of other topics are other messages: nothing may be dropped on their account.
                logger.error(
                    "[%s] a reader of %s uses this handler: its messages are handled unprotected; "
                    "decorate the handler for each scope that it serves",
                    self._name,
                    scope,
                )
            elif reader.max_tries:
                logger.warning(
                    "[%s] the reader has max_tries=%d: it finishes unprocessed what nsqd has given out more often, "
                    "whether a handler ran or not; set max_tries=0, and give up by message.tries in the handler",
                    self._name,
                    reader.max_tries,
                )
        return line

    def _lost(self, conn: Any, **_: Any) -> None:  # noqa: ANN401 - an event's arguments
        source = self._lines.pop(conn).source
        for message in [message for _, message in self._parked.values() if message.source is source]:
            self._forget(message)
        self._deduper.lost(source)
        self.wake()

    # -- turns of the loop -----------------------------------------------------------------------

    def _work(self) -> None:
        self._go_on()
        self._flush_in_time(monotonic())

    def _go_on(self) -> None:
        if self._deduper.work(monotonic() + SLICE):
            self.wake()
        if not (self._open or self._deduper.behind):
            return
        self._set_timer()
        if self._ticker is None and self._loop is not None:
            self._ticker = self._loop.call_later(TICK, self._tick)

    def _tick(self) -> None:
        self._ticker = None
        now = monotonic()
        for message in self._waiting:
            if now - message.since > min(TOUCH_EVERY, message.source.msg_timeout / 3):
                message.since = now
                self._send(message.conn, nsq.protocol.touch(message.id))
        for due, message in list(self._parked.values()):
            if due <= now:
                del self._parked[message.owner]
                message.begin_anew()
                self._deduper.take([message])
        self._deduper.tick()
        self._work()

    def _on_flusher(self) -> None:
        self._flusher = None
        self._flush()

    def _flush_in_time(self, began: float) -> None:
        """Write what answers a message whose handler was called then; see `Line.flush_in_time`."""
        for line in list(self._lines.values()):
            line.flush_in_time(began)

    def _flush(self) -> None:
        for line in list(self._lines.values()):
            line.flush()

    def _send(self, conn: Any, command: bytes) -> None:  # noqa: ANN401 - a connection of pynsq's
        line = self._lines.get(conn)
        if line is None:
            return  # it is closed
        line.send(command)
        if self._flusher is None and self._loop is not None:
            self._flusher = self._loop.call_later(LATEST, self._on_flusher)

    def _take_touch(self, message: Message) -> None:
        super()._take_touch(message)
        self._flush()  # the handler may go on for long

    # -- what the state machine wants (its Port) -------------------------------------------------

    def run(self, delivery: Delivery, /) -> bool:
        """Call the handler; see `Handling.run`."""
        self._waiting.pop(cast("AdoptedMessage", delivery), None)
        return self.handling.run(delivery)

    def run_on(
        self, ready: deque[Delivery], _: int, record: Callable[[bytes, int], None], __: float, /
    ) -> Delivery | None:
        """Run, record and answer one: messages come one by one here."""
        message = cast("AdoptedMessage", ready.popleft())
        message.state = _RUNNING
        if not self.run(message):
            return message
        try:
            record(message.fingerprint, message.place)  # type: ignore[arg-type] # what has none is not here
        except Exception:  # noqa: BLE001 - the long way meets it too, and makes up for it
            self._answer(message, Outcome.HANDLED, None)
            return message
        if not message.source.open:
            self._answer(message, Outcome.HANDLED, None)
            return message
        message.state = _ANSWERED
        message.outcome = Outcome.HANDLED
        self.finish([message], ran=True)
        return None

    def finish(self, deliveries: Sequence[Delivery], /, *, ran: bool) -> None:
        """Send FINs, each after the RDY commands that a success brings about."""
        for message in cast("Sequence[AdoptedMessage]", deliveries):
            if not ran:
                message.close_unhandled()
            elif (line := self._lines.get(message.conn)) is None or line.hears_of_successes:
                self._tell(message, nsq.event.RESUME)
            self._forget(message, handled=True)
            self._send(message.conn, nsq.protocol.finish(message.id))

    def requeue(self, delivery: Delivery, delay: float, /, *, ran: bool) -> None:
        """Send REQ if a handler ran, or if the copy may have one more attempt; else keep it, and ask again later."""
        message = cast("AdoptedMessage", delivery)
        line = self._lines.get(message.conn)
        if message.outcome is None and line is not None and line.may_have_again(message.attempts):
            message.close_unhandled()
            self._forget(message)
            self._requeue(message, delay, ran=False)
        elif message.outcome is None:
            self._waiting[message] = None
            self._parked[message.owner] = monotonic() + delay, message
        else:
            self._open -= 1
            self._requeue(message, delay, ran=ran)

    def hold(self, delivery: Delivery, /) -> None:
        """Keep a copy that waits for another one."""
        self._waiting[cast("AdoptedMessage", delivery)] = None

    def abandon(self, delivery: Delivery, /) -> None:
        """Let the connection forget a message that will not be answered."""
        super().abandon(delivery)
        self._forget(cast("AdoptedMessage", delivery))

    def _forget(self, message: AdoptedMessage, *, handled: bool = False) -> None:
        self._open -= 1
        self._waiting.pop(message, None)
        self._parked.pop(message.owner, None)
        self._places.leave(message)
        if message.state is not _RUNNING:
            message.tell(handled=handled)

    def waiting_limit(self) -> int:
        """All of them: a copy that is not let wait would be kept all the same."""
        return ALL

    def paused(self) -> bool:
        """Whether the application paused a reader."""
        return any(reader.max_in_flight == 0 for reader in self._readers)

    def _take_answer(self, message: Message, outcome: Outcome, delay: float | None) -> None:
        if outcome is Outcome.FAILED and delay is None:
            delay = message.conn.requeue_delay * (message.tries + 1)
        super()._take_answer(message, outcome, delay)
        cast("AdoptedMessage", message).tell(handled=outcome is Outcome.HANDLED)


class _Hooks:
    """What `Handling` asks of a reader. The stock reader has called its hooks before the handler."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.message_handler = None

    def process_message(self, message: AdoptedMessage) -> object:
        return message.handler(message)

    def preprocess_message(self, message: AdoptedMessage) -> AdoptedMessage:
        return message

    def validate_message(self, _: AdoptedMessage) -> bool:
        return True

    def giving_up(self, message: AdoptedMessage) -> None:
        """The stock reader gives up, not we."""
