"""Counters: plain integers in the core, and one frozen snapshot for whoever reads them.

Each delivery is counted once when it comes and once when it is answered, so that at any moment

    received = handled + duplicates + failed + deferred + given_up + invalid + unanswered + in_flight
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping


class Tally:
    """What became of the deliveries of one nsqd."""

    __slots__ = ("deferred", "duplicates", "failed", "given_up", "handled", "invalid", "received", "unanswered")

    def __init__(self) -> None:
        self.received = 0
        self.handled = 0
        self.duplicates = 0
        self.failed = 0
        self.deferred = 0
        self.given_up = 0
        self.invalid = 0
        self.unanswered = 0

    @property
    def in_flight(self) -> int:
        """Deliveries that are still open."""
        answered = self.handled + self.duplicates + self.failed + self.deferred
        return self.received - answered - self.given_up - self.invalid - self.unanswered

    def as_dict(self) -> dict[str, int]:
        """Every counter by name, and ``in_flight``."""
        return {**{name: getattr(self, name) for name in self.__slots__}, "in_flight": self.in_flight}


class Events:
    """What else happened; beside the sum."""

    __slots__ = (
        "fatal_errors",
        "fin_failed",
        "key_errors",
        "late_confirms",
        "observed",
        "outages",
        "standbys",
        "store_errors",
        "takeovers",
        "unprotected",
    )

    def __init__(self) -> None:
        self.unprotected = 0
        self.standbys = 0
        self.takeovers = 0
        self.late_confirms = 0
        self.fin_failed = 0
        self.key_errors = 0
        self.store_errors = 0
        self.outages = 0
        self.observed = 0
        self.fatal_errors = 0


@dataclasses.dataclass(frozen=True, slots=True)
class Stats:
    """A snapshot of what a reader did since it was made. Counts deliveries, not messages.

    Attributes:
        received: deliveries that arrived.

        handled: finished after a handler's success.

        duplicates: finished without a handler run, because the message was done (standbys included).

        failed: a handler ran and the copy was requeued.

        deferred: requeued without a handler run.

        given_up: finished because the message had failed ``max_tries`` times.

        invalid: finished because ``validate_message`` said no.

        unanswered: the connection or the lease was gone before an answer.

        in_flight: still open.

        unprotected: handled without a claim (no key, store out of reach, ``store=False``).

        standbys: deliveries that had to wait because another copy was being handled.

        takeovers: standbys that became the owner of their message.

        late_confirms: successes that came after the claim had passed to another copy.

        fin_failed: FINs that nsqd refused, because the message was no longer in flight.

        key_errors: messages whose key could not be had.

        store_errors: claims and confirms that the store did not take.

        outages: how often the store went out of reach.

        observed: with ``observe=True``, deliveries that would have been finished unprocessed.

        fatal_errors: how often an nsqd refused a connection (IDENTIFY, AUTH, SUB, or TLS).

        nsqds: the first eight and ``in_flight`` for each nsqd, by address.
    """

    received: int
    handled: int
    duplicates: int
    failed: int
    deferred: int
    given_up: int
    invalid: int
    unanswered: int
    in_flight: int
    unprotected: int
    standbys: int
    takeovers: int
    late_confirms: int
    fin_failed: int
    key_errors: int
    store_errors: int
    outages: int
    observed: int
    fatal_errors: int
    nsqds: Mapping[str, Mapping[str, int]]

    def as_dict(self) -> dict[str, object]:
        """The same as plain dicts and integers, ready for JSON."""
        names = (field.name for field in dataclasses.fields(self))
        return {
            name: {address: dict(tally) for address, tally in self.nsqds.items()}
            if name == "nsqds"
            else getattr(self, name)
            for name in names
        }


def snapshot(events: Events, tallies: Mapping[str, Tally]) -> Stats:
    """Freeze the counters; the deliveries of all nsqds are added up."""
    nsqds = {address: tally.as_dict() for address, tally in tallies.items()}
    sums = {name: sum(tally[name] for tally in nsqds.values()) for name in (*Tally.__slots__, "in_flight")}
    return Stats(**sums, **{name: getattr(events, name) for name in Events.__slots__}, nsqds=nsqds)
