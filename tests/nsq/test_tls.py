"""TLS with real nsqds: what is spoken, who is trusted, and what is told when there is no agreement."""

from __future__ import annotations

import asyncio
import json
import logging
import ssl
import warnings
from pathlib import Path
from typing import Any

import pytest
from certificates import Certificates
from consumers import Seen, bodies, consuming, on_loop, publish
from fake_nsqd import IDENTITY, RESPONSE, frame
from servers import Servers, eventually_async

from nsqdedupe import BODY, DedupeReader
from nsqdedupe.cli.local_nsq import Nsqd

with warnings.catch_warnings():
    warnings.simplefilter("ignore", DeprecationWarning)
    ONLY_1_2 = ssl.PROTOCOL_TLSv1_2


@pytest.fixture(autouse=True)
def _in_a_hurry(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr("nsqdedupe.pauses.LONGEST", 0.05)
    caplog.set_level(logging.ERROR, "tornado.general")  # warns of each handshake that fails


def tls(**options: Any) -> dict[str, Any]:
    return {"tls_v1": True, "tls_options": options}


async def consumed(nsqd: Nsqd, address: str, topic: str, channel: str, **options: Any) -> dict[str, Any]:
    """Consume a hundred messages; returns what nsqd says of the client."""
    messages, seen = bodies(100), Seen()
    publish([nsqd], topic, messages)
    options["nsqd_tcp_addresses"] = address
    async with consuming(topic, channel, seen.handle, (), **options):
        await eventually_async(lambda: len(seen.handled) == 100)
        (client,) = nsqd.channel_stats(topic, channel)["clients"]
    seen.once_each(messages)
    return dict(client)


async def refused(nsqd: Nsqd, topic: str, channel: str, **options: Any) -> str:
    """Be refused a few times; returns the code."""
    codes = []

    class Refused(DedupeReader):
        def fatal_error(self, error: Any) -> None:
            codes.append(error.code)

    async with consuming(topic, channel, lambda _: True, [nsqd], Refused, **options) as reader:
        await eventually_async(lambda: len(codes) >= 3)
        assert reader.stats.fatal_errors == len(codes)
        assert not reader.conns
    (code,) = set(codes)
    return str(code)


def told(caplog: pytest.LogCaptureFixture) -> str:
    """The one line of the log that is an error, however often it was tried."""
    (line,) = [record.getMessage() for record in caplog.records if record.levelno >= logging.ERROR]
    return str(line)


@pytest.mark.parametrize(
    ("version", "spoken"), [(None, "TLS1.3"), (ssl.PROTOCOL_TLS_CLIENT, "TLS1.3"), (ONLY_1_2, "TLS1.2")]
)
def test_the_newest_version_is_spoken_unless_another_is_asked_for(
    certificates: Certificates, servers: Servers, topic: str, channel: str, version: int | None, spoken: str
) -> None:
    nsqd = servers.nsqd(*certificates.nsqd_flags)
    options = tls(ca_certs=certificates.authority, ssl_version=version)
    client = on_loop(consumed(nsqd, nsqd.tcp_address, topic, channel, **options))
    assert client["tls"]
    assert client["tls_version"].replace(" ", "") == spoken


def test_an_nsqd_that_speaks_only_1_2_is_understood(
    certificates: Certificates, servers: Servers, topic: str, channel: str
) -> None:
    """The other end of what is spoken: nsqd takes nothing below what it is told to."""
    nsqd = servers.nsqd(*certificates.nsqd_flags, "--tls-min-version=tls1.2")
    client = on_loop(consumed(nsqd, nsqd.tcp_address, topic, channel, **certificates.options))
    assert client["tls"]


def test_a_certificate_of_a_strange_authority_is_not_trusted(
    certificates: Certificates, servers: Servers, topic: str, channel: str, caplog: pytest.LogCaptureFixture
) -> None:
    nsqd = servers.nsqd(*certificates.nsqd_flags)
    assert on_loop(refused(nsqd, topic, channel, **tls(ca_certs=certificates.stranger))) == "TLS"
    assert "CERTIFICATE_VERIFY_FAILED" in told(caplog)


def test_without_authorities_those_of_the_system_are_asked(
    certificates: Certificates, servers: Servers, topic: str, channel: str, caplog: pytest.LogCaptureFixture
) -> None:
    nsqd = servers.nsqd(*certificates.nsqd_flags)
    assert on_loop(refused(nsqd, topic, channel, tls_v1=True)) == "TLS"
    assert "CERTIFICATE_VERIFY_FAILED" in told(caplog)


def test_who_verifies_nothing_is_connected(
    certificates: Certificates, servers: Servers, topic: str, channel: str
) -> None:
    nsqd = servers.nsqd(*certificates.nsqd_flags)
    assert on_loop(consumed(nsqd, nsqd.tcp_address, topic, channel, **tls(cert_reqs=ssl.CERT_NONE)))["tls"]


@pytest.mark.parametrize("checked", [False, True])
def test_the_name_is_checked_only_when_asked(
    servers: Servers, topic: str, channel: str, tmp_path: Path, checked: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """The certificate is for another host."""
    certificates = Certificates(tmp_path, "nsqd.example.com")
    nsqd = servers.nsqd(*certificates.nsqd_flags)
    options = tls(ca_certs=certificates.authority, check_hostname=checked)
    if checked:
        assert on_loop(refused(nsqd, topic, channel, **options)) == "TLS"
        assert "IP address mismatch" in told(caplog)
    else:
        assert on_loop(consumed(nsqd, nsqd.tcp_address, topic, channel, **options))["tls"]


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost"])
def test_the_name_that_was_connected_to_is_the_one_that_counts(
    servers: Servers, topic: str, channel: str, tmp_path: Path, host: str
) -> None:
    certificates = Certificates(tmp_path, host)
    nsqd = servers.nsqd(*certificates.nsqd_flags)
    options = tls(ca_certs=certificates.authority, check_hostname=True)
    assert on_loop(consumed(nsqd, f"{host}:{nsqd.tcp_port}", topic, channel, **options))["tls"]


def test_a_client_proves_who_it_is(certificates: Certificates, servers: Servers, topic: str, channel: str) -> None:
    flags = (
        "--tls-required=tcp-https",
        "--tls-client-auth-policy=require-verify",
        f"--tls-root-ca-file={certificates.authority}",
    )
    nsqd = servers.nsqd(*certificates.nsqd_flags, *flags)
    certificate, key = certificates.client
    options = tls(ca_certs=certificates.authority, certfile=certificate, keyfile=key)
    assert on_loop(consumed(nsqd, nsqd.tcp_address, topic, channel, **options))["tls"]


@pytest.mark.parametrize("version", [None, ONLY_1_2])
def test_a_client_that_proves_nothing_is_told_so(
    certificates: Certificates,
    servers: Servers,
    topic: str,
    channel: str,
    version: int | None,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """With TLS 1.3 the refusal comes when the handshake is over for us."""
    flags = (
        "--tls-required=tcp-https",
        "--tls-client-auth-policy=require-verify",
        f"--tls-root-ca-file={certificates.authority}",
    )
    nsqd = servers.nsqd(*certificates.nsqd_flags, *flags)
    options = tls(ca_certs=certificates.authority, ssl_version=version)
    assert on_loop(refused(nsqd, topic, channel, **options)) == "TLS"
    assert "ALERT" in told(caplog).upper()


def test_an_nsqd_that_insists_on_tls_says_so(
    certificates: Certificates, servers: Servers, topic: str, channel: str, caplog: pytest.LogCaptureFixture
) -> None:
    nsqd = servers.nsqd(*certificates.nsqd_flags, "--tls-required=tcp-https")
    assert on_loop(refused(nsqd, topic, channel)) == "E_INVALID"
    assert "TLS" in told(caplog)


def test_a_certificate_that_is_renewed_is_read_at_the_next_connection(
    servers: Servers, topic: str, channel: str, tmp_path: Path
) -> None:
    """And while its file is away, that is told and tried again."""
    certificates = Certificates(tmp_path)
    nsqd = servers.nsqd(*certificates.nsqd_flags)
    authority = Path(certificates.authority)
    remove, write = authority.unlink, authority.write_bytes
    right, wrong = authority.read_bytes(), Path(certificates.stranger).read_bytes()
    seen = Seen()

    async def main() -> None:
        async with consuming(topic, channel, seen.handle, [nsqd], **certificates.options) as reader:
            remove()
            await eventually_async(lambda: reader.stats.fatal_errors >= 2)
            write(wrong)
            before = reader.stats.fatal_errors
            await eventually_async(lambda: reader.stats.fatal_errors >= before + 2)
            write(right)
            await eventually_async(lambda: reader.conns)
            publish([nsqd], topic, [b"body"])
            await eventually_async(lambda: seen.handled)

    on_loop(main())
    seen.once_each([b"body"])


def test_a_connection_can_be_closed_while_its_handshake_runs(certificates: Certificates) -> None:
    """The other side agrees to TLS and then says nothing."""
    met: list[asyncio.StreamReader] = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"IDENTIFY\n")
        writer.write(frame(RESPONSE, json.dumps({**IDENTITY, "tls_v1": True}).encode()))
        await reader.readuntil(b"\x16\x03\x01")  # a ClientHello
        met.append(reader)
        await reader.read()
        writer.close()

    async def main() -> None:
        server = await asyncio.start_server(serve, "127.0.0.1", 0)
        port = server.sockets[0].getsockname()[1]
        options = {"nsqd_tcp_addresses": f"127.0.0.1:{port}", "key": BODY, **certificates.options}
        reader = DedupeReader("topic", "channel", lambda _: True, **options)
        await eventually_async(lambda: met)
        assert await reader.stop(timeout=5) == 0
        await eventually_async(met[0].at_eof)
        server.close()

    on_loop(main())
