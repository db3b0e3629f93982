"""Ids for publishers: what makes two messages the same message, where the body alone does not say."""

from __future__ import annotations

import json
import os
import time
import uuid
from collections.abc import Mapping

from nsqdedupe import checks
from nsqdedupe.errors import ConfigError


def with_id(document: Mapping[str, object] | bytes | str, field: str = "messageId") -> bytes:
    """A JSON object with an id, as the body of a message.

    Make it once and publish it to every nsqd, and again if publishing fails: the copies share the id, while two
    messages that are equal otherwise differ by it. Consumers then use ``key=json_field("messageId")``.

    Args:
        document: the object, or its JSON text. One that has the field already keeps it.

        field: name of the field, at the top of the object.

    Returns:
        UTF-8 text. The id is a UUID of version 7: later ones sort after earlier ones, to about a microsecond.

    Raises:
        ConfigError: the document is no JSON object, or cannot be written as one; the field's name is not usable,
            or what it holds is no id. The text does not show the document.
    """
    _check_field(field)
    fields = dict(document) if isinstance(document, Mapping) else _object_of(document)
    if field in fields:
        value = fields[field]
        if not isinstance(value, str | int) or isinstance(value, bool) or value == "":
            kind = "an empty string" if value == "" else f"a {type(value).__name__}"
            raise ConfigError(f"document: its field {field!r} holds {kind}, which is no id; leave the field out")
    else:
        fields = {field: str(_uuid7()), **fields}
    try:
        return json.dumps(fields, ensure_ascii=False, allow_nan=False, separators=(",", ":")).encode()
    except (TypeError, ValueError, RecursionError) as error:
        raise ConfigError(f"document: cannot be written as JSON: {_reason(error)}") from None


def _check_field(field: object) -> None:
    if not isinstance(field, str) or not field or "." in field:
        raise checks.refuse("field", field, "the name of a field, without dots", 'for example "messageId"')


def _object_of(text: object) -> dict[str, object]:
    if not isinstance(text, bytes | str):
        raise ConfigError(f"document: must be a mapping or JSON text, not {type(text).__name__}")
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"document: is no JSON text: {_reason(error)}") from None
    if not isinstance(value, dict):
        raise ConfigError(f"document: must be a JSON object, not {type(value).__name__}")
    return value


def _reason(error: Exception) -> str:
    """What went wrong, without the text in which it did."""
    if isinstance(error, json.JSONDecodeError):
        return f"{error.msg} at character {error.pos}"
    if isinstance(error, RecursionError):
        return "it is nested too deeply"
    return "it is not UTF-8" if isinstance(error, UnicodeError) else str(error)


def _uuid7() -> uuid.UUID:
    """RFC 9562, section 5.7, with the fraction of the millisecond in front of the random bits (6.2, method 3)."""
    milliseconds, rest = divmod(time.time_ns(), 1_000_000)
    fraction = (rest << 12) // 1_000_000
    random_bits = int.from_bytes(os.urandom(8)) & (1 << 62) - 1
    return uuid.UUID(int=milliseconds << 80 | 7 << 76 | fraction << 64 | 0b10 << 62 | random_bits)
