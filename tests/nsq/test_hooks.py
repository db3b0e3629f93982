"""The ways in which applications hook into a reader, and the keys that they choose."""

from __future__ import annotations

import json
from collections import Counter
from typing import Any

import pytest
from consumers import (
    KINDS,
    PATIENCE,
    Seen,
    at_rest,
    bodies,
    consuming,
    nothing_left,
    on_loop,
    publish,
    told,
    watched_channel,
    watched_pair,
)
from servers import Pair, eventually_async

from nsqdedupe import BODY, DedupeReader, MemoryStore, json_field
from nsqdedupe.cli.local_nsq import Nsqd, Nsqlookupd


def test_without_a_store_every_copy_is_handled(nsqd_pair: Pair, lookupd: Nsqlookupd, topic: str, channel: str) -> None:
    messages = bodies(2000)
    publish(nsqd_pair, topic, messages)
    seen = Seen()

    async def main() -> None:
        async with consuming(topic, channel, seen.handle, lookupd, store=False, key=None) as reader:
            await eventually_async(lambda: reader.stats.handled == 4000, PATIENCE)
            await nothing_left(nsqd_pair, topic, channel)
            at_rest(reader)
            assert reader.stats.unprotected == 4000
            assert reader.store is False

    on_loop(main())
    assert seen.handled == Counter(messages * 2)


def as_json(number: int, copy: int) -> bytes:
    return json.dumps({"copy": copy, "context": {"id": f"id-{number}"}}).encode()


def number_of(message: Any) -> str:
    return str(json.loads(message.body)["context"]["id"])


KEYS = {
    "json_field": {"key": json_field("context.id")},
    "function": {"key": number_of},
    "function to bytes": {"key": lambda message: number_of(message).encode()},
    "secret": {"key": json_field("context.id"), "secret": b"nobody knows"},
}


@pytest.mark.parametrize("options", KEYS.values(), ids=KEYS)
def test_the_key_says_what_makes_two_messages_the_same(
    nsqd_pair: Pair, lookupd: Nsqlookupd, topic: str, channel: str, options: dict[str, Any]
) -> None:
    for copy, nsqd in enumerate(nsqd_pair):
        nsqd.create_channel(topic, channel)
        publish([nsqd], topic, [as_json(number, copy) for number in range(500)])
    handled: Counter[str] = Counter()

    async def main() -> None:
        def handle(message: Any) -> bool:
            handled[number_of(message)] += 1
            return True

        async with consuming(topic, channel, handle, lookupd, **options) as reader:
            await eventually_async(lambda: reader.stats.handled + reader.stats.duplicates == 1000, PATIENCE)
            await nothing_left(nsqd_pair, topic, channel)
            assert reader.stats.key_errors == 0

    on_loop(main())
    assert handled == Counter(f"id-{number}" for number in range(500))


def test_what_validate_message_refuses_is_finished_and_not_remembered(
    nsqd_pair: Pair, lookupd: Nsqlookupd, topic: str, channel: str
) -> None:
    messages = bodies(100)
    publish(nsqd_pair, topic, messages)
    seen = Seen()
    refused: Counter[bytes] = Counter()

    class Picky(DedupeReader):
        strict = True

        def validate_message(self, message: Any) -> bool:
            if self.strict and int(message.body[:-1]) % 2:
                refused[message.body] += 1
                return False
            return True

    async def main() -> None:
        async with consuming(topic, channel, seen.handle, lookupd, Picky) as reader:
            await eventually_async(lambda: reader.stats.received == 200 and not reader.stats.in_flight, PATIENCE)
            await nothing_left(nsqd_pair, topic, channel)
            at_rest(reader)
            stats = reader.stats
            assert (stats.handled, stats.duplicates, stats.invalid) == (50, 50, 100)
            reader.strict = False
            publish(nsqd_pair[:1], topic, messages)
            await eventually_async(lambda: reader.stats.handled == 100, PATIENCE)
            await nothing_left(nsqd_pair, topic, channel)
            assert reader.stats.duplicates == 100

    on_loop(main())
    seen.once_each(messages)
    assert refused == Counter(messages[1::2] * 2)
    assert told(nsqd_pair, topic, channel, "requeue_count") == [0, 0]


def test_a_standby_of_what_was_refused_is_looked_at_itself(nsqd: Nsqd, topic: str, channel: str) -> None:
    """The other copy comes while the first one is being refused: by a hook that lets a coroutine hold the key."""
    publish([nsqd], topic, [b"same", b"same"])
    looks: list[bytes] = []

    async def main() -> None:
        def validate(message: Any) -> bool:
            looks.append(message.body)
            return False

        async with consuming(topic, channel, lambda _: True, [nsqd], max_in_flight=2) as reader:
            reader.validate_message = validate
            await eventually_async(lambda: reader.stats.invalid == 2, PATIENCE)
            await nothing_left([nsqd], topic, channel)
            at_rest(reader)

    on_loop(main())
    assert looks == [b"same", b"same"]


def test_a_listener_hears_of_what_was_refused(nsqd: Nsqd, topic: str, channel: str) -> None:
    publish([nsqd], topic, [b"message"])
    heard: list[bytes] = []

    async def main() -> None:
        def preprocess(message: Any) -> Any:
            message.on("finish", lambda message: heard.append(message.body))
            return message

        async with consuming(topic, channel, lambda _: True, [nsqd]) as reader:
            reader.preprocess_message = preprocess
            reader.validate_message = lambda _: False
            await eventually_async(lambda: reader.stats.invalid == 1)

    on_loop(main())
    assert heard == [b"message"]


def test_preprocess_may_replace_the_body_and_the_key_is_of_the_wire(
    nsqd_pair: Pair, lookupd: Nsqlookupd, topic: str, channel: str
) -> None:
    watched_channel(nsqd_pair[0], topic, channel)
    publish(nsqd_pair, topic, [as_json(number, 0) for number in range(100)])
    handled: Counter[str] = Counter()
    validated: list[Any] = []

    async def main() -> None:
        def preprocess(message: Any) -> Any:
            message.body = json.loads(message.body)
            return message.body

        def validate(document: Any) -> bool:
            validated.append(document)
            return "context" in document

        def handle(message: Any) -> bool:
            handled[message.body["context"]["id"]] += 1
            return True

        async with consuming(topic, channel, handle, lookupd) as reader:
            # As applications do: on the instance, after construction.
            reader.preprocess_message = preprocess
            reader.validate_message = validate
            await eventually_async(lambda: reader.stats.handled + reader.stats.duplicates == 200, PATIENCE)
            await nothing_left(nsqd_pair, topic, channel)

    on_loop(main())
    assert handled == Counter(f"id-{number}" for number in range(100))
    assert len(validated) == 100
    assert isinstance(validated[0], dict)


@pytest.mark.parametrize("hook", ["preprocess_message", "validate_message"])
def test_a_hook_that_raises_fails_its_message(nsqd: Nsqd, topic: str, channel: str, hook: str) -> None:
    watched_channel(nsqd, topic, channel)
    publish([nsqd], topic, [b"message"])
    seen = Seen()

    async def main() -> None:
        def broken(message: Any) -> Any:
            if message.tries == 0:
                raise ValueError("the hook is broken")
            return message

        options = {"requeue_delay": 0, "max_backoff_duration": 1}
        async with consuming(topic, channel, seen.handle, [nsqd], **options) as reader:
            setattr(reader, hook, broken)
            await nothing_left([nsqd], topic, channel)
            assert (reader.stats.failed, reader.stats.handled) == (1, 1)

    on_loop(main())
    assert [run.tries for run in seen.runs] == [1]


def test_a_subclass_may_call_handlers_its_own_way(
    nsqd_pair: Pair, lookupd: Nsqlookupd, topic: str, channel: str
) -> None:
    """Its handler is a bound method, and its attributes have names that are ours."""
    messages = bodies(100)
    publish(nsqd_pair, topic, messages)

    class Application(DedupeReader):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, message_handler=self.work, **kwargs)
            self.stats = self.store = self.key = "mine"  # type: ignore[assignment]
            self.seen = Seen()
            self.wrapped = 0

        def work(self, message: Any) -> bool:
            return self.seen.handle(message)

        def process_message(self, message: Any) -> Any:
            self.wrapped += 1
            return super().process_message(message)

    async def main() -> None:
        reader = Application(topic, channel, lookupd_http_addresses=[lookupd.http_address], key=BODY, max_in_flight=50)
        try:
            await eventually_async(lambda: len(reader.seen.handled) == 100, PATIENCE)
            await nothing_left(nsqd_pair, topic, channel)
            reader.seen.once_each(messages)
            assert reader.wrapped == 100
            assert reader.stats == "mine"
        finally:
            reader.close()

    on_loop(main())


def test_who_listens_to_responses_once_connected_hears_no_earlier_one(nsqd: Nsqd, topic: str, channel: str) -> None:
    """With pynsq the first is that to the subscription; that to IDENTIFY has brought the connection about."""
    heard: list[bytes] = []

    class Listening(DedupeReader):
        def connect_to_nsqd(self, host: str, port: int) -> Any:
            conn = super().connect_to_nsqd(host, port)
            assert conn is not None
            conn.on("ready", lambda conn: conn.on("response", lambda conn, data: heard.append(data)))
            return conn

    async def main() -> None:
        async with consuming(topic, channel, lambda _: True, [nsqd], Listening):
            await eventually_async(lambda: heard)

    on_loop(main())
    assert heard == [b"OK"]


def test_the_handler_may_be_set_later_and_changed(nsqd: Nsqd, topic: str, channel: str) -> None:
    first, second = Seen(), Seen()

    async def main() -> None:
        async with consuming(topic, channel, None, [nsqd]) as reader:
            reader.set_message_handler(first.handle)
            publish([nsqd], topic, [b"one"])
            await eventually_async(lambda: first.handled)
            reader.set_message_handler(KINDS["coroutine"](second.handle, 0))
            publish([nsqd], topic, [b"two"])
            await eventually_async(lambda: second.handled)

    on_loop(main())
    first.once_each([b"one"])
    second.once_each([b"two"])


def test_a_reader_without_a_handler_says_so_and_can_be_closed(
    nsqd: Nsqd, topic: str, channel: str, caplog: pytest.LogCaptureFixture
) -> None:
    async def main() -> None:
        async with consuming(topic, channel, None, [nsqd]) as reader:
            await eventually_async(lambda: caplog.records)
            assert reader.conns == {}
            assert await reader.stop(1) == 0

    with pytest.raises(AssertionError, match="message_handler is missing"):
        on_loop(main())
    assert "set_message_handler" in caplog.text


def test_options_pass_by_position_as_for_pynsq(nsqd: Nsqd, topic: str, channel: str) -> None:
    nsqd.create_channel(topic, channel)
    seen = Seen()

    async def main() -> None:
        reader = DedupeReader(topic, channel, seen.handle, "a name", nsqd.tcp_address, None, 7, 42, key=BODY)
        try:
            assert (reader.name, reader.max_tries, reader.max_in_flight) == ("a name", 7, 42)
            agent = await eventually_async(lambda: nsqd.channel_stats(topic, channel)["clients"][0]["user_agent"])
            assert agent.startswith("nsqdedupe/")
            assert "pynsq/0.9" in agent
        finally:
            reader.close()

    on_loop(main())


def test_two_channels_may_share_a_store(nsqd_pair: Pair, lookupd: Nsqlookupd, topic: str, channel: str) -> None:
    messages = bodies(300)
    channels = f"{channel}-1", f"{channel}-2"
    for nsqd in nsqd_pair:
        for one in channels:
            nsqd.create_channel(topic, one)
    publish(nsqd_pair, topic, messages)
    seen = Seen(), Seen()
    store = MemoryStore(window=10_000)

    async def main() -> None:
        async with (
            consuming(topic, channels[0], seen[0].handle, lookupd, store=store),
            consuming(topic, channels[1], seen[1].handle, lookupd, store=store),
        ):
            for one in channels:
                await nothing_left(nsqd_pair, topic, one)

    on_loop(main())
    for one in seen:
        one.once_each(messages)


@pytest.mark.parametrize("kind", KINDS)
def test_two_readers_of_a_channel_with_one_store_handle_each_message_once(
    nsqd_pair: Pair, lookupd: Nsqlookupd, topic: str, channel: str, kind: str
) -> None:
    """Copies of a message go to either, so each waits for what the other one handles."""
    messages = bodies(2000)
    watched_pair(nsqd_pair, lookupd, topic, channel)
    publish(nsqd_pair, topic, messages)
    seen = Seen()
    store = MemoryStore(window=10_000)

    async def main() -> None:
        handler = KINDS[kind](seen.handle, 0.0 if kind == "plain" else 0.002)
        async with (
            consuming(topic, channel, handler, lookupd, store=store) as first,
            consuming(topic, channel, handler, lookupd, store=store) as second,
        ):
            await eventually_async(lambda: len(first.conns) == len(second.conns) == 2)
            await eventually_async(lambda: len(seen.handled) == 2000, PATIENCE)
            await nothing_left(nsqd_pair, topic, channel)
            at_rest(first)
            at_rest(second)
            both = first.stats, second.stats
            assert sum(stats.handled for stats in both) == 2000
            assert sum(stats.duplicates for stats in both) == 2000
            assert sum(stats.unanswered for stats in both) == 0

    on_loop(main())
    seen.once_each(messages)
    assert told(nsqd_pair, topic, channel, "timeout_count") == [0, 0]
