"""Traces of handler runs that outlive the process: for messages that kill whoever handles them."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence

from nsqdedupe.delivery import Care, Delivery, State
from nsqdedupe.ledger import Ledger


class Traces:
    """Has the store note each run that is about to begin, one after the other.

    A redelivery may be one because its process died. Only one at a time is between its note and its start, so that
    a process which dies of a message leaves no trace of those that merely came next.

    Args:
        ledger: where the traces are left.

        go_on: called with each delivery whose trace is made, to start it; ``ours``: whether it still has its message.
    """

    def __init__(self, ledger: Ledger, go_on: Callable[..., None]) -> None:
        self._ledger = ledger
        self._go_on = go_on
        self._queue: deque[Delivery] = deque()

    def leave(self, delivery: Delivery) -> None:
        """Note a run; it begins when that is done."""
        delivery.state = State.ASKED
        self._queue.append(delivery)
        if len(self._queue) == 1:
            self._next()

    def _next(self) -> None:
        delivery = self._queue[0]

        def noted(ours: Sequence[bool]) -> None:
            delivery.care = Care.TRIES
            try:
                self._go_on(delivery, ours=ours[0])
            finally:
                self._queue.popleft()
                if self._queue:
                    self._next()

        assert delivery.claim is not None  # noqa: S101 - only claims leave traces
        self._ledger.start([delivery.claim], noted)
