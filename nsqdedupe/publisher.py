"""`ReplicatedWriter`: publishes each message to several nsqds, so that the loss of one loses nothing."""

from __future__ import annotations

import asyncio
import inspect
import weakref
from collections.abc import Sequence
from types import TracebackType
from typing import Any, Self

import nsq

from nsqdedupe import checks
from nsqdedupe.cluster import Cluster, Copies
from nsqdedupe.commands import check_bodies, check_body, check_defer, cut, framed
from nsqdedupe.connection import check_pynsq
from nsqdedupe.errors import ConfigError, PublishError
from nsqdedupe.options import CHECKS, check_options
from nsqdedupe.outbox import Outbox
from nsqdedupe.permits import Permits
from nsqdedupe.pipeline import UNKNOWN, Pipeline
from nsqdedupe.publication import Future, Publication, publish_error
from nsqdedupe.version import USER_AGENT

_CLOSED = "the writer is closed"

_writers: weakref.WeakSet[ReplicatedWriter] = weakref.WeakSet()


class ReplicatedWriter:
    """Publishes each message to several different nsqds. Consumers that de-duplicate handle it once.

    They tell messages by a key, so give each message one: `with_id` adds an id that copies share.

    It connects when it is used first, and again whenever a connection is lost (after pauses of 0.1 s, then
    longer ones, up to 60 s). A message is sent to as many nsqds as must acknowledge it and to no more: to those
    that owe the fewest answers, in turn among equals. Only when one fails, is lost or is silent for ``timeout``
    seconds (half of it while others are to spare) another one takes its place, as soon as it is connected. An
    outcome that is not known counts as a failure, so there may be a copy more than asked for, never one less.

    Messages of one topic that are published in the same turn of the event loop, or within 2 ms while an earlier
    command is not answered, go out as one command, of 500 messages or 256 KiB at most.

    Make one per event loop, inside or outside of it; call it from that loop's thread. Nothing here blocks.
    ``async with`` stops it at the end (see `stop`).

    Args:
        nsqd_tcp_addresses: ``host:port`` of each nsqd, each nsqd under one name only.

        copies: on how many nsqds a message must be: a number, ``"quorum"`` (more than half of them) or
            ``"all"``. Of those that were given, a number from 1 to how many they are. These two words count the
            nsqds that were given, those that nsqlookupd lists, and those that are connected; where
            ``lookupd_http_addresses`` are given, they mean nothing until one of these has answered. nsqlookupd
            lists an nsqd no longer once it is gone, so "all" then means all that are left.

        lookupd_http_addresses: ``host:port`` of each nsqlookupd. Every nsqd that one of them lists is used too,
            but not for topics for which it is tombstoned.

        lookupd_poll_interval: seconds between two looks at nsqlookupd, at most; a whole number, 1 or more. It
            looks more often while there are too few nsqds.

        timeout: seconds that a message may take from when it is accepted until it is acknowledged, connecting
            included; greater than 0.

        max_pending: how many messages are accepted that are not yet acknowledged; 1 or more. Whoever
            publishes more waits, first come first served.

        kwargs: options of `nsq.AsyncConn`, for example ``tls_v1``, ``snappy`` or ``auth_secret``.

    Raises:
        ConfigError: an option is unknown, of the wrong type, out of range or in conflict with another;
            nothing was started.

        MissingDependency: the installed pynsq is not one that this package knows.
    """

    def __init__(
        self,
        nsqd_tcp_addresses: str | list[str] | tuple[str, ...] | set[str] | None = None,
        copies: Copies = 2,
        *,
        lookupd_http_addresses: str | list[str] | tuple[str, ...] | set[str] | None = None,
        lookupd_poll_interval: int = 60,
        timeout: float = 5.0,
        max_pending: int = 10_000,
        **kwargs: Any,  # noqa: ANN401 - pynsq's options, checked below
    ) -> None:
        check_pynsq()
        asked = {
            "nsqd_tcp_addresses": nsqd_tcp_addresses,
            "lookupd_http_addresses": lookupd_http_addresses,
            "lookupd_poll_interval": lookupd_poll_interval,
            "user_agent": USER_AGENT,
            **kwargs,
        }
        self._options = _check_options(asked)
        given, lookupds, interval = (self._options.pop(name) for name in list(asked)[:3])
        _check_copies(copies, given, lookupds)
        self._timeout = checks.number("timeout", timeout, 0, open_low=True)
        self._permits = Permits(checks.integer("max_pending", max_pending, 1))
        if len({checks.tcp_address("nsqd_tcp_addresses", address) for address in given}) < len(given):
            raise checks.refuse("nsqd_tcp_addresses", given, "different addresses", "name each nsqd once")
        self._cluster = Cluster(given, lookupds, interval, copies, make=self._pipeline, changed=self._on_changed)
        self._outbox = Outbox(self._cluster, self._permits, self._timeout)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._ended = ""

    async def publish(self, topic: str, body: bytes, *, defer: float = 0) -> tuple[str, ...]:
        """Publish a message.

        It waits while ``max_pending`` messages are pending. If the task is cancelled meanwhile, the message is
        not published; cancelled later, copies that were sent may be published all the same.

        Args:
            topic: a topic name as nsqd takes it.

            body: 1 byte or more, up to nsqd's ``--max-msg-size``.

            defer: seconds until nsqd delivers it, rounded up to milliseconds; up to nsqd's
                ``--max-req-timeout``, an hour by default. Until then the copies are in the memory of their
                nsqds only, and are lost with these.

        Returns:
            The addresses of the nsqds that acknowledged it, ``copies`` of them.

        Raises:
            PublishError: fewer acknowledged it within ``timeout`` seconds after it was accepted, or it is
                certain already that fewer will; or it waited half as long to be accepted, and others ran out of time.
                Publishing it again is safe.

            ConfigError: topic, body or defer is none; nothing was sent.
        """
        if type(topic) is not str or not self._outbox.has_batch(topic):
            checks.nsq_name("topic", topic)
        if type(body) is not bytes or not body:
            check_body(body)
        defer_ms = check_defer(defer) if defer != 0 or isinstance(defer, bool) else 0
        loop = self._enter()
        if not self._permits.take(1):
            await self._wait(1)
        outbox = self._outbox
        publication = outbox.new(topic, defer_ms) if defer_ms else outbox.batch(topic, framed(body))
        future: Future = loop.create_future()
        publication.add(future, (body,))
        if defer_ms:
            outbox.send(publication)
        elif publication.count >= outbox.most:
            outbox.send_batch(topic)
        try:
            return await future
        except asyncio.CancelledError:
            self._permits.give(publication.drop(future))
            raise

    async def publish_many(self, topic: str, bodies: Sequence[bytes]) -> tuple[str, ...]:
        """Publish several messages, in as few commands as possible.

        It waits while ``max_pending`` messages are pending; there may be more bodies than that.

        Args:
            topic: a topic name as nsqd takes it.

            bodies: of one message or more, each as for `publish`.

        Returns:
            The addresses of the nsqds that acknowledged one or more of them. Each message is on ``copies`` of them.

        Raises:
            PublishError: as `publish`, for one or more of them. Its ``acknowledged`` are the nsqds that have
                them all. Publishing all of them again is safe.

            ConfigError: the topic or one of the bodies is none, or there is no body; nothing was sent.
        """
        checks.nsq_name("topic", topic)
        bodies = check_bodies(bodies)
        loop = self._enter()
        calls: list[tuple[Future, Publication]] = []
        sent = 0
        try:
            for chunk in cut(bodies, self._outbox.most, self._outbox.most_bytes):
                if not self._permits.take(len(chunk)):
                    await self._wait(len(chunk))
                if any(future.done() and future.exception() for future, _ in calls):
                    self._permits.give(len(chunk))
                    break
                publication = self._outbox.new(topic)
                future: Future = loop.create_future()
                calls.append((future, publication))
                publication.add(future, chunk)
                self._outbox.send(publication)
                sent += len(chunk)
            if sent == len(bodies) and len(calls) == 1:
                return await calls[0][0]
            results = await asyncio.gather(*(future for future, _ in calls), return_exceptions=True)
        except BaseException:
            for future, publication in calls:
                if not future.cancel() and not future.cancelled():
                    future.exception()  # it is told of in this one's place
                self._permits.give(publication.drop(future))
            raise
        return _together(results, self._cluster.wanted(topic), all_sent=sent == len(bodies))

    async def stop(self, timeout: float = 30) -> int:  # noqa: ASYNC109 - what is left is counted, not cancelled
        """Stop gracefully: take no more publishes, wait until the pending ones are answered, close.

        Args:
            timeout: seconds to wait, 0 or more.

        Returns:
            Number of messages that were pending still, and failed: 0 if all were answered in time.
        """
        checks.number("timeout", timeout, 0)
        self._ended = self._ended or "the writer is stopping"
        try:
            async with asyncio.timeout(timeout):
                await self._permits.idle()
        except TimeoutError:
            pass
        finally:
            left = self._permits.used + self._permits.wanted
            self.close()
        return left

    def close(self) -> None:
        """Send what was accepted and not sent yet, wait for no answer, and close. Returns at once. Idempotent.

        Pending publishes raise PublishError. A connection stays open in the background until nsqd has answered what
        it was sent, for ``timeout`` seconds at most, as long as the event loop runs.
        """
        self._ended = _CLOSED
        if self._loop is not None and not self._loop.is_closed():
            self._outbox.send_batches()
        # First, or they would be accepted now.
        self._permits.refuse(lambda: self._outbox.refusal(_CLOSED))
        unanswered = f"the writer was closed before its answer {UNKNOWN}"
        self._outbox.give_up_all(unanswered, "the writer was closed before it was connected")
        self._cluster.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.stop()

    # -- what it rests on ------------------------------------------------------------------------

    def _enter(self) -> asyncio.AbstractEventLoop:
        """A call begins: start if need be."""
        loop = asyncio.get_running_loop()
        if self._ended:
            raise self._outbox.refusal(f"{self._ended}; make another one")
        if self._loop is None:
            self._loop = loop
            _writers.add(self)
            self._outbox.start(loop)
            self._cluster.start()
        elif self._loop is not loop:
            raise ConfigError("this writer was used on another event loop: make one writer per event loop")
        return loop

    async def _wait(self, count: int) -> None:
        await self._permits.wait(count)
        if self._ended == _CLOSED:  # between the grant and this moment
            self._permits.give(count)
            raise self._outbox.refusal(_CLOSED)

    def _pipeline(self, address: str) -> Pipeline:
        return Pipeline(
            address,
            self._options,
            timeout=self._timeout,
            patience=self._patience,
            changed=self._on_pipeline,
        )

    def _on_changed(self) -> None:
        self._outbox.changed()

    def _on_pipeline(self) -> None:
        self._cluster.look()

    def _patience(self) -> float:
        # With nsqds to spare it costs little to take a slow one for lost, and publishes still succeed elsewhere.
        return self._timeout / 2 if len(self._cluster.ready) > self._cluster.wanted() else self._timeout


def live_writers(loop: asyncio.AbstractEventLoop) -> list[ReplicatedWriter]:
    """All writers that were used on an event loop and not closed."""
    return [writer for writer in _writers if writer._loop is loop and writer._ended != _CLOSED]  # noqa: SLF001


def _together(results: Sequence[tuple[str, ...] | BaseException], copies: int, *, all_sent: bool) -> tuple[str, ...]:
    """What came of several commands, as what came of one call."""
    errors = [result for result in results if isinstance(result, PublishError)]
    if not errors:
        return tuple(dict.fromkeys(address for result in results if isinstance(result, tuple) for address in result))
    holders = [error.acknowledged for error in errors]
    holders += [result for result in results if isinstance(result, tuple)]
    everywhere = [one for one in holders[0] if all_sent and all(one in holder for holder in holders)]
    failed = {address: reason for error in errors for address, reason in error.failed.items()}
    raise publish_error(copies, everywhere, failed, f"{len(errors)} of {len(results)} commands failed")


def _check_copies(copies: object, given: Sequence[str], lookupds: Sequence[str]) -> None:
    if isinstance(copies, str) and copies in {"quorum", "all"}:
        return
    accepted = "a whole number of 1 or more" if lookupds else f"a whole number from 1 to {len(given)}"
    if not isinstance(copies, int) or isinstance(copies, bool) or copies < 1:
        raise checks.refuse("copies", copies, f"{accepted}, 'quorum' or 'all'")
    if not lookupds and copies > len(given):
        remedy = "a message has one copy per nsqd at most: ask for fewer, or give more nsqd_tcp_addresses"
        raise checks.refuse("copies", copies, f"{accepted}, 'quorum' or 'all'", remedy)


def _check_options(options: dict[str, Any]) -> dict[str, Any]:
    """Those of a connection only; a writer has no topic, channel or handler."""
    own = ["nsqd_tcp_addresses", "lookupd_http_addresses", "lookupd_poll_interval"]
    conn = [name for name in inspect.signature(nsq.AsyncConn).parameters if name in CHECKS and name != "timeout"]
    unknown = sorted(set(options) - {*own, *conn})
    if unknown:
        known = [own[0], "copies", *own[1:], "timeout", "max_pending", *conn]
        raise ConfigError(f"unknown option {unknown[0]!r}: known are {', '.join(known)}")
    return check_options(options)
