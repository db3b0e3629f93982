"""The error tree: what catching one class catches, and what the errors carry."""

from __future__ import annotations

import pytest

from nsqdedupe import errors


@pytest.mark.parametrize(
    ("error", "caught_as"),
    [
        (errors.ConfigError, ValueError),
        (errors.MissingDependency, ImportError),
        (errors.StoreUnavailable, errors.StoreError),
    ],
)
def test_errors_are_caught_as_what_they_also_are(error: type[Exception], caught_as: type[Exception]) -> None:
    with pytest.raises(caught_as, match="why"):
        raise error("why")


def test_every_error_of_the_package_hangs_under_one_root() -> None:
    classes = [value for value in vars(errors).values() if isinstance(value, type) and issubclass(value, Exception)]
    assert [error for error in classes if not issubclass(error, errors.DedupeError)] == []


def test_what_happened_to_a_message_is_not_caught_as_a_misconfiguration() -> None:
    for error in (errors.KeyExtractionError, errors.PublishError, errors.StoreError):
        assert not issubclass(error, ValueError)


def test_a_publish_error_keeps_who_answered_and_who_did_not() -> None:
    acknowledged, failed = ["a:4150"], {"b:4150": "connection refused"}
    error = errors.PublishError("1 of 2 copies", acknowledged=acknowledged, failed=failed)
    acknowledged.clear()
    failed.clear()
    assert str(error) == "1 of 2 copies"
    assert error.acknowledged == ("a:4150",)
    assert error.failed == {"b:4150": "connection refused"}


def test_a_fatal_error_says_which_nsqd_and_what_it_said() -> None:
    error = errors.FatalError("refused", nsqd="127.0.0.1:4150", code="E_AUTH_FAILED")
    assert (str(error), error.nsqd, error.code) == ("refused", "127.0.0.1:4150", "E_AUTH_FAILED")
