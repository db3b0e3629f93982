"""pynsq's `Client`, whose look after stale connections can be stopped."""

from __future__ import annotations

from typing import Any

import nsq.client
from tornado.ioloop import IOLoop, PeriodicCallback

LOOK_EVERY = 60.0
"""Seconds between looks after connections that have been silent for two heartbeats; pynsq's own."""


class Client(nsq.client.Client):
    """Stands between `nsq.Reader` and `nsq.client.Client`, as a further base class of a reader.

    pynsq keeps no handle of the timer that looks after stale connections: it would hold a closed reader, and all
    that it remembers, as long as the event loop runs.
    """

    def __init__(self, **_: Any) -> None:  # noqa: ANN401 - pynsq's options, which its own ignores too
        # All that pynsq's own does, which is therefore not called.
        self.io_loop = IOLoop.current()
        self.__look = PeriodicCallback(self._check_last_recv_timestamps, LOOK_EVERY * 1000)
        self.__look.start()

    def _stop_looking(self) -> None:
        """Look after connections no more."""
        self.__look.stop()
