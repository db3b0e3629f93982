"""What a program of the field finds around it: NSQ, the reader under test, and where to note what it did.

``Reader`` is `nsq.Reader` or `DedupeReader`, as the environment says, and ``KEY`` what the latter wants beside:
all that a user changes.
"""

from __future__ import annotations

import atexit
import logging
import os
from typing import Any

import nsq

import nsqdedupe

STOCK = os.environ["FIELD_READER"] == "stock"
TOPIC, CHANNEL = os.environ["FIELD_TOPIC"], os.environ["FIELD_CHANNEL"]
NSQDS = os.environ["FIELD_NSQDS"].split(",")


class _Counted(nsqdedupe.DedupeReader):
    """Kept, so that its counters can be told in the end."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        _made.append(self)


_made: list[nsqdedupe.DedupeReader] = []

Reader: type[Any] = nsq.Reader if STOCK else _Counted
KEY: dict[str, Any] = {} if STOCK else {"key": nsqdedupe.BODY}
JSON_ID: dict[str, Any] = {} if STOCK else {"key": nsqdedupe.json_field("id")}

_journal = os.open(os.environ["FIELD_JOURNAL"], os.O_WRONLY | os.O_APPEND | os.O_CREAT)

logging.basicConfig(level=logging.INFO)


def effect(*words: str) -> None:
    """Note something that the program did."""
    os.write(_journal, " ".join(words).encode() + b"\n")


@atexit.register
def _tell_counters() -> None:
    """What nsqd counts as requeued beside what handlers requeued."""
    for reader in _made:
        stats = vars(nsqdedupe.DedupeReader)["stats"].__get__(reader)  # the program may have stats of its own
        effect("stats", str(stats.failed), str(stats.deferred))
