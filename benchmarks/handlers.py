"""The handlers of the contestants: most do nothing but count, so that what is measured is the reader."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from job import STAMP, Job, digest

Handler = Callable[[Any], Any]


class Handling:
    """A handler, and what came of it."""

    def __init__(self, job: Job) -> None:
        self._bodies: set[bytes] = set()
        self._latencies: list[int] = []
        self._job = job
        self.handle: Handler
        self.runs: Callable[[], int]
        """How often it was called."""
        looking = self._look if job.check else self._clock if job.stamped else self._work if job.work else None
        if looking is not None:
            self.handle, self.runs = _looking(looking)
        else:
            self.handle, self.runs = _coroutine() if job.coroutine else _plain()

    def figures(self) -> dict[str, Any]:
        """What it has seen, for those jobs that ask it to look."""
        found: dict[str, Any] = {"runs": self.runs()}
        if self._job.check:
            found["digest"] = digest(self._bodies)
        if self._job.stamped:
            found["latencies_ms"] = [nanoseconds / 1e6 for nanoseconds in sorted(self._latencies)]
        return found

    def _look(self, body: bytes) -> None:
        self._bodies.add(body)

    def _clock(self, body: bytes) -> None:
        """A copy was published when its body says so; of a message the first one counts."""
        now = time.monotonic_ns()
        if body not in self._bodies:
            self._bodies.add(body)
            self._latencies.append(now - int(body[:STAMP], 16))

    def _work(self, _: bytes) -> None:
        end = time.perf_counter() + self._job.work
        while time.perf_counter() < end:
            pass


def _plain() -> tuple[Handler, Callable[[], int]]:
    runs = 0

    def handle(_: object) -> bool:
        nonlocal runs
        runs += 1
        return True

    return handle, lambda: runs


def _coroutine() -> tuple[Handler, Callable[[], int]]:
    runs = 0

    async def handle(_: object) -> bool:
        nonlocal runs
        runs += 1
        return True

    return handle, lambda: runs


def _looking(look: Callable[[bytes], None]) -> tuple[Handler, Callable[[], int]]:
    runs = 0

    def handle(message: Any) -> bool:  # noqa: ANN401 - pynsq's, ours
        nonlocal runs
        runs += 1
        look(message.body)
        return True

    return handle, lambda: runs
