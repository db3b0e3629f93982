"""What nsqlookupd knows of the cluster: the nsqds that there are, asked again and again."""

from __future__ import annotations

import asyncio
import json
import logging
import random
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from tornado.httpclient import AsyncHTTPClient

logger = logging.getLogger(__name__)

_HURRY = 1.0
"""Seconds until the next poll while there are not enough nsqds; doubled each time."""

_JITTER = 0.3
"""The share of a pause that is left to chance, as pynsq has it."""

Endpoint = tuple[str, int]


async def get_json(url: str) -> dict[str, Any]:
    """The JSON object at an address.

    Raises:
        Exception: it cannot be had; whatever tornado's client raises, or ValueError.
    """
    response = await AsyncHTTPClient().fetch(url, connect_timeout=1, request_timeout=2)
    document = json.loads(response.body)
    if not isinstance(document, dict):
        raise ValueError(f"{type(document).__name__} instead of an object")  # noqa: TRY004 - bad data, no bug
    return document


def lookupd_url(address: str, path: str) -> str:
    """The URL of a path on an nsqlookupd that is given as ``host:port`` or as a URL."""
    base = address if "://" in address else f"http://{address}"
    return f"{base.rstrip('/')}{path}"


def read_nodes(document: Mapping[str, Any]) -> tuple[dict[Endpoint, frozenset[str]], int]:
    """Read an answer to ``/nodes``.

    Returns:
        The nsqds, and for each the topics for which it is tombstoned; and how many records name no nsqd.

    Raises:
        ValueError: it is no such answer.
    """
    records = document.get("producers")
    if not isinstance(records, list):
        raise ValueError("no list of producers")  # noqa: TRY004 - bad data, no bug
    found: dict[Endpoint, frozenset[str]] = {}
    odd = 0
    for record in records:
        try:
            host, port = record["broadcast_address"], record["tcp_port"]
            marks = zip(record.get("topics") or (), record.get("tombstones") or (), strict=False)
            hidden = frozenset(topic for topic, tombstoned in marks if tombstoned)
            if not (isinstance(host, str) and host and 0 < port < 1 << 16):
                raise ValueError  # noqa: TRY301 - as any other odd record
            found[host, int(port)] = hidden
        except (LookupError, TypeError, ValueError, AttributeError):
            odd += 1
    return found, odd


class NodesPoll:
    """Asks every nsqlookupd for its nsqds, again and again.

    One that is down, slow or talks nonsense is told of in one warning, and what the others say counts.

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
        self.trouble: dict[str, str] = {}
        """What is wrong with those that gave no good answer, by address."""
        self._addresses = addresses
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
            answers = await asyncio.gather(*map(self._ask, self._addresses))
            union: dict[Endpoint, frozenset[str]] = {}
            for answer in answers:
                for endpoint, hidden in (answer or {}).items():
                    union[endpoint] = union.get(endpoint, frozenset()) | hidden
            if any(answer is not None for answer in answers):
                self._found(union)
            pause = self._interval
            if not self._enough():
                pause = min(pause, hurry)
                hurry *= 2
            else:
                hurry = _HURRY
            await asyncio.sleep(pause * random.uniform(1 - _JITTER, 1))

    async def _ask(self, address: str) -> dict[Endpoint, frozenset[str]] | None:
        try:
            nodes, odd = read_nodes(await get_json(lookupd_url(address, "/nodes")))
        except Exception as error:  # noqa: BLE001 - whatever a server may answer, and however it may fail
            self._note(address, str(error) or type(error).__name__)
            return None
        self._note(address, f"{odd} of its records name no nsqd" if odd else "")
        return nodes

    def _note(self, address: str, trouble: str) -> None:
        before = self.trouble.pop(address, "")
        if trouble:
            self.trouble[address] = trouble
            if not before:
                logger.warning("[%s] trouble with this nsqlookupd: %s; asking again", address, trouble)
        elif before:
            logger.info("[%s] this nsqlookupd answers again", address)
