"""Backoff as nsqd sees it: on streams without duplicates a DedupeReader gives RDY as stock pynsq does.

What is compared is every RDY command of every connection in its order, and where messages come one at a time every
FIN and REQ among them. Where pynsq draws lots, both readers draw the same. What differs on purpose happens in none of
these scenes; it is listed in docs/architecture.md, under "RDY is pynsq's".
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import nsq
import pytest
from consumers import PATIENCE, on_loop
from proxy import Line, Proxy, recording
from servers import Servers, eventually_async

from nsqdedupe import BODY, DedupeReader
from nsqdedupe.cli.local_nsq import Nsqd

Scene = Callable[["Stage"], Awaitable[None]]


class Chance:
    """In place of pynsq's ``random``: the script says which connection it falls on.

    Args:
        addresses: of the connections, in their order.
    """

    def __init__(self, addresses: Sequence[str]) -> None:
        self._addresses = addresses
        self.tests = 0
        """The connection that tests a backoff."""
        self.gets = 0
        """The connection that redistribution gives RDY to, if all are without."""

    def choice(self, conns: Sequence[Any]) -> Any:
        return min(conns, key=lambda conn: (self._addresses.index(conn.id) - self.tests) % len(self._addresses))

    def randrange(self, stop: int) -> int:
        return self.gets % stop


class Stage:
    """A reader on nsqds with a proxy before each, and a handler that does what each message's body says.

    A body is a name and the outcomes of its runs, the last one for ever: ``a.ffk`` fails twice, then
    succeeds. ``f`` returns False, ``x`` raises, ``c`` requeues without a backoff, ``k`` returns True.
    """

    def __init__(self, proxies: Sequence[Proxy], topic: str) -> None:
        self.proxies = proxies
        self.topic = topic
        self.chance = Chance([proxy.address for proxy in proxies])
        self.runs: Counter[bytes] = Counter()
        self.held: dict[bytes, asyncio.Future[None]] | None = None
        self.reader: Any = None
        self.finish_block: Callable[[], Any] = lambda: None
        self.block_lasts = False
        self.overdue = False

    @property
    def lines(self) -> list[Line]:
        return [proxy.line for proxy in self.proxies]

    @property
    def conns(self) -> dict[int, Any]:
        """The reader's connections, by the number of their line."""
        numbers = {proxy.address: number for number, proxy in enumerate(self.proxies)}
        return {numbers[conn.id]: conn for conn in self.reader.conns.values()}

    def handle(self, message: Any) -> Any:
        """What it says, or a coroutine for it while messages are held."""
        return self.do(message) if self.held is None else self.do_when_let_go(message)

    async def do_when_let_go(self, message: Any) -> bool:
        """Hold it until the script lets it go."""
        assert self.held is not None
        self.held[message.body] = asyncio.get_running_loop().create_future()
        await self.held[message.body]
        return self.do(message)

    def do(self, message: Any) -> bool:
        """What it says."""
        script = message.body.partition(b".")[2].decode()
        outcome = script[min(self.runs[message.body], len(script) - 1)]
        self.runs[message.body] += 1
        if outcome == "x":
            raise ValueError("as the script says")
        if outcome == "c":
            message.requeue(backoff=False)
        return outcome == "k"

    async def start(self, reader_class: type[Any], **options: Any) -> None:
        """Connect to one nsqd after the other, so that their order is the same each time."""
        quick: dict[str, Any] = {
            "nsqd_tcp_addresses": [self.proxies[0].address],
            "max_backoff_duration": 1,
            "requeue_delay": 0,
            "max_tries": 0,
            "low_rdy_idle_timeout": 3600,
            "output_buffer_timeout": 25,
        }
        self.reader = reader_class(self.topic, "channel", self.handle, **{**quick, **options})
        for proxy in self.proxies:
            if proxy is not self.proxies[0]:
                self.reader.connect_to_nsqd("127.0.0.1", proxy.port)
            await eventually_async(lambda proxy=proxy: proxy.lines and proxy.line.said(b"SUB"))
        await self.calm()
        # RDY moves, blocks end and connections come back when the script says so, not when time has passed.
        self.reader.redist_periodic.stop()
        self.reader.connect_to_nsqd = lambda *_, **__: None
        self.finish_block, self.reader._finish_backoff_block = self.reader._finish_backoff_block, self.end_of_block

    def end_of_block(self) -> None:
        """The time of a block is over: so is the block, unless the script has it last."""
        self.overdue = self.block_lasts
        if not self.block_lasts:
            self.finish_block()

    def let_block_end(self) -> None:
        """Blocks last no longer than pynsq has them."""
        self.block_lasts = False
        if self.overdue:
            self.end_of_block()

    async def calm(self) -> None:
        """Wait until no block goes on, and nsqd was told what the reader thinks."""

        def is_calm() -> bool:
            told = {number: (self.lines[number].rdy() or [0])[-1] for number in self.conns}
            return not self.reader.backoff_block and told == self.rdy()

        await eventually_async(is_calm, PATIENCE)

    def rdy(self) -> dict[int, int]:
        """What each connection was given last."""
        return {number: conn.last_rdy for number, conn in self.conns.items()}

    async def publish(self, where: int, *bodies: str) -> None:
        await asyncio.to_thread(self.proxies[where].nsqd.mpublish, self.topic, [body.encode() for body in bodies])

    async def say(self, where: int, *bodies: str) -> None:
        """Publish messages one by one, each when the one before was handled and no block goes on."""
        for body in bodies:
            await self.publish(where, body)
            await eventually_async(lambda body=body: f"FIN {body}" in self.lines[where].answers(), PATIENCE)
            await self.calm()

    async def hold(self, where: int, *bodies: str) -> None:
        """Publish messages and wait until all of them are with the handler, unanswered."""
        if self.held is None:
            self.held = {}
        await self.publish(where, *bodies)
        await eventually_async(lambda: {body.encode() for body in bodies} <= set(self.held or ()), PATIENCE)

    def let_run(self, body: str) -> None:
        """Let one handler go on; it is held again when its message comes again."""
        assert self.held is not None
        self.held.pop(body.encode()).set_result(None)

    async def let_go(self, *bodies: str, apart: bool) -> None:
        """Let handlers answer in this order, at once or each when the one before was heard by nsqd.

        A block that one of them begins lasts until all have answered.
        """
        self.block_lasts = True
        held, self.held = self.held or {}, None
        for body in bodies:
            held[body.encode()].set_result(None)
            if apart:
                await eventually_async(lambda body=body: self.runs[body.encode()], PATIENCE)
                await self.heard()
        await eventually_async(lambda: all(self.runs[body.encode()] for body in bodies), PATIENCE)
        await self.heard()
        self.let_block_end()

    async def heard(self) -> None:
        """Wait until nsqd has heard all that handlers answered."""
        await eventually_async(lambda: self.answers_given() >= sum(self.runs.values()), PATIENCE)

    def answers_given(self) -> int:
        return sum(len(line.said(b"FIN", b"REQ")) for line in self.lines)

    def answered(self, answer: str) -> bool:
        return any(answer in line.answers() for line in self.lines)

    def redistribute(self, *idle: int) -> None:
        """What pynsq does every 5 s; these connections have had no message for a long time."""
        now = time.time()
        for number, conn in self.conns.items():
            conn.last_msg_timestamp = now - 7200 * (number in idle)
        self.reader._redistribute_rdy_state()

    async def turn(self, number: int) -> None:
        """See to it that this connection has RDY, where there is not enough for all of them."""
        if not self.conns[number].rdy:
            self.chance.gets = number
            self.redistribute(*self.conns)
            await self.calm()

    async def end(self) -> None:
        """All was handled, and the backoff is over."""
        await self.calm()
        assert self.reader.backoff_timer.get_interval() == 0
        assert self.reader.backoff_block_completed
        for line in (self.lines[number] for number in self.conns):
            finished = [command.args[0] for command in line.said(b"FIN")]
            assert sorted(finished) == sorted({message.id for message in line.messages()})


async def perform(
    scene: Scene,
    nsqds: Sequence[Nsqd],
    topic: str,
    reader_class: type[Any],
    monkeypatch: pytest.MonkeyPatch,
    **options: Any,
) -> list[list[str]]:
    """Play a scene with a reader; returns what it told each nsqd."""
    async with recording(*nsqds) as proxies:
        stage = Stage(proxies, topic)
        monkeypatch.setattr("nsq.reader.random", stage.chance)
        await stage.start(reader_class, **options)
        try:
            await scene(stage)
            await stage.end()
            return [line.answers() for line in stage.lines]
        finally:
            stage.reader.close()


def rdy_of(told: Sequence[str]) -> list[str]:
    return [command for command in told if command.startswith("RDY")]


def compare(
    scene: Scene,
    nsqds: Sequence[Nsqd],
    topic: str,
    monkeypatch: pytest.MonkeyPatch,
    *,
    ordered: bool = True,
    **options: Any,
) -> list[list[str]]:
    """Play a scene with stock pynsq and with a DedupeReader: both must tell each nsqd the same, in the same order.

    Args:
        ordered: False where messages that come again meet others: then it depends on nsqd when they are answered, and
            the RDY commands must be the same in the same order, the answers just the same.

    Returns:
        What that was: RDY commands, FINs and REQs, for each nsqd.
    """

    async def main() -> list[list[str]]:
        stock = await perform(scene, nsqds, f"{topic[-20:]}-stock", nsq.Reader, monkeypatch, **options)
        ours = await perform(scene, nsqds, f"{topic[-20:]}-ours", DedupeReader, monkeypatch, key=BODY, **options)
        if ordered:
            assert ours == stock
        assert [rdy_of(told) for told in ours] == [rdy_of(told) for told in stock]
        assert [sorted(told) for told in ours] == [sorted(told) for told in stock]
        return ours

    return on_loop(main())


@pytest.mark.parametrize("max_in_flight", [1, 2, 10, 100])
def test_one_connection_one_message_at_a_time(
    nsqd: Nsqd, topic: str, monkeypatch: pytest.MonkeyPatch, max_in_flight: int
) -> None:
    """Failures in a row, in the test phase, by exception; requeues without backoff in and out of a backoff."""

    async def scene(stage: Stage) -> None:
        await stage.say(0, "a.k", "b.fk", "c.k", "d.ffk", "e.k", "f.k", "g.ck", "h.xfck", "i.k", "j.k", "k.k", "l.k")

    (told,) = compare(scene, [nsqd], topic, monkeypatch, max_in_flight=max_in_flight)
    assert told.count("RDY 0") == 8


@pytest.mark.parametrize("max_in_flight", [1, 2, 10, 100])
@pytest.mark.parametrize("count", [2, 3])
@pytest.mark.parametrize("tested", ["where-it-failed", "idle"])
def test_several_connections_one_of_them_idle(
    servers: Servers, topic: str, monkeypatch: pytest.MonkeyPatch, max_in_flight: int, count: int, tested: str
) -> None:
    """Messages come to the first nsqd (and to the second of three); the last one has none at all.

    When the connection that tests the backoff is the idle one, redistribution moves RDY 1 on.
    """
    idle = count - 1

    async def scene(stage: Stage) -> None:
        for number in range(count - 1):
            await stage.turn(number)
            await stage.say(number, f"a{number}.k", f"b{number}.k")
        await stage.turn(0)
        before = stage.answers_given()
        stage.chance.tests = 0 if tested == "where-it-failed" else idle
        await stage.publish(0, "c.fcfk")
        for answered in range(1, 6):
            if answered == 5:
                await stage.publish(0, "d.k")
            await eventually_async(lambda n=answered: stage.answers_given() >= before + n, PATIENCE)
            await stage.calm()
            if tested == "idle" and answered < 5:
                assert stage.rdy() == {**dict.fromkeys(range(idle), 0), idle: 1}
                stage.chance.gets = 0
                stage.redistribute(idle)

    compare(scene, [servers.nsqd() for _ in range(count)], topic, monkeypatch, max_in_flight=max_in_flight)


ORDERS = {
    "failures-first": "ffkkkk",
    "failures-last": "kkkkff",
    "one-failure-amid": "kkfkkk",
    "all-fail": "ffffff",
    "requeued-without-backoff": "kcfckk",
}


@pytest.mark.parametrize("apart", [False, True], ids=["at-once", "one-by-one"])
@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("count", [1, 2])
def test_several_messages_in_flight_end(
    servers: Servers, topic: str, monkeypatch: pytest.MonkeyPatch, order: str, count: int, apart: bool
) -> None:
    """Six coroutine handlers run when the first of them ends: a block begins with others still in flight."""
    last = count - 1

    async def scene(stage: Stage) -> None:
        for number in range(count):
            await stage.say(number, f"first{number}.k")
        held = [f"{number}.{outcome}k" for number, outcome in enumerate(ORDERS[order])]
        for number in range(count):
            await stage.hold(number, *held[number::count])
        await stage.let_go(*held, apart=apart)
        await eventually_async(lambda: all(stage.answered(f"FIN {body}") for body in held), PATIENCE)

    told = compare(scene, [servers.nsqd() for _ in range(count)], topic, monkeypatch, max_in_flight=20, ordered=False)
    assert "RDY 0" in told[last]


@pytest.mark.parametrize("max_in_flight", [1, 2])
def test_more_connections_than_max_in_flight_take_turns(
    servers: Servers, topic: str, monkeypatch: pytest.MonkeyPatch, max_in_flight: int
) -> None:
    """Every connection has its turn, idle ones give theirs up, and so do those whose handlers take long."""

    async def scene(stage: Stage) -> None:
        for number in (0, 1, 2, 0):
            await stage.turn(number)
            await stage.say(number, f"{number}{stage.answers_given()}.k")
        await stage.hold(0, "held.k")
        for _ in range(2):
            stage.redistribute()
            await stage.calm()
        await stage.let_go("held.k", apart=True)
        for number in (2, 1):
            stage.chance.tests = number
            for body in (f"{number}.fk", f"{number}.kk"):
                await stage.turn(number)
                await stage.say(number, body)

    told = compare(scene, [servers.nsqd() for _ in range(3)], topic, monkeypatch, max_in_flight=max_in_flight)
    assert all("RDY 0" in of_one for of_one in told)


@pytest.mark.parametrize("outcome", ["k", "f", "c"])
def test_a_connection_is_lost_while_its_message_tests_a_backoff(
    servers: Servers, topic: str, monkeypatch: pytest.MonkeyPatch, outcome: str
) -> None:
    """Its handler goes on: what comes of it ends the backoff, or begins another block, on the other connection."""

    async def scene(stage: Stage) -> None:
        await stage.say(0, "a.k")
        await stage.say(1, "b.k")
        body = f"c.f{outcome}"
        await stage.hold(0, body)
        stage.let_run(body)
        await eventually_async(lambda: body.encode() in (stage.held or ()), PATIENCE)
        assert stage.rdy() == {0: 1, 1: 0}
        stage.lines[0].cut()
        await eventually_async(lambda: stage.rdy() == {1: 0}, PATIENCE)
        stage.let_run(body)
        await eventually_async(lambda: stage.rdy() == {1: 10 if outcome == "k" else 1}, PATIENCE)
        stage.held = None
        await stage.say(1, "d.k", "e.k")

    told = compare(scene, [servers.nsqd() for _ in range(2)], topic, monkeypatch, max_in_flight=10)
    assert told[1][-3:] == {"k": ["RDY 10", "FIN d.k", "FIN e.k"]}.get(outcome, told[1][-3:])
