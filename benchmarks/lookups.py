"""Looking up and adding: what is measured of a way to remember, and how.

*Warm*: what is needed of it was just looked at. *Cold*: half a gigabyte of other memory was, since.
"""

from __future__ import annotations

import functools
import random
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, TypeVar

from figures import markdown, spread
from memory import Memory

from nsqdedupe import MemoryStore
from nsqdedupe.store import IS_DONE, Claim, Verdict

BATCHES = (1, 10, 100, 1_000)
TABLE_BATCH = 100
AT_ONCE = 10_000
"""Messages of one measurement; half a window where that is less, so that all are remembered."""

T = TypeVar("T")
Deed = Callable[[], None]


def timed(deed: Callable[[], None], count: int) -> float:
    """Nanoseconds of CPU for one of so many."""
    began = time.process_time_ns()
    deed()
    return (time.process_time_ns() - began) / count


class Place(NamedTuple):
    """One line of a report."""

    remembered: int
    way: str


COLUMNS = ("new, warm", "new, cold", "duplicate, warm", "duplicate, cold")


def claims_of(digests: Sequence[bytes]) -> list[Claim]:
    return [Claim(digest, b"127.0.0.1:4150 0123456789abcdef", random.randbytes(16), 62.0) for digest in digests]


def in_batches(items: Sequence[T], size: int) -> list[Sequence[T]]:
    return [items[at : at + size] for at in range(0, len(items), size)]


@dataclass(frozen=True)
class Deeds:
    """What is measured at a place."""

    of: Callable[[Sequence[bytes]], tuple[Deed, Deed]]
    """What is to be done with new messages, and with the same ones as duplicates."""

    look: Callable[[Sequence[bytes]], object]
    """Looks up some messages."""


def measure(deeds: Deeds, remembered: int, other: bytes) -> tuple[float, ...]:
    """Costs in the order of `COLUMNS`.

    Raises:
        SystemExit: it has not answered as it should.
    """
    count = min(AT_ONCE, remembered // 2)
    costs = []
    for cold in (False, True):
        digests = [random.randbytes(16) for _ in range(count)]
        for deed in deeds.of(digests):
            if cold:
                other[::64]
            else:
                deeds.look(digests)
            costs.append(timed(deed, count))
    new_warm, done_warm, new_cold, done_cold = costs
    return new_warm, new_cold, done_warm, done_cold


def compare(places: dict[Place, Deeds], rounds: int) -> dict[Place, list[list[float]]]:
    """What each place costs: for each column the values of all rounds."""
    other = random.randbytes(1 << 20) * (512 if max(places).remembered > AT_ONCE * 10 else 1)
    found: dict[Place, list[list[float]]] = {place: [[] for _ in COLUMNS] for place in places}
    for number in range(rounds):
        for place in random.sample(list(places), len(places)):
            for values, one in zip(found[place], measure(places[place], place.remembered, other), strict=True):
                values.append(one)
        print(f"round {number + 1} of {len(places)} places", file=sys.stderr)
    return found


def table_of(found: dict[Place, list[list[float]]]) -> str:
    rows = [
        [way, f"{remembered:,}", *(spread(values, "{:,.0f}") for values in columns)]
        for (remembered, way), columns in found.items()
    ]
    return markdown(["what", "messages remembered", *(f"{column}, ns" for column in COLUMNS)], rows)


def by_claims(store: MemoryStore, digests: Sequence[bytes], *, batch: int) -> tuple[Deed, Deed]:
    batches, again = (in_batches(claims_of(digests), batch) for _ in range(2))

    def new() -> None:
        for claims in batches:
            if store.claim(claims)[-1].verdict is not Verdict.NEW:
                raise SystemExit("a new message was taken for another one")
            store.confirm(claims)

    def done() -> None:
        for claims in again:
            if store.claim(claims)[-1].verdict is not Verdict.DONE:
                raise SystemExit("a message was forgotten at once")

    return new, done


def by_table(store: MemoryStore, digests: Sequence[bytes], *, at_once: bool) -> tuple[Deed, Deed]:
    batches, table = in_batches(digests, TABLE_BATCH), store.table

    def new() -> None:
        for some in batches:
            if any(table.check_and_set_many(some) if at_once else table.contains_many(some)):
                raise SystemExit("a new message was taken for another one")
            if not at_once:
                table.add_many(some)

    def done() -> None:
        for some in batches:
            if not all(table.contains_many(some)):
                raise SystemExit("a message was forgotten at once")

    return new, done


def by_places(store: MemoryStore, digests: Sequence[bytes]) -> tuple[Deed, Deed]:
    """As a reader does whose handlers return."""
    batches, table = in_batches(digests, TABLE_BATCH), store.table

    def new() -> None:
        for some in batches:
            places = table.places(some)
            if IS_DONE in places:
                raise SystemExit("a new message was taken for another one")
            for fingerprint, place in zip(some, places, strict=True):
                table.add_new(fingerprint, place)

    def done() -> None:
        for some in batches:
            if set(table.places(some)) != {IS_DONE}:
                raise SystemExit("a message was forgotten at once")

    return new, done


def by_other(memory: Memory, digests: Sequence[bytes]) -> tuple[Deed, Deed]:
    batches = in_batches(digests, TABLE_BATCH)

    def new() -> None:
        for some in batches:
            if any(memory.knows(some)):
                raise SystemExit("a new message was taken for another one")
            memory.add(some)

    def done() -> None:
        known = sum(sum(memory.knows(some)) for some in batches)
        if known < 0.98 * len(digests):
            raise SystemExit(f"of {len(digests)} messages {known} were remembered")

    return new, done


WAYS: dict[str, Callable[[MemoryStore, Sequence[bytes]], tuple[Deed, Deed]]] = {
    f"table, batches of {TABLE_BATCH}, looked up and added": functools.partial(by_table, at_once=True),
    f"table, batches of {TABLE_BATCH}, looked up, then added": functools.partial(by_table, at_once=False),
    f"table, batches of {TABLE_BATCH}, looked up, then each added at its place": by_places,
    **{f"store, batches of {batch:,}": functools.partial(by_claims, batch=batch) for batch in BATCHES},
}
