"""Stores by class and by URL."""

from __future__ import annotations

import ssl
from typing import assert_type

import nsqdedupe


def main() -> None:
    store = nsqdedupe.MemcachedStore(
        ["10.0.0.1:11211", "10.0.0.2:11211"],
        window=1_000_000,
        recall=0.999,
        namespace="billing",
        connect_timeout=0.25,
        timeout=1,
        tls_context=ssl.create_default_context(),
    )
    assert_type(store.slots, int)
    assert_type(store.damaged, int)
    assert_type(store.traits.shared, bool)
    assert_type(nsqdedupe.open_store("memcached://10.0.0.1:11211?window=1000000"), nsqdedupe.Store)
    nsqdedupe.MemcachedStore("10.0.0.1:11211").close()
    nsqdedupe.DedupeReader(
        "events", "billing", lambda _: True, nsqd_tcp_addresses=["127.0.0.1:4150"], key=nsqdedupe.BODY, store=store
    )


if __name__ == "__main__":
    main()
