"""One connection of a stock `nsq.Reader`, as seen by what answers on it: answers are written many at a time.

pynsq takes one message at a time from what it has read, and writes each answer at once: a packet each, for nsqd as
well. Here the answers to what was read in one go are one write, the sooner the slower the handler is.
"""

from __future__ import annotations

from typing import Any

import nsq
import nsq.event
import nsq.protocol

from nsqdedupe.clock import monotonic
from nsqdedupe.delivery import Source

PROMPT = 0.001
"""Seconds: after a handler that took longer, answers are written at once."""

LATEST = 0.008
"""Seconds that an answer may wait for others while handlers are quicker than that."""

TOGETHER = 1 << 14
"""Bytes of answers that are written in any case."""


class Line:
    """Collects answers and writes them.

    Args:
        conn: the connection.

        source: counts its deliveries.

        reader: the stock reader that it belongs to; None: it is not known.

        in_scope: whether it reads what the handler was decorated for.
    """

    def __init__(self, conn: nsq.AsyncConn, source: Source, reader: Any, *, in_scope: bool) -> None:  # noqa: ANN401
        self.conn = conn
        self.source = source
        self.reader = reader
        self.in_scope = in_scope
        self.owner_prefix = f"{conn.id}/".encode()
        self._out = bytearray()
        self._close = conn.close
        # Its own attribute from now on: what is answered shall be written before it closes, as in pynsq.
        conn.close = self.close  # type: ignore[method-assign]
        self._since = 0.0

    @property
    def tests(self) -> bool:
        """Whether a backoff waits for the outcome of a message."""
        reader = self.reader
        return reader is not None and reader.backoff_timer.get_interval() > 0 and not reader.backoff_block

    @property
    def hears_of_successes(self) -> bool:
        """Whether a success may change anything: while nothing has failed, it does not."""
        reader = self.reader
        return reader is None or bool(reader.backoff_timer.get_interval()) or not reader.backoff_block_completed

    def may_have_again(self, attempts: int) -> bool:
        """Whether a message that nsqd has given out so often can be sent back, and is not given up when it comes."""
        return self.reader is not None and (not self.reader.max_tries or attempts + 1 < self.reader.max_tries)

    def send(self, command: bytes) -> None:
        """Write a command, soon."""
        if not self._out:
            self._since = monotonic()
        self._out += command

    def flush_in_time(self, began: float) -> None:
        """Write what waits, unless more is about to come of messages that were read already.

        Args:
            began: when the handler of the latest message was called.
        """
        if not self._out:
            return
        now = monotonic()
        more = getattr(self.conn.stream, "_read_buffer_size", 0)  # tornado's own; without it nothing is put off
        if not more or now - began > PROMPT or now - self._since > LATEST or len(self._out) > TOGETHER:
            self.flush()

    def close(self) -> None:
        """Write what waits, and close the connection."""
        self.flush()
        self._close()

    def flush(self) -> None:
        """Write what waits."""
        if not self._out:
            return
        data = bytes(self._out)
        self._out.clear()
        if self.conn.closed():
            return
        try:
            self.conn.send(data)
        except Exception as error:  # noqa: BLE001 - as pynsq does: a connection that cannot answer is no use
            self._close()
            error = nsq.protocol.SendError("failed to answer", error)
            self.conn.trigger(nsq.event.ERROR, conn=self.conn, error=error)
