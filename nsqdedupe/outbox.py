"""`Outbox`: from messages that were accepted to commands that are sent, answered or given up."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from nsqdedupe.cluster import Cluster
from nsqdedupe.commands import ALONE
from nsqdedupe.errors import PublishError
from nsqdedupe.permits import Permits
from nsqdedupe.pipeline import UNKNOWN
from nsqdedupe.publication import Publication, publish_error

BATCH = 500
"""Messages of one command at most: what comes of it is told to so many tasks in one turn of the loop."""

BATCH_BYTES = ALONE // 4
"""Bytes of a command of several messages at most."""

LINGER = 0.002
"""Seconds that messages wait for others at most, while an earlier command is not answered."""

_DEFAULT_MAX_DEFER_MS = 3_600_000
"""Nsqd's default for --max-req-timeout. What is deferred for longer may well be refused."""


class Outbox:
    """Gathers messages into batches, sends these to the nsqds of a cluster, and sees to it that each one ends.

    Args:
        cluster: where to.

        permits: one for each message; they are given back when what they were taken for has ended.

        timeout: seconds that a publication may take.
    """

    def __init__(self, cluster: Cluster, permits: Permits, timeout: float) -> None:
        self.most = min(BATCH, permits.limit)
        """Messages of one command at most."""
        self.most_bytes = BATCH_BYTES
        """Bytes of a command of several messages at most."""
        self._cluster = cluster
        self._permits = permits
        self._timeout = timeout
        self._batches: dict[str, Publication] = {}
        """Those that take more messages in, by topic."""
        self._turn_ends = False
        self._linger: asyncio.TimerHandle | None = None
        self._publications: set[Publication] = set()
        """All that are not settled."""
        self._sent = 0
        """How many of them were sent, as far as there were nsqds."""
        self._waiting: dict[Publication, None] = {}
        """Those that need more nsqds than are connected, oldest first."""
        self._loop: asyncio.AbstractEventLoop

    def start(self, loop: asyncio.AbstractEventLoop) -> None:
        """From now on it may be used, on this event loop."""
        self._loop = loop

    # -- collecting ------------------------------------------------------------------------------

    def batch(self, topic: str, size: int) -> Publication:
        """The batch of a topic, one that has room for so many bytes. It is sent by itself, or with `send_batch`."""
        batch = self._batches.get(topic)
        if batch is not None and batch.size + size <= self.most_bytes:
            return batch
        self.send_batch(topic)
        batch = self._batches[topic] = self.new(topic)
        if not self._turn_ends:
            self._turn_ends = True
            self._loop.call_soon(self._on_turn_end)
        return batch

    def new(self, topic: str, defer_ms: int = 0) -> Publication:
        """A publication of its own, to be sent with `send`. Its time runs from now on."""
        publication = Publication(
            topic,
            place=self._place,
            settled=self._on_settled,
            split=self._on_split,
            defer_ms=defer_ms,
            alone=defer_ms > _DEFAULT_MAX_DEFER_MS,
        )
        self._publications.add(publication)
        self._time(publication, self._timeout)
        return publication

    def _time(self, publication: Publication, seconds: float) -> None:
        # One turn after it has run out: when the loop was blocked, answers that have come are read before.
        publication.timer = self._loop.call_later(seconds, self._loop.call_soon, self._on_late, publication)

    def _on_turn_end(self) -> None:
        self._turn_ends = False
        if not self._sent:
            self.send_batches()
        elif self._batches and self._linger is None:
            # An nsqd that is busy is better served with fewer commands; the next answer sends them, too.
            self._linger = self._loop.call_later(LINGER, self.send_batches)

    def has_batch(self, topic: str) -> bool:
        """Whether there is one that takes more messages in."""
        return topic in self._batches

    def send_batches(self) -> None:
        """Send all batches now."""
        if self._linger is not None:
            self._linger.cancel()
            self._linger = None
        for topic in list(self._batches):
            self.send_batch(topic)

    def send_batch(self, topic: str) -> None:
        """Send the batch of a topic now, if there is one."""
        batch = self._batches.pop(topic, None)
        if batch is not None:
            self.send(batch)

    # -- sending ---------------------------------------------------------------------------------

    def send(self, publication: Publication) -> None:
        """Send a publication to as many nsqds as it needs."""
        if not publication.done:
            self._sent += 1
            publication.sent = True
            self._place(publication)

    def _place(self, publication: Publication) -> None:
        """Ask as many more nsqds as it needs. If there are not enough, let it wait, or fail if that cannot help."""
        topic = publication.topic
        publication.aim(self._cluster.wanted(topic))
        for pipeline in self._cluster.next_ready(topic):
            if publication.done or publication.unplaced <= 0:
                break
            publication.ask(pipeline)
        if publication.done:
            return
        wants = publication.unplaced > 0 or not publication.copies
        known = self._cluster.known(topic)
        if wants and (self._cluster.may_grow() or not all(map(publication.was_asked, known))):
            self._waiting[publication] = None
            return
        self._waiting.pop(publication, None)
        if wants and publication.hangs:
            self._give_up(publication, "")

    def changed(self) -> None:
        """There are more nsqds, or fewer."""
        for publication in list(self._waiting):
            if not publication.done:
                self._place(publication)

    # -- the end of a publication ----------------------------------------------------------------

    def _on_settled(self, publication: Publication) -> None:
        self._forget(publication)
        self._permits.give(publication.count)
        if publication.sent:
            self._sent -= 1
            if self._batches:
                self.send_batches()

    def _forget(self, publication: Publication) -> None:
        if publication.timer is not None:
            publication.timer.cancel()
        self._publications.discard(publication)
        self._waiting.pop(publication, None)
        if self._batches.get(publication.topic) is publication:
            del self._batches[publication.topic]

    def _on_split(self, publication: Publication, parts: Sequence[Publication], reason: str) -> None:
        """Nsqd refused a command for one of its messages, or for its size."""
        if reason.startswith("E_BAD_BODY"):
            self.most_bytes = max(self.most_bytes // 2, 1)
        timer = publication.timer
        left = self._timeout if timer is None else timer.when() - self._loop.time()
        self._forget(publication)
        self._sent -= 1
        self._publications.update(parts)
        for part in parts:
            self._time(part, left)
        for part in parts:
            self.send(part)

    def _on_late(self, publication: Publication) -> None:
        # First, or they would get the permits that it gives back, and wait as long again.
        self._permits.refuse(self._not_accepted, before=self._loop.time() - self._timeout / 2)
        self._give_up(publication, f"no answer within {self._timeout:g} s {UNKNOWN}")

    def _not_accepted(self) -> PublishError:
        text = f"not accepted within {self._timeout / 2:g} s, max_pending={self._permits.limit} others are pending"
        down = [pipeline for pipeline in self._cluster.known() if not pipeline.ready]
        return self.refusal(text, {pipeline.address: f"not connected: {pipeline.trouble}" for pipeline in down})

    def refusal(self, text: str, failed: dict[str, str] | None = None) -> PublishError:
        """The error of a message that was never accepted."""
        return publish_error(self._cluster.wanted(), (), failed or {}, text)

    def give_up_all(self, unanswered: str, unasked: str) -> None:
        """Let all that is pending fail, for these reasons (see `Publication.give_up`)."""
        for publication in list(self._publications):
            self._give_up(publication, unanswered, unasked)

    def _give_up(self, publication: Publication, unanswered: str, unasked: str = "") -> None:
        topic = publication.topic
        publication.give_up(self._cluster.known(topic), unanswered, unasked, self._cluster.shortage(topic))
