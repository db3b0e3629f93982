"""`Cluster`: the nsqds that a writer can publish to, given or found: how many there are, which to take next."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Literal

from nsqdedupe import checks
from nsqdedupe.lookupd import Endpoint, NodesPoll
from nsqdedupe.pipeline import Pipeline

logger = logging.getLogger(__name__)

Copies = int | Literal["quorum", "all"]

_POLLS_UNTIL_FORGOTTEN = 10
"""An nsqd that no nsqlookupd lists and that is not connected is tried for so many polls: mostly it restarts."""


class Member:
    """An nsqd of the cluster.

    Args:
        pipeline: publishes to it.

        given: it was given by address, so it is never forgotten.
    """

    def __init__(self, pipeline: Pipeline, *, given: bool) -> None:
        self.pipeline = pipeline
        self.given = given
        self.listed = False
        """The last poll found it."""
        self.missed = 0
        """How many polls since then have not found it."""
        self.hidden: frozenset[str] = frozenset()
        """The topics for which it is tombstoned: their consumers do not look for it."""
        self.twin = False
        """It is another name of an nsqd that is connected already."""

    def counts(self, topic: str) -> bool:
        """Whether it is one of those that "all" means."""
        known = self.given or self.listed or self.pipeline.ready
        return known and not self.twin and topic not in self.hidden


class Cluster:
    """The nsqds to publish to. Each that is known is connected to.

    Args:
        given: addresses of nsqds.

        lookupds: addresses of nsqlookupds that know more.

        interval: seconds between two polls of these.

        copies: how many of the nsqds a message must be on.

        make: makes a pipeline to an address; it must call `look` when that is ready or no longer.

        changed: called when more or fewer are ready, or known.
    """

    def __init__(
        self,
        given: Sequence[str],
        lookupds: Sequence[str],
        interval: float,
        copies: Copies,
        *,
        make: Callable[[str], Pipeline],
        changed: Callable[[], None],
    ) -> None:
        self._make = make
        self._changed = changed
        self._copies = copies
        self._members: dict[Endpoint, Member] = {}
        for address in given:
            self._members[checks.tcp_address("nsqd_tcp_addresses", address)] = Member(make(address), given=True)
        self.ready: list[Pipeline] = []
        """Those that take commands."""
        self._turn = 0
        self._told: set[Endpoint] = set()
        self._poll = NodesPoll(lookupds, interval, found=self._on_found, enough=self._enough) if lookupds else None
        self._polled = self._poll is None

    def start(self) -> None:
        """Connect, on the running loop, to those that are known, and look for others."""
        for member in self._members.values():
            member.pipeline.start()
        if self._poll is not None:
            self._poll.start()

    def close(self) -> None:
        """Close all connections, each when what was sent is answered. Returns at once. Idempotent."""
        if self._poll is not None:
            self._poll.stop()
        for member in self._members.values():
            member.pipeline.close()
        self.ready = []

    # -- what there is ---------------------------------------------------------------------------

    def known(self, topic: str = "") -> list[Pipeline]:
        """Those that may get messages of a topic, ready or not."""
        return [member.pipeline for member in self._members.values() if member.counts(topic)]

    def wanted(self, topic: str = "") -> int:
        """How many nsqds must acknowledge a message of a topic. 0: that is not known yet."""
        if isinstance(self._copies, int):
            return self._copies
        known = len(self.known(topic)) if self._polled else 0
        return known // 2 + 1 if self._copies == "quorum" and known else known

    def may_grow(self) -> bool:
        """Whether nsqds may yet be found that are needed."""
        return self._poll is not None and not self._enough()

    def shortage(self, topic: str) -> str:
        """What to tell of the nsqds that were looked for and not found. "": nothing."""
        known = len(self.known(topic))
        if self._polled and known >= max(self.wanted(topic), 1):
            return ""
        trouble = self._poll.trouble if self._poll is not None else {}
        return "; ".join([f"{known} nsqds known", *(f"nsqlookupd {at}: {text}" for at, text in trouble.items())])

    def next_ready(self, topic: str) -> Iterator[Pipeline]:
        """Those that take commands now: those that owe least first, in turn among equals."""
        ready = self.ready
        self._turn += 1
        start = self._turn % len(ready) if ready else 0
        order = sorted(ready[start:] + ready[:start], key=lambda pipeline: pipeline.load)
        hidden = [member.pipeline for member in self._members.values() if topic in member.hidden]
        return (pipeline for pipeline in order if pipeline not in hidden) if hidden else iter(order)

    def look(self) -> None:
        """See which are ready."""
        taken: dict[object, Pipeline] = {}
        # Those that were ready before stay: messages may be on their way there.
        for endpoint, member in sorted(self._members.items(), key=lambda item: item[1].pipeline not in self.ready):
            pipeline = member.pipeline
            if pipeline.ready:
                # None: it was ready, and its connection has ended since. That is nobody else's.
                first = taken.setdefault(pipeline.peer or pipeline, pipeline)
                member.twin = first is not pipeline
                if member.twin and endpoint not in self._told:
                    self._told.add(endpoint)
                    logger.warning("[%s] is the same nsqd as %s: left out", pipeline.address, first.address)
        self.ready = list(taken.values())
        self._changed()

    # -- what nsqlookupd says --------------------------------------------------------------------

    def _enough(self) -> bool:
        return len(self.known()) >= max(self.wanted(), 1)

    def _on_found(self, nodes: Mapping[Endpoint, frozenset[str]]) -> None:
        for host, port in nodes.keys() - self._members.keys():
            address = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
            member = self._members[host, port] = Member(self._make(address), given=False)
            member.pipeline.start()
        for endpoint, member in list(self._members.items()):
            member.listed = endpoint in nodes
            member.hidden = nodes.get(endpoint, frozenset())
            member.missed = 0 if member.listed or member.pipeline.ready else member.missed + 1
            if member.missed > _POLLS_UNTIL_FORGOTTEN and not member.given:
                del self._members[endpoint]
                member.pipeline.close()
        self._polled = True
        self._changed()
