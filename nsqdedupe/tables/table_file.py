"""The file of a table: made whole or not at all, for one process at a time, mapped into memory.

It has three parts: the header (`nsqdedupe.tables.table_header`), a cursor byte per bucket, the slots. Each
begins at a multiple of 64 KiB, which every page size divides, so that each can be mapped alone, and a file may
move between machines.

What is written to a mapping is in the kernel's page cache at once, so the death of the process loses none of
it, SIGKILL included. Only the death of the machine loses what the kernel had not yet written back.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import logging
import mmap
import os
import stat
from collections.abc import Callable
from pathlib import Path

from nsqdedupe.checks import refuse
from nsqdedupe.errors import ConfigError, StoreError
from nsqdedupe.sizing import buckets_for
from nsqdedupe.tables.table_header import (
    BEGIN_ANEW,
    HASHING_AT,
    HEADER_BYTES,
    STATE_AT,
    WORD_BYTES,
    Shape,
    State,
    UnreadableError,
    hashing_record,
    new_header,
    read_header,
    read_state,
    state_word,
)

logger = logging.getLogger(__name__)

_ALIGN = 1 << 16
_CURSORS_AT = _ALIGN
_CHUNK = 1 << 20

# O_NONBLOCK: a device or a FIFO in the file's place must not keep us waiting.
_FLAGS = os.O_RDWR | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOCTTY

_open_here: set[tuple[int, int]] = set()
"""Device and inode of what is open in this process. Process ids do not tell: in containers many are 1."""

_NO_ROOM = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}
_RIGHTS = "this user must be allowed to read and write it, and, while it does not exist, to write to its directory"
_REMEDIES = {
    errno.ENOENT: "create its directory first",
    errno.ENOTDIR: "what stands before the last / must be a directory",
    errno.EISDIR: "give the name of a file in that directory",
    errno.EACCES: _RIGHTS,
    errno.EPERM: _RIGHTS,
    errno.EROFS: "give a path on a file system that can be written to",
}


class TableFile:
    """Cursors and slots of one table, mapped from a file that this process alone has open.

    A file that is not there is made, for its owner alone and with all its blocks allocated: under another name
    first, so that a crash leaves no half of it. A symbolic link is followed. Opening reads the cursors; it
    waits for the disk.

    Args:
        path: the file. Its directory must exist.

        shape: of the table, in whole buckets.

    Raises:
        ConfigError: it cannot be opened or made, there is no room for it, it is open already (here or in
            another process), it is something else, damaged, or a table of another shape. Whatever is there is
            left as it was.
    """

    cursors: mmap.mmap
    """A byte per bucket, less than ``ways`` each. All zero in a new file."""

    tags: mmap.mmap
    """The slots. All zero in a new file."""

    hashing: str | None
    """How the fingerprints in it are made; None until `record_hashing` was called."""

    def __init__(self, path: str | os.PathLike[str], shape: Shape) -> None:
        name = _name_of(path)
        self.label = f"path={name!r}"
        """How errors name the file."""
        self._shape = shape
        self._buckets = buckets_for(shape.slots, shape.ways)
        tags_at = _CURSORS_AT + -(-self._buckets // _ALIGN) * _ALIGN
        tags_size = shape.slots * shape.tag_bytes
        self._size = tags_at + tags_size
        self._fd = -1
        try:
            # Resolved, so that a new file is made where a link leads to, not beside the link.
            self._fd = self._acquire(Path(os.path.realpath(name)))
            self._identity = _identity_of(self._fd)
            _open_here.add(self._identity)
            self.hashing = self._check()
            # It may have holes if it was copied. A write into a hole, on a full disk, ends in SIGBUS.
            os.posix_fallocate(self._fd, 0, self._size)
            self.cursors = mmap.mmap(self._fd, self._buckets, offset=_CURSORS_AT)
            self.tags = mmap.mmap(self._fd, tags_size, offset=tags_at)
            self._say(is_open=True)
        except OSError as error:
            self.abandon()
            raise self._cannot_open(error) from error
        except BaseException:
            self.abandon()
            raise

    def record_hashing(self, hashing: str) -> None:
        """Record how its fingerprints are made, where nothing was recorded. On return it is on the disk.

        Args:
            hashing: 1 to 64 ASCII characters.

        Raises:
            StoreError: the disk does not take it.
        """
        text, seal = hashing_record(hashing)

        def write() -> None:
            os.pwrite(self._fd, text, HASHING_AT)
            os.pwrite(self._fd, seal, HASHING_AT + len(text))
            os.fsync(self._fd)

        self._to_disk(write)
        self.hashing = hashing

    def flush(self) -> None:
        """Wait until cursors and slots are on the disk as they are now.

        Raises:
            StoreError: the disk does not take them.
        """
        self._to_disk(self.cursors.flush, self.tags.flush)

    def close(self) -> None:
        """Wait until everything is on the disk, then mark the file as closed, and let go of it. Idempotent.

        Raises:
            StoreError: the disk does not take it. The file is let go of all the same.
        """
        if self._fd < 0:
            return
        try:
            # In this order: a file that is marked as closed is whole, even after a power cut.
            self._to_disk(self.cursors.flush, self.tags.flush, lambda: self._say(is_open=False))
        finally:
            self.abandon()

    def abandon(self) -> None:
        """Let go of the file as it is. Idempotent. In a fork it leaves what the parent has of it untouched."""
        for mapped in ("cursors", "tags"):
            if mapped in vars(self):
                getattr(self, mapped).close()
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1
            _open_here.discard(self._identity)

    def _say(self, *, is_open: bool) -> None:
        os.pwrite(self._fd, state_word(State(is_open, os.getpid())), STATE_AT)
        os.fsync(self._fd)

    def _to_disk(self, *steps: Callable[[], None]) -> None:
        try:
            for step in steps:
                step()
        except OSError as error:
            raise StoreError(f"{self.label}: cannot be written to the disk: {error.strerror}") from error

    # -- finding or making it --------------------------------------------------------------------

    def _acquire(self, path: Path) -> int:
        """A descriptor of the file, locked. It is made if there is none."""
        while True:
            try:
                found = os.open(path, _FLAGS)
            except FileNotFoundError:
                fd = self._make(path)
            else:
                fd = self._lock(found, path)
            if fd is not None:
                return fd

    def _lock(self, fd: int, path: Path) -> int | None:
        """Lock a file that was opened. None: it has left that path meanwhile, and was closed."""
        try:
            self._lock_now(fd)
            with contextlib.suppress(FileNotFoundError):
                if os.path.samestat(os.fstat(fd), os.lstat(path)):
                    return fd
        except BaseException:
            os.close(fd)
            raise
        os.close(fd)
        return None

    def _lock_now(self, fd: int) -> None:
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            raise self._refuse("is no regular file", "give the name of one, or of one to be made")
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise self._in_use(fd) from None

    def _make(self, path: Path) -> int | None:
        """A descriptor of a new file, locked. None: another process has made it meanwhile.

        The lock of the name under which it is made is the right to make it, so who holds that lock and finds
        the path free has no rival. What a crash left under that name is overwritten.
        """
        new = path.with_name(f"{path.name}.nsqdedupe-new")
        fd = self._lock(os.open(new, _FLAGS | os.O_CREAT | os.O_NOFOLLOW, 0o600), new)
        if fd is None:
            return None
        try:
            if not os.path.lexists(path):
                os.fchmod(fd, 0o600)
                os.ftruncate(fd, 0)
                os.posix_fallocate(fd, 0, self._size)
                os.pwrite(fd, new_header(self._shape), 0)
                os.fsync(fd)
                new.rename(path)
                _sync_directory(path.parent)
                return fd
            new.unlink()
        except BaseException:
            with contextlib.suppress(OSError):
                new.unlink()
            os.close(fd)
            raise
        os.close(fd)
        return None

    # -- refusing it -----------------------------------------------------------------------------

    def _check(self) -> str | None:
        """Refuse what is no table of this shape, or damaged. Returns what it says of its fingerprints."""
        try:
            header = read_header(os.pread(self._fd, HEADER_BYTES, 0))
        except UnreadableError as error:
            raise self._refuse(error.what, error.remedy) from None
        if header.shape != self._shape:
            raise self._refuse(
                f"has {header.shape}, and {self._shape} was asked for",
                f"ask for {header.shape}, or give another path: a table cannot be resized, because its tags "
                f"lack the bits that chose their bucket; {BEGIN_ANEW}",
            )
        size = os.fstat(self._fd).st_size
        if size != self._size:
            what = "is cut off" if size < self._size else "is too long"
            raise self._refuse(f"{what}: it has {size} bytes, and should have {self._size}", BEGIN_ANEW)
        self._check_cursors()
        if header.state.is_open:
            logger.info(
                "%s: was not closed by process %d. What that had written is there, unless the machine went down too",
                self.label,
                header.state.pid,
            )
        return header.hashing

    def _check_cursors(self) -> None:
        """Each must stay in its bucket. Wrong tags cannot be told from right ones, and only forget."""
        allowed = bytes(range(self._shape.ways))
        for start in range(0, self._buckets, _CHUNK):
            cursors = os.pread(self._fd, min(_CHUNK, self._buckets - start), _CURSORS_AT + start)
            wrong = cursors.translate(None, allowed)
            if wrong:
                bucket = start + cursors.index(wrong[:1])
                what = f"is damaged: the cursor of bucket {bucket} is {wrong[0]}, and ways={self._shape.ways}"
                raise self._refuse(what, BEGIN_ANEW)

    def _refuse(self, what: str, remedy: str) -> ConfigError:
        return ConfigError(f"{self.label}: {what}; {remedy}")

    def _in_use(self, fd: int) -> ConfigError:
        if _identity_of(fd) in _open_here:
            return self._refuse("is open in this process already", "share that table or store, or close it first")
        state = read_state(os.pread(fd, WORD_BYTES, STATE_AT))
        who = f"another process (pid {state.pid})" if state is not None and state.is_open else "another process"
        return self._refuse(f"{who} has it open", "give each process a path of its own, or stop that one first")

    def _cannot_open(self, error: OSError) -> ConfigError:
        if error.errno in _NO_ROOM:
            what = f"there is no room for its {self._size} bytes: {error.strerror}"
            return self._refuse(what, "make room, or ask for a smaller table")
        remedy = _REMEDIES.get(error.errno or 0, "give the name of a file on a local disk")
        return self._refuse(f"cannot be opened: {error.strerror}", remedy)


def _name_of(path: object) -> str:
    name = os.fspath(path) if isinstance(path, os.PathLike) else path
    if not isinstance(name, str) or not name or "\0" in name or name.endswith("/"):
        raise refuse("path", path, "the name of a file as str or Path", "it is made if it is not there")
    return name


def _identity_of(fd: int) -> tuple[int, int]:
    about = os.fstat(fd)
    return about.st_dev, about.st_ino


def _sync_directory(directory: Path) -> None:
    """Have the names in a directory on the disk."""
    fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
