"""Runs what came together in one loop: what the ways of messages to their handlers share."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from nsqdedupe.delivery import Delivery
from nsqdedupe.metrics import Tally
from nsqdedupe.port import Port

RunTogether = Callable[[Callable[[bytes, int], None], float], Delivery | None]
"""`Together.run`."""


class Together:
    """Runs what is ready, and counts the successes: all at the end of a loop, or when somebody asks before.

    Args:
        port: calls handlers.

        ready: deliveries whose turn is to come, in order.
    """

    def __init__(self, port: Port, ready: deque[Delivery]) -> None:
        self._port = port
        self._ready = ready
        self._tally: Tally | None = None
        """Of what is being run."""
        self._uncounted = 0
        """How many were ready before the first of those that are not counted yet."""

    def run(self, record: Callable[[bytes, int], None], until: float) -> Delivery | None:
        """Have all that is ready run, as far as that goes; see `Port.run_on`.

        Returns:
            The last one, if it has not succeeded in one go.
        """
        ready = self._ready
        self._tally = tally = ready[0].source.tally
        self._uncounted = len(ready)
        left: Delivery | None = None
        broken_off = True
        try:
            left = self._port.run_on(ready, len(ready), record, until)
            broken_off = False
        finally:
            self._tally = None
            # Who asks the application to stop has been answered, and is none that succeeded.
            tally.handled += self._uncounted - len(ready) - (left is not None or broken_off)
        return left

    def count(self) -> None:
        """Count the successes so far, for a handler that looks at the counters: its own message is none yet."""
        if self._tally is not None:
            before = len(self._ready) + 1
            self._tally.handled += self._uncounted - before
            self._uncounted = before
