"""Which messages would be the same message? Counts the bodies on standard input, one a line, under several keys.

A key that finds fewer different messages than there are takes some for copies of others, and would have them dropped;
one that finds more sees the copies of a message as different ones. Bodies without a key are handled unprotected.
"""

from __future__ import annotations

import dataclasses
import json
import sys
from collections.abc import Callable

import nsqdedupe


@dataclasses.dataclass
class Sample:
    """A body that stands for a message."""

    body: bytes


def order_and_step(message: Sample) -> str:
    """A key of one's own: several fields that name the event together. It may raise: then there is no key."""
    event = json.loads(message.body)
    return f"{event['order']}/{event['step']}"


KEYS: dict[str, Callable[[Sample], bytes | str]] = {
    "BODY": nsqdedupe.BODY,
    'json_field("id")': nsqdedupe.json_field("id"),
    "order_and_step": order_and_step,
}


def main() -> None:
    samples = [Sample(line.rstrip(b"\r\n")) for line in sys.stdin.buffer]
    print(f"{len(samples)} bodies")
    for name, key in KEYS.items():
        seen: set[bytes | str] = set()
        without = 0
        for sample in samples:
            try:
                seen.add(key(sample))
            except (nsqdedupe.KeyExtractionError, ValueError, LookupError, TypeError):
                without += 1
        print(f"{name}: {len(seen)} different messages, {without} bodies without a key")


if __name__ == "__main__":
    main()
