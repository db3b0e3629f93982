"""A plain connection is read and written without its IOStream once it is ready; nothing else shows of that."""

from __future__ import annotations

import asyncio
import fcntl
import logging
import select
import socket
import struct
import termios
from typing import Any

import pytest
from consumers import PATIENCE, Seen, at_rest, on_loop
from fake_nsqd import ERROR, connected, frame, message, message_id
from servers import eventually_async

from nsqdedupe import transport
from nsqdedupe.clock import monotonic
from nsqdedupe.transport import CHUNK, LARGEST, ON_THE_WAY

LINE = 1 << 16


def by_id(message: Any) -> bytes:
    return bytes(message.id)


def unread(sock: socket.socket) -> int:
    """Bytes that the system holds for a socket."""
    (size,) = struct.unpack("i", fcntl.ioctl(sock, termios.FIONREAD, bytes(4)))
    return int(size)


def too_much() -> list[bytes]:
    """More than the buffers of the system hold: 16 MiB of commands."""
    return [b"%06d" % number + bytes([65 + number % 26]) * (LINE - 7) for number in range(256)]


def test_what_the_system_does_not_take_at_once_follows_in_order() -> None:
    lines = too_much()

    async def main() -> None:
        async with connected(lambda _: True) as (fake, reader, conn):
            await eventually_async(lambda: conn._bare is conn.stream.socket)
            before = len(fake.commands)
            fake.writer.transport.pause_reading()
            for line in lines:
                conn.send(line + b"\n")
            conn.flush()
            assert conn._unsent, "the system took all of it: this tests nothing"
            conn.send(b"LAST\n")
            draining = asyncio.ensure_future(conn.drain())
            await fake.send(message(1, b"read meanwhile"))
            await eventually_async(lambda: reader.stats.handled == 1)
            assert not draining.done()
            fake.writer.transport.resume_reading()
            await asyncio.wait_for(draining, PATIENCE)
            assert not conn._unsent
            await eventually_async(lambda: fake.answers(b"FIN"), PATIENCE)
            heard = [command for command in fake.commands[before:] if not command.startswith(b"RDY ")]
            assert heard == [*lines, b"LAST", b"FIN " + message_id(1)]
            # Nothing is left of it: the next goes out at once.
            await fake.send(message(2, b"afterwards"))
            await eventually_async(lambda: fake.answers(b"FIN") == [message_id(1), message_id(2)])
            at_rest(reader)

    on_loop(main())


@pytest.mark.parametrize("who", ["we", "nsqd"])
def test_who_waits_for_what_is_unsent_waits_no_longer_than_the_connection_lives(who: str) -> None:
    async def main() -> None:
        async with connected(lambda _: True) as (fake, reader, conn):
            fake.writer.transport.pause_reading()
            for line in too_much():
                conn.send(line + b"\n")
            draining = asyncio.ensure_future(conn.drain())
            await eventually_async(lambda: conn._unsent)
            if who == "we":
                conn.stream.close()
            else:
                fake.writer.transport.abort()
            await asyncio.wait_for(draining, PATIENCE)
            assert conn.closed()
            await eventually_async(lambda: conn not in reader.conns.values())

    on_loop(main())


@pytest.mark.parametrize("how", ["ends", "is reset"])
def test_a_connection_that_is_lost_is_made_again(how: str) -> None:
    seen = Seen()

    async def main() -> None:
        async with connected(seen.handle) as (fake, reader, conn):
            await fake.send(message(1, b"before"))
            await eventually_async(lambda: fake.answers(b"FIN") == [message_id(1)])
            if how == "is reset":
                linger = struct.pack("ii", 1, 0)
                fake.writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
            fake.writer.close()
            await eventually_async(lambda: fake.subscribed == 2 and conn not in reader.conns.values(), PATIENCE)
            assert isinstance(conn.error, ConnectionResetError) is (how == "is reset")
            await eventually_async(lambda: bool(reader.conns) and fake.commands[-1] == b"RDY 1")
            await fake.send(message(2, b"after"))
            await eventually_async(lambda: fake.answers(b"FIN") == [message_id(1), message_id(2)])
            at_rest(reader)

    on_loop(main())
    seen.once_each([b"before", b"after"])


def test_what_nsqd_said_before_it_hung_up_is_heard_though_nothing_can_be_written(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def main() -> None:
        def handle(message: Any) -> bool:
            conn = message.conn
            fake.writer.write(frame(ERROR, b"E_INVALID that was too much"))
            fake.writer.get_extra_info("socket").shutdown(socket.SHUT_RDWR)
            # The first that is written has nsqd's side refuse it; the next cannot be written.
            conn.send(b"NOP\n")
            conn.flush()
            refused = select.poll()
            refused.register(conn.stream.socket, 0)
            assert refused.poll(1000 * PATIENCE)
            conn.send(b"NOP\n")
            conn.flush()
            assert not conn.closed()
            return True

        async with connected(handle) as (fake, reader, conn):
            await fake.send(message(1, b"body"))
            await eventually_async(lambda: conn not in reader.conns.values(), PATIENCE)
            assert reader.stats.handled == 1

    on_loop(main())
    assert [r.levelno for r in caplog.records if "E_INVALID" in r.getMessage()] == [logging.ERROR]


def test_another_error_of_a_write_ends_the_connection(monkeypatch: pytest.MonkeyPatch) -> None:
    async def main() -> None:
        async with connected(lambda _: True) as (_, reader, conn):
            # A datagram of that size is refused: EMSGSIZE.
            with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as other:
                other.connect(("127.0.0.1", 9))
                conn._bare = other
                conn.send(bytes(1 << 17))
                conn.flush()
            assert conn.closed()
            assert isinstance(conn.error, OSError)
            await eventually_async(lambda: conn not in reader.conns.values())
            assert conn._unsent == b""

    on_loop(main())


def test_what_lies_unread_is_never_taken_for_younger_than_it_is() -> None:
    """While reading is paused, or a read has left something behind, nobody knows since when it lies there."""
    sizes: list[int] = []
    moved: list[bool] = []

    def looked(conn: Any) -> bool:
        before = conn.seen_empty
        conn.look(monotonic())
        return bool(conn.seen_empty > before)

    async def main() -> None:
        async with connected(lambda _: True, key=by_id) as (fake, reader, conn):
            await eventually_async(lambda: conn.subscribed)
            assert looked(conn)
            receive = conn._receive

            def pause(*batch: Any) -> bool:
                receive(*batch)
                return False

            def take(conn: Any, *batch: Any) -> bool:
                sizes.append(batch[-1])
                # In the next turn of the loop, before what is left is read.
                asyncio.get_running_loop().call_soon(lambda: moved.append(looked(conn)))
                return bool(receive(conn, *batch))

            conn._receive = pause
            await fake.send(message(1, b"body"))
            await eventually_async(lambda: conn._paused)
            assert not looked(conn)
            await fake.send(b"".join(message(number, bytes(10_000)) for number in range(2, 12)))
            await eventually_async(lambda: unread(conn.stream.socket) > CHUNK)
            conn._receive = take
            conn.read_on()
            assert not looked(conn)
            await eventually_async(lambda: len(fake.answers(b"FIN")) == 11)
            assert sizes[0] == CHUNK
            assert (moved[0], moved[-1]) == (False, True)
            at_rest(reader)

    on_loop(main())


def test_where_the_socket_is_never_empty_messages_do_not_seem_ever_older(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else none would be handled any more after so long, and nsqd would give each out again."""
    now = [0.0]
    read_at: dict[float, int] = {}

    class Full:
        def recv(self, size: int) -> bytes:
            return message(1, bytes(size - len(message(1, b""))))

    async def main() -> None:
        async with connected(lambda _: True) as (_, _, conn):
            await eventually_async(lambda: conn._bare)
            conn._receive = lambda *_: True
            now[0] = first = conn.seen_empty
            monkeypatch.setattr(transport, "monotonic", lambda: now[0])
            read = read_at[first] = 0
            while read < 3 * ON_THE_WAY:
                now[0] += 1.0
                read += conn._wanted
                conn._on_readable(Full())
                read_at[now[0]] = read
                behind = read - read_at[conn.seen_empty]
                assert behind < 1.25 * ON_THE_WAY + 2 * LARGEST
                assert conn.seen_empty == first or behind >= ON_THE_WAY
            assert conn.seen_empty > first

    on_loop(main())


def test_more_is_read_at_a_time_where_messages_are_large_and_less_again_where_they_are_small() -> None:
    sizes: list[int] = []
    large = b"".join(message(number, bytes(10_000)) for number in range(60))
    small = b"".join(message(number, b"") for number in range(60, 20_000))

    async def main() -> None:
        async with connected(lambda _: True, key=by_id) as (fake, reader, conn):
            await eventually_async(lambda: conn.subscribed)
            conn.stream.socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4 << 20)
            receive = conn._receive

            def take(conn: Any, *batch: Any) -> bool:
                sizes.append(batch[-1])
                return bool(receive(conn, *batch))

            async def read(messages: bytes) -> None:
                """All of them when they are there, so that each read but the last brings what was asked for."""
                conn._paused = True
                conn._watch(conn._bare)
                await fake.send(messages)
                await eventually_async(lambda: unread(conn.stream.socket) == len(messages))
                sizes.clear()
                conn.read_on()
                await eventually_async(lambda: sum(sizes) == len(messages))

            conn._receive = take
            await read(large)
            assert sizes == [CHUNK, 2 * CHUNK, LARGEST, len(large) - CHUNK - 2 * CHUNK - LARGEST]
            await read(small)
            assert sizes[:4] == [LARGEST, LARGEST // 2, LARGEST // 4, CHUNK]
            await eventually_async(lambda: len(fake.answers(b"FIN")) == 20_000)
            at_rest(reader)

    on_loop(main())
