"""`Pipeline`: one nsqd to publish to. Its connection is kept up; its answers come in the order of the commands."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping
from typing import Any, Protocol

import nsq
import nsq.event

from nsqdedupe import checks
from nsqdedupe.commands import CommandQueue
from nsqdedupe.connection import Connection
from nsqdedupe.pauses import STEADY, Pauses

logger = logging.getLogger(__name__)

UNKNOWN = "(outcome unknown)"
"""Ends a reason when the command may have been carried out for all we know."""

_AT_ONCE = 1 << 16
"""Bytes of a command that is written without waiting for others: nsqd works on it meanwhile."""


class Ticket(Protocol):
    """Who sent a command and learns what came of it: one of the two is called, once."""

    def acknowledged(self, pipeline: Pipeline) -> None:
        """Nsqd answered OK."""
        ...

    def failed(self, pipeline: Pipeline, reason: str, *, again: bool) -> None:
        """It did not; ``again``: the command was certainly not carried out and may be sent here once more."""
        ...


class Pipeline:
    """Sends commands to one nsqd as fast as they come, and hands out its answers.

    Once started it connects, and connects again whenever the connection is lost, until it is closed.
    A connection is given up when nsqd owes something (an answer, or to become ready) and is silent for
    too long, or sends no heartbeat.

    Args:
        address: ``host:port`` of the nsqd.

        options: for `nsq.AsyncConn`.

        timeout: seconds that an attempt to connect may take.

        patience: asked for the seconds of silence after which answers that are owed are given up.

        changed: called when `ready` has changed.
    """

    def __init__(
        self,
        address: str,
        options: Mapping[str, Any],
        *,
        timeout: float,
        patience: Callable[[], float],
        changed: Callable[[], None],
    ) -> None:
        self.address = address
        self.endpoint = checks.tcp_address("nsqd_tcp_addresses", address)
        self.ready = False
        """It takes commands."""
        self.trouble = "no answer yet"
        """Why it is not ready."""
        self._options = options
        self._timeout = timeout
        self._patience = patience
        self._changed = changed
        self._conn: _Connection | None = None
        self.peer: object = None
        """Whom it is connected to, as the system names it."""
        self._commands: CommandQueue[Ticket] = CommandQueue(lambda _: None)
        self._heard = 0.0
        """When it last sent something, or began to owe something."""
        self._outage = False
        """It is told that nothing can be published to it."""
        self._pauses = Pauses()
        self._ready_since = 0.0
        self._works = False
        """The connection has proved to be of use; that it is ready proves nothing."""
        self._closing = False
        self._timer: asyncio.TimerHandle | None = None
        self._loop: asyncio.AbstractEventLoop

    def start(self) -> None:
        """Connect, on the running loop, and stay connected."""
        self._loop = asyncio.get_running_loop()
        self._connect()

    @property
    def load(self) -> int:
        """Bytes of the commands that it has not answered."""
        return self._commands.load

    def send(self, command: bytes, ticket: Ticket, *, alone: bool = False) -> bool:
        """Send a command, in one write with the others of this turn of the loop. False: it cannot be sent.

        Args:
            command: what is sent.

            ticket: whose it is.

            alone: nothing else is on its way meanwhile: nsqd may well refuse it, and ends the connection then.
        """
        conn = self._conn
        if conn is None or conn.stream.closed():
            return False
        if not self._commands.owed:
            self._heard = self._loop.time()
        self._commands.put(command, ticket, alone=alone)
        if len(command) >= _AT_ONCE:
            conn.flush()
        return True

    def close(self) -> None:
        """Close when all that was sent is answered, or after ``timeout`` seconds. Returns at once. Idempotent."""
        if self._closing:
            return
        self._closing = True
        if self._conn is None or not self._commands.owed or self._loop.is_closed():
            self._end()
            return
        # Not before: to close while answers are unread makes TCP drop what nsqd has not read yet.
        self.ready = False
        self._conn.flush()
        if self._timer is not None:
            self._timer.cancel()
        self._timer = self._loop.call_later(self._timeout, self._end)

    # -- the connection --------------------------------------------------------------------------

    def _part(self) -> _Connection | None:
        """Have no connection from now on."""
        conn, self._conn = self._conn, None
        self.ready = False
        self._commands.clear()
        if self._timer is not None:
            self._timer.cancel()
        return conn

    def _end(self) -> None:
        conn = self._part()
        if conn is not None:
            conn.close()

    def _connect(self) -> None:
        # Neither is called: nsqd sends messages to subscribers only.
        conn = _Connection(*self.endpoint, receive=lambda *_: True, **self._options)
        conn.on(nsq.event.IDENTIFY_RESPONSE, self._on_identified)
        conn.on(nsq.event.READY, self._on_ready)
        conn.on(nsq.event.RESPONSE, self._on_response)
        conn.on(nsq.event.HEARTBEAT, self._on_heartbeat)
        conn.on(nsq.event.ERROR, self._on_error)
        conn.on(nsq.event.CLOSE, self._on_close)
        self._conn = conn
        self._commands = CommandQueue(conn.send)
        self._heard = self._loop.time()
        self._watch_on()
        conn.connect()

    def _on_identified(self, data: Mapping[str, Any], **_: Any) -> None:  # noqa: ANN401 - an event's arguments
        for option in ("tls_v1", "snappy", "deflate"):
            if self._options.get(option) and not data.get(option):
                logger.warning("[%s] nsqd does not offer %s: going on without", self.address, option)

    def _on_ready(self, conn: _Connection) -> None:
        if conn is not self._conn:
            return
        self._heard = self._ready_since = self._loop.time()
        self._works = False
        self.peer = conn.peer
        self.ready = True
        self._changed()

    def _on_success(self) -> None:
        """It has taken a message, or has stood for long: the outage before, if there was one, is over."""
        self._works = True
        self._pauses.reset()
        if self._outage:
            self._outage = False
            logger.info("[%s] connected again", self.address)

    def _watch_on(self) -> None:
        # Often enough for what is sent next. One turn later: after a blocked loop, read before judging.
        self._timer = self._loop.call_later(self._timeout / 4, self._loop.call_soon, self._watch)

    def _watch(self) -> None:
        """Give the connection up if it has been silent for too long."""
        conn = self._conn
        if conn is None:
            return
        now = self._loop.time()
        if self.ready and not self._works and now - self._ready_since >= STEADY:
            self._on_success()
        silence = now - self._heard
        if not self.ready:
            limit = self._timeout
        elif self._commands.owed:
            limit = self._patience()
        else:
            limit = 2 * conn.heartbeat_interval / 1000
        if silence < limit:
            self._watch_on()
        else:
            said = f"no answer for {silence:.2g} s"
            self._lose(said, f"{said} {UNKNOWN}")

    def _on_close(self, conn: _Connection, error: Exception | None = None) -> None:
        if conn is not self._conn:
            return
        cause = conn.error or error
        trouble = getattr(cause, "strerror", None) or str(cause)
        if cause is None or trouble == "failed to unpack size":  # pynsq's words for it
            trouble = "connection closed by nsqd"
        self._lose(trouble, f"connection closed before its answer {UNKNOWN}")

    def _lose(self, trouble: str, reason: str, *, refused: bool = False) -> None:
        """Give the connection up and connect anew later; commands that were not answered failed for this reason.

        If ``refused``, that is only the first: nsqd carries out nothing of what came behind an error.
        """
        if not (self._closing or self._outage):
            self._outage = True
            logger.warning("[%s] cannot publish to this nsqd: %s; connecting again", self.address, trouble)
        sent, held = self._commands.clear()
        was_ready = self.ready
        self._end()
        if self._closing:
            return
        self.trouble = trouble
        self._timer = self._loop.call_later(self._pauses.next(), self._connect)
        if was_ready:
            self._changed()
        for number, ticket in enumerate(sent):
            ticket.failed(self, reason, again=refused and number > 0)
        for ticket in held:
            ticket.failed(self, reason, again=True)

    # -- answers ---------------------------------------------------------------------------------

    def _on_response(self, conn: _Connection, data: bytes) -> None:
        if conn is not self._conn or not (self.ready or self._closing):
            return  # a late answer, or one to the negotiation
        self._heard = self._loop.time()
        if data == b"OK" and self._commands.owed:
            if not self._works:
                self._on_success()
            self._commands.take().acknowledged(self)
            if self._closing and not self._commands.owed:
                self._end()
        else:
            said = f"unexpected answer {data[:40]!r}"
            self._lose(said, f"{said} {UNKNOWN}")

    def _on_heartbeat(self, **_: Any) -> None:  # noqa: ANN401 - an event's arguments
        self._heard = self._loop.time()

    def _on_error(self, conn: _Connection, error: Exception) -> None:
        said = error.args[0] if error.args else None
        if conn is not self._conn or not isinstance(said, bytes):
            self._on_close(conn, error)
            return
        text = said.decode("utf-8", "replace")
        self._lose(text, text, refused=True)


class _Connection(Connection):
    """Hears nsqd out before it ends."""

    def send(self, data: bytes) -> Any:  # noqa: ANN401 - pynsq's signature
        """As usual, but after the end nothing is sent and nothing raised: a heartbeat may have come with it."""
        return None if self.stream.closed() else super().send(data)
