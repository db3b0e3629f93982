"""What a server must show before anything is entrusted to it, each time a connection is made.

A server that takes every ``add`` makes each copy look new; one that takes every compare-and-swap lets two owners
have a message; one that finds the end of a reply by its bytes mixes up answers. Some proxies and some other programs
with memcached's protocol do such things, and nothing would tell.

Beside that there are *marks* in the namespace: how many buckets there are, and how fingerprints are made. Consumers
that differ in them would share nothing, silently. Whoever comes first writes them, and who differs is refused.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Sequence
from typing import NamedTuple

from nsqdedupe.errors import ConfigError, StoreUnavailable
from nsqdedupe.memcached.meta import QUIET, READS, WRITES, MisreadError, Reply, flags_of
from nsqdedupe.memcached.wire import Talk, converse

_FIRST = b"first\r\nMN\r\nVA 3 c1\r\n"
_SECOND = bytes(range(256))
_SECONDS = 60


class Mark(NamedTuple):
    """What all consumers of a namespace must have in common."""

    key: bytes
    value: bytes

    complaint: str
    """What to say of another value: ``{theirs}`` and ``{ours}`` stand in it."""


def prove(connection: socket.socket, name: str, namespace: str, marks: Sequence[Mark], timeout: float) -> None:
    """Have a server prove itself. Blocks for two round trips.

    Args:
        connection: a socket that does not block.

        name: the server, for texts.

        namespace: what its keys begin with.

        marks: what it must have, or is given.

        timeout: seconds for each round trip.

    Raises:
        StoreUnavailable: it gave no answer, or has no memory or connections to spare.

        ConfigError: it does not do as memcached 1.6 does, or holds other marks.
    """

    def ask(kinds: bytes, *commands: bytes) -> list[Reply]:
        talk = Talk(connection, commands, kinds)
        converse([talk], timeout)
        if isinstance(talk.error, MisreadError) and not talk.error.transient:
            raise _refused(name, str(talk.error))
        if talk.error:
            raise StoreUnavailable(f"{name}: {talk.error}") from talk.error
        return talk.replies

    def expect(what: str, *, shown: bool) -> None:
        if not shown:
            raise _refused(name, what)

    key = b"%b:proof:%b" % (namespace.encode(), os.urandom(8).hex().encode())
    ttl = _SECONDS
    first = b"ms %b %d ME T%d c\r\n%b\r\n" % (key, len(_FIRST), ttl, _FIRST)
    added, again, read = ask(WRITES + WRITES + READS, first, first, b"mg %b v c t f\r\n" % key)
    expect("takes nothing that is added", shown=added[0][:4] == b"HD c")
    token = added[0].split(b" ")[1][1:]
    expect("takes what is added twice", shown=again[0][:2] == b"NS")
    expect("does not give back what it was given", shown=read[1] == _FIRST)
    flags = flags_of(read[0])
    expect("has no tokens for compare-and-swap", shown=token.isdigit() and flags.get(b"c") == token)
    left = flags.get(b"t", b"")
    expect("does not tell how long an item lives", shown=left.isdigit() and 0 < int(left) <= ttl)
    expect("does not keep the flags of an item", shown=flags.get(b"f") == b"0")

    swap = b"ms %b %d C%b T%d c\r\n%b\r\n" % (key, len(_SECOND), token, ttl, _SECOND)
    marking = [
        command
        for mark in marks
        for command in (b"ms %b %d ME\r\n%b\r\n" % (mark.key, len(mark.value), mark.value), b"mg %b v\r\n" % mark.key)
    ]
    quiet = b"ms %b %d C%b T%d q O0\r\n%b\r\n" % (key, len(_SECOND), token, ttl, _SECOND)
    swapped, stale, read, quietly, kept, gone, absent, late, *marked = ask(
        WRITES + WRITES + READS + QUIET + WRITES + WRITES + READS + WRITES + (WRITES + READS) * len(marks),
        *(swap, swap, b"mg %b v\r\n" % key, quiet),
        *(b"md %b C%b\r\n" % (key, token), b"md %b\r\n" % key, b"mg %b v\r\n" % key, swap),
        *marking,
    )
    expect("swaps nothing", shown=swapped[0][:2] == b"HD")
    expect("swaps by a token that is used up", shown=stale[0][:2] == b"EX")
    expect("does not give back what was swapped in", shown=read[1] == _SECOND)
    expect("says nothing of a quiet command that failed", shown=quietly[0][:2] == b"EX")
    expect("deletes by a token that is used up", shown=kept[0][:2] == b"EX")
    expect("does not delete", shown=gone[0][:2] == b"HD" and absent[1] is None)
    expect("swaps what is not there", shown=late[0][:2] == b"NF")
    for mark, (_, theirs) in zip(marks, marked[1::2], strict=True):
        if theirs not in (mark.value, None):  # None: evicted already
            shown = theirs[:200].decode(errors="replace")
            raise ConfigError(f"memcached {name}: {mark.complaint.format(theirs=shown, ours=mark.value.decode())}")


def _refused(name: str, what: str) -> ConfigError:
    return ConfigError(
        f"memcached {name}: it {what}; needed is memcached 1.6 or newer, or a proxy that passes its meta commands on"
    )
