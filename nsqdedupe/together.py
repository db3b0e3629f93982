"""Runs what came together in one loop: what the ways of messages to their handlers share."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from nsqdedupe.delivery import Delivery
from nsqdedupe.port import Port


def run_together(
    port: Port, ready: deque[Delivery], record: Callable[[bytes, int], None], until: float
) -> Delivery | None:
    """Have all that is ready run, as far as that goes, and count the successes; see `Port.run_on`.

    Returns:
        The last one, if it has not succeeded in one go.
    """
    source, waiting = ready[0].source, len(ready)
    left: Delivery | None = None
    broken_off = True
    try:
        left = port.run_on(ready, waiting, record, until)
        broken_off = False
    finally:
        # Who asks the application to stop has been answered, and is none that succeeded.
        source.tally.handled += waiting - len(ready) - (left is not None or broken_off)
    return left
