"""What makes two messages the same message, as 16 bytes.

A fingerprint is a hash of where the message is read (topic and channel), which kind of key names it, and
the key. Equal keys of other topics, other channels or other kinds never meet: each channel has its own
copies to handle. The kinds of key:

- `BODY`: messages with equal bodies are one message.
- `json_field`: one field of a JSON body, for example an id that the producer chose.
- a function of the message that returns bytes or str.

All of them see the body as it came over the wire. An empty key is refused: it would make one message of all
those that lack an id. Texts of errors hold lengths, types and positions, never a body or a key.

The hash is murmur3 x64-128. Whoever can choose bodies can make two of them share it, and so have a message
dropped: for producers that are not trusted, a secret turns it into keyed BLAKE2b-128.
"""

from __future__ import annotations

import importlib
import inspect
import json
import operator
from collections.abc import Callable, Sequence
from hashlib import blake2b
from typing import Any, Final, Protocol, TypeVar, final

from mmh3 import mmh3_x64_128_digest

from nsqdedupe import checks
from nsqdedupe.errors import ConfigError, KeyExtractionError

_BLOCK = 16
_LONGEST_SECRET = 64
_CHOICES = (
    "say what makes two messages the same message: nsqdedupe.BODY (equal bodies), "
    'nsqdedupe.json_field("messageId") (one field of a JSON body), '
    "or a function that is given the message and returns bytes or str"
)
_JSON_NAMES = {dict: "an object", list: "an array", bool: "a boolean", float: "no whole number", type(None): "null"}
_QUOTE, _BACKSLASH = b'"\\'


class Message(Protocol):
    """What a key is taken from: an `nsq.Message`, or anything else that has a body."""

    @property
    def body(self) -> bytes:
        """The body as it came over the wire."""


M = TypeVar("M", bound=Message)


@final
class BodyKey:
    """The type of `BODY`."""

    kind: Final = "BODY"

    def __call__(self, message: Message) -> bytes:
        """The whole body."""
        return message.body

    def __repr__(self) -> str:
        return "nsqdedupe.BODY"


BODY: Final = BodyKey()
"""The key that is the whole body: messages with equal bodies are one message."""


@final
class JsonField:
    """The key that is one field of a JSON body. `json_field` makes it."""

    def __init__(self, path: object) -> None:
        if not isinstance(path, str) or not all(path.split(".")) or path.encode(errors="ignore").decode() != path:
            raise checks.refuse("path", path, "the name of a field, or names joined by dots, as in 'context.id'")
        self.path = path
        self.kind = f"json:{path}"
        self._parts = path.split(".")
        self._quickly = _quick_reader(self._parts)

    def __call__(self, message: Message) -> bytes:
        """The field's value in the body of this message; see `of_body`."""
        return self.of_body(message.body)

    def __repr__(self) -> str:
        return f"nsqdedupe.json_field({self.path!r})"

    def of_body(self, body: bytes) -> bytes:
        """The field's value: a whole number's digits as they are written, or a string's UTF-8.

        So ``1`` and ``"1"`` are the same key. Of a field that is there twice the last one counts.

        Raises:
            KeyExtractionError: the body is not JSON; or the field is absent, empty, or neither a string nor
                a whole number (``1.0`` and ``1e3`` are none).
        """
        return self._quickly(body) or self._carefully(body)

    def _carefully(self, body: bytes) -> bytes:
        try:
            value: object = _decode_json(body.decode())
        except UnicodeDecodeError as error:
            raise KeyExtractionError(f"the body is not UTF-8 at byte {error.start}") from None
        except (ValueError, RecursionError) as error:
            raise KeyExtractionError(f"the body is not JSON: {error}") from error
        for part in self._parts:
            if not isinstance(value, dict) or part not in value:
                raise KeyExtractionError(f"field {self.path!r} is absent")
            value = value[part]
        if what := _JSON_NAMES.get(type(value)):
            raise KeyExtractionError(f"field {self.path!r} is {what}; a key is a string or a whole number")
        return _as_key(value, f"field {self.path!r}")


def json_field(path: str) -> JsonField:
    """The key that is one field of a JSON body: by its name, or by a path into nested objects (``context.id``).

    Names that contain a dot cannot be reached, nor can elements of arrays. A path that is no text or has an
    empty name in it raises `ConfigError`.
    """
    return JsonField(path)


def kind_of(key: Callable[[M], bytes | str]) -> str:
    """Which kind a key is, as it goes into fingerprints: ``BODY``, ``json:<path>`` or ``callable``."""
    return key.kind if isinstance(key, BodyKey | JsonField) else "callable"


def key_hasher(topic: str, channel: str, kind: str, secret: bytes | None = None) -> Callable[[bytes], bytes]:
    """A function from the bytes of a key to its fingerprint, for one topic, one channel and one `kind_of` key.

    Topic, channel and kind are hashed first, each after its length (4 bytes, little-endian), then zeros up to
    a whole block of 16 bytes, then the key. The lengths say where each ends, so nothing else gives the same
    bytes. It raises `ConfigError` for names that nsqd refuses, and for a secret that is not 1 to 64 bytes.
    """
    prefix = _prefix(topic, channel, kind)
    if secret is None:
        return lambda key: mmh3_x64_128_digest(prefix + key)
    given: object = secret
    if not isinstance(given, bytes) or not 0 < len(given) <= _LONGEST_SECRET:
        # Not `checks.refuse`: its text would show the secret.
        what = len(given) if isinstance(given, bytes) else type(given).__name__
        raise ConfigError(f"secret: must be 1 to {_LONGEST_SECRET} bytes, not {what}")
    start = blake2b(prefix, digest_size=16, key=secret).copy

    def keyed(key: bytes) -> bytes:
        state = start()
        state.update(key)
        return state.digest()

    return keyed


def _prefix(topic: str, channel: str, kind: str) -> bytes:
    """What is hashed before the key."""
    names = (checks.nsq_name("topic", topic).encode(), checks.nsq_name("channel", channel).encode(), kind.encode())
    prefix = b"".join(len(name).to_bytes(4, "little") + name for name in names)
    return prefix + bytes(-len(prefix) % _BLOCK)


def hashing_of(secret: bytes | None) -> str:
    """Names the hash that a secret leads to, and the secret by 8 bytes that tell two apart, not what they are.

    Who can guess a secret can check the guess by them, so they are to be kept like a log line, not published.

    Args:
        secret: as for `key_hasher`, which checks it.
    """
    if secret is None:
        return "mmh3-x64-128"
    return f"blake2b-128 key {blake2b(b'nsqdedupe: which key is it?', digest_size=8, key=secret).hexdigest()}"


def fingerprinter(
    topic: str, channel: str, key: Callable[[M], bytes | str] | None, secret: bytes | None = None
) -> Callable[[M], bytes]:
    """A function from a message to its 16-byte fingerprint.

    That function raises `KeyExtractionError` for a message without a usable key: also if a key function
    raises, or returns what is empty or neither bytes nor str. A str counts as its UTF-8.

    Args:
        topic: the topic the messages are read from.
        channel: the channel they are read on.
        key: `BODY`, what `json_field` returns, or a function that is given the message.
        secret: None, or 1 to 64 bytes, the same in all processes that share a store.

    Raises:
        ConfigError: there is no key, or it is no such thing; a name or the secret is refused.
    """
    given: object = key
    if key is None or not callable(given) or given is json_field or inspect.iscoroutinefunction(given):
        raise ConfigError(f"key={key!r}: {_CHOICES}")
    digest = key_hasher(topic, channel, kind_of(key), secret)
    if isinstance(key, BodyKey):
        return lambda message: digest(message.body)
    if isinstance(key, JsonField):
        of_body = key.of_body
        return lambda message: digest(of_body(message.body))
    return lambda message: digest(_ask(key, message))


def bodies_fingerprinter(
    topic: str, channel: str, key: Callable[[Any], bytes | str] | None, secret: bytes | None = None
) -> Callable[[Sequence[bytes]], list[bytes]] | None:
    """The same for the bodies of many messages in one go, in order; None if the key is not in the body alone.

    It raises `KeyExtractionError` if any of them has no usable key.
    """
    if not isinstance(key, BodyKey | JsonField):
        return None
    digest = key_hasher(topic, channel, kind_of(key), secret)
    if isinstance(key, JsonField):
        of_body = key.of_body
        return lambda bodies: [digest(of_body(body)) for body in bodies]
    if secret is not None:
        return lambda bodies: [digest(body) for body in bodies]
    # Written out: each message would pay for a call more.
    prefix = _prefix(topic, channel, key.kind)
    return lambda bodies: [mmh3_x64_128_digest(prefix + body) for body in bodies]


def _ask(function: Callable[[M], object], message: M) -> bytes:
    """The key that a user's function gives."""
    try:
        key = function(message)
    except KeyExtractionError:
        raise
    except Exception as error:
        raise KeyExtractionError(f"the key function raised {type(error).__name__}") from error
    return _as_key(key, "what the key function returned")


def _as_key(value: object, what: str) -> bytes:
    if isinstance(value, str):
        try:
            value = value.encode()
        except UnicodeEncodeError as error:
            raise KeyExtractionError(f"{what} has half a surrogate pair at character {error.start}") from None
    if not isinstance(value, bytes):
        raise KeyExtractionError(f"{what} is of type {type(value).__name__}; a key is bytes or str")
    if not value:
        raise KeyExtractionError(f"{what} is empty")
    return value


def _no_constant(name: str) -> None:
    raise ValueError(f"{name} is no JSON")


# Whole numbers stay as they are written, of any length; as bytes they are told from strings.
_decode_json = json.JSONDecoder(parse_int=str.encode, parse_constant=_no_constant).decode


def _quick_reader(parts: list[str]) -> Callable[[bytes], bytes]:
    """A reader that gives the key in the plain cases, and b"" in all that need a second look.

    With msgspec it is several times as fast as the standard library, which decides the rest, errors too: so
    installing msgspec changes no key. Both must read alike what is decided here.
    """
    try:
        msgspec = importlib.import_module("msgspec")
        shape = msgspec.Raw
        for part in reversed(parts):
            shape = msgspec.defstruct("Node", [("inner", shape)], rename={"inner": part}, gc=False)
    except (ImportError, ValueError):  # not installed, or a name with quotes, backslashes or control characters
        return lambda _: b""
    decode = msgspec.json.Decoder(shape).decode
    inner = operator.attrgetter(".".join(["inner"] * len(parts)))

    def read(body: bytes) -> bytes:
        try:
            raw = bytes(inner(decode(body)))
            # The decoder does not look at the UTF-8 of strings that it skips.
            if not body.isascii():
                body.decode()
        except Exception:  # noqa: BLE001 - whatever it stumbled over, the second look decides
            return b""
        if raw[0] == _QUOTE:
            return b"" if _BACKSLASH in raw else raw[1:-1]
        return raw if raw.removeprefix(b"-").isdigit() else b""

    return read
