"""Whatever pynsq negotiates, messages take one path."""

from __future__ import annotations

import asyncio
import ssl
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import trustme
from servers import Servers, eventually, eventually_async

import nsqdedupe

MESSAGES = 5000


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with an authority (ca.pem) and a key and certificate for 127.0.0.1."""
    directory = tmp_path_factory.mktemp("certificate")
    authority = trustme.CA()
    server = authority.issue_cert("127.0.0.1")
    authority.cert_pem.write_to_path(directory / "ca.pem")
    server.private_key_pem.write_to_path(directory / "key.pem")
    server.cert_chain_pems[0].write_to_path(directory / "cert.pem")
    return directory


def plain(_: Path) -> dict[str, Any]:
    return {}


def snappy(_: Path) -> dict[str, Any]:
    return {"snappy": True}


def deflate(_: Path) -> dict[str, Any]:
    return {"deflate": True}


def tls_with_snappy(certificate: Path) -> dict[str, Any]:
    return {**tls(certificate), **snappy(certificate)}


def tls_with_deflate(certificate: Path) -> dict[str, Any]:
    return {**tls(certificate), **deflate(certificate)}


def tls(certificate: Path) -> dict[str, Any]:
    options = {"ssl_version": ssl.PROTOCOL_TLS_CLIENT, "ca_certs": str(certificate / "ca.pem")}
    return {"tls_v1": True, "tls_options": options}


@pytest.mark.parametrize("transport", [plain, snappy, deflate, tls, tls_with_snappy, tls_with_deflate])
def test_each_message_is_handled_once(
    transport: Callable[[Path], dict[str, Any]], certificate: Path, servers: Servers, topic: str, channel: str
) -> None:
    flags = (f"--tls-cert={certificate / 'cert.pem'}", f"--tls-key={certificate / 'key.pem'}")
    nsqds = [servers.nsqd(*flags), servers.nsqd(*flags)]
    bodies = [f"{number} ".encode() * 30 for number in range(MESSAGES)]
    for nsqd in nsqds:
        nsqd.create_topic(topic)
        nsqd.create_channel(topic, channel)
        nsqd.mpublish(topic, bodies)
    handled: Counter[bytes] = Counter()

    def handle(message: Any) -> bool:
        handled[message.body] += 1
        return True

    async def consume() -> nsqdedupe.Stats:
        reader = nsqdedupe.DedupeReader(
            topic,
            channel,
            handle,
            nsqd_tcp_addresses=[nsqd.tcp_address for nsqd in nsqds],
            key=nsqdedupe.BODY,
            max_in_flight=500,
            output_buffer_timeout=25,
            **transport(certificate),
        )
        await eventually_async(lambda: reader.stats.duplicates == MESSAGES, timeout=60)
        assert await reader.stop(timeout=60) == 0
        return reader.stats

    stats = asyncio.run(consume())
    assert handled == Counter(bodies)
    assert stats.received == 2 * MESSAGES
    eventually(lambda: [nsqd.unfinished(topic, channel) for nsqd in nsqds] == [0, 0])
