"""A publisher."""

from __future__ import annotations

import asyncio

import nsqdedupe


async def main() -> None:
    async with nsqdedupe.ReplicatedWriter(nsqd_tcp_addresses=["10.0.0.1:4150", "10.0.0.2:4150"], copies=2) as writer:
        body: bytes = nsqdedupe.with_id({"user": 7})
        try:
            await writer.publish("events", body)
            await writer.publish_many("events", [nsqdedupe.with_id(b"{}", field="id")])
        except nsqdedupe.PublishError as error:
            print(error.acknowledged, error.failed)
    nsqdedupe.ReplicatedWriter(lookupd_http_addresses=["127.0.0.1:4161"], copies="quorum").close()


if __name__ == "__main__":
    asyncio.run(main())
