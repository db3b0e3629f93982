"""A stream that was mended reads on where tornado's own would close."""

from __future__ import annotations

import errno
import ssl
import zlib
from typing import Any

import pytest

from nsqdedupe.streams import mend

PART_OF_A_FRAME = OSError(errno.EWOULDBLOCK)
RESET = ConnectionResetError(errno.ECONNRESET, "reset")
PIPE = BrokenPipeError(errno.EPIPE, "pipe")
EOF = ssl.SSLEOFError(ssl.SSL_ERROR_EOF, "EOF occurred in violation of protocol")


class Stream:
    """What is mended of an IOStream; reads and writes end as they are told, one after the other."""

    def __init__(self, *ends: int | Exception | None) -> None:
        self.ends = list(ends)

    def read_from_fd(self, buf: bytearray) -> int | None:
        end = self.ends.pop(0)
        if isinstance(end, Exception):
            raise end
        return end

    write_to_fd = read_from_fd


def mended(*ends: int | Exception | None) -> Any:
    stream: Any = Stream(*ends)
    mend(stream)
    return stream


@pytest.mark.parametrize("ends", [[7], [None], [0], [PART_OF_A_FRAME, 7], [PART_OF_A_FRAME, PART_OF_A_FRAME, None]])
def test_a_read_goes_on_until_there_is_something_or_nothing(ends: list[int | OSError | None]) -> None:
    stream = mended(*ends)
    assert stream.read_from_fd(bytearray(9)) == ends[-1]
    assert stream.ends == []


@pytest.mark.parametrize("error", [RESET, OSError(errno.EWOULDBLOCK, "by the system"), OSError("what?")])
def test_other_errors_of_a_read_are_left_to_tornado(error: OSError) -> None:
    with pytest.raises(type(error)) as raised:
        mended(error).read_from_fd(bytearray(9))
    assert raised.value is error


@pytest.mark.parametrize("error", [zlib.error("Error -3"), ValueError("no snappy")])
def test_what_cannot_be_decompressed_breaks_the_connection_like_any_error_of_it(error: Exception) -> None:
    with pytest.raises(OSError, match=r"cannot be decompressed: .*(Error -3|no snappy)") as raised:
        mended(error).read_from_fd(bytearray(9))
    assert raised.value.__cause__ is error


@pytest.mark.parametrize("error", [RESET, PIPE, EOF])
def test_a_write_to_a_closed_connection_writes_nothing(error: OSError) -> None:
    assert mended(error).write_to_fd(b"data") == 0


def test_other_ends_of_a_write_are_left_to_tornado() -> None:
    assert mended(4).write_to_fd(b"data") == 4
    with pytest.raises(BlockingIOError):
        mended(BlockingIOError(errno.EWOULDBLOCK, "full")).write_to_fd(b"data")
    with pytest.raises(OSError, match="what"):
        mended(OSError("what?")).write_to_fd(b"data")


def test_a_stream_is_mended_once() -> None:
    stream = mended(1)
    once = stream.read_from_fd
    mend(stream)
    assert stream.read_from_fd is once
