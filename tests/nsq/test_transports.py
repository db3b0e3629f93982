"""Whatever pynsq negotiates, messages take one path."""

from __future__ import annotations

from typing import Any

import pytest
from certificates import Certificates
from consumers import PATIENCE, Seen, at_rest, bodies, consuming, nothing_left, on_loop, publish
from servers import Servers, eventually_async

MESSAGES = 20_000

TRANSPORTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "snappy": {"snappy": True},
    "deflate": {"deflate": True},
    "TLS": {"tls_v1": True},
    "TLS with snappy": {"tls_v1": True, "snappy": True},
    "TLS with deflate": {"tls_v1": True, "deflate": True, "deflate_level": 1},
}


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Certificates:
    """For 127.0.0.1."""
    return Certificates(tmp_path_factory.mktemp("certificates"))


@pytest.mark.parametrize("options", TRANSPORTS.values(), ids=TRANSPORTS)
def test_under_load_each_message_is_handled_once(
    options: dict[str, Any], certificates: Certificates, servers: Servers, topic: str, channel: str
) -> None:
    """20,000 messages of 180 bytes, two copies of each: takes some seconds."""
    nsqds = [servers.nsqd(*certificates.nsqd_flags), servers.nsqd(*certificates.nsqd_flags)]
    messages = bodies(MESSAGES, size=180)
    for nsqd in nsqds:
        nsqd.create_channel(topic, channel)
    publish(nsqds, topic, messages)
    seen = Seen()
    if "tls_v1" in options:
        options = {**certificates.options, **options}

    async def main() -> None:
        async with consuming(topic, channel, seen.handle, nsqds, max_in_flight=1000, **options) as reader:
            await eventually_async(lambda: reader.stats.duplicates == MESSAGES, timeout=PATIENCE)
            await nothing_left(nsqds, topic, channel)
            at_rest(reader)
            assert reader.stats.received == 2 * MESSAGES
            assert {conn._bare is None for conn in reader.conns.values()} == {bool(options)}
            for nsqd in nsqds:
                (client,) = nsqd.channel_stats(topic, channel)["clients"]
                used = {"tls_v1": client["tls"], "snappy": client["snappy"], "deflate": client["deflate"]}
                assert used == {name: bool(options.get(name)) for name in used}

    on_loop(main())
    seen.once_each(messages)
