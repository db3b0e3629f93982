"""Real nsqd and nsqlookupd on 127.0.0.1, for the demo and the tests (Linux).

Example:
    >>> with Nsqlookupd() as lookupd, Nsqd(lookupds=[lookupd]) as nsqd:
    ...     nsqd.publish("events", b"hello")
"""

from __future__ import annotations

import http.client
import json
import os
import shutil
import struct
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

from nsqdedupe.cli.local_server import HOST, LocalServer, LocalServerError
from nsqdedupe.errors import MissingDependency

DURABLE = ("--mem-queue-size=0", "--sync-every=1")
"""Flags with which an nsqd keeps what is queued even when it is killed (what is in flight is lost all the same)."""


def find_binary(name: str) -> Path:
    """Where a program of NSQ 1.3 is.

    In this order: the directory that the environment variable NSQ_BIN_DIR names (nowhere else, if it is
    set); ``.tools/nsq/bin`` beside a source checkout; PATH.

    Raises:
        MissingDependency: it is in none of them, or only in another version; the text says what was tried.
    """
    remedy = "in a source checkout `make demo` and `make test` get it; else install NSQ 1.3 (see nsq.io)"
    named = os.environ.get("NSQ_BIN_DIR")
    if named:
        chosen = Path(named).absolute() / name
        if os.access(chosen, os.X_OK):
            return chosen
        raise MissingDependency(f"{name} is not in NSQ_BIN_DIR={named}; correct or unset it; {remedy}")
    built = Path(__file__).parents[2] / ".tools" / "nsq" / "bin" / name
    if os.access(built, os.X_OK):
        return built
    found = shutil.which(name)
    if found is None:
        raise MissingDependency(f"{name} is needed; tried NSQ_BIN_DIR (not set), {built} and PATH; {remedy}")
    try:
        asked = [found, "--version"]
        version = subprocess.run(asked, capture_output=True, text=True, timeout=5, check=False).stdout.strip()  # noqa: S603
    except (OSError, subprocess.TimeoutExpired) as error:
        version = str(error)
    if " v1.3." not in version:
        raise MissingDependency(f"{name} 1.3 is needed, but {found} says {version!r}; {remedy}")
    return Path(found)


class _NsqServer(LocalServer):
    """What nsqd and nsqlookupd have in common: beside TCP they speak HTTP."""

    def __init__(self, *flags: str, directory: Path | None = None) -> None:
        super().__init__(find_binary(self.program), *flags, directory=directory)
        self.http_port = self._own_port()

    @property
    def http_address(self) -> str:
        """``host:port`` of its HTTP interface; the same over restarts."""
        return f"{HOST}:{self.http_port}"

    def request(self, method: str, path: str, body: bytes | None = None, **query: str | None) -> Any:  # noqa: ANN401 - JSON
        """Ask its HTTP interface; query parameters that are None are left out.

        Returns:
            The parsed JSON of the answer, or None where the answer is empty or plain text.

        Raises:
            LocalServerError: it said no.
            OSError: it cannot be reached.
        """
        given = {name: value for name, value in query.items() if value is not None}
        # Not urllib.request: that would send a request for this machine through a configured proxy.
        connection = http.client.HTTPConnection(HOST, self.http_port, timeout=10)
        try:
            connection.request(method, f"{path}?{urlencode(given)}", body)
            answer = connection.getresponse()
            payload = answer.read()
        except http.client.HTTPException as error:
            raise ConnectionError(f"{self.program}: {error!r}") from error
        finally:
            connection.close()
        if answer.status != http.client.OK:
            raise self.failed(f"answered {answer.status} to {method} {path}: {payload.decode(errors='replace')}")
        return json.loads(payload) if payload.startswith(b"{") else None

    def _own_flags(self) -> list[str]:
        return [
            f"--tcp-address={self.tcp_address}",
            f"--http-address={self.http_address}",
            f"--broadcast-address={HOST}",
        ]

    def _answers(self) -> bool:
        try:
            self.request("GET", "/ping")
        except (OSError, LocalServerError):
            return False
        return True


class Nsqlookupd(_NsqServer):
    """An nsqlookupd of one's own."""

    program = "nsqlookupd"

    def nodes(self) -> list[str]:
        """The TCP addresses of the nsqds that have registered."""
        return _addresses(self.request("GET", "/nodes"))

    def lookup(self, topic: str) -> list[str]:
        """The TCP addresses of the nsqds that have a topic."""
        return _addresses(self.request("GET", "/lookup", topic=topic))


class Nsqd(_NsqServer):
    """An nsqd of one's own.

    Args:
        flags: further command line flags, for example ``"--msg-timeout=1s"``. They win over ours.

        lookupds: where it registers.

        directory: where its data and its log lie; made if need be, and kept. None: a temporary one.
    """

    program = "nsqd"

    def __init__(self, *flags: str, lookupds: Sequence[Nsqlookupd] = (), directory: Path | None = None) -> None:
        super().__init__(*flags, directory=directory)
        self._lookupds = tuple(lookupds)

    def publish(self, topic: str, body: bytes, *, defer_ms: int | None = None) -> None:
        """Publish one message, to be delivered ``defer_ms`` milliseconds later if given."""
        self.request("POST", "/pub", body, topic=topic, defer=None if defer_ms is None else str(defer_ms))

    def mpublish(self, topic: str, bodies: Sequence[bytes]) -> None:
        """Publish many messages in one request (5 MB at most)."""
        parts = [struct.pack(">l", len(bodies))]
        for body in bodies:
            parts += struct.pack(">l", len(body)), body
        self.request("POST", "/mpub", b"".join(parts), topic=topic, binary="true")

    def create_topic(self, topic: str) -> None:
        """Make a topic; no harm if it is there."""
        self.request("POST", "/topic/create", topic=topic)

    def create_channel(self, topic: str, channel: str) -> None:
        """Make a channel, and its topic first; no harm if they are there."""
        self.create_topic(topic)
        self.request("POST", "/channel/create", topic=topic, channel=channel)

    def stats(self, topic: str | None = None, channel: str | None = None) -> dict[str, Any]:
        """What /stats says, of all topics or of one, of all its channels or of one."""
        answer: dict[str, Any] = self.request("GET", "/stats", format="json", topic=topic, channel=channel)
        return answer

    def topic_stats(self, topic: str) -> dict[str, Any]:
        """What /stats says of a topic.

        Raises:
            LookupError: it has no such topic.
        """
        return self._one("topic_name", topic, self.stats(topic)["topics"])

    def channel_stats(self, topic: str, channel: str) -> dict[str, Any]:
        """What /stats says of a channel.

        Raises:
            LookupError: it has no such topic or channel.
        """
        return self._one("channel_name", channel, self.topic_stats(topic)["channels"])

    def depth(self, topic: str, channel: str | None = None) -> int:
        """How many messages are queued in a channel, or in a topic that has no channel yet."""
        stats = self.topic_stats(topic) if channel is None else self.channel_stats(topic, channel)
        return int(stats["depth"])

    def unfinished(self, topic: str, channel: str) -> int:
        """How many messages a channel still owes: queued, in flight or deferred."""
        stats = self.channel_stats(topic, channel)
        return int(stats["depth"] + stats["in_flight_count"] + stats["deferred_count"])

    def _own_flags(self) -> list[str]:
        registers = [f"--lookupd-tcp-address={lookupd.tcp_address}" for lookupd in self._lookupds]
        return [*super()._own_flags(), f"--https-address={HOST}:0", f"--data-path={self.directory}", *registers]

    def _one(self, field: str, name: str, entries: list[dict[str, Any]] | None) -> dict[str, Any]:
        for entry in entries or ():  # null, if it knows none
            if entry[field] == name:
                return entry
        raise LookupError(f"nsqd on {self.http_address} has no {field} {name!r}")


def _addresses(answer: Any) -> list[str]:  # noqa: ANN401 - JSON
    """``host:port`` of each nsqd in an answer of nsqlookupd."""
    return sorted(f"{node['broadcast_address']}:{node['tcp_port']}" for node in answer["producers"])
