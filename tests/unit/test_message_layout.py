"""A message costs what it holds, and no dict beside it."""

from __future__ import annotations

import gc

from nsqdedupe.delivery import Delivery
from nsqdedupe.message import Message


def test_attributes_set_after_many_messages_were_made_find_room_in_each() -> None:
    messages = [Message(None, b"id", b"body", 0, 1) for _ in range(1000)]  # type: ignore[arg-type]
    names = [
        *(name for name in Delivery.__annotations__ if name != "owner"),
        "_async_enabled",
        "_has_responded",
        "backoff",
        "counted",
        "held",
        "as_made",
    ]
    for name in names:
        for message in messages:
            setattr(message, name, None)
    assert not any(type(held) is dict for message in messages for held in gc.get_referents(message))
