"""When to try again what failed: soon, then ever more rarely, and never all at the same moment."""

from __future__ import annotations

import random

from nsqdedupe.clock import Clock, monotonic

SHORTEST = 0.1
"""Seconds, and so are all of these: the first pause at most. It doubles from one to the next."""

HURRIED = 1.5
"""The longest pause while a restart is likely."""

HURRY = 30.0
"""For how long after the first failure a restart is likely."""

LONGEST = 60.0
"""The longest pause, unless another is given."""

STEADY = 10.0
"""For how long a connection must have stood for its loss to be a new outage: else it is the same one, goes on."""


class Pauses:
    """The pauses between attempts to connect to one server.

    While an outage is young, a pause is short enough to be back within two seconds of the server's return;
    later they double, up to the longest. Chance shortens each, by half at most.

    Args:
        clock: seconds that never go back.

        longest: seconds of the longest pause.
    """

    def __init__(self, clock: Clock = monotonic, longest: float = LONGEST) -> None:
        self._clock = clock
        self._longest = longest
        self._since: float | None = None
        self._pause = 0.0

    def next(self, *, hurry: bool = True) -> float:
        """Seconds to wait after one more failure.

        Args:
            hurry: a restart may be the cause. If not, the pauses double from the first on.
        """
        now = self._clock()
        if self._since is None:
            self._since = now
        limit = HURRIED if hurry and now - self._since < HURRY else self._longest
        self._pause = min(limit, max(2 * self._pause, SHORTEST))
        return random.uniform(self._pause / 2, self._pause)

    def reset(self) -> None:
        """The outage is over."""
        self._since = None
        self._pause = 0.0
