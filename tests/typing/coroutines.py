"""A consumer on an event loop of its own: a coroutine handler, a key function, a graceful stop."""

from __future__ import annotations

import asyncio
from typing import assert_type

import nsqdedupe


def by_user(message: nsqdedupe.Message) -> bytes | str:
    return message.body.partition(b" ")[0]


async def handle(message: nsqdedupe.Message) -> bool:
    await asyncio.sleep(0.1)
    return message.body != b""


def handle_later(message: nsqdedupe.Message) -> None:
    message.enable_async()
    asyncio.get_running_loop().call_later(1, message.finish)


class Reader(nsqdedupe.DedupeReader):
    """Hooks as pynsq has them."""

    def validate_message(self, message: nsqdedupe.Message) -> bool:
        return len(message.body) < 100

    def giving_up(self, message: nsqdedupe.Message) -> None:
        print(message.id, message.tries)


async def main() -> None:
    reader = Reader("events", "billing", handle, nsqd_tcp_addresses=["127.0.0.1:4150"], key=by_user)
    later = nsqdedupe.DedupeReader(
        "events", "later", handle_later, nsqd_tcp_addresses=["127.0.0.1:4150"], key=lambda message: message.body
    )
    await asyncio.sleep(60)
    assert_type(await reader.stop(timeout=30), int)
    later.close()


if __name__ == "__main__":
    asyncio.run(main())
