"""Connections that break in the middle of something, or that are closed by what they bring."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from consumers import PATIENCE, Seen, at_rest, on_loop
from fake_nsqd import ERROR, RESPONSE, connected, frame, message, message_id
from servers import eventually_async

HEARTBEAT = frame(RESPONSE, b"_heartbeat_")
AGREED = frame(RESPONSE, b"CLOSE_WAIT")


def by_id(message: Any) -> bytes:
    return bytes(message.id)


def test_a_hook_that_closes_the_reader_leaves_what_came_with_the_heartbeat_to_nsqd() -> None:
    seen = Seen()

    async def main() -> None:
        async with connected(seen.handle) as (fake, reader, _):
            reader.heartbeat = lambda _: reader.close()
            await fake.send(message(1, b"before") + HEARTBEAT + message(2, b"after"))
            await eventually_async(lambda: not reader.conns)
            assert reader.stats.received == 0

    on_loop(main())
    assert seen.runs == []


@pytest.mark.parametrize("cut", [2, 9])
def test_a_frame_that_comes_in_two_parts_may_close_the_reader(cut: int) -> None:
    seen = Seen()

    async def main() -> None:
        async with connected(seen.handle) as (fake, reader, conn):
            reader.fatal_error = lambda _: reader.close()
            refusal = frame(ERROR, b"E_INVALID")
            await fake.send_apart(conn, refusal[:cut], refusal[cut:] + refusal + message(1, b"after"))
            await eventually_async(lambda: not reader.conns)
            assert reader.stats.fatal_errors == 1
            assert reader.stats.received == 0

    on_loop(main())
    assert seen.runs == []


@pytest.mark.parametrize("protected", [True, False])
@pytest.mark.parametrize("during", [1, 2, 3])
def test_what_is_read_while_a_handler_has_the_loop_run_waits_until_it_returns(during: int, *, protected: bool) -> None:
    """As with nest_asyncio. Copies of the message in hand are among it."""
    seen = Seen()
    order: list[tuple[str, bytes]] = []

    async def main() -> None:
        def handle(given: Any) -> bool:
            order.append(("begins", given.body))
            if given.id == message_id(during):
                conn._take(b"".join(message(number, given.body) for number in (4, 5)))
                conn._take(message(6, b"new"))
            order.append(("ends", given.body))
            return seen.handle(given)

        async with connected(handle, **({} if protected else {"store": False, "key": None})) as (fake, reader, conn):
            await fake.send(b"".join(message(number, b"%d" % number) for number in range(1, 4)))
            await eventually_async(lambda: len(fake.answers(b"FIN")) == 6)
            assert sorted(fake.answers(b"FIN")) == [message_id(number) for number in range(1, 7)]
            assert reader.stats.duplicates == (2 if protected else 0)
            at_rest(reader)

    on_loop(main())
    assert all(begun[1] == ended[1] for begun, ended in zip(order[::2], order[1::2], strict=True))
    if protected:
        seen.once_each([b"1", b"2", b"3", b"new"])


def test_what_is_read_while_a_handler_has_the_loop_run_is_nsqds_if_its_connection_closes() -> None:
    seen = Seen()

    async def main() -> None:
        def handle(given: Any) -> bool:
            conn._take(message(2, b"2"))
            reader.close()
            return seen.handle(given)

        async with connected(handle) as (fake, reader, conn):
            await fake.send(message(1, b"1"))
            await eventually_async(lambda: not reader.conns)
            assert reader.stats.received == 1

    on_loop(main())
    seen.once_each([b"1"])


@pytest.mark.parametrize("answer", ["fails", "is invalid", "touches", "is cancelled", "succeeds"])
def test_a_connection_that_breaks_while_its_batch_runs_costs_no_answer_of_another(answer: str) -> None:
    """Its close event comes in the next turn of the loop; the batch is settled before."""
    seen = Seen()

    async def main() -> None:
        def handle(message: Any) -> bool:
            seen.run(message)
            if message.id == message_id(2):
                # As tornado does when it cannot write.
                message.conn.stream.close()
                if answer == "touches":
                    message.touch()
                if answer == "is cancelled":
                    raise asyncio.CancelledError
                return answer != "fails"
            return True

        async with connected(handle, key=by_id, requeue_delay=0) as (fake, reader, conn):
            reader.validate_message = lambda message: answer != "is invalid" or message.conn.stream.close()
            await fake.send(b"".join(message(number, b"body") for number in range(1, 4)))
            await eventually_async(lambda: reader.stats.received == 3 and not reader.conns)
            await eventually_async(lambda: not reader.stats.in_flight)
            assert conn.closed()
            # Nobody waits for them: who comes again is handled, or was.
            assert list(reader._DedupeReader__runner._deduper.in_hand()) == []
            assert conn.in_flight == 0

    on_loop(main())


def test_messages_that_came_with_the_goodbye_go_back() -> None:
    seen = Seen()

    async def main() -> None:
        async with connected(seen.handle) as (fake, reader, conn):
            fake.deaf = True
            stopping = asyncio.ensure_future(reader.stop(PATIENCE))
            await eventually_async(lambda: conn._goodbye is not None)
            await fake.send(message(1, b"body") + AGREED)
            assert await stopping == 0
            await eventually_async(lambda: b"REQ " + message_id(1) + b" 0" in fake.commands)
            assert reader.stats.deferred == 1

    on_loop(main())
    assert seen.runs == []


def test_a_connection_that_is_lost_already_needs_no_goodbye() -> None:
    async def main() -> None:
        async with connected(lambda _: True) as (_, reader, conn):
            conn.stream.close()
            assert await asyncio.wait_for(reader.stop(3600), PATIENCE) == 0
            at_rest(reader)

    on_loop(main())


def test_nothing_is_sent_on_a_closed_connection() -> None:
    async def main() -> None:
        async with connected(lambda _: True) as (fake, reader, conn):
            before = list(fake.commands)
            conn.stream.close()
            with pytest.raises(OSError, match="closed"):
                conn.send(b"NOP\n")
            assert not conn.send_rdy(7)
            await eventually_async(lambda: not reader.conns and fake.open == 0)
            assert fake.commands == before

    on_loop(main())


def test_an_nsqd_that_hangs_up_before_the_subscription_is_no_end(caplog: pytest.LogCaptureFixture) -> None:
    """It agreed on everything, and was gone."""

    async def main() -> None:
        async with connected(lambda _: True) as (_, reader, conn):
            reader._DedupeReader__lose(conn)
            del reader.conns[conn.id]
            conn.stream.close()
            with pytest.raises(OSError, match="closed"):
                reader._on_connection_ready(conn)
            await eventually_async(lambda: not conn.is_open)
            assert reader.conns == {}

    on_loop(main())
