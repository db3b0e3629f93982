"""What the demo publishes: lines of real text, each a JSON event with an id of its own.

Ids are ``file:line``, so lines with equal text are different events.
"""

from __future__ import annotations

import functools
import itertools
import json
import os
import sysconfig
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from nsqdedupe.errors import DedupeError

LONGEST = 1 << 20
"""Bytes of the longest message an nsqd takes, as it is by default."""

_SKIPPED = {"__pycache__", "dist-packages", "idle_test", "site-packages", "test", "tests"}
"""Directories of the standard library's path that are not the library, or hold files broken on purpose."""


class InputError(DedupeError):
    """The input cannot be published; the text says why, in one line."""


class Event(NamedTuple):
    """One message, as its producer knows it."""

    id: str
    body: bytes


def library_events(limit: int, root: Path | None = None) -> list[Event]:
    """The lines of the standard library's source files, in the order of their paths.

    Args:
        limit: how many at most.

        root: where the files lie; None: the library of the running Python.

    Raises:
        InputError: there are none.
    """
    root = root or Path(sysconfig.get_path("stdlib"))
    events = list(itertools.islice(_library_lines(root), limit))
    if not events:
        raise InputError(f"{_shown(root)} has no Python source files: name a file of your own with --input")
    return events


def file_events(path: Path, limit: int | None = None) -> list[Event]:
    """The lines of any file.

    Args:
        path: the file.

        limit: how many at most; None: all.

    Raises:
        InputError: it is absent, not readable, empty, not UTF-8, or has a line that no nsqd would take.
    """
    try:
        events = list(itertools.islice(_lines(path, path.name), limit))
    except OSError as error:
        raise InputError(f"{_shown(path)}: {error.strerror or error}") from error
    if not events:
        raise InputError(f"{_shown(path)}: is empty, so there is nothing to publish")
    return events


def _library_lines(root: Path) -> Iterator[Event]:
    for directory, subdirectories, names in os.walk(root):
        subdirectories[:] = sorted(set(subdirectories) - _SKIPPED)
        for name in sorted(names):
            if name.endswith(".py"):
                path = Path(directory, name)
                try:
                    yield from list(_lines(path, path.relative_to(root).as_posix()))
                except (OSError, InputError):
                    continue  # a file in another encoding, or one that is gone: there are thousands more


def _lines(path: Path, name: str) -> Iterator[Event]:
    with path.open("rb") as file:
        # No line is read further than it may be long: a file may be one endless line.
        for number, line in enumerate(iter(functools.partial(file.readline, LONGEST), b""), start=1):
            yield _event(path, name, number, line)


def _event(path: Path, name: str, number: int, line: bytes) -> Event:
    if len(line) == LONGEST:
        raise _too_long(path, number)
    try:
        text = line.removesuffix(b"\n").removesuffix(b"\r").decode()
    except UnicodeDecodeError as error:
        raise InputError(f"{_shown(path)}: line {number} is not UTF-8 at byte {error.start + 1}") from error
    event_id = f"{printable(name)}:{number}"
    body = json.dumps({"id": event_id, "text": text}, ensure_ascii=False).encode()
    if len(body) >= LONGEST:
        raise _too_long(path, number)
    return Event(event_id, body)


def _too_long(path: Path, number: int) -> InputError:
    return InputError(f"{_shown(path)}: line {number} is too long: as a message it must be below {LONGEST:,} bytes")


def printable(name: str) -> str:
    """A file's name as text that can be encoded: names may be any bytes."""
    return os.fsencode(name).decode(errors="backslashreplace")


def _shown(path: Path) -> str:
    """A path within a text of one line."""
    shown = printable(str(path))
    return shown if shown.isprintable() else repr(shown)
