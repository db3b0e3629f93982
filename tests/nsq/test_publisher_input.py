"""What nsqd would refuse is refused before anything is sent."""

from __future__ import annotations

import itertools
import logging
import re
from typing import Any

import pytest
from consumers import on_loop
from servers import Pair
from writers import writing

from nsqdedupe import ConfigError, PublishError, ReplicatedWriter
from nsqdedupe.cli.local_nsq import Nsqd

ONE = "127.0.0.1:4150"
TWO = "127.0.0.1:4152"


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"nsqd_tcp_addresses": []}, "nsqd_tcp_addresses and lookupd_http_addresses are both empty: give one"),
        ({"nsqd_tcp_addresses": None}, "are both empty: give one"),
        ({"nsqd_tcp_addresses": None, "lookupd_http_addresses": []}, "are both empty: give one"),
        ({"nsqd_tcp_addresses": 7}, "nsqd_tcp_addresses=7: must be a string or a list of strings"),
        ({"nsqd_tcp_addresses": ["nsqd"]}, "must be 'host:port'"),
        ({"nsqd_tcp_addresses": [ONE, ONE]}, "must be different addresses; name each nsqd once"),
        ({"nsqd_tcp_addresses": ["[::1]:4150", "[::1]:4150"]}, "must be different addresses"),
        ({"copies": 0}, "copies=0: must be a whole number from 1 to 2, 'quorum' or 'all'"),
        ({"copies": 3}, "copies=3: must be a whole number from 1 to 2, 'quorum' or 'all'; a message has one copy per"),
        ({"copies": 0, "lookupd_http_addresses": ["l:4161"]}, "copies=0: must be a whole number of 1 or more, "),
        ({"copies": "most"}, "copies='most': must be"),
        ({"copies": None}, "copies=None: must be"),
        ({"copies": ["all"]}, "copies=['all']: must be"),
        ({"copies": True}, "copies=True"),
        ({"copies": "2"}, "copies='2'"),
        ({"copies": 1.0}, "copies=1.0"),
        ({"nsqd_tcp_addresses": ONE}, "copies=2: must be a whole number from 1 to 1"),
        ({"timeout": 0}, "timeout=0: must be a number greater than 0"),
        ({"timeout": float("inf")}, "timeout=inf"),
        ({"timeout": None}, "timeout=None"),
        ({"tls_v1": "yes"}, "tls_v1='yes': must be True or False"),
        ({"snappy": True, "deflate": True}, "one way at a time"),
        ({"max_in_flight": 5}, "unknown option 'max_in_flight': known are nsqd_tcp_addresses, copies, "),
        ({"topic": "events"}, "unknown option 'topic'"),
        ({"lookupd_http_addresses": 4161}, "lookupd_http_addresses=4161: must be a string or a list of strings"),
        ({"lookupd_http_addresses": [4161]}, "lookupd_http_addresses=[4161]: must be"),
        ({"lookupd_poll_interval": 0}, "lookupd_poll_interval=0: must be a whole number of 1 or more"),
        ({"lookupd_poll_interval": 1.5}, "lookupd_poll_interval=1.5"),
        ({"max_pending": 0}, "max_pending=0: must be a whole number of 1 or more"),
        ({"max_pending": 10.0}, "max_pending=10.0"),
        ({"max_pending": None}, "max_pending=None"),
        ({"batch_size": 10}, "unknown option 'batch_size'"),
    ],
)
def test_a_bad_option_is_refused(options: dict[str, Any], says: str) -> None:
    """Outside of any event loop, where nothing could be started."""
    with pytest.raises(ConfigError, match=re.escape(says)):
        ReplicatedWriter(**{"nsqd_tcp_addresses": [ONE, TWO], **options})


def test_bad_input_is_refused_before_anything_is_sent(nsqd: Nsqd, topic: str) -> None:
    async def main() -> None:
        async with writing([nsqd], 1) as writer:
            with pytest.raises(ConfigError, match=r"^topic="):
                await writer.publish("not a topic", b"body")
            with pytest.raises(ConfigError, match=r"^body"):
                await writer.publish(topic, "text")  # type: ignore[arg-type]
            with pytest.raises(ConfigError, match=r"^body"):
                await writer.publish(topic, b"")
            with pytest.raises(ConfigError, match=r"^bodies"):
                await writer.publish_many(topic, [])
            with pytest.raises(ConfigError, match=re.escape("bodies[1]")):
                await writer.publish_many(topic, [b"body", b""])
            assert not nsqd.stats()["producers"]

    on_loop(main())


def test_no_body_is_ever_logged(nsqd_pair: Pair, topic: str, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    secret = b"do not show"

    async def main() -> None:
        async with writing(nsqd_pair) as writer:
            await writer.publish(topic, secret)
            with pytest.raises(PublishError) as refused:
                await writer.publish(topic, secret * 100_000)
            await writer.publish_many(topic, [secret, secret])
        assert secret.decode() not in str(refused.value)

    on_loop(main())
    assert "too big" in caplog.text
    assert not any(secret.decode() in str(part) for part in itertools.chain(caplog.messages, [caplog.text]))
