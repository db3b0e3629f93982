"""What tests of several consumers on one memcached share."""

from __future__ import annotations

from collections.abc import Sequence

from nsqdedupe import Claim, Store, Verdict
from nsqdedupe.cli.local_memcached import Memcached
from nsqdedupe.cli.local_nsq import Nsqd
from nsqdedupe.fingerprint import key_hasher
from nsqdedupe.memcached.items import TAIL


def store_url(memcached: Memcached, topic: str, window: int = 10_000) -> str:
    """Of a store of one test's own. It is patient: a message that is handled without it may be handled twice."""
    options = f"window={window}&recall=0.999&namespace={topic[-8:]}&timeout=30&connect_timeout=30"
    return f"memcached://{memcached.tcp_address}?{options}"


def verdicts(store: Store, topic: str, channel: str, messages: Sequence[bytes]) -> set[Verdict]:
    """What a stranger is told who asks for these messages; it gets those that nobody has, for a second."""
    hashed = key_hasher(topic, channel, "BODY")
    claims = [Claim(hashed(body), b"stranger", bytes(16), 1.0) for body in messages]
    return {answer.verdict for answer in store.claim(claims)}


def end_lease(memcached: Memcached, topic: str, channel: str, body: bytes) -> None:
    """Let no more of a claim's time be left than tries outlive it, as if its lease had passed."""
    fingerprint = key_hasher(topic, channel, "BODY")(body)
    assert memcached.command(f"touch {topic[-8:]}:c:{fingerprint.hex()} {TAIL}") == ["TOUCHED"]


def ready(nsqd: Nsqd, topic: str, channel: str) -> int:
    """How many consumers take messages."""
    return sum(client["ready_count"] > 0 for client in nsqd.channel_stats(topic, channel)["clients"])
