"""The demo cluster's account of what was published and handled."""

from __future__ import annotations

from pathlib import Path

import pytest

from nsqdedupe.cli.cluster.account import DUPLICATES, HANDLED, PUBLISHED, Account, Journal, event_id, number_of


@pytest.fixture
def account(tmp_path: Path) -> Account:
    return Account(tmp_path)


def counts(account: Account) -> tuple[int, int, int, int, int]:
    account.read()
    return account.published, account.handled, len(account.waiting), account.twice, account.duplicates


def test_it_is_empty_at_first(account: Account) -> None:
    assert counts(account) == (0, 0, 0, 0, 0)


def test_what_is_published_waits_until_it_is_handled(account: Account, tmp_path: Path) -> None:
    Journal(tmp_path, "publisher").write(PUBLISHED, ["a-1", "a-2", "a-3"])
    assert counts(account) == (3, 0, 3, 0, 0)
    Journal(tmp_path, "consumer").write(HANDLED, ["a-2"])
    assert counts(account) == (3, 1, 2, 0, 0)
    assert account.waiting == {"a-1", "a-3"}


def test_what_is_handled_before_the_publisher_knows_does_not_wait(account: Account, tmp_path: Path) -> None:
    Journal(tmp_path, "consumer").write(HANDLED, ["a-1"])
    assert counts(account) == (0, 1, 0, 0, 0)
    Journal(tmp_path, "publisher").write(PUBLISHED, ["a-1"])
    assert counts(account) == (1, 1, 0, 0, 0)


def test_what_two_have_handled_is_counted_once_as_handled_and_once_as_twice(account: Account, tmp_path: Path) -> None:
    for name in ("one", "other", "third"):
        Journal(tmp_path, name).write(HANDLED, ["a-1"])
    assert counts(account) == (0, 1, 0, 1, 0)


def test_duplicates_are_the_sum_of_what_each_program_said_last(account: Account, tmp_path: Path) -> None:
    one, other = Journal(tmp_path, "one"), Journal(tmp_path, "other")
    for count in (5, 7):
        one.write(DUPLICATES, [count])
        assert counts(account)[-1] == count
    other.write(DUPLICATES, [3])
    assert counts(account)[-1] == 10


def test_a_line_that_is_being_written_is_read_when_it_is_whole(account: Account, tmp_path: Path) -> None:
    path = tmp_path / "publisher.1.journal"
    path.write_bytes(b"published a-1\npubli")
    assert counts(account)[0] == 1
    with path.open("ab") as file:
        file.write(b"shed a-2\n")
    assert counts(account)[0] == 2
    assert account.waiting == {"a-1", "a-2"}


def test_who_reads_it_later_or_again_sees_the_same(account: Account, tmp_path: Path) -> None:
    journal = Journal(tmp_path, "consumer")
    journal.write(HANDLED, ["a-1", "a-2"])
    seen = counts(account)
    assert counts(account) == seen
    assert counts(Account(tmp_path)) == seen


def test_a_program_that_starts_again_has_another_journal(tmp_path: Path) -> None:
    for _ in range(2):
        Journal(tmp_path, "consumer").write(HANDLED, ["a-1"])
    assert len(list(tmp_path.iterdir())) == 2


def test_an_event_knows_which_one_of_its_run_it_is() -> None:
    assert number_of(event_id("18ea1e3a0c6e7dae", 7)) == 7
