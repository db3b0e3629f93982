"""Replies are read by their lengths, whole or not at all."""

from __future__ import annotations

import contextlib
import select
import socket
import struct
import threading

import pytest

from nsqdedupe.cli.local_memcached import Memcached
from nsqdedupe.clock import monotonic
from nsqdedupe.memcached.link import Link, Terms
from nsqdedupe.memcached.meta import LONGEST_LINE, QUIET, READS, WRITES, MisreadError, Replies, Reply, flags_of
from nsqdedupe.memcached.wire import RECORD, Talk, _records, converse, silent

TRICKY = b"\r\nMN\r\nEN\r\nVA 3 c1\r\n"
STREAM = (
    b"HD c7\r\n"
    b"VA %d c9 t3600 f0\r\n%b\r\n" % (len(TRICKY), TRICKY) + b"NS c0\r\n"
    b"EN\r\n"
    b"EX\r\n"
    b"VA 0 c11\r\n\r\n"
    b"NF\r\n"
    b"MN\r\n"
)
KINDS = WRITES + READS + WRITES + READS + WRITES + READS + WRITES
REPLIES: list[Reply] = [
    (b"HD c7", None),
    (b"VA %d c9 t3600 f0" % len(TRICKY), TRICKY),
    (b"NS c0", None),
    (b"EN", None),
    (b"EX", None),
    (b"VA 0 c11", b""),
    (b"NF", None),
]


def test_a_stream_that_comes_whole() -> None:
    assert Replies(KINDS).feed(STREAM) == REPLIES


@pytest.mark.parametrize("cut", range(1, len(STREAM)))
def test_a_stream_that_comes_in_two_pieces(cut: int) -> None:
    replies = Replies(KINDS)
    assert replies.feed(STREAM[:cut]) is None
    assert replies.feed(STREAM[cut:]) == REPLIES


def test_a_stream_that_comes_byte_by_byte() -> None:
    replies = Replies(KINDS)
    *early, last = [replies.feed(bytes([byte])) for byte in STREAM]
    assert set(map(str, early)) == {"None"}
    assert last == REPLIES


QUIETLY: Reply = (b"HD", None)
WITH_QUIET_ONES = {
    b"MN\r\n": (QUIET * 3, [QUIETLY] * 3),
    b"EX O1\r\nMN\r\n": (QUIET * 3, [QUIETLY, (b"EX O1", None), QUIETLY]),
    b"HD c1\r\nNF O1\r\nEN\r\nMN\r\n": (
        QUIET + WRITES + QUIET + READS + QUIET,
        [QUIETLY, (b"HD c1", None), (b"NF O1", None), (b"EN", None), QUIETLY],
    ),
    b"NS O0\r\nVA 4 c1\r\nMN\r\n\r\nMN\r\n": (QUIET + READS, [(b"NS O0", None), (b"VA 4 c1", b"MN\r\n")]),
}


@pytest.mark.parametrize("stream", WITH_QUIET_ONES)
def test_quiet_commands_are_told_of_when_they_failed(stream: bytes) -> None:
    kinds, replies = WITH_QUIET_ONES[stream]
    assert Replies(kinds).feed(stream) == replies
    piecemeal = Replies(kinds)
    *early, last = [piecemeal.feed(bytes([byte])) for byte in stream]
    assert set(map(str, early)) == {"None"}
    assert last == replies


def test_flags_are_told_by_their_letter() -> None:
    assert flags_of(b"VA 36 c9 t-1 f0") == {b"c": b"9", b"t": b"-1", b"f": b"0"}
    assert flags_of(b"HD c9") == {b"c": b"9"}
    assert flags_of(b"EN") == {}


WRONG = {
    "an error": (WRITES, b"ERROR\r\n"),
    "an error after good replies": (WRITES + WRITES, b"HD\r\nSERVER_ERROR out of memory\r\n"),
    "a reply too few": (WRITES + WRITES, b"HD\r\nMN\r\n"),
    "a reply too many": (WRITES, b"HD\r\nHD\r\nMN\r\n"),
    "a value for a write": (WRITES, b"VA 1 c1\r\nx\r\n"),
    "a write's reply for a read": (READS, b"HD\r\n"),
    "a miss for a write": (WRITES, b"EN\r\n"),
    "a size that is none": (READS, b"VA x c1\r\n"),
    "a size below nothing": (READS, b"VA -1 c1\r\n"),
    "no size": (READS, b"VA \r\n"),
    "a size beyond all bounds": (READS, b"VA 999999999999 c1\r\n"),
    "a value longer than its size": (READS, b"VA 1 c1\r\nxx\r\n"),
    "words that only begin like a reply": (WRITES, b"HDX\r\n"),
    "a line without end": (WRITES, b"H" * (LONGEST_LINE + 1)),
    "a quiet one that is not there": (QUIET, b"EX O1\r\n"),
    "a quiet one without its number": (QUIET, b"EX\r\n"),
    "a number that is none": (QUIET, b"EX Ox\r\n"),
    "a quiet one that comes again": (QUIET * 3, b"EX O1\r\nEX O0\r\n"),
    "a quiet one beyond one that is not": (QUIET + WRITES + QUIET, b"EX O1\r\n"),
    "an end in place of a reply": (QUIET + WRITES, b"MN\r\n"),
    "a value for a quiet one": (QUIET, b"VA 1 c1 O0\r\nx\r\n"),
    "another protocol": (WRITES, b"HTTP/1.1 400 Bad Request\r\n"),
}


def feed(replies: Replies, stream: bytes, size: int) -> None:
    for start in range(0, len(stream), size):
        assert replies.feed(stream[start : start + size]) is None


@pytest.mark.parametrize(("kinds", "stream"), WRONG.values(), ids=WRONG)
def test_anything_else_is_refused_however_it_comes(kinds: bytes, stream: bytes) -> None:
    for size in (1, 3, len(stream)):
        with pytest.raises(MisreadError, match="answered b'"):
            feed(Replies(kinds), stream, size)


def test_what_may_pass_is_told_from_what_will_not() -> None:
    assert MisreadError(b"SERVER_ERROR out of memory storing object").transient
    assert MisreadError(b"ERROR Too many open connections").transient
    assert not MisreadError(b"ERROR").transient


def test_bytes_after_the_end_are_not_its_own() -> None:
    replies = Replies(WRITES)
    assert replies.feed(b"HD\r\nMN\r\nHD\r\nMN\r\n") == [(b"HD", None)]
    assert replies.beyond == b"HD\r\nMN\r\n"


def test_a_talk_alone_on_its_connection_refuses_them() -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        ours.settimeout(0)
        theirs.sendall(b"HD\r\nMN\r\nHD\r\n")
        assert str(hold(ours, WRITES).error) == "answered b'HD\\r\\n'"


# -- on sockets ----------------------------------------------------------------------------------


def test_a_talk_to_which_nothing_was_said_goes_on() -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        ours.settimeout(0)
        assert not Talk(ours, [], WRITES).read()


def hold(connection: socket.socket, kinds: bytes, timeout: float = 10.0) -> Talk:
    connection.settimeout(0)
    talk = Talk(connection, [], kinds)
    converse([talk], timeout)
    return talk


def test_a_pipeline_larger_than_all_buffers_does_not_lock_up() -> None:
    """Its server answers each command as it comes, and reads no further while nobody takes the answers."""
    count, value = 4000, b"x" * 200
    ours, theirs = socket.socketpair()
    for end in (ours, theirs):
        end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)

    def serve() -> None:
        with theirs, theirs.makefile("rwb", buffering=0) as lines:
            for _ in range(count):
                assert lines.readline() == b"mg key v\r\n"
                theirs.sendall(b"VA %d\r\n%b\r\n" % (len(value), value))
            assert lines.readline() == b"mn\r\n"
            theirs.sendall(b"MN\r\n")

    server = threading.Thread(target=serve)
    ours.settimeout(0)
    with ours:
        talk = Talk(ours, [b"mg key v\r\n"] * count, READS * count)
        talk.write()
        assert not talk.sent, "it must be larger than what goes out before anybody reads"
        server.start()
        converse([talk], 60.0)
        server.join()
    assert talk.error is None
    assert talk.replies == [(b"VA 200", value)] * count


def test_one_that_hangs_up_one_that_is_silent_and_one_that_answers() -> None:
    pairs = [socket.socketpair() for _ in range(3)]
    hangs_up, _, answers = [theirs for _, theirs in pairs]
    hangs_up.close()
    answers.sendall(b"HD\r\nMN\r\n")
    for ours, _ in pairs:
        ours.settimeout(0)
    talks = [Talk(ours, [b"md key\r\n"], WRITES) for ours, _ in pairs]
    converse(talks, 0.05)
    broken, silent, good = talks
    assert isinstance(broken.error, OSError)
    assert isinstance(silent.error, TimeoutError)
    assert str(silent.error) == "no answer within 0.05 s"
    assert (good.error, good.replies) == (None, [(b"HD", None)])
    for pair in pairs:
        for end in pair:
            end.close()


def test_an_end_in_the_middle_of_a_reply_is_an_error() -> None:
    ours, theirs = socket.socketpair()
    with ours:
        theirs.sendall(b"HD\r\n")
        theirs.shutdown(socket.SHUT_WR)
        talk = hold(ours, WRITES * 2)
        theirs.close()
    assert isinstance(talk.error, ConnectionError)
    assert talk.replies == []


def test_what_came_in_time_is_read_after_the_deadline() -> None:
    """A process that was stopped meanwhile finds its answers when it goes on."""
    ours, theirs = socket.socketpair()
    with ours, theirs:
        theirs.sendall(b"HD\r\nMN\r\n")
        assert hold(ours, WRITES, timeout=0.0).error is None


def test_a_connection_is_silent_until_something_comes_or_it_ends() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        for event in ("speaks", "closes", "resets"):
            with contextlib.closing(socket.create_connection(listener.getsockname())) as ours:
                theirs = listener.accept()[0]
                ours.settimeout(0)
                assert silent(ours)
                if event == "speaks":
                    theirs.sendall(b"x")
                elif event == "resets":
                    theirs.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                if event != "speaks":
                    theirs.close()
                assert select.select([ours], [], [], 30.0)[0]
                assert not silent(ours)
                theirs.close()


def test_a_pipeline_is_not_begun_where_something_came_unasked(memcached: Memcached) -> None:
    link = Link("127.0.0.1", memcached.tcp_port, Terms("unasked", 10.0, 10.0, None, monotonic, []))
    assert link.ready()
    connection = link._connection
    assert connection is not None
    connection.send(b"mn\r\n")
    assert select.select([connection], [], [], 30.0)[0]
    assert link.talk([b"mg key v\r\n"], READS) is None
    assert not link.connected
    assert link.reach.why.endswith("said more than it was asked")


def test_records_of_tls_hold_whole_commands() -> None:
    commands = [bytes([number]) * size for number, size in enumerate([1, RECORD - 1, 1, RECORD + 1, 5, 5])]
    records = list(_records(commands))
    assert records == [commands[0] + commands[1], commands[2], commands[3], commands[4] + commands[5]]
    assert list(_records([b"mn\r\n"])) == [b"mn\r\n"]
