"""The header of a table's file: every byte that changed is noticed, whatever was cut short is not."""

from __future__ import annotations

import pytest

from nsqdedupe.tables.table_header import (
    HASHING_AT,
    HEADER_BYTES,
    LONGEST_HASHING,
    STATE_AT,
    Header,
    Shape,
    State,
    UnreadableError,
    hashing_record,
    new_header,
    read_header,
    read_state,
    state_word,
)

SHAPE = Shape(slots=1 << 20, ways=32, tag_bytes=8)
NEVER_OPEN = State(is_open=False, pid=0)


def with_parts(header: bytes, *parts: tuple[int, bytes]) -> bytes:
    for at, part in parts:
        header = header[:at] + part + header[at + len(part) :]
    return header


def bound(header: bytes, hashing: str) -> bytes:
    return with_parts(header, (HASHING_AT, b"".join(hashing_record(hashing))))


def test_a_new_header_says_its_shape_and_nothing_else() -> None:
    header = new_header(SHAPE)
    assert len(header) == HEADER_BYTES
    assert read_header(header) == Header(SHAPE, NEVER_OPEN, hashing=None)


@pytest.mark.parametrize("hashing", ["m", "mmh3-x64-128", "x" * LONGEST_HASHING])
@pytest.mark.parametrize("state", [State(is_open=True, pid=1), State(is_open=False, pid=2**32 - 1)])
def test_a_header_gives_back_what_was_written_into_it(hashing: str, state: State) -> None:
    header = with_parts(bound(new_header(SHAPE), hashing), (STATE_AT, state_word(state)))
    assert read_header(header) == Header(SHAPE, state, hashing)


def test_all_that_changes_lies_in_one_sector_of_a_disk() -> None:
    text, seal = hashing_record("x")
    assert max(HASHING_AT + len(text) + len(seal), STATE_AT + len(state_word(NEVER_OPEN))) <= 512


@pytest.mark.parametrize("mask", [1, 128, 255])
def test_every_byte_that_changed_is_noticed(mask: int) -> None:
    header = bound(new_header(SHAPE), "mmh3-x64-128")
    read_header(header)
    unnoticed = []
    for at in range(HEADER_BYTES):
        try:
            read_header(with_parts(header, (at, bytes([header[at] ^ mask]))))
        except UnreadableError:
            continue
        unnoticed.append(at)
    assert unnoticed == []


@pytest.mark.parametrize("written", range(LONGEST_HASHING))
def test_a_text_whose_writer_died_before_the_seal_does_not_count(written: int) -> None:
    text, _ = hashing_record("y" * LONGEST_HASHING)
    header = with_parts(new_header(SHAPE), (HASHING_AT, text[:written]))
    assert read_header(header).hashing is None
    assert read_header(bound(header, "mmh3")).hashing == "mmh3"


@pytest.mark.parametrize("word", [b"", b"\0" * 8, b"O", b"\2" + b"\0" * 7, state_word(NEVER_OPEN) + b"\0"])
def test_what_is_no_state_is_none(word: bytes) -> None:
    assert read_state(word) is None


def test_a_state_is_one_word() -> None:
    for state in (NEVER_OPEN, State(is_open=True, pid=4_194_304)):
        assert len(state_word(state)) == 8
        assert read_state(state_word(state)) == state


def test_a_shape_is_told_in_the_words_of_the_options() -> None:
    assert str(SHAPE) == "slots=1048576, ways=32, tag_bytes=8"
