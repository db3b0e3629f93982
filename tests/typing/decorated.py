"""Handlers of a stock reader, decorated."""

from __future__ import annotations

from typing import Any, assert_type

import nsqdedupe

store = nsqdedupe.MemoryStore(window=1_000_000)


@nsqdedupe.dedupe(store, key=nsqdedupe.BODY, scope="events/billing")
def handle(message: nsqdedupe.Message) -> bool:
    return bool(message.body)


@nsqdedupe.dedupe(store, key=nsqdedupe.json_field("id"), scope="events/billing", secret=b"secret")
async def handle_slowly(message: nsqdedupe.Message) -> bool:
    return bool(message.body)


class Application:
    @nsqdedupe.dedupe(store, key=nsqdedupe.BODY, scope="events/billing")
    def handle(self, message: nsqdedupe.Message) -> bool:
        return bool(message.body)

    def existing(self, message: Any) -> bool:
        return bool(message.body)


def main() -> None:
    application = Application()
    wrapped = nsqdedupe.dedupe(store, key=nsqdedupe.BODY, scope="events/billing")(application.existing)
    assert_type(wrapped, nsqdedupe.DedupedHandler)
    assert_type(handle.stats, nsqdedupe.Stats)
    application.handle(None)
    wrapped(None)


if __name__ == "__main__":
    main()
