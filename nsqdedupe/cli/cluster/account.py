"""The demo cluster's own account: who published what, and who handled it.

Each program appends to a file of its own in one directory. What was appended is in the kernel's hands, so it
outlives a `kill -9` of its writer, at any moment; and whoever reads the directory later, or again, sees it all.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterable, Iterator
from pathlib import Path

PUBLISHED = "published"
"""Every nsqd has acknowledged it."""

HANDLED = "handled"
"""A handler has done its work."""

DUPLICATES = "duplicates"
"""How many copies the reader has finished unprocessed so far."""


def event_id(run: str, number: int) -> str:
    """An event's id: which run of the publisher made it, and which one of them it is."""
    return f"{run}-{number}"


def number_of(event: str) -> int:
    """Which one of its run an event is."""
    return int(event.rpartition("-")[2])


class Journal:
    """Where one program writes down what it has done.

    Args:
        directory: that of the account.

        name: the program's; each start of it has a file of its own.
    """

    def __init__(self, directory: Path, name: str) -> None:
        path = directory / f"{name}.{time.time_ns():x}.journal"
        self._descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND, 0o644)

    def write(self, word: str, facts: Iterable[object]) -> None:
        """Append a line for each fact, all of them in one write."""
        os.write(self._descriptor, "".join(f"{word} {fact}\n" for fact in facts).encode())


class Account:
    """All journals of a directory, read as they grow.

    Args:
        directory: where they are, and will be.
    """

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._offsets: dict[Path, int] = {}
        self._duplicates: dict[Path, int] = {}
        self._handled: set[str] = set()
        self._twice: set[str] = set()
        self.published = 0
        """How many events all nsqds have acknowledged."""
        self.waiting: set[str] = set()
        """The events that were published and are not yet handled."""

    @property
    def handled(self) -> int:
        """How many events were handled, be it once or more."""
        return len(self._handled)

    @property
    def twice(self) -> int:
        """How many events were handled more than once."""
        return len(self._twice)

    @property
    def duplicates(self) -> int:
        """How many copies were finished unprocessed, as each reader said last."""
        return sum(self._duplicates.values())

    def read(self) -> None:
        """Read what was appended since the last time."""
        for path in sorted(self._directory.glob("*.journal")):
            for word, fact in self._appended(path):
                if word == PUBLISHED:
                    self.published += 1
                    if fact not in self._handled:
                        self.waiting.add(fact)
                elif word == HANDLED:
                    (self._twice if fact in self._handled else self._handled).add(fact)
                    self.waiting.discard(fact)
                else:
                    self._duplicates[path] = int(fact)

    def _appended(self, path: Path) -> Iterator[tuple[str, str]]:
        offset = self._offsets.get(path, 0)
        with path.open("rb") as file:
            file.seek(offset)
            new = file.read()
        whole = new[: new.rfind(b"\n") + 1]  # its writer may be in the middle of a line
        self._offsets[path] = offset + len(whole)
        for line in whole.decode().splitlines():
            word, _, fact = line.partition(" ")
            yield word, fact
