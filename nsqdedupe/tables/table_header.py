"""The header of a table's file: what it is, its shape, who has it open, how its fingerprints are made.

Every byte of its 4 KiB is accounted for, so that one that changed is noticed. The shape is written once, under
a checksum. What is written later can be cut short by SIGKILL at any moment, so it is words of 8 bytes that
carry their own checksums: one for the state, and one that seals the text about fingerprints, written after
the text. All of that lies in the first 512 bytes, which a disk writes whole.
"""

from __future__ import annotations

import struct
import zlib
from typing import NamedTuple

HEADER_BYTES = 4096
STATE_AT = 64
WORD_BYTES = 8
HASHING_AT = 128
LONGEST_HASHING = 64

BEGIN_ANEW = "to begin anew, remove it: what it remembers is lost, and those messages may be handled again"

_MAGIC = b"nsqdedupe table\n"
_VERSION = 1
_SHAPE = struct.Struct("<16sIQII")  # magic, version, slots, ways, tag_bytes
_SEAL_AT = HASHING_AT + LONGEST_HASHING
_SEAL = struct.Struct("<II")  # length and checksum of the text
_CRC = struct.Struct("<I")
_STATE = struct.Struct("<?I")
_STATE_CRC_BYTES = WORD_BYTES - _STATE.size


class Shape(NamedTuple):
    """What a table must be opened as."""

    slots: int
    ways: int
    tag_bytes: int

    def __str__(self) -> str:
        return ", ".join(f"{name}={value}" for name, value in self._asdict().items())


class State(NamedTuple):
    """Who has a file open, or had it last."""

    is_open: bool
    """It was not closed since that process opened it."""

    pid: int
    """0: none ever had it."""


class Header(NamedTuple):
    """What a file says of itself."""

    shape: Shape
    state: State

    hashing: str | None
    """How the fingerprints in it are made; None: nobody has said so yet."""


class UnreadableError(Exception):
    """A file is no table, or none that can be read: what it is, and the remedy."""

    def __init__(self, what: str, remedy: str) -> None:
        super().__init__(what, remedy)
        self.what = what
        self.remedy = remedy


def new_header(shape: Shape) -> bytes:
    """The header of a new file, not open, with nothing said of its fingerprints."""
    said = _SHAPE.pack(_MAGIC, _VERSION, *shape)
    said += _CRC.pack(zlib.crc32(said))
    return (said.ljust(STATE_AT, b"\0") + state_word(State(is_open=False, pid=0))).ljust(HEADER_BYTES, b"\0")


def state_word(state: State) -> bytes:
    """What stands at `STATE_AT`: 8 bytes."""
    said = _STATE.pack(*state)
    return said + _checksum(said)[:_STATE_CRC_BYTES]


def read_state(word: bytes) -> State | None:
    """What a word says; None if it was not made by `state_word`."""
    state = State(*_STATE.unpack_from(word.ljust(WORD_BYTES, b"\0")))
    return state if state_word(state) == word else None


def hashing_record(hashing: str) -> tuple[bytes, bytes]:
    """What stands at `HASHING_AT`: a text, and the seal that follows it and must be written after it.

    Args:
        hashing: 1 to 64 ASCII characters.
    """
    text = hashing.encode("ascii")
    return text.ljust(LONGEST_HASHING, b"\0"), _SEAL.pack(len(text), zlib.crc32(text))


def read_header(header: bytes) -> Header:
    """What the first `HEADER_BYTES` of a file say, or as many as there are.

    Raises:
        UnreadableError: it is no table, one of another release, or damaged.
    """
    if not header.startswith(_MAGIC):
        what = "is no table of nsqdedupe" if header else "is empty"
        raise UnreadableError(what, "give another path, or remove it if nobody needs it")
    if len(header) < HEADER_BYTES:
        raise UnreadableError(f"is cut off after {len(header)} bytes", BEGIN_ANEW)
    _, version, *shape = _SHAPE.unpack_from(header)
    if version != _VERSION:
        raise UnreadableError(
            f"has format {version}, and this release reads format {_VERSION}",
            f"use a release that reads it; or, {BEGIN_ANEW}",
        )
    crc = header[_SHAPE.size : _SHAPE.size + _CRC.size]
    state = read_state(header[STATE_AT : STATE_AT + WORD_BYTES])
    hashing = _read_hashing(header)
    unused = header[_SHAPE.size + _CRC.size : STATE_AT] + header[STATE_AT + WORD_BYTES : HASHING_AT]
    unused += header[_SEAL_AT + _SEAL.size :]
    if crc != _checksum(header[: _SHAPE.size]) or state is None or hashing is None or any(unused):
        raise UnreadableError("is damaged: its header was changed", BEGIN_ANEW)
    return Header(Shape(*shape), state, hashing or None)


def _read_hashing(header: bytes) -> str | None:
    """The sealed text; "" if nothing was sealed yet; None if it was changed since."""
    text, seal = header[HASHING_AT:_SEAL_AT], header[_SEAL_AT : _SEAL_AT + _SEAL.size]
    if not any(seal):
        return ""  # whatever the text: its writer may have died before the seal
    said = text[: _SEAL.unpack(seal)[0]].decode("ascii", "replace")
    return said if said.isascii() and said and hashing_record(said) == (text, seal) else None


def _checksum(said: bytes) -> bytes:
    return _CRC.pack(zlib.crc32(said))
