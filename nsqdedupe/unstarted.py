"""Notices a reader whose event loop does not run: built before ``asyncio.run()``, it belongs to another loop."""

from __future__ import annotations

import asyncio
import logging
import threading

logger = logging.getLogger(__name__)

PATIENCE = 10.0
"""Seconds from the making of a reader to the warning; a program may have things to do before it starts the loop."""


class StartWatch:
    """Warns if a reader that was made outside of a running event loop is not started.

    Args:
        name: of the reader.
    """

    def __init__(self, name: str) -> None:
        self._timer: threading.Timer | None = None
        try:
            asyncio.get_running_loop()
        except RuntimeError:
            # Not a timer of the loop: that one may never run.
            self._timer = threading.Timer(PATIENCE, _warn, (name,))
            self._timer.daemon = True
            self._timer.start()

    def stop(self) -> None:
        """It was started, or shall not be any more. Idempotent."""
        if self._timer is not None:
            self._timer.cancel()


def _warn(name: str) -> None:
    logger.warning(
        "[%s] made %g s ago and not started: the event loop that was current then does not run. Make the reader "
        "inside the coroutine that asyncio.run() gets, or run that loop with nsqdedupe.run()",
        name,
        PATIENCE,
    )
