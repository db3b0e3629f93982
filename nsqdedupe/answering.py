"""What the reader and decorated handlers share: decisions go out to nsqd, answers of handlers come in.

Handlers may answer from any thread; everything else happens on the event loop's.
"""

from __future__ import annotations

import asyncio
import logging
import math
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any, cast

import nsq
import nsq.event
import nsq.protocol

from nsqdedupe.clock import monotonic
from nsqdedupe.deduper import Deduper
from nsqdedupe.delivery import Delivery, Outcome
from nsqdedupe.message import Message
from nsqdedupe.places import Places

logger = logging.getLogger(__name__)

_GOOD = (Outcome.HANDLED, Outcome.GIVEN_UP, Outcome.INVALID)


def let_another_test(reader: Any, conn: Any) -> None:  # noqa: ANN401 - a reader of pynsq's, and a connection of it
    """What was to end a backoff says nothing about the handler: the next connection gets RDY 1 as well.

    This one keeps its own, so that a backlog of duplicates drains; else messages behind it would wait for the
    other connection, which may be idle.
    """
    conns = list(reader.conns.values())
    if conn not in conns:
        return
    here = conns.index(conn)
    for other in conns[here + 1 :] + conns[:here]:
        if other.rdy == 0:
            reader._send_rdy(other, 1)  # noqa: SLF001 - pynsq's, checked at start
            return


class Answering(ABC):
    """The part of a port that sends REQ and keeps count, and the way from a handler's answer to the state machine.

    Args:
        name: for log lines.
    """

    _deduper: Deduper

    def __init__(self, name: str) -> None:
        self._name = name
        self._places = Places()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread = 0
        self._timer: asyncio.TimerHandle | None = None
        self._woken = False
        self._closed = False

    @abstractmethod
    def _work(self) -> None:
        """Have the state machine do what it can, and see to the rest."""

    def start(self) -> None:
        """The event loop runs, on this thread."""
        self._loop = asyncio.get_running_loop()
        self._thread = threading.get_ident()

    # -- to nsqd ---------------------------------------------------------------------------------

    def _requeue(self, message: Message, delay: float, *, ran: bool) -> None:
        """Send REQ, after the RDY commands that a failure brings about."""
        if ran:
            self._tell(message, nsq.event.BACKOFF if message.backoff else nsq.event.CONTINUE)
        self._places.leave(message)
        self._send(message.conn, nsq.protocol.requeue(message.id, math.ceil(delay * 1000)))

    def _send(self, conn: Any, command: bytes) -> None:  # noqa: ANN401 - a connection of ours or of pynsq's
        if conn.closed():
            return
        try:
            conn.send(command)
        except Exception as error:  # noqa: BLE001 - as pynsq does: a connection that cannot answer is no use
            conn.close()
            conn.trigger(nsq.event.ERROR, conn=conn, error=nsq.protocol.SendError("failed to answer", error))

    def _tell(self, message: Message, event: str) -> None:
        """Let the backoff take note; the answer goes out even if a hook of the application breaks there."""
        if self._closed:
            return  # a block would begin that nobody is left to end
        conn = message.conn
        # In pynsq the message is in flight until then: where RDY is scarce, its connection passes RDY on.
        self._places.enter(message)
        try:
            conn.trigger(event, conn=conn)
        except Exception:
            logger.exception("[%s:%s] a hook failed on %s", conn.id, self._name, event)

    def hold(self, delivery: Delivery, /) -> None:
        """Let a copy that waits count as in flight."""
        self._places.hold(cast("Message", delivery))

    def abandon(self, delivery: Delivery, /) -> None:
        """Let the connection forget a message that will not be answered. If its run has ended, the backoff is told."""
        message = cast("Message", delivery)
        if message.outcome in _GOOD:
            self._tell(message, nsq.event.RESUME)
        elif message.outcome is Outcome.FAILED:
            self._tell(message, nsq.event.BACKOFF if message.backoff else nsq.event.CONTINUE)
        self._places.leave(message)

    # -- turns of the loop -----------------------------------------------------------------------

    def wake(self) -> None:
        """Work in the next turn of the loop."""
        if self._loop is not None and not self._woken and not self._loop.is_closed():
            self._woken = True
            self._loop.call_soon(self._on_wake)

    def _on_wake(self) -> None:
        self._woken = False
        self._work()

    def _set_timer(self) -> None:
        """Come back when a copy whose owner is elsewhere wants to ask again."""
        due = self._deduper.next_poll()
        if due is not None and self._timer is None and self._loop is not None:
            self._timer = self._loop.call_later(max(0.0, due - monotonic()), self._on_timer)

    def _on_timer(self) -> None:
        self._timer = None
        self._work()

    # -- answers of handlers, from any thread ----------------------------------------------------

    def _touch(self, message: Message) -> None:
        self._on_loop(self._take_touch, message)

    def _take_touch(self, message: Message) -> None:
        self._deduper.touch(message)
        self._send(message.conn, nsq.protocol.touch(message.id))

    def _answer(self, message: Message, outcome: Outcome, delay: float | None) -> None:
        self._on_loop(self._take_answer, message, outcome, delay)

    def _take_answer(self, message: Message, outcome: Outcome, delay: float | None) -> None:
        # At once, not when the batch is settled: the next handler may ask how many are in flight.
        self._places.leave(message)
        self._deduper.answer(message, outcome, delay)

    def _on_loop(self, call: Callable[..., None], *args: Any) -> None:  # noqa: ANN401 - passed on
        if self._loop is None or threading.get_ident() == self._thread:
            call(*args)
        else:
            self._loop.call_soon_threadsafe(call, *args)
