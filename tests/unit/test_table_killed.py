"""A table in a file, and the death of its process: what was confirmed is there, and nothing else."""

from __future__ import annotations

import logging
import multiprocessing
import os
import random
import subprocess
import sys
import time
from collections import deque
from pathlib import Path

import pytest
from table_process import BATCH, PATIENCE, add_for_ever, batch_of, die_before, fork, hold, process, told

from nsqdedupe.errors import ConfigError
from nsqdedupe.tables import opposite_bloom
from nsqdedupe.tables.opposite_bloom import OppositeBloomFilter
from nsqdedupe.tables.table_header import Shape

SHAPE = Shape(slots=2048, ways=32, tag_bytes=8)
FP = b"fingerprint 0001"


class Expected:
    """What must be in a table, given what was confirmed before each kill, and what else was written by then."""

    def __init__(self, shape: Shape, about: str) -> None:
        self.shape = shape
        self.about = about
        self.buckets = [deque[tuple[bytes, bool]](maxlen=shape.ways) for _ in range(shape.slots // shape.ways)]
        self.tags: set[bytes] = set()

    def add(self, fingerprints: list[bytes], *, confirmed: bool) -> None:
        for fp in fingerprints:
            self.buckets[int.from_bytes(fp[8:], "little") % len(self.buckets)].append((fp, confirmed))
            self.tags.add(fp[: self.shape.tag_bytes])

    def check(self, table: OppositeBloomFilter, chance: random.Random) -> None:
        confirmed = [fp for bucket in self.buckets for fp, sure in bucket if sure]
        assert all(table.contains_many(confirmed)), f"a confirmed one was forgotten too early {self.about}"
        never_added = [chance.randbytes(16) for _ in range(1000)]
        assert not any(table.contains_many(never_added)), f"one never added is found {self.about}"
        width = self.shape.tag_bytes
        tags = bytes(table._tags)
        # A slot of 16 bytes under way is one whose first half is zero: that of no message.
        held = {tags[at : at + width] for at in range(0, len(tags), width) if any(tags[at : at + 8])}
        assert held <= self.tags, f"a tag that nobody wrote {self.about}"


@pytest.mark.timeout(600)
@pytest.mark.parametrize(("kills", "tag_bytes"), [(200, 8), (40, 16)])
def test_a_process_is_killed_at_any_moment_and_nothing_confirmed_is_forgotten(
    tmp_path: Path, kills: int, tag_bytes: int
) -> None:
    """Longer than others: 200 processes, one after another, on the same file; some on one they have yet to make."""
    seed = os.urandom(4).hex()
    chance = random.Random(seed)
    path, shape = tmp_path / "seen.table", SHAPE._replace(tag_bytes=tag_bytes)
    expected = Expected(shape, f"with seed {seed}")
    added = killed_while_adding = 0
    for kill in range(kills):
        if chance.random() < 0.1:
            path.unlink(missing_ok=True)
            expected = Expected(shape, f"with seed {seed}, kill {kill}")
        batches = f"{seed}/{kill}"
        with process(add_for_ever, path, shape, batches) as (child, connection):
            until = time.perf_counter()
            if chance.random() < 0.8:
                assert connection.poll(PATIENCE), "it adds nothing"
                until = time.perf_counter() + chance.random() * 0.003
            else:
                until += chance.random() * 0.02
            while time.perf_counter() < until:
                pass
            child.kill()
            child.join()
            confirmed = 0
            while written := os.read(connection.fileno(), 1 << 16):
                confirmed += len(written)
        for number in range(confirmed):
            expected.add(batch_of(batches, number), confirmed=True)
        added += confirmed * BATCH
        killed_while_adding += confirmed > 0
        table = OppositeBloomFilter(*shape, path=path)
        # The batch that was under way: what is not found has taken no slot. Only in slots of 16 bytes the oldest of
        # a bucket is gone before the new one is there.
        doubtful = batch_of(batches, confirmed)
        written = [*table.contains_many(doubtful), False].index(False)
        expected.add(doubtful[: written + (tag_bytes == 16)], confirmed=False)
        expected.check(table, chance)
        table.close()
    assert killed_while_adding > kills / 2
    assert added > shape.slots, "no bucket was ever full"


@pytest.mark.parametrize("tag_bytes", [8, 16])
@pytest.mark.parametrize("stores", [0, 1, 2, 3])
@pytest.mark.parametrize("verb", ["check_and_set", "check_and_set_many"])
def test_a_kill_between_tag_and_cursor_costs_the_message_that_was_in_doubt(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tag_bytes: int, stores: int, verb: str
) -> None:
    """Each store of the write may be the last: its neighbours stay, and no mixture of two fingerprints is found."""
    path, shape = tmp_path / "seen.table", Shape(32, 32, tag_bytes)
    fps = [random.Random(n).randbytes(16) for n in range(35)]
    table = OppositeBloomFilter(*shape, path=path)
    table.add_many(fps[:33])
    real, left = opposite_bloom._store_8, [stores]

    def store_8(*args: object) -> None:
        if not left[0]:
            raise KeyboardInterrupt
        left[0] -= 1
        real(*args)

    class NoMore:
        def __getitem__(self, bucket: int) -> int:
            return table._file.cursors[bucket]  # type: ignore[union-attr]

        def __setitem__(self, bucket: int, cursor: int) -> None:
            raise KeyboardInterrupt

    table._cursors = NoMore()  # type: ignore[assignment]
    monkeypatch.setattr(opposite_bloom, "_store_8", store_8)
    with pytest.raises(KeyboardInterrupt):
        getattr(table, verb)(fps[33] if verb == "check_and_set" else [fps[33]])
    monkeypatch.undo()
    table.close()

    table = OppositeBloomFilter(*shape, path=path)
    written = tag_bytes == 8 or stores == 3
    # The slot of fps[1] was the oldest: it goes with the first store, fps[33] comes with the last.
    assert table.contains_many(fps[:34]) == [False, tag_bytes == 16 and not stores, *[True] * 31, written]
    mixtures = [fps[1][:8] + fps[33][8:], fps[33][:8] + fps[1][8:]]
    assert tag_bytes == 8 or table.contains_many(mixtures) == [False, False]
    table.add(fps[34])
    assert table.contains_many(fps[2:]) == [True] * 31 + [False, True]
    table.close()


@pytest.mark.parametrize(
    ("call", "count"),
    [("posix_fallocate", 1), ("pwrite", 1), ("fsync", 1), ("rename", 1), ("fsync", 2), ("posix_fallocate", 2)],
)
def test_a_crash_while_the_file_is_made_is_no_obstacle(tmp_path: Path, call: str, count: int) -> None:
    path = tmp_path / "seen.table"
    with process(die_before, path, SHAPE, call, count) as (child, connection):
        assert connection.poll(PATIENCE)
        with pytest.raises(EOFError):
            connection.recv()
        child.join()
    left = [file.name for file in tmp_path.iterdir()]
    assert left == (["seen.table"] if count == 2 else ["seen.table.nsqdedupe-new"])
    table = OppositeBloomFilter(*SHAPE, path=path)
    assert not table.check_and_set(FP)
    table.close()
    assert [file.name for file in tmp_path.iterdir()] == ["seen.table"]


@pytest.mark.parametrize("ends", ["killed", "dropped"])
def test_another_process_has_it_until_it_ends(tmp_path: Path, caplog: pytest.LogCaptureFixture, ends: str) -> None:
    """Who drops a table closes it; a kill leaves a word in the file."""
    caplog.set_level(logging.INFO, logger="nsqdedupe")
    path = tmp_path / "seen.table"
    with process(hold, path, SHAPE, [FP]) as (child, connection):
        assert told(connection) == "open"
        with pytest.raises(ConfigError) as refused:
            OppositeBloomFilter(*SHAPE, path=path)
        assert str(refused.value).endswith(
            f"another process (pid {child.pid}) has it open; "
            "give each process a path of its own, or stop that one first"
        )
        if ends == "killed":
            child.kill()
        else:
            connection.send("end")
        child.join()
        pid = child.pid
    table = OppositeBloomFilter(*SHAPE, path=path)
    assert table.contains(FP)
    table.close()
    OppositeBloomFilter(*SHAPE, path=path).close()
    note = (
        f"path={str(path)!r}: was not closed by process {pid}. What that had written is there, unless the machine "
        "went down too"
    )
    assert [(record.levelname, record.getMessage()) for record in caplog.records] == (
        [("INFO", note)] if ends == "killed" else []
    )


def test_the_interpreter_closes_it_at_its_end(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, logger="nsqdedupe")
    path = tmp_path / "seen.table"
    program = (
        "import nsqdedupe, sys; table = nsqdedupe.OppositeBloomFilter(2048, path=sys.argv[1]); table.add(b'x' * 16)"
    )
    subprocess.run([sys.executable, "-c", program, path], check=True, cwd=Path(opposite_bloom.__file__).parents[2])
    table = OppositeBloomFilter(*SHAPE, path=path)
    assert table.contains(b"x" * 16)
    table.close()
    assert caplog.records == []


def test_two_processes_that_make_the_file_get_one_table(tmp_path: Path) -> None:
    path = tmp_path / "seen.table"
    with process(hold, path, SHAPE, [FP]) as one, process(hold, path, SHAPE, [FP]) as other:
        said = []
        for _, connection in (one, other):
            assert connection.poll(PATIENCE)
            try:
                said.append(connection.recv())
            except EOFError:
                said.append("refused")
        assert sorted(said) == ["open", "refused"]
    assert [file.name for file in tmp_path.iterdir()] == ["seen.table"]


def test_a_fork_leaves_the_file_to_its_parent(tmp_path: Path) -> None:
    """It may not write, may not open it, does not close it, and holds no lock once the parent is through."""
    path = tmp_path / "seen.table"
    gate, theirs = multiprocessing.Pipe()
    with gate, process(fork, path, SHAPE, FP, theirs) as (child, connection):
        theirs.close()
        *verbs, opening = told(connection)
        text = "StoreError: the table is in a file that the parent of this process has open; open it after the fork"
        assert [verb.startswith(text) for verb in verbs] == [True] * 6
        assert f"another process (pid {child.pid}) has it open" in opening
        assert told(connection) == [True, "None"]
        connection.send("parent, go on")
        assert told(connection) == "closed"
        table = OppositeBloomFilter(*SHAPE, path=path)
        assert table.contains(FP), "the parent could not go on"
        table.close()


def test_what_a_fork_does_to_the_tables_it_inherits(tmp_path: Path) -> None:
    table = OppositeBloomFilter(*SHAPE, path=tmp_path / "seen.table")
    opposite_bloom._leave_files_to_parent()
    with pytest.raises(opposite_bloom.StoreError, match="open it after the fork"):
        table.add(FP)
    table.close()
