"""Publish every line of standard input to two nsqds, as an event with an id of its own."""

from __future__ import annotations

import argparse
import asyncio
import sys

import nsqdedupe

AT_ONCE = 100
"""Lines on their way: what is published at the same time goes out in few commands."""


async def publish(addresses: list[str], topic: str) -> None:
    published = 0

    async def work() -> None:
        nonlocal published
        for line in sys.stdin:  # all workers share it
            # The id is made once: copies share it, and two equal lines stay two messages.
            body = nsqdedupe.with_id({"text": line.rstrip("\n")}, field="id")
            while True:
                try:
                    await writer.publish(topic, body)
                    break
                except nsqdedupe.PublishError as error:
                    print(f"publishing again: {error}", file=sys.stderr)
            published += 1

    async with nsqdedupe.ReplicatedWriter(nsqd_tcp_addresses=addresses, copies=2) as writer:
        await asyncio.gather(*(work() for _ in range(AT_ONCE)))
    print(f"published {published}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--topic", default="events")
    parser.add_argument("--nsqd-tcp-address", action="append", required=True, help="give it twice or more")
    args = parser.parse_args()
    asyncio.run(publish(args.nsqd_tcp_address, args.topic))


if __name__ == "__main__":
    main()
