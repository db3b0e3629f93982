"""`ReplicatedWriter`: publishes each message to several nsqds, so that the loss of one loses nothing."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Sequence
from typing import Any

import nsq

from nsqdedupe import checks
from nsqdedupe.commands import mpub, pub
from nsqdedupe.connection import check_pynsq
from nsqdedupe.errors import ConfigError, PublishError
from nsqdedupe.options import CHECKS, check_options
from nsqdedupe.pipeline import UNKNOWN, Pipeline
from nsqdedupe.publication import Publication
from nsqdedupe.version import USER_AGENT


class ReplicatedWriter:
    """Publishes each message to ``copies`` different nsqds. Consumers that de-duplicate handle it once.

    It connects when it is used first, and again whenever a connection is lost (after pauses of 0.1 s, then
    longer ones, up to 60 s). Publishes rotate over the nsqds that are connected. When one fails, another
    one that was not asked yet takes its place, as soon as it is connected. An nsqd that answers nothing for
    ``timeout`` seconds (half of it while others are to spare) is taken for lost.

    Make one per event loop, inside or outside of it; call it from that loop's thread. Nothing here blocks.

    Args:
        nsqd_tcp_addresses: ``host:port`` of each nsqd, each nsqd under one name only.

        copies: on how many nsqds a message must be, from 1 to the number of addresses.

        timeout: seconds that a publish may take, connecting included; greater than 0.

        kwargs: options of `nsq.AsyncConn`, for example ``tls_v1``, ``snappy`` or ``auth_secret``.

    Raises:
        ConfigError: an option is unknown, of the wrong type, out of range or in conflict with another;
            nothing was started.

        MissingDependency: the installed pynsq is not one that this package knows.
    """

    def __init__(
        self,
        nsqd_tcp_addresses: str | list[str] | tuple[str, ...] | set[str],
        copies: int = 2,
        *,
        timeout: float = 5.0,
        **kwargs: Any,  # noqa: ANN401 - pynsq's options, checked below
    ) -> None:
        check_pynsq()
        options = _check_options({"nsqd_tcp_addresses": nsqd_tcp_addresses, "user_agent": USER_AGENT, **kwargs})
        given = options.pop("nsqd_tcp_addresses")
        remedy = "a message has one copy per nsqd at most: ask for fewer, or give more nsqd_tcp_addresses"
        self._copies = checks.integer("copies", copies, 1, len(given), remedy)
        self._timeout = checks.number("timeout", timeout, 0, open_low=True)
        self._pipelines = [
            Pipeline(address, options, timeout=self._timeout, patience=self._patience, changed=self._on_changed)
            for address in given
        ]
        if len({pipeline.endpoint for pipeline in self._pipelines}) < len(given):
            raise checks.refuse("nsqd_tcp_addresses", given, "different addresses", "name each nsqd once")
        self._ready: list[Pipeline] = []
        self._turn = 0
        self._publications: set[Publication] = set()
        self._waiting: dict[Publication, None] = {}
        """Those that need more nsqds than are connected, oldest first."""
        self._loop: asyncio.AbstractEventLoop | None = None
        self._ended = ""

    async def publish(self, topic: str, body: bytes) -> tuple[str, ...]:
        """Publish a message.

        If the task is cancelled meanwhile, copies that were sent may be published all the same.

        Args:
            topic: a topic name as nsqd takes it.

            body: 1 byte or more, up to nsqd's ``--max-msg-size``.

        Returns:
            The addresses of the nsqds that acknowledged it, ``copies`` of them.

        Raises:
            PublishError: fewer acknowledged it within ``timeout`` seconds, or it is certain already that
                fewer will. Publishing it again is safe.

            ConfigError: topic or body is none; nothing was sent.
        """
        return await self._publish(pub(topic, body))

    async def publish_many(self, topic: str, bodies: Sequence[bytes]) -> tuple[str, ...]:
        """Publish several messages in one command, to the same nsqds.

        Args:
            topic: a topic name as nsqd takes it.

            bodies: of one message or more, all together up to nsqd's ``--max-body-size``.

        Returns:
            As `publish`.

        Raises:
            PublishError: as `publish`.

            ConfigError: the topic or one of the bodies is none, or there is no body; nothing was sent.
        """
        return await self._publish(mpub(topic, bodies))

    async def stop(self, timeout: float = 30) -> int:  # noqa: ASYNC109 - what is left is counted, not cancelled
        """Stop gracefully: take no more publishes, wait until the pending ones are answered, close.

        Args:
            timeout: seconds to wait, 0 or more.

        Returns:
            Number of publishes that were pending still, and failed: 0 if all were answered in time.
        """
        checks.number("timeout", timeout, 0)
        self._ended = self._ended or "the writer is stopping"
        pending = [publication.future for publication in self._publications]
        if pending:
            await asyncio.wait(pending, timeout=timeout)
        left = sum(not future.done() for future in pending)
        self.close()
        return left

    def close(self) -> None:
        """Close at once: pending publishes raise PublishError. Idempotent."""
        self._ended = "the writer is closed"
        for publication in self._publications:
            unanswered = f"the writer was closed before its answer {UNKNOWN}"
            publication.give_up(self._pipelines, unanswered, "the writer was closed before it was connected")
        for pipeline in self._pipelines:
            pipeline.close()
        self._ready = []

    # -- publishing ------------------------------------------------------------------------------

    async def _publish(self, command: bytes) -> tuple[str, ...]:
        loop = asyncio.get_running_loop()
        if self._ended:
            text = f"published to 0 of {self._copies} nsqds: {self._ended}; make another one"
            raise PublishError(text, acknowledged=(), failed={})
        if self._loop is None:
            self._loop = loop
            for pipeline in self._pipelines:
                pipeline.start()
        elif self._loop is not loop:
            raise ConfigError("this writer was used on another event loop: make one writer per event loop")
        publication = Publication(command, self._copies, loop.create_future(), self._place)
        self._publications.add(publication)
        # One turn after it has run out: when the loop was blocked, answers that have come are read before.
        timer = loop.call_later(self._timeout, loop.call_soon, self._on_late, publication)
        self._place(publication)
        try:
            return await publication.future
        finally:
            timer.cancel()
            self._publications.discard(publication)
            self._waiting.pop(publication, None)

    def _place(self, publication: Publication) -> None:
        """Ask as many more nsqds as it needs. If there are not enough, let it wait, or fail if that cannot help."""
        ready = self._ready
        self._turn += 1
        for turn in range(self._turn, self._turn + len(ready)):
            if not publication.unplaced:
                break
            publication.ask(ready[turn % len(ready)])
        if publication.unplaced and publication.asked < len(self._pipelines):
            self._waiting[publication] = None
            return
        self._waiting.pop(publication, None)
        if publication.unplaced and publication.hangs:
            publication.give_up(self._pipelines, "")

    def _on_late(self, publication: Publication) -> None:
        publication.give_up(self._pipelines, f"no answer within {self._timeout:g} s {UNKNOWN}")

    def _on_changed(self) -> None:
        self._ready = [pipeline for pipeline in self._pipelines if pipeline.ready]
        for publication in list(self._waiting):
            if not publication.future.done():
                self._place(publication)

    def _patience(self) -> float:
        # With nsqds to spare it costs little to take a slow one for lost, and publishes still succeed elsewhere.
        return self._timeout / 2 if len(self._ready) > self._copies else self._timeout


def _check_options(options: dict[str, Any]) -> dict[str, Any]:
    """Those of a connection only; a writer has no topic, channel or handler."""
    known = [name for name in inspect.signature(nsq.AsyncConn).parameters if name in CHECKS and name != "timeout"]
    unknown = sorted(set(options) - {"nsqd_tcp_addresses", *known})
    if unknown:
        known = ["nsqd_tcp_addresses", "copies", "timeout", *known]
        raise ConfigError(f"unknown option {unknown[0]!r}: known are {', '.join(known)}")
    if not checks.strings("nsqd_tcp_addresses", options["nsqd_tcp_addresses"]):
        raise ConfigError("nsqd_tcp_addresses is empty: give 'host:port' of each nsqd to publish to")
    return check_options(options)
