"""A message costs what it holds, and no dict beside it."""

from __future__ import annotations

import gc
from types import SimpleNamespace
from typing import Any

from nsqdedupe.delivery import Delivery
from nsqdedupe.message import messages_of


def test_attributes_set_after_many_messages_were_made_find_room_in_each() -> None:
    conn: Any = SimpleNamespace(source=None, seen_empty=0.0)
    messages = messages_of(conn, [(34, 2, 0, 1, b"id")] * 1000, [b"body"] * 1000, [None] * 1000, [0] * 1000)
    assert len(messages) == 1000
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
