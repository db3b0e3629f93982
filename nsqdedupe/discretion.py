"""Tells of an exception, but not of the message that it was raised for: not all who read logs may read those."""

from __future__ import annotations

from collections.abc import Iterator
from types import TracebackType


class WithheldError(Exception):
    """Stands in a traceback for an exception whose text is not for logs."""


def exc_info(error: BaseException, body: object) -> tuple[type[BaseException], BaseException, TracebackType | None]:
    """What to log of an exception, for the argument of that name.

    Args:
        error: what was raised while a message was handled.

        body: of the message, as it arrived or as a hook made it. When a text of the exception or of one that
            led to it holds it, only the class and the lines of code are told.
    """
    try:
        holds = _holds(error, body)
    except Exception:  # noqa: BLE001 - a text that cannot be had: let it be
        holds = True
    if holds:
        told = f"{type(error).__name__}, whose text holds the message's body or cannot be had"
        return WithheldError, WithheldError(told), error.__traceback__
    return type(error), error, error.__traceback__


def _holds(error: BaseException, body: object) -> bool:
    plain = body.decode(errors="replace") if isinstance(body, bytes) else str(body)
    # As it is, and as Python writes it: the text of a KeyError is the key in the latter form.
    written = {plain, repr(plain)[1:-1]} | ({repr(body)[2:-1]} if isinstance(body, bytes) else set())
    return any(form in text for text in _texts(error) for form in written if form)


def _texts(error: BaseException) -> Iterator[str]:
    """What a traceback would say of an exception and of those that led to it."""
    ahead, seen = [error], set()
    while ahead:
        this = ahead.pop()
        if id(this) in seen:
            continue
        seen.add(id(this))
        ahead += [other for other in (this.__cause__, this.__context__) if other is not None]
        yield from (str(this), *getattr(this, "__notes__", ()))
        ahead += getattr(this, "exceptions", ())
