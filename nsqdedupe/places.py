"""Who takes one of the places that ``max_in_flight`` gives, as `nsq.Reader.is_starved` counts them."""

from __future__ import annotations

from collections.abc import Iterable

from nsqdedupe.connection import Connection
from nsqdedupe.message import Message

ENOUGH = 0.85
"""Share of a connection's RDY in flight at which `nsq.Reader.is_starved` is true."""


class Places:
    """Keeps ``in_flight`` of each connection: messages that handlers have, and copies that wait for them.

    Messages whose turn has not come count when it comes. Else `is_starved` would be true as soon as a batch
    arrives, and a handler that buffers messages until it is would always find a buffer of one.
    """

    def __init__(self) -> None:
        self._held = 0

    def enter(self, message: Message) -> None:
        """It takes a place in flight, and is not one that only waits."""
        if not message.counted:
            message.counted = True
            message.conn.in_flight += 1
        elif message.held:
            message.held = False
            self._held -= 1

    def leave(self, message: Message) -> None:
        """Its place is free."""
        if message.counted:
            message.counted = False
            message.conn.in_flight -= 1
            if message.held:
                message.held = False
                self._held -= 1

    def hold(self, message: Message) -> None:
        """It takes a place, but only waits for another copy."""
        if not message.counted:
            self.enter(message)
            message.held = True
            self._held += 1

    def all_held(self, conns: Iterable[Connection]) -> bool:
        """Whether copies of what handlers have and did not answer could take all places of every connection.

        They wait then, and no handler is called until it answers what it has.
        """
        connections = list(conns)
        unanswered = sum(conn.in_flight for conn in connections) - self._held
        widest = max((conn.last_rdy for conn in connections), default=0)
        return 0 < unanswered >= ENOUGH * widest
