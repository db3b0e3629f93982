"""What nsqlookupds know of the cluster: which nsqds there are, and which of them have a topic."""

from __future__ import annotations

import asyncio
import json
import logging
import random
import re
from collections.abc import Callable, Mapping, Sequence
from http import HTTPStatus
from typing import Any, TypeVar
from urllib.parse import SplitResult, parse_qs, urlencode, urlsplit

from tornado.httpclient import AsyncHTTPClient, HTTPClientError

T = TypeVar("T")

logger = logging.getLogger(__name__)

LARGEST = 4 << 20
"""Bytes of the largest answer that is looked at: some 15,000 nsqds. To parse it keeps the event loop waiting."""

_HURRY = 1.0
"""Seconds until the next poll while there are not enough nsqds; doubled each time."""

_JITTER = 0.3
"""The share of a pause that is left to chance, as pynsq has it."""

_HOST = re.compile(r"[^\s/@\[\]]{1,255}")

Endpoint = tuple[str, int]


async def get_json(
    url: str, *, client: AsyncHTTPClient | None = None, connect_timeout: float = 1, request_timeout: float = 2
) -> dict[str, Any]:
    """The JSON object at an address.

    Args:
        url: the address.

        client: who asks; None: tornado's common one.

        connect_timeout: seconds until it is connected, at most.

        request_timeout: seconds until it has answered, at most.

    Raises:
        Exception: it cannot be had; whatever tornado's client raises, or ValueError.
    """
    asking = (client or AsyncHTTPClient()).fetch(
        url,
        headers={"Accept": "application/vnd.nsq; version=1.0"},
        connect_timeout=connect_timeout,
        request_timeout=request_timeout,
    )
    # Whoever stops waiting leaves it to its end: tornado would log as an error what it cannot tell anybody.
    asking.add_done_callback(lambda asked: asked.cancelled() or asked.exception())
    await asyncio.wait([asking])
    response = asking.result()
    if len(response.body) > LARGEST:
        raise ValueError(f"answer of {len(response.body)} bytes: {LARGEST} at most are looked at")
    document = json.loads(response.body)
    if not isinstance(document, dict):
        raise ValueError(f"{type(document).__name__} instead of an object")  # noqa: TRY004 - bad data, no bug
    return document


_LOOKUP, _NODES = "/lookup", "/nodes"


def _split(address: str) -> SplitResult:
    """An nsqlookupd's address, ``host:port`` or a URL, in parts. Its path has no slash at its end."""
    parts = urlsplit(address if "://" in address else f"http://{address}")
    return parts._replace(path=parts.path.rstrip("/"), fragment="")


def lookup_url(address: str, topic: str) -> str:
    """Where an nsqlookupd says which nsqds have a topic. As in pynsq, the address may name another path and a query.

    Raises:
        ValueError: the address is none.
    """
    parts = _split(address)
    query = urlencode({**parse_qs(parts.query), "topic": topic}, doseq=True)
    return parts._replace(path=parts.path or _LOOKUP, query=query).geturl()


def nodes_url(address: str) -> str:
    """Where an nsqlookupd says which nsqds there are: beside the path of `lookup_url`, with the same query.

    Raises:
        ValueError: the address is none.
    """
    parts = _split(address)
    return parts._replace(path=parts.path.removesuffix(_LOOKUP) + _NODES).geturl()


def _endpoint(record: Any) -> Endpoint:  # noqa: ANN401 - JSON
    """The nsqd that a record names.

    Raises:
        Exception: it names none.
    """
    host, port = record["broadcast_address"], record["tcp_port"]
    # Printable: JSON can say half a character, which cannot be sent to anybody.
    named = isinstance(host, str) and _HOST.fullmatch(host) and host.isprintable()
    if not (named and type(port) is int and 0 < port < 1 << 16):
        raise ValueError
    return host, port


def _records(document: Mapping[str, Any]) -> list[Any]:
    records = document.get("producers")
    if not isinstance(records, list):
        raise ValueError("no list of producers")  # noqa: TRY004 - bad data, no bug
    return records


def read_producers(document: Mapping[str, Any]) -> tuple[set[Endpoint], int]:
    """Read an answer to ``/lookup``.

    Returns:
        The nsqds that have the topic; and how many records name no nsqd.

    Raises:
        ValueError: it is no such answer.
    """
    found: set[Endpoint] = set()
    odd = 0
    for record in _records(document):
        try:
            found.add(_endpoint(record))
        except (LookupError, TypeError, ValueError):
            odd += 1
    return found, odd


def read_nodes(document: Mapping[str, Any]) -> tuple[dict[Endpoint, frozenset[str]], int]:
    """Read an answer to ``/nodes``.

    Returns:
        The nsqds, and for each the topics for which it is tombstoned; and how many records name no nsqd.

    Raises:
        ValueError: it is no such answer.
    """
    found: dict[Endpoint, frozenset[str]] = {}
    odd = 0
    for record in _records(document):
        try:
            marks = zip(record.get("topics") or (), record.get("tombstones") or (), strict=False)
            hidden = frozenset(topic for topic, tombstoned in marks if tombstoned)
            found[_endpoint(record)] = hidden
        except (LookupError, TypeError, ValueError, AttributeError):
            odd += 1
    return found, odd


class Lookupds:
    """Several nsqlookupds, always asked all at once.

    One that is down, slow or talks nonsense is told of in one warning, and what the others say counts.

    Args:
        addresses: ``host:port`` or URL of each.

        connect_timeout: seconds until one is connected, at most.

        request_timeout: seconds until it has answered, at most.
    """

    def __init__(self, addresses: Sequence[str], *, connect_timeout: float = 1, request_timeout: float = 2) -> None:
        self.trouble: dict[str, str] = {}
        """What is wrong with those that gave no good answer, by address."""
        self._addresses = addresses
        self._timeouts = {"connect_timeout": connect_timeout, "request_timeout": request_timeout}
        self._client: AsyncHTTPClient | None = None

    async def ask(
        self,
        url: Callable[[str], str],
        read: Callable[[Mapping[str, Any]], tuple[T, int]],
        got: Callable[[str, T], None],
    ) -> None:
        """Ask them all; returns when each has answered or failed.

        Args:
            url: what to ask the one with this address.

            read: makes something of an answer; returns it, and how many records of the answer are of no use.

            got: called with an address and what was made of its answer, as soon as that is there.
        """
        if self._client is None:
            # One of our own: whoever waits in the queue of the common one is given up like a server that is slow.
            self._client = AsyncHTTPClient(force_instance=True, max_clients=max(10, len(self._addresses)))
        await asyncio.gather(*(self._ask(address, url, read, got) for address in self._addresses))

    async def _ask(
        self,
        address: str,
        url: Callable[[str], str],
        read: Callable[[Mapping[str, Any]], tuple[T, int]],
        got: Callable[[str, T], None],
    ) -> None:
        try:
            answer, odd = read(await self._get(url(address)))
        except Exception as error:  # noqa: BLE001 - whatever a server may answer, and however it may fail
            self._note(address, str(error) or type(error).__name__)
            return
        self._note(address, f"{odd} of its records name no nsqd" if odd else "")
        got(address, answer)

    async def _get(self, url: str) -> dict[str, Any]:
        try:
            return await get_json(url, client=self._client, **self._timeouts)
        except HTTPClientError as error:
            body = error.response.body if error.code == HTTPStatus.NOT_FOUND and error.response else b""
            if b"TOPIC_NOT_FOUND" not in (body or b""):
                raise
            return {"producers": []}  # nobody has published to it yet

    def _note(self, address: str, trouble: str) -> None:
        before = self.trouble.pop(address, "")
        if trouble:
            self.trouble[address] = trouble
            if not before:
                logger.warning("[%s] trouble with this nsqlookupd: %s; asking again", address, trouble)
        elif before:
            logger.info("[%s] this nsqlookupd answers again", address)


class NodesPoll:
    """Asks every nsqlookupd for its nsqds, again and again.

    Args:
        addresses: ``host:port`` or URL of each.

        interval: seconds between two polls; some are shorter by chance, so that writers that started together
            do not ask together, and so are those made while there are not enough nsqds.

        found: called after each poll that had an answer: the nsqds of all answers, with the topics for which
            one of them has it tombstoned.

        enough: whether there are enough nsqds.
    """

    def __init__(
        self,
        addresses: Sequence[str],
        interval: float,
        *,
        found: Callable[[dict[Endpoint, frozenset[str]]], None],
        enough: Callable[[], bool],
    ) -> None:
        self._lookupds = Lookupds(addresses)
        self.trouble = self._lookupds.trouble
        """What is wrong with those that gave no good answer, by address."""
        self._interval = interval
        self._found = found
        self._enough = enough
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Poll, on the running loop, until `stop`."""
        self._task = asyncio.ensure_future(self._poll_on())

    def stop(self) -> None:
        """Poll no more. Idempotent."""
        if self._task is not None:
            self._task.cancel()

    async def _poll_on(self) -> None:
        hurry = _HURRY
        while True:
            answers: dict[str, dict[Endpoint, frozenset[str]]] = {}
            await self._lookupds.ask(nodes_url, read_nodes, answers.__setitem__)
            union: dict[Endpoint, frozenset[str]] = {}
            for answer in answers.values():
                for endpoint, hidden in answer.items():
                    union[endpoint] = union.get(endpoint, frozenset()) | hidden
            if answers:
                self._found(union)
            pause = self._interval
            if not self._enough():
                pause = min(pause, hurry)
                hurry *= 2
            else:
                hurry = _HURRY
            await asyncio.sleep(pause * random.uniform(1 - _JITTER, 1))
