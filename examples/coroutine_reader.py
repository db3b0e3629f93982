"""A coroutine handler inside an asyncio program of one's own, stopped gracefully by the program."""

from __future__ import annotations

import argparse
import asyncio
import json

import nsqdedupe


async def consume(nsqd_tcp_addresses: list[str], wanted: int) -> None:
    enough = asyncio.Event()
    done: list[str] = []

    async def handle(message: nsqdedupe.Message) -> bool:
        event = json.loads(message.body)
        await asyncio.sleep(0.01)  # a query, a request, ...
        done.append(event["id"])
        if len(done) >= wanted:
            enough.set()
        return True

    reader = nsqdedupe.DedupeReader(
        topic="events",
        channel="example",
        message_handler=handle,
        nsqd_tcp_addresses=nsqd_tcp_addresses,
        key=nsqdedupe.json_field("id"),
        store=nsqdedupe.MemoryStore(window=500_000, recall=0.999),
        max_in_flight=200,
    )
    await enough.wait()
    left = await reader.stop(timeout=10)
    print(f"handled {len(done)}, left in flight {left}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--nsqd-tcp-address", action="append", required=True)
    parser.add_argument("--messages", type=int, default=100)
    args = parser.parse_args()
    asyncio.run(consume(args.nsqd_tcp_address, args.messages))


if __name__ == "__main__":
    main()
