"""What may be told of an exception."""

from __future__ import annotations

import traceback
from collections.abc import Callable

import pytest

from nsqdedupe.discretion import WithheldError, exc_info

BODY = b'{"name": "J\xc3\xbcrgen"}'


def plain() -> None:
    raise ValueError(f"cannot parse {BODY.decode()}")


def written_as_bytes() -> None:
    int(BODY)


def as_a_cause() -> None:
    try:
        plain()
    except ValueError as error:
        raise RuntimeError("no") from error


def as_a_context() -> None:
    try:
        plain()
    except ValueError:
        raise RuntimeError("no")  # noqa: B904 - that is the case


def as_a_note() -> None:
    error = RuntimeError("no")
    error.add_note(BODY.decode())
    raise error


def in_a_group() -> None:
    raise ExceptionGroup("all", [KeyError("x"), ValueError(BODY.decode())])


def in_a_circle() -> None:
    error = RuntimeError("no")
    error.__cause__ = KeyError()
    error.__cause__.__cause__ = error
    raise error


class NastyError(ValueError):
    def __str__(self) -> str:
        raise RuntimeError("no text")


def without_a_text() -> None:
    raise NastyError


def text_of(fail: Callable[[], None], body: object = BODY) -> str:
    with pytest.raises(Exception) as caught:
        fail()
    return "".join(traceback.format_exception(*exc_info(caught.value, body)))


CASES = [plain, written_as_bytes, as_a_cause, as_a_context, as_a_note, in_a_group, without_a_text]


@pytest.mark.parametrize("fail", CASES)
def test_a_body_is_withheld_and_the_class_and_the_lines_are_told(fail: Callable[[], None]) -> None:
    text = text_of(fail)
    assert WithheldError.__name__ in text
    assert fail.__name__ in text
    assert "rgen" not in text


def test_a_circle_of_causes_has_an_end() -> None:
    assert "RuntimeError: no" in text_of(in_a_circle)


def test_the_class_is_told() -> None:
    assert "WithheldError: RuntimeError, whose" in text_of(as_a_cause)


def test_a_body_that_a_hook_replaced_is_withheld_too() -> None:
    body = {"name": "Ada"}

    def fail() -> None:
        raise KeyError(f"of {body}")

    assert "Ada" not in text_of(fail, body)


@pytest.mark.parametrize("body", [b"J\xc3\xbcrgen\n", "J\N{LATIN SMALL LETTER U WITH DIAERESIS}rgen\n"])
def test_a_body_that_was_no_key_is_withheld(body: bytes | str) -> None:
    """The text of a KeyError is the key as Python would write it, line ends and all."""

    def fail() -> None:
        raise KeyError(body.decode() if isinstance(body, bytes) else body)

    assert "rgen" not in text_of(fail, body)


@pytest.mark.parametrize("body", [b"", b"something else", {}])
def test_other_texts_are_told(body: object) -> None:
    assert "cannot parse" in text_of(plain, body)
