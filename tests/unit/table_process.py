"""Processes that have a table's file open, so that they can be killed: started in some milliseconds each.

They come of a server that has imported the table once, and that is no fork of the test's own process.
"""

from __future__ import annotations

import contextlib
import itertools
import multiprocessing
import os
import random
import resource
import signal
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from resident import resident

from nsqdedupe.errors import DedupeError
from nsqdedupe.tables.opposite_bloom import OppositeBloomFilter
from nsqdedupe.tables.table_header import Shape

BATCH = 20
PATIENCE = 60.0

_context = multiprocessing.get_context("forkserver")
_context.set_forkserver_preload(["nsqdedupe.tables.opposite_bloom"])


@contextlib.contextmanager
def process(program: Callable[..., None], *args: object) -> Iterator[tuple[BaseProcess, Connection]]:
    """A process that runs ``program(connection, *args)``, and the other end. Killed at the end, if it still lives."""
    ours, theirs = _context.Pipe()
    child = _context.Process(target=program, args=(theirs, *args))
    child.start()
    theirs.close()
    try:
        yield child, ours
    finally:
        child.kill()
        child.join()
        ours.close()
        child.close()


def told(connection: Connection) -> Any:
    """What the process says next."""
    assert connection.poll(PATIENCE), "it says nothing"
    return connection.recv()


def batch_of(seed: str, number: int) -> list[bytes]:
    """The fingerprints of a batch, for who adds them and who checks them."""
    several = random.Random(f"{seed}/{number}").randbytes(16 * BATCH)
    return [several[at : at + 16] for at in range(0, len(several), 16)]


# -- what such processes do ----------------------------------------------------------------------


def add_for_ever(connection: Connection, path: Path, shape: Shape, seed: str) -> None:
    """Add batch after batch, and write a byte after each."""
    table = OppositeBloomFilter(*shape, path=path)
    for number in itertools.count():
        table.add_many(batch_of(seed, number))
        os.write(connection.fileno(), b".")


def hold(connection: Connection, path: Path, shape: Shape, fingerprints: list[bytes]) -> None:
    """Add these, say so, and wait for a word; then end as programs do, without closing the table."""
    table = OppositeBloomFilter(*shape, path=path)
    table.add_many(fingerprints)
    connection.send("open")
    connection.recv()


def die_before(connection: Connection, path: Path, shape: Shape, call: str, count: int) -> None:
    """Open a table; be killed when it calls a function of `os`, for the so-manieth time."""
    real, calls = getattr(os, call), itertools.count(1)

    def deadly(*args: Any, **options: Any) -> object:
        if next(calls) == count:
            os.kill(os.getpid(), signal.SIGKILL)
        return real(*args, **options)

    setattr(os, call, deadly)
    OppositeBloomFilter(*shape, path=path)
    connection.send("survived")


def fork(connection: Connection, path: Path, shape: Shape, fingerprint: bytes, gate: Connection) -> None:
    """Fork with a table open: the child tries every verb and tells what came of it, then the parent goes on.

    The child ends when the other end of the gate is closed.
    """
    table = OppositeBloomFilter(*shape, path=path)
    in_memory = OppositeBloomFilter(*shape)
    in_memory.add(fingerprint)
    if os.fork() == 0:
        verbs: list[Callable[[], object]] = [
            lambda: table.contains(fingerprint),
            lambda: table.contains_many([fingerprint]),
            lambda: table.check_and_set(fingerprint),
            lambda: table.add_many([fingerprint]),
            lambda: table.discard(fingerprint),
            lambda: table.bind("another"),
            lambda: OppositeBloomFilter(*shape, path=path),
        ]
        connection.send([_outcome(verb) for verb in verbs])
        connection.send([in_memory.contains(fingerprint), _outcome(table.close)])
        gate.poll(None)
        return
    connection.recv()
    table.add(fingerprint)
    table.close()
    connection.send("closed")
    connection.recv()


def fork_in_memory(connection: Connection, shape: Shape, before: bytes, by_child: bytes, by_parent: bytes) -> None:
    """Fork with a table in memory; both add to it. Tells what the parent knows then, and what the child does."""
    table = OppositeBloomFilter(*shape)
    table.add(before)
    child_reads, parent_writes = os.pipe()
    parent_reads, child_writes = os.pipe()
    if os.fork() == 0:
        table.add(by_child)
        os.write(child_writes, b".")
        os.read(child_reads, 1)
        connection.send(("child", table.contains_many([before, by_child, by_parent])))
        os.write(child_writes, b".")
        return
    os.read(parent_reads, 1)
    table.add(by_parent)
    connection.send(("parent", table.contains_many([before, by_child, by_parent])))
    os.write(parent_writes, b".")
    os.read(parent_reads, 1)


def grow(connection: Connection, shape: Shape, messages: int) -> None:
    """Make a table in memory and add so many to it; tells by how many bytes the process grew."""
    OppositeBloomFilter(slots=1).add_many(batch_of("before", 0))
    before = resident()
    table = OppositeBloomFilter(*shape)
    for number in range(messages // BATCH):
        table.add_many(batch_of("grow", number))
    connection.send(resident() - before)


def made_within(connection: Connection, shape: Shape, room: int) -> None:
    """Make a table in memory where the process may have only so many bytes; tells the error."""
    resource.setrlimit(resource.RLIMIT_AS, (room, room))
    try:
        OppositeBloomFilter(*shape)
    except MemoryError as error:
        connection.send((type(error).__name__, str(error)))


def _outcome(verb: Callable[[], object]) -> str:
    try:
        return repr(verb())
    except DedupeError as error:
        return f"{type(error).__name__}: {error}"
