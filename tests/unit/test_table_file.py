"""A table's file: what is made, what is refused and how, and that what is refused is left as it was."""

from __future__ import annotations

import contextlib
import fcntl
import gc
import os
import resource
import shutil
import socket
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from nsqdedupe.errors import ConfigError, StoreError
from nsqdedupe.stores.embedded import MemoryStore
from nsqdedupe.tables import table_file
from nsqdedupe.tables.opposite_bloom import OppositeBloomFilter
from nsqdedupe.tables.table_header import HASHING_AT, Shape, new_header

SHAPE = Shape(slots=64, ways=32, tag_bytes=8)
SIZE = (1 << 16) + (1 << 16) + 64 * 8
CURSORS_AT = 1 << 16
FP = b"fingerprint 0001"
NOBODY = 65534


_opened: list[OppositeBloomFilter] = []


def opened(path: object, shape: Shape = SHAPE) -> OppositeBloomFilter:
    """A table that is closed when the test ends, not when it is collected."""
    table = OppositeBloomFilter(*shape, path=path)  # type: ignore[arg-type]
    _opened.append(table)
    return table


@pytest.fixture(autouse=True)
def _close_all() -> Iterator[None]:
    yield
    while _opened:
        _opened.pop().close()


def names_in(folder: Path) -> list[str]:
    return sorted(file.name for file in folder.iterdir())


def refusal(path: object, shape: Shape = SHAPE) -> str:
    with pytest.raises(ConfigError) as caught:
        opened(path, shape)
    return str(caught.value)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "seen.table"


@pytest.fixture
def made(path: Path) -> Path:
    """The file of a table that holds `FP`."""
    table = opened(path)
    table.add(FP)
    table.close()
    return path


@contextlib.contextmanager
def unprivileged() -> Iterator[Path]:
    """As a user whom permissions bind, which root is not; a directory that this user can reach."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        folder.chmod(0o777)
        was = os.geteuid()
        if was == 0:
            os.seteuid(NOBODY)
        try:
            yield folder
        finally:
            os.seteuid(was)


# -- what is made ------------------------------------------------------------------------------


def test_what_was_added_is_there_when_the_file_is_opened_again(made: Path) -> None:
    table = opened(made)
    assert table.durable
    assert table.contains(FP)
    table.discard(FP)
    table.close()
    assert not opened(str(made)).contains(FP)


def test_first_in_first_out_goes_on_where_it_was(path: Path) -> None:
    fps = [bytes([n]) * 8 + bytes(8) for n in range(1, 36)]
    for fp in fps:
        table = opened(path)
        table.add(fp)
        table.close()
    assert opened(path).contains_many(fps) == [False] * 3 + [True] * 32


@pytest.mark.parametrize("umask", [0, 0o377])
def test_it_is_for_its_owner_alone_and_has_all_its_blocks(path: Path, umask: int) -> None:
    was = os.umask(umask)
    try:
        opened(path).close()
    finally:
        os.umask(was)
    about = path.stat()
    assert about.st_mode & 0o777 == 0o600
    assert about.st_size == SIZE
    assert about.st_blocks * 512 >= SIZE
    assert names_in(path.parent) == [path.name]


def test_the_holes_that_a_copy_made_are_filled(made: Path) -> None:
    content = made.read_bytes()
    made.unlink()
    with made.open("wb") as sparse:
        sparse.write(content[:4096])
        sparse.truncate(SIZE)
    opened(made).close()
    assert made.stat().st_blocks * 512 >= SIZE


@pytest.mark.parametrize("exists", [True, False])
def test_a_symbolic_link_is_followed(made: Path, tmp_path: Path, exists: bool) -> None:
    folder = tmp_path / "elsewhere"
    folder.mkdir()
    target = folder / "real.table"
    link = tmp_path / "link"
    link.symlink_to(target)
    if exists:
        made.rename(target)
    table = opened(link)
    assert table.contains(FP) is exists
    table.close()
    assert link.is_symlink()
    assert names_in(folder) == ["real.table"]


def test_a_table_that_nobody_holds_any_more_is_closed(path: Path) -> None:
    table = OppositeBloomFilter(*SHAPE, path=path)
    table.add(FP)
    del table
    gc.collect()
    assert opened(path).contains(FP)


def test_a_copy_is_a_table_of_its_own(made: Path, tmp_path: Path) -> None:
    copied = Path(shutil.copy(made, tmp_path / "copy.table"))
    one, other = opened(made), opened(copied)
    one.discard(FP)
    assert other.contains(FP)


# -- what a crash or a rival leaves ------------------------------------------------------------


@pytest.mark.parametrize("left", [b"", b"half a header", new_header(SHAPE), b"x" * 2 * SIZE])
def test_what_a_crash_left_of_a_new_file_is_made_anew(path: Path, left: bytes) -> None:
    new = path.with_name("seen.table.nsqdedupe-new")
    new.write_bytes(left)
    new.chmod(0o644)
    table = opened(path)
    assert not table.contains(FP)
    assert names_in(path.parent) == ["seen.table"]
    assert path.stat().st_size == SIZE
    assert path.stat().st_mode & 0o777 == 0o600


def before_the_first_lock(monkeypatch: pytest.MonkeyPatch, act: Callable[[], object]) -> None:
    """Let another process act in the moment between opening a file and locking it."""
    acts = [act]

    def flock(fd: int, how: int) -> None:
        if acts:
            acts.pop()()
        real(fd, how)

    real = fcntl.flock
    monkeypatch.setattr(table_file.fcntl, "flock", flock)


def test_a_file_that_is_made_meanwhile_by_another_process_is_taken(
    made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "later.table"
    before_the_first_lock(monkeypatch, lambda: made.rename(path))
    assert opened(path).contains(FP)
    assert names_in(tmp_path) == ["later.table"]


def test_a_rival_that_was_as_fast_and_has_finished_is_no_obstacle(
    made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "later.table"

    def finish() -> None:
        path.with_name("later.table.nsqdedupe-new").unlink()
        made.rename(path)

    before_the_first_lock(monkeypatch, finish)
    assert opened(path).contains(FP)


def test_a_file_that_is_replaced_meanwhile_is_not_locked_in_vain(
    made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = tmp_path / "other.table"
    opened(other).close()
    before_the_first_lock(monkeypatch, lambda: other.replace(made))
    assert not opened(made).contains(FP)


def test_a_file_that_is_removed_meanwhile_is_made(made: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before_the_first_lock(monkeypatch, made.unlink)
    assert not opened(made).contains(FP)
    assert made.exists()


# -- what is refused ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("content", "text"),
    [
        (b"", "is empty; give another path, or remove it if nobody needs it"),
        (b"id;name\n1;one\n" * 10_000, "is no table of nsqdedupe; give another path, or remove it"),
        (bytes(SIZE), "is no table of nsqdedupe"),
        (new_header(SHAPE)[:100], "is cut off after 100 bytes; to begin anew, remove it"),
        (new_header(SHAPE)[:4095], "is cut off after 4095 bytes"),
        (new_header(SHAPE), f"is cut off: it has 4096 bytes, and should have {SIZE}; to begin anew, remove it"),
    ],
)
def test_what_is_no_whole_table_is_refused(path: Path, content: bytes, text: str) -> None:
    path.write_bytes(content)
    assert refusal(path).startswith(f"path={str(path)!r}: {text}")
    assert path.read_bytes() == content


@pytest.mark.parametrize("by", [-1, -512, 1, 4096])
def test_a_file_of_another_length_is_refused(made: Path, by: int) -> None:
    os.truncate(made, SIZE + by)
    before = made.read_bytes()
    what = "cut off" if by < 0 else "too long"
    assert f"is {what}: it has {SIZE + by} bytes, and should have {SIZE}; to begin anew, remove it" in refusal(made)
    assert made.read_bytes() == before


def patched(path: Path, at: int, change: bytes) -> bytes:
    content = path.read_bytes()
    content = content[:at] + change + content[at + len(change) :]
    path.write_bytes(content)
    return content


@pytest.mark.parametrize("at", [20, 30, 36, 64, 70, 100, 511, 4095])
def test_a_damaged_header_is_refused(made: Path, at: int) -> None:
    changed = bytes([made.read_bytes()[at] ^ 0x10])
    before = patched(made, at, changed)
    assert "its header was changed; to begin anew, remove it" in refusal(made)
    assert made.read_bytes() == before


def test_a_file_of_another_release_is_refused(made: Path) -> None:
    before = patched(made, 16, b"\2")
    assert "has format 2, and this release reads format 1; use a release that reads it" in refusal(made)
    assert made.read_bytes() == before


@pytest.mark.parametrize(("bucket", "cursor"), [(0, 32), (1, 200)])
def test_a_cursor_that_leaves_its_bucket_is_refused(made: Path, bucket: int, cursor: int) -> None:
    patched(made, CURSORS_AT + bucket, bytes([cursor]))
    assert f"is damaged: the cursor of bucket {bucket} is {cursor}, and ways=32; to begin anew" in refusal(made)


@pytest.mark.parametrize(
    ("other", "asked"),
    [
        (SHAPE._replace(slots=96), "slots=96, ways=32, tag_bytes=8"),
        (SHAPE._replace(ways=16), "slots=64, ways=16, tag_bytes=8"),
        (SHAPE._replace(tag_bytes=16), "slots=64, ways=32, tag_bytes=16"),
    ],
)
def test_a_table_of_another_shape_is_refused(made: Path, other: Shape, asked: str) -> None:
    text = refusal(made, other)
    assert f"has slots=64, ways=32, tag_bytes=8, and {asked} was asked for; ask for slots=64, ways=32" in text
    assert "a table cannot be resized, because its tags lack the bits that chose their bucket" in text
    assert "remove it: what it remembers is lost, and those messages may be handled again" in text
    assert opened(made).contains(FP)


def test_slots_are_compared_in_whole_buckets(made: Path) -> None:
    assert opened(made, SHAPE._replace(slots=33)).contains(FP)


def test_a_window_that_needs_another_size_is_refused_in_slots(made: Path) -> None:
    with pytest.raises(ConfigError, match=r"has slots=64, ways=32, tag_bytes=8, and slots=1600, ways=32"):
        MemoryStore(window=1000, recall=0.99, path=made)


@pytest.mark.parametrize("wrong", ["", 7, b"seen.table", "seen\0table", "folder/", True])
def test_what_is_no_name_of_a_file_is_refused(wrong: object) -> None:
    assert refusal(wrong).startswith(f"path={wrong!r}: must be the name of a file as str or Path; it is made if")


def test_a_missing_directory_is_refused(tmp_path: Path) -> None:
    text = refusal(tmp_path / "missing" / "seen.table")
    assert text.endswith(": cannot be opened: No such file or directory; create its directory first")
    assert names_in(tmp_path) == []


def test_a_path_below_a_file_is_refused(made: Path) -> None:
    assert "cannot be opened: Not a directory; what stands before the last / must be a dir" in refusal(made / "x")


def test_a_directory_in_its_place_is_refused(tmp_path: Path) -> None:
    assert refusal(tmp_path).endswith("Is a directory; give the name of a file in that directory")


def test_a_fifo_in_its_place_is_refused_at_once(path: Path) -> None:
    os.mkfifo(path)
    assert refusal(path).endswith("is no regular file; give the name of one, or of one to be made")


@pytest.mark.parametrize("device", ["/dev/null", "/dev/zero"])
def test_a_device_in_its_place_is_refused(device: str) -> None:
    assert "is no regular file" in refusal(device)


def test_a_socket_in_its_place_is_refused(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(path.parent)  # the names of sockets must be short
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(path.name)
        assert refusal(path).endswith("No such device or address; give the name of a file on a local disk")


def test_a_link_to_itself_is_refused(path: Path) -> None:
    path.symlink_to(path)
    assert "cannot be opened: Too many levels of symbolic links" in refusal(path)


def test_a_link_in_place_of_a_new_file_is_not_followed(path: Path, tmp_path: Path) -> None:
    precious = tmp_path / "precious"
    precious.write_text("precious")
    path.with_name("seen.table.nsqdedupe-new").symlink_to(precious)
    assert "Too many levels of symbolic links" in refusal(path)
    assert precious.read_text() == "precious"


def test_a_directory_that_may_not_be_written_to_is_refused() -> None:
    with unprivileged() as folder:
        opened(folder / "allowed.table").close()
        inner = folder / "inner"
        inner.mkdir()
        inner.chmod(0o555)
        text = refusal(inner / "seen.table")
        assert "cannot be opened: Permission denied; this user must be allowed to read and write it, and, wh" in text


def test_a_file_that_may_not_be_written_to_is_refused() -> None:
    with unprivileged() as folder:
        opened(folder / "seen.table").close()
        (folder / "seen.table").chmod(0o444)
        assert "cannot be opened: Permission denied; this user must be allowed" in refusal(folder / "seen.table")


def test_an_existing_file_needs_no_rights_on_its_directory() -> None:
    with unprivileged() as folder:
        inner = folder / "inner"
        inner.mkdir()
        opened(inner / "seen.table").close()
        inner.chmod(0o555)
        opened(inner / "seen.table").close()


@contextlib.contextmanager
def room_for(size: int) -> Iterator[None]:
    """No file may grow beyond so many bytes: a full disk that needs no rights."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_a_disk_without_room_is_told_when_the_file_is_made(path: Path) -> None:
    with room_for(SIZE - 1):
        text = refusal(path)
    assert f"there is no room for its {SIZE} bytes: File too large; make room, or ask for a smaller table" in text
    assert names_in(path.parent) == []
    with room_for(SIZE):
        opened(path).close()


def test_it_is_open_once_in_a_process(made: Path, tmp_path: Path) -> None:
    table = opened(made)
    link = tmp_path / "link"
    link.symlink_to(made)
    for name in (made, link):
        assert refusal(name).endswith("is open in this process already; share that table or store, or close it first")
    table.close()
    assert opened(made).contains(FP)


# -- how fingerprints are made -----------------------------------------------------------------


def test_how_fingerprints_are_made_is_kept_in_the_file(made: Path) -> None:
    table = opened(made)
    table.bind("mmh3-x64-128")
    table.close()
    table = opened(made)
    with pytest.raises(ConfigError) as caught:
        table.bind("blake2b-128 key 00")
    assert str(caught.value) == (
        f"path={str(made)!r}: its fingerprints are made with mmh3-x64-128, not with blake2b-128 key 00 as those to "
        "come, so none would be found; give the secret that was given before, or begin with another table"
    )
    table.bind("mmh3-x64-128")
    assert table.contains(FP)


@pytest.mark.parametrize("wrong", ["", "ü", "x" * 65])
def test_what_names_no_hashing_is_refused(wrong: str) -> None:
    with pytest.raises(ConfigError, match=r"hashing='.*': must be 1 to 64 ASCII characters"):
        OppositeBloomFilter(slots=32).bind(wrong)


def test_a_file_whose_hashing_was_changed_is_refused(made: Path) -> None:
    table = opened(made)
    table.bind("mmh3-x64-128")
    table.close()
    patched(made, HASHING_AT, b"M")
    assert "is damaged: its header was changed" in refusal(made)


# -- a disk that fails -------------------------------------------------------------------------


def fail(*_: object) -> None:
    raise OSError(5, "Input/output error")


def test_a_disk_that_fails_is_told_and_the_file_is_let_go_of(made: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    table = opened(made)
    with monkeypatch.context() as broken:
        broken.setattr(os, "fsync", fail)
        with pytest.raises(StoreError, match=r"seen.table': cannot be written to the disk: Input/output error"):
            table.bind("mmh3-x64-128")
        with pytest.raises(StoreError, match=r"cannot be written to the disk"):
            table.close()
    assert opened(made).contains(FP)


@pytest.mark.parametrize("exists", [True, False])
def test_a_disk_that_fails_at_the_start_is_told(
    made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, exists: bool
) -> None:
    path = made if exists else tmp_path / "new.table"
    with monkeypatch.context() as broken:
        broken.setattr(os, "fsync", fail)
        assert "cannot be opened: Input/output error; give the name of a file on a local disk" in refusal(path)
    assert names_in(tmp_path) == ["seen.table"]
    assert opened(path).contains(FP) is exists
