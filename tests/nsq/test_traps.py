"""The traps of NSQ and pynsq, by number, and the tests that watch them.

Most of them belong to a subject, and are tested with it; here are those that belong to none.

 1. A message id is no key: copies do not share it, and different messages may.
        test_traps.py::test_messages_that_share_an_id_are_two_and_copies_that_do_not_are_one
        unit/test_fingerprint.py::test_equal_bodies_are_one_message_per_topic_and_channel
 2. A key function fails: the message is neither dropped nor requeued for ever.
        test_failing_handlers.py::test_without_a_key_both_copies_are_handled
        test_failing_handlers.py::test_without_a_key_attempts_decide_when_a_message_is_given_up
 3. The store is down: handle, or send back without a try and without a backoff.
        test_store_outage.py::test_nothing_is_lost_when_the_store_is_away_for_a_while
        unit/test_deduper_outages.py::test_a_message_that_cannot_be_claimed_goes_back_if_the_user_chose_so
        unit/test_deduper_outages.py::test_an_outage_costs_no_try
 4. Confirm and release come before the bytes of the answer.
        unit/test_deduper_outcomes.py::test_a_message_is_confirmed_before_it_is_finished
        unit/test_deduper_outcomes.py::test_a_claim_is_released_before_its_message_is_requeued
 5. Giving up and refusing fire the event of a success, and are none. Giving up is once per message.
        test_failing_handlers.py::test_a_message_that_always_fails_runs_max_tries_times_in_all_and_is_given_up_once
        test_hooks.py::test_what_validate_message_refuses_is_finished_and_not_remembered
        test_hooks.py::test_a_listener_hears_of_what_was_refused
 6. Who never answers fires no event: leases end, and odd results are failures.
        test_outcomes.py::test_what_a_handler_does_is_answered
        test_slow_handlers.py::test_who_answers_too_late_is_heard_all_the_same
        test_wire.py::test_an_nsqd_that_negotiates_nothing_has_its_defaults
        unit/test_deduper_leases.py::test_touch_lets_the_lease_start_anew
 7. A duplicate is finished without the event that ends a backoff.
        test_backoff.py::test_duplicates_end_no_block
 8. A copy of a message in progress is not finished.
        test_crashes.py::test_the_consumer_and_the_owners_nsqd_are_killed_and_the_other_copy_is_handled
        unit/test_deduper_standbys.py::test_a_copy_waits_while_another_is_handled_and_is_finished_with_it
 9. Deferring raises attempts: a copy that was deferred often is not given up.
        test_traps.py::test_a_copy_that_was_deferred_a_thousand_times_is_handled
        unit/test_deduper_outcomes.py::test_deliveries_without_a_run_cost_no_try
10. Only whole milliseconds, from 0 to an hour, are sent.
        test_traps.py::test_whatever_delay_is_asked_for_whole_milliseconds_are_sent
        test_outcomes.py::test_what_a_handler_does_is_answered
11. A redelivery of what is still being handled stands by itself.
        test_slow_handlers.py::test_a_handler_slower_than_the_message_timeout_runs_once
12. A lost FIN: the message stays done.
        test_counters.py::test_a_finish_that_nsqd_refuses_is_counted_and_its_message_is_not_handled_again
13. A second answer is refused without assert statements too.
        test_outcomes.py::test_what_a_handler_does_is_answered
        test_answers.py::test_answering_twice_is_an_error_and_only_the_first_counts
14. All that can be called can be a handler, and be decorated.
        test_decorated.py::test_all_that_can_be_called_can_be_decorated
        test_answers.py::test_a_future_from_an_executor_is_an_answer
        field/test_programs.py::test_program
15. Copies may reach another process, which is told of.
        test_neighbours.py::test_a_foreign_consumer_is_told_of_once
16. Copies come late after an outage: they are recognised within the window.
        test_crashes.py::test_an_nsqd_is_killed_and_what_it_brings_back_are_duplicates
        unit/test_sizing.py::test_real_tables_remember_what_the_formula_says
17. close() at any moment, and silence afterwards.
        test_stopping.py::test_a_stopped_reader_keeps_silent
        test_stopping.py::test_it_may_be_ended_before_it_began
        test_stopping.py::test_it_may_be_ended_while_it_connects
        test_stopping.py::test_a_connection_that_is_ready_too_late_is_closed
18. stop() drains; a message that comes late goes back at once; a second signal ends it.
        test_stopping.py::test_what_is_stopped_under_load_is_finished_by_the_next_reader
        test_stopping.py::test_stop_says_how_many_were_left
        test_wire.py::test_a_late_message_after_the_goodbye_goes_back_at_once
        test_run.py::test_a_signal_under_load_drains_all_readers
        test_run.py::test_a_second_signal_ends_it_at_once
19. A connection is lost: what still runs here is not handled again.
        unit/test_deduper_connections.py::test_a_redelivery_over_a_new_connection_stands_by_the_run_and_answers_for_it
        unit/test_deduper_connections.py::test_what_waits_for_its_turn_is_not_run_and_its_message_is_free
        test_crashes.py::test_nsqds_that_restart_one_after_the_other_lose_and_repeat_nothing
20. A second connection to the same nsqd does not make the first one forgotten.
        test_wire.py::test_an_nsqd_is_not_connected_to_twice
21. An nsqd given by address is connected to again, with nsqlookupds given as well.
        test_traps.py::test_an_nsqd_given_by_address_is_found_again_though_no_nsqlookupd_knows_it
22. Options are checked before anything starts, and never by assert.
        unit/test_options.py::test_a_wrong_value_is_refused_by_name
        unit/test_options.py::test_types_are_those_that_pynsq_insists_on
23. A reader belongs to the loop that was current when it was made: one that never runs is told of.
        test_traps.py::test_a_reader_whose_loop_does_not_run_is_told_of
        test_traps.py::test_a_reader_made_before_its_loop_runs_is_not
24. A normal close is no error, and no body is logged.
        test_stopping.py::test_a_close_is_no_error
        test_outcomes.py::test_what_a_handler_does_is_answered
25. TLS with compression, and compression alone, work.
        test_transports.py::test_under_load_each_message_is_handled_once
        unit/test_streams.py::test_a_read_goes_on_until_there_is_something_or_nothing
26. What an nsqd refuses reaches the application.
        test_fatal_errors.py::test_a_refusal_is_told_each_time_counted_each_time_and_logged_once
27. Answers from another thread work.
        test_answers.py::test_finish_requeue_and_touch_from_other_threads_are_all_answered
        field/test_programs.py::test_program
28. The key is of the bytes that came, whatever a hook makes of the body.
        test_hooks.py::test_preprocess_may_replace_the_body_and_the_key_is_of_the_wire
29. The message that tests a backoff may be a duplicate.
        test_backoff.py::test_live_messages_flow_soon_after_a_block_whatever_a_backlog_of_duplicates_does
30. In a pause nothing starts, takeovers neither.
        test_flow.py::test_in_a_pause_no_copy_that_waits_takes_over
        test_hold_walk.py::test_a_hold_that_ends_in_a_pause_lets_nothing_run_in_it
"""

from __future__ import annotations

import ast
import asyncio
import re
import threading
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest
from consumers import Seen, consuming, on_loop
from fake_nsqd import connected, fake_nsqd, message, message_id
from servers import Servers, eventually, eventually_async

from nsqdedupe import BODY, DedupeReader
from nsqdedupe.cli.local_nsq import Nsqd

TESTS = Path(__file__).parents[1]


def watchers() -> dict[int, list[str]]:
    """The tests named above, by the number of their trap."""
    found: dict[int, list[str]] = defaultdict(list)
    number = 0
    for line in str(__doc__).splitlines():
        trap = re.match(r" ?(\d+)\. ", line)
        number = int(trap[1]) if trap else number
        found[number] += re.findall(r"\S+\.py::test_\w+", line)
    return found


def test_every_trap_is_watched() -> None:
    found = watchers()
    assert [number for number in range(1, 31) if not found[number]] == []
    for name in sorted({name for names in found.values() for name in names}):
        file, _, test = name.partition("::")
        path = TESTS / (file if "/" in file else f"nsq/{file}")
        functions = {node.name for node in ast.parse(path.read_text()).body if isinstance(node, ast.FunctionDef)}
        assert test in functions, f"{name} is no more: which test watches this trap now?"


def test_messages_that_share_an_id_are_two_and_copies_that_do_not_are_one() -> None:
    """Ids count up by themselves on each nsqd, and start from the host's name."""
    seen = Seen()

    async def main() -> None:
        async with fake_nsqd() as first, fake_nsqd() as second:
            both = [first.address, second.address]
            reader = DedupeReader("topic", "channel", seen.handle, nsqd_tcp_addresses=both, max_in_flight=9, key=BODY)
            await eventually_async(lambda: all(b"RDY 1" in fake.commands for fake in (first, second)))
            for fake, frames in (
                (first, message(1, b"one") + message(2, b"two")),
                (second, message(1, b"three") + message(4, b"two")),
            ):
                await fake.send(frames)
            await eventually_async(lambda: [len(fake.answers(b"FIN")) for fake in (first, second)] == [2, 2])
            assert reader.stats.duplicates == 1
            reader.close()
            await eventually_async(lambda: not reader.conns)

    on_loop(main())
    seen.once_each([b"one", b"two", b"three"])


@pytest.mark.parametrize("attempts", [6, 1000, 40_000])
def test_a_copy_that_was_deferred_a_thousand_times_is_handled(attempts: int) -> None:
    seen = Seen()

    async def main() -> None:
        async with connected(seen.handle, max_tries=5) as (fake, reader, _):
            await fake.send(message(1, b"one", attempts))
            await eventually_async(lambda: fake.answers(b"FIN") == [message_id(1)])
            assert reader.stats.given_up == 0

    on_loop(main())
    seen.once_each([b"one"])
    assert [run.tries for run in seen.runs] == [0]


DELAYS: dict[str, tuple[dict[str, float], bytes]] = {
    "parts of a second": ({"delay": 0.0015}, b"2"),
    "parts of a millisecond": ({"time_ms": 0.25}, b"1"),
    "nothing": ({"delay": 0.0}, b"0"),
    "more than an hour": ({"delay": 1e6}, b"3600000"),
    "less than nothing": ({"delay": -7.5, "time_ms": -3}, b"90000"),
}


@pytest.mark.parametrize(("asked", "sent"), DELAYS.values(), ids=DELAYS)
def test_whatever_delay_is_asked_for_whole_milliseconds_are_sent(asked: dict[str, float], sent: bytes) -> None:
    def handle(message: Any) -> None:
        message.requeue(**asked)

    async def main() -> None:
        async with connected(handle) as (fake, _, _):
            await fake.send(message(1, b"one"))
            await eventually_async(lambda: b"REQ %s %s" % (message_id(1), sent) in fake.commands)

    on_loop(main())


def test_an_nsqd_given_by_address_is_found_again_though_no_nsqlookupd_knows_it(
    servers: Servers, nsqd: Nsqd, topic: str, channel: str
) -> None:
    seen = Seen()
    nsqd.create_channel(topic, channel)
    stranger = servers.lookupd()

    async def main() -> None:
        options = {"lookupd_http_addresses": [stranger.http_address]}
        async with consuming(topic, channel, seen.handle, [nsqd], **options) as reader:
            await eventually_async(lambda: reader.conns)
            nsqd.kill()
            await eventually_async(lambda: not reader.conns)
            nsqd.start()
            nsqd.publish(topic, b"after the outage")
            await eventually_async(lambda: seen.handled)

    on_loop(main())


@pytest.fixture
def patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """As long as it must be, and no longer."""
    monkeypatch.setattr("nsqdedupe.unstarted.PATIENCE", 0.05)


def started_at_last(reader: DedupeReader, loop: asyncio.AbstractEventLoop) -> None:
    """Let a reader start on its loop, and close it."""

    async def main() -> None:
        await eventually_async(lambda: reader.connection_attempts)
        reader.close()
        await eventually_async(lambda: not reader.conns)

    loop.run_until_complete(main())
    loop.close()


@pytest.mark.usefixtures("patience")
def test_a_reader_whose_loop_does_not_run_is_told_of(
    nsqd: Nsqd, topic: str, channel: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Made first, and then asyncio.run(): with pynsq it never connects, without a word."""
    loop = asyncio.new_event_loop()
    asyncio.set_event_loop(loop)
    reader = DedupeReader(topic, channel, lambda _: True, nsqd_tcp_addresses=nsqd.tcp_address, key=BODY)

    async def main() -> None:
        await eventually_async(lambda: "asyncio.run()" in caplog.text)

    with asyncio.Runner() as another:
        another.run(main())
    assert f"[{reader.name}]" in caplog.text
    started_at_last(reader, loop)


def test_a_reader_made_before_its_loop_runs_is_not(
    nsqd: Nsqd, topic: str, channel: str, caplog: pytest.LogCaptureFixture
) -> None:
    loop = asyncio.new_event_loop()
    asyncio.set_event_loop(loop)
    reader = DedupeReader(topic, channel, lambda _: True, nsqd_tcp_addresses=nsqd.tcp_address, key=BODY)
    started_at_last(reader, loop)
    eventually(lambda: not [thread for thread in threading.enumerate() if isinstance(thread, threading.Timer)])
    assert "not started" not in caplog.text
