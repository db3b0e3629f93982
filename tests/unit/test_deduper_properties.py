"""Never lose, never stall, rarely twice: whatever happens, in whatever order."""

from __future__ import annotations

from typing import Any

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from simulated_nsq import MSG_TIMEOUT, Link, Nsqd, Run
from simulation import Process, World

from nsqdedupe.delivery import Outcome
from nsqdedupe.stores.embedded import SWEEP_EVERY, TAIL

settings.register_profile(
    "state machine",
    report_multiple_bugs=False,
    max_examples=300,
    stateful_step_count=60,
    suppress_health_check=list(HealthCheck),
)

RUNS = st.lists(st.sampled_from([*Run, Run.LATER, Run.COROUTINE, Run.NEVER, Run.FAIL]), min_size=1, max_size=5)
FAULTS = ("connections", "restarts", "deaths", "crashes", "outages", "evictions", "stalls")
SOON = 400
"""Seconds after the last fault in which everything is over: a few delays, timeouts and leases."""


class Consumers(RuleBasedStateMachine):
    """Processes that consume from nsqds, with some kinds of faults; in the end without."""

    processes = 1
    store_survives = False
    slow = False
    direct = False

    @initialize(
        nsqds=st.integers(2, 3),
        limit=st.integers(0, 4),
        policy=st.sampled_from(["process", "requeue"]),
        faults=st.sets(st.sampled_from(FAULTS)),
    )
    def begin(self, nsqds: int, limit: int, policy: str, faults: set[str]) -> None:
        self.world = World(nsqds, self.processes, limit, policy, slow=self.slow, direct=self.direct)
        self.faults = faults

    # -- what every day brings -------------------------------------------------------------------

    @rule(runs=RUNS, hook_failures=st.integers(0, 1), protected=st.sampled_from([True] * 5 + [False]))
    def publish(self, runs: list[Run], hook_failures: int, protected: bool) -> None:
        nsqds = [nsqd for nsqd in self.world.nsqds if nsqd.alive]
        self.world.publish(nsqds, runs, hook_failures, protected)

    @rule(nsqd=st.integers(0), process=st.integers(0), count=st.integers(1, 3))
    def deliver(self, nsqd: int, process: int, count: int) -> None:
        """Into the kernel's buffer."""
        self.world.send(self.nsqd(nsqd), self.process(process), count)

    @rule(process=st.integers(0), work=st.booleans())
    def read(self, process: int, work: bool) -> None:
        self.process(process).read()
        if work:
            self.process(process).work()

    @rule(process=st.integers(0), seconds=st.integers(0, 3))
    def consume(self, process: int, seconds: int) -> None:
        """All that can be had, from every nsqd, for some seconds."""
        for _ in range(seconds + 1):
            for nsqd in self.world.nsqds:
                if nsqd.alive:
                    self.world.send(nsqd, self.process(process), 5)
                    self.process(process).read()
                    self.process(process).work()
            self.world.pass_time(1.0)
            self.look_after()

    @rule(
        process=st.integers(0),
        handler=st.integers(0),
        outcome=st.sampled_from([Outcome.HANDLED, Outcome.FAILED, Outcome.CANCELLED]),
        delay=st.sampled_from([None, 0.0, 4.0]),
        work=st.booleans(),
    )
    def answer(self, process: int, handler: int, outcome: Outcome, delay: float | None, work: bool) -> None:
        by = self.process(process)
        if by.pending:
            arrival = by.pending[handler % len(by.pending)]
            by.answer(arrival, outcome, delay if outcome is Outcome.FAILED else None)
        if work:
            by.work()

    @rule(process=st.integers(0), handler=st.integers(0))
    def touch(self, process: int, handler: int) -> None:
        by = self.process(process)
        if by.pending:
            arrival = by.pending[handler % len(by.pending)]
            by.deduper.touch(arrival)
            if arrival.link.alive and arrival.copy.client is arrival.link:
                arrival.copy.until = self.world.clock() + MSG_TIMEOUT

    @precondition(lambda self: self.slow)
    @rule(process=st.integers(0), executed=st.integers(0, 3), told=st.integers(0, 3), work=st.booleans())
    def serve(self, process: int, executed: int, told: int, work: bool) -> None:
        """Calls get to the store, and results back."""
        self.process(process).calls.execute(executed)
        self.process(process).calls.tell(told)
        if work:
            self.process(process).work()

    @rule(seconds=st.integers(1, 14))
    def wait(self, seconds: int) -> None:
        for _ in range(seconds):
            self.world.pass_time(1.0)
            self.look_after()

    @rule(process=st.integers(0), what=st.sampled_from(["pause", "go on", "drain"]))
    def control(self, process: int, what: str) -> None:
        if what == "drain":
            self.process(process).deduper.drain()
        else:
            self.process(process).stopped = what == "pause"

    # -- faults ----------------------------------------------------------------------------------

    @precondition(lambda self: "stalls" in self.faults)
    @rule(seconds=st.sampled_from([0.25, 3.0, 6.5, 9.75, 11.0, 13.0, 30.0]))
    def stall(self, seconds: float) -> None:
        """Nobody looks after anything meanwhile."""
        self.world.pass_time(seconds)

    @precondition(lambda self: "connections" in self.faults)
    @rule(process=st.integers(0), nsqd=st.integers(0), noticed=st.booleans())
    def lose_connection(self, process: int, nsqd: int, noticed: bool) -> None:
        link = self.process(process).links.get(self.nsqd(nsqd).name)
        if link is not None:
            self.cut(link, noticed)

    @precondition(lambda self: "restarts" in self.faults)
    @rule(nsqd=st.integers(0), back=st.integers(0, 2), noticed=st.booleans())
    def restart_nsqd(self, nsqd: int, back: int, noticed: bool) -> None:
        """It counts attempts anew, and offers again what was finished just before."""
        which = self.nsqd(nsqd)
        self.cut_all(which, noticed)
        for copy in which.finished[len(which.finished) - back :]:
            which.copies[copy.id] = copy
            if copy.message.fingerprint is None:
                copy.message.disturbed = True
        del which.finished[len(which.finished) - back :]
        for copy in which.copies.values():
            copy.client = None
            copy.attempts = 0
            copy.until = self.world.clock()

    @precondition(lambda self: "deaths" in self.faults)
    @rule(nsqd=st.integers(0), noticed=st.booleans())
    def lose_nsqd(self, nsqd: int, noticed: bool) -> None:
        """It never comes back; what is not over has a copy elsewhere."""
        which = self.nsqd(nsqd)
        if self.world.may_die(which) and sum(other.alive for other in self.world.nsqds) > 1:
            which.alive = False
            which.copies.clear()
            self.cut_all(which, noticed)

    @precondition(lambda self: "crashes" in self.faults)
    @rule(process=st.integers(0), late=st.integers(0, 2))
    def crash(self, process: int, late: int) -> None:
        self.world.crash(process % self.processes, store_survives=self.store_survives, late=late)

    @precondition(lambda self: "outages" in self.faults)
    @rule(process=st.integers(0), how=st.sampled_from(["before", "after", None]))
    def cut_off_store(self, process: int, how: str | None) -> None:
        self.process(process).gate.cut = how

    @precondition(lambda self: "evictions" in self.faults)
    @rule(which=st.integers(0))
    def evict_claim(self, which: int) -> None:
        self.world.evict(which)

    # -- what must hold at every step ------------------------------------------------------------

    @invariant()
    def everything_adds_up(self) -> None:
        assert self.world.store.touched == []
        for process in self.world.processes:
            if process.gate.cut is not None:
                # Whoever is handled now is handled without a claim.
                for message in self.world.messages:
                    message.disturbed = True
            process.check()

    # -- how it ends -----------------------------------------------------------------------------

    def teardown(self) -> None:
        if hasattr(self, "world"):
            self.end_faults()
            for _ in range(SOON):
                self.consume_everything()
                if not any(nsqd.copies for nsqd in self.world.nsqds) and not any(p.open for p in self.world.processes):
                    break
            self.check_that_nothing_is_left()

    def end_faults(self) -> None:
        for process in self.world.processes:
            process.gate.cut = None
            process.stopped = False
            for link in list(process.links.values()):
                if not link.alive:
                    process.notice(link)

    def consume_everything(self) -> None:
        """One second in which every process gets something, and handlers answer that ever will."""
        world = self.world
        for number, nsqd in enumerate(world.nsqds):
            for process in world.processes[:: 1 if number % 2 else -1]:
                if nsqd.alive:
                    world.send(nsqd, process, 2)
                process.read()
                process.work()
        for process in world.processes:
            process.calls.finish()
            process.work()
            for arrival in [arrival for arrival in process.pending if not arrival.never]:
                process.answer(arrival, Outcome.HANDLED)
        world.pass_time(1.0)
        self.look_after()
        for process in world.processes:
            process.calls.finish()
        self.everything_adds_up()

    def check_that_nothing_is_left(self) -> None:
        world = self.world
        assert [copy.message.name for nsqd in world.nsqds for copy in nsqd.copies.values()] == []
        assert [message.name for message in world.messages if not message.over] == []
        for process in world.processes:
            assert list(process.deduper.in_hand()) == []
            assert process.deduper.next_poll() is None
        world.clock.advance(TAIL + 3600.0)
        world.store.claim([])
        world.clock.advance(SWEEP_EVERY)
        world.store.claim([])
        assert world.store.kept() == 0

    # -- helpers ---------------------------------------------------------------------------------

    def process(self, number: int) -> Process:
        return self.world.processes[number % self.processes]

    def nsqd(self, number: int) -> Nsqd:
        alive = [nsqd for nsqd in self.world.nsqds if nsqd.alive]
        return alive[number % len(alive)]

    def look_after(self) -> None:
        """What a reader does a few times a second."""
        for process in self.world.processes:
            process.look_after()

    def cut(self, link: Link, noticed: bool) -> None:
        link.alive = False
        if noticed:
            for process in self.world.processes:
                if process.links.get(link.nsqd.name) is link:
                    process.notice(link)

    def cut_all(self, nsqd: Nsqd, noticed: bool) -> None:
        for process in self.world.processes:
            link = process.links.get(nsqd.name)
            if link is not None:
                self.cut(link, noticed)


class TwoConsumers(Consumers):
    """Two processes on one store that outlives both."""

    processes = 2
    store_survives = True


class ConsumerWithoutClaims(Consumers):
    """One process, whose handlers have no claim if they succeed in one go."""

    direct = True


class TwoConsumersWithoutClaims(TwoConsumers):
    """Two readers of one process on one store."""

    direct = True


class TwoConsumersOfASlowStore(TwoConsumers):
    """The same, and calls of the store take their time."""

    slow = True


def machine(kind: type[Consumers]) -> Any:
    case = kind.TestCase
    case.settings = settings.get_profile("state machine")
    return case


TestOneProcessWhoseStoreDiesWithIt = machine(Consumers)
TestTwoProcessesOnOneStore = machine(TwoConsumers)
TestOneProcessWithoutClaims = machine(ConsumerWithoutClaims)
TestTwoReadersOfOneProcessWithoutClaims = machine(TwoConsumersWithoutClaims)
TestTwoProcessesOnASlowStore = machine(TwoConsumersOfASlowStore)
