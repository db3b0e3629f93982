"""A table that remembers the latest fingerprints and never takes a new one for an old one.

A Bloom filter never forgets but may claim to have seen what it has not. The structure here is its
opposite, named so by Jeff Hodges ("The Opposite of a Bloom Filter", 2012) and known to NSQ's users from
Dave Gardner's "Stream de-duplication": an array in which a message overwrites whatever its hash index
holds, and is recognised by what is stored there. It forgets, but what it says it has seen it has seen.

The classic form has one slot per hash index and keeps the whole id, so any later message of the same index
ends the memory of this one: ``ways=1``. Here an index leads to a bucket of ``ways`` slots that is used
first in, first out, so it takes ``ways`` later messages of the same index, and the moment of forgetting
scatters far less: with 32 ways a sixtieth of the slots gives 99 % recall (`nsqdedupe.sizing` has the
arithmetic).

What it promises, given fingerprints that are spread evenly (any good hash):

- No false drop: a new fingerprint is found with probability ``ways * 2**-64`` (8-byte tags) or
  ``slots * 2**-128`` (16-byte tags), never more, however full the table is.
- Bounded: memory is taken once and never grows; every operation looks at one bucket.
- First in, first out within a bucket: recall depends on how many *new* messages came since, so finding or
  adding again what is there does not renew it.
- With a ``path``, the table outlives its process, whatever ends it. A tag is written before its cursor moves
  on: a process that dies in between leaves a fingerprint that is found, and that the next one of its bucket
  overwrites. Its `add` had not returned, and all whose `add` had keep their place; only with 16-byte tags the
  oldest of that bucket may be gone already.
"""

from __future__ import annotations

import mmap
import os
import struct
import weakref
from collections.abc import Callable, Sequence
from typing import NoReturn

from nsqdedupe import sizing
from nsqdedupe.checks import refuse
from nsqdedupe.errors import ConfigError, StoreError
from nsqdedupe.tables.table_file import TableFile
from nsqdedupe.tables.table_header import LONGEST_HASHING, Shape

# The tag comes from one half of the fingerprint, the bucket from the other: the messages of one bucket
# would otherwise share bits of their tags. Unpacking checks the length in passing.
_split = struct.Struct("<8sQ").unpack
_split_all = struct.Struct("<8sQ").iter_unpack

_ZERO_8 = bytes(8)

_in_files: weakref.WeakKeyDictionary[OppositeBloomFilter, TableFile] = weakref.WeakKeyDictionary()
"""What a fork of this process must leave to it."""


class OppositeBloomFilter:
    """A fixed-size set of 16-byte fingerprints that forgets the oldest of a bucket first.

    For one thread at a time. All verbs raise `ConfigError` for anything that is not 16 bytes, and `StoreError`
    once the table is closed. Raw keys and ids must be hashed first (`nsqdedupe.fingerprint`): half of a
    counter's 16 bytes are zero, so its tags or its buckets would all be the same. In a batch, what comes before
    the culprit has taken effect.

    In memory it does no I/O. In a file, looking up and adding touch the kernel's page cache only, which has to
    read a page from the disk when it is first met after a reboot; to open, `bind`, discard and `close` wait
    for the disk. A fork of the process gets a copy of a table in memory, and cannot use one in a file.

    A table in memory is made in a moment, because a page of it is taken from the system when it is first written to;
    most are long before the table is full. Where the system promises more than it has, as Linux does by default, no
    error tells of a table that is too large: the process is killed when its machine or container runs out of memory.

    Args:
        slots: how many fingerprints fit, 1 to 2**36; rounded up to whole buckets. `sizing.slots_for` gives
            it for a window and a recall.

        ways: slots per bucket, 1 to 64.

        tag_bytes: bytes stored per fingerprint, 8 or 16 (all of it).

        path: keeps the table in this file, which one process at a time may have open. It is made if it is
            not there; its directory must be. A file that is there must be a table of the same shape. None:
            the table is in memory.

    Raises:
        ConfigError: an argument is out of range; or the file cannot be opened or made, is open already, is
            something else, damaged or of another shape. The text names the difference and the remedy.

        MemoryError: there is no room for that many slots, or the process may not have so much.
    """

    def __init__(
        self, slots: int = 1 << 20, ways: int = 32, tag_bytes: int = 8, path: str | os.PathLike[str] | None = None
    ) -> None:
        size = sizing.bytes_for(slots, ways, tag_bytes)
        self._buckets = sizing.buckets_for(slots, ways)
        self._ways = ways
        self._tag_bytes = tag_bytes
        self._row = ways * tag_bytes
        self._off_grid = tag_bytes - 1
        self._wide = tag_bytes == sizing.FINGERPRINT_BYTES
        # Empty slots are zero, so a tag that is zero (a digest may be) would be found in any bucket with
        # room, and its message dropped unhandled. Another tag stands for it.
        self._empty = bytes(tag_bytes)
        self._stand_in = b"\xff" * tag_bytes
        self._write: Callable[[bytearray | mmap.mmap, int, bytes], None] = struct.Struct(f"{tag_bytes}s").pack_into
        # Which slot of a bucket is overwritten next. Kept apart: shifting the tags would cost a memmove per
        # message, and cursors among them would break the grid.
        self._cursors: bytearray | mmap.mmap
        self._tags: bytearray | mmap.mmap
        self._file: TableFile | None = None
        self._hashing: str | None = None
        self._durable = path is not None
        if path is None:
            self._tags, self._cursors = _pages(size - self._buckets), _pages(self._buckets)
        else:
            file = self._file = TableFile(path, Shape(self.slots, ways, tag_bytes))
            self._tags, self._cursors, self._hashing = file.tags, file.cursors, file.hashing
            self._write = _store_16 if self._wide else _store_8
            # Done also when the interpreter ends. Not a method of this object, which it would keep alive.
            self._close_file = weakref.finalize(self, file.close)
            _in_files[self] = file
        self._find: Callable[[bytes, int, int], int] = self._tags.find
        self._added = 0

    @property
    def slots(self) -> int:
        """How many fingerprints fit: what was asked for, rounded up to whole buckets."""
        return self._buckets * self._ways

    @property
    def ways(self) -> int:
        """Slots per bucket."""
        return self._ways

    @property
    def tag_bytes(self) -> int:
        """Bytes stored per fingerprint."""
        return self._tag_bytes

    @property
    def durable(self) -> bool:
        """Whether it is in a file, and outlives the process."""
        return self._durable

    @property
    def nbytes(self) -> int:
        """Bytes of memory that tags and cursors take once all was written to; 0 when it is closed."""
        return len(self._tags) + len(self._cursors)

    def contains(self, fingerprint: bytes) -> bool:
        """Whether it was added and is still remembered. Changes nothing."""
        # Each verb writes the look-up out: a call would cost half as much as the search itself.
        try:
            tag, index = _split(fingerprint)
        except (struct.error, TypeError):
            raise _not_a_fingerprint(fingerprint) from None
        if self._wide:
            tag = bytes(fingerprint)
        if tag == self._empty:
            tag = self._stand_in
        start = index % self._buckets * self._row
        position = self._find(tag, start, start + self._row)
        # A hit that begins off the grid lies across two slots and is none: look on from the next slot.
        while position > 0 and position & self._off_grid:
            position = self._find(tag, (position | self._off_grid) + 1, start + self._row)
        return position >= 0

    def contains_many(self, fingerprints: Sequence[bytes]) -> list[bool]:
        """Whether each was added and is still remembered, in order. Changes nothing."""
        find, buckets, row = self._find, self._buckets, self._row
        off_grid, wide, empty, stand_in = self._off_grid, self._wide, self._empty, self._stand_in
        found: list[bool] = []
        note = found.append
        for fingerprint in fingerprints:
            try:
                tag, index = _split(fingerprint)
            except (struct.error, TypeError):
                raise _not_a_fingerprint(fingerprint) from None
            if wide:
                tag = bytes(fingerprint)
            if tag == empty:
                tag = stand_in
            start = index % buckets * row
            position = find(tag, start, start + row)
            while position > 0 and position & off_grid:
                position = find(tag, (position | off_grid) + 1, start + row)
            note(position >= 0)
        return found

    def check_and_set(self, fingerprint: bytes) -> bool:
        """Add it unless it is remembered. True: it was there already."""
        try:
            tag, index = _split(fingerprint)
        except (struct.error, TypeError):
            raise _not_a_fingerprint(fingerprint) from None
        if self._wide:
            tag = bytes(fingerprint)
        if tag == self._empty:
            tag = self._stand_in
        bucket = index % self._buckets
        start = bucket * self._row
        position = self._find(tag, start, start + self._row)
        while position > 0 and position & self._off_grid:
            position = self._find(tag, (position | self._off_grid) + 1, start + self._row)
        if position >= 0:
            return True
        cursor = self._cursors[bucket]
        self._write(self._tags, start + cursor * self._tag_bytes, tag)
        cursor += 1
        self._cursors[bucket] = cursor if cursor < self._ways else 0
        self._added += 1
        return False

    def check_and_set_many(self, fingerprints: Sequence[bytes]) -> list[bool]:
        """Add each unless it is remembered. True, in order: it was there, or came earlier in this call."""
        find, buckets, row = self._find, self._buckets, self._row
        off_grid, wide, empty, stand_in = self._off_grid, self._wide, self._empty, self._stand_in
        tags, cursors, write, ways, width = self._tags, self._cursors, self._write, self._ways, self._tag_bytes
        found: list[bool] = []
        note = found.append
        for fingerprint in fingerprints:
            try:
                tag, index = _split(fingerprint)
            except (struct.error, TypeError):
                raise _not_a_fingerprint(fingerprint) from None
            if wide:
                tag = bytes(fingerprint)
            if tag == empty:
                tag = stand_in
            bucket = index % buckets
            start = bucket * row
            position = find(tag, start, start + row)
            while position > 0 and position & off_grid:
                position = find(tag, (position | off_grid) + 1, start + row)
            if position < 0:
                cursor = cursors[bucket]
                write(tags, start + cursor * width, tag)
                cursor += 1
                cursors[bucket] = cursor if cursor < ways else 0
            note(position >= 0)
        self._added += len(found)  # at most: who compares looks again once too often
        return found

    def changes(self) -> int:
        """Another number whenever one was added since."""
        return self._added

    def places(self, fingerprints: Sequence[bytes]) -> list[int]:
        """Where `add_new` would put each, in order; -1: it was added and is still remembered. Changes nothing."""
        joined = b"".join(fingerprints)
        if self._wide or self._empty in joined:
            return [self._place(fingerprint) for fingerprint in fingerprints]
        # As `contains_many` without what only few fingerprints need: this is the way of every message.
        find, buckets, row, off_grid = self._find, self._buckets, self._row, self._off_grid
        places: list[int] = []
        note = places.append
        for tag, index in _split_all(joined):
            bucket = index % buckets
            start = bucket * row
            position = find(tag, start, start + row)
            while position > 0 and position & off_grid:
                position = find(tag, (position | off_grid) + 1, start + row)
            note(bucket if position < 0 else -1)
        return places

    def add_new(self, fingerprint: bytes, place: int) -> None:
        """Remember one that is not, at its place of `places`: one that is would take a second slot."""
        cursors = self._cursors
        try:
            cursor = cursors[place]
        except IndexError:
            self._find(self._empty, 0, 0)  # raises if it is closed
            place -= self._buckets  # see `_place`
            fingerprint = self._stand_in
            cursor = cursors[place]
        self._write(self._tags, place * self._row + cursor * self._tag_bytes, fingerprint)
        cursor += 1
        cursors[place] = cursor if cursor < self._ways else 0
        self._added += 1

    def _place(self, fingerprint: bytes) -> int:
        """Its bucket, or -1; beyond the buckets if another tag stands for its own, so that few need be told apart."""
        if self.contains(fingerprint):
            return -1
        bucket: int = _split(fingerprint)[1] % self._buckets
        return bucket + self._buckets if fingerprint.startswith(self._empty) else bucket

    def add(self, fingerprint: bytes) -> None:
        """Remember it. One that is there already keeps its place in the queue."""
        self.check_and_set(fingerprint)

    def add_many(self, fingerprints: Sequence[bytes]) -> None:
        """Remember each. One that is there already keeps its place in the queue."""
        self.check_and_set_many(fingerprints)

    def discard(self, fingerprint: bytes) -> None:
        """Forget it. One that is not there is no error."""
        self.discard_many((fingerprint,))

    def discard_many(self, fingerprints: Sequence[bytes]) -> None:
        """Forget each. One that is not there is no error.

        The slot stays empty until its turn comes: filling it earlier would end the newcomer's memory before
        that of older ones. Of a table in a file, it waits for the disk: what is forgotten must not come back
        with a power cut, or the message that is published again would be lost.

        Raises:
            StoreError: the disk does not take it; in this process all are forgotten.
        """
        try:
            self._clear(fingerprints)
        finally:
            if self._file is not None:
                self._file.flush()

    def bind(self, hashing: str) -> None:
        """Say how the fingerprints are made, before the first is used; a file keeps it.

        Fingerprints of another hash or secret would never be found, silently. Idempotent. Of a table in a file
        the first time waits for the disk.

        Args:
            hashing: names hash and secret, as `nsqdedupe.fingerprint.hashing_of` does; 1 to 64 ASCII
                characters.

        Raises:
            ConfigError: those that are remembered were made otherwise; or it is no such text.
        """
        if not hashing.isascii() or not 0 < len(hashing) <= LONGEST_HASHING:
            raise refuse("hashing", hashing, f"1 to {LONGEST_HASHING} ASCII characters")
        self._find(self._empty, 0, 0)  # raises if it is closed
        if self._hashing is None:
            if self._file is not None:
                self._file.record_hashing(hashing)
            self._hashing = hashing
        if self._hashing != hashing:
            where = "this table" if self._file is None else self._file.label
            raise ConfigError(
                f"{where}: its fingerprints are made with {self._hashing}, not with {hashing} as those to come, so "
                "none would be found; give the secret that was given before, or begin with another table"
            )

    def close(self) -> None:
        """Let go of the memory, and of the file, when it is on the disk whole. Idempotent.

        It is done by itself when the interpreter ends. After a process that ends otherwise, a log line at INFO
        says so when the file is opened again.

        Raises:
            StoreError: the disk does not take it. The file is let go of all the same.
        """
        if self._retire(_closed) is not None:
            self._close_file()

    def _retire(self, instead: Callable[[bytes, int, int], int]) -> TableFile | None:
        """Drop the memory, and return the file. Every verb looks up first, and meets what stands there instead."""
        file, self._file = self._file, None
        _in_files.pop(self, None)
        self._find = instead
        self._tags = self._cursors = bytearray()
        return file

    def _clear(self, fingerprints: Sequence[bytes]) -> None:
        for fingerprint in fingerprints:
            try:
                tag, index = _split(fingerprint)
            except (struct.error, TypeError):
                raise _not_a_fingerprint(fingerprint) from None
            if self._wide:
                tag = bytes(fingerprint)
            if tag == self._empty:
                tag = self._stand_in
            start = index % self._buckets * self._row
            position = self._find(tag, start, start + self._row)
            while position >= 0:
                if not position & self._off_grid:
                    self._write(self._tags, position, self._empty)
                position = self._find(tag, (position | self._off_grid) + 1, start + self._row)


def _pages(size: int) -> mmap.mmap:
    """Zeros. Private: else a fork would write to the same memory."""
    try:
        return mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except OSError as error:
        raise MemoryError(
            f"no room in memory for the {size} bytes of a table: {error.strerror}; ask for fewer slots"
        ) from error


def _store_8(tags: bytearray | mmap.mmap, position: int, tag: bytes) -> None:
    """Write 8 aligned bytes at once. `struct.pack_into` writes zeros first, and a kill may come in between."""
    tags[position : position + 8] = tag[:8]


def _store_16(tags: bytearray | mmap.mmap, position: int, tag: bytes) -> None:
    """Write 16 bytes so that a death between any two stores leaves no mixture of two fingerprints."""
    _store_8(tags, position, _ZERO_8)
    _store_8(tags, position + 8, tag[8:])
    _store_8(tags, position, tag[:8])


def _closed(*_: object) -> NoReturn:
    raise StoreError("the table is closed, and cannot be used any more; make another")


def _left_to_parent(*_: object) -> NoReturn:
    raise StoreError(
        "the table is in a file that the parent of this process has open; open it after the fork, in one process"
    )


def _leave_files_to_parent() -> None:
    """In a fork: the parent goes on with its files, and its locks must not live on here."""
    for table, file in list(_in_files.items()):
        table._retire(_left_to_parent)  # noqa: SLF001 - its own module
        file.abandon()


os.register_at_fork(after_in_child=_leave_files_to_parent)


def _not_a_fingerprint(value: object) -> ConfigError:
    # The value stays out of the text: whoever passes a raw key or a body by mistake must not find it logged.
    what = f"{len(value)} bytes" if isinstance(value, bytes | bytearray | memoryview) else type(value).__name__
    return ConfigError(
        f"fingerprint: must be 16 bytes, not {what}; hash the key first, for example with nsqdedupe.fingerprint"
    )
