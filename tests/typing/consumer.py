"""A consumer as most are: a plain handler, options by name, counters read while it runs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import assert_type

import nsqdedupe


def handle(message: nsqdedupe.Message) -> bool:
    assert_type(message.body, bytes)
    assert_type(message.id, bytes)
    assert_type(message.attempts, int)
    assert_type(message.tries, int)
    assert_type(message.timestamp, int)
    if message.tries > 3:
        message.requeue(delay=60, backoff=False)
        return False
    message.touch()
    message.finish()
    return True


def main() -> None:
    store = nsqdedupe.MemoryStore(window=1_000_000, recall=0.999, path="seen.table")
    reader = nsqdedupe.DedupeReader(
        topic="events",
        channel="billing",
        message_handler=handle,
        lookupd_http_addresses=["127.0.0.1:4161"],
        store=store,
        key=nsqdedupe.json_field("messageId"),
        max_in_flight=1000,
        requeue_delay=10,
        msg_timeout=120,
        secret=b"secret",
        on_store_error="requeue",
        observe=False,
    )
    assert_type(reader.stats, nsqdedupe.Stats)
    assert_type(reader.stats.duplicates, int)
    assert_type(reader.stats.nsqds, Mapping[str, Mapping[str, int]])
    assert_type(reader.stats.as_dict(), dict[str, object])
    nsqdedupe.DedupeReader("events", "positional", handle, "name", ["127.0.0.1:4150"], key=nsqdedupe.BODY)
    nsqdedupe.DedupeReader("events", "batching", handle, nsqd_tcp_addresses="127.0.0.1:4150", store=False)
    nsqdedupe.run(timeout=10)


if __name__ == "__main__":
    main()
